"""Waits as long as other libraries let their callers wait: for ever, or past the longest wait the daemon takes."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Final, TypeVar

from leased.client.answers import Refusal, Unknown
from leased.client.errors import LeaseLost, LeaseRefused, OutcomeUnknown, RateLimited

if TYPE_CHECKING:
    from leased.client.held import HeldLease
    from leased.client.sync import Client

LOG = logging.getLogger(__name__)
LONGEST_WAIT_SECONDS: Final = 300.0  # of one place in a queue; whoever waits longer queues again, at the end
RETRY_SECONDS: Final = 1.0  # after an answer that nobody could give and that does not say when to ask again
LEAST_PAUSE_SECONDS: Final = 0.05

Granted = TypeVar("Granted")


def until_granted(
    ask: Callable[[float], Granted | Refusal | Unknown],
    seconds: float | None,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> Granted | Refusal:
    """Asks, with a wait of at most `LONGEST_WAIT_SECONDS` each time, until granted or `seconds` are over (None: never).

    What is refused at the end is returned.  An outcome still unknown at the end is raised as OutcomeUnknown, a limit still reached
    as RateLimited: neither says that somebody else has it.  Other errors, DaemonUnreachable first, are raised at once.
    """
    until = None if seconds is None else clock() + seconds
    while True:
        left = LONGEST_WAIT_SECONDS if until is None else max(0.0, min(until - clock(), LONGEST_WAIT_SECONDS))
        failure: Refusal | OutcomeUnknown | RateLimited
        pause = RETRY_SECONDS
        try:
            answer = ask(left)
        except (OutcomeUnknown, RateLimited) as failed:
            failure = failed
        else:
            if isinstance(answer, Unknown):
                failure, pause = OutcomeUnknown("lease", answer.reason), answer.retry_after_seconds
            elif isinstance(answer, Refusal):
                failure, pause = answer, LEAST_PAUSE_SECONDS
            else:
                return answer
        pause = max(pause, LEAST_PAUSE_SECONDS)
        if until is not None:
            pause = min(pause, until - clock())
            if pause <= 0:
                if isinstance(failure, Refusal):
                    return failure
                raise failure
        sleep(pause)


def entered(client: Client, key: str, wait: float, *, ttl: float, bind: str, holder: str | None = None) -> HeldLease | Refusal:
    """One attempt at a lease that renews itself; the refusal as a value.  Raises what `Client` raises, and OutcomeUnknown.

    Other libraries have no way to tell a caller that a lock was lost meanwhile: it is logged as a warning.
    """
    lease = client.lease(key, ttl, holder=holder, wait=wait, bind=bind, on_lost=_tell)
    try:
        return lease.__enter__()
    except LeaseRefused as refused:
        return refused.refusal


def _tell(lost: LeaseLost) -> None:
    LOG.warning("%s", lost)
