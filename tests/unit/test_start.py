"""The start: a crash at any of its steps, from any situation it may find, loses nothing that was promised.

Every situation is met with a short lease (20 s, waited out) of B and a long one (100 s, in the ledger) of R.  The start has three steps with the
ledger; at each the flush fails, or the daemon is killed, or the power goes, with every outcome the flush may have had.  Then it starts again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from worlds import Side, World, volatile_state_fails, world

from leased.errors import StateRefused
from leased.start import Step

FLUSHES = 3  # what the ledger lacks; the next start; the mark may go with either or alone
OUTCOMES: list[tuple[Side, Side]] = [("old", "old"), ("new", "old"), ("old", "new"), ("new", "new")]
CRASHES: dict[str, list[tuple[Side, Side]]] = {
    "killed": [("old", "old"), ("new", "new")],
    "power cut": [("old", "old"), ("new", "new")],
    "flush failed, then killed": [("old", "old"), ("new", "old")],
    "flush failed, then power cut": OUTCOMES,
}


def kept(w: World) -> None:
    w.kill()


def gone(w: World) -> None:
    w.lose_runtime()


def power_was_cut(w: World) -> None:
    w.power_cut()


def stopped(w: World) -> None:
    assert w.stop()


def stopped_and_runtime_lost(w: World) -> None:
    assert w.stop()
    w.lose_runtime()


def stopped_and_rebooted(w: World) -> None:
    assert w.stop()
    w.power_cut()


def ledger_lost(w: World) -> None:
    w.kill()
    w.lose_state()


def restored(w: World) -> None:
    copy = w.backup()
    w.kill()
    w.restore(copy)


def foreign_runtime(w: World) -> None:
    w.kill()
    w.swap_runtime()
    w.run()
    w.kill()
    w.swap_runtime()


def wait_raised(w: World) -> None:
    w.kill()
    w.wait_out = 50


def wait_lowered(w: World) -> None:
    w.kill()
    w.wait_out = 5


def wait_lowered_while_waiting(w: World) -> None:
    w.lose_runtime()
    w.run()
    w.kill()
    w.wait_out = 5


def killed_while_waiting(w: World) -> None:
    w.lose_runtime()
    w.run()
    w.pass_time(5)
    w.kill()


SITUATIONS: list[Callable[[World], None]] = [
    kept,
    gone,
    power_was_cut,
    stopped,
    stopped_and_runtime_lost,
    stopped_and_rebooted,
    ledger_lost,
    restored,
    foreign_runtime,
    wait_raised,
    wait_lowered,
    wait_lowered_while_waiting,
    killed_while_waiting,
]


@pytest.fixture
def w() -> Iterator[World]:
    with world() as made:
        yield made


def met(w: World, situation: Callable[[World], None]) -> None:
    w.run()
    w.granted("B", 20, "short")
    w.granted("R", 100, "long")
    situation(w)


def crash(w: World, how: str, outcome: tuple[Side, Side]) -> None:
    if how == "killed":
        w.kill(*outcome)
    elif how == "power cut":
        w.power_cut(outcome[1])
    else:
        w.flush_fails(*outcome)
        w.upkeep.tick()
        w.assert_kept()
        if how.endswith("killed"):
            w.kill()
        else:
            w.power_cut()


def goes_on(w: World) -> None:
    """After the crash: what was promised is there, and whoever held goes on or is told no, but nobody else is told yes."""
    w.run()
    for who, key in (("B", "short"), ("R", "long")):
        for other in ("C", who):
            w.lease(other, 20, key)
            w.calm()
        if who in w.fences:
            w.renew(who, 30, key)
            w.calm()
    w.pass_time(15)
    w.granted_or_unknown("D", "another")


@pytest.mark.parametrize("how", CRASHES)
@pytest.mark.parametrize("situation", SITUATIONS, ids=lambda each: each.__name__)
def test_a_crash_at_any_step_of_the_start_loses_nothing_that_was_promised(situation: Callable[[World], None], how: str) -> None:
    for step in range(FLUSHES):
        for outcome in CRASHES[how]:
            with world() as w:
                met(w, situation)
                w.begin()
                for _ in range(step):
                    if w.flight is not None:
                        w.flush()
                        w.upkeep.tick()
                if w.flight is None:
                    break  # the start had fewer flushes
                crash(w, how, outcome)
                goes_on(w)


@pytest.mark.parametrize("situation", SITUATIONS, ids=lambda each: each.__name__)
def test_a_start_whose_flushes_fail_is_tried_again_until_it_succeeds(situation: Callable[[World], None]) -> None:
    for outcome in OUTCOMES:
        with world() as w:
            met(w, situation)
            w.begin()
            for _ in range(2):
                w.flush_fails(*outcome)
                reply = w.lease("C", 20, "new")
                assert reply is not None
                assert reply["acquired"] is None
                assert w.start_up.error == "the disk is broken"
                w.pass_time(4, disk_works=False)
            goes_on_after_failure(w)


def goes_on_after_failure(w: World) -> None:
    w.calm()
    assert w.start_up.started
    w.pass_time(60)
    w.granted_or_unknown("D", "another")


def test_the_steps_of_a_start_and_what_each_allows(w: World) -> None:
    w.begin()
    steps = [w.start_up.step]
    while not w.start_up.started:
        reply = w.lease("A", 20)
        assert reply is not None
        assert (reply["acquired"], reply["reason"]) == (None, "starting")
        assert w.check()["held"] is False
        w.flush()
        steps.append(w.start_up.step)
    assert steps == [Step.FIRST_FLUSH, Step.SECOND_FLUSH, Step.STARTED]
    w.calm()
    w.granted("A", 20)


def test_a_release_is_answered_before_the_start_is_written(w: World) -> None:
    w.run()
    w.granted("A", 20)
    w.kill()
    w.begin()
    reply = w.release("A")
    assert reply is not None
    assert reply["released"] is True


def test_a_lease_released_while_the_first_flush_fails_is_not_put_in_the_ledger_after_all(w: World) -> None:
    w.run()
    w.granted("R", 40)
    w.kill()
    w.lose_state()
    w.begin()  # the rebuilt ledger's first flush carries the lease
    reply = w.release("R")
    assert reply is not None
    assert reply["released"] is True
    w.flush_fails("old", "old")
    w.calm_after_retries()
    assert w.in_ledger() is None
    w.granted("S", 20)
    w.power_cut()
    w.run()
    assert w.record() is None
    reply = w.renew("R", 40)
    assert reply is not None
    assert reply["acquired"] is None


@pytest.mark.parametrize("step", [Step.STORE_NEXT, Step.ADOPT_NEXT])
def test_a_step_that_cannot_be_written_is_tried_again_at_the_next_tick(w: World, step: Step) -> None:
    w.run()
    w.granted("A", 40)
    w.kill()
    w.begin()
    if step is Step.ADOPT_NEXT:
        w.flush()
    with volatile_state_fails(w):
        w.flush()
        assert w.start_up.step is step
        w.upkeep.tick()
        assert w.start_up.step is step
    w.calm()
    assert w.start_up.started
    w.granted("B", 20, "other")


def test_a_flush_that_was_under_way_before_does_not_count_for_the_next_step(w: World) -> None:
    w.run()
    w.granted("R", 40)
    w.kill()
    w.begin()
    with volatile_state_fails(w):
        w.flush()
    assert w.start_up.step is Step.STORE_NEXT
    w.release("R")
    w.lessor.journal.kick(w.lessor.now.boot, force=True)
    assert w.flight is not None  # its delete is under way
    w.upkeep.tick()
    assert w.start_up.step is Step.SECOND_FLUSH
    w.flush()
    assert w.start_up.step is Step.SECOND_FLUSH
    w.calm()
    assert w.start_up.started


def test_the_start_adopted_by_leases_is_the_one_the_ledger_has(w: World) -> None:
    for _ in range(3):
        w.run()
        ours, theirs = w.leases.read_meta(), w.ledger.read_meta()
        assert ours is not None
        assert theirs is not None
        assert ours.start == ours.next_start == theirs.start
        assert ours.incarnation == theirs.incarnation
        w.kill()
    assert ours.start.number == 3


def test_a_copy_of_a_lease_above_a_lowered_wait_stays_in_the_ledger_after_a_wait(w: World) -> None:
    """Stopped in order under a wait of 60 s; then a foreign runtime directory makes the start wait, and the wait has been lowered."""
    w.wait_out = 60
    w.run()
    w.granted("R", 50)
    stale = w.root / "stale"
    assert w.stop()
    w.swap_runtime(stale.name)  # an empty one, for a daemon of another state
    w.run()
    assert w.stop()
    w.swap_runtime(stale.name)  # the one of before, by mistake
    w.witness.promises["k"].may_end = False
    w.wait_out = 5
    assert w.run().waiting
    w.renew("R", 50)
    w.calm()
    w.pass_time(30)
    w.renew("R", 50)
    w.calm()
    w.pass_time(31)
    assert w.lessor.gate.settled
    w.witness.promises["k"].may_end = False
    w.power_cut()
    w.run()
    w.pass_time(10)
    w.granted_or_unknown("S", "k")


def test_leases_flushed_by_the_start_are_no_longer_marked_unflushed(w: World) -> None:
    w.run()
    w.lease("A", 40)
    w.kill()  # committed to `leases`, never flushed, never told
    w.run()
    record = w.record()
    assert record is not None
    assert not record.unflushed
    assert w.in_ledger() is not None


def test_an_emptied_ledger_of_a_known_installation_is_refused_when_nothing_else_is_left(w: World) -> None:
    w.run()
    w.kill()
    (w.state / "data.mdb").unlink()
    w.lose_runtime()
    with pytest.raises(StateRefused, match="leased restore"):
        w.begin()
    w.running = False
