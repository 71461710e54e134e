"""Request ids of leases that ended early: kept until they may go, then handed out for deletion once."""

from __future__ import annotations

import pytest

from leased.tombs import BUCKET_SECONDS, Tombs


def rid(number: int) -> bytes:
    return number.to_bytes(16, "big")


@pytest.mark.parametrize("until", [0.0, 0.5, 3.999, 4.0, 100.3, 3600.0])
def test_a_row_is_kept_until_its_time_and_goes_soon_after(until: float) -> None:
    tombs = Tombs()
    tombs.add(rid(1), until)
    assert tombs.take_due(until - 0.001, 10) == []
    assert tombs.take_due(until, 10) == []
    due = until + BUCKET_SECONDS
    assert tombs.take_due(due, 10) == [rid(1)]
    assert tombs.take_due(due, 10) == []
    assert tombs.total == 0


def test_no_more_go_at_once_than_one_transaction_takes_and_none_is_lost() -> None:
    tombs = Tombs()
    for n in range(25):
        tombs.add(rid(n), float(n))
    assert tombs.total == 25
    taken: list[bytes] = []
    while batch := tombs.take_due(1000.0, 7):
        assert len(batch) <= 7
        taken += batch
        assert tombs.total == 25 - len(taken)
    assert sorted(taken) == [rid(n) for n in range(25)]


def test_what_is_not_due_stays() -> None:
    tombs = Tombs()
    tombs.add(rid(1), 1.0)
    tombs.add(rid(2), 100.0)
    assert tombs.take_due(50.0, 10) == [rid(1)]
    assert tombs.total == 1
    assert tombs.take_due(50.0, 10) == []
    assert tombs.take_due(104.0, 10) == [rid(2)]


def test_a_row_whose_deletion_failed_is_handed_out_again() -> None:
    tombs = Tombs()
    tombs.add(rid(1), 1.0)
    assert tombs.take_due(10.0, 10) == [rid(1)]
    tombs.add(rid(1), 10.0)
    assert tombs.take_due(20.0, 10) == [rid(1)]


def test_memory_is_sixteen_bytes_for_each() -> None:
    tombs = Tombs()
    for n in range(10_000):
        tombs.add(rid(n), 10.0)
    assert sum(len(rows) for rows in tombs._buckets.values()) == 160_000
