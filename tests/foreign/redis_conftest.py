"""Put as conftest.py beside redis-py's own test_lock.py: its `Lock` is ours, and its `r` says what of Redis has a meaning here.

What a Redis key is, in leases: a value is the label of whoever holds it; SET by a third party takes it by force.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import redis.lock

from leased import Client
from leased.adapters.redis_lock import Lock

redis.lock.Lock = Lock  # before test_lock.py takes the name from there


class LeaseClient:
    """The calls of redis.Redis that the suite makes on its `r`.  Not pexpire: nobody but the fence's bearer changes a lease."""

    def __init__(self, *, decoded: bool = False) -> None:
        self.client = Client()
        self._decoded = decoded

    def lock(self, name: str, *, lock_class: Any = Lock, **arguments: Any) -> Any:
        return lock_class(self.client, name, **arguments)

    def get(self, name: str) -> bytes | str | None:
        held_by = self.client.check(name).held_by
        return held_by if held_by is None or self._decoded else held_by.encode()

    def set(self, name: str, value: str) -> bool:
        self.client.revoke(name, reason="SET by redis-py's tests")
        return bool(self.client.try_acquire(name, holder=value))

    def pttl(self, name: str) -> int:
        remaining = self.client.check(name).expires_in_seconds
        return -2 if remaining is None else int(remaining * 1000)

    def ttl(self, name: str) -> int:
        return round(self.pttl(name) / 1000)


def _get_client(cls: type[Any], request: pytest.FixtureRequest, *, decode_responses: bool = False) -> LeaseClient:
    return LeaseClient(decoded=decode_responses)


@pytest.fixture
def r() -> LeaseClient:
    return LeaseClient()


@pytest.fixture(autouse=True)
def flushed() -> Iterator[None]:
    """As redis-py's own fixture does: what a test leaves behind is gone before the next."""
    yield
    with Client() as client:
        client.revoke("foo", reason="the test is over")
