"""Records: frozen values to bytes and back.

Every record is: version byte, body, CRC-32 of both.  LMDB does not notice flipped bytes inside a page, so each record proves itself;
one that cannot is set aside by its reader and reported, and nothing is ever granted on it.

Upgrading: a new shape gets the next version byte; its decoder goes into the table beside the old one, which stays for as long as a
downgrade must be possible.  A reader that meets a version it does not know refuses the state (`StateRefused`), it does not guess.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterable, Iterator
from typing import Final

from leased.digests import KEY_HASH_BYTES, PROOF_BYTES
from leased.errors import StateRefused
from leased.model import Lease, Tombstone, made

LEASE_VERSION: Final = 1
TOMBSTONE_VERSION: Final = 1
_HEAD: Final = struct.Struct(
    "<BBQddQddd16s16sHHH"
)  # version flags generation ttl deadline sealed rid_until previous(2) proof rid lengths(3)
GLANCE: Final = struct.Struct("<BBQdd")
_PREVIOUS: Final = struct.Struct("<dd")
_PREVIOUS_AT: Final = struct.calcsize("<BBQddQd")
_TOMBSTONE: Final = struct.Struct(f"<B{KEY_HASH_BYTES}s{PROOF_BYTES}sd")
_CRC: Final = struct.Struct("<I")
crc32: Final = zlib.crc32
_RESIDUE: Final = 0x2144DF1C  # the CRC-32 of anything followed by its own CRC-32: no slice is needed to check one
_HAS_RID, _HAS_SCOPE, _PRESENTED, _UNFLUSHED, _BIND_SHIFT = 1, 2, 4, 8, 4
_NO_RID: Final = bytes(16)

# For survey.py, which takes in a million records and has no time for a call for each.
LOOK: Final = struct.Struct("<BBQdd64xHHH")  # version flags generation ttl deadline lengths(3)
TEXTS_AT: Final = _HEAD.size
RID_AT: Final = struct.calcsize("<BBQddQddd16s")
RESIDUE: Final = _RESIDUE
HAS_RID: Final = _HAS_RID
HAS_SCOPE: Final = _HAS_SCOPE
UNFLUSHED: Final = _UNFLUSHED


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
    if size < _HEAD.size or crc32(record) != _RESIDUE:
        raise RecordDamaged(f"a lease record of {len(record)} bytes does not match its checksum")
    (version, flags, generation, ttl, deadline, sealed, rid_until, p_ttl, p_deadline, proof, rid, n_space, n_label, n_unit) = (
        _HEAD.unpack_from(record)
    )
    if version != LEASE_VERSION:
        raise future("lease", version)
    at = _HEAD.size
    label_at = at + n_space
    unit_at = label_at + n_label
    if unit_at + n_unit != size:
        raise RecordDamaged("a lease record has text of the wrong length")
    lease: Lease = made(
        Lease,
        (
            record[at:label_at].decode(), record[label_at:unit_at].decode(), record[unit_at:size].decode() if flags & _HAS_SCOPE else None,
            generation, proof, ttl, deadline, flags >> _BIND_SHIFT, rid if flags & _HAS_RID else b"", sealed, rid_until,
            flags & _PRESENTED != 0, flags & _UNFLUSHED != 0, p_ttl, p_deadline,
        ),
    )  # fmt: skip
    return lease


def glance(raw: bytes, at: int = 0, sealed: int = 0) -> tuple[int, float, float] | None:
    """(generation, ttl, deadline) of one lease record, None if it is damaged; `at`, `sealed` and what is raised as for `glances`."""
    for _, _, generation, ttl, deadline in glances(((b"", raw),), at, sealed):
        return generation, ttl, deadline
    return None


def confirmed(raw: bytes) -> bytes:
    """A sound lease record without its mark `unflushed` and what a failed flush would have given back."""
    body = bytearray(raw[:-4])
    body[1] &= ~_UNFLUSHED
    _PREVIOUS.pack_into(body, _PREVIOUS_AT, 0.0, 0.0)
    return bytes(body) + _CRC.pack(crc32(body))


def glances(rows: Iterable[tuple[bytes, bytes]], at: int = 0, sealed: int = 0) -> Iterator[tuple[bytes, bytes, int, float, float]]:
    """(key, raw, generation, ttl, deadline) of every lease record that is sound.

    `at`: where the lease begins within an envelope of version `sealed`, whose checksum covers it.  Raises StateRefused for a version
    of the future.
    """
    unpack, least = GLANCE.unpack_from, at + _HEAD.size + 4
    for key, raw in rows:
        if len(raw) < least or crc32(raw) != _RESIDUE:
            continue
        if at and raw[0] != sealed:
            raise future("ledger lease", raw[0])
        version, _, generation, ttl, deadline = unpack(raw, at)
        if version != LEASE_VERSION:
            raise future("lease", version)
        yield key, raw, generation, ttl, deadline


def encode_tombstone(tombstone: Tombstone) -> bytes:
    body = _TOMBSTONE.pack(TOMBSTONE_VERSION, *tombstone)
    return body + _CRC.pack(crc32(body))


def decode_tombstone(record: bytes) -> Tombstone:
    if len(record) != _TOMBSTONE.size + 4 or crc32(record) != _RESIDUE:
        raise RecordDamaged("a tombstone does not match its checksum")
    version, key_hash, holder_hash, until = _TOMBSTONE.unpack_from(record)
    if version != TOMBSTONE_VERSION:
        raise future("tombstone", version)
    return Tombstone(key_hash, holder_hash, until)


def seal(version: int, body: bytes) -> bytes:
    """Version byte, body, checksum: the envelope of the small records (meta, switches, events)."""
    framed = bytes((version,)) + body
    return framed + _CRC.pack(crc32(framed))


def unseal(record: bytes, version: int, what: str) -> bytes:
    """The body again.  Raises RecordDamaged, or StateRefused for a version of the future."""
    if len(record) < 5 or crc32(record) != _RESIDUE:
        raise RecordDamaged(f"the {what} record does not match its checksum")
    if record[0] != version:
        raise future(what, record[0])
    return record[1:-4]


def future(what: str, version: int) -> StateRefused:
    """What is raised for a record of a version of the future."""
    return StateRefused(
        f"a {what} record has version {version}, which this version of leased does not know: "
        "install the version that wrote it, or restore a backup made by this one"
    )
