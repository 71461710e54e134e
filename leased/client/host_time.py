"""The clock a client judges its leases by, and waiting on it.  Tests hand in their own."""

from __future__ import annotations

import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    import threading
    from typing import Final

    from leased.client.face import Face, Gate

_SLICE_SECONDS: Final = 1.0


class HostTime:
    """CLOCK_BOOTTIME, in seconds: it never steps and it counts suspend."""

    def now(self) -> float:
        return time.clock_gettime(time.CLOCK_BOOTTIME)

    def wait(self, change: threading.Condition, seconds: float) -> None:
        """Waits, with `change` held, until it is notified or `seconds` have passed."""
        change.wait(seconds)

    async def rest(self, face: Face, gate: Gate, seconds: float, keeper: object) -> None:
        """Waits until `gate` is open, or `seconds` have passed, or a second has: loops do not count suspend, and must look again."""
        await gate.passed(face.now() + min(seconds, _SLICE_SECONDS))

    def begins(self, keeper: object) -> None:
        """A thread (`keeper`) or a task (any name for it) will sleep by this clock until `ends`.  For clocks that tests move."""

    def ends(self, keeper: object) -> None:
        """It sleeps no more."""
