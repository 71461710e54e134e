"""Job control for a command in a process group of its own: who has the terminal, and what Ctrl-Z stops.

The command gets the terminal when it asks for it (it is stopped by SIGTTIN or SIGTTOU) and the job `lease run` belongs to has it.  Until
then that job keeps it, so that Ctrl-C reaches everybody in a script or a pipeline, and `lease run` passes it on.
"""

from __future__ import annotations

import os
import signal
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Final

MIRRORED: Final = frozenset({signal.SIGTSTP, signal.SIGTTIN, signal.SIGTTOU})
"""Stops that are the terminal's or the shell's doing, and that `lease run` joins.  A SIGSTOP was meant for whoever it was sent to."""


class Terminal:
    """The controlling terminal, if there is one.  Its calls need SIGTTOU blocked."""

    def __init__(self) -> None:
        self._given = False
        try:
            self._file = os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY | os.O_CLOEXEC)
        except OSError:
            self._file = -1

    @property
    def exists(self) -> bool:
        return self._file >= 0

    def give(self, group: int) -> bool:
        """Hands it to `group`; False if this process's job does not have it either."""
        if not self._is(os.getpgrp()):
            return False
        self._given = self._hand(group)
        return self._given

    def give_again(self, group: int) -> None:
        """After a stop: hands it back to a group that had it, if this job is in the foreground again."""
        if self._given:
            self.give(group)

    def take_back(self, group: int) -> None:
        """From `group`, if it has it."""
        if self._is(group):
            self._hand(os.getpgrp())

    def _is(self, group: int) -> bool:
        try:
            return self._file >= 0 and os.tcgetpgrp(self._file) == group
        except OSError:  # it was hung up
            return False

    def _hand(self, group: int) -> bool:
        try:
            os.tcsetpgrp(self._file, group)
        except OSError:
            return False
        return True


def stop_too(number: int) -> None:
    """Stops this process as its command was; returns when it is continued, or at once where nobody could continue it."""
    signal.signal(number, signal.SIG_DFL)
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, set())
    os.kill(os.getpid(), number)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {number})
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def interrupted() -> None:
    """Dies of SIGINT, if there is a terminal: a shell that runs a script goes on with its next line after a Ctrl-C unless the command it
    waited for died of it, and says 130 either way.  Without a terminal it returns, and an exit code of 130 is as good."""
    if not Terminal().exists:
        return
    sys.stdout.flush()
    sys.stderr.flush()
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    os.kill(os.getpid(), signal.SIGINT)
