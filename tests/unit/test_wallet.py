"""Real signatures against the official package's own resource server and facilitator.  What is not real is the chain: a table of balances and
used nonces that takes what the facilitator sends it.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import structlog
import trio
from billed import BilledWorld, billed_world
from demands import ASSET, CAPS, NETWORK, demand_v1
from upstreams import Request, Scripted, bill, shipper_of

from leased.errors import ConfigError
from leased.payer import X402Payer, read_demand
from leased.state.payments import read_spending
from leased.upstream import Answer, Shipper
from leased.wallet import Wallet, read_key

pytestmark = pytest.mark.packages

KEY = "0x" + "4c" * 32
PAYEE = "0x209693Bc6afc0C5328bA36FaF03C514EF312287C"


class Chain:
    """What the facilitator's signer stands on.  `unconfirmed`: so many waits for a receipt time out, though the money has moved."""

    def __init__(self) -> None:
        self.used: set[bytes] = set()
        self.transfers: list[tuple[str, str, int]] = []
        self.unconfirmed = 0
        self.revert = ""

    def get_addresses(self) -> list[str]:
        return ["0x" + "fa" * 20]

    def get_chain_id(self) -> int:
        return 84532

    def get_code(self, address: str) -> bytes:
        return b"\x60" if address.lower() == ASSET else b""

    def get_balance(self, address: str, token_address: str) -> int:
        return 10**9

    def read_contract(self, address: str, abi: object, function: str, *arguments: Any) -> Any:
        if function == "transferWithAuthorization":
            self._admit(arguments[5])
            return None
        raise AssertionError(f"nothing else is read here: {function}")

    def write_contract(self, address: str, abi: object, function: str, *arguments: Any, data_suffix: str | None = None) -> str:
        payer, payee, value, _, valid_before, nonce, *_ = arguments
        assert function == "transferWithAuthorization" and valid_before > time.time()
        self._admit(nonce)
        self.used.add(nonce)
        self.transfers.append((payer, payee, value))
        return "0x" + f"{len(self.transfers):064x}"

    def _admit(self, nonce: bytes) -> None:
        if self.revert:
            raise ValueError(f"execution reverted: {self.revert}")
        if nonce in self.used:
            raise ValueError("execution reverted: FiatTokenV2: authorization is used or canceled")

    def wait_for_transaction_receipt(self, tx_hash: str) -> Any:
        from x402.mechanisms.evm.types import TransactionReceipt

        if self.unconfirmed:
            self.unconfirmed -= 1
            raise TimeoutError("not mined in time")
        return TransactionReceipt(1, 7, tx_hash, None)


class PaidUpstream:
    """An upstream that wants 0.004 for each batch.  `cached`: it knows a batch it has taken by its Idempotency-Key.  `silent`: so many answers
    get lost after the payment was settled and the batch stored."""

    def __init__(self, chain: Chain, *, cached: bool = True, price: str = "$0.004", payee: str = PAYEE) -> None:
        from x402 import ResourceConfig, x402FacilitatorSync, x402ResourceServerSync
        from x402.mechanisms.evm.exact import register_exact_evm_facilitator, register_exact_evm_server

        self.facilitator = register_exact_evm_facilitator(x402FacilitatorSync(), chain, NETWORK)  # type: ignore[arg-type]
        self.server = register_exact_evm_server(x402ResourceServerSync(self.facilitator), NETWORK)
        self.server.initialize()
        config = ResourceConfig(scheme="exact", network=NETWORK, pay_to=payee, price=price, max_timeout_seconds=120)
        self.requirements = self.server.build_payment_requirements(config)
        self.cached = cached
        self.silent = 0
        self.stored: dict[str, object] = {}
        self.settled: dict[str, str] = {}  # by Idempotency-Key: the receipt
        self.verified: list[str] = []

    def answer(self, request: Request) -> Answer:
        from x402.http.utils import decode_payment_signature_header, encode_payment_response_header

        key = request.headers["idempotency-key"]
        if self.cached and key in self.settled:
            return self._taken(self.settled[key])
        signature = request.headers.get("payment-signature")
        if signature is None:
            return self._demand(None)
        payload = decode_payment_signature_header(signature)
        requirement = self.server.find_matching_requirements(self.requirements, payload)
        assert requirement is not None, "what was signed for is not what was asked"
        verified = self.server.verify_payment(payload, requirement)
        self.verified.append(verified.invalid_reason or "")
        if not verified.is_valid:
            return self._demand(verified.invalid_reason)
        receipt = self.server.settle_payment(payload, requirement)
        encoded = encode_payment_response_header(receipt)
        if not receipt.success:
            return self._demand(receipt.error_reason, encoded)
        self.settled[key] = encoded
        self.stored |= {each["id"]: each for each in json.loads(request.body)}
        if self.silent:
            self.silent -= 1
            return Answer(0, error="no answer within 10 s")
        return self._taken(encoded)

    def _taken(self, receipt: str) -> Answer:
        return Answer(202, 0.0, (("payment-response", receipt),))

    def _demand(self, error: str | None, receipt: str | None = None) -> Answer:
        from x402.http.utils import encode_payment_required_header
        from x402.schemas import ResourceInfo

        whole = self.server.create_payment_required_response(
            self.requirements, ResourceInfo(url="https://upstream.test/events"), error
        )
        headers = [("payment-required", encode_payment_required_header(whole))]
        return Answer(402, 0.0, (*headers, *([("payment-response", receipt)] if receipt else [])))


