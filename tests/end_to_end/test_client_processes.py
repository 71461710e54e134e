"""Real processes that hold a lease: stopped beyond its end, killed, forked.  What the one who comes next may rely on."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from daemons import ANSWER_SECONDS, Daemon, MakeDaemon, environment

from leased import Client
from leased.client.answers import Grant

TTL_SECONDS = 1.0


@pytest.fixture(scope="module")
def served(make_shared_daemon: MakeDaemon) -> Daemon:
    return make_shared_daemon().start()


@pytest.fixture
def key(request: pytest.FixtureRequest) -> str:
    return str(request.node.name)


@contextmanager
def program(source: str, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-c", source, *arguments],
        env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
    )  # fmt: skip
    try:
        yield process
    finally:
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def taken_over(daemon: Daemon, key: str) -> Grant:
    """The next holder's, who stood in the line: the moment the lease before it ends."""
    grant = Client(daemon.socket, "next").try_acquire(key, 60, wait=ANSWER_SECONDS)
    assert isinstance(grant, Grant), grant
    return grant


_SYNC = """
import os, signal, sys, threading, time
from leased import Client, LeaseLost
told = threading.Event()
try:
    with Client(sys.argv[1], "stopped").lease(sys.argv[2], ttl=1, on_lost=lambda loss: told.set()) as lease:
        for seconds in (1.5, 0):
            lease.check()
            print("touched", flush=True)
            time.sleep(seconds)  # renewed meanwhile
        os.kill(os.getpid(), signal.SIGSTOP)
        lease.check()
        print("touched after the stop", flush=True)
except LeaseLost as loss:
    print("lost:", loss.reason, lease.lost, told.wait(10), flush=True)
"""

_ASYNC = """
import os, signal, sys
from leased import AsyncClient, LeaseLost
async def main(sleep):
    try:
        async with AsyncClient(sys.argv[1], "stopped").lease(sys.argv[2], ttl=1) as lease:
            for seconds in (1.5, 0):
                lease.check()
                print("touched", flush=True)
                await sleep(seconds)
            os.kill(os.getpid(), signal.SIGSTOP)
            lease.check()
            print("touched after the stop", flush=True)
    except LeaseLost as loss:
        print("lost:", loss.reason, lease.lost, True, flush=True)
"""


@pytest.mark.parametrize(
    "source",
    [_SYNC, f"{_ASYNC}\nimport trio; trio.run(main, trio.sleep)", f"{_ASYNC}\nimport asyncio; asyncio.run(main(asyncio.sleep))"],
    ids=["sync", "trio", "asyncio"],
)
def test_a_process_stopped_beyond_its_ttl_learns_of_it_before_it_touches_anything(served: Daemon, key: str, source: str) -> None:
    with program(source, str(served.socket), key) as process:
        assert [line(process), line(process)] == ["touched", "touched"]
        until = time.monotonic() + ANSWER_SECONDS
        while Path(f"/proc/{process.pid}/stat").read_text().rpartition(") ")[2][0] != "T":
            assert time.monotonic() < until, "it does not stop"
            time.sleep(0.01)
        taken_over(served, key)
        os.kill(process.pid, signal.SIGCONT)
        told = line(process)
        assert told.startswith("lost: ") and told.endswith(" True True"), told
        assert Client(served.socket).check(key).held_by == "next"  # what the loser released was not the next one's


_FORKS = """
import os, sys, time
from leased import Client
with Client(sys.argv[1], "parent").lease(sys.argv[2], ttl=1) as lease:
    if os.fork() == 0:
        print("child", os.getpid(), flush=True)
        time.sleep(60)
        os._exit(0)
    time.sleep(60)
"""


def test_a_renewer_dies_with_its_process_even_if_a_child_lives_on(served: Daemon, key: str) -> None:
    with program(_FORKS, str(served.socket), key) as process:
        _, child = line(process).split()
        time.sleep(1.5 * TTL_SECONDS)
        client = Client(served.socket)
        assert client.check(key).held_by == "parent"
        process.kill()
        process.wait()
        killed_at = time.monotonic()
        taken_over(served, key)
        assert time.monotonic() - killed_at < TTL_SECONDS + ANSWER_SECONDS / 2
        os.kill(int(child), 0)  # it lives, and renews nothing


_LEAVES = """
import sys, threading, time
from leased import Client
client = Client(sys.argv[1], "leaver")
before = threading.active_count()
with client.lease(sys.argv[2], ttl=1) as lease:
    time.sleep(0.5)
print(threading.active_count() - before, flush=True)
try:
    with client.lease(sys.argv[2], ttl=1):
        raise SystemExit("the block ends the program")
finally:
    print(threading.active_count() - before, client.check(sys.argv[2]).held, flush=True)
"""


def test_no_renewer_outlives_its_release_and_a_program_that_ends_in_a_block_releases(served: Daemon, key: str) -> None:
    with program(_LEAVES, str(served.socket), key) as process:
        assert [line(process), line(process)] == ["0", "0 False"]


_ENDS = """
import sys
from leased import Client
Client(sys.argv[1], "sloppy").lease(sys.argv[2], ttl=1).__enter__()
print("held", flush=True)
"""


def test_a_program_that_ends_without_leaving_its_block_is_not_held_up_by_the_renewer(served: Daemon, key: str) -> None:
    with program(_ENDS, str(served.socket), key) as process:
        assert line(process) == "held"
        assert process.wait(ANSWER_SECONDS) == 0
        taken_over(served, key)
