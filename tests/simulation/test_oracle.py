"""The reference model has teeth: legal sequences pass, and each rule broken once is caught."""

from __future__ import annotations

from typing import Any

import pytest
from expectation import Billing, Expectation
from oracle import Caller, Model

A = Caller(connection="a", process=101)
B = Caller(connection="b", process=102)
ROOT = Caller(operator=True, connection="root")
FREE = {"amount": "0", "currency": "USDC", "event_id": None}
PRICE = {"amount": "0.002", "currency": "USDC", "event_id": "e-1"}
FENCE = 2**53
R = "r" * 22
AT = "2026-11-29T17:39:36.123Z"


def granted(
    n: int = 1, *, now: float = 0.0, ttl: float = 60, holder: str = "a", renewed: bool = False, **other: Any
) -> dict[str, Any]:
    """The legal reply for grant number `n`; its fence and generation are drawn from the number."""
    reply = {
        "acquired": True,
        "renewed": renewed,
        "key": "k",
        "holder": holder,
        "fence": str(FENCE + n),
        "generation": 10 * n,
        "scope": None,
        "ttl_seconds": ttl,
        "expires_at": AT,
        "expires_in_seconds": ttl,
        "expires_boottime": now + ttl,
        "boot_id": "boot-1",
        "charge": FREE,
    }
    return {**reply, **other}


def refused(
    reason: str, *, left: float | None = 60, held_by: str | None = "a", holder: str = "b", n: int = 1, **other: Any
) -> dict[str, Any]:
    live = left is not None
    reply = {
        "acquired": False,
        "key": "k",
        "holder": holder,
        "reason": reason,
        "held_by": held_by if live else None,
        "same_holder_label": live and held_by == holder,
        "generation": 10 * n if live else None,
        "expires_at": AT if live else None,
        "expires_in_seconds": left,
        "retry_after_seconds": max(left, 0.05) if left is not None else None,
        "charge": FREE,
    }
    return {**reply, **other}


def held(n: int = 1, *, held_by: str = "a", left: float = 60, waiting: int = 0, **other: Any) -> dict[str, Any]:
    reply = {"held": True, "key": "k", "held_by": held_by, "generation": 10 * n, "expires_at": AT, "expires_in_seconds": left}
    return {**reply, "waiting": waiting, **other}


NOT_HELD = {
    "held": False,
    "key": "k",
    "held_by": None,
    "generation": None,
    "expires_at": None,
    "expires_in_seconds": None,
    "waiting": 0,
}
EXPIRED = {"released": False, "key": "k", "reason": "expired"}


class Bench:
    """A model and its callers; `yes` asserts that a reply is allowed."""

    def __init__(self, **options: Any) -> None:
        self.model = Model(**options)

    def ask(self, now: float, caller: Caller, operation: str, **params: Any) -> Expectation:
        return self.model.apply(now, caller, operation, {"key": "k", **params})

    def yes(self, reply: object, now: float, caller: Caller, operation: str, **params: Any) -> None:
        assert self.ask(now, caller, operation, **params).check(reply) == []

    def first(self, **params: Any) -> None:
        self.yes(granted(ttl=params.get("ttl_seconds", 60)), 0.0, A, "lease", holder="a", **params)


@pytest.fixture
def bench() -> Bench:
    return Bench()


def fence(n: int = 1) -> str:
    return str(FENCE + n)


def broken(expectation: Expectation, reply: object, words: str) -> None:
    found = expectation.check(reply)
    assert any(words in complaint for complaint in found), found


# -- shapes ------------------------------------------------------------------------------------------------------------------

GRANT_FAULTS = [
    ({"acquired": 1}, "acquired"),
    ({"renewed": True}, "renewed"),
    ({"holder": "b"}, "holder"),
    ({"key": "K"}, "key"),
    ({"fence": FENCE + 1}, "decimal string"),
    ({"fence": "0" + str(FENCE)}, "decimal string"),
    ({"fence": str(2**53 - 1)}, "never below 2^53"),
    ({"fence": str(2**63)}, "63-bit"),
    ({"generation": 2**53}, "below 2^53"),
    ({"generation": "10"}, "integer"),
    ({"generation": True}, "integer"),
    ({"ttl_seconds": 59.9}, "exactly what is given"),
    ({"expires_in_seconds": 60.5}, "now + ttl_seconds"),
    ({"expires_in_seconds": "60"}, "not a number"),
    ({"expires_boottime": 61.0}, "CLOCK_BOOTTIME"),
    ({"expires_at": "2026-11-29T17:39:36Z"}, "milliseconds"),
    ({"boot_id": None}, "boot_id"),
    ({"scope": "s"}, "scope"),
    ({"charge": PRICE}, "everything else is free"),
    ({"charge": {"amount": "0", "currency": "USDC"}}, "event_id is missing"),
    ({"reason": "held"}, "does not belong here"),
]


