"""The life of a daemon process: open, listen, say that it is ready, serve until told to stop, leave nothing behind."""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import signal
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Final, NamedTuple

import structlog
import trio

from leased.binds import is_bind
from leased.clock import HostClock
from leased.config import Address, Config
from leased.daemon import Daemon
from leased.doors.listen import bind_tcp, bind_unix
from leased.hangup import Hangups
from leased.not_started import tell
from leased.opening import open_state
from leased.peers import group_id
from leased.reload import Reloader
from leased.systemd import Inherited, Notifier, inherited, listening

log = structlog.get_logger()

READERS_SECONDS: Final = 60.0  # a `leased backup` that was killed would keep the ledger from using its free pages again
GC_ALLOCATIONS: Final = 20_000  # requests make no cycles: looking for them every 700 allocations is a tenth of their cost


async def run(
    config: Config,
    *,
    ready: Callable[[Path], None] | None = None,
    read: Callable[[], Config] | None = None,
    speak: Callable[[Config], object] = lambda config: None,
) -> int:
    """The whole life of a daemon process.  Returns the exit code.  On SIGHUP the configuration is what `read` gives (None: it stays), and
    `speak` makes the log follow it."""
    hangups = Hangups()
    given = inherited()
    notifier = Notifier()
    if notifier:
        faulthandler.enable()  # the watchdog's SIGABRT leaves in the journal where every thread was, and none of its values
    try:
        notifier.status(f"starting: reading the state in {config.state_dir}")
        daemon = _opened(config, notifier)
        daemon.binds.restored({each.name: each.descriptor for each in given if is_bind(each.name)})
        doors = _doors(config, given)
    except Exception as error:
        raise tell(error, given, notifier, socket=str(config.socket)) from error

    def say_ready() -> None:
        notifier.ready(str(daemon.standing()))
        if ready is not None:
            ready(doors.path)

    reloader = Reloader(daemon, read or (lambda: daemon.config), speak)
    asked, ask = trio.open_memory_channel[None](1)  # more than one that waits would read the same file twice
    with trio.open_signal_receiver(signal.SIGTERM, signal.SIGINT, signal.SIGHUP) as signals:
        async with trio.open_nursery() as nursery:

            async def wait_for_signal() -> None:
                async for number in signals:
                    if number != signal.SIGHUP or hangups.terminal_gone():
                        log.info("daemon.draining", signal=signal.Signals(number).name)
                        daemon.stop()
                    else:
                        with contextlib.suppress(trio.WouldBlock):
                            asked.send_nowait(None)

            async def reload() -> None:
                async for _ in ask:
                    notifier.reloading()
                    await reloader.reload()
                    notifier.say("READY=1")

            async def forget_readers() -> None:
                while True:
                    await trio.sleep(READERS_SECONDS)
                    daemon.writer.read(lambda ledger: ledger.environment.reader_check(), lambda *_: None)
                    daemon.backups.give_up()

            nursery.start_soon(wait_for_signal)
            nursery.start_soon(reload)
            nursery.start_soon(forget_readers)
            if hangups.early:
                asked.send_nowait(None)
            await daemon.serve(doors.listeners, say_ready)
            nursery.cancel_scope.cancel()
    notifier.stopping("stopping: what is under way is answered, and the ledger is told of every lease")
    doors.unlink()
    await daemon.shut()
    return 70 if daemon.floor_lost else 0


def _opened(config: Config, notifier: Notifier) -> Daemon:
    gc.disable()  # a million records are read in one go, and none of what they become is garbage
    clock = HostClock()
    daemon = Daemon(config, clock, open_state(config, clock), notifier)
    gc.freeze()
    gc.set_threshold(GC_ALLOCATIONS, 20, 100)
    gc.enable()
    return daemon


class _Doors(NamedTuple):
    """`path`: where the Unix socket is; `bound`: its inode, if it was made here."""

    listeners: list[socket.socket]
    path: Path
    bound: int | None

    def unlink(self) -> None:
        """Only what was made here, and only if it still is what was made."""
        try:
            if self.bound is not None and self.path.stat().st_ino == self.bound:
                self.path.unlink()
        except OSError:
            pass


def _doors(config: Config, given: list[Inherited]) -> _Doors:
    """What systemd listens on already, and what is missing: there is a Unix socket always, and the addresses of http.listen.

    An inherited listener serves what its address family stands for, whatever its name is.  Raises ConfigError for a descriptor that is none.
    """
    listeners = [listening(each) for each in given if not is_bind(each.name)]
    there = {listener.getsockname()[:2] for listener in listeners if listener.family != socket.AF_UNIX}
    path, bound = config.socket, None
    inherited_unix = next((listener for listener in listeners if listener.family == socket.AF_UNIX), None)
    if inherited_unix is not None:
        path = Path(inherited_unix.getsockname())
    else:
        gid = None if config.socket_group is None else group_id(config.socket_group, "socket_group")
        listeners.append(bind_unix(config.socket, config.socket_mode, gid))
        bound = config.socket.stat().st_ino
    listeners += [bind_tcp(*address) for address in config.http.listen if tuple(address) not in there]
    for listener in listeners:
        if listener.family != socket.AF_UNIX:
            log.info("http.listening", address=str(Address(*listener.getsockname()[:2])))
    return _Doors(listeners, path, bound)
