"""Ships the outbox upstream, oldest first, each event under one id for ever.  Nothing here ever delays a lease.

What upstream may answer, and what happens then, is the table `verdict`.  An event leaves the outbox only when upstream has said that
it has it; a crash in between sends it again under the same id, and upstream ignores repeats.  A hung or hostile upstream costs one task, one
bounded answer and one time limit.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Awaitable, Callable
from email.utils import parsedate_to_datetime
from enum import Enum
from typing import Any, Final, NamedTuple

import structlog
import trio

from leased.billing import Billing
from leased.clock import Clock, rfc3339
from leased.config_keys import Upstream
from leased.config_values import amount_text
from leased.state.journal import Journal
from leased.state.outbox import Waiting, oldest
from leased.state.writer import WriterThread
from leased.tariff import KINDS, Event

log = structlog.get_logger()

MEDIA_TYPE: Final = "application/cloudevents-batch+json"
MAX_ANSWER_BYTES: Final = 64 * 1024  # of which only a demand for payment is read
FIRST_BACKOFF_SECONDS: Final = 1.0
MAX_BACKOFF_SECONDS: Final = 300.0  # an ambiguous time-out must be tried again well within upstream's memory of ids
MAX_RETRY_AFTER_SECONDS: Final = 3600.0
IDLE_SECONDS: Final = 0.5


class Verdict(Enum):
    TAKEN = "taken"
    POISONED = "poisoned"  # one of these events will never be taken
    TOO_LARGE = "too_large"
    UNAUTHORIZED = "unauthorized"
    UNPAID = "unpaid"
    LATER = "later"


class Answer(NamedTuple):
    """What came back.  `status` 0: nothing did, or not in time.  `retry_after` in seconds, 0.0 when not said."""

    status: int
    retry_after: float = 0.0
    headers: tuple[tuple[str, str], ...] = ()
    body: bytes = b""
    error: str = ""


class Batch(NamedTuple):
    sequences: list[int]
    events: list[Event]
    body: bytes
    key: str


Pay = Callable[[Batch, Answer], Awaitable["dict[str, str] | None"]]
"""Meets a demand for payment: the headers to send the batch again with, or None when it will not be met."""
Post = Callable[[bytes, "dict[str, str]"], Awaitable[Answer]]


def verdict(status: int) -> Verdict:
    if 200 <= status < 300 or status == 409:
        return Verdict.TAKEN
    if status in {400, 422}:
        return Verdict.POISONED
    if status == 413:
        return Verdict.TOO_LARGE
    if status in {401, 403}:
        return Verdict.UNAUTHORIZED
    return Verdict.UNPAID if status == 402 else Verdict.LATER


def cloud_event(event: Event, source: str) -> dict[str, Any]:
    """CloudEvents 1.0.  The same fact gives the same bytes on every sending: some collectors compare the time too."""
    return {
        "specversion": "1.0",
        "id": event.id,
        "source": source,
        "type": KINDS[event.kind],
        "subject": event.namespace,
        "time": rfc3339(event.wall),
        "datacontenttype": "application/json",
        "data": {
            "amount": amount_text(event.amount),
            "currency": event.currency,
            "key_hash": event.key_hash,
            "holder_hash": event.holder_hash,
        },
    }


def batch_of(rows: list[Waiting], source: str) -> Batch:
    events = [row.event for row in rows if row.event is not None]
    body = json.dumps([cloud_event(event, source) for event in events], separators=(",", ":")).encode()
    key = hashlib.sha256("\n".join(event.id for event in events).encode()).hexdigest()
    return Batch([row.sequence for row in rows if row.event is not None], events, body, key)


class Shipper:
    """The task.  `failing` says in a word why nothing is being taken, for readyz and metrics; empty while all is well."""

    def __init__(
        self,
        config: Upstream,
        billing: Billing,
        journal: Journal,
        writer: WriterThread,
        clock: Clock,
        install_id: str,
        post: Post,
        pay: Pay | None,
    ) -> None:
        self._most = config.batch_events
        self._size = config.batch_events
        self._billing = billing
        self._journal = journal
        self._writer = writer
        self._clock = clock
        self._source = f"urn:leased:{install_id}"
        self._post = post
        self._pay = pay
        self._after = 0
        self._failures = 0
        self.failing = ""
        self.shipped = 0
        self.attempts = 0

    def look_again(self) -> None:
        """Dead letters have come back: begin with the oldest."""
        self._after = 0

    async def run(self) -> None:
        """For ever.  Cancellation leaves the outbox as it is: what was sent and not yet dropped is sent again after the next start."""
        while True:
            if not self._billing.waiting_total or not (rows := await self._oldest()):
                await trio.sleep(IDLE_SECONDS)
                continue
            for row in rows:
                if row.event is None:
                    self._bury(row, "the record is damaged")
            batch = batch_of(rows, self._source)
            if batch.events:
                pause = await self.ship(batch)
                if pause:
                    await trio.sleep(pause)

    async def _oldest(self) -> list[Waiting]:
        """Read in the writer's thread.  Cancellation abandons the reading."""
        after, most = self._after, self._size
        answered: list[list[Waiting]] = []
        done = trio.Event()

        def take(rows: list[Waiting], error: Exception | None) -> None:
            if error is None:
                answered.append(rows)
            done.set()

        self._writer.read(lambda ledger: oldest(ledger, most, after), take)
        await done.wait()
        return answered[0] if answered else []

    async def ship(self, batch: Batch) -> float:
        """One attempt.  Returns the seconds to wait before the next.  Cancellation: as `run`."""
        headers = {"content-type": MEDIA_TYPE, "idempotency-key": batch.key}
        self.attempts += 1
        answer = await self._post(batch.body, headers)
        if answer.status == 402 and self._pay is not None:
            paid = await self._pay(batch, answer)
            if paid is not None:
                answer = await self._post(batch.body, headers | paid)
        return self._judge(batch, answer)

    def _judge(self, batch: Batch, answer: Answer) -> float:
        outcome = verdict(answer.status)
        if outcome is Verdict.TAKEN:
            self._dropped(batch)
            return 0.0
        if outcome is Verdict.TOO_LARGE and len(batch.events) > 1:
            self._size = max(1, len(batch.events) // 2)
            return 0.0
        if outcome in {Verdict.POISONED, Verdict.TOO_LARGE}:
            if len(batch.events) > 1:
                self._size = max(1, len(batch.events) // 2)
                return 0.0
            self._bury(Waiting(batch.sequences[0], batch.events[0]), f"upstream answered {answer.status}")
            return 0.0
        return self._back_off(outcome, answer)

    def _dropped(self, batch: Batch) -> None:
        self._journal.append(("shipped", batch.sequences))
        self._journal.kick(self._clock.now().boot)
        self._billing.delivered([event.namespace for event in batch.events])
        self._after = batch.sequences[-1]
        self._size = min(self._most, self._size * 2)
        self._failures = 0
        self.shipped += len(batch.events)
        if self.failing:
            log.info("upstream.recovered", was=self.failing)
            self.failing = ""

    def _bury(self, row: Waiting, why: str) -> None:
        self._journal.append(("bury", row.sequence, why))
        self._journal.kick(self._clock.now().boot)
        self._after = row.sequence
        self._size = min(self._most, max(1, self._size) * 2)
        if row.event is not None:
            self._billing.buried(row.event.namespace)
        log.error("upstream.buried", event_id=row.event.id if row.event is not None else None, sequence=row.sequence, why=why)

    def _back_off(self, outcome: Verdict, answer: Answer) -> float:
        """Full jitter, so that a thousand hosts do not come back at once; what upstream asks for is the least."""
        ceiling = min(MAX_BACKOFF_SECONDS, FIRST_BACKOFF_SECONDS * 2 ** min(self._failures, 20))
        self._failures += 1
        if self.failing != outcome.value:
            self.failing = outcome.value
            say = log.error if outcome in {Verdict.UNAUTHORIZED, Verdict.UNPAID} else log.warning
            name = {Verdict.UNAUTHORIZED: "upstream.refused", Verdict.UNPAID: "upstream.unpaid"}.get(outcome, "upstream.failed")
            say(name, status=answer.status, error=answer.error)
        return max(random.uniform(0, ceiling), min(answer.retry_after, MAX_RETRY_AFTER_SECONDS), 0.05)


def retry_after_of(value: str | None, wall: float) -> float:
    """The header in seconds, from either of its forms; 0.0 for none or nonsense."""
    if value is None:
        return 0.0
    try:
        return max(0.0, float(value))
    except ValueError:
        pass
    try:
        return max(0.0, parsedate_to_datetime(value).timestamp() - wall)
    except (ValueError, TypeError, OverflowError):
        return 0.0
