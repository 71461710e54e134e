"""The quick reader of common requests against h11: what it takes, h11 takes too, and means the same."""

from __future__ import annotations

import h11
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from leased.doors.http_plain import plain

MOST = 16 * 1024


def by_h11(raw: bytes) -> tuple[bytes, bytes, dict[bytes, bytes], bytes, bytes] | None:
    """(method, target, headers, body, rest) of a whole request; None for anything else."""
    connection = h11.Connection(h11.SERVER, max_incomplete_event_size=MOST)
    connection.receive_data(raw)
    request, body = None, b""
    try:
        while True:
            event = connection.next_event()
            if isinstance(event, h11.Request):
                request = event
            elif isinstance(event, h11.Data):
                body += event.data
            elif isinstance(event, h11.EndOfMessage):
                break
            else:
                return None
    except h11.RemoteProtocolError:
        return None
    assert request is not None
    headers: dict[bytes, bytes] = {}
    for name, value in request.headers:
        headers[name] = headers[name] + b", " + value if name in headers else value
    return request.method, request.target, headers, body, connection.trailing_data[0]


NAMES = st.sampled_from(
    [
        "Host",
        "host",
        "Content-Length",
        "Content-Type",
        "Accept",
        "X-A",
        "Transfer-Encoding",
        "Expect",
        "Connection",
        "Upgrade",
        "Bad Name",
        "X_Y",
        "",
    ]
)
VALUES = st.sampled_from(
    [
        "localhost",
        "0",
        "5",
        " 5 ",
        "05",
        "+5",
        "5, 5",
        "-1",
        "99999",
        "chunked",
        "100-continue",
        "close",
        "keep-alive",
        "\t5",
        "a\x00b",
        "é",
        "",
        " ",
        "a\r\n b",
    ]
)
HEADERS = st.lists(st.tuples(NAMES, VALUES, st.sampled_from([": ", ":", " : "])), max_size=6)
LINES = st.sampled_from(
    [
        "POST /v1/lease HTTP/1.1",
        "GET / HTTP/1.1",
        "GET  / HTTP/1.1",
        "GET / HTTP/1.0",
        "PUT / HTTP/1.1",
        "GET /a b HTTP/1.1",
        "POST /é HTTP/1.1",
        "get / HTTP/1.1",
    ]
)
ENDS = st.sampled_from(["\r\n", "\r\n", "\r\n", "\n"])


@settings(max_examples=600, deadline=None)
@given(LINES, HEADERS, ENDS, st.sampled_from([b"", b"hello", b"hello, more", b"GET / HTTP/1.1\r\nHost: h\r\n\r\n"]))
@example("POST / HTTP/1.1", [("Host", "h", ": "), ("Content-Length", "5", ":")], "\r\n", b"hello, more")
@example("POST / HTTP/1.1", [("Host", "h", ": "), ("Connection", "keep-alive", ":")], "\r\n", b"")
def test_what_is_read_quickly_means_the_same_to_h11(line: str, headers: list[tuple[str, str, str]], end: str, rest: bytes) -> None:
    head = end.join([line, *(name + separator + value for name, value, separator in headers), "", ""])
    raw = head.encode("latin-1") + rest
    quick = plain(raw, MOST, 65536)
    if quick is not None:
        assert by_h11(raw) == (quick.method, quick.target, quick.headers, raw[quick.head_end : quick.end], raw[quick.end :])


@settings(max_examples=400, deadline=None)
@given(st.binary(max_size=40), st.integers(0, 120))
def test_nor_does_damage_make_them_differ(noise: bytes, at: int) -> None:
    raw = b"POST /v1/lease HTTP/1.1\r\nHost: localhost\r\nContent-Length: 11\r\nX-Other: value\r\n\r\n" + b'{"key":"k"}'
    raw = raw[:at] + noise + raw[at:]
    quick = plain(raw, MOST, 65536)
    if quick is not None:
        assert by_h11(raw) == (quick.method, quick.target, quick.headers, raw[quick.head_end : quick.end], raw[quick.end :])


@pytest.mark.parametrize(
    "raw",
    [
        b"GET / HTTP/1.1\r\nHost: h\r\n\r\n",
        b"POST / HTTP/1.1\r\nHost: h\r\nContent-Length: 2\r\n\r\n{}GET",
        b"GET /x?y HTTP/1.1\r\nHost: h\r\nUser-Agent: curl/7.88.1\r\nAccept: */*\r\nConnection: keep-alive\r\n\r\n",
    ],
)
def test_common_requests_are_read_quickly(raw: bytes) -> None:
    assert plain(raw, MOST, 65536) is not None


@pytest.mark.parametrize(
    "raw",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: h\r\nHost: h\r\n\r\n",
        b"GET / HTTP/1.1\nHost: h\n\n",
        b"POST / HTTP/1.1\r\nHost: h\r\nContent-Length: 3\r\n\r\n{}",
        b"POST / HTTP/1.1\r\nHost: h\r\nContent-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n{}",
        b"POST / HTTP/1.1\r\nHost: h\r\nContent-Length: 2\r\nExpect: 100-continue\r\n\r\n{}",
        b"GET / HTTP/1.1\r\nHost: h\r\nConnection: close\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: h\r\nX: a\r\n b\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: h\r\nX: " + b"x" * MOST + b"\r\n\r\n",
        b"POST / HTTP/1.1\r\nHost: h\r\nContent-Length: 70000\r\n\r\n" + b"x" * 70000,
    ],
)
def test_all_else_is_left_to_h11(raw: bytes) -> None:
    assert plain(raw, MOST, 65536) is None
