"""`Client`: the synchronous face.  Thread-safe, repeats what is safe to repeat, bounded in time; how, is told in attempt.py.

A `release` or `revoke` said twice can answer "nothing live" because the first one did it, which its answer tells (`maybe_released`,
`maybe_revoked`).
"""

from __future__ import annotations

from leased.client import questions
from leased.client.answers import Checked, Grant, Refusal, Released, Revoked, Unknown
from leased.client.calling import Caller
from leased.client.errors import LeaseLost, OutcomeUnknown

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import Any, ParamSpec, TypeVar, overload

    from leased.client.decorating import Leasing
    from leased.client.held import HeldLease
    from leased.client.scopes import ResumePacket, SwitchState
    from leased.client.watching import Watch

    A = TypeVar("A")
    P = ParamSpec("P")
    R = TypeVar("R")


class Client(Caller):
    """A connection to the daemon, made when first needed.

    `socket`: a path; by default $LEASED_SOCKET, else the daemon's usual place.  `holder`: the label of this instance, at most 256
    bytes, unique among the living; by default host, process id and 8 random digits.  `timeout`: seconds to wait for an answer,
    beyond any `wait` asked for.  `agent_key`: the key of a namespace, where one is needed.

    Every method may raise DaemonUnreachable (nothing was sent), OutcomeUnknown (no answer in time), InvalidArgument,
    PermissionDenied, RateLimited and ProtocolFault.
    """

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def try_acquire(
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
        """Asks for the lease on `key` for `ttl` seconds (0.1 to 3600); queues up to `wait` seconds (0 to 300) while it is held.

        True only for a Grant.  `fence` of a live lease renews it.  `request_id`, drawn when not given, asks for the grant of an
        earlier attempt again (see Unknown); of two calls that wait with the same one the earlier ends as an Unknown, reason
        "superseded".  A wait outlives a restart of the daemon: what is left of it is asked for again.  An answer that does not come
        in time is an Unknown, reason "no_answer"; its connection is closed, so that a grant still waiting goes to somebody else.

        `bind`: "none"; "process", and the lease also ends, at once, when this process dies (a stopped one lives, and a forked child
        keeps nothing); or "connection", and it ends with this client's connection: with `close`, and with an answer of any of its
        calls that does not come in time.  After a restart of the daemon it is the next renewal that binds a lease again.
        """
        question = questions.lease(
            key, holder or self.holder, ttl, scope=scope, wait=wait, fence=fence, bind=bind, request_id=request_id
        )
        answer = self._answer(question)
        if isinstance(answer, Grant) and wait:
            return questions.dated(answer) or questions.dated_by(answer, self.renew(answer))
        return answer

    def renew(
        self,
        key: str | Grant,
        fence: str | None = None,
        *,
        holder: str | None = None,
        ttl: float | None = None,
        timeout: float | None = None,
    ) -> Grant | Refusal | Unknown:
        """Renews a Grant, or the lease on `key` with `fence` and `holder`; `ttl` defaults to its own.  Never a fresh grant."""
        return self._answer(questions.renew(key, fence, holder, self.holder, ttl), timeout)

    def release(self, key: str | Grant, fence: str | None = None, *, holder: str | None = None) -> Released:
        """Ends a Grant, or the lease on `key` whose fence this is.  True if this call ended it."""
        return self._answer(questions.release(key, fence, holder))

    def check(self, key: str, generation: int | None = None) -> Checked:
        """Who holds `key`?  With `generation`, `current` tells whether exactly that lease is live."""
        return self._answer(questions.check(key, generation))

    def list(
        self, *, scope: str | None = None, holder: str | None = None, page: int = 100, all: bool = False
    ) -> Iterator[dict[str, Any]]:
        """The namespace's live leases, oldest generation first, fetched `page` at a time (1 to 1000) as they are consumed.

        `all` (operators only): every namespace.
        """
        pages = questions.Pages(scope, holder, page, all)
        while not pages.over:
            yield from pages.took(self._answer(pages.question))

    def revoke(
        self, key: str | None = None, reason: str = "", *, key_hash: str | None = None, namespace: str | None = None
    ) -> Revoked:
        """Ends somebody's lease by force (operators only).  `reason` is logged.  Exactly one of `key` and `key_hash`."""
        return self._answer(questions.revoke(key, reason, key_hash, namespace))

    def heartbeat(self, scope: str, expect_within: float, agent_id: str | None = None) -> SwitchState:
        """Arms the dead-man switch of `scope`: unless it is armed again within `expect_within` seconds (1 to 86,400), all live leases
        of the scope are released.  `agent_id`: a label for whoever resumes the scope; when not given, the one given before stays."""
        from leased.client.scopes import SwitchState

        fields = {"scope": scope, "expect_within_seconds": expect_within, "agent_id": agent_id}
        return SwitchState(self._ask("heartbeat", fields, self.timeout)[0])

    def disarm(self, scope: str) -> SwitchState:
        """Switches the dead-man switch of `scope` off.  Its leases stay."""
        from leased.client.scopes import SwitchState

        return SwitchState(self._ask("heartbeat", {"scope": scope, "disarm": True}, self.timeout)[0])

    def resume_packet(self, scope: str) -> ResumePacket:
        """What a successor needs to take up `scope`: its live leases, and what its switch did.  No fences."""
        from leased.client.scopes import ResumePacket

        return ResumePacket(self._ask("resume_packet", {"scope": scope}, self.timeout)[0])

    if TYPE_CHECKING:

        @overload
        def leased(
            self,
            key: str,
            ttl: float = 60,
            *,
            holder: str | None = ...,
            scope: str | None = ...,
            wait: float = ...,
            bind: str = ...,
        ) -> Leasing: ...

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
        ) -> Callable[[Callable[P, R]], Callable[P, R]]: ...

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
        """A decorator: each call of the function holds a lease of its own, as a block of `lease` does, and raises what that raises.

        `key` may name parameters of the function in braces, as in `str.format` (double the braces that are meant); one that is no
        parameter is a ValueError at once.  Or it is a function of the same parameters:

            @client.leased("report:{day}", ttl=30)
            def write_report(day: str, force: bool = False) -> None: ...

        A call within a call asks for the same key again, and is refused.  Code that needs the generation opens a block itself.
        """
        from leased.client.decorating import leased

        return leased(self, key, {"ttl": ttl, "holder": holder, "scope": scope, "wait": wait, "bind": bind})

    def watch(self, key: str | None = None, scope: str | None = None) -> Watch:
        """What happens from now on to the leases on `key`, of `scope`, or of the whole namespace; see `Watch`."""
        from leased.client.watching import Watch

        return Watch(self.socket, {"key": key, "scope": scope, "agent_key": self._agent_key}, self.timeout)

    def wait_free(self, key: str, timeout: float | None = None) -> bool:
        """Waits until nobody holds `key`, at most `timeout` seconds (None: as long as it takes).  False: it is still held.

        True promises nothing for the next moment: whoever wants the key queues by `try_acquire(wait=...)`.
        """
        from leased.client.watching import wait_free

        return wait_free(self, key, timeout)

    def usage(self, since: str | float | None = None) -> dict[str, Any]:
        """What the namespace was billed, from `since` (RFC 3339, or seconds since 1970) or in the whole."""
        return self._ask("usage", {"since": since}, self.timeout)[0]

    def info(self) -> dict[str, Any]:
        """What the daemon is, whom it takes this client for, and its limits."""
        return self._ask("info", {}, self.timeout)[0]

    def call(self, operation: str, **fields: Any) -> dict[str, Any]:
        """Any operation by the protocol's names, its reply as it came.  Fields that are None are left out.

        Asked again after a lost connection, but for a `lease` without request_id: that raises OutcomeUnknown.
        """
        wait = fields.pop("wait_seconds", 0)
        return self._ask(operation, fields, self.timeout, wait)[0]

    def lease(
        self,
        key: str,
        ttl: float = 60,
        *,
        holder: str | None = None,
        scope: str | None = None,
        wait: float = 0,
        bind: str = "none",
        on_lost: Callable[[LeaseLost], None] | None = None,
    ) -> HeldLease:
        """`with client.lease("gpu:0", ttl=30, wait=10) as lease:` holds the lease for the block; see `HeldLease`."""
        from leased.client.held import HeldLease

        terms = {"ttl": ttl, "holder": holder, "scope": scope, "wait": wait, "bind": bind}
        return HeldLease(self, key, terms, self._time, on_lost)

    def _answer(self, question: questions.Question[A], timeout: float | None = None) -> A:
        seconds = self.timeout if timeout is None else timeout
        try:
            reply, sent_at, repeated = self._ask(question.operation, question.fields, seconds, question.wait)
        except OutcomeUnknown as unknown:
            if question.unanswered is None:
                raise
            return question.unanswered(unknown)
        return question.understood(reply, sent_at, repeated)
