"""One question, one answer, over a connection that comes and goes: what the asynchronous client stands on.

What is asked again, and for how long, is decided in attempt.py.
"""

from __future__ import annotations

import os
import weakref
from typing import TYPE_CHECKING, Any, TypeVar

from leased.client.async_wire import AsyncConnection
from leased.client.attempt import Attempt
from leased.client.calling import DEFAULT_TIMEOUT_SECONDS, time_at
from leased.client.core import draw_holder, socket_path
from leased.client.errors import LeasedClientError, OutcomeUnknown
from leased.client.face import Face, running
from leased.client.forked import leave_to_parent
from leased.client.wire import BACKLOG_PAUSE_SECONDS, backlog_is_full, connect_now

if TYPE_CHECKING:
    from leased.client.answers import Reply
    from leased.client.async_held import AsyncHeldLease
    from leased.client.host_time import HostTime
    from leased.client.questions import Question

A = TypeVar("A")


class AsyncCaller:
    """A connection to the daemon, made when first needed, replaced when it is lost, shared by the tasks of one loop."""

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
        self._connection: AsyncConnection | None = None
        self._held: weakref.WeakSet[AsyncHeldLease] = weakref.WeakSet()

    def __repr__(self) -> str:
        return f"{type(self).__name__}(socket={self.socket!r}, holder={self.holder!r})"

    def close(self) -> None:
        """Ends the connection (and with it leases bound to it, which learn of it).  The next call makes a new one.  Waits for nothing."""
        if self._connection is not None:
            self._connection.close()
            self._drop(self._connection)

    async def aclose(self) -> None:
        """`close`, under the name that `contextlib.aclosing` and the like call.  No checkpoint."""
        self.close()

    async def _ask(self, operation: str, fields: dict[str, Any], seconds: float, wait: float = 0) -> tuple[Reply, float, bool]:
        """The reply, the boot time from before its request was sent, and whether an earlier attempt may have been carried out.

        Cancelled, the request may have been carried out.
        """
        face = running()
        if self._agent_key is not None:
            fields["agent_key"] = self._agent_key
        attempt = Attempt(self.socket, operation, fields, seconds, wait, face.now())
        while True:
            connection = None
            try:
                connection = await self._connected(face, attempt.deadline)
                sent_at = self._time.now()
                reply = await connection.exchange(face, operation, attempt.fields(face.now()), attempt.deadline)
                if attempt.settles(reply, face.now()):
                    return reply, sent_at, attempt.repeated
            except LeasedClientError as wrong:
                if connection is not None and attempt.hangs_up_after(wrong):
                    connection.close("an answer did not come in time")
                attempt.failed(wrong)
            finally:
                if connection is not None and connection.gone:
                    self._drop(connection)
            await face.sleep(attempt.pause(face.now()))

    async def _answer(self, question: Question[A], timeout: float | None = None) -> A:
        """Cancelled, the question may have been carried out."""
        seconds = self.timeout if timeout is None else timeout
        try:
            reply, sent_at, repeated = await self._ask(question.operation, question.fields, seconds, question.wait)
        except OutcomeUnknown as unknown:
            if question.unanswered is None:
                raise
            return question.unanswered(unknown)
        return question.understood(reply, sent_at, repeated)

    async def _connected(self, face: Face, deadline: float) -> AsyncConnection:
        while self._connection is None or self._connection.gone:
            stream = connect_now(self.socket)  # a Unix socket connects at once or not at all
            if stream is not None:
                self._connection = AsyncConnection(stream)
            elif face.now() >= deadline:
                raise backlog_is_full(self.socket)
            else:
                await face.sleep(BACKLOG_PAUSE_SECONDS)
        return self._connection

    def _drop(self, connection: AsyncConnection) -> None:
        """Bound leases may have ended with the connection, or want to be bound to the next one: renew them now."""
        if self._connection is connection:
            self._connection = None
        for lease in [*self._held]:
            lease.connection_lost()

    def _keep(self, lease: AsyncHeldLease) -> None:
        self._held.add(lease)

    def left_to_parent(self) -> None:
        """In a forked child: see forked.py."""
        connection, held = self._connection, [*self._held]
        self._start_anew()
        if connection is not None:
            connection.abandon()
        for lease in held:
            lease.left_to_parent()
