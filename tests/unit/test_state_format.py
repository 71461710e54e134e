"""A state of another format is refused before anything is opened for writing, in words that name both programs."""

from __future__ import annotations

import io
import os
from pathlib import Path
from typing import Any

import pytest
import states

from leased import __main__ as command
from leased import backup, fsck, state_format
from leased.errors import StateRefused
from leased.opening import open_state
from leased.state import agent_records, leases, ledger, outbox, payments, records, switch_records
from leased.state.records import seal
from leased.version import VERSION


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("made")
    states.make(root)
    return root


@pytest.fixture
def root(made: Path, tmp_path: Path) -> Path:
    return states.copy_of(made, tmp_path)


def everything(root: Path) -> dict[str, tuple[bytes, int, int]]:
    """Content, mode and time of last change of every file of both directories."""
    found = {}
    for path in sorted(path for name in ("state", "run") for path in (root / name).iterdir()):
        status = path.stat()
        found[str(path)] = (path.read_bytes(), status.st_mode, status.st_mtime_ns)
    return found


def doctored(root: Path, **fields: Any) -> None:
    with states.opened_ledger(root) as (store, transaction):
        states.change_meta(transaction, store.meta, **fields)


def refusal(root: Path) -> str:
    """What a start says; it has changed nothing."""
    before = everything(root)
    with pytest.raises(StateRefused) as refused:
        open_state(states.config_of(root), states.StoppedClock())
    assert everything(root) == before
    return str(refused.value)


def test_a_newer_state_is_refused_and_untouched(root: Path) -> None:
    doctored(root, format=3)
    assert refusal(root) == (
        f"{root}/state: the state has format 3, and was written by a newer leased; this is leased {VERSION}, which knows 2: install the "
        "version that wrote it again, or restore a backup that was made before the upgrade (`leased restore`); nothing was changed"
    )


def test_the_program_that_wrote_it_is_named(root: Path) -> None:
    doctored(root, format=3)
    (root / "state" / "version").write_text("9.9.0\n")
    said = refusal(root)
    assert f"was written by leased 9.9.0; this is leased {VERSION}, which knows 2: install leased 9.9.0 again" in said
    (root / "state" / "version").write_text("9.9\nrm -rf /")
    with pytest.raises(StateRefused, match="by a newer leased;") as refused:
        state_format.refuse_another(root / "state")
    assert "-rf" not in str(refused.value)


@pytest.mark.parametrize("table", ["state", "run"])
def test_a_meta_record_of_another_version_is_refused_and_untouched(root: Path, table: str) -> None:
    """Its body may be anything."""
    opened = states.opened_ledger if table == "state" else states.opened_leases
    with opened(root) as (store, transaction):
        transaction.put(b"meta", seal(2, b"\xff no JSON"), db=store.meta)
    said = refusal(root)
    assert "version 2, and was written by a newer leased; this is leased" in said and "nothing was changed" in said


def test_an_older_state_without_an_upgrade_is_refused_by_rule(root: Path) -> None:
    assert set(state_format.UPGRADES) == ledger.BROUGHT_UP == {1}
    doctored(root, format=0)
    said = refusal(root)
    assert "the state has format 0, and was written by an older leased" in said and "start a version in between" in said


