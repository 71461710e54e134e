"""The codec against hostile bytes, one msgpack trap at a time; then the two ends facing each other."""

from __future__ import annotations

import struct
import subprocess
import sys
import tracemalloc
from collections.abc import Iterator
from typing import Any

import msgpack
import pytest

from leased import frames
from leased.errors import PeerError
from leased.frames import MAX_DEPTH, MAX_MESSAGE_BYTES, MAX_REPLY_BYTES, Answer, Event, FrameError, Replies, Request, Requests

READ_BYTES = 64 * 1024
LEASE = {"key": "gpu0", "holder": "agent-7", "ttl_seconds": 2.5, "wait_seconds": 0, "request_id": "r" * 24}
GOOD = msgpack.packb([0, 1, "lease", [LEASE]])
TAKEN = (1, "lease", LEASE)
TIMESTAMP = b"\xd6\xff\x00\x00\x00\x01"


def drained(stream: Requests | Replies, limit: int = 64) -> list[Any]:
    """Everything complete, the way a door does it."""
    messages: list[Any] = []
    while stream.pending and not stream.unfinished:
        taken = stream.take(limit)
        assert len(taken) <= limit
        messages += taken
    return messages


def with_params(encoded: bytes) -> bytes:
    """A request whose params array holds these bytes, whatever they are."""
    return b"\x94\x00\x01\xa5lease\x91" + encoded


def refused(raw: bytes, stream: Requests | Replies | None = None) -> FrameError:
    """The error for these bytes, which must come at once and for ever, and leave nothing in memory."""
    stream = stream or Requests()
    with pytest.raises(FrameError) as first:
        stream.feed(raw)
        drained(stream)
    assert first.value.fatal
    assert stream.pending == 0
    assert not stream.unfinished
    stream.feed(GOOD)
    assert stream.pending == 0
    with pytest.raises(FrameError):
        stream.take(1)
    return first.value


def nested(depth: int) -> bytes:
    """A request `depth` containers deep, itself and its params included."""
    return with_params(b"\x81\xa1a" + b"\x91" * (depth - 4) + b"\x90")


# ---- what an honest peer sends


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        (GOOD, TAKEN),
        (msgpack.packb([0, 0, "info", []]), (0, "info", {})),
        (msgpack.packb([0, 2**32 - 1, "info", [{}]]), (2**32 - 1, "info", {})),
        (msgpack.packb([0, 200, "info", [{}]]), (200, "info", {})),
        (msgpack.packb([0, 60000, "info", [{}]]), (60000, "info", {})),
        (msgpack.packb([2, "note", [{"a": 1}]]), (None, "note", {"a": 1})),
        (msgpack.packb([2, "note", []]), (None, "note", {})),
        (b"\xdc\x00\x04\xcc\x00\xcd\x00\x05\xd9\x01x\xdd\x00\x00\x00\x01\xde\x00\x00", (5, "x", {})),
        (with_params(b"\x81\xa2id\xc4\x03abc"), (1, "lease", {"id": b"abc"})),
        (msgpack.packb([0, 1, "m" * 40, [{f"f{n}": n for n in range(30)}]]), (1, "m" * 40, {f"f{n}": n for n in range(30)})),
        (
            msgpack.packb([0, 1, "x", [{"é": "schlüssel", "t": None, "b": True}]]),
            (1, "x", {"é": "schlüssel", "t": None, "b": True}),
        ),
        (msgpack.packb([0, 1, "x", [{"a": {"b": [1, {"c": []}]}}]]), (1, "x", {"a": {"b": [1, {"c": []}]}})),
        (with_params(b"\x81\xa1n\xcf" + b"\xff" * 8), (1, "lease", {"n": 2**64 - 1})),
        (with_params(b"\x81\xa1n\xcb" + struct.pack(">d", float("inf"))), (1, "lease", {"n": float("inf")})),
    ],
)
def test_good_messages_whole_and_byte_by_byte(raw: bytes, expected: Request) -> None:
    whole = Requests()
    whole.feed(raw)
    assert whole.pending == len(raw)
    assert whole.take(1) == [expected]
    assert (whole.pending, whole.unfinished) == (0, False)
    dripped = Requests()
    for index in range(len(raw) - 1):
        dripped.feed(raw[index : index + 1])
        assert dripped.take(1) == []
        assert (dripped.pending, dripped.unfinished) == (index + 1, True)
    dripped.feed(raw[-1:])
    assert dripped.take(1) == [expected]
    assert (dripped.pending, dripped.unfinished) == (0, False)


