"""Lines of waiters in a whole lessor: who is served, when, and how often."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from worlds import World, volatile_state_fails, world

from leased.calls import Call
from leased.model import LeaseRequest, ReleaseRequest

RID = b"r" * 22


@pytest.fixture
def w() -> Iterator[World]:
    with world() as made:
        made.run()
        yield made


def waits(w: World, who: str, seconds: float = 60.0, **more: object) -> Call:
    (call,) = w.decide((who, LeaseRequest("k", who, 20.0, wait=seconds, **more)))  # type: ignore[arg-type]
    assert call not in w.answers
    return call


def test_a_released_lease_passes_to_the_head_of_the_line(w: World) -> None:
    w.granted("A", 20)
    first, second = waits(w, "B"), waits(w, "C")
    w.release("A")
    assert w.answers[first]["acquired"] is True
    assert second not in w.answers
    w.release("B")
    assert w.answers[second]["acquired"] is True


def test_a_lapsed_lease_passes_on_in_the_decision_that_notices_it(w: World) -> None:
    w.granted("A", 20)
    first = waits(w, "B")
    w.clock.elapsed += 21
    reply = w.lease("newcomer", 20)
    assert reply is not None
    assert (reply["acquired"], reply["held_by"]) == (False, "B")
    assert w.answers[first]["acquired"] is True


def test_a_newcomer_in_the_same_batch_as_the_release_cannot_slip_in(w: World) -> None:
    w.granted("A", 20)
    first = waits(w, "B")
    calls = w.decide(("A", ReleaseRequest("k", w.fences["A"][0])), ("newcomer", LeaseRequest("k", "newcomer", 20)))
    assert w.answers[first]["acquired"] is True
    assert w.answers[calls[1]]["acquired"] is False


def test_a_waiter_that_hung_up_is_passed_over(w: World) -> None:
    w.granted("A", 20)
    first, second = waits(w, "B"), waits(w, "C")
    w.caller("B").hung_up = True
    w.release("A")
    assert first not in w.answers
    assert w.answers[second]["acquired"] is True


@pytest.mark.parametrize("repeated", [True, False])
def test_a_grant_that_was_never_read_ends_with_its_connection_unless_a_repeat_was_told_of_it(w: World, repeated: bool) -> None:
    w.granted("A", 20)
    call = waits(w, "B", request_id=RID)
    w.release("A")
    first = w.caller("B")
    assert call.passed_on is not None
    first.undelivered.add(call.passed_on, 1)
    if repeated:
        (again,) = w.decide(("B again", LeaseRequest("k", "B", 20.0, request_id=RID)))
        assert w.answers[again]["acquired"] is True
    w.upkeep.binds.hung_up(first)
    assert w.check()["held_by"] == ("B" if repeated else None)


def test_the_end_of_a_wait_is_an_ordinary_refusal(w: World) -> None:
    w.granted("A", 20)
    call = waits(w, "B", 5.0)
    w.pass_time(4.9)
    assert call not in w.answers
    w.pass_time(0.2)
    assert (w.answers[call]["acquired"], w.answers[call]["reason"], w.answers[call]["held_by"]) == (False, "held", "A")
    assert w.check()["waiting"] == 0


def test_a_repeat_takes_the_place_of_the_call_that_waits(w: World) -> None:
    w.granted("A", 20)
    first = waits(w, "B", request_id=RID)
    second = waits(w, "C")
    again = waits(w, "B", request_id=RID)
    assert (w.answers[first]["acquired"], w.answers[first]["reason"]) == (None, "superseded")
    w.release("A")
    assert w.answers[again]["acquired"] is True
    assert second not in w.answers


def test_repeats_of_one_request_that_arrive_together_are_one_waiter(w: World) -> None:
    w.granted("A", 20)
    request = LeaseRequest("k", "B", 20.0, wait=60.0, request_id=RID)
    first, again = w.decide(("B", request), ("B", request))
    w.release("A")
    assert [w.answers[call]["acquired"] for call in (first, again)] == [None, True]
    w.release("B")
    assert w.check() == w.check() | {"held": False, "waiting": 0}


def test_a_request_id_used_for_two_keys_in_one_batch_is_refused_for_the_second(w: World) -> None:
    calls = w.decide(("A", LeaseRequest("a", "A", 20, request_id=RID)), ("A", LeaseRequest("b", "A", 20, request_id=RID)))
    assert w.answers[calls[0]]["acquired"] is True
    assert w.answers[calls[1]]["error"] == "invalid_argument"


def test_waiters_are_served_when_the_wait_after_a_start_is_over(w: World) -> None:
    w.granted("A", 20)
    w.lose_runtime()
    w.run()
    first, second = waits(w, "B"), waits(w, "C")
    w.pass_time(19)
    assert first not in w.answers
    w.pass_time(2)
    assert w.answers[first]["acquired"] is True
    assert second not in w.answers


def test_a_grant_that_the_end_of_another_wait_brings_about_keeps_its_generation_after_a_kill(w: World) -> None:
    """The wait after a start is over, and the first to look at the free key is a waiter whose own wait ends: the head of the line gets it."""
    w.granted("A", 20)
    w.lose_runtime()
    w.run()
    left = w.lessor.gate.no_grant_before - w.clock.now().boot
    first, second = waits(w, "B"), waits(w, "C", left + 0.5)
    w.pass_time(left)
    assert w.lessor.gate.settled
    w.clock.elapsed += 0.5
    w.upkeep.tick()
    assert w.answers[second]["reason"] == "held"
    generation = w.answers[first]["generation"]
    assert w.leases.read_last() == generation
    w.kill()
    w.run()
    assert w.granted("D", 20, key="other")["generation"] > generation


def test_a_waiter_on_a_record_that_was_damaged_is_answered_when_its_wait_ends(w: World) -> None:
    w.granted("A", 20)
    call = waits(w, "B", 5.0)
    with w.leases.environment.begin(write=True) as transaction:
        for key_hash, _, raw in list(w.leases.rows(transaction)):
            transaction.put(key_hash, raw[:-1] + bytes((raw[-1] ^ 1,)), db=w.leases.leases)
    w.witness.promises["k"].may_end = True  # it cannot be read: whoever asks is told null
    w.pass_time(6)
    assert w.answers[call]["acquired"] is None
    reply = w.lease("C", 20)
    assert reply is not None
    assert (reply["acquired"], reply["reason"]) == (None, "damaged")


@pytest.mark.parametrize("at", ["begin", "commit"])
def test_a_batch_that_cannot_be_written_leaves_every_waiter_in_its_place(w: World, at: str) -> None:
    w.granted("A", 20)
    first = waits(w, "B")
    with volatile_state_fails(w, at):
        reply = w.release("A")
        assert reply is not None
        assert reply["released"] is None
        assert first not in w.answers
    w.release("A")
    assert w.answers[first]["acquired"] is True


@pytest.mark.parametrize("at", ["begin", "commit"])
def test_a_repeat_that_could_not_be_written_leaves_the_first_call_waiting_and_each_is_answered_once(w: World, at: str) -> None:
    w.granted("A", 20)
    first = waits(w, "B", 10.0, request_id=RID)
    with volatile_state_fails(w, at):
        (again,) = w.decide(("B", LeaseRequest("k", "B", 20.0, wait=10.0, request_id=RID)))
    assert w.answers[again]["acquired"] is None
    assert first not in w.answers
    w.pass_time(11)
    assert w.answers[first]["acquired"] is False
