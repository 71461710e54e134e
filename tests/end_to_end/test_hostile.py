"""Hostile bytes and slow peers harm nobody else: one error at most, the connection ends, and a neighbour's work goes on undisturbed.

Every test here has that neighbour: it takes, renews and gives back leases all the while, and complains of any answer that is wrong or
late.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import msgpack
import pytest
from daemons import Daemon, HungUp, MakeDaemon, Rpc, RpcError, request

MESSAGE_SECONDS = 0.5
LATE_SECONDS = 2.0  # for one honest call beside hostile peers; a twentieth of a second is usual, the rest is for loaded machines
NEVER_USED = b"\xc1"
KEY_LIMIT = "key must be "
TTL_BOUNDS = "ttl_seconds must be a number from 0.1 to 3600"


class Neighbour(threading.Thread):
    """Honest work on a connection of its own."""

    def __init__(self, daemon: Daemon) -> None:
        super().__init__(daemon=True)
        self.rounds = 0
        self.slowest = 0.0
        self.complaint = ""
        self.done = threading.Event()
        self._rpc = daemon.rpc()
        self._name = f"neighbour {id(self)}"

    def run(self) -> None:
        try:
            while not self.done.wait(0.01):
                grant = self._ask("lease", key=self._name, holder="honest", ttl_seconds=30)
                assert grant["acquired"] is True and grant["renewed"] is False, grant
                renewal = self._ask("renew", key=self._name, holder="honest", fence=grant["fence"])
                assert renewal["generation"] == grant["generation"], renewal
                assert self._ask("check", key=self._name, generation=grant["generation"])["current"] is True
                assert self._ask("release", key=self._name, fence=grant["fence"])["released"] is True
                self.rounds += 1
        except Exception as error:
            self.complaint = repr(error)
        finally:
            self._rpc.close()

    def _ask(self, operation: str, **params: Any) -> dict[str, Any]:
        before = time.monotonic()
        reply = self._rpc.call(operation, **params)
        self.slowest = max(self.slowest, time.monotonic() - before)
        return reply


@pytest.fixture(scope="module")
def served(make_shared_daemon: MakeDaemon) -> Daemon:
    return make_shared_daemon(f"[limits]\nmessage_seconds = {MESSAGE_SECONDS}\n").start()


@pytest.fixture
def hostile(served: Daemon) -> Iterator[Rpc]:
    """A connection for the worst, beside a neighbour whose work is judged at the end."""
    with beside_honest_work(served), served.rpc() as rpc:
        yield rpc


class beside_honest_work:
    def __init__(self, daemon: Daemon, late_seconds: float = LATE_SECONDS) -> None:
        self._neighbour = Neighbour(daemon)
        self._late_seconds = late_seconds

    def __enter__(self) -> Neighbour:
        self._neighbour.start()
        return self._neighbour

    def __exit__(self, *_: object) -> None:
        """At least one round lies after whatever has been done."""
        begun = self._neighbour.rounds
        until = time.monotonic() + 20
        while self._neighbour.rounds < begun + 2 and not self._neighbour.complaint and time.monotonic() < until:
            time.sleep(0.005)
        self._neighbour.done.set()
        self._neighbour.join(20)
        assert self._neighbour.complaint == ""
        assert self._neighbour.rounds >= begun + 2, "the neighbour's work stands still"
        assert self._neighbour.slowest < self._late_seconds


def nested(depth: int) -> bytes:
    """A request with an array `depth` deep in a field of its parameters."""
    return request(1, "check", {"key": None})[:-1] + b"\x91" * depth + b"\xc0"


def with_params(raw: bytes) -> bytes:
    """A request whose parameters are these bytes."""
    return b"\x94\x00\x01\xa5check\x91" + raw


BAD_BYTES = {
    "a byte msgpack never uses": NEVER_USED,
    "a map": msgpack.packb({1: 2}),
    "a string": msgpack.packb("hello"),
    "nil": b"\xc0",
    "an integer": b"\x07",
    "an empty array": b"\x90",
    "an empty line": b"\n",
    "JSON": b'{"jsonrpc": "2.0", "method": "info", "id": 1}\n',
    "TLS": bytes.fromhex("16030100f8010000f40303"),
    "lower-case HTTP": b"get / http/1.1\r\n\r\n",
    "an answer": msgpack.packb([1, 1, None, {}]),
    "a request of three": msgpack.packb([0, 1, "info"]),
    "a request of five": msgpack.packb([0, 1, "info", [], 1]),
    "an unknown kind": msgpack.packb([7, 1, "info", []]),
    "a bool for the kind": msgpack.packb([False, 1, "info", []]),
    "a negative msgid": msgpack.packb([0, -1, "info", []]),
    "a msgid of 33 bits": msgpack.packb([0, 2**32, "info", []]),
    "a msgid of text": msgpack.packb([0, "1", "info", []]),
    "a msgid that is true": msgpack.packb([0, True, "info", []]),
    "a method that is binary": msgpack.packb([0, 1, b"info", []]),
    "a method that is nil": msgpack.packb([0, 1, None, []]),
    "params that are a map": msgpack.packb([0, 1, "info", {}]),
    "params that are nil": msgpack.packb([0, 1, "info", None]),
    "two params": msgpack.packb([0, 1, "info", [{}, {}]]),
    "a param that is no map": msgpack.packb([0, 1, "info", [1]]),
    "depth 17": nested(14),
    "depth 3000": nested(3000),
    "depth 60000": nested(60_000),
    "a timestamp": msgpack.packb([0, 1, "check", [{"key": msgpack.Timestamp(1, 1)}]]),
    "a far timestamp": msgpack.packb([0, 1, "check", [{"key": msgpack.Timestamp(2**63 - 1, 0)}]]),
    "an extension": msgpack.packb([0, 1, "check", [{"key": msgpack.ExtType(5, b"x")}]]),
    "a duplicate key": with_params(b"\x82\xa3key\xa1a\xa3key\xa1b"),
    "an integer for a key": with_params(b"\x81\x01\xa1a"),
    "an array for a key": with_params(b"\x81\x91\x01\xa1a"),
    "bytes for a key": with_params(b"\x81\xc4\x03key\xa1a"),
    "bad UTF-8": with_params(b"\x81\xa3key\xa2\xff\xfe"),
    "a lone surrogate": with_params(b"\x81\xa3key\xa3\xed\xa0\x80"),
    "overlong UTF-8": with_params(b"\x81\xa3key\xa2\xc0\x80"),
    "half a character": with_params(b"\x81\xa3key\xa1\xc3"),
    "65 fields": with_params(b"\xde\x00\x41" + b"".join(b"\xa3%03d\xc0" % number for number in range(65))),
    "an array of 1025": with_params(b"\x81\xa3key\xdc\x04\x01" + b"\xc0" * 1025),
    "too many values": with_params(b"\x81\xa3key\x9a" + (b"\xdc\x01\x00" + b"\xc0" * 256) * 10),
}  # fmt: skip
TOO_LARGE = {
    "a message of 64 KiB and a byte": request(1, "check", {"key": "x" * 65530}),
    "a string that claims 4 GiB": with_params(b"\x81\xa3key\xdb\xff\xff\xff\xff") + b"x" * 200_000,
    "binary that claims 4 GiB": with_params(b"\x81\xa3key\xc6\xff\xff\xff\xff") + b"x" * 200_000,
    "an array that claims 2^32 - 1": b"\xdd\xff\xff\xff\xff" + b"\x01" * 200_000,
    "a map that claims 2^32 - 1": with_params(b"\xdf\xff\xff\xff\xff") + b"\xa1k\x01" * 70_000,
    "arrays without end": b"\x91" * 200_000,
    "maps without end": with_params(b"\x81\xa1k" * 70_000),
}


def refused_as_a_connection(rpc: Rpc, *codes: str) -> str:
    """One error with msgid 0, then the end; nothing else.  Returns its text."""
    messages = rpc.rest()
    assert len(messages) == 1, messages
    kind, msgid, error, result = messages[0]
    assert (kind, msgid, result) == (1, 0, None)
    code, _, text = error.partition(": ")
    assert code in codes and text, error
    return str(text)


def send_what_it_takes(rpc: Rpc, octets: bytes) -> None:
    """The daemon may close before it has all of it."""
    try:
        rpc.send(octets)
    except (BrokenPipeError, ConnectionResetError):
        pass


@pytest.mark.parametrize("octets", BAD_BYTES.values(), ids=BAD_BYTES)
def test_bad_bytes_get_one_error_and_the_end(hostile: Rpc, octets: bytes) -> None:
    send_what_it_takes(hostile, octets + request(9, "info", {}))
    refused_as_a_connection(hostile, "invalid_argument", "too_large")


@pytest.mark.parametrize("octets", TOO_LARGE.values(), ids=TOO_LARGE)
def test_what_has_no_end_is_cut_off(hostile: Rpc, octets: bytes) -> None:
    send_what_it_takes(hostile, octets)
    refused_as_a_connection(hostile, "too_large", "invalid_argument")


def test_the_largest_message_is_taken(hostile: Rpc) -> None:
    """One byte less than what is refused above."""
    hostile.send(request(1, "check", {"key": "x" * (65536 - len(request(1, "check", {"key": "x" * 65000})) + 65000)}))
    with pytest.raises(RpcError) as raised:
        hostile.answer(1)
    assert raised.value.text.startswith(KEY_LIMIT)
    assert hostile.call("info")["name"] == "leased"


def test_the_deepest_message_is_taken(hostile: Rpc) -> None:
    """One array less than what is refused above: the envelope, the list of parameters and their map are three more."""
    hostile.send(nested(13))
    with pytest.raises(RpcError) as raised:
        hostile.answer(1)
    assert raised.value.text.startswith(KEY_LIMIT)
    assert hostile.call("info")["name"] == "leased"


def test_what_came_before_the_bad_bytes_is_answered(hostile: Rpc) -> None:
    for number in range(1, 101):
        hostile.send(request(number, "check", {"key": "before"}))
    hostile.send(NEVER_USED)
    messages = hostile.rest()
    assert [message[1] for message in messages] == [*range(1, 101), 0]
    assert all(message[2] is None for message in messages[:100])


def test_sixty_megabytes_in_one_nested_array_are_not_read(served: Daemon, hostile: Rpc) -> None:
    """msgpack's own limit does not see this: parts already parsed leave its buffer."""
    before = served.memory_bytes()
    sent, chunk = 0, b"\x91" * 65536
    try:
        while sent < 60_000_000:
            sent += hostile.socket.send(chunk)
    except (BrokenPipeError, ConnectionResetError):
        pass
    assert sent < 2_000_000
    refused_as_a_connection(hostile, "too_large", "invalid_argument")
    assert served.memory_bytes() < before + 8_000_000


