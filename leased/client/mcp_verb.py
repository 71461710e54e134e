"""The verb that serves MCP.  It is a process of its own and a client of the daemon like any other; the daemon need not run yet.

The SDK takes more than a second to import, so it is imported when the verb runs, and only then.
"""

from __future__ import annotations

import gc
import os
import signal
import socket
import sys
from typing import Final, NamedTuple

from leased.client.mcp_address import PATH, Address, address, listener
from leased.client.shell import EXIT_INTERRUPTED, EXIT_UNKNOWN, EXIT_YES, Arguments, Option, Output, Usage, Verb

_NOT_INSTALLED: Final = (
    "`lease mcp` needs packages that {python} does not have ({missing} is missing): in a checkout of leased, install them into a virtual\n"
    "environment: python3 -m venv .venv && .venv/bin/pip install '.[mcp]'; then .venv/bin/lease mcp"
)
_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def serve(arguments: Arguments, out: Output) -> int:
    where = arguments.text("--http")
    bind = arguments.text("--bind") or "none"
    if where is not None and bind != "none":
        raise Usage("--bind is for stdio: over HTTP there is no process or connection of the caller's that a lease could end with")
    if where is None:
        for name in ("--allow-remote", "--require-key", "--hosts"):
            if arguments.switch(name):
                raise Usage(f"{name} goes with --http ADDR:PORT")
    wanted = _permitted(where, arguments) if where is not None else None
    gc.disable()  # importing makes no garbage, only work for its collector: a sixth of the start
    try:
        import hypercorn  # noqa: F401
        import trio

        from leased.client import mcp_server  # noqa: F401
    except ImportError as missing:
        out.aside(_NOT_INSTALLED.format(python=sys.executable, missing=missing.name))
        return EXIT_UNKNOWN
    finally:
        gc.enable()
    if wanted is None:
        if sys.stdin.isatty():
            out.aside("speaking MCP with this terminal; a host starts this command by itself.  Ctrl-D ends it")
        return trio.run(_serve, arguments, bind, None)
    try:
        listening = listener(wanted)
    except OSError as wrong:
        out.aside(f"--http {wanted}: {wrong.strerror}")
        return EXIT_UNKNOWN
    with listening:
        out.aside(f"MCP at http://{wanted._replace(port=listening.getsockname()[1])}{PATH}")
        hosts = [name.strip() for name in (arguments.text("--hosts") or "").split(",") if name.strip()]
        keyed = not wanted.loopback or arguments.switch("--require-key")
        return trio.run(_serve, arguments, bind, Door(listening, hosts, keyed))


def _permitted(where: str, arguments: Arguments) -> Address:
    try:
        wanted = address(where)
    except ValueError as wrong:
        raise Usage(f"--http {wrong}") from None
    if not wanted.loopback and not arguments.switch("--allow-remote"):
        raise Usage(
            f"{wanted.host} is not a loopback address, and whoever reaches it could take leases.  With --allow-remote it is served: "
            "unencrypted, and to callers with an agent key only"
        )
    return wanted


class Door(NamedTuple):
    """What serving HTTP needs to know."""

    listening: socket.socket
    hosts: list[str]
    keyed: bool


async def _serve(arguments: Arguments, bind: str, door: Door | None) -> int:
    """Until the host closes its end or a signal comes.  Calls under way are cancelled then, and leave no grant behind."""
    import trio

    from leased.client import mcp_server
    from leased.client.core import socket_path
    from leased.client.mcp_calls import Calls
    from leased.client.mcp_daemon import Lines

    mcp_server.quiet()
    code = EXIT_YES
    async with trio.open_nursery() as outer:  # the lines outlive the calls, which give back by them what nobody will hear of
        lines = Lines(socket_path(arguments.text("--socket")), outer)
        calls = Calls(lines, arguments.text("--holder") or os.environ.get("LEASE_HOLDER"), bind=bind, local=door is None)
        agent_key = os.environ.get("LEASED_AGENT_KEY") or None
        with trio.open_signal_receiver(*_SIGNALS) as signals:
            async with trio.open_nursery() as inner:

                async def stop_on_signal() -> None:
                    nonlocal code
                    async for number in signals:
                        code = EXIT_INTERRUPTED if number == signal.SIGINT else EXIT_YES
                        inner.cancel_scope.cancel()

                inner.start_soon(stop_on_signal)
                if door is None:
                    from leased.client import mcp_stdio

                    await mcp_stdio.serve(mcp_server.make(calls, local=True, bind=bind, agent_key=agent_key))
                else:
                    from leased.client import mcp_http

                    await mcp_http.serve(mcp_server.make(calls, local=False), door.listening, door.hosts, keyed=door.keyed)
                inner.cancel_scope.cancel()
        outer.cancel_scope.cancel()
    return code


VERBS: Final = {
    "mcp": Verb(
        serve,
        "lease mcp [--holder LABEL] [--bind none] | lease mcp --http ADDR:PORT [--require-key] [--allow-remote] [--hosts NAMES]",
        "Serves MCP, the protocol by which hosts give tools to a model: lease, renew, release, check, heartbeat, resume_packet and\n"
        "agent_lock. Over standard input and output it ends when the host closes them; with --http it serves any number of hosts until\n"
        "it gets SIGTERM. It needs packages of its own (the extra mcp).",
        (
            Option("--http", "ADDR:PORT", "serve streamable HTTP there, at /mcp; the caller's key is in its Authorization header"),
            Option("--holder", "LABEL", "the label of all calls (default: $LEASE_HOLDER, else one of its own for each session)"),
            Option(
                "--bind", "BIND", "stdio: what a lease is bound to where the call does not say", ("none", "process", "connection")
            ),
            Option("--require-key", "", "HTTP: refuse calls without an agent key (always so where the address is not loopback)"),
            Option("--allow-remote", "", "HTTP: serve an address that is not loopback"),
            Option("--hosts", "NAMES", "HTTP: further names in Host that are this server's, joined by commas"),
        ),
        (0, 0),
        ("claude mcp add leased -- lease mcp", "lease mcp --http 127.0.0.1:8766"),
    ),
}
