"""What a client can ask, as values: the operation, its fields, and what its answer means.  Every face asks these and no others."""

from __future__ import annotations

from leased.client.answers import Checked, Grant, Refusal, Released, Reply, Revoked, Unknown, answer_to_lease, verdict
from leased.client.core import draw_request_id
from leased.client.errors import OutcomeUnknown, ProtocolFault
from leased.light import Generic, TypeVar

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

A = TypeVar("A")
Acquired = Grant | Refusal | Unknown


class Question(Generic[A]):
    """`understood(reply, sent_at, repeated)` makes the answer; `sent_at`: CLOCK_BOOTTIME from before the request was sent.

    `unanswered` makes one of OutcomeUnknown, where that is an answer; where it is None, it is raised.
    """

    __slots__ = ("fields", "operation", "unanswered", "understood", "wait")

    def __init__(
        self,
        operation: str,
        fields: dict[str, Any],
        understood: Callable[[Reply, float, bool], A],
        unanswered: Callable[[OutcomeUnknown], A] | None = None,
        wait: float = 0,
    ) -> None:
        self.operation = operation
        self.fields = fields
        self.understood = understood
        self.unanswered = unanswered
        self.wait = wait


def lease(
    key: str,
    holder: str,
    ttl: float = 60,
    *,
    scope: str | None = None,
    wait: float = 0,
    fence: str | None = None,
    bind: str = "none",
    request_id: str | None = None,
) -> Question[Acquired]:
    rid = request_id or draw_request_id()
    fields = {"key": key, "holder": holder, "ttl_seconds": ttl, "scope": scope, "fence": fence, "bind": bind, "request_id": rid}

    def understood(reply: Reply, sent_at: float, repeated: bool) -> Acquired:
        return answer_to_lease(reply, key, sent_at, rid)

    return Question("lease", fields, understood, lambda unknown: _no_answer(key, holder, unknown, rid), wait)


def renew(key: str | Grant, fence: str | None, holder: str | None, label: str, ttl: float | None) -> Question[Acquired]:
    """`label` is the client's own, for a bare key and fence without a holder."""
    key, fence, holder = _credentials(key, fence, holder)
    name, told = key, holder or label

    def understood(reply: Reply, sent_at: float, repeated: bool) -> Acquired:
        return answer_to_lease(reply, name, sent_at)

    fields = {"key": name, "holder": told, "fence": fence, "ttl_seconds": ttl}
    return Question("renew", fields, understood, lambda unknown: _no_answer(name, told, unknown))


def release(key: str | Grant, fence: str | None = None, holder: str | None = None) -> Question[Released]:
    key, fence, holder = _credentials(key, fence, holder)
    return Question("release", {"key": key, "fence": fence, "holder": holder}, _released)


def check(key: str, generation: int | None = None) -> Question[Checked]:
    return Question("check", {"key": key, "generation": generation}, _checked)


def revoke(key: str | None, reason: str, key_hash: str | None, namespace: str | None) -> Question[Revoked]:
    fields = {"key": key, "key_hash": key_hash, "reason": reason, "namespace": namespace}
    return Question("revoke", fields, _revoked)


def plain(operation: str, fields: dict[str, Any], wait: float = 0) -> Question[Reply]:
    """Any operation; the answer is the daemon's own map."""
    return Question(operation, fields, _as_it_came, None, wait)


class Pages:
    """A list, page by page: ask `question`, hand the reply to `took`, until `over`."""

    def __init__(self, scope: str | None, holder: str | None, page: int, all: bool) -> None:
        self._fields: dict[str, Any] = {"scope": scope, "holder": holder, "limit": page, "all": all or None}
        self.over = False

    @property
    def question(self) -> Question[Reply]:
        return plain("list", dict(self._fields))

    def took(self, reply: Reply) -> list[dict[str, Any]]:
        cursor = reply.get("cursor")
        self.over = cursor is None
        if not self.over and cursor == self._fields.get("cursor"):
            raise ProtocolFault("a list whose cursor stands still")
        self._fields["cursor"] = cursor
        return reply.get("leases") or []


def dated(grant: Grant) -> Grant | None:
    """A grant after a wait: when it began is not known from when it was asked for.

    The daemon's deadline stands if it is of this boot and time namespace.  Else None: renew at once, and count from that.
    """
    from leased.clock import HostClock

    try:
        if grant.reply["boot_id"] == HostClock().boot_id():
            return Grant(grant.reply, float(grant.reply["expires_boottime"]))
    except (OSError, KeyError, TypeError, ValueError):
        pass
    return None


def dated_by(grant: Grant, renewed: Acquired) -> Acquired:
    """The grant, as its renewal dates it; a renewal that was refused or not answered is the answer itself."""
    return Grant(grant.reply, renewed.deadline) if isinstance(renewed, Grant) else renewed


def _credentials(key: str | Grant, fence: str | None, holder: str | None) -> tuple[str, str | None, str | None]:
    return (key.key, key.fence, holder or key.holder) if isinstance(key, Grant) else (key, fence, holder)


def _no_answer(key: str, holder: str, unknown: OutcomeUnknown, rid: str | None = None) -> Unknown:
    return Unknown({"key": key, "holder": holder, "acquired": None, "reason": "no_answer", "text": unknown.why}, rid)


def _released(reply: Reply, sent_at: float, repeated: bool) -> Released:
    released = verdict(reply, "released")
    return Released(reply, released, repeated and released is False and reply.get("reason") == "expired")


def _revoked(reply: Reply, sent_at: float, repeated: bool) -> Revoked:
    revoked = verdict(reply, "revoked")
    return Revoked(reply, revoked, repeated and revoked is False and reply.get("reason") == "expired")


def _checked(reply: Reply, sent_at: float, repeated: bool) -> Checked:
    return Checked(reply)


def _as_it_came(reply: Reply, sent_at: float, repeated: bool) -> Reply:
    return reply
