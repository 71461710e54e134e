"""What happens when the connection ends before the answer, for every face: no socket, no thread, no clock.

Everything is asked again on a new connection until the time is up.  A `lease` carries the same request_id, so it is the same attempt,
and one that waited queues again for the rest of its wait; renewals and checks may be said twice; what else a repeat can mean is for
the caller to tell, who is told that there was one.  Instants are seconds of a clock that does not step; the face hands them in.
"""

from __future__ import annotations

import os

from leased.client.errors import (
    ConnectionGone,
    DaemonUnreachable,
    LeasedClientError,
    OutcomeUnknown,
    ProtocolFault,
    RateLimited,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any, Final

LONGEST_WAIT_SECONDS: Final = 300.0  # the protocol's, repeated: importing leased.model costs a twentieth of `lease check`
RESTARTING: Final = frozenset({"starting", "shutting_down", "state_lost"})  # why a daemon that ends or begins decides nothing
FIRST_PAUSE_SECONDS: Final = 0.05  # a restarted daemon is back within a few of these
LONGEST_PAUSE_SECONDS: Final = 1.0
FOR_EVER: Final = float("inf")  # a deadline that does not come


class Attempt:
    """One question, over as many connections as it takes.  `seconds`: how long an answer may take, beyond `wait`.

    A face loops: send `fields(now)`; hand the reply to `settles`, or what was raised to `failed`; unless that settled it, pause for
    `pause(now)` and connect anew.  `repeated`: an earlier sending may have been carried out.
    """

    __slots__ = ("_fields", "_path", "_pause", "_started", "_wait", "_waiting", "_why", "deadline", "operation", "repeated")

    def __init__(self, path: str, operation: str, fields: Mapping[str, Any], seconds: float, wait: Any, now: float) -> None:
        self.operation = operation
        self.repeated = False
        self._fields = fields
        self._path = path
        self._started = now
        self._wait = wait
        self._waiting = _seconds(wait) if wait else 0.0
        self.deadline = now + seconds + self._waiting
        self._pause = 0.0  # the daemon may have restarted since the last call: then the first new connection is good
        self._why = ""

    def fields(self, now: float) -> Mapping[str, Any]:
        """What to send now: of a wait only what is left of it."""
        if not self._wait:
            return self._fields
        return {
            **self._fields,
            "wait_seconds": max(0.0, self._waiting - (now - self._started)) if self.repeated else self._wait,
        }

    def settles(self, reply: Mapping[str, Any], now: float) -> bool:
        """False where a caller that still wants to wait met a daemon that ends or begins: then it is to be asked again.

        Not for "superseded": another call has the place in the line.
        """
        if (
            not self._wait
            or reply.get("acquired", True) is not None
            or reply.get("reason") not in RESTARTING
            or now >= self._started + self._waiting
            or not self._repeatable
        ):
            return True
        self.repeated = True
        self._why = f"the daemon answered {reply['reason']!r}"
        return False

    def failed(self, wrong: LeasedClientError) -> None:
        """Returns where it is worth asking again; else raises: `wrong`, or OutcomeUnknown where an earlier sending may have counted."""
        if isinstance(wrong, ConnectionGone):
            self.repeated = self.repeated or wrong.sent
        elif not self.repeated or not isinstance(wrong, DaemonUnreachable | RateLimited | ProtocolFault):
            raise wrong
        elif isinstance(wrong, ProtocolFault):
            raise OutcomeUnknown(self.operation, str(wrong)) from None
        self._why = str(wrong)

    def pause(self, now: float) -> float:
        """Seconds until the next connection.  Raises OutcomeUnknown or DaemonUnreachable when the time is up."""
        pause = self._pause
        if (self.repeated and not self._repeatable) or now + pause >= self.deadline:
            raise OutcomeUnknown(self.operation, self._why) if self.repeated else DaemonUnreachable(self._path, self._why)
        self._pause = min(2 * pause or FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS)
        return jittered(pause)

    def hangs_up_after(self, wrong: LeasedClientError) -> bool:
        """Is the connection to be closed, so that a grant still on its way goes to somebody else?"""
        return self.operation == "lease" and isinstance(wrong, OutcomeUnknown)

    @property
    def _repeatable(self) -> bool:
        return self.operation != "lease" or self._fields.get("request_id") is not None


def jittered(pause: float) -> float:
    """Half of `pause` to all of it: not all clients of a restarted daemon come back at one instant."""
    return pause * (0.5 + os.urandom(1)[0] / 512)


def _seconds(wait: Any) -> float:
    """A wait as this side counts it; whether it is acceptable is for the daemon to say."""
    try:
        return min(max(0.0, float(wait)), LONGEST_WAIT_SECONDS)  # in this order: of NaN it makes 0
    except (TypeError, ValueError, OverflowError):
        return 0.0
