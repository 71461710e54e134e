"""Demands for payment and receipts as upstream writes them, and a signer that signs nothing."""

from __future__ import annotations

import base64
import json
from typing import Any

from leased.config_keys import X402
from leased.payer import Demand, Offer, Signed
from leased.upstream import Answer

NETWORK = "eip155:84532"
ASSET = "0x036cbd53842c5426634e7929541ec2318f3dcf7e"
PAYEE = "0x" + "ab" * 20
CAPS = X402(networks=(NETWORK,), assets=(ASSET,), payees=(PAYEE,), max_per_batch=5_000, max_per_day=12_000)


def offer(**changes: Any) -> dict[str, Any]:
    """A requirement of version 2 within the caps."""
    return {
        "scheme": "exact",
        "network": NETWORK,
        "asset": "0x036CbD53842c5426634e7929541eC2318f3dCF7e",
        "amount": "4000",
        "payTo": "0x" + "AB" * 20,
        "maxTimeoutSeconds": 300,
        "extra": {"name": "USDC", "version": "2"},
    } | changes


def offer_v1(**changes: Any) -> dict[str, Any]:
    raw = offer(
        network="base-sepolia", maxAmountRequired="4000", resource="https://upstream.test/events", description="", mimeType=""
    )
    del raw["amount"]
    return raw | changes


def encoded(whole: Any) -> str:
    return base64.b64encode(json.dumps(whole).encode()).decode()


def demand(*offers: Any, error: str | None = None, receipt: dict[str, Any] | None = None) -> Answer:
    """A 402 of version 2: in the header."""
    whole = {
        "x402Version": 2,
        "error": error,
        "resource": {"url": "https://upstream.test/events"},
        "accepts": list(offers) or [offer()],
    }
    headers = [("payment-required", encoded(whole))]
    if receipt is not None:
        headers.append(("payment-response", encoded(receipt)))
    return Answer(402, 0.0, tuple(headers))


def demand_v1(*offers: Any) -> Answer:
    """A 402 of version 1: in the body."""
    whole = {"x402Version": 1, "error": "X-PAYMENT header is required", "accepts": list(offers) or [offer_v1()]}
    return Answer(402, 0.0, (), json.dumps(whole).encode())


def taken(transaction: str = "0x" + "77" * 32) -> Answer:
    receipt = {"success": True, "transaction": transaction, "network": NETWORK, "payer": "0x" + "cc" * 20}
    return Answer(202, 0.0, (("payment-response", encoded(receipt)),))


class FakeSigner:
    """Counts.  Its nonces are 0x1, 0x2, ..."""

    def __init__(self, valid_before: int = 1_800_000_300) -> None:
        self.signed: list[Offer] = []
        self.identifiers: list[str] = []
        self.valid_before = valid_before
        self.fault: Exception | None = None

    def sign(self, demand: Demand, offer: Offer, identifier: str) -> Signed:
        if self.fault is not None:
            raise self.fault
        self.signed.append(offer)
        self.identifiers.append(identifier)
        nonce = f"0x{len(self.signed):x}"
        return Signed(f"signature-{nonce}", "0x" + "cc" * 20, nonce, self.valid_before)
