"""The plainest HTTP client that can misbehave: raw bytes over a socket, one response at a time.  For tests only.

It shares no code with the daemon and parses what comes back by the letter, so that a wrong length or a missing header cannot hide.
"""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any, NamedTuple, Self

ANSWER_SECONDS = 20.0


class Response(NamedTuple):
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> dict[str, Any]:
        value = json.loads(self.body)
        assert isinstance(value, dict)
        return value

    @property
    def code(self) -> str:
        """Of a problem document, which this must be."""
        assert self.headers["content-type"] == "application/problem+json", self
        told = self.json
        assert set(told) == {"type", "title", "status", "detail", "code"} and told["status"] == self.status, told
        code = told["code"]
        assert isinstance(code, str)
        return code


def request(method: str, path: str, fields: Any = None, *, body: bytes | None = None, **headers: str | None) -> bytes:
    """The bytes of a request.  A header that is None is left out; `host` and `content_type` are there unless they are."""
    if body is None and fields is not None:
        body = json.dumps(fields).encode()
    said: dict[str, str | None] = {"host": "localhost"}
    if body is not None:
        said |= {"content-type": "application/json", "content-length": str(len(body))}
    said |= {name.replace("_", "-"): value for name, value in headers.items()}
    lines = [f"{method} {path} HTTP/1.1", *(f"{name}: {value}" for name, value in said.items() if value is not None)]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + (body or b"")


class Http:
    """One connection, to a Unix socket (a path) or to (host, port)."""

    def __init__(self, where: Path | tuple[str, int], *, timeout: float = ANSWER_SECONDS) -> None:
        if isinstance(where, tuple):
            self.socket = socket.create_connection(where, timeout=timeout)
        else:
            self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            self.socket.settimeout(timeout)
            self.socket.connect(str(where))
        self._raw = b""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()

    def close(self) -> None:
        self.socket.close()

    def send(self, octets: bytes) -> None:
        self.socket.sendall(octets)

    def ask(self, method: str, path: str, fields: Any = None, **more: Any) -> Response:
        self.send(request(method, path, fields, **more))
        return self.response(bodiless=method == "HEAD")

    def post(self, path: str, **fields: Any) -> Response:
        return self.ask("POST", path, fields)

    def line(self) -> bytes:
        while b"\r\n" not in self._raw:
            self._more()
        line, _, self._raw = self._raw.partition(b"\r\n")
        return line

    def response(self, *, bodiless: bool = False) -> Response:
        """The next response.  Raises TimeoutError, and ConnectionError where there is no more."""
        version, status, _ = self.line().split(b" ", 2)
        assert version == b"HTTP/1.1"
        headers: dict[str, str] = {}
        while line := self.line():
            name, _, value = line.decode("latin-1").partition(": ")
            assert name.lower() not in headers, name
            headers[name.lower()] = value
        length = 0 if bodiless or status == b"100" else int(headers["content-length"])
        while len(self._raw) < length:
            self._more()
        body, self._raw = self._raw[:length], self._raw[length:]
        return Response(int(status), headers, body)

    def ended(self) -> bool:
        """Does the daemon hang up now, with nothing more to say?"""
        try:
            return not self._raw and not self.socket.recv(1)
        except ConnectionResetError:
            return True

    def silent(self, seconds: float) -> bool:
        """Does nothing come within `seconds`?"""
        before = self.socket.gettimeout()
        self.socket.settimeout(seconds)
        try:
            self._more()
        except TimeoutError:
            return True
        finally:
            self.socket.settimeout(before)
        return False

    def _more(self) -> None:
        chunk = self.socket.recv(65536)
        if not chunk:
            raise ConnectionError("the daemon has hung up")
        self._raw += chunk
