"""Who has the key, who renews it, who gives it back: the rules of ownership through the real socket.

Names like P3 are those of known bugs of other lock services, each re-run here.  The callers A, B, C of those sequences are connections.
"""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from typing import Any

import pytest
from daemons import Daemon, MakeDaemon, Rpc

TTL = 0.15  # seconds; the shortest that leaves a loaded machine time for the steps of a test that come before the lapse
REFUSAL = {
    "acquired", "key", "holder", "reason", "held_by", "same_holder_label", "generation", "expires_at", "expires_in_seconds",
    "retry_after_seconds", "charge",
}  # fmt: skip
GRANT = {
    "acquired", "renewed", "key", "holder", "fence", "generation", "scope", "ttl_seconds", "expires_at", "expires_in_seconds",
    "expires_boottime", "boot_id", "charge",
}  # fmt: skip
FREE = {"amount": "0", "currency": "USDC", "event_id": None}
NOBODY = {"held_by": None, "generation": None, "expires_at": None, "expires_in_seconds": None, "retry_after_seconds": None}


@pytest.fixture(scope="module")
def served(make_shared_daemon: MakeDaemon) -> Daemon:
    return make_shared_daemon().start()


@pytest.fixture
def a(served: Daemon) -> Iterator[Rpc]:
    with served.rpc() as rpc:
        yield rpc


@pytest.fixture
def b(served: Daemon) -> Iterator[Rpc]:
    with served.rpc() as rpc:
        yield rpc


@pytest.fixture
def key(request: pytest.FixtureRequest) -> str:
    return str(request.node.name)


def boottime() -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def lapse(grant: dict[str, Any]) -> None:
    """Until just past the deadline of `grant`."""
    while (left := grant["expires_boottime"] - boottime()) > 0:
        time.sleep(left + 0.001)


def draw() -> str:
    return secrets.token_urlsafe(24)


# ---- the four answers


def test_a_free_key_is_granted_with_everything_a_holder_needs(a: Rpc, key: str) -> None:
    before = boottime()
    grant = a.call("lease", key=key, holder="a", ttl_seconds=30, scope="s")
    after = boottime()
    assert set(grant) == GRANT
    assert (grant["acquired"], grant["renewed"], grant["key"], grant["holder"], grant["scope"]) == (True, False, key, "a", "s")
    assert re.fullmatch(r"[1-9][0-9]*", grant["fence"]) and 2**53 <= int(grant["fence"]) < 2**63
    assert type(grant["generation"]) is int and 1 <= grant["generation"] < 2**53
    assert grant["ttl_seconds"] == 30 and type(grant["ttl_seconds"]) is float
    assert before + 30 <= grant["expires_boottime"] <= after + 30
    assert grant["expires_in_seconds"] == pytest.approx(30, abs=1e-6)
    assert grant["charge"] == FREE
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", grant["expires_at"])
    expected = time.time() + (grant["expires_boottime"] - boottime())
    assert datetime.strptime(grant["expires_at"], "%Y-%m-%dT%H:%M:%S.%fZ").replace(tzinfo=UTC).timestamp() == pytest.approx(
        expected, abs=0.1
    )


def test_the_default_ttl_is_a_minute_and_there_is_no_scope(a: Rpc, key: str) -> None:
    grant = a.call("lease", key=key, holder="a")
    assert (grant["ttl_seconds"], grant["scope"]) == (60, None)


def test_another_label_is_refused_and_told_of_the_holder(a: Rpc, b: Rpc, key: str) -> None:
    grant = a.call("lease", key=key, holder="a", ttl_seconds=20)
    refusal = b.call("lease", key=key, holder="b", ttl_seconds=2)
    assert set(refusal) == REFUSAL
    assert (refusal["acquired"], refusal["reason"], refusal["held_by"], refusal["same_holder_label"]) == (False, "held", "a", False)
    assert (refusal["key"], refusal["holder"], refusal["generation"]) == (key, "b", grant["generation"])
    assert 19 < refusal["expires_in_seconds"] <= 20 and refusal["retry_after_seconds"] == refusal["expires_in_seconds"]
    assert refusal["charge"] == FREE, "billing is off unless configured"