def test_the_usual_request_takes_the_fast_path() -> None:
    for msgid in (0, 127, 128, 255, 256, 65535, 65536, 2**32 - 1):
        assert frames.single(msgpack.packb([0, msgid, "lease", [LEASE]])) == (msgid, "lease", LEASE)
    stream = Requests()
    stream.feed(GOOD)
    stream.take(1)
    assert stream._scanner is None


def test_take_stops_at_its_limit_and_keeps_the_rest() -> None:
    stream = Requests()
    stream.feed(GOOD * 5 + GOOD[:10])
    assert stream.take(0) == []
    assert stream.pending == len(GOOD) * 5 + 10
    assert stream.take(2) == [TAKEN] * 2
    assert stream.pending == len(GOOD) * 3 + 10
    assert stream.take(3) == [TAKEN] * 3
    assert not stream.unfinished  # nobody has looked yet
    assert stream.take(3) == []
    assert (stream.pending, stream.unfinished) == (10, True)
    stream.feed(GOOD[10:] + GOOD)
    assert not stream.unfinished
    assert stream.take(9) == [TAKEN] * 2
    assert stream.pending == 0


def test_3500_pipelined_messages_in_64_kib_reads_pass() -> None:
    sent = [(n, "lease", {**LEASE, "key": f"key-{n}"}) for n in range(3500)]
    raw = b"".join(msgpack.packb([0, msgid, method, [params]]) for msgid, method, params in sent)
    assert len(raw) > 4 * READ_BYTES
    stream = Requests()
    got = []
    for start in range(0, len(raw), READ_BYTES):
        stream.feed(raw[start : start + READ_BYTES])
        got += drained(stream)
        assert stream.pending < 200
    assert got == sent
    assert stream.pending == 0


def test_nan_is_left_to_the_schema() -> None:
    stream = Requests()
    stream.feed(msgpack.packb([0, 1, "x", [{"ttl_seconds": float("nan")}]]))
    value = stream.take(1)[0][2]["ttl_seconds"]
    assert value != value


# ---- damage


@pytest.mark.parametrize(
    ("raw", "text"),
    [
        (b"\xc1", "not MessagePack"),
        (with_params(b"\x81\xa1a\xc1"), "not MessagePack"),
        (with_params(b"\x82\xa1a\x01\xa1a\x02"), "duplicate key"),
        (with_params(b"\x81\xa1a\x82\xa1b\x01\xa1b\x02"), "duplicate key"),
        (with_params(b"\xde\x00\x5f" + b"".join(b"\xd9\x02%02d\x01" % n for n in [*range(94), 93])), "beyond its limits"),
        (with_params(b"\x81\x01\x02"), "not MessagePack"),
        (with_params(b"\x81\x90\x02"), "not MessagePack"),
        (with_params(b"\x81\xc4\x01a\x02"), "key which is not a string"),
        (with_params(b"\x81\xc0\x02"), "not MessagePack"),
        (with_params(b"\x81\xa1a\xa1\xff"), "not UTF-8"),
        (with_params(b"\x81\xa1a\xa3\xed\xa0\x80"), "not UTF-8"),
        (with_params(b"\x81\xa1\xff\x01"), "not UTF-8"),
        (with_params(b"\x81\xa1a\xd4\x05x"), "extension type 5"),
        (with_params(b"\x81\xa1a\xc7\x02\x05xy"), "extension type 5"),
        (with_params(b"\x81\xa1a\xc9\xff\xff\xff\xff"), "beyond its limits"),  # msgpack's length wraps round to nothing
        (with_params(b"\x81\xa1a" + TIMESTAMP), "timestamp"),
        (with_params(b"\x81\xa1a\xd7\xff" + b"\xff" * 8), "not MessagePack"),
        (with_params(b"\x81\xa1a\xc7\x0c\xff" + b"\x00" * 4 + b"\x7f" + b"\xff" * 7), "timestamp"),
        (b"\x94\x00\x01" + TIMESTAMP + b"\x90", "timestamp"),
        (TIMESTAMP, "must be"),
        (with_params(b"\x81\xa1a\xdc\x04\x01" + b"\x01" * 1025), "beyond its limits"),
    ],
)
def test_damage_is_refused(raw: bytes, text: str) -> None:
    error = refused(raw)
    assert error.code == "invalid_argument"
    assert text in error.text
    assert text in refused(raw + GOOD).text


