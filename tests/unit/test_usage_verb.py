"""`lease usage`: sentences for people, the reply itself for programs."""

from __future__ import annotations

from typing import Any

import pytest

from leased.client.usage_verb import told

USED: dict[str, Any] = {
    "namespace": "local",
    "currency": "USDC",
    "amount": "0.015",
    "refusals_billed": 7,
    "calls_billed": 1,
    "pending_upstream": 0,
    "oldest_pending_seconds": None,
    "dead_letters": 0,
}


@pytest.mark.parametrize(
    ("changes", "lines"),
    [
        ({}, ["0.015 USDC in local: 7 refusals, 1 agent-lock call."]),
        (
            {"refusals_billed": 1, "calls_billed": 0, "pending_upstream": 2, "oldest_pending_seconds": 61.4, "dead_letters": 1},
            [
                "0.015 USDC in local: 1 refusal, 0 agent-lock calls.",
                "2 events not upstream yet, the oldest for 61 s.",
                "1 event that upstream will not take; an operator sees them by `leased outbox list`.",
            ],
        ),
    ],
)
def test_what_people_are_told(changes: dict[str, Any], lines: list[str]) -> None:
    assert told(USED | changes) == lines
