"""`Client`: the synchronous face.  Thread-safe, one connection, repeats what is safe to repeat, bounded in time.

What happens when the connection ends before the answer: everything is asked again on a new one until the time is up.  A `lease`
carries the same request_id, so it is the same grant; renewals and checks may be said twice; a `release` or `revoke` said twice can
answer "nothing live" because the first one did it, which its answer tells (`maybe_released`, `maybe_revoked`).
After a fork the child's client starts anew: its own connection, its own holder label.
"""

from __future__ import annotations

import os
import select
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Final

from leased.client.answers import Checked, Grant, Refusal, Released, Reply, Revoked, Unknown, answer_to_lease, verdict
from leased.client.core import draw_holder, draw_request_id, socket_path
from leased.client.errors import ConnectionGone, DaemonUnreachable, LeaseLost, OutcomeUnknown, ProtocolFault, RateLimited
from leased.client.host_time import HostTime
from leased.client.wire import Connection, connect

if TYPE_CHECKING:
    from leased.client.held import HeldLease

DEFAULT_TIMEOUT_SECONDS: Final = 10.0
LONGEST_WAIT_SECONDS: Final = 300.0  # the protocol's, repeated: importing leased.model costs a twentieth of `lease check`
_FIRST_PAUSE_SECONDS: Final = 0.05  # a restarted daemon is back within a few of these
_LONGEST_PAUSE_SECONDS: Final = 1.0


