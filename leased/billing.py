"""Billing in the lane: the event is written in the transaction of the decision it belongs to, and told of in its reply.

What has been billed once is also kept in memory, so that a refusal reads nothing for it.  Events go to the ledger behind the answer and
leave `leases` when they are there.  No answer waits for a bill, and what cannot be recorded is not charged.

What the counts here say is what the ledger says once all that is queued for it has been written: both change by the same steps in the same
order.
"""

from __future__ import annotations

import secrets
from bisect import insort
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from typing import Final

import structlog

from leased import model
from leased.calls import Call
from leased.config_values import amount_text
from leased.lane import Outcome
from leased.lessor import Lessor
from leased.model import Reply
from leased.state.outbox import FOLDED, SEQUENCE, BillingState, decode_event, encode_event
from leased.state.records import RecordDamaged
from leased.tariff import AGENT_LOCK, REFUSAL, Event, Tariff, hour_of

log = structlog.get_logger()

EVENT_BYTES: Final = 600  # of the map, tree included: what one event may take there until it is copied
DELETED_AT_ONCE: Final = 500  # two milliseconds of the loop
SAY_OVERFLOW_SECONDS: Final = 60.0
HOURS_KEPT: Final = 400 * 24  # told apart by `usage` since; older ones only count in the whole


