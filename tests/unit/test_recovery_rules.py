"""What a crash, a power cut, a failing disk or an operator may not break, one short story for each rule of the recovery.

wait_out is 20 s here unless said otherwise: a ttl of 20 is short (waited out), 40 and 60 are long (flushed).  A and B are processes of this host,
R is a caller elsewhere who outlives its power.  The world's witness checks every answer; see witnesses.py.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from worlds import World, world

from leased.model import MAX_TTL_SECONDS, LeaseRequest


@pytest.fixture
def w() -> Iterator[World]:
    with world() as made:
        yield made


def grant_after(w: World, who: str, ttl: float, key: str = "k") -> bool:
    """One attempt, with a disk that works: was it granted?"""
    (call,) = w.decide((who, _lease(who, ttl, key)))
    w.calm()
    return w.answers[call]["acquired"] is True


def _lease(who: str, ttl: float, key: str = "k") -> LeaseRequest:
    return LeaseRequest(key, who, ttl)


def test_nothing_is_granted_until_leases_that_may_be_forgotten_have_lapsed(w: World) -> None:
    w.run()
    w.granted("A", 20)
    w.lose_runtime()
    assert w.run().waiting
    reply = w.lease("B", 20)
    assert reply is not None
    assert (reply["acquired"], reply["reason"]) == (None, "recovering")
    assert 19.0 < reply["retry_after_seconds"] <= 20.0
    w.pass_time(20)
    assert grant_after(w, "B", 20)


def test_the_wait_counts_from_when_the_state_was_locked_not_from_the_boot(w: World) -> None:
    w.run()
    w.pass_time(500)
    w.granted("A", 20)
    w.lose_runtime()
    locked_at = w.clock.now().boot
    taken = w.run()
    assert taken.meta.no_grant_before == locked_at + 20
    w.pass_time(locked_at + 19.9 - w.clock.now().boot)
    assert not grant_after(w, "B", 20)
    w.pass_time(0.2)
    assert grant_after(w, "B", 20)


def test_the_wait_is_the_longer_of_the_stored_and_the_configured_one(w: World) -> None:
    w.wait_out = 40
    w.run()
    w.granted("A", 40)
    w.lose_runtime()
    w.wait_out = 20
    w.run()
    w.pass_time(30)
    assert not grant_after(w, "B", 20)
    w.pass_time(10)
    assert grant_after(w, "B", 20)

    w.lose_runtime()
    w.wait_out = 40
    w.run()
    w.pass_time(30)
    assert not grant_after(w, "A", 20)


def test_a_key_is_not_granted_again_while_a_power_cut_could_bring_its_old_lease_back(w: World) -> None:
    w.run()
    w.granted("A", 40)
    w.renew("A", 20)
    w.pass_time(20, disk_works=False)  # lapsed; the delete of its record is under way
    assert w.record() is None
    assert w.in_ledger() is not None
    (call,) = w.decide(("R", _lease("R", 20)))
    assert call not in w.answers
    w.lose_runtime()
    w.run()
    assert w.record() is not None
    reply = w.renew("A", 20)
    assert reply is not None
    assert reply["acquired"] is True  # late, but nobody else was told yes


def test_the_grant_leaves_once_the_old_record_is_gone_from_the_disk(w: World) -> None:
    w.run()
    w.granted("A", 40)
    w.renew("A", 20)
    w.pass_time(20, disk_works=False)
    (call,) = w.decide(("R", _lease("R", 20)))
    assert call not in w.answers
    w.flush()  # the delete that was under way; the grant has asked for one of its own
    w.calm()
    assert w.answers[call]["acquired"] is True
    assert w.in_ledger() is None
    w.power_cut()
    w.run()
    assert w.record() is None


def test_a_renewal_beyond_what_is_waited_out_is_true_only_after_its_flush(w: World) -> None:
    w.run()
    w.granted("A", 20)
    assert w.renew("A", 40) is None
    w.lose_runtime()
    w.begin()  # the ttl of the grant may end here; nobody was promised more


def test_a_renewal_that_was_told_comes_back_after_the_runtime_directory_is_lost(w: World) -> None:
    w.run()
    w.granted("A", 20)
    w.renew("A", 40)
    w.calm()
    assert w.witness.promises["k"].ttl == 40
    w.lose_runtime()
    w.begin()
    assert w.record() is not None


def test_a_start_takes_the_clean_mark_away_before_it_grants(w: World) -> None:
    w.run()
    assert w.stop()
    taken = w.run()
    assert not taken.waiting
    w.granted("A", 40)
    w.lose_runtime()
    assert w.begin().waiting
    assert w.record() is not None


def test_leases_granted_after_a_backup_are_waited_out_after_its_restore(w: World) -> None:
    w.run()
    w.lease("R", 40)
    copy = w.backup()
    w.flush()
    assert w.witness.promises["k"].holder == "R"
    w.power_cut()
    w.restore(copy)
    w.run()
    w.pass_time(39)
    assert not grant_after(w, "A", 20)


def test_a_restored_start_waits_for_the_longest_ttl_there_is(w: World) -> None:
    w.run()
    w.lease("R", 40)
    copy = w.backup()
    w.flush()
    w.kill()
    w.restore(copy)
    began = w.clock.elapsed
    assert w.run().story == "a restored backup"
    w.pass_time(began + MAX_TTL_SECONDS - 0.1 - w.clock.elapsed)
    assert not grant_after(w, "A", 20)
    w.pass_time(1)
    assert grant_after(w, "A", 20)


@pytest.mark.parametrize("crash", ["killed", "power cut"])
def test_a_crash_during_the_wait_after_a_restore_does_not_skip_it(w: World, crash: str) -> None:
    w.run()
    copy = w.backup()
    w.granted("R", 3000)
    w.kill()
    w.restore(copy)
    w.run()
    w.pass_time(1000)
    if crash == "killed":
        w.kill()
    else:
        w.power_cut()
    assert w.run().waiting
    w.pass_time(1990)
    assert not grant_after(w, "A", 20)


def test_a_restore_without_holders_waits_for_nobody(w: World) -> None:
    w.run()
    copy = w.backup()
    w.kill()
    w.restore(copy, no_holders=True)
    assert not w.run().waiting
    assert grant_after(w, "A", 20)


def test_a_grant_taken_back_by_a_failed_flush_is_not_told_to_who_repeats_the_request(w: World) -> None:
    w.run()
    rid = b"r" * 22
    (call,) = w.decide(("A", _lease("A", 40)._replace(request_id=rid)))
    w.flush_fails("new", "old")
    assert w.answers[call]["acquired"] is None
    assert w.lease("A", 40, request_id=rid) is None or w.witness.promises == {}
    w.power_cut("old")
    w.begin()
    assert w.record() is None


def test_a_grant_taken_back_leaves_no_record_that_keeps_the_key_from_others(w: World) -> None:
    w.run()
    w.lease("A", 40)
    w.flush_fails("new", "old")
    assert w.in_ledger() is not None
    assert w.record() is None
    w.pass_time(3)
    assert w.in_ledger() is None
    reply = w.lease("B", 20)
    assert reply is not None
    assert reply["acquired"] is True


def test_leases_above_a_lowered_wait_are_put_in_the_ledger_first(w: World) -> None:
    w.wait_out = 40
    w.run()
    w.granted("R", 40)
    w.kill()
    w.wait_out = 20
    w.run()
    w.power_cut()
    w.witness.promises["k"].may_end = False  # the wait that covers it now is too short: it must be in the ledger
    w.begin()
    assert w.record() is not None


def test_revoked_is_told_only_when_no_power_cut_can_bring_the_fence_back(w: World) -> None:
    w.run()
    w.granted("R", 40)
    call = w.revoke()
    assert call not in w.answers
    w.power_cut("old")
    w.run()
    reply = w.renew("R", 20)
    assert reply is not None
    assert reply["acquired"] is True  # nobody was told that it is dead

    call = w.revoke()
    w.calm()
    assert w.answers[call]["revoked"] is True
    w.power_cut()
    w.run()
    reply = w.renew("R", 20)
    assert reply is not None
    assert reply["acquired"] is None
    w.pass_time(20)
    reply = w.renew("R", 20)
    assert reply is not None
    assert (reply["acquired"], reply["reason"]) == (False, "lapsed")


@pytest.mark.parametrize("ttl", [20, 40])
def test_after_a_clean_stop_nothing_is_forgotten_though_the_runtime_directory_is_lost(w: World, ttl: float) -> None:
    w.run()
    w.granted("A", ttl)
    w.pass_time(5)
    before = w.record()
    assert before is not None
    assert w.stop()
    w.lose_runtime()
    w.witness.promises["k"].may_end = False
    taken = w.run()
    assert not taken.waiting
    assert w.record() == before  # the very deadline: this is the same boot
    assert grant_after(w, "B", 20, "other")


@pytest.mark.parametrize("ttl", [20, 40])
def test_after_a_clean_reboot_a_lease_has_what_remained_of_it(w: World, ttl: float) -> None:
    w.run()
    w.granted("R", ttl)
    w.pass_time(5)
    remained = w.check()["expires_in_seconds"]
    assert w.stop()
    w.power_cut()
    w.witness.promises["k"].may_end = False
    assert not w.run().waiting
    assert w.check()["expires_in_seconds"] == pytest.approx(remained, abs=0.2)
    assert grant_after(w, "B", 20, "other")
