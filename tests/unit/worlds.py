"""A world for the lessor: real LMDB environments, everything else scripted.  No thread, no socket, no sleep.

The clock moves when told to.  A flush is under way until the test says how it ended.  What the ledger shows when read and what is on the disk
are two things here, as they are behind a page cache: a power cut brings back the disk.  A `Witness` hears every answer.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

from surroundings import Caller, Flight, Refusing, Unallocated, WorldClock
from witnesses import Witness

from leased.binds import Binds
from leased.calls import Call
from leased.config_keys import Config, Limits
from leased.digests import Digests
from leased.errors import StoreError
from leased.gate import Gate
from leased.generations import Generations
from leased.lessor import Lessor
from leased.model import (
    CheckRequest,
    Lease,
    LeaseRequest,
    ReleaseRequest,
    RenewRequest,
    Reply,
    Request,
    RevokeRequest,
)
from leased.start import Start
from leased.state.journal import Journal
from leased.state.ledger import INITIALISED, Ledger, Op, write_initialised
from leased.state.recovery import TakenOver, take_over
from leased.stop import copy_out
from leased.switches import Switches
from leased.upkeep import Upkeep
from leased.views import Views

MAX_LEASES = 100
CALM_AFTER = 50  # turns within which a world with a working disk must have nothing left to flush


Side = Literal["old", "new"]


@contextmanager
def world(wait_out: float = 20.0) -> Iterator[World]:
    """A new world in a directory of its own: in memory where there is such a file system, because a real flush takes 5 ms."""
    memory = Path("/dev/shm")
    root = Path(tempfile.mkdtemp(prefix="leased-world-", dir=memory if os.access(memory, os.W_OK) else None))
    made = World(root, wait_out)
    try:
        yield made
    finally:
        made.close()
        shutil.rmtree(root)


class World:
    def __init__(self, root: Path, wait_out: float = 20.0) -> None:
        self.clock = WorldClock()
        self.witness = Witness()
        self.state, self.runtime = root / "state", root / "runtime"
        self.root = root
        for directory in (self.state, self.runtime):
            directory.mkdir()
        self.wait_out = wait_out
        self.in_force = 0.0  # the greatest wait_out that may be written in the ledger
        self.limits = Limits()
        self.disk: bytes | None = None  # the ledger's file as a power cut would leave it
        self.flight: Flight | None = None
        self.answers: dict[Call, Reply] = {}
        self.fences: dict[str, tuple[int, int]] = {}  # holder -> (fence, generation), as last told
        self.callers: dict[str, Caller] = {}
        self.violations: list[AssertionError] = []
        self.running = False

    # ---- the writer's side of the journal

    def write(self, ops: list[Op], done: Callable[[Exception | None], None]) -> None:
        assert self.flight is None, "two flushes at once"
        self.flight = Flight(ops, done)

    def flush(self) -> None:
        """The flush under way reaches the disk and says so."""
        flight = self._apply("new", "new")
        flight.done(None)
        self._note_initialised()
        self.assert_nothing_wrong_was_said()

    def flush_fails(self, read: Side = "old", disk: Side = "old") -> None:
        """It reports an error; either old or new is read from the ledger afterwards, either old or new is on the disk."""
        self._apply(read, disk).done(StoreError("the disk is broken"))
        self.assert_nothing_wrong_was_said()

    def _apply(self, read: Side, disk: Side) -> Flight:
        assert self.flight is not None, "no flush is under way"
        flight, self.flight = self.flight, None
        path = self.state / "data.mdb"
        before = path.read_bytes()
        self.ledger.apply(flight.ops)
        for op in flight.ops:
            written = op[1].wait_out if op[0] == "new" else op[1].get("wait_out", 0.0) if op[0] == "meta" else 0.0
            if written:
                self.in_force = written if read == disk == "new" else max(written, self.in_force)
        if disk == "new":
            self.disk = path.read_bytes()
        if read == "old":
            self.ledger.environment.close()
            path.write_bytes(before)
            self.ledger._open()
        return flight

    def _note_initialised(self) -> None:
        if self.start_up.ledger_written and not (self.state / INITIALISED).exists():
            write_initialised(self.state, self.taken.meta.install_id)

    # ---- the life of a daemon

    def begin(self) -> TakenOver:
        """Take over and begin the start: its first flush is under way, nothing of it is on the disk."""
        assert not self.running
        self.ledger = Ledger(self.state)
        self.leases = Unallocated(self.runtime, MAX_LEASES)
        now = self.clock.now()
        self.taken = taken = take_over(
            self.leases, self.ledger, wait_out=self.wait_out, boot=now.boot, boot_id=self.clock.boot_id()
        )
        self.journal = Journal(self, flushed=self._flushed, failed=self._failed)
        gate = Gate(taken.wait_out, taken.meta.no_grant_before, settled=not taken.waiting, closed="starting")
        digests = Digests(bytes.fromhex(taken.meta.secret))
        self.lessor = Lessor(self.leases, digests, Generations(taken.last, taken.mark), self.journal, gate, self.clock, self.limits)
        self.lessor.load(taken.rows)
        self.start_up = Start(self.lessor, taken, self.wait_out)
        self.switches = Switches(self.lessor, self.limits.max_switches_per_namespace)
        self.switches.load()
        self.upkeep = Upkeep(self.lessor, self.start_up, self.switches, Binds(self.lessor, _unwatched, _unwatched, None))
        config = Config("", self.root / "socket", self.state, self.runtime)
        self.views = Views(self.lessor, self.start_up, config, taken.meta.install_id, lambda: 0)
        self.equip()
        self.running = True
        self.start_up.begin()
        self.upkeep.tick()
        self.assert_kept()
        return taken

    def equip(self) -> None:
        """For worlds with more in them: the daemon's parts are there, its start has not begun."""

    def run(self) -> TakenOver:
        """A whole start with a working disk, up to where it would grant (or wait)."""
        taken = self.begin()
        self.calm()
        assert self.start_up.started
        return taken

    def _flushed(self, number: int) -> None:
        self.upkeep.flushed(number)

    def _failed(self, number: int, error: Exception) -> None:
        self.upkeep.failed(number, error)

    def calm_after_retries(self) -> None:
        """As `calm`, past the pause that follows a failed flush."""
        self.pass_time(3.0)
        self.calm()

    def calm(self) -> None:
        """Let the disk work until nothing is left to flush."""
        for _ in range(CALM_AFTER):
            if self.flight is not None:
                self.flush()
            self.upkeep.tick()
            if self.flight is None and not len(self.journal):
                return self.assert_kept()
            self.clock.elapsed += 0.1
        raise AssertionError("the ledger does not come to rest")

    def pass_time(self, seconds: float, *, disk_works: bool = True) -> None:
        """The daemon lives through `seconds`.  With a disk that does not work the flush under way stays under way."""
        end = self.clock.elapsed + seconds
        while self.running and self.clock.elapsed < end:
            wake = self.upkeep.next_wake() + self.clock.booted
            self.clock.elapsed = min(end, max(wake, self.clock.elapsed + seconds / 40))
            self.upkeep.tick()
            if disk_works:
                while self.flight is not None:
                    self.flush()
        self.clock.elapsed = max(self.clock.elapsed, end)
        if self.running:
            self.assert_kept()

    def kill(self, read: Side = "old", disk: Side = "old") -> None:
        """kill -9.  A flush under way may still have come through."""
        if self.flight is not None:
            self._apply(read, disk)
        self.leases.close()
        self.ledger.close()
        self.running = False

    def power_cut(self, disk: Side = "old") -> None:
        """And the host comes up again: the runtime directory is empty, the disk is as it was."""
        if self.running:
            self.kill(disk, disk)
        self.witness.memory_lost(max(self.in_force, self.wait_out))
        self.witness.died(LOCAL)
        _empty(self.runtime)
        if self.disk is None:
            self.witness.everything_is_lost()
            (self.state / "data.mdb").unlink(missing_ok=True)
        else:
            (self.state / "data.mdb").write_bytes(self.disk)
        self.clock.reboot()

    def stop(self) -> bool:
        """A stop in order.  True when the ledger was marked clean."""
        marked = copy_out(self.lessor, self.start_up, self.switches)
        if marked:
            self.flush()
        self.leases.close()
        self.ledger.close()
        self.running, self.flight = False, None
        return marked

    def close(self) -> None:
        """The test is over."""
        if self.running:
            self.leases.close()
            self.ledger.close()
            self.running = False

    # ---- directories, and what operators do with them; the daemon is down

    def lose_runtime(self) -> None:
        self.witness.memory_lost(max(self.in_force, self.wait_out))
        if self.running:
            self.kill()
        _empty(self.runtime)

    def swap_runtime(self, other: str = "other") -> None:
        """Another runtime directory is put in place (an empty one the first time); this one is kept aside."""
        self.witness.memory_lost(max(self.in_force, self.wait_out))
        aside = self.root / other
        aside.mkdir(exist_ok=True)
        spare = self.root / "spare"
        self.runtime.rename(spare)
        aside.rename(self.runtime)
        spare.rename(aside)

    def lose_state(self) -> None:
        _empty(self.state)
        self.disk = None

    def backup(self) -> Path:
        """What `leased backup` writes: a copy that knows that it is one."""
        copy = self.root / f"backup-{self.clock.elapsed}"
        copy.mkdir()
        shutil.copy(self.state / "data.mdb", copy / "data.mdb")
        ledger = Ledger(copy)
        ledger.apply([("meta", {"clean": False, "restored": 1})])
        ledger.close()
        return copy

    def restore(self, copy: Path, *, no_holders: bool = False) -> None:
        ledger = Ledger(copy)
        ledger.apply([("meta", {"restored": 2 if no_holders else 1})])
        ledger.close()
        self.witness.memory_lost(0.0, everything=True)
        shutil.copy(copy / "data.mdb", self.state / "data.mdb")
        self.disk = (self.state / "data.mdb").read_bytes()

    # ---- callers

    def caller(self, who: str) -> Caller:
        if who not in self.callers:
            self.callers[who] = Caller(self)
        return self.callers[who]

    def decide(self, *requests: tuple[str, Request]) -> list[Call]:
        """One batch."""
        calls = []
        for who, request in requests:
            calls.append(Call(self.caller(who), len(self.answers), request))
            if isinstance(request, RenewRequest) or (isinstance(request, LeaseRequest) and request.fence is not None):
                self._settle_for(who, request)
            elif isinstance(request, RevokeRequest) and request.key is not None:
                self.witness.asked_revocation(request.key)
        self.lessor.decide(calls)
        self.assert_nothing_wrong_was_said()
        return calls

    def _settle_for(self, who: str, request: LeaseRequest | RenewRequest) -> None:
        if request.ttl is not None and who in self.fences:
            self.witness.asked_renewal(request.key, self.fences[who][1], self.clock.elapsed + request.ttl)

    def ask(self, who: str, request: Request) -> Reply | None:
        """The answer, or None while there is none yet."""
        (call,) = self.decide((who, request))
        return self.answers.get(call)

    def lease(self, who: str, ttl: float, key: str = "k", **more: Any) -> Reply | None:
        return self.ask(who, LeaseRequest(key, who, ttl, **more))

    def granted(self, who: str, ttl: float, key: str = "k", **more: Any) -> Reply:
        """A grant, flushed if it must be."""
        (call,) = self.decide((who, LeaseRequest(key, who, ttl, **more)))
        self.calm()
        reply = self.answers[call]
        assert reply["acquired"] is True and not reply["renewed"], reply
        return reply

    def granted_now(self, who: str, key: str) -> None:
        """A short grant that needs no flush."""
        reply = self.lease(who, 20.0, key)
        assert reply is not None
        assert reply["acquired"] is True

    def granted_or_unknown(self, who: str, key: str) -> None:
        """A short lease is asked for: it must be granted unless the daemon waits out what it may have forgotten."""
        (call,) = self.decide((who, LeaseRequest(key, who, 10.0)))
        self.calm()
        reply = self.answers[call]
        if reply["acquired"] is not True:
            assert reply["reason"] in {"recovering", "held"}, reply

    def renew(self, who: str, ttl: float | None = None, key: str = "k") -> Reply | None:
        return self.ask(who, RenewRequest(key, who, self.fences[who][0], ttl))

    def release(self, who: str, key: str = "k") -> Reply | None:
        return self.ask(who, ReleaseRequest(key, self.fences[who][0]))

    def check(self, key: str = "k") -> Reply:
        reply = self.ask("X", CheckRequest(key))
        assert reply is not None
        return reply

    def revoke(self, key: str = "k") -> Call:
        return self.decide(("operator", RevokeRequest("a test", key)))[0]

    def heard(self, call: Call, reply: Reply) -> None:
        """A peer must not raise: what the witness finds wrong is raised by whoever drives the world."""
        try:
            assert call not in self.answers, f"answered twice: {call.request} {self.answers[call]} {reply}"
            self._judge(call, reply)
        except AssertionError as violation:
            self.violations.append(violation)

    def assert_nothing_wrong_was_said(self) -> None:
        if self.violations:
            raise self.violations[0]

    def _judge(self, call: Call, reply: Reply) -> None:
        self.answers[call] = reply
        if reply.get("acquired") is True:
            until = reply["expires_boottime"] + self.clock.booted
            self.fences[reply["holder"]] = (int(reply["fence"]), reply["generation"])
            self.witness.told_yes(reply, self.clock.elapsed, until)
        elif reply.get("released") is True:
            self.witness.told_released(reply["key"], reply["generation"])
        elif reply.get("revoked") is True:
            self.witness.told_revoked(reply["generation"])

    # ---- looking

    def records(self) -> dict[bytes, Lease]:
        with self.leases.environment.begin() as transaction:
            return {key_hash: lease for key_hash, lease, _ in self.leases.rows(transaction) if lease is not None}

    def record(self, key: str = "k") -> Lease | None:
        return self.records().get(self.lessor.digests.key_hash("local", key))

    def in_ledger(self, key: str = "k") -> Lease | None:
        """What a read of the ledger shows."""
        with self.ledger.environment.begin() as transaction:
            rows = {key_hash: entry.lease for key_hash, entry, _ in self.ledger.rows(transaction) if entry is not None}
        return rows.get(self.lessor.digests.key_hash("local", key))

    def assert_kept(self) -> None:
        """Every lease that must not have ended is in `leases`, at least as long as promised; and no answer was wrong."""
        self.assert_nothing_wrong_was_said()
        for key, promise in self.witness.owed(self.clock.elapsed).items():
            record = self.record(key)
            assert record is not None, f"{key}: the lease of {promise.holder} is forgotten"
            assert record.generation == promise.generation, f"{key}: another lease stands in the place of {promise.holder}'s"
            ends = record.deadline + self.clock.booted
            assert record.unflushed or ends > promise.until - 1e-6, f"{key}: ends {promise.until - ends:.3f} s early"


LOCAL = {"A", "B"}
"""Holders that are processes of this host; any other name is a caller who outlives its power."""


def _unwatched(*_: object) -> None:
    """No descriptor is watched: nobody binds a lease to a process here."""


def _empty(directory: Path) -> None:
    for path in directory.iterdir():
        path.unlink()


@contextmanager
def volatile_state_fails(world: World, at: str = "begin") -> Iterator[None]:
    """Nothing can be written to `leases` meanwhile: transactions fail as they begin, or only at their commit."""
    leases: Any = world.leases
    environment = leases.environment
    leases.environment = Refusing(environment, at)
    try:
        yield
    finally:
        leases.environment = environment
