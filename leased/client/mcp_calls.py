"""One call of a tool: arguments in, an answer for a model out.  No MCP and no transport: those are in mcp_server.py.

An attempt to acquire has a request_id, drawn here.  It stays that of the same key and label until the daemon has answered true or
false, so that a model that calls again after an unknown gets the grant it may have been given before.
"""

from __future__ import annotations

import hashlib
import os
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any, Final, NamedTuple, Protocol

from leased import model
from leased.client.answers import Reply
from leased.client.core import draw_holder, draw_request_id
from leased.client.errors import LeasedClientError, OutcomeUnknown, ProtocolFault
from leased.client.mcp_tools import LABELLED, NEVER_ASKED
from leased.client.mcp_wording import failed, meaning
from leased.errors import PeerError, invalid
from leased.schema import parse

MAX_ATTEMPTS: Final = 1024  # unanswered ones that are remembered; the oldest go
RETRY_SECONDS: Final = 1.0  # as the daemon says of what it cannot tell


class Asked(Protocol):
    async def ask(self, operation: str, fields: dict[str, Any]) -> tuple[Reply, bool]: ...


class Caller(NamedTuple):
    """Who calls: `agent_key`, if one came along, and what tells sessions of one bridge apart."""

    agent_key: str | None = None
    session: str = ""


class Told(NamedTuple):
    """`reply` None: a mistake or a failure, told in `text`."""

    reply: Reply | None
    text: str


class Calls:
    """`holder`: the label of all calls; drawn when None, and then another one for each session and each agent key.

    `bind`: what a `lease` that does not say is bound to.  `local`: false where nothing can be bound (HTTP).
    """

    def __init__(self, lines: Asked, holder: str | None, *, bind: str = "none", local: bool = True) -> None:
        self._lines = lines
        self._bind = bind
        self._local = local
        self._given = holder
        self._drawn = f"mcp:{draw_holder()}"
        self._salt = os.urandom(16)
        self._unanswered: OrderedDict[tuple[str | None, str, str], str] = OrderedDict()

    def label(self, caller: Caller) -> str:
        """The same for every call of a session, and unlike any other's: a call said twice then meets `same_label`, not a stranger."""
        if self._given is not None:
            return self._given
        if not caller.session and caller.agent_key is None:
            return self._drawn
        digest = hashlib.blake2s(f"{caller.session}\0{caller.agent_key or ''}".encode(), key=self._salt, digest_size=4)
        return f"{self._drawn}:{digest.hexdigest()}"

    async def call(self, tool: str, arguments: Mapping[str, Any], caller: Caller) -> Told:
        """Cancelled, it leaves no fresh grant behind (see mcp_daemon.py)."""
        try:
            fields = self._fields(tool, arguments, caller)
        except PeerError as wrong:
            return Told(None, f"{wrong}. Nothing happened. Correct that argument and call again.")
        attempt = (caller.agent_key, str(fields.get("key")), str(fields.get("holder")))
        request_id = ""
        if tool == "lease":
            request_id = fields["request_id"] = self._unanswered.pop(attempt, None) or draw_request_id()
        try:
            reply, repeated = await self._lines.ask(tool, fields)
            text = meaning(tool, reply, repeated=repeated)
        except OutcomeUnknown as unknown:
            reply = no_answer(tool, fields)
            text = meaning(tool, reply) if reply else failed(unknown)
        except LeasedClientError as wrong:
            return Told(None, failed(wrong))
        except (KeyError, TypeError, ValueError) as wrong:  # a reply that is none, and must not pass for permission
            return Told(None, failed(ProtocolFault(f"a reply that cannot be understood ({type(wrong).__name__})")))
        if request_id and reply.get("acquired") is None:
            self._remember(attempt, request_id)
        return Told(reply or None, text)

    def _fields(self, tool: str, arguments: Mapping[str, Any], caller: Caller) -> dict[str, Any]:
        """What to send, checked by the table as the daemon will check it.  Raises PeerError."""
        for name, why in NEVER_ASKED.items():
            if name in arguments:
                raise invalid(name, why)
        fields = dict(arguments)
        if tool in LABELLED and fields.get("holder") is None:
            fields["holder"] = self.label(caller)
        if tool == "lease":
            if fields.get("bind") is None:
                fields["bind"] = self._bind
            elif not self._local and fields["bind"] != "none":
                raise invalid(
                    "bind", "must be none: over HTTP there is no process or connection of yours that a lease could end with"
                )
        parse(tool, fields)
        if caller.agent_key is not None:
            fields["agent_key"] = caller.agent_key
        return fields

    def _remember(self, attempt: tuple[str | None, str, str], request_id: str) -> None:
        self._unanswered[attempt] = request_id
        while len(self._unanswered) > MAX_ATTEMPTS:
            self._unanswered.popitem(last=False)


def no_answer(tool: str, fields: Mapping[str, Any]) -> Reply:
    """The unknown that stands for an answer which did not come in time; empty where the tool has none."""
    unknown: Reply = {"key": fields.get("key"), "reason": "no_answer", "retry_after_seconds": RETRY_SECONDS}
    if tool in LABELLED:
        return {"acquired": None, "holder": fields["holder"], **unknown, "charge": dict(model.FREE)}
    if tool == "release":
        return {"released": None, **unknown}
    if tool == "check":
        empty = dict.fromkeys(("held_by", "generation", "expires_at", "expires_in_seconds"))
        return {"held": None, **unknown, **empty, "waiting": 0}
    if tool != "agent_lock":
        return {}
    op = str(fields.get("op") or model.LOCK_OPS[0])
    verdict = {"claim": {"acquired": None, "token": None}, "release": {"released": None}}.get(op)
    lost = verdict or {"held": None, **dict.fromkeys(("held_by", "expires_at", "expires_in_seconds"))}
    return {"op": op, **lost, **unknown, "charge": dict(model.FREE)}
