"""One connection to the daemon, shared by any number of tasks of one loop.

Requests are pipelined: each task sends its own and waits for its own answer.  Whoever waits first reads for all; when it has its
answer, or is cancelled, another reads on.  There is no reader task, so nothing of a client runs while nobody asks.
"""

from __future__ import annotations

import errno
import socket
from collections.abc import Mapping
from typing import Any

from leased.client.core import Conversation
from leased.client.errors import ConnectionGone, OutcomeUnknown
from leased.client.face import Face, Gate
from leased.client.wire import READ_BYTES, why
from leased.frames import proof


class AsyncConnection:
    """One stream and its conversation.  After `ConnectionGone` it is of no more use."""

    def __init__(self, stream: socket.socket) -> None:
        self._stream = stream
        self._conversation = Conversation()
        self._gates: dict[int, Gate] = {}
        self._out = bytearray()
        self._queued = 0  # bytes ever put in `_out`
        self._sent = 0  # of these
        self._reading = False
        self._flushing = False
        self._gone: str | None = None

    @property
    def gone(self) -> bool:
        return self._gone is not None

    async def exchange(self, face: Face, operation: str, fields: Mapping[str, Any], deadline: float) -> dict[str, Any]:
        """Sends one request and waits for its answer until `deadline` (`face.now`).

        Raises ConnectionGone when the stream ended first, OutcomeUnknown at the deadline, and what an error answer says.  Cancelled,
        the request may have been carried out; its answer is dropped, and the connection serves others on.
        """
        if self._gone is not None:
            raise ConnectionGone(self._gone, sent=False)
        msgid, octets = self._conversation.ask(operation, fields)
        try:
            await self._send(face, octets, deadline)
            return await self._await(face, operation, msgid, deadline)
        finally:
            self._conversation.forget(msgid)
            self._gates.pop(msgid, None)
            self._pass_on()

    def close(self, why: str = "closed by this client") -> None:
        """Ends the connection; calls in flight raise ConnectionGone.  The descriptor lives on until nobody waits for it."""
        if self._gone is not None:
            return
        self._gone = why
        for gate in self._gates.values():
            gate.open()
        try:
            self._stream.shutdown(socket.SHUT_RDWR)  # wakes whoever waits for it
        except OSError:
            pass
        self._close_if_idle()

    def abandon(self) -> None:
        """In a forked child: drops the child's copy of the descriptor and says nothing on it.  The parent's goes on."""
        self._gone = "left to the parent process"
        self._stream.close()

    async def _send(self, face: Face, octets: bytes, deadline: float) -> None:
        begin = self._queued
        self._queued += len(octets)
        self._out += octets
        try:
            self._push()
            while self._out and not self._flushing:
                if not await self._writable(face, deadline):
                    raise TimeoutError("the daemon reads nothing")
                self._push()
        except OSError as wrong:  # part of a message may have left: nothing can follow it on this stream
            self._hear_last_words()
            self.close(why(wrong))
            raise self._conversation.ended(why(wrong), sent=self._sent > begin) from None
        except BaseException:
            self.close("interrupted")
            raise

    async def _writable(self, face: Face, deadline: float) -> bool:
        self._flushing = True
        try:
            return await face.ready(self._stream, True, deadline)
        finally:
            self._flushing = False
            self._close_if_idle()

    def _push(self) -> None:
        if self._gone is not None:
            raise OSError(errno.EPIPE, self._gone)
        try:
            while self._out:
                sent = self._stream.send(self._out, socket.MSG_NOSIGNAL)
                self._sent += sent
                del self._out[:sent]
        except BlockingIOError:
            pass

    def _hear_last_words(self) -> None:
        """A daemon that closes a connection at once has said why, and the bytes are still there to be read."""
        if not self._reading:
            try:
                self._conversation.receive(self._stream.recv(READ_BYTES))
            except OSError:
                pass

    async def _await(self, face: Face, operation: str, msgid: int, deadline: float) -> dict[str, Any]:
        while True:
            if self._conversation.answered(msgid):
                return self._conversation.answer(msgid)
            if self._gone is not None:
                raise self._conversation.ended(self._gone)
            if not self._reading:
                in_time = await self._read(face, deadline)
            else:
                gate = self._gates[msgid] = face.gate()
                in_time = await gate.passed(deadline)
            if not in_time and not self._conversation.answered(msgid):
                raise OutcomeUnknown(operation, "the daemon did not answer in time")

    async def _read(self, face: Face, deadline: float) -> bool:
        """Reads once for all who wait; False if nothing came until the deadline."""
        self._reading = True
        try:
            if not await face.ready(self._stream, False, deadline):
                return False
            octets = self._stream.recv(READ_BYTES)
            answered, events = self._conversation.receive(octets)
            for msgid in answered:
                if msgid in self._gates:
                    self._gates[msgid].open()
            for event in events:
                if (
                    event.method == "prove"
                ):  # before Linux 6.5: the daemon asks which process this is, the kernel signs what we send
                    echo = proof(event.params.get("nonce"))
                    self._queued += len(echo)
                    self._out += echo
                    self._push()
            if not octets or self._conversation.fault is not None:
                self.close("the daemon closed the connection")
        except BlockingIOError:
            pass
        except OSError as wrong:
            self.close(why(wrong))
        finally:
            self._reading = False
            self._close_if_idle()
        return True

    def _close_if_idle(self) -> None:
        if self._gone is not None and not self._reading and not self._flushing:
            self._stream.close()

    def _pass_on(self) -> None:
        """Wakes one of those who wait, to read on; one that is woken for nothing waits again."""
        if not self._reading:
            for gate in self._gates.values():
                gate.open()
                return
