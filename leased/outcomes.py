"""How the ledger's thread is heard: calls for the loop's thread, and a descriptor that is readable while there are some.

Of our own, because the loop waits in the switchboard's epoll far more often than in trio's, and a grant that waits for its flush must not
wait for both.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable


class Outcomes:
    def __init__(self) -> None:
        self._calls: deque[Callable[[], None]] = deque()
        self._bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def fileno(self) -> int:
        return self._bell

    def put(self, call: Callable[[], None]) -> None:
        """From any thread."""
        self._calls.append(call)
        try:
            os.eventfd_write(self._bell, 1)
        except OSError:  # the loop has ended and a hung disk lets go only now: nobody is left to hear of it
            pass

    def heard(self) -> None:
        """The descriptor was readable: it is not any more.  `run` is still to be called."""
        try:
            os.eventfd_read(self._bell)
        except BlockingIOError:
            pass

    def run(self) -> None:
        """From the loop's thread."""
        while self._calls:
            self._calls.popleft()()
