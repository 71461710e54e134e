"""The loop's side of the ledger: what is queued, what is in flight, and what a power cut might bring back.

The lane never waits for the ledger.  It queues operations here; one flush at a time takes all that is queued; its outcome comes back
through `done`.  The account kept here is deliberately pessimistic: a key *may be held* by the ledger from the moment a put is queued
until a later delete of it has been flushed, whatever failed in between.

After a failed flush, and from the start until the first success, the ledger is `unsettled`: any record may be there or not.  The next success
settles it, so one is attempted even when nothing is queued.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Final, Protocol

from leased.state.ledger import LedgerLease, Op
from leased.state.outbox import REPEATABLE

REPEATED: Final = (
    frozenset({"del", "mark", "switch", "agent"}) | REPEATABLE
)  # applied again after a flush whose outcome is not known
FIRST_RETRY_SECONDS: Final = 0.1
MAX_RETRY_SECONDS: Final = 2.0
DELETES_WAIT_SECONDS: Final = 0.02  # ends of leases that nobody waits for: they go with the next flush, or alone after this
MAX_WAITING: Final = (
    100_000  # operations behind a disk that does not work, 30 MB; what still comes then are ends of leases known here
)


class Writer(Protocol):
    """Whoever runs `Ledger.apply`: a thread in the daemon, a script in the simulation.  `write` returns at once; exactly one `done`
    follows, in the loop's thread, with the error or None."""

    def write(self, ops: list[Op], done: Callable[[Exception | None], None]) -> None: ...


