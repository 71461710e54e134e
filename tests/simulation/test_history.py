"""The judge of concurrent histories has teeth, and never bites a legal history."""

from __future__ import annotations

import random
import time
from typing import Any

import pytest
from history import History

FREE = {"amount": "0", "currency": "USDC", "event_id": None}
R = "r" * 22


def fence(n: int) -> str:
    return str(2**53 + n)


def grant(
    n: int, *, ttl: float = 10, holder: str = "a", renewed: bool = False, scope: str | None = None, **other: Any
) -> dict[str, Any]:
    reply = {"acquired": True, "renewed": renewed, "key": "k", "holder": holder, "fence": fence(n), "generation": n, "scope": scope}
    return {**reply, "ttl_seconds": ttl, "expires_in_seconds": ttl, "charge": FREE, **other}


def no(reason: str, n: int | None, *, held_by: str = "a", holder: str = "b", left: float = 1, **other: Any) -> dict[str, Any]:
    live = n is not None
    reply = {
        "acquired": False,
        "key": "k",
        "holder": holder,
        "reason": reason,
        "held_by": held_by if live else None,
        "generation": n,
    }
    timing = {"expires_in_seconds": left if live else None, "retry_after_seconds": left if live else None}
    return {**reply, **timing, "same_holder_label": live and held_by == holder, "charge": FREE, **other}


UNKNOWN = {"acquired": None, "key": "k", "holder": "a", "reason": "full", "retry_after_seconds": 1.0, "charge": FREE}
FREE_KEY = {
    "held": False,
    "key": "k",
    "held_by": None,
    "generation": None,
    "expires_at": None,
    "expires_in_seconds": None,
    "waiting": 0,
}
RELEASED = {"released": True, "key": "k", "generation": 1}
EXPIRED = {"released": False, "key": "k", "reason": "expired"}


def held(n: int, held_by: str = "a", left: float = 1) -> dict[str, Any]:
    return {**FREE_KEY, "held": True, "held_by": held_by, "generation": n, "expires_in_seconds": left}


class Story:
    """A history of one key told in lines; A's first grant, generation 1 with ttl 10, is sent at 0 and answered at 1."""

    def __init__(self, *, told: bool = True, **first: Any) -> None:
        self.history = History()
        if told:
            self.lease(0, 1, grant(1, **{k: v for k, v in first.items() if k in ("ttl", "scope")}), **{"ttl_seconds": 10, **first})

    def lease(self, sent: float, received: float | None, reply: object, *, client: str = "A", **params: Any) -> Story:
        params.pop("ttl", None)
        return self.call("lease", sent, received, reply, client=client, **{"holder": "a", "ttl_seconds": 10, **params})

    def call(
        self, operation: str, sent: float, received: float | None, reply: object, *, client: str = "A", **params: Any
    ) -> Story:
        self.history.add(client, operation, {"key": "k", **params}, sent, received, reply)
        return self

    def renew(self, sent: float, received: float | None, reply: object, n: int = 1, **params: Any) -> Story:
        return self.call("renew", sent, received, reply, holder=params.pop("holder", "a"), fence=fence(n), **params)

    def release(self, sent: float, received: float | None, reply: object, n: int = 1, **params: Any) -> Story:
        return self.call("release", sent, received, reply, fence=fence(n), **params)

    def check(self, sent: float, received: float, reply: object) -> Story:
        return self.call("check", sent, received, reply, client="C")

    def by_b(self, sent: float, received: float | None, reply: object, **params: Any) -> Story:
        return self.lease(sent, received, reply, client="B", **{"holder": "b", **params})

    def crash(self, kind: Any, at: float, wait_out: float = 0) -> Story:
        self.history.crash(kind, at, wait_out)
        return self


B2 = grant(2, holder="b")

