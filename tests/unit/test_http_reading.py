"""Requests out of bytes, however they are cut; and where the bounds are."""

from __future__ import annotations

import pytest

from leased.doors.http_reading import MAX_BODY_BYTES, MAX_HEAD_BYTES, Asked, Head, Reader
from leased.doors.problems import Problem


def nothing_wrong(head: Head) -> None:
    pass


def read(raw: bytes, size: int, judge: object = nothing_wrong) -> list[Asked]:
    reader = Reader(judge)  # type: ignore[arg-type]
    found = []
    for at in range(0, len(raw), size):
        reader.feed(raw[at : at + size])
        while (asked := reader.take()) is not None:
            found.append(asked)
    assert not reader.partial
    return found


PIPELINE = (
    b"POST /a HTTP/1.1\r\nHost: h\r\nContent-Length: 5\r\n\r\nhello"
    b"\r\n\r\nGET /b HTTP/1.1\r\nHost: h\r\n\r\n"
    b"POST /c HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nfoo\r\n2;e=f\r\nba\r\n0\r\nX: y\r\n\r\n"
    b"GET /d HTTP/1.1\r\nHost: h\r\nConnection: Close\r\n\r\n"
)


@pytest.mark.parametrize("size", [1, 2, 3, 7, 40, 64, 1000])
def test_requests_are_the_same_however_the_bytes_are_cut(size: int) -> None:
    asked = read(PIPELINE, size)
    assert [(one.head.method, one.head.target, one.body) for one in asked] == [
        ("POST", "/a", b"hello"), ("GET", "/b", b""), ("POST", "/c", b"fooba"), ("GET", "/d", b""),
    ]  # fmt: skip
    assert [one.head.keep_alive for one in asked] == [True, True, True, False]


def refusal(raw: bytes, size: int = 65536) -> Problem:
    with pytest.raises(Problem) as caught:
        read(raw, size)
    return caught.value


@pytest.mark.parametrize("size", [100, 65536])
def test_a_head_is_bounded_whether_it_comes_whole_or_in_pieces(size: int) -> None:
    head = b"GET / HTTP/1.1\r\nHost: h\r\nX: %s\r\n\r\n"
    assert len(read(head % (b"x" * (MAX_HEAD_BYTES - 100)), size)) == 1
    assert refusal(head % (b"x" * MAX_HEAD_BYTES), size).status == 431


@pytest.mark.parametrize("size", [1000, 65536])
def test_a_body_is_bounded_however_it_is_framed(size: int) -> None:
    head = b"POST / HTTP/1.1\r\nHost: h\r\n"
    told = head + b"Content-Length: %d\r\n\r\n"
    assert len(read(told % MAX_BODY_BYTES + b"x" * MAX_BODY_BYTES, size)[0].body) == MAX_BODY_BYTES
    assert refusal(told % (MAX_BODY_BYTES + 1)).status == 413, "before any of it has come"
    chunks = b"8000\r\n" + b"x" * 0x8000 + b"\r\n"
    chunked = head + b"Transfer-Encoding: chunked\r\n\r\n"
    assert len(read(chunked + chunks * 2 + b"0\r\n\r\n", size)[0].body) == MAX_BODY_BYTES
    assert refusal(chunked + chunks * 3, size).status == 413


@pytest.mark.parametrize(
    ("raw", "status"),
    [
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\n\r\n", 400),
        (b"GET / HTTP/2.0\r\nHost: h\r\n\r\n", 400),
        (b"POST / HTTP/1.1\r\nHost: h\r\nContent-Length: 3\r\nContent-Length: 4\r\n\r\nabcd", 400),
        (b"POST / HTTP/1.1\r\nHost: h\r\nContent-Length: 3\r\nTransfer-Encoding: identity\r\n\r\nabc", 501),
        (b"GET / HTTP/1.1\r\nHost: h\r\nAuthorization: a\r\nAuthorization: b\r\n\r\n", 400),
        (b"POST / HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n", 400),
    ],
)
def test_what_is_not_http_is_refused_without_repeating_it(raw: bytes, status: int) -> None:
    problem = refusal(raw)
    assert problem.status == status
    assert "abc" not in problem.text and "\\x" not in problem.text


def test_a_problem_of_the_head_waits_for_the_end_of_the_body() -> None:
    def judge(head: Head) -> None:
        raise Problem(404, "unknown_method", "nothing there")

    (asked,) = read(b"POST / HTTP/1.1\r\nHost: h\r\nContent-Length: 5\r\n\r\nhello", 10, judge)
    assert asked.problem is not None and asked.problem.status == 404
    expecting = b"POST / HTTP/1.1\r\nHost: h\r\nContent-Length: 5\r\nExpect: 100-continue\r\n\r\n"
    with pytest.raises(Problem):
        read(expecting, 1000, judge)


def test_a_client_is_told_to_go_on_once() -> None:
    reader = Reader(nothing_wrong)
    reader.feed(b"POST / HTTP/1.1\r\nHost: h\r\nContent-Length: 5\r\nExpect: 100-continue\r\n\r\n")
    assert reader.take() is None and reader.wants_continue
    reader.told_to_continue()
    assert not reader.wants_continue
    reader.feed(b"hello")
    asked = reader.take()
    assert asked is not None and asked.body == b"hello"
