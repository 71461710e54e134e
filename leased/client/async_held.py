"""A lease held for the length of an `async with` block.  When it is renewed, and when it is lost: see keeping.py.

Two tasks in the background keep it: one renews; the other watches the deadline, so that a renewal that hangs in the socket does not
keep it from ending the block in time.  Neither belongs to a nursery or task group: what leaves the block is never wrapped in a group.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final

from leased.client.answers import Released
from leased.client.errors import LeasedClientError, LeaseLost
from leased.client.face import Background, Face, Gate, Scope, running
from leased.client.keeping import INHERITED, KeptLease, granted, not_released

if TYPE_CHECKING:
    from leased.client.async_client import AsyncClient
    from leased.client.host_time import HostTime

RELEASE_SECONDS: Final = (
    2.0  # how long a cancelled task is kept for the release: it takes a millisecond, or the daemon is in trouble
)
LOST_RELEASE_SECONDS: Final = 0.5  # the same for a lease that is lost: nobody holds it any more, and the caller is to know soon


class AsyncHeldLease(KeptLease):
    """What `async with client.lease(...)` gives.

    Entering raises LeaseRefused, or OutcomeUnknown where nobody can tell, and what `AsyncClient` raises.  When the lease is lost, the
    block is cancelled, and LeaseLost comes out of it, bare; at the latest at the deadline that this host's clock knows, even if the
    daemon says nothing.  Code between two awaits cannot be cancelled: there, `check()`, or hand `generation` to the store.
    An exception of the block itself comes out as it is, whatever became of the lease.  A cancellation from outside passes through.
    Leaving releases, which holds a cancelled task up for at most RELEASE_SECONDS; a daemon that does not answer is no error: the lease
    will lapse (`released` is then None).
    In a forked child all methods raise LeaseLost and nothing is sent: the lease stays the parent's.
    """

    def __init__(self, client: AsyncClient, key: str, terms: dict[str, Any], host_time: HostTime) -> None:
        super().__init__(key, terms, host_time)
        self._client = client
        self._face: Face | None = None
        self._scope: Scope | None = None
        self._keepers: list[Background] = []
        self._gates: dict[str, Gate] = {}
        self._ending: list[Gate] = []  # of tasks that wait for the end which another has begun
        self._over = False

    async def __aenter__(self) -> AsyncHeldLease:
        """Cancelled, nothing is held."""
        self._once()
        self._face = running()
        self._keeping.begin(granted(await self._client.try_acquire(self.key, **self._terms)))
        if (loss := self._judged()) is not None:  # it took longer than the ttl to get here
            await self._end()
            raise self._lost(loss)
        self._client._keep(self)
        self._scope = self._face.scope()
        self._scope.enter()
        for keeper, work in (("renewer", self._keep_renewed), ("watcher", self._watch_deadline)):
            self._time.begins((id(self), keeper))
            self._keepers.append(self._face.spawn(partial(self._guarded, work), partial(self._left, keeper)))
        return self

    async def __aexit__(self, kind: type[BaseException] | None, raised: BaseException | None, trace: TracebackType | None) -> None:
        assert self._scope is not None
        self._judged()
        loss = INHERITED if self._keeping.inherited else self._keeping.loss
        cancelled = False
        try:
            cancelled = self._scope.exit(kind, raised, trace)
        finally:
            await self._end()
        if kind is None or cancelled:
            loss = loss or not_released(self.released)
            if loss is not None:
                raise self._lost(loss) from None

    async def release(self) -> Released | None:
        """Ends the renewals, then releases.  Once; later calls return the same.  Shielded from cancellation.

        None where the daemon did not answer: the lease lapses by itself.  Raises LeaseLost in a forked child.
        """
        if self._keeping.inherited:
            raise LeaseLost(self.key, INHERITED)
        self._grant  # noqa: B018  raises where nothing was ever held
        await self._end()
        return self.released

    def connection_lost(self) -> None:
        """A bound lease may have ended with the connection, or wants to be bound to the next: renew it now."""
        if self._terms["bind"] != "none" and not self._keeping.ended:
            self._keeping.renew_now()
            self._wake()

    def left_to_parent(self) -> None:
        """In a forked child: this lease is the parent's, and so is the loop that renews it."""
        self._keeping.left_to_parent()

    # ---- in the background

    async def _keep_renewed(self) -> None:
        while self._judged() is None:
            rest = self._keeping.rest(self._time.now())
            if rest > 0:
                await self._rest("renewer", rest)
            else:
                await self._renew_once()

    async def _watch_deadline(self) -> None:
        while self._judged() is None:
            await self._rest("watcher", self.deadline - self._time.now())

    async def _guarded(self, work: Callable[[], Awaitable[None]]) -> None:
        try:
            await work()
        except Exception as wrong:  # a fault of this library: nobody renews any more, and the block must not go on as if
            self._keeping.lose(f"its renewals failed: {type(wrong).__name__}")

    def _left(self, keeper: str) -> None:
        """A keeper has come to its end.  Before the block's, that is a loss, if only because somebody cancelled the keeper."""
        self._time.ends((id(self), keeper))
        if not self._keeping.ended:
            self._keeping.lose("its renewals were cancelled")
            assert self._scope is not None
            self._scope.cancel()
            self._wake()

    async def _renew_once(self) -> None:
        """One renewal, bounded by the deadline."""
        grant = self._grant
        before = self._time.now()
        try:
            answer = await self._client.renew(
                grant, ttl=grant.ttl_seconds, timeout=min(self._client.timeout, self.deadline - before)
            )
        except LeasedClientError:
            answer = None
        self._keeping.answered(answer, before, self._time.now())

    async def _rest(self, keeper: str, seconds: float) -> None:
        assert self._face is not None
        gate = self._gates[keeper] = self._face.gate()
        await self._time.rest(self._face, gate, seconds, (id(self), keeper))

    def _wake(self) -> None:
        for gate in self._gates.values():
            gate.open()

    # ---- the end

    async def _end(self) -> None:
        """Once: no renewal after this, and, unless the daemon itself has ended the lease, a release.  Shielded, bounded in time.

        Who comes second waits until the first is done; a cancellation ends that wait."""
        first = self._keeping.end()
        if self._over or self._keeping.inherited:
            return
        assert self._face is not None
        if not first:
            self._ending.append(self._face.gate())
            await self._ending[-1].passed(self._face.now() + RELEASE_SECONDS)
            return
        for keeper in self._keepers:
            keeper.cancel()
        try:
            await self._face.shielded(self._let_go, RELEASE_SECONDS if self._keeping.loss is None else LOST_RELEASE_SECONDS)
        finally:
            self._over = True
            for gate in self._ending:
                gate.open()

    async def _let_go(self) -> None:
        for keeper in self._keepers:
            await keeper.ended()
        if not self._keeping.refused:
            try:
                self.released = await self._client.release(self._grant)
            except LeasedClientError:
                pass
