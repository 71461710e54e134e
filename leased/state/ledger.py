"""The durable environment: what must outlive a power cut, written behind the lane by one thread.

Every transaction here is one default-sync LMDB commit (two flushes, 0.5 ms on a good disk).  Until `apply` returns nothing in it counts as
there, and after it raised nothing it wrote counts as there or as absent (journal.py keeps that account).
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, NamedTuple

import lmdb

from leased.digests import KEY_HASH_BYTES
from leased.errors import StateRefused, StoreError
from leased.model import Lease
from leased.state.agent_records import Agent, decode_agent
from leased.state.environment import FILE_MODE, each, open_environment, translated
from leased.state.leases import Start
from leased.state.outbox import OPS
from leased.state.records import RecordDamaged, decode_lease, encode_lease, glance, seal, unseal

FORMAT: Final = 2  # an older one is brought up when it is opened for writing, see state_format.py
MAP_BYTES: Final = 1 << 36  # address space only: the file grows as it needs
BROUGHT_UP: Final = frozenset({1})
META_VERSION: Final = 1
COPY_VERSION: Final = 2
OLD_COPY_VERSION: Final = 1  # the same record, under its key hash alone: see _bring_up
_OLD: Final = bytes((OLD_COPY_VERSION,))
TABLES: Final = ("meta", "leases", "billed", "outbox", "dead", "totals", "agents", "switches")
INITIALISED: Final = "initialised"
_REMAINING: Final = struct.Struct("<d")
GENERATION: Final = struct.Struct(">Q")
ROW_KEY_BYTES: Final = GENERATION.size + KEY_HASH_BYTES
NOT_A_COPY: Final = -1.0
LEASE_AT: Final = 1 + _REMAINING.size  # where the lease begins in a ledger record
_NO_COPY: Final = _REMAINING.pack(NOT_A_COPY)


class LedgerMeta(NamedTuple):
    """The ledger's account of itself.  `mark`: no generation above it was ever handed out.  `clean`: stopped in order, so its leases are
    all there were.  `restored`: 0 no, 1 from a backup, 2 from a backup with no holder left."""

    install_id: str
    secret: str
    mark: int
    incarnation: str
    boot_id: str
    start: Start
    wait_out: float
    clean: bool = False
    restored: int = 0
    format: int = FORMAT


class LedgerLease(NamedTuple):
    """A lease as the ledger holds it.  `remaining`: seconds left at a clean stop (its deadline counts in the same boot, else this);
    NOT_A_COPY for one written while it was live, which comes back with its full ttl."""

    lease: Lease
    remaining: float = NOT_A_COPY


Op = tuple[Any, ...]
"""("put", key_hash, LedgerLease) · ("del", key_hash, generation) · ("mark", generation) · ("meta", {field: value}) ·
("new", LedgerMeta) · ("uncopy", wait_out) · ("switch", key, record or None) ·
("agent", digest, record or None) · and those of outbox.py"""


class Ledger:
    """The environment and its tables.  After `open` only the writer thread touches it, until `close`.

    A lease stands under its generation and its key hash: what was granted at one time lies together, and a lease that comes and goes
    changes the last pages only, where its neighbours do the same.  By key hash alone each would cost a page of its own, twice.
    """

    def __init__(self, directory: Path, *, readonly: bool = False) -> None:
        self.directory = directory
        self._readonly = readonly
        self._open()
        if not readonly:
            self._bring_up()

    def _open(self) -> None:
        self.environment: lmdb.Environment = open_environment(
            self.directory, map_bytes=MAP_BYTES, tables=len(TABLES), sync=True, readonly=self._readonly
        )
        with translated(str(self.directory)):
            names = [self.environment.open_db(name.encode(), create=not self._readonly) for name in TABLES]
        self.meta, self.leases, self.billed, self.outbox, self.dead, self.totals, self.agents, self.switches = names
        self.identity = (self.directory / "data.mdb").stat().st_ino

    def reopen(self) -> None:
        """Raises StoreError when the path leads elsewhere by now, StateRefused, or lmdb's errors."""
        if not self.in_place():
            raise StoreError(f"{self.directory}/data.mdb is not the file that was opened")
        self.environment.close()
        self._open()

    def close(self) -> None:
        self.environment.close()

    def in_place(self) -> bool:
        try:
            return (self.directory / "data.mdb").stat().st_ino == self.identity
        except OSError:
            return False

    # ---- reading, at the start and for fsck

    def read_meta(self) -> LedgerMeta | None:
        """None: a ledger that was never written.  Raises StateRefused for another format, or for damage."""
        with translated(str(self.directory)), self.environment.begin() as transaction:
            raw = transaction.get(b"meta", db=self.meta)
        if raw is None:
            return None
        try:
            fields = json.loads(unseal(bytes(raw), META_VERSION, "ledger meta"))
        except RecordDamaged as error:
            raise StateRefused(f"{self.directory}/data.mdb: {error}: run `leased fsck`, then restore a backup") from error
        if fields.get("format") not in {FORMAT, *BROUGHT_UP}:
            raise StateRefused(
                f"{self.directory}: the state has format {fields.get('format')!r} and this version of leased knows {FORMAT}: "
                "install the version that wrote it; nothing was changed"
            )
        try:
            fields["start"] = Start(*fields["start"])
            return LedgerMeta(**fields)
        except (TypeError, KeyError) as error:
            raise StateRefused(
                f"{self.directory}/data.mdb: the meta record has other fields than this version knows: run `leased fsck`, then restore a backup"
            ) from error

    def rows(self, transaction: Any) -> Any:
        """(key hash, LedgerLease or None where damaged, raw), in the order of generations: where a key comes twice, the later one counts."""
        for row_key, entry, raw in each(transaction, self.leases, decode_ledger_lease):
            yield key_hash_of(row_key), entry if entry is not None and stands_under(row_key, entry) else None, raw

    def read_agents(self) -> tuple[dict[bytes, Agent], list[bytes]]:
        """Agent keys by digest, and the digests of those that cannot be read."""
        with translated(str(self.directory)), self.environment.begin() as transaction:
            rows = list(each(transaction, self.agents, decode_agent))
        return {digest: agent for digest, agent, _ in rows if agent is not None}, [
            digest for digest, agent, _ in rows if agent is None
        ]

    # ---- writing

    def apply(self, ops: list[Op], *, prove: bool = False) -> None:
        """All of `ops`, in order, in one flushed transaction.  A put never lowers the ttl of its generation; a del deletes only its
        generation.  `prove`: write something even if the operations change nothing.

        Raises StoreError or StoreFull, and then the environment has been opened anew (or could not be)."""
        try:
            with translated(str(self.directory)), self.environment.begin(write=True) as transaction:
                if not ops or prove:  # does the disk work again?  LMDB touches it only when something has changed
                    transaction.put(b"proof", os.urandom(8), db=self.meta)
                for op in ops:
                    _APPLY[op[0]](self, transaction, *op[1:])
        except Exception:
            with translated(str(self.directory)):
                self.reopen()
            raise

    def _put(self, transaction: Any, key_hash: bytes, entry: LedgerLease) -> None:
        row_key = row_key_of(key_hash, entry.lease.generation)
        raw = transaction.get(row_key, db=self.leases)
        if raw is not None and entry.remaining == NOT_A_COPY:
            there = glance(raw, LEASE_AT, COPY_VERSION)
            if there is not None and there[1] > entry.lease.ttl:
                return
        transaction.put(row_key, encode_ledger_lease(entry), db=self.leases)

    def _del(self, transaction: Any, key_hash: bytes, generation: int) -> None:
        transaction.delete(row_key_of(key_hash, generation), db=self.leases)

    def _meta(self, transaction: Any, changes: dict[str, Any]) -> None:
        raw = transaction.get(b"meta", db=self.meta)
        fields = json.loads(unseal(bytes(raw), META_VERSION, "ledger meta"))
        transaction.put(b"meta", seal(META_VERSION, json.dumps(fields | changes).encode()), db=self.meta)

    def _mark(self, transaction: Any, generation: int) -> None:
        """Raise the high-water mark; it never sinks but at a clean stop, which writes the exact last generation through "meta"."""
        raw = transaction.get(b"meta", db=self.meta)
        fields = json.loads(unseal(bytes(raw), META_VERSION, "ledger meta"))
        if generation > fields["mark"]:
            self._meta(transaction, {"mark": generation})

    def _switch(self, transaction: Any, key: bytes, record: bytes | None) -> None:
        if record is None:
            transaction.delete(key, db=self.switches)
        else:
            transaction.put(key, record, db=self.switches)

    def _agent(self, transaction: Any, digest: bytes, record: bytes | None) -> None:
        if record is None:
            transaction.delete(digest, db=self.agents)
        else:
            transaction.put(digest, record, db=self.agents)

    def _new(self, transaction: Any, meta: LedgerMeta) -> None:
        if transaction.get(b"meta", db=self.meta) is None:
            transaction.put(b"meta", seal(META_VERSION, json.dumps(meta._asdict()).encode()), db=self.meta)

    def _uncopy(self, transaction: Any, wait_out: float) -> None:
        """The clean mark is going: copies of short leases go with it, copies of long ones become ordinary records."""
        copies = [bytes(key) for key, raw in transaction.cursor(db=self.leases) if raw[1 : 1 + _REMAINING.size] != _NO_COPY]
        for row_key in copies:
            try:
                entry = decode_ledger_lease(bytes(transaction.get(row_key, db=self.leases)))
            except RecordDamaged:
                continue
            if entry.lease.ttl <= wait_out:
                transaction.delete(row_key, db=self.leases)
            else:
                transaction.put(row_key, encode_ledger_lease(LedgerLease(entry.lease)), db=self.leases)

    def _bring_up(self) -> None:
        """From format 1, where leases stood under key hashes alone, all in one transaction.  Of a damaged record only the key can be told: it goes
        under generation 0.  Raises StoreError; a meta record that cannot be read is left for `read_meta` to tell of."""
        with translated(str(self.directory)), self.environment.begin(write=True) as transaction:
            try:
                fields = json.loads(unseal(transaction.get(b"meta", db=self.meta) or b"", META_VERSION, "ledger meta"))
            except (RecordDamaged, StateRefused):
                return
            if fields.get("format") != 1:
                return
            for key_hash, raw in [(bytes(key), bytes(raw)) for key, raw in transaction.cursor(db=self.leases)]:
                transaction.delete(key_hash, db=self.leases)
                try:
                    seen = glance(raw, LEASE_AT, OLD_COPY_VERSION)
                except StateRefused:
                    seen = None
                if seen is not None:
                    raw = seal(COPY_VERSION, raw[1:-4])
                transaction.put(row_key_of(key_hash, seen[0] if seen is not None else 0), raw, db=self.leases)
            self._meta(transaction, {"format": FORMAT})


