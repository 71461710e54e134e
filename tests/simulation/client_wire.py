"""One connection, seen from its client: bytes out, answers and events in, each answer compared with what the daemon had said."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import trio
from parties import NOT_ANSWERED, Asked, Connection, Heard

from leased import frames

if TYPE_CHECKING:
    from programs import Client

PATIENCE_SECONDS = 12.0


class Wire:
    """One connection, seen from its client."""

    def __init__(self, client: Client, connection: Connection, ours: socket.socket) -> None:
        self._client = client
        self.connection = connection
        self._socket: socket.socket | None = ours
        self._frames = frames.Replies()
        self._next = 1
        self._open: dict[int, tuple[str, Mapping[str, Any], float]] = {}
        self.answers: dict[int, Any] = {}
        self.watch: Heard | None = None

    @property
    def alive(self) -> bool:
        return self._socket is not None

    def send(self, *requests: tuple[str, dict[str, Any]]) -> list[int]:
        """Written at once, as a pipeline.  An empty list: the connection was gone."""
        world = self._client.world
        packed, numbers = b"", []
        for operation, params in requests:
            number = self._next
            self._next += 1
            world.referee.sent(self.connection, number, operation, params)
            self._open[number] = (operation, params, world.time)
            packed += frames.request(number, operation, params)
            numbers.append(number)
        try:
            assert self._socket is not None
            self._socket.sendall(packed)
        except OSError:
            self.close()
            return []
        return numbers

    async def read(self, *numbers: int, seconds: float = PATIENCE_SECONDS) -> None:
        """Until all of `numbers` are answered, the connection ends, or patience does.  With no number, just read for `seconds`."""
        with trio.move_on_after(seconds):
            while self._socket is not None and not (numbers and all(number in self.answers for number in numbers)):
                await trio.lowlevel.wait_readable(self._socket)
                self._take()

    def _take(self) -> None:
        assert self._socket is not None
        try:
            chunk = self._socket.recv(64 * 1024)
        except BlockingIOError:
            return
        except OSError:
            chunk = b""
        if not chunk:
            self.close()
            return
        self._frames.feed(chunk)
        for message in self._frames.take():
            if isinstance(message, frames.Event):
                self._event(message)
            else:
                self._answer(message)

    def _answer(self, message: frames.Answer) -> None:
        world = self._client.world
        told = message.error if message.error is not None else message.result
        if message.msgid not in self._open:
            world.referee.complain(f"{self.connection} is answered {message.msgid}, which it did not ask")
            return
        operation, params, sent = self._open.pop(message.msgid)
        asked: Asked = world.referee.asked[self.connection, message.msgid]
        if asked.answer is NOT_ANSWERED or told != asked.answer:
            world.referee.complain(f"{asked} was told {told}, and the daemon had said {asked.answer}")
        self.answers[message.msgid] = told
        self._client.note(operation, params, sent, world.time, told, self.connection.namespace)

    def _event(self, message: frames.Event) -> None:
        if self.watch is not None:
            self.watch.came.append({"method": message.method, **message.params})

    def half_close(self) -> None:
        if self._socket is not None:
            self.connection.half_closed = True
            try:
                self._socket.shutdown(socket.SHUT_WR)
            except OSError:
                self.close()

    def close(self) -> None:
        if self._socket is None:
            return
        self._socket.close()
        self._socket = None
        self.connection.gone = True
        world = self._client.world
        if self.watch is not None:
            self._client.heard.append(self.watch)
            self.watch = None
        for operation, params, sent in self._open.values():
            self._client.note(operation, params, sent, None, None, self.connection.namespace)
        self._open.clear()
        self._client.history.closed(self._client.name, world.time)
