"""Watching leases from tasks: as watching.py, which says what is told; here one task reads, and cancellation takes the place of threads."""

from __future__ import annotations

import socket
from collections import deque
from typing import TYPE_CHECKING, Any

from leased.client.attempt import FIRST_PAUSE_SECONDS, FOR_EVER, LONGEST_PAUSE_SECONDS, jittered
from leased.client.core import Conversation
from leased.client.errors import ConnectionGone, DaemonUnreachable, OutcomeUnknown, ProtocolFault, RateLimited
from leased.client.face import Face, running
from leased.client.forked import leave_to_parent
from leased.client.watching import ENDINGS, Gap, LeaseEvent, understood
from leased.client.wire import BACKLOG_PAUSE_SECONDS, READ_BYTES, backlog_is_full, connect_now, why

if TYPE_CHECKING:
    from leased.client.async_client import AsyncClient


class AsyncWatch:
    """An asynchronous iterator of `LeaseEvent | Gap`, made by `AsyncClient.watch`.  Everything from its beginning on is told, or there
    is a Gap in its place.  It begins with the block, or with the first event that is asked for.

    For the whole picture, watch first and then list; list again after each Gap:

        async with client.watch(scope="night") as watch:
            show([lease async for lease in client.list(scope="night")])
            async for told in watch: ...

    A lost connection is replaced; a daemon that stays away for the client's `timeout` raises DaemonUnreachable, and asking once more
    tries once more.  One task at a time.  In a forked child it begins anew, with a Gap.
    """

    def __init__(self, path: str, fields: dict[str, Any], patience: float) -> None:
        self._path = path
        self._fields = fields
        self._patience = patience
        self._conversation = Conversation()
        self._stream: socket.socket | None = None
        self._told: deque[LeaseEvent | Gap] = deque()
        self._begun = False
        self._reading = False
        self._pause = 0.0
        self.closed = False
        leave_to_parent(self)

    def __repr__(self) -> str:
        watched = {name: value for name, value in self._fields.items() if name != "agent_key" and value is not None}
        return f"AsyncWatch({watched}, closed={self.closed})"

    async def __aenter__(self) -> AsyncWatch:
        face = running()
        try:
            await self._connected(face, FOR_EVER)
        except BaseException:
            self.close()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()

    def __aiter__(self) -> AsyncWatch:
        return self

    async def __anext__(self) -> LeaseEvent | Gap:
        told = await self.take()
        if told is None:
            raise StopAsyncIteration
        return told

    def close(self) -> None:
        """Ends the watch.  Closing twice is harmless.  Waits for nothing."""
        self.closed = True
        self._hang_up()

    async def take(self, timeout: float | None = None) -> LeaseEvent | Gap | None:
        """What was told next; None after `timeout` seconds without anything, or once the watch is closed.

        Raises what `AsyncClient` raises.  Cancelled, nothing is lost.
        """
        face = running()
        deadline = FOR_EVER if timeout is None else face.now() + timeout
        while not self.closed and not self._told:
            if self._stream is None:
                if not await self._connected(face, deadline):
                    return None
            elif not await self._read(face, deadline):
                return None
        return self._told.popleft() if self._told else None

    async def _read(self, face: Face, deadline: float) -> bool:
        """Reads once; False if nothing came until the deadline.  Only while nothing waits to be taken: so memory stays bounded."""
        stream = self._stream
        if stream is None:
            return True
        self._reading = True
        try:
            if not await face.ready(stream, False, deadline):
                return False
            octets = stream.recv(READ_BYTES)
            self._told += map(understood, self._conversation.receive(octets)[1])
        except BlockingIOError:
            return True
        except OSError:
            octets = b""
        except ProtocolFault:
            self._reading = False
            self._hang_up()
            raise
        finally:
            self._reading = False
            if self._stream is None:  # closed meanwhile
                stream.close()
        fault = self._conversation.fault
        if not octets or fault is not None:
            self._hang_up()
            if isinstance(fault, ProtocolFault):
                raise fault
        else:
            self._pause = 0.0
        return True

    async def _connected(self, face: Face, deadline: float) -> bool:
        """A connection that watches, a new one if need be; False at the deadline."""
        give_up_at = face.now() + self._patience
        while self._stream is None and not self.closed:
            pause = jittered(self._pause)
            if face.now() + pause >= deadline:
                await face.sleep(max(0.0, deadline - face.now()))
                return False
            if pause:
                await face.sleep(pause)
            self._pause = min(2 * self._pause or FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS)
            try:
                await self._begin(face, min(deadline, face.now() + self._patience))
            except (DaemonUnreachable, ConnectionGone, OutcomeUnknown, RateLimited) as wrong:
                if not isinstance(wrong, ConnectionGone) and not self._begun:
                    raise
                if face.now() >= give_up_at:
                    raise DaemonUnreachable(self._path, str(wrong)) if isinstance(wrong, ConnectionGone) else wrong from None
        return True

    async def _begin(self, face: Face, deadline: float) -> None:
        """A new connection that watches; after a lost one a Gap is told before what it tells."""
        while (stream := connect_now(self._path)) is None:
            if face.now() >= deadline:
                raise backlog_is_full(self._path)
            await face.sleep(BACKLOG_PAUSE_SECONDS)
        conversation = Conversation()
        told: list[LeaseEvent | Gap] = [Gap(None, None)] if self._begun else []
        try:
            msgid, octets = conversation.ask("watch", self._fields)
            try:
                stream.send(octets, socket.MSG_NOSIGNAL)  # far smaller than a new socket's buffer
            except OSError:
                pass  # it has hung up already; what it said before can still be read
            while not conversation.answered(msgid):
                if not await face.ready(stream, False, deadline):
                    raise OutcomeUnknown("watch", "the daemon did not answer in time")
                octets = stream.recv(READ_BYTES)
                told += map(understood, conversation.receive(octets)[1])
                if conversation.fault is not None or (not octets and not conversation.answered(msgid)):
                    raise conversation.ended("the daemon closed the connection")
            conversation.answer(msgid)
        except OSError as wrong:
            stream.close()
            raise ConnectionGone(why(wrong), sent=True) from None
        except BaseException:
            stream.close()
            raise
        if self.closed:
            stream.close()
            return
        self._conversation, self._stream, self._begun = conversation, stream, True
        self._told += told

    def _hang_up(self) -> None:
        stream, self._stream = self._stream, None
        if stream is not None:
            try:
                stream.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass
            if not self._reading:
                stream.close()

    def left_to_parent(self) -> None:
        """In a forked child: the connection, and what was read from it, are the parent's."""
        self._told.clear()
        self._pause = 0.0
        stream, self._stream = self._stream, None
        if stream is not None:
            stream.close()


async def wait_free(client: AsyncClient, key: str, timeout: float | None) -> bool:
    """See `AsyncClient.wait_free`.  Watched first and then asked, so no end of a lease falls between the two."""
    face = running()
    deadline = FOR_EVER if timeout is None else face.now() + timeout
    async with client.watch(key=key) as watch:
        while True:
            checked = await client.check(key)
            if checked.held is False:
                return True
            ask_again_at = FOR_EVER
            if checked.held is None:  # no event will say when the daemon can tell
                ask_again_at = face.now() + (checked.reply.get("retry_after_seconds") or 1.0)
            until = min(deadline, ask_again_at)
            while True:
                told = await watch.take(None if until == FOR_EVER else max(0.0, until - face.now()))
                if told is None or isinstance(told, Gap) or told.type in ENDINGS:
                    break
            if told is None and face.now() >= deadline:
                return False