def test_the_holder_renews_by_lease_with_its_fence(a: Rpc, key: str) -> None:
    grant = a.call("lease", key=key, holder="a", ttl_seconds=5, scope="s")
    renewal = a.call("lease", key=key, holder="a", fence=grant["fence"], ttl_seconds=50, scope="other", bind="none")
    assert set(renewal) == GRANT
    assert (renewal["acquired"], renewal["renewed"], renewal["ttl_seconds"]) == (True, True, 50)
    assert (renewal["fence"], renewal["generation"]) == (grant["fence"], grant["generation"])
    assert renewal["scope"] == "s", "scope of a renewal is ignored"
    assert renewal["expires_boottime"] > grant["expires_boottime"] + 44


@pytest.mark.parametrize("operation", ["lease", "renew"])
def test_a_renewal_lasts_exactly_as_long_as_it_asks_even_shorter(a: Rpc, key: str, operation: str) -> None:
    grant = a.call("lease", key=key, holder="a", ttl_seconds=50)
    mine = {"key": key, "holder": "a", "fence": grant["fence"]}
    shorter = a.call(operation, **mine, ttl_seconds=3)
    assert (shorter["ttl_seconds"], shorter["renewed"]) == (3, True)
    assert shorter["expires_boottime"] < grant["expires_boottime"] - 40
    kept = a.call(operation, **mine)
    assert kept["ttl_seconds"] == 3, "without ttl_seconds a renewal keeps the lease's own"
    assert kept["expires_boottime"] >= shorter["expires_boottime"]


@pytest.mark.parametrize("written", ["text", "integer"])
def test_a_fence_is_taken_as_text_and_as_integer(a: Rpc, key: str, written: str) -> None:
    fence = a.call("lease", key=key, holder="a")["fence"]
    assert a.call("renew", key=key, holder="a", fence=fence if written == "text" else int(fence))["renewed"] is True


def test_a_lease_with_an_old_fence_on_a_free_key_is_a_fresh_grant(a: Rpc, key: str) -> None:
    """P12: what has lapsed is not revived, displaced or not."""
    grant = a.call("lease", key=key, holder="a", ttl_seconds=TTL)
    lapse(grant)
    lapsed = a.call("renew", key=key, holder="a", fence=grant["fence"])
    assert set(lapsed) == REFUSAL
    assert (lapsed["acquired"], lapsed["reason"], lapsed["same_holder_label"]) == (False, "lapsed", False)
    assert {name: lapsed[name] for name in NOBODY} == NOBODY
    fresh = a.call("lease", key=key, holder="a", fence=grant["fence"])
    assert (fresh["acquired"], fresh["renewed"]) == (True, False)
    assert fresh["fence"] != grant["fence"] and fresh["generation"] > grant["generation"]


def test_right_fence_wrong_holder(a: Rpc, key: str) -> None:
    grant = a.call("lease", key=key, holder="a")
    for operation in ("lease", "renew"):
        refusal = a.call(operation, key=key, holder="b", fence=grant["fence"])
        assert (refusal["acquired"], refusal["reason"], refusal["held_by"]) == (False, "wrong_holder", "a")
    release = a.call("release", key=key, holder="b", fence=grant["fence"])
    assert (release["released"], release["reason"], release["held_by"]) == (False, "not_holder", "a")
    assert a.call("check", key=key, generation=grant["generation"])["current"] is True


def test_wrong_fence_whoever_holds_it(a: Rpc, key: str) -> None:
    grant = a.call("lease", key=key, holder="a")
    wrong = str(int(grant["fence"]) ^ 1)
    for holder in ("a", "b"):
        for operation in ("lease", "renew"):
            refusal = a.call(operation, key=key, holder=holder, fence=wrong)
            assert (refusal["acquired"], refusal["reason"]) == (False, "wrong_fence")
            assert (refusal["held_by"], refusal["generation"]) == ("a", grant["generation"])
            assert refusal["same_holder_label"] is (holder == "a")