# ---- values that the envelope carries and the fields refuse; the connection goes on


@pytest.mark.parametrize(
    "value",
    [
        0, 5e-324, 0.099, 3600.001, 1e308, 2**53, 2**63, 2**64 - 1, -1, -0.0, True, False, float("nan"), float("inf"), -float("inf"),
        "abc", "", "nan", "inf", "1e999", "5 ", "٥", "0x10", "-1", "9" * 1000, [], {}, [5], b"5",
    ],
    ids=lambda value: repr(value)[:20],
)  # fmt: skip
def test_p22_no_number_is_guessed_or_clamped(hostile: Rpc, value: object) -> None:
    error = hostile.error("lease", key="p22", holder="h", ttl_seconds=value)
    assert (error.code, error.text) == ("invalid_argument", TTL_BOUNDS)
    assert hostile.call("check", key="p22")["held"] is False


@pytest.mark.parametrize("value", [0.1, 1, 3600, 3600.0, "5", "0.1", "3600", "1e2"], ids=repr)
def test_p23_bounds_are_inclusive_and_echoed(hostile: Rpc, value: object) -> None:
    grant = hostile.call("lease", key=f"p23 {value!r}", holder="h", ttl_seconds=value)
    assert grant["acquired"] is True
    assert grant["ttl_seconds"] == float(str(value))
    assert grant["expires_in_seconds"] == pytest.approx(float(str(value)), abs=1e-6), "the life is the ttl, not twice that"
    hostile.call("release", key=f"p23 {value!r}", fence=grant["fence"])


