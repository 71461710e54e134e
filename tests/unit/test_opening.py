"""What children have read before the daemon does is what it would have read itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import states

import leased.opening
import leased.state.recovery
from leased.opening import Opened, open_state
from leased.state.probe import Taken
from leased.state.recovery import TakenOver
from leased.state.survey import Rows

KEYS = [bytes((n,)) * 20 for n in range(33, 41)]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A state that was killed: leases of two namespaces in one store or both, one of them damaged."""
    root = tmp_path / "root"
    root.mkdir()
    states.make(root)
    with states.opened_leases(root) as (store, transaction):
        for n, key in enumerate(KEYS):
            store.put(
                transaction,
                key,
                states.lease_of(1000 - n, 600.0, scope="s" if n % 2 else None, namespace="local" if n % 3 else "uid:9"),
            )
        states.spoil(transaction, KEYS[2], store.leases)
    return root


def opened(root: Path) -> Opened:
    made = open_state(states.config_of(root), states.StoppedClock())
    for each in (made.leases, made.ledger, *made.locks):
        each.close()
    return made


def told(taken: TakenOver) -> dict[str, Any]:
    """All of it but what is drawn at each start."""
    rows = vars(taken.rows)
    return {"rows": rows, "first": taken.first, "known": taken.known, "last": taken.last, "story": taken.story}


def no_reading(*_: object) -> Rows:
    raise AssertionError("read twice")


def test_the_records_are_read_and_proven_once(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    copy = states.copy_of(root, tmp_path / "copy")
    with monkeypatch.context() as patch:
        patch.setattr(leased.opening, "_still", lambda taken, environment: b"")
        alone = told(opened(copy).taken)
    monkeypatch.setattr(leased.state.recovery, "_looked", no_reading)
    monkeypatch.setattr(leased.state.recovery, "_promised", no_reading)
    taken = opened(root).taken
    assert told(taken) == alone
    assert taken.story == "the volatile state was kept"
    assert taken.rows.damaged == [KEYS[2]]
    assert set(KEYS) - {KEYS[2]} <= set(taken.rows.keys)
    assert {op[1] for op in taken.first if op[0] == "put"} >= set(KEYS) - {KEYS[2]}


def test_what_was_read_of_a_file_that_has_changed_since_is_not_used(root: Path) -> None:
    with states.opened_leases(root) as (store, _):
        number = store.environment.info()["last_txnid"]
        assert leased.opening._still(Taken(number, b"made"), store.environment) == b"made"
        assert leased.opening._still(Taken(number - 1, b"made"), store.environment) == b""
        assert leased.opening._still(None, store.environment) == b""


def test_rows_of_a_volatile_state_that_is_made_anew_are_not_used(root: Path) -> None:
    class Rebooted(states.StoppedClock):
        def boot_id(self) -> str:
            return "another-boot"

    made = open_state(states.config_of(root), Rebooted())
    try:
        assert "made anew" in made.taken.story
        with made.leases.environment.begin() as transaction:
            assert made.taken.rows.keys == [bytes(key) for key, _ in transaction.cursor(db=made.leases.leases)]
        assert not set(KEYS) & set(made.taken.rows.keys)
    finally:
        for each in (made.leases, made.ledger, *made.locks):
            each.close()
