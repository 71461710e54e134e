"""One run from one number: what the daemon lives through, how its lives end, and what all judges say of it."""

from __future__ import annotations

import random
import traceback
from collections import Counter
from dataclasses import dataclass
from typing import Any

import hearing
import trio
import trio._core._run as trio_run
from history import History
from host import QUANTUM, pause
from oracle import DEFAULT_TTL
from plans import CLIENTS, KEYS, SCOPES, STEPS, Life, Plan, plan
from programs import Client
from replacing import world
from replies import Place
from scripted_disk import Flight
from store_faults import SimulatedCrash
from trio.testing import MockClock
from world import World

from leased import fsck

TRACE_SHOWN = 40


@dataclass
class Report:
    seed: int
    violations: list[str]
    trace: list[str]
    crashed: Counter[tuple[str, str]]
    decisions: int

    def __str__(self) -> str:
        return "\n".join(
            [
                f"seed {self.seed}: {len(self.violations)} violations; again with",
                f"  LEASED_SEED={self.seed} pytest tests/simulation/test_simulation.py -k one_seed (or the test's own id, if it changes the plan)",
                *self.violations[:10],
                f"the last {TRACE_SHOWN} of {len(self.trace)} lines before the first:",
                *self._shown(),
            ]
        )

    def _shown(self) -> list[str]:
        first = next((at for at, line in enumerate(self.trace) if "VIOLATION" in line), len(self.trace))
        return self.trace[max(0, first - TRACE_SHOWN) : first + 1]


class Run:
    """A plan, carried out."""

    def __init__(self, seed: int, made: World, planned: Plan, clients: int, steps: int) -> None:
        self.seed = seed
        self.world = made
        self.plan = planned
        self.chance = random.Random(f"{seed}:run")
        self.history = History(undone_seconds=10.0 if planned.flaky_disk else 2.0)  # a start writes no switch in its first second
        self.clients = [Client(made, self.history, number, seed, planned.ttls) for number in range(clients)]
        self.steps = steps
        self.done = trio.Event()
        self.calm = False
        self.opened = False

    async def main(self) -> None:
        with trio.fail_after(2000):
            async with trio.open_nursery() as everything:
                everything.start_soon(self._lives)
                everything.start_soon(self._weather)
                async with trio.open_nursery() as clients:
                    for client in self.clients:
                        clients.start_soon(client.run, self.steps)
                self.done.set()

            self._afterwards()

    def _afterwards(self) -> None:
        referee = self.world.referee
        for client in self.clients:
            for heard in client.heard:
                for complaint in hearing.judge(self.world, heard):
                    referee.complain(f"a watcher of {client.name}: {complaint}")
        for event in self.world.logged:
            if event["event"] == "lane.failed":
                referee.complain(f"a request could not be decided: {event.get('exception') or event}")

    def excused(self, complaint: str) -> bool:
        """That a fence was presented by a renewal that needed no flush is forgotten with it in a power cut: its request_id replays again."""
        return "replayed after its fence was presented" in complaint and any(crash.forgets for crash in self.history.crashes)

    # ---- the lives of the daemon

    async def _lives(self) -> None:
        made, before = self.world, None
        for number, life in enumerate(self.plan.lives):
            if self.done.is_set() and number < len(self.plan.lives) - 1:
                continue
            ended = await self._live(life, before)
            made.referee.say(f"=== the daemon ended: {ended}")
            self._look()
            down_since = made.time
            stored = made.disk.shown.wait_out
            if ended in ("power", "stop_reboot clean", "stop_reboot"):
                self.history.crash("power", made.time, max(stored, life.wait_out) if ended != "stop_reboot clean" else 0.0)
                made.power_cut()
            elif ended == "runtime_lost":
                self.history.crash("runtime_lost", made.time, max(stored, life.wait_out))
                made.lose_runtime()
            elif ended != "stop":
                self.history.crash("kill", made.time)
            await pause(life.down)
            if before is None or self.opened or ended not in ("kill", "stop"):
                before = (ended, down_since)

    async def _live(self, life: Life, before: tuple[str, float] | None) -> str:
        """How it ended."""
        made = self.world
        made.traps.armed = list(life.traps)
        flights = 0

        def next_flight(ops: list[Any]) -> Flight:
            nonlocal flights
            flights += 1
            return self._flight(flights, life)

        made.next_flight = next_flight
        ended = life.ending
        try:
            async with trio.open_nursery() as nursery:
                made.nursery = nursery
                self._begin(life, before)
                nursery.start_soon(made.serve)
                if life.seconds == float("inf"):
                    await self._last_life()
                else:
                    await pause(life.seconds)
                if ended.startswith("stop"):
                    made.wake_up()
                    made.daemon.stop()
                    await pause(QUANTUM)
                    clean = await made.stop()
                    ended = {("stop", True): "stop", ("stop_reboot", True): "stop_reboot clean"}.get((ended, clean), ended)
                    if not clean and ended == "stop":
                        ended = "kill"
                nursery.cancel_scope.cancel()
        except* SimulatedCrash:
            ended = "kill" if ended.startswith("stop") else ended
        made.kill(flight_lands=self.chance.random() < 0.5)
        return ended

    def _begin(self, life: Life, before: tuple[str, float] | None) -> None:
        """A start that made the volatile state anew and ended before the ledger knew of it is begun anew."""
        made, recoveries = self.world, self.world.recoveries
        stored, last = made.disk.shown, made.incarnation
        self.opened = False
        foreign = (made.runtime / "data.mdb").exists()
        made.open(life.wait_out)
        self.opened = True
        made.referee.say(f"=== the daemon starts: {made.daemon.taken.story}")
        clean = stored.clean and before is not None and before[0] not in ("kill", "stop")
        unfinished = stored.exists and stored.incarnation != last
        if before is None or (before[0] in ("kill", "stop") and not unfinished):
            recoveries.kept(pidfds_kept=before is not None and bool(made.keeper))
        else:
            recoveries.made_anew(
                clean=clean,
                waits=not clean or foreign,
                same_boot=stored.boot_id == made.clock.boot_id(),
                wait_seconds=max(stored.wait_out, life.wait_out) if stored.exists else 0.0,
                since_down=before[1],
            )
        made.daemon.binds.restored(made.keeper.handed_back())

    def _flight(self, number: int, life: Life) -> Flight:
        chance = self.chance
        if number == life.doomed_flush and life.seconds < float("inf"):
            return Flight(QUANTUM, life.doom)  # type: ignore[arg-type]
        seconds = chance.choice([1, 1, 2, 4, 16]) * QUANTUM
        if self.calm or chance.random() >= self.plan.flaky_disk:
            return Flight(seconds)
        return Flight(chance.choice([seconds, seconds, 0.75, 3.0]), chance.choice(["old", "new", "written"]))  # type: ignore[arg-type]

    async def _last_life(self) -> None:
        """Until the clients are done; then until nothing is left of what they did."""
        made = self.world
        await self.done.wait()
        self.calm = True
        made.wake_up()
        with trio.move_on_after(DEFAULT_TTL + 40.0):
            while _left_over(made) or made.daemon.switches.armed:
                await pause(2.0)
        made.recoveries.compare_all()
        for text in _left_over(made):
            made.referee.complain(f"when everything has lapsed, {text}")

    # ---- the weather

    async def _weather(self) -> None:
        """Stops (SIGSTOP) and steps of the wall clock."""
        made, chance = self.world, self.chance
        while not self.done.is_set():
            await pause(chance.choice([0.5, 1.0, 2.0]))
            if self.plan.wall_steps and chance.random() < 0.3:
                made.clock.wall_offset += chance.choice([-86400.0, -90.0, 1.0, 45.0, 120.0, 3600.0])
            if self.plan.deaf and chance.random() < 0.3 and made.daemon is not None and not made.referee.trouble.draining:
                seconds = chance.choice([0.25, 1.0, 3.0])
                self.history.late_allowance = max(self.history.late_allowance, seconds + 1.0)
                made.stop_listening()
                await pause(seconds)
                made.wake_up()

    def _look(self) -> None:
        """What `leased fsck` says of what is left."""
        made = self.world
        report = fsck.examine(made.config(made.disk.shown.wait_out), made.clock)
        for finding in report.findings:
            if not finding.note:
                made.referee.complain(f"leased fsck: {finding.text}")


