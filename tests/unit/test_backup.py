"""A backup is one private file that says what it is; a restore puts it in place and forgets nothing that may still be held."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import lmdb
import pytest
import states
from states import BOOT, BOOT_ID, ENDED, ENDED_ROW, FIRST, LONG, LONG_ROW, WALL

from leased import backup, fsck
from leased.errors import StateLocked, StateRefused, StoreError, StoreFull
from leased.exits import WrongUse
from leased.generations import HEADROOM, Generations
from leased.state.environment import DirectoryLock, open_to_read
from leased.state.leases import Leases
from leased.state.ledger import Ledger
from leased.state.reading import LedgerContents, Reader, read_ledger
from leased.state.recovery import TakenOver, take_over


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("killed")
    states.make(root)
    return root


@pytest.fixture
def root(killed: Path, tmp_path: Path) -> Path:
    return states.copy_of(killed, tmp_path)


@pytest.fixture
def copy(root: Path, tmp_path: Path) -> Path:
    file = tmp_path / "copy"
    assert backup.backup(states.config_of(root), file, io.StringIO()) == 0
    return file


def read(file: Path) -> LedgerContents:
    with open_to_read(file, tables=16) as environment:
        reader = Reader(environment, "ledger", str(file))
        contents = read_ledger(reader)
    assert reader.findings == []
    return contents


def restored(root: Path, file: Path, **options: bool) -> str:
    out = io.StringIO()
    assert backup.restore(states.config_of(root), file, out, **options) == 0
    return out.getvalue()


def taken_over(root: Path) -> Iterator[tuple[TakenOver, Leases]]:
    ledger, leases = Ledger(root / "state"), Leases(root / "run", 100)
    try:
        yield take_over(leases, ledger, wait_out=60.0, boot=BOOT, boot_id=BOOT_ID), leases
    finally:
        ledger.close()
        leases.close()


def wrong(root: Path) -> list[str]:
    findings = fsck.examine(states.config_of(root), states.StoppedClock()).findings
    return [each.code for each in findings if not each.note]


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


# ---- backup


def test_a_backup_is_the_ledger_in_one_private_file(root: Path, tmp_path: Path) -> None:
    out = io.StringIO()
    file = tmp_path / "copy"
    before = (root / "state" / "data.mdb").read_bytes()
    assert backup.backup(states.config_of(root), file, out) == 0
    assert file.stat().st_mode & 0o777 == 0o600
    assert names(tmp_path) == ["copy", "run", "state"]
    contents, source = read(file), read(root / "state")
    assert contents.meta is not None and source.meta is not None
    assert contents.meta == {**source.meta, "clean": False, "restored": 1}
    assert (contents.rows, contents.counts) == (source.rows, source.counts)
    assert set(contents.rows) == {LONG, ENDED}
    assert out.getvalue().startswith(f"{file}: {file.stat().st_size} bytes, with the daemon stopped: 2 lease records, 1 switches\n")
    assert (root / "state" / "data.mdb").read_bytes() == before
    DirectoryLock(root / "state").close()  # nothing holds it any more


def test_a_backup_of_a_clean_stop_is_not_clean(tmp_path: Path) -> None:
    states.make(tmp_path, clean=True)
    backup.backup(states.config_of(tmp_path), tmp_path / "copy", io.StringIO())
    meta = read(tmp_path / "copy").meta
    assert meta is not None and (meta["clean"], meta["restored"], meta["mark"]) == (False, 1, FIRST + 2)


def test_a_backup_beside_a_writer_is_of_one_moment_and_harms_nobody(root: Path, tmp_path: Path) -> None:
    lock, ledger = DirectoryLock(root / "state"), Ledger(root / "state")
    try:
        ledger.apply([("del", ENDED, FIRST + 2)])
        with ledger.environment.begin(write=True) as transaction:  # under way: what it does is not to be seen
            transaction.drop(ledger.leases, delete=False)
            run = subprocess.run(
                [sys.executable, "-m", "leased", "backup", str(tmp_path / "copy"), "--state-dir", str(root / "state"),
                 "--runtime-dir", str(root / "run")],
                capture_output=True, text=True, timeout=60,
            )  # fmt: skip
            transaction.abort()
        assert (run.returncode, run.stderr) == (0, "")
        assert "while the daemon runs: 1 lease records" in run.stdout
        ledger.apply([("mark", FIRST + 90_000_000)])
        assert ledger.environment.reader_check() == 0
    finally:
        ledger.close()
        lock.close()
    assert set(read(tmp_path / "copy").rows) == {LONG}


def test_a_backup_overwrites_nothing(root: Path, copy: Path) -> None:
    before = copy.read_bytes()
    with pytest.raises(WrongUse, match="exists: a backup overwrites nothing: remove it, or name another file"):
        backup.backup(states.config_of(root), copy, io.StringIO())
    assert copy.read_bytes() == before
    link = copy.with_name("link")
    link.symlink_to("nowhere")
    with pytest.raises(WrongUse, match="exists"):
        backup.backup(states.config_of(root), link, io.StringIO())


def test_what_an_interrupted_backup_left_is_not_taken_for_ours(root: Path, tmp_path: Path) -> None:
    (tmp_path / "copy.tmp").write_text("somebody's")
    with pytest.raises(WrongUse, match=r"copy\.tmp exists, perhaps from a backup that was interrupted"):
        backup.backup(states.config_of(root), tmp_path / "copy", io.StringIO())
    assert (tmp_path / "copy.tmp").read_text() == "somebody's"


@pytest.mark.parametrize("link", [os.symlink, os.link])
def test_another_file_put_in_the_place_of_the_copy_is_not_given_away(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, link: Callable[[Path, Path], None]
) -> None:
    """Whoever owns the directory may do that while root writes there, and would be given the file it leads to."""
    precious, read_back = tmp_path / "precious", backup._read_back
    given: list[object] = []
    precious.write_text("root's")

    def swapped(growing: Path) -> backup.Copied:
        copied = read_back(growing)
        growing.unlink()
        link(precious, growing)
        return copied

    monkeypatch.setattr(backup, "_read_back", swapped)
    monkeypatch.setattr(backup, "give_to_owner", lambda *given_away: given.append(given_away))
    with pytest.raises(StoreError, match="somebody else writes"):
        backup.backup(states.config_of(root), tmp_path / "b", io.StringIO())
    assert given == [] and not (tmp_path / "b").exists() and precious.read_text() == "root's"


def test_a_backup_that_fails_leaves_no_file(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Full:
        def __enter__(self) -> Full:
            return self

        def __exit__(self, *_: object) -> None: ...

        def copyfd(self, descriptor: int, *, compact: bool) -> None:
            os.write(descriptor, b"half a page")
            raise lmdb.DiskError("mdb_env_copyfd3: No space left on device")

    monkeypatch.setattr(backup, "open_to_read", lambda *_, **__: Full())
    with pytest.raises(StoreFull, match=r"copy\.tmp: .*No space left on device: give the file system more room"):
        backup.backup(states.config_of(root), tmp_path / "copy", io.StringIO())
    assert names(tmp_path) == ["run", "state"]


def test_a_place_that_is_none_is_told(root: Path, tmp_path: Path) -> None:
    with pytest.raises(WrongUse, match="is not a directory: make it, or name another file"):
        backup.backup(states.config_of(root), tmp_path / "none" / "copy", io.StringIO())


def test_nothing_to_back_up_is_told(tmp_path: Path) -> None:
    with pytest.raises(StateRefused, match=r"data\.mdb: there is no state here to back up"):
        backup.backup(states.config_of(tmp_path), tmp_path / "copy", io.StringIO())
    (tmp_path / "state").mkdir()
    DirectoryLock(tmp_path / "state").close()
    Ledger(tmp_path / "state").close()
    with pytest.raises(StateRefused, match="was never started"):
        backup.backup(states.config_of(tmp_path), tmp_path / "copy", io.StringIO())
    assert names(tmp_path) == ["state"]


def test_a_damaged_record_is_copied_and_told(root: Path, tmp_path: Path) -> None:
    with states.opened_ledger(root) as (ledger, transaction):
        states.spoil(transaction, ENDED_ROW, ledger.leases)
    out = io.StringIO()
    assert backup.backup(states.config_of(root), tmp_path / "copy", out) == 1
    assert f"damaged in the ledger, and so in the copy: the leases record {ENDED_ROW.hex()} cannot be read" in out.getvalue()
    assert (tmp_path / "copy").exists()


def test_a_ledger_that_kills_its_reader_is_not_copied(root: Path, tmp_path: Path) -> None:
    os.truncate(root / "state" / "data.mdb", 8192)
    with pytest.raises(StateRefused, match=r"data\.mdb: the file kills its reader \(signal 7, SIGBUS\)"):
        backup.backup(states.config_of(root), tmp_path / "copy", io.StringIO())
    assert names(tmp_path) == ["run", "state"]


# ---- restore


def test_a_restore_waits_the_longest_ttl_and_jumps_forward(root: Path, copy: Path) -> None:
    with states.opened_leases(root) as (leases, transaction):  # an hour's work after the backup
        leases.put_last(transaction, FIRST + 3_600_000_000)
    said = restored(root, copy)
    assert "grants nothing for 3600 s" in said and "Lost: every lease" in said and "Generations jump forward" in said
    assert wrong(root) == []
    for taken, leases in taken_over(root):
        assert taken.waiting and taken.story == "a restored backup"
        assert taken.meta.no_grant_before == BOOT + 3600.0
        with leases.environment.begin() as transaction:
            assert list(leases.rows(transaction)) == []
        assert {op[1] for op in taken.first if op[0] == "del"} == {LONG, ENDED}
        generations = Generations(taken.last, taken.mark)
        wall = WALL + 7200.0
        assert (generations.last, generations.mark) == (FIRST + 60_000_000 + HEADROOM, FIRST + 60_000_000)
        generations.raising = generations.wanted_mark(wall)
        generations.raised()
        following = generations.peek(wall)
        assert following is not None and following > FIRST + 3_600_000_000


def test_no_holders_waits_for_nothing(root: Path, copy: Path) -> None:
    said = restored(root, copy, no_holders=True)
    assert "You said that no holder is left: the next start grants at once." in said and "3600 s before" in said
    meta = read(root / "state").meta
    assert meta is not None and meta["restored"] == 2
    for taken, _ in taken_over(root):
        assert (taken.waiting, taken.meta.no_grant_before) == (False, 0.0)


def test_a_restore_keeps_what_was_there(root: Path, copy: Path) -> None:
    with states.opened_ledger(root) as (ledger, transaction):
        transaction.delete(LONG_ROW, db=ledger.leases)
    before = (root / "state" / "data.mdb").read_bytes()
    said = restored(root, copy)
    restored(root, copy)
    aside = sorted((root / "state").glob("data.mdb.before-restore-*"))
    assert len(aside) == 2 and str(aside[0]) in said
    assert before in {path.read_bytes() for path in aside}
    assert {path.stat().st_mode & 0o777 for path in (root / "state").iterdir()} == {0o600}
    assert not (root / "state" / backup.RESTORING).exists()


def test_a_restore_needs_no_sound_state(copy: Path, root: Path) -> None:
    for damage in (lambda path: os.truncate(path, 8192), lambda path: path.write_bytes(b"x" * 9000), Path.unlink):
        damage(root / "state" / "data.mdb")
        restored(root, copy)
        assert wrong(root) == []
    elsewhere = root / "moved"
    elsewhere.mkdir()
    assert "Nothing was there before." in restored(elsewhere, copy)
    assert wrong(elsewhere) == []
    meta = read(copy).meta
    assert meta is not None and (elsewhere / "state" / "initialised").read_text().strip() == meta["install_id"]


def test_a_backup_of_a_restored_state_can_be_restored(root: Path, copy: Path) -> None:
    restored(root, copy, no_holders=True)
    again = copy.with_name("again")
    assert backup.backup(states.config_of(root), again, io.StringIO()) == 0
    meta = read(again).meta
    assert meta is not None and meta["restored"] == 1, "that nobody was left then says nothing of later"


def refused(root: Path, file: Path, said: str, error: type[Exception] = StateRefused) -> None:
    """The restore is refused and has touched nothing."""
    before = {path: path.read_bytes() for path in (root / "state").iterdir()}
    with pytest.raises(error, match=said):
        backup.restore(states.config_of(root), file, io.StringIO())
    assert {path: path.read_bytes() for path in (root / "state").iterdir()} == before


def test_a_newer_format_is_refused(root: Path, copy: Path) -> None:
    change(copy, format=3)
    refused(root, copy, "has format 3 and this version of leased knows 2: install the version that wrote it; nothing was changed")


def test_a_damaged_backup_is_refused(root: Path, copy: Path) -> None:
    with lmdb.open(str(copy), subdir=False, lock=False, max_dbs=8) as environment:
        table = environment.open_db(b"leases", create=False)
        with environment.begin(write=True) as transaction:
            states.spoil(transaction, LONG_ROW, table)
    refused(root, copy, "the leases record .* cannot be read")
    os.truncate(copy, 8192)
    refused(root, copy, "the file kills its reader .*: name another backup")


@pytest.mark.parametrize(
    ("content", "said", "error"),
    [
        (b"not LMDB" * 1000, "is damaged .*: name another backup", StateRefused),
        (b"", "is empty: name another backup", StateRefused),
        (None, "there is no such file: name one that `leased backup` wrote", WrongUse),
    ],
)
def test_what_is_no_backup_is_refused(root: Path, content: bytes | None, said: str, error: type[Exception]) -> None:
    file = root / "file"
    if content is not None:
        file.write_bytes(content)
    refused(root, file, said, error)


def test_a_foreign_database_and_the_state_itself_are_refused(root: Path, tmp_path: Path) -> None:
    foreign = tmp_path / "foreign"
    with lmdb.open(str(foreign), subdir=False, lock=False, max_dbs=2) as environment:
        environment.open_db(b"something")
    refused(root, foreign, "is not the ledger of leased")
    refused(root, root / "state" / "data.mdb", "is the state itself", WrongUse)
    refused(root, root, "there is no such file", WrongUse)


@pytest.mark.parametrize("name", ["state", "run"])
def test_a_running_daemon_forbids_a_restore(root: Path, copy: Path, name: str) -> None:
    lock = DirectoryLock(root / name)
    refused(root, copy, "in use by another leased process: stop it first", StateLocked)
    lock.close()


@pytest.mark.parametrize("step", ["hardlink_to", "replace"])
def test_a_crash_while_it_is_put_in_place_leaves_the_old_state(
    root: Path, copy: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    before = (root / "state" / "data.mdb").read_bytes()

    def crash(path: Path, target: Path) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, step, crash)
    with pytest.raises(KeyboardInterrupt):
        backup.restore(states.config_of(root), copy, io.StringIO())
    monkeypatch.undo()
    assert (root / "state" / "data.mdb").read_bytes() == before
    assert wrong(root) == []
    restored(root, copy)
    assert wrong(root) == []


def test_a_copy_that_does_not_read_back_is_not_put_in_place(root: Path, copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def torn(path: Path, number: int) -> None:
        os.truncate(path, 8192)

    monkeypatch.setattr(backup, "_mark", torn)
    refused(root, copy, r"data\.mdb\.restoring: the file kills its reader .*: the copy did not come out", StoreError)


def change(copy: Path, **changes: object) -> None:
    with lmdb.open(str(copy), subdir=False, lock=False, max_dbs=8) as environment:
        table = environment.open_db(b"meta", create=False)
        with environment.begin(write=True) as transaction:
            states.change_meta(transaction, table, **changes)
