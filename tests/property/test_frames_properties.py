"""However the bytes are cut and whatever they are: the same messages, one kind of error, bounded memory."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import msgpack
from hypothesis import example, given, settings
from hypothesis import strategies as st

from leased import frames
from leased.frames import FrameError, Replies, Requests

FEW = settings(max_examples=50, deadline=None)

text = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
scalars = st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False) | text | st.binary(max_size=40)
values = st.recursive(scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(text, inner, max_size=3), max_leaves=6)
params = st.dictionaries(text, values, max_size=18)
msgids = st.integers(0, 127) | st.integers(0, 2**32 - 1)
requests = st.tuples(st.just(0), msgids, text, st.lists(params, max_size=1))
notifications = st.tuples(st.just(2), text, st.lists(params, max_size=1))
cuts = st.lists(st.integers(0, 10**6), max_size=12)
answers = st.tuples(st.just(1), msgids, st.none() | text, values)

# Bytes that look like messages for long enough to reach every branch: headers and heads, mixed with anything.
HEADS = [
    b"\x94\x00\x01\xa1x\x91",
    b"\x94\x00\xcd\x91\x81\xa1x\x91",
    b"\x94\x01\x01\xc0",
    b"\x93\x02\xa1x\x91",
    b"\x81\xa1a",
    b"\x82\xa1a\x01",
]
PARTS = [b"\xa1a", b"\x90", b"\x80", b"\x91", b"\xc4\x01a", b"\xc7\x01\x05a", b"\x01", b"\xc0", b"\xc1", b"\xd9\x02ab"]
CLAIMS = [b"\xdc\x00\x02", b"\xde\x00\x02", b"\xdd\xff\xff\xff\xff", b"\xdb\xff\xff\xff\xff", b"\xc9\xff\xff\xff\xff"]
ODDITIES = [b"\xd6\xff\x00\x00\x00\x01", b"\xcb\x7f\xf8\x00\x00\x00\x00\x00\x00"]
pieces = st.sampled_from([*HEADS, *PARTS, *CLAIMS, *ODDITIES])
noise = st.lists(pieces | st.binary(max_size=6), max_size=25).map(b"".join)


def cut(raw: bytes, places: list[int]) -> list[bytes]:
    edges = sorted({0, len(raw), *(place % (len(raw) + 1) for place in places)})
    return [raw[start:end] for start, end in pairwise(edges)]


def received(stream: Requests | Replies, chunks: list[bytes], limit: int) -> tuple[list[Any], str | None]:
    """What came out, and the code of the error that ended it.  Anything but FrameError escapes and fails the test."""
    messages: list[Any] = []
    bound = stream._limit + max(map(len, chunks), default=0)
    try:
        for chunk in chunks:
            stream.feed(chunk)
            while stream.pending and not stream.unfinished:
                assert stream.pending <= bound
                messages += stream.take(limit)
            assert stream.pending < stream._limit
            assert len(stream._raw) <= bound
    except FrameError as error:
        assert stream.pending == len(stream._raw) == 0
        return messages, error.code
    return messages, None


def meaning(message: tuple[Any, ...]) -> Any:
    """What an end of the line should make of this message."""
    if message[0] == 1:
        return frames.Answer(*message[1:])
    fields = message[-1][0] if message[-1] else {}
    return (message[1], message[2], fields) if message[0] == 0 else (None, message[1], fields)


@FEW
@given(st.lists(requests | notifications, max_size=6), cuts, st.integers(1, 8))
def test_any_cut_of_good_requests_gives_the_same_messages(sent: list[Any], places: list[int], limit: int) -> None:
    raw = b"".join(map(msgpack.packb, sent))
    expected = [meaning(message) for message in sent]
    assert received(Requests(), cut(raw, places), limit) == (expected, None)
    assert received(Requests(), [raw], limit) == (expected, None)


@FEW
@given(st.lists(answers | notifications, max_size=6), cuts, st.integers(1, 8))
def test_any_cut_of_good_answers_gives_the_same_messages(sent: list[Any], places: list[int], limit: int) -> None:
    raw = b"".join(map(msgpack.packb, sent))
    expected = [frames.Event(*event[1:]) if (event := meaning(message))[0] is None else event for message in sent]
    assert received(Replies(), cut(raw, places), limit) == (expected, None)


@FEW
@given(noise, cuts, st.integers(1, 3))
def test_noise_raises_only_frame_errors_and_its_cut_does_not_matter(raw: bytes, places: list[int], limit: int) -> None:
    for stream in (Requests, Replies):
        whole = received(stream(), [raw], limit)
        assert repr(received(stream(), cut(raw, places), limit)) == repr(whole)  # repr: NaN is not equal to itself
        assert repr(received(stream(), cut(raw, list(range(len(raw)))), limit)) == repr(whole)


@FEW
@given(st.binary(max_size=20), st.integers(1, 2000), cuts)
def test_repeated_noise_never_fills_memory(unit: bytes, times: int, places: list[int]) -> None:
    received(Requests(), cut(b"\x94\x00\x01\xa1x" + unit * times, places), 16)


def strict(raw: bytes) -> Any:
    try:
        return frames._request(frames._strict(raw, frames._RULES, frames.MAX_VALUES))
    except FrameError:
        return None


@settings(max_examples=150, deadline=None)
@given(noise | (requests | notifications | answers).map(msgpack.packb))
@example(b"\x94\x00\x01\xa1x\x91\x82\xa1a\x01\xa1a\x02")
@example(b"\x94\x00\x01\xa1x\x91\xde\x00\x5f" + b"".join(b"\xd9\x02%02d\x01" % n for n in [*range(94), 93]))
@example(b"\x94\x00\x01\xa1x\x91\x81\xc4\x01a\x01")
@example(b"\x94\x00\x01\xa1x\x91\x81\xa1a\xd6\xff\x00\x00\x00\x01")
@example(b"\x94\x00\x01\xa1x\x91\xdc\x00\x5c" + b"\x01" * 92)
@example(b"\xa8" + "ÔÑaÁ".encode())
def test_the_fast_path_accepts_nothing_the_strict_one_refuses(raw: bytes) -> None:
    fast = frames.single(raw)
    if fast is not None:
        assert repr(fast) == repr(strict(raw))


@FEW
@given(msgids, st.text("abcdefghijklmnopqrstuvwxyz_", max_size=31), st.dictionaries(text, scalars, max_size=15))
def test_the_fast_path_takes_every_flat_request(msgid: int, method: str, fields: dict[str, Any]) -> None:
    raw = frames.request(msgid, method, fields)
    assert frames.single(raw) == (msgid, method, fields) == strict(raw)
