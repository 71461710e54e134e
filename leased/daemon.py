"""The daemon: its parts, serving, and the end in order.  The only place that knows everything.

One trio task waits for the sockets, one for the time.  Both do their work in plain calls: nothing that decides ever awaits.
"""

from __future__ import annotations

import socket
from collections.abc import Awaitable, Callable
from typing import Final

import structlog
import trio

from leased.agent_lock import AgentLock
from leased.agents import Agents
from leased.backup_desk import BackupDesk
from leased.billing import Billing
from leased.binds import Binds
from leased.calls import Call
from leased.clock import Clock
from leased.config import Config
from leased.config_keys import in_force
from leased.digests import Digests
from leased.doors.lines import AnyPeer
from leased.doors.pages import http_door
from leased.doors.unix import Switchboard
from leased.gate import Gate
from leased.generations import Generations
from leased.lessor import Lessor
from leased.metrics import Meters, TimedWriter
from leased.opening import Opened
from leased.outbox_desk import OutboxDesk
from leased.outcomes import Outcomes
from leased.pulse import Pulse, Standing, standing
from leased.reload import policy_of, tariff_of
from leased.start import Start
from leased.state.journal import Journal
from leased.state.ledger import INITIALISED, write_initialised
from leased.state.outbox import read_state
from leased.state.writer import WriterThread
from leased.stop import copy_out
from leased.switches import Switches
from leased.systemd import Notifier
from leased.upkeep import Upkeep
from leased.upstream import Shipper
from leased.views import Views
from leased.watch import Watchers

log = structlog.get_logger()

LATE_SECONDS: Final = 0.1  # a loop later than this was deaf, and what waited in its sockets comes first
SERVED_SECONDS: Final = 0.005  # of turns before the rest of the loop gets a look in
LINGER_SECONDS: Final = 0.001  # the shortest an epoll can wait; most clients ask again within a tenth of it
START_SECONDS: Final = 1.0  # for the two flushes of a start; a disk that takes longer is told of by the answers
STOP_SECONDS: Final = 5.0  # for the last flush; a disk that hangs longer gets no clean mark


class FloorLost(Exception):
    """The state's paths lead elsewhere: whatever is granted from now on could be granted twice."""


