"""Paying upstream: within the caps or not at all, flushed before it is sent, the same bytes until taken, never a second one on top.

The signatures here are words; test_wallet.py has real ones.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
import structlog
import trio
from billed import BilledWorld, billed_world
from demands import ASSET, CAPS, NETWORK, PAYEE, FakeSigner, demand, demand_v1, encoded, offer, offer_v1, taken
from upstreams import Request, Scripted, bill, shipper_of

from leased.payer import MAX_AUTHORIZATION_SECONDS, NotPaid, X402Payer, read_demand, read_receipt
from leased.state.payments import read_spending
from leased.upstream import Answer, Shipper, Verdict

DOWN = Answer(0, error="no answer within 10 s")
DAY = 86_400


@pytest.fixture
def w() -> Iterator[BilledWorld]:
    with billed_world(instant=True) as made:
        yield made


@pytest.fixture
def signer() -> FakeSigner:
    return FakeSigner()


def payer_of(w: BilledWorld, signer: FakeSigner, **caps: Any) -> X402Payer:
    from dataclasses import replace

    return X402Payer(replace(CAPS, **caps), signer, read_spending(w.ledger), w.billing, w.journal, w.clock)


def paying(
    w: BilledWorld, upstream: Scripted, signer: FakeSigner, *, batch_events: int = 100, **caps: Any
) -> tuple[Shipper, X402Payer]:
    payer = payer_of(w, signer, **caps)
    return shipper_of(w, upstream, payer, batch_events=batch_events), payer


# ---- the ordinary course


@pytest.mark.trio
async def test_a_demand_within_the_caps_is_paid_and_the_batch_is_taken(w: BilledWorld, signer: FakeSigner) -> None:
    ids = bill(w, 3)
    upstream = Scripted(demand(), taken())
    shipper, payer = paying(w, upstream, signer)
    with structlog.testing.capture_logs() as logs:
        assert await shipper.step() == 0.0
    bare, paid = upstream.requests
    assert bare.body == paid.body
    assert "payment-signature" not in bare.headers
    assert paid.headers == bare.headers | {"payment-signature": "signature-0x1"}
    assert (w.outbox(), payer.payment, payer.paid, payer.spent_today) == ([], None, 1, 4_000)
    assert read_spending(w.ledger) == (None, {int(w.clock.now().wall // DAY): 4_000})
    (line,) = [line for line in logs if line["event"] == "upstream.paid"]
    assert (line["amount"], line["network"], line["payee"], line["settled"]) == ("0.004", NETWORK, PAYEE, True)
    assert line["transaction"] == "0x" + "77" * 32
    assert "signature" not in str(logs)
    assert signer.identifiers == [bare.headers["idempotency-key"]]
    assert len(ids) == 3


@pytest.mark.trio
async def test_version_1_is_paid_in_its_own_header(w: BilledWorld, signer: FakeSigner) -> None:
    bill(w, 1)
    upstream = Scripted(demand_v1(), Answer(200))
    shipper, payer = paying(w, upstream, signer)
    assert await shipper.step() == 0.0
    assert upstream.requests[1].headers["x-payment"] == "signature-0x1"
    assert (signer.signed[0].network, signer.signed[0].version) == (NETWORK, 1)
    assert payer.payment is None


@pytest.mark.trio
async def test_the_payment_is_on_the_disk_before_it_is_sent(w: BilledWorld, signer: FakeSigner) -> None:
    bill(w, 2)
    seen: list[object] = []

    def look(request: Request) -> Answer:
        seen.append(read_spending(w.ledger).payment)
        return taken()

    shipper, _ = paying(w, Scripted(demand(), look), signer)
    await shipper.step()
    (payment,) = seen
    assert payment is not None
    assert (payment.value, payment.sequences, payment.nonce) == ("signature-0x1", [1, 2], "0x1")  # type: ignore[attr-defined]


@pytest.mark.trio
async def test_a_payment_that_cannot_be_flushed_is_not_sent(w: BilledWorld, signer: FakeSigner) -> None:
    bill(w, 1)
    w.instant = False
    upstream = Scripted(demand(), taken())
    shipper, payer = paying(w, upstream, signer)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(shipper.step)
        with trio.fail_after(10):
            while w.flight is None:
                await trio.lowlevel.checkpoint()
        w.flush_fails()
        for _ in range(5):
            await trio.lowlevel.checkpoint()
        assert len(upstream.requests) == 1
        w.calm_after_retries()
        with trio.fail_after(10):
            while payer.payment is not None:
                await trio.lowlevel.checkpoint()
    w.calm()
    assert (len(upstream.requests), payer.spent_today) == (2, 4_000)
    assert read_spending(w.ledger).payment is None


@pytest.mark.trio
async def test_each_batch_has_a_payment_of_its_own(w: BilledWorld, signer: FakeSigner) -> None:
    bill(w, 6)
    upstream = Scripted(demand(), taken(), demand(), taken(), demand(), taken())
    shipper, payer = paying(w, upstream, signer, batch_events=2)
    assert [await shipper.step() for _ in range(3)] == [0.0] * 3
    assert (payer.paid, payer.spent_today, len({each.headers.get("payment-signature") for each in upstream.requests})) == (
        3,
        12_000,
        4,
    )


# ---- outside the caps


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"network": "eip155:8453"}, "network eip155:8453 is not in x402.networks"),
        ({"asset": "0x" + "11" * 20}, "is not in x402.assets"),
        ({"payTo": "0x" + "22" * 20}, "is not in x402.payees"),
        ({"amount": "5001"}, "0.005001 is above x402.max_per_batch (0.005)"),
        ({"maxTimeoutSeconds": MAX_AUTHORIZATION_SECONDS + 1}, "an authorization of 3601 s"),
        ({"maxTimeoutSeconds": 0}, "an authorization of 0 s"),
        ({"scheme": "upto"}, "offers nothing that is known here"),
        ({"extra": {"assetTransferMethod": "permit2"}}, "offers nothing that is known here"),
        ({"amount": 4000}, "offers nothing that is known here"),
        ({"amount": "-4000"}, "offers nothing that is known here"),
        ({"amount": "4e3"}, "offers nothing that is known here"),
        ({"amount": "\u0664"}, "offers nothing that is known here"),
        ({"payTo": "0x" + "22" * 19}, "offers nothing that is known here"),
        ({"maxTimeoutSeconds": True}, "offers nothing that is known here"),
    ],
)
@pytest.mark.trio
async def test_what_is_outside_the_caps_is_refused_kept_and_reported(
    w: BilledWorld, signer: FakeSigner, changes: dict[str, Any], why: str
) -> None:
    bill(w, 1)
    upstream = Scripted(demand(offer(**changes)))
    shipper, payer = paying(w, upstream, signer)
    with structlog.testing.capture_logs() as logs:
        assert await shipper.step() > 0
    assert (signer.signed, payer.payment, len(w.outbox()), len(upstream.requests)) == ([], None, 1, 1)
    assert (shipper.failing, payer.refused, payer.spent_today) == (Verdict.UNPAID.value, 1, 0)
    (line,) = [line for line in logs if line["event"] == "upstream.unpaid"]
    assert (line["log_level"], why in line["error"]) == ("error", True), line


@pytest.mark.trio
async def test_the_cheapest_offer_within_the_caps_is_taken(w: BilledWorld, signer: FakeSigner) -> None:
    bill(w, 1)
    offers = [
        offer(payTo="0x" + "22" * 20, amount="1"),
        offer(amount="4500"),
        offer(amount="3000"),
        "nonsense",
        None,
        offer(amount="9"),
    ]
    offers[-1]["network"] = "eip155:1"  # type: ignore[index]
    shipper, _ = paying(w, Scripted(demand(*offers), taken()), signer)
    await shipper.step()
    assert [signed.amount for signed in signer.signed] == [3_000]


@pytest.mark.trio
async def test_a_day_has_a_cap_that_outlives_a_crash_and_ends_with_the_day(w: BilledWorld, signer: FakeSigner) -> None:
    bill(w, 6)
    upstream = Scripted(*[answer for _ in range(3) for answer in (demand(), taken())], demand())
    shipper, _ = paying(w, upstream, signer, batch_events=1)
    for _ in range(3):
        await shipper.step()
    assert await shipper.step() > 0
    assert shipper.payer is not None
    assert "0.004 would go above x402.max_per_day (0.012)" in shipper.payer.why
    w.kill()
    w.run()
    upstream = Scripted(demand(), demand(), taken())
    shipper, payer = paying(w, upstream, signer, batch_events=1)
    assert await shipper.step() > 0
    assert (len(signer.signed), payer.spent_today) == (3, 12_000)
    w.clock.wall += DAY
    assert await shipper.step() == 0.0
    assert (len(signer.signed), payer.spent_today) == (4, 4_000)


@pytest.mark.trio
async def test_without_a_wallet_a_demand_is_kept_and_reported(w: BilledWorld) -> None:
    bill(w, 1)
    shipper = shipper_of(w, Scripted(demand()))
    assert await shipper.step() > 0
    assert (shipper.failing, len(w.outbox())) == ("unpaid", 1)


@pytest.mark.trio
async def test_what_cannot_be_signed_is_not_paid(w: BilledWorld, signer: FakeSigner) -> None:
    bill(w, 1)
    signer.fault = ValueError("the key is 0xsecret")
    shipper, payer = paying(w, Scripted(demand()), signer)
    assert await shipper.step() > 0
    assert (payer.payment, payer.spent_today, payer.why) == (None, 0, "the demand cannot be signed for")


# ---- outcomes that are not known


@pytest.mark.parametrize(
    "outcome",
    [
        DOWN,
        Answer(500),
        Answer(503, 3.0),
        Answer(429),
        Answer(401),
        Answer(400),
        Answer(413),
        Answer(422),
        demand(),
        demand(receipt={"success": False, "errorReason": "settlement_pending", "transaction": "0x9"}),
    ],
)
@pytest.mark.trio
async def test_the_same_payment_goes_again_whatever_was_answered(w: BilledWorld, signer: FakeSigner, outcome: Answer) -> None:
    bill(w, 4)
    upstream = Scripted(demand(), outcome, outcome, outcome, taken())
    shipper, payer = paying(w, upstream, signer)
    assert await shipper.step() > 0
    assert payer.payment is not None
    bill(w, 3)  # they wait behind it: the batch stays what it was
    for _ in range(2):
        assert await shipper.step() > 0
    assert await shipper.step() == 0.0
    assert len(signer.signed) == 1
    first, *others = [request for request in upstream.requests if "payment-signature" in request.headers]
    assert [(each.body, each.headers) for each in others] == [(first.body, first.headers)] * 3
    assert (payer.paid, payer.spent_today, len(w.outbox())) == (1, 4_000, 3)
    w.assert_accounts_agree()


@pytest.mark.trio
async def test_a_crash_between_sending_and_recording_sends_the_same_bytes_again(w: BilledWorld, signer: FakeSigner) -> None:
    bill(w, 3)
    first, second = Scripted(demand(), DOWN), Scripted(taken())
    shipper, _ = paying(w, first, signer)
    await shipper.step()
    w.kill()
    w.run()
    bill(w, 2)
    shipper, payer = paying(w, second, signer)
    assert payer.payment is not None
    assert await shipper.step() == 0.0
    assert second.requests[0].headers == first.requests[1].headers
    assert second.requests[0].body == first.requests[1].body
    assert (len(signer.signed), len(w.outbox()), payer.spent_today) == (1, 2, 4_000)


@pytest.mark.trio
async def test_a_crash_right_after_the_flush_sends_what_was_flushed(w: BilledWorld, signer: FakeSigner) -> None:
    """The payment is in the ledger and was never sent."""
    bill(w, 2)

    async def killed(body: bytes, headers: dict[str, str]) -> Answer:
        if "payment-signature" in headers:
            raise KeyboardInterrupt
        return demand()

    shipper, _ = paying(w, Scripted(), signer)
    shipper._post = killed
    with pytest.raises(KeyboardInterrupt):
        await shipper.step()
    w.kill()
    w.run()
    upstream = Scripted(taken())
    shipper, payer = paying(w, upstream, signer)
    assert await shipper.step() == 0.0
    assert (upstream.requests[0].headers["payment-signature"], len(signer.signed), payer.payment) == ("signature-0x1", 1, None)


@pytest.mark.trio
async def test_a_402_after_a_payment_ends_paying_until_an_operator_says_so(w: BilledWorld, signer: FakeSigner) -> None:
    """The circuit breaker: three demands in a row are one payment."""
    bill(w, 1)
    insufficient = demand(error="insufficient_funds\n\x1b[31m")
    upstream = Scripted(demand(), insufficient, insufficient, insufficient, demand(), taken())
    shipper, payer = paying(w, upstream, signer)
    with structlog.testing.capture_logs() as logs:
        for _ in range(3):
            assert await shipper.step() > 0
    (line,) = [line for line in logs if line["event"] == "upstream.unpaid"]
    assert line["error"] == "a payment was sent and payment is demanded again (upstream says: insufficient_funds?[31m)"
    assert (len(signer.signed), payer.spent_today) == (1, 4_000)
    forgotten = payer.forget()
    assert forgotten is not None and forgotten.nonce == "0x1"
    assert read_spending(w.ledger).payment is not None
    w.journal.kick(w.clock.now().boot)
    assert read_spending(w.ledger).payment is None
    assert await shipper.step() == 0.0
    assert [signed.amount for signed in signer.signed] == [4_000, 4_000]
    assert payer.spent_today == 8_000  # what was forgotten may have been settled: it goes on counting


@pytest.mark.trio
async def test_an_expired_authorization_is_not_replaced_by_a_fresh_one(w: BilledWorld, signer: FakeSigner) -> None:
    """Nobody here can show that its nonce was not used."""
    bill(w, 1)
    upstream = Scripted(demand(), DOWN, demand(error="authorization expired"))
    shipper, payer = paying(w, upstream, signer)
    await shipper.step()
    w.clock.wall += 7200
    for _ in range(3):
        assert await shipper.step() > 0
    assert len(signer.signed) == 1
    assert "the payment has expired" in payer.why
    assert "outbox drop --payment" in payer.why
    assert {request.headers.get("payment-signature") for request in upstream.requests[1:]} == {"signature-0x1"}


@pytest.mark.trio
async def test_a_batch_that_is_not_there_any_more_pays_for_nothing_else(w: BilledWorld, signer: FakeSigner) -> None:
    bill(w, 2)
    upstream = Scripted(demand(), DOWN, taken())
    shipper, payer = paying(w, upstream, signer)
    await shipper.step()
    with w.ledger.environment.begin(write=True) as transaction:
        transaction.delete((1).to_bytes(8, "big"), db=w.ledger.outbox)
    assert await shipper.step() > 0
    assert (len(upstream.requests), shipper.failing, payer.payment is None) == (2, "unpaid", False)


@pytest.mark.trio
async def test_a_poisoned_batch_that_was_paid_for_is_halved_once_the_payment_is_out_of_the_way(
    w: BilledWorld, signer: FakeSigner
) -> None:
    bill(w, 4)
    upstream = Scripted(demand(), Answer(422), Answer(202))
    shipper, payer = paying(w, upstream, signer)
    assert await shipper.step() > 0
    payer.forget()
    assert await shipper.step() == 0.0
    assert upstream.sizes == [4, 4, 2]


# ---- bytes of a stranger


@pytest.mark.parametrize(
    "answer",
    [
        Answer(402),
        Answer(402, 0.0, (), b"not json"),
        Answer(402, 0.0, (), b"[1]"),
        Answer(402, 0.0, (), b'{"x402Version": 3, "accepts": []}'),
        Answer(402, 0.0, (), b'{"x402Version": true, "accepts": []}'),
        Answer(402, 0.0, (), b'{"x402Version": 2, "accepts": []}'),
        Answer(402, 0.0, (), b"[" * 60_000),
        Answer(402, 0.0, (("payment-required", "***"),)),
        Answer(402, 0.0, (("payment-required", encoded([1])),)),
        Answer(402, 0.0, (("payment-required", encoded({"x402Version": 1, "accepts": []})),)),
        Answer(402, 0.0, (("payment-required", "\u00e9\u00e9"),)),
    ],
)
def test_what_is_no_demand_is_said_to_be_none(answer: Answer) -> None:
    with pytest.raises(NotPaid, match="the answer is 402"):
        read_demand(answer)


@pytest.mark.parametrize("accepts", [None, {}, "x", [[]], [{}], [{"scheme": "exact"}], [offer(extra="x")], [offer(asset=7)]])
def test_offers_that_are_no_offers_are_left_out(accepts: Any) -> None:
    answer = Answer(402, 0.0, (("payment-required", encoded({"x402Version": 2, "accepts": accepts})),))
    assert read_demand(answer).offers == []


def test_of_a_thousand_offers_some_are_looked_at() -> None:
    assert len(read_demand(demand(*[offer(amount=str(number)) for number in range(1, 1001)])).offers) == 64


def test_an_offer_is_signed_for_without_the_fields_nobody_knows() -> None:
    """A field that means nothing here could mean something to whoever signs."""
    (read,) = read_demand(demand(offer(pay_to="0x" + "66" * 20, max_timeout_seconds=10**9))).offers
    assert set(read.raw) == {"scheme", "network", "asset", "amount", "payTo", "maxTimeoutSeconds", "extra"}
    assert (read.network, read.asset, read.payee, read.amount, read.seconds) == (NETWORK, ASSET, PAYEE, 4_000, 300)


def test_a_network_of_version_1_has_its_name_of_then() -> None:
    networks = [
        read_demand(demand_v1(offer_v1(network=name))).offers[0].network for name in ("base", "base-sepolia", "eip155:8453", "mars")
    ]
    assert networks == ["eip155:8453", "eip155:84532", "eip155:8453", "mars"]


@pytest.mark.parametrize(
    ("value", "told"),
    [
        (encoded({"success": True, "transaction": "0x7", "network": 1}), {"success": True, "transaction": "0x7"}),
        (
            encoded({"success": "yes", "errorReason": ["x"], "transaction": "a\nb" + "c" * 500}),
            {"success": "yes", "transaction": "a?b" + "c" * 117},
        ),
        ("***", {}),
        (encoded(7), {}),
    ],
)
def test_a_receipt_is_read_with_care(value: str, told: dict[str, object]) -> None:
    assert read_receipt(Answer(200, 0.0, (("payment-response", value),))) == told
    assert read_receipt(Answer(200)) == {}
    assert json.dumps(told)
