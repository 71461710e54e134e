"""The rules of leases.  Pure: one record, one request, one instant in; one decision out.

The theory.  A lease is a promise about time: until its deadline nobody else is told yes for this key.  Four facts follow.

* A lease is live while now < deadline and gone afterwards.  Whether anyone has noticed makes no difference: a record past its deadline
  is a free key, for the renewal that comes late as for the stranger who comes next.  Nothing revives it.
* Who may renew or release is proven by the fence, the credential of one grant.  The holder is a label: it says who to ask, and
  two instances may carry it by mistake, so a label without the fence gets a refusal (`same_label`), never the lease.
* Order is told by the generation.  It is drawn anew at each grant and never at a renewal, so a store that keeps the largest it has seen can
  refuse a writer whose lease has passed to another.
* A reply can be lost.  A caller that sends the same request_id again asks for the answer, not for a second lease: it is told the
  same fence until that fence has been presented once (then the answer had arrived), and `spent` when that lease is gone.

The table for `lease`, first row that fits (live means a live record of this key):

    live | fence        | holder | request_id      | decision
    yes  | the lease's  | same   | any             | renewal
    yes  | the lease's  | other  | any             | refusal wrong_holder
    yes  | any other    | same   | the lease's     | the grant again, unless its fence was presented
    any  | any          | any    | of an ended one | refusal spent
    yes  | another      | any    | any             | refusal wrong_fence
    yes  | none         | same   | any             | refusal same_label
    yes  | none         | other  | any             | refusal held
    no   | any          | any    | any             | grant

Whether a decision may be answered now or must wait for a flush is not known here: see `needs_flush` and holds.py.
The instant handed in judges with `judged` and counts new deadlines from `boot`; see lessor.py for when they differ.
"""

from __future__ import annotations

import hmac
from typing import Any, Final, NamedTuple

from leased.clock import rfc3339
from leased.model import (
    DEFAULT_TTL_SECONDS,
    FREE,
    Ask,
    CheckRequest,
    Fresh,
    Instant,
    Lease,
    LeaseRequest,
    ReleaseRequest,
    RenewRequest,
    Reply,
    made,
)

compare_digest: Final = hmac.compare_digest
MIN_RETRY_SECONDS: Final = 0.05  # a refused caller is never told to come back at once
UNKNOWN_RETRY_SECONDS: Final = 1.0

GRANTED: Final = "granted"
RENEWED: Final = "renewed"
REPLAYED: Final = "replayed"
RELEASED: Final = "released"
REVOKED: Final = "revoked"
REFUSED: Final = "refused"


class Decision(NamedTuple):
    """`change` is what happened; `lease` the record to store (granted, renewed) or that ended (released, revoked)."""

    reply: Reply
    change: str
    lease: Lease | None = None


def _decision(reply: Reply, change: str, lease: Lease | None = None) -> Decision:
    decision: Decision = made(Decision, (reply, change, lease))
    return decision


def live(lease: Lease | None, now: Instant) -> bool:
    """Live means now < deadline: at exactly the deadline it has lapsed."""
    return lease is not None and now.judged < lease.deadline


def needs_flush(ttl: float, wait_out: float, ledger_ttl: float) -> bool:
    """May a power cut make us forget this lease before it lapses?  Up to `wait_out` seconds are waited out after one; what the
    ledger already holds for this generation (`ledger_ttl`, 0 if nothing) comes back with that ttl."""
    return ttl > wait_out and ttl > ledger_ttl


def lease(record: Lease | None, request: LeaseRequest, ask: Ask, now: Instant, fresh: Fresh) -> Decision:
    """`lease`, by the table at the head of this file."""
    if record is None or now.judged >= record.deadline:
        if ask.spent:
            return _decision(refusal(None, request.key, request.holder, "spent", now), REFUSED)
        return grant(request, ask, now, fresh)
    same_holder = record.holder == request.holder
    if ask.proof and compare_digest(record.proof, ask.proof):
        if not same_holder:
            return _decision(refusal(record, request.key, request.holder, "wrong_holder", now), REFUSED)
        return _renewal(record, request.key, request.ttl, str(request.fence), now)
    if ask.rid and same_holder and compare_digest(record.rid, ask.rid) and not record.presented:
        fence = str(record.sealed ^ ask.rid_mask)
        return _decision(
            _held_reply(record, request.key, fence, now, max(0.0, record.deadline - now.boot), renewed=False), REPLAYED, record
        )
    reason = "spent" if ask.spent else "wrong_fence" if ask.proof else "same_label" if same_holder else "held"
    return _decision(refusal(record, request.key, request.holder, reason, now), REFUSED)


