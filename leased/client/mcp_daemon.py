"""The bridge's way to the daemon, under trio: lines, and a question that leaves nothing behind when its asker goes away.

All calls share one line, but for a `lease` that waits: it has a line of its own, because hanging up is what takes a waiter out of the
queue, and free of charge.  A line is hung up by shutting it down in both directions.  The kernel then decides between the two ends: an
answer that had arrived whole can still be read here (and a grant in it is released), any other answer cannot be delivered there, and
the daemon passes such a grant on.
"""

from __future__ import annotations

import socket
from typing import Any, Final

import trio

from leased.client.answers import Reply
from leased.client.attempt import Attempt
from leased.client.core import Conversation
from leased.client.errors import ConnectionGone, LeasedClientError, OutcomeUnknown, RateLimited
from leased.client.wire import READ_BYTES, connect, why
from leased.frames import proof

ANSWER_SECONDS: Final = 10.0  # beyond any wait; as the other clients
UNDO_SECONDS: Final = 5.0  # how long a call that was given up may still take to give back what it got
MAX_WAITING: Final = 64  # lines of their own; the daemon lets one user have 256


class Line:
    """One connection.  After `ConnectionGone` it is of no more use."""

    def __init__(self, stream: trio.SocketStream) -> None:
        self._stream = stream
        self._conversation = Conversation()
        self._sending = trio.Lock()
        self._answered: dict[int, trio.Event] = {}
        self.gone: str | None = None

    async def read(self) -> None:
        """Reads until the connection ends.  Cancelled, it ends it."""
        reason = "the daemon closed the connection"
        try:
            while True:
                octets = await self._stream.receive_some(READ_BYTES)
                answered, events = self._conversation.receive(bytes(octets))
                for msgid in answered:
                    if msgid in self._answered:
                        self._answered[msgid].set()
                if not octets or self._conversation.fault is not None:
                    return
                for event in events:
                    if event.method == "prove":
                        await self._send(proof(event.params.get("nonce")))
        except (trio.BrokenResourceError, trio.ClosedResourceError) as wrong:
            reason = why(wrong.__cause__ or wrong)
        except LeasedClientError as wrong:
            reason = str(wrong)
        finally:
            self.gone = reason
            for waiting in self._answered.values():
                waiting.set()
            await trio.aclose_forcefully(self._stream)

    async def ask(self, operation: str, fields: dict[str, Any]) -> int:
        """Sends one request, whole even if cancelled meanwhile, and returns its number for `answer`.  Raises ConnectionGone."""
        if self.gone is not None:
            raise ConnectionGone(self.gone, sent=False)
        msgid, octets = self._conversation.ask(operation, fields)
        self._answered[msgid] = trio.Event()
        try:
            await self._send(octets)
        except BaseException:
            self.forget(msgid)
            raise
        return msgid

    async def answer(self, msgid: int) -> Reply:
        """Waits for it.  Raises ConnectionGone, and what an error answer says.  Cancelled, it can be called again."""
        await self._answered[msgid].wait()
        if self._conversation.answered(msgid):
            return self._conversation.answer(msgid)
        raise self._conversation.ended(self.gone or "the connection ended")

    def forget(self, msgid: int) -> None:
        self._answered.pop(msgid, None)
        self._conversation.forget(msgid)

    def hang_up(self) -> None:
        """Nothing more is sent or received, but for what has arrived; the reader then ends the line."""
        try:
            self._stream.socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass  # it has ended already

    async def _send(self, octets: bytes) -> None:
        with trio.move_on_after(ANSWER_SECONDS, shield=True) as bound:
            async with self._sending:
                try:
                    await self._stream.send_all(octets)
                    return
                except (trio.BrokenResourceError, trio.ClosedResourceError) as wrong:
                    self.hang_up()
                    raise self._conversation.ended(why(wrong.__cause__ or wrong)) from None
        assert bound.cancelled_caught
        self.hang_up()  # part of a message may have left: nothing can follow it
        raise ConnectionGone("the daemon reads nothing", sent=True)


