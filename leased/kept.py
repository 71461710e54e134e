"""What the daemon keeps of its leases, in the volatile store and in memory, and how it is looked at.

Nothing here ends or grants a lease: holdings.py does.  What is kept in memory follows the records, and is rebuilt from them by `reread`.
"""

from __future__ import annotations

from typing import Final

import structlog

from leased import model
from leased.clock import Clock
from leased.companions import Bills, Binding, Watching
from leased.config_keys import Limits
from leased.digests import Digests
from leased.errors import StateRefused
from leased.fences import Fences
from leased.gate import Gate
from leased.generations import Generations
from leased.holds import Holds
from leased.index import Index
from leased.lane import Lane
from leased.model import Instant, Lease
from leased.queues import Queues
from leased.state.environment import PAGE_BYTES
from leased.state.journal import Journal
from leased.state.leases import RESERVED_PAGES, Leases, LeasesMeta
from leased.state.records import RecordDamaged, decode_lease, glance
from leased.state.survey import Rows
from leased.tombs import Tombs

log = structlog.get_logger()

TOMBSTONE_BYTES: Final = 192  # a remembered request_id, 96 bytes in a half-filled tree
DAMAGED_SECONDS: Final = model.MAX_TTL_SECONDS  # a record that cannot be read may have promised this much


class Kept:
    """The records of one daemon and everything remembered beside them.  `now` is the instant of the batch or tick under way."""

    def __init__(
        self, leases: Leases, digests: Digests, generations: Generations, journal: Journal, gate: Gate, clock: Clock, limits: Limits
    ) -> None:
        self.leases = leases
        self.lane = Lane(leases, self.reread)
        self.digests = digests
        self.generations = generations
        self.journal = journal
        self.gate = gate
        self.clock = clock
        self.limits = limits
        self.index = Index()
        self.holds = Holds()
        self.queues = Queues()
        self.tombs = Tombs()
        self.damaged: dict[bytes, float] = {}
        self.replayed: dict[bytes, int] = {}  # by key, the generation of a live grant that was told to another connection again
        self.watching: Watching | None = None
        self.binding: Binding | None = None
        self.billing: Bills | None = None
        self.free = model.FREE
        self.stalled = False  # a free key has a line and could not be granted: see Upkeep._each_second
        self.room = 0  # pages, an estimate that only errs downwards; see has_room
        self.counts: dict[str, int] = dict.fromkeys(
            (
                "granted",
                "renewed",
                "replayed",
                "released",
                "revoked",
                "lapsed",
                "switch_missed",
                "refused",
                "unknown",
                "undone",
                "full",
            ),
            0,
        )
        self._boot_id = clock.boot_id()
        self._fences = Fences()
        self._last_stored = 0
        self._mark_number = 0
        self.now = self.instant()

    def instant(self, judged: float | None = None) -> Instant:
        now = self.clock.now()
        return Instant(now.boot if judged is None else judged, now.boot, now.wall, self._boot_id, self.free)

    def record(self, key_hash: bytes) -> Lease | None:
        """The live lease of a key, looked at and nothing more; None too for a record that cannot be read."""
        record = self.stored(key_hash)
        return record if record is not None and self.now.judged < record.deadline else None

    def stored(self, key_hash: bytes) -> Lease | None:
        """What is recorded, live or not; None too for a record that cannot be read."""
        raw = self.lane.transaction.get(key_hash, db=self.leases.leases)
        try:
            return decode_lease(raw) if raw is not None else None
        except (RecordDamaged, StateRefused):
            self.set_aside(key_hash)
            return None

    def live_record(self, key_hash: bytes, generation: int) -> bytes | None:
        """The record of exactly this lease while it is live, not decoded: a third of the price."""
        raw: bytes | None = self.lane.transaction.get(key_hash, db=self.leases.leases)
        try:
            seen = glance(raw) if raw is not None else None
        except StateRefused:
            seen = None
        if raw is not None and seen is None:
            self.set_aside(key_hash)
        return raw if seen is not None and seen[0] == generation and self.now.judged < seen[2] else None

    def is_live(self, key_hash: bytes, generation: int) -> bool:
        """Outside a transaction: is the lease of exactly this generation live?  False for a record that cannot be read."""
        with self.leases.environment.begin() as transaction:
            raw = transaction.get(key_hash, db=self.leases.leases)
        try:
            record = decode_lease(raw) if raw is not None else None
        except (RecordDamaged, StateRefused):
            return False
        return record is not None and record.generation == generation and self.clock.now().boot < record.deadline

    def set_aside(self, key_hash: bytes) -> None:
        if key_hash not in self.damaged:
            self.damaged[key_hash] = self.now.boot + DAMAGED_SECONDS
            log.error("record.set_aside", table="leases", key_hash=key_hash.hex(), seconds=DAMAGED_SECONDS)

    def raise_mark(self) -> int:
        """Queue the next high-water mark if it is time to.  Returns the flush that carries the latest one, 0 when none is under way."""
        wanted = self.generations.wanted_mark(self.now.wall)
        if wanted:
            self.generations.raising = wanted
            self._mark_number = self.journal.append(("mark", wanted))
        return self._mark_number

    def mark_flushed(self, number: int) -> None:
        if self._mark_number and number >= self._mark_number:
            self._mark_number = 0
            self.generations.raised()

    def leases_meta(self, meta: LeasesMeta) -> None:
        self.leases.put_meta(self.lane.transaction, meta)

    def has_room(self) -> bool:
        """Each grant may use up a page before the estimate is made anew; RESERVED_PAGES stay for releases and lapses, and
        with them what it takes to remember the request_id of every live lease that has one."""
        self.room -= 1
        if self.room <= 0:
            endings = len(self.index.rids) * TOMBSTONE_BYTES // PAGE_BYTES
            self.room = (self.leases.free_pages(self.lane.transaction) - RESERVED_PAGES - endings) // 4
        return self.room > 0

    def reread(self) -> None:
        """Rebuild what memory knows from the records, after the environment had to be opened anew."""
        emptied = Index()  # there is no room for two of them
        emptied.texts, self.index = self.index.texts, emptied
        rows = Rows()
        with self.leases.environment.begin() as transaction:
            rows.read(transaction.cursor(db=self.leases.leases))
        rows.share(self.journal.known)
        self.load(rows)

    def load(self, rows: Rows) -> None:
        """Begin with these records, which are all there are; the rest is read here.  What is large in `rows` is gone afterwards."""
        texts = self.index.texts
        self.index, self.tombs, self.damaged = Index(), Tombs(), {}
        self.index.load(rows)
        self.index.texts = {key_hash: text for key_hash, text in texts.items() if key_hash in self.index}
        for key_hash in rows.damaged:
            self.set_aside(key_hash)
        with self.leases.environment.begin() as transaction:
            for rid, tombstone, _ in self.leases.tombstone_rows(transaction):
                self.tombs.add(rid, tombstone.until if tombstone is not None else 0.0)
        self._last_stored = self.leases.read_last()
        self.generations.last = max(self.generations.last, self._last_stored)
        if self.billing is not None:
            self.billing.reread()