class Client:
    """A connection to the daemon, made when first needed.

    `socket`: a path; by default $LEASED_SOCKET, else the daemon's usual place.  `holder`: the label of this instance, at most 256
    bytes, unique among the living; by default host, process id and 8 random digits.  `timeout`: seconds to wait for an answer,
    beyond any `wait` asked for.  `agent_key`: the key of a namespace, where one is needed.

    Every method may raise DaemonUnreachable (nothing was sent), OutcomeUnknown (no answer in time), InvalidArgument,
    PermissionDenied, RateLimited and ProtocolFault.
    """

    def __init__(
        self,
        socket: str | os.PathLike[str] | None = None,
        holder: str | None = None,
        timeout: float = DEFAULT_TIMEOUT_SECONDS,
        *,
        agent_key: str | None = None,
        host_time: HostTime | None = None,
    ) -> None:
        self.socket = socket_path(os.fspath(socket) if socket is not None else None)
        self.timeout = timeout
        self._given_holder = holder
        self._agent_key = agent_key
        self._time = host_time or HostTime()
        self._start_anew()
        _clients.add(self)

    def _start_anew(self) -> None:
        self.holder = self._given_holder or draw_holder()
        self._lock = threading.Lock()
        self._connection: Connection | None = None
        self._held: weakref.WeakSet[HeldLease] = weakref.WeakSet()

    def __repr__(self) -> str:
        return f"Client(socket={self.socket!r}, holder={self.holder!r})"

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends the connection (and with it leases bound to it).  The next call makes a new one."""
        with self._lock:
            connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()

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
        earlier attempt again (see Unknown).  An answer that does not come in time is an Unknown, reason "no_answer"; its
        connection is closed, so that a grant still waiting goes to somebody else.
        """
        label = holder or self.holder
        rid = request_id or draw_request_id()
        fields = {"key": key, "holder": label, "ttl_seconds": ttl, "scope": scope, "fence": fence, "bind": bind, "request_id": rid}
        try:
            reply, sent_at, _ = self._ask("lease", fields, self.timeout, wait)
        except OutcomeUnknown as unknown:
            return Unknown({"key": key, "holder": label, "acquired": None, "reason": "no_answer", "text": unknown.why}, rid)
        answer = answer_to_lease(reply, key, sent_at, rid)
        if isinstance(answer, Grant) and wait:
            return self._dated(answer)
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
        key, fence, holder = _credentials(key, fence, holder)
        label = holder or self.holder
        fields = {"key": key, "holder": label, "fence": fence, "ttl_seconds": ttl}
        try:
            reply, sent_at, _ = self._ask("renew", fields, self.timeout if timeout is None else timeout)
        except OutcomeUnknown as unknown:
            return Unknown({"key": key, "holder": label, "acquired": None, "reason": "no_answer", "text": unknown.why})
        return answer_to_lease(reply, key, sent_at)

    def release(self, key: str | Grant, fence: str | None = None, *, holder: str | None = None) -> Released:
        """Ends a Grant, or the lease on `key` whose fence this is.  True if this call ended it."""
        key, fence, holder = _credentials(key, fence, holder)
        reply, _, repeated = self._ask("release", {"key": key, "fence": fence, "holder": holder}, self.timeout)
        released = verdict(reply, "released")
        return Released(reply, released, repeated and released is False and reply.get("reason") == "expired")

    def check(self, key: str, generation: int | None = None) -> Checked:
        """Who holds `key`?  With `generation`, `current` tells whether exactly that lease is live."""
        return Checked(self._ask("check", {"key": key, "generation": generation}, self.timeout)[0])

    def list(
        self, *, scope: str | None = None, holder: str | None = None, page: int = 100, all: bool = False
    ) -> Iterator[dict[str, Any]]:
        """The namespace's live leases, oldest generation first, fetched `page` at a time (1 to 1000) as they are consumed.

        `all` (operators only): every namespace.
        """
        fields: dict[str, Any] = {"scope": scope, "holder": holder, "limit": page, "all": all or None}
        while True:
            reply = self._ask("list", fields, self.timeout)[0]
            yield from reply.get("leases", ())
            cursor = reply.get("cursor")
            if cursor is None:
                return
            if cursor == fields.get("cursor"):
                raise ProtocolFault("a list whose cursor stands still")
            fields["cursor"] = cursor

    def revoke(
        self, key: str | None = None, reason: str = "", *, key_hash: str | None = None, namespace: str | None = None
    ) -> Revoked:
        """Ends somebody's lease by force (operators only).  `reason` is logged.  Exactly one of `key` and `key_hash`."""
        fields = {"key": key, "key_hash": key_hash, "reason": reason, "namespace": namespace}
        reply, _, repeated = self._ask("revoke", fields, self.timeout)
        revoked = verdict(reply, "revoked")
        return Revoked(reply, revoked, repeated and revoked is False and reply.get("reason") == "expired")

    def info(self) -> dict[str, Any]:
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

    def _dated(self, grant: Grant) -> Grant | Refusal | Unknown:
        """A grant after a wait: when it began is not known here.

        The daemon's deadline stands if it is of this boot and time namespace; else a renewal is made at once and counted from.
        """
        from leased.clock import HostClock

        try:
            if grant.reply["boot_id"] == HostClock().boot_id():
                return Grant(grant.reply, float(grant.reply["expires_boottime"]))
        except (OSError, KeyError, TypeError, ValueError):
            pass
        renewed = self.renew(grant)
        return Grant(grant.reply, renewed.deadline) if isinstance(renewed, Grant) else renewed

    def _ask(self, operation: str, fields: dict[str, Any], seconds: float, wait: float = 0) -> tuple[Reply, float, bool]:
        """The reply, the boot time from before its request was sent, and whether an earlier attempt may have been carried out."""
        started = time.monotonic()
        waiting = _seconds(wait)
        deadline = started + seconds + waiting
        repeatable = operation != "lease" or fields.get("request_id") is not None
        pause = 0.0  # the daemon may have restarted since the last call: then the first new connection is good
        repeated = False
        while True:
            asked = dict(fields, agent_key=self._agent_key)
            if wait:
                asked["wait_seconds"] = max(0.0, waiting - (time.monotonic() - started)) if repeated else wait
            connection = None
            try:
                connection = self._connected(deadline)
                sent_at = self._time.now()
                return connection.exchange(operation, asked, deadline), sent_at, repeated
            except ConnectionGone as gone:
                repeated = repeated or gone.sent
                why = str(gone)
            except (DaemonUnreachable, RateLimited) as failed:
                if not repeated:
                    raise
                why = str(failed)
            except OutcomeUnknown:
                if operation == "lease" and connection is not None:
                    connection.close("an answer did not come in time")
                raise
            except ProtocolFault as fault:
                if not repeated:
                    raise
                raise OutcomeUnknown(operation, str(fault)) from None
            finally:
                if connection is not None and connection.gone:
                    self._drop(connection)
            if (repeated and not repeatable) or time.monotonic() + pause >= deadline:
                raise OutcomeUnknown(operation, why) if repeated else DaemonUnreachable(self.socket, why)
            select.select([], [], [], pause * (0.5 + os.urandom(1)[0] / 512))  # jitter: not all clients at one instant
            pause = min(2 * pause or _FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS)

    def _connected(self, deadline: float) -> Connection:
        with self._lock:
            if self._connection is None or self._connection.gone:
                self._connection = Connection(connect(self.socket, deadline))
            return self._connection

    def _drop(self, connection: Connection) -> None:
        """Bound leases may have ended with the connection, or want to be bound to the next one: renew them now."""
        with self._lock:
            if self._connection is connection:
                self._connection = None
            held = [*self._held]
        for lease in held:
            lease.connection_lost()

    def _keep(self, lease: HeldLease) -> None:
        with self._lock:
            self._held.add(lease)

    def _after_fork(self) -> None:
        connection, held = self._connection, [*self._held]
        self._start_anew()
        if connection is not None:
            connection.abandon()
        for lease in held:
            lease.left_to_parent()


def _credentials(key: str | Grant, fence: str | None, holder: str | None) -> tuple[str, str | None, str | None]:
    return (key.key, key.fence, holder or key.holder) if isinstance(key, Grant) else (key, fence, holder)


def _seconds(wait: Any) -> float:
    """A wait as this side counts it; whether it is acceptable is for the daemon to say."""
    try:
        return min(max(float(wait), 0.0), LONGEST_WAIT_SECONDS)
    except (TypeError, ValueError, OverflowError):
        return 0.0


_clients: weakref.WeakSet[Client] = weakref.WeakSet()


def _after_fork_in_child() -> None:
    for client in [*_clients]:
        client._after_fork()


os.register_at_fork(after_in_child=_after_fork_in_child)
