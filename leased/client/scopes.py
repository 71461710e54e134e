"""What the daemon tells about a scope, as types: its dead-man switch, and what a successor finds."""

from __future__ import annotations

from leased.client.errors import ProtocolFault

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from leased.client.answers import Reply


class SwitchState:
    """A dead-man switch; true while it is armed.

    `due_in_seconds` is when it falls unless it is armed again, None where it is not armed.  `last_missed_at` (RFC 3339) is when it
    fell last, `released` what that released: maps of key (None where it is not known), key_hash and generation.
    """

    __slots__ = ("agent_id", "armed", "due_at", "due_in_seconds", "last_missed_at", "released", "reply", "scope")

    def __init__(self, reply: Reply, scope: str | None = None) -> None:
        armed = reply.get("armed")
        if not isinstance(armed, bool):
            raise ProtocolFault("a switch that is neither armed nor unarmed")
        self.scope: str = scope if scope is not None else reply.get("scope", "")
        self.armed = armed
        self.agent_id: str | None = reply.get("agent_id")
        self.due_at: str | None = reply.get("due_at")
        self.due_in_seconds: float | None = reply.get("due_in_seconds")
        self.last_missed_at: str | None = reply.get("last_missed_at")
        self.released: list[dict[str, Any]] = reply.get("released") or []
        self.reply = reply

    def __bool__(self) -> bool:
        return self.armed

    def __repr__(self) -> str:
        return (
            f"SwitchState(scope={self.scope!r}, armed={self.armed}, due_in_seconds={self.due_in_seconds}, "
            f"last_missed_at={self.last_missed_at!r}, agent_id={self.agent_id!r})"
        )


class ResumePacket:
    """The answer to `resume_packet`: the scope's live leases (maps as in `Client.list`) and its switch, None if it never had one.

    True if there is anything to resume.  No fences: whoever lost one waits for the lapse or the switch.
    """

    __slots__ = ("leases", "reply", "scope", "switch")

    def __init__(self, reply: Reply) -> None:
        self.scope: str = reply.get("scope", "")
        self.leases: list[dict[str, Any]] = reply.get("leases") or []
        switch = reply.get("switch")
        self.switch = None if switch is None else SwitchState(switch, self.scope)
        self.reply = reply

    def __bool__(self) -> bool:
        return self.reply.get("empty") is not True

    def __repr__(self) -> str:
        return f"ResumePacket(scope={self.scope!r}, leases={len(self.leases)}, switch={self.switch!r})"
