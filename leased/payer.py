"""Pays upstream by x402, within the caps of the configuration: what may be paid, to whom, in what, how much.

One payment at a time, and each in four steps: choose what the demand offers that the caps allow; sign, now, because an authorization lives for
minutes and an outbox may wait for days; have the ledger flush all that will be sent; send.  From the flush on, this payment is the only one
there is.  It goes again, the same bytes, until upstream has taken its batch; it may have been settled at any of these times, and a second one for
the same debt could be settled too.  An authorization that upstream does not take is therefore the end of paying: no later one is signed until an
operator, who can look at the chain, says that this one is to be forgotten.  That is the circuit breaker.

The parsing here trusts nothing: a demand is bytes of a stranger.  What is signed names the chain, the asset, the payee and the amount that were
checked, and nothing else of the demand can redirect it.
"""

from __future__ import annotations

import base64
import binascii
import json
import re
from collections.abc import Callable
from typing import Any, Final, NamedTuple, Protocol

import structlog
import trio

from leased.billing import Billing
from leased.clock import Clock
from leased.config_keys import X402
from leased.config_values import amount_text
from leased.state.journal import Journal
from leased.state.payments import Payment, Spending
from leased.upstream import Answer, Batch

log = structlog.get_logger()

DAY_SECONDS: Final = 86_400
MAX_AUTHORIZATION_SECONDS: Final = 3600  # a signature that lives longer is a liability
MAX_OFFERS: Final = 64  # of one demand; the rest is not looked at
V1_NETWORKS: Final = {"eip155:8453": "base", "eip155:84532": "base-sepolia"}
"""What the first version of the protocol called the chains that it is spoken on."""
DEMAND_HEADER: Final = "payment-required"
RECEIPT_HEADERS: Final = ("payment-response", "x-payment-response")
_KNOWN: Final = frozenset({"scheme", "network", "asset", "payTo", "maxTimeoutSeconds", "extra"})
_KNOWN_BY_VERSION: Final = {1: {"maxAmountRequired", "resource", "description", "mimeType", "outputSchema"}, 2: {"amount"}}
_ADDRESS: Final = re.compile(r"0x[0-9a-fA-F]{40}")
_AMOUNT: Final = re.compile(r"[0-9]{1,30}")
_PLAIN: Final = re.compile(r"[^ -~]+")
MAX_SAID_CHARACTERS: Final = 120


class Offer(NamedTuple):
    """One way to meet the demand.  `raw` is the requirement as it was written, without fields that are not known here, so that none of
    them can mean something to whoever signs; `network` by its CAIP-2 name, addresses in lower case."""

    version: int
    network: str
    asset: str
    payee: str
    amount: int
    seconds: int
    raw: dict[str, Any]


class Demand(NamedTuple):
    """`error` is what upstream says, made harmless; `whole` all of it, for the package that signs."""

    version: int
    offers: list[Offer]
    error: str
    whole: dict[str, Any]


class Signed(NamedTuple):
    """What goes on the wire, and the parts of the authorization by which it can be found on the chain."""

    value: str
    payer: str
    nonce: str
    valid_before: int


class Signer(Protocol):
    """The wallet: see wallet.py."""

    def sign(self, demand: Demand, offer: Offer, identifier: str) -> Signed:
        """`identifier` names the debt for upstreams that know repeats by it.  Blocks.  Raises ValueError when this cannot be signed."""
        ...


class NotPaid(Exception):
    """Why a demand is not met."""


