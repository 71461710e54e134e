"""Does a file kill its reader?  Asked in a child process, because the answer may be a signal.

A truncated file is SIGBUS at the first access behind its end, a zeroed page mostly an assertion of LMDB and SIGABRT: neither can be caught.
So whoever is about to read a file that may be damaged lets a child walk all of it first.
"""

from __future__ import annotations

import faulthandler
import os
import resource
import signal
from pathlib import Path
from typing import Final

import lmdb

from leased.errors import LeasedError
from leased.state.environment import open_to_read

MAX_TABLES: Final = 64
_MAX_TEXT_BYTES: Final = 4096


def probe(path: Path, *, beside_writer: bool = False) -> str:
    """Empty when every page in use of the environment at `path` (a directory or a file) can be read; otherwise what happens instead.

    Forks: only for a process with no environment open and a single thread.  Raises OSError when it cannot fork.
    """
    reading, writing = os.pipe2(os.O_CLOEXEC)
    child = os.fork()
    if child == 0:
        _walk_and_exit(path, beside_writer, writing)
    os.close(writing)
    with os.fdopen(reading, "rb") as told:
        text = told.read(_MAX_TEXT_BYTES).decode(errors="replace")
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        return f"the file kills its reader (signal {number}, {signal.Signals(number).name}): it is truncated, or pages of it are destroyed"
    return text or ("" if status == 0 else "its reader ended without a word")


def _walk_and_exit(path: Path, beside_writer: bool, writing: int) -> None:
    """In the child.  Never returns, whatever happens: nothing of the parent may run twice."""
    code = 1
    try:
        faulthandler.disable()
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # LMDB's assertion speaks of its own sources
        code = 0
        for text in _walk(path, beside_writer):
            os.write(writing, text.encode()[:_MAX_TEXT_BYTES])
    except BaseException as error:
        os.write(writing, f"it cannot be read: {error or type(error).__name__}".encode()[:_MAX_TEXT_BYTES])
    finally:
        os._exit(code)


def _walk(path: Path, beside_writer: bool) -> list[str]:
    try:
        environment = open_to_read(path, tables=MAX_TABLES, beside_writer=beside_writer)
    except LeasedError as error:
        return [str(error)]
    except OSError as error:
        return [f"{error.filename}: {error.strerror}"]
    try:
        for name in _names(environment):
            table = environment.open_db(name, create=False)
            with environment.begin(db=table) as transaction:
                for key, value in transaction.cursor():
                    bytes(key), bytes(value)
    except lmdb.Error as error:
        return [f"it cannot be read to its end: {error}"]
    environment.close()
    return []


def _names(environment: lmdb.Environment) -> list[bytes]:
    with environment.begin() as transaction:
        return [bytes(key) for key, _ in transaction.cursor()]