@pytest.fixture
def w() -> Iterator[BilledWorld]:
    with billed_world(instant=True) as made:
        made.clock.wall = time.time() - made.clock.elapsed  # the package that signs looks at the host's clock
        yield made


@pytest.fixture
def key_file(tmp_path: Path) -> Path:
    path = tmp_path / "wallet.key"
    path.write_text(KEY + "\n")
    path.chmod(0o600)
    return path


@pytest.fixture
def chain() -> Chain:
    return Chain()


def paying(
    w: BilledWorld, upstream: PaidUpstream, key_file: Path, *, batch_events: int = 100, **caps: Any
) -> tuple[Shipper, X402Payer, Scripted]:
    limits = replace(CAPS, payees=(PAYEE.lower(),), **caps)
    payer = X402Payer(limits, Wallet(key_file), read_spending(w.ledger), w.billing, w.journal, w.clock)
    scripted = Scripted(upstream.answer)
    return shipper_of(w, scripted, payer, batch_events=batch_events), payer, scripted


# ---- signatures


@pytest.mark.trio
async def test_the_official_facilitator_takes_our_signature_and_moves_the_money(
    w: BilledWorld, chain: Chain, key_file: Path
) -> None:
    ids = bill(w, 5)
    upstream = PaidUpstream(chain)
    shipper, payer, _ = paying(w, upstream, key_file)
    with structlog.testing.capture_logs() as logs:
        assert await shipper.step() == 0.0
    assert upstream.verified == [""]
    wallet = Wallet(key_file).address
    assert [(payer_.lower(), payee.lower(), value) for payer_, payee, value in chain.transfers] == [
        (wallet.lower(), PAYEE.lower(), 4_000)
    ]
    assert list(upstream.stored) == ids
    (line,) = [line for line in logs if line["event"] == "upstream.paid"]
    assert (line["settled"], line["transaction"]) == (True, "0x" + f"{1:064x}")
    assert (payer.payment, payer.spent_today, w.outbox()) == (None, 4_000, [])


def test_a_payment_of_version_1_is_valid_to_the_facilitator(chain: Chain, key_file: Path) -> None:
    from x402.http.utils import decode_payment_signature_header
    from x402.schemas.v1 import PaymentRequirementsV1

    upstream = PaidUpstream(chain)
    asked = read_demand(demand_v1())
    signed = Wallet(key_file).sign(asked, asked.offers[0], "ab" * 32)
    payload = decode_payment_signature_header(signed.value)
    assert payload.x402_version == 1
    verified = upstream.facilitator.verify(payload, PaymentRequirementsV1.model_validate(asked.offers[0].raw))
    assert (verified.is_valid, verified.invalid_reason) == (True, None)
    assert 0 < signed.valid_before - time.time() <= 300


