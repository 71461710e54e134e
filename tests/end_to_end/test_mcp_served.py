"""`lease mcp` as hosts use it: the SDK's own client over both transports and in both eras, and raw messages of our own."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import trio
from daemons import Daemon, MakeDaemon, Rpc, environment
from jsonschema import Draft202012Validator
from mcp import Client as Host
from mcp import StdioServerParameters
from mcp.client.streamable_http import streamable_http_client
from mcp.shared._httpx_utils import create_mcp_http_client
from mcp_bridge import COMMAND, ENVELOPE, MODERN, MODERN_HEADERS, WAIT, Bridge, Web, eventually, modern, nobody_gets, one_waits

pytestmark = pytest.mark.slow
HANDSHAKES = ("2024-11-05", "2025-03-26", "2025-06-18", "2025-11-25")
ERAS = ("legacy", MODERN)


@pytest.fixture(scope="module")
def served(make_shared_daemon: MakeDaemon) -> Daemon:
    return make_shared_daemon().start()


@pytest.fixture(scope="module")
def http(served: Daemon, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bridge]:
    with Bridge(served.socket, tmp_path_factory.mktemp("http") / "log", "--http", "127.0.0.1:0") as bridge:
        yield bridge
        assert "Traceback" not in bridge.errors()


@pytest.fixture
def rpc(served: Daemon) -> Iterator[Rpc]:
    with served.rpc() as connection:
        yield connection


@asynccontextmanager
async def host_of(transport: str, era: str, served: Daemon, http: Bridge) -> AsyncIterator[Host]:
    where: Any = http.url
    if transport == "stdio":
        given = {name: value for name, value in environment().items() if name.startswith(("PYTHON", "XDG"))}
        where = StdioServerParameters(command=COMMAND[0], args=[*COMMAND[1:], "--socket", str(served.socket)], env=given)
    async with Host(where, mode=era) as host:
        yield host


async def drive(host: Host, key: str, listed: dict[str, Any]) -> None:
    """Every tool, and every verdict it can give here.  The client checks answers against the output schemas, and so do we."""

    async def call(tool: str, **arguments: Any) -> dict[str, Any]:
        result = await host.call_tool(tool, arguments)
        assert not result.is_error, result.content
        reply: Any = result.structured_content
        Draft202012Validator(listed[tool].output_schema).validate(reply)
        assert json.loads(result.content[0].text) == reply
        return dict(reply)

    grant = await call("lease", key=key, ttl_seconds=30, scope=f"{key}/scope")
    assert grant["acquired"] is True and grant["ttl_seconds"] == 30
    again = await call("lease", key=key)
    assert (again["acquired"], again["reason"], again["held_by"]) == (False, "same_label", grant["holder"])
    other = await call("lease", key=key, holder="another", wait_seconds=0.01)
    assert (other["acquired"], other["reason"]) == (False, "held")
    checked = await call("check", key=key, generation=grant["generation"])
    assert checked["held"] is True and checked["current"] is True
    renewed = await call("renew", key=key, fence=grant["fence"])
    assert renewed["renewed"] is True and renewed["generation"] == grant["generation"]
    switch = await call("heartbeat", scope=f"{key}/scope", expect_within_seconds=600, agent_id="tester")
    assert switch["armed"] is True
    packet = await call("resume_packet", scope=f"{key}/scope")
    assert [lease["key"] for lease in packet["leases"]] == [key] and packet["switch"]["agent_id"] == "tester"
    assert (await call("heartbeat", scope=f"{key}/scope", disarm=True))["armed"] is False
    assert (await call("release", key=key, fence=grant["fence"]))["released"] is True
    assert (await call("release", key=key, fence=grant["fence"]))["reason"] == "expired"
    assert (await call("renew", key=key, fence=grant["fence"]))["reason"] == "lapsed"
    claim = await call("agent_lock", key=key)
    assert claim["acquired"] is True
    assert (await call("agent_lock", key=key))["acquired"] is False
    assert (await call("agent_lock", op="check", key=key))["held"] is True
    assert (await call("agent_lock", op="release", key=key, token=claim["token"]))["released"] is True
    wrong = await host.call_tool("lease", {"key": key, "ttl_seconds": 4000})
    assert wrong.is_error and wrong.content[0].text.startswith("invalid_argument: ttl_seconds must be a number from 0.1 to 3600.")


@pytest.mark.trio
@pytest.mark.parametrize("era", ERAS)
@pytest.mark.parametrize("transport", ["stdio", "http"])
async def test_the_sdks_client_drives_every_tool(transport: str, era: str, served: Daemon, http: Bridge) -> None:
    async with host_of(transport, era, served, http) as host:
        listed = {tool.name: tool for tool in (await host.list_tools()).tools}
        assert len(listed) == 7
        await drive(host, f"{transport} {era}", listed)


def test_every_version_of_the_handshake_is_spoken(http: Bridge) -> None:
    web = Web(http.url)
    for version in HANDSHAKES:
        session, told = web.session(version)
        assert told["protocolVersion"] == version and "you do not have it" in told["instructions"]
        body = {"id": 2, "method": "tools/call", "params": {"name": "check", "arguments": {"key": "k"}}}
        status, _, message = web.post(body, Mcp_Session_Id=session, MCP_Protocol_Version=version)
        assert status == 200
        assert json.loads(message["result"]["content"][0]["text"])["held"] is False


def refused_for_its_size(web: Web, **named: str) -> int:
    """A connection closed upon us while we send may take the answer with it: that is TCP's, so it is asked again."""
    for _ in range(10):
        with contextlib.suppress(ConnectionError):
            return web.post(b" " * (2 << 20), **named)[0]
    return 0