BROKEN: list[tuple[str, Story]] = [
    ("mutual exclusion", Story().by_b(5, 9.9, B2)),
    ("mutual exclusion", Story().renew(5, 6, grant(1, renewed=True)).by_b(11, 14.9, B2)),
    ("mutual exclusion", Story().renew(5, None, None, ttl_seconds=10).by_b(8, 9.9, B2)),
    ("mutual exclusion", Story().crash("kill", 3).by_b(5, 9, B2)),
    ("mutual exclusion", Story().crash("power", 3, 60).by_b(5, 9, B2)),
    ("mutual exclusion", Story().by_b(2, 9, B2).release(9.5, 10, RELEASED)),
    ("mutual exclusion", Story().call("revoke", 2, 3, {"revoked": False, "reason": "expired"}).by_b(5, 9, B2)),
    ("generations go back", Story().release(2, 3, RELEASED).by_b(4, 5, grant(0, holder="b"))),
    ("one generation, two grants", Story().release(2, 3, RELEASED).by_b(4, 5, {**B2, "generation": 1})),
    ("one fence, one grant", Story().release(2, 3, RELEASED).by_b(4, 5, {**B2, "fence": fence(1)})),
    ("unchanged by renewal", Story().renew(2, 3, grant(1, renewed=True, generation=2))),
    ("answers another fence", Story().renew(2, 3, grant(1, renewed=True), n=9)),
    ("nobody was granted", Story().renew(2, 3, grant(9, renewed=True), n=9)),
    ("wrong_holder", Story().renew(2, 3, grant(1, renewed=True, holder="a"), holder="b")),
    ("exactly what was given", Story().renew(2, 3, grant(1, renewed=True), ttl_seconds=3)),
    ("lost while live", Story().renew(2, 9.9, no("lapsed", None, holder="a"))),
    ("lost while live", Story().crash("kill", 3).renew(4, 5, no("lapsed", None, holder="a"))),
    ("lost while live", Story().crash("power", 3, 5).renew(4, 5, no("lapsed", None, holder="a"))),
    ("lost while live", Story().check(2, 3, FREE_KEY)),
    ("lost while live", Story().release(2, 3, EXPIRED)),
    ("lost while live", Story().by_b(2, 3, no("held", 7, held_by="x")).lease(0, None, None, holder="x")),
    ("own bearer refused", Story().renew(2, 3, no("wrong_fence", 1, holder="a"))),
    (
        "own bearer refused",
        Story().release(2, 3, {**EXPIRED, "reason": "not_holder", "held_by": "a", "generation": 1, "expires_in_seconds": 1}),
    ),
    ("never revived", Story().release(2, 3, RELEASED).renew(4, 5, grant(1, renewed=True))),
    ("never revived", Story().release(2, 3, RELEASED).by_b(4, 5, no("held", 1))),
    ("never revived", Story().check(10.5, 11.5, FREE_KEY).check(11.6, 12, held(1))),
    ("never revived", Story().by_b(10, 12, B2).renew(13, 14, grant(1, renewed=True))),
    ("never revived", Story().call("revoke", 2, 3, {"revoked": True, "generation": 1, "held_by": "a"}).check(4, 5, held(1))),
    ("lapsed by 11", Story().renew(11.1, 12, grant(1, renewed=True))),
    ("lapsed by 11", Story().by_b(11.1, 12, no("held", 1))),
    ("beyond its deadline", Story().check(5, 6, held(1, left=9))),
    ("released twice", Story().release(2, 5, RELEASED).release(3, 6, RELEASED)),
    ("another generation", Story().release(2, 3, {**RELEASED, "generation": 2})),
    ("is no grant of this key", Story(told=False).by_b(0, 1, no("held", 7))),
    ("is no grant of this key", Story(told=False).lease(0, None, None).by_b(5, 6, no("held", 7)).by_b(30, 31, no("held", 8))),
    ("before it was asked for", Story(told=False).by_b(0, 1, no("held", 1)).lease(2, 3, grant(1))),
    ("is 'a''s", Story().check(2, 3, held(1, "z"))),
    ("reason held, not same_label", Story().by_b(2, 3, no("held", 1, holder="a"), holder="a")),
    ("reason held, not wrong_fence", Story().by_b(2, 3, no("held", 1), fence=fence(5))),
    ("same_holder_label", Story().by_b(2, 3, no("held", 1, same_holder_label=True))),
    ("a fence outside a grant", Story().by_b(2, 3, no("held", 1, fence=fence(1)))),
    ("retry_after_seconds", Story().by_b(2, 3, no("held", 1, retry_after_seconds=5))),
    ("not the 5.0 asked for", Story(told=False).lease(0, 1, grant(1), ttl_seconds=5)),
    ("fence is not", Story(told=False).lease(0, 1, grant(1, fence="77"))),
    ("one request_id, two grants", Story(request_id=R).release(2, 3, RELEASED).lease(4, 5, grant(2), request_id=R)),
    ("instead of replayed", Story(request_id=R).lease(4, 5, no("same_label", 1, holder="a"), request_id=R)),
    ("instead of replayed", Story(request_id=R).crash("kill", 2).lease(4, 5, no("same_label", 1, holder="a"), request_id=R)),
    ("only until first presented", Story(request_id=R).renew(2, 3, grant(1, renewed=True)).lease(4, 5, grant(1), request_id=R)),
    (
        "not spent",
        Story(request_id=R)
        .release(2, 3, RELEASED)
        .by_b(4, 5, B2)
        .lease(6, 7, no("held", 2, held_by="b", holder="a"), request_id=R),
    ),
    ("never granted", Story(told=False).lease(4, 5, no("spent", None, holder="a"), request_id=R)),
    ("past the grant's original deadline", Story(request_id=R).lease(11.1, 12, no("spent", None, holder="a"), request_id=R)),
    ("reused with another key or holder", Story(request_id=R).by_b(2, 3, no("held", 1), request_id=R)),
    ("replayed to another request_id", Story(request_id=R).lease(2, 3, grant(1), request_id="q" * 22)),
    (
        "granted before 10.0",
        Story().crash("power", 3, 60).call("lease", 4, 5, {**grant(2), "key": "k2"}, key="k2", holder="a", ttl_seconds=10),
    ),
    (
        "granted before 42.0",
        Story()
        .renew(2, 3, grant(1, renewed=True, ttl=40), ttl_seconds=40)
        .crash("power", 4, 60)
        .call("lease", 15, 16, {**grant(2), "key": "k2"}, key="k2", holder="a", ttl_seconds=10),
    ),
    ("an unknown was billed", Story(told=False).lease(0, 1, {**UNKNOWN, "charge": {**FREE, "amount": "0.002", "event_id": "e"}})),
    ("without a true grant", Story(told=False).lease(0, 1, UNKNOWN).call("use", 2, 3, {"accepted": True}, generation=1)),
    (
        "a stale write landed",
        Story()
        .by_b(10, 12, B2)
        .call("use", 13, 14, {"accepted": True}, client="B", generation=2)
        .call("use", 15, 16, {"accepted": True}, generation=1),
    ),
]


