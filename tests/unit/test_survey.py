"""The columns of lease records, and how both tables of leases compare."""

from __future__ import annotations

import zlib

import pytest

from leased.errors import StateRefused
from leased.model import Lease
from leased.state.ledger import COPY_VERSION, LEASE_AT, NOT_A_COPY, LedgerLease, encode_ledger_lease, row_key_of
from leased.state.records import encode_lease, seal
from leased.state.survey import Compared, Promises, Rows, compare

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
    assert Promises.unpacked(Promises.packed([])).names == []


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
    with pytest.raises(ValueError, match="keys of another length"):
        Rows.packed(strange)
    held = [(b"short", in_ledger(1)), (row_key_of(key(2), 2), in_ledger(2))]
    assert Promises.of(held).names == [key(2)], "fsck tells of the other"


Held = tuple[bytes, int, float]


def theirs(*held: Held) -> Promises:
    records = [(row_key_of(name, generation), in_ledger(generation, ttl)) for name, generation, ttl in held]
    found = Promises.of(sorted(records))
    assert list(zip(found.names, found.generations, found.ttls, strict=True)) == list(held)
    assert found.older == []
    return found


def in_ledger(generation: int, ttl: float = 600.0) -> bytes:
    return encode_ledger_lease(LedgerLease(lease(generation, ttl), NOT_A_COPY))


def test_of_two_generations_of_a_key_the_later_one_counts_and_the_other_goes() -> None:
    both = [(row_key_of(key(n), generation), in_ledger(generation)) for n, generation in ((1, 10), (2, 11), (1, 12), (1, 14))]
    found = Promises.of(both)
    assert (found.names, found.generations) == ([key(1), key(2)], [14, 11])
    told = compare(read([(key(1), encode_lease(lease(14)))]), found, WAIT_OUT, BOOT)
    assert told.known == {key(1): (14, 600.0), key(2): (11, 600.0)}
    assert told.over == [(key(1), 10), (key(1), 12)]
    assert (told.lacking, told.strangers) == ([], [(key(2), 11)])


def test_a_record_of_the_ledger_that_cannot_be_read_promises_nothing_and_is_written_again_or_deleted() -> None:
    ruined = in_ledger(10)[:-1] + b"?"
    found = Promises.of([(row_key_of(key(n), 10 + n), ruined) for n in (0, 1, 2)] + [(row_key_of(key(3), 13), in_ledger(99))])
    assert found.ttls.tolist() == [0.0] * 4
    ours = [(key(0), encode_lease(lease(10))), (key(1), encode_lease(lease(7, 30.0)))]
    told = compare(read(ours), found, WAIT_OUT, BOOT)
    assert told.lacking == [key(0)]
    assert told.over == [(key(1), 11)]
    assert told.strangers == [(key(2), 12), (key(3), 13)]


def test_a_record_of_the_ledger_of_the_future_is_refused() -> None:
    for record in (
        seal(COPY_VERSION + 1, in_ledger(1)[1:-4]),
        seal(COPY_VERSION, in_ledger(1)[1:LEASE_AT] + b"\2" + in_ledger(1)[LEASE_AT + 1 : -4]),
    ):
        with pytest.raises(StateRefused, match="version"):
            Promises.packed([(row_key_of(key(1), 1), record)])


def compared(ours: dict[int, Lease], *held: Held) -> Compared:
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
    assert set(found.known) == {name for name, _, _ in held}


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


def test_many_leases_with_a_few_differences_compare_as_few_do() -> None:
    """Where long stretches are the same on both sides, they are not looked at one by one."""
    ours = {n: lease(n) for n in range(1000)}
    held = {n: (n, 600.0) for n in range(1000)}
    ours[200] = lease(200, deadline=BOOT)
    ours[201] = lease(201, 700.0)
    ours[640] = lease(100_640)
    del ours[500], held[700]
    held[2000] = 2000, 30.0
    found = compared(ours, *((key(n), *each) for n, each in held.items()))
    assert found.known == {key(n): (generation, ttl if ttl > WAIT_OUT else 0.0) for n, (generation, ttl) in held.items()}
    assert found.lacking == [key(201), key(640), key(700)]
    assert found.over == [(key(200), 200), (key(640), 640)]
    assert found.strangers == [(key(500), 500), (key(2000), 2000)]


@pytest.mark.parametrize("n", [0, 127, 128, 255, 299])
@pytest.mark.parametrize("what", ["generation", "ttl", "deadline", "ours", "theirs"])
def test_one_difference_is_found_wherever_it_is(n: int, what: str) -> None:
    ours = {each: lease(each) for each in range(300)}
    held = {each: (each, 600.0) for each in range(300)}
    match what:
        case "generation":
            held[n] = 1000, 600.0
        case "ttl":
            held[n] = n, 599.0
        case "deadline":
            ours[n] = lease(n, deadline=BOOT)
        case "ours":
            del held[n]
        case "theirs":
            del ours[n]
    found = compared(ours, *((key(each), *standing) for each, standing in held.items()))
    assert found.lacking == ([key(n)] if what in {"generation", "ttl", "ours"} else [])
    assert found.over == ([(key(n), held[n][0])] if what in {"generation", "deadline"} else [])
    assert found.strangers == ([(key(n), n)] if what == "theirs" else [])
    assert found.known == {key(each): standing for each, standing in held.items()}
