"""The MCP server: the official SDK's low-level one, which speaks both eras, with the calls of mcp_calls.py behind it.

A refusal is an ordinary result; a mistake or a failure is a result with isError; an unknown tool is a JSON-RPC error.  The SDK checks
envelopes, not arguments: those are checked against the table before anything is sent.
"""

from __future__ import annotations

import json
import logging
from typing import Any, Final

import trio
from mcp.server.lowlevel import Server
from mcp.shared.exceptions import MCPError
from mcp_types import (
    INVALID_PARAMS,
    CallToolRequestParams,
    CallToolResult,
    ListToolsResult,
    TextContent,
    Tool,
    ToolAnnotations,
)

from leased.client import mcp_tools
from leased.client.mcp_calls import Caller, Calls, Told
from leased.fields import named, suggestion
from leased.version import VERSION

GONE: Final = "leased.gone"
"""In the ASGI scope of an HTTP request: a trio.Event, set when the other end has closed the connection."""

CALLER: Final = "leased.caller"
"""In the same scope: who calls, as the door judged it.  Nobody reads the headers a second time: of two that differ another might be taken."""

_BEARER: Final = "bearer "


def make(calls: Calls, *, local: bool, bind: str = "none", agent_key: str | None = None) -> Server[Any]:
    """`agent_key`: of every call over stdio.  Over HTTP (not `local`) it is what the door found in each request (CALLER)."""
    catalogue = mcp_tools.tools(local=local, bind=bind)
    listed = ListToolsResult(tools=[_shown(tool) for tool in catalogue.values()])

    async def list_tools(_context: Any, _params: Any) -> ListToolsResult:
        return listed

    async def call_tool(context: Any, params: CallToolRequestParams) -> CallToolResult:
        if params.name not in catalogue:
            raise MCPError(INVALID_PARAMS, f"{named(params.name)} is not a tool{suggestion(params.name, catalogue)}")
        caller, gone = Caller(agent_key), None
        if not local:
            caller, gone = context.request.scope[CALLER], context.request.scope[GONE]
        return _result(await _while_heard(calls, params.name, params.arguments or {}, caller, gone))

    server: Server[Any] = Server(
        "leased",
        version=VERSION,
        title="leased",
        instructions=mcp_tools.INSTRUCTIONS,
        on_list_tools=list_tools,
        on_call_tool=call_tool,
    )
    server.middleware.clear()  # spans of whatever tracing is installed: nobody asked for them here
    return server


def quiet() -> None:
    """The SDK's log lines can repeat what a message held, secrets included: none is written."""
    for name in ("mcp", "hypercorn.access", "hypercorn.error", "sse_starlette"):
        logger = logging.getLogger(name)
        logger.addHandler(logging.NullHandler())
        logger.propagate = False


def caller_of(headers: Any) -> Caller:
    """The agent key of a request's Authorization header, and its session, which only the era of handshakes has."""
    authorization = headers.get("authorization", "")
    secret = authorization[len(_BEARER) :].strip() if authorization.lower().startswith(_BEARER) else ""
    return Caller(secret or None, headers.get("mcp-session-id", ""))


async def _while_heard(calls: Calls, tool: str, arguments: dict[str, Any], caller: Caller, gone: trio.Event | None) -> Told:
    """The call's answer; where `gone` comes first the call is cancelled, since nobody can be told of a grant any more."""
    told = Told(None, "Cancelled: the connection was closed.")
    if gone is None:
        return await calls.call(tool, arguments, caller)
    async with trio.open_nursery() as nursery:

        async def hang_up() -> None:
            await gone.wait()
            nursery.cancel_scope.cancel()

        nursery.start_soon(hang_up)
        told = await calls.call(tool, arguments, caller)
        nursery.cancel_scope.cancel()
    return told


def _result(told: Told) -> CallToolResult:
    """JSON first, as MCP asks for, then what it means; a mistake has its sentence alone."""
    texts = [told.text] if told.text else []
    if told.reply is None:
        return CallToolResult(content=[TextContent(text=text) for text in texts], is_error=True)
    texts.insert(0, json.dumps(told.reply, ensure_ascii=False))
    return CallToolResult(content=[TextContent(text=text) for text in texts], structured_content=told.reply, is_error=False)


def _shown(tool: mcp_tools.Tool) -> Tool:
    return Tool(
        name=tool.name,
        title=tool.title,
        description=tool.description,
        input_schema=tool.input_schema,
        output_schema=tool.output_schema,
        annotations=ToolAnnotations.model_validate({"title": tool.title, **tool.hints}),
    )
