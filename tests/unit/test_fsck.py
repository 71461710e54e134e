"""Each invariant of a stopped state: a state in which only it is broken makes only its finding appear."""

from __future__ import annotations

import io
import json
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lmdb
import pytest
import states
from states import BOOT, ENDED, ENDED_ROW, FIRST, LONG, LONG_ROW, OTHER, RID, SHORT, SHORT_ROW, SPENT, lease_of

from leased import fsck
from leased.errors import StateLocked
from leased.model import Tombstone
from leased.state.environment import DirectoryLock
from leased.state.leases import META_VERSION
from leased.state.ledger import COPY_VERSION, LedgerLease, encode_ledger_lease
from leased.state.probe import probe
from leased.state.reading import Finding
from leased.state.records import encode_lease, seal


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("killed")
    states.make(root)
    return root


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("stopped")
    states.make(root, clean=True)
    return root


def examined(root: Path, *, boot: float = BOOT, boot_id: str = states.BOOT_ID, **changes: Any) -> list[Finding]:
    return fsck.examine(states.config_of(root, **changes), states.StoppedClock(boot, boot_id)).findings


def wrong(findings: list[Finding]) -> set[str]:
    return {each.code for each in findings if not each.note}


def notes(findings: list[Finding]) -> set[str]:
    return {each.code for each in findings if each.note}


def story(findings: list[Finding]) -> str:
    return next(each.text for each in findings if each.code == "next_start")


def contents(root: Path) -> dict[str, tuple[int, bytes]]:
    return {str(path): (path.stat().st_mode, path.read_bytes()) for path in sorted(root.rglob("*")) if path.is_file()}


# ---- nothing is wrong


def test_a_killed_daemons_state_is_clean_and_late_deletes_are_told(killed: Path, tmp_path: Path) -> None:
    root = states.copy_of(killed, tmp_path)
    before = contents(root)
    findings = examined(root)
    assert wrong(findings) == set()
    assert notes(findings) == {"both.late_deletes", "next_start"}
    assert "late deletes: 1 (" in next(each.text for each in findings if each.code == "both.late_deletes")
    assert story(findings) == "the next start keeps the volatile state; nothing is waited for"
    assert contents(root) == before, "it changes nothing"


def test_a_state_stopped_in_order_is_clean(stopped: Path, tmp_path: Path) -> None:
    findings = examined(states.copy_of(stopped, tmp_path))
    assert (wrong(findings), notes(findings)) == (set(), {"next_start"})


def test_after_a_reboot_the_volatile_state_is_only_read(killed: Path, stopped: Path, tmp_path: Path) -> None:
    (tmp_path / "k").mkdir()
    (tmp_path / "s").mkdir()
    crashed = examined(states.copy_of(killed, tmp_path / "k"), boot=20.0, boot_id="boot-b")
    assert (wrong(crashed), story(crashed)) == (
        set(), "the next start makes the volatile state anew from the ledger; nothing is granted for 60 s",
    )  # fmt: skip
    in_order = examined(states.copy_of(stopped, tmp_path / "s"), boot=20.0, boot_id="boot-b")
    assert (wrong(in_order), story(in_order)) == (
        set(), "the next start makes the volatile state anew from a ledger that was stopped in order; nothing is waited for",
    )  # fmt: skip


def test_no_state_at_all_is_a_first_start(tmp_path: Path) -> None:
    findings = examined(tmp_path)
    assert (wrong(findings), story(findings)) == (set(), "the next start is the first one")
    assert list(tmp_path.iterdir()) == []


def test_the_longer_of_the_two_waits_is_told(killed: Path, tmp_path: Path) -> None:
    root = states.copy_of(killed, tmp_path)
    (root / "run" / "data.mdb").unlink()
    assert story(examined(root, wait_out_seconds=90.0)).endswith("nothing is granted for 90 s")


# ---- one thing is wrong; each function changes the state of a killed daemon

Change = Callable[[Path], None]
CHANGES: list[tuple[str, str, Change]] = []


def breaks(code: str, said: str = "") -> Callable[[Change], Change]:
    def taken(change: Change) -> Change:
        CHANGES.append((code, said, change))
        return change

    return taken


@breaks("ledger.record", "does not come back after a power cut")
def a_flipped_bit_in_a_ledger_lease(root: Path) -> None:
    with states.opened_ledger(root) as (ledger, transaction):
        states.spoil(transaction, ENDED_ROW, ledger.leases)


