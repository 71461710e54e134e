"""What may be decided at all just now: starting, waiting out leases that may have been forgotten, open, or draining."""

from __future__ import annotations

from leased.rules import MIN_RETRY_SECONDS, UNKNOWN_RETRY_SECONDS


class Unknown(Exception):
    """This request's answer is null.  `reason` is told to the caller."""

    def __init__(self, reason: str, retry_after: float = UNKNOWN_RETRY_SECONDS) -> None:
        super().__init__(reason)
        self.reason = reason
        self.retry_after = retry_after


class Gate:
    """`closed`: no grant and no renewal, and why ("starting", "shutting_down", "state_lost"); checks and releases go on.  `shut`:
    nothing is decided any more.  `no_grant_before` (CLOCK_BOOTTIME) is 0.0 when nothing can have been forgotten; once it has passed,
    grants still wait until the ledger says so too (`settled`).  `wait_out` is the value in force: what is flushed in the ledger."""

    def __init__(self, wait_out: float, no_grant_before: float = 0.0, *, settled: bool = True, closed: str = "") -> None:
        self.wait_out = wait_out
        self.no_grant_before = no_grant_before
        self.settled = settled
        self.closed = closed
        self.shut = ""

    def admit(self) -> None:
        """For `lease` and `renew`.  Raises Unknown."""
        if self.closed or self.shut:
            raise Unknown(self.shut or self.closed)

    def admit_reading(self) -> None:
        """For `release`, `check` and the views.  Raises Unknown."""
        if self.shut:
            raise Unknown(self.shut)

    def admit_unknown_key(self, boot: float) -> None:
        """For a key no live lease is known of: it may be one of the forgotten.  Raises Unknown."""
        if not self.settled or boot < self.no_grant_before:
            raise Unknown("recovering", max(MIN_RETRY_SECONDS, self.no_grant_before - boot))

    def recovering(self, boot: float) -> bool:
        return not self.settled or boot < self.no_grant_before
