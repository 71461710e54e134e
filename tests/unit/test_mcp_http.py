"""The door of MCP over HTTP: who calls is judged once, so that nobody gets past it by saying it twice."""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Any

import pytest
import trio

from leased.client.mcp_calls import Caller
from leased.client.mcp_http import guarded
from leased.client.mcp_server import CALLER, GONE

KEY = (b"authorization", b"Bearer k3y")
OTHER = (b"authorization", b"Basic x")


async def through(headers: list[tuple[bytes, bytes]], *, keyed: bool) -> tuple[int, Caller | None]:
    """The status, and whom the application behind the door takes the caller for."""
    sent: list[MutableMapping[str, Any]] = []
    seen: list[Caller] = []

    async def application(scope: Any, receive: Any, send: Any) -> None:
        seen.append(scope[CALLER])
        assert isinstance(scope[GONE], trio.Event)
        await send({"type": "http.response.start", "status": 200, "headers": []})

    async def send(message: MutableMapping[str, Any]) -> None:
        sent.append(message)

    async def receive() -> MutableMapping[str, Any]:
        return {"type": "http.disconnect"}

    await guarded(application, keyed)({"type": "http", "headers": headers}, receive, send)
    return sent[0]["status"], seen[0] if seen else None


@pytest.mark.trio
@pytest.mark.parametrize("headers", [[OTHER, KEY], [KEY, OTHER], [KEY, KEY]])
@pytest.mark.parametrize("keyed", [True, False])
async def test_two_authorizations_are_no_way_around_the_key(headers: list[tuple[bytes, bytes]], keyed: bool) -> None:
    assert await through(headers, keyed=keyed) == (400, None)


@pytest.mark.trio
async def test_two_sessions_hosts_or_origins_are_refused() -> None:
    for name in (b"mcp-session-id", b"host", b"origin"):
        assert await through([KEY, (name, b"one"), (name, b"another")], keyed=True) == (400, None)


@pytest.mark.trio
async def test_who_has_no_key_stays_outside_where_one_is_needed() -> None:
    for headers in ([], [OTHER], [(b"authorization", b"Bearer ")]):
        assert await through(headers, keyed=True) == (401, None)
        assert await through(headers, keyed=False) == (200, Caller())
    assert await through([KEY, (b"mcp-session-id", b"s")], keyed=True) == (200, Caller("k3y", "s"))
