"""`leased backup` and `leased restore`: the ledger as one file, and back.

A backup is the ledger alone: the volatile state is of one boot and worth nothing in another, and fences are stored nowhere.  The copy says
of itself that it is one (restored = 1, not clean), so that even a copy put in place by hand is never taken for the present: whoever starts on
it waits out the longest ttl before anything is granted.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import stat
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final, NamedTuple, TextIO

import lmdb

from leased.backup_fetch import fetch
from leased.clock import rfc3339
from leased.config import Config
from leased.errors import StateLocked, StateRefused, StoreError, StoreFull
from leased.exits import EXIT_FINDINGS, EXIT_YES, WrongUse
from leased.generations import MICROSECONDS
from leased.model import MAX_TTL_SECONDS
from leased.state.environment import FILE_MODE, DirectoryLock, give_to_owner, open_to_read
from leased.state.ledger import INITIALISED, MAP_BYTES, META_VERSION, write_initialised
from leased.state.probe import MAX_TABLES, probe
from leased.state.reading import Finding, LedgerContents, Reader, read_ledger
from leased.state.records import seal, unseal

DATA: Final = "data.mdb"
RESTORING: Final = "data.mdb.restoring"
ASIDE: Final = "data.mdb.before-restore-"
RESTORED: Final = 1  # what LedgerMeta.restored says of a copy: its leases may still be held by somebody
RESTORED_NO_HOLDERS: Final = 2  # an operator says they are not


class Copied(NamedTuple):
    """A finished copy, as it was read back."""

    contents: LedgerContents
    findings: list[Finding]
    size: int


def backup(config: Config, file: Path, out: TextIO) -> int:
    """Write FILE; a running daemon goes on serving: it makes the copy if it answers, else its ledger is read beside it.  0, or 1 when records of
    the ledger are damaged (and so are the copy's).  Raises WrongUse, StateRefused, StoreError or OSError, and then no file is left."""
    file = file.absolute()
    _must_be_new(file)
    copied, live = _write(lambda growing: fetch(config.socket, config.state_dir, growing, FILE_MODE), file), True
    if copied is None:
        if not (config.state_dir / DATA).exists():
            raise StateRefused(f"{config.state_dir / DATA}: there is no state here to back up: name the directory with --state-dir")
        with _locked_or_live(config) as live:
            said = probe(config.state_dir, beside_writer=live)
            if said:
                raise StateRefused(_about(config.state_dir / DATA, said, "restore an older backup with `leased restore`"))
            copied = _write(lambda growing: _copy(config.state_dir, growing, live=live), file)
    assert copied is not None
    counts = copied.contents.counts
    print(
        f"{file}: {copied.size} bytes, {'while the daemon runs' if live else 'with the daemon stopped'}: {_told(counts)}", file=out
    )
    print("it holds the hashing secret and no fence; keep it private, and put it back with `leased restore`", file=out)
    for each in copied.findings:
        print(f"damaged in the ledger, and so in the copy: {each.text}", file=out)
    return EXIT_FINDINGS if copied.findings else EXIT_YES


def restore(config: Config, file: Path, out: TextIO, *, no_holders: bool = False) -> int:
    """Put FILE in the place of the ledger, whatever state that is in; it is kept beside it.  Raises StateLocked, WrongUse, StateRefused,
    StoreError or OSError, and then the ledger is as it was."""
    file = file.absolute()
    home, target = config.state_dir, config.state_dir / DATA
    if not file.is_file():
        raise WrongUse(f"{file}: there is no such file: name one that `leased backup` wrote")
    os.close(os.open(file, os.O_RDONLY | os.O_CLOEXEC))  # who may not read it is told so, and not that it is damaged
    if target.exists() and file.samefile(target):
        raise WrongUse(f"{file} is the state itself: name a copy that `leased backup` wrote")
    with contextlib.ExitStack() as held:
        for directory in (home, config.runtime_dir):
            held.callback(DirectoryLock(directory, make=not directory.exists()).close)
        _must_be_sound(file)
        owner = home.stat()
        restoring = home / RESTORING
        restoring.unlink(missing_ok=True)
        with _removed_on_failure(restoring):
            _copy(file, restoring, live=False)
            _mark(restoring, RESTORED_NO_HOLDERS if no_holders else RESTORED)
            copied = _read_back(restoring)
            if copied.findings:
                raise StateRefused(
                    f"{file}: the copy of it is damaged: {copied.findings[0].text}: look at the disk, then try again"
                )
            _flush(restoring, owner)
        assert copied.contents.meta is not None
        aside = _swap(home, restoring, copied.contents.meta["install_id"], owner)
    _tell(out, file, target, aside, copied, no_holders=no_holders)
    return EXIT_YES


# ---- the parts of both


def _must_be_new(file: Path) -> None:
    if file.exists() or file.is_symlink():
        raise WrongUse(f"{file} exists: a backup overwrites nothing: remove it, or name another file")
    if not file.parent.is_dir():
        raise WrongUse(f"{file.parent} is not a directory: make it, or name another file")


@contextlib.contextmanager
def _locked_or_live(config: Config) -> Iterator[bool]:
    """True when a daemon holds the state: then its ledger is read beside it.  Otherwise none can start until the copy is made."""
    try:
        lock = DirectoryLock(config.state_dir, make=False)
    except StateLocked:
        yield True
    else:
        try:
            yield False
        finally:
            lock.close()


def _write(copy: Callable[[Path], bool], file: Path) -> Copied | None:
    """None: `copy` has written nothing."""
    growing = file.with_name(file.name + ".tmp")
    with _removed_on_failure(growing), _not_there(growing):
        if not copy(growing):
            return None
        _mark(growing, RESTORED)
        copied = _read_back(growing)
        _flush(growing, file.parent.stat())
        _must_be_new(file)
        growing.rename(file)
    _flush_directory(file.parent)
    return copied


def _copy(source: Path, target: Path, *, live: bool) -> bool:
    """All that one read transaction of `source` (a directory or a file) sees, without its free pages."""
    descriptor = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, FILE_MODE)
    try:
        with _translated(target), open_to_read(source, tables=MAX_TABLES, beside_writer=live) as environment:
            environment.copyfd(descriptor, compact=True)
    finally:
        os.close(descriptor)
    return True


