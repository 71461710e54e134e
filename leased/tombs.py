"""Request ids of leases that ended early, until their original deadline.

The rows are in `leases`; memory keeps sixteen bytes for each, in buckets by the second they may go, so that a worker that takes and
releases thousands of leases a second does not make the daemon grow.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from leased.digests import RID_BYTES

BUCKET_SECONDS: Final = 4  # a row goes at most this late; until then it is ignored by its own `until`


class Tombs:
    def __init__(self) -> None:
        self._buckets: dict[int, bytearray] = {}
        self.total = 0

    def add(self, rid: bytes, until: float) -> None:
        self._buckets.setdefault(int(until) // BUCKET_SECONDS + 1, bytearray()).extend(rid)
        self.total += 1

    def take_due(self, now: float, limit: int) -> list[bytes]:
        """Up to `limit` rids whose rows may be deleted.  They are forgotten here; `add` them again if the deletion fails."""
        found: list[bytes] = []
        for bucket in sorted(self._buckets):
            if bucket * BUCKET_SECONDS > now or len(found) >= limit:
                break
            rids = self._buckets[bucket]
            size = min(len(rids), (limit - len(found)) * RID_BYTES)
            found.extend(_split(rids[:size]))
            del rids[:size]
            if not rids:
                del self._buckets[bucket]
        self.total -= len(found)
        return found


def _split(rids: bytearray) -> Iterator[bytes]:
    for at in range(0, len(rids), RID_BYTES):
        yield bytes(rids[at : at + RID_BYTES])
