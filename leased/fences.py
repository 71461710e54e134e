"""Fences: the credential of one grant, 63 bits of the operating system's randomness."""

from __future__ import annotations

import os
from typing import Final

from leased.model import MIN_FENCE

DRAWN_AT_ONCE: Final = 64  # one system call for as many; they wait in memory as bytes nobody has been told


class Fences:
    def __init__(self) -> None:
        self._drawn = b""

    def draw(self) -> int:
        """A number from MIN_FENCE to 2^63 - 1 that is never drawn again.  One draw in a thousand is too small and is drawn anew."""
        while True:
            if len(self._drawn) < 8:
                self._drawn = os.urandom(8 * DRAWN_AT_ONCE)
            fence = int.from_bytes(self._drawn[:8], "big") >> 1
            self._drawn = self._drawn[8:]
            if fence >= MIN_FENCE:
                return fence