def test_release_and_its_repeat(a: Rpc, b: Rpc, key: str) -> None:
    """P5."""
    grant = a.call("lease", key=key, holder="a")
    assert a.call("release", key=key, fence=grant["fence"]) == {"released": True, "key": key, "generation": grant["generation"]}
    again = a.call("release", key=key, fence=grant["fence"])
    assert (again["released"], again["key"], again["reason"]) == (False, key, "expired")
    successor = b.call("lease", key=key, holder="b")
    assert successor["acquired"] is True
    late = a.call("release", key=key, fence=grant["fence"], holder="a")
    assert (late["released"], late["reason"], late["held_by"]) == (False, "not_holder", "b")
    assert late["generation"] == successor["generation"] and 59 < late["expires_in_seconds"] <= 60


# ---- sequences that broke others


def test_p1_a_holder_that_slept_past_its_lease_is_told_and_harms_nobody(a: Rpc, b: Rpc, key: str) -> None:
    old = a.call("lease", key=key, holder="a", ttl_seconds=TTL)
    lapse(old)
    new = b.call("lease", key=key, holder="b", ttl_seconds=30)
    assert new["generation"] > old["generation"], "the store behind this key could not tell them apart"
    assert a.call("renew", key=key, holder="a", fence=old["fence"])["reason"] == "wrong_fence"
    assert a.call("lease", key=key, holder="a", fence=old["fence"])["reason"] == "wrong_fence"
    assert a.call("release", key=key, fence=old["fence"])["reason"] == "not_holder"
    assert a.call("check", key=key, generation=old["generation"])["current"] is False
    stands = b.call("check", key=key, generation=new["generation"])
    assert stands["current"] is True and 29 < stands["expires_in_seconds"] <= 30


def test_p3_a_late_release_does_not_free_the_successors_key(served: Daemon, a: Rpc, b: Rpc, key: str) -> None:
    old = a.call("lease", key=key, holder="a", ttl_seconds=TTL)
    lapse(old)
    b.call("lease", key=key, holder="b")
    late = a.call("release", key=key, fence=old["fence"])
    assert (late["released"], late["reason"], late["held_by"]) == (False, "not_holder", "b")
    with served.rpc() as c:
        assert c.call("lease", key=key, holder="c")["held_by"] == "b"


def test_p4_after_revocation_nothing_brings_the_old_lease_back(a: Rpc, b: Rpc, key: str) -> None:
    attempt = {"key": key, "holder": "a", "request_id": draw()}
    old = a.call("lease", **attempt)
    assert b.call("revoke", key=key, reason="test") == {"revoked": True, "generation": old["generation"], "held_by": "a"}
    assert b.call("revoke", key=key, reason="test") == {"revoked": False, "reason": "expired"}
    assert a.call("renew", key=key, holder="a", fence=old["fence"])["reason"] == "lapsed"
    spent = a.call("lease", **attempt)
    assert (spent["acquired"], spent["reason"], spent["charge"]) == (False, "spent", FREE)
    assert {name: spent[name] for name in NOBODY} == NOBODY
    new = a.call("lease", key=key, holder="a", request_id=draw())
    assert new["acquired"] is True and new["fence"] != old["fence"] and new["generation"] > old["generation"]
    spent = a.call("lease", **attempt)
    assert (spent["reason"], spent["held_by"], spent["generation"]) == ("spent", "a", new["generation"])


def test_p6_a_lost_reply_is_asked_for_again(served: Daemon, b: Rpc, key: str) -> None:
    attempt = {"key": key, "holder": "a", "request_id": draw()}
    with served.rpc() as lost:
        lost.post("lease", **attempt, ttl_seconds=30)
        while b.call("check", key=key)["held"] is not True:
            pass
    with served.rpc() as again:
        grant = again.call("lease", **attempt, ttl_seconds=5, scope="ignored")
        assert (grant["acquired"], grant["renewed"], grant["ttl_seconds"], grant["scope"]) == (True, False, 30, None)
        assert grant["expires_in_seconds"] < 30
        assert again.call("check", key=key, generation=grant["generation"])["current"] is True
        assert again.call("lease", key=key, holder="a")["reason"] == "same_label", "without the request_id it is a stranger's"
        assert again.call("renew", key=key, holder="a", fence=grant["fence"])["renewed"] is True


