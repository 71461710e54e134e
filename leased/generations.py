"""Generations: one counter for the daemon, never below any number it ever handed out.

next = max(last + 1, wall clock in µs); while that clock is past the mark, max(last + 1, mark - 30 s).  `mark` is the high-water mark
that is flushed in the ledger: nobody is told a generation above it, so whatever is lost, a start from the mark can only jump forward.
Because the number follows the wall clock, an old backup or a lost directory jumps forward too, and it tells one tenant nothing of
another's activity.
"""

from __future__ import annotations

from typing import Final

from leased.errors import StateRefused
from leased.model import MAX_GENERATION

MICROSECONDS: Final = 1_000_000
BLOCK: Final = 60 * MICROSECONDS  # raised one minute at a time: one flush a minute at most while idle
RAISE_WITHIN: Final = 30 * MICROSECONDS  # long before it is needed, so that no grant waits for it
LAST_WALL_SECONDS: Final = 7_258_118_400.0  # 2200-01-01; 2^53 µs is the year 2255


def check_wall(wall: float) -> None:
    """Raises StateRefused for a wall clock no generation could follow."""
    if wall >= LAST_WALL_SECONDS:
        raise StateRefused("the wall clock is past the year 2200: generations follow it, so set the clock before starting leased")


HEADROOM: Final = MICROSECONDS  # how far above the mark may be decided on: a million grants while one flush is under way


class Generations:
    """`last` and `mark` are generations; `raising` is the mark that has been sent to be flushed, 0 when none."""

    def __init__(self, last: int, mark: int) -> None:
        self.last = last
        self.mark = mark
        self.raising = 0

    def peek(self, wall: float) -> int | None:
        """The next generation; None when there is none left below 2^53 or within HEADROOM of the mark.  Nothing is used up.

        One above the mark may be decided on but must not be told to anybody before the raised mark is flushed.  A wall clock past the mark has
        stepped, or the host slept: half a minute's worth of numbers below the mark is left, which lasts until the mark has followed.  They
        are above all that was handed out, for the mark was a whole block above the wall clock when it was raised.
        """
        clock = int(min(wall, LAST_WALL_SECONDS) * MICROSECONDS)
        if clock > self.mark:
            clock = self.mark - RAISE_WITHIN
        following = self.last + 1
        if clock > following:
            following = clock
        return following if following <= min(MAX_GENERATION, self.mark + HEADROOM) else None

    def wanted_mark(self, wall: float) -> int:
        """The mark to flush now, or 0 when the present one will do for a while."""
        reached = max(self.last, int(min(wall, LAST_WALL_SECONDS) * MICROSECONDS))
        if self.raising or reached <= self.mark - RAISE_WITHIN:
            return 0
        return min(MAX_GENERATION, max(self.mark, reached) + BLOCK)

    def raised(self) -> None:
        """The mark that was sent has been flushed."""
        self.mark = max(self.mark, self.raising)
        self.raising = 0
