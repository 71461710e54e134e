"""Directories, locks and files of the state; lmdb's errors end at this border."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import lmdb
import pytest

from leased.errors import StateLocked, StateRefused, StoreError, StoreFull
from leased.state.environment import DirectoryLock, each, free_pages, open_environment, translated


def modes(directory: Path) -> dict[str, int]:
    return {path.name: path.stat().st_mode & 0o777 for path in (directory, *directory.iterdir())}


def test_a_directory_is_made_private_with_its_lock(tmp_path: Path) -> None:
    lock = DirectoryLock(tmp_path / "a" / "state")
    assert modes(tmp_path / "a" / "state") == {"state": 0o700, "lock": 0o600}
    lock.close()


def test_an_existing_directory_that_others_may_enter_is_tightened(tmp_path: Path) -> None:
    (tmp_path / "state").mkdir(mode=0o755)
    DirectoryLock(tmp_path / "state").close()
    assert modes(tmp_path / "state")["state"] == 0o700


def test_a_directory_of_somebody_else_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    owner = tmp_path.stat().st_uid
    monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
    with pytest.raises(StateRefused, match=f"belongs to uid {owner}, not to uid {owner + 1}"):
        DirectoryLock(tmp_path)


def test_two_locks_on_one_directory_exclude_each_other_until_the_first_is_closed(tmp_path: Path) -> None:
    first = DirectoryLock(tmp_path)
    with pytest.raises(StateLocked, match="in use by another leased process"):
        DirectoryLock(tmp_path)
    first.close()
    DirectoryLock(tmp_path).close()


def test_a_lock_that_is_a_link_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "lock").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(StateRefused):
        DirectoryLock(tmp_path)
    assert not (tmp_path / "elsewhere").exists()


def test_a_file_in_the_place_of_the_directory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "state").write_text("")
    with pytest.raises(StateRefused):
        DirectoryLock(tmp_path / "state")


def test_a_file_system_without_flock_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))

    monkeypatch.setattr("leased.state.environment.fcntl.flock", refuse)
    with pytest.raises(StateRefused, match="file system with flock"):
        DirectoryLock(tmp_path)


def test_a_lock_knows_when_its_path_leads_elsewhere(tmp_path: Path) -> None:
    state = tmp_path / "state"
    lock = DirectoryLock(state)
    assert lock.in_place()
    state.rename(tmp_path / "moved")
    assert not lock.in_place()
    state.mkdir()
    (state / "lock").write_text("")
    assert not lock.in_place()
    lock.close()


def test_a_lock_knows_when_its_file_was_replaced(tmp_path: Path) -> None:
    lock = DirectoryLock(tmp_path)
    os.close(os.open(tmp_path / "new", os.O_CREAT | os.O_WRONLY))
    (tmp_path / "new").replace(tmp_path / "lock")
    assert not lock.in_place()
    lock.close()


def test_files_are_private_whatever_the_umask(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        environment = open_environment(tmp_path, map_bytes=1 << 20, tables=1, sync=False)
        environment.close()
    finally:
        os.umask(before)
    assert {name: mode for name, mode in modes(tmp_path).items() if name.endswith(".mdb")} == {"data.mdb": 0o600, "lock.mdb": 0o600}


@pytest.mark.parametrize("damage", [b"not a database" * 1000, b"\0" * 8192])
def test_a_data_file_that_is_no_database_is_refused_with_advice(tmp_path: Path, damage: bytes) -> None:
    (tmp_path / "data.mdb").write_bytes(damage)
    with pytest.raises(StateRefused, match="leased fsck"):
        open_environment(tmp_path, map_bytes=1 << 20, tables=1, sync=False)


@pytest.mark.parametrize(
    ("raised", "told"),
    [
        (lmdb.MapFullError("x"), StoreFull),
        (lmdb.TxnFullError("x"), StoreFull),
        (lmdb.DiskError("x"), StoreFull),
        (lmdb.BadTxnError("x"), StoreError),
        (OSError(errno.EIO, "x"), StoreError),
    ],
)
def test_errors_of_the_store_become_ours(raised: Exception, told: type[StoreError]) -> None:
    with pytest.raises(told, match="the ledger: ") as caught, translated("the ledger"):
        raise raised
    assert type(caught.value) is told
    assert caught.value.__cause__ is raised


def test_our_own_errors_pass_the_border_as_they_are() -> None:
    with pytest.raises(ZeroDivisionError), translated("the ledger"):
        raise ZeroDivisionError


def test_a_damaged_row_is_told_apart_and_the_others_are_read(tmp_path: Path) -> None:
    environment = open_environment(tmp_path, map_bytes=1 << 20, tables=1, sync=False)
    table = environment.open_db(b"numbers")
    with environment.begin(write=True) as transaction:
        for key, value in ((b"a", b"1"), (b"b", b"x"), (b"c", b"3")):
            transaction.put(key, value, db=table)
    with environment.begin() as transaction:
        assert list(each(transaction, table, int)) == [(b"a", 1, b"1"), (b"b", None, b"x"), (b"c", 3, b"3")]
    environment.close()


def test_pages_that_are_used_are_no_longer_free(tmp_path: Path) -> None:
    environment = open_environment(tmp_path, map_bytes=1 << 20, tables=1, sync=False)
    before = free_pages(environment, 1 << 20)
    table = environment.open_db(b"large")
    with environment.begin(write=True) as transaction:
        transaction.put(b"a", bytes(40_960), db=table)
    assert before - free_pages(environment, 1 << 20) >= 11
    environment.close()


def test_a_lock_file_has_its_room_before_lmdb_writes_it_through_a_map(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int, offset: int, length: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as no_room:
        no_room.setattr(os, "posix_fallocate", full)
        with pytest.raises(StateRefused, match=r"lock\.mdb: No space left on device: give the file system more room"):
            open_environment(tmp_path, map_bytes=1 << 20, tables=1, sync=False)
    open_environment(tmp_path, map_bytes=1 << 20, tables=1, sync=False).close()
    assert (tmp_path / "lock.mdb").stat().st_blocks > 0