class Journal:
    """`flushed(number)` and `failed(number, error)` are called after the account has been brought up to date."""

    def __init__(self, writer: Writer, *, flushed: Callable[[int], None], failed: Callable[[int, Exception], None]) -> None:
        self._writer = writer
        self._on_flushed = flushed
        self._on_failed = failed
        self._queue: list[Op] = []
        self._flying: list[Op] | None = None
        self._flushed: dict[bytes, tuple[int, float]] = {}  # (generation, ttl): what certainly is in the ledger
        self._uncertain: dict[bytes, int] = {}  # the generation of the latest put, for keys of which that is not certain
        self._retry_at = 0.0
        self._retry_seconds = FIRST_RETRY_SECONDS
        self._wanted = False  # something queued is waited for
        self._deletes_at = 0.0  # when what nobody waits for is flushed; 0.0 while nothing of that kind has been seen
        self.open_number = 1  # the flush that what is queued now will be part of
        self.unsettled = True
        self.flushes = 0
        self.failures = 0
        self.last_error = ""

    # ---- the account

    def may_hold(self, key_hash: bytes) -> bool:
        """Might a power cut bring back a record of this key?"""
        return self.unsettled or key_hash in self._flushed or key_hash in self._uncertain

    def knows(self, key_hash: bytes) -> bool:
        """Has a put of this key been queued or read, and no later delete been flushed?"""
        return key_hash in self._flushed or key_hash in self._uncertain

    def ttl_of(self, key_hash: bytes, generation: int) -> float:
        """The ttl a power cut certainly brings this generation back with; 0.0 when that is not certain."""
        if self.unsettled:
            return 0.0
        known = self._flushed.get(key_hash)
        return known[1] if known is not None and known[0] == generation else 0.0

    def settle_with(self, rows: dict[bytes, tuple[int, float]]) -> None:
        """The start has read the ledger: `rows` are (generation, ttl) by key hash, and belong to the journal from now on."""
        self._flushed, self._uncertain = rows, {}

    @property
    def known(self) -> dict[bytes, tuple[int, float]]:
        """What certainly is in the ledger: (generation, ttl) by key hash.  Not to be changed."""
        return self._flushed

    def __len__(self) -> int:
        return len(self._queue) + len(self._flying or ())

    @property
    def full(self) -> bool:
        """So much waits that nothing more should be begun which needs a flush: its answer would be null anyway."""
        return len(self) >= MAX_WAITING

    def held(self) -> list[bytes]:
        """Every key the ledger may hold."""
        return [*self._flushed, *(key_hash for key_hash in self._uncertain if key_hash not in self._flushed)]

    @property
    def busy(self) -> bool:
        return self._flying is not None

    # ---- queueing; each returns the number of the flush that will carry it

    def put(self, key_hash: bytes, entry: LedgerLease) -> int:
        generation = entry.lease.generation
        flushed, uncertain = self._flushed.get(key_hash), self._uncertain.get(key_hash)
        if flushed is not None and flushed[0] != generation:  # each generation has a record of its own there
            self._queue.append(("del", key_hash, flushed[0]))
        if uncertain is not None and uncertain != generation:
            self._queue.append(("del", key_hash, uncertain))
        self._uncertain[key_hash] = generation
        self._queue.append(("put", key_hash, entry))
        self._wanted = True
        return self.open_number

    def end(self, key_hash: bytes) -> int | None:
        """A lease of this key has ended and somebody waits until no power cut can bring it back, or its next one must not be shadowed by an
        old record: if the ledger may hold the key, its record goes.  Returns the flush to wait for, or None when there is none."""
        if self.forget(key_hash):
            self._wanted = True
            return self.open_number
        return self.settling_number if self.unsettled else None

    def forget(self, key_hash: bytes) -> bool:
        """A lease of this key has ended and nobody waits for it: a power cut before the flush makes it end late.  So its deletion goes
        with the next flush that is wanted, and one client that takes and releases pays for one flush, not for two.  False: nothing to do."""
        uncertain, flushed = self._uncertain.get(key_hash), self._flushed.get(key_hash)
        if flushed is not None and flushed[0] != uncertain:
            self._queue.append(("del", key_hash, flushed[0]))
        if uncertain is not None:
            self._queue.append(("del", key_hash, uncertain))
        return uncertain is not None or flushed is not None

    def append(self, op: Op) -> int:
        """Any other operation.  Those not in REPEATED are lost with a failed flush."""
        self._queue.append(op)
        self._wanted = True
        return self.open_number

    @property
    def settling_number(self) -> int:
        """The flush whose success settles the ledger: the one under way, else the next."""
        return self.open_number - 1 if self._flying is not None else self.open_number

    # ---- flushing

    def kick(self, now: float, *, force: bool = False) -> None:
        """Start a flush if one is wanted and none is under way.  Called at the end of each batch and tick.  `force`: even if nothing is
        queued, and without waiting for the pause after a failure to end."""
        if self._flying is not None or not (self._queue or self.unsettled or force) or (now < self._retry_at and not force):
            return
        if not (self._wanted or self.unsettled or force):
            if not self._deletes_at:
                self._deletes_at = now + DELETES_WAIT_SECONDS
            if now < self._deletes_at:
                return
        self._wanted, self._deletes_at = False, 0.0
        self._flying, self._queue = self._queue, []
        self.open_number += 1
        number = self.open_number - 1
        flying = self._flying
        self._writer.write(flying, lambda error: self._done(number, flying, error))

    def _done(self, number: int, ops: list[Op], error: Exception | None) -> None:
        self._flying = None
        if error is not None:
            # What failed may be in the ledger or not.  Deletes and marks go again.  A put does not: whoever waited for it is told null, and
            # what it may have left is remembered as uncertain.  Nor does anything else: its owner (the start, the end of a wait) begins anew.
            self.failures += 1
            self.last_error = str(error)
            for op in ops:
                if op[0] in {"put", "del"} and (known := self._flushed.pop(op[1], None)) is not None:
                    self._uncertain.setdefault(op[1], known[0])
            self._queue[:0] = [op for op in ops if op[0] in REPEATED]
            self.unsettled = True
            self._retry_at = math.inf  # until the next tick, which knows the time
            self._on_failed(number, error)
            return
        self.flushes += 1
        self.unsettled = False
        self._retry_seconds = FIRST_RETRY_SECONDS
        for op in ops:
            if op[0] == "put":
                lease = op[2].lease
                known = self._flushed.get(op[1])
                if known is None or known[0] != lease.generation or known[1] < lease.ttl:
                    self._flushed[op[1]] = (lease.generation, lease.ttl)
                if self._uncertain.get(op[1]) == lease.generation:
                    del self._uncertain[op[1]]
            elif op[0] == "del":
                known = self._flushed.get(op[1])
                if known is not None and known[0] == op[2]:
                    del self._flushed[op[1]]
                if self._uncertain.get(op[1]) == op[2]:
                    del self._uncertain[op[1]]
        self._on_flushed(number)

    def next_try(self) -> float | None:
        """When a tick is wanted.  For what failed: at once to set the time of the next try, then at that time.  For deletes that nobody
        waits for: when they have waited long enough."""
        if self._flying is not None or not (self._queue or self.unsettled):
            return None
        return 0.0 if self._retry_at == math.inf else max(self._retry_at, self._deletes_at)

    def tick(self, now: float) -> None:
        """After a failure, sets when to try again: 0.1 s, doubling to 2 s."""
        if self._retry_at == math.inf:
            self._retry_at = now + self._retry_seconds
            self._retry_seconds = min(MAX_RETRY_SECONDS, self._retry_seconds * 2)
        self.kick(now)
