"""How much of the daemon each caller has: connections, and requests in this second.  A caller is a uid, or the address it came from."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Final

import structlog

from leased.config_keys import Limits
from leased.doors.rpc import Allowance

log = structlog.get_logger()

SAY_SECONDS: Final = 60


class Callers:
    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._connections: dict[Hashable, int] = {}
        self._allowances: dict[Hashable, Allowance] = {}
        self._total = 0
        self._turned_away = 0
        self._seconds = 0

    def refusal(self, caller: Hashable, *, local: bool) -> str:
        """Why one more connection of this caller is turned away; empty when it is welcome."""
        standing = self._connections.get(caller, 0)
        if self._total >= self._limits.max_connections:
            why = f"{self._limits.max_connections} connections are open, the limit (limits.max_connections)"
        elif standing >= self._limits.max_connections_per_uid:
            who = "your user" if local else "your address"
            why = f"{who} has {standing} connections open, the limit (limits.max_connections_per_uid)"
        else:
            return ""
        self._turned_away += 1
        return why

    def enter(self, caller: Hashable) -> Allowance | None:
        """One more connection.  Returns what its requests are counted against, if they are bounded."""
        self._total += 1
        self._connections[caller] = self._connections.get(caller, 0) + 1
        return self.allowance(caller)

    def change(self) -> None:
        """Another limit of requests: everybody's second begins anew."""
        self._allowances.clear()

    def allowance(self, caller: Hashable) -> Allowance | None:
        each_second = self._limits.requests_per_second_per_uid
        if not each_second:
            return None
        if caller not in self._allowances:
            self._allowances[caller] = Allowance(each_second)
        return self._allowances[caller]

    def leave(self, caller: Hashable) -> None:
        """One less.  Its allowance stays until the second is over: reconnecting buys nothing."""
        self._total -= 1
        self._connections[caller] -= 1
        if not self._connections[caller]:
            del self._connections[caller]

    def each_second(self) -> None:
        """Refill the allowances; say once a minute how many connections were turned away."""
        self._seconds += 1
        if self._turned_away and self._seconds >= SAY_SECONDS:
            log.warning("peer.limit", connections_turned_away=self._turned_away)
            self._turned_away = self._seconds = 0
        for caller, allowance in list(self._allowances.items()):
            allowance.refill()
            if caller not in self._connections:
                del self._allowances[caller]


def in_turn(events: list[tuple[int, int]], first: int) -> list[tuple[int, int]]:
    """The same events in the same order, from descriptor `first` on and round: else those who are ready first would always be served
    first.  `first` below 0: as they are."""
    at = next((at for at, event in enumerate(events) if event[0] == first), 0) if first >= 0 else 0
    return events[at:] + events[:at] if at else events
