"""Records: frozen values to bytes and back.

Every record is: version byte, body, CRC-32 of both.  LMDB does not notice flipped bytes inside a page, so each record proves itself;
one that cannot is set aside by its reader and reported, and nothing is ever granted on it.

Upgrading: a new shape gets the next version byte; its decoder goes into the table beside the old one, which stays for as long as a
downgrade must be possible.  A reader that meets a version it does not know refuses the state (`StateRefused`), it does not guess.
"""

from __future__ import annotations

import struct
from typing import Final, NamedTuple
from zlib import crc32

from leased.digests import KEY_HASH_BYTES, PROOF_BYTES
from leased.errors import StateRefused
from leased.model import Lease, Tombstone

LEASE_VERSION: Final = 1
TOMBSTONE_VERSION: Final = 1
_HEAD = struct.Struct(
    "<BBQddQddd16s16sHHH"
)  # version flags generation ttl deadline sealed rid_until previous(2) proof rid lengths(3)
_GLANCE = struct.Struct("<BBQdd")
_TOMBSTONE = struct.Struct(f"<B{KEY_HASH_BYTES}s{PROOF_BYTES}sd")
_CRC = struct.Struct("<I")
_HAS_RID, _HAS_SCOPE, _PRESENTED, _UNFLUSHED, _BIND_SHIFT = 1, 2, 4, 8, 4
_NO_RID = bytes(16)


class RecordDamaged(ValueError):
    """A record whose checksum or shape is wrong.  The reader sets it aside."""


def encode_lease(lease: Lease) -> bytes:
    """About 1 µs."""
    (
        namespace,
        holder,
        scope,
        generation,
        proof,
        ttl,
        deadline,
        bind,
        rid,
        sealed,
        rid_until,
        presented,
        unflushed,
        p_ttl,
        p_deadline,
    ) = lease
    flags = bind << _BIND_SHIFT
    if rid:
        flags |= _HAS_RID
    if presented:
        flags |= _PRESENTED
    if unflushed:
        flags |= _UNFLUSHED
    space, label, unit = namespace.encode(), holder.encode(), b""
    if scope is not None:
        flags |= _HAS_SCOPE
        unit = scope.encode()
    body = (
        _HEAD.pack(
            LEASE_VERSION, flags, generation, ttl, deadline, sealed, rid_until, p_ttl, p_deadline, proof, rid or _NO_RID,
            len(space), len(label), len(unit),
        )
        + space
        + label
        + unit
    )  # fmt: skip
    return body + _CRC.pack(crc32(body))


def decode_lease(record: bytes) -> Lease:
    """About 1.5 µs.  Raises RecordDamaged, or StateRefused for a version of the future."""
    size = len(record) - 4
    if size < _HEAD.size or _CRC.unpack_from(record, size)[0] != crc32(record[:size]):
        raise RecordDamaged(f"a lease record of {len(record)} bytes does not match its checksum")
    (version, flags, generation, ttl, deadline, sealed, rid_until, p_ttl, p_deadline, proof, rid, n_space, n_label, n_unit) = (
        _HEAD.unpack_from(record)
    )
    if version != LEASE_VERSION:
        raise _future("lease", version)
    at = _HEAD.size
    label_at = at + n_space
    unit_at = label_at + n_label
    if unit_at + n_unit != size:
        raise RecordDamaged("a lease record has text of the wrong length")
    return Lease(
        record[at:label_at].decode(),
        record[label_at:unit_at].decode(),
        record[unit_at:size].decode() if flags & _HAS_SCOPE else None,
        generation,
        proof,
        ttl,
        deadline,
        flags >> _BIND_SHIFT,
        rid if flags & _HAS_RID else b"",
        sealed,
        rid_until,
        bool(flags & _PRESENTED),
        bool(flags & _UNFLUSHED),
        p_ttl,
        p_deadline,
    )


class Glance(NamedTuple):
    """What the start needs of a record, without the cost of all of it: a million are looked at."""

    generation: int
    ttl: float
    deadline: float
    unflushed: bool


def glance(record: bytes, at: int = 0) -> Glance:
    """The lease record that begins at byte `at` (within an envelope, whose checksum covers it).  Raises as decode_lease does."""
    size = len(record) - 4
    if size < at + _HEAD.size or _CRC.unpack_from(record, size)[0] != crc32(memoryview(record)[:size]):
        raise RecordDamaged(f"a lease record of {len(record)} bytes does not match its checksum")
    version, flags, generation, ttl, deadline = _GLANCE.unpack_from(record, at)
    if version != LEASE_VERSION:
        raise _future("lease", version)
    return Glance(generation, ttl, deadline, bool(flags & _UNFLUSHED))


class Entry(NamedTuple):
    """What the index needs of a record."""

    generation: int
    deadline: float
    namespace: bytes
    scope: bytes | None
    rid: bytes
    unflushed: bool


def entry(record: bytes) -> Entry:
    """Raises as decode_lease does."""
    size = len(record) - 4
    if size < _HEAD.size or _CRC.unpack_from(record, size)[0] != crc32(memoryview(record)[:size]):
        raise RecordDamaged(f"a lease record of {len(record)} bytes does not match its checksum")
    version, flags, generation, _, deadline, _, _, _, _, _, rid, n_space, n_label, n_unit = _HEAD.unpack_from(record)
    if version != LEASE_VERSION:
        raise _future("lease", version)
    at = _HEAD.size
    unit_at = at + n_space + n_label
    if unit_at + n_unit != size:
        raise RecordDamaged("a lease record has text of the wrong length")
    scope = record[unit_at:size] if flags & _HAS_SCOPE else None
    return Entry(generation, deadline, record[at : at + n_space], scope, rid if flags & _HAS_RID else b"", bool(flags & _UNFLUSHED))


def encode_tombstone(tombstone: Tombstone) -> bytes:
    body = _TOMBSTONE.pack(TOMBSTONE_VERSION, *tombstone)
    return body + _CRC.pack(crc32(body))


def decode_tombstone(record: bytes) -> Tombstone:
    if len(record) != _TOMBSTONE.size + 4 or _CRC.unpack_from(record, _TOMBSTONE.size)[0] != crc32(record[:-4]):
        raise RecordDamaged("a tombstone does not match its checksum")
    version, key_hash, holder_hash, until = _TOMBSTONE.unpack_from(record)
    if version != TOMBSTONE_VERSION:
        raise _future("tombstone", version)
    return Tombstone(key_hash, holder_hash, until)


def seal(version: int, body: bytes) -> bytes:
    """Version byte, body, checksum: the envelope of the small records (meta, switches, events)."""
    framed = bytes((version,)) + body
    return framed + _CRC.pack(crc32(framed))


def unseal(record: bytes, version: int, what: str) -> bytes:
    """The body again.  Raises RecordDamaged, or StateRefused for a version of the future."""
    if len(record) < 5 or _CRC.unpack_from(record, len(record) - 4)[0] != crc32(record[:-4]):
        raise RecordDamaged(f"the {what} record does not match its checksum")
    if record[0] != version:
        raise _future(what, record[0])
    return record[1:-4]


def _future(what: str, version: int) -> StateRefused:
    return StateRefused(
        f"a {what} record has version {version}, which this version of leased does not know: "
        "install the version that wrote it, or restore a backup made by this one"
    )
