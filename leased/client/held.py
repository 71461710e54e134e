"""A lease held for the length of a `with` block, renewed by a thread at every third of its ttl.  When it is lost: see keeping.py."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Any

from leased.client.answers import Released
from leased.client.errors import LeasedClientError, LeaseLost
from leased.client.keeping import INHERITED, KeptLease, granted, not_released

if TYPE_CHECKING:
    from leased.client.host_time import HostTime
    from leased.client.sync import Client


class HeldLease(KeptLease):
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
        super().__init__(key, terms, host_time)
        self._client = client
        self._on_lost = on_lost
        self._change = threading.Condition()  # guards what is kept
        self._renewer: threading.Thread | None = None

    def __enter__(self) -> HeldLease:
        self._once()
        grant = granted(self._client.try_acquire(self.key, **self._terms))
        self._keeping.begin(grant)
        renewer = threading.Thread(target=self._renew_until_ended, name=f"leased-renewer-{grant.generation}", daemon=True)
        try:
            self._client._keep(self)
            self._time.begins(renewer)
            renewer.start()
            self._renewer = renewer
        except BaseException:  # no thread can be started, or an interrupt: there will be no block to end the lease
            self._time.ends(renewer)
            self.release()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, raised: BaseException | None, trace: TracebackType | None) -> None:
        self._judged()
        kept = self._keeping
        loss = INHERITED if kept.inherited else kept.loss
        if not kept.inherited:
            self.release()
            loss = loss or not_released(self.released)
        if loss is not None and kind is None:
            raise self._lost(loss)

    def release(self) -> Released | None:
        """Ends the renewals, waits for one in flight, then releases.  Once; later calls return the same.

        None where the daemon did not answer: the lease lapses by itself.  Raises LeaseLost in a forked child.
        """
        if self._keeping.inherited:
            raise LeaseLost(self.key, INHERITED)
        grant = self._grant
        with self._change:
            first = self._keeping.end()
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
            if self._terms["bind"] != "none" and not self._keeping.ended:
                self._keeping.renew_now()
                self._change.notify_all()

    def left_to_parent(self) -> None:
        """In a forked child: this lease is the parent's, and the thread that renews it was not forked."""
        self._change = threading.Condition()
        self._keeping.left_to_parent()

    def _judged(self) -> str | None:
        with self._change:
            return super()._judged()

    def _renew_until_ended(self) -> None:
        try:
            while True:
                with self._change:
                    while (rest := self._keeping.rest(self._time.now())) > 0:
                        self._time.wait(self._change, rest)
                if self._judged() is not None:
                    break
                self._renew_once()
            if self._on_lost is not None and self._keeping.loss is not None:
                self._on_lost(self._lost(self._keeping.loss))
        finally:
            self._time.ends(threading.current_thread())

    def _renew_once(self) -> None:
        """One renewal, bounded by the deadline."""
        grant = self._grant
        before = self._time.now()
        try:
            answer = self._client.renew(grant, ttl=grant.ttl_seconds, timeout=min(self._client.timeout, self.deadline - before))
        except Exception:  # of this library's making too: it is tried again, and the deadline judges
            answer = None
        with self._change:
            self._keeping.answered(answer, before, self._time.now())
