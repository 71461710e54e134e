"""A connection to FakeLeased: what is sent is answered before `send` returns, by a real socket, so that clients wait as they always do."""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Callable
from typing import Any

import msgpack

from leased.errors import PeerError
from leased.frames import Requests
from leased.model import Reply, WatchRequest


class FakeStream(socket.socket):
    """The client's end.  `sent` is given what it sends, `closed` is called when it closes."""

    def __init__(self, descriptor: int, sent: Callable[[bytes], None], closed: Callable[[], None]) -> None:
        super().__init__(fileno=descriptor)
        self._sent = sent
        self._closed_by_client = closed

    def send(self, octets: Any, flags: int = 0, /) -> int:
        """Raises BrokenPipeError once the fake has closed the connection."""
        self._sent(bytes(octets))
        return len(octets)

    def shutdown(self, how: int, /) -> None:
        self._closed_by_client()
        super().shutdown(how)

    def close(self) -> None:
        super().close()
        self._closed_by_client()


class FakeLine:
    """The fake's end.  `asked(line, msgid, operation, params)` is called for each request, `hung_up(line)` once at the end."""

    def __init__(self, asked: Callable[[FakeLine, int, str, dict[str, Any]], None], hung_up: Callable[[FakeLine], None]) -> None:
        self.watch: WatchRequest | None = None
        self.seq = 0
        self.answered: set[int] = set()
        self.mute = False
        self._asked = asked
        self._hung_up = hung_up
        self._requests = Requests()
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        theirs.setblocking(False)
        self._socket: socket.socket | None = ours
        self.stream = FakeStream(theirs.detach(), self._heard, self.close)

    def answer(self, msgid: int, reply: Reply) -> None:
        self.answered.add(msgid)
        self._say(_packed((1, msgid, None, reply)))

    def refuse(self, msgid: int, error: PeerError) -> None:
        self.answered.add(msgid)
        self._say(_packed((1, msgid, str(error), None)))

    def notify(self, method: str, params: Reply) -> None:
        self._say(_packed((2, method, (params,))))

    def close(self) -> None:
        ours, self._socket = self._socket, None
        if ours is not None:
            ours.close()
            self._hung_up(self)

    def _heard(self, octets: bytes) -> None:
        if self._socket is None:
            raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))
        self._requests.feed(octets)
        while self._requests.pending and not self._requests.unfinished:
            for msgid, operation, params in self._requests.take():
                if msgid is not None:
                    self._asked(self, msgid, operation, params)

    def _say(self, octets: bytes) -> None:
        """A reader too slow for the socket's buffer loses the connection."""
        if self._socket is not None and not self.mute:
            try:
                self._socket.sendall(octets)
            except OSError:
                self.close()


def _packed(message: tuple[Any, ...]) -> bytes:
    packed: bytes = msgpack.packb(message)
    return packed