@pytest.mark.parametrize(("fault", "words"), GRANT_FAULTS)
def test_a_faulty_grant_is_caught(bench: Bench, fault: dict[str, Any], words: str) -> None:
    broken(bench.ask(0.0, A, "lease", holder="a"), granted(**fault), words)


def test_a_missing_field_is_caught(bench: Bench) -> None:
    reply = granted()
    del reply["expires_boottime"]
    broken(bench.ask(0.0, A, "lease", holder="a"), reply, "expires_boottime is missing")


REFUSAL_FAULTS = [
    ({"reason": "same_label"}, "reason"),
    ({"held_by": "b"}, "held_by"),
    ({"same_holder_label": True}, "same_holder_label"),
    ({"generation": 20}, "generation"),
    ({"expires_in_seconds": 60}, "the holder's"),
    ({"retry_after_seconds": 1.0}, "the holder's remaining time"),
    ({"retry_after_seconds": 0}, "at least 0.05"),
    ({"acquired": None}, "acquired"),
    ({"fence": fence()}, "does not belong here"),
    ({"charge": {"amount": "0.002", "currency": "USDC", "event_id": "e"}}, "amount"),
]


@pytest.mark.parametrize(("fault", "words"), REFUSAL_FAULTS)
def test_a_faulty_refusal_is_caught(bench: Bench, fault: dict[str, Any], words: str) -> None:
    bench.first()
    expectation = bench.ask(50.0, B, "lease", holder="b", ttl_seconds=2)
    broken(expectation, {**refused("held", left=10), **fault}, words)
    assert expectation.check(refused("held", left=10)) == []


def test_the_last_moment_prints_retry_after_of_a_twentieth(bench: Bench) -> None:
    bench.first()
    bench.yes(refused("held", left=0.01), 59.99, B, "lease", holder="b")


# -- ownership ---------------------------------------------------------------------------------------------------------------


def test_a_renewal_at_exactly_ttl_finds_it_lapsed() -> None:
    for now, live in [(0.9999, True), (1.0, False), (1.0001, False)]:
        bench = Bench()
        bench.first(ttl_seconds=1)
        expectation = bench.ask(now, A, "renew", holder="a", fence=fence())
        answers = [granted(now=now, ttl=1, renewed=True), refused("lapsed", left=None, holder="a")]
        right, wrong = answers if live else answers[::-1]
        broken(expectation, wrong, "acquired")
        assert expectation.check(right) == []


def test_decimal_ttls_lapse_on_the_nanosecond(bench: Bench) -> None:
    bench.yes(granted(now=0.1, ttl=0.2), 0.1, A, "lease", holder="a", ttl_seconds=0.2)
    bench.yes(refused("lapsed", left=None, holder="a"), 0.3, A, "renew", holder="a", fence=fence())  # 0.1 + 0.2 > 0.3 as floats


def test_wrong_fence_whoever_holds_it(bench: Bench) -> None:
    bench.first()
    bench.yes(refused("wrong_fence"), 0.0, B, "lease", holder="b", fence=fence(7))
    bench.yes(refused("wrong_fence", holder="a"), 0.0, A, "lease", holder="a", fence=fence(7))
    bench.yes(refused("wrong_fence", holder="a"), 0.0, A, "renew", holder="a", fence=fence(7))
    broken(bench.ask(0.0, A, "lease", holder="a", fence=fence(7)), refused("same_label", holder="a"), "reason")
    broken(bench.ask(0.0, A, "lease", holder="a", fence=fence(7)), granted(renewed=True), "acquired")


