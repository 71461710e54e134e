"""The daemon: open, recover, serve, drain.  The only place that knows everything.

One trio task waits for the sockets, one for the time.  Both do their work in plain calls: nothing that decides ever awaits.
"""

from __future__ import annotations

import gc
import signal
import socket
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Final

import structlog
import trio

from leased.agent_lock import AgentLock
from leased.agents import Agents
from leased.billing import Billing
from leased.binds import Binds, is_bind
from leased.calls import Call
from leased.clock import Clock, HostClock
from leased.config import Config
from leased.digests import Digests
from leased.doors.lines import AnyPeer
from leased.doors.listen import bind_tcp, bind_unix
from leased.doors.pages import http_door
from leased.doors.unix import Switchboard
from leased.errors import StateRefused, StoreError
from leased.gate import Gate
from leased.generations import Generations, check_wall
from leased.lessor import Lessor
from leased.metrics import Meters, TimedWriter
from leased.outbox_desk import OutboxDesk
from leased.peers import Policy, group_id
from leased.start import Start
from leased.state.environment import DirectoryLock, NotWritten
from leased.state.journal import Journal
from leased.state.leases import Leases
from leased.state.ledger import INITIALISED, Ledger, write_initialised
from leased.state.outbox import read_state
from leased.state.probe import probe
from leased.state.recovery import TakenOver, take_over
from leased.state.writer import WriterThread
from leased.stop import copy_out
from leased.switches import Switches
from leased.systemd import Notifier, inherited
from leased.tariff import Tariff
from leased.upkeep import Upkeep
from leased.upstream import Shipper
from leased.views import Views
from leased.watch import Watchers

log = structlog.get_logger()

LATE_SECONDS: Final = 0.1  # a loop later than this was deaf, and what waited in its sockets comes first
TURNS_AT_ONCE: Final = 16  # turns before the rest of the loop gets a look in
GC_ALLOCATIONS: Final = 20_000  # requests make no cycles: looking for them every 700 allocations is a tenth of their cost
STOP_SECONDS: Final = 5.0  # for the last flush; a disk that hangs longer gets no clean mark


class FloorLost(Exception):
    """The state's paths lead elsewhere: whatever is granted from now on could be granted twice."""


