"""When `lease run` tells its command to end and when it makes it: the clock is a number here."""

from __future__ import annotations

from signal import SIGKILL, SIGTERM

import pytest

from leased.client.endgame import LEFT_BEHIND, LOST, ORPHANED, UNRENEWED, Endgame, Terms

MINUTE = Terms(ttl=60, on_lost="term", kill_after=5)
FOREVER = float("inf")


def test_while_renewals_come_nothing_is_due() -> None:
    game = Endgame(MINUTE)
    assert game.look(0, 60, None) == (None, 54)
    assert game.look(53.9, 80, None) == (None, 74)
    assert game.cause is None


def test_without_a_renewal_term_comes_first_and_kill_before_the_deadline() -> None:
    game = Endgame(MINUTE)
    assert game.look(54, 60, None) == (SIGTERM, 59)
    assert game.cause == UNRENEWED
    assert game.look(58.9, 60, None) == (None, 59)
    signal, again = game.look(59, 60, None)
    assert (signal, again > 59) == (SIGKILL, True)
    assert game.look(60, 60, None)[0] == SIGKILL  # for whoever was forked meanwhile


def test_a_renewal_that_comes_after_the_term_changes_nothing_but_the_time_there_is() -> None:
    game = Endgame(MINUTE)
    game.look(54, 60, None)
    assert game.look(55, 120, None) == (None, 59)
    assert game.look(59, 120, None)[0] == SIGKILL


@pytest.mark.parametrize("ttl", [1, 2, 10, 60, 3600])
@pytest.mark.parametrize("kill_after", [0, 0.1, 5, 1000])
def test_a_term_leaves_room_for_one_late_renewal_and_a_kill_for_its_effect(ttl: float, kill_after: float) -> None:
    game = Endgame(Terms(ttl, "term", kill_after))
    _, first = game.look(0, ttl, None)
    signal, last = game.look(first, ttl, None)
    assert first > ttl / 3
    assert last <= ttl - min(1.0, ttl / 10) or signal == SIGKILL
    assert signal == (SIGTERM if kill_after else SIGKILL)


def test_one_who_wakes_up_too_late_for_a_term_kills() -> None:
    """The machine slept."""
    assert Endgame(MINUTE).look(1000, 60, None)[0] == SIGKILL


@pytest.mark.parametrize("cause", [LOST, ORPHANED, LEFT_BEHIND])
def test_a_cause_begins_it_at_once(cause: str) -> None:
    game = Endgame(MINUTE)
    assert game.look(10, 60, cause) == (SIGTERM, 15)
    assert game.look(15, 60, cause)[0] == SIGKILL
    assert game.cause == cause


def test_the_deadline_bounds_every_grace() -> None:
    game = Endgame(Terms(60, "term", 1000))
    assert game.look(30, 60, ORPHANED) == (SIGTERM, 59)
    assert game.look(59, 60, ORPHANED)[0] == SIGKILL


def test_kill_gives_no_term_for_a_loss_and_one_for_the_rest() -> None:
    terms = MINUTE._replace(on_lost="kill")
    assert Endgame(terms).look(0, 60, None) == (None, 59)
    assert Endgame(terms).look(59, 60, None)[0] == SIGKILL
    game = Endgame(terms)
    assert game.look(10, 60, LOST)[0] == SIGKILL
    assert game.look(10.1, 60, LOST)[0] == SIGKILL
    assert Endgame(terms).look(10, 60, ORPHANED) == (SIGTERM, 15)


def test_ignore_ends_nothing_for_a_loss_but_leaves_no_orphan() -> None:
    game = Endgame(MINUTE._replace(on_lost="ignore"))
    assert game.look(1000, 60, None) == (None, FOREVER)
    assert game.look(1000, 60, LOST) == (None, FOREVER)
    assert game.look(1000, 60, ORPHANED) == (SIGTERM, 1005)
    assert game.look(1005, 60, ORPHANED)[0] == SIGKILL
