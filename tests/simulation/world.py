"""A world for the daemon: the real one, over real LMDB stores and real sockets, with time, disk, kernel and death in our hands.

`open_state` and `Daemon` build it exactly as they do in a process; only the names it finds time, threads and proofs of processes by are
replaced (replacing.py).  Time is trio's MockClock: nothing sleeps.
"""

from __future__ import annotations

import os
import random
import socket
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import trio
from hooks import hooked
from host import QUANTUM, Keeper, SimulatedClock
from notices import Notices
from oracle import nanoseconds
from parties import NEVER, Connection, Process
from recoveries import Recoveries
from referee import Referee
from replies import Lease, Place
from scripted_disk import Disk, Flight
from store_faults import Traps

import leased.daemon
from leased.config_keys import Config
from leased.model import Identity
from leased.opening import open_state
from leased.state.records import decode_lease

MAX_LEASES = 100
DEAF_SECONDS = 0.11  # a loop later than 0.1 s was deaf
MAP_BYTES = 1 << 20  # allocated at each start, which is most of what a start costs


class World:
    """One run.  `keys` and `scopes` are all there are, as (namespace, text)."""

    def __init__(self, root: Path, seed: int, keys: list[Place], scopes: list[Place], *, keeper: bool) -> None:
        self.state, self.runtime = root / "state", root / "runtime"
        self.state.mkdir(mode=0o700)
        self.runtime.mkdir(mode=0o700)
        self.keys, self.scopes = keys, scopes
        self.chance = random.Random(f"{seed}:world")
        self.clock = SimulatedClock()
        self.traps = Traps(lambda: self.time)
        self.disk = Disk(self.state / "data.mdb")
        self.keeper = Keeper(present=keeper)
        self.daemon: Any = None
        self.nursery: trio.Nursery | None = None
        self.referee = Referee(self)
        self.notices = Notices(self.referee)
        self.recoveries = Recoveries(self.referee, self.notices)
        self.next_flight: Callable[[list[Any]], Flight] = lambda ops: Flight(QUANTUM)
        self.certain_since = -NEVER  # when the latest flush that came through was begun
        self.logged: list[Any] = []
        self.admitting: Connection | None = None
        self.connections = 0
        self.pipes: dict[Process, tuple[int, int]] = {}
        self._flight_began = 0.0
        self._stopped: trio.Event | None = None
        self._not_accepted: list[tuple[Connection, socket.socket]] = []
        self._of_hash: dict[bytes, Place] = {}
        self.held: list[Any] = []  # what a process that dies lets go of
        self.deaf_from = self.deaf_to = -NEVER
        self.long_deaf = False
        self.incarnation = ""  # of the volatile state that was opened last

    @property
    def time(self) -> float:
        return self.clock.time

    def config(self, wait_out: float) -> Config:
        return Config("", self.state / "socket", self.state, self.runtime, wait_out_seconds=wait_out, max_leases=MAX_LEASES)

    # ---- a life of the daemon

    def open(self, wait_out: float) -> None:
        """Start a daemon as systemd would, up to where it serves.  May raise SimulatedCrash half-way."""
        self.long_deaf = False
        self.traps.kind, self.traps.unseen = "take_over", lambda: None
        self.daemon = None
        opened = open_state(self.config(wait_out), self.clock)
        daemon = self.daemon = leased.daemon.Daemon(self.config(wait_out), self.clock, opened, self.keeper)  # type: ignore[arg-type]
        self._of_hash = {daemon.lessor.digests.key_hash(*place): place for place in self.keys}
        self.traps.kind = ""
        self.incarnation = daemon.taken.meta.incarnation
        daemon.board._policy = SimpleNamespace(identify=self._identify)
        written = {key: row[0] for key, row in self.disk.shown.rows.items()}
        if {key: row[0] for key, row in daemon.taken.known.items()} != written:
            self.referee.complain(f"the ledger shows {len(daemon.taken.known)} rows, not the {len(written)} written")
        hooked(self)

    async def serve(self) -> None:
        await self.daemon.serve([], lambda: None)

    def kill(self, *, flight_lands: bool = False) -> None:
        """kill -9, or what is left of a process that ended: every descriptor closes, nothing else happens."""
        daemon, self.daemon = self.daemon, None
        self.wake_up()
        for connection, theirs in self._not_accepted:
            connection.noticed = True
            theirs.close()
        self._not_accepted.clear()
        if daemon is None:
            self._close_half_open()
            return
        if flight_lands and self.disk.flying is not None:
            daemon.ledger.apply(self.disk.flying)
            self.disk.landed(self.disk.flying, certain=False)
        self.disk.flying = None
        for line in daemon.board._lines.values():
            if line.peer.watch is not None:
                line.peer.watch = None
            line.peer.connection.noticed = True
            line.socket.close()
        daemon.board.epoll.close()
        os.close(daemon.outcomes.fileno())
        descriptors = {process.descriptor for process in daemon.binds._process_of.values()}
        descriptors |= {line.peer.process.descriptor for line in daemon.board._lines.values() if line.peer.process is not None}
        for descriptor in descriptors - {-1}:
            os.close(descriptor)
        if daemon.lessor.lane.transaction is not None:
            daemon.lessor.lane.transaction.abort()
            daemon.lessor.lane.transaction = None
        self._close_half_open()

    async def stop(self) -> bool:
        """SIGTERM: drain, copy out, mark clean.  True when it is."""
        daemon = self.daemon
        self.referee.trouble.draining = True
        clean: bool = await daemon.shut()
        if self.disk.flying is not None:  # the disk hangs: the process goes, and leaves it
            daemon.ledger.close()
        self.disk.flying = None
        self.daemon = None
        self.held.clear()
        os.close(daemon.outcomes.fileno())
        return clean

    def _close_half_open(self) -> None:
        """Stores and locks, also of a start that died before there was a daemon."""
        for held in self.held:
            try:
                held.close()
            except OSError:
                pass
        self.held.clear()

    def lose_runtime(self) -> None:
        for path in self.runtime.iterdir():
            path.unlink()

    def power_cut(self) -> None:
        """The host comes up again: the runtime directory is empty, the disk is what it may be, nothing is left of any process."""
        self.lose_runtime()
        self.disk.cut(self.chance.randrange(8))
        self.clock.reboot()
        self.keeper.clear()

    # ---- what the referee asks

    def place_of(self, key_hash: bytes) -> Place:
        return self._of_hash[key_hash]

    def records(self) -> dict[Place, Any]:
        leases = self.daemon.leases
        with leases.environment.begin() as transaction:
            return {self._of_hash[bytes(key)]: decode_lease(bytes(raw)) for key, raw in transaction.cursor(db=leases.leases)}

    def switch_record(self, place: Place) -> Any:
        return self.daemon.switches._all.get(self.daemon.lessor.digests.scope_key(*place))

    def all_must_be_safe(self) -> None:
        """A flush has changed what a power cut would bring back: of every lease anybody has been told of."""
        referee = self.referee
        for lease in referee.leases.values():
            generation = lease.numbers.generation
            if generation in referee.told and lease.deadline > nanoseconds(self.time):
                self.must_be_safe(lease, referee.before.get(generation or 0, (lease.ttl, 0))[0])

    def must_be_safe(self, lease: Lease, promised: int = 0) -> None:
        """Promise 2: whatever a power cut at this moment brings back, nobody else gets the key before this lease has lapsed."""
        key_hash = self.daemon.lessor.digests.key_hash(*lease.place)
        generation, ttl = lease.numbers.generation, (promised or lease.ttl) / 1e9
        if generation is None:
            return  # complained of already
        for snapshot in self.disk.all_possible():
            row = snapshot.rows.get(key_hash)
            short = ttl <= snapshot.wait_out and (row is None or row[0] == generation)
            if not short and (row is None or row[0] != generation or row[1] < ttl):
                self.referee.complain(
                    f"generation {generation} of {lease.place} for {ttl:g} s is told, and a power cut would leave {row} and wait "
                    f"{snapshot.wait_out:g} s (promise 2)"
                )
            if generation > snapshot.mark:
                self.referee.complain(f"generation {generation} is told, and the mark may be {snapshot.mark} (promise 3)")

    def must_be_forgotten(self, place: Place, generation: int) -> None:
        key_hash = self.daemon.lessor.digests.key_hash(*place)
        for snapshot in self.disk.all_possible():
            if snapshot.rows.get(key_hash, (0,))[0] == generation:
                self.referee.complain(f"the revocation of {generation} is told, and a power cut would bring it back (section 2)")

    # ---- SIGSTOP

    def stop_listening(self) -> None:
        self._stopped = trio.Event()
        self.deaf_from = self.time
        self.referee.judged = self.time  # until its first pass after it

    def first_pass(self, judged: float | None) -> None:
        """The first thing a daemon does that was deaf for long: it serves what lies in its sockets, and the time it was deaf does not count."""
        was_deaf, self.long_deaf = self.long_deaf, False
        if was_deaf and not self.referee.trouble.draining and (judged is None or judged > self.deaf_from + DEAF_SECONDS):
            self.referee.complain(
                f"deaf since {self.deaf_from:.3f}, and yet judged by {judged} (a renewal that waited is punished for it)"
            )

    def was_deaf(self, judged: float) -> None:
        """A pass is judged by an earlier instant: one at which the daemon was not deaf yet, or shortly after."""
        self.deaf_to = self.time
        if not self.deaf_from - 1.0 <= judged <= self.time:  # an idle daemon listens without noting it, once a second at least
            self.referee.complain(f"judged by {judged:.3f}, though the daemon was deaf from {self.deaf_from:.3f} on (promise 4)")

    def wake_up(self) -> None:
        if self._stopped is not None:
            self._stopped.set()
            self._stopped = None
            self.long_deaf = self.time - self.deaf_from > 1.0 + 2 * DEAF_SECONDS  # it may not have meant to wake up earlier
        waiting, self._not_accepted = self._not_accepted, []
        for connection, theirs in waiting:
            self._accept(connection, theirs)

    async def awake(self) -> None:
        """Until the daemon is not stopped."""
        while self._stopped is not None:
            await self._stopped.wait()

    # ---- connections and processes

    def connect(
        self, namespace: str, operator: bool, process: Process | None, send_buffer: int = 0
    ) -> tuple[Connection, socket.socket]:
        """Raises ConnectionRefusedError while no daemon runs."""
        if self.daemon is None or self.referee.trouble.draining:
            raise ConnectionRefusedError
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        if send_buffer:
            theirs.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer)
        self.connections += 1
        connection = Connection(self.connections, namespace, operator, process)
        if self._stopped is not None:
            self._not_accepted.append((connection, theirs))
        else:
            self._accept(connection, theirs)
        return connection, ours

    def _accept(self, connection: Connection, theirs: socket.socket) -> None:
        if self.daemon is None:
            theirs.close()
            return
        self.admitting = connection
        self.daemon.board._admit(theirs)
        self.admitting = None

    def _identify(self, _: socket.socket) -> Identity:
        assert self.admitting is not None
        return Identity(self.admitting.namespace, 1000, 4321, self.admitting.operator)

    def process(self) -> Process:
        made = Process(len(self.pipes) + 1)
        self.pipes[made] = os.pipe()
        return made

    def dies(self, process: Process) -> None:
        """Its pidfd becomes readable.  Its connections are the caller's to close."""
        process.dead_since = self.time
        os.close(self.pipes[process][1])

    def pidfd(self, connection: Connection) -> int:
        if connection.process is None:
            raise OSError(95, "no pidfd")
        return os.dup(self.pipes[connection.process][0])