def paid(event: str) -> dict[str, Any]:
    return {"charge": {"amount": "0.002", "currency": "USDC", "event_id": event}}


BROKEN += [
    ("billed twice", Story().by_b(2, 3, no("held", 1, **paid("e"))).by_b(4, 5, no("held", 1, **paid("e")))),
    ("one fact, two events", Story().by_b(2, 3, no("held", 1, **paid("e"))).by_b(4, 5, no("held", 1, **paid("f")))),
    (
        "one event id, two facts",
        Story().by_b(2, 3, no("held", 1, **paid("e"))).by_b(4, 5, no("held", 1, holder="c", **paid("e")), holder="c"),
    ),
    ("billed what is free", Story(told=False).lease(0, 1, grant(1, **paid("e")))),
]

LEGAL: list[Story] = [
    Story().by_b(5, 10, B2),  # decided at 10, just as a grant decided at 0 lapses
    Story().release(2, None, None).by_b(3, 4, B2),
    Story().release(3.9, 5, RELEASED).by_b(3, 4, B2),
    Story().call("revoke", 2, None, None).by_b(5, 9, B2),
    Story().renew(2, 3, grant(1, renewed=True, ttl=1), ttl_seconds=1).by_b(3, 4, B2),
    Story().renew(2, None, None, ttl_seconds=1).by_b(3, 4, B2),
    Story().renew(9, None, None).check(15, 16, held(1)).renew(17, 18, grant(1, renewed=True)),
    Story().renew(9, None, None).by_b(11, 12, B2),
    Story().renew(9.9, 12, grant(1, renewed=True)).check(13, 14, held(1)),
    Story(scope="s").call("heartbeat", 1, 2, {"armed": True}, scope="s", expect_within_seconds=3).by_b(4, 5, B2),
    Story(scope="s")  # two heartbeats at once: the longer one may have been decided first
    .call("heartbeat", 1, 5, {"armed": True}, scope="s", expect_within_seconds=3)
    .call("heartbeat", 2, 3, {"armed": True}, scope="s", expect_within_seconds=30)
    .by_b(6, 7, B2),
    # A lost renewal that gave no ttl kept whichever the lease had, here the longer one.
    Story()
    .renew(9, None, None)
    .crash("kill", 9.5)
    .check(15, 16, held(1))
    .renew(17, 18, grant(1, renewed=True, ttl=0.5), ttl_seconds=0.5),
    Story().crash("power", 3, 10).renew(4, 5, no("lapsed", None, holder="a")).by_b(9, 10.5, B2),
    Story().crash("power", 3, 10).renew(4, 5, {**UNKNOWN, "reason": "recovering"}).renew(6, 7, no("lapsed", None, holder="a")),
    Story().crash("kill", 3).renew(4, 5, grant(1, renewed=True)),
    Story()  # short once, and by a renewal longer than what is waited out: it comes back
    .renew(2, 3, grant(1, renewed=True, ttl=90), ttl_seconds=90)
    .crash("power", 4, 60)
    .call("lease", 65, 66, {**grant(2), "key": "k2"}, key="k2", holder="a", ttl_seconds=10),
    Story(request_id=R)
    .lease(2, 3, grant(1), request_id=R)
    .release(4, 5, RELEASED)
    .lease(6, 7, no("spent", None, holder="a"), request_id=R),
    Story(request_id=R).renew(2, 3, grant(1, renewed=True)).lease(4, 5, no("same_label", 1, holder="a"), request_id=R),
    Story(request_id=R).renew(2, None, None).lease(4, 5, no("same_label", 1, holder="a"), request_id=R),
    Story(request_id=R).by_b(2, 3, "invalid_argument: request_id belongs to another key or holder", request_id=R),
    Story(request_id=R).lease(11.5, 12, grant(2), request_id=R),
    Story(told=False).lease(0, None, None, request_id=R).crash("kill", 3).lease(4, 5, grant(1), request_id=R).by_b(9, 10.1, B2),
    Story(told=False).lease(0, None, None).by_b(5, 6, no("held", 7)),
    Story().by_b(2, 3, no("wrong_fence", 1), fence=fence(9)).by_b(2, 3, no("wrong_holder", 1), fence=fence(1)),
    Story().by_b(2, 11, no("held", 1)).by_b(2, 3, "rate_limited: too many requests"),
    Story().by_b(2, 12, B2, wait_seconds=30),
    Story().by_b(2, 3, no("held", 1, **paid("e"))).crash("power", 4, 0).by_b(5, 6, no("held", 1, **paid("e"))),
    Story()
    .call("use", 2, 3, {"accepted": True}, generation=1)
    .by_b(10, 12, B2)
    .call("use", 13, 14, {"accepted": False}, generation=1),
]