def _left_over(made: World) -> list[str]:
    """What memory keeps of leases, waiters and connections that are no more."""
    daemon, lessor = made.daemon, made.daemon.lessor
    counts = {
        "leases": len(lessor.index),
        "due leases": len(lessor.index._due_of) + len(lessor.index._spaces) + len(lessor.index._scopes),
        "request ids": len(lessor.index.rids),
        "key texts": len(lessor.index.texts),
        "waiters": lessor.queues.total + len(lessor.queues._lines) + len(lessor.queues._lengths) + len(lessor.queues._of_rid),
        "waiting connections": len(lessor.queues._of_peer) + len(lessor.queues._spaces),
        "holds": len(lessor.holds),
        "spent request ids": lessor.tombs.total,
        "binds": len(daemon.binds),
        "ends to repeat": len(daemon.binds._again),
        "watchers": len(daemon.watchers),
        "connections": len(daemon.board),
        "operations for the ledger": len(lessor.journal),
        "keys the ledger may hold": len(lessor.journal.held()),
        "records": len(made.records()),
        "kept descriptors": len(made.keeper.kept),
    }
    return [f"{count} {what} are left" for what, count in counts.items() if count]


def run_seed(seed: int, *, planned: Plan | None = None, clients: int = CLIENTS, steps: int = STEPS) -> Report:
    """Everything about a run follows from `seed`."""
    places: list[Place] = [(namespace, key) for namespace in ("local", "other") for key in KEYS[: 3 if namespace == "local" else 1]]
    scopes: list[Place] = [(namespace, scope) for namespace in ("local", "other") for scope in SCOPES]
    planned = planned or plan(seed)
    trio_run._ALLOW_DETERMINISTIC_SCHEDULING = True  # type: ignore[misc]
    trio_run._r.seed(seed)
    with world(seed, places, scopes, keeper=planned.keeper) as made:
        run = Run(seed, made, planned, clients, steps)
        referee = made.referee
        try:
            trio.run(run.main, clock=MockClock(autojump_threshold=0))
        except Exception:
            referee.violations.append(traceback.format_exc())
        violations = referee.violations + [f"history: {each}" for each in run.history.judge() if not run.excused(each)]
        return Report(seed, violations, referee.trace, made.traps.crashed, len(referee.asked))