@pytest.mark.parametrize(
    "message",
    [
        [],
        {},
        0,
        None,
        "lease",
        [0],
        [0, 1, "x"],
        [0, 1, "x", [], 0],
        [False, 1, "x", []],
        [0.0, 1, "x", []],
        [3, 1, "x", []],
        [1, 1, None, {}],
        [0, -1, "x", []],
        [0, 2**32, "x", []],
        [0, True, "x", []],
        [0, 1.0, "x", []],
        [0, "1", "x", []],
        [0, None, "x", []],
        [0, 1, b"x", []],
        [0, 1, None, []],
        [0, 1, 7, []],
        [2, "x"],
        [2, b"x", {}],
        [2, 1, "x", []],
        [True, "x", []],
    ],
)
def test_wrong_envelopes_are_refused(message: Any) -> None:
    error = refused(msgpack.packb(message))
    assert error.code == "invalid_argument"
    assert "message must be [0, msgid, method, params]" in error.text


OTHER_LISTS: list[Any] = [[1], [None], [[]], ["k"], [{}, {}], [{}, 1]]


@pytest.mark.parametrize("params", [{}, None, 1, "a", {"a": 1}, *OTHER_LISTS])
def test_params_of_another_shape_are_refused(params: Any) -> None:
    assert "params must be [map]" in refused(msgpack.packb([0, 7, "lease", params])).text
    if not isinstance(params, list):
        assert "message must be" in refused(msgpack.packb([2, "lease", params])).text


@pytest.mark.parametrize("params", [[], [{}], *OTHER_LISTS])
def test_a_notification_for_another_kind_of_server_is_no_operation_and_no_fault(params: list[Any]) -> None:
    stream = Requests()
    stream.feed(msgpack.packb([2, b"nvim_set_client_info", params]) + msgpack.packb([0, 1, "info", []]))
    assert stream.take() == [(None, "", {}), (1, "info", {})]


@pytest.mark.parametrize("params", OTHER_LISTS)
def test_a_notification_with_positional_parameters_is_not_taken_for_one_of_ours(params: list[Any]) -> None:
    stream = Requests()
    stream.feed(msgpack.packb([2, "watch", params]))
    assert stream.take() == [(None, "", {})]


def test_depth_is_counted_from_the_message_itself() -> None:
    stream = Requests()
    stream.feed(nested(MAX_DEPTH))
    assert [message[:2] for message in stream.take(1)] == [(1, "lease")]
    for depth in (MAX_DEPTH + 1, 17, 1000, 1024, 1025, 3000):
        assert "nested" in refused(nested(depth)).text
    assert "nested" in refused(b"\x94" + b"\x91" * 3000).text
    assert "nested" in refused(with_params(b"\x81\xa1a" * 500 + b"\x01")).text


def test_good_messages_before_the_damage_are_answered_first() -> None:
    for damage in (b"\xc1", msgpack.packb([1, 1, None, None]), with_params(b"\x81\xa1a\xa1\xff"), b"GET / HTTP/1.1\r\n"):
        for limit in (1, 2, 3, 64):
            stream = Requests()
            stream.feed(GOOD * 3 + damage + GOOD)
            taken: list[Request] = []
            with pytest.raises(FrameError):
                while stream.pending and not stream.unfinished:
                    taken += stream.take(limit)
            assert taken == [TAKEN] * 3
            assert stream.pending == 0


def test_after_damage_was_seen_nothing_more_is_read() -> None:
    stream = Requests()
    stream.feed(GOOD + b"\xc1")
    assert stream.take(9) == [TAKEN]
    assert stream.pending > 0
    assert not stream.unfinished
    stream.feed(GOOD)
    with pytest.raises(FrameError):
        stream.take(9)
    assert stream.pending == 0


def test_the_error_is_a_peer_error_and_quotes_nothing_sent() -> None:
    error = refused(with_params(b"\x82\xa6secret\x01\xa6secret\x02"))
    assert isinstance(error, PeerError)
    assert "secret" not in str(error)
    assert str(error).startswith("invalid_argument: ")


# ---- size and memory


def sized(size: int) -> bytes:
    """A good request of exactly `size` bytes."""
    empty = len(msgpack.packb([0, 1, "x", [{"a": "b" * 60000}]])) - 60000
    raw: bytes = msgpack.packb([0, 1, "x", [{"a": "b" * (size - empty)}]])
    if len(raw) != size:  # past 64 KiB the string's own header grows
        raw = msgpack.packb([0, 1, "x", [{"a": "b" * (2 * size - empty - len(raw))}]])
    assert len(raw) == size
    return raw


def reads(raw: bytes, size: int) -> Iterator[bytes]:
    return (raw[start : start + size] for start in range(0, len(raw), size))