def test_same_label_is_flagged_and_not_renewed(bench: Bench) -> None:
    bench.first()
    expectation = bench.ask(5.0, B, "lease", holder="a")
    broken(expectation, refused("held", left=55, holder="a"), "reason")
    broken(expectation, refused("same_label", left=60, holder="a"), "expires_in_seconds")
    assert expectation.check(refused("same_label", left=55, holder="a")) == []


def test_right_fence_other_holder(bench: Bench) -> None:
    bench.first()
    for operation in ("lease", "renew"):
        expectation = bench.ask(0.0, B, operation, holder="b", fence=fence())
        broken(expectation, refused("wrong_fence"), "reason")
        assert expectation.check(refused("wrong_holder")) == []
    not_holder = {"released": False, "key": "k", "reason": "not_holder", "held_by": "a", "generation": 10}
    expectation = bench.ask(0.0, B, "release", holder="b", fence=fence())
    broken(expectation, {"released": True, "key": "k", "generation": 10}, "only the live fence's bearer")
    assert expectation.check({**not_holder, "expires_at": AT, "expires_in_seconds": 60}) == []
    bench.yes(held(), 0.0, B, "check")


def test_own_release_repeated_is_expired_and_frees_no_successor(bench: Bench) -> None:
    bench.first()
    bench.yes({"released": True, "key": "k", "generation": 10}, 1.0, A, "release", fence=fence())
    broken(bench.ask(1.0, A, "release", fence=fence()), {"released": True, "key": "k", "generation": 10}, "own release repeated")
    bench.yes({**EXPIRED, "held_by": None}, 1.0, A, "release", fence=fence())
    bench.yes(granted(2, now=2.0, holder="b"), 2.0, B, "lease", holder="b")
    expectation = bench.ask(3.0, A, "release", fence=fence())
    broken(expectation, EXPIRED, "reason")
    not_holder = {"released": False, "key": "k", "reason": "not_holder", "held_by": "b", "generation": 20, "expires_at": AT}
    assert expectation.check({**not_holder, "expires_in_seconds": 59}) == []
    bench.yes(refused("wrong_fence", left=57, held_by="b", holder="a", n=2), 5.0, A, "renew", holder="a", fence=fence())
    bench.yes(held(2, held_by="b", left=57, current=False), 5.0, A, "check", generation=10)


def test_ttl_of_a_renewal_is_exactly_what_is_given_even_shorter(bench: Bench) -> None:
    bench.first()
    expectation = bench.ask(1.0, A, "renew", holder="a", fence=fence(), ttl_seconds=2)
    broken(expectation, granted(now=1.0, ttl=60, renewed=True), "even shorter")
    assert expectation.check(granted(now=1.0, ttl=2, renewed=True)) == []
    bench.yes(granted(now=2.0, ttl=2, renewed=True), 2.0, A, "renew", holder="a", fence=fence())
    bench.yes(NOT_HELD, 4.0, A, "check")


def test_a_renewal_by_lease_with_no_ttl_keeps_the_leases_own(bench: Bench) -> None:
    bench.first(ttl_seconds=5)
    expectation = bench.ask(1.0, A, "lease", holder="a", fence=fence(), scope="ignored", bind="connection", request_id=R)
    broken(expectation, granted(now=1.0, ttl=60, renewed=True), "omitted keeps the lease's own")
    broken(expectation, granted(now=1.0, ttl=5, renewed=True, scope="ignored"), "the scope of a renewal is ignored")
    assert expectation.check(granted(now=1.0, ttl=5, renewed=True)) == []


def test_a_fence_for_a_free_key_is_a_fresh_grant_with_the_default_ttl(bench: Bench) -> None:
    bench.first(ttl_seconds=1)
    bench.yes(refused("lapsed", left=None, holder="a"), 2.0, A, "renew", holder="a", fence=fence())
    expectation = bench.ask(2.0, A, "lease", holder="a", fence=fence())
    broken(expectation, granted(now=2.0, renewed=True), "renewed")
    broken(expectation, granted(now=2.0, fence=fence()), "drawn anew")
    broken(expectation, granted(2, now=2.0, generation=9), "strictly larger")
    assert expectation.check(granted(2, now=2.0, generation=11)) == []


def test_a_renewal_changes_neither_fence_nor_generation(bench: Bench) -> None:
    bench.first()
    faults: list[tuple[dict[str, Any], str]] = [({"fence": fence(2)}, "same fence"), ({"generation": 20}, "unchanged by renewal")]
    for fault, words in faults:
        broken(bench.ask(1.0, A, "renew", holder="a", fence=fence()), granted(now=1.0, renewed=True, **fault), words)


