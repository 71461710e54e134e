"""The judge of what a watcher heard of one key: silence, inventions and a wrong order are seen, and what came to nothing may be left out."""

from __future__ import annotations

from hearing import _one_key
from parties import NEVER, Told

PLACE = ("local", "k")
GRANT, RENEWAL, LAPSE, NEXT = ("granted", 1), ("renewed", 1), ("lapsed", 1), ("granted", 2)


def due(what: tuple[str, int], *, optional: bool = False) -> Told:
    return Told(what[0], PLACE, None, "h", what[1], optional=optional)


def complaints(
    expected: list[Told], came: list[tuple[str, int]], earlier: set[tuple[str, int]] | None = None, *, gaps: bool = False
) -> list[str]:
    return list(_one_key(PLACE, expected, came, earlier or set(), ends=NEVER, gaps=gaps))


def test_all_that_was_due_in_order_is_right() -> None:
    assert complaints([due(GRANT), due(RENEWAL), due(LAPSE)], [GRANT, RENEWAL, LAPSE]) == []


def test_silence_is_seen() -> None:
    (complaint,) = complaints([due(GRANT), due(LAPSE)], [GRANT])
    assert "not told" in complaint
    assert complaints([due(GRANT), due(RENEWAL), due(LAPSE)], [GRANT, LAPSE])


def test_a_wrong_order_and_what_never_was_are_seen() -> None:
    assert complaints([due(GRANT), due(LAPSE)], [LAPSE, GRANT])
    assert complaints([due(GRANT)], [GRANT, NEXT])
    assert complaints([due(GRANT), due(RENEWAL), due(LAPSE)], [GRANT, RENEWAL, RENEWAL, LAPSE])


def test_of_a_renewal_that_was_taken_back_and_one_that_stood_one_is_told() -> None:
    """They look alike: which of the two it was cannot be heard."""
    expected = [due(GRANT), due(RENEWAL, optional=True), due(RENEWAL), due(LAPSE)]
    assert complaints(expected, [GRANT, RENEWAL, LAPSE]) == []
    assert complaints(expected, [GRANT, RENEWAL, RENEWAL, LAPSE]) == []
    assert complaints(expected, [GRANT, LAPSE])
    assert complaints(expected, [GRANT, RENEWAL, RENEWAL, RENEWAL, LAPSE])
    assert complaints(expected[:3], [GRANT])


def test_a_gap_excuses_silence_and_no_invention() -> None:
    assert complaints([due(GRANT), due(RENEWAL), due(LAPSE)], [LAPSE], gaps=True) == []
    assert complaints([due(GRANT), due(LAPSE)], [NEXT], gaps=True)


def test_what_was_decided_before_the_watch_began_may_be_told_in_it() -> None:
    assert complaints([due(LAPSE)], [GRANT, LAPSE], {GRANT}) == []
    assert complaints([due(LAPSE)], [GRANT, LAPSE])
