"""The volatile environment: every live lease, on tmpfs, committed before its reply leaves and never flushed.

It survives kill -9 and restarts.  It is discarded when the boot (or the time namespace's offset) is another, or CLOCK_BOOTTIME stands behind
the last tick stored here: see recovery.py.  The data file is allocated to its full map size when made, so that a tmpfs filled
by others cannot stop a release.
"""

from __future__ import annotations

import json
import os
import struct
from pathlib import Path
from typing import Any, Final, NamedTuple

import lmdb

from leased.errors import StateRefused, StoreError
from leased.model import Lease, Tombstone
from leased.state.environment import PAGE_BYTES, each, open_environment, translated
from leased.state.records import decode_lease, decode_tombstone, encode_lease, encode_tombstone, seal, unseal

FIXED_MAP_BYTES: Final = 8 << 20
MAP_BYTES_PER_LEASE: Final = (
    640  # a record with usual labels takes 260 in a half-filled tree; the rest is for tombstones and events
)
RESERVED_PAGES: Final = 64  # kept for releases and lapses: LMDB copies the pages it changes, also to delete
META_VERSION: Final = 1
TABLES: Final = ("leases", "tombstones", "meta", "events", "billed", "switches")
_COUNTER = struct.Struct("<Q")
_SECONDS = struct.Struct("<d")


class Start(NamedTuple):
    """One start of a daemon: a number that rises and a random id, so that two starts with one number are still told apart."""

    number: int
    id: str


class LeasesMeta(NamedTuple):
    """What `leases` knows of itself besides the counters.  `no_grant_before` is on this boot's CLOCK_BOOTTIME, 0.0 when over."""

    incarnation: str
    boot_id: str
    start: Start
    next_start: Start
    wait_out: float
    install_id: str
    secret: str
    no_grant_before: float


def map_bytes_for(max_leases: int) -> int:
    return (FIXED_MAP_BYTES + max_leases * MAP_BYTES_PER_LEASE) // PAGE_BYTES * PAGE_BYTES


class Leases:
    """The environment and its tables.  The lessor alone writes it, in the loop's thread."""

    def __init__(self, directory: Path, max_leases: int, *, readonly: bool = False) -> None:
        self.directory = directory
        self.map_bytes = map_bytes_for(max_leases)
        self._readonly = readonly
        path = directory / "data.mdb"
        if path.exists():
            self.map_bytes = max(self.map_bytes, path.stat().st_size // PAGE_BYTES * PAGE_BYTES)
        self._open()
        if not readonly:
            self._allocate()

    def _open(self) -> None:
        self.environment: lmdb.Environment = open_environment(
            self.directory, map_bytes=self.map_bytes, tables=len(TABLES), sync=False, readonly=self._readonly
        )
        with translated(str(self.directory)):
            tables = [self.environment.open_db(name.encode(), create=not self._readonly) for name in TABLES]
        self.leases, self.tombstones, self.meta, self.events, self.billed, self.switches = tables
        self.identity = (self.directory / "data.mdb").stat().st_ino

    def _allocate(self) -> None:
        """Raises StoreError when the file system has no room: a daemon that could not release must not start."""
        path = self.directory / "data.mdb"
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            try:
                os.posix_fallocate(descriptor, 0, self.map_bytes)
            finally:
                os.close(descriptor)
        except OSError as error:
            raise StoreError(
                f"{path}: {error.strerror}: the volatile state needs {self.map_bytes >> 20} MiB here; "
                "give the file system more room, or lower max_leases"
            ) from error

    def reopen(self) -> None:
        """After a failed commit the environment's memory of itself is not to be trusted.  Raises StoreError when the path leads elsewhere
        by now: what is there is not what was promised on."""
        if not self.in_place():
            raise StoreError(f"{self.directory}/data.mdb is not the file that was opened")
        self.environment.close()
        self._open()

    def close(self) -> None:
        self.environment.close()

    def in_place(self) -> bool:
        """Does the path still lead to the file that is open?"""
        try:
            return (self.directory / "data.mdb").stat().st_ino == self.identity
        except OSError:
            return False

    def free_pages(self, transaction: Any) -> int:
        """Pages that no table uses: never used ones and those LMDB will use again.  Its own free list (a few pages) is not counted."""
        used = 4
        for table in (self.leases, self.tombstones, self.meta, self.events, self.billed, self.switches):
            stat = transaction.stat(table)
            used += stat["branch_pages"] + stat["leaf_pages"] + stat["overflow_pages"]
        return self.map_bytes // PAGE_BYTES - int(used)

    # ---- meta and counters

    def read_meta(self) -> LeasesMeta | None:
        """None: a new file.  Raises RecordDamaged or StateRefused."""
        with self.environment.begin() as transaction:
            raw = transaction.get(b"meta", db=self.meta)
        if raw is None:
            return None
        fields = json.loads(unseal(bytes(raw), META_VERSION, "leases meta"))
        fields["start"], fields["next_start"] = Start(*fields["start"]), Start(*fields["next_start"])
        try:
            return LeasesMeta(**fields)
        except TypeError:
            raise StateRefused("the meta record of the volatile state has other fields than this version knows") from None

    def put_meta(self, transaction: Any, meta: LeasesMeta) -> None:
        transaction.put(b"meta", seal(META_VERSION, json.dumps(meta._asdict()).encode()), db=self.meta)

    def put_last(self, transaction: Any, generation: int) -> None:
        """The last generation handed out: written with the grants that used it."""
        transaction.put(b"last", seal(META_VERSION, _COUNTER.pack(generation)), db=self.meta)

    def read_last(self) -> int:
        """0 when none was handed out.  Raises RecordDamaged."""
        with self.environment.begin() as transaction:
            raw = transaction.get(b"last", db=self.meta)
        return 0 if raw is None else int(_COUNTER.unpack(unseal(bytes(raw), META_VERSION, "last generation"))[0])

    def put_tick(self, transaction: Any, boot: float) -> None:
        transaction.put(b"tick", seal(META_VERSION, _SECONDS.pack(boot)), db=self.meta)

    def read_tick(self) -> float:
        with self.environment.begin() as transaction:
            raw = transaction.get(b"tick", db=self.meta)
        return 0.0 if raw is None else float(_SECONDS.unpack(unseal(bytes(raw), META_VERSION, "tick"))[0])

    # ---- rows

    def put(self, transaction: Any, key_hash: bytes, lease: Lease) -> None:
        transaction.put(key_hash, encode_lease(lease), db=self.leases)

    def put_tombstone(self, transaction: Any, rid: bytes, tombstone: Tombstone) -> None:
        transaction.put(rid, encode_tombstone(tombstone), db=self.tombstones)

    def rows(self, transaction: Any) -> Any:
        """(key hash, Lease or None where damaged, raw) of every record, live or not."""
        return each(transaction, self.leases, decode_lease)

    def tombstone_rows(self, transaction: Any) -> Any:
        return each(transaction, self.tombstones, decode_tombstone)