def test_what_is_no_request_for_a_tool_is_a_json_rpc_error(http: Bridge) -> None:
    web = Web(http.url)
    ask = {"id": 1, "method": "tools/call", "params": {"name": "steal", "arguments": {}}}
    session, _ = web.session("2025-11-25")
    named = {"Mcp_Session_Id": session, "MCP_Protocol_Version": "2025-11-25"}
    assert web.post(ask, **named)[2]["error"]["code"] == -32602
    ask["params"] = {"name": "lease", "arguments": [1]}
    assert web.post(ask, **named)[2]["error"]["code"] == -32602
    assert web.post({"id": 2, "method": "leases/all"}, **named)[2]["error"]["code"] == -32601
    assert web.post(b"hello", **named)[0] == 400
    assert refused_for_its_size(web, **named) == 413
    later = {
        "id": 1,
        "method": "tools/list",
        "params": {"_meta": {**ENVELOPE, "io.modelcontextprotocol/protocolVersion": "2031-01-01"}},
    }
    status, _, message = web.post(later, MCP_Protocol_Version="2031-01-01", Mcp_Method="tools/list")
    assert (status, message["error"]["code"]) == (400, -32022) and message["error"]["data"]["supported"] == [MODERN]


@pytest.mark.trio
async def test_the_key_in_the_header_is_the_agent_of_the_call(served: Daemon, http: Bridge) -> None:
    with served.rpc() as rpc:
        secret = rpc.call("agent_add", name="mcp-agent", namespace="mcp-space")["secret"]
        client = create_mcp_http_client(headers={"Authorization": f"Bearer {secret}"})
        async with Host(streamable_http_client(http.url, http_client=client), mode=MODERN) as host:
            result = await host.call_tool("lease", {"key": "walled"})
        assert result.structured_content is not None and result.structured_content["acquired"] is True
        assert rpc.call("check", key="walled")["held"] is False, "it is not in the namespace of the socket"
        held_by = rpc.call("check", key="walled", agent_key=secret)["held_by"]
        assert held_by == result.structured_content["holder"] and secret not in held_by
        web = Web(http.url)
        refused = web.call("lease", {"key": "walled"}, Authorization=f"Bearer {secret}")
        assert refused["structuredContent"]["reason"] == "same_label", "the same key, the same label"
        wrong = web.call("lease", {"key": "walled"}, Authorization="Bearer nonsense")
        assert wrong["isError"] and "unauthenticated" in wrong["content"][0]["text"] and "nonsense" not in json.dumps(wrong)
        assert web.call("lease", {"key": "walled"})["structuredContent"]["acquired"] is True
    assert secret not in http.errors() and secret not in served.logs()


def test_sessions_of_one_server_are_told_apart(http: Bridge) -> None:
    web = Web(http.url)
    body = {"id": 2, "method": "tools/call", "params": {"name": "lease", "arguments": {"key": "apart"}}}
    reasons = []
    first, second = (web.session("2025-11-25")[0] for _ in range(2))
    for session in (first, first, second):
        reply = web.post(body, Mcp_Session_Id=session, MCP_Protocol_Version="2025-11-25")[2]["result"]["structuredContent"]
        reasons.append(reply.get("reason"))
    assert reasons == [None, "same_label", "held"]


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Host": "evil.example"}, 421),
        ({"Host": "evil.example:80"}, 421),
        ({"Host": "127.0.0.1.evil.example"}, 421),
        ({"Origin": "https://evil.example"}, 403),
        ({"Origin": "http://localhost:3000"}, 403),
        ({"Origin": "null"}, 403),
    ],
)
@pytest.mark.parametrize("era", [MODERN_HEADERS | {"Mcp_Name": "check"}, {}])
def test_web_pages_and_rebound_names_are_refused(era: dict[str, str], headers: dict[str, str], status: int, http: Bridge) -> None:
    body = {"id": 1, "method": "tools/call", "params": {"name": "check", "arguments": {"key": "k"}}}
    assert Web(http.url).post(body, **era, **headers)[0] == status