@pytest.mark.parametrize("read", [1000, READ_BYTES, 10 * READ_BYTES])
def test_64_kib_pass_and_one_byte_more_does_not(read: int) -> None:
    stream = Requests()
    for chunk in reads(sized(MAX_MESSAGE_BYTES) + GOOD, read):
        stream.feed(chunk)
        got = drained(stream)
    assert got[-1] == TAKEN
    assert stream.pending == 0
    stream = Requests()
    with pytest.raises(FrameError) as caught:
        for chunk in reads(GOOD + sized(MAX_MESSAGE_BYTES + 1), read):
            stream.feed(chunk)
            drained(stream)
    assert caught.value.code == "too_large"


@pytest.mark.parametrize("header", [b"\xdb", b"\xc6", b"\xdd", b"\xdf", b"\xc8\xff"])
def test_a_claim_of_4_gib_waits_as_unfinished_and_costs_nothing(header: bytes) -> None:
    stream = Requests()
    stream.feed(GOOD + with_params(b"\x81\xa1a" + header + b"\xff" * 4))
    assert drained(stream) == [TAKEN]
    assert stream.unfinished
    assert stream.pending < 30
    with pytest.raises(FrameError) as caught:
        for _ in range(17):
            stream.feed(b"\x01" * 4096)
            assert drained(stream) == []
            assert stream.unfinished
            assert stream.pending <= MAX_MESSAGE_BYTES
    assert caught.value.code == "too_large"


@pytest.mark.parametrize("read", [7, 4096, READ_BYTES])
@pytest.mark.parametrize("endless", [b"\xdd\xff\xff\xff\xff" + b"\x90" * 200_000, (b"\xdc\xff\xff" + b"\x80" * 70) * 3000])
def test_an_endless_nested_array_is_refused_within_64_kib_and_one_read(read: int, endless: bytes) -> None:
    stream = Requests()
    fed = 0
    with pytest.raises(FrameError):
        for chunk in reads(with_params(endless), read):
            fed += len(chunk)
            stream.feed(chunk)
            assert stream.pending <= MAX_MESSAGE_BYTES + read
            assert drained(stream) == []
    assert fed <= MAX_MESSAGE_BYTES + read
    assert stream.pending == 0


