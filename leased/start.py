"""The start, after `leases` has been taken over: four steps with the ledger, and the end of the wait.

1. flush what the ledger lacks; 2. `leases` stores the next start; 3. flush {incarnation, boot, that start, wait_out, not clean}; 4. `leases` makes it
its start.  Only then is anything granted or renewed.  A crash between any two of them leaves a pair that still matches: the ledger has either
the start of `leases` or its next.  A flush that fails is tried again for ever; until it succeeds `lease` and `renew` answer null.

When a wait was needed, its end is a flush too: {wait_out, not restored, every lease above wait_out}.  From the moment that flush is put
together the lower of the two wait_outs is in force, so that no renewal slips between it and the disk.
"""

from __future__ import annotations

from enum import Enum
from typing import Any

import structlog

from leased.lane import Outcome
from leased.lessor import Lessor
from leased.state.ledger import LedgerLease, Op
from leased.state.records import encode_lease, glances
from leased.state.recovery import TakenOver

log = structlog.get_logger()


class Step(Enum):
    FIRST_FLUSH = 1
    STORE_NEXT = 2
    SECOND_FLUSH = 3
    ADOPT_NEXT = 4
    STARTED = 5


class Start:
    def __init__(self, lessor: Lessor, taken: TakenOver, wait_out: float) -> None:
        self._lessor = lessor
        lessor.journal.settle_with(taken.known)
        self._taken = taken
        self._configured = wait_out
        self._meta = taken.meta
        self._number = 0
        self._settling = 0
        self.step = Step.FIRST_FLUSH
        self.error = ""

    @property
    def started(self) -> bool:
        return self.step is Step.STARTED

    @property
    def ledger_written(self) -> bool:
        """Is there a meta record for the mark to be raised in?"""
        return self.step.value > Step.FIRST_FLUSH.value

    def begin(self) -> None:
        """The first flush; the next tick sends it."""
        self._queue(self._taken.first)

    def _queue(self, ops: list[Any]) -> None:
        journal = self._lessor.journal
        for op in ops:
            if op[0] == "put":
                journal.put(op[1], op[2])
            else:
                journal.append(op)
        self._number = journal.open_number  # whoever called kicks the journal, with what else is to go along

    def flushed(self, number: int) -> None:
        if self._settling and number >= self._settling:
            self._settled()
        if self.started or number < self._number:
            return
        self.error = ""
        if self.step is Step.FIRST_FLUSH:
            self.step = Step.STORE_NEXT
        elif self.step is Step.SECOND_FLUSH:
            self.step = Step.ADOPT_NEXT
        self._advance()

    def failed(self, number: int) -> None:
        if self._settling and number >= self._settling:
            self._settling = 0
        if self.started or number < self._number:
            return
        self.error = self._lessor.journal.last_error
        self._queue(self._still_so(self._taken.first) if self.step is Step.FIRST_FLUSH else self._taken.second)

    def _still_so(self, ops: list[Op]) -> list[Op]:
        """Without the leases that have ended since: their deletes are queued already, and a put after those would bring them back."""
        leases = self._lessor.leases
        kept = []
        with leases.environment.begin() as transaction:
            for op in ops:
                raw = transaction.get(op[1], db=leases.leases) if op[0] == "put" else None
                found = next(glances([(op[1], raw)]), None) if raw is not None else None
                if op[0] != "put" or (raw is not None and (found is None or found[2] == op[2].lease.generation)):
                    kept.append(op)  # one that cannot be read any more has its only copy here
        return kept

    def tick(self, boot: float) -> None:
        if self._lessor.lane.broken:
            return
        if not self.started:
            self._advance()
        elif (ends := self.next_wake()) is not None and boot >= ends:
            self._settle()

    def next_wake(self) -> float | None:
        """When the wait for what may have been forgotten ends, and a tick is to say so to the ledger."""
        gate = self._lessor.gate
        idle = gate.settled or self._settling or not self.started or self._lessor.lane.broken
        return None if idle else gate.no_grant_before

    def _advance(self) -> None:
        """The steps in `leases`; one that cannot be written is tried again at the next tick."""
        lane = self._lessor.lane
        if self.step is Step.STORE_NEXT and lane.run(self._store_next) is Outcome.COMMITTED:
            self.step = Step.SECOND_FLUSH
            self._queue(self._taken.second)
        if self.step is Step.ADOPT_NEXT and lane.run(self._adopt_next) is Outcome.COMMITTED:
            self.step = Step.STARTED
            self._lessor.gate.closed = ""
            log.info("daemon.started", recovering=self._taken.waiting)

    def _store_next(self) -> None:
        self._lessor.leases.put_meta(self._lessor.lane.transaction, self._meta)

    def _adopt_next(self) -> None:
        """Everything the ledger must know is flushed, so no lease is unflushed any more."""
        lessor = self._lessor
        transaction = lessor.lane.transaction
        self._meta = self._meta._replace(start=self._meta.next_start, wait_out=self._taken.wait_out)
        lessor.leases.put_meta(transaction, self._meta)
        for key_hash in lessor.index.unflushed:
            lease = lessor.record(key_hash)
            if lease is not None and lease.unflushed:
                flushed = lease._replace(unflushed=False, previous_ttl=0.0, previous_deadline=0.0)
                transaction.put(key_hash, encode_lease(flushed), db=lessor.leases.leases)

    # ---- the end of the wait

    def _settle(self) -> None:
        lessor = self._lessor
        lessor.gate.wait_out = min(lessor.gate.wait_out, self._configured)
        with lessor.leases.environment.begin() as transaction:
            for key_hash, lease, _ in lessor.leases.rows(transaction):
                if (
                    lease is not None
                    and lease.ttl > self._configured
                    and lessor.journal.ttl_of(key_hash, lease.generation) < lease.ttl
                ):
                    lessor.journal.put(key_hash, LedgerLease(lease))
        self._settling = lessor.journal.append(("meta", {"wait_out": self._configured, "restored": 0}))

    def _settled(self) -> None:
        self._settling = 0
        lessor = self._lessor
        self._meta = self._meta._replace(wait_out=self._configured, no_grant_before=0.0)
        if lessor.lane.run(lessor.leases_meta, self._meta) is Outcome.COMMITTED:
            lessor.gate.wait_out = self._configured
            lessor.gate.no_grant_before = 0.0
            lessor.gate.settled = True
            log.info("daemon.recovered")
