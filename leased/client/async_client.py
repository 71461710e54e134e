"""`AsyncClient`: the asynchronous face, one for trio and asyncio.  Which of them runs is found out at each call."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Coroutine
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar, overload

from leased.client import questions
from leased.client.answers import Checked, Grant, Refusal, Released, Revoked, Unknown
from leased.client.async_calling import AsyncCaller
from leased.client.async_held import RELEASE_SECONDS, AsyncHeldLease
from leased.client.async_leaving import Unsure, left, ours
from leased.client.core import draw_request_id
from leased.client.errors import LeasedClientError
from leased.client.face import running

if TYPE_CHECKING:
    from leased.client.async_watching import AsyncWatch
    from leased.client.decorating import AsyncLeasing
    from leased.client.scopes import ResumePacket, SwitchState

P = ParamSpec("P")
R = TypeVar("R")


class AsyncClient(AsyncCaller):
    """A connection to the daemon, made when first needed, for all tasks of one loop.  The parameters are those of `Client`.

    Every method may raise DaemonUnreachable (nothing was sent), OutcomeUnknown (no answer in time), InvalidArgument,
    PermissionDenied, RateLimited and ProtocolFault; and NoLoop outside of trio and asyncio.  A method that is cancelled may have been
    carried out, but for `try_acquire` and `lease`, which leave nothing held behind.
    """

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()

    async def try_acquire(
        self,
        key: str,
        ttl: float = 60,
        *,
        holder: str | None = None,
        scope: str | None = None,
        wait: float = 0,
        fence: str | None = None,
        bind: str = "none",
        request_id: str | None = None,
    ) -> Grant | Refusal | Unknown:
        """As `Client.try_acquire`.  Cancelled, it leaves the line, unbilled, and gives back what it may have been granted meanwhile, which
        holds the cancellation up for at most 2 s; but for a renewal, with `fence`, which stands."""
        label = holder or self.holder
        question = questions.lease(
            key, label, ttl, scope=scope, wait=wait, fence=fence, bind=bind, request_id=request_id or draw_request_id()
        )
        grant: Grant | None = None
        try:
            answer = await self._answer(question)
            if isinstance(answer, Grant) and wait:
                grant = answer
                return questions.dated(grant) or questions.dated_by(grant, await self.renew(grant))
            return answer
        except (Exception, GeneratorExit):  # the latter: a coroutine that is thrown away may wait for nothing more
            raise
        except BaseException:
            if fence is None:

                async def give_back() -> None:
                    await self._give_back(grant, question)

                await running().shielded(give_back, RELEASE_SECONDS)
            raise

    async def _give_back(self, grant: Grant | None, question: questions.Question[questions.Acquired]) -> None:
        """The same attempt once more: it takes the place of the one that was cancelled, and is told what that was granted."""
        key, holder, request_id = (question.fields[name] for name in ("key", "holder", "request_id"))
        try:
            answer: questions.Acquired | None = grant
            sure = False
            if answer is None and question.wait and not ours((await self.check(key)).reply, holder):  # decided after the lease
                try:
                    reply = await left(running(), self.socket, question.fields)
                    answer = None if reply is None else question.understood(reply, self._time.now(), True)
                    sure = True
                except Unsure:
                    pass
            if answer is None and not sure:
                answer = await self._answer(questions.lease(key, holder, request_id=request_id))
            if isinstance(answer, Grant):
                await self.release(answer)
        except LeasedClientError:
            pass  # then nobody renews it, and it lapses

    async def renew(
        self,
        key: str | Grant,
        fence: str | None = None,
        *,
        holder: str | None = None,
        ttl: float | None = None,
        timeout: float | None = None,
    ) -> Grant | Refusal | Unknown:
        """Renews a Grant, or the lease on `key` with `fence` and `holder`; `ttl` defaults to its own.  Never a fresh grant."""
        return await self._answer(questions.renew(key, fence, holder, self.holder, ttl), timeout)

    async def release(self, key: str | Grant, fence: str | None = None, *, holder: str | None = None) -> Released:
        """Ends a Grant, or the lease on `key` whose fence this is.  True if this call ended it."""
        return await self._answer(questions.release(key, fence, holder))

    async def check(self, key: str, generation: int | None = None) -> Checked:
        """Who holds `key`?  With `generation`, `current` tells whether exactly that lease is live."""
        return await self._answer(questions.check(key, generation))

    async def list(
        self, *, scope: str | None = None, holder: str | None = None, page: int = 100, all: bool = False
    ) -> AsyncIterator[dict[str, Any]]:
        """The namespace's live leases, oldest generation first, fetched `page` at a time (1 to 1000) as they are consumed.

        `all` (operators only): every namespace.
        """
        pages = questions.Pages(scope, holder, page, all)
        while not pages.over:
            for lease in pages.took(await self._answer(pages.question)):
                yield lease

    async def revoke(
        self, key: str | None = None, reason: str = "", *, key_hash: str | None = None, namespace: str | None = None
    ) -> Revoked:
        """Ends somebody's lease by force (operators only).  `reason` is logged.  Exactly one of `key` and `key_hash`."""
        return await self._answer(questions.revoke(key, reason, key_hash, namespace))

    async def heartbeat(self, scope: str, expect_within: float, agent_id: str | None = None) -> SwitchState:
        """Arms the dead-man switch of `scope`; see `Client.heartbeat`."""
        from leased.client.scopes import SwitchState

        fields = {"scope": scope, "expect_within_seconds": expect_within, "agent_id": agent_id}
        return SwitchState(await self.call("heartbeat", **fields))

    async def disarm(self, scope: str) -> SwitchState:
        """Switches the dead-man switch of `scope` off.  Its leases stay."""
        from leased.client.scopes import SwitchState

        return SwitchState(await self.call("heartbeat", scope=scope, disarm=True))

    async def resume_packet(self, scope: str) -> ResumePacket:
        """What a successor needs to take up `scope`: its live leases, and what its switch did.  No fences."""
        from leased.client.scopes import ResumePacket

        return ResumePacket(await self.call("resume_packet", scope=scope))

    async def usage(self, since: str | float | None = None) -> dict[str, Any]:
        """What the namespace was billed, from `since` (RFC 3339, or seconds since 1970) or in the whole."""
        return await self.call("usage", since=since)

    async def info(self) -> dict[str, Any]:
        """What the daemon is, whom it takes this client for, and its limits."""
        return await self.call("info")

    async def call(self, operation: str, **fields: Any) -> dict[str, Any]:
        """Any operation by the protocol's names, its reply as it came.  Fields that are None are left out.

        Asked again after a lost connection, but for a `lease` without request_id: that raises OutcomeUnknown.
        """
        wait = fields.pop("wait_seconds", 0)
        return await self._answer(questions.plain(operation, fields, wait))

    def lease(
        self,
        key: str,
        ttl: float = 60,
        *,
        holder: str | None = None,
        scope: str | None = None,
        wait: float = 0,
        bind: str = "none",
    ) -> AsyncHeldLease:
        """`async with client.lease("gpu:0", ttl=30, wait=10) as lease:` holds the lease for the block; see `AsyncHeldLease`."""
        terms = {"ttl": ttl, "holder": holder, "scope": scope, "wait": wait, "bind": bind}
        return AsyncHeldLease(self, key, terms, self._time)

    @overload
    def leased(
        self, key: str, ttl: float = 60, *, holder: str | None = ..., scope: str | None = ..., wait: float = ..., bind: str = ...
    ) -> AsyncLeasing: ...

    @overload
    def leased(
        self,
        key: Callable[P, str],
        ttl: float = 60,
        *,
        holder: str | None = ...,
        scope: str | None = ...,
        wait: float = ...,
        bind: str = ...,
    ) -> Callable[[Callable[P, Coroutine[Any, Any, R]]], Callable[P, Coroutine[Any, Any, R]]]: ...

    def leased(
        self,
        key: str | Callable[..., str],
        ttl: float = 60,
        *,
        holder: str | None = None,
        scope: str | None = None,
        wait: float = 0,
        bind: str = "none",
    ) -> Any:
        """A decorator: each call of the coroutine function holds a lease of its own, as a block of `lease` does, and raises what that raises.

        `key` may name parameters of the function in braces, as in `str.format` (double the braces that are meant); one that is no
        parameter is a ValueError at once.  Or it is a function of the same parameters:

            @client.leased("report:{day}", ttl=30)
            async def write_report(day: str, force: bool = False) -> None: ...

        A call within a call asks for the same key again, and is refused.  Code that needs the generation opens a block itself.
        """
        from leased.client.decorating import async_leased

        return async_leased(self, key, {"ttl": ttl, "holder": holder, "scope": scope, "wait": wait, "bind": bind})

    def watch(self, key: str | None = None, scope: str | None = None) -> AsyncWatch:
        """`async with client.watch(...) as watch: async for told in watch:`; see `AsyncWatch`."""
        from leased.client.async_watching import AsyncWatch

        return AsyncWatch(self.socket, {"key": key, "scope": scope, "agent_key": self._agent_key}, self.timeout)

    async def wait_free(self, key: str, timeout: float | None = None) -> bool:
        """Waits until nobody holds `key`, at most `timeout` seconds (None: as long as it takes).  False: it is still held."""
        from leased.client.async_watching import wait_free

        return await wait_free(self, key, timeout)
