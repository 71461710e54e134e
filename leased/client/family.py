"""A process's descendants, and how to reach all of them: its process group, and those that left it.

Linux only: a subreaper becomes the parent of every descendant whose own parent ends, so nobody who descends from it can get out of
its sight by forking twice or by a session of his own.
"""

from __future__ import annotations

import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Final

_SET_PDEATHSIG: Final = 1
_SET_CHILD_SUBREAPER: Final = 36
_THREADS: Final = 17  # the number of threads in /proc/PID/stat, counted from the state on


def become_subreaper() -> None:
    """From now on orphans among this process's descendants become its children."""
    _prctl(_SET_CHILD_SUBREAPER, 1)


def die_with_parent(signal: int, parent: int) -> bool:
    """The kernel sends `signal` to this process when the thread that forked it ends.  False: `parent` has ended already."""
    _prctl(_SET_PDEATHSIG, signal)
    return os.getppid() == parent


def descendants(root: int) -> list[int]:
    """The process ids of all who descend from `root`, a subreaper, and live, zombies left out.  Empty where /proc does not tell.

    Nobody found is nobody there: who lost its parent during the walk, and so was seen neither below it nor below `root`, is `root`'s child
    by the end of it, and is counted among the living without a look.
    """
    first = pending = _children(root)
    found: list[int] = []
    while pending:
        found += filter(_lives, pending)
        pending = [child for pid in pending for child in _children(pid)]
    return found or [pid for pid in _children(root) if pid not in first]


def signal_all(root: int, group: int, number: int) -> None:
    """Sends a signal to the process group `group` and to every descendant of `root` outside of it.

    Who runs as another user (sudo) cannot be signalled, and is passed over.
    """
    try:
        os.killpg(group, number)
    except (ProcessLookupError, PermissionError):
        pass
    for pid in descendants(root):
        try:
            if os.getpgid(pid) != group:
                os.kill(pid, number)
        except (ProcessLookupError, PermissionError):
            pass


def reap_adopted(keep: int) -> None:
    """Reaps this process's children that have ended, but for `keep`: its zombie keeps its process group's number from being reused."""
    for pid in _children(os.getpid()):
        if pid != keep:
            try:
                os.waitpid(pid, os.WNOHANG)
            except ChildProcessError:
                pass


def _children(pid: int) -> list[int]:
    found: list[int] = []
    try:
        for task in os.listdir(f"/proc/{pid}/task"):  # noqa: PTH208  pathlib costs as much as a request
            with open(f"/proc/{pid}/task/{task}/children", "rb") as file:  # noqa: PTH123
                found += map(int, file.read().split())
    except OSError:
        pass
    return found


def _lives(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:  # noqa: PTH123
            fields = file.read().rpartition(b")")[2].split()
            return fields[0] not in {b"Z", b"X"} or int(fields[_THREADS]) > 1  # its first thread has ended, and others go on
    except OSError:
        return False


def _prctl(option: int, value: int) -> None:
    import ctypes

    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option})")
