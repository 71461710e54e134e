"""Numbers in rising order, put in order only as far as somebody looks."""

from __future__ import annotations

import random

import pytest

from leased import rising
from leased.rising import Rising

NUMBERS = [n * n + 7 for n in range(3000)]


@pytest.fixture
def shuffled(monkeypatch: pytest.MonkeyPatch) -> Rising:
    """Of NUMBERS, so that a few are many."""
    monkeypatch.setattr(rising, "SORTED_AT_ONCE", 40)
    numbers = list(NUMBERS)
    random.Random(4).shuffle(numbers)
    return Rising(numbers)


@pytest.mark.parametrize("after", [0, 6, 7, 8, 1_000_006, 1_000_007, 1_000_008, NUMBERS[-2], NUMBERS[-1], 2**53])
def test_those_above_a_number_come_in_order(shuffled: Rising, after: int) -> None:
    expected = [n for n in NUMBERS if n > after]
    assert list(shuffled.after(after)) == expected
    assert list(shuffled.after(after)) == expected
    assert len(shuffled) == len(NUMBERS)


def test_pages_from_anywhere_agree_whatever_was_looked_at_before(shuffled: Rising) -> None:
    chance = random.Random(5)
    for _ in range(200):
        after = chance.randrange(NUMBERS[-1] + 10)
        page = shuffled.after(after)
        assert [n for _, n in zip(range(30), page, strict=False)] == [n for n in NUMBERS if n > after][:30]


def test_what_nobody_looks_at_is_not_put_in_order(shuffled: Rising) -> None:
    assert next(shuffled.after(0)) == 7
    assert sum(len(part) for part, sorted_ in zip(shuffled._parts, shuffled._in_order, strict=True) if sorted_) <= 40


def test_two_may_look_at_once(shuffled: Rising) -> None:
    first = shuffled.after(0)
    begun = [next(first) for _ in range(5)]
    assert list(shuffled.after(NUMBERS[1000])) == NUMBERS[1001:]
    late = shuffled.after(NUMBERS[2000])
    begun_late = [next(late) for _ in range(5)]
    begun += [next(first) for _ in range(200)]
    assert begun_late + list(late) == NUMBERS[2001:]
    assert begun + list(first) == NUMBERS


def test_none_are_none() -> None:
    assert list(Rising([]).after(0)) == []


def test_numbers_that_are_already_in_order_and_those_in_reverse_are_split_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rising, "SORTED_AT_ONCE", 40)
    assert list(Rising(list(NUMBERS)).after(7)) == NUMBERS[1:]
    assert list(Rising(NUMBERS[::-1]).after(7)) == NUMBERS[1:]
