"""One long conversation with two daemons: the one under test, and the same sources interpreted.  What they say must not differ in a byte.

Every operation is asked with every kind of wrong value in every field, with right ones, and in a life of leases.  What is drawn, or read from a
clock, is compared by its form: an integer stays an integer, a number with a point has one in both.  In the compiled build (contrib/compiled) the
two are different programs; elsewhere this proves that the comparison itself is sound.
"""

from __future__ import annotations

import math
import re
import shutil
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgpack
import pytest
from daemons import ROOT, Daemon, Rpc, request

from leased.schema import OPERATIONS

CONFIG = """
wait_out_seconds = 20
[billing]
enabled = true
[limits]
message_seconds = 1
"""
ODD: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 60, 61.5, 2**53 - 1, 2**53, 2**63 - 1, 2**63, 2**64 - 1, -(2**63), 0.0, -0.0, 0.1, 1.0, 3600, 3600.0),
    *(3601, 1e300, math.nan, math.inf, -math.inf, 5e-324, "", "x", "none", "process", "60", "60.5", "6e1", "060", "+60", " 60", "６０", "nan"),
    *("9007199254740993", "9" * 41, "uid:0", "a\nb", "é" * 200, "x" * 300, "x" * 2000, "0" * 40, "2026-11-30T00:00:00Z", "2026-02-30T00:00:00Z"),
    *(b"", b"x" * 30, b"\xff" * 30, [], ["x"], {}, {"a": 1}),
)  # fmt: skip
RIGHT: dict[str, Any] = {
    "key": "k", "holder": "h", "fence": str(2**53), "ttl_seconds": 30, "scope": "s", "request_id": "r" * 22, "reason": "why", "name": "agent",
    "token": str(2**53), "op": "check", "expect_within_seconds": 3600, "sequence": 1, "generation": 1, "limit": 10,
}  # fmt: skip
DAMAGE = (
    b"\xc1", b"\x94", b"\x90", b"\xc0", b"\x00", b"\x80", b"\xff" * 100, b"\x94\x00\x01\xa5lease", b"\x93\x02\xa4info\x90", b"\x93\x02\xc4\x01x\x90",
    b"\x94\x00\xff\xa4info\x90", b"\x94\x00\xce\xff\xff\xff\xff\xa4info\x90", b"\x94\x00\xcf" + b"\xff" * 8 + b"\xa4info\x90",
    b"\x94\x00\xcb" + b"\x00" * 8 + b"\xa4info\x90", b"\x94\x00\xc3\xa4info\x90", b"\x94\xc2\x01\xa4info\x90", b"\x94\x00\x01\xc4\x04info\x90",
    b"\x94\x00\x01\xa4\xff\xfe\xfd\xfc\x90", b"\x94\x00\x01\xa4info\x80", b"\x94\x00\x01\xa4info\xc0", b"\x94\x00\x01\xa4info\x91\xc0",
    b"\x94\x00\x01\xa4info\x92\x80\x80", b"\x94\x00\x01\xa5check\x91\x82\xa3key\xa1k\xa3key\xa1l", b"\x94\x00\x01\xa5check\x91\x81\xc4\x03key\xa1k",
    b"\x94\x00\x01\xa5check\x91\x81\x01\xa1k", b"\x94\x00\x01\xa5check\x91\x81\xa3key\xd6\xff\x00\x00\x00\x00", b"\x95\x00\x01\xa4info\x90\xc0",
    b"\x94\x00\x01\xa5check\x91\x81\xa3key\xc7\x03\x05abc", b"\x94\x00\x01\xa4info" + b"\x91" * 40 + b"\xc0", b"\xdd\xff\xff\xff\xff",
    b"\x94\x00\x01\xa5check\x91\x81\xa3key" + b"\xdb\x00\x02\x00\x00" + b"k" * (1 << 17), b"\x94\x00\x01\xa5check\x91\xdf\x00\x01\x00\x00",
    b"\x94\x00\x01\xa0\x90", b"\x94\x00\x01\xa4prov\x90", b"\x94\x00\x01\xa5prove\x90", b"\x94\x00\x01\xa5prove\x91\x81\xa5nonce\xc4\x01x",
    b"\x94\x00\x01\xa4info\x90\x94\x00\x02\xa4info\x90\xc1", b"\x94\x01\x01\xc0\x90", b"\x94\x00\x01\xa4info\x91\x81\xa9agent_key\x01",
    b"\x94\x00\x01\xa4info\x91\x81\xa9agent_key\xa3abc", b"GET / HTTP/1.1\r\n\r\n",
    b"POST /lease HTTP/1.1\r\nHost: leased\r\nContent-Length: 2\r\n\r\n{}",
)  # fmt: skip
DRAWN = re.compile(
    r"/\S+/state|[0-9a-f]{8}-[0-9a-f-]{27}\S*|[0-9a-f]{16,}|\d{4}-\d\d-\d\dT[\d:.]+Z|leased_\S+|(?<=agent-lock:)[0-9a-f]{8}"
)