def renew(record: Lease | None, request: RenewRequest, ask: Ask, now: Instant) -> Decision:
    """`renew`: strict, never a fresh grant."""
    if record is None or now.judged >= record.deadline:
        return _decision(refusal(None, request.key, request.holder, "lapsed", now), REFUSED)
    if not compare_digest(record.proof, ask.proof):
        return _decision(refusal(record, request.key, request.holder, "wrong_fence", now), REFUSED)
    if record.holder != request.holder:
        return _decision(refusal(record, request.key, request.holder, "wrong_holder", now), REFUSED)
    return _renewal(record, request.key, request.ttl, str(request.fence), now)


def release(record: Lease | None, request: ReleaseRequest, ask: Ask, now: Instant) -> Decision:
    """`release`: the fence decides; a holder, when given, must be the lease's too."""
    if record is None or now.judged >= record.deadline:
        return _decision({"released": False, "key": request.key, "reason": "expired", **_standing(None, now)}, REFUSED)
    if not compare_digest(record.proof, ask.proof) or request.holder not in {None, record.holder}:
        standing = _standing(record, now)
        del standing["retry_after_seconds"]  # it is nobody's turn to try again
        return _decision({"released": False, "key": request.key, "reason": "not_holder", **standing}, REFUSED)
    return _decision({"released": True, "key": request.key, "generation": record.generation}, RELEASED, record)


def revoke(record: Lease | None, now: Instant) -> Decision:
    """`revoke`: by authority, not by fence."""
    if record is None or now.judged >= record.deadline:
        return _decision({"revoked": False, "reason": "expired"}, REFUSED)
    return _decision({"revoked": True, "generation": record.generation, "held_by": record.holder}, REVOKED, record)


def check(record: Lease | None, request: CheckRequest, now: Instant, waiting: int) -> Reply:
    """`check`: what stands, and whether a given generation is the one that stands."""
    if record is not None and now.judged < record.deadline:
        remaining = record.deadline - now.boot
        if remaining < 0.0:
            remaining = 0.0
        reply: Reply = {
            "held": True,
            "key": request.key,
            "held_by": record.holder,
            "generation": record.generation,
            "expires_at": rfc3339(now.wall + remaining),
            "expires_in_seconds": remaining,
            "waiting": waiting,
        }
    else:
        record = None
        reply = {"held": False, "key": request.key, **_standing(None, now), "waiting": waiting}
        del reply["retry_after_seconds"]
    if request.generation is not None:
        reply["current"] = record is not None and record.generation == request.generation
    return reply


def refusal(record: Lease | None, key: str, holder: str, reason: str, now: Instant) -> Reply:
    """The refusal of `lease` and `renew`.  `record` is the live lease, or None when there is none to tell of."""
    if record is None:
        return {
            "acquired": False,
            "key": key,
            "holder": holder,
            "reason": reason,
            "same_holder_label": False,
            **_standing(None, now),
            "charge": now.free,
        }
    remaining = record.deadline - now.boot
    if remaining < 0.0:
        remaining = 0.0
    return {
        "acquired": False,
        "key": key,
        "holder": holder,
        "reason": reason,
        "held_by": record.holder,
        "same_holder_label": record.holder == holder,
        "generation": record.generation,
        "expires_at": rfc3339(now.wall + remaining),
        "expires_in_seconds": remaining,
        "retry_after_seconds": remaining if remaining > MIN_RETRY_SECONDS else MIN_RETRY_SECONDS,
        "charge": now.free,
    }


def unknown(request: Any, reason: str, retry_after: float = UNKNOWN_RETRY_SECONDS, free: Reply = FREE) -> Reply:
    """The null answer of `lease`, `renew`, `release` and `check`: never permission, never billed."""
    if isinstance(request, LeaseRequest | RenewRequest):
        return {
            "acquired": None,
            "key": request.key,
            "holder": request.holder,
            "reason": reason,
            "retry_after_seconds": retry_after,
            "charge": free,
        }
    verb = "released" if isinstance(request, ReleaseRequest) else "held"
    reply: Reply = {verb: None, "key": request.key, "reason": reason, "retry_after_seconds": retry_after}
    if isinstance(request, CheckRequest):
        reply |= {"held_by": None, "generation": None, "expires_at": None, "expires_in_seconds": None, "waiting": 0}
        if request.generation is not None:
            reply["current"] = None
    return reply