@breaks("ledger.record", "the switches record")
def a_flipped_bit_in_a_switch(root: Path) -> None:
    with states.opened_ledger(root) as (ledger, transaction):
        states.spoil(transaction, b"k" * 20, ledger.switches)


@breaks("ledger.record", "the outbox record")
def an_event_without_its_checksum(root: Path) -> None:
    with states.opened_ledger(root) as (ledger, transaction):
        transaction.put(b"12345678", b"an event", db=ledger.outbox)


@breaks("ledger.version", "install the version that wrote it")
def a_record_of_the_future(root: Path) -> None:
    with states.opened_ledger(root) as (ledger, transaction):
        transaction.put(ENDED_ROW, seal(COPY_VERSION + 1, b"whatever"), db=ledger.leases)


@breaks("ledger.format", "format 3 and this version of leased knows 2")
def a_format_of_the_future(root: Path) -> None:
    with states.opened_ledger(root) as (ledger, transaction):
        states.change_meta(transaction, ledger.meta, format=3, mark=None)


@breaks("ledger.key", "has a key of 21 bytes, not 28")
def a_key_of_another_length(root: Path) -> None:
    with states.opened_ledger(root) as (ledger, transaction):
        transaction.put(b"x" * 21, encode_ledger_lease(LedgerLease(lease_of(FIRST - 5, 90.0))), db=ledger.leases)


@breaks("ledger.key", "is of another generation than it stands under: this lease does not come back")
def a_record_in_the_place_of_another(root: Path) -> None:
    with states.opened_ledger(root) as (ledger, transaction):
        transaction.put(ENDED_ROW, encode_ledger_lease(LedgerLease(lease_of(FIRST - 5, 900.0))), db=ledger.leases)


@breaks("ledger.bounds", "has a ttl of 3601.0 seconds, outside 0.1 to 3600")
def a_ttl_nobody_may_have(root: Path) -> None:
    with states.opened_ledger(root) as (ledger, transaction):
        states.put_in_ledger(ledger, transaction, ENDED, LedgerLease(lease_of(FIRST + 2, 3601.0)))


@breaks("ledger.generation_twice", f"generation {FIRST} is on two leases")
def one_generation_twice_in_the_ledger(root: Path) -> None:
    with states.opened_ledger(root) as (ledger, transaction):
        states.put_in_ledger(ledger, transaction, OTHER, LedgerLease(lease_of(FIRST, 90.0)))


@breaks("ledger.copy", "is not marked clean")
def a_copy_without_the_clean_mark(root: Path) -> None:
    with states.opened_ledger(root) as (ledger, transaction):
        states.put_in_ledger(ledger, transaction, ENDED, LedgerLease(lease_of(FIRST + 2, 90.0), 45.0))


@breaks("ledger.meta", "the field wait_out of the meta record is -1")
def a_wait_below_zero(root: Path) -> None:
    with states.opened_ledger(root) as (ledger, transaction):
        states.change_meta(transaction, ledger.meta, wait_out=-1)


@breaks("ledger.meta", "the field secret of the meta record is not what it may be")
def a_secret_cut_short(root: Path) -> None:
    with states.opened_ledger(root) as (ledger, transaction):
        states.change_meta(transaction, ledger.meta, secret="ab" * 31)


@breaks("ledger.meta", "the field clean of the meta record is missing")
def a_meta_without_a_field(root: Path) -> None:
    with states.opened_ledger(root) as (ledger, transaction):
        states.change_meta(transaction, ledger.meta, clean=None)


@breaks("ledger.meta", "the meta record cannot be read")
def a_flipped_bit_in_the_meta(root: Path) -> None:
    with states.opened_ledger(root) as (ledger, transaction):
        states.spoil(transaction, b"meta", ledger.meta)


@breaks("ledger.emptied", "restore a backup with `leased restore`, or, if no lease can be held any more, remove")
def an_emptied_file(root: Path) -> None:
    os.truncate(root / "state" / "data.mdb", 0)


@breaks("ledger.missing", "the ledger is gone")
def a_state_directory_that_is_gone(root: Path) -> None:
    for path in (root / "state").iterdir():
        path.unlink()


@breaks("ledger.initialised", "it names the install id nothing that is one, the ledger")
def a_mark_of_another_installation(root: Path) -> None:
    (root / "state" / "initialised").write_text("another\n")


