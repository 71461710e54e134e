"""What the HTTP door says when it cannot answer: RFC 9457 problem documents, and the bytes of a response."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from typing import Any, Final

from leased.errors import PeerError

JSON: Final = "application/json"
PROBLEM: Final = "application/problem+json"

PHRASES: Final = {
    200: "OK",
    400: "Bad Request",
    401: "Unauthorized",
    403: "Forbidden",
    404: "Not Found",
    405: "Method Not Allowed",
    408: "Request Timeout",
    409: "Conflict",
    413: "Content Too Large",
    415: "Unsupported Media Type",
    429: "Too Many Requests",
    431: "Request Header Fields Too Large",
    500: "Internal Server Error",
    501: "Not Implemented",
    503: "Service Unavailable",
}
STATUS_OF: Final = {
    "invalid_argument": 400,
    "unknown_method": 404,
    "unauthenticated": 401,
    "permission_denied": 403,
    "too_large": 413,
    "rate_limited": 429,
    "internal": 500,
    "invalid_token": 409,
}
RATE_LIMITED_RETRY_SECONDS: Final = 1
_CHALLENGE: Final = ("WWW-Authenticate", 'Bearer realm="leased"')

encode: Final = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode
"""One for all answers: json.dumps with anything but its defaults builds an encoder each time."""

Headers = tuple[tuple[str, str], ...]


class Problem(Exception):
    """An answer that is an error.  `code` is one of STATUS_OF; `text` says what to do and repeats nothing secret."""

    def __init__(self, status: int, code: str, text: str, headers: Headers = ()) -> None:
        super().__init__(text)
        self.status = status
        self.code = code
        self.text = text
        self.headers = headers

    def document(self) -> bytes:
        return encode(
            {"type": "about:blank", "title": PHRASES[self.status], "status": self.status, "detail": self.text, "code": self.code}
        ).encode()


def problem_of(error: PeerError) -> Problem:
    status = STATUS_OF[error.code]
    headers: Headers = ()
    if status == 401:
        headers = (_CHALLENGE,)
    elif status == 429:
        headers = (("Retry-After", str(RATE_LIMITED_RETRY_SECONDS)),)
    return Problem(status, error.code, error.text, headers)


def retry_after(seconds: float) -> tuple[str, str]:
    """Whole seconds, rounded up: nobody is told to come back too soon."""
    return "Retry-After", str(max(1, math.ceil(seconds)))


def response(
    status: int,
    kind: str,
    body: bytes,
    *,
    date: str,
    headers: Iterable[tuple[str, str]] = (),
    close: bool = False,
    head_only: bool = False,
) -> bytes:
    """A whole response.  Answers carry fences, so none may be kept by whatever lies between."""
    lines = (
        f"HTTP/1.1 {status} {PHRASES[status]}\r\nDate: {date}\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\n"
        "Cache-Control: no-store\r\nX-Content-Type-Options: nosniff\r\n"
    )
    for name, value in headers:
        lines += f"{name}: {value}\r\n"
    lines += "Connection: close\r\n\r\n" if close else "\r\n"
    return lines.encode("latin-1") if head_only else lines.encode("latin-1") + body


def decoded(body: bytes) -> Any:
    """The JSON value of a body.  Raises Problem: duplicate names, NaN, infinities, bad UTF-8 and what nests too deep are refused."""
    try:
        return _DECODER.decode(body.decode())
    except (ValueError, RecursionError):  # its own words may quote the body
        raise Problem(400, "invalid_argument", "body must be JSON in UTF-8 (RFC 8259), each name once in an object") from None


def _fields(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) < len(pairs):
        raise ValueError
    return fields


def _no_constant(_: str) -> Any:
    raise ValueError


_DECODER: Final = json.JSONDecoder(object_pairs_hook=_fields, parse_constant=_no_constant)
