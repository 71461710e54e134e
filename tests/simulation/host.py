"""The host as a simulated daemon sees it: its clocks, and who keeps descriptors for it.

Clocks show multiples of QUANTUM, which a float and a whole number of nanoseconds both hold exactly, so that "at the deadline" means at the
deadline.
"""

from __future__ import annotations

import os
from typing import Any

import trio

from leased.clock import Now

pause = trio.sleep  # of virtual time: the clock of every run is trio's MockClock, and nothing sleeps
QUANTUM = 2.0**-9
BOOTED_AT = 64.0  # CLOCK_BOOTTIME when a daemon can first run
WALL_AT = 1_800_000_000.0


class SimulatedClock:
    """`booted` is the world's time at which CLOCK_BOOTTIME was 0."""

    def __init__(self) -> None:
        self.booted = -BOOTED_AT
        self.boots = 1
        self.wall_offset = WALL_AT

    @property
    def time(self) -> float:
        """The world's own: it never steps, and knows nothing of boots."""
        return trio.current_time() // QUANTUM * QUANTUM

    def now(self) -> Now:
        time = self.time
        return Now(time - self.booted, self.wall_offset + time)

    def boot_id(self) -> str:
        return f"boot-{self.boots}"

    def reboot(self) -> None:
        self.boots += 1
        self.booted = self.time - BOOTED_AT


class Keeper:
    """In place of systemd: its descriptor store, which outlives the daemon, and its ear; or, when absent, in place of its absence."""

    def __init__(self, *, present: bool) -> None:
        self._present = present
        self.watchdog_seconds = 3.0
        self.said: list[str] = []  # of the present life
        self.kept: dict[str, int] = {}

    def __bool__(self) -> bool:
        return self._present

    def say(self, *lines: str) -> None:
        self.said = [*self.said[-99:], *lines]

    def keep(self, name: str, descriptor: int) -> None:
        self.drop(name)
        self.kept[name] = os.dup(descriptor)

    def drop(self, name: str) -> None:
        if name in self.kept:
            os.close(self.kept.pop(name))

    def handed_back(self) -> dict[str, int]:
        return {name: os.dup(descriptor) for name, descriptor in self.kept.items()}

    def clear(self) -> None:
        for name in list(self.kept):
            self.drop(name)


class InOrder(dict[Any, None]):
    """A set that is walked in the order of insertion: the addresses of objects must not decide who is served first."""

    def add(self, item: Any) -> None:
        self[item] = None

    def discard(self, item: Any) -> None:
        self.pop(item, None)
