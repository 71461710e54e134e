"""The counter: next = max(last + 1, min(wall clock in µs, mark))."""

from __future__ import annotations

import pytest

from leased.errors import StateRefused
from leased.generations import BLOCK, HEADROOM, LAST_WALL_SECONDS, MICROSECONDS, RAISE_WITHIN, Generations, check_wall
from leased.model import MAX_GENERATION

WALL = 1_800_000_000.0
NOW = int(WALL * MICROSECONDS)


def test_a_generation_is_the_wall_clock_in_microseconds_where_it_can_be() -> None:
    assert Generations(NOW - 1000, NOW + BLOCK).peek(WALL) == NOW


@pytest.mark.parametrize("behind", [0, 1, 10**9])
def test_a_clock_that_stands_behind_the_last_one_makes_the_next_one_follow_it(behind: int) -> None:
    assert Generations(NOW + behind, NOW + BLOCK + behind).peek(WALL) == NOW + behind + 1


def test_a_clock_that_has_passed_the_mark_leaves_half_a_minute_of_numbers_below_it() -> None:
    generations = Generations(NOW, NOW + BLOCK)
    assert generations.peek(WALL + 86400) == NOW + BLOCK - RAISE_WITHIN
    generations.last = NOW + BLOCK
    assert generations.peek(WALL + 86400) == NOW + BLOCK + 1  # decided, but nobody may be told before a higher mark is flushed


def test_only_so_many_are_decided_above_the_mark() -> None:
    assert Generations(NOW + HEADROOM - 1, NOW).peek(WALL) == NOW + HEADROOM
    assert Generations(NOW + HEADROOM, NOW).peek(WALL) is None


def test_looking_uses_nothing_up() -> None:
    generations = Generations(NOW - 5, NOW + BLOCK)
    assert [generations.peek(WALL) for _ in range(3)] == [NOW] * 3


def test_the_mark_is_raised_by_a_minute_when_half_a_minute_is_left() -> None:
    generations = Generations(0, NOW + RAISE_WITHIN)
    assert generations.wanted_mark(WALL) == 0
    assert generations.wanted_mark(WALL + 0.001) == NOW + RAISE_WITHIN + BLOCK
    generations = Generations(NOW, NOW + RAISE_WITHIN - 1)  # the counter comes near it, the clock does not
    assert generations.wanted_mark(WALL - 3600) == NOW + RAISE_WITHIN - 1 + BLOCK


def test_a_start_after_a_long_time_raises_the_mark_past_the_clock() -> None:
    assert Generations(5, 10).wanted_mark(WALL) == NOW + BLOCK


def test_a_mark_counts_only_when_it_has_been_flushed_and_is_asked_for_once() -> None:
    generations = Generations(0, 0)
    generations.raising = wanted = generations.wanted_mark(WALL)
    assert generations.wanted_mark(WALL + 100) == 0
    assert generations.peek(WALL) == 1
    generations.raised()
    assert (generations.mark, generations.raising) == (wanted, 0)
    assert generations.peek(WALL) == NOW


def test_a_mark_is_never_lowered() -> None:
    generations = Generations(NOW, NOW + 10 * BLOCK)
    generations.raising = NOW + BLOCK
    generations.raised()
    assert generations.mark == NOW + 10 * BLOCK


def test_generations_stay_below_two_to_the_53() -> None:
    assert Generations(MAX_GENERATION - 1, MAX_GENERATION).peek(WALL) == MAX_GENERATION
    assert Generations(MAX_GENERATION, MAX_GENERATION).peek(WALL) is None
    assert Generations(MAX_GENERATION - 5, MAX_GENERATION - 4).wanted_mark(WALL) == MAX_GENERATION


def test_a_wall_clock_past_the_year_2200_is_refused_at_the_start() -> None:
    check_wall(LAST_WALL_SECONDS - 1)
    with pytest.raises(StateRefused, match="2200"):
        check_wall(LAST_WALL_SECONDS)


@pytest.mark.parametrize("year", [2200, 2300, 9999])
def test_a_wall_clock_that_steps_into_the_far_future_does_not_use_the_generations_up(year: int) -> None:
    """A start there is refused; a step while running must not end all grants of this installation for ever."""
    generations = Generations(NOW, NOW + BLOCK)
    far = (year - 1970) * 365.2425 * 86400 + 86400
    for wall in (far, far, WALL + 1, WALL + 2):
        wanted = generations.wanted_mark(wall)
        if wanted:
            generations.raising = wanted
            generations.raised()
        following = generations.peek(wall)
        if following is not None:
            generations.last = following
    assert generations.last < LAST_WALL_SECONDS * MICROSECONDS + 100 * BLOCK
