"""Answers held back: by key, by flush, by time."""

from __future__ import annotations

from typing import Any

import pytest

from leased.calls import Call
from leased.holds import NEVER, Held, Holds, bound
from leased.model import Identity, InfoRequest


def held(name: str) -> Held:
    peer: Any = name
    return Held(Call(peer, None, InfoRequest(), Identity("uid:0", 0, 1, True)), {"acquired": True, "to": name})


@pytest.mark.parametrize(("ttl", "seconds"), [(3600.0, 2.0), (4.0, 2.0), (3.0, 1.5), (0.1, 0.05)])
def test_a_caller_is_held_for_two_seconds_or_half_the_ttl(ttl: float, seconds: float) -> None:
    assert bound(100.0, ttl) == 100.0 + seconds


def test_an_answer_is_ready_with_its_flush_and_not_before() -> None:
    holds = Holds()
    holds.add(b"k", 7, 3, 10.0, held("a"))
    assert holds.ready(2) == []
    ((key_hash, hold),) = holds.ready(3)
    assert (key_hash, hold.generation, [each.call.peer for each in hold.held]) == (b"k", 7, ["a"])
    assert len(holds) == 1
    assert holds.pop(b"k") is hold
    assert holds.pop(b"k") is None
    assert len(holds) == 0


def test_everyone_who_joins_waits_for_the_latest_flush_any_of_them_needs() -> None:
    holds = Holds()
    holds.add(b"k", 7, 3, 10.0, held("a"))
    holds.add(b"k", 7, 5, 12.0, held("b"))
    holds.add(b"k", 7, None, 14.0, held("c"))
    holds.add(b"k", 7, 4, 15.0, held("d"))
    assert holds.ready(4) == []
    ((_, hold),) = holds.ready(5)
    assert [each.call.peer for each in hold.held] == ["a", "b", "c", "d"]
    assert hold.bound == 10.0


def test_what_can_only_be_undone_is_never_ready() -> None:
    holds = Holds()
    holds.add(b"k", 7, 3, 10.0, held("a"))
    ((_, hold),) = holds.ready(3)
    hold.number = NEVER
    holds.add(b"k", 7, 9, 10.0, held("b"))
    assert holds.ready(10**9) == []
    assert holds.overdue(10.0) == [(b"k", hold)]


def test_the_next_bound_is_the_earliest_of_all() -> None:
    holds = Holds()
    assert holds.next_bound() is None
    holds.add(b"k", 7, 3, 10.0, held("a"))
    holds.add(b"l", 8, 3, 9.0, held("b"))
    holds.add_plain(3, 8.0, held("c"), {"revoked": None})
    assert holds.next_bound() == 8.0
    assert holds.overdue(8.9) == []
    assert [key_hash for key_hash, _ in holds.overdue(9.0)] == [b"l"]


def test_a_revocation_is_told_by_its_flush_or_told_null_by_its_failure_or_bound() -> None:
    holds = Holds()
    for number, until, name in ((3, 10.0, "a"), (4, 11.0, "b"), (5, 12.0, "c")):
        holds.add_plain(number, until, held(name), {"revoked": None, "to": name})
    assert [each.call.peer for each in holds.pop_plain(3)] == ["a"]
    failed = list(holds.pop_plain_failed(4, 0.0))
    assert [(each.call.peer, each.reply) for each in failed] == [("b", {"revoked": None, "to": "b"})]
    assert list(holds.pop_plain_failed(0, 11.9)) == []
    assert [each.call.peer for each in holds.pop_plain_failed(0, 12.0)] == ["c"]
    assert len(holds) == 0
