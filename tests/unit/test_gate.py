"""What may be decided at all, and what a caller is told when it may not."""

from __future__ import annotations

import pytest

from leased.gate import Gate, Unknown


def test_an_open_gate_admits_everything() -> None:
    gate = Gate(60.0)
    gate.admit()
    gate.admit_reading()
    gate.admit_unknown_key(0.0)
    assert not gate.recovering(0.0)


@pytest.mark.parametrize("reason", ["starting", "state_lost"])
def test_a_closed_gate_still_lets_releases_and_checks_through(reason: str) -> None:
    gate = Gate(60.0, closed=reason)
    with pytest.raises(Unknown) as refused:
        gate.admit()
    assert (refused.value.reason, refused.value.retry_after) == (reason, 1.0)
    gate.admit_reading()


def test_a_shut_gate_lets_nothing_through_and_says_so_first() -> None:
    gate = Gate(60.0, closed="starting")
    gate.shut = "shutting_down"
    for ask in (gate.admit, gate.admit_reading):
        with pytest.raises(Unknown) as refused:
            ask()
        assert refused.value.reason == "shutting_down"


@pytest.mark.parametrize(("boot", "retry"), [(100.0, 50.0), (149.0, 1.0), (149.99, 0.05), (150.0, 0.05), (200.0, 0.05)])
def test_an_unknown_key_is_told_how_long_the_wait_still_is(boot: float, retry: float) -> None:
    gate = Gate(60.0, 150.0, settled=False)
    with pytest.raises(Unknown) as refused:
        gate.admit_unknown_key(boot)
    assert refused.value.reason == "recovering"
    assert refused.value.retry_after == pytest.approx(retry)


def test_the_wait_is_over_when_its_time_has_come_and_the_ledger_says_so() -> None:
    gate = Gate(60.0, 150.0, settled=False)
    assert gate.recovering(150.0)
    gate.settled = True
    assert gate.recovering(149.999)
    assert not gate.recovering(150.0)
    gate.admit_unknown_key(150.0)
    with pytest.raises(Unknown):
        gate.admit_unknown_key(149.999)


def test_known_keys_are_decided_during_the_wait() -> None:
    gate = Gate(60.0, 150.0, settled=False)
    gate.admit()
    gate.admit_reading()
