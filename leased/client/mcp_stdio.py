"""MCP over standard input and output: one JSON-RPC message a line.

Reading and writing block in threads, which works for pipes, sockets, terminals and files alike and changes no flag of a descriptor
that others share.  While it serves, descriptor 1 is standard error: whatever a library might print does not break the protocol.
The end of the input is the end of the session: calls under way are cancelled and leave no grant behind.
"""

from __future__ import annotations

import json
import os
from typing import Any, Final

import anyio
import trio
from mcp.server.lowlevel import Server
from mcp.shared.message import SessionMessage
from mcp_types import INVALID_REQUEST, PARSE_ERROR, ErrorData, JSONRPCError, JSONRPCMessage, jsonrpc_message_adapter
from pydantic import ValidationError

MAX_LINE_BYTES: Final = 1 << 20  # the daemon takes 64 KiB; a client may have much to say of itself
READ_BYTES: Final = 1 << 16
MAX_QUEUED: Final = 1024  # answers to a host that does not read; then calls wait
FLUSH_SECONDS: Final = 1.0  # for the last answers, once the host has closed its end


async def serve(server: Server[Any], source: int = 0, sink: int = 1) -> None:
    """Until the host closes `source` or does not take what is written to `sink`.  Cancelled, it cancels the calls under way."""
    heard, messages = anyio.create_memory_object_stream[SessionMessage | Exception](0)
    answers, written = anyio.create_memory_object_stream[SessionMessage](MAX_QUEUED)
    wire = os.dup(sink)
    _divert(sink)
    try:
        async with trio.open_nursery() as nursery:
            flushed = trio.Event()
            reading = trio.CancelScope()
            nursery.start_soon(_read, source, heard, answers.clone(), reading)
            nursery.start_soon(_write, wire, written, reading, flushed)
            await server.run(messages, answers, server.create_initialization_options())
            with trio.move_on_after(FLUSH_SECONDS):
                await flushed.wait()
            nursery.cancel_scope.cancel()
    finally:
        os.dup2(wire, sink)
        os.close(wire)


def _divert(sink: int) -> None:
    try:
        os.dup2(2, sink)
    except OSError:  # no standard error
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sink)
        os.close(nowhere)


async def _read(source: int, heard: Any, answers: Any, reading: trio.CancelScope) -> None:
    with reading:
        async with heard, answers:
            lines = Lines()
            while octets := await trio.to_thread.run_sync(_some, source, abandon_on_cancel=True):
                for line in lines.feed(octets):
                    message = understood(line)
                    await (answers if isinstance(message, JSONRPCError) and message.id is None else heard).send(
                        SessionMessage(message)
                    )


def _some(source: int) -> bytes:
    """Empty at the end, which a terminal that is gone is too."""
    try:
        return os.read(source, READ_BYTES)
    except OSError:
        return b""


async def _write(wire: int, written: Any, reading: trio.CancelScope, flushed: trio.Event) -> None:
    try:
        async with written:
            async for item in written:
                text = item.message.model_dump_json(by_alias=True, exclude_unset=True)
                await trio.to_thread.run_sync(_all, wire, text.encode() + b"\n", abandon_on_cancel=True)
    except OSError:  # the host is gone
        reading.cancel()
    finally:
        flushed.set()


def _all(wire: int, octets: bytes) -> None:
    while octets:
        octets = octets[os.write(wire, octets) :]


class Lines:
    """Bytes in, whole lines out.  Of a line longer than MAX_LINE_BYTES nothing is kept: it comes out as None."""

    def __init__(self) -> None:
        self._begun = bytearray()
        self._too_long = False

    def feed(self, octets: bytes) -> list[bytes | None]:
        """Blank lines are left out."""
        lines: list[bytes | None] = []
        *ended, rest = octets.split(b"\n")
        for part in ended:
            self._add(part)
            if self._too_long:
                lines.append(None)
            elif self._begun.strip():
                lines.append(bytes(self._begun))
            self._begun.clear()
            self._too_long = False
        self._add(rest)
        return lines

    def _add(self, part: bytes) -> None:
        if self._too_long or len(self._begun) + len(part) > MAX_LINE_BYTES:
            self._too_long = True
            self._begun.clear()
        else:
            self._begun += part


def understood(line: bytes | None) -> JSONRPCMessage:
    """The message; for what is none, the error that answers it.  An error that has no id is for us to send, not for the server."""
    if line is None:
        return _error(INVALID_REQUEST, f"a line of more than {MAX_LINE_BYTES} bytes was left out")
    try:
        return jsonrpc_message_adapter.validate_json(line, by_name=False)
    except ValidationError:
        pass
    try:
        json.loads(line)
    except (ValueError, RecursionError):
        return _error(PARSE_ERROR, "a line that is no JSON")
    return _error(INVALID_REQUEST, "a line that is no JSON-RPC request, response or notification")


def _error(code: int, text: str) -> JSONRPCError:
    return JSONRPCError(jsonrpc="2.0", id=None, error=ErrorData(code=code, message=text))
