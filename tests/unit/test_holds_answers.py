"""Answers that wait for the ledger: each call is answered exactly once, and true only when it is true."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from worlds import World, volatile_state_fails, world

from leased.model import LeaseRequest, RenewRequest
from leased.upkeep import RETRY_SECONDS

RID = b"r" * 22


@pytest.fixture
def w() -> Iterator[World]:
    with world() as made:
        made.run()
        yield made


def test_a_short_grant_is_answered_without_any_flush(w: World) -> None:
    flushes = w.journal.flushes
    reply = w.lease("A", 20)
    assert reply is not None
    assert reply["acquired"] is True
    assert w.flight is None
    assert w.journal.flushes == flushes


@pytest.mark.parametrize("ttl", [20.1, 40, 3600])
def test_a_long_grant_is_answered_by_its_flush(w: World, ttl: float) -> None:
    (call,) = w.decide(("A", LeaseRequest("k", "A", ttl)))
    assert call not in w.answers
    assert w.check()["held"] is True
    w.flush()
    assert w.answers[call]["acquired"] is True
    record = w.record()
    assert record is not None
    assert not record.unflushed


def test_in_the_strict_mode_every_fresh_grant_is_flushed() -> None:
    with world(wait_out=0) as strict:
        strict.run()
        (call,) = strict.decide(("A", LeaseRequest("k", "A", 0.1)))
        assert call not in strict.answers
        strict.flush()
        assert strict.answers[call]["acquired"] is True


def test_many_grants_share_one_flush(w: World) -> None:
    calls = w.decide(*[(f"h{n}", LeaseRequest(f"k{n}", f"h{n}", 40)) for n in range(5)])
    w.flush()
    assert [w.answers[call]["acquired"] for call in calls] == [True] * 5
    assert w.flight is None


def test_what_is_asked_during_a_flush_waits_for_the_next(w: World) -> None:
    (first,) = w.decide(("A", LeaseRequest("a", "A", 40)))
    (second,) = w.decide(("B", LeaseRequest("b", "B", 40)))
    w.flush()
    assert first in w.answers
    assert second not in w.answers
    w.flush()
    assert w.answers[second]["acquired"] is True


@pytest.mark.parametrize("next_one", [True, False])
def test_a_waiter_that_hangs_up_while_its_grant_is_flushed_leaves_no_lease(w: World, next_one: bool) -> None:
    w.granted("A", 20)
    (first,) = w.decide(("B", LeaseRequest("k", "B", 40, wait=60)))
    (second,) = w.decide(("C", LeaseRequest("k", "C", 20, wait=60))) if next_one else (None,)
    w.release("A")
    assert first not in w.answers
    w.caller("B").hung_up = True
    w.flush()
    w.calm()
    assert w.check()["held_by"] == ("C" if next_one else None)
    assert second is None or w.answers[second]["acquired"] is True
    assert first not in w.answers or w.answers[first]["acquired"] is None
    assert w.in_ledger() is None


def test_a_repeat_that_is_still_there_keeps_the_grant_of_a_waiter_that_hung_up(w: World) -> None:
    w.granted("A", 20)
    w.decide(("B", LeaseRequest("k", "B", 40, wait=60, request_id=RID)))
    w.release("A")
    w.caller("B").hung_up = True
    (again,) = w.decide(("B again", LeaseRequest("k", "B", 40, request_id=RID)))
    w.flush()
    w.calm()
    assert w.answers[again]["acquired"] is True
    assert w.check()["held_by"] == "B"


def test_a_repeat_of_an_unflushed_grant_waits_with_it_and_hears_the_same(w: World) -> None:
    calls = [w.decide(("A", LeaseRequest("k", "A", 40, request_id=RID)))[0] for _ in range(3)]
    assert not any(call in w.answers for call in calls)
    w.flush()
    fences = {w.answers[call]["fence"] for call in calls}
    assert len(fences) == 1
    assert {w.answers[call]["generation"] for call in calls} == {w.fences["A"][1]}


def test_a_slow_flush_takes_the_grant_back_after_two_seconds_or_half_the_ttl(w: World) -> None:
    w.wait_out = 0
    w.kill()
    w.run()
    for ttl, bound in ((40.0, 2.0), (1.0, 0.5)):
        (call,) = w.decide(("A", LeaseRequest("k", "A", ttl)))
        w.pass_time(bound - 0.01, disk_works=False)
        assert call not in w.answers
        w.pass_time(0.02, disk_works=False)
        assert (w.answers[call]["acquired"], w.answers[call]["reason"]) == (None, "ledger_slow")
        assert w.record() is None
        w.calm()


def test_a_grant_that_cannot_be_taken_back_at_once_is_told_why_it_failed_not_that_the_disk_was_slow(w: World) -> None:
    (call,) = w.decide(("A", LeaseRequest("k", "A", 40)))
    with volatile_state_fails(w):
        w.flush_fails()
    assert call not in w.answers
    w.pass_time(RETRY_SECONDS + 0.01)
    assert (w.answers[call]["acquired"], w.answers[call]["reason"]) == (None, "store")
    assert w.record() is None


def test_a_grant_taken_back_has_forgotten_its_request_id(w: World) -> None:
    w.decide(("A", LeaseRequest("k", "A", 40, request_id=RID)))
    w.flush_fails()
    (again,) = w.decide(("A", LeaseRequest("k", "A", 40, request_id=RID)))
    w.pass_time(1.9)
    w.calm()
    assert w.answers[again]["acquired"] is True


def test_a_failed_renewal_gives_the_former_ttl_and_deadline_back_and_the_fence_stays_good(w: World) -> None:
    w.granted("A", 20)
    before = w.record()
    assert before is not None
    w.clock.elapsed += 5
    (call,) = w.decide(("A", RenewRequest("k", "A", w.fences["A"][0], 40)))
    w.flush_fails()
    assert w.answers[call]["acquired"] is None
    after = w.record()
    assert after is not None
    assert (after.ttl, after.deadline, after.unflushed) == (before.ttl, before.deadline, False)
    reply = w.renew("A", 20)
    assert reply is not None
    assert reply["acquired"] is True


def test_two_renewals_that_fail_give_back_what_was_before_the_first(w: World) -> None:
    w.granted("A", 20)
    before = w.record()
    assert before is not None
    calls = w.decide(*[("A", RenewRequest("k", "A", w.fences["A"][0], ttl)) for ttl in (40, 50)])
    w.flush_fails()
    assert [w.answers[call]["acquired"] for call in calls] == [None, None]
    after = w.record()
    assert after is not None
    assert (after.ttl, after.deadline) == (before.ttl, before.deadline)


def test_a_longer_renewal_keeps_the_first_waiting_until_both_are_flushed(w: World) -> None:
    w.granted("A", 20)
    (first,) = w.decide(("A", RenewRequest("k", "A", w.fences["A"][0], 40)))
    (second,) = w.decide(("A", RenewRequest("k", "A", w.fences["A"][0], 60)))
    w.flush()
    assert first not in w.answers
    assert second not in w.answers
    w.flush()
    assert w.answers[first]["acquired"] is w.answers[second]["acquired"] is True


def test_a_renewal_within_what_the_ledger_has_needs_no_flush(w: World) -> None:
    w.granted("A", 60)
    for ttl in (60, 40, 20, None):
        reply = w.renew("A", ttl)
        assert reply is not None
        assert reply["acquired"] is True
    assert w.flight is None


def test_whoever_waits_behind_a_grant_taken_back_is_answered(w: World) -> None:
    w.decide(("A", LeaseRequest("k", "A", 40)))
    (waiting,) = w.decide(("B", LeaseRequest("k", "B", 20, wait=60.0)))
    w.flush_fails()
    assert waiting not in w.answers  # it has the key now, but the ledger may still have the other's record
    record = w.record()
    assert record is not None
    assert record.holder == "B"
    w.pass_time(3)
    assert waiting in w.answers


def test_a_lapse_answers_what_still_waits_for_its_flush(w: World) -> None:
    w.granted("A", 20)
    (call,) = w.decide(("A", RenewRequest("k", "A", w.fences["A"][0], 40)))
    w.revoke()
    w.calm()
    assert (w.answers[call]["acquired"], w.answers[call]["reason"]) == (None, "ended")


def test_a_flush_that_cannot_be_noted_in_the_volatile_state_answers_null(w: World) -> None:
    (call,) = w.decide(("A", LeaseRequest("k", "A", 40)))
    with volatile_state_fails(w):
        w.flush()
        assert w.answers[call]["acquired"] is None
    w.pass_time(50)
    w.granted("B", 20)


def test_a_grant_that_cannot_be_taken_back_now_is_never_told_and_taken_back_later(w: World) -> None:
    (call,) = w.decide(("A", LeaseRequest("k", "A", 40)))
    with volatile_state_fails(w):
        w.flush_fails()
        assert call not in w.answers
        w.pass_time(3)
        assert call not in w.answers
    w.pass_time(3)
    assert w.answers[call]["acquired"] is None
    assert w.record() is None


def test_revoked_waits_for_two_seconds_at_most(w: World) -> None:
    w.granted("A", 40)
    call = w.revoke()
    w.pass_time(2.1, disk_works=False)
    assert w.answers[call]["revoked"] is None
    assert w.record() is None


def test_the_daemon_wakes_for_the_retry_of_a_failed_flush(w: World) -> None:
    w.decide(("A", LeaseRequest("k", "A", 40)))
    w.flush_fails()
    w.upkeep.tick()
    assert w.upkeep.next_wake() <= w.clock.now().boot + 0.11


def test_a_generation_above_the_mark_is_told_only_when_the_mark_is_flushed(w: World) -> None:
    w.pass_time(100, disk_works=False)  # the next mark is under way, and the clock has passed the last
    w.lessor.generations.last = w.lessor.generations.mark - 1
    w.granted_now("A", "a")  # the mark itself
    (call,) = w.decide(("B", LeaseRequest("b", "B", 20)))
    assert call not in w.answers
    w.power_cut("old")
    w.run()
    w.pass_time(21)
    (again,) = w.decide(("B", LeaseRequest("b", "B", 20)))
    w.calm()
    assert w.answers[again]["generation"] > w.fences["A"][1]


def test_a_grant_above_the_mark_leaves_with_the_flush_of_the_mark(w: World) -> None:
    w.pass_time(100, disk_works=False)
    w.lessor.generations.last = w.lessor.generations.mark - 1
    w.granted_now("A", "a")
    (call,) = w.decide(("B", LeaseRequest("b", "B", 20)))
    w.flush()
    w.calm()
    assert w.answers[call]["acquired"] is True
    meta = w.ledger.read_meta()
    assert meta is not None
    assert w.answers[call]["generation"] <= meta.mark
