"""The columns of lease records, and how both tables of leases compare."""

from __future__ import annotations

import zlib
from collections.abc import Iterator

import pytest

from leased.errors import StateRefused
from leased.model import Lease
from leased.state.ledger import NOT_A_COPY, LedgerLease, encode_ledger_lease
from leased.state.records import encode_lease
from leased.state.survey import Compared, Promise, Rows, compare, packed_promises, promises, unpacked_promises

BOOT = 1000.0
WAIT_OUT = 60.0


def key(n: int) -> bytes:
    return n.to_bytes(20, "big")


def lease(
    generation: int,
    ttl: float = 600.0,
    deadline: float = BOOT + 1.0,
    namespace: str = "local",
    scope: str | None = None,
    rid: bytes = b"",
    unflushed: bool = False,
) -> Lease:
    return Lease(namespace, "me", scope, generation, b"p" * 16, ttl, deadline, rid=rid, unflushed=unflushed)


MIXED = [
    (key(1), encode_lease(lease(11))),
    (key(2), encode_lease(lease(12, scope="night", rid=b"r" * 16, unflushed=True))),
    (key(3), b"\0"),
    (key(4), encode_lease(lease(14, namespace="uid:7", scope="ä"))),
    (key(5), encode_lease(lease(15))[:-1] + b"?"),
    (key(6), encode_lease(lease(16, namespace="uid:7", ttl=0.1, deadline=0.25))),
    (key(7), encode_lease(lease(17))),
]


def read(records: list[tuple[bytes, bytes]]) -> Rows:
    rows = Rows()
    rows.read(records)
    return rows


@pytest.mark.parametrize("take", [read, lambda records: Rows.unpacked(Rows.packed(records))], ids=["here", "packed"])
def test_all_that_is_wanted_of_sound_records_and_the_keys_of_the_others(take: object) -> None:
    rows = take(MIXED)  # type: ignore[operator]
    assert rows.keys == [key(n) for n in (1, 2, 4, 6, 7)]
    assert rows.generations == [11, 12, 14, 16, 17]
    assert rows.ttls.tolist() == [600.0, 600.0, 600.0, 0.1, 600.0]
    assert rows.deadlines == [BOOT + 1.0, BOOT + 1.0, BOOT + 1.0, 0.25, BOOT + 1.0]
    assert rows.spaces == [(0, b"local"), (2, b"uid:7"), (4, b"local")]
    assert rows.scopes == [(1, b"local", b"night"), (2, b"uid:7", "ä".encode())]
    assert rows.rids == [(b"r" * 16, key(2))]
    assert rows.unflushed == [key(2)]
    assert rows.damaged == [key(3), key(5)]


def test_none_are_none_packed_too() -> None:
    rows = Rows.unpacked(Rows.packed([]))
    assert (rows.keys, rows.spaces, rows.damaged) == ([], [], [])
    assert list(unpacked_promises(packed_promises([]))) == []


def test_a_text_of_the_wrong_length_is_damage_though_its_checksum_is_right() -> None:
    body = encode_lease(lease(1))[:-4] + b"more"
    rows = read([(key(1), body + zlib.crc32(body).to_bytes(4, "little"))])
    assert (rows.keys, rows.damaged) == ([], [key(1)])


def test_a_record_of_the_future_is_refused() -> None:
    body = b"\2" + encode_lease(lease(1))[1:-4]
    record = body + zlib.crc32(body).to_bytes(4, "little")
    for take in (read, Rows.packed):
        with pytest.raises(StateRefused, match="version 2"):
            take([(key(1), record)])


def test_strange_keys_are_not_packed_but_can_be_read() -> None:
    strange = [(b"short", encode_lease(lease(1))), (key(2), encode_lease(lease(2)))]
    assert read(strange).keys == [b"short", key(2)]
    for pack in (Rows.packed, packed_promises):
        with pytest.raises(ValueError, match="a key of 5 bytes"):
            pack(strange)


def theirs(*held: Promise) -> Iterator[Promise]:
    records = [(name, encode_ledger_lease(LedgerLease(lease(generation, ttl), NOT_A_COPY))) for name, generation, ttl in held]
    plain = list(promises(records))
    assert plain == list(unpacked_promises(packed_promises(records))) == list(held)
    return iter(plain)


def compared(ours: dict[int, Lease], *held: Promise) -> Compared:
    return compare(read([(key(n), encode_lease(each)) for n, each in sorted(ours.items())]), theirs(*held), WAIT_OUT, BOOT)


def test_what_both_have_is_known_and_nothing_is_to_be_done() -> None:
    found = compared({1: lease(11), 2: lease(12, 30.0)}, (key(1), 11, 600.0), (key(2), 12, 600.0))
    assert found == ({key(1): (11, 600.0), key(2): (12, 600.0)}, [], [], [])


@pytest.mark.parametrize(
    ("ours", "held", "lacking", "over"),
    [
        (lease(11, 600.0), None, True, False),
        (lease(11, WAIT_OUT), None, False, False),
        (lease(11, 600.0, BOOT), None, False, False),
        (lease(11, 600.0), (11, 599.0), True, False),
        (lease(11, 60.0), (11, 59.0), False, False),
        (lease(11, 600.0), (10, 600.0), True, True),
        (lease(11, 30.0), (10, 600.0), False, True),
        (lease(11, 600.0, BOOT), (11, 600.0), False, True),
        (lease(11, 600.0, BOOT), (10, 60.0), False, True),
    ],
)
def test_what_the_ledger_lacks_and_what_it_should_not_have(
    ours: Lease, held: tuple[int, float] | None, lacking: bool, over: bool
) -> None:
    around = {1: lease(1, 30.0), 9: lease(9, 30.0)}
    found = compared(around | {5: ours}, *([(key(5), *held)] if held is not None else []))
    assert found.lacking == ([key(5)] if lacking else [])
    assert found.over == ([(key(5), held[0])] if over and held is not None else [])
    assert found.strangers == []
    assert set(found.known) == ({key(5)} if held is not None else set())


def test_what_only_the_ledger_has_is_known_and_named_wherever_it_stands() -> None:
    held = [(key(n), n, 600.0) for n in (1, 2, 5, 8, 9)]
    found = compared({3: lease(3, 30.0), 5: lease(5), 7: lease(7)}, *held)
    assert found.strangers == [(key(n), n) for n in (1, 2, 8, 9)]
    assert found.lacking == [key(7)]
    assert list(found.known) == [name for name, _, _ in held]


def test_a_ttl_that_is_waited_out_is_nothing_to_rely_on() -> None:
    found = compared({1: lease(1, 60.0), 2: lease(2, 61.0)}, (key(1), 1, 60.0), (key(2), 2, 61.0), (key(3), 3, 5.0))
    assert found.known == {key(1): (1, 0.0), key(2): (2, 61.0), key(3): (3, 0.0)}


def test_a_key_and_a_generation_that_both_have_are_one_object() -> None:
    big = 2**50
    rows = read([(key(1), encode_lease(lease(big)))])
    known = compare(rows, theirs((key(1), big, 600.0)), WAIT_OUT, BOOT).known
    assert next(iter(known)) is rows.keys[0]
    assert known[key(1)][0] is rows.generations[0]
    again = read([(key(1), encode_lease(lease(big))), (key(2), encode_lease(lease(big + 1)))])
    again.share(known)
    assert again.keys == [key(1), key(2)]
    assert again.keys[0] is next(iter(known))
    assert again.generations[0] is known[key(1)][0]
