"""What is remembered beside the records."""

from __future__ import annotations

import pytest

from leased.index import Index
from leased.model import Lease


def lease(generation: int, deadline: float = 100.0, namespace: str = "local", scope: str | None = None, rid: bytes = b"") -> Lease:
    return Lease(namespace, "me", scope, generation, b"p" * 16, 60.0, deadline, rid=rid)


def test_the_next_due_is_the_earliest_deadline() -> None:
    index = Index()
    assert index.next_due() is None
    index.granted(b"a", lease(1, 30.0), "a")
    index.granted(b"b", lease(2, 20.0), "b")
    assert index.next_due() == 20.0
    index.ended(b"b", lease(2, 20.0))
    assert index.next_due() == 30.0


def test_a_later_renewal_costs_nothing_and_a_sooner_one_is_seen_in_time() -> None:
    index = Index()
    index.granted(b"a", lease(1, 30.0), None)
    index.moved(b"a", 50.0)
    assert index.next_due() == 30.0
    assert index.pop_due(30.0, 10) == [b"a"]
    index.again(b"a", 50.0)
    assert index.pop_due(49.9, 10) == []
    index.moved(b"a", 10.0)
    assert index.next_due() == 10.0
    assert index.pop_due(10.0, 10) == [b"a"]
    assert index.pop_due(60.0, 10) == []  # the entry at 50 is stale


def test_no_more_are_due_at_once_than_one_transaction_takes() -> None:
    index = Index()
    for n in range(10):
        index.granted(b"%d" % n, lease(n + 1, float(n)), None)
    assert index.pop_due(100.0, 4) == [b"0", b"1", b"2", b"3"]
    assert len(index.pop_due(100.0, 100)) == 6


def test_a_lease_due_at_this_very_instant_is_due() -> None:
    index = Index()
    index.granted(b"a", lease(1, 30.0), None)
    assert index.pop_due(29.999, 1) == []
    assert index.pop_due(30.0, 1) == [b"a"]


def test_looking_again_at_a_lease_that_is_gone_is_harmless() -> None:
    index = Index()
    index.again(b"a", 5.0)
    assert index.next_due() is None


def test_scopes_and_namespaces_are_forgotten_with_their_last_lease() -> None:
    index = Index()
    one, two = lease(1, scope="night"), lease(2, scope="night")
    index.granted(b"a", one, "a")
    index.granted(b"b", two, "b")
    assert index.of_scope("local", "night") == [b"a", b"b"]
    assert index.of_scope("other", "night") == []
    assert (index.count("local"), len(index), index.namespaces()) == (2, 2, ["local"])
    index.ended(b"a", one)
    assert index.of_scope("local", "night") == [b"b"]
    index.ended(b"b", two)
    assert (index.of_scope("local", "night"), index.count("local"), index.namespaces(), index.texts) == ([], 0, [], {})


def test_pages_go_on_after_the_last_generation_seen() -> None:
    index = Index()
    for n in range(1, 6):
        index.granted(b"%d" % n, lease(n, namespace="even" if n % 2 == 0 else "odd", scope="s" if n > 2 else None), None)
    assert list(index.of_namespace("odd", 0)) == [(1, b"1"), (3, b"3"), (5, b"5")]
    assert list(index.of_namespace("odd", 1)) == [(3, b"3"), (5, b"5")]
    assert list(index.of_namespace("odd", 2, "s")) == [(3, b"3"), (5, b"5")]
    assert list(index.of_namespace("odd", 5)) == []
    assert list(index.of_all(2)) == [(3, b"3"), (4, b"4"), (5, b"5")]


def test_a_page_may_be_taken_while_leases_end() -> None:
    index = Index()
    for n in range(1, 4):
        index.granted(b"%d" % n, lease(n), None)
    page = index.of_namespace("local", 0)
    assert next(page) == (1, b"1")
    index.ended(b"2", lease(2))
    assert [key_hash for _, key_hash in page] == [b"2", b"3"]  # whoever reads the page looks each record up


def test_the_heap_does_not_grow_with_leases_that_come_and_go() -> None:
    index = Index()
    index.granted(b"stays", lease(1, 1e6), None)
    for n in range(2, 5000):
        index.granted(b"k", lease(n, 1000.0 + n), None)
        index.ended(b"k", lease(n, 1000.0 + n))
    assert len(index._due) <= 65
    assert index.pop_due(2e6, 10) == [b"stays"]


@pytest.mark.parametrize("rid", [b"", b"r" * 16])
def test_a_request_id_is_found_while_its_lease_lives(rid: bytes) -> None:
    index = Index()
    index.granted(b"a", lease(1, rid=rid), None)
    assert index.rids == ({rid: b"a"} if rid else {})
    index.ended(b"a", lease(1, rid=rid))
    assert index.rids == {}