def test_a_message_of_countless_values_is_refused_before_its_maps_are_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    checked: list[int] = []

    def fields(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        checked.append(len(pairs))
        return dict(pairs)

    monkeypatch.setattr(frames, "_fields", fields)
    raw = with_params(b"\x81\xa1a\xdc\x00\xfa" + (b"\xdc\x00\xff" + b"\x80" * 255) * 250)
    assert len(raw) < MAX_MESSAGE_BYTES
    assert "too many values" in refused(raw).text
    assert checked == []
    stream = Requests()
    stream.feed(with_params(b"\x81\xa1a\xdc\x03\xe8" + b"\x80" * 1000))
    assert stream.take(1) == [(1, "lease", {"a": [{}] * 1000})]
    assert len(checked) == 1001


def test_claims_inside_claims_make_msgpack_reserve_nothing() -> None:
    raw = (with_params(b"\x81\xa1a" + b"\xdc\xff\xf0" * 1000)).ljust(MAX_MESSAGE_BYTES - 1, b"\x01")
    stream = Requests()
    tracemalloc.start()
    try:
        stream.feed(raw)
        assert stream.take(1) == []
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert stream.unfinished
    assert peak < 2 * 2 * MAX_MESSAGE_BYTES


def test_an_unfinished_message_that_cannot_be_one_is_not_waited_for() -> None:
    for opening in (b"\xdb\xff\xff\xff\xff", b"\x85\xa1a", b"\xc6\x00\xff", b"\x91", b"\x95", b"\xd9\x20GET", b"\xc7\xff"):
        assert "not an array" in refused(opening).text


def test_reading_on_without_taking_ends_the_connection_and_not_the_memory() -> None:
    stream = Requests()
    for _ in range(50):
        stream.feed(GOOD * (READ_BYTES // len(GOOD)))
        assert len(stream._raw) <= MAX_MESSAGE_BYTES + READ_BYTES
    assert stream.pending > 0
    with pytest.raises(FrameError) as caught:
        stream.take(9)
    assert caught.value.code == "too_large"
    assert stream.pending == 0


def test_nothing_is_kept_between_messages() -> None:
    stream = Requests()
    stream.feed(GOOD * 100)
    assert len(drained(stream)) == 100
    assert stream._scanner is None
    assert stream._raw == b""


# ---- the two ends facing each other


@pytest.mark.parametrize("read", [1, 3, 50, 10**6])
def test_client_and_server_understand_each_other(read: int) -> None:
    server, client = Requests(), Replies()
    asked = b"".join(frames.request(msgid, "lease", {**LEASE, "key": f"k{msgid}"}) for msgid in (1, 200, 70000, 2**32 - 1))
    answered = b""
    for chunk in reads(asked, read):
        server.feed(chunk)
        for msgid, method, params in drained(server):
            assert method == "lease"
            assert msgid is not None
            if msgid == 200:
                answered += frames.error(msgid, "invalid_argument", "key must be text")
            else:
                answered += frames.reply(msgid, {"key": params["key"], "charge": {"amount": "0", "event_id": None}})
    answered += frames.notification("event", {"seq": 1, "scope": None})
    got = []
    for chunk in reads(answered, read):
        client.feed(chunk)
        got += drained(client)
    assert got == [
        Answer(1, None, {"key": "k1", "charge": {"amount": "0", "event_id": None}}),
        Answer(200, "invalid_argument: key must be text", None),
        Answer(70000, None, {"key": "k70000", "charge": {"amount": "0", "event_id": None}}),
        Answer(2**32 - 1, None, {"key": f"k{2**32 - 1}", "charge": {"amount": "0", "event_id": None}}),
        Event("event", {"seq": 1, "scope": None}),
    ]
    assert [type(message) for message in got] == [Answer] * 4 + [Event]


def test_the_bytes_written() -> None:
    assert msgpack.unpackb(frames.reply(7, {"held": None})) == [1, 7, None, {"held": None}]
    assert msgpack.unpackb(frames.error(0, "too_large", "message exceeds")) == [1, 0, "too_large: message exceeds", None]
    assert msgpack.unpackb(frames.notification("event", {"seq": 1})) == [2, "event", [{"seq": 1}]]
    assert msgpack.unpackb(frames.request(3, "info", {})) == [0, 3, "info", [{}]]


@pytest.mark.parametrize("result", [object(), "\ud800", 2**64])
def test_an_answer_that_cannot_be_packed_does_not_spoil_the_next(result: Any) -> None:
    with pytest.raises((TypeError, ValueError, OverflowError)):
        frames.reply(1, {"good": "x" * 1000, "bad": result})
    assert msgpack.unpackb(frames.reply(2, {})) == [1, 2, None, {}]


def test_the_client_takes_pages_larger_than_a_request_may_be() -> None:
    page = {"leases": [{"key": "k" * 200, "generation": n, "scope": None} for n in range(1000)], "cursor": "1000"}
    raw = frames.reply(1, page)
    assert len(raw) > MAX_MESSAGE_BYTES
    client = Replies()
    for chunk in reads(raw + frames.reply(2, {}), READ_BYTES):
        client.feed(chunk)
        got = client.take()
    assert got == [Answer(1, None, page), Answer(2, None, {})]


@pytest.mark.parametrize(
    "raw",
    [
        GOOD,
        msgpack.packb([1, 1, None]),
        msgpack.packb([1, -1, None, None]),
        msgpack.packb([1, 2**32, None, None]),
        msgpack.packb([1, 1, {"code": "x"}, None]),
        msgpack.packb([1, 1, ["x", "y"], None]),
        msgpack.packb([2, "event", [1]]),
        msgpack.packb([1, 1, None, msgpack.Timestamp(1)]),
        msgpack.packb([1, 1, None, msgpack.ExtType(4, b"x")]),
        b"\x94\x01\x01\xc0\x82\xa1a\x01\xa1a\x01",
        b"\x94\x01\x01\xc0" + b"\x91" * 16 + b"\x90",
        b"\x94\x01\x01\xc0\xa1\xff",
        b"HTTP/1.1 200 OK",
    ],
)
def test_the_client_refuses_damage_too(raw: bytes) -> None:
    assert refused(raw, Replies()).code == "invalid_argument"


def test_the_client_is_not_drowned() -> None:
    client = Replies()
    chunk = b"\x90" * READ_BYTES
    client.feed(b"\x94\x01\x01\xc0\xdd\xff\xff\xff\xff")
    with pytest.raises(FrameError) as caught:
        for _ in range(MAX_REPLY_BYTES // READ_BYTES + 1):
            assert client.take() == []
            client.feed(chunk)
        client.take()
    assert caught.value.code == "too_large"
    assert client.pending == 0


def test_the_codec_imports_nothing_heavy() -> None:
    code = "import sys, leased.frames; print(*sorted({'trio', 'lmdb', 'h11', 'structlog', 'socket', 'asyncio'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""
