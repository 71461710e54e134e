"""What the service manager hears of a running daemon: that the lane turns, and in one sentence how it stands.

The proof is a round: the task that keeps the time asks, by a descriptor the lane waits for like any other; the lane takes that up in a
turn, and the ping leaves after what that turn decided.  Whichever of the two hangs, there is silence, and the watchdog ends the process.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from typing import Final, NamedTuple

from leased.clock import rfc3339
from leased.health import reasons
from leased.lessor import Lessor
from leased.systemd import Notifier

PINGS: Final = 3  # in a watchdog's time: one that is lost or late does not matter
COUNT_SECONDS: Final = 10.0  # between two sentences that differ only in the number of leases


class Standing(NamedTuple):
    """`words` change when something has happened, `leases` with every grant."""

    words: str
    leases: int

    def __str__(self) -> str:
        return f"{self.words}; {self.leases} lease{'' if self.leases == 1 else 's'} held"


def standing(lessor: Lessor, upstream: str = "") -> Standing:
    """How the daemon stands, for an operator who looks at `systemctl status`.  `upstream`: what is wrong there, if anything is."""
    why = reasons(lessor)
    words = "serving"
    if why == ["recovering"]:
        words = "recovering: keys not known are not granted until the wait is over"
        now = lessor.clock.now()
        if (left := lessor.gate.no_grant_before - now.boot) > 0:
            words = f"recovering until {rfc3339(round(now.wall + left))[:19]}Z: keys not known are not granted before"
    elif why == ["starting"]:
        words = "starting: checks and releases are served, grants wait for the first flush"
    elif why:
        words = f"grants may be refused ({', '.join(why)}); what is held stays held"
    return Standing(f"{words}; upstream: {upstream}" if upstream else words, len(lessor.index))


class Pulse:
    """`readable(descriptor, then)` calls `then` in the turn that finds the descriptor readable, `after_turn(call)` after that turn."""

    def __init__(
        self,
        notifier: Notifier,
        standing: Callable[[], Standing],
        readable: Callable[[int, Callable[[], None]], None],
        after_turn: Callable[[Callable[[], None]], None],
    ) -> None:
        self._notifier = notifier
        self._standing = standing
        self._after_turn = after_turn
        self._every = notifier.watchdog_seconds / PINGS
        self._told = Standing("", 0)
        self._asked_at = self._told_at = -math.inf
        self._bell = -1
        if notifier:
            self._bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
            readable(self._bell, self._heard)

    def each_second(self, boot: float) -> None:
        """From the task that keeps the time.  Asks for a ping when one is due, or when there is something new to say."""
        if self._bell < 0:
            return
        now = self._standing()
        news = now.words != self._told.words or (now.leases != self._told.leases and boot >= self._told_at + COUNT_SECONDS)
        if news or boot >= self._asked_at + self._every:
            self._asked_at = boot
            if news:
                self._told_at = boot
            os.eventfd_write(self._bell, 1)

    def _heard(self) -> None:
        """In a turn of the lane."""
        os.eventfd_read(self._bell)
        self._after_turn(self._beat)

    def _beat(self) -> None:
        now = self._standing()
        lines = ["WATCHDOG=1"] if self._every < math.inf else []
        if now != self._told:
            self._told = now
            lines.append(f"STATUS={now}")
        if lines:
            self._notifier.say(*lines)