class Daemon:
    """All parts of one running daemon, made inside a trio run; `serve` runs it until `stop` is called or the floor is lost."""

    def __init__(
        self,
        config: Config,
        clock: Clock,
        opened: Opened,
        notifier: Notifier,
    ) -> None:
        self.config = config
        self.clock = clock
        self.locks, self.leases, self.ledger, self.taken = opened
        leases, ledger, taken = opened.leases, opened.ledger, opened.taken
        self.limits = in_force(config.limits)
        self.policy = policy_of(config)
        self.outcomes = Outcomes()
        self.writer = WriterThread(ledger, self.outcomes.put)
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
            self.limits,
        )
        self.start = Start(self.lessor, taken, config.wait_out_seconds)
        self.lessor.load(taken.rows)
        self.switches = Switches(self.lessor, config.limits.max_switches_per_namespace)
        self.switches.load()
        self.watchers = Watchers(self.lessor, config.limits.max_watchers_per_uid)
        agents, damaged = ledger.read_agents()
        for digest in damaged:
            log.error("record.set_aside", table="agents", digest=digest.hex())
        self.agents = Agents(self.lessor, self.watchers, agents.items())
        self.board = Switchboard(self.policy, self.limits, self._decide, self._hung_up)
        self.board.known = self.agents.identify
        self.binds = Binds(self.lessor, self.board.readable, self.board.forget, notifier or None)
        self.billing = Billing(
            self.lessor,
            tariff_of(config),
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
        self.backups = BackupDesk(self.lessor, self.writer, self.board.flush)
        self.board.readable(self.outcomes.fileno(), self.outcomes.heard)
        self.board.proven = self.binds.adopt
        self.board.overslept = self._overslept
        self.upkeep = Upkeep(self.lessor, self.start, self.switches, self.binds, self.billing)
        self.views = Views(self.lessor, self.start, config, taken.meta.install_id, lambda: len(self.board))
        self.pulse = Pulse(notifier, self.standing, self.board.readable, self.outcomes.put)
        self._seen = clock.now().boot
        self._wake = self._seen
        self._scope = trio.CancelScope()
        self._stopping = trio.Event()
        self._checked_floor = 0.0
        self.floor_lost = False
        self._initialised = False  # as far as we have looked
        self._shutting = False  # connections we close end no lease

    # ---- serving

    async def serve(self, listeners: list[socket.socket], ready: Callable[[], None]) -> None:
        """Serve until told to stop.  Cancellation closes nothing: `shut` does."""
        self.start.begin()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._serve_sockets)
            nursery.start_soon(self._keep_time)
            nursery.start_soon(self._open_doors, listeners, ready)
            self._background = nursery
            if self.shipper is not None:
                nursery.start_soon(self.shipper.run)
            await self._stopping.wait()
            nursery.cancel_scope.cancel()

    async def _open_doors(self, listeners: list[socket.socket], ready: Callable[[], None]) -> None:
        """Whoever calls while the start is being written waits in the backlog for some milliseconds, and is not told null: the first call after a
        boot is the one that starts the daemon.  A disk that hangs closes no door: checks and releases are served without it.  Polled: it happens once
        in a daemon's life.  Cancellation leaves the doors closed."""
        until = trio.current_time() + START_SECONDS
        while trio.current_time() < until:
            if self.start.started or self.start.error:
                break
            await trio.sleep(0.002)
        for listener in listeners:
            self.board.listen(listener)
        ready()

    def stop(self) -> None:
        self._stopping.set()

    def standing(self) -> Standing:
        return standing(self.lessor, self._upstream())

    async def _serve_sockets(self) -> None:
        """Cancellation leaves nothing half done: a turn has no await in it."""
        descriptor = self.board.epoll.fileno()
        while True:
            if self.board.behind:  # what is left of a long pipeline makes no descriptor readable
                await trio.lowlevel.checkpoint()
            else:
                await trio.lowlevel.wait_readable(descriptor)
            busy = self._turn(0.0)
            until = self._seen + SERVED_SECONDS
            while busy and self._seen < until:
                busy = self._turn(LINGER_SECONDS)
            self._rearm()

    def _turn(self, wait: float) -> bool:
        """One turn of the sockets and what the ledger has told meanwhile.  `wait`: block so long for a client to ask again, which costs
        less than to go through the whole loop; nothing else is late by more than that."""
        boot = self.clock.now().boot
        judged = None
        if boot > self._wake + LATE_SECONDS:
            judged = self._deaf(boot)
        done = self.board.turn(judged, wait)
        if self.meters.undone_turn:
            self.meters.turned(self.clock.now().boot - boot)
        self.outcomes.run()
        self.journal.kick(boot)
        self._seen = boot
        return done

    def _overslept(self) -> float | None:
        """A process stopped while it lingers finds its requests in the same poll: they are judged as if the loop had come late to them."""
        boot = self.clock.now().boot
        return self._deaf(boot) if boot > self._wake + LATE_SECONDS else None

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
            self.outcomes.run()
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
            boot = self.clock.now().boot
            self._wake = max(wake, boot)  # what is wanted at once does not make the loop late
            self._scope.deadline = trio.current_time() + self._wake - boot

    def _decide(self, batch: list[Call], judged: float | None) -> None:
        self.meters.batch(len(batch))
        self.lessor.decide(batch, judged)

    def _upstream(self) -> str:
        return self.shipper.failing if self.shipper is not None else ""

    def _spawn(self, task: Callable[[], Awaitable[None]]) -> None:
        if self._background is not None and not self._stopping.is_set():  # a turn of the stop may still take a request for a page
            self._background.start_soon(self._beside, task)

    async def _beside(self, task: Callable[[], Awaitable[None]]) -> None:
        """What goes wrong beside the leases ends none of them.  Cancellation leaves what the task says it leaves."""
        try:
            await task()
        except Exception:
            log.exception("lane.failed", operation=getattr(task, "__qualname__", "?"))

    def _hung_up(self, peer: AnyPeer) -> None:
        self.watchers.hung_up(peer)
        if not self._shutting:
            self.binds.hung_up(peer)
        self.lessor.hung_up(peer)

    def _flushed(self, number: int) -> None:
        """Called between turns, never before the sockets of one that comes late have been heard."""
        self.upkeep.flushed(number)
        if self.start.ledger_written and not self._initialised:
            self._initialise()
        self.board.flush()
        self._rearm()

    def _initialise(self) -> None:
        """Once in a state's life the loop waits for the disk.  What cannot be written now is tried again at the next flush."""
        try:
            if not (self.ledger.directory / INITIALISED).exists():
                write_initialised(self.ledger.directory, self.taken.meta.install_id)
        except OSError as error:
            log.warning("store.flush_failed", error=f"{INITIALISED}: {error.strerror}", failures=self.journal.failures)
        else:
            self._initialised = True

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
        self.pulse.each_second(boot)
        if not (all(lock.in_place() for lock in self.locks) and self.leases.in_place() and self.ledger.in_place()):
            self.lessor.gate.closed = "state_lost"
            self.floor_lost = True
            log.error("floor.lost", state_dir=str(self.config.state_dir), runtime_dir=str(self.config.runtime_dir))
            self.stop()

    # ---- the end

    async def _idle_journal(self) -> None:
        """Until no flush is under way.  Polled: it happens once in a daemon's life."""
        while self.journal.busy:
            self.outcomes.run()
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
                self.outcomes.run()
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