class Billing:
    """`max_waiting` bounds the outbox of the ledger, `max_once` the billed-once records.

    For metrics: `waiting_total`, `overflow`, `unrecorded` (facts that could not be written and so were not charged), `dead_total`,
    `uncopied` (events the ledger does not have yet), `oldest_waiting(wall)`.
    """

    def __init__(
        self, lessor: Lessor, tariff: Tariff, state: BillingState, incarnation: str, *, max_waiting: int, max_once: int
    ) -> None:
        self.tariff = tariff
        self.enabled = tariff.enabled
        self.max_waiting = max_waiting
        self._lessor = lessor
        self._incarnation = incarnation
        self.max_once = max_once
        self._most_uncopied = lessor.leases.map_bytes // 4 // EVENT_BYTES
        self._billed = {event_id for event_id, _ in state.billed}
        self._billed_order = deque(event_id for event_id, _ in state.billed)
        self._staged: set[bytes] = set()  # in the open transaction
        self._number = state.copied[1] if state.copied[0] == incarnation else 0
        self._uncopied: dict[int, None] = {}
        self._sent: deque[tuple[int, int]] = deque()  # (flush, event number)
        self._copied: list[int] = []  # in the ledger, not yet deleted here
        self._after_flush: list[tuple[int, Callable[[], object]]] = []
        self._hours: dict[str, dict[int, list[int]]] = {}
        self._folded_at = 0
        self.waiting: dict[str, deque[float]] = {}
        self.waiting_total = 0
        self.dead = dict(state.dead)
        self.overflow = state.overflow
        self.unrecorded = 0
        self._said_overflow = -SAY_OVERFLOW_SECONDS
        for (namespace, hour), counts in state.hours.items():
            self._hours.setdefault(namespace, {})[hour] = list(counts)
        for namespace, wall in state.waiting:
            self._wait(namespace, wall)
        lessor.billing = self
        lessor.free = tariff.free()
        lessor.operations[model.UsageRequest] = self.usage
        self._take_up()

    def change(self, tariff: Tariff, *, max_waiting: int, max_once: int) -> None:
        """Other prices and bounds from the next decision on; what has been charged stays charged."""
        self.tariff = tariff
        self.enabled = tariff.enabled
        self.max_waiting = max_waiting
        self.max_once = max_once
        self._lessor.free = tariff.free()

    @property
    def dead_total(self) -> int:
        return sum(self.dead.values())

    @property
    def uncopied(self) -> int:
        return len(self._uncopied)

    def oldest_waiting(self, wall: float) -> float:
        """Seconds since the oldest event that waits was decided; 0.0 when none does."""
        return max(0.0, wall - min((walls[0] for walls in self.waiting.values()), default=wall))

    def _take_up(self) -> None:
        """Events of before a crash that the ledger may lack: they are sent again, it knows which it has."""
        copied = self._number
        for number, record in self._rows():
            self._number = max(self._number, number)
            try:
                event = decode_event(record)
            except RecordDamaged as error:
                log.error("record.set_aside", table="events", error=str(error))
                self._copied.append(number)
                continue
            event_id = bytes.fromhex(event.id)
            if number > copied and event_id not in self._billed:
                self._counted(event)
            if event.kind == REFUSAL:
                self._once(event_id)
            self._send(number, record)

    def _rows(self) -> list[tuple[int, bytes]]:
        leases = self._lessor.leases
        with leases.environment.begin() as transaction:
            return [(SEQUENCE.unpack(bytes(key))[0], bytes(raw)) for key, raw in transaction.cursor(db=leases.events)]

    def reread(self) -> None:
        """The environment was opened anew after a commit whose outcome is not known.  Its callers were told null, so an event of it that is
        there all the same is not billed."""
        self._copied += [number for number, _ in self._rows() if number not in self._uncopied and number not in self._copied]

    # ---- in the decision's transaction

    def refused(self, namespace: str, key_hash: bytes, holder: str) -> Reply:
        """The charge of a refusal by `lease`."""
        if not self.tariff.enabled:
            return self.tariff.free()
        event_id = self._lessor.digests.refusal_id(namespace, key_hash, holder)
        if event_id in self._billed or event_id in self._staged:
            return self.tariff.free()
        return self._record(REFUSAL, event_id, namespace, key_hash, holder)

    def called(self, namespace: str, key_hash: bytes, holder: str) -> Reply:
        """The charge of an agent-lock call that got a true or false answer."""
        if not self.tariff.enabled:
            return self.tariff.free()
        return self._record(AGENT_LOCK, secrets.token_bytes(16), namespace, key_hash, holder)

    def _record(self, kind: str, event_id: bytes, namespace: str, key_hash: bytes, holder: str) -> Reply:
        lessor, lane = self._lessor, self._lessor.lane
        amount = self.tariff.price(kind)
        if amount == 0:
            return self.tariff.free()
        if len(self._uncopied) + len(self._copied) + len(self._staged) >= self._most_uncopied or not lessor.has_room():
            self.unrecorded += 1
            return self.tariff.free()
        holder_hash = lessor.digests.holder_hash(namespace, holder).hex()
        event = Event(event_id.hex(), kind, namespace, amount, self.tariff.currency, key_hash.hex(), holder_hash, lessor.now.wall)
        record = encode_event(event)
        self._number += 1  # an abort leaves a gap, which means nothing
        lane.transaction.put(SEQUENCE.pack(self._number), record, db=lessor.leases.events)
        self._staged.add(event_id)
        lane.on_abort(partial(self._staged.discard, event_id))
        lane.after(self._recorded, self._number, event, record)
        return self.tariff.charged(kind, event.id)

    # ---- after the commit

    def _recorded(self, number: int, event: Event, record: bytes) -> None:
        event_id = bytes.fromhex(event.id)
        self._staged.discard(event_id)
        self._counted(event)
        if event.kind == REFUSAL:
            self._once(event_id)
        self._send(number, record)

    def _counted(self, event: Event) -> None:
        counts = self._hours.setdefault(event.namespace, {}).setdefault(hour_of(event.wall), [0, 0, 0])
        counts[0] += event.amount
        counts[1 if event.kind == REFUSAL else 2] += 1
        if self.waiting_total >= self.max_waiting:
            self.overflow += 1
        else:
            self._wait(event.namespace, event.wall)

    def _wait(self, namespace: str, wall: float) -> None:
        self.waiting.setdefault(namespace, deque()).append(wall)
        self.waiting_total += 1

    def _once(self, event_id: bytes) -> None:
        if event_id in self._billed:
            return
        self._billed.add(event_id)
        self._billed_order.append(event_id)
        while len(self._billed) > self.max_once:
            oldest = self._billed_order.popleft()
            self._billed.discard(oldest)
            self._lessor.journal.append(("unbill", oldest))

    def _send(self, number: int, record: bytes) -> None:
        flush = self._lessor.journal.append(("event", self._incarnation, number, record, self.max_waiting))
        self._uncopied[number] = None
        self._sent.append((flush, number))

    def flushed(self, flush: int) -> None:
        """Events up to this flush are in the ledger: they leave `leases`."""
        while self._sent and self._sent[0][0] <= flush:
            number = self._sent.popleft()[1]
            self._uncopied.pop(number, None)
            self._copied.append(number)
        self.clear_copied()
        ready = [call for number, call in self._after_flush if number <= flush]
        self._after_flush = [entry for entry in self._after_flush if entry[0] > flush]
        for call in ready:
            call()

    def when_flushed(self, flush: int, call: Callable[[], object]) -> None:
        """`call` follows when this flush, or a later one that repeats what it failed to write, is on the disk."""
        self._after_flush.append((flush, call))

    def clear_copied(self) -> None:
        """Delete some of what has been copied; what cannot be deleted now is tried again at the next flush or second."""
        numbers = self._copied[:DELETED_AT_ONCE]
        if numbers and self._lessor.lane.run(self._delete, numbers) is Outcome.COMMITTED:
            del self._copied[: len(numbers)]

    def _delete(self, numbers: list[int]) -> None:
        for number in numbers:
            self._lessor.lane.transaction.delete(SEQUENCE.pack(number), db=self._lessor.leases.events)

    def each_second(self) -> None:
        self.clear_copied()
        now = self._lessor.now
        if self.overflow and self.waiting_total >= self.max_waiting and now.boot >= self._said_overflow + SAY_OVERFLOW_SECONDS:
            self._said_overflow = now.boot
            log.error("outbox.full", events=self.waiting_total, overflow=self.overflow)
        before = hour_of(now.wall) - HOURS_KEPT
        if before > self._folded_at:
            self._folded_at = before
            self._fold(before)

    def _fold(self, before: int) -> None:
        folded = False
        for hours in self._hours.values():
            for hour in [hour for hour in hours if FOLDED < hour < before]:
                whole, part = hours.setdefault(FOLDED, [0, 0, 0]), hours.pop(hour)
                whole[:] = [old + new for old, new in zip(whole, part, strict=True)]
                folded = True
        if folded:
            self._lessor.journal.append(("fold_hours", before))

    # ---- upstream and operators tell

    def delivered(self, namespaces: Iterable[str]) -> None:
        """Events of these namespaces, the oldest of each, are no longer waiting."""
        for namespace in namespaces:
            walls = self.waiting.get(namespace)
            if walls:
                walls.popleft()
                self.waiting_total -= 1
                if not walls:
                    del self.waiting[namespace]

    def buried(self, namespace: str | None) -> None:
        """One more dead letter; None: of a record that could not be read, and was never counted as waiting."""
        if namespace is not None:
            self.delivered([namespace])
        self.dead[namespace or ""] = self.dead.get(namespace or "", 0) + 1

    def exhumed(self, namespace: str | None, wall: float | None) -> None:
        """One dead letter less.  With `wall`, when it was decided, it waits again."""
        self.dead[namespace or ""] = self.dead.get(namespace or "", 0) - 1
        if namespace is not None and wall is not None:
            insort(self.waiting.setdefault(namespace, deque()), wall)
            self.waiting_total += 1

    # ---- usage

    def usage(self, call: Call, request: model.UsageRequest) -> None:
        self._lessor.gate.admit_reading()
        self._lessor.lane.after(call.answer, self.used(call.identity.namespace, request.since))

    def used(self, namespace: str, since: float | None) -> Reply:
        """`since` counts from the beginning of its hour."""
        hours = self._hours.get(namespace, {})
        first = hour_of(since) if since is not None else FOLDED
        amount, refusals, calls = (sum(counts[at] for hour, counts in hours.items() if hour >= first) for at in range(3))
        walls = self.waiting.get(namespace)
        return {
            "namespace": namespace,
            "currency": self.tariff.currency,
            "amount": amount_text(amount),
            "refusals_billed": refusals,
            "calls_billed": calls,
            "pending_upstream": len(walls) if walls else 0,
            "oldest_pending_seconds": max(0.0, self._lessor.now.wall - walls[0]) if walls else None,
            "dead_letters": self.dead.get(namespace, 0),
        }