@pytest.mark.parametrize("kind", ["text", "binary"])
def test_p11_five_repeats_are_one_grant_until_its_fence_is_presented(a: Rpc, key: str, kind: str) -> None:
    attempt = {"key": key, "holder": "a", "request_id": draw() if kind == "text" else secrets.token_bytes(32), "ttl_seconds": 20}
    grants = [a.call("lease", **attempt) for _ in range(5)]
    assert len({(grant["fence"], grant["generation"], grant["expires_boottime"]) for grant in grants}) == 1
    assert {(grant["acquired"], grant["renewed"]) for grant in grants} == {(True, False)}
    a.call("renew", key=key, holder="a", fence=grants[0]["fence"], ttl_seconds=30)
    refusal = a.call("lease", **attempt)
    assert (refusal["acquired"], refusal["reason"]) == (False, "same_label")
    a.call("release", key=key, fence=grants[0]["fence"])
    assert a.call("lease", **attempt)["reason"] == "spent"


def test_a_request_id_is_forgotten_at_the_original_deadline(a: Rpc, key: str) -> None:
    attempt = {"key": key, "holder": "a", "request_id": draw(), "ttl_seconds": 0.3}
    grant = a.call("lease", **attempt)
    a.call("renew", key=key, holder="a", fence=grant["fence"], ttl_seconds=60)
    a.call("release", key=key, fence=grant["fence"])
    assert a.call("lease", **attempt)["reason"] == "spent"
    lapse(grant)
    fresh = a.call("lease", **attempt)
    assert fresh["acquired"] is True and fresh["generation"] > grant["generation"] and fresh["fence"] != grant["fence"]


def test_a_request_id_belongs_to_one_key_and_one_holder(a: Rpc, key: str) -> None:
    request_id = draw()
    first = a.call("lease", key=key, holder="a", request_id=request_id)
    for other in ({"key": f"{key} too", "holder": "a"}, {"key": key, "holder": "b"}):
        error = a.error("lease", **other, request_id=request_id)
        assert error.code == "invalid_argument" and error.text.startswith("request_id ")
    a.call("release", key=key, fence=first["fence"])
    for other in ({"key": f"{key} too", "holder": "a"}, {"key": key, "holder": "b"}):
        assert a.error("lease", **other, request_id=request_id).code == "invalid_argument", "spent ones are remembered too"
    assert a.call("check", key=f"{key} too")["held"] is False


def test_p8_a_contenders_ttl_changes_nothing_for_the_holder(a: Rpc, b: Rpc, key: str) -> None:
    grant = a.call("lease", key=key, holder="a", ttl_seconds=30)
    answers = [b.call("lease", key=key, holder="b", ttl_seconds=0.1 + attempt / 10) for attempt in range(50)]
    assert {(answer["acquired"], answer["held_by"], answer["generation"]) for answer in answers} == {
        (False, "a", grant["generation"])
    }
    left = [answer["expires_in_seconds"] for answer in answers]
    assert left == sorted(left, reverse=True) and 28 < left[-1] < left[0] < 30


def test_p9_one_label_in_two_processes_is_not_one_holder(a: Rpc, b: Rpc, key: str) -> None:
    grant = a.call("lease", key=key, holder="worker", ttl_seconds=30)
    second = b.call("lease", key=key, holder="worker", ttl_seconds=3000)
    assert (second["acquired"], second["reason"], second["same_holder_label"]) == (False, "same_label", True)
    assert second["expires_in_seconds"] < 30
    assert b.call("check", key=key)["expires_in_seconds"] < 30, "the lease was renewed by its label"
    assert a.call("release", key=key, fence=grant["fence"])["released"] is True