def test_generations_rise_over_all_keys(bench: Bench) -> None:
    bench.first()
    expectation = bench.model.apply(0.0, B, "lease", {"key": "other", "holder": "b"})
    broken(expectation, granted(2, holder="b", key="other", generation=10), "strictly larger")
    assert expectation.check(granted(2, holder="b", key="other")) == []


def test_namespaces_are_walls(bench: Bench) -> None:
    bench.first()
    other = Caller(namespace="other", connection="o")
    bench.yes(NOT_HELD, 0.0, other, "check")
    bench.yes(granted(2, holder="a"), 0.0, other, "lease", holder="a")


def test_check_counts_current_and_waiting(bench: Bench) -> None:
    bench.first()
    bench.yes(held(current=True), 0.0, B, "check", generation=10)
    faults: dict[str, object] = {"current": False, "waiting": 1, "held_by": None, "expires_in_seconds": -0.5, "fence": fence()}
    for field, fault in faults.items():
        broken(bench.ask(0.0, B, "check", generation=10), {**held(current=True), field: fault}, field)


# -- request ids -------------------------------------------------------------------------------------------------------------


def test_a_lost_reply_is_replayed_until_presented(bench: Bench) -> None:
    bench.ask(0.0, A, "lease", holder="a", request_id=R)  # its reply was lost: nothing learned
    expectation = bench.ask(10.0, B, "lease", holder="a", request_id=R, ttl_seconds=3)
    broken(expectation, refused("same_label", left=50, holder="a"), "acquired")
    broken(expectation, granted(now=0.0, renewed=True, expires_in_seconds=50), "renewed")
    assert expectation.check(granted(now=0.0, expires_in_seconds=50)) == []
    broken(bench.ask(10.0, A, "lease", holder="a", request_id=R), granted(2, expires_in_seconds=50), "same fence")
    bench.yes(granted(now=20.0, renewed=True), 20.0, A, "renew", holder="a", fence=fence())
    expectation = bench.ask(20.0, A, "lease", holder="a", request_id=R)
    broken(expectation, granted(now=20.0), "acquired")
    assert expectation.check(refused("same_label", holder="a")) == []


def test_spent_until_the_original_deadline(bench: Bench) -> None:
    bench.first(request_id=R)
    bench.yes({"released": True, "key": "k", "generation": 10}, 1.0, A, "release", fence=fence())
    expectation = bench.ask(2.0, A, "lease", holder="a", request_id=R)
    broken(expectation, granted(2, now=2.0), "acquired")
    broken(expectation, refused("lapsed", left=None, holder="a"), "reason")
    assert expectation.check(refused("spent", left=None, holder="a")) == []
    bench.yes(granted(2, now=2.0, holder="b"), 2.0, B, "lease", holder="b")
    bench.yes(refused("spent", left=50, held_by="b", holder="a", n=2), 12.0, A, "lease", holder="a", request_id=R, wait_seconds=9)
    bench.yes(refused("held", left=2, held_by="b", holder="a", n=2), 60.0, A, "lease", holder="a", request_id=R)
    bench.yes(granted(3, now=62.0), 62.0, A, "lease", holder="a", request_id=R)


def test_revoked_is_never_replayed(bench: Bench) -> None:
    bench.first(request_id=R)
    broken(bench.ask(1.0, A, "revoke", reason="stuck"), {"revoked": True, "generation": 10, "held_by": "a"}, "permission_denied")
    bench.yes({"revoked": True, "generation": 10, "held_by": "a"}, 1.0, ROOT, "revoke", reason="stuck")
    bench.yes({"revoked": False, "reason": "expired"}, 1.0, ROOT, "revoke", reason="stuck")
    bench.yes(refused("lapsed", left=None, holder="a"), 1.0, A, "renew", holder="a", fence=fence())
    bench.yes(refused("spent", left=None, holder="a"), 1.0, A, "lease", holder="a", request_id=R)