FIELDS = {
    "key": ["", "x" * 1025, "é" * 513, 5, True, ["k"], b"k"],
    "holder": ["", "h" * 257, "é" * 129, 5, b"h", {}],
    "scope": ["", "s" * 257, 5, b"s"],
    "wait_seconds": [-0.1, 300.1, True, float("nan"), "soon"],
    "bind": ["", "thread", 0, True],
    "request_id": ["r" * 21, "r" * 129, b"r" * 21, b"r" * 129, 5, ["r" * 22]],
    "fence": ["", "abc", 2**53 - 1, 2**63, -1, 0, "1", True, 1.5, "9" * 100, [], b"9007199254740993"],
    "agent_key": [5, True, []],
}


@pytest.mark.parametrize(("field", "value"), [(field, value) for field, values in FIELDS.items() for value in values], ids=repr)
def test_p40_each_field_is_refused_by_name(hostile: Rpc, field: str, value: object) -> None:
    error = hostile.error("lease", **{"key": "p40", "holder": "h", field: value})
    assert error.code == "invalid_argument" and error.text.startswith(f"{field} must "), error
    assert not isinstance(value, str) or len(value) < 2 or value not in error.text, "what may be a credential is repeated"
    assert hostile.call("check", key="p40")["held"] is False


@pytest.mark.parametrize(
    "operation", ["leese", "", "Lease", "lease ", "__init__", "x" * 60_000, "a\0b"], ids=lambda name: name[:10]
)
def test_unknown_methods_are_told_so(hostile: Rpc, operation: str) -> None:
    error = hostile.error(operation)
    assert error.code == "unknown_method" and len(error.text) < 1000
    assert hostile.call("info")["name"] == "leased"


