"""Where redis-py is installed its users' `except` clauses go on working.  Run by test_peer_suites.py, in the environment that has it."""

from __future__ import annotations

from inspect import signature
from pathlib import Path

import pytest
import redis
import redis.lock

from leased import Client
from leased.adapters.redis_lock import Lock


def test_its_errors_are_raised(tmp_path: Path) -> None:
    with Client() as client:
        with pytest.raises(redis.exceptions.LockError) as raised:
            Lock(client, "inside").release()
        assert raised.value.lock_name == "inside"
        lock = Lock(client, "inside", timeout=30)
        assert lock.acquire()
        client.revoke("inside", reason="test")
        with pytest.raises(redis.exceptions.LockNotOwnedError):
            lock.release()


def test_a_daemon_that_is_not_there_is_its_connection_error(tmp_path: Path) -> None:
    with pytest.raises(redis.exceptions.ConnectionError, match="nowhere"):
        Lock(Client(tmp_path / "nowhere"), "inside").acquire()


def test_every_argument_of_its_is_one_of_ours_with_the_same_default() -> None:
    for ours, theirs in [(Lock, redis.lock.Lock), *((getattr(Lock, name), getattr(redis.lock.Lock, name)) for name in METHODS)]:
        asked = {each.name: (each.kind, each.default) for each in signature(theirs).parameters.values()}
        assert {each.name: (each.kind, each.default) for each in signature(ours).parameters.values()} == asked, theirs


METHODS = ("acquire", "release", "extend", "reacquire", "owned", "locked")