_APPLY: Final[dict[str, Callable[..., None]]] = {
    "put": Ledger._put,
    "del": Ledger._del,
    "mark": Ledger._mark,
    "meta": Ledger._meta,
    "new": Ledger._new,
    "uncopy": Ledger._uncopy,
    "switch": Ledger._switch,
    "agent": Ledger._agent,
    **OPS,
}


def row_key_of(key_hash: bytes, generation: int) -> bytes:
    """What a lease stands under in the ledger."""
    return GENERATION.pack(generation) + key_hash


def key_hash_of(row_key: bytes) -> bytes:
    return row_key[GENERATION.size :]


def stands_under(row_key: bytes, entry: LedgerLease) -> bool:
    """Is this the record that belongs there?"""
    return row_key[: GENERATION.size] == GENERATION.pack(entry.lease.generation)


def encode_ledger_lease(entry: LedgerLease) -> bytes:
    return seal(COPY_VERSION, _REMAINING.pack(entry.remaining) + encode_lease(entry.lease))


def decode_ledger_lease(record: bytes) -> LedgerLease:
    body = unseal(record, OLD_COPY_VERSION if record[:1] == _OLD else COPY_VERSION, "ledger lease")
    if len(body) <= _REMAINING.size:
        raise RecordDamaged("a ledger lease is too short")
    return LedgerLease(decode_lease(body[_REMAINING.size :]), _REMAINING.unpack_from(body)[0])


def write_initialised(directory: Path, install_id: str) -> None:
    """The mark that tells an emptied data.mdb from a new install.  Flushed, with its directory entry."""
    path = directory / f"{INITIALISED}.new"
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, FILE_MODE)
    try:
        os.write(descriptor, f"{install_id}\n".encode())
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    path.replace(directory / INITIALISED)
    entry = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(entry)
    finally:
        os.close(entry)
