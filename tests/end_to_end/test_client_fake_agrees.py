"""FakeLeased answers as the daemon does: the same steps are asked of both, and every reply, error and event must be the same.

Fences, generations, hashes and instants differ from run to run; they are compared by what they equal, and by their order.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
from daemons import ANSWER_SECONDS, Daemon, MakeDaemon

from leased import Client
from leased.client.errors import LeasedClientError
from leased.client.watching import LeaseEvent
from leased.testing import FakeLeased

RID, OTHER_RID = "r" * 32, "s" * 32
Answers = list[tuple[str, Any]]


class Place:
    """One of the two.  `do` asks as one of several clients, each with a connection of its own, and keeps what was answered."""

    def __init__(self, name: str, client: Callable[[str], Client], sleep: Callable[[float], None]) -> None:
        self.name = name
        self.sleep = sleep
        self.answers: Answers = []
        self._client = client
        self._clients: dict[str, Client] = {}
        self._waiting: dict[str, tuple[threading.Thread, list[Any]]] = {}

    def client(self, who: str) -> Client:
        if who not in self._clients:
            self._clients[who] = self._client(who)
        return self._clients[who]

    def do(self, who: str, operation: str, **fields: Any) -> Any:
        answer = self._ask(who, operation, fields)
        self.answers.append((f"{who} {operation} {fields.get('key') or fields.get('scope') or ''}", answer))
        return answer

    def queue(self, who: str, key: str, replaces: str | None = None, **fields: Any) -> None:
        """Waits in a thread; returns once it stands in the line, where it may take the place of another."""
        before = self.client("onlooker").check(key).waiting
        told: list[Any] = []
        thread = threading.Thread(target=lambda: told.append(self._ask(who, "lease", {"key": key, "holder": who, **fields})))
        thread.start()
        self._waiting[who] = (thread, told)
        if replaces is not None:
            self.until(lambda: self._waiting[replaces][1])
        else:
            self.until(lambda: self.client("onlooker").check(key).waiting > before or told)

    def waited(self, who: str) -> Any:
        thread, told = self._waiting.pop(who)
        thread.join(ANSWER_SECONDS)
        self.answers.append((f"{who} waited", told[0]))
        return told[0]

    def until(self, true: Callable[[], Any]) -> None:
        end = time.monotonic() + ANSWER_SECONDS
        while not true():
            assert time.monotonic() < end, f"it did not come true at {self.name}"
            time.sleep(0.002)

    def _ask(self, who: str, operation: str, fields: dict[str, Any]) -> Any:
        try:
            return self.client(who).call(operation, **fields)
        except LeasedClientError as wrong:
            return f"{type(wrong).__name__}: {wrong}"


def credentials(p: Place) -> None:
    grant = p.do("a", "lease", key="k", holder="a", ttl_seconds=60, scope="s")
    fence = grant["fence"]
    p.do("b", "lease", key="k", holder="b")
    p.do("b", "lease", key="k", holder="a")
    p.do("b", "lease", key="k", holder="b", fence=fence)
    p.do("b", "lease", key="k", holder="b", fence="9007199254740993")
    p.do("a", "lease", key="k", holder="a", fence=fence, ttl_seconds=30, scope="ignored")
    p.do("a", "lease", key="k", holder="a", fence=fence)
    p.do("a", "renew", key="k", holder="a", fence=fence)
    p.do("a", "renew", key="k", holder="a", fence=int(fence), ttl_seconds="45")
    p.do("b", "renew", key="k", holder="b", fence=fence)
    p.do("b", "renew", key="k", holder="a", fence="9007199254740993")
    for generation in (None, grant["generation"], grant["generation"] - 1):
        p.do("b", "check", key="k", generation=generation)
    p.do("b", "release", key="k", fence="9007199254740993")
    p.do("b", "release", key="k", fence=fence, holder="b")
    p.do("a", "release", key="k", fence=fence, holder="a")
    p.do("a", "release", key="k", fence=fence)
    p.do("a", "renew", key="k", holder="a", fence=fence)
    p.do("b", "check", key="k", generation=grant["generation"])
    p.do("a", "lease", key="k", holder="a", fence=fence)  # a fence of old, and a free key: a fresh grant


def repeats(p: Place) -> None:
    grant = p.do("a", "lease", key="k", holder="a", request_id=RID)
    p.sleep(0.01)
    p.do("a", "lease", key="k", holder="a", request_id=RID, ttl_seconds=5)
    p.do("a", "lease", key="other", holder="a", request_id=RID)
    p.do("a", "lease", key="k", holder="b", request_id=RID)
    p.do("a", "renew", key="k", holder="a", fence=grant["fence"])
    p.do("a", "lease", key="k", holder="a", request_id=RID)
    p.do("a", "release", key="k", fence=grant["fence"])
    p.do("a", "lease", key="k", holder="a", request_id=RID)
    p.do("a", "lease", key="k", holder="b", request_id=RID)
    p.do("b", "lease", key="k", holder="b")
    p.do("a", "lease", key="k", holder="a", request_id=RID)


def lapses(p: Place) -> None:
    grant = p.do("a", "lease", key="k", holder="a", ttl_seconds=0.3, request_id=OTHER_RID)
    p.do("b", "lease", key="j", holder="b", ttl_seconds=0.3)
    p.sleep(0.5)
    p.do("a", "renew", key="k", holder="a", fence=grant["fence"])
    p.do("a", "check", key="k")
    p.do("a", "release", key="k", fence=grant["fence"])
    p.do("a", "lease", key="k", holder="a", request_id=OTHER_RID)  # its first deadline is over: a new attempt
    p.do("b", "check", key="j")


def lines(p: Place) -> None:
    grant = p.do("a", "lease", key="k", holder="a")
    for who in ("b", "c", "d"):
        p.queue(who, "k", wait_seconds=60, ttl_seconds=20, request_id=f"of {who}".ljust(32, "."))
    p.do("a", "check", key="k")
    p.queue("again", "k", "c", wait_seconds=60, holder="c", request_id="of c".ljust(32, "."))
    p.waited("c")
    p.do("a", "lease", key="other", holder="c", request_id="of c".ljust(32, "."))
    p.do("e", "lease", key="k", holder="e", wait_seconds=0.1) if p.name == "daemon" else _ends_at_once(p, "e")
    p.do("a", "release", key="k", fence=grant["fence"])
    second = p.waited("b")
    p.do("b", "release", key="k", fence=second["fence"])
    third = p.waited("again")
    p.do("c", "check", key="k")
    p.do("c", "release", key="k", fence=third["fence"])
    last = p.waited("d")
    p.do("d", "release", key="k", fence=last["fence"])
    p.do("c", "check", key="k")


def _ends_at_once(p: Place, who: str) -> None:
    thread = threading.Thread(target=lambda: p.do(who, "lease", key="k", holder=who, wait_seconds=0.1))
    before = p.client("onlooker").check("k").waiting
    thread.start()
    p.until(lambda: p.client("onlooker").check("k").waiting > before)
    p.sleep(0.1)
    thread.join(ANSWER_SECONDS)


def listing(p: Place) -> None:
    for n in range(5):
        p.do(
            "a",
            "lease",
            key=f"k{n}",
            holder="a" if n % 2 else "b",
            scope="s" if n < 3 else None,
            bind="process" if n == 1 else "none",
        )
    whole = p.do("a", "list")
    p.do("a", "list", scope="s")
    p.do("a", "list", holder="a")
    p.do("a", "list", holder="a", scope="nobody's")
    page = p.do("a", "list", limit=2)
    page = p.do("a", "list", limit=2, cursor=page["cursor"])
    p.do("a", "list", limit=2, cursor=page["cursor"])
    p.do("a", "list", all=True, limit=1)
    p.do("a", "revoke", key="k0", reason="by key")
    p.do("a", "revoke", key="k0", reason="again")
    p.do("a", "revoke", key_hash=whole["leases"][3]["key_hash"], reason="by hash")
    p.do("a", "revoke", key="k4", namespace="another", reason="elsewhere")
    p.do("a", "list")


def switches(p: Place) -> None:
    for key, scope in (("k", "s"), ("j", "s"), ("other", None)):
        p.do("a", "lease", key=key, holder="a", scope=scope)
    p.do("a", "resume_packet", scope="s")
    p.do("a", "resume_packet", scope="nobody's")
    p.do("a", "heartbeat", scope="s", expect_within_seconds=50, agent_id="worker")
    p.do("a", "heartbeat", scope="s", disarm=True)
    p.do("a", "heartbeat", scope="unknown", disarm=True)
    p.do("a", "heartbeat", scope="s", expect_within_seconds=1, agent_id="worker")
    p.do("a", "resume_packet", scope="s")
    p.queue("b", "k", wait_seconds=60)
    p.sleep(1.3)
    p.waited("b")
    p.do("a", "list")
    p.do("a", "resume_packet", scope="s")
    p.do("a", "heartbeat", scope="s", expect_within_seconds=50)
    p.do("a", "resume_packet", scope="s")


def binding(p: Place) -> None:
    p.do("a", "lease", key="k", holder="a", bind="connection")
    grant = p.do("a", "lease", key="j", holder="a", bind="connection")
    p.do("b", "renew", key="j", holder="a", fence=grant["fence"])  # from now on it is b's connection that counts
    p.client("a").close()
    p.until(lambda: p.client("onlooker").check("k").held is False)
    p.do("b", "check", key="j")
    p.client("b").close()
    p.until(lambda: p.client("onlooker").check("j").held is False)


def mistakes(p: Place) -> None:
    for fields in (
        {}, {"key": ""}, {"key": "k", "holder": "a", "ttl_seconds": 0}, {"key": "k", "holder": "a", "ttl_second": 5},
        {"key": "k", "holder": "a", "bind": "for ever"}, {"key": "k", "holder": "a", "request_id": "short"},
        {"key": "k" * 1025, "holder": "a"}, {"key": 5, "holder": True}, {"key": "k", "holder": "a", "fence": "x"},
    ):  # fmt: skip
        p.do("a", "lease", **fields)
    p.do("a", "heartbeat", scope="s")
    p.do("a", "revoke", reason="nothing")
    p.do("a", "no_such_operation")
    p.do("a", "watch", key="k", scope="s")
    p.do("a", "watch", key="k")
    p.do("a", "watch", key="k")
    p.do("a", "unwatch")
    p.do("a", "watch", key="j")
    p.do("a", "usage")
    p.answers.append(("info", {name: p.client("a").info()[name] for name in ("name", "version", "namespace", "leases", "waiting")}))


SCENARIOS = (credentials, repeats, lapses, lines, listing, switches, binding, mistakes)
LABELLED = frozenset({"fence", "generation", "key_hash", "cursor", "boot_id"})
INSTANTS = frozenset({"expires_at", "due_at", "last_missed_at", "expires_boottime"})
REMAINDERS = frozenset({"expires_in_seconds", "retry_after_seconds", "due_in_seconds"})


class Steady:
    """A reply without what differs from run to run."""

    def __init__(self) -> None:
        self._labels: dict[Any, str] = {}
        self.generations: list[int] = []

    def __call__(self, value: Any, name: str = "", ttl: float | None = None) -> Any:
        if isinstance(value, dict):
            return {each: self(inner, each, value.get("ttl_seconds")) for each, inner in value.items()}
        if isinstance(value, list):
            return [self(inner) for inner in value]
        if value is None or isinstance(value, bool):
            return value
        if name in LABELLED:
            if name == "generation" and value not in self.generations:
                self.generations.append(value)
            return self._labels.setdefault((name, value), f"{name} {len([each for each in self._labels if each[0] == name])}")
        if name in INSTANTS:
            return type(value).__name__
        if name in REMAINDERS:
            return "the whole ttl" if value == ttl else f"{type(value).__name__}, {'some' if value > 0 else 'nothing'} left"
        return value


def played(scenario: Callable[[Place], None], place: Place) -> tuple[Answers, list[Any]]:
    with ExitStack() as stack:
        watch = stack.enter_context(place.client("watcher").watch())
        scenario(place)
        place.client("watcher").call("lease", key="the end", holder="watcher")
        steady = Steady()
        answers = [(asked, steady(answer)) for asked, answer in place.answers]
        events = []
        while isinstance(told := watch.take(ANSWER_SECONDS), LeaseEvent) and told.key != "the end":
            events.append(steady(told._asdict() | {"seq": None}))
        assert told is not None, f"{place.name} does not tell the end"
    granted = [answer["generation"] for _, answer in place.answers if isinstance(answer, dict) and answer.get("acquired")]
    assert granted == sorted(granted) or scenario is lines
    return answers, events


@pytest.fixture(scope="module")
def served(make_shared_daemon: MakeDaemon) -> Daemon:
    return make_shared_daemon().start()


@pytest.fixture
def emptied(served: Daemon) -> Iterator[Daemon]:
    """Nothing is held before and after a scenario."""
    yield served
    client = Client(served.socket)
    for lease in client.list():
        client.revoke(key_hash=lease["key_hash"], reason="the scenario is over")


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: str(scenario.__name__))
def test_the_fake_and_the_daemon_say_the_same(scenario: Callable[[Place], None], emptied: Daemon) -> None:
    fake = FakeLeased()
    real, imagined = (
        played(scenario, Place(name, client, sleep))
        for name, client, sleep in (
            ("daemon", lambda who: Client(emptied.socket, who), time.sleep),
            ("fake", lambda who: fake.client(who, timeout=5), fake.advance),
        )
    )
    for ours, theirs in zip(imagined[0], real[0], strict=True):
        assert ours == theirs
    assert imagined[1] == real[1]
    assert len(real[0]) > 3
