"""What a decision costs.  Pure: integer micro-units in, decimal strings out, never a float.

A fact is billed once: that this key was refused to this holder label in this namespace.  Being refused again there is free for ever,
whatever generation the lease has by then.  Calls of the agent-lock form have a price each and never the refusal's.  Grants, renewals,
releases, checks, errors and unknowns are free.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from leased.config_values import amount_text
from leased.model import Reply

BILLED_REASONS: Final = frozenset(
    {"held", "same_label", "wrong_fence", "wrong_holder"}
)  # not `spent`: that is the caller's own repeat
REFUSAL: Final = "refusal"
AGENT_LOCK: Final = "agent_lock"
KINDS: Final = {REFUSAL: "leased.refusal.billed", AGENT_LOCK: "leased.agent_lock.called"}


class Tariff(NamedTuple):
    """Prices in micro-units of `currency`."""

    enabled: bool = False
    currency: str = "USDC"
    refusal: int = 2_000
    agent_lock_call: int = 1_000

    def price(self, kind: str) -> int:
        if not self.enabled:
            return 0
        return self.refusal if kind == REFUSAL else self.agent_lock_call

    def free(self) -> Reply:
        return {"amount": "0", "currency": self.currency, "event_id": None}

    def charged(self, kind: str, event_id: str) -> Reply:
        return {"amount": amount_text(self.price(kind)), "currency": self.currency, "event_id": event_id}


class Event(NamedTuple):
    """One billing fact.  `amount` in micro-units; `wall` when it was decided; hashes, never texts."""

    id: str
    kind: str
    namespace: str
    amount: int
    currency: str
    key_hash: str
    holder_hash: str
    wall: float


def hour_of(wall: float) -> int:
    """Totals are kept by the hour (UTC, counted from the epoch): `usage` since an instant begins with that instant's hour."""
    return int(wall // 3600)
