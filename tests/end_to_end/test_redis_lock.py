"""`leased.adapters.redis_lock.Lock` on a real daemon: what redis-py's users do with theirs, and what is different by intention.

Needs no redis.  redis-py's own tests run in tests/foreign.
"""

from __future__ import annotations

import os
import runpy
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import readme
from daemons import ROOT, Daemon, MakeDaemon, environment

from leased import Client
from leased.adapters import redis_errors
from leased.adapters.redis_errors import LockError, LockNotOwnedError, LockUnreachable
from leased.adapters.redis_lock import Lock


@pytest.fixture(scope="module")
def served(make_shared_daemon: MakeDaemon) -> Daemon:
    return make_shared_daemon().start()


@pytest.fixture
def client(served: Daemon) -> Iterator[Client]:
    with Client(served.socket) as client:
        yield client


@pytest.fixture
def name(request: pytest.FixtureRequest) -> str:
    return str(request.node.name)


def left(client: Client, name: str) -> float:
    seconds = client.check(name).expires_in_seconds
    assert seconds is not None
    return seconds


def test_a_lock_is_a_lease(client: Client, name: str) -> None:
    with Lock(client, name, timeout=20) as lock:
        checked = client.check(name)
        assert (checked.held_by, checked.generation) == (client.holder, lock.generation)
        assert lock.local.token == client.holder.encode()
        assert lock.owned() and lock.locked()
        assert not client.try_acquire(name, holder="somebody else")
    assert not lock.locked() and lock.generation is None


def test_extend_adds_and_replaces_and_reacquire_begins_anew(client: Client, name: str) -> None:
    lock = Lock(client, name.encode(), timeout=20)
    assert lock.acquire()
    assert lock.extend(100) and 110 < left(client, name) <= 120
    assert lock.extend(50, replace_ttl=True) and 40 < left(client, name) <= 50
    assert lock.reacquire() and 10 < left(client, name) <= 20
    lock.release()


def test_what_no_lease_can_be_is_an_error_of_redis_py(client: Client, name: str) -> None:
    for timeout in (0.05, 3601, -1):
        with pytest.raises(LockError, match=r"0\.1 to 3600"):
            Lock(client, name, timeout=timeout)
    with pytest.raises(LockError, match="UTF-8"):
        Lock(client, b"\xff")
    with pytest.raises(ValueError, match="key"):
        Lock(client, "k" * 1025, timeout=1).acquire()
    with Lock(client, name, timeout=20) as lock:
        with pytest.raises(LockError, match="ttl_seconds"):
            lock.extend(3600)
        assert lock.owned()


def test_a_waiting_lock_gets_its_turn_when_it_is_released(client: Client, name: str) -> None:
    first, second = Lock(client, name, timeout=30), Lock(client, name, timeout=30, sleep=1000)
    assert first.acquire()
    got: list[bool] = []
    waiting = threading.Thread(target=lambda: got.append(second.acquire(blocking_timeout=20)))
    waiting.start()
    until = time.monotonic() + 20
    while not client.check(name).waiting and time.monotonic() < until:
        time.sleep(0.01)
    first.release()
    waiting.join(20)
    assert got == [True]


def test_a_thread_sees_its_own_lock_only(client: Client, name: str) -> None:
    told: list[str] = []

    def elsewhere(lock: Lock) -> None:
        try:
            lock.release()
            told.append("released")
        except LockError as error:
            told.append(type(error).__name__)

    for local in (True, False):
        lock = Lock(client, name, timeout=30, thread_local=local)
        assert lock.acquire()
        thread = threading.Thread(target=elsewhere, args=(lock,))
        thread.start()
        thread.join(20)
        assert lock.owned() is local
        if local:
            lock.release()
    assert told == ["LockError", "released"]


def test_a_token_is_a_label_and_releases_nothing(client: Client, served: Daemon, name: str) -> None:
    lock = Lock(client, name, timeout=30)
    assert lock.acquire(token="reporter")
    assert client.check(name).held_by == "reporter"
    with Client(served.socket) as other:
        namesake = Lock(other, name, timeout=30)
        assert not namesake.acquire(blocking=False, token=b"reporter")
        with pytest.raises(LockError):
            namesake.release()
    assert lock.owned()
    lock.release()


