"""Sentences of the recovery that are easily read another way, each with the sequence that breaks if they are.

Units and callers as in test_recovery_rules.py: ttl 20 is short, 40 and 60 are long; A and B are of this host, R is not.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from worlds import World, world

from leased.model import LeaseRequest


@pytest.fixture
def w() -> Iterator[World]:
    with world() as made:
        yield made


def acquired(reply: object) -> object:
    """The verdict of an answer, or "held" while there is none."""
    return reply["acquired"] if isinstance(reply, dict) else "held"


def test_the_lease_records_of_a_restored_backup_do_not_come_back_live(w: World) -> None:
    w.run()
    w.granted("A", 40)
    w.renew("A", 20)
    copy = w.backup()
    w.pass_time(20)
    w.granted("R", 20)
    assert w.stop()
    w.restore(copy)
    w.run()
    assert w.record() is None
    assert acquired(w.renew("A", 20)) is None


def test_a_flush_that_hangs_counts_as_one_that_may_still_arrive(w: World) -> None:
    w.run()
    rid = b"r" * 22
    asked = w.decide(("A", LeaseRequest("k", "A", 40, request_id=rid)))[0]
    w.pass_time(3, disk_works=False)  # longer than a caller is kept waiting
    assert acquired(w.answers[asked]) is None
    w.pass_time(40, disk_works=False)
    other = w.decide(("R", LeaseRequest("k", "R", 20)))[0]
    assert other not in w.answers
    w.flush()  # the hung one lands: the record of a lease taken back is on the disk
    assert w.in_ledger() is not None
    assert other not in w.answers
    w.lose_runtime()
    w.run()
    w.lease("A", 40, request_id=rid)  # whoever comes back now: nobody else holds a true answer


def test_after_a_failed_flush_what_is_read_from_the_ledger_is_not_believed(w: World) -> None:
    w.run()
    w.granted("A", 20)
    assert w.renew("A", 40) is None
    w.flush_fails("new", "old")
    assert w.in_ledger() is not None
    assert w.renew("A", 40) is None  # what is read may not be on the disk
    w.power_cut("old")
    w.begin()


def test_after_a_failed_flush_a_record_that_cannot_be_read_may_still_be_on_the_disk(w: World) -> None:
    w.run()
    w.lease("A", 40)
    w.flush_fails("old", "new")
    assert w.in_ledger() is None
    other = w.decide(("R", LeaseRequest("k", "R", 20)))[0]
    assert other not in w.answers
    w.power_cut("old")
    w.run()
    assert w.record() is not None


def test_a_flush_that_arrives_answers_null_for_a_lease_that_has_been_released_meanwhile(w: World) -> None:
    w.run()
    w.granted("A", 20)
    call = w.decide(("A", LeaseRequest("k", "A", 40, fence=w.fences["A"][0])))[0]
    assert call not in w.answers
    reply = w.release("A")
    assert reply is not None
    assert reply["released"] is True
    w.flush()
    assert acquired(w.answers[call]) is None
    w.calm()
    assert w.in_ledger() is None


def test_a_flush_that_arrives_late_does_not_confirm_a_longer_renewal(w: World) -> None:
    w.run()
    w.granted("R", 20)
    first = w.decide(("R", LeaseRequest("k", "R", 40, fence=w.fences["R"][0])))[0]
    w.pass_time(3, disk_works=False)
    assert acquired(w.answers[first]) is None
    second = w.decide(("R", LeaseRequest("k", "R", 60, fence=w.fences["R"][0])))[0]
    w.flush()  # the first one
    assert second not in w.answers
    w.power_cut("old")
    w.begin()
    record = w.record()
    assert record is not None
    assert record.ttl == 40


def test_a_put_never_lowers_the_ttl_that_the_ledger_has(w: World) -> None:
    w.run()
    w.granted("R", 20)
    w.renew("R", 60)
    w.pass_time(3, disk_works=False)
    shorter = w.decide(("R", LeaseRequest("k", "R", 40, fence=w.fences["R"][0])))[0]
    w.flush()
    w.flush()
    assert acquired(w.answers[shorter]) is True
    assert acquired(w.renew("R", 60)) is True  # at once: the disk has 60 already
    w.power_cut()
    w.begin()
    record = w.record()
    assert record is not None
    assert record.ttl == 60


def test_a_runtime_directory_of_another_time_is_discarded_with_its_leases(w: World) -> None:
    w.run()
    w.granted("A", 20)
    assert w.stop()
    w.swap_runtime()
    w.witness.promises["k"].may_end = False
    w.run()
    w.renew("A", 40)
    w.calm()
    assert w.witness.promises["k"].ttl == 40
    w.kill()
    w.swap_runtime()
    taken = w.begin()
    assert taken.waiting
    record = w.record()
    assert record is not None
    assert record.ttl == 40


def test_a_start_that_finds_its_announced_start_in_the_ledger_makes_it_its_own_first(w: World) -> None:
    w.run()
    w.granted("A", 20)
    w.kill()
    w.begin()
    w.flush()
    w.kill("new", "new")  # the ledger has the next start, `leases` has not made it its own
    w.begin()
    w.flush()  # `leases` stores another next start
    w.kill()
    assert not w.begin().waiting
    assert w.record() is not None


def test_a_rebuilt_ledger_says_whose_it_is_from_its_first_transaction_on(w: World) -> None:
    w.run()
    w.granted("A", 20)
    w.kill()
    w.lose_state()
    w.begin()
    w.kill("new", "new")
    assert not w.begin().waiting
    assert w.record() is not None


def test_the_wait_is_over_only_when_the_ledger_says_so_too(w: World) -> None:
    w.run()
    w.lose_runtime()
    w.wait_out = 40
    w.run()
    w.pass_time(45, disk_works=False)
    assert acquired(w.lease("R", 40)) is None
    w.flush()
    w.pass_time(1)
    assert acquired(w.lease("R", 40)) is True
    w.lose_runtime()
    w.wait_out = 20
    w.run()
    w.pass_time(21)
    assert acquired(w.lease("A", 20)) is None


def test_during_the_wait_renewals_go_by_the_wait_that_the_ledger_knows(w: World) -> None:
    w.run()
    w.granted("R", 40)
    w.power_cut()
    w.wait_out = 60
    w.run()
    assert w.lessor.gate.wait_out == 20
    assert w.renew("R", 60) is None
    w.power_cut("old")
    w.wait_out = 20
    w.run()
    w.pass_time(41)
    w.granted("A", 20)


def test_a_renewal_told_during_the_wait_survives_another_power_cut(w: World) -> None:
    w.run()
    w.granted("R", 40)
    w.power_cut()
    w.wait_out = 60
    w.run()
    w.renew("R", 60)
    w.calm()
    assert w.witness.promises["k"].ttl == 60
    w.power_cut()
    w.wait_out = 20
    w.run()
    w.pass_time(45)
    assert acquired(w.lease("A", 20)) is False


def test_no_renewal_slips_between_a_lowered_wait_and_the_flush_that_says_so(w: World) -> None:
    """R is in the ledger with 40 s; the wait in force is 60 s, so its renewals up to that need no flush; the operator wants 20 s."""
    w.run()
    w.granted("R", 40)
    w.kill()
    w.wait_out = 60
    w.run()
    w.lose_runtime()
    w.wait_out = 20
    w.run()
    assert acquired(w.renew("R", 55)) is True
    w.pass_time(30)
    assert acquired(w.renew("R", 55)) is True
    w.pass_time(31, disk_works=False)  # the flush that ends the wait is under way
    assert w.flight is not None
    assert w.renew("R", 58) is None
    w.flush()
    record = w.in_ledger()
    assert record is not None
    assert record.ttl == 55
    w.power_cut("old")
    w.begin()
    record = w.record()
    assert record is not None
    assert record.ttl == 55


def test_a_flush_that_arrives_after_the_lease_has_lapsed_unnoticed_answers_null(w: World) -> None:
    w.run()
    call = w.decide(("A", LeaseRequest("k", "A", 40)))[0]
    w.clock.elapsed += 41  # nothing was swept meanwhile
    w.flush()
    assert acquired(w.answers[call]) is None
