"""`agent_lock`: claim, release and check in the words of POST /agent-lock.

No rule of its own: each is the ordinary operation on the same keys, asked for and told in another form.  The one thing it adds is that
whoever brings the live token need not know the holder label, which was drawn for the claim: the lease's own is used.
"""

from __future__ import annotations

import secrets
from hmac import compare_digest
from typing import Final

from leased import model
from leased.calls import Call
from leased.errors import PeerError, invalid
from leased.gate import Unknown
from leased.lessor import Lessor
from leased.model import Identity, Reply

HOLDER_PREFIX: Final = "agent-lock:"
INVALID_TOKEN: Final = "invalid_token"


class AgentLock:
    def __init__(self, lessor: Lessor) -> None:
        self._lessor = lessor
        lessor.operations[model.AgentLockRequest] = self.decide

    def decide(self, call: Call, request: model.AgentLockRequest) -> None:
        asked: model.Request
        if request.op == model.LOCK_CLAIM:
            holder = self._holder(call.identity, request)
            asked = model.LeaseRequest(request.key, holder, request.ttl, request.token)
        elif request.op == model.LOCK_CHECK:
            asked = model.CheckRequest(request.key)
        elif request.token is None:
            raise invalid("token", "is required to release")
        else:
            asked = model.ReleaseRequest(request.key, request.token, request.holder)
        lessor = self._lessor
        inner = _Inner(call, request, asked, lessor.free)
        try:
            lessor.operations[type(asked)](inner, asked)
        except Unknown as unknown:
            lessor.lane.after(lessor.answer_unknown, inner, unknown)

    def _holder(self, identity: Identity, request: model.AgentLockRequest) -> str:
        if request.holder is not None:
            return request.holder
        if request.token is not None:
            lessor = self._lessor
            record = lessor.record(lessor.digests.key_hash(identity.namespace, request.key))
            if record is not None and compare_digest(record.proof, lessor.digests.proof(request.token)):
                return record.holder
        return HOLDER_PREFIX + secrets.token_hex(4)


class _Inner(Call):
    """The ordinary request on the way; its answer is told in the other form."""

    __slots__ = ("_free", "_lock", "_outer")

    def __init__(self, outer: Call, lock: model.AgentLockRequest, asked: model.Request, free: Reply) -> None:
        super().__init__(outer.peer, outer.msgid, asked, outer.identity)
        self.agent_lock = True
        self._outer = outer
        self._lock = lock
        self._free = free

    def answer(self, reply: Reply) -> None:
        told = _TOLD[self._lock.op](self._lock, reply)
        told["charge"] = reply.get("charge", self._free)  # the lane puts one into what it has charged for
        self._outer.answer(told)

    def refuse(self, error: PeerError) -> None:
        self._outer.refuse(error)


def _claimed(request: model.AgentLockRequest, reply: Reply) -> Reply:
    acquired = reply["acquired"]
    told: Reply = {"op": "claim", "key": request.key, "acquired": acquired, "token": None}
    if acquired is True:
        names: tuple[str, ...] = ("generation", "ttl_seconds", "expires_at", "expires_in_seconds")
        told["token"] = reply["fence"]
    elif acquired is False:
        told["ttl_seconds"] = model.DEFAULT_TTL_SECONDS if request.ttl is None else request.ttl
        names = ("generation", "expires_at", "expires_in_seconds", "held_by", "reason", "retry_after_seconds")
    else:
        names = ("reason", "retry_after_seconds")
    return told | {name: reply[name] for name in names}


def _released(request: model.AgentLockRequest, reply: Reply) -> Reply:
    """`released` false: the token is not the live lease's, or there is none any more."""
    told: Reply = {"op": "release", "key": request.key, "released": reply["released"]}
    if reply["released"] is False:
        told["reason"] = INVALID_TOKEN
    elif reply["released"] is None:
        told |= {"reason": reply["reason"], "retry_after_seconds": reply["retry_after_seconds"]}
    return told


def _checked(request: model.AgentLockRequest, reply: Reply) -> Reply:
    told: Reply = {"op": "check", "key": request.key}
    told |= {name: reply[name] for name in ("held", "held_by", "expires_at", "expires_in_seconds")}
    if reply["held"] is None:
        told |= {"reason": reply["reason"], "retry_after_seconds": reply["retry_after_seconds"]}
    return told


_TOLD: Final = {model.LOCK_CLAIM: _claimed, model.LOCK_RELEASE: _released, model.LOCK_CHECK: _checked}
