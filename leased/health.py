"""What the daemon says of its own health, in words that name no caller and no key."""

from __future__ import annotations

from leased.lessor import Lessor
from leased.model import Reply

DRAINING = "shutting_down"


def reasons(lessor: Lessor) -> list[str]:
    """Why leases are not granted as they should be; empty when they are.  "recovering": keys not known are not granted yet;
    "store": nothing can be written; "ledger": long leases answer null; "full": no room for another lease."""
    gate = lessor.gate
    found = [gate.shut or gate.closed] if gate.shut or gate.closed else []
    if gate.recovering(lessor.clock.now().boot):
        found.append("recovering")
    if lessor.lane.broken:
        found.append("store")
    if lessor.journal.unsettled and lessor.journal.failures:
        found.append("ledger")
    if lessor.room < 0:
        found.append("full")
    return found


def readiness(lessor: Lessor, upstream: str = "") -> tuple[bool, Reply]:
    """(ready, the document of /readyz).  `upstream` is told and makes nothing unready: leases never wait for it."""
    why = reasons(lessor)
    told: Reply = {"ready": not why, "reasons": why}
    if upstream:
        told["upstream"] = upstream
    return not why, told
