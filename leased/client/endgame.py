"""When a command that runs under a lease is told to end, and when it is made to.  No clock, no process: `now` comes in."""

from __future__ import annotations

from signal import SIGKILL, SIGTERM

from leased.light import NamedTuple

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Final

LEAST_TTL_SECONDS: Final = 1.0
"""Of `lease run`.  Below it there is no room for a renewal that is late, a TERM and a KILL on a busy machine."""

_AGAIN_SECONDS: Final = 0.05  # between kills, while somebody is still there: forked meanwhile, or stuck in the kernel
_MARGIN_OF_TTL: Final = 10  # the last tenth of the lease, at most a second, is kept for the KILL to be delivered and to take effect
_MARGIN_SECONDS: Final = 1.0
_GRACE_OF_TTL: Final = 3  # a TERM before its deadline comes at most a third of the ttl early: one renewal is late by then

LOST: Final = "lost"
UNRENEWED: Final = "unrenewed"
ORPHANED: Final = "orphaned"
LEFT_BEHIND: Final = "left behind"


class Terms(NamedTuple):
    """`on_lost`: term, kill or ignore.  `kill_after`: seconds from the TERM to the KILL, if the lease lasts that long."""

    ttl: float
    on_lost: str
    kill_after: float


class Endgame:
    """Told what is so, says what signal is due.  Deadlines are CLOCK_BOOTTIME seconds, as `now`."""

    def __init__(self, terms: Terms) -> None:
        self._terms = terms
        self._margin = min(_MARGIN_SECONDS, terms.ttl / _MARGIN_OF_TTL)
        self._grace = min(terms.kill_after, terms.ttl / _GRACE_OF_TTL)
        self._begun: float | None = None
        self.cause: str | None = None

    def look(self, now: float, deadline: float, cause: str | None) -> tuple[int | None, float]:
        """The signal to send to everybody now, or None; and when to look again, if nothing happens before.

        `cause`: why the command has to end, if anybody but the clock says so.  Ended once is ended: a renewal that comes late is too late.
        """
        ignoring = self._terms.on_lost == "ignore"
        last = float("inf") if ignoring else deadline - self._margin
        if self._begun is None:
            first = last if self._terms.on_lost == "kill" else last - self._grace
            if cause is None or (cause == LOST and ignoring):
                if now < first:
                    return None, first
                cause = UNRENEWED
            self._begun, self.cause = now, cause
            if self._terms.on_lost != "kill" or cause in {ORPHANED, LEFT_BEHIND}:
                kill_at = min(now + self._terms.kill_after, last)
                return (SIGTERM, kill_at) if now < kill_at else (SIGKILL, now + _AGAIN_SECONDS)
            return SIGKILL, now + _AGAIN_SECONDS
        kill_at = min(self._begun + self._terms.kill_after, last)
        if self._terms.on_lost == "kill" and self.cause in {LOST, UNRENEWED}:
            kill_at = self._begun
        return (None, kill_at) if now < kill_at else (SIGKILL, now + _AGAIN_SECONDS)
