"""The rules, case by case where a reader of the contract would look for one.  The whole table is in the property tests."""

from __future__ import annotations

import pytest

from leased import rules
from leased.clock import rfc3339
from leased.model import Ask, CheckRequest, Fresh, Instant, Lease, LeaseRequest, ReleaseRequest, RenewRequest

PROOF, OTHER_PROOF = b"p" * 16, b"q" * 16
FENCE = 2**53 + 11
HELD = Lease("local", "me", "night", 7, PROOF, 60.0, 1060.0)
WALL = 1_796_000_000.0


def at(boot: float, judged: float | None = None) -> Instant:
    return Instant(boot if judged is None else judged, boot, WALL, "boot")


@pytest.mark.parametrize(("boot", "renewed"), [(1059.999, True), (1060.0, False), (1060.001, False)])
def test_a_renewal_at_exactly_its_ttl_finds_the_lease_lapsed(boot: float, renewed: bool) -> None:
    decision = rules.renew(HELD, RenewRequest("k", "me", FENCE), Ask("local", PROOF), at(boot))
    assert decision.reply["acquired"] is renewed
    assert decision.reply.get("reason") == (None if renewed else "lapsed")


def test_lease_with_the_fence_of_a_lapsed_lease_is_a_fresh_grant() -> None:
    reply = rules.lease(
        HELD, LeaseRequest("k", "me", fence=FENCE), Ask("local", PROOF), at(1060.0), Fresh(8, FENCE + 1, OTHER_PROOF)
    ).reply
    assert (reply["acquired"], reply["renewed"], reply["generation"], reply["fence"]) == (True, False, 8, str(FENCE + 1))


def test_a_renewal_that_waited_while_the_daemon_was_deaf_is_judged_by_then_and_counts_from_now() -> None:
    decision = rules.renew(HELD, RenewRequest("k", "me", FENCE), Ask("local", PROOF), at(1075.0, judged=1059.0))
    assert decision.lease is not None
    assert decision.lease.deadline == 1075.0 + 60.0


def test_remainders_are_never_below_zero_though_the_deadline_has_passed_for_the_real_clock() -> None:
    now = at(1075.0, judged=1059.0)
    refused = rules.lease(HELD, LeaseRequest("k", "you"), Ask("local"), now, Fresh(0, 0, b"")).reply
    assert (refused["expires_in_seconds"], refused["retry_after_seconds"]) == (0.0, 0.05)
    assert rules.check(HELD, CheckRequest("k"), now, 0)["expires_in_seconds"] == 0.0
    not_yours = rules.release(HELD, ReleaseRequest("k", FENCE), Ask("local", OTHER_PROOF), now).reply
    assert not_yours["expires_in_seconds"] == 0.0
    assert rules.listed(HELD, "k", b"h", now)["expires_in_seconds"] == 0.0
    again = rules.lease(
        HELD._replace(rid=b"r" * 16, sealed=FENCE), LeaseRequest("k", "me"), Ask("local", rid=b"r" * 16), now, Fresh(0, 0, b"")
    )
    assert again.reply["expires_in_seconds"] == 0.0


def test_a_refusal_tells_who_and_until_when() -> None:
    reply = rules.lease(HELD, LeaseRequest("k", "you"), Ask("local"), at(1000.0), Fresh(0, 0, b"")).reply
    assert reply == {
        "acquired": False,
        "key": "k",
        "holder": "you",
        "reason": "held",
        "held_by": "me",
        "same_holder_label": False,
        "generation": 7,
        "expires_at": rfc3339(WALL + 60),
        "expires_in_seconds": 60.0,
        "retry_after_seconds": 60.0,
        "charge": {"amount": "0", "currency": "USDC", "event_id": None},
    }


def test_ones_own_label_without_the_fence_renews_nothing() -> None:
    decision = rules.lease(HELD, LeaseRequest("k", "me", 3600.0), Ask("local"), at(1000.0), Fresh(0, 0, b""))
    assert decision.lease is None
    assert (decision.reply["reason"], decision.reply["same_holder_label"]) == ("same_label", True)


def test_an_ended_request_is_spent_and_tells_of_whoever_holds_now() -> None:
    ask = Ask("local", rid=b"r" * 16, spent=True)
    free = rules.lease(None, LeaseRequest("k", "you"), ask, at(1000.0), Fresh(9, FENCE, PROOF)).reply
    assert (free["acquired"], free["reason"], free["held_by"], free["generation"]) == (False, "spent", None, None)
    assert (free["expires_at"], free["expires_in_seconds"], free["retry_after_seconds"]) == (None, None, None)
    held = rules.lease(HELD, LeaseRequest("k", "you"), ask, at(1000.0), Fresh(9, FENCE, PROOF)).reply
    assert (held["reason"], held["held_by"], held["generation"]) == ("spent", "me", 7)


def test_the_null_answers_have_the_fields_of_their_operation() -> None:
    lease = rules.unknown(LeaseRequest("k", "me"), "full")
    assert lease == rules.unknown(RenewRequest("k", "me", FENCE), "full")
    assert lease == {
        "acquired": None,
        "key": "k",
        "holder": "me",
        "reason": "full",
        "retry_after_seconds": 1.0,
        "charge": {"amount": "0", "currency": "USDC", "event_id": None},
    }
    assert rules.unknown(ReleaseRequest("k", FENCE), "store") == {
        "released": None,
        "key": "k",
        "reason": "store",
        "retry_after_seconds": 1.0,
    }
    check = rules.unknown(CheckRequest("k", 7), "recovering", 3.5)
    assert (check["held"], check["held_by"], check["current"], check["retry_after_seconds"]) == (None, None, None, 3.5)
    assert "current" not in rules.unknown(CheckRequest("k"), "recovering")


def test_a_listed_lease_shows_no_credential() -> None:
    shown = rules.listed(HELD._replace(bind=2), None, bytes(range(20)), at(1000.0))
    assert shown == {
        "key": None,
        "key_hash": bytes(range(20)).hex(),
        "holder": "me",
        "scope": "night",
        "generation": 7,
        "expires_at": rfc3339(WALL + 60),
        "expires_in_seconds": 60.0,
        "bind": "connection",
    }


@pytest.mark.parametrize(
    ("ttl", "wait_out", "ledger_ttl", "needed"),
    [
        (60, 60, 0, False),
        (60.1, 60, 0, True),
        (0.1, 0, 0, True),
        (100, 60, 100, False),
        (100.1, 60, 100, True),
        (70, 60, 80, False),
    ],
)
def test_when_a_flush_is_needed(ttl: float, wait_out: float, ledger_ttl: float, needed: bool) -> None:
    assert rules.needs_flush(ttl, wait_out, ledger_ttl) is needed
