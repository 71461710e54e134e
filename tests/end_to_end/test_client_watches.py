"""Watching the real daemon: by the client library, by `lease watch` and by leasenc."""

from __future__ import annotations

import json
import select
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from daemons import ANSWER_SECONDS, ROOT, Daemon, MakeDaemon, environment

from leased.client.answers import Grant
from leased.client.sync import Client
from leased.client.watching import Gap, LeaseEvent, Watch

NEVER_SECONDS = 0.2  # how long to look for what must not come
LEASE = [sys.executable, "-m", "leased.client.command", "watch"]
LEASENC = [sys.executable, "-I", str(ROOT / "contrib" / "leasenc"), "--watch"]


@pytest.fixture(scope="module")
def served(make_shared_daemon: MakeDaemon) -> Daemon:
    return make_shared_daemon().start()


@pytest.fixture
def key(request: pytest.FixtureRequest) -> str:
    return str(request.node.name)


def granted(answer: object) -> Grant:
    assert isinstance(answer, Grant), answer
    return answer


def told(watch: Watch) -> LeaseEvent:
    event = watch.take(ANSWER_SECONDS)
    assert isinstance(event, LeaseEvent), event
    return event


def test_each_thing_that_can_happen_is_told_once_and_in_order(served: Daemon, key: str) -> None:
    client = Client(served.socket, "me")
    with client.watch(key=key) as watch:
        first = granted(client.try_acquire(key, scope=key))
        client.renew(first)
        client.release(first)
        second = granted(client.try_acquire(key, 0.2))
        assert client.wait_free(key, ANSWER_SECONDS)
        third = granted(client.try_acquire(key))
        client.revoke(key, "the test wants it")
        fourth = granted(client.try_acquire(key, scope=key))
        client.heartbeat(key, 1)
        granted(client.try_acquire(f"{key} of another name", scope=key))
        events = [told(watch) for _ in range(9)]
        assert watch.take(NEVER_SECONDS) is None
    assert [(event.seq, event.type, event.generation) for event in events] == [
        (1, "granted", first.generation),
        (2, "renewed", first.generation),
        (3, "released", first.generation),
        (4, "granted", second.generation),
        (5, "lapsed", second.generation),
        (6, "granted", third.generation),
        (7, "revoked", third.generation),
        (8, "granted", fourth.generation),
        (9, "switch_missed", fourth.generation),
    ]
    assert {(event.key, event.holder) for event in events} == {(key, "me")}
    assert [event.scope for event in events] == [key, key, key, None, None, None, None, key, key]


def test_watched_first_and_then_listed_nothing_is_missing(served: Daemon, key: str) -> None:
    client, other = Client(served.socket), Client(served.socket)
    before = granted(other.try_acquire(f"{key} before", scope=key))
    with client.watch(scope=key) as watch:
        between = granted(other.try_acquire(f"{key} between", scope=key))
        listed = {lease["generation"] for lease in client.list(scope=key)}
        after = granted(other.try_acquire(f"{key} after", scope=key))
        granted(other.try_acquire(f"{key} elsewhere"))
        seen = {told(watch).generation, told(watch).generation}
        assert watch.take(NEVER_SECONDS) is None
    assert listed == {before.generation, between.generation}
    assert listed | seen == {before.generation, between.generation, after.generation}