class Beside(Daemon):
    """The same sources, without what was compiled of them."""

    def command(self, verb: str = "serve") -> list[str]:
        here = f"import sys; sys.path.insert(0, {str(self.home / 'sources')!r}); from leased.__main__ import main; sys.exit(main(sys.argv[1:]))"
        return [sys.executable, "-c", here, *super().command(verb)[3:]]


@pytest.fixture
def both(tmp_path: Path) -> Iterator[tuple[Daemon, Daemon]]:
    daemons = Daemon(tmp_path / "ours", CONFIG), Beside(tmp_path / "beside", CONFIG)
    shutil.copytree(ROOT / "leased", tmp_path / "beside/sources/leased", ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    try:
        yield daemons[0].start(), daemons[1].start()
    finally:
        for each in daemons:
            each.close()


def form(value: Any, name: str = "") -> Any:
    """What two daemons that were asked the same must agree on."""
    if isinstance(value, dict):
        if name == "counts":  # ends of connections are noticed a moment sooner or later
            return [(key, type(entry).__name__) for key, entry in value.items()]
        return [(key, form(entry, key)) for key, entry in value.items()]
    if isinstance(value, list):
        return [form(entry, name) for entry in value]
    if type(value) is str:
        if value.startswith(("unauthenticated: agent_key", "rate_limited: agent_key")):  # so many a second are told the first
            return "a wrong agent key"
        return DRAWN.sub("…", value)
    if type(value) is bytes:
        return "bin"
    if name in {"ledger_pending", "ledger_flushes", "connections", "leases"}:
        return type(value).__name__
    if type(value) is float:
        counted_down = name.endswith("_in_seconds") or name == "retry_after_seconds"  # whole only where no time had passed
        return f"{value!r}" if name == "ttl_seconds" or (value == int(value) < 4000 and not counted_down) else "float"
    return f"{type(value).__name__} {'…' if type(value) is int and abs(value) > 10**9 else value!r}"


def flat(value: Any) -> list[Any]:
    """Every scalar with what it is called, to tell where two differ."""
    return [each for inner in value for each in flat(inner)] if isinstance(value, list | tuple) else [value]


class Talk:
    """A connection to each; what one says, the other must."""

    def __init__(self, both: tuple[Daemon, Daemon]) -> None:
        self.ends = [each.rpc() for each in both]
        self.asked = 0

    def close(self) -> None:
        for end in self.ends:
            end.close()

    def ask(self, operation: str, *, waits: bool = False, **own: tuple[Any, Any]) -> list[Any]:
        """`own`: a pair for each field, one value for either daemon.  Returns what each answered; None for one that `waits`."""
        self.asked += 2
        said = []
        for at, end in enumerate(self.ends):
            end.send(request(self.asked, operation, {name: pair[at] for name, pair in own.items()}))
            end.send(request(self.asked + 1, "heartbeat", {"scope": "after", "disarm": True}))
            said.append(until(end, {self.asked + 1} if waits else {self.asked, self.asked + 1}))
        ours, theirs = map(form, said)
        apart = [pair for pair in zip(flat(ours), flat(theirs), strict=False) if pair[0] != pair[1]]
        assert ours == theirs, (operation, own, apart)
        return [next((each[3] for each in told if each[:2] == [1, self.asked]), None) for told in said]


def until(end: Rpc, msgids: set[int]) -> list[Any]:
    """What is said until all of these have been answered, in order of msgid; whatever was not asked for first, as it came."""
    told = []
    while msgids and (message := end.receive()) is not None:
        msgids.discard(message[1] if message[0] == 1 else -1)
        told.append(message)
    return sorted(told, key=lambda message: message[1] if message[0] == 1 else -1)


def pairs(**values: Any) -> dict[str, tuple[Any, Any]]:
    return {name: (value, value) for name, value in values.items()}


def test_every_operation_with_every_odd_value_in_every_field(both: tuple[Daemon, Daemon]) -> None:
    talk = Talk(both)
    number = 0
    for name in sorted(
        OPERATIONS, key={"lease", "agent_lock"}.__contains__
    ):  # those last: some of their leases lapse within the second
        operation = OPERATIONS[name]
        required = {field.name: RIGHT[field.name] for field in operation.fields if field.required}
        talk.ask(name, **pairs(**required))
        talk.ask(name, **pairs(**required, no_such_field=1))
        for field in operation.fields:
            for value in ODD:
                number += 1
                fresh = {"key": f"k{number}"} if "key" in required else {}
                talk.ask(name, **pairs(**{**required, **fresh, field.name: value}))
    for name in ("", "leas", "LEASE", "é", "x" * 100, "__class__"):
        talk.ask(name)
    talk.close()
    assert number > 3500
    for daemon in both:
        assert "Traceback" not in daemon.logs() and "lane.failed" not in daemon.logs()


def test_a_life_of_leases(both: tuple[Daemon, Daemon]) -> None:
    talk, other = Talk(both), Talk(both)
    for ttl in (None, 5, 5.5, "7", 3600, 60):
        granted = talk.ask("lease", **pairs(key="k", holder="A", ttl_seconds=ttl, scope="s", request_id=f"{ttl}" + "r" * 30))
        fences, generations = (tuple(each[name] for each in granted) for name in ("fence", "generation"))
        talk.ask("lease", **pairs(key="k", holder="A", request_id=f"{ttl}" + "r" * 30))
        other.ask("lease", **pairs(key="k", holder="B"))
        other.ask("lease", **pairs(key="k", holder="A"))
        other.ask("lease", **pairs(key="k", holder="B", request_id=f"{ttl}" + "r" * 30))
        other.ask("lease", **pairs(key="k", holder="B", wait_seconds=300), waits=True)
        talk.ask("lease", **pairs(key="k", holder="A"), fence=fences)
        for again in (None, 9, 9.25, 3600, 30):
            talk.ask("renew", **pairs(key="k", holder="A", ttl_seconds=again), fence=fences)
        talk.ask("renew", **pairs(key="k", holder="B"), fence=fences)
        talk.ask("check", **pairs(key="k"), generation=generations)
        talk.ask("check", **pairs(key="k", generation=5))
        talk.ask("list", **pairs(scope="s"))
        talk.ask("list", **pairs(all=True, limit=1))
        talk.ask("resume_packet", **pairs(scope="s"))
        talk.ask("heartbeat", **pairs(scope="s", expect_within_seconds=50))
        talk.ask("agent_lock", **pairs(key="k", op="check"))
        talk.ask("agent_lock", **pairs(key="k"))
        talk.ask("watch", **pairs(scope="s"))
        talk.ask("release", **pairs(key="k", holder="B"), fence=fences)
        talk.ask("release", **pairs(key="k"), fence=fences)
        talk.ask("release", **pairs(key="k"), fence=fences)
        talk.ask("unwatch")
        talk.ask("revoke", **pairs(key="k", reason="enough"))
        talk.ask("lease", **pairs(key="k", holder="A", request_id=f"{ttl}" + "r" * 30))
        talk.ask("lease", **pairs(key="bound", holder="A", bind="connection"))
        talk.ask("lease", **pairs(key="process", holder="A", bind="process"))
        claimed = talk.ask("agent_lock", **pairs(key="l", ttl_seconds=ttl))
        talk.ask("agent_lock", **pairs(key="l", op="release"), token=tuple(each["token"] for each in claimed))
        talk.ask("usage")
        talk.ask("agent_add", **pairs(name=f"agent {ttl}", namespace="local"))
        talk.ask("agent_list")
        talk.close()
        other.close()
        talk, other = Talk(both), Talk(both)
    infos = talk.ask("info")
    assert infos[0]["limits"] == infos[1]["limits"]
    for each in (talk, other):
        each.close()


def test_damaged_bytes(both: tuple[Daemon, Daemon]) -> None:
    for octets in DAMAGE:
        told = []
        for daemon in both:
            with daemon.rpc() as rpc:
                rpc.send(octets)
                rpc.half_close()
                told.append(rest(rpc))
        if told[0].startswith(b"HTTP"):
            told = [re.sub(rb"(?i)date:.*?\r\n", b"", each) for each in told]
            assert told[0] == told[1], octets
        else:
            assert form(list(unpacked(told[0]))) == form(list(unpacked(told[1]))), octets


def rest(rpc: Rpc) -> bytes:
    raw = b""
    with suppress(ConnectionResetError):  # it closed with bytes of ours unread
        while chunk := rpc.socket.recv(1 << 16):
            raw += chunk
    return raw


def unpacked(raw: bytes) -> Iterator[Any]:
    unpacker = msgpack.Unpacker(raw=False, strict_map_key=False)
    unpacker.feed(raw)
    yield from unpacker
