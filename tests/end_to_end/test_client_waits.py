"""The client library and the `lease` command against the real daemon: waiting, through restarts, and switches that fall."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from daemons import ANSWER_SECONDS, Daemon, MakeDaemon, environment

from leased.client.answers import Grant, Refusal, Unknown
from leased.client.errors import LeaseLost
from leased.client.sync import Client

SOON_SECONDS = 2.0  # what must happen at once; it takes milliseconds


@pytest.fixture(scope="module")
def served(make_shared_daemon: MakeDaemon) -> Daemon:
    return make_shared_daemon().start()


@pytest.fixture
def key(request: pytest.FixtureRequest) -> str:
    return str(request.node.name)


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(8) as threads:
        yield threads


def granted(answer: object) -> Grant:
    assert isinstance(answer, Grant), answer
    return answer


def until(true: Callable[[], Any]) -> None:
    end = time.monotonic() + ANSWER_SECONDS
    while not true():
        assert time.monotonic() < end, "it did not come true"
        time.sleep(0.005)


def waiting(client: Client, key: str, count: int) -> None:
    until(lambda: client.check(key).waiting == count)


def lease(daemon: Daemon, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "leased.client.command", *words, "--socket", str(daemon.socket)],
        env=environment(), capture_output=True, text=True, timeout=ANSWER_SECONDS, check=False,
    )  # fmt: skip


def test_waiters_get_the_lease_in_order_of_arrival(served: Daemon, key: str, threads: ThreadPoolExecutor) -> None:
    clients = [Client(served.socket, f"waiter {n}") for n in range(4)]
    holding = granted(clients[0].try_acquire(key))
    lined_up: list[Future[Any]] = []
    for n, client in enumerate(clients[1:], 1):
        lined_up.append(threads.submit(client.try_acquire, key, 5, wait=20))
        waiting(clients[0], key, n)
    clients[0].release(holding)
    for n, (client, future) in enumerate(zip(clients[1:], lined_up, strict=True), 1):
        grant = granted(future.result(SOON_SECONDS))
        assert grant.holder == f"waiter {n}"
        left = grant.deadline - time.clock_gettime(time.CLOCK_BOOTTIME)
        assert 5 - SOON_SECONDS < left <= 5  # counted from the grant, not from when it was asked for
        assert all(not later.done() for later in lined_up[n:])
        assert client.release(grant)


@pytest.mark.parametrize("end", ["kill", "terminate"])
def test_a_wait_goes_on_across_a_restart(daemon: Daemon, threads: ThreadPoolExecutor, end: str) -> None:
    holder, waiter, later = (Client(daemon.socket, label) for label in ("holder", "waiter", "later"))
    holding = granted(holder.try_acquire("k", 60))
    future = threads.submit(waiter.try_acquire, "k", wait=30)
    waiting(holder, "k", 1)
    getattr(daemon, end)()
    assert not future.done()
    daemon.start()
    waiting(holder, "k", 1)  # it queued again by itself
    behind = threads.submit(later.try_acquire, "k", wait=0.2)
    assert isinstance(behind.result(ANSWER_SECONDS), Refusal)
    assert holder.release(holding)
    grant = granted(future.result(SOON_SECONDS))
    assert (grant.holder, grant.renewed) == ("waiter", False)
    assert grant.generation > holding.generation
    assert waiter.release(grant)


def test_a_restart_makes_a_wait_no_longer_than_it_was_to_be(daemon: Daemon, threads: ThreadPoolExecutor) -> None:
    holder, waiter = Client(daemon.socket, "holder"), Client(daemon.socket, "waiter")
    granted(holder.try_acquire("k", 60))
    started = time.monotonic()
    future = threads.submit(waiter.try_acquire, "k", wait=4)
    waiting(holder, "k", 1)
    daemon.kill()
    time.sleep(1.5)
    daemon.start()
    refusal = future.result(ANSWER_SECONDS)
    assert isinstance(refusal, Refusal)
    assert refusal.held_by == "holder"
    assert 3.9 < time.monotonic() - started < 4 + SOON_SECONDS


def test_a_later_call_takes_the_place_of_an_earlier_one_with_the_same_request_id(
    served: Daemon, key: str, threads: ThreadPoolExecutor
) -> None:
    """The same attempt from two connections: one place in the line, and the earlier call neither hangs nor fights for it."""
    holder, before, after = Client(served.socket, "holder"), Client(served.socket, "w"), Client(served.socket, "w")
    holding = granted(holder.try_acquire(key))
    rid = "one attempt of one holder"
    earlier = threads.submit(before.try_acquire, key, wait=20, request_id=rid)
    waiting(holder, key, 1)
    later = threads.submit(after.try_acquire, key, wait=20, request_id=rid)
    superseded = earlier.result(SOON_SECONDS)
    assert isinstance(superseded, Unknown)
    assert superseded.reason == "superseded"
    assert holder.check(key).waiting == 1
    holder.release(holding)
    grant = granted(later.result(SOON_SECONDS))
    assert granted(before.try_acquire(key, request_id=rid)).fence == grant.fence  # and still the same attempt


def test_wait_free_returns_when_the_last_in_line_has_let_go(served: Daemon, key: str, threads: ThreadPoolExecutor) -> None:
    client, next_one = Client(served.socket, "a"), Client(served.socket, "b")
    assert client.wait_free(key, 0)
    holding = granted(client.try_acquire(key))
    assert not client.wait_free(key, 0.05)
    queued = threads.submit(next_one.try_acquire, key, 20, wait=20)
    waiting(client, key, 1)
    free = threads.submit(Client(served.socket).wait_free, key, 20)
    client.release(holding)
    grant = granted(queued.result(SOON_SECONDS))
    assert not client.wait_free(key, 0.1)
    assert not free.done()
    next_one.release(grant)
    assert free.result(SOON_SECONDS) is True


def test_wait_free_sees_a_lapse_and_lives_through_a_restart(daemon: Daemon, threads: ThreadPoolExecutor) -> None:
    client = Client(daemon.socket)
    granted(client.try_acquire("k", 1.5))
    free = threads.submit(Client(daemon.socket).wait_free, "k", 20)
    daemon.kill()
    daemon.start()
    assert free.result(ANSWER_SECONDS) is True
    assert client.check("k").held is False


def test_a_missed_heartbeat_releases_the_scope_and_the_holder_learns_of_it(served: Daemon, key: str) -> None:
    client, watcher = Client(served.socket, "worker"), Client(served.socket)
    lost = threading.Event()
    with (
        pytest.raises(LeaseLost, match="lapsed"),
        client.lease(key, ttl=3, scope=key, on_lost=lambda loss: lost.set()) as lease,
    ):
        generation = lease.generation
        assert client.heartbeat(key, 1, "worker-7").due_in_seconds == pytest.approx(1, abs=0.01)
        assert client.heartbeat(key, 1.5)
        assert not watcher.wait_free(key, 1.2)
        assert watcher.wait_free(key, SOON_SECONDS)
        packet = watcher.resume_packet(key)
        assert lost.wait(SOON_SECONDS)
    assert packet.leases == []
    assert packet.switch is not None
    assert (packet.switch.armed, packet.switch.agent_id) == (False, "worker-7")
    assert packet.switch.last_missed_at is not None
    assert [(each["key"], each["generation"]) for each in packet.switch.released] == [(key, generation)]


def test_a_disarmed_switch_falls_on_nobody(served: Daemon, key: str) -> None:
    client = Client(served.socket)
    granted(client.try_acquire(key, scope=key))
    assert client.heartbeat(key, 1)
    assert not client.disarm(key)
    assert not client.wait_free(key, 1.3)
    assert [lease["key"] for lease in client.resume_packet(key).leases] == [key]


def test_the_commands_of_a_scope(served: Daemon, key: str) -> None:
    assert lease(served, "resume", key).stdout.startswith("Nothing is known of")
    assert lease(served, "acquire", key, "--scope", key, "-q").returncode == 0
    armed = lease(served, "heartbeat", key, "--expect-within", "1", "--agent-id", "a", "--json")
    assert json.loads(armed.stdout)["armed"] is True
    free = lease(served, "wait", key, "--timeout", "10s")
    assert (free.returncode, free.stdout) == (0, f"{key} is free.\n")
    told = lease(served, "resume", key).stdout
    assert f"it released {key}" in told
    assert "it was last missed at" in told
    assert lease(served, "heartbeat", key, "--disarm").stdout.startswith(f"The switch of {key} is not armed")


def test_the_command_that_waits_says_when_the_time_was_up(served: Daemon, key: str) -> None:
    granted(Client(served.socket).try_acquire(key))
    ran = lease(served, "wait", key, "--timeout", "100ms")
    assert (ran.returncode, ran.stdout, ran.stderr) == (75, f"{key} was not free in time.\n", "")
    ran = lease(served, "acquire", key, "--wait", "100ms", "--holder", "other")
    assert ran.returncode == 75
    assert "is held by" in ran.stdout
    listed = lease(served, "list", "--all", "--json")
    assert (key, "local") in [(each["key"], each["namespace"]) for each in map(json.loads, listed.stdout.splitlines())]


def test_a_waiting_command_that_is_interrupted_leaves_the_line(served: Daemon, key: str) -> None:
    client = Client(served.socket)
    granted(client.try_acquire(key))
    waiter = subprocess.Popen(
        [sys.executable, "-m", "leased.client.command", "acquire", key, "--wait", "5m", "--socket", str(served.socket)],
        env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, cwd=Path("/"),
    )  # fmt: skip
    waiting(client, key, 1)
    waiter.send_signal(signal.SIGINT)
    out, _ = waiter.communicate(timeout=ANSWER_SECONDS)
    assert (waiter.returncode, out) == (130, b"")
    waiting(client, key, 0)