def test_a_request_id_of_another_key_or_holder_is_invalid(bench: Bench) -> None:
    bench.first(request_id=R)
    for params in ({"key": "other", "holder": "a"}, {"holder": "b"}):
        expectation = bench.ask(1.0, B, "lease", request_id=R, **params)
        broken(expectation, refused("held", left=59), "invalid_argument")
        broken(expectation, "invalid_argument: holder is odd", "request_id")
        assert expectation.check("invalid_argument: request_id was used for another key or holder") == []
    bench.yes(granted(2, now=60.0, holder="b", key="other"), 60.0, B, "lease", key="other", holder="b", request_id=R)


# -- arguments ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("ttl_seconds", 0),
        ("ttl_seconds", 0.099),
        ("ttl_seconds", 3600.001),
        ("ttl_seconds", True),
        ("ttl_seconds", float("nan")),
        ("ttl_seconds", "abc"),
        ("ttl_seconds", []),
        ("ttl_seconds", 2**64),
        ("wait_seconds", -1),
        ("wait_seconds", 300.5),
        ("key", ""),
        ("key", "é" * 513),
        ("key", "\ud800"),
        ("holder", "h" * 257),
        ("request_id", "short"),
        ("bind", "thread"),
        ("ttl_second", 5),
    ],
)
def test_out_of_bounds_is_refused_by_name(bench: Bench, field: str, value: object) -> None:
    expectation = bench.ask(0.0, A, "lease", **{"holder": "a", field: value})
    broken(expectation, granted(), "must be refused")
    assert expectation.check(f"invalid_argument: {field} is out of its bounds") == []
    bench.yes(NOT_HELD, 0.0, A, "check")


def test_numbers_as_strings_and_bounds_inclusive(bench: Bench) -> None:
    bench.yes(granted(ttl=0.1), 0.0, A, "lease", holder="a", ttl_seconds="0.1")
    bench.yes(granted(ttl=3600, now=0.05, renewed=True), 0.05, A, "lease", holder="a", fence=FENCE + 1, ttl_seconds=3600)
    broken(bench.ask(0.05, B, "lease", holder="b"), "internal: oops", "refusals are results")


def test_bind_to_a_process_needs_proof(bench: Bench) -> None:
    for caller in (Caller(connection="x"), Caller(connection="x", process=1, tcp=True)):
        assert bench.ask(0.0, caller, "lease", holder="a", bind="process").check("invalid_argument: bind cannot be proven") == []


# -- billing -----------------------------------------------------------------------------------------------------------------


def test_a_refusal_is_billed_once_per_key_and_label() -> None:
    bench = Bench(billing=Billing(enabled=True))
    bench.first()
    broken(bench.ask(0.0, A, "renew", holder="c", fence=fence()), refused("wrong_holder", holder="c", charge=PRICE), "amount")
    expectation = bench.ask(0.0, B, "lease", holder="b")
    broken(expectation, refused("held"), "amount")
    assert expectation.check(refused("held", charge=PRICE)) == []
    expectation = bench.ask(1.0, B, "lease", holder="b")
    broken(expectation, refused("held", left=59, charge=PRICE), "billed the first time")
    assert expectation.check(refused("held", left=59)) == []
    expectation = bench.ask(1.0, B, "lease", holder="c")
    broken(expectation, refused("held", left=59, holder="c", charge=PRICE), "another fact's")
    broken(expectation, refused("held", left=59, holder="c", charge={**PRICE, "amount": 0.002}), "amount")


# -- list --------------------------------------------------------------------------------------------------------------------


def entry(n: int, key: str, *, holder: str = "a", scope: str | None = None, left: float = 60, **other: Any) -> dict[str, Any]:
    fields = {"key": key, "key_hash": f"hash-{key}", "holder": holder, "scope": scope, "generation": 10 * n, "expires_at": AT}
    return {**fields, "expires_in_seconds": left, "bind": "none", **other}


def three_leases(bench: Bench) -> list[dict[str, Any]]:
    for n, key in enumerate("xyz", 1):
        bench.yes(granted(n, key=key, scope="s"), 0.0, A, "lease", key=key, holder="a", scope="s")
    return [entry(n, key, scope="s") for n, key in enumerate("xyz", 1)]


