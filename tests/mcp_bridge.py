"""`lease mcp` as a process, and the plainest host there is: JSON lines and raw HTTP.  For tests only."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

from daemons import Rpc, environment

PATIENCE_SECONDS = 60.0  # the SDK takes seconds to import, on a busy machine many
MODERN = "2026-07-28"
ENVELOPE = {"io.modelcontextprotocol/protocolVersion": MODERN, "io.modelcontextprotocol/clientCapabilities": {}}
WAIT = {"wait_seconds": 120}
BILLED = "[billing]\nenabled = true\n"
COMMAND = [sys.executable, "-m", "leased.client.command", "mcp"]


def eventually(true: Callable[[], Any]) -> None:
    """Waits until it is; fails the test if it never is."""
    until = time.monotonic() + PATIENCE_SECONDS
    while not true():
        assert time.monotonic() < until, "it did not happen"
        time.sleep(0.01)


def one_waits(rpc: Rpc, key: str) -> Callable[[], bool]:
    return lambda: rpc.call("check", key=key)["waiting"] == 1


def nobody_gets(rpc: Rpc, key: str, fence: str) -> None:
    """The waiter is gone, and its key is free once the holder lets go."""
    eventually(lambda: rpc.call("check", key=key)["waiting"] == 0)
    rpc.call("release", key=key, fence=fence)
    assert rpc.call("check", key=key)["held"] is False
    assert rpc.call("usage")["refusals_billed"] == 0, "a wait that was given up is no refusal"


class Bridge:
    """One process.  Over stdio the messages are lines; with `--http` in `arguments`, `url` is where it serves."""

    def __init__(self, socket: Path | str, log: Path, *arguments: str, **variables: str) -> None:
        self.log = log
        with log.open("wb") as errors:
            self.process = subprocess.Popen(
                [*COMMAND, "--socket", str(socket), *arguments],
                env=environment() | variables, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, start_new_session=True,
            )  # fmt: skip
        self._begun = b""
        self._msgid = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            with contextlib.suppress(BrokenPipeError):
                pipe.close()

    # ---- stdio

    def write(self, octets: bytes) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(octets)
        self.process.stdin.flush()

    def send(self, method: str, params: dict[str, Any] | None = None, *, notification: bool = False) -> int:
        message: dict[str, Any] = {"jsonrpc": "2.0", "method": method}
        if params is not None:
            message["params"] = params
        if not notification:
            self._msgid += 1
            message["id"] = self._msgid
        self.write(json.dumps(message).encode() + b"\n")
        return self._msgid

    def receive(self) -> dict[str, Any]:
        """The next message.  Raises TimeoutError, and EOFError at the end."""
        assert self.process.stdout is not None
        until = time.monotonic() + PATIENCE_SECONDS
        with selectors.DefaultSelector() as selector:
            selector.register(self.process.stdout, selectors.EVENT_READ)
            while b"\n" not in self._begun:
                if not selector.select(max(0.0, until - time.monotonic())):
                    raise TimeoutError(self.errors())
                octets = os.read(self.process.stdout.fileno(), 65536)
                if not octets:
                    raise EOFError(self.errors())
                self._begun += octets
        line, _, self._begun = self._begun.partition(b"\n")
        message: dict[str, Any] = json.loads(line)
        return message

    def ask(self, method: str, params: dict[str, Any] | None = None) -> dict[str, Any]:
        """The response to one request; nothing else may come before it."""
        msgid = self.send(method, params)
        message = self.receive()
        assert message.get("id") == msgid, message
        return message

    def shake_hands(self, version: str = "2025-11-25") -> dict[str, Any]:
        told = self.ask("initialize", handshake(version))["result"]
        self.send("notifications/initialized", notification=True)
        return dict(told)

    def call(self, tool: str, **arguments: Any) -> dict[str, Any]:
        """The result of tools/call, in the era of handshakes."""
        return dict(self.ask("tools/call", {"name": tool, "arguments": arguments})["result"])

    # ---- the process

    def errors(self) -> str:
        return self.log.read_text(errors="replace")

    def close_input(self) -> int:
        assert self.process.stdin is not None
        self.process.stdin.close()
        return self.process.wait(PATIENCE_SECONDS)

    @property
    def url(self) -> str:
        """Waits until it serves."""
        eventually(lambda: "MCP at" in self.errors() or self.process.poll() is not None)
        found = re.search(r"MCP at (http://\S+)", self.errors())
        assert found is not None, self.errors()
        return found[1]


def handshake(version: str) -> dict[str, Any]:
    return {"protocolVersion": version, "capabilities": {}, "clientInfo": {"name": "test", "version": "1"}}


class Web:
    """HTTP by hand, one connection for each request."""

    def __init__(self, url: str) -> None:
        self.host, self.path = re.fullmatch(r"http://([^/]+)(/.*)", url).groups()  # type: ignore[union-attr]

    def post(self, body: Any, **headers: str) -> tuple[int, dict[str, str], Any]:
        """Status, headers and the one message of the answer, JSON or event stream; None where there is none."""
        connection = self.open(body, **headers)
        try:
            response = connection.getresponse()
            text = response.read().decode()
            told = {name.lower(): value for name, value in response.getheaders()}
            if told.get("content-type", "").startswith("text/event-stream"):
                text = "".join(line[6:] for line in text.splitlines() if line.startswith("data: "))
            with contextlib.suppress(ValueError):
                return response.status, told, json.loads(text)
            return response.status, told, text or None
        finally:
            connection.close()

    def open(self, body: Any, **headers: str) -> http.client.HTTPConnection:
        """Sends without waiting for the answer.  `_` in the names of headers stands for `-`."""
        connection = http.client.HTTPConnection(self.host, timeout=PATIENCE_SECONDS)
        given = {"Content-Type": "application/json", "Accept": "application/json, text/event-stream"}
        given |= {name.replace("_", "-"): value for name, value in headers.items()}
        octets = body if isinstance(body, bytes) else json.dumps({"jsonrpc": "2.0", **body}).encode()
        with contextlib.suppress(ConnectionError):  # refused before all of it was sent: the answer may be there all the same
            connection.request("POST", self.path, octets, given)
        return connection

    def session(self, version: str) -> tuple[str, dict[str, Any]]:
        """The id of a new session, and what initialize told."""
        status, headers, message = self.post({"id": 1, "method": "initialize", "params": handshake(version)})
        assert status == 200, message
        self.post({"method": "notifications/initialized"}, Mcp_Session_Id=headers["mcp-session-id"], MCP_Protocol_Version=version)
        return headers["mcp-session-id"], message["result"]

    def call(self, tool: str, arguments: dict[str, Any], **headers: str) -> dict[str, Any]:
        """One tools/call without a session, in the stateless era."""
        status, _, message = self.post(*modern(tool, arguments), **{**MODERN_HEADERS, "Mcp_Name": tool, **headers})
        assert status == 200 and "result" in message, message
        return dict(message["result"])


MODERN_HEADERS = {"MCP_Protocol_Version": MODERN, "Mcp_Method": "tools/call"}


def modern(tool: str, arguments: dict[str, Any]) -> tuple[dict[str, Any]]:
    return ({"id": 1, "method": "tools/call", "params": {"name": tool, "arguments": arguments, "_meta": ENVELOPE}},)
