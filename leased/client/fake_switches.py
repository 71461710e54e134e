"""The dead-man switches of FakeLeased."""

from __future__ import annotations

from typing import NamedTuple

from leased.clock import rfc3339
from leased.model import HeartbeatRequest, Instant, Lease, Reply


class Switch(NamedTuple):
    """`due` None: not armed.  `released`: (key, its hash, generation) of what the last miss gave back."""

    due: float | None = None
    agent_id: str | None = None
    missed_wall: float = 0.0
    released: tuple[tuple[str, bytes, int], ...] = ()


class FakeSwitches:
    def __init__(self) -> None:
        self._all: dict[str, Switch] = {}

    def due(self) -> list[float]:
        return [switch.due for switch in self._all.values() if switch.due is not None]

    def fallen(self, now: float) -> list[str]:
        """The scopes whose switch is due: their leases end, and then `missed` says so."""
        return [scope for scope, switch in self._all.items() if switch.due is not None and now >= switch.due]

    def missed(self, scope: str, wall: float, released: list[tuple[str, bytes, Lease]]) -> None:
        told = tuple((key, key_hash, lease.generation) for key, key_hash, lease in released)
        self._all[scope] = self._all[scope]._replace(due=None, missed_wall=wall, released=told)

    def heartbeat(self, request: HeartbeatRequest, now: Instant) -> Reply:
        before = self._all.get(request.scope, Switch())
        due = None if request.disarm or request.expect_within is None else now.boot + request.expect_within
        switch = before._replace(due=due, agent_id=before.agent_id if request.agent_id is None else request.agent_id)
        if switch.due is not None or switch.missed_wall:
            self._all[request.scope] = switch
        else:
            self._all.pop(request.scope, None)  # it says nothing any more
        return {"scope": request.scope, **_told(switch, now)}

    def told(self, scope: str, now: Instant) -> Reply | None:
        """As `resume_packet` tells it; None for a scope that never had one."""
        switch = self._all.get(scope)
        if switch is None:
            return None
        released = [{"key": key, "key_hash": key_hash.hex(), "generation": number} for key, key_hash, number in switch.released]
        return {**_told(switch, now), "released": released}


def _told(switch: Switch, now: Instant) -> Reply:
    remaining = None if switch.due is None else max(0.0, switch.due - now.boot)
    return {
        "armed": switch.due is not None,
        "agent_id": switch.agent_id,
        "due_at": None if remaining is None else rfc3339(now.wall + remaining),
        "due_in_seconds": remaining,
        "last_missed_at": rfc3339(switch.missed_wall) if switch.missed_wall else None,
    }
