"""Amounts are integers inside and decimal strings outside; what is free says so in the same words."""

from __future__ import annotations

import pytest

from leased.config_values import amount_text
from leased.tariff import AGENT_LOCK, BILLED_REASONS, KINDS, REFUSAL, Tariff, hour_of


@pytest.mark.parametrize(
    ("micro", "text"),
    [
        (0, "0"),
        (1, "0.000001"),
        (2_000, "0.002"),
        (1_000, "0.001"),
        (1_000_000, "1"),
        (10_500_000, "10.5"),
        (2**53 + 1, "9007199254.740993"),
    ],
)
def test_amounts_are_exact(micro: int, text: str) -> None:
    assert amount_text(micro) == text


def test_ten_thousand_prices_add_up_to_the_micro_unit() -> None:
    tariff = Tariff(True)
    total = sum(tariff.price(REFUSAL) for _ in range(10_000)) + sum(tariff.price(AGENT_LOCK) for _ in range(10_000))
    assert amount_text(total) == "30"


def test_a_charge_names_amount_currency_and_event() -> None:
    tariff = Tariff(True, "EURC", 1_500, 3)
    assert tariff.charged(REFUSAL, "ab") == {"amount": "0.0015", "currency": "EURC", "event_id": "ab"}
    assert tariff.charged(AGENT_LOCK, "cd") == {"amount": "0.000003", "currency": "EURC", "event_id": "cd"}
    assert tariff.free() == {"amount": "0", "currency": "EURC", "event_id": None}


def test_nothing_costs_anything_when_billing_is_off() -> None:
    assert [Tariff(False).price(kind) for kind in KINDS] == [0, 0]


def test_the_default_prices_are_those_of_the_protocol() -> None:
    assert (Tariff(True).price(REFUSAL), Tariff(True).price(AGENT_LOCK), Tariff().currency) == (2_000, 1_000, "USDC")


def test_four_reasons_are_billed_and_spent_is_not() -> None:
    assert {"held", "same_label", "wrong_fence", "wrong_holder"} == BILLED_REASONS


def test_hours_count_from_the_epoch() -> None:
    assert [hour_of(wall) for wall in (0.0, 3599.999, 3600.0, 1_800_000_000.5)] == [0, 0, 1, 500_000]
