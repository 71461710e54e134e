"""Lines of standard input, whatever they hold."""

from __future__ import annotations

import json
import logging
import os
from typing import Any

import pytest
import trio
from mcp.server.lowlevel import Server
from mcp_types import INVALID_REQUEST, PARSE_ERROR, EmptyResult, JSONRPCError, JSONRPCNotification, JSONRPCRequest, JSONRPCResponse

from leased.client.mcp_server import quiet
from leased.client.mcp_stdio import MAX_LINE_BYTES, Lines, serve, understood


@pytest.mark.parametrize("size", [1, 2, 7, 1000])
def test_lines_are_the_same_however_they_come(size: int) -> None:
    octets = b'{"a":1}\n\n  \r\nnext\xff line\r\nlast'
    lines = Lines()
    found = [line for at in range(0, len(octets), size) for line in lines.feed(octets[at : at + size])]
    assert found == [b'{"a":1}', b"next\xff line\r"]
    assert lines.feed(b"\n") == [b"last"]


def test_of_a_line_that_never_ends_nothing_is_kept() -> None:
    lines = Lines()
    for _ in range(40):
        assert lines.feed(b"x" * 65536) == []
        assert len(lines._begun) <= MAX_LINE_BYTES
    assert lines.feed(b"\nnext\n") == [None, b"next"]


def test_the_longest_line_is_taken_and_one_byte_more_is_not() -> None:
    assert Lines().feed(b"x" * MAX_LINE_BYTES + b"\n") == [b"x" * MAX_LINE_BYTES]
    assert Lines().feed(b"x" * (MAX_LINE_BYTES + 1) + b"\n") == [None]


def _error(line: bytes | None) -> int:
    message = understood(line)
    assert isinstance(message, JSONRPCError) and message.id is None
    assert json.loads(message.model_dump_json(by_alias=True, exclude_unset=True))["id"] is None
    return message.error.code


@pytest.mark.parametrize(
    "line", [b"hello", b"{", b"\xff\xfe\x00", b'{"jsonrpc": "2.0", "id": 1, "method": "ping"', b"[" * 100_000, b'"' + b"\\" * 99]
)
def test_what_is_no_json_is_answered_as_that(line: bytes) -> None:
    assert _error(line) == PARSE_ERROR


@pytest.mark.parametrize(
    "line",
    [
        b"[]",
        b"7",
        b"null",
        b"{}",
        b'{"id": 1, "method": "ping"}',
        b'{"jsonrpc": "1.0", "id": 1, "method": "ping"}',
        b'{"jsonrpc": "2.0", "id": 1, "method": 7}',
        b'[{"jsonrpc": "2.0", "id": 1, "method": "ping"}]',
        None,
    ],
)
def test_what_is_no_message_is_answered_as_that(line: bytes | None) -> None:
    assert _error(line) == INVALID_REQUEST


def test_messages_are_understood() -> None:
    assert isinstance(understood(b'{"jsonrpc": "2.0", "id": 1, "method": "ping"}'), JSONRPCRequest)
    assert isinstance(understood(b'{"jsonrpc": "2.0", "method": "notifications/initialized"}'), JSONRPCNotification)
    assert isinstance(understood(b'{"jsonrpc": "2.0", "id": "a", "result": {}}'), JSONRPCResponse)


@pytest.mark.trio
async def test_what_is_printed_while_it_serves_does_not_break_the_protocol(capfd: pytest.CaptureFixture[str]) -> None:
    source, to_server = os.pipe()
    from_server, sink = os.pipe()

    async def noisy(_context: Any, _params: Any) -> EmptyResult:
        os.write(sink, b"noise of a library\n")
        return EmptyResult()

    with trio.fail_after(30):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(serve, Server("noisy", on_ping=noisy), source, sink)
            os.write(to_server, b'{"jsonrpc": "2.0", "id": 1, "method": "ping"}\n')
            answer = await trio.to_thread.run_sync(os.read, from_server, 65536)
            os.close(to_server)
    assert json.loads(answer) == {"jsonrpc": "2.0", "id": 1, "result": {}}
    assert capfd.readouterr().err == "noise of a library\n"
    os.write(sink, b"its own again")
    assert os.read(from_server, 65536) == b"its own again"
    for descriptor in (source, from_server, sink):
        os.close(descriptor)


@pytest.mark.trio
async def test_a_host_that_reads_nothing_more_ends_the_session() -> None:
    source, to_server = os.pipe()
    from_server, sink = os.pipe()
    os.close(from_server)
    with trio.fail_after(30):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(serve, Server("unheard"), source, sink)
            os.write(to_server, b'{"jsonrpc": "2.0", "id": 1, "method": "ping"}\n')
    for descriptor in (source, to_server, sink):
        os.close(descriptor)


def test_nothing_the_sdk_logs_is_written(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    loggers = [logging.getLogger(name) for name in ("mcp", "hypercorn.error", "sse_starlette")]
    for logger in loggers:
        monkeypatch.setattr(logger, "propagate", True)
        monkeypatch.setattr(logger, "handlers", [])
    quiet()
    logging.getLogger("mcp.server.runner").error("a message with a fence in it")
    assert caplog.records == []
    for logger in loggers:
        assert not logger.propagate