@breaks("ledger.mode", "chmod 0700")
def an_open_directory(root: Path) -> None:
    (root / "state").chmod(0o755)


@breaks("ledger.mode", "chmod 0600")
def an_open_file(root: Path) -> None:
    (root / "state" / "data.mdb").chmod(0o640)


@breaks("leases.mode", "so others may reach what is in it")
def an_open_volatile_directory(root: Path) -> None:
    (root / "run").chmod(0o750)


@breaks("leases.record", "the daemon answers null for this key")
def a_flipped_bit_in_a_lease(root: Path) -> None:
    with states.opened_leases(root) as (leases, transaction):
        states.spoil(transaction, SHORT, leases.leases)


@breaks("leases.record", "the tombstones record")
def a_flipped_bit_in_a_tombstone(root: Path) -> None:
    with states.opened_leases(root) as (leases, transaction):
        states.spoil(transaction, SPENT, leases.tombstones)


@breaks("leases.counter", "the last generation cannot be read")
def a_flipped_bit_in_the_last_generation(root: Path) -> None:
    with states.opened_leases(root) as (leases, transaction):
        states.spoil(transaction, b"last", leases.meta)
        transaction.drop(leases.leases, delete=False)


@breaks("leases.no_last", "does not say which generation was the last")
def no_last_generation(root: Path) -> None:
    with states.opened_leases(root) as (leases, transaction):
        transaction.delete(b"last", db=leases.meta)


@breaks("leases.counter", "the tick cannot be read")
def a_tick_of_another_size(root: Path) -> None:
    with states.opened_leases(root) as (leases, transaction):
        transaction.put(b"tick", seal(META_VERSION, b"four"), db=leases.meta)


@breaks("leases.tick", "is ahead of the boot clock")
def a_tick_that_is_yet_to_come(root: Path) -> None:
    with states.opened_leases(root) as (leases, transaction):
        leases.put_tick(transaction, BOOT + 5.0)


@breaks("leases.key", "has a key of 3 bytes, not 16")
def a_tombstone_of_no_request_id(root: Path) -> None:
    with states.opened_leases(root) as (leases, transaction):
        leases.put_tombstone(transaction, b"rid", Tombstone(OTHER, b"h" * 16, BOOT + 1.0))


@breaks("leases.bounds", "seconds left, of a ttl of 30.0")
def a_deadline_beyond_its_ttl(root: Path) -> None:
    with states.opened_leases(root) as (leases, transaction):
        leases.put(transaction, SHORT, lease_of(FIRST + 1, 30.0, deadline=BOOT + 31.0))


@breaks("leases.bounds", "has the deadline nan")
def a_deadline_that_is_no_number(root: Path) -> None:
    with states.opened_leases(root) as (leases, transaction):
        leases.put(transaction, SHORT, lease_of(FIRST + 1, 30.0, deadline=struct.unpack("<d", b"\0\0\0\0\0\0\xf8\x7f")[0]))


@breaks("leases.bounds", "though it is flushed")
def a_flushed_lease_that_could_go_back(root: Path) -> None:
    with states.opened_leases(root) as (leases, transaction):
        leases.put(transaction, SHORT, lease_of(FIRST + 1, 30.0, previous_ttl=10.0, previous_deadline=BOOT))


@breaks("leases.bounds", "bound in a way nobody knows (7)")
def an_unknown_bind(root: Path) -> None:
    with states.opened_leases(root) as (leases, transaction):
        leases.put(transaction, SHORT, lease_of(FIRST + 1, 30.0, bind=7))


@breaks("leases.bounds", "the spent request_id")
def a_request_id_remembered_for_ever(root: Path) -> None:
    with states.opened_leases(root) as (leases, transaction):
        leases.put_tombstone(transaction, SPENT, Tombstone(ENDED, b"h" * 16, BOOT + 3601.0))


@breaks("leases.above_last", f"is above {FIRST + 2}, the last generation handed out")
def a_generation_above_the_last(root: Path) -> None:
    with states.opened_leases(root) as (leases, transaction):
        leases.put(transaction, OTHER, lease_of(FIRST + 3, 30.0))


@breaks("leases.generation_twice", f"generation {FIRST + 1} is on two leases")
def one_generation_twice(root: Path) -> None:
    with states.opened_leases(root) as (leases, transaction):
        leases.put(transaction, OTHER, lease_of(FIRST + 1, 30.0, namespace="other"))


