"""Whoever goes away while `lease mcp` works for them leaves no lease behind that nobody knows of; and no input costs a traceback."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from daemons import Daemon, MakeDaemon, Rpc, environment
from mcp_bridge import BILLED, COMMAND, WAIT, Bridge, eventually, handshake, nobody_gets, one_waits

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def served(make_shared_daemon: MakeDaemon) -> Daemon:
    return make_shared_daemon(BILLED).start()


@pytest.fixture
def rpc(served: Daemon) -> Iterator[Rpc]:
    with served.rpc() as connection:
        yield connection


def test_a_wait_that_is_cancelled_over_stdio_and_the_calls_beside_it(served: Daemon, rpc: Rpc, tmp_path: Path) -> None:
    fence = rpc.call("lease", key="a", holder="x")["fence"]
    with Bridge(served.socket, tmp_path / "log") as bridge:
        bridge.shake_hands()
        waiting = bridge.send("tools/call", {"name": "lease", "arguments": {"key": "a", **WAIT}})
        eventually(one_waits(rpc, "a"))
        assert bridge.call("check", key="a")["structuredContent"]["waiting"] == 1, "it holds up no other call"
        bridge.send("notifications/cancelled", {"requestId": waiting, "reason": "the user"}, notification=True)
        nobody_gets(rpc, "a", fence)
        assert bridge.call("check", key="a")["structuredContent"]["held"] is False, "and has no answer of its own"
        fence = rpc.call("lease", key="b", holder="x")["fence"]
        bridge.send("tools/call", {"name": "lease", "arguments": {"key": "b", **WAIT}})
        eventually(one_waits(rpc, "b"))
        bridge.process.send_signal(signal.SIGINT)
        assert bridge.process.wait(30) == 130, "a signal ends it though the host keeps its input open"
        nobody_gets(rpc, "b", fence)
        assert bridge.errors() == ""


HOST = """
import json, subprocess, sys
bridge = subprocess.Popen(json.loads(sys.argv[1]), stdin=subprocess.PIPE, stdout=subprocess.PIPE)
for line in json.loads(sys.argv[2]):
    bridge.stdin.write(json.dumps({"jsonrpc": "2.0", **line}).encode() + b"\\n")
    bridge.stdin.flush()
    if line.get("id", 0) in (1, 2, 3):
        bridge.stdout.readline()
print(bridge.pid, flush=True)
bridge.wait()
"""


def call(msgid: int, key: str, **more: Any) -> dict[str, Any]:
    return {"id": msgid, "method": "tools/call", "params": {"name": "lease", "arguments": {"key": key, "ttl_seconds": 300, **more}}}


@pytest.mark.parametrize("whom", ["host", "bridge"])
def test_killed_with_9_while_it_waits_and_holds(whom: str, served: Daemon, rpc: Rpc, tmp_path: Path) -> None:
    """What waited is out of the queue; what is bound to the bridge ends; what is bound to nothing stays for its time."""
    held, kept, queued = (f"{whom} {what}" for what in ("bound", "kept", "queued"))
    fence = rpc.call("lease", key=queued, holder="x")["fence"]
    command = [*COMMAND, "--socket", str(served.socket), "--bind", "process"]
    lines = [
        {"id": 1, "method": "initialize", "params": handshake("2025-11-25")},
        {"method": "notifications/initialized"},
        call(2, held),
        call(3, kept, bind="none"),
        call(4, queued, **WAIT),
    ]
    with (tmp_path / "log").open("wb") as errors:
        host = subprocess.Popen(
            [sys.executable, "-c", HOST, json.dumps(command), json.dumps(lines)],
            env=environment(), stdout=subprocess.PIPE, stderr=errors, start_new_session=True,
        )  # fmt: skip
    try:
        assert host.stdout is not None
        bridge = int(host.stdout.readline())
        eventually(one_waits(rpc, queued))
        assert rpc.call("check", key=held)["held"] is True
        os.kill(host.pid if whom == "host" else bridge, signal.SIGKILL)
        nobody_gets(rpc, queued, fence)
        eventually(lambda: not rpc.call("check", key=held)["held"])
        assert rpc.call("check", key=kept)["held"] is True
        eventually(lambda: not _lives(bridge))
    finally:
        os.killpg(host.pid, signal.SIGKILL)
        host.wait()
        assert host.stdout is not None
        host.stdout.close()
    assert (tmp_path / "log").read_text() == ""


def _lives(pid: int) -> bool:
    """A zombie, whose parent has not asked yet, does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_hostile_lines_cost_no_traceback_and_no_session(served: Daemon, tmp_path: Path) -> None:
    with Bridge(served.socket, tmp_path / "log") as bridge:
        bridge.shake_hands()
        for line, code in (
            (b"hello", -32700),
            (b"\xff\xfe\x00\x01", -32700),
            (b"[" * 100_000, -32700),
            (b'{"jsonrpc": "2.0", "id": 9}', -32600),
            (b"[]", -32600),
            (b"x" * (3 << 20), -32600),
        ):
            bridge.write(line + b"\n")
            message = bridge.receive()
            assert (message["id"], message["error"]["code"]) == (None, code)
        bridge.write(b'\n\r\n{"jsonrpc": "2.0", "id": 77, "result": {}}\n{"jsonrpc": "2.0", "method": "notifications/no_such"}\n')
        deep: Any = "x"
        for _ in range(100):
            deep = [deep]
        for params, code in (
            ({"name": "lease", "arguments": 7}, -32602),
            ({"name": 7}, -32602),
            ({"arguments": {}}, -32602),
            ({"name": "\n" * 1000, "arguments": {}}, -32602),
            ({"name": "lease", "arguments": {"key": "k"}, "_meta": 7}, -32602),
        ):
            assert bridge.ask("tools/call", params)["error"]["code"] == code
        for arguments in ({"key": deep}, {"key": "k" * 500_000}, {"key": "k", "ttl_seconds": 10**400}, {"key": "k", "\x00": 1}):
            assert bridge.call("lease", **arguments)["isError"] is True
        assert bridge.call("check", key="k")["structuredContent"]["held"] is False
        memory = int(
            next(line for line in Path(f"/proc/{bridge.process.pid}/status").read_text().splitlines() if "VmRSS" in line).split()[1]
        )
        assert memory < 200 * 1024
        bridge.write(b'{"jsonrpc": "2.0", "id": 5, "method": "pi')
        assert bridge.close_input() == 0
        assert bridge.errors() == ""
