"""What an operator does about dead letters: said when it is on the disk, counted as it is done, and for operators alone."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import structlog
from billed import BilledWorld, billed_world
from upstreams import Scripted, bill, shipper_of

from leased.calls import Call
from leased.model import Identity, OutboxDropRequest, OutboxListRequest, OutboxRetryRequest, Reply, Request
from leased.outbox_desk import LETTER_BYTES, PAGE_BYTES, OutboxDesk
from leased.state.payments import Payment
from leased.upstream import Answer, Shipper

PAYMENT = Payment(
    [1], "payment-signature", "the-signature", 4_000, "eip155:84532", "0xa", "0xb", "0xc", "0x1", 1_900_000_000, 20_000
)


class Payer:
    """One payment under way, until it is forgotten."""

    why = ""

    def __init__(self, w: BilledWorld) -> None:
        self.payment: Payment | None = PAYMENT
        self._journal = w.journal

    async def pay(self, batch: object, demand: object) -> Payment | None:
        raise AssertionError

    def taken(self, answer: object) -> None: ...

    def unresolved(self, answer: object) -> None: ...

    def forget(self) -> Payment | None:
        payment, self.payment = self.payment, None
        if payment is not None:
            self._journal.append(("paid", payment.nonce))
        return payment


@pytest.fixture
def w() -> Iterator[BilledWorld]:
    with billed_world(instant=True) as made:
        yield made


@pytest.fixture
def shipper(w: BilledWorld) -> Shipper:
    return shipper_of(w, Scripted(Answer(422)), Payer(w), batch_events=1)


@pytest.fixture
def answered(w: BilledWorld, shipper: Shipper) -> list[int]:
    told: list[int] = []
    OutboxDesk(w.lessor, w.billing, w, shipper, lambda: told.append(1))
    return told


def bury(w: BilledWorld, count: int) -> None:
    bill(w, count)
    for sequence in range(1, count + 1):
        w.journal.append(("bury", sequence, "upstream answered 422"))
        w.billing.buried("local")
    w.journal.kick(w.clock.now().boot)


def ask(w: BilledWorld, request: Request) -> Reply:
    reply = w.ask("operator", request)
    assert reply is not None
    return reply


def test_the_list_tells_letters_and_standing_and_no_signature(w: BilledWorld, answered: list[int]) -> None:
    bury(w, 2)
    reply = ask(w, OutboxListRequest())
    assert [letter["sequence"] for letter in reply["dead"]] == [1, 2]
    assert set(reply["dead"][0]) == {"sequence", "event_id", "type", "namespace", "amount", "currency", "time", "why"}
    assert (reply["dead_letters"], reply["waiting"], reply["cursor"], reply["failing"], reply["upstream"]) == (2, 0, None, "", True)
    assert (reply["payment"]["nonce"], reply["payment"]["amount"]) == ("0x1", "0.004")
    assert "the-signature" not in str(reply)
    assert answered == [1]


def test_pages_end_by_number_and_by_size(w: BilledWorld, answered: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    bury(w, 5)
    page = ask(w, OutboxListRequest(limit=2))
    assert ([letter["sequence"] for letter in page["dead"]], page["cursor"]) == ([1, 2], "2")
    assert [letter["sequence"] for letter in ask(w, OutboxListRequest(limit=2, cursor=4))["dead"]] == [5]
    monkeypatch.setattr("leased.outbox_desk.PAGE_BYTES", LETTER_BYTES)
    assert len(ask(w, OutboxListRequest())["dead"]) == 1
    assert PAGE_BYTES < 64 * 1024


def test_a_retried_letter_waits_again_and_the_shipper_looks(w: BilledWorld, shipper: Shipper, answered: list[int]) -> None:
    bury(w, 2)
    shipper._after = 7
    assert ask(w, OutboxRetryRequest(sequence=1)) == {"retried": 1}
    assert (len(w.outbox()), w.used()["dead_letters"], w.used()["pending_upstream"], shipper._after) == (1, 1, 1, 0)
    assert ask(w, OutboxRetryRequest(sequence=1)) == {"retried": 0}
    w.assert_accounts_agree()


def test_all_are_dropped_for_good(w: BilledWorld, answered: list[int]) -> None:
    bury(w, 3)
    with structlog.testing.capture_logs() as logs:
        assert ask(w, OutboxDropRequest(all=True)) == {"dropped": 3, "payment": None}
    assert [(line["event"], line["events"], line["uid"]) for line in logs] == [("outbox.dropped", 3, 1000)]
    assert ask(w, OutboxDropRequest(all=True)) == {"dropped": 0, "payment": None}
    w.assert_accounts_agree()


def test_nothing_is_said_to_be_done_before_it_is_on_the_disk(w: BilledWorld, answered: list[int]) -> None:
    bury(w, 2)
    w.instant = False
    (call,) = w.decide(("operator", OutboxDropRequest(sequence=1)))
    assert call not in w.answers
    w.flush()
    assert w.answers[call] == {"dropped": 1, "payment": None}
    (call,) = w.decide(("operator", OutboxRetryRequest(sequence=2)))
    w.pass_time(3, disk_works=False)
    assert w.answers[call] == {"retried": None, "reason": "store", "retry_after_seconds": 1.0}


def test_a_letter_that_cannot_be_read_is_only_dropped(w: BilledWorld, answered: list[int]) -> None:
    bury(w, 2)
    with w.ledger.environment.begin(write=True) as transaction:
        transaction.put((1).to_bytes(8, "big"), b"nonsense", db=w.ledger.dead)
    assert ask(w, OutboxListRequest())["dead"][0] | {"why": ""} == dict.fromkeys(
        ("event_id", "type", "namespace", "amount", "currency", "time")
    ) | {"sequence": 1, "why": ""}
    assert ask(w, OutboxRetryRequest(all=True)) == {"retried": 1}
    assert ask(w, OutboxDropRequest(all=True)) == {"dropped": 1, "payment": None}


def test_the_payment_under_way_is_forgotten_once(w: BilledWorld, shipper: Shipper, answered: list[int]) -> None:
    with structlog.testing.capture_logs() as logs:
        reply = ask(w, OutboxDropRequest(payment=True))
    assert (reply["dropped"], reply["payment"]["nonce"]) == (0, "0x1")
    assert [(line["event"], line["nonce"]) for line in logs if "payment" in line["event"]] == [
        ("upstream.payment_forgotten", "0x1")
    ]
    assert ask(w, OutboxDropRequest(payment=True)) == {"dropped": 0, "payment": None}


@pytest.mark.parametrize("request_", [OutboxListRequest(), OutboxRetryRequest(all=True), OutboxDropRequest(all=True)])
def test_only_operators_may(w: BilledWorld, answered: list[int], request_: Request) -> None:
    bury(w, 1)
    call = Call(w.caller("A"), 1, request_, Identity("local", 1000, 1, False))
    w.lessor.decide([call])
    assert w.answers[call]["error"] == "permission_denied"
    assert w.used()["dead_letters"] == 1