@pytest.mark.parametrize(("words", "story"), BROKEN, ids=[f"{n}-{words}" for n, (words, _) in enumerate(BROKEN)])
def test_each_breach_is_caught(words: str, story: Story) -> None:
    found = story.history.judge()
    assert any(words in complaint for complaint in found), found
    assert not any(fence(1) in complaint for complaint in found), "a fence is a credential: it is never printed"


@pytest.mark.parametrize("story", LEGAL, ids=range(len(LEGAL)))
def test_legal_histories_pass(story: Story) -> None:
    assert story.history.judge() == []


def test_a_lost_renewal_dies_with_the_daemon_unless_the_socket_outlives_it() -> None:
    def story() -> Story:
        told = Story().renew(2, None, None, ttl_seconds=1).crash("kill", 2.5).renew(3, 4, grant(1, renewed=True))
        return told.by_b(5, 9, B2)

    assert any("mutual exclusion" in complaint for complaint in story().history.judge())
    outliving = story().history
    outliving.lost_die_with_daemon = False
    assert outliving.judge() == []


def test_a_bound_lease_may_end_from_the_closing_on() -> None:
    for closed, legal in [(2.0, True), (None, False)]:
        story = Story(bind="connection").by_b(3, 4, B2)
        if closed:
            story.history.closed("A", closed)
        assert (story.history.judge() == []) is legal


