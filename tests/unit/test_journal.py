"""The account of what the ledger holds for certain, and of what a power cut might bring back."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import pytest

from leased.errors import StoreError
from leased.model import Lease
from leased.state.journal import DELETES_WAIT_SECONDS, FIRST_RETRY_SECONDS, MAX_RETRY_SECONDS, Journal
from leased.state.ledger import LedgerLease, Op

KEY, OTHER = b"k" * 20, b"o" * 20
FAULT = StoreError("broken")


def entry(generation: int, ttl: float = 100.0) -> LedgerLease:
    return LedgerLease(Lease("local", "me", None, generation, b"p" * 16, ttl, ttl))


class Disk:
    """Keeps what is under way until the test says how it ends."""

    def __init__(self) -> None:
        self.flights: list[tuple[list[Op], Callable[[Exception | None], None]]] = []

    def write(self, ops: list[Op], done: Callable[[Exception | None], None]) -> None:
        self.flights.append((ops, done))

    def end(self, error: Exception | None = None) -> list[Op]:
        ops, done = self.flights.pop()
        done(error)
        return ops


class Desk:
    """A journal with its disk and what it reported."""

    def __init__(self, *, settled: bool = True) -> None:
        self.disk = Disk()
        self.reports: list[tuple[str, int]] = []
        self.journal = Journal(
            self.disk,
            flushed=lambda number: self.reports.append(("flushed", number)),
            failed=lambda number, error: self.reports.append(("failed", number)),
        )
        if settled:
            self.flush()

    def flush(self, error: Exception | None = None, now: float = 0.0) -> list[Op]:
        self.journal.kick(now)
        return self.disk.end(error)


def test_a_journal_begins_unsettled_and_proves_the_disk_with_an_empty_flush() -> None:
    desk = Desk(settled=False)
    assert desk.journal.unsettled
    assert desk.journal.may_hold(KEY)
    assert not desk.journal.knows(KEY)
    assert desk.journal.end(KEY) == 1
    assert desk.flush() == []
    assert desk.reports == [("flushed", 1)]
    assert not desk.journal.unsettled
    assert not desk.journal.may_hold(KEY)
    assert desk.journal.end(KEY) is None


def test_what_the_start_has_read_counts_only_after_the_first_success() -> None:
    desk = Desk(settled=False)
    desk.journal.settle_with({KEY: (7, 100.0)})
    assert desk.journal.ttl_of(KEY, 7) == 0.0
    desk.flush(FAULT)
    assert desk.journal.ttl_of(KEY, 7) == 0.0
    desk.journal.tick(0.0)
    desk.flush(now=1.0)
    assert desk.journal.ttl_of(KEY, 7) == 100.0
    assert desk.journal.ttl_of(KEY, 8) == 0.0
    assert desk.journal.held() == [KEY]


def test_a_put_may_be_held_from_when_it_is_queued_and_counts_from_when_it_is_flushed() -> None:
    desk = Desk()
    number = desk.journal.put(KEY, entry(7))
    assert desk.journal.may_hold(KEY)
    assert desk.journal.ttl_of(KEY, 7) == 0.0
    assert not desk.journal.may_hold(OTHER)
    desk.flush()
    assert desk.reports[-1] == ("flushed", number)
    assert desk.journal.ttl_of(KEY, 7) == 100.0


def test_a_second_put_never_lowers_what_is_known_of_its_generation() -> None:
    desk = Desk()
    desk.journal.put(KEY, entry(7, 100.0))
    desk.flush()
    desk.journal.put(KEY, entry(7, 50.0))
    desk.flush()
    assert desk.journal.ttl_of(KEY, 7) == 100.0
    desk.journal.put(KEY, entry(8, 50.0))
    desk.flush()
    assert desk.journal.ttl_of(KEY, 7) == 0.0
    assert desk.journal.ttl_of(KEY, 8) == 50.0


def test_an_ended_lease_may_come_back_until_its_delete_is_flushed() -> None:
    desk = Desk()
    desk.journal.put(KEY, entry(7))
    desk.flush()
    number = desk.journal.end(KEY)
    assert number == desk.journal.open_number
    assert desk.journal.may_hold(KEY)
    assert desk.flush() == [("del", KEY, 7)]
    assert not desk.journal.may_hold(KEY)
    assert desk.journal.ttl_of(KEY, 7) == 0.0


@pytest.mark.parametrize("error", [None, FAULT], ids=["flushed", "uncertain"])
def test_a_put_takes_an_older_generation_of_its_key_along_whatever_was_said_of_its_end(error: Exception | None) -> None:
    desk = Desk()
    desk.journal.put(KEY, entry(7))
    desk.flush(error)
    desk.journal.tick(0.0)
    desk.journal.put(KEY, entry(8))
    assert desk.flush(now=9.0) == [("del", KEY, 7), ("put", KEY, entry(8))]
    assert desk.journal.ttl_of(KEY, 8) == 100.0
    desk.journal.put(KEY, entry(8, 200.0))
    assert desk.flush(now=9.0) == [("put", KEY, entry(8, 200.0))]


def test_the_delete_of_an_older_lease_says_nothing_of_a_newer_one() -> None:
    desk = Desk()
    desk.journal.put(KEY, entry(7))
    desk.flush()
    desk.journal.end(KEY)
    desk.journal.put(KEY, entry(8))
    desk.flush()
    assert desk.journal.may_hold(KEY)
    assert desk.journal.ttl_of(KEY, 8) == 100.0


def test_an_older_record_deleted_after_the_newer_was_put_takes_nothing_from_it() -> None:
    """The order of a start: what the ledger lacks, then what it should not have."""
    desk = Desk(settled=False)
    desk.journal.settle_with({KEY: (7, 100.0)})
    desk.journal.put(KEY, entry(8))
    desk.journal.append(("del", KEY, 7))
    desk.flush()
    assert desk.journal.may_hold(KEY)
    assert desk.journal.ttl_of(KEY, 8) == 100.0


def test_a_failed_put_may_be_on_the_disk_until_its_delete_is_flushed() -> None:
    desk = Desk()
    desk.journal.put(KEY, entry(7))
    desk.flush(FAULT)
    assert desk.journal.unsettled
    assert desk.journal.may_hold(OTHER)
    desk.journal.end(KEY)
    desk.journal.tick(0.0)
    desk.journal.kick(1.0)
    assert desk.disk.end() == [("del", KEY, 7)]  # the put is not tried again: whoever waited for it was told null
    assert not desk.journal.may_hold(KEY)


def test_a_failed_flush_settles_again_with_the_next_success() -> None:
    desk = Desk()
    desk.journal.put(KEY, entry(7))
    desk.flush()
    desk.journal.put(OTHER, entry(9))
    desk.flush(FAULT)
    assert desk.journal.ttl_of(KEY, 7) == 0.0
    desk.journal.tick(0.0)
    desk.journal.kick(1.0)
    assert desk.disk.end() == []
    assert desk.journal.ttl_of(KEY, 7) == 100.0
    assert desk.journal.ttl_of(OTHER, 9) == 0.0
    assert desk.journal.may_hold(OTHER)


def test_deletes_marks_and_switches_go_again_before_what_was_queued_meanwhile() -> None:
    desk = Desk()
    first: list[Op] = [("del", KEY, 7), ("mark", 5), ("switch", b"s", None), ("meta", {"wait_out": 1.0})]
    for op in first:
        desk.journal.append(op)
    desk.journal.kick(0.0)
    desk.journal.append(("mark", 6))
    desk.disk.end(FAULT)
    desk.journal.tick(0.0)
    desk.journal.kick(1.0)
    assert desk.disk.end() == [*first[:3], ("mark", 6)]


def test_one_flush_at_a_time_takes_all_that_is_queued() -> None:
    desk = Desk()
    first = desk.journal.put(KEY, entry(7))
    desk.journal.kick(0.0)
    second = desk.journal.put(OTHER, entry(8))
    third = desk.journal.append(("mark", 1))
    desk.journal.kick(0.0)
    assert len(desk.disk.flights) == 1
    assert (second, third) == (first + 1, first + 1)
    assert (len(desk.journal), desk.journal.busy) == (3, True)
    desk.disk.end()
    assert [op[0] for op in desk.flush()] == ["put", "mark"]


def test_with_nothing_to_say_a_settled_journal_leaves_the_disk_alone() -> None:
    desk = Desk()
    desk.journal.kick(0.0)
    assert desk.disk.flights == []
    desk.journal.kick(0.0, force=True)
    assert desk.disk.end() == []


def test_what_settles_an_unsettled_journal_is_the_flush_under_way_else_the_next() -> None:
    desk = Desk(settled=False)
    assert desk.journal.settling_number == 1
    desk.journal.kick(0.0)
    assert desk.journal.settling_number == 1
    assert desk.journal.end(KEY) == 1
    desk.disk.end(FAULT)
    assert desk.journal.settling_number == 2


def test_failures_are_tried_again_after_a_pause_that_doubles_to_a_bound() -> None:
    desk = Desk(settled=False)
    now, pauses = 0.0, []
    desk.flush(FAULT, now)
    for _ in range(8):
        desk.journal.kick(now + 1000.0)
        assert desk.disk.flights == []  # not before a tick has told the time of the failure
        desk.journal.tick(now)
        failed_at = now
        while not desk.disk.flights:
            now += 0.05
            desk.journal.tick(now)
        pauses.append(round(now - failed_at, 2))
        desk.disk.end(FAULT)
    assert pauses[0] == pytest.approx(FIRST_RETRY_SECONDS, abs=0.051)
    assert pauses[1] == pytest.approx(2 * FIRST_RETRY_SECONDS, abs=0.051)
    assert pauses[-1] == pytest.approx(MAX_RETRY_SECONDS, abs=0.051)
    assert all(later > sooner - 0.06 for sooner, later in pairwise(pauses))


def test_the_account_is_brought_up_to_date_before_anybody_is_told() -> None:
    seen: list[float] = []
    disk = Disk()
    journal = Journal(
        disk, flushed=lambda number: seen.append(journal.ttl_of(KEY, 7)), failed=lambda number, error: seen.append(-1.0)
    )
    journal.put(KEY, entry(7))
    journal.kick(0.0)
    disk.end()
    assert seen == [100.0]


def test_deletions_nobody_waits_for_go_with_the_next_flush_or_alone_after_a_moment() -> None:
    desk = Desk()
    desk.journal.put(KEY, entry(7))
    desk.flush()
    assert desk.journal.forget(KEY)
    desk.journal.kick(10.0)
    assert desk.disk.flights == []  # a client that takes and releases in turn pays for one flush, not for two
    assert desk.journal.next_try() == 10.0 + DELETES_WAIT_SECONDS
    number = desk.journal.put(OTHER, entry(8))
    assert desk.flush(now=10.001) == [("del", KEY, 7), ("put", OTHER, entry(8))]
    assert desk.reports[-1] == ("flushed", number)
    assert desk.journal.forget(OTHER)
    desk.journal.kick(20.0)
    desk.journal.kick(20.0 + DELETES_WAIT_SECONDS)
    assert desk.disk.end() == [("del", OTHER, 8)]
    assert not desk.journal.may_hold(OTHER)
    assert desk.journal.next_try() is None


def test_a_deletion_somebody_waits_for_is_flushed_at_once() -> None:
    desk = Desk()
    desk.journal.put(KEY, entry(7))
    desk.flush()
    desk.journal.forget(KEY)
    desk.journal.kick(10.0)
    assert desk.journal.end(KEY) == desk.journal.open_number
    assert desk.flush(now=10.0) == [("del", KEY, 7)] * 2
