"""The thread that flushes the ledger.  It takes one list of operations at a time and reports one outcome."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, Final, TypeVar

from leased.errors import StoreError
from leased.state.ledger import Ledger, Op

SWITCH_INTERVAL_SECONDS: Final = 0.0002  # at the default 5 ms the thread waits for a busy loop longer than for the disk
Done = Callable[[Exception | None], None]
T = TypeVar("T")


class WriterThread:
    """`notify` carries a call into the loop's thread (see outcomes.py); it is called from this thread.

    A disk that hangs keeps the thread, and nothing else, hanging: `stop` waits at most as long as it is told.
    """

    def __init__(self, ledger: Ledger, notify: Callable[[Callable[[], None]], None]) -> None:
        self._ledger = ledger
        self._notify = notify
        self._work: SimpleQueue[tuple[Any, Any] | None] = SimpleQueue()
        sys.setswitchinterval(SWITCH_INTERVAL_SECONDS)
        self._thread = threading.Thread(target=self._run, name="ledger", daemon=True)
        self._thread.start()

    def write(self, ops: list[Op], done: Done) -> None:
        self._work.put((ops, done))

    def read(self, question: Callable[[Ledger], T], done: Callable[[T, Exception | None], None]) -> None:
        """Ask the ledger something, behind what has been given to write.  `done` as for `write`; its first argument is None with an error."""
        self._work.put((question, done))

    def stop(self, timeout_seconds: float) -> bool:
        """True when the thread has ended (so that the ledger may be closed)."""
        self._work.put(None)
        self._thread.join(timeout_seconds)
        return not self._thread.is_alive()

    def _run(self) -> None:
        unproven = True  # that the disk takes what is written
        while (work := self._work.get()) is not None:
            ops, done = work
            error: Exception | None = None
            if callable(ops):
                answer: Any = None
                try:
                    answer = ops(self._ledger)
                except Exception as raised:
                    error = StoreError(f"the ledger cannot be read: {raised}")
                self._notify(lambda done=done, answer=answer, error=error: done(answer, error))  # type: ignore[misc]
                continue
            try:
                self._ledger.apply(ops, prove=unproven)
                unproven = False
            except Exception as raised:  # whatever it was, the lane must hear of it, or its callers wait for ever
                unproven = True
                error = raised if isinstance(raised, StoreError) else StoreError(f"the ledger's thread failed: {raised!r}")
            self._notify(lambda done=done, error=error: done(error))  # type: ignore[misc]
