"""Does a file kill its reader?  Asked in a child process, because the answer may be a signal.

A truncated file is SIGBUS at the first access behind its end, a zeroed page mostly an assertion of LMDB and SIGABRT: neither can be caught.
So whoever is about to read a file that may be damaged lets a child walk all of it first.
"""

from __future__ import annotations

import faulthandler
import os
import resource
import signal
import struct
from collections import deque
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Final, NamedTuple

import lmdb

from leased.errors import LeasedError
from leased.state.environment import open_to_read

MAX_TABLES: Final = 64
_MAX_TEXT_BYTES: Final = 4096
_HEAD = struct.Struct("<?QQ")  # good, transaction, bytes that follow


Records = Iterable[tuple[bytes, bytes]]
Taking = tuple[bytes, Callable[[Records], bytes]]
"""The name of a table, and what makes of its rows the bytes that are wanted of it."""


class Taken(NamedTuple):
    """What a child made of a table, and the number of the last transaction in the file it read."""

    transaction: int
    made: bytes


class Probe:
    """A child that reads every page in use of the environment at `path` (a directory or a file), beside whatever else is done meanwhile.

    What it makes of one table on its way (`taking`) is handed over, so that nobody has to read that again.
    Forks: only for a process with no environment open and a single thread.  Raises OSError when it cannot fork.
    """

    def __init__(self, path: Path, *, beside_writer: bool = False, taking: Taking | None = None) -> None:
        self.taken: Taken | None = None
        self._reading, writing = os.pipe2(os.O_CLOEXEC)
        self._child = os.fork()
        if self._child == 0:
            _walk_and_exit(path, beside_writer, taking, writing)
        os.close(writing)

    def end(self) -> str:
        """Wait for it.  Empty when everything could be read, and then there may be something `taken`; otherwise what happens instead."""
        with os.fdopen(self._reading, "rb") as told:
            head, made = told.read(_HEAD.size), told.read()
        _, status = os.waitpid(self._child, 0)
        if os.WIFSIGNALED(status):
            number = os.WTERMSIG(status)
            return f"the file kills its reader (signal {number}, {signal.Signals(number).name}): it is truncated, or pages of it are destroyed"
        if len(head) < _HEAD.size:
            return "its reader ended without a word"
        good, transaction, size = _HEAD.unpack(head)
        if not good:
            return made[:_MAX_TEXT_BYTES].decode(errors="replace")
        if status != 0:
            return "its reader ended without a word"
        if made and len(made) == size:
            self.taken = Taken(transaction, made)
        return ""


def probe(path: Path, *, beside_writer: bool = False) -> str:
    """As a Probe that is waited for at once: empty when everything could be read, otherwise what happens instead."""
    return Probe(path, beside_writer=beside_writer).end()


def _walk_and_exit(path: Path, beside_writer: bool, taking: Taking | None, writing: int) -> None:
    """In the child.  Never returns, whatever happens: nothing of the parent may run twice."""
    code = 1
    try:
        faulthandler.disable()
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # LMDB's assertion speaks of its own sources
        try:
            wrong, taken = _walk(path, beside_writer, taking)
        except BaseException as error:
            wrong, taken = f"it cannot be read: {error or type(error).__name__}", Taken(0, b"")
        made = wrong.encode()[:_MAX_TEXT_BYTES] if wrong else taken.made
        with os.fdopen(writing, "wb") as telling:
            telling.write(_HEAD.pack(not wrong, taken.transaction, len(made)))
            telling.write(made)
        code = 0
    finally:
        os._exit(code)


def _walk(path: Path, beside_writer: bool, taking: Taking | None) -> tuple[str, Taken]:
    """What is wrong, and what has been taken."""
    made, transaction_id = b"", 0
    try:
        environment = open_to_read(path, tables=MAX_TABLES, beside_writer=beside_writer)
    except LeasedError as error:
        return str(error), Taken(0, b"")
    except OSError as error:
        return f"{error.filename}: {error.strerror}", Taken(0, b"")
    try:
        for name in _names(environment):
            table = environment.open_db(name, create=False)
            with environment.begin(db=table) as transaction:
                if taking is not None and name == taking[0]:
                    made, transaction_id = _made(taking[1], transaction), transaction.id()
                if not made:
                    deque(transaction.cursor(), maxlen=0)  # each key and value is copied, so each page is read
    except lmdb.Error as error:
        return f"it cannot be read to its end: {error}", Taken(0, b"")
    environment.close()
    return "", Taken(transaction_id, made)


def _made(make: Callable[[Records], bytes], transaction: Any) -> bytes:
    """Empty when nothing can be made of the table, for whatever reason: only the walk says whether it can be read, and whoever opens it then
    finds out why."""
    try:
        return make(transaction.cursor())
    except Exception:
        return b""


def _names(environment: lmdb.Environment) -> list[bytes]:
    with environment.begin() as transaction:
        return [bytes(key) for key, _ in transaction.cursor()]
