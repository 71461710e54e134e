"""What is remembered beside the records."""

from __future__ import annotations

import pytest

from leased.index import Index
from leased.model import Lease
from leased.state.records import encode_lease
from leased.state.survey import Rows


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
    assert list(page) == [(3, b"3")]


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


def loaded(*leases: tuple[bytes, Lease]) -> Index:
    rows = Rows()
    rows.read([(key_hash, encode_lease(each)) for key_hash, each in leases])
    index = Index()
    index.load(rows)
    return index


def test_leases_loaded_in_the_order_of_their_keys_are_listed_in_that_of_their_generations() -> None:
    index = loaded((b"a", lease(9, scope="s")), (b"b", lease(3)), (b"c", lease(7, namespace="other")), (b"d", lease(5, scope="s")))
    assert list(index.of_namespace("local", 0)) == [(3, b"b"), (5, b"d"), (9, b"a")]
    assert list(index.of_namespace("local", 3)) == [(5, b"d"), (9, b"a")]
    assert list(index.of_namespace("local", 4)) == [(5, b"d"), (9, b"a")]
    assert list(index.of_namespace("local", 0, "s")) == [(5, b"d"), (9, b"a")]
    assert list(index.of_namespace("other", 0)) == [(7, b"c")]
    assert list(index.of_all(3)) == [(5, b"d"), (7, b"c"), (9, b"a")]
    assert index.of_scope("local", "s") == [b"d", b"a"]
    assert (len(index), index.count("local"), b"c" in index, b"e" in index) == (4, 3, True, False)


def test_what_is_granted_after_a_load_comes_behind_it_and_what_has_ended_is_left_out() -> None:
    one, three, five = lease(1), lease(3), lease(5)
    index = loaded((b"a", five), (b"b", one), (b"c", three))
    index.granted(b"d", lease(6), None)
    index.ended(b"c", three)
    index.granted(b"c", lease(7), None)
    assert list(index.of_namespace("local", 0)) == [(1, b"b"), (5, b"a"), (6, b"d"), (7, b"c")]
    for after, found in ((1, [5, 6, 7]), (4, [5, 6, 7]), (5, [6, 7]), (6, [7]), (7, [])):
        assert [generation for generation, _ in index.of_namespace("local", after)] == found
    index.ended(b"a", five)
    index.ended(b"b", one)
    assert list(index.of_namespace("local", 0)) == [(6, b"d"), (7, b"c")]
    assert list(index.of_namespace("local", 6)) == [(7, b"c")]


def test_a_namespace_that_was_empty_for_a_while_begins_anew() -> None:
    index = loaded((b"a", lease(5)))
    index.ended(b"a", lease(5))
    assert (index.namespaces(), list(index.of_namespace("local", 0))) == ([], [])
    index.granted(b"b", lease(6), None)
    assert list(index.of_namespace("local", 0)) == [(6, b"b")]


def test_what_has_ended_of_those_loaded_is_not_looked_at_for_ever() -> None:
    leases = [(b"%04d" % n, lease(10_000 - n)) for n in range(100)]
    index = loaded(*leases)
    for key_hash, each in leases[1:]:
        index.ended(key_hash, each)
    assert list(index.of_namespace("local", 0)) == [(10_000, b"0000")]
    assert len(index._loaded["local"]) == 1


def test_a_record_that_cannot_be_read_any_more_is_forgotten_though_it_was_loaded() -> None:
    index = loaded((b"a", lease(5, scope="s", rid=b"r" * 16)), (b"b", lease(3)))
    index.forget(b"a")
    assert list(index.of_namespace("local", 0)) == [(3, b"b")]
    assert (index.of_scope("local", "s"), index.rids, len(index)) == ([], {}, 1)


def test_a_load_finds_the_next_due_the_request_ids_and_the_unflushed() -> None:
    index = loaded((b"a", lease(5, 30.0, rid=b"r" * 16)), (b"b", lease(3, 20.0)._replace(unflushed=True)))
    assert (index.next_due(), index.rids, index.unflushed) == (20.0, {b"r" * 16: b"a"}, [b"b"])
    assert index.pop_due(30.0, 10) == [b"b", b"a"]