def test_a_rearmed_switch_is_no_excuse() -> None:
    story = Story(scope="s").call("heartbeat", 1, 2, {"armed": True}, scope="s", expect_within_seconds=3)
    story.call("heartbeat", 2.5, 3, {"armed": True}, scope="s", expect_within_seconds=30).by_b(4, 5, B2)
    assert any("mutual exclusion" in complaint for complaint in story.history.judge())


def test_boottime_deadlines_are_compared_when_asked() -> None:
    for deadline, legal in [(10.0, True), (11.0, True), (9.9, False), (11.1, False)]:
        history = History(check_boottime=True)
        params = {"key": "k", "holder": "a", "ttl_seconds": 10}
        history.add("A", "lease", params, 0, 1, grant(1, expires_boottime=deadline))
        assert (history.judge() == []) is legal


def test_a_stopped_daemon_may_be_excused() -> None:
    history = History(late_allowance=3)
    history.add("A", "lease", {"key": "k", "holder": "a", "ttl_seconds": 10}, 0, 1, grant(1))
    history.add("A", "renew", {"key": "k", "holder": "a", "fence": fence(1)}, 12, 15, grant(1, renewed=True))
    assert history.judge() == []


# -- whole histories of a toy daemon -----------------------------------------------------------------------------------------


class ToyDaemon:
    """Decides one call at a time at the instant given; `fault` names the rule it breaks now and then."""

    def __init__(self, rng: random.Random, fault: str = "") -> None:
        self.rng, self.fault = rng, fault
        self.leases: dict[str, dict[str, Any]] = {}
        self.attempts: dict[str, dict[str, Any]] = {}
        self.generation = 0

    def slips(self, fault: str) -> bool:
        return self.fault == fault and self.rng.random() < 0.1

    def live(self, key: str, now: float) -> dict[str, Any] | None:
        lease = self.leases.get(key)
        early = 0.5 if self.slips("lapses early") else 0.0
        return lease if lease and now < lease["deadline"] - early * lease["ttl"] else None

    def decide(self, now: float, operation: str, params: dict[str, Any]) -> dict[str, Any]:
        key, live = params["key"], self.live(params["key"], now)
        if operation == "check":
            return (
                {**FREE_KEY, "key": key}
                if live is None
                else {**held(live["generation"], live["holder"], live["deadline"] - now), "key": key}
            )
        right = live is not None and params.get("fence") == live["fence"]
        if operation == "release":
            if not right:
                word = (
                    EXPIRED
                    if live is None
                    else {
                        **held(live["generation"], live["holder"], live["deadline"] - now),
                        "released": False,
                        "reason": "not_holder",
                    }
                )
                return {**word, "key": key}
            del self.leases[key]
            return {"released": True, "key": key, "generation": live["generation"]} if live else {}
        if live and right:
            live.update(ttl=params.get("ttl_seconds", live["ttl"]), presented=True)
            live["deadline"] = now + live["ttl"]
            return self.granted(live, True, now)
        request = self.attempts.get(params.get("request_id", ""))
        if operation == "lease" and request and now < request["until"]:
            if live is not request["lease"]:
                return self.refusal("spent", params, live, now)
            if not live["presented"]:
                return self.granted(live, False, now)
        if operation == "lease" and live is None:
            return self.grant(now, params)
        reason = "lapsed" if live is None else "wrong_fence" if "fence" in params else ""
        if live and not reason:
            reason = "same_label" if live["holder"] == params["holder"] else "held"
        return self.refusal(reason, params, live, now)

    def grant(self, now: float, params: dict[str, Any]) -> dict[str, Any]:
        self.generation += self.rng.randint(1, 9)
        generation = self.generation - 500 if self.slips("goes back") else self.generation
        lease = {
            "key": params["key"],
            "holder": params["holder"],
            "fence": str(self.rng.randrange(2**53, 2**63)),
            "generation": generation,
        }
        lease.update(ttl=params["ttl_seconds"], deadline=now + params["ttl_seconds"], presented=False)
        self.leases[params["key"]] = lease
        if "request_id" in params:
            self.attempts[params["request_id"]] = {"lease": lease, "until": lease["deadline"]}
        return self.granted(lease, False, now)

    def granted(self, lease: dict[str, Any], renewed: bool, now: float) -> dict[str, Any]:
        reply = grant(1, ttl=lease["ttl"], holder=lease["holder"], renewed=renewed, expires_in_seconds=lease["deadline"] - now)
        return {
            **reply,
            "key": lease["key"],
            "fence": lease["fence"],
            "generation": lease["generation"],
            "expires_boottime": lease["deadline"],
        }

    def refusal(self, reason: str, params: dict[str, Any], live: dict[str, Any] | None, now: float) -> dict[str, Any]:
        if live is None:
            return {**no(reason, None, holder=params["holder"]), "key": params["key"]}
        left = live["deadline"] - now
        reply = no(reason, live["generation"], held_by=live["holder"], holder=params["holder"], left=left)
        return {**reply, "key": params["key"], "retry_after_seconds": max(left, 0.05)}

    def killed(self) -> None:
        if self.fault == "forgets when killed":
            self.leases.clear()


