"""The life of a daemon process: open, listen, say that it is ready, serve until told to stop, leave nothing behind."""

from __future__ import annotations

import gc
import signal
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Final

import structlog
import trio

from leased.binds import is_bind
from leased.clock import HostClock
from leased.config import Config
from leased.daemon import Daemon
from leased.doors.listen import bind_tcp, bind_unix
from leased.opening import open_state
from leased.peers import group_id
from leased.systemd import Notifier, inherited

log = structlog.get_logger()

GC_ALLOCATIONS: Final = 20_000  # requests make no cycles: looking for them every 700 allocations is a tenth of their cost


async def run(config: Config, *, ready: Callable[[Path], None] | None = None) -> int:
    """The whole life of a daemon process.  Returns the exit code."""
    given = inherited()
    notifier = Notifier()
    gc.disable()  # a million records are read in one go, and none of what they become is garbage
    clock = HostClock()
    daemon = Daemon(config, clock, open_state(config, clock), notifier)
    gc.freeze()
    gc.set_threshold(GC_ALLOCATIONS, 20, 100)
    gc.enable()
    listeners = [socket.socket(fileno=each.descriptor) for each in given if not is_bind(each.name)]
    daemon.binds.restored({each.name: each.descriptor for each in given if is_bind(each.name)})
    bound = None
    if not listeners:
        gid = None if config.socket_group is None else group_id(config.socket_group, "socket_group")
        listeners = [bind_unix(config.socket, config.socket_mode, gid)]
        bound = config.socket.stat().st_ino
    for address in config.http.listen:
        listeners.append(bind_tcp(address.host, address.port))
        log.info("http.listening", address=str(address._replace(port=listeners[-1].getsockname()[1])))

    def say_ready() -> None:
        notifier.ready(daemon.taken.story)
        if ready is not None:
            ready(config.socket)

    with trio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
        async with trio.open_nursery() as nursery:

            async def wait_for_signal() -> None:
                async for number in signals:
                    log.info("daemon.draining", signal=signal.Signals(number).name)
                    daemon.stop()

            nursery.start_soon(wait_for_signal)
            await daemon.serve(listeners, say_ready)
            nursery.cancel_scope.cancel()
    notifier.stopping()
    try:
        if bound is not None and config.socket.stat().st_ino == bound:
            config.socket.unlink()
    except OSError:
        pass
    await daemon.shut()
    return 70 if daemon.floor_lost else 0
