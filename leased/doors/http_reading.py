"""HTTP/1.1 requests out of bytes, by h11 where there is anything to decide: one request at a time, bounded.

Each request gets an h11 connection of its own, which is asked where the request ends and what is in it.  Answers are written by the door
itself, so that several requests of one connection can be under way: h11 would not read the second before the first is answered.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, NamedTuple

import h11

from leased.doors.http_plain import Plain, plain
from leased.doors.problems import Problem

MAX_HEAD_BYTES: Final = 16 * 1024  # a request of ours has a few hundred
MAX_BODY_BYTES: Final = 64 * 1024  # as a MessagePack-RPC message
_STATUS_TEXTS: Final = {
    400: ("invalid_argument", "this is not an HTTP/1.1 request"),
    431: ("too_large", f"the request line and the headers together exceed {MAX_HEAD_BYTES} bytes"),
    501: ("invalid_argument", "the only Transfer-Encoding understood is chunked"),
}


class Head(NamedTuple):
    """Request line and headers.  Names are lower-case; of a repeated header all values are there, joined by commas, but for those
    that must not be repeated."""

    method: str
    target: str
    headers: dict[bytes, bytes]
    keep_alive: bool


class Asked(NamedTuple):
    """One whole request.  `problem` was found in its head: its body was read only to find the end of it."""

    head: Head
    body: bytes
    problem: Problem | None


_ONCE: Final = frozenset({b"authorization", b"host", b"content-type", b"content-length", b"origin", b"referer"})


class Reader:
    """`judge` is shown each head before the body is read, and raises Problem for one that will not be answered otherwise."""

    __slots__ = ("_body", "_connection", "_head", "_judge", "_problem", "_rest", "_size", "_told")

    def __init__(self, judge: Callable[[Head], None]) -> None:
        self._judge = judge
        self._connection: h11.Connection | None = None
        self._rest = b""
        self._head: Head | None = None
        self._problem: Problem | None = None
        self._body: list[bytes] = []
        self._size = 0
        self._told = False

    @property
    def partial(self) -> bool:
        """A request has begun and is not complete."""
        return self._connection is not None

    @property
    def untouched(self) -> bool:
        """Bytes wait that nobody has looked at."""
        return bool(self._rest)

    @property
    def untouched_bytes(self) -> int:
        return len(self._rest)

    @property
    def wants_continue(self) -> bool:
        """The client waits for a go-ahead before it sends the body."""
        connection = self._connection
        return connection is not None and self._head is not None and not self._told and connection.they_are_waiting_for_100_continue

    def told_to_continue(self) -> None:
        self._told = True

    def feed(self, chunk: bytes) -> None:
        if self._connection is not None:
            self._connection.receive_data(chunk)
        else:
            self._rest += chunk

    def take(self) -> Asked | None:
        """The next whole request, or None until there is more to read.  Raises Problem for what ends the connection."""
        connection = self._connection
        if connection is None:
            self._rest = self._rest.lstrip(b"\r\n")  # RFC 9112 2.2: empty lines before a request line mean nothing
            if not self._rest:
                return None
            if (common := plain(self._rest, MAX_HEAD_BYTES, MAX_BODY_BYTES)) is not None:
                return self._whole(common)
            connection = self._connection = h11.Connection(h11.SERVER, max_incomplete_event_size=MAX_HEAD_BYTES)
            connection.receive_data(self._rest)
            self._rest = b""
        try:
            while True:
                event = connection.next_event()
                if event is h11.NEED_DATA:
                    return None
                if type(event) is h11.Request:
                    self._begin(event)
                    if self._problem is not None and connection.they_are_waiting_for_100_continue:
                        raise self._problem
                elif type(event) is h11.Data:
                    self._size += len(event.data)
                    if self._size > MAX_BODY_BYTES:
                        raise too_large()
                    self._body.append(bytes(event.data))
                else:  # EndOfMessage: h11 says nothing else here
                    return self._end(connection)
        except h11.RemoteProtocolError as error:  # its own words may quote the request
            status = error.error_status_hint if error.error_status_hint in _STATUS_TEXTS else 400
            raise Problem(status, *_STATUS_TEXTS[status]) from None

    def _whole(self, common: Plain) -> Asked:
        raw = self._rest
        self._rest = raw[common.end :]
        head = Head(common.method.decode("ascii"), common.target.decode("ascii"), common.headers, True)
        try:
            self._judge(head)
        except Problem as problem:
            return Asked(head, b"", problem)
        return Asked(head, raw[common.head_end : common.end], None)

    def _begin(self, event: h11.Request) -> None:
        headers: dict[bytes, bytes] = {}
        size = len(event.target) + len(event.method)
        for name, value in event.headers:
            size += len(name) + len(value) + 4
            if name in headers:
                if name in _ONCE:
                    raise Problem(400, "invalid_argument", "a header that must be there once is there twice")
                headers[name] += b", " + value
            else:
                headers[name] = value
        if size > MAX_HEAD_BYTES:
            raise Problem(431, *_STATUS_TEXTS[431])
        if event.http_version not in (b"1.1", b"1.0"):
            raise Problem(400, *_STATUS_TEXTS[400])
        keep_alive = event.http_version == b"1.1" and b"close" not in headers.get(b"connection", b"").lower()
        if int(headers.get(b"content-length", b"0")) > MAX_BODY_BYTES:
            raise too_large()
        self._head = Head(event.method.decode("ascii"), event.target.decode("ascii"), headers, keep_alive)
        try:
            self._judge(self._head)
        except Problem as problem:
            self._problem = problem

    def _end(self, connection: h11.Connection) -> Asked:
        assert self._head is not None
        asked = Asked(self._head, b"".join(self._body), self._problem)
        self._rest = connection.trailing_data[0]
        self._connection = self._head = self._problem = None
        self._body = []
        self._size = 0
        self._told = False
        return asked


def too_large() -> Problem:
    return Problem(413, "too_large", f"body exceeds {MAX_BODY_BYTES} bytes")