def test_p10_an_old_handle_has_no_power_over_a_new_lease_of_the_same_process(a: Rpc, key: str) -> None:
    old = a.call("lease", key=key, holder="a", ttl_seconds=TTL)
    lapse(old)
    new = a.call("lease", key=key, holder="a", ttl_seconds=30)
    assert a.call("renew", key=key, holder="a", fence=old["fence"])["reason"] == "wrong_fence"
    assert a.call("release", key=key, fence=old["fence"])["released"] is False
    assert a.call("renew", key=key, holder="a", fence=new["fence"])["renewed"] is True


def test_p24_a_key_is_free_when_its_ttl_is_over_and_polling_leaves_no_line(served: Daemon, a: Rpc, key: str) -> None:
    lines = len(served.logs().splitlines())
    with served.rpc() as gone:
        grant = gone.call("lease", key=key, holder="gone", ttl_seconds=0.5)
    while (answer := a.call("lease", key=key, holder="a"))["acquired"] is not True:
        assert boottime() < grant["expires_boottime"] + 5
    taken = answer["expires_boottime"] - answer["ttl_seconds"]
    assert grant["expires_boottime"] <= taken < grant["expires_boottime"] + 0.2
    noise = [line for line in served.logs().splitlines()[lines:] if "loop.late" not in line]
    assert noise == []


def test_p36_a_closed_connection_ends_no_lease_that_is_not_bound(served: Daemon, a: Rpc, key: str) -> None:
    with served.rpc() as gone:
        grant = gone.call("lease", key=key, holder="gone", ttl_seconds=30, bind="none")
    assert a.call("check", key=key, generation=grant["generation"])["current"] is True
    assert a.call("release", key=key, fence=grant["fence"])["released"] is True, "any connection may bear the fence"


def test_p15_of_many_at_once_exactly_one_is_granted(served: Daemon, key: str) -> None:
    """A round is one key; everybody asks for every round, in one write each."""
    rounds, clients = 100, 16

    def contend(number: int) -> list[bool]:
        with served.rpc() as rpc:
            calls = [("lease", {"key": f"{key} {turn}", "holder": f"client {number}"}) for turn in range(rounds)]
            return [answer["acquired"] for answer in rpc.answers(rpc.post_all(calls))]

    with ThreadPoolExecutor(clients) as pool:
        told = list(pool.map(contend, range(clients)))
    assert [sum(turn) for turn in zip(*told, strict=True)] == [1] * rounds


def test_generations_rise_over_all_keys_and_fences_do_not_repeat(a: Rpc, key: str) -> None:
    calls = [("lease", {"key": f"{key} {number}", "holder": "a"}) for number in range(500)]
    grants = a.answers(a.post_all(calls))
    generations = [grant["generation"] for grant in grants]
    assert generations == sorted(set(generations))
    assert len({grant["fence"] for grant in grants}) == 500


def test_an_operation_of_one_key_leaves_others_alone(a: Rpc, key: str) -> None:
    """P40: no two keys collide, and none is altered."""
    keys = [
        "a/", "a", "a//b", "a/b", "../a", "/a", "\0", "a\0", "a\0b", " a", "a ", "A", "\u00e9", "e\u0301", "é\u200d", "\U0001f512",
        "x" * 511, "x" * 512, "x" * 1024, "é" * 512, "k\n", "%2F", "'; drop",
    ]  # fmt: skip
    calls = [("lease", {"key": each, "holder": "a", "scope": key}) for each in keys]
    grants = a.answers(a.post_all(calls))
    assert [(grant["acquired"], grant["key"]) for grant in grants] == [(True, each) for each in keys]
    listed = a.call("list", scope=key)["leases"]
    assert [entry["key"] for entry in listed] == keys
    for each, grant in zip(keys, grants, strict=True):
        assert a.call("release", key=each, fence=grant["fence"])["released"] is True


def test_scope_and_key_are_two_things(a: Rpc, key: str) -> None:
    first = a.call("lease", key="b/c", holder="a", scope=f"{key}/a")
    second = a.call("lease", key="c", holder="a", scope=f"{key}/a/b")
    assert first["acquired"] is second["acquired"] is True
    other_scope = a.call("lease", key="c", holder="b", scope="elsewhere")
    assert (other_scope["acquired"], other_scope["reason"]) == (False, "held"), "a scope is no wall: the key is one resource"