def test_list_pages_oldest_generation_first(bench: Bench) -> None:
    entries = three_leases(bench)

    def listed(**params: Any) -> Expectation:
        return bench.model.apply(0.0, A, "list", params)

    assert listed().check({"leases": entries, "cursor": None}) == []
    assert listed(limit=2).check({"leases": entries[:2], "cursor": "20"}) == []
    assert listed(cursor="20").check({"leases": entries[2:], "cursor": None}) == []
    assert listed(scope="t").check({"leases": [], "cursor": None}) == []
    broken(listed(), {"leases": entries[::-1], "cursor": None}, "oldest generation first")
    broken(listed(), {"leases": entries[:2], "cursor": None}, "where 3 are live")
    broken(listed(limit=1), {"leases": entries[:2], "cursor": "20"}, "more than limit")
    broken(listed(holder="z"), {"leases": entries[:1], "cursor": None}, "where 0 are live")
    broken(listed(), {"leases": [{**entries[0], "fence": fence()}, *entries[1:]], "cursor": None}, "fence does not belong")
    broken(listed(), {"leases": [{**entries[0], "key_hash": "hash-y"}, *entries[1:]], "cursor": None}, "key_hash")
    broken(listed(), {"leases": [{**entries[0], "key": None}, *entries[1:]], "cursor": None}, "key")
    assert listed(all=True).check("permission_denied: operators only") == []
    bench.model.restart(1.0, pidfds_kept=True)
    later = [{**one, "key": None, "expires_in_seconds": 59} for one in entries]
    assert bench.model.apply(1.0, A, "list", {}).check({"leases": later, "cursor": None}) == []


# -- waiting -----------------------------------------------------------------------------------------------------------------


def test_waiters_are_served_in_order_and_newcomers_last(bench: Bench) -> None:
    bench.first(ttl_seconds=10)
    second = bench.ask(1.0, B, "lease", holder="b", wait_seconds=30)
    third = bench.ask(2.0, Caller(connection="c"), "lease", holder="c", wait_seconds=5, ttl_seconds=7)
    broken(second, refused("held", left=9), "queues until granted")
    bench.yes(held(left=7, waiting=2), 3.0, A, "check")
    bench.yes({"released": True, "key": "k", "generation": 10}, 4.0, A, "release", fence=fence())
    assert second.check(granted(2, now=4.0, holder="b")) == [] and second.decided_at == 4.0
    bench.yes(refused("held", left=59, held_by="b", holder="a", n=2), 5.0, A, "lease", holder="a")
    bench.model.advance(7.5)
    broken(third, granted(3, holder="c", ttl=7), "acquired")
    assert third.check(refused("held", left=57, held_by="b", holder="c", n=2)) == [] and third.decided_at == 7.0
    assert bench.model.settled == [second, third]


def test_a_lapse_hands_over_in_the_same_decision_and_ttl_runs_from_the_grant(bench: Bench) -> None:
    bench.first(ttl_seconds=10)
    waiting = bench.ask(1.0, B, "lease", holder="b", wait_seconds=9)  # ends as the lease lapses: nothing live, so a grant
    newcomer = bench.ask(12.0, A, "lease", holder="a")
    broken(newcomer, granted(3, now=12.0), "acquired")
    assert waiting.check(granted(2, now=10.0, holder="b")) == []
    assert newcomer.check(refused("held", left=58, held_by="b", holder="a", n=2)) == []
    assert [event.type for event in bench.model.events] == ["granted", "lapsed", "granted"]


def test_a_gone_waiter_receives_nothing(bench: Bench) -> None:
    bench.first()
    gone = bench.ask(1.0, B, "lease", holder="b", wait_seconds=30)
    bench.model.close("b", 2.0)
    bench.yes({"released": True, "key": "k", "generation": 10}, 3.0, A, "release", fence=fence())
    broken(gone, granted(2, now=3.0, holder="b"), "whose connection is gone")
    assert gone.check(None) == []
    bench.yes(NOT_HELD, 3.0, A, "check")


def test_a_repeat_takes_over_the_place_and_the_older_is_superseded(bench: Bench) -> None:
    bench.first()
    older = bench.ask(1.0, B, "lease", holder="b", wait_seconds=30, request_id=R)
    last = bench.ask(1.0, A, "lease", holder="c", wait_seconds=30)
    newer = bench.ask(2.0, Caller(connection="b2"), "lease", holder="b", wait_seconds=5, request_id=R)
    superseded = {"acquired": None, "key": "k", "holder": "b", "reason": "superseded", "retry_after_seconds": 1.0, "charge": FREE}
    broken(older, refused("held", left=58), "acquired")
    assert older.check(superseded) == []
    bench.yes({"released": True, "key": "k", "generation": 10}, 3.0, A, "release", fence=fence())
    assert newer.check(granted(2, now=3.0, holder="b")) == [] and last.kind == "pending"


