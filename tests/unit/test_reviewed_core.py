"""What a hostile reading of the core found, each as the story that showed it: leases, request ids, lines, switches, and what may grow."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from states import spoil
from worlds import World, world

from leased.config_keys import Limits
from leased.errors import StoreError
from leased.model import HeartbeatRequest, LeaseRequest, Reply, ResumeRequest, RevokeRequest
from leased.stop import copy_out

RID = b"r" * 22
MANY = 20


@pytest.fixture
def w() -> Iterator[World]:
    with world() as made:
        made.run()
        yield made


def key_hash(w: World, key: str = "k") -> bytes:
    return w.lessor.digests.key_hash("local", key)


def beat(w: World, scope: str, expect_within: float = 60.0) -> Reply:
    reply = w.ask("A", HeartbeatRequest(scope, expect_within))
    assert reply is not None
    return reply


# ---- what a power cut brings back


def test_revoking_by_hash_in_the_wrong_namespace_leaves_the_lease_in_the_ledger(w: World) -> None:
    told = w.granted("T", 100.0)
    (call,) = w.decide(("operator", RevokeRequest("a test", key_hash=key_hash(w), namespace="another")))
    w.calm()
    assert w.answers[call]["revoked"] is False
    kept = w.in_ledger()
    assert kept is not None, "a power cut now forgets a lease that nobody ended"
    assert kept.generation == told["generation"]
    w.power_cut()
    w.run()
    w.pass_time(21.0)
    refused = w.lease("B", 10.0)
    assert refused is not None
    assert refused["acquired"] is not True


def test_nobody_is_granted_a_lease_once_the_clean_mark_is_under_way(w: World) -> None:
    w.decide(("T", LeaseRequest("x", "T", 100.0)))
    w.flush_fails()
    w.calm_after_retries()
    assert w.journal.failures
    told = w.granted("A", 2.0)
    (waiting,) = w.decide(("B", LeaseRequest("k", "B", 10.0, wait=8.0)))
    w.lessor.gate.shut = "shutting_down"
    assert copy_out(w.lessor, w.start_up, w.switches)
    w.clock.elapsed += 3.0
    w.flush()
    assert waiting not in w.answers
    assert w.lessor.generations.last == told["generation"], "above the mark that was written, and given again after a reboot"


def test_a_generation_named_in_a_refusal_is_given_to_nobody_else_after_a_power_cut(w: World) -> None:
    generations = w.lessor.generations
    generations.last = generations.mark
    (held,) = w.decide(("A", LeaseRequest("k", "A", 10.0)))
    refused = w.lease("C", 10.0)
    assert held not in w.answers
    assert refused is not None
    assert refused["generation"] == generations.mark + 1
    w.power_cut()
    w.run()
    w.pass_time(21.0)
    assert w.granted("D", 10.0)["generation"] > refused["generation"]


# ---- a file that is another by now


def test_a_mistake_after_the_volatile_state_was_moved_away_opens_no_other_in_its_place(w: World) -> None:
    w.granted("A", 20.0)
    data = w.runtime / "data.mdb"
    data.rename(w.runtime / "aside")

    def mistake() -> None:
        raise RuntimeError("in the consequence of a decision, after which memory is rebuilt from the file")

    w.lessor.lane.run(w.lessor.lane.after, mistake)
    reply = w.lease("B", 20.0)
    assert reply is not None
    assert reply["acquired"] is None, "A holds the key"
    assert not w.leases.in_place(), "the floor is lost, and must be seen to be"
    assert not data.exists()


@pytest.mark.parametrize("name", ["leases", "ledger"])
def test_reopening_what_was_replaced_is_refused_and_leaves_the_old_file_open(w: World, name: str) -> None:
    store = getattr(w, name)
    data = store.directory / "data.mdb"
    data.rename(data.with_name("aside"))
    data.write_bytes(data.with_name("aside").read_bytes())
    with pytest.raises(StoreError, match="not the file that was opened"):
        store.reopen()
    assert not store.in_place()


# ---- records that cannot be read


def test_a_waiter_whose_spent_request_id_cannot_be_read_is_refused_and_the_daemon_lives(w: World) -> None:
    w.granted("A", 2.0)
    (waiting,) = w.decide(("B", LeaseRequest("k", "B", 10.0, wait=30.0, request_id=RID)))
    with w.leases.environment.begin(write=True) as transaction:
        transaction.put(w.lessor.digests.rid("local", RID)[0], b"damaged", db=w.leases.tombstones)
    w.pass_time(3.0)
    assert (w.answers[waiting]["acquired"], w.answers[waiting]["reason"]) == (False, "spent")
    w.granted("C", 10.0)


def test_a_stored_descriptor_of_a_record_that_cannot_be_read_is_closed_and_the_start_goes_on(w: World) -> None:
    generation = w.granted("A", 20.0)["generation"]
    with w.leases.environment.begin(write=True) as transaction:
        spoil(transaction, key_hash(w), w.leases.leases)
    stored, other = os.pipe()
    os.close(other)
    w.upkeep.binds.restored({f"bind.{key_hash(w).hex()}.{generation}": stored})
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(stored)


# ---- lines


def test_a_line_on_a_key_that_came_free_without_room_is_served_when_there_is_room(
    w: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    w.granted("A", 2.0)
    (waiting,) = w.decide(("B", LeaseRequest("k", "B", 10.0, wait=300.0)))
    with monkeypatch.context() as full:
        full.setattr(w.leases, "free_pages", lambda _: 0)
        w.lessor.room = 0
        w.pass_time(5.0)
        assert w.record() is None
        assert waiting not in w.answers
    w.pass_time(1.5)
    assert w.answers[waiting]["acquired"] is True


# ---- request ids


def test_a_request_id_stays_that_of_its_later_key_when_its_earlier_one_is_swept(w: World) -> None:
    w.lease("A", 1.0, "earlier", request_id=RID)
    w.clock.elapsed += 2.0
    later = w.lease("A", 20.0, "later", request_id=RID)
    assert later is not None
    assert later["acquired"] is True
    w.upkeep.tick()
    third = w.lease("A", 20.0, "third", request_id=RID)
    assert third is not None
    assert third.get("error") == "invalid_argument", third


@pytest.mark.interpreted
def test_request_ids_that_may_go_all_go_in_one_second(w: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("leased.upkeep.TOMBS_AT_ONCE", 4)
    for n in range(MANY):
        w.lease("A", 1.0, request_id=RID + b"%d" % n)
        w.release("A")
    assert w.lessor.tombs.total == MANY
    w.clock.elapsed += 10.0
    turns = 1
    while w.upkeep.tick() and turns < MANY:
        turns += 1
    assert w.lessor.tombs.total == 0
    assert turns > MANY // 4, "each turn is a transaction that others wait for"
    with w.leases.environment.begin() as transaction:
        assert list(w.leases.tombstone_rows(transaction)) == []


# ---- what may grow


def test_deadlines_that_move_to_and_fro_leave_nothing_behind(w: World) -> None:
    w.granted("A", 20.0)
    for _ in range(150):
        w.renew("A", 0.1)
        w.renew("A", 20.0)
        w.clock.elapsed += 0.11
        w.upkeep.tick()
    assert len(w.lessor.index._due) <= 65
    w.assert_kept()


@pytest.mark.interpreted
def test_retries_against_a_disk_that_hangs_fill_the_journal_only_so_far(w: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("leased.state.journal.MAX_WAITING", 10, raising=False)
    for _ in range(MANY):
        w.decide(("T", LeaseRequest("k", "T", 100.0)))
        w.pass_time(2.1, disk_works=False)
    assert len(w.journal) < 10 + 5
    refused = w.lease("T", 100.0)
    assert refused is not None
    assert (refused["acquired"], refused["reason"]) == (None, "store")
    short = w.lease("S", 10.0, "s")
    assert short is not None
    assert short["acquired"] is True, "what needs no flush goes on"
    renewed = w.renew("S", 100.0, "s")
    assert renewed is not None
    assert (renewed["acquired"], renewed["reason"]) == (None, "store")
    w.calm_after_retries()
    w.granted("T", 100.0)


@pytest.mark.interpreted
def test_heartbeats_against_a_disk_that_hangs_wait_once_for_each_switch(w: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("leased.state.journal.MAX_WAITING", 10, raising=False)
    for _ in range(40):
        beat(w, "task")
        w.pass_time(1.0, disk_works=False)
    assert len(w.journal) < 10 + 5
    w.calm()
    assert beat(w, "task")["armed"] is True


def test_heartbeats_of_one_switch_leave_nothing_behind(w: World) -> None:
    for _ in range(500):
        beat(w, "task", 86_400.0)
    assert len(w.switches._due) <= 65
    due = w.switches.next_due()
    assert due == pytest.approx(w.clock.now().boot + 86_400.0)


def test_scopes_that_were_missed_once_make_room_for_new_ones_and_those_armed_do_not() -> None:
    with world() as w:
        w.limits = Limits(max_switches_per_namespace=3)
        w.run()
        for n in range(3):
            beat(w, f"task-{n}", 1.0)
            w.pass_time(2.0)
        assert beat(w, "new-0").get("armed") is True
        packets = [w.ask("A", ResumeRequest(f"task-{n}")) for n in range(3)]
        assert [packet is not None and packet["empty"] for packet in packets] == [True, False, False], "the oldest miss goes first"
        assert [beat(w, f"new-{n}").get("armed") for n in (1, 2)] == [True, True]
        assert beat(w, "new-3")["error"] == "rate_limited"