def test_a_changed_payment_is_not_valid(w: BilledWorld, chain: Chain, key_file: Path) -> None:
    """The facilitator of these tests does check."""
    from x402.http.utils import decode_payment_signature_header

    upstream = PaidUpstream(chain)
    asked = read_demand(upstream._demand(None))
    payload = decode_payment_signature_header(Wallet(key_file).sign(asked, asked.offers[0], "x" * 64).value)
    authorization = payload.payload["authorization"]  # type: ignore[index]
    authorization["validBefore"] = str(int(authorization["validBefore"]) + 1)
    assert upstream.facilitator.verify(payload, upstream.requirements[0]).is_valid is False


def test_every_signature_has_a_nonce_of_its_own(chain: Chain, key_file: Path) -> None:
    asked = read_demand(PaidUpstream(chain)._demand(None))
    wallet = Wallet(key_file)
    assert len({wallet.sign(asked, asked.offers[0], "x" * 64).nonce for _ in range(5)}) == 5


def test_a_debt_is_named_where_upstream_asks_for_a_name(key_file: Path) -> None:
    from demands import demand
    from x402.http.utils import decode_payment_signature_header

    answer = demand()
    whole = read_demand(answer).whole | {
        "extensions": {"payment-identifier": {"info": {"required": True}, "schema": {}}, "other": {"info": {}}}
    }
    asked = read_demand(answer)._replace(whole=whole)
    payload: Any = decode_payment_signature_header(Wallet(key_file).sign(asked, asked.offers[0], "ab" * 32).value)
    assert set(payload.extensions) == {"payment-identifier"}
    assert payload.extensions["payment-identifier"]["info"] == {"required": True, "id": "ab" * 32}


# ---- outcomes


@pytest.mark.trio
async def test_a_settlement_whose_answer_is_lost_is_paid_once_and_known_again(w: BilledWorld, chain: Chain, key_file: Path) -> None:
    bill(w, 3)
    upstream = PaidUpstream(chain)
    upstream.silent = 3
    shipper, payer, scripted = paying(w, upstream, key_file)
    assert await shipper.step() > 0
    assert await shipper.step() == 0.0
    assert (len(chain.transfers), payer.payment, len(w.outbox())) == (1, None, 0)
    assert len({request.headers.get("payment-signature") for request in scripted.requests}) == 2  # none, and one


@pytest.mark.trio
async def test_where_upstream_does_not_know_its_batch_again_paying_stops_at_one(
    w: BilledWorld, chain: Chain, key_file: Path
) -> None:
    """The nonce is used, the facilitator says so, and no second payment is signed on top."""
    bill(w, 3)
    upstream = PaidUpstream(chain, cached=False)
    upstream.silent = 1
    shipper, payer, _ = paying(w, upstream, key_file)
    for _ in range(4):
        assert await shipper.step() > 0
    assert len(chain.transfers) == 1
    assert upstream.verified[1:] and "nonce_already_used" in upstream.verified[1]
    assert "payment is demanded again" in payer.why and "nonce_already_used" in payer.why
    assert (shipper.failing, len(w.outbox())) == ("unpaid", 3)


@pytest.mark.trio
async def test_a_pending_settlement_is_waited_for_with_the_same_payment(w: BilledWorld, chain: Chain, key_file: Path) -> None:
    """The facilitator broadcast, and saw no receipt: twice (it asks once more by itself), then it is there."""
    bill(w, 2)
    chain.unconfirmed = 2
    upstream = PaidUpstream(chain)
    shipper, payer, _ = paying(w, upstream, key_file)
    assert await shipper.step() > 0
    assert "settlement_pending" in payer.why
    assert payer.payment is not None
    chain.used.clear()  # a node that has not seen the transaction yet: else verifying would refuse what settling remembers
    assert await shipper.step() == 0.0
    assert (len(chain.transfers), payer.payment, len(w.outbox())) == (1, None, 0)


