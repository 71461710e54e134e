"""Ships the outbox upstream, oldest first, each event under one id for ever.  Nothing here ever delays a lease.

What upstream may answer, and what happens then, is the table `verdict`.  An event leaves the outbox only when upstream has said that
it has it; a crash in between sends it again under the same id, and upstream ignores repeats.  A hung or hostile upstream costs one task, one
bounded answer and one time limit.

A demand for payment is met by a `Payer`, if there is one.  While a payment is under way its batch is the only one that is sent, byte for byte
the same, with the same payment: whether the first sending was paid for cannot be known, and must not be paid for twice.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Awaitable, Callable
from email.utils import parsedate_to_datetime
from enum import Enum
from itertools import takewhile
from typing import Any, Final, NamedTuple, Protocol

import structlog
import trio

from leased.billing import Billing
from leased.clock import Clock, rfc3339
from leased.config_keys import X402, Upstream
from leased.config_values import amount_text
from leased.state.journal import Journal
from leased.state.ledger import Ledger
from leased.state.outbox import Waiting, oldest, these
from leased.state.payments import Payment
from leased.state.writer import WriterThread
from leased.tariff import KINDS, Event

log = structlog.get_logger()

MEDIA_TYPE: Final = "application/cloudevents-batch+json"
MAX_ANSWER_BYTES: Final = 64 * 1024  # of which only a demand for payment is read
FIRST_BACKOFF_SECONDS: Final = 1.0
MAX_BACKOFF_SECONDS: Final = 300.0  # an ambiguous time-out must be tried again well within upstream's memory of ids
MIN_BACKOFF_SECONDS: Final = 0.05
MAX_RETRY_AFTER_SECONDS: Final = 3600.0
IDLE_SECONDS: Final = 0.5
TAKEN_BEFORE_LARGER: Final = 100  # batches, after upstream has called one too large, before a larger one is tried again
BURIED_IN_A_ROW: Final = 3  # then upstream refuses everything rather than one event, and is asked less and less often


class Verdict(Enum):
    TAKEN = "taken"
    POISONED = "poisoned"  # one of these events will never be taken
    TOO_LARGE = "too_large"
    UNAUTHORIZED = "unauthorized"
    UNPAID = "unpaid"
    LATER = "later"


_SAID: Final = {Verdict.UNAUTHORIZED: "upstream.refused", Verdict.UNPAID: "upstream.unpaid"}


class Answer(NamedTuple):
    """What came back.  `status` 0: nothing did, or not in time.  `retry_after` in seconds, 0.0 when not said; header names in lower case."""

    status: int
    retry_after: float = 0.0
    headers: tuple[tuple[str, str], ...] = ()
    body: bytes = b""
    error: str = ""

    def header(self, name: str) -> str | None:
        return next((value for given, value in self.headers if given == name), None)


class Batch(NamedTuple):
    sequences: list[int]
    events: list[Event]
    body: bytes
    key: str


class Payer(Protocol):
    """Meets demands for payment within its caps.  `payment`: the one under way.  `why`: in a few words, why the last demand was not met,
    or is not known to have been."""

    payment: Payment | None
    why: str

    def change(self, config: X402, signer: Any) -> None:
        """Other caps and another wallet, from the next demand on."""
        ...

    async def pay(self, batch: Batch, demand: Answer) -> Payment | None:
        """Sign for this batch and record it durably; None when the demand is not met.  Cancellation leaves a recorded payment or none."""
        ...

    def taken(self, answer: Answer) -> None:
        """Upstream has taken the batch that the payment went with."""
        ...

    def unresolved(self, answer: Answer) -> None:
        """It has not said so."""
        ...

    def forget(self) -> Payment | None:
        """An operator says that the payment under way is over.  Returns it, or None when there is none."""
        ...


Post = Callable[[bytes, "dict[str, str]"], Awaitable[Answer]]
"""Body and headers to answer.  Never raises but Cancelled, which leaves the outcome unknown."""


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
    """Of rows that can be read."""
    sequences = [row.sequence for row in rows]
    events = [row.event for row in rows if row.event is not None]
    body = json.dumps([cloud_event(event, source) for event in events], separators=(",", ":")).encode()
    key = hashlib.sha256("\n".join(event.id for event in events).encode()).hexdigest()
    return Batch(sequences, events, body, key)


class Shipper:
    """The task.  For readyz and metrics: `failing` says in a word why nothing is being taken (empty while all is well), `shipped` counts
    events taken, `buried` those given up, `attempts` requests, `failures` those since the last that was taken."""

    def __init__(
        self,
        config: Upstream,
        billing: Billing,
        journal: Journal,
        writer: WriterThread,
        clock: Clock,
        install_id: str,
        post: Post,
        payer: Payer | None = None,
    ) -> None:
        self.payer = payer
        self._most = config.batch_events
        self._ceiling = config.batch_events  # what upstream has not called too large
        self._size = config.batch_events
        self._billing = billing
        self._journal = journal
        self._writer = writer
        self._clock = clock
        self._source = f"urn:leased:{install_id}"
        self._post = post
        self._hurried = trio.Event()
        self._after = 0
        self._looked = False
        self._suspects = 0  # so many from here on, of which upstream will not take one
        self._taken_in_a_row = 0
        self._buried_in_a_row = 0
        self.failures = 0
        self.failing = ""
        self.shipped = 0
        self.buried = 0
        self.attempts = 0

    def change(self, config: Upstream, post: Post) -> None:
        """Ship by `post` from the next attempt on; one under way goes on as it was begun."""
        self._post = post
        self._most = self._ceiling = config.batch_events
        self._size = min(self._size, self._most)

    def hurry(self) -> None:
        """Whatever was wrong may have been mended: try again now."""
        self.failures = 0
        self._hurried.set()

    def look_again(self) -> None:
        """Dead letters have come back: begin with the oldest."""
        self._after = 0

    async def run(self) -> None:
        """For ever.  Cancellation leaves the outbox as it is: what was sent and not yet dropped is sent again after the next start."""
        while True:
            try:
                pause = await self.step()
            except Exception:  # a mistake in here must not end the daemon, whose leases have nothing to do with it
                log.exception("upstream.failed", status=0, error="a fault of the daemon itself")
                pause = MAX_BACKOFF_SECONDS
            if pause:
                with trio.move_on_after(pause):
                    await self._hurried.wait()
            self._hurried = trio.Event()

    async def step(self) -> float:
        """Ship the oldest batch, if there is one.  Returns the seconds to wait before the next.  Cancellation: as `run`."""
        payment = self.payer.payment if self.payer is not None else None
        if self._looked and not self._billing.waiting_total and payment is None:
            return IDLE_SECONDS
        rows = await self._rows(payment)
        if rows is None:
            return IDLE_SECONDS
        self._looked = True
        if payment is None and rows and rows[0].event is None:
            self._bury(rows[0], "the record is damaged")
            return 0.0
        batch = batch_of(list(takewhile(lambda row: row.event is not None, rows)), self._source)
        if payment is not None and batch.sequences != payment.sequences:
            return self._back_off(Verdict.UNPAID, Answer(402, error="the batch of the payment under way is not there any more"))
        return await self.ship(batch, payment) if batch.events else IDLE_SECONDS

    async def _rows(self, payment: Payment | None) -> list[Waiting] | None:
        """Read in the writer's thread; None when it cannot be read.  Cancellation abandons the reading."""
        after, most = self._after, self._size
        answered: list[list[Waiting] | None] = []
        done = trio.Event()

        def question(ledger: Ledger) -> list[Waiting]:
            return oldest(ledger, most, after) if payment is None else these(ledger, payment.sequences)

        def take(rows: list[Waiting], error: Exception | None) -> None:
            answered.append(rows if error is None else None)
            done.set()

        self._writer.read(question, take)
        await done.wait()
        return answered[0]

    async def ship(self, batch: Batch, payment: Payment | None = None) -> float:
        """One attempt.  Returns the seconds to wait before the next.  Cancellation: as `run`."""
        headers = {"content-type": MEDIA_TYPE, "idempotency-key": batch.key}
        if payment is not None:
            headers[payment.header] = payment.value
        answer = await self._send(batch, headers)
        if answer.status == 402 and payment is None and self.payer is not None:
            payment = await self.payer.pay(batch, answer)
            if payment is None:
                return self._back_off(Verdict.UNPAID, answer._replace(error=self.payer.why))
            headers[payment.header] = payment.value
            answer = await self._send(batch, headers)
        return self._judge(batch, answer) if payment is None else self._judge_paid(batch, answer)

    async def _send(self, batch: Batch, headers: dict[str, str]) -> Answer:
        self.attempts += 1
        return await self._post(batch.body, dict(headers))

    def _judge(self, batch: Batch, answer: Answer) -> float:
        outcome = verdict(answer.status)
        if outcome is Verdict.TAKEN:
            self._dropped(batch)
            return 0.0
        if outcome in {Verdict.POISONED, Verdict.TOO_LARGE} and len(batch.events) > 1:
            self._halve(batch, outcome)
            return 0.0
        if outcome is Verdict.POISONED and self._billing.dead_total < self._billing.max_waiting:
            self._bury(Waiting(batch.sequences[0], batch.events[0]), f"upstream answered {answer.status}")
            self._buried_in_a_row += 1
            return 0.0 if self._buried_in_a_row < BURIED_IN_A_ROW else self._back_off(outcome, answer)
        return self._back_off(outcome, answer)

    def _judge_paid(self, batch: Batch, answer: Answer) -> float:
        """Anything but a batch taken leaves the payment under way: its batch stays as it is."""
        assert self.payer is not None
        outcome = verdict(answer.status)
        if outcome is Verdict.TAKEN:
            self.payer.taken(answer)
            self._dropped(batch)
            return 0.0
        if outcome in {Verdict.POISONED, Verdict.TOO_LARGE}:
            self._halve(batch, outcome)  # for when this payment is out of the way
            outcome = Verdict.UNPAID
        self.payer.unresolved(answer)
        return self._back_off(outcome, answer._replace(error=answer.error or self.payer.why))

    def _halve(self, batch: Batch, outcome: Verdict) -> None:
        self._size = max(1, len(batch.events) // 2)
        if outcome is Verdict.TOO_LARGE:
            self._ceiling = self._size
            self._taken_in_a_row = 0
        else:
            self._suspects = len(batch.events)

    def _dropped(self, batch: Batch) -> None:
        self._journal.append(("shipped", batch.sequences))
        self._journal.kick(self._clock.now().boot)
        self._billing.delivered(event.namespace for event in batch.events)
        self._after = batch.sequences[-1]
        self._taken_in_a_row += 1
        if self._taken_in_a_row % TAKEN_BEFORE_LARGER == 0:
            self._ceiling = min(self._most, self._ceiling * 2)
        self._suspects = max(0, self._suspects - len(batch.events))
        self._size = min(self._ceiling, max(1, self._suspects // 2) if self._suspects else self._size * 2)
        self.failures = self._buried_in_a_row = 0
        self.shipped += len(batch.events)
        if self.failing:
            log.info("upstream.recovered", was=self.failing)
            self.failing = ""

    def _bury(self, row: Waiting, why: str) -> None:
        self._journal.append(("bury", row.sequence, why))
        self._journal.kick(self._clock.now().boot)
        self._after = row.sequence
        self._suspects = 0
        self._size = min(self._ceiling, self._size * 2)
        self._billing.buried(row.event.namespace if row.event is not None else None)
        self.buried += 1
        log.error("upstream.buried", event_id=row.event.id if row.event is not None else None, sequence=row.sequence, why=why)

    def _back_off(self, outcome: Verdict, answer: Answer) -> float:
        """Full jitter, so that a thousand hosts do not come back at once; what upstream asks for is the least."""
        ceiling = min(MAX_BACKOFF_SECONDS, FIRST_BACKOFF_SECONDS * 2 ** min(self.failures, 20))
        self.failures += 1
        if self.failing != outcome.value:
            self.failing = outcome.value
            say = log.error if outcome in _SAID else log.warning
            say(_SAID.get(outcome, "upstream.failed"), status=answer.status, error=answer.error, attempts=self.attempts)
        return max(random.uniform(0, ceiling), min(answer.retry_after, MAX_RETRY_AFTER_SECONDS), MIN_BACKOFF_SECONDS)


def retry_after_of(value: str | None, wall: float) -> float:
    """The header in seconds, from either of its forms; 0.0 for none or nonsense."""
    if value is None:
        return 0.0
    if value.strip().isascii() and value.strip().isdigit():
        return float(value.strip()[:12])
    try:
        return max(0.0, parsedate_to_datetime(value).timestamp() - wall)
    except (ValueError, TypeError, OverflowError):
        return 0.0