@breaks("leases.rid_twice", "one request_id is on two leases")
def one_request_id_twice(root: Path) -> None:
    with states.opened_leases(root) as (leases, transaction):
        leases.put(transaction, SHORT, lease_of(FIRST + 1, 30.0, rid=RID, rid_until=BOOT + 29.0))


@breaks("leases.rid_spent", "also remembered as spent")
def a_request_id_both_live_and_spent(root: Path) -> None:
    with states.opened_leases(root) as (leases, transaction):
        leases.put_tombstone(transaction, RID, Tombstone(LONG, b"h" * 16, BOOT + 50.0))


@breaks("both.install", "the install id of the volatile state is not the ledger's")
def a_volatile_state_of_another_installation(root: Path) -> None:
    with states.opened_leases(root) as (leases, transaction):
        states.change_meta(transaction, leases.meta, install_id="0" * 32)


@breaks("both.install", "the hashing secret")
def a_volatile_state_with_another_secret(root: Path) -> None:
    with states.opened_leases(root) as (leases, transaction):
        states.change_meta(transaction, leases.meta, secret="0" * 64)


@breaks("both.match", "of another incarnation than the ledger")
def a_volatile_state_of_another_incarnation(root: Path) -> None:
    with states.opened_leases(root) as (leases, transaction):
        states.change_meta(transaction, leases.meta, incarnation="0" * 32)


@breaks("both.match", "an older copy of the ledger was put back; the next start brings the ledger up to it")
def a_ledger_put_back(root: Path) -> None:
    with states.opened_leases(root) as (leases, transaction):
        states.change_meta(transaction, leases.meta, start=[5, "a" * 32], next_start=[6, "b" * 32])


@breaks("both.match", "an older copy of the volatile state was put back; the next start discards it and waits")
def a_volatile_state_put_back(root: Path) -> None:
    with states.opened_ledger(root) as (ledger, transaction):
        states.change_meta(transaction, ledger.meta, start=[9, "a" * 32])


@breaks("both.mark", "was told of, above the ledger's mark")
def a_generation_above_the_mark(root: Path) -> None:
    with states.opened_leases(root) as (leases, transaction):
        leases.put_last(transaction, FIRST + 60_000_001)
        leases.put(transaction, OTHER, lease_of(FIRST + 60_000_001, 30.0))


@breaks("both.long_missing", "was promised for 600 s, longer than the 60 s that are waited out, and the ledger does not have it")
def a_long_lease_that_is_not_in_the_ledger(root: Path) -> None:
    with states.opened_ledger(root) as (ledger, transaction):
        transaction.delete(LONG_ROW, db=ledger.leases)


@breaks("both.long_missing", "the ledger has it with 300 s")
def a_long_lease_that_is_shorter_in_the_ledger(root: Path) -> None:
    with states.opened_ledger(root) as (ledger, transaction):
        states.put_in_ledger(ledger, transaction, LONG, LedgerLease(lease_of(FIRST, 300.0)))


@breaks("both.long_missing", "was promised for 600 s")
def an_unflushed_renewal_whose_first_promise_is_not_kept(root: Path) -> None:
    renewed = lease_of(FIRST, 900.0, unflushed=True, previous_ttl=600.0, previous_deadline=BOOT + 10.0, presented=True)
    with states.opened_leases(root) as (leases, transaction):
        leases.put(transaction, LONG, renewed)
    a_long_lease_that_is_shorter_in_the_ledger(root)


@breaks("both.other_generation", f"while the ledger still held generation {FIRST - 9} of its key")
def a_short_lease_shadowed_by_an_old_record(root: Path) -> None:
    with states.opened_ledger(root) as (ledger, transaction):
        states.put_in_ledger(ledger, transaction, SHORT, LedgerLease(lease_of(FIRST - 9, 90.0)))


@breaks("both.ledger_ahead", "the volatile state never handed it out")
def a_ledger_that_knows_more_than_the_volatile_state(root: Path) -> None:
    with states.opened_ledger(root) as (ledger, transaction):
        states.put_in_ledger(ledger, transaction, OTHER, LedgerLease(lease_of(FIRST + 7, 90.0)))


