"""One transaction at a time: all of its consequences or none."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lmdb
import pytest

from leased.errors import StoreError
from leased.lane import Lane, Outcome
from leased.state.leases import Leases


class Store:
    """A lane on a real environment, with what happened to it."""

    def __init__(self, directory: Path) -> None:
        self.leases = Leases(directory, 10)
        self.rereads = 0
        self.lane = Lane(self.leases, self._reread)
        self.happened: list[str] = []

    def _reread(self) -> None:
        self.rereads += 1

    def write(self, key: bytes, *, then: str = "") -> None:
        self.lane.transaction.put(key, b"value", db=self.leases.meta)
        if then:
            self.lane.after(self.happened.append, then)

    def has(self, key: bytes) -> bool:
        with self.leases.environment.begin() as transaction:
            return transaction.get(key, db=self.leases.meta) is not None


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    made = Store(tmp_path)
    yield made
    made.leases.close()


class Faulty:
    """An environment whose transactions fail where the test wants."""

    def __init__(self, real: Any, *, begin: Exception | None = None, commit: Exception | None = None) -> None:
        self.real, self._begin, self._commit = real, begin, commit

    def begin(self, **options: Any) -> Any:
        if self._begin is not None and options.get("write"):
            raise self._begin
        return FaultyTransaction(self.real.begin(**options), self._commit)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.real, name)


class FaultyTransaction:
    def __init__(self, real: Any, fault: Exception | None) -> None:
        self._real, self._fault = real, fault

    def commit(self) -> None:
        if self._fault is not None:
            self._real.abort()
            raise self._fault
        self._real.commit()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)


def test_consequences_happen_after_the_commit_and_in_order(store: Store) -> None:
    def work() -> None:
        store.write(b"a", then="first")
        store.write(b"b", then="second")
        assert store.happened == []
        store.lane.after(lambda: store.happened.append("seen" if store.has(b"a") else "unseen"))

    assert store.lane.run(work) is Outcome.COMMITTED
    assert store.happened == ["first", "second", "seen"]
    assert store.lane.transaction is None
    assert (store.lane.commits, store.lane.aborts) == (1, 0)


@pytest.mark.parametrize("fault", [lmdb.MapFullError("full"), lmdb.DiskError("disk")])
def test_a_store_that_refuses_a_write_leaves_nothing_behind(store: Store, fault: Exception) -> None:
    def work() -> None:
        store.write(b"a", then="told")
        store.lane.on_abort(lambda: store.happened.append("undone 1"))
        store.lane.on_abort(lambda: store.happened.append("undone 2"))
        raise fault

    assert store.lane.run(work) is Outcome.ABORTED
    assert store.happened == ["undone 2", "undone 1"]
    assert not store.has(b"a")
    assert store.lane.last_error == str(fault)
    assert store.lane.run(store.write, b"b") is Outcome.COMMITTED
    assert store.happened == ["undone 2", "undone 1"]


def test_a_mistake_of_ours_is_rolled_back_and_raised(store: Store) -> None:
    def work() -> None:
        store.write(b"a", then="told")
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        store.lane.run(work)
    assert store.lane.transaction is None
    assert not store.has(b"a")
    assert store.lane.run(store.write, b"b") is Outcome.COMMITTED
    assert store.happened == []


def test_a_transaction_that_cannot_begin_is_an_abort(store: Store) -> None:
    real = store.leases.environment
    store.leases.environment = Faulty(real, begin=lmdb.ReadersFullError("readers"))
    assert store.lane.run(store.write, b"a") is Outcome.ABORTED
    store.leases.environment = real
    assert store.lane.run(store.write, b"a") is Outcome.COMMITTED


def test_a_commit_that_finds_the_map_full_has_written_nothing(store: Store) -> None:
    real = store.leases.environment
    store.leases.environment = Faulty(real, commit=lmdb.MapFullError("full"))
    assert store.lane.run(lambda: store.write(b"a", then="told")) is Outcome.ABORTED
    store.leases.environment = real
    assert (store.happened, store.rereads, store.lane.broken) == ([], 0, "")


def test_after_any_other_commit_error_the_environment_is_opened_anew_and_memory_rebuilt(store: Store) -> None:
    store.leases.environment = Faulty(store.leases.environment, commit=lmdb.DiskError("input/output error"))
    assert store.lane.run(lambda: store.write(b"a", then="told")) is Outcome.UNKNOWN
    assert (store.happened, store.rereads, store.lane.broken) == ([], 1, "")
    assert store.lane.run(lambda: store.write(b"b", then="told")) is Outcome.COMMITTED
    assert store.happened == ["told"]


def test_an_environment_that_cannot_be_opened_again_is_tried_at_each_transaction(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse() -> None:
        raise StoreError("no such device")

    real_reopen = store.leases.reopen
    store.leases.environment = Faulty(store.leases.environment, commit=lmdb.DiskError("input/output error"))
    monkeypatch.setattr(store.leases, "reopen", refuse)
    assert store.lane.run(store.write, b"a") is Outcome.UNKNOWN
    assert store.lane.broken == "no such device"
    assert store.lane.run(store.write, b"a") is Outcome.UNKNOWN
    assert store.rereads == 0
    monkeypatch.setattr(store.leases, "reopen", real_reopen)
    assert store.lane.run(store.write, b"a") is Outcome.COMMITTED
    assert (store.lane.broken, store.rereads) == ("", 1)


def test_what_a_transaction_has_granted_is_forgotten_by_the_next(store: Store) -> None:
    def grants() -> None:
        store.lane.granted["local"] = store.lane.granted.get("local", 0) + 1
        assert store.lane.granted == {"local": 1}

    for _ in range(2):
        assert store.lane.run(grants) is Outcome.COMMITTED
