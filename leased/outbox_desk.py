"""`outbox_list`, `outbox_retry`, `outbox_drop`: what an operator can do about events that upstream will not take.

The dead letters are read in the ledger's thread, since there may be many; what is to happen to them is queued like everything else the
ledger is told, and said to have happened when it is on the disk.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice
from typing import Any, Final, NamedTuple, Protocol

import structlog

from leased import model
from leased.billing import Billing
from leased.calls import Call
from leased.clock import rfc3339
from leased.config_values import amount_text
from leased.errors import PeerError
from leased.holds import MAX_HOLD_SECONDS, Held
from leased.lessor import Lessor
from leased.model import Reply
from leased.rules import UNKNOWN_RETRY_SECONDS
from leased.state.ledger import Ledger
from leased.state.outbox import DeadLetter, dead_letters
from leased.state.payments import Payment
from leased.tariff import KINDS
from leased.upstream import Shipper
from leased.views import require_operator

log = structlog.get_logger()

PAGE_BYTES: Final = 48 * 1024  # a page ends here even below its limit
LETTER_BYTES: Final = 300  # without its texts


class Reading(Protocol):
    """The ledger's thread: see writer.py."""

    def read(self, question: Callable[[Ledger], Any], done: Callable[[Any, Exception | None], None]) -> None: ...


Letters = list[DeadLetter]


class Page(NamedTuple):
    letters: list[Reply]
    cursor: str | None


class OutboxDesk:
    """`answered` is called when answers were given outside of a turn."""

    def __init__(
        self, lessor: Lessor, billing: Billing, reading: Reading, shipper: Shipper | None, answered: Callable[[], None]
    ) -> None:
        self._lessor = lessor
        self._billing = billing
        self._reading = reading
        self._shipper = shipper
        self._answered = answered
        lessor.operations[model.OutboxListRequest] = self.list
        lessor.operations[model.OutboxRetryRequest] = self.retry
        lessor.operations[model.OutboxDropRequest] = self.drop

    def list(self, call: Call, request: model.OutboxListRequest) -> None:
        require_operator(call.identity, "outbox_list")
        self._lessor.gate.admit_reading()

        def told(page: Page) -> None:
            call.answer(standing(self._billing, self._shipper) | {"dead": page.letters, "cursor": page.cursor})

        self._ask(call, lambda ledger: page_of(ledger, request.limit, request.cursor or 0), told)

    def retry(self, call: Call, request: model.OutboxRetryRequest) -> None:
        require_operator(call.identity, "outbox_retry")
        self._lessor.gate.admit()
        self._ask(call, lambda ledger: chosen(ledger, request.sequence), lambda letters: self._retry(call, letters))

    def drop(self, call: Call, request: model.OutboxDropRequest) -> None:
        require_operator(call.identity, "outbox_drop")
        self._lessor.gate.admit()
        if request.payment:
            self._lessor.lane.after(self._forget, call)
            return
        self._ask(call, lambda ledger: chosen(ledger, request.sequence), lambda letters: self._drop(call, letters))

    def _ask(self, call: Call, question: Callable[[Ledger], Any], told: Callable[[Any], None]) -> None:
        def done(answer: Any, error: Exception | None) -> None:
            if error is None:
                told(answer)
            else:
                call.refuse(PeerError("internal", "the ledger cannot be read now; try again"))
            self._answered()

        self._lessor.lane.after(self._reading.read, question, done)

    def _retry(self, call: Call, letters: Letters) -> None:
        """Those that cannot be read stay where they are."""
        whole = [letter for letter in letters if letter.event is not None]
        if not whole:
            call.answer({"retried": 0})
            return
        number = self._lessor.journal.append(("unbury", [letter.sequence for letter in whole], True))
        for _, event, _ in whole:
            if event is not None:
                self._billing.exhumed(event.namespace, event.wall)
        if self._shipper is not None:
            self._billing.when_flushed(number, self._shipper.look_again)
        log.warning("outbox.retried", events=len(whole), uid=call.identity.uid)
        self._hold(call, {"retried": len(whole)}, number)

    def _drop(self, call: Call, letters: Letters) -> None:
        if not letters:
            call.answer({"dropped": 0, "payment": None})
            return
        number = self._lessor.journal.append(("unbury", [letter.sequence for letter in letters], False))
        for _, event, _ in letters:
            self._billing.exhumed(None if event is None else event.namespace, None)
        log.warning("outbox.dropped", events=len(letters), uid=call.identity.uid)
        self._hold(call, {"dropped": len(letters), "payment": None}, number)

    def _forget(self, call: Call) -> None:
        payer = self._shipper.payer if self._shipper is not None else None
        payment = payer.forget() if payer is not None else None
        if payment is None:
            call.answer({"dropped": 0, "payment": None})
            return
        log.warning("upstream.payment_forgotten", amount=amount_text(payment.amount), nonce=payment.nonce, uid=call.identity.uid)
        self._hold(call, {"dropped": 0, "payment": shown(payment)}, self._lessor.journal.open_number)

    def _hold(self, call: Call, reply: Reply, number: int) -> None:
        """What a power cut could undo is not said before the ledger has it."""
        lessor = self._lessor
        lessor.now = lessor.instant()
        otherwise = dict.fromkeys(reply) | {"reason": "store", "retry_after_seconds": UNKNOWN_RETRY_SECONDS}
        lessor.holds.add_plain(number, lessor.now.boot + MAX_HOLD_SECONDS, Held(call, reply), otherwise)
        lessor.journal.kick(lessor.now.boot)