@contextlib.contextmanager
def _not_there(target: Path) -> Iterator[None]:
    try:
        yield
    except FileExistsError:
        raise WrongUse(f"{target} exists, perhaps from a backup that was interrupted: remove it, then try again") from None


def _mark(copy: Path, restored: int) -> None:
    """The copy says that it is one.  Raises StateRefused when its meta record cannot be read or is of another format."""
    with _translated(copy), lmdb.open(str(copy), subdir=False, map_size=MAP_BYTES, max_dbs=MAX_TABLES, lock=False) as environment:
        contents, reader = _contents(environment, copy)
        if contents.meta is None:
            raise StateRefused(_unusable(copy, reader.findings))
        table = environment.open_db(b"meta", create=False)
        with environment.begin(write=True, db=table) as transaction:
            fields = json.loads(unseal(transaction.get(b"meta") or b"", META_VERSION, "ledger meta"))
            fields |= {"clean": False, "restored": restored}
            transaction.put(b"meta", seal(META_VERSION, json.dumps(fields).encode()))


def _read_back(copy: Path) -> Copied:
    said = probe(copy)
    if said:
        raise StoreError(_about(copy, said, "the copy did not come out as it was written: look at the disk, then try again"))
    with _translated(copy), open_to_read(copy, tables=MAX_TABLES) as environment:
        contents, reader = _contents(environment, copy)
    return Copied(contents, reader.findings, copy.stat().st_size)


def _contents(environment: lmdb.Environment, path: Path) -> tuple[LedgerContents, Reader]:
    reader = Reader(environment, "ledger", str(path))
    return read_ledger(reader), reader


def _must_be_sound(file: Path) -> None:
    """A file to be restored.  Raises StateRefused when it is damaged, of a newer format, or something else altogether."""
    said = probe(file)
    if said:
        raise StateRefused(_about(file, said, "name another backup"))
    with _translated(file), open_to_read(file, tables=MAX_TABLES) as environment:
        contents, reader = _contents(environment, file)
    if contents.meta is None or reader.findings:
        raise StateRefused(_unusable(file, reader.findings))