def listed(record: Lease, key: str | None, key_hash: bytes, now: Instant) -> Reply:
    """One entry of `list` and `resume_packet`: no fence."""
    remaining = max(0.0, record.deadline - now.boot)
    return {
        "key": key,
        "key_hash": key_hash.hex(),
        "holder": record.holder,
        "scope": record.scope,
        "generation": record.generation,
        "expires_at": rfc3339(now.wall + remaining),
        "expires_in_seconds": remaining,
        "bind": ("none", "process", "connection")[record.bind],
    }


def undone(record: Lease) -> Lease | None:
    """What a failed flush leaves of an unflushed lease: nothing of a fresh grant; a renewed one as it was before."""
    if not record.previous_deadline:
        return None
    return record._replace(
        ttl=record.previous_ttl, deadline=record.previous_deadline, unflushed=False, previous_ttl=0.0, previous_deadline=0.0
    )


def grant(request: LeaseRequest, ask: Ask, now: Instant, fresh: Fresh) -> Decision:
    """The grant of a free key: the last row of the table."""
    ttl = DEFAULT_TTL_SECONDS if request.ttl is None else request.ttl
    deadline = now.boot + ttl
    if ask.rid:
        rid, sealed, rid_until = ask.rid, fresh.fence ^ ask.rid_mask, deadline
    else:
        rid, sealed, rid_until = b"", 0, 0.0
    record: Lease = made(
        Lease,
        (
            ask.namespace, request.holder, request.scope, fresh.generation, fresh.proof, ttl, deadline, request.bind, rid, sealed,
            rid_until, False, False, 0.0, 0.0,
        ),
    )  # fmt: skip
    return _decision(_held_reply(record, request.key, str(fresh.fence), now, ttl, renewed=False), GRANTED, record)


def _renewal(record: Lease, key: str, ttl: float | None, fence: str, now: Instant) -> Decision:
    """The deadline becomes now + ttl, exactly as asked, even sooner.  What a failed flush would give back is kept from the first
    renewal that was not flushed, not from the latest."""
    if ttl is None:
        ttl = record.ttl
    (
        namespace,
        holder,
        scope,
        generation,
        proof,
        _,
        _,
        bind,
        rid,
        sealed,
        rid_until,
        _,
        unflushed,
        previous_ttl,
        previous_deadline,
    ) = record
    renewed: Lease = made(
        Lease,
        (
            namespace, holder, scope, generation, proof, ttl, now.boot + ttl, bind, rid, sealed, rid_until, True, unflushed,
            previous_ttl, previous_deadline,
        ),
    )  # fmt: skip
    return _decision(_held_reply(renewed, key, fence, now, ttl, renewed=True), RENEWED, renewed)


def _held_reply(record: Lease, key: str, fence: str, now: Instant, remaining: float, *, renewed: bool) -> Reply:
    """`remaining` is the ttl itself where it has just begun: counted back from the deadline it would show the noise of floats."""
    return {
        "acquired": True,
        "renewed": renewed,
        "key": key,
        "holder": record.holder,
        "fence": fence,
        "generation": record.generation,
        "scope": record.scope,
        "ttl_seconds": record.ttl,
        "expires_at": rfc3339(now.wall + remaining),
        "expires_in_seconds": remaining,
        "expires_boottime": record.deadline,
        "boot_id": now.boot_id,
        "charge": now.free,
    }


def _standing(record: Lease | None, now: Instant) -> Reply:
    """What is said of the lease that stands in the way; all null when there is none."""
    if record is None:
        return {
            "held_by": None,
            "generation": None,
            "expires_at": None,
            "expires_in_seconds": None,
            "retry_after_seconds": None,
        }
    remaining = max(0.0, record.deadline - now.boot)
    return {
        "held_by": record.holder,
        "generation": record.generation,
        "expires_at": rfc3339(now.wall + remaining),
        "expires_in_seconds": remaining,
        "retry_after_seconds": max(remaining, MIN_RETRY_SECONDS),
    }