def standing(billing: Billing, shipper: Shipper | None) -> Reply:
    """How the outbox stands, all namespaces together."""
    payer = shipper.payer if shipper is not None else None
    return {
        "waiting": billing.waiting_total,
        "dead_letters": billing.dead_total,
        "overflow": billing.overflow,
        "upstream": shipper is not None,
        "failing": shipper.failing if shipper is not None else "",
        "payment": shown(payer.payment) if payer is not None and payer.payment is not None else None,
    }


def shown(payment: Payment) -> Reply:
    """A payment as an operator looks for it on the chain.  Its signature stays in the ledger."""
    return {
        "amount": amount_text(payment.amount),
        "network": payment.network,
        "asset": payment.asset,
        "payee": payment.payee,
        "payer": payment.payer,
        "nonce": payment.nonce,
        "valid_before": rfc3339(payment.valid_before),
        "events": len(payment.sequences),
    }


# ---- in the ledger's thread, or under the directory's lock


def page_of(ledger: Ledger, limit: int, after: int) -> Page:
    letters: list[Reply] = []
    size = 0
    with ledger.environment.begin() as transaction:
        for letter in dead_letters(transaction, ledger, after):
            if len(letters) >= limit or size >= PAGE_BYTES:
                return Page(letters, str(letters[-1]["sequence"]))
            letters.append(described(letter))
            size += LETTER_BYTES + len(letter.why) + (len(letter.event.namespace) if letter.event is not None else 0)
    return Page(letters, None)


def chosen(ledger: Ledger, sequence: int | None) -> list[DeadLetter]:
    """One dead letter, or all of them; empty when there is none."""
    with ledger.environment.begin() as transaction:
        if sequence is None:
            return list(dead_letters(transaction, ledger))
        return [letter for letter in islice(dead_letters(transaction, ledger, sequence - 1), 1) if letter.sequence == sequence]


def described(letter: DeadLetter) -> Reply:
    event = letter.event
    return {
        "sequence": letter.sequence,
        "event_id": None if event is None else event.id,
        "type": None if event is None else KINDS[event.kind],
        "namespace": None if event is None else event.namespace,
        "amount": None if event is None else amount_text(event.amount),
        "currency": None if event is None else event.currency,
        "time": None if event is None else rfc3339(event.wall),
        "why": letter.why,
    }
