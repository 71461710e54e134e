"""Records come back as they were written, and no flipped bit goes unnoticed."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from leased.errors import StateRefused
from leased.model import MAX_HOLDER_BYTES, MAX_SCOPE_BYTES, Lease, Tombstone
from leased.state.ledger import COPY_VERSION, LEASE_AT, NOT_A_COPY, LedgerLease, decode_ledger_lease, encode_ledger_lease
from leased.state.records import (
    RecordDamaged,
    decode_lease,
    decode_tombstone,
    encode_lease,
    encode_tombstone,
    glances,
    seal,
    unseal,
)
from leased.state.survey import Rows

unhurried = settings(max_examples=50, deadline=None)  # other tests may have the processor meanwhile


def text(most_bytes: int) -> st.SearchStrategy[str]:
    """Text that fits in so many bytes of UTF-8, and texts that fill them."""
    few = st.text("aZ09 .:/\0\nß€日🔒", max_size=20)
    return few | st.just("ä" * (most_bytes // 2)) | st.just("x" * most_bytes) | st.just("🔒" * (most_bytes // 4))


seconds = st.floats(0.0, 1e9, allow_nan=False)
leases = st.builds(
    Lease,
    namespace=text(256),
    holder=text(MAX_HOLDER_BYTES),
    scope=st.none() | text(MAX_SCOPE_BYTES),
    generation=st.integers(0, 2**53 - 1),
    proof=st.binary(min_size=16, max_size=16),
    ttl=seconds,
    deadline=seconds,
    bind=st.integers(0, 2),
    rid=st.just(b"") | st.binary(min_size=16, max_size=16),
    sealed=st.integers(0, 2**64 - 1),
    rid_until=seconds,
    presented=st.booleans(),
    unflushed=st.booleans(),
    previous_ttl=seconds,
    previous_deadline=seconds,
)
tombstones = st.builds(Tombstone, st.binary(min_size=20, max_size=20), st.binary(min_size=16, max_size=16), seconds)


def flipped(record: bytes, bit: int) -> bytes:
    bit %= len(record) * 8
    changed = bytearray(record)
    changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)


@unhurried
@given(leases)
def test_a_lease_comes_back_as_it_was(lease: Lease) -> None:
    back = decode_lease(encode_lease(lease))
    assert back == lease
    assert [type(value) for value in back] == [type(value) for value in lease]


def glance(record: bytes, at: int = 0, sealed: int = 0) -> tuple[Any, ...]:
    """(generation, ttl, deadline) as a start sees it."""
    found = list(glances([(b"k", record)], at, sealed))
    if not found:
        raise RecordDamaged
    return found[0][2:]


def glance_ledger_lease(record: bytes) -> tuple[Any, ...]:
    return glance(record, LEASE_AT, COPY_VERSION)


def entry(record: bytes) -> tuple[Any, ...]:
    rows = Rows()
    rows.read([(b"k", record)])
    if rows.damaged:
        assert (rows.damaged, rows.keys) == ([b"k"], [])
        raise RecordDamaged
    assert rows.keys == [b"k"]
    [[_, namespace]] = rows.spaces
    scope, rid = next(iter(rows.scopes), None), next(iter(rows.rids), None)
    assert scope is None or scope[:2] == (0, namespace)
    assert rid is None or rid[1] == b"k"
    return (
        *(rows.generations[0], rows.ttls[0], rows.deadlines[0], namespace, scope and scope[2], rid[0] if rid else b""),
        rows.unflushed == [b"k"],
    )


@unhurried
@given(leases)
def test_the_short_looks_at_a_lease_agree_with_the_whole_of_it(lease: Lease) -> None:
    record = encode_lease(lease)
    assert glance(record) == (lease.generation, lease.ttl, lease.deadline)
    namespace, scope = lease.namespace.encode(), None if lease.scope is None else lease.scope.encode()
    assert entry(record) == (lease.generation, lease.ttl, lease.deadline, namespace, scope, lease.rid, lease.unflushed)


@unhurried
@given(tombstones)
def test_a_tombstone_comes_back_as_it_was(tombstone: Tombstone) -> None:
    assert decode_tombstone(encode_tombstone(tombstone)) == tombstone


@unhurried
@given(leases, seconds | st.just(NOT_A_COPY))
def test_a_lease_in_the_ledger_comes_back_as_it_was(lease: Lease, remaining: float) -> None:
    record = encode_ledger_lease(LedgerLease(lease, remaining))
    assert decode_ledger_lease(record) == LedgerLease(lease, remaining)
    assert glance_ledger_lease(record) == (lease.generation, lease.ttl, lease.deadline)


@unhurried
@given(st.integers(0, 255), st.binary(max_size=300))
def test_an_envelope_gives_back_what_was_sealed(version: int, body: bytes) -> None:
    assert unseal(seal(version, body), version, "test") == body


@unhurried
@given(leases, st.integers(0), st.sampled_from([decode_lease, glance, entry]))
def test_no_flipped_bit_of_a_lease_goes_unnoticed(lease: Lease, bit: int, read: Any) -> None:
    with pytest.raises((RecordDamaged, StateRefused)):
        read(flipped(encode_lease(lease), bit))


@unhurried
@given(tombstones, st.integers(0))
def test_no_flipped_bit_of_a_tombstone_goes_unnoticed(tombstone: Tombstone, bit: int) -> None:
    with pytest.raises((RecordDamaged, StateRefused)):
        decode_tombstone(flipped(encode_tombstone(tombstone), bit))


@unhurried
@given(leases, st.integers(0))
def test_no_flipped_bit_of_a_ledger_lease_goes_unnoticed(lease: Lease, bit: int) -> None:
    for read in (decode_ledger_lease, glance_ledger_lease):
        with pytest.raises((RecordDamaged, StateRefused)):
            read(flipped(encode_ledger_lease(LedgerLease(lease)), bit))


@unhurried
@given(st.binary(max_size=60), st.integers(0))
def test_no_flipped_bit_of_an_envelope_goes_unnoticed(body: bytes, bit: int) -> None:
    with pytest.raises((RecordDamaged, StateRefused)):
        unseal(flipped(seal(1, body), bit), 1, "test")


@unhurried
@given(leases, st.integers(0), st.binary(max_size=8))
def test_a_cut_or_lengthened_record_is_damaged(lease: Lease, cut: int, more: bytes) -> None:
    record = encode_lease(lease)
    for changed in (record[: cut % len(record)], record + more + b"\0"):
        with pytest.raises(RecordDamaged):
            decode_lease(changed)


@unhurried
@given(st.binary(max_size=400))
def test_bytes_that_are_no_record_are_damaged_and_nothing_else_is_raised(raw: bytes) -> None:
    for read in (decode_lease, decode_tombstone, decode_ledger_lease, glance_ledger_lease, glance, entry):
        with pytest.raises((RecordDamaged, StateRefused)):
            read(raw)