def test_a_reader_that_stalls_is_told_how_much_it_missed_and_harms_nobody(served: Daemon, key: str) -> None:
    """It takes one event, then nothing until long after every buffer between is full."""
    rounds, at_once = 4000, 400
    with Client(served.socket).watch(scope=key) as stalled, served.rpc() as rpc, Client(served.socket).watch(scope=key) as quick:
        grant = rpc.call("lease", key=key, holder="me", scope=key)
        assert told(stalled).type == "granted"
        renewal = ("renew", {"key": key, "holder": "me", "fence": grant["fence"], "ttl_seconds": 60})
        quick_seqs = [told(quick).seq]
        for _ in range(rounds // at_once):
            assert all(answer["renewed"] for answer in rpc.answers(rpc.post_all([renewal] * at_once)))
            quick_seqs += [told(quick).seq for _ in range(at_once)]
        assert quick_seqs == list(range(1, rounds + 2))
        next_seq, gaps = 2, []
        while next_seq <= rounds + 1:
            event = stalled.take(ANSWER_SECONDS)
            if isinstance(event, Gap):
                assert event.from_seq is not None and event.to_seq is not None
                assert event.from_seq == next_seq
                assert event.to_seq >= event.from_seq
                gaps.append(event)
                next_seq = event.to_seq + 1
            else:
                assert event is not None
                assert event.seq == next_seq
                next_seq += 1
        assert len(gaps) == 1  # a buffer's worth of events, then one gap for all the rest
        rpc.call("release", key=key, fence=grant["fence"])
        assert (told(stalled).type, told(quick).type) == ("released", "released")
        assert stalled.take(NEVER_SECONDS) is None


def test_a_watch_goes_on_after_kill_9_and_says_that_it_missed_something(daemon: Daemon) -> None:
    client = Client(daemon.socket)
    with client.watch() as watch:
        first = granted(client.try_acquire("a"))
        assert told(watch).seq == 1
        daemon.kill()
        assert watch.take(NEVER_SECONDS) is None
        daemon.start()
        assert watch.take(ANSWER_SECONDS) == Gap(None, None)
        assert [lease["generation"] for lease in client.list()] == [first.generation]
        second = granted(client.try_acquire("b"))
        assert (told(watch).generation, watch.take(NEVER_SECONDS)) == (second.generation, None)


class Watching:
    """A watching command as a process."""

    def __init__(self, daemon: Daemon, command: list[str]) -> None:
        self.process = subprocess.Popen(
            [*command, "--socket", str(daemon.socket)],
            env=environment(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=Path("/"),
        )  # fmt: skip

    def line(self) -> Any:
        assert self.process.stdout is not None
        return json.loads(self.process.stdout.readline())

    def end(self) -> tuple[str, str]:
        return self.process.communicate(timeout=ANSWER_SECONDS)


def begun(daemon: Daemon, make_event: Callable[[], object], watching: Watching) -> Any:
    """The first line: events are made until the watch, which begins when its process has started, tells one."""
    assert watching.process.stdout is not None
    while not select.select([watching.process.stdout], [], [], 0.05)[0]:
        make_event()
    return watching.line()


@pytest.mark.parametrize("command", [[*LEASE, "k", "--json", "-q"], [*LEASENC, "key=k"]], ids=["lease", "leasenc"])
def test_the_commands_print_what_happens_and_live_through_a_restart(daemon: Daemon, command: list[str]) -> None:
    client = Client(daemon.socket, "me")
    grant = granted(client.try_acquire("k"))
    watching = Watching(daemon, command)
    try:
        first = begun(daemon, lambda: client.renew(grant), watching)
        assert (first["type"], first["key"], first["generation"]) == ("renewed", "k", grant.generation)
        client.release(grant)
        while (event := watching.line())["type"] == "renewed":
            pass
        assert (event["type"], event["holder"]) == ("released", "me")
        daemon.kill()
        daemon.start()
        assert watching.line() == {"type": "gap", "from_seq": None, "to_seq": None}
        again = granted(client.try_acquire("k"))
        assert watching.line() == {
            "seq": 1, "type": "granted", "key": "k", "key_hash": event["key_hash"], "scope": None, "holder": "me",
            "generation": again.generation, "reason": None,
        }  # fmt: skip
        watching.process.send_signal(signal.SIGINT)
        assert watching.end() == ("", "")
        assert watching.process.returncode == 130
    finally:
        watching.process.kill()
        watching.process.wait()
