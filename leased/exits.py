"""Exit codes of `leased`, and which error means which: every error becomes a sentence, none a traceback.

A group of errors, as trio's nurseries raise them, is judged by the first error in it.  A mistake of the program itself is told by its type
and places, never by its text, which could hold a key or worse.
"""

from __future__ import annotations

import errno
import traceback
from typing import Final

from leased.errors import ConfigError, LeasedError, StateLocked, StateRefused, StoreError
from leased.state.records import RecordDamaged

EXIT_YES: Final = 0
EXIT_FINDINGS: Final = 1
EXIT_USAGE: Final = 64
EXIT_UNAVAILABLE: Final = 69
EXIT_INTERNAL: Final = 70
EXIT_PERMISSION: Final = 77
EXIT_CONFIG: Final = 78
EXIT_INTERRUPTED: Final = 130  # 128 + SIGINT
EXIT_BROKEN_PIPE: Final = 141  # 128 + SIGPIPE

_OF_A_PATH: Final = frozenset(
    {errno.EADDRINUSE, errno.EACCES, errno.EPERM, errno.ENOENT, errno.ENOTDIR, errno.EROFS, errno.ENAMETOOLONG, errno.ELOOP}
)
"""What bind(2) says of the socket's path without naming it."""

_REMEDIES: Final = {
    errno.EACCES: "run this as the user it belongs to, or as root",
    errno.EPERM: "run this as the user it belongs to, or as root",
    errno.ENOENT: "make it, or name another place",
    errno.ENOTDIR: "a part of this path is a file: name another place",
    errno.EEXIST: "something else is there: move it away, or name another place",
    errno.EROFS: "it is mounted read-only: mount it for writing, or name another place",
    errno.ENOSPC: "give the file system more room, or name another place",
    errno.EDQUOT: "give the user more room, or name another place",
    errno.EADDRINUSE: "stop what listens there, or remove the file if nothing does, or name another socket",
}


class WrongUse(LeasedError):
    """The command line asks for what cannot be done as it stands.  Exit code 64; says what can."""


def judged(error: BaseException, *, serving: bool = False, socket: str = "") -> tuple[int, str]:
    """(exit code, sentences) of whatever ended a command.  `serving`: it was `serve`, which must not be restarted beside a second daemon;
    `socket`: what its errors without a file name are about."""
    error = first_of(error)
    if isinstance(error, WrongUse):
        return EXIT_USAGE, str(error)
    if isinstance(error, StateLocked):
        return EXIT_CONFIG if serving else EXIT_UNAVAILABLE, str(error)
    if isinstance(error, ConfigError | StateRefused):
        return EXIT_CONFIG, str(error)
    if isinstance(error, RecordDamaged):
        return EXIT_CONFIG, f"the state is damaged: {error}: run `leased fsck`, which says where and what to do"
    if isinstance(error, StoreError):
        return EXIT_UNAVAILABLE, str(error)
    if isinstance(error, KeyboardInterrupt):
        return EXIT_INTERRUPTED, "interrupted"
    if isinstance(error, OSError):
        return _system(error, socket)
    return EXIT_INTERNAL, _internal(error)


def first_of(error: BaseException) -> BaseException:
    """The error itself, or the first that is in its group, however deep."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def _system(error: OSError, socket: str) -> tuple[int, str]:
    code = EXIT_PERMISSION if error.errno in {errno.EACCES, errno.EPERM} else EXIT_UNAVAILABLE
    said = error.strerror or str(error)
    where = (
        str(error.filename) if error.filename is not None else socket if error.errno in _OF_A_PATH and socket not in said else ""
    )
    remedy = _REMEDIES.get(error.errno or 0, "")
    return code, ": ".join(part for part in (where, said, remedy) if part)


def _internal(error: BaseException) -> str:
    places = traceback.StackSummary.extract(traceback.walk_tb(error.__traceback__), lookup_lines=False)
    trail = "".join(f"\n  at {frame.filename}:{frame.lineno} in {frame.name}" for frame in places)
    return f"internal error: {type(error).__name__}; please report it with these lines{trail}"