def test_a_state_of_format_1_is_read_by_all_and_brought_up_by_the_first_start(root: Path) -> None:
    with states.opened_ledger(root) as (store, transaction):
        old = {ledger.key_hash_of(bytes(key)): bytes(raw) for key, raw in transaction.cursor(db=store.leases)}
        transaction.drop(store.leases, delete=False)
        for key_hash, raw in old.items():
            transaction.put(key_hash, seal(ledger.OLD_COPY_VERSION, raw[1:-4]), db=store.leases)
        states.change_meta(transaction, store.meta, format=1)
    copy = root / "copy"
    assert backup.backup(states.config_of(root), copy, io.StringIO()) == 0
    before = everything(root)
    report = fsck.examine(states.config_of(root), states.StoppedClock())
    assert [each for each in report.findings if not each.note] == []
    assert everything(root) == before, "whoever only reads brings nothing up"
    assert backup.restore(states.config_of(root), copy, io.StringIO(), no_holders=False) == 0
    for name, content in before.items():
        Path(name).write_bytes(content[0])
    opened = open_state(states.config_of(root), states.StoppedClock())
    try:
        with opened.ledger.environment.begin() as transaction:
            meta = opened.ledger.read_meta()
            assert meta is not None and meta.format == 2
            rows = {key_hash: entry for key_hash, entry, _ in opened.ledger.rows(transaction)}
        assert {key_hash: entry.lease.generation for key_hash, entry in rows.items() if entry is not None} == {
            states.LONG: states.FIRST,
            states.ENDED: states.FIRST + 2,
        }
        assert ("del", states.ENDED, states.FIRST + 2) in opened.taken.first
        assert opened.taken.known[states.LONG] == (states.FIRST, 600.0)
    finally:
        for each in (opened.leases, opened.ledger, *opened.locks):
            each.close()


def test_a_state_of_ours_is_opened_and_signed(root: Path) -> None:
    assert not (root / "state" / "version").exists()
    opened = open_state(states.config_of(root), states.StoppedClock())
    for each in (opened.leases, opened.ledger, *opened.locks):
        each.close()
    assert state_format.writer_of(root / "state") == VERSION
    assert (root / "state" / "version").stat().st_mode & 0o777 == 0o600
    before = (root / "state" / "version").stat().st_mtime_ns
    state_format.note_writer(root / "state")
    assert (root / "state" / "version").stat().st_mtime_ns == before, "written once for each version"
    state_format.note_writer(root / "nowhere")


def test_nothing_yet_and_damage_are_not_its_business(root: Path, tmp_path: Path) -> None:
    state_format.refuse_another(tmp_path / "none", tmp_path / "none")
    with states.opened_ledger(root) as (store, transaction):
        states.spoil(transaction, b"meta", store.meta)
    state_format.refuse_another(root / "state", root / "run")
    (root / "state" / "data.mdb").write_bytes(b"")
    state_format.refuse_another(root / "state", root / "run")


@pytest.mark.parametrize("words", [("agent", "add", "a"), ("agent", "list"), ("outbox", "list")])
def test_the_commands_refuse_it_too(root: Path, words: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    doctored(root, format=3)
    before = everything(root)
    (root / "f.toml").write_text("")
    places = [
        f"--state-dir={root / 'state'}",
        f"--runtime-dir={root / 'run'}",
        f"--socket={root / 's'}",
        f"--config={root / 'f.toml'}",
    ]
    umask = os.umask(0o022)
    try:
        assert command.main([*words, *places]) == 78
    finally:
        os.umask(umask)
    assert f"this is leased {VERSION}, which knows 2" in capsys.readouterr().err
    assert everything(root) == before


def test_a_backup_of_a_newer_state_is_refused(root: Path, tmp_path: Path) -> None:
    from leased.backup import backup

    doctored(root, format=3)
    before = everything(root)
    with pytest.raises(StateRefused, match="has format 3 and this version of leased knows 2"):
        backup(states.config_of(root), tmp_path / "copy", io.StringIO())
    assert everything(root) == before and not (tmp_path / "copy").exists()


def test_no_record_changes_without_the_format() -> None:
    """Whoever gives a record a new version gives the format a new number, and this table a new row: an older program must refuse the whole
    state, not stumble over a record in the middle of a start."""
    versions = {
        f"{module.__name__.removeprefix('leased.state.')}.{name}": value
        for module in (agent_records, leases, ledger, outbox, payments, records, switch_records)
        for name, value in vars(module).items()
        if name.endswith("_VERSION") and isinstance(value, int)
    }
    known = {1: 1, 2: 2}  # format: the highest version of any record in it
    assert known[ledger.FORMAT] == max(versions.values()), versions
    assert len({name.partition(".")[0] for name in versions}) == 7
