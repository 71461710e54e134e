"""MCP over streamable HTTP: the SDK's application, served by hypercorn under trio.

Whoever can connect to the port is let in, so the door is narrow: loopback unless told otherwise, names of ours in Host, nothing from web
pages (any Origin is refused), and a key where the address is not loopback.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from typing import Any, Final

import trio
from hypercorn.config import Config
from hypercorn.trio import serve as hypercorn_serve
from mcp.server.lowlevel import Server
from mcp.server.transport_security import TransportSecuritySettings
from starlette.datastructures import Headers

from leased.client.mcp_address import PATH
from leased.client.mcp_server import CALLER, GONE, caller_of

MAX_BODY_BYTES: Final = 1 << 20
MAX_SESSIONS: Final = 1024
SESSION_IDLE_SECONDS: Final = 1800.0
ONCE: Final = ("authorization", "mcp-session-id", "host", "origin")
"""Headers that decide who calls and from where.  Said twice, two readers might each take another."""

_LOOPBACK: Final = ("127.0.0.1", "localhost", "[::1]")

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]


async def serve(server: Server[Any], listening: socket.socket, hosts: Iterable[str], *, keyed: bool) -> None:
    """Until cancelled.  `hosts`: further names in Host.  `keyed`: a request without an agent key is refused with 401."""
    own = listening.getsockname()[0]
    names = {*_LOOPBACK, f"[{own}]" if ":" in own else own, *hosts}
    security = TransportSecuritySettings(allowed_hosts=sorted({*names, *(f"{name}:*" for name in names)}), allowed_origins=[])
    application = server.streamable_http_app(
        streamable_http_path=PATH,
        max_request_body_size=MAX_BODY_BYTES,
        session_idle_timeout=SESSION_IDLE_SECONDS,
        max_sessions=MAX_SESSIONS,
        transport_security=security,
    )
    config = Config()
    config.bind = [f"fd://{os.dup(listening.fileno())}"]  # hypercorn closes it
    config.accesslog = None
    config.errorlog = None
    config.graceful_timeout = 0.0
    config.include_server_header = False
    await hypercorn_serve(guarded(application, keyed), config, shutdown_trigger=trio.sleep_forever, mode="asgi")


def guarded(application: Any, keyed: bool) -> Any:
    """The application, behind the key if there must be one; its scope tells it who calls, and when the other end has closed."""

    async def guard(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await application(scope, receive, send)
            return
        headers = Headers(scope=scope)
        if any(len(headers.getlist(name)) > 1 for name in ONCE):
            await _refuse(send, 400, f"each of these headers is given once at most: {', '.join(ONCE)}")
            return
        caller = caller_of(headers)
        if keyed and caller.agent_key is None:
            await _refuse(send, 401, "an agent key is needed: Authorization: Bearer KEY")
            return
        gone = trio.Event()

        async def hear() -> MutableMapping[str, Any]:
            message = await receive()
            if message["type"] == "http.disconnect":
                gone.set()
            return message

        await application({**scope, CALLER: caller, GONE: gone}, hear, send)

    return guard


async def _refuse(send: Send, status: int, why: str) -> None:
    body = json.dumps({"jsonrpc": "2.0", "id": None, "error": {"code": -32600, "message": why}}).encode()
    headers = [(b"content-type", b"application/json"), *([(b"www-authenticate", b"Bearer")] if status == 401 else [])]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