def test_a_lost_lock_says_so_and_ends_nobody_elses(client: Client, name: str) -> None:
    lock = Lock(client, name, timeout=30)
    assert lock.acquire()
    client.revoke(name, reason="test")
    assert client.try_acquire(name, holder="next")
    assert not lock.owned()
    for call in (lock.reacquire, lambda: lock.extend(1), lock.release):
        with pytest.raises(LockNotOwnedError):
            call()
    assert client.check(name).held_by == "next"


def test_the_end_of_a_block_never_hides_its_exception(client: Client, name: str, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(KeyError, match="the work"), Lock(client, name, timeout=30):
        client.revoke(name, reason="test")
        raise KeyError("the work")
    assert "no longer owned" in caplog.text
    with pytest.raises(LockNotOwnedError), Lock(client, name, timeout=30):
        client.revoke(name, reason="test")


HOLDING = """
import sys, time
from leased import Client
from leased.adapters.redis_lock import Lock
Lock(Client(sys.argv[1]), sys.argv[2]).acquire()
print("held", flush=True)
time.sleep(60)
"""


def test_without_a_timeout_it_is_renewed_and_ends_with_the_process(
    client: Client, served: Daemon, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("leased.adapters.redis_lock.RENEWED_TTL_SECONDS", 0.6)
    with Lock(client, name) as lock:
        time.sleep(1.5)
        assert lock.owned()
    holding = subprocess.Popen(
        [sys.executable, "-c", HOLDING, str(served.socket), name], env=environment(), stdout=subprocess.PIPE, text=True
    )
    try:
        assert holding.stdout is not None and holding.stdout.readline() == "held\n"
        assert left(client, name) > 30
        holding.send_signal(signal.SIGKILL)
        assert lock.acquire(blocking_timeout=20)
        lock.release()
    finally:
        holding.kill()
        holding.communicate()


@pytest.mark.parametrize("timeout", [None, 30])
def test_a_forked_child_holds_nothing(client: Client, name: str, timeout: float | None) -> None:
    lock = Lock(client, name, timeout=timeout)
    assert lock.acquire()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            code = 2 if lock.owned() else 3
            lock.release()
        except LockError:
            code += 10
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 13
    assert lock.owned()
    lock.release()


def test_a_daemon_that_is_not_there_is_no_refusal(tmp_path: Path) -> None:
    lock = Lock(Client(tmp_path / "nowhere"), "k", timeout=1)
    for call in (lock.acquire, lock.locked):
        with pytest.raises(LockUnreachable, match="nowhere") as raised:
            call()
        assert isinstance(raised.value.__cause__, Exception)


def test_a_lock_that_could_not_be_released_can_be_released_later(make_daemon: MakeDaemon) -> None:
    running = make_daemon().start()
    with Client(running.socket, timeout=1) as client:
        lock = Lock(client, "k", timeout=60)
        assert lock.acquire()
        running.kill()
        with pytest.raises(LockUnreachable):
            lock.release()
        running.start()
        lock.release()
        assert not lock.locked()


def test_without_redis_the_errors_have_the_same_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "redis", None)
    monkeypatch.setitem(sys.modules, "redis.exceptions", None)
    own = runpy.run_path(redis_errors.__file__)  # a copy: the module itself stays as it was imported
    error = own["LockNotOwnedError"]("gone", lock_name="k")
    assert isinstance(error, own["LockError"]) and isinstance(error, ValueError)
    assert (str(error), error.message, error.lock_name) == ("gone", "gone", "k")
    assert issubclass(own["LockUnreachable"], ConnectionError)


def test_the_examples_are_users_of_redis_py_moved_over(served: Daemon) -> None:
    section = readme.section("Moving over from tooz and redis-py; other languages")
    pairs = zip(readme.blocks(section, "python"), readme.blocks(section, "text"), strict=True)
    ((shown, printed),) = [pair for pair in pairs if "redis_lock" in pair[0]]
    whole = (ROOT / "contrib/adapters/from_redis.py").read_text()
    for source, told in ((shown, printed), (whole, "mine: True, with a generation above 0: True\nheld afterwards: False\n")):
        run = subprocess.run(
            [sys.executable, "-c", source], env=environment() | {"LEASED_SOCKET": str(served.socket)},
            capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip
        assert (run.stdout, run.stderr, run.returncode) == (told, "", 0)