class Daemon:
    """All parts of one running daemon.  Made by `open_daemon`; `serve` runs it until `stop` is called or the floor is lost."""

    def __init__(
        self,
        config: Config,
        clock: Clock,
        locks: list[DirectoryLock],
        leases: Leases,
        ledger: Ledger,
        taken: TakenOver,
        notifier: Notifier,
    ) -> None:
        self.config = config
        self.clock = clock
        self.locks = locks
        self.leases = leases
        self.ledger = ledger
        self.taken = taken
        self._token = trio.lowlevel.current_trio_token()
        self.writer = WriterThread(ledger, self._token.run_sync_soon)
        self.meters = Meters()
        self.journal = Journal(TimedWriter(self.writer, clock, self.meters.flushes), flushed=self._flushed, failed=self._failed)
        gate = Gate(taken.wait_out, taken.meta.no_grant_before, settled=not taken.waiting, closed="starting")
        self.lessor = Lessor(
            leases,
            Digests(bytes.fromhex(taken.meta.secret)),
            Generations(taken.last, taken.mark),
            self.journal,
            gate,
            clock,
            config.limits,
        )
        self.start = Start(self.lessor, taken, config.wait_out_seconds)
        self.lessor.reread()
        self.switches = Switches(self.lessor, config.limits.max_switches_per_namespace)
        self.switches.load()
        self.watchers = Watchers(self.lessor, config.limits.max_watchers_per_uid)
        agents, damaged = ledger.read_agents()
        for digest in damaged:
            log.error("record.set_aside", table="agents", digest=digest.hex())
        self.agents = Agents(self.lessor, self.watchers, agents.items())
        policy = Policy(
            by_uid=config.namespaces.uids,
            by_gid=config.namespaces.gids,
            per_uid=config.namespaces.per_uid,
            operator_group=config.operator_group,
        )
        self.board = Switchboard(policy, config.limits, self._decide, self._hung_up)
        self.board.known = self.agents.identify
        self.binds = Binds(self.lessor, self.board.readable, self.board.forget, notifier or None)
        tariff = Tariff(config.billing.enabled, config.billing.currency, config.billing.refusal, config.billing.agent_lock_call)
        self.lessor.free = tariff.free()
        self.billing = Billing(
            self.lessor,
            tariff,
            read_state(ledger),
            taken.meta.incarnation,
            max_waiting=config.billing.outbox_max_events,
            max_once=config.limits.max_billed_once_records,
        )
        AgentLock(self.lessor)
        self._background: trio.Nursery | None = None
        parts = (self.lessor, self.meters, self.billing, self.agents, self.board)
        self.board.http = http_door(*parts, self._upstream, self._spawn)
        self.shipper: Shipper | None = None
        if config.upstream.url is not None:
            from leased.upstream_http import make_shipper

            self.shipper = make_shipper(
                config.upstream, config.x402, self.billing, self.journal, self.writer, ledger, clock, taken.meta.install_id
            )
        OutboxDesk(self.lessor, self.billing, self.writer, self.shipper, self.board.flush)
        self.board.proven = self.binds.adopt
        self.upkeep = Upkeep(self.lessor, self.start, self.switches, self.binds, self.billing)
        self.views = Views(self.lessor, self.start, config, taken.meta.install_id, lambda: len(self.board))
        self._seen = clock.now().boot
        self._wake = self._seen
        self._scope = trio.CancelScope()
        self._stopping = trio.Event()
        self._checked_floor = 0.0
        self.floor_lost = False
        self._shutting = False  # connections we close end no lease

    # ---- serving

    async def serve(self, listeners: list[socket.socket], ready: Callable[[], None]) -> None:
        """Serve until told to stop.  Cancellation closes nothing: `shut` does."""
        self.start.begin()
        for listener in listeners:
            self.board.listen(listener)
        ready()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._serve_sockets)
            nursery.start_soon(self._keep_time)
            self._background = nursery
            if self.shipper is not None:
                nursery.start_soon(self.shipper.run)
            await self._stopping.wait()
            nursery.cancel_scope.cancel()

    def stop(self) -> None:
        self._stopping.set()

    async def _serve_sockets(self) -> None:
        """Cancellation leaves nothing half done: a turn has no await in it."""
        descriptor = self.board.epoll.fileno()
        while True:
            if self.board.behind:  # what is left of a long pipeline makes no descriptor readable
                await trio.lowlevel.checkpoint()
            else:
                await trio.lowlevel.wait_readable(descriptor)
            for _ in range(TURNS_AT_ONCE):
                if not self._turn():
                    break
            self._rearm()

    def _turn(self) -> bool:
        boot = self.clock.now().boot
        judged = None
        if boot > self._wake + LATE_SECONDS:
            judged = self._deaf(boot)
        done = self.board.turn(judged)
        if self.meters.undone_turn:
            self.meters.turned(self.clock.now().boot - boot)
        self.journal.kick(boot)
        self._seen = boot
        return done

    def _deaf(self, boot: float) -> float:
        """The loop comes `late`: this pass is judged by the last instant we are known to have listened."""
        log.warning("loop.late", seconds=round(boot - self._wake, 3))
        self._wake = boot
        return min(boot, self._seen + LATE_SECONDS)

    async def _keep_time(self) -> None:
        """Cancellation leaves nothing half done: a tick has no await in it."""
        while True:
            boot = self.clock.now().boot
            if boot > self._wake + LATE_SECONDS:
                self.board.turn(self._deaf(boot))
            more = self.upkeep.tick()
            self._each_second(boot)
            self.board.flush()
            self._seen = boot
            self._wake = boot if more else max(self.upkeep.next_wake(), boot + 0.001)
            with trio.CancelScope(deadline=trio.current_time() + self._wake - boot) as self._scope:
                await trio.sleep_forever()

    def _rearm(self) -> None:
        """A lease that ends sooner than the next tick was granted: tick sooner."""
        wake = self.upkeep.next_wake()
        if wake < self._wake:
            self._scope.deadline = trio.current_time() + max(0.0, wake - self.clock.now().boot)
            self._wake = wake

    def _decide(self, batch: list[Call], judged: float | None) -> None:
        self.meters.batch(len(batch))
        self.lessor.decide(batch, judged)

    def _upstream(self) -> str:
        return self.shipper.failing if self.shipper is not None else ""

    def _spawn(self, task: Callable[[], Awaitable[None]]) -> None:
        if self._background is not None:
            self._background.start_soon(task)

    def _hung_up(self, peer: AnyPeer) -> None:
        self.watchers.hung_up(peer)
        if not self._shutting:
            self.binds.hung_up(peer)
        self.lessor.hung_up(peer)

    def _flushed(self, number: int) -> None:
        self.upkeep.flushed(number)
        if self.start.ledger_written and not (self.ledger.directory / INITIALISED).exists():
            write_initialised(self.ledger.directory, self.taken.meta.install_id)
        self.board.flush()
        self._rearm()

    def _failed(self, number: int, error: Exception) -> None:
        self.upkeep.failed(number, error)
        self.board.flush()
        self._rearm()

    # ---- the floor

    def _each_second(self, boot: float) -> None:
        if boot < self._checked_floor + 1.0:
            return
        self._checked_floor = boot
        self.board.each_second(boot)
        if not (all(lock.in_place() for lock in self.locks) and self.leases.in_place() and self.ledger.in_place()):
            self.lessor.gate.closed = "state_lost"
            self.floor_lost = True
            log.error("floor.lost", state_dir=str(self.config.state_dir), runtime_dir=str(self.config.runtime_dir))
            self.stop()

    # ---- the end

    async def _idle_journal(self) -> None:
        """Until no flush is under way.  Polled: it happens once in a daemon's life."""
        while self.journal.busy:  # noqa: ASYNC110
            await trio.sleep(0.002)

    async def shut(self) -> bool:
        """Stop deciding, let what is under way finish, copy every live lease into the ledger and mark it clean.

        True when it was marked clean.  Cancellation leaves an unclean ledger, which the next start waits out.
        """
        self.board.stop_listening()
        if self.board.http is not None:
            self.board.http.draining = True
        self.lessor.gate.shut = "shutting_down"
        clean = False
        with trio.move_on_after(STOP_SECONDS):
            while self.journal.busy or len(self.lessor.holds):
                self.upkeep.tick()
                self.board.flush()
                await trio.sleep(0.005)
            if not self.floor_lost and copy_out(self.lessor, self.start, self.switches):
                flushes = self.journal.flushes
                await self._idle_journal()
                clean = self.journal.flushes > flushes
        self.board.turn()
        self._shutting = True
        self.board.close_all()
        if self.writer.stop(0.5):
            self.ledger.close()
        self.leases.close()
        for lock in self.locks:
            lock.close()
        log.info("daemon.stopped", clean=clean)
        return clean


