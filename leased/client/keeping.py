"""When a held lease is renewed, and when it is lost: the judgement every face shares.  No socket, no thread, no clock.

Judged by this host's boot clock alone: a renewal counts from before it was asked for, so the deadline here is never later than the
daemon's, and a lease past it is lost whether or not anybody answers.  Once lost it stays lost.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from leased.client.answers import Grant, Refusal, Released, Unknown
from leased.client.errors import LeaseLost, LeaseRefused, OutcomeUnknown

if TYPE_CHECKING:
    from leased.client.host_time import HostTime

INHERITED: Final = "it belongs to the process that forked this one"
_NEVER_ENTERED: Final = "it was never entered"
_LONGEST_RETRY_SECONDS: Final = 1.0  # between renewals that got no answer, or a tenth of the ttl if that is sooner


class Keeping:
    """One grant while it is held.  Instants are CLOCK_BOOTTIME seconds, handed in.  Not thread-safe: the face serialises its calls.

    `refused`: the daemon itself has said that the lease is no longer ours; other losses are only inferred.
    """

    __slots__ = ("_renew_at", "deadline", "ended", "grant", "inherited", "loss", "refused")

    def __init__(self) -> None:
        self.grant: Grant | None = None
        self.deadline = 0.0
        self.loss: str | None = None
        self.refused = False
        self.ended = False
        self.inherited = False
        self._renew_at = 0.0

    @property
    def entered(self) -> bool:
        return self.grant is not None or self.inherited

    def begin(self, grant: Grant) -> None:
        """The first renewal is due when a third of the ttl has passed."""
        self.grant = grant
        self.deadline = grant.deadline
        self._renew_at = grant.deadline - grant.ttl_seconds * 2 / 3

    def judged(self, now: float) -> str | None:
        """Why the lease is not known to be held; None while it is."""
        if self.inherited:
            return INHERITED
        if self.grant is None:
            return _NEVER_ENTERED
        if self.loss is None:
            if self.ended:
                return "it was released"
            if now >= self.deadline:
                self.loss = "no renewal was answered before its deadline"
        return self.loss

    def rest(self, now: float) -> float:
        """Seconds until there is something to do: a renewal, or to judge that the deadline has passed.  0 or less: now."""
        if self.ended or self.loss is not None:
            return 0.0
        return min(self._renew_at, self.deadline) - now

    def answered(self, answer: Grant | Refusal | Unknown | None, before: float, now: float) -> None:
        """A renewal asked for at `before` has come to its end.  None: it failed.  Only a refusal is a loss; else it is tried again.

        An answer past the old deadline finds the lease already lost.
        """
        assert self.grant is not None
        if isinstance(answer, Grant) and now < self.deadline:
            self.deadline = answer.deadline
            self._renew_at = before + self.grant.ttl_seconds / 3
        elif isinstance(answer, Refusal):
            self.refused = True
            self.loss = self.loss or f"its renewal was refused: {answer.reason}"
        else:
            self._renew_at = now + min(_LONGEST_RETRY_SECONDS, self.grant.ttl_seconds / 10)

    def renew_now(self) -> None:
        self._renew_at = 0.0

    def lose(self, why: str) -> None:
        """For what no clock and no answer can tell: nobody is there any more to renew it."""
        self.loss = self.loss or why

    def end(self) -> bool:
        """From now on nothing is renewed.  True the first time."""
        first, self.ended = not self.ended, True
        return first

    def left_to_parent(self) -> None:
        self.inherited = self.ended = True


def not_released(released: Released | None) -> str | None:
    """The loss that a release at the end of a block brings to light: the daemon knew nothing of the lease any more."""
    if released is not None and released.ended is False and not released.maybe:
        return f"its release was answered with {released.reason!r}"
    return None


class KeptLease:
    """What every face's lease tells about itself.  `terms` are those of `try_acquire`."""

    def __init__(self, key: str, terms: dict[str, Any], host_time: HostTime) -> None:
        self.key = key
        self.released: Released | None = None
        self._terms = terms
        self._time = host_time
        self._keeping = Keeping()

    def __repr__(self) -> str:
        kept = self._keeping
        if kept.grant is None:
            return f"{type(self).__name__}(key={self.key!r}, not held)"
        return (
            f"{type(self).__name__}(key={self.key!r}, generation={kept.grant.generation}, deadline={kept.deadline:.3f}, "
            f"loss={kept.loss!r})"
        )

    @property
    def generation(self) -> int:
        return self._grant.generation

    @property
    def fence(self) -> str:
        """The credential.  Raises LeaseLost in a forked child, which has no business with it."""
        if self._keeping.inherited:
            raise LeaseLost(self.key, INHERITED)
        return self._grant.fence

    @property
    def holder(self) -> str:
        return self._grant.holder

    @property
    def deadline(self) -> float:
        """CLOCK_BOOTTIME seconds up to which the lease is known to be held; moves with every renewal."""
        return self._keeping.deadline

    @property
    def lost(self) -> bool:
        """True once the lease is lost, or past its deadline without a renewal; then it stays true."""
        return self._judged() is not None

    def check(self) -> None:
        """Raises LeaseLost if the lease is not known to be held.  Asks nobody: the clock and the renewals tell."""
        loss = self._judged()
        if loss is not None:
            raise self._lost(loss)

    def _judged(self) -> str | None:
        return self._keeping.judged(self._time.now())

    def _lost(self, loss: str) -> LeaseLost:
        grant = self._keeping.grant
        return LeaseLost(self.key, loss, None if grant is None else grant.generation)

    @property
    def _grant(self) -> Grant:
        if self._keeping.grant is None:
            raise LeaseLost(self.key, _NEVER_ENTERED)
        return self._keeping.grant

    def _once(self) -> None:
        if self._keeping.entered:
            raise LeaseLost(self.key, "a lease is entered once; ask the client for a new one")


def granted(answer: Grant | Refusal | Unknown) -> Grant:
    """The grant that a block needs to begin.  Raises LeaseRefused, and OutcomeUnknown where nobody can tell."""
    if isinstance(answer, Refusal):
        raise LeaseRefused(answer)
    if isinstance(answer, Unknown):
        raise OutcomeUnknown("lease", answer.reply.get("text") or answer.reason)
    return answer
