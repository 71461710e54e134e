"""The daemon under simulated time, disk, kernel and death, judged by the oracle: every reply, every restart, what is left at the end.

A seed that fails is run again alone by LEASED_SEED=N pytest tests/simulation/test_simulation.py -k one_seed.
"""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import replace

import pytest
from plans import COMMITS, ENDINGS, Life, plan
from seeded import Report, run_seed
from store_faults import Trap

pytestmark = pytest.mark.interpreted  # the referee listens in by replacing methods of the daemon

SEED = int(os.environ.get("LEASED_SEED", "0"))  # read before conftest.py clears the environment
FEW = range(1, 25)
SHOWED = (2407, 2548, 2564, 2565, 2684, 3093, 3123, 3422, 4133, 4192)  # each has shown a mistake, of the daemon or of its judge
MANY = range(25, 220)
CRASHES = [(kind, action) for kind in COMMITS if kind for action in ("crash_before", "crash_after")]
FAULTS = [("begin", "error"), ("put", "error"), ("put", "full"), ("commit", "error"), ("commit", "full")]
LAST = Life(4.0, float("inf"), "stop", 0.0)


def clean(report: Report) -> Report:
    if report.violations:
        pytest.fail(str(report), pytrace=False)
    return report


def test_one_seed() -> None:
    clean(run_seed(SEED))


@pytest.mark.parametrize("seed", [*FEW, *SHOWED])
def test_a_few_seeds(seed: int) -> None:
    clean(run_seed(seed))


@pytest.mark.slow
def test_many_seeds() -> None:
    """Together they end lives in every way there is, and crash at most kinds of commits."""
    crashed: Counter[tuple[str, str]] = Counter()
    endings: Counter[str] = Counter()
    decisions = 0
    for seed in MANY:
        report = clean(run_seed(seed))
        crashed += report.crashed
        endings.update(life.ending for life in plan(seed).lives[:-1])
        decisions += report.decisions
    assert set(endings) == set(ENDINGS)
    assert len(crashed) > len(CRASHES) / 2
    assert decisions > 100 * len(MANY)


def test_one_seed_is_one_run() -> None:
    """Nothing but the seed decides: not the addresses of objects, not the hashing of strings, not what the system draws."""
    first, second = run_seed(3), run_seed(3)
    assert first.trace == second.trace
    assert len(first.trace) > 100


def test_the_trace_shows_no_credential() -> None:
    trace = "\n".join(run_seed(3).trace)
    assert "request_id': '…'" in trace
    assert "fence': '…'" in trace
    assert "attempt-" not in trace


def crash_at(kind: str, action: str, seed: int) -> Report:
    """A run whose first life ends at the first commit of `kind`, if there is one in it."""
    planned = plan(seed)
    trap = Trap("commit", action, 1, kind)  # type: ignore[arg-type]
    life = Life(4.0, 8.0, "kill", 0.25, [trap])
    flaky = 0.5 if kind == "_undo" else planned.flaky_disk
    report = run_seed(seed, planned=replace(planned, lives=[life, LAST], flaky_disk=flaky, deaf=False))
    return clean(report)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "action"), CRASHES)
def test_a_crash_at_every_kind_of_commit(kind: str, action: str) -> None:
    for seed in range(1000, 1020):
        if crash_at(kind, action, seed).crashed[kind, action]:
            return
    pytest.fail(f"no seed comes to a commit of {kind}")


@pytest.mark.slow
@pytest.mark.parametrize("doom", ["crash_before", "crash_after"])
@pytest.mark.parametrize("number", [1, 2, 3, 4, 5, 8])
@pytest.mark.parametrize("ending", ["kill", "power", "runtime_lost"])
def test_a_crash_at_each_of_the_first_flushes(number: int, doom: str, ending: str) -> None:
    """The four steps of a start, then the mark and the leases: whatever is in the ledger by then, the next start knows what it means."""
    for seed in (2000 + number, 2100 + number):
        planned = plan(seed)
        lives = [Life(4.0, 5.0, ending, 0.25, [], number, doom), Life(0.0, 3.0, ending, 0.0, [], number, doom), LAST]
        clean(run_seed(seed, planned=replace(planned, lives=lives, flaky_disk=0.0, deaf=False)))


def fail_at(operation: str, action: str, number: int) -> Report:
    trap = Trap(operation, action, number)  # type: ignore[arg-type]
    planned = replace(plan(3000 + number), lives=[replace(LAST, traps=[trap])], flaky_disk=0.0, deaf=False, wall_steps=False)
    report = clean(run_seed(3000 + number, planned=planned, clients=10, steps=8))
    assert sum("granted" in line for line in report.trace) > 5, "the daemon goes on"
    return report


@pytest.mark.parametrize(("operation", "action"), FAULTS)
@pytest.mark.parametrize("number", [1, 2, 3, 7])
def test_the_nth_operation_fails(operation: str, action: str, number: int) -> None:
    """No grant without its record, a clean null, and the daemon goes on."""
    fail_at(operation, action, number)


@pytest.mark.slow
@pytest.mark.parametrize(("operation", "action"), FAULTS)
def test_each_of_the_first_operations_fails(operation: str, action: str) -> None:
    for number in (*range(4, 30), 40, 60, 80):
        fail_at(operation, action, number)