def test_wrong_fences_do_not_wait(bench: Bench) -> None:
    bench.first()
    bench.yes(refused("wrong_fence"), 0.0, B, "lease", holder="b", fence=fence(7), wait_seconds=30)


# -- bind, switch ------------------------------------------------------------------------------------------------------------


def test_only_a_bound_lease_ends_with_its_connection_or_process(bench: Bench) -> None:
    for n, bind in enumerate(("none", "connection", "process"), 1):
        bench.yes(granted(n, key=bind), 0.0, A, "lease", key=bind, holder="a", bind=bind)
    bench.model.close("a", 1.0)
    assert {place[1] for place in bench.model.leases} == {"none", "process"}
    bench.model.died(101, 1.0)
    assert {place[1] for place in bench.model.leases} == {"none"}


def test_a_renewal_rebinds(bench: Bench) -> None:
    bench.first(bind="connection")
    bench.yes(granted(now=1.0, renewed=True), 1.0, B, "renew", holder="a", fence=fence())
    bench.model.close("a", 2.0)
    bench.yes(held(left=59), 2.0, A, "check")
    bench.model.close("b", 2.0)
    bench.yes(NOT_HELD, 2.0, A, "check")


def beat(armed: bool, due: float | None, missed: bool, **other: Any) -> dict[str, Any]:
    fields = {"scope": "s", "armed": armed, "agent_id": None, "due_at": AT if armed else None, "due_in_seconds": due}
    return {**fields, "last_missed_at": AT if missed else None, **other}


def test_a_missed_switch_releases_its_scope_once(bench: Bench) -> None:
    entries = three_leases(bench)
    bench.yes(granted(4), 0.0, A, "lease", holder="a")

    def heartbeat(now: float, **params: Any) -> Expectation:
        return bench.model.apply(now, A, "heartbeat", {"scope": "s", **params})

    assert heartbeat(0.0).check("invalid_argument: expect_within_seconds is required to arm") == []
    broken(heartbeat(0.0, expect_within_seconds=5), beat(True, 4.0, False), "due_in_seconds")
    broken(heartbeat(4.0, expect_within_seconds=5), beat(False, None, False), "armed")
    packet = {"scope": "s", "empty": False, "leases": [{**one, "expires_in_seconds": 52} for one in entries]}
    switch = {key: value for key, value in beat(True, 1.0, False).items() if key != "scope"}
    assert bench.model.apply(8.0, A, "resume_packet", {"scope": "s"}).check({**packet, "switch": {**switch, "released": []}}) == []
    waiting = bench.ask(8.5, B, "lease", key="y", holder="b", wait_seconds=9)
    bench.model.advance(9.0)
    assert waiting.check(granted(5, now=9.0, holder="b", key="y")) == []
    assert {place[1] for place in bench.model.leases} == {"k", "y"}
    gone = [{"key": one["key"], "key_hash": one["key_hash"], "generation": one["generation"]} for one in entries]
    switch = {key: value for key, value in beat(False, None, True).items() if key != "scope"}
    expectation = bench.model.apply(9.0, A, "resume_packet", {"scope": "s"})
    packet = {"scope": "s", "empty": False, "leases": [], "switch": {**switch, "released": gone}}
    broken(expectation, {**packet, "switch": {**switch, "released": gone[:2]}}, "3 leases the scope had")
    broken(expectation, {**packet, "switch": None}, "switch")
    assert expectation.check(packet) == []
    assert [event.type for event in bench.model.events].count("switch_missed") == 1


def test_a_switch_never_falls_within_ten_seconds_of_a_start(bench: Bench) -> None:
    bench.yes(granted(scope="s"), 0.0, A, "lease", holder="a", scope="s")
    bench.model.apply(0.0, A, "heartbeat", {"scope": "s", "expect_within_seconds": 5})
    bench.model.advance(4.0)
    bench.model.restart(8.0, pidfds_kept=False)
    bench.yes(held(left=43), 17.0, A, "check")
    bench.yes(NOT_HELD, 18.0, A, "check")
