"""What a start makes of dead-man switches that only one of the two stores knows."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from worlds import World, world

from leased.model import HeartbeatRequest, Reply, ResumeRequest


@pytest.fixture
def w() -> Iterator[World]:
    with world() as made:
        made.run()
        yield made


def beat(w: World, *, disarm: bool = False) -> Reply:
    reply = w.ask("A", HeartbeatRequest("task", None if disarm else 60.0, disarm=disarm))
    assert reply is not None
    return reply


def switch(w: World) -> Reply | None:
    packet = w.ask("A", ResumeRequest("task"))
    assert packet is not None
    told: Reply | None = packet["switch"]
    return told


def armed_and_flushed(w: World) -> None:
    assert beat(w)["armed"] is True
    w.pass_time(2.0)


def test_a_switch_disarmed_just_before_a_kill_stays_disarmed_when_the_power_fails_later(w: World) -> None:
    armed_and_flushed(w)
    assert beat(w, disarm=True)["armed"] is False
    w.kill()
    w.run()
    w.pass_time(5.0)
    w.power_cut()
    w.run()
    assert switch(w) is None


def test_a_stop_in_order_copies_no_switch_that_was_disarmed_before_a_kill(w: World) -> None:
    armed_and_flushed(w)
    beat(w, disarm=True)
    w.kill()
    w.run()
    assert w.stop()
    w.power_cut()
    w.run()
    assert switch(w) is None


def test_a_disarming_the_ledger_could_not_be_told_at_the_start_is_told_before_a_new_arming(w: World) -> None:
    armed_and_flushed(w)
    beat(w, disarm=True)
    w.kill()
    w.begin()
    w.flush_fails()
    beat(w)
    w.calm_after_retries()
    w.power_cut()
    w.run()
    told = switch(w)
    assert told is not None
    assert told["armed"] is True, "the delete of the old one came after the put of the new one"


def test_a_switch_armed_just_before_a_kill_is_in_the_ledger_after_the_start(w: World) -> None:
    assert beat(w)["armed"] is True
    w.kill()
    w.run()
    w.pass_time(2.0)
    w.power_cut()
    w.run()
    told = switch(w)
    assert told is not None
    assert told["armed"] is True


def test_a_switch_armed_while_the_ledger_could_not_be_written_is_written_as_soon_as_it_can_be(w: World) -> None:
    w.kill()
    w.begin()
    assert beat(w)["armed"] is True
    w.pass_time(3.0, disk_works=False)
    w.flush()  # the start's first, which the disk was slow with
    w.flush()  # its second
    w.power_cut()
    w.run()
    told = switch(w)
    assert told is not None
    assert told["armed"] is True, "it was armed 3 s ago, and a power cut may undo the last second"
