"""Opening LMDB the one way it is safe here: a lock beside it, private files, errors translated at this border.

LMDB itself lets two processes write one directory; the flock on `lock` is what excludes the second daemon, and it is freed by
kill -9.  The lock file holds nothing and is never unlinked.
"""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, TypeVar

import lmdb

from leased.errors import StateLocked, StateRefused, StoreError, StoreFull

DIRECTORY_MODE: Final = 0o700
FILE_MODE: Final = 0o600
LOCK_NAME: Final = "lock"
PAGE_BYTES: Final = 4096
_T = TypeVar("_T")


class DirectoryLock:
    """An exclusive flock on a directory of state, held for the life of the object.

    Raises StateLocked when another process holds it, StateRefused when the directory cannot be made or is not private enough to trust.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        try:
            directory.mkdir(mode=DIRECTORY_MODE, parents=True, exist_ok=True)
            status = directory.stat()
            if status.st_uid != os.geteuid():
                raise StateRefused(
                    f"{directory} belongs to uid {status.st_uid}, not to uid {os.geteuid()} that runs this: chown it, or name another"
                )
            if status.st_mode & 0o077:
                directory.chmod(DIRECTORY_MODE)
            self._descriptor = os.open(directory / LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, FILE_MODE)
        except OSError as error:
            raise StateRefused(f"{directory}: {error.strerror}: leased needs a directory it can write") from error
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(self._descriptor)
            if error.errno not in {errno.EAGAIN, errno.EACCES}:
                raise StateRefused(f"{directory}: {error.strerror}: leased needs a file system with flock") from error
            raise StateLocked(
                f"{directory} is in use by another leased process: stop it first, or name another directory"
            ) from None
        self.identity = _identity(directory)

    def in_place(self) -> bool:
        """Does the path still lead to the directory that was locked, with its lock file in it?"""
        try:
            return _identity(self.directory) == self.identity and (
                (self.directory / LOCK_NAME).stat().st_ino == os.fstat(self._descriptor).st_ino
            )
        except OSError:
            return False

    def close(self) -> None:
        os.close(self._descriptor)


def _identity(directory: Path) -> tuple[int, int]:
    status = directory.stat()
    return status.st_dev, status.st_ino


def open_environment(directory: Path, *, map_bytes: int, tables: int, sync: bool, readonly: bool = False) -> lmdb.Environment:
    """An environment in `directory`, data file private from its first instant.  Raises StateRefused or StoreError."""
    data = directory / "data.mdb"
    if not readonly:
        for name in ("data.mdb", "lock.mdb"):  # made by us first, so that no umask can widen them for a moment
            os.close(os.open(directory / name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, FILE_MODE))
    try:
        environment = lmdb.open(
            str(directory), map_size=map_bytes, max_dbs=tables, sync=sync, metasync=True, mode=FILE_MODE, readonly=readonly,
            max_readers=16, lock=not readonly,
        )  # fmt: skip
        environment.reader_check() if not readonly else None
    except lmdb.Error as error:
        raise _opening(data, error) from error
    return environment


def _opening(data: Path, error: lmdb.Error) -> Exception:
    if isinstance(
        error, lmdb.InvalidError | lmdb.CorruptedError | lmdb.PageNotFoundError | lmdb.VersionMismatchError | lmdb.PanicError
    ):
        return StateRefused(f"{data} is damaged ({error}): run `leased fsck`, then restore a backup, or move the directory away")
    return StoreError(f"{data}: {error}")


@contextmanager
def translated(what: str) -> Iterator[None]:
    """The border: lmdb's errors become ours.  Costs half a microsecond, so the hot path catches lmdb.Error itself."""
    try:
        yield
    except (lmdb.MapFullError, lmdb.TxnFullError, lmdb.DiskError) as error:
        raise StoreFull(f"{what}: {error}") from error
    except (lmdb.Error, OSError) as error:
        raise StoreError(f"{what}: {error}") from error


def free_pages(environment: lmdb.Environment, map_bytes: int) -> int:
    """Pages never used yet.  Freed pages inside the file are found by LMDB itself and not counted: the true room is larger."""
    return map_bytes // PAGE_BYTES - environment.info()["last_pgno"] - 1


def each(transaction: Any, table: Any, decode: Callable[[bytes], _T]) -> Iterator[tuple[bytes, _T | None, bytes]]:
    """Every (key, value, raw) of a table; value is None where the record is damaged."""
    for key, raw in transaction.cursor(db=table):
        try:
            yield bytes(key), decode(bytes(raw)), bytes(raw)
        except ValueError:
            yield bytes(key), None, bytes(raw)
