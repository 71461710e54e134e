"""One question, one answer, over a connection that comes and goes: what every synchronous client stands on.

What is asked again, and for how long, is decided in attempt.py.  After a fork the child starts anew: its own connection, its own
holder label.
"""

from __future__ import annotations

import os
import select
import time
import weakref

from leased.client.attempt import Attempt
from leased.client.core import draw_holder, socket_path
from leased.client.errors import LeasedClientError
from leased.client.forked import leave_to_parent
from leased.client.host_time import HostTime
from leased.client.wire import Connection, connect, stand_ins

TYPE_CHECKING = False
if TYPE_CHECKING:
    from threading import Lock
    from typing import Any, Final

    from leased.client.answers import Reply
    from leased.client.held import HeldLease
else:
    from _thread import allocate_lock as Lock  # this, and no more, is what `threading` calls a Lock

DEFAULT_TIMEOUT_SECONDS: Final = 10.0


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
        self._time = host_time or time_at(self.socket)
        self._start_anew()
        leave_to_parent(self)

    def _start_anew(self) -> None:
        self.holder = self._given_holder or draw_holder()
        self._lock = Lock()
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
        if self._agent_key is not None:
            fields["agent_key"] = self._agent_key
        attempt = Attempt(self.socket, operation, fields, seconds, wait, time.monotonic())
        while True:
            connection = None
            try:
                connection = self._connected(attempt.deadline)
                sent_at = self._time.now()
                reply = connection.exchange(operation, attempt.fields(time.monotonic()) if wait else fields, attempt.deadline)
                if not wait or attempt.settles(reply, time.monotonic()):
                    return reply, sent_at, attempt.repeated
            except LeasedClientError as wrong:
                if connection is not None and attempt.hangs_up_after(wrong):
                    connection.close("an answer did not come in time")
                attempt.failed(wrong)
            finally:
                if connection is not None and connection.gone:
                    self._drop(connection)
            select.select([], [], [], attempt.pause(time.monotonic()))

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

    def left_to_parent(self) -> None:
        """In a forked child: see forked.py."""
        connection, held = self._connection, [*self._held]
        self._start_anew()
        if connection is not None:
            connection.abandon()
        for lease in held:
            lease.left_to_parent()


def time_at(path: str) -> HostTime:
    """The clock of whoever listens at `path`: this host's, but for a stand-in of the daemon."""
    stand_in = stand_ins.get(path)
    return HostTime() if stand_in is None else stand_in.time
