"""The tooz driver on a real daemon, beyond what tooz's own suite asks.  Run by test_peer_suites.py, in the environment that has tooz."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tooz
from tooz import coordination

from leased import Client
from leased.adapters.tooz_driver import LeasedDriver

EXAMPLE = Path(__file__).resolve().parents[2] / "contrib/adapters/from_tooz.py"


@pytest.fixture
def coordinator() -> Iterator[Any]:
    made = coordination.get_coordinator("leased+unix://", b"first")
    made.start()
    yield made
    made.stop()


@pytest.fixture
def name(request: pytest.FixtureRequest) -> bytes:
    return str(request.node.name).encode()


def test_a_lock_is_a_lease_of_the_member(coordinator: Any, name: bytes) -> None:
    with Client() as client, coordinator.get_lock(name) as lock:
        checked = client.check(name.decode())
        assert (checked.held_by, checked.generation) == ("first", lock.generation)
        assert not client.try_acquire(name.decode())


def test_it_renews_itself(name: bytes) -> None:
    quick = coordination.get_coordinator(f"leased+unix://{os.environ['LEASED_SOCKET']}?lock_timeout=0.6", b"quick")
    assert not quick.requires_beating
    quick.start(start_heart=True)
    lock = quick.get_lock(name)
    assert lock.acquire()
    time.sleep(1.5)
    assert lock.acquired and lock.heartbeat() and lock.is_still_owner()
    quick.stop()


def test_a_stop_releases_what_is_held(name: bytes) -> None:
    stopped = coordination.get_coordinator("leased+unix://", "text is taken too", lock_timeout=3600)
    stopped.start()
    locks = [stopped.get_lock(name + digit) for digit in (b"1", b"2")]
    assert all(lock.acquire() for lock in locks)
    stopped.stop()
    with Client() as client:
        assert not any(client.check(lock.name.decode()).held for lock in locks)
    with pytest.raises(tooz.ToozError, match="not started"):
        locks[0].acquire()


HOLDING = """
import sys, time
from tooz import coordination
made = coordination.get_coordinator("leased+unix://?lock_timeout=3600" + sys.argv[2], b"holding")
made.start()
assert made.get_lock(sys.argv[1].encode()).acquire()
print("held", flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize(("option", "free"), [("", True), ("&bind=none", False)])
def test_a_lock_ends_with_its_process_unless_told_otherwise(coordinator: Any, name: bytes, option: str, free: bool) -> None:
    holding = subprocess.Popen([sys.executable, "-c", HOLDING, name.decode(), option], stdout=subprocess.PIPE, text=True)
    try:
        assert holding.stdout is not None and holding.stdout.readline() == "held\n"
        holding.send_signal(signal.SIGKILL)
        holding.wait()
        lock = coordinator.get_lock(name)
        assert lock.acquire(timeout=20 if free else 0.5) is free
        assert lock.break_() and not lock.release()
    finally:
        holding.kill()
        holding.communicate()


def test_a_forked_child_holds_nothing(coordinator: Any, name: bytes) -> None:
    lock = coordinator.get_lock(name)
    assert lock.acquire()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            code = 10 + 2 * lock.acquired + lock.release()
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 10
    assert lock.is_still_owner() and lock.release()


def test_a_lock_that_was_taken_away_is_not_owned(coordinator: Any, name: bytes) -> None:
    lock = coordinator.get_lock(name)
    assert lock.acquire()
    with Client() as client:
        assert client.revoke(name.decode(), reason="test")
    assert not lock.is_still_owner()
    assert not lock.release() and not lock.acquired


def test_a_loss_in_the_background_is_logged(name: bytes, caplog: pytest.LogCaptureFixture) -> None:
    quick = coordination.get_coordinator("leased+unix://?lock_timeout=0.6", b"quick")
    quick.start()
    lock = quick.get_lock(name)
    assert lock.acquire()
    with Client() as client:
        assert client.revoke(name.decode(), reason="test")
    until = time.monotonic() + 20
    while lock.acquired and time.monotonic() < until:
        time.sleep(0.01)
    quick.stop()
    assert [record.getMessage() for record in caplog.records if "is lost" in record.getMessage()] == [
        f"the lease on {name.decode()!r} is lost: its renewal was refused: lapsed"
    ]


def test_a_lock_granted_to_a_coordinator_that_stopped_meanwhile_is_given_back(coordinator: Any, name: bytes) -> None:
    stopped = coordination.get_coordinator("leased+unix://", b"stopped")
    stopped.start()
    lock, first = stopped.get_lock(name), coordinator.get_lock(name)
    assert first.acquire()
    told: list[str] = []

    def wait() -> None:
        try:
            told.append(str(lock.acquire(timeout=30)))
        except tooz.ToozError as error:
            told.append(str(error))

    waiting = threading.Thread(target=wait)
    waiting.start()
    with Client() as client:
        until = time.monotonic() + 20
        while not client.check(name.decode()).waiting and time.monotonic() < until:
            time.sleep(0.01)
        stopped.stop()  # its client asks again, on another connection
        first.release()
        waiting.join(20)
        assert told == ["the coordinator was stopped meanwhile"]
        assert not client.check(name.decode()).held


def test_a_bounded_wait_ends_and_a_turn_comes(coordinator: Any, name: bytes) -> None:
    with Client() as client:
        assert client.try_acquire(name.decode(), ttl=1.5)
    lock = coordinator.get_lock(name)
    assert not lock.acquire(blocking=0.1)
    assert not lock.acquire(timeout=0.1)
    assert not lock.acquire(blocking=False)
    assert lock.acquire() and lock.release()


def test_what_it_says_of_itself_is_what_can_be_asked_for() -> None:
    wanted = coordination.Characteristics
    assert coordination.get_coordinator("leased+unix://", b"m", [wanted.LINEARIZABLE, wanted.DISTRIBUTED_ACROSS_PROCESSES])
    for beyond in (wanted.DISTRIBUTED_ACROSS_HOSTS, wanted.NON_TIMEOUT_BASED):
        with pytest.raises(coordination.ToozDriverChosenPoorly):
            coordination.get_coordinator("leased+unix://", b"m", [beyond])
    assert len(set(LeasedDriver.CHARACTERISTICS)) == 7


@pytest.mark.filterwarnings("error")
def test_a_mistake_in_the_url_is_named() -> None:
    for url, said in (
        ("leased+unix://run/leased.sock", "three slashes"),
        ("leased+unix:///s?lock_timout=5", "no option lock_timout"),
        ("leased+unix:///s?lock_timeout=0", "0.1 to 3600"),
        ("leased+unix:///s?bind=thread", "bind must be"),
    ):
        with pytest.raises(tooz.ToozError, match=said):
            coordination.get_coordinator(url, b"m")
    with pytest.raises(tooz.ToozError, match="member id must be UTF-8"):
        coordination.get_coordinator("leased+unix://", b"\xff")
    with pytest.raises(tooz.ToozError, match="agent_key_file"):
        coordination.get_coordinator("leased+unix://?agent_key_file=/nowhere", b"m").start()


def test_an_agent_key_from_a_file_leads_to_its_namespace(coordinator: Any, name: bytes, tmp_path: Path) -> None:
    added = subprocess.run(
        [sys.executable, "-m", "leased", "agent", "add", "tooz"], capture_output=True, text=True, timeout=60, check=True
    )
    (tmp_path / "key").write_text(added.stdout)
    agent = coordination.get_coordinator("leased+unix://", b"first", agent_key_file=str(tmp_path / "key"))
    agent.start()
    with coordinator.get_lock(name), agent.get_lock(name) as walled:
        assert walled.is_still_owner()
    agent.stop()


def test_errors_are_toozs(coordinator: Any, tmp_path: Path) -> None:
    with pytest.raises(coordination.ToozConnectionError, match="nowhere"):
        coordination.get_coordinator(f"leased+unix://{tmp_path}/nowhere", b"m").start()
    with pytest.raises(tooz.ToozError, match="UTF-8"):
        coordinator.get_lock(b"\xff")
    with pytest.raises(tooz.ToozError, match="key"):
        coordinator.get_lock(b"k" * 1025).acquire()
    with pytest.raises(tooz.ToozError, match="agent_key"):
        (tmp_path / "key").write_text("no key of anybody\n")
        coordination.get_coordinator(f"leased+unix://?agent_key_file={tmp_path}/key", b"m").start()


def test_what_leases_cannot_be_is_refused_at_once(coordinator: Any) -> None:
    for call in (
        lambda: coordinator.get_lock(b"k").acquire(shared=True),
        lambda: coordinator.watch_join_group(b"g", print),
        lambda: coordinator.watch_leave_group(b"g", print),
        lambda: coordinator.watch_elected_as_leader(b"g", print),
        lambda: coordinator.create_group(b"g"),
        lambda: coordinator.run_watchers(),
    ):
        with pytest.raises(tooz.NotImplemented):
            call()


def test_the_example_is_a_user_of_tooz_moved_over() -> None:
    run = subprocess.run([sys.executable, EXAMPLE], capture_output=True, text=True, timeout=60, check=False)
    told = "mine: True, with a generation above 0: True\nmine afterwards: False\n"
    assert (run.stdout, run.stderr, run.returncode) == (told, "", 0)