# ---- slow peers


def test_p44_one_byte_at_a_time_is_given_up(hostile: Rpc) -> None:
    """The time counts from the first byte of the message, not from the latest."""
    began = time.monotonic()
    drip = request(1, "check", {"key": "x" * 1000})
    sent = 0
    try:
        while sent < 400:
            hostile.send(drip[sent : sent + 1])
            sent += 1
            time.sleep(0.02)
    except (BrokenPipeError, ConnectionResetError):
        pass
    assert MESSAGE_SECONDS < time.monotonic() - began < 6
    text = refused_as_a_connection(hostile, "invalid_argument")
    assert text == "message was left unfinished for 0.5 s"


def test_silence_is_no_unfinished_message(hostile: Rpc) -> None:
    with pytest.raises(TimeoutError):
        hostile.socket.settimeout(MESSAGE_SECONDS + 2)
        hostile.receive()
    hostile.socket.settimeout(20)
    assert hostile.call("info")["name"] == "leased"


def test_a_message_that_is_always_another_one_is_not_unfinished(hostile: Rpc) -> None:
    """An honest pipeline whose writes never end where a message ends."""
    packed = request(1, "check", {"key": "k"})
    until = time.monotonic() + MESSAGE_SECONDS + 2.5
    hostile.send(packed[:7])
    answered = 0
    while time.monotonic() < until:
        hostile.send(packed[7:] + packed[:7])
        message = hostile.receive()
        assert message is not None and message[2] is None, message
        answered += 1
        time.sleep(0.02)
    assert answered > 20


@pytest.mark.slow
@pytest.mark.parametrize("worst", ["unfinished messages", "unread lists", "unread checks", "all of it"])
def test_p45_memory_stays_below_100_megabytes_whatever_one_user_does(make_daemon: MakeDaemon, worst: str) -> None:
    """On all the connections one user may have, but for the neighbour's and one to look around."""
    daemon = make_daemon("[limits]\nmessage_seconds = 30\n").start()
    doings = {
        "unfinished messages": with_params(b"\x81\xa3key\xda\xff\xff") + b"x" * 65_000,
        "unread lists": request(1, "list", {"limit": 1000}) * 500,  # each answer is a page of 128 KiB
        "unread checks": request(1, "check", {"key": "k"}) * 3000,
    }
    with daemon.rpc() as rpc, beside_honest_work(daemon, late_seconds=5), ExitStack() as stack:
        for part in range(20):
            texts = {"holder": "h" * 200, "scope": "s" * 100}
            rpc.answers(rpc.post_all([("lease", {"key": f"{part} {number} " + "k" * 100, **texts}) for number in range(50)]))
        for number in range(254):
            hurled = list(doings.values())[number % 3] if worst == "all of it" else doings[worst]
            hostile = stack.enter_context(daemon.rpc())
            hostile.socket.setblocking(False)
            assert hostile.socket.send(hurled) > 5_000
        until_connected(rpc, 256)
        time.sleep(0.5)  # for whatever it does with what it was given
        rpc.call("info")
        assert daemon.memory_bytes("VmHWM") < 100_000_000
    assert "Traceback" not in daemon.logs()


@pytest.mark.slow
def test_nobody_works_for_those_who_have_hung_up(make_daemon: MakeDaemon) -> None:
    """Thousands of pages are asked for, and the askers are gone: what they only wanted to see is not looked up; what they gave back is."""
    daemon = make_daemon().start()
    with daemon.rpc() as rpc:
        for part in range(20):
            rpc.answers(rpc.post_all([("lease", {"key": f"{part} {number}", "holder": "h" * 200}) for number in range(50)]))
        grant = rpc.call("lease", key="given back", holder="h")
        with beside_honest_work(daemon) as neighbour:
            with daemon.stopped(), ExitStack() as stack:
                for number in range(200):
                    gone = stack.enter_context(daemon.rpc())
                    last = request(2, "release", {"key": "given back", "fence": grant["fence"]}) if number == 100 else b""
                    gone.send(request(1, "list", {"limit": 1000}) * 200 + last)
            neighbour.slowest = 0.0
        assert rpc.call("check", key="given back")["held"] is False
        assert daemon.memory_bytes("VmHWM") < 100_000_000


