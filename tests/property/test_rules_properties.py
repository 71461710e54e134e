"""The rules against a second statement of them, written from the contract: a table of rows, each with its own condition."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from hypothesis import example, given, settings
from hypothesis import strategies as st

from leased import rules
from leased.clock import rfc3339
from leased.model import (
    DEFAULT_TTL_SECONDS,
    MAX_FENCE,
    MIN_FENCE,
    Ask,
    CheckRequest,
    Fresh,
    Instant,
    Lease,
    LeaseRequest,
    ReleaseRequest,
    RenewRequest,
    Reply,
)

unhurried = settings(max_examples=80, deadline=None)  # other tests may have the processor meanwhile

GRANT_FIELDS = {
    "acquired", "renewed", "key", "holder", "fence", "generation", "scope", "ttl_seconds", "expires_at", "expires_in_seconds",
    "expires_boottime", "boot_id", "charge",
}  # fmt: skip
REFUSAL_FIELDS = {
    "acquired", "key", "holder", "reason", "held_by", "same_holder_label", "generation", "expires_at", "expires_in_seconds",
    "retry_after_seconds", "charge",
}  # fmt: skip
STANDING_FIELDS = {"held_by", "generation", "expires_at", "expires_in_seconds"}
FREE = {"amount": "0", "currency": "USDC", "event_id": None}
NOW_BOOT, NOW_WALL = 5000.0, 1_800_000_000.0

PROOFS = [bytes((n,)) * 16 for n in (1, 2, 3)]
RIDS = [bytes((n,)) * 16 for n in (8, 9)]
HOLDERS = ["alpha", "beta", "gämma"]
# Eighths of a second are exact in binary, so that a boundary is a boundary.
eighths = st.integers(1, 800).map(lambda n: n / 8)
instants = st.integers(0, 80).map(lambda n: Instant(NOW_BOOT - n / 8, NOW_BOOT, NOW_WALL, "boot"))
deadlines = st.integers(-100, 400).map(lambda n: NOW_BOOT + n / 8)
leases = st.builds(
    Lease,
    namespace=st.just("local"),
    holder=st.sampled_from(HOLDERS),
    scope=st.sampled_from([None, "night"]),
    generation=st.integers(1, 2**53 - 1),
    proof=st.sampled_from(PROOFS),
    ttl=eighths,
    deadline=deadlines,
    bind=st.integers(0, 2),
    rid=st.sampled_from([b"", *RIDS]),
    sealed=st.integers(0, 2**63 - 1),
    rid_until=deadlines,
    presented=st.booleans(),
    unflushed=st.booleans(),
    previous_ttl=st.just(0.0) | eighths,
    previous_deadline=st.just(0.0) | deadlines,
)
records = st.none() | leases
fences = st.integers(MIN_FENCE, MAX_FENCE)
fresh = st.builds(Fresh, st.integers(1, 2**53 - 1), fences, st.just(b"\x07" * 16))


class Asking(NamedTuple):
    request: LeaseRequest
    ask: Ask


@st.composite
def askings(draw: st.DrawFn) -> Asking:
    """A `lease` with its credentials as the lessor digests them: a proof exactly when a fence was given, and so on."""
    proof = draw(st.sampled_from([b"", *PROOFS]))
    rid = draw(st.sampled_from([b"", *RIDS]))
    request = LeaseRequest(
        key="k", holder=draw(st.sampled_from(HOLDERS)), ttl=draw(st.none() | eighths), fence=draw(fences) if proof else None,
        scope=draw(st.sampled_from([None, "day"])), bind=draw(st.integers(0, 2)), request_id=b"i" * 22 if rid else None,
    )  # fmt: skip
    return Asking(
        request, Ask("local", proof, rid, draw(st.integers(0, 2**64 - 1)) if rid else 0, spent=bool(rid) and draw(st.booleans()))
    )


def is_live(record: Lease | None, now: Instant) -> bool:
    return record is not None and record.deadline > now.judged


class Row(NamedTuple):
    decision: str
    fits: Callable[[Lease | None, LeaseRequest, Ask, Instant], bool]


def _its_fence(record: Lease | None, ask: Ask) -> bool:
    return record is not None and ask.proof == record.proof


TABLE = [
    Row("renewal", lambda r, q, a, n: is_live(r, n) and _its_fence(r, a) and r is not None and r.holder == q.holder),
    Row("wrong_holder", lambda r, q, a, n: is_live(r, n) and _its_fence(r, a)),
    Row(
        "again",
        lambda r, q, a, n: (
            r is not None and is_live(r, n) and a.rid != b"" and r.rid == a.rid and r.holder == q.holder and not r.presented
        ),
    ),
    Row("spent", lambda r, q, a, n: a.spent),
    Row("grant", lambda r, q, a, n: not is_live(r, n)),
    Row("wrong_fence", lambda r, q, a, n: a.proof != b""),
    Row("same_label", lambda r, q, a, n: r is not None and r.holder == q.holder),
    Row("held", lambda r, q, a, n: True),
]


def left(record: Lease, now: Instant) -> float:
    return max(0.0, record.deadline - now.boot)


def assert_standing(reply: Reply, record: Lease | None, now: Instant) -> None:
    """What is told of the lease in the way, or null all through."""
    if record is None:
        assert all(reply[name] is None for name in STANDING_FIELDS | {"retry_after_seconds"})
        return
    assert reply["held_by"] == record.holder
    assert reply["generation"] == record.generation
    assert reply["expires_in_seconds"] == left(record, now) >= 0.0
    assert reply["expires_at"] == rfc3339(NOW_WALL + left(record, now))
    if "retry_after_seconds" in reply:
        assert reply["retry_after_seconds"] == max(0.05, left(record, now))


def assert_refusal(reply: Reply, reason: str, record: Lease | None, holder: str, now: Instant) -> None:
    assert set(reply) == REFUSAL_FIELDS
    assert reply["acquired"] is False
    assert (reply["key"], reply["holder"], reply["reason"], reply["charge"]) == ("k", holder, reason, FREE)
    assert reply["same_holder_label"] is (record is not None and record.holder == holder)
    assert_standing(reply, record, now)


def assert_yes(reply: Reply, lease: Lease, fence: int, now: Instant, *, renewed: bool) -> None:
    assert set(reply) == GRANT_FIELDS
    assert reply["acquired"] is True
    assert reply["renewed"] is renewed
    assert reply["fence"] == str(fence)
    assert (reply["key"], reply["holder"], reply["generation"]) == ("k", lease.holder, lease.generation)
    assert (reply["scope"], reply["ttl_seconds"], reply["expires_boottime"]) == (lease.scope, lease.ttl, lease.deadline)
    assert reply["expires_in_seconds"] == left(lease, now) >= 0.0
    assert reply["expires_at"] == rfc3339(NOW_WALL + left(lease, now))
    assert (reply["boot_id"], reply["charge"]) == ("boot", FREE)


AT_ITS_DEADLINE = Lease("local", "alpha", None, 5, PROOFS[0], 8.0, NOW_BOOT)
ITS_FENCE = Asking(LeaseRequest("k", "alpha", None, MIN_FENCE), Ask("local", PROOFS[0]))


@unhurried
@given(record=records, asking=askings(), now=instants, fresh=fresh)
@example(AT_ITS_DEADLINE, ITS_FENCE, Instant(NOW_BOOT, NOW_BOOT, NOW_WALL, "boot"), Fresh(6, MIN_FENCE + 1, b"\x07" * 16))
@example(AT_ITS_DEADLINE, ITS_FENCE, Instant(NOW_BOOT - 0.125, NOW_BOOT, NOW_WALL, "boot"), Fresh(6, MIN_FENCE + 1, b"\x07" * 16))
def test_a_lease_is_decided_by_the_first_row_that_fits(record: Lease | None, asking: Asking, now: Instant, fresh: Fresh) -> None:
    request, ask = asking
    row = next(row.decision for row in TABLE if row.fits(record, request, ask, now))
    decision = rules.lease(record, request, ask, now, fresh)
    standing = record if is_live(record, now) else None

    if row == "grant":
        ttl = DEFAULT_TTL_SECONDS if request.ttl is None else request.ttl
        rid = (ask.rid, fresh.fence ^ ask.rid_mask, now.boot + ttl) if ask.rid else (b"", 0, 0.0)
        expected = Lease(
            "local", request.holder, request.scope, fresh.generation, fresh.proof, ttl, now.boot + ttl, request.bind, *rid
        )
        assert decision.change == "granted"
        assert decision.lease == expected
        assert_yes(decision.reply, expected, fresh.fence, now, renewed=False)
    elif row == "renewal":
        assert record is not None
        assert request.fence is not None
        ttl = record.ttl if request.ttl is None else request.ttl
        expected = record._replace(ttl=ttl, deadline=now.boot + ttl, presented=True)
        assert decision.change == "renewed"
        assert decision.lease == expected
        assert_yes(decision.reply, expected, request.fence, now, renewed=True)
    elif row == "again":
        assert record is not None
        assert decision.change == "replayed"
        assert_yes(decision.reply, record, record.sealed ^ ask.rid_mask, now, renewed=False)
    else:
        assert decision.change == "refused"
        assert decision.lease is None
        assert_refusal(decision.reply, row, standing, request.holder, now)


@unhurried
@given(record=leases, asking=askings(), now=instants, fresh=fresh)
def test_nothing_is_granted_and_no_fence_is_told_while_another_holds(
    record: Lease, asking: Asking, now: Instant, fresh: Fresh
) -> None:
    request, ask = asking
    reply = rules.lease(record, request, ask, now, fresh).reply
    if not is_live(record, now):
        return
    if ask.proof == record.proof and request.holder == record.holder:
        assert reply["renewed"] is True
    elif ask.rid and ask.rid == record.rid and request.holder == record.holder and not record.presented:
        assert reply["generation"] == record.generation
    else:
        assert reply["acquired"] is False
        assert "fence" not in reply
        assert str(fresh.fence) not in repr(reply)


@unhurried
@given(asking=askings(), now=instants, fresh=fresh, later=eighths)
def test_whoever_repeats_a_request_id_is_told_the_same_fence_until_it_was_used(
    asking: Asking, now: Instant, fresh: Fresh, later: float
) -> None:
    request, ask = asking
    ask = ask._replace(rid=RIDS[0], spent=False)
    first = rules.lease(None, request, ask, now, fresh)
    assert first.lease is not None
    after = now._replace(judged=now.boot + later, boot=now.boot + later)
    if not is_live(first.lease, after):
        return
    other = Fresh(fresh.generation + 1, MIN_FENCE, b"\x06" * 16)
    again = rules.lease(first.lease, request, Ask("local", b"", ask.rid, ask.rid_mask), after, other)
    assert (again.reply["fence"], again.reply["generation"]) == (first.reply["fence"], first.reply["generation"])
    assert again.reply["renewed"] is False
    used = first.lease._replace(presented=True)
    refused = rules.lease(used, request, Ask("local", b"", ask.rid, ask.rid_mask), after, other)
    assert refused.reply["reason"] == "same_label"


@unhurried
@given(
    record=records,
    holder=st.sampled_from(HOLDERS),
    proof=st.sampled_from(PROOFS),
    fence=fences,
    ttl=st.none() | eighths,
    now=instants,
)
@example(AT_ITS_DEADLINE, "alpha", PROOFS[0], MIN_FENCE, None, Instant(NOW_BOOT, NOW_BOOT, NOW_WALL, "boot"))
def test_a_strict_renewal(record: Lease | None, holder: str, proof: bytes, fence: int, ttl: float | None, now: Instant) -> None:
    decision = rules.renew(record, RenewRequest("k", holder, fence, ttl), Ask("local", proof), now)
    if record is None or record.deadline <= now.judged:
        assert_refusal(decision.reply, "lapsed", None, holder, now)
    elif proof != record.proof:
        assert_refusal(decision.reply, "wrong_fence", record, holder, now)
    elif holder != record.holder:
        assert_refusal(decision.reply, "wrong_holder", record, holder, now)
    else:
        given_ttl = record.ttl if ttl is None else ttl
        expected = record._replace(ttl=given_ttl, deadline=now.boot + given_ttl, presented=True)
        assert decision == (decision.reply, "renewed", expected)
        assert_yes(decision.reply, expected, fence, now, renewed=True)
        return
    assert decision.change == "refused"
    assert decision.lease is None


@unhurried
@given(record=records, holder=st.none() | st.sampled_from(HOLDERS), proof=st.sampled_from(PROOFS), now=instants)
@example(AT_ITS_DEADLINE, None, PROOFS[0], Instant(NOW_BOOT, NOW_BOOT, NOW_WALL, "boot"))
def test_a_release_needs_the_fence_and_the_right_holder_where_one_is_given(
    record: Lease | None, holder: str | None, proof: bytes, now: Instant
) -> None:
    decision = rules.release(record, ReleaseRequest("k", MIN_FENCE, holder), Ask("local", proof), now)
    reply = decision.reply
    if record is None or record.deadline <= now.judged:
        assert (reply["released"], reply["reason"]) == (False, "expired")
        assert set(reply) == {"released", "key", "reason", "retry_after_seconds"} | STANDING_FIELDS
        assert_standing(reply, None, now)
    elif proof != record.proof or (holder is not None and holder != record.holder):
        assert (reply["released"], reply["reason"]) == (False, "not_holder")
        assert set(reply) == {"released", "key", "reason"} | STANDING_FIELDS
        assert_standing(reply, record, now)
    else:
        assert reply == {"released": True, "key": "k", "generation": record.generation}
        assert decision == (reply, "released", record)
        return
    assert decision.lease is None
    assert decision.change == "refused"


@unhurried
@given(record=records, now=instants)
def test_a_revocation_needs_only_a_live_lease(record: Lease | None, now: Instant) -> None:
    decision = rules.revoke(record, now)
    if is_live(record, now):
        assert record is not None
        assert decision == ({"revoked": True, "generation": record.generation, "held_by": record.holder}, "revoked", record)
    else:
        assert decision == ({"revoked": False, "reason": "expired"}, "refused", None)


@unhurried
@given(
    record=records, generation=st.none() | st.integers(1, 2**53 - 1), same=st.booleans(), waiting=st.integers(0, 9), now=instants
)
def test_a_check_tells_what_stands(record: Lease | None, generation: int | None, same: bool, waiting: int, now: Instant) -> None:
    if same and record is not None and generation is not None:
        generation = record.generation
    reply = rules.check(record, CheckRequest("k", generation), now, waiting)
    fields = {"held", "key", "held_by", "generation", "expires_at", "expires_in_seconds", "waiting"}
    assert set(reply) == (fields if generation is None else fields | {"current"})
    held = is_live(record, now)
    assert (reply["held"], reply["key"], reply["waiting"]) == (held, "k", waiting)
    if record is not None and held:
        assert (reply["held_by"], reply["generation"], reply["expires_in_seconds"]) == (
            record.holder,
            record.generation,
            left(record, now),
        )
        assert reply["expires_at"] == rfc3339(NOW_WALL + left(record, now))
    else:
        assert [reply[name] for name in ("held_by", "generation", "expires_at", "expires_in_seconds")] == [None] * 4
    if generation is not None:
        assert reply["current"] is (held and record is not None and record.generation == generation)


@unhurried
@given(ttl=eighths, wait_out=eighths, ledger_ttl=st.just(0.0) | eighths)
def test_a_flush_is_needed_exactly_above_what_is_waited_out_and_what_the_ledger_has(
    ttl: float, wait_out: float, ledger_ttl: float
) -> None:
    assert rules.needs_flush(ttl, wait_out, ledger_ttl) is (ttl > max(wait_out, ledger_ttl))
    assert not rules.needs_flush(wait_out, wait_out, 0.0)


@unhurried
@given(record=leases)
def test_what_a_failed_flush_leaves(record: Lease) -> None:
    before = rules.undone(record)
    if record.previous_deadline == 0.0:
        assert before is None
    else:
        expected = record._replace(
            ttl=record.previous_ttl, deadline=record.previous_deadline, unflushed=False, previous_ttl=0.0, previous_deadline=0.0
        )
        assert before == expected