def _unusable(file: Path, findings: list[Finding]) -> str:
    if not findings:
        return f"{file} is not the ledger of leased, or that of one that was never started: name a file that `leased backup` wrote"
    first = max(findings, key=lambda each: each.closed)
    more = f" (and {len(findings) - 1} more)" if len(findings) > 1 else ""
    return f"{file}: {first.text.partition(': restore a backup')[0]}{more}; nothing was changed"


def _about(file: Path, said: str, remedy: str) -> str:
    said = (
        said.removeprefix(f"{file} ")
        .removeprefix(f"{file}: ")
        .partition(": restore a backup")[0]
        .partition(": run `leased fsck`")[0]
    )
    return f"{file}: {said}: {remedy}"


def _swap(home: Path, restoring: Path, install_id: str, owner: os.stat_result) -> Path | None:
    """The copy becomes the ledger, in one step: a crash leaves the one or the other in its place."""
    write_initialised(home, install_id)
    if os.geteuid() == 0:
        os.chown(home / INITIALISED, owner.st_uid, owner.st_gid, follow_symlinks=False)
    target, aside = home / DATA, None
    if target.exists():
        aside = _free_name(home)
        aside.hardlink_to(target)
    restoring.replace(target)
    _flush_directory(home)
    return aside


def _free_name(home: Path) -> Path:
    stamp = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
    names = (home / f"{ASIDE}{stamp}{suffix}" for suffix in ("", *(f".{number}" for number in range(1, 1000))))
    return next(name for name in names if not name.exists())


def _flush(path: Path, owner: os.stat_result) -> None:
    """Only what was made here is flushed and given away: whoever may write to its directory could have put another file's link in its place.
    Raises StoreError."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError as error:
        raise StoreError(f"{path}: {error.strerror}: somebody else writes to {path.parent}: name a place of your own") from error
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode) or status.st_nlink != 1 or status.st_uid != os.geteuid():
            raise StoreError(
                f"{path} is not the file that was written: somebody else writes to {path.parent}: name a place of your own"
            )
        give_to_owner(descriptor, owner)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _flush_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def _removed_on_failure(path: Path) -> Iterator[None]:
    existed = path.exists()
    try:
        yield
    except BaseException:
        if not existed:
            path.unlink(missing_ok=True)
        raise


@contextlib.contextmanager
def _translated(path: Path) -> Iterator[None]:
    try:
        yield
    except lmdb.Error as error:
        if isinstance(error, lmdb.DiskError | lmdb.MapFullError) or os.strerror(errno.ENOSPC) in str(error):
            raise StoreFull(f"{path}: {error}: give the file system more room, or name another place") from error
        raise StoreError(f"{path}: {error}") from error


# ---- what people are told


def _told(counts: dict[str, int]) -> str:
    names = {"leases": "lease records", "switches": "switches", "agents": "agent keys", "billed": "billed-once records",
             "outbox": "events to ship", "dead": "dead letters"}  # fmt: skip
    return ", ".join(f"{counts.get(table, 0)} {name}" for table, name in names.items() if table == "leases" or counts.get(table))


def _tell(out: TextIO, file: Path, target: Path, aside: Path | None, copied: Copied, *, no_holders: bool) -> None:
    mark = copied.contents.meta["mark"] if copied.contents.meta is not None else 0
    known = f"{rfc3339(mark / MICROSECONDS)[:16]}Z" if mark else "its first start"
    say = [
        f"{target} is now the backup {file} ({_told(copied.contents.counts)}).",
        f"What was there is kept as {aside}; remove it when it is not needed any more." if aside else "Nothing was there before.",
        "Lost: every lease (whoever holds one loses it), and what happened after the backup was made, "
        f"about {known}: switches, agent keys added or revoked, bills. Events shipped since then are shipped again, under the same ids.",
        "Generations jump forward with the wall clock: none comes again, as long as the clock does not stand behind a value it showed before.",
    ]
    if no_holders:
        say.append(
            "You said that no holder is left: the next start grants at once. If one does work on under a lease it got from the lost state, "
            f"two will hold its key: then run this again without --no-holders, or wait {MAX_TTL_SECONDS:.0f} s before you start the daemon."
        )
    else:
        say.append(
            f"The next start grants nothing for {MAX_TTL_SECONDS:.0f} s, until every lease that may still be held must have lapsed. If no holder "
            "can be left (the machine was rebooted, every worker was stopped), restore again with --no-holders: then it grants at once."
        )
    print("\n".join(say), file=out)
