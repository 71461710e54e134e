"""A lease held for the length of a `with` block, renewed by a thread at every third of its ttl.

Judged by this host's boot clock alone: a renewal counts from before it was asked for, so the deadline here is never later than the
daemon's, and a lease past it is lost whether or not anybody answers.  Once lost it stays lost.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final

from leased.client.answers import Grant, Refusal, Released
from leased.client.errors import LeasedClientError, LeaseLost, LeaseRefused, OutcomeUnknown

if TYPE_CHECKING:
    from leased.client.host_time import HostTime
    from leased.client.sync import Client

_LONGEST_RETRY_SECONDS: Final = 1.0  # between renewals that got no answer, or a tenth of the ttl if that is sooner


class HeldLease:
    """What `with client.lease(...)` gives.

    Entering raises LeaseRefused, or OutcomeUnknown where nobody can tell, and what `Client` raises.  Inside, `check()` before every
    step that must not be taken without the lease; better still, hand `generation` to the store that is written to.  `on_lost` is
    called once, by the renewing thread.  Leaving releases.  A block that ends without an exception although the lease was lost
    raises LeaseLost; an exception of the block is never replaced.  A daemon that cannot be reached for the release is no error:
    the lease ran to the end of the block, and will lapse (`released` is then None).
    In a forked child all methods raise LeaseLost and nothing is sent: the lease stays the parent's.
    """

    def __init__(
        self, client: Client, key: str, terms: dict[str, Any], host_time: HostTime, on_lost: Callable[[LeaseLost], None] | None
    ) -> None:
        self.key = key
        self.released: Released | None = None
        self._client = client
        self._terms = terms
        self._time = host_time
        self._on_lost = on_lost
        self._change = threading.Condition()  # guards all below
        self._grant: Grant | None = None
        self._deadline = 0.0
        self._renew_at = 0.0
        self._loss: str | None = None
        self._ended = False
        self._inherited = False
        self._renewer: threading.Thread | None = None

    def __repr__(self) -> str:
        if self._grant is None:
            return f"HeldLease(key={self.key!r}, not held)"
        return (
            f"HeldLease(key={self.key!r}, generation={self._grant.generation}, deadline={self._deadline:.3f}, loss={self._loss!r})"
        )

    def __enter__(self) -> HeldLease:
        if self._grant is not None or self._inherited:
            raise LeaseLost(self.key, "a lease is entered once; ask the client for a new one")
        answer = self._client.try_acquire(self.key, **self._terms)
        if isinstance(answer, Refusal):
            raise LeaseRefused(answer)
        if not isinstance(answer, Grant):
            raise OutcomeUnknown("lease", answer.reply.get("text") or answer.reason)
        self._grant = answer
        self._deadline = answer.deadline
        self._renew_at = answer.deadline - answer.ttl_seconds * 2 / 3
        self._client._keep(self)
        self._renewer = threading.Thread(target=self._renew_until_ended, name=f"leased-renewer-{answer.generation}", daemon=True)
        self._renewer.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, raised: BaseException | None, trace: TracebackType | None) -> None:
        self._judged()
        loss = _INHERITED if self._inherited else self._loss
        if not self._inherited:
            self.release()
            if loss is None and self.released is not None and self.released.ended is False and not self.released.maybe:
                loss = f"its release was answered with {self.released.reason!r}"
        if loss is not None and kind is None:
            raise LeaseLost(self.key, loss, self._held().generation)

    @property
    def generation(self) -> int:
        return self._held().generation

    @property
    def fence(self) -> str:
        """The credential.  Raises LeaseLost in a forked child, which has no business with it."""
        if self._inherited:
            raise LeaseLost(self.key, _INHERITED)
        return self._held().fence

    @property
    def holder(self) -> str:
        return self._held().holder

    @property
    def deadline(self) -> float:
        """CLOCK_BOOTTIME seconds up to which the lease is known to be held; moves with every renewal."""
        return self._deadline

    @property
    def lost(self) -> bool:
        """True once the lease is lost, or past its deadline without a renewal; then it stays true."""
        return self._judged() is not None

    def check(self) -> None:
        """Raises LeaseLost if the lease is not known to be held.  Asks nobody: the clock and the renewals tell."""
        loss = self._judged()
        if loss is not None:
            raise LeaseLost(self.key, loss, self._grant.generation if self._grant else None)

    def release(self) -> Released | None:
        """Ends the renewals, waits for one in flight, then releases.  Once; later calls return the same.

        None where the daemon did not answer: the lease lapses by itself.  Raises LeaseLost in a forked child.
        """
        if self._inherited:
            raise LeaseLost(self.key, _INHERITED)
        grant = self._held()
        with self._change:
            first, self._ended = not self._ended, True
            self._change.notify_all()
        if first:
            if self._renewer is not None and self._renewer is not threading.current_thread():
                self._renewer.join()
            try:
                self.released = self._client.release(grant)
            except LeasedClientError:
                pass
        return self.released

    def connection_lost(self) -> None:
        """A bound lease may have ended with the connection, or wants to be bound to the next: renew it now."""
        with self._change:
            if self._terms["bind"] != "none" and not self._ended:
                self._renew_at = 0.0
                self._change.notify_all()

    def left_to_parent(self) -> None:
        """In a forked child: this lease is the parent's, and the thread that renews it was not forked."""
        self._change = threading.Condition()
        self._inherited = True
        self._ended = True

    def _held(self) -> Grant:
        if self._grant is None:
            raise LeaseLost(self.key, "it was never entered")
        return self._grant

    def _judged(self) -> str | None:
        with self._change:
            if self._inherited:
                return _INHERITED
            if self._grant is None:
                return "it was never entered"
            if self._loss is None and not self._ended and self._time.now() >= self._deadline:
                self._loss = "no renewal was answered before its deadline"
            if self._loss is None and self._ended:
                return "it was released"
            return self._loss

    def _renew_until_ended(self) -> None:
        grant = self._held()
        while True:
            with self._change:
                while (
                    not self._ended and self._loss is None and (rest := min(self._renew_at, self._deadline) - self._time.now()) > 0
                ):
                    self._time.wait(self._change, rest)
            if self._judged() is not None:
                break
            self._renew_once(grant)
        if self._on_lost is not None and self._loss is not None:
            self._on_lost(LeaseLost(self.key, self._loss, grant.generation))

    def _renew_once(self, grant: Grant) -> None:
        """One renewal, bounded by the deadline.  Only a refusal is a loss; what fails is tried again until the deadline."""
        before = self._time.now()
        try:
            answer = self._client.renew(grant, ttl=grant.ttl_seconds, timeout=min(self._client.timeout, self._deadline - before))
        except LeasedClientError:
            answer = None
        with self._change:
            now = self._time.now()
            if isinstance(answer, Grant) and now < self._deadline:  # an answer past the old deadline finds the lease already lost
                self._deadline = answer.deadline
                self._renew_at = before + grant.ttl_seconds / 3
            elif isinstance(answer, Refusal):
                self._loss = self._loss or f"its renewal was refused: {answer.reason}"
            else:
                self._renew_at = now + min(_LONGEST_RETRY_SECONDS, grant.ttl_seconds / 10)


_INHERITED: Final = "it belongs to the process that forked this one"
