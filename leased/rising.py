"""Many numbers in rising order, put in order only as far as somebody looks.

To sort a million generations takes half a second, which neither a start nor whoever lists a page of them should have to wait for.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from typing import Final

SORTED_AT_ONCE: Final = 4096  # a millisecond
_SAMPLE: Final = 31


class Rising:
    """`numbers` are different and belong to this object from now on."""

    def __init__(self, numbers: list[int]) -> None:
        self._parts: list[list[int]] = [numbers]  # every number of a part is below those of the next
        self._least: list[int] = [0]  # of each part, a number that is above those of the part before and not above its own
        self._in_order: list[bool] = [False]

    def __len__(self) -> int:
        return sum(map(len, self._parts))

    def after(self, number: int) -> Iterator[int]:
        """Those above `number`, which is not below 0.  Before the first of a million come two tenths of a second, and hardly any for the
        others of a page."""
        wanted: int | None = number + 1
        while wanted is not None:
            at = bisect_right(self._least, wanted) - 1
            part = self._parts[at]
            if not self._in_order[at]:
                if len(part) > SORTED_AT_ONCE:
                    self._split(at)
                    continue
                part.sort()
                self._in_order[at] = True
            rest = part[bisect_left(part, wanted) :]
            wanted = self._least[at + 1] if at + 1 < len(self._least) else None
            yield from rest  # meanwhile parts may be split, for somebody else

    def _split(self, at: int) -> None:
        part = self._parts[at]
        pivot = sorted(part[:: len(part) // _SAMPLE])[_SAMPLE // 2]
        self._parts[at : at + 1] = [[each for each in part if each < pivot], [each for each in part if each >= pivot]]
        self._least.insert(at + 1, pivot)
        self._in_order.insert(at + 1, False)
