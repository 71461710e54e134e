"""The record of a dead-man switch, the same in both stores."""

from __future__ import annotations

import json
from typing import Final, NamedTuple

from leased.state.records import RecordDamaged, seal, unseal

SWITCH_VERSION: Final = 1
MAX_TOLD: Final = 1000  # released leases remembered with a miss; more than that were released too, and counted


class Switch(NamedTuple):
    """`due` is CLOCK_BOOTTIME of boot `boot_id`, meaningful while armed.  `graced`: this `due` has been moved once for a restart.
    `missed_wall` is 0.0 while it was never missed; `released` are the (key hash, generation) the last miss gave back, at most MAX_TOLD
    of `released_count`."""

    namespace: str
    scope: str
    armed: bool
    expect_within: float
    due: float
    boot_id: str
    agent_id: str | None = None
    graced: bool = False
    missed_wall: float = 0.0
    released: tuple[tuple[bytes, int], ...] = ()
    released_count: int = 0


def encode_switch(switch: Switch) -> bytes:
    fields = switch._asdict()
    fields["released"] = [[key_hash.hex(), generation] for key_hash, generation in switch.released]
    return seal(SWITCH_VERSION, json.dumps(fields, ensure_ascii=False, separators=(",", ":")).encode())


def decode_switch(record: bytes) -> Switch:
    """Raises RecordDamaged or StateRefused."""
    body = unseal(record, SWITCH_VERSION, "switch")
    try:
        fields = json.loads(body)
        fields["released"] = tuple((bytes.fromhex(key_hash), generation) for key_hash, generation in fields["released"])
        return Switch(**fields)
    except (ValueError, TypeError, KeyError) as error:
        raise RecordDamaged("a switch record is not of the shape its version has") from error
