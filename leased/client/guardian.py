"""The process between `lease run` and its command: it ends the command, with all that came of it, when the lease or `lease run` does.

    lease run      takes the lease, renews it, passes signals on, answers for the exit code
      guardian     judges the deadline; survives what kills, stops or hangs `lease run`
        COMMAND    leads a process group of its own; its orphans become the guardian's

The guardian runs no Python thread, asks no daemon while `lease run` lives, and looks at the boot clock at least once a second, so that
neither a renewal that hangs nor a `lease run` that was stopped (SIGSTOP) lets the command outlast its lease.  The three are tied by the
kernel: when `lease run` dies the guardian gets a signal, when the guardian dies the command gets SIGKILL.
"""

from __future__ import annotations

import errno
import mmap
import os
import signal
import sys
import time

from leased.client import endgame, family
from leased.client.shell import EXIT_INTERNAL

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Final, NoReturn

WAKE: Final = signal.SIGRTMAX - 3  # look at the board; a number nobody else is known to use
EXIT_CANNOT_RUN: Final = 126
EXIT_NO_COMMAND: Final = 127
_LOOK_SECONDS: Final = 1.0  # timers stand still while the machine sleeps and the boot clock does not
_DEFAULTED: Final = (signal.SIGPIPE, signal.SIGXFSZ)  # Python ignores these; the command is not to


class _Slot:
    def __init__(self, at: int) -> None:
        self._at = at

    def __get__(self, board: Board, _: type) -> float:
        return board.page[self._at]

    def __set__(self, board: Board, value: float) -> None:
        board.page[self._at] = value


class Board:
    """What `lease run` and the guardian tell each other: a page of shared memory, each slot written by one of them."""

    deadline = _Slot(0)  # of `lease run`: boot clock seconds up to which the lease is known to be held
    lost = _Slot(1)  # of `lease run`: 1 once the daemon has said so
    child = _Slot(2)  # of the guardian: the command's process id
    stopped = _Slot(3)  # of the guardian: the signal the command was stopped by last; `lease run` clears it
    code = _Slot(4)  # of the guardian: the command's exit code, plus 1
    wrong = _Slot(5)  # of what is to become the command: errno of exec
    ended = _Slot(6)  # of the guardian: 1 once it has ended the command because no renewal came in time

    def __init__(self) -> None:
        self.page = memoryview(mmap.mmap(-1, mmap.PAGESIZE)).cast("d")


def spawn(
    board: Board, command: list[str], environment: dict[str, str], terms: endgame.Terms, mask: set[int], release: Callable[[], None]
) -> int:
    """Forks the guardian, which forks the command; its process id.  Only while this process has one thread, its signals blocked.

    `mask`: the signals that were blocked before, and are for the command.  `release`: gives the lease back, in the guardian, after
    `lease run` has died and the command with it.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    family.become_subreaper()  # for the day the guardian is killed: then its descendants come to `lease run`
    parent = os.getpid()
    pid = os.fork()
    if pid:
        return pid
    code = EXIT_INTERNAL
    try:
        os.setpgid(0, 0)
        family.become_subreaper()
        above = os.pidfd_open(parent)
        if family.die_with_parent(WAKE, parent):
            child = _start(board, command, environment, mask)
            _wake(above)
            _guard(board, child, parent, above, terms)
        if os.getppid() != parent:
            release()
        code = 0
    finally:  # whatever went wrong: the command dies with this process
        os._exit(code)


def _start(board: Board, command: list[str], environment: dict[str, str], mask: set[int]) -> int:
    guardian = os.getpid()
    pid = os.fork()
    if pid == 0:
        _become(board, command, environment, mask, guardian)
    try:
        os.setpgid(pid, pid)  # both do it, so that it is done whoever comes first
    except OSError:
        pass  # it has, and has become the command
    board.child = pid
    return pid


def _wake(above: int) -> None:
    """By its pidfd: a number could be somebody else's by now."""
    try:
        signal.pidfd_send_signal(above, WAKE)
    except ProcessLookupError:
        pass


def _become(board: Board, command: list[str], environment: dict[str, str], mask: set[int], guardian: int) -> NoReturn:
    code = EXIT_CANNOT_RUN
    try:
        os.setpgid(0, 0)
        if not family.die_with_parent(signal.SIGKILL, guardian):
            os._exit(EXIT_INTERNAL)
        for number in (*_DEFAULTED, *caught()):
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        os.execvpe(command[0], command, environment)
    except OSError as wrong:
        board.wrong = wrong.errno or errno.EIO
        if wrong.errno in {errno.ENOENT, errno.ENOTDIR}:
            code = EXIT_NO_COMMAND
    finally:
        os._exit(code)


def caught() -> list[signal.Signals]:
    """The signals this process does not leave to their default and does not ignore."""
    numbers = signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}
    return [signal.Signals(number) for number in numbers if callable(signal.getsignal(number))]


def _guard(board: Board, child: int, parent: int, above: int, terms: endgame.Terms) -> None:
    """Until the command and all who descend from it are gone."""
    game = endgame.Endgame(terms)
    own = os.getpid()
    while True:
        over = _seen(board, child, above)
        family.reap_adopted(child)
        cause = None
        if over:
            if not family.descendants(own):
                return
            cause = endgame.LEFT_BEHIND
        if os.getppid() != parent:
            cause = endgame.ORPHANED
        elif board.lost:
            cause = endgame.LOST
        now = boot_seconds()
        due, again = game.look(now, board.deadline, cause)
        if due is not None:
            if game.cause == endgame.UNRENEWED:
                board.ended = 1
            family.signal_all(own, child, due)
            if due == signal.SIGTERM:
                family.signal_all(own, child, signal.SIGCONT)  # a stopped process acts on no TERM
        signal.sigtimedwait({signal.SIGCHLD, WAKE}, max(0.0, min(again - now, _LOOK_SECONDS)))


def _seen(board: Board, child: int, above: int) -> bool:
    """Has the command ended?  Told on the board, as is a stop.  It is left a zombie until the guardian ends."""
    if board.code:
        return True
    end = os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    if end is not None:
        board.code = 1 + (end.si_status if end.si_code == os.CLD_EXITED else 128 + end.si_status)
        return True
    try:
        stop = os.waitid(os.P_PID, child, os.WSTOPPED | os.WNOHANG)
    except ChildProcessError:  # it has ended since the lines above: Linux has no stops to tell of a zombie
        return False
    if stop is not None:
        board.stopped = stop.si_status
        _wake(above)
    return False


def boot_seconds() -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME)
