"""Lines of waiters: first come, first served, and nobody who has left is found again."""

from __future__ import annotations

from typing import Any

from leased.calls import Call
from leased.model import Ask, Identity, LeaseRequest
from leased.queues import Queues, Waiter

KEY, OTHER = b"k", b"o"


class Line:
    """A peer that only has an identity."""

    def __init__(self) -> None:
        self.identity = Identity("local", 1000, 1, False)


def waiter(peer: Any, key_hash: bytes = KEY, until: float = 10.0, rid: bytes = b"", namespace: str = "local") -> Waiter:
    call = Call(peer, 1, LeaseRequest("k", "h", wait=1.0))
    return Waiter(call, call.request, Ask(namespace, rid=rid), key_hash, until)  # type: ignore[arg-type]


def test_the_first_to_come_is_the_first_in_line() -> None:
    queues, peer = Queues(), Line()
    first, second = waiter(peer), waiter(peer)
    assert not queues
    queues.add(first)
    queues.add(second)
    assert queues
    assert queues.first(KEY) is first
    assert queues.first(OTHER) is None
    queues.remove(first)
    assert queues.first(KEY) is second
    queues.remove(second)
    assert queues.first(KEY) is None
    assert not queues


def test_one_that_a_decision_has_taken_is_passed_over_until_it_is_given_back() -> None:
    queues, peer = Queues(), Line()
    first, second = waiter(peer), waiter(peer)
    queues.add(first)
    queues.add(second)
    first.taken = True
    assert queues.first(KEY) is second
    assert queues.waiting(KEY) == 1
    first.taken = False
    assert queues.first(KEY) is first


def test_a_repeat_takes_the_very_place() -> None:
    queues, peer, other = Queues(), Line(), Line()
    first, second, third = waiter(peer), waiter(peer, rid=b"r"), waiter(peer)
    for each in (first, second, third):
        queues.add(each)
    again = waiter(other, rid=b"r", until=99.0)
    queues.replace(second, again)
    assert second.gone
    assert queues.of_rid(b"r") is again
    assert queues.length(KEY) == 3
    assert queues.of_peer(other) == [again]
    queues.remove(first)
    assert queues.first(KEY) is again
    queues.remove(again)
    assert queues.first(KEY) is third
    assert queues.of_rid(b"r") is None


def test_removing_twice_is_harmless() -> None:
    queues, peer = Queues(), Line()
    first, second = waiter(peer), waiter(peer)
    queues.add(first)
    queues.add(second)
    queues.remove(first)
    queues.remove(first)
    assert (queues.total, queues.length(KEY), queues.of_namespace("local")) == (1, 1, 1)


def test_ends_come_in_their_order_and_only_once() -> None:
    queues, peer = Queues(), Line()
    late, soon, gone = waiter(peer, until=30.0), waiter(peer, until=10.0), waiter(peer, until=5.0)
    for each in (late, soon, gone):
        queues.add(each)
    assert queues.next_end() == 5.0
    queues.remove(gone)
    assert queues.next_end() == 10.0
    assert queues.ended(9.99) == []
    assert queues.ended(10.0) == [soon]
    assert queues.ended(10.0) == []
    queues.remove(soon)
    assert queues.next_end() == 30.0


def test_counts_are_by_key_by_namespace_and_by_connection() -> None:
    queues, peer, other = Queues(), Line(), Line()
    queues.add(waiter(peer))
    queues.add(waiter(peer, OTHER))
    queues.add(waiter(other, namespace="uid:1"))
    assert (queues.length(KEY), queues.length(OTHER), queues.total) == (2, 1, 3)
    assert (queues.of_namespace("local"), queues.of_namespace("uid:1"), queues.of_namespace("none")) == (2, 1, 0)
    assert len(queues.of_peer(peer)) == 2
    assert sorted(queues.waited_for()) == [KEY, OTHER]
    for each in queues.of_peer(peer):
        queues.remove(each)
    assert queues.of_peer(peer) == []
    assert queues.waited_for() == [KEY]


def test_nothing_grows_with_waiters_that_come_and_go() -> None:
    queues, peer = Queues(), Line()
    stays = waiter(peer, until=1e9)
    queues.add(stays)
    for n in range(3000):
        passing = waiter(peer, until=1000.0 + n, rid=b"%d" % n)
        queues.add(passing)
        queues.remove(passing)
    assert len(queues._ends) <= 65
    assert len(queues._lines[KEY]) <= 33
    assert queues.first(KEY) is stays
    queues.remove(stays)
    assert (queues._lines, queues._lengths, queues._spaces, queues._of_peer, queues._of_rid) == ({}, {}, {}, {}, {})


def test_a_repeat_whose_transaction_failed_gives_the_place_back() -> None:
    queues, peer = Queues(), Line()
    first, second = waiter(peer, rid=b"r"), waiter(peer)
    queues.add(first)
    queues.add(second)
    again = waiter(peer, rid=b"r", until=50.0)
    queues.replace(first, again)
    queues.put_back(again, first)
    assert again.gone
    assert not first.gone
    assert queues.first(KEY) is first
    assert queues.of_rid(b"r") is first
    assert queues.total == 2
    assert queues.ended(10.0).count(first) == 1