@pytest.mark.trio
async def test_a_settle_that_times_out_is_unknown_and_paid_once_across_a_crash(
    w: BilledWorld, chain: Chain, key_file: Path
) -> None:
    bill(w, 2)
    upstream = PaidUpstream(chain)
    upstream.silent = 1
    shipper, _, _ = paying(w, upstream, key_file)
    await shipper.step()
    w.kill()
    w.run()
    shipper, payer, scripted = paying(w, upstream, key_file)
    assert await shipper.step() == 0.0
    assert (len(chain.transfers), len(scripted.requests), payer.payment) == (1, 1, None)


@pytest.mark.trio
async def test_a_wallet_without_money_pays_nothing_and_says_so(w: BilledWorld, chain: Chain, key_file: Path) -> None:
    bill(w, 1)
    chain.revert = "ERC20: transfer amount exceeds balance"
    upstream = PaidUpstream(chain)
    shipper, payer, _ = paying(w, upstream, key_file)
    assert await shipper.step() > 0
    assert "insufficient_balance" in payer.why
    chain.revert = ""
    assert await shipper.step() == 0.0  # it has been filled: the same payment is taken
    assert len(chain.transfers) == 1


@pytest.mark.trio
async def test_a_payee_outside_the_caps_gets_nothing(w: BilledWorld, chain: Chain, key_file: Path) -> None:
    bill(w, 1)
    upstream = PaidUpstream(chain, payee="0x" + "66" * 20)
    shipper, payer, _ = paying(w, upstream, key_file)
    with structlog.testing.capture_logs() as logs:
        assert await shipper.step() > 0
    assert (chain.transfers, upstream.verified, len(w.outbox()), payer.spent_today) == ([], [], 1, 0)
    (line,) = [line for line in logs if line["event"] == "upstream.unpaid"]
    assert "payee 0x6666" in line["error"]


@pytest.mark.trio
async def test_an_outbox_is_paid_for_up_to_the_cap_of_the_day(w: BilledWorld, chain: Chain, key_file: Path) -> None:
    bill(w, 8)
    upstream = PaidUpstream(chain)
    shipper, payer, _ = paying(w, upstream, key_file, batch_events=2)
    pauses = [await shipper.step() for _ in range(4)]
    assert [bool(pause) for pause in pauses] == [False, False, False, True]
    assert (len(chain.transfers), payer.spent_today, len(w.outbox())) == (3, 12_000, 2)


# ---- the key


@pytest.mark.parametrize(
    ("content", "mode", "said"),
    [
        (KEY, 0o644, "mode 0644"),
        (KEY, 0o640, "chmod 600"),
        ("", 0o600, "64 hexadecimal digits"),
        (KEY[:-1], 0o600, "64 hexadecimal digits"),
        (KEY + KEY, 0o600, "64 hexadecimal digits"),
        ("0x" + "0" * 64, 0o600, "does not hold a private key"),
        ("\u00e9" * 64, 0o600, "64 hexadecimal digits"),
    ],
)
def test_a_bad_key_file_is_refused_without_being_repeated(tmp_path: Path, content: str, mode: int, said: str) -> None:
    path = tmp_path / "key"
    path.write_text(content)
    path.chmod(mode)
    with pytest.raises(ConfigError, match=said) as caught:
        Wallet(path)
    assert "4c4c" not in str(caught.value)
    assert caught.value.__cause__ is None


def test_a_missing_key_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        read_key(tmp_path / "none")


def test_a_wallet_that_cannot_sign_says_nothing_of_what_it_was_given(key_file: Path) -> None:
    from demands import demand, offer

    asked = read_demand(demand(offer(extra={"name": ["USDC"], "version": {}})))
    with pytest.raises(ValueError) as caught:
        Wallet(key_file).sign(asked, asked.offers[0], "x" * 64)
    assert "4c4c" not in repr(caught.value) and caught.value.__cause__ is None


def test_signing_in_a_thread_leaves_trio_alone(key_file: Path, chain: Chain) -> None:
    asked = read_demand(PaidUpstream(chain)._demand(None))
    wallet = Wallet(key_file)

    async def main() -> str:
        return (await trio.to_thread.run_sync(wallet.sign, asked, asked.offers[0], "x" * 64)).payer

    assert trio.run(main) == wallet.address