def open_daemon(config: Config, notifier: Notifier, clock: Clock | None = None) -> Daemon:
    """Lock, open, take over.  Inside a trio run.  Raises StateLocked, StateRefused, StoreError or ConfigError: nothing is left open
    that a process about to exit would have to close."""
    clock = clock or HostClock()
    check_wall(clock.now().wall)
    locks = [DirectoryLock(config.state_dir), DirectoryLock(config.runtime_dir)]
    _prove(config)
    ledger = Ledger(config.state_dir)
    leases = _open_leases(config)
    try:
        taken = take_over(leases, ledger, wait_out=config.wait_out_seconds, boot=clock.now().boot, boot_id=clock.boot_id())
    except NotWritten as error:
        raise StoreError(f"{config.state_dir} or {config.runtime_dir}: {error}") from error
    log.info("daemon.starting", story=taken.story, recovering=taken.waiting, long_leases=len(taken.known))
    if taken.rebuilt:
        log.warning(
            "ledger.rebuilt",
            state_dir=str(config.state_dir),
            lost="agent keys, billing events not yet shipped, switches told of elsewhere",
        )
    if taken.waiting:
        log.warning("daemon.recovering", seconds=round(taken.meta.no_grant_before - clock.now().boot, 3))
    return Daemon(config, clock, locks, leases, ledger, taken, notifier)


def _prove(config: Config) -> None:
    """A destroyed page would end this process with a signal, or an error that no restart mends, at every start.  A child reads both files first:
    a ledger that it cannot read is refused, a volatile state is discarded like one that LMDB cannot open."""
    data = config.state_dir / "data.mdb"
    if _written(data) and (said := probe(config.state_dir)):
        raise StateRefused(f"{data} is damaged ({said}): run `leased fsck`, then restore a backup, or move the directory away")
    if _written(config.runtime_dir / "data.mdb") and (said := probe(config.runtime_dir)):
        _discard(config, said)


def _written(data: Path) -> bool:
    return data.exists() and data.stat().st_size > 0


def _discard(config: Config, why: str) -> None:
    log.warning("leases.discarded", error=why)
    for name in ("data.mdb", "lock.mdb"):
        (config.runtime_dir / name).unlink(missing_ok=True)


def _open_leases(config: Config) -> Leases:
    """A volatile state that LMDB cannot open is worth nothing: it is made anew, and the ledger's rules say what waits for it."""
    try:
        return Leases(config.runtime_dir, config.max_leases)
    except StateRefused as error:
        _discard(config, str(error))
        return Leases(config.runtime_dir, config.max_leases)


async def run(config: Config, *, ready: Callable[[Path], None] | None = None) -> int:
    """The whole life of a daemon process.  Returns the exit code."""
    given = inherited()
    notifier = Notifier()
    gc.disable()  # a million records are read in one go, and none of what they become is garbage
    daemon = open_daemon(config, notifier)
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