@pytest.mark.parametrize(("code", "said", "change"), CHANGES, ids=[change.__name__ for _, _, change in CHANGES])
def test_each_broken_invariant_is_found_alone(killed: Path, tmp_path: Path, code: str, said: str, change: Change) -> None:
    root = states.copy_of(killed, tmp_path)
    change(root)
    findings = examined(root)
    assert wrong(findings) == {code}
    assert said in next(each.text for each in findings if each.code == code)
    assert fsck.exit_code(findings) == (78 if code in {"ledger.version", "ledger.format"} else 1)
    assert "0" * 64 not in str(findings), "no secret is told"


def test_a_generation_above_the_mark_of_the_ledger(killed: Path, tmp_path: Path) -> None:
    root = states.copy_of(killed, tmp_path)
    with states.opened_ledger(root) as (ledger, transaction):
        states.change_meta(transaction, ledger.meta, mark=FIRST + 1)
    assert wrong(examined(root, boot=1.0, boot_id="boot-b")) == {"ledger.above_mark"}


@pytest.mark.parametrize(
    ("code", "entry", "key_hash"),
    [
        ("ledger.not_copied", LedgerLease(lease_of(FIRST, 600.0)), LONG),
        ("ledger.bounds", LedgerLease(lease_of(FIRST, 600.0), 601.0), LONG),
        ("ledger.copy", LedgerLease(lease_of(FIRST, 600.0, unflushed=True), 599.0), LONG),
    ],
)
def test_what_a_clean_ledger_must_say(stopped: Path, tmp_path: Path, code: str, entry: LedgerLease, key_hash: bytes) -> None:
    root = states.copy_of(stopped, tmp_path)
    with states.opened_ledger(root) as (ledger, transaction):
        states.put_in_ledger(ledger, transaction, key_hash, entry)
    assert wrong(examined(root)) == {code}


def test_a_clean_ledger_has_every_live_lease(stopped: Path, tmp_path: Path) -> None:
    root = states.copy_of(stopped, tmp_path)
    with states.opened_ledger(root) as (ledger, transaction):
        transaction.delete(SHORT_ROW, db=ledger.leases)
    assert wrong(examined(root)) == {"both.clean_missing"}


def test_a_full_volatile_state_is_a_finding(killed: Path, tmp_path: Path) -> None:
    root = states.copy_of(killed, tmp_path)
    with states.opened_leases(root) as (leases, transaction):
        number = 0
        while leases.free_pages(transaction) > 60:
            number += 1
            transaction.put(number.to_bytes(16, "big"), seal(1, bytes(3000)), db=leases.events)
    assert wrong(examined(root)) == {"leases.room"}


# ---- what looks wrong and is not


def test_an_unflushed_grant_owes_the_ledger_nothing(killed: Path, tmp_path: Path) -> None:
    root = states.copy_of(killed, tmp_path)
    with states.opened_leases(root) as (leases, transaction):
        leases.put(transaction, ENDED, lease_of(FIRST + 2, 900.0, unflushed=True))
        leases.put(transaction, OTHER, lease_of(FIRST + 60_000_001, 30.0, unflushed=True))  # waits for the mark
        leases.put_last(transaction, FIRST + 60_000_001)
        leases.put(transaction, LONG, lease_of(FIRST, 900.0, unflushed=True, previous_ttl=600.0, previous_deadline=BOOT + 10.0))
    findings = examined(root)
    assert wrong(findings) == set()
    assert "wait for their flush: 3 (" in next(each.text for each in findings if each.code == "leases.unflushed")


def test_a_lapsed_lease_and_a_request_id_no_longer_spent_are_nothing(killed: Path, tmp_path: Path) -> None:
    root = states.copy_of(killed, tmp_path)
    with states.opened_leases(root) as (leases, transaction):
        leases.put(transaction, OTHER, lease_of(FIRST - 1, 600.0, deadline=BOOT - 1.0))
        leases.put_tombstone(transaction, RID, Tombstone(LONG, b"h" * 16, BOOT - 1.0))
    assert wrong(examined(root)) == set()


def test_a_crash_in_the_middle_of_a_start_is_nothing(killed: Path, tmp_path: Path) -> None:
    root = states.copy_of(killed, tmp_path)
    with states.opened_ledger(root) as (ledger, transaction):
        states.change_meta(transaction, ledger.meta, start=[2, "a" * 32])
    with states.opened_leases(root) as (leases, transaction):
        states.change_meta(transaction, leases.meta, next_start=[2, "a" * 32])
    (root / "state" / "initialised").unlink()
    findings = examined(root)
    assert wrong(findings) == set()
    assert "ledger.initialised" in notes(findings)