class Lines:
    """Asks the daemon at `path`; the readers of its lines run in `nursery`."""

    def __init__(self, path: str, nursery: trio.Nursery) -> None:
        self.path = path
        self._nursery = nursery
        self._shared: Line | None = None
        self._waiting = 0

    async def ask(self, operation: str, fields: dict[str, Any]) -> tuple[Reply, bool]:
        """The reply, and whether an earlier sending of the same question may have been carried out.

        Cancelled, it waits up to UNDO_SECONDS to give back what it may have got by then: no fresh grant is left behind.
        Raises what the other clients raise: DaemonUnreachable, OutcomeUnknown, InvalidArgument, PermissionDenied, RateLimited and
        ProtocolFault.
        """
        wait = fields.get("wait_seconds") if operation == "lease" else None
        if not wait:
            return await self._ask(operation, fields, None)
        if self._waiting >= MAX_WAITING:
            raise RateLimited(f"rate_limited: {MAX_WAITING} calls wait through this server already")
        self._waiting += 1
        try:
            return await self._ask(operation, fields, wait)
        finally:
            self._waiting -= 1

    async def _ask(self, operation: str, fields: dict[str, Any], wait: Any) -> tuple[Reply, bool]:
        attempt = Attempt(self.path, operation, fields, ANSWER_SECONDS, wait, trio.current_time())
        while True:
            try:
                reply = await self._once(attempt, bool(wait))
                if attempt.settles(reply, trio.current_time()):
                    return reply, attempt.repeated
            except LeasedClientError as wrong:
                attempt.failed(wrong)
                if operation == "agent_lock" and attempt.repeated:  # a second claim would be refused because of the first
                    raise OutcomeUnknown(operation, str(wrong)) from None
            await trio.sleep(attempt.pause(trio.current_time()))

    async def _once(self, attempt: Attempt, alone: bool) -> Reply:
        line = await self._open() if alone else await self._common()
        fields = dict(attempt.fields(trio.current_time()))
        msgid = await line.ask(attempt.operation, fields)
        reply = None
        try:
            with trio.move_on_at(attempt.deadline):
                reply = await line.answer(msgid)
            if reply is None and alone:
                line.hang_up()
                reply = await line.answer(msgid)  # what had arrived, else ConnectionGone
            if reply is None:
                raise OutcomeUnknown(attempt.operation, "the daemon did not answer in time")
            if alone and fields.get("bind") == "connection" and reply.get("acquired") is True:
                reply = await self._moved(fields)
            await trio.lowlevel.checkpoint_if_cancelled()  # cancelled while it came: the asker is gone all the same
            return reply
        except trio.Cancelled:
            with trio.move_on_after(UNDO_SECONDS, shield=True):
                if alone:
                    line.hang_up()
                await self._undo(line, msgid, attempt.operation, fields, reply)
            raise
        finally:
            line.forget(msgid)
            if alone:
                line.hang_up()

    async def _moved(self, fields: dict[str, Any]) -> Reply:
        """A lease bound to a line that is about to end: a replay of its request binds it to the one that stays."""
        line = await self._common()
        msgid = await line.ask("lease", fields)
        try:
            return await line.answer(msgid)
        finally:
            line.forget(msgid)

    async def _undo(self, line: Line, msgid: int, operation: str, fields: dict[str, Any], reply: Reply | None) -> None:
        """Releases a grant that nobody will hear of.  What cannot be undone in time lapses."""
        if operation not in ("lease", "agent_lock"):
            return
        try:
            fence = fresh_fence(operation, fields, await line.answer(msgid) if reply is None else reply)
            if fence is not None:
                await self._ask("release", {"key": fields["key"], "fence": fence, "agent_key": fields.get("agent_key")}, None)
        except LeasedClientError:
            pass

    async def _common(self) -> Line:
        if self._shared is None or self._shared.gone is not None:
            self._shared = await self._open()
        return self._shared

    async def _open(self) -> Line:
        """Raises DaemonUnreachable or PermissionDenied, at once: connecting to a Unix socket does not wait."""
        stream = socket.socket(fileno=connect(self.path, 0.0).detach())  # trio takes a `socket.socket` and nothing that is like one
        line = Line(trio.SocketStream(trio.socket.from_stdlib_socket(stream)))
        self._nursery.start_soon(line.read)
        return line


def fresh_fence(operation: str, fields: dict[str, Any], reply: Reply) -> str | None:
    """The fence of a grant that `reply` brings for the first time; None where it renews, refuses or knows nothing."""
    if reply.get("acquired") is not True:
        return None
    if operation == "lease":
        return None if reply["renewed"] else str(reply["fence"])
    token = str(reply["token"])
    return None if token == str(fields.get("token")) else token
