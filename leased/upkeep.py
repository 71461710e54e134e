"""What the lessor does without being asked: sweeping, telling waiters, taking back what could not be flushed, raising the mark.

`tick` does what is due and `next_wake` says when to come again; the daemon's loop is those two.  Outcomes of the ledger arrive in `flushed`
and `failed`, between ticks.
"""

from __future__ import annotations

import math
from typing import Final

import structlog

from leased import rules
from leased.billing import Billing
from leased.binds import UNDELIVERED, Binds
from leased.gate import Unknown
from leased.holdings import LAPSED
from leased.holds import NEVER, Hold
from leased.lane import Outcome
from leased.lessor import Lessor
from leased.start import Start
from leased.state.records import RecordDamaged, confirmed, decode_lease, decode_tombstone, encode_lease
from leased.switches import Switches

log = structlog.get_logger()

SWEEP_AT_ONCE: Final = 256  # lapses in one transaction: 20,000 that fall together must not keep a renewal waiting for 20 ms
TOMBS_AT_ONCE: Final = 1024
TICK_SECONDS: Final = 1.0
SAY_FULL_SECONDS: Final = 60.0
RETRY_SECONDS: Final = 0.5  # after a transaction that could not be written


class Upkeep:
    def __init__(self, lessor: Lessor, start: Start, switches: Switches, binds: Binds, billing: Billing | None = None) -> None:
        self.binds = binds
        self.billing = billing
        self.lessor = lessor
        self.switches = switches
        self.start = start
        self._last_tick = -math.inf
        self._sweep_size = SWEEP_AT_ONCE
        self._tombs_due = False
        self._was_recovering = True
        self._flushes_fail = False
        self._said_full = (0, -math.inf)

    def next_wake(self) -> float:
        """The CLOCK_BOOTTIME at which `tick` wants to run again: at most a second away."""
        lessor = self.lessor
        wakes = [self._last_tick + TICK_SECONDS]
        for wake in (
            lessor.index.next_due(),
            lessor.holds.next_bound(),
            lessor.queues.next_end(),
            self.switches.next_due(),
            lessor.journal.next_try(),
            self.start.next_wake(),
        ):
            if wake is not None:
                wakes.append(wake)
        return min(wakes)

    def tick(self, judged: float | None = None) -> bool:
        """Do what is due.  True when there is more of it than one transaction should hold: come back soon, after the sockets."""
        lessor = self.lessor
        lessor.now = now = lessor.instant(judged)
        more = self._sweep()
        self.switches.fall()
        self.binds.retry()
        self._end_waits()
        self._take_back(lessor.holds.overdue(now.boot), "ledger_slow")
        for held in lessor.holds.pop_plain_failed(0, now.boot):
            lessor.counts["unknown"] += 1
            held.call.answer(held.reply)
        if now.boot >= self._last_tick + TICK_SECONDS:
            self._last_tick = now.boot
            self._each_second()
            self._tombs_due = True
        if self._tombs_due:
            self._tombs_due = self._forget_spent()
            more = more or self._tombs_due
        recovering = lessor.gate.recovering(now.boot) or bool(lessor.gate.closed)
        if self._was_recovering and not recovering:
            self._serve_lines()
        self._was_recovering = recovering
        self.start.tick(now.boot)
        self._raise_mark()
        lessor.journal.tick(now.boot)
        return more

    # ---- lapses

    def _sweep(self) -> bool:
        lessor = self.lessor
        due = lessor.index.pop_due(lessor.now.judged, self._sweep_size)
        if not due:
            return False
        if lessor.lane.run(self._lapse, due) is Outcome.COMMITTED:
            self._sweep_size = SWEEP_AT_ONCE
        else:  # a full map may still have room for a small transaction; either way it is tried for ever
            retry_at = lessor.now.boot + (0.0 if self._sweep_size > 1 else RETRY_SECONDS)
            for key_hash in due:
                lessor.index.again(key_hash, retry_at)
            self._sweep_size = max(1, self._sweep_size // 16)
        return len(due) == self._sweep_size

    def _lapse(self, due: list[bytes]) -> None:
        lessor = self.lessor
        for key_hash in due:
            record = lessor.stored(key_hash)
            if record is None:
                continue
            if lessor.now.judged < record.deadline:
                lessor.lane.after(lessor.index.again, key_hash, record.deadline)
            else:
                lessor.end(key_hash, record, LAPSED, "")
                if lessor.queues:
                    lessor.pass_on(key_hash)
        lessor.store_last()

    def _end_waits(self) -> None:
        """Waits that are over get the refusal that stands now."""
        lessor = self.lessor
        for waiter in lessor.queues.ended(lessor.now.boot, SWEEP_AT_ONCE):  # the others a millisecond later
            if lessor.lane.run(lessor.end_wait, waiter) is not Outcome.COMMITTED:
                lessor.queues.remove(waiter)
                lessor.answer_unknown(waiter.call, Unknown("store"))

    def _serve_lines(self) -> None:
        """The wait after a start is over: whoever queued meanwhile gets what is free."""
        lessor = self.lessor
        for key_hash in lessor.queues.waited_for():
            lessor.lane.run(self._serve_line, key_hash)

    def _serve_line(self, key_hash: bytes) -> None:
        lessor = self.lessor
        try:
            lessor.standing(key_hash)
        except Unknown:
            return
        lessor.store_last()

    # ---- the ledger's outcomes

    def flushed(self, number: int) -> None:
        """Flush `number` is on disk: what waited for it is true now, if it still is."""
        lessor = self.lessor
        lessor.now = lessor.instant()
        ready = lessor.holds.ready(number)
        if ready and lessor.lane.run(self._confirm, ready) is not Outcome.COMMITTED:
            for key_hash, hold in ready:  # the mark stays; a renewal or the next start clears it
                lessor.holds.pop(key_hash)
                self._tell_unknown(hold, "store")
        for held in lessor.holds.pop_plain(number):
            held.call.answer(held.reply)
        if self._flushes_fail:
            self._flushes_fail = False
            log.info("store.flush_recovered", failures=lessor.journal.failures)
        lessor.mark_flushed(number)
        had_ledger = self.start.ledger_written
        self.start.flushed(number)
        if not had_ledger:
            self._tell_switches()  # with the start's second flush: after a slow first one the next second is too late
        if self.billing is not None:
            self.billing.flushed(number)
        self._raise_mark()  # beside the start's second flush, so that the first grant has a generation
        self._serve_stalled()
        lessor.journal.kick(lessor.now.boot)

    def _confirm(self, ready: list[tuple[bytes, Hold]]) -> None:
        lessor = self.lessor
        transaction, leases = lessor.lane.transaction, lessor.leases.leases
        for key_hash, hold in ready:
            lessor.lane.after(lessor.holds.pop, key_hash)  # first: a waiter that gets the key now may have a hold of its own
            raw = lessor.live_record(key_hash, hold.generation)
            if raw is None:
                lessor.lane.after(self._tell_unknown, hold, "ended")
            elif all(held.call.passed_on is not None and held.call.peer.gone() for held in hold.held):
                self.binds.end_all([(key_hash, hold.generation, UNDELIVERED)])  # who waited for it hung up during the flush
            else:
                flushed = confirmed(raw)
                transaction.put(key_hash, flushed, db=leases)
                for held in hold.held:
                    if held.call.agent_lock:
                        lessor.price(held.call, key_hash, decode_lease(flushed).holder, held.reply)
                lessor.lane.after(lessor.confirmed, key_hash, flushed, hold)

    def failed(self, number: int, error: Exception) -> None:
        """Flush `number` may have happened or not: fresh grants that waited for it are undone, renewals go back."""
        lessor = self.lessor
        if not self._flushes_fail:  # once for all of them: a full disk lasts
            self._flushes_fail = True
            log.warning("store.flush_failed", error=str(error), failures=lessor.journal.failures)
        lessor.now = lessor.instant()
        self._take_back(lessor.holds.ready(number), "store")
        for held in lessor.holds.pop_plain_failed(number, -math.inf):
            lessor.counts["unknown"] += 1
            held.call.answer(held.reply)
        self.start.failed(number)

    def _take_back(self, holds: list[tuple[bytes, Hold]], reason: str) -> None:
        for key_hash, hold in holds:
            if self.lessor.lane.run(self._undo, key_hash, hold) is Outcome.COMMITTED:
                self._tell_unknown(hold, hold.failed or reason)
            else:  # cannot be undone now: it stays marked, nothing true is said about it, and it is tried again
                hold.failed = hold.failed or reason
                hold.bound = self.lessor.now.boot + RETRY_SECONDS
                hold.number = NEVER

    def _undo(self, key_hash: bytes, hold: Hold) -> None:
        lessor = self.lessor
        lessor.lane.after(lessor.holds.pop, key_hash)  # first: a waiter that gets the key now has a hold of its own
        record = lessor.stored(key_hash)
        if record is None or record.generation != hold.generation or not record.unflushed:
            return
        before = rules.undone(record)
        if before is None:
            lessor.undo_grant(key_hash, record)
            if lessor.queues:
                lessor.pass_on(key_hash)
                lessor.store_last()
        else:
            lessor.lane.transaction.put(key_hash, encode_lease(before), db=lessor.leases.leases)
            lessor.lane.after(lessor.index.moved, key_hash, before.deadline)
            lessor.lane.after(self._count_undone)

    def _count_undone(self) -> None:
        self.lessor.counts["undone"] += 1

    def _tell_unknown(self, hold: Hold, reason: str) -> None:
        for held in hold.held:
            self.lessor.answer_unknown(held.call, Unknown(reason))

    def _serve_stalled(self) -> None:
        """A line whose free key could not be granted (no room, no generation, a full journal) is looked at again."""
        if self.lessor.stalled:
            self.lessor.stalled = False
            self._serve_lines()

    # ---- each second

    def _each_second(self) -> None:
        lessor = self.lessor
        boot = lessor.now.boot
        self._tell_switches()
        if self.billing is not None:
            self.billing.each_second()
        self._serve_stalled()
        self._say_full(boot)
        healed = [key_hash for key_hash, until in lessor.damaged.items() if until <= boot]
        lessor.lane.run(self._write_tick, healed)

    def _tell_switches(self) -> None:
        """Until there is a ledger, and room in its journal, each switch waits once, not once a heartbeat."""
        if self.start.ledger_written and not self.lessor.journal.full:
            self.switches.each_second()

    def _say_full(self, boot: float) -> None:
        """Once a minute at most, while grants are refused for want of room."""
        full = self.lessor.counts["full"]
        if full > self._said_full[0] and boot >= self._said_full[1] + SAY_FULL_SECONDS:
            self._said_full = (full, boot)
            log.warning("store.full", grants_refused=full, leases=len(self.lessor.index))

    def _forget_spent(self) -> bool:
        """True when there are more: thousands of leases a second may be given back, so a second's worth is not one transaction."""
        lessor = self.lessor
        due = lessor.tombs.take_due(lessor.now.boot, TOMBS_AT_ONCE)
        if due and lessor.lane.run(self._delete_spent, due) is not Outcome.COMMITTED:
            for rid in due:
                lessor.tombs.add(rid, lessor.now.boot)
            return False
        return len(due) == TOMBS_AT_ONCE

    def _delete_spent(self, rids: list[bytes]) -> None:
        lessor = self.lessor
        transaction = lessor.lane.transaction
        for rid in rids:
            raw = transaction.get(rid, db=lessor.leases.tombstones)
            if raw is not None and not _kept(raw, lessor.now.boot):
                transaction.delete(rid, db=lessor.leases.tombstones)

    def _write_tick(self, healed: list[bytes]) -> None:
        lessor = self.lessor
        transaction = lessor.lane.transaction
        lessor.leases.put_tick(transaction, lessor.now.boot)
        for key_hash in healed:
            transaction.delete(key_hash, db=lessor.leases.leases)
            lessor.lane.after(lessor.damaged.pop, key_hash)
            lessor.lane.after(lessor.index.forget, key_hash)

    def _raise_mark(self) -> None:
        if self.start.ledger_written and not self.lessor.gate.shut:
            self.lessor.raise_mark()


def _kept(raw: bytes, boot: float) -> bool:
    """A request_id used again after its time has a row of its own under the same name, with a bucket of its own."""
    try:
        return decode_tombstone(raw).until > boot
    except RecordDamaged:
        return False