def test_a_restored_ledger_is_not_measured_by_what_was_there(killed: Path, tmp_path: Path) -> None:
    root = states.copy_of(killed, tmp_path)
    with states.opened_ledger(root) as (ledger, transaction):
        transaction.drop(ledger.leases, delete=False)
        states.change_meta(transaction, ledger.meta, restored=1, incarnation="0" * 32)
    findings = examined(root)
    assert (wrong(findings), story(findings)) == (
        set(), "the next start takes the restored backup: no lease comes back, and nothing is granted for 3600 s",
    )  # fmt: skip


# ---- files that cannot be opened


@pytest.mark.parametrize("store", ["state", "run"])
def test_a_file_that_kills_its_reader_is_told_and_survived(killed: Path, tmp_path: Path, store: str) -> None:
    root = states.copy_of(killed, tmp_path)
    path = root / store / "data.mdb"
    os.truncate(path, 8192)
    findings = examined(root)
    name = "ledger" if store == "state" else "leases"
    assert wrong(findings) == {f"{name}.unreadable"}
    (text,) = (each.text for each in findings if each.code == f"{name}.unreadable")
    assert text.startswith("the file kills its reader (signal 7, SIGBUS)")
    assert ("leased restore" in text) == (store == "state")
    assert fsck.exit_code(findings) == 78


def test_a_zeroed_page_is_told(killed: Path, tmp_path: Path) -> None:
    root = states.copy_of(killed, tmp_path)
    path = root / "state" / "data.mdb"
    states.zero_page(path, states.page_of(path, encode_lease(lease_of(FIRST + 2, 900.0))[:60]))
    findings = examined(root)
    assert wrong(findings) == {"ledger.unreadable"}
    assert fsck.exit_code(findings) == 78


@pytest.mark.parametrize(
    ("content", "said"),
    [(b"no database" * 1000, "is damaged"), (None, "is not a regular file")],
)
def test_what_is_no_database_is_told(killed: Path, tmp_path: Path, content: bytes | None, said: str) -> None:
    root = states.copy_of(killed, tmp_path)
    path = root / "state" / "data.mdb"
    if content is None:
        path.unlink()
        path.mkdir()
    else:
        path.write_bytes(content)
    findings = examined(root)
    assert wrong(findings) == {"ledger.unreadable"}
    assert said in next(each.text for each in findings if each.code == "ledger.unreadable")


def test_the_probe_reads_a_good_file_and_one_that_is_not_ours(killed: Path, tmp_path: Path) -> None:
    root = states.copy_of(killed, tmp_path)
    assert probe(root / "state") == ""
    foreign = tmp_path / "foreign.mdb"
    with lmdb.open(str(foreign), subdir=False, lock=False) as environment, environment.begin(write=True) as transaction:
        transaction.put(b"key", b"no table")
    assert "cannot be read to its end" in probe(foreign)


# ---- the command


def test_a_held_state_is_not_looked_at(killed: Path, tmp_path: Path) -> None:
    root = states.copy_of(killed, tmp_path)
    for name in ("state", "run"):
        lock = DirectoryLock(root / name)
        with pytest.raises(StateLocked, match="stop it first"):
            examined(root)
        lock.close()
    assert wrong(examined(root)) == set()


def test_findings_are_lines_or_json(
    killed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    root = states.copy_of(killed, tmp_path)
    a_long_lease_that_is_not_in_the_ledger(root)
    monkeypatch.setattr(fsck, "HostClock", states.StoppedClock)
    out = io.StringIO()
    assert fsck.run(states.config_of(root), out) == 1
    lines = out.getvalue().splitlines()
    assert [line.startswith("note: ") for line in lines] == [False, True, True]
    assert lines[0].startswith(f"{root}/state/data.mdb: the lease of key hash {LONG.hex()} (generation {FIRST}) was promised")
    assert "leased fsck: findings: 1; live leases: 2; in the ledger: 1; free pages: " in capsys.readouterr().err
    out = io.StringIO()
    assert fsck.run(states.config_of(root), out, as_json=True) == 1
    rows = json.loads(out.getvalue())
    assert [(row["level"], row["code"]) for row in rows] == [
        ("finding", "both.long_missing"), ("note", "both.late_deletes"), ("note", "next_start"),
    ]  # fmt: skip
    assert set(rows[0]) == {"level", "code", "path", "text"}
