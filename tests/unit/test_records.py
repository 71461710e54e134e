"""Records of another version are refused with advice; each single bit of one record is tried."""

from __future__ import annotations

import zlib

import pytest

from leased.errors import StateRefused
from leased.model import Lease, Tombstone
from leased.state.records import (
    RecordDamaged,
    confirmed,
    decode_lease,
    decode_tombstone,
    encode_lease,
    encode_tombstone,
    glances,
    seal,
    unseal,
)

LEASE = Lease("local", "me", "night", 7, b"p" * 16, 60.0, 1060.0, 1, b"r" * 16, 2**53 + 5, 1060.0, True, False, 10.0, 1010.0)


def resealed(record: bytes, version: int) -> bytes:
    """The same record as another version would have written it, its checksum right."""
    body = bytes((version,)) + record[1:-4]
    return body + zlib.crc32(body).to_bytes(4, "little")


@pytest.mark.parametrize("version", [0, 2, 255])
def test_a_record_of_an_unknown_version_is_refused_not_guessed(version: int) -> None:
    for read, record in (
        (decode_lease, encode_lease(LEASE)),
        (lambda raw: list(glances([(b"k", raw)])), encode_lease(LEASE)),
        (decode_tombstone, encode_tombstone(Tombstone(b"k" * 20, b"h" * 16, 1.0))),
        (lambda raw: unseal(raw, 1, "test"), seal(1, b"body")),
    ):
        with pytest.raises(StateRefused, match=f"version {version}, .*install the version that wrote it, or restore a backup"):
            read(resealed(record, version))  # type: ignore[operator]


def test_every_single_bit_of_a_lease_record_is_guarded() -> None:
    record = encode_lease(LEASE)
    for bit in range(len(record) * 8):
        changed = bytearray(record)
        changed[bit // 8] ^= 1 << bit % 8
        with pytest.raises(RecordDamaged):
            decode_lease(bytes(changed))


def test_a_record_whose_texts_do_not_fill_it_is_damaged_though_its_checksum_is_right() -> None:
    record = encode_lease(LEASE)
    body = record[:-4] + b"more"
    with pytest.raises(RecordDamaged, match="wrong length"):
        decode_lease(body + zlib.crc32(body).to_bytes(4, "little"))


def test_the_fence_of_a_lease_is_not_in_its_record() -> None:
    fence, mask = 6_000_000_000_000_000_001, 0x1234_5678_9ABC_DEF0
    record = encode_lease(LEASE._replace(sealed=fence ^ mask))
    assert fence.to_bytes(8, "little") not in record
    assert fence.to_bytes(8, "big") not in record
    assert str(fence).encode() not in record


def test_a_usual_record_is_as_small_as_the_map_is_sized_for() -> None:
    usual = Lease("local", "worker-0123456789abcdef", "nightly-build", 1, b"p" * 16, 60.0, 60.0, 0, b"r" * 16, 1, 60.0)
    assert len(encode_lease(usual)) <= 200


def test_confirming_a_record_takes_its_mark_and_nothing_else() -> None:
    marked = LEASE._replace(unflushed=True, previous_ttl=9.0, previous_deadline=1009.0)
    assert decode_lease(confirmed(encode_lease(marked))) == LEASE._replace(previous_ttl=0.0, previous_deadline=0.0)
    assert confirmed(encode_lease(marked)) == encode_lease(LEASE._replace(previous_ttl=0.0, previous_deadline=0.0))
