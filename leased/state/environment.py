"""Opening LMDB the one way it is safe here: a lock beside it, private files, errors translated at this border.

LMDB itself lets two processes write one directory; the flock on `lock` is what excludes the second daemon, and it is freed by
kill -9.  The lock file holds nothing and is never unlinked.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import struct
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
_MAGIC: Final = 0xBEEFC0DE
_META_END: Final = 152
_U32: Final = struct.Struct("<I")
_U64: Final = struct.Struct("<Q")
READ_MAP_BYTES: Final = 1 << 36  # address space only: a file may grow while it is read
_T = TypeVar("_T")
NotWritten: Final = lmdb.Error  # what the lane catches by these names, since a context manager would cost it half a microsecond
MapFull: Final = lmdb.MapFullError


class DirectoryLock:
    """An exclusive flock on a directory of state, held for the life of the object.

    Raises StateLocked when another process holds it, StateRefused when the directory cannot be made or is not private enough to trust.
    With `make` False it is for whoever only looks: nothing is made or tightened but a missing lock file, root may lock what belongs to
    another, and FileNotFoundError or PermissionError come as they are.
    """

    def __init__(self, directory: Path, *, make: bool = True) -> None:
        self.directory = directory
        if make:
            self._descriptor = self._made()
        else:
            self._descriptor = self._found()
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

    def _made(self) -> int:
        directory = self.directory
        try:
            directory.mkdir(mode=DIRECTORY_MODE, parents=True, exist_ok=True)
            status = directory.stat()
            if status.st_uid != os.geteuid():
                raise StateRefused(
                    f"{directory} belongs to uid {status.st_uid}, not to uid {os.geteuid()} that runs this: chown it, or name another"
                )
            if status.st_mode & 0o077:
                directory.chmod(DIRECTORY_MODE)
            return os.open(directory / LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, FILE_MODE)
        except OSError as error:
            raise StateRefused(f"{directory}: {error.strerror}: leased needs a directory it can write") from error

    def _found(self) -> int:
        path, status = self.directory / LOCK_NAME, self.directory.stat()
        if os.geteuid() not in {0, status.st_uid}:
            raise PermissionError(
                errno.EACCES, f"it belongs to uid {status.st_uid}, not to uid {os.geteuid()}", str(self.directory)
            )
        try:
            return os.open(
                path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW
            )  # a lock needs no more, and a read-only mount gives no more
        except FileNotFoundError:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, FILE_MODE)
            give_to_owner(descriptor, status)
            return descriptor

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


def give_to_owner(descriptor: int, status: os.stat_result) -> None:
    """A file that root makes in somebody's state directory (of this status) is to be theirs, or their daemon could not open it."""
    if os.geteuid() == 0 != status.st_uid:
        os.fchown(descriptor, status.st_uid, status.st_gid)


def _identity(directory: Path) -> tuple[int, int]:
    status = directory.stat()
    return status.st_dev, status.st_ino


def open_environment(directory: Path, *, map_bytes: int, tables: int, sync: bool, readonly: bool = False) -> lmdb.Environment:
    """An environment in `directory`, data file private from its first instant.  Raises StateRefused or StoreError.

    `readonly` is for whoever holds the directory's lock; see `open_to_read` for the others.
    """
    data = directory / "data.mdb"
    if not readonly:
        for name in ("data.mdb", "lock.mdb"):  # made by us first, so that no umask can widen them for a moment
            _make(directory / name, allocated=name == "lock.mdb")
    refuse_truncated(data)
    try:
        environment = lmdb.open(
            str(directory), map_size=map_bytes, max_dbs=tables, sync=sync, metasync=True, mode=FILE_MODE, readonly=readonly,
            max_readers=16, lock=not readonly,
        )  # fmt: skip
        environment.reader_check() if not readonly else None
    except lmdb.Error as error:
        raise _opening(data, error) from error
    return environment


def _make(path: Path, *, allocated: bool) -> None:
    """The file, if it is not there.  `allocated`: with room for all of it, as LMDB writes its lock file through a map, where a full disk is
    SIGBUS.  Raises StateRefused without room, OSError."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, FILE_MODE)
    try:
        if allocated and os.fstat(descriptor).st_size < PAGE_BYTES:
            os.posix_fallocate(descriptor, 0, PAGE_BYTES)
    except OSError as error:
        if error.errno not in {errno.ENOSPC, errno.EDQUOT}:
            raise
        raise StateRefused(f"{path}: {error.strerror}: give the file system more room, or name another directory") from error
    finally:
        os.close(descriptor)


def refuse_truncated(data: Path) -> None:
    """A data file shorter than its newest meta page says kills its reader by SIGBUS, which no `except` can catch.  Raises StateRefused.

    The two meta pages (page 0 and 1) are, from byte 16: magic, version, address, map size, two trees of 48 bytes, last page, transaction.
    """
    with data.open("rb") as file:
        pages = [file.read(PAGE_BYTES), file.read(PAGE_BYTES)]
        size = os.fstat(file.fileno()).st_size
    newest, last_page = -1, 0
    for page in pages:
        if len(page) >= _META_END and _U32.unpack_from(page, 16)[0] == _MAGIC:
            last, transaction = _U64.unpack_from(page, 136)[0], _U64.unpack_from(page, 144)[0]
            if transaction > newest:
                newest, last_page = transaction, last
    if newest >= 0 and size < (last_page + 1) * PAGE_BYTES:
        raise StateRefused(
            f"{data} is cut short: it has {size} bytes of {(last_page + 1) * PAGE_BYTES}: run `leased fsck`, then restore a backup"
        )


def open_to_read(path: Path, *, tables: int, beside_writer: bool = False) -> lmdb.Environment:
    """The environment in a directory, or in one file, to be read only.  Raises StateRefused, StoreError or OSError.

    `beside_writer`: another process may be writing it, so the reader enters itself in LMDB's own lock file; without that the writer
    would reuse the pages it stands on.  Otherwise nothing at all is written.
    """
    data = path / "data.mdb" if path.is_dir() else path
    descriptor = os.open(
        data, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK
    )  # LMDB would not say which file it could not open, nor why
    try:
        status = os.fstat(descriptor)
    finally:
        os.close(descriptor)
    if not stat.S_ISREG(status.st_mode):
        raise StateRefused(f"{data} is not a regular file: name the file of a backup, or the directory of a state")
    if status.st_size == 0:
        raise StateRefused(f"{data} is empty: restore a backup with `leased restore`")
    try:
        return lmdb.open(
            str(path), subdir=path.is_dir(), map_size=READ_MAP_BYTES, max_dbs=tables, readonly=True,
            lock=beside_writer, max_readers=16, create=False,
        )  # fmt: skip
    except lmdb.Error as error:
        raise _opening(data, error) from error


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
