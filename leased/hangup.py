"""SIGHUP has two meanings: "read the configuration again", from whoever sends it, and "your terminal is gone", from the kernel.

Which of them it is, is asked of the terminal: where the process had one and it can no longer be opened, the daemon stops in order.  Whoever
started it by nohup has said that terminals do not matter.
"""

from __future__ import annotations

import os
import signal
from types import FrameType


class Hangups:
    """From its making on SIGHUP ends nothing: what comes before somebody listens is kept in `early`."""

    def __init__(self) -> None:
        self.early = False
        ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
        self._on_terminal = not ignored and _has_terminal()
        signal.signal(signal.SIGHUP, self._note)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.early = True

    def terminal_gone(self) -> bool:
        return self._on_terminal and not _has_terminal()


def _has_terminal() -> bool:
    """Does this process have a controlling terminal?"""
    try:
        os.close(os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY | os.O_CLOEXEC))
    except OSError:
        return False
    return True
