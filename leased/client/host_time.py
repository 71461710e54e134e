"""The clock a client judges its leases by, and waiting on it.  Tests hand in their own."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import threading


class HostTime:
    """CLOCK_BOOTTIME, in seconds: it never steps and it counts suspend."""

    def now(self) -> float:
        return time.clock_gettime(time.CLOCK_BOOTTIME)

    def wait(self, change: threading.Condition, seconds: float) -> None:
        """Waits, with `change` held, until it is notified or `seconds` have passed."""
        change.wait(seconds)