def test_a_reader_that_reads_again_gets_every_answer(hostile: Rpc) -> None:
    """Its answers were not thrown away, and its requests were not read while nobody took their answers."""
    calls = 20_000
    feeding = threading.Thread(
        target=hostile.send, args=(b"".join(request(n, "check", {"key": "k"}) for n in range(1, calls + 1)),)
    )
    feeding.start()
    time.sleep(0.3)
    answers = [hostile.receive() for _ in range(calls)]
    feeding.join()
    assert [answer[1] for answer in answers] == list(range(1, calls + 1))
    assert all(answer[2] is None for answer in answers)


# ---- limits


def refused_at_the_door(daemon: Daemon) -> str:
    with daemon.rpc() as rpc:
        return refused_as_a_connection(rpc, "rate_limited")


def until_connected(rpc: Rpc, number: int) -> None:
    """Until the daemon knows of exactly so many connections: it may notice a hang-up later than the next one to come."""
    until = time.monotonic() + 20
    while rpc.call("info")["connections"] != number:
        assert time.monotonic() < until


@pytest.mark.slow
@pytest.mark.parametrize("limit", ["max_connections", "max_connections_per_uid"])
def test_connections_are_limited(make_daemon: MakeDaemon, limit: str) -> None:
    daemon = make_daemon(f"[limits]\n{limit} = 5\n").start()
    with ExitStack() as stack:
        first = stack.enter_context(daemon.rpc())
        until_connected(first, 1)
        held = [stack.enter_context(daemon.rpc()) for _ in range(4)]
        until_connected(first, 5)
        for _ in range(20):
            assert f"limits.{limit})" in refused_at_the_door(daemon)
        for _ in range(10):  # each that goes frees its place again
            held.pop().close()
            until_connected(first, 4)
            held.append(stack.enter_context(daemon.rpc()))
            until_connected(first, 5)
            assert held[-1].call("info")["name"] == "leased"
        assert f"limits.{limit})" in refused_at_the_door(daemon)


@pytest.mark.slow
def test_leases_of_one_namespace_are_limited(make_daemon: MakeDaemon) -> None:
    daemon = make_daemon("[limits]\nmax_leases_per_namespace = 10\n").start()
    with daemon.rpc() as rpc:
        posted = rpc.post_all([("lease", {"key": f"k{number}", "holder": "h"}) for number in range(12)])  # one batch
        grants = rpc.answers(posted[:10])
        for msgid in posted[10:]:
            with pytest.raises(RpcError, match=r"rate_limited: .*limits\.max_leases_per_namespace"):
                rpc.answer(msgid)
        assert rpc.call("renew", key="k0", holder="h", fence=grants[0]["fence"])["renewed"] is True
        assert rpc.call("lease", key="k0", holder="other")["reason"] == "held", "a refusal needs no room"
        assert rpc.call("release", key="k0", fence=grants[0]["fence"])["released"] is True
        assert rpc.call("lease", key="k11", holder="h")["acquired"] is True


@pytest.mark.slow
def test_without_descriptors_clients_wait_and_lose_nothing(make_daemon: MakeDaemon) -> None:
    import resource

    daemon = make_daemon().start()
    with beside_honest_work(daemon), ExitStack() as stack:
        room = 3
        resource.prlimit(daemon.pid, resource.RLIMIT_NOFILE, (daemon.descriptors() + room,) * 2)
        clients = [stack.enter_context(daemon.rpc()) for _ in range(10)]
        posted = [client.post("lease", key=f"k{number}", holder="h") for number, client in enumerate(clients)]
        assert [client.answer(msgid)["acquired"] for client, msgid in zip(clients[:room], posted, strict=False)] == [True] * room
        assert clients[room].unanswered(posted[room], 1.3), "there was no descriptor for it"
        assert daemon.events("accept.paused"), "the log does not say why nobody is let in"
        for number, client in enumerate(clients):
            if number >= room:
                clients[number - room].close()
                assert client.answer(posted[number])["acquired"] is True
        assert daemon.running and "Traceback" not in daemon.logs()


def test_a_hang_up_in_the_middle_of_anything_is_harmless(served: Daemon) -> None:
    with beside_honest_work(served):
        for at in range(0, len(request(1, "lease", {"key": "cut", "holder": "h"})), 3):
            with served.rpc() as rpc:
                rpc.send(request(1, "lease", {"key": "cut", "holder": "h"})[:at])
            with served.rpc() as rpc:
                rpc.send(request(1, "info", {}))
                rpc.half_close()
        with served.rpc() as rpc:
            rpc.half_close()
            assert rpc.rest() == []
            with pytest.raises((HungUp, OSError)):
                rpc.call("info")