class X402Payer:
    """The Payer.  For metrics: `paid` counts payments upstream acknowledged, `spent_today`, `refused` demands that were not met."""

    def __init__(self, config: X402, signer: Signer, spending: Spending, billing: Billing, journal: Journal, clock: Clock) -> None:
        self.payment = spending.payment
        self.why = "a payment of before the start is under way" if spending.payment is not None else ""
        self.paid = 0
        self.refused = 0
        self._config = config
        self._signer = signer
        self._days = dict(spending.days)
        self._billing = billing
        self._journal = journal
        self._clock = clock

    def change(self, config: X402, signer: Signer) -> None:
        """Other caps and another wallet from the next demand on; a payment under way stays what it is."""
        self._config = config
        self._signer = signer

    @property
    def spent_today(self) -> int:
        """Micro-units signed for on this day (UTC)."""
        return self._days.get(self._day(), 0)

    def _day(self) -> int:
        return int(self._clock.now().wall // DAY_SECONDS)

    async def pay(self, batch: Batch, answer: Answer) -> Payment | None:
        """Cancellation: before the signature nothing has happened; after it, the payment may be in the ledger and goes out after the next
        start."""
        assert self.payment is None, "one payment at a time"
        try:
            demand = read_demand(answer)
            offer = self._chosen(demand)
            signed = await trio.to_thread.run_sync(self._signer.sign, demand, offer, batch.key)
        except (NotPaid, ValueError) as error:
            self.refused += 1
            self.why = plain(str(error)) if isinstance(error, NotPaid) else "the demand cannot be signed for"
            return None
        header = "payment-signature" if demand.version == 2 else "x-payment"
        payment = Payment(
            batch.sequences, header, signed.value, offer.amount, offer.network, offer.asset, offer.payee, signed.payer, signed.nonce,
            signed.valid_before, self._day(),
        )  # fmt: skip
        self.payment = payment
        self._days[payment.day] = self._days.get(payment.day, 0) + payment.amount
        await self._durable(self._journal.append(("pay", list(payment))))
        return payment

    async def _durable(self, flush: int) -> None:
        """Until this flush is on the disk, however long that takes.  Cancellation leaves it queued."""
        done = trio.Event()
        self._billing.when_flushed(flush, done.set)
        self._journal.kick(self._clock.now().boot)
        await done.wait()

    def _chosen(self, demand: Demand) -> Offer:
        """The cheapest offer within the caps.  Raises NotPaid with what stands against the first one."""
        if not demand.offers:
            raise NotPaid(f"the demand offers nothing that is known here{said(demand.error)}")
        allowed = [offer for offer in demand.offers if not self._against(offer)]
        if not allowed:
            raise NotPaid(self._against(demand.offers[0]))
        return min(allowed, key=lambda offer: offer.amount)

    def _against(self, offer: Offer) -> str:
        """What forbids an offer; empty when nothing does."""
        config = self._config
        if offer.network not in config.networks:
            return f"network {offer.network} is not in x402.networks"
        if offer.asset not in config.assets:
            return f"asset {offer.asset} is not in x402.assets"
        if offer.payee not in config.payees:
            return f"payee {offer.payee} is not in x402.payees"
        if offer.amount > config.max_per_batch:
            return f"{amount_text(offer.amount)} is above x402.max_per_batch ({amount_text(config.max_per_batch)})"
        if self.spent_today + offer.amount > config.max_per_day:
            return f"{amount_text(offer.amount)} would go above x402.max_per_day ({amount_text(config.max_per_day)})"
        if not 0 < offer.seconds <= MAX_AUTHORIZATION_SECONDS:
            return f"an authorization of {offer.seconds} s is outside 1 to {MAX_AUTHORIZATION_SECONDS} s"
        return ""

    def taken(self, answer: Answer) -> None:
        payment = self.payment
        assert payment is not None
        self.paid += 1
        receipt = read_receipt(answer)
        log.info(
            "upstream.paid", amount=amount_text(payment.amount), network=payment.network, asset=payment.asset, payee=payment.payee,
            nonce=payment.nonce, events=len(payment.sequences), settled=receipt.get("success"), transaction=receipt.get("transaction"),
        )  # fmt: skip
        self._end(payment)

    def unresolved(self, answer: Answer) -> None:
        """A 402 after a payment, or no answer at all: it may be settled or may yet be."""
        payment = self.payment
        assert payment is not None
        receipt = read_receipt(answer)
        reason = receipt.get("errorReason") or (read_error(answer) if answer.status == 402 else "")
        if self._clock.now().wall > payment.valid_before:
            self.why = (
                "the payment has expired and upstream has not taken its batch; look whether its nonce was used on the chain, then "
                + ("`leased outbox drop --payment`")
            )
        elif answer.status == 402:
            self.why = f"a payment was sent and payment is demanded again{said(plain(str(reason)))}"
        else:
            self.why = f"a payment was sent, its outcome is not known{said(plain(str(reason)))}"

    def forget(self) -> Payment | None:
        """An operator says so: the next demand is paid anew.  Returns what was forgotten."""
        payment = self.payment
        if payment is not None:
            self._end(payment)
        return payment

    def _end(self, payment: Payment) -> None:
        self.payment = None
        self.why = ""
        self._journal.append(("paid", payment.nonce))


# ---- what upstream says


def read_demand(answer: Answer) -> Demand:
    """From the header of the second version, else from the body of the first.  Raises NotPaid."""
    header = answer.header(DEMAND_HEADER)
    whole = _json(_base64(header) if header is not None else answer.body)
    version = whole.get("x402Version", 2 if header is not None else None)
    if version not in (1, 2) or isinstance(version, bool) or (version == 1) != (header is None):
        raise NotPaid("the answer is 402 but holds no demand of x402 version 1 or 2")
    accepts = whole.get("accepts")
    read = _offer_v2 if version == 2 else _offer_v1
    offers = [
        offer for raw in (accepts[:MAX_OFFERS] if isinstance(accepts, list) else []) if (offer := _offer(read, raw)) is not None
    ]
    return Demand(int(version), offers, plain(str(whole.get("error") or "")), whole)


def _offer(read: Callable[[dict[str, Any]], Offer], raw: Any) -> Offer | None:
    """None for anything but an exact payment by EIP-3009 in well-formed terms."""
    try:
        extra = raw.get("extra") or {}
        if raw["scheme"] != "exact" or extra.get("assetTransferMethod", "eip3009") != "eip3009":
            return None
        offer = read(raw)
        known = _KNOWN | _KNOWN_BY_VERSION[offer.version]
        offer = offer._replace(raw={key: value for key, value in raw.items() if key in known})
        good = _ADDRESS.fullmatch(offer.asset) and _ADDRESS.fullmatch(offer.payee) and type(offer.seconds) is int
        return offer if good else None
    except (AttributeError, KeyError, TypeError, ValueError):
        return None


def _offer_v2(raw: dict[str, Any]) -> Offer:
    amount = _atomic(raw["amount"])
    return Offer(2, str(raw["network"]), raw["asset"].lower(), raw["payTo"].lower(), amount, raw["maxTimeoutSeconds"], raw)


def _offer_v1(raw: dict[str, Any]) -> Offer:
    network = next((caip for caip, name in V1_NETWORKS.items() if name == raw["network"]), plain(str(raw["network"])))
    amount = _atomic(raw["maxAmountRequired"])
    return Offer(1, network, raw["asset"].lower(), raw["payTo"].lower(), amount, raw["maxTimeoutSeconds"], raw)


def _atomic(value: Any) -> int:
    if not isinstance(value, str) or not value.isascii() or not _AMOUNT.fullmatch(value):
        raise ValueError("not an amount")
    return int(value)


def read_receipt(answer: Answer) -> dict[str, Any]:
    """What upstream says became of the payment; empty when it says nothing that can be read.  Only plain strings and booleans."""
    for name in RECEIPT_HEADERS:
        header = answer.header(name)
        if header is not None:
            try:
                whole = _json(_base64(header))
            except NotPaid:
                return {}
            return {
                key: value if isinstance(value, bool) else plain(value)
                for key in ("success", "errorReason", "transaction")
                if isinstance(value := whole.get(key), bool | str)
            }
    return {}


def read_error(answer: Answer) -> str:
    try:
        return read_demand(answer).error
    except NotPaid:
        return ""


def _base64(text: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise NotPaid("the answer is 402 and its demand is not base64") from None


def _json(octets: bytes) -> dict[str, Any]:
    try:
        whole = json.loads(octets)
    except (ValueError, RecursionError):
        raise NotPaid("the answer is 402 and its demand is not JSON") from None
    if not isinstance(whole, dict):
        raise NotPaid("the answer is 402 and its demand is not an object")
    return whole


def plain(text: str) -> str:
    """What a stranger wrote, short and printable."""
    return _PLAIN.sub("?", text[:MAX_SAID_CHARACTERS])


def said(text: str) -> str:
    return f" (upstream says: {text})" if text else ""
