"""Order: of requests within a connection, and of those who wait for a key."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import msgpack
import pytest
from daemons import Daemon, HungUp, MakeDaemon, Rpc, RpcError, request

SOON = 0.15  # seconds in which nothing must happen


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


def until_waiting(rpc: Rpc, key: str, number: int) -> None:
    until = boottime() + 20
    while rpc.call("check", key=key)["waiting"] != number:
        assert boottime() < until


# ---- pipelines


@pytest.mark.parametrize("cut", [1, 7, 4096, 1 << 20])
def test_requests_on_one_key_are_decided_in_the_order_sent(a: Rpc, key: str, cut: int) -> None:
    """However the bytes are cut on their way, and in however many batches they arrive."""
    rounds = 4 if cut == 1 else 100
    calls: list[tuple[str, dict[str, Any]]] = []
    for turn in range(rounds):
        calls += [
            ("lease", {"key": key, "holder": f"{turn}"}),
            ("lease", {"key": key, "holder": "late"}),
            ("check", {"key": key}),
            ("revoke", {"key": key, "reason": "next turn"}),
            ("check", {"key": key}),
        ]
    packed = b"".join(request(1 + at, *call) for at, call in enumerate(calls))
    for at in range(0, len(packed), cut):
        a.send(packed[at : at + cut])
    answers = a.answers(list(range(1, len(calls) + 1)))
    for turn in range(rounds):
        grant, refusal, held, revoked, free = answers[5 * turn : 5 * turn + 5]
        assert grant["acquired"] is True
        assert (refusal["acquired"], refusal["held_by"]) == (False, f"{turn}")
        assert (held["held"], held["generation"]) == (True, grant["generation"])
        assert (revoked["revoked"], revoked["generation"]) == (True, grant["generation"])
        assert free["held"] is False


@pytest.mark.parametrize("number", [1000, 1500, 2500])
def test_a_long_pipeline_in_one_write_is_answered_without_help_from_others(make_daemon: MakeDaemon, number: int) -> None:
    """Nothing else happens at this daemon: what it has read must be enough to go on."""
    daemon = make_daemon().start()
    with daemon.rpc(timeout=5) as rpc:
        rpc.send(b"".join(request(at, "check", {"key": "k"}) for at in range(1, number + 1)))
        assert [rpc.receive()[1] for _ in range(number)] == list(range(1, number + 1))


def test_a_flushed_grant_and_what_follows_it_keep_their_order(a: Rpc, key: str) -> None:
    """A long grant waits for the disk; the release sent behind it is decided after it, and both are true to each other."""
    posted = a.post_all(
        [
            ("lease", {"key": key, "holder": "a", "ttl_seconds": 600}),
            ("check", {"key": key}),
            ("lease", {"key": key, "holder": "b"}),
        ]
    )
    grant, held, refusal = a.answers(posted)
    assert grant["acquired"] is True
    assert (held["held"], held["generation"]) == (True, grant["generation"])
    assert (refusal["acquired"], refusal["generation"]) == (False, grant["generation"])


def test_a_waiting_lease_holds_back_no_later_answer(a: Rpc, b: Rpc, key: str) -> None:
    grant = b.call("lease", key=key, holder="b")
    waiting = a.post("lease", key=key, holder="a", wait_seconds=30)
    assert a.call("check", key=key)["held_by"] == "b"
    assert a.call("lease", key=f"{key} too", holder="a")["acquired"] is True
    assert b.call("release", key=key, fence=grant["fence"])["released"] is True
    assert a.answer(waiting)["acquired"] is True
    assert a.order[-1] == waiting


def test_a_client_that_sends_no_more_still_gets_its_answers(served: Daemon, b: Rpc, key: str) -> None:
    """`printf ... | nc -N -U leased.sock`: the half-closed connection lives until everything has been answered."""
    grant = b.call("lease", key=key, holder="b", ttl_seconds=30)
    with served.rpc() as rpc:
        posted = rpc.post_all(
            [
                ("info", {}),
                ("lease", {"key": f"{key} long", "holder": "a", "ttl_seconds": 600}),
                ("lease", {"key": key, "holder": "a", "wait_seconds": 30}),
            ]
        )
        rpc.half_close()
        info, long, *_ = rpc.answers(posted[:2])
        assert info["name"] == "leased" and long["acquired"] is True
        assert rpc.unanswered(posted[2], SOON), "a half-closed client was given up while it waits"
        assert b.call("release", key=key, fence=grant["fence"])["released"] is True
        assert rpc.answer(posted[2])["acquired"] is True
        assert rpc.rest() == [], "the connection ends with its last answer"


def test_the_shortest_request_of_all(served: Daemon) -> None:
    """What the README shows: four bytes of envelope, no parameters."""
    with served.rpc() as rpc:
        rpc.send(b"\x94\x00\x01\xa4info\x90")
        rpc.half_close()
        [message] = rpc.rest()
        assert message[:3] == [1, 1, None] and message[3]["name"] == "leased"


def test_a_notification_is_done_and_not_answered(a: Rpc, b: Rpc, key: str) -> None:
    a.send(msgpack.packb([2, "lease", [{"key": key, "holder": "quiet"}]]))
    a.send(msgpack.packb([2, "lease", [{"key": key}]]))
    a.send(msgpack.packb([2, "no_such_thing", []]))
    assert a.call("check", key=key)["held_by"] == "quiet"
    assert len(a.order) == 1, "a notification was answered"


def test_an_error_in_a_pipeline_stops_nothing(a: Rpc, key: str) -> None:
    good = a.post("lease", key=key, holder="a")
    bad = [a.post("lease", key=key), a.post("leese", key=key, holder="a"), a.post("lease", key=key, holder="a", ttl_second=3)]
    check = a.post("check", key=key)
    assert a.answer(good)["acquired"] is True
    assert a.answer(check)["held"] is True
    told = []
    for msgid in bad:
        with pytest.raises(RpcError) as raised:
            a.answer(msgid)
        told.append(str(raised.value))
    assert told[0] == "invalid_argument: holder is required"
    assert told[1].startswith("unknown_method: ") and "lease" in told[1]
    assert told[2].startswith("invalid_argument: ttl_second is not a field of lease") and "ttl_seconds" in told[2]


# ---- queues


def test_who_came_first_is_served_first_and_a_newcomer_last(served: Daemon, a: Rpc, key: str) -> None:
    """P28: the release hands the key on in its own decision."""
    grant = a.call("lease", key=key, holder="holder")
    with ExitStack() as stack:
        lines = [stack.enter_context(served.rpc()) for _ in range(8)]
        waits = []
        for number, line in enumerate(lines):
            waits.append(line.post("lease", key=key, holder=f"{number}", wait_seconds=60, ttl_seconds=30))
            until_waiting(a, key, number + 1)
        fence = grant["fence"]
        for number, line in enumerate(lines):
            released, newcomer = a.answers(
                a.post_all([("release", {"key": key, "fence": fence}), ("lease", {"key": key, "holder": "newcomer"})])
            )
            assert released["released"] is True
            assert (newcomer["acquired"], newcomer["held_by"]) == (False, f"{number}")
            assert a.call("check", key=key)["waiting"] == 7 - number
            granted = line.answer(waits[number])
            assert (granted["acquired"], granted["renewed"], granted["holder"]) == (True, False, f"{number}")
            assert granted["expires_boottime"] > boottime() + 28, "ttl runs from the grant, not from the request"
            fence = granted["fence"]


def test_check_counts_no_waiter_that_has_been_granted(make_daemon: MakeDaemon) -> None:
    """Pipelined behind the release that granted it: held_by names the waiter, and `waiting` still counts it."""
    daemon = make_daemon().start()
    with daemon.rpc() as a, daemon.rpc() as b:
        fence = a.call("lease", key="k", holder="a")["fence"]
        b.post("lease", key="k", holder="b", wait_seconds=60)
        while a.call("check", key="k")["waiting"] != 1:
            time.sleep(0.01)
        _, check = a.answers(a.post_all([("release", {"key": "k", "fence": fence}), ("check", {"key": "k"})]))
        assert (check["held_by"], check["waiting"]) == ("b", 0)


def test_p25_a_lapsed_key_goes_to_who_waits(a: Rpc, b: Rpc, key: str) -> None:
    grant = a.call("lease", key=key, holder="a", ttl_seconds=0.3)
    got = b.call("lease", key=key, holder="b", wait_seconds=5)
    assert got["acquired"] is True and got["generation"] > grant["generation"]
    begun = got["expires_boottime"] - got["ttl_seconds"]
    assert grant["expires_boottime"] <= begun < grant["expires_boottime"] + 0.2


def test_p28_nobody_slips_in_between_a_lapse_and_who_waits(served: Daemon, a: Rpc, b: Rpc, key: str) -> None:
    """A newcomer in a tight loop finds the lapse before the sweep does, often enough: the key still goes to the line."""
    with served.rpc() as newcomer:
        for turn in range(10):
            a.call("lease", key=f"{key} {turn}", holder="a", ttl_seconds=0.1)
            waiting = b.post("lease", key=f"{key} {turn}", holder="b", wait_seconds=20, ttl_seconds=30)
            until_waiting(a, f"{key} {turn}", 1)
            while (answer := newcomer.call("lease", key=f"{key} {turn}", holder="newcomer")).get("held_by") == "a":
                pass
            assert (answer["acquired"], answer.get("held_by")) == (False, "b")
            assert b.answer(waiting)["acquired"] is True


def test_a_wait_that_ends_is_a_refusal(a: Rpc, b: Rpc, key: str) -> None:
    grant = a.call("lease", key=key, holder="a")
    sent = boottime()
    refusal = b.call("lease", key=key, holder="b", wait_seconds=0.3)
    waited = boottime() - sent
    assert (refusal["acquired"], refusal["reason"], refusal["held_by"]) == (False, "held", "a")
    assert refusal["generation"] == grant["generation"] and refusal["charge"]["amount"] == "0"
    assert 0.3 <= waited < 1.5
    assert b.call("check", key=key)["waiting"] == 0


def test_wait_zero_answers_at_once(a: Rpc, b: Rpc, key: str) -> None:
    """P23: zero is a value, not an absence."""
    a.call("lease", key=key, holder="a")
    assert b.call("lease", key=key, holder="b", wait_seconds=0)["acquired"] is False
    assert b.call("check", key=key)["waiting"] == 0


def test_only_what_will_pass_is_waited_for(a: Rpc, b: Rpc, key: str) -> None:
    grant = a.call("lease", key=key, holder="a")
    wrong = str(int(grant["fence"]) ^ 1)
    assert b.call("lease", key=key, holder="b", fence=wrong, wait_seconds=30)["reason"] == "wrong_fence"
    assert b.call("lease", key=key, holder="b", fence=grant["fence"], wait_seconds=30)["reason"] == "wrong_holder"
    same = b.post("lease", key=key, holder="a", wait_seconds=30)
    until_waiting(a, key, 1)
    a.call("release", key=key, fence=grant["fence"])
    assert b.answer(same)["acquired"] is True


def test_p27_whoever_is_gone_is_passed_over(served: Daemon, a: Rpc, key: str) -> None:
    grant = a.call("lease", key=key, holder="a")
    with served.rpc() as dead, served.rpc() as alive:
        dead.post("lease", key=key, holder="dead", wait_seconds=60)
        until_waiting(a, key, 1)
        wait = alive.post("lease", key=key, holder="alive", wait_seconds=60)
        until_waiting(a, key, 2)
        dead.close()
        released = a.call("release", key=key, fence=grant["fence"])
        assert released["released"] is True
        assert alive.answer(wait)["acquired"] is True
    assert a.call("check", key=key)["held_by"] == "alive"


def test_p6_a_repeat_takes_over_the_place_of_the_call_that_waits(served: Daemon, a: Rpc, key: str) -> None:
    grant = a.call("lease", key=key, holder="a")
    attempt = {"key": key, "holder": "b", "request_id": secrets.token_urlsafe(24)}
    with served.rpc() as first, served.rpc() as behind, served.rpc() as second:
        older = first.post("lease", **attempt, wait_seconds=60)
        until_waiting(a, key, 1)
        later = behind.post("lease", key=key, holder="c", wait_seconds=60)
        until_waiting(a, key, 2)
        newer = second.post("lease", **attempt, wait_seconds=60)
        told = first.answer(older)
        assert (told["acquired"], told["reason"]) == (None, "superseded")
        assert a.call("check", key=key)["waiting"] == 2
        a.call("release", key=key, fence=grant["fence"])
        got = second.answer(newer)
        assert got["acquired"] is True
        replay = first.call("lease", **attempt)
        assert (replay["fence"], replay["generation"]) == (got["fence"], got["generation"])
        assert behind.unanswered(later, SOON)


def test_who_hangs_up_in_the_moment_of_the_release_is_not_granted(served: Daemon, a: Rpc, key: str) -> None:
    """The daemon finds both at once: the release, and a waiter whose connection is gone."""
    for turn in range(4):
        grant = a.call("lease", key=key, holder="a")
        with served.rpc() as gone:
            gone.post("lease", key=key, holder="gone", wait_seconds=60)
            until_waiting(a, key, 1)
            with served.stopped():
                if turn % 2:
                    gone.close()
                posted = a.post_all([("release", {"key": key, "fence": grant["fence"]}), ("check", {"key": key})])
                gone.close()
        released, check = a.answers(posted)
        assert released["released"] is True
        assert check["held"] is False


def test_waiters_are_limited(make_daemon: MakeDaemon) -> None:
    limits = "[limits]\nmax_waiters_per_namespace = 3\nmax_waiters_per_key = 2\nmax_waiters_per_connection = 2\n"
    daemon = make_daemon(limits).start()
    with daemon.rpc() as a, daemon.rpc() as b, daemon.rpc() as c:
        for key in ("k", "l", "m"):
            a.call("lease", key=key, holder="a")
        b.post("lease", key="k", holder="b", wait_seconds=60)
        until_waiting(a, "k", 1)
        c.post("lease", key="k", holder="c", wait_seconds=60)
        until_waiting(a, "k", 2)
        told = a.error("lease", key="k", holder="d", wait_seconds=60)
        assert told.code == "rate_limited" and "max_waiters_per_key" in told.text
        b.post("lease", key="l", holder="b", wait_seconds=60)
        until_waiting(a, "l", 1)
        told = c.error("lease", key="m", holder="c", wait_seconds=60)
        assert told.code == "rate_limited" and "max_waiters_per_namespace" in told.text
        c.close()
        until_waiting(a, "k", 1)
        told = b.error("lease", key="m", holder="b", wait_seconds=60)
        assert told.code == "rate_limited" and "max_waiters_per_connection" in told.text
        assert a.call("lease", key="k", holder="d", wait_seconds=0)["acquired"] is False, "who does not wait is refused as ever"


def test_a_stop_tells_those_who_wait(make_daemon: MakeDaemon) -> None:
    """Neither silence nor a grant: the answer is null, or the connection ends."""
    daemon = make_daemon().start()
    with daemon.rpc() as a, daemon.rpc() as b:
        a.call("lease", key="k", holder="a")
        waiting = b.post("lease", key="k", holder="b", wait_seconds=60)
        until_waiting(a, "k", 1)
        assert daemon.terminate() == 0
        try:
            told = b.answer(waiting)
        except HungUp:
            pass
        else:
            assert told["acquired"] is None
