"""Leases bound to a process or to a connection, by the client library against the real daemon."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from daemons import ANSWER_SECONDS, Daemon, MakeDaemon, environment

from leased.client.answers import Grant
from leased.client.errors import InvalidArgument, LeaseLost
from leased.client.sync import Client

AT_ONCE_SECONDS = 2.0  # milliseconds, with room for a busy host; the leases below last a minute
NEVER_SECONDS = 0.4

HOLDS = """
import sys, os, signal
from leased import Client
client = Client(sys.argv[1], "child")
with client.lease(sys.argv[2], ttl=float(sys.argv[3]), bind="process") as lease:
    print(os.getpid(), flush=True)
    sys.stdin.read()
"""

ASKS_AND_FORKS = """
import sys, os, signal
from leased import Client
client = Client(sys.argv[1], "child")
assert client.try_acquire(sys.argv[2], 60, bind="process")
kept = os.dup(client._connection._stream.fileno())  # the fork keeps the connection open, whatever the client does about its own
forked = os.fork()
if forked == 0:
    signal.pause()
print(forked, flush=True)
signal.pause()
"""


@pytest.fixture(scope="module")
def served(make_shared_daemon: MakeDaemon) -> Daemon:
    return make_shared_daemon().start()


@pytest.fixture
def key(request: pytest.FixtureRequest) -> str:
    return str(request.node.name)


@contextmanager
def child(daemon: Daemon, key: str, program: str = HOLDS, ttl: float = 60) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """A process that has the lease on `key`, and the process id it printed."""
    with subprocess.Popen(
        [sys.executable, "-c", program, str(daemon.socket), key, str(ttl)],
        env=environment(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=Path("/"), start_new_session=True,
    ) as process:  # fmt: skip
        try:
            assert process.stdout is not None
            yield process, int(process.stdout.readline())
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def granted(answer: object) -> Grant:
    assert isinstance(answer, Grant), answer
    return answer


def bind_of(client: Client, key: str) -> str:
    (bind,) = [lease["bind"] for lease in client.list() if lease["key"] == key]
    return str(bind)


def test_a_killed_process_frees_its_lease_at_once(served: Daemon, key: str) -> None:
    client = Client(served.socket)
    with child(served, key) as (process, _), client.watch(key) as watch:
        assert client.check(key).held_by == "child"
        process.kill()
        assert client.wait_free(key, AT_ONCE_SECONDS)
        event = watch.take(AT_ONCE_SECONDS)
    assert event is not None
    assert (event[1], event[-1]) == ("released", "process_exited")


def test_a_stopped_process_is_alive(served: Daemon, key: str) -> None:
    client = Client(served.socket)
    with child(served, key, ttl=60) as (process, _):
        process.send_signal(signal.SIGSTOP)
        assert not client.wait_free(key, NEVER_SECONDS)
        process.send_signal(signal.SIGCONT)
        assert process.stdin is not None
        process.stdin.close()  # it goes on, releases and ends by itself
        assert client.wait_free(key, AT_ONCE_SECONDS)
        assert process.wait(ANSWER_SECONDS) == 0


def test_a_stopped_process_that_is_killed_frees_its_lease(served: Daemon, key: str) -> None:
    client = Client(served.socket)
    with child(served, key) as (process, _):
        process.send_signal(signal.SIGSTOP)
        process.kill()
        assert client.wait_free(key, AT_ONCE_SECONDS)


def test_a_fork_keeps_the_lease_with_the_process_that_asked(served: Daemon, key: str) -> None:
    """The fork has the connection still open, and lives on: it is another process all the same."""
    client = Client(served.socket)
    with child(served, key, ASKS_AND_FORKS) as (asked, forked):
        asked.kill()
        assert client.wait_free(key, AT_ONCE_SECONDS)
        os.kill(forked, 0)


def test_the_end_of_a_fork_ends_nothing(served: Daemon, key: str) -> None:
    client = Client(served.socket)
    with child(served, key, ASKS_AND_FORKS) as (_, forked):
        os.kill(forked, signal.SIGKILL)
        assert not client.wait_free(key, NEVER_SECONDS)


def test_a_lease_is_passed_on_to_who_waits_when_its_process_is_killed(served: Daemon, key: str) -> None:
    client = Client(served.socket, "next")
    with child(served, key) as (process, _):
        killed_at = time.monotonic()
        os.kill(process.pid, signal.SIGKILL)
        granted(client.try_acquire(key, wait=30))
        assert time.monotonic() - killed_at < AT_ONCE_SECONDS


def test_a_connection_bound_lease_ends_with_its_client_and_another_s_does_not(served: Daemon, key: str) -> None:
    mine, other, watcher = Client(served.socket, "mine"), Client(served.socket, "other"), Client(served.socket)
    granted(mine.try_acquire(key, bind="connection"))
    granted(other.try_acquire(f"{key} other", bind="connection"))
    granted(mine.try_acquire(f"{key} free"))
    mine.close()
    assert watcher.wait_free(key, AT_ONCE_SECONDS)
    assert watcher.check(f"{key} other").held
    assert watcher.check(f"{key} free").held


def test_a_lease_whose_connection_was_closed_is_lost_and_said_to_be(served: Daemon, key: str) -> None:
    client = Client(served.socket, "mine")
    lost = threading.Event()
    with pytest.raises(LeaseLost, match="lapsed"), client.lease(key, bind="connection", on_lost=lambda loss: lost.set()):
        client.close()
        assert lost.wait(AT_ONCE_SECONDS)  # and not when it is next to be renewed
    assert client.check(key).held is False


@pytest.mark.parametrize("end", ["kill", "terminate"])
def test_a_renewal_binds_to_the_process_again_after_a_restart(daemon: Daemon, end: str) -> None:
    client = Client(daemon.socket)
    with child(daemon, "k", ttl=6) as (process, _):
        generation = client.check("k").generation
        getattr(daemon, end)()
        daemon.start()
        with client.watch("k") as watch:
            event = watch.take(ANSWER_SECONDS)
            assert event is not None
            assert event[1] == "renewed"
            assert client.check("k").generation == generation
            process.kill()
            killed_at = time.monotonic()
            assert client.wait_free("k", ANSWER_SECONDS)
            assert time.monotonic() - killed_at < AT_ONCE_SECONDS
            assert (event := watch.take(AT_ONCE_SECONDS)) is not None
            assert event[-1] == "process_exited"


def test_a_renewal_binds_to_the_new_connection_after_a_restart(daemon: Daemon) -> None:
    client, watcher = Client(daemon.socket, "mine"), Client(daemon.socket)
    grant = granted(client.try_acquire("k", bind="connection"))
    daemon.kill()
    daemon.start()
    assert watcher.check("k").generation == grant.generation  # the daemon's own end is no end of a lease
    assert granted(client.renew(grant)).generation == grant.generation
    client.close()
    assert watcher.wait_free("k", AT_ONCE_SECONDS)


def test_the_daemon_tells_how_a_lease_is_bound(served: Daemon, key: str) -> None:
    client = Client(served.socket)
    for bind in ("none", "process", "connection"):
        granted(client.try_acquire(f"{key} {bind}", bind=bind))
        assert bind_of(client, f"{key} {bind}") == bind
    with pytest.raises(InvalidArgument, match="bind"):
        client.try_acquire(key, bind="parent")
