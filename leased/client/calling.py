"""One question, one answer, over a connection that comes and goes: what every synchronous client stands on.

What happens when the connection ends before the answer: everything is asked again on a new one until the time is up.  A `lease`
carries the same request_id, so it is the same attempt, and one that waited queues again for the rest of its wait; renewals and checks
may be said twice; what else a repeat can mean is for the caller to tell, who is told that there was one.
After a fork the child starts anew: its own connection, its own holder label.
"""

from __future__ import annotations

import os
import select
import threading
import time
import weakref
from typing import TYPE_CHECKING, Any, Final

from leased.client.core import draw_holder, socket_path
from leased.client.errors import ConnectionGone, DaemonUnreachable, OutcomeUnknown, ProtocolFault, RateLimited
from leased.client.host_time import HostTime
from leased.client.wire import Connection, connect

if TYPE_CHECKING:
    from leased.client.answers import Reply
    from leased.client.held import HeldLease

DEFAULT_TIMEOUT_SECONDS: Final = 10.0
LONGEST_WAIT_SECONDS: Final = 300.0  # the protocol's, repeated: importing leased.model costs a twentieth of `lease check`
RESTARTING: Final = frozenset({"starting", "shutting_down", "state_lost"})  # why a daemon that ends or begins decides nothing
FIRST_PAUSE_SECONDS: Final = 0.05  # a restarted daemon is back within a few of these
LONGEST_PAUSE_SECONDS: Final = 1.0


class Caller:
    """A connection to the daemon, made when first needed, replaced when it is lost, shared by threads.  `Client` has the operations."""

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
        _callers.add(self)

    def _start_anew(self) -> None:
        self.holder = self._given_holder or draw_holder()
        self._lock = threading.Lock()
        self._connection: Connection | None = None
        self._held: weakref.WeakSet[HeldLease] = weakref.WeakSet()

    def __repr__(self) -> str:
        return f"{type(self).__name__}(socket={self.socket!r}, holder={self.holder!r})"

    def close(self) -> None:
        """Ends the connection (and with it leases bound to it, which learn of it).  The next call makes a new one."""
        with self._lock:
            connection = self._connection
        if connection is not None:
            connection.close()
            self._drop(connection)

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
                reply = connection.exchange(operation, asked, deadline)
                if not (repeatable and _to_be_queued_again(reply, started + waiting)):
                    return reply, sent_at, repeated
                repeated = True
                why = f"the daemon answered {reply['reason']!r}"
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
            select.select([], [], [], jittered(pause))
            pause = min(2 * pause or FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS)

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


def jittered(pause: float) -> float:
    """Half of `pause` to all of it: not all clients of a restarted daemon come back at one instant."""
    return pause * (0.5 + os.urandom(1)[0] / 512)


def _to_be_queued_again(reply: Reply, until: float) -> bool:
    """Did a caller that still wants to wait meet a daemon that ends or begins?  Not for "superseded": another call has the place."""
    return time.monotonic() < until and reply.get("acquired", True) is None and reply.get("reason") in RESTARTING


def _seconds(wait: Any) -> float:
    """A wait as this side counts it; whether it is acceptable is for the daemon to say."""
    try:
        return min(max(float(wait), 0.0), LONGEST_WAIT_SECONDS)
    except (TypeError, ValueError, OverflowError):
        return 0.0


_callers: weakref.WeakSet[Caller] = weakref.WeakSet()


def _after_fork_in_child() -> None:
    for caller in [*_callers]:
        caller._after_fork()


os.register_at_fork(after_in_child=_after_fork_in_child)