@pytest.mark.parametrize("era", ["session", "stateless"])
def test_a_wait_whose_http_connection_closes(era: str, http: Bridge, rpc: Rpc) -> None:
    key = f"closes {era}"
    fence = rpc.call("lease", key=key, holder="x")["fence"]
    web = Web(http.url)
    body, headers = modern("lease", {"key": key, **WAIT})[0], {**MODERN_HEADERS, "Mcp_Name": "lease"}
    if era == "session":
        headers = {"Mcp_Session_Id": web.session("2025-11-25")[0], "MCP_Protocol_Version": "2025-11-25"}
        body = {"id": 7, "method": "tools/call", "params": {"name": "lease", "arguments": {"key": key, **WAIT}}}
    connection = web.open(body, **headers)
    eventually(one_waits(rpc, key))
    connection.close()
    nobody_gets(rpc, key, fence)


@pytest.mark.trio
@pytest.mark.parametrize("era", ["legacy", MODERN])
async def test_a_wait_that_the_sdks_client_gives_up(era: str, http: Bridge, rpc: Rpc) -> None:
    key = f"given up {era}"
    fence = rpc.call("lease", key=key, holder="x")["fence"]
    async with Host(http.url, mode=era) as host:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(host.call_tool, "lease", {"key": key, **WAIT})
            await trio.to_thread.run_sync(eventually, one_waits(rpc, key))
            nursery.cancel_scope.cancel()
        await trio.to_thread.run_sync(nobody_gets, rpc, key, fence)
        assert (await host.call_tool("check", {"key": key})).structured_content["held"] is False  # type: ignore[index]


def test_a_door_that_wants_a_key_and_stops_when_it_is_told(served: Daemon, tmp_path: Path) -> None:
    with Bridge(served.socket, tmp_path / "log", "--http", "[::1]:0", "--require-key", "--hosts", "leases.example") as bridge:
        web = Web(bridge.url)
        status, headers, message = web.post({"id": 1, "method": "tools/list"})
        assert (status, headers["www-authenticate"]) == (401, "Bearer") and "agent key" in message["error"]["message"]
        wrong = web.call("check", {"key": "k"}, Authorization="Bearer nonsense", Host="leases.example")
        assert "unauthenticated" in wrong["content"][0]["text"]
        bridge.process.terminate()
        assert bridge.process.wait(30) == 0
        assert bridge.errors() == f"lease: MCP at {bridge.url}\n"


def test_bound_leases_end_with_the_bridge_and_outlive_a_restart_of_the_daemon(make_daemon: MakeDaemon, tmp_path: Path) -> None:
    daemon = make_daemon().start()
    with Bridge(daemon.socket, tmp_path / "log", LEASE_HOLDER="the bridge") as bridge:
        bridge.shake_hands()
        grant = bridge.call("lease", key="k", bind="connection", ttl_seconds=300)["structuredContent"]
        assert grant["holder"] == "the bridge"
        with daemon.rpc() as rpc:
            blocked = rpc.call("lease", key="z", holder="x", ttl_seconds=600)
            through = bridge.send("tools/call", {"name": "lease", "arguments": {"key": "z", **WAIT}})
            eventually(one_waits(rpc, "z"))
        daemon.kill()
        down = bridge.call("renew", key="k", fence=grant["fence"])
        assert down["isError"] and "no daemon answers at" in down["content"][0]["text"]
        daemon.start()
        assert bridge.call("renew", key="k", fence=grant["fence"])["structuredContent"]["renewed"] is True
        with daemon.rpc() as rpc:
            eventually(one_waits(rpc, "z"))
            rpc.call("release", key="z", fence=blocked["fence"])
            message = bridge.receive()
            assert message["id"] == through and message["result"]["structuredContent"]["acquired"] is True, (
                "a wait outlives the daemon"
            )
            blocker = rpc.call("lease", key="w", holder="x")
            asked = {"key": "w", "wait_seconds": 60, "bind": "connection", "ttl_seconds": 300}
            waiting = bridge.send("tools/call", {"name": "lease", "arguments": asked})
            eventually(lambda: rpc.call("check", key="w")["waiting"] == 1)
            rpc.call("release", key="w", fence=blocker["fence"])
            message = bridge.receive()
            assert message["id"] == waiting and message["result"]["structuredContent"]["acquired"] is True
            assert rpc.call("check", key="w")["held"] is True, "its own line is gone, and it is bound to the one that stays"
            assert bridge.close_input() == 0
            for key in ("k", "w"):
                eventually(lambda key=key: not rpc.call("check", key=key)["held"])
        assert bridge.errors() == ""