def toy_history(seed: int, calls: int, *, fault: str = "", keys: int = 5, clients: int = 12, lost: float = 0.05) -> History:
    """Clients call without waiting for one another; each decision falls at random between sending and answer; kills now and then."""
    rng = random.Random(seed)
    daemon = ToyDaemon(rng, fault)
    history = History(check_boottime=True)
    fences: dict[tuple[int, str], str] = {}
    requests: dict[tuple[int, str], str] = {}
    now = 1_000_000.0
    for index in range(calls):
        now += rng.expovariate(20)
        client, key = rng.randrange(clients), f"k{rng.randrange(keys)}"
        params: dict[str, Any] = {"key": key, "holder": f"h{client}"}
        operation = rng.choices(["lease", "renew", "release", "check"], [5, 5, 1, 2])[0]
        known = fences.get((client, key))
        if operation in ("renew", "release") and not known:
            operation = "lease"
        if operation in ("renew", "release"):
            params["fence"] = known
        if operation == "lease":
            again = requests.get((client, key)) if rng.random() < 0.5 else None
            params["ttl_seconds"] = rng.choice([0.5, 1, 2, 5])
            params["request_id"] = requests[client, key] = again or f"{index:022d}"
        if operation == "renew" and rng.random() < 0.3:
            params["ttl_seconds"] = rng.choice([0.1, 1, 3])
        sent, received = now - rng.expovariate(30), now + rng.expovariate(30)
        if history.crashes and sent <= history.crashes[-1].at:
            sent = history.crashes[-1].at + (now - history.crashes[-1].at) / 2
        gone = rng.random() < lost
        reply = daemon.decide(now, operation, params) if not gone or rng.random() < 0.5 else {}
        history.add(client, operation, params, sent, None if gone else received, reply)
        if (not gone and reply.get("acquired") and daemon.fault != "forgets when killed") or (not gone and reply.get("acquired")):
            fences[client, key] = reply["fence"]
        if rng.random() < 0.002:
            now += 0.5
            history.crash("kill", now)
            daemon.killed()
            now += 0.2
    return history


@pytest.mark.parametrize("seed", range(20))
def test_a_legal_daemon_is_never_accused(seed: int) -> None:
    assert toy_history(seed, 1500, lost=0.05 * (seed % 4)).judge() == []


@pytest.mark.parametrize(
    ("fault", "words"), [("lapses early", "mutual exclusion"), ("goes back", "go back"), ("forgets when killed", "lost while live")]
)
def test_a_faulty_daemon_is_accused(fault: str, words: str) -> None:
    found = toy_history(1, 3000, fault=fault).judge()
    assert any(words in complaint for complaint in found), found[:5]


@pytest.mark.slow
@pytest.mark.parametrize("keys", [1, 5000])
def test_two_hundred_thousand_calls_are_judged_in_ten_seconds(keys: int) -> None:
    history = toy_history(7, 200_000, keys=keys)
    started = time.process_time()
    assert history.judge() == []
    assert time.process_time() - started < 10
