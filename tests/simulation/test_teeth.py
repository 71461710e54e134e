"""The simulation has teeth: each line of the daemon, broken on purpose, is caught by one of a few seeds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from seeded import run_seed

import leased.daemon
import leased.state.recovery
from leased import rules
from leased.binds import Binds
from leased.daemon import Daemon
from leased.doors.rpc import RpcPeer
from leased.gate import Gate
from leased.generations import Generations
from leased.holdings import Holdings
from leased.holds import Holds
from leased.index import Index
from leased.lessor import Lessor
from leased.queues import Queues
from leased.state.journal import Journal
from leased.state.leases import Leases
from leased.switches import Switches
from leased.upkeep import Upkeep
from leased.watch import Watch

pytestmark = pytest.mark.interpreted  # the referee listens in by replacing methods of the daemon

SEEDS = range(40)
Mend = pytest.MonkeyPatch


def live_at_the_deadline(patch: Mend) -> None:
    """Live means now <= deadline."""
    standing = Holdings.standing

    def mutant(self: Holdings, *arguments: Any) -> Any:
        now, self.now = self.now, self.now._replace(judged=self.now.judged - 1e-4)
        try:
            return standing(self, *arguments)
        finally:
            self.now = now

    patch.setattr(Holdings, "standing", mutant)


def release_without_fence(patch: Mend) -> None:
    release = rules.release
    patch.setattr(
        rules, "release", lambda record, request, ask, now: release(record, request, ask._replace(proof=record.proof if record else b""), now)
    )  # fmt: skip


def no_tombstones(patch: Mend) -> None:
    patch.setattr(Leases, "put_tombstone", lambda *_: None)


def second_in_line_first(patch: Mend) -> None:
    first = Queues.first

    def mutant(self: Queues, key_hash: bytes) -> Any:
        found = first(self, key_hash)
        line = [each for each in self._lines.get(key_hash, ()) if not each.gone and not each.taken and each is not found]
        return line[0] if line else found

    patch.setattr(Queues, "first", mutant)


def line_not_served(patch: Mend) -> None:
    """A released key is left to whoever looks next."""
    pass_on = Holdings.pass_on
    patch.setattr(Holdings, "pass_on", lambda self, key_hash: None if self.counts["granted"] % 5 == 4 else pass_on(self, key_hash))


def gone_is_there(patch: Mend) -> None:
    patch.setattr(RpcPeer, "gone", lambda self: False)


def no_delete_before_regrant(patch: Mend) -> None:
    patch.setattr(Journal, "may_hold", lambda self, key_hash: False)


def answered_before_flush(patch: Mend) -> None:
    patch.setattr(Holds, "add", lambda self, key_hash, generation, number, bound, held: held.call.answer(held.reply))


def undo_keeps_the_grant(patch: Mend) -> None:
    def mutant(self: Upkeep, key_hash: bytes, hold: Any) -> None:
        self.lessor.lane.after(self.lessor.holds.pop, key_hash)

    patch.setattr(Upkeep, "_undo", mutant)


def ledger_said_to_hold_everything(patch: Mend) -> None:
    """Renewals that make a lease longer are not flushed."""
    patch.setattr(Journal, "ttl_of", lambda self, key_hash, generation: 3600.0)


def nothing_waited_out(patch: Mend) -> None:
    patch.setattr(Gate, "admit_unknown_key", lambda self, boot: None)
    patch.setattr(Gate, "recovering", lambda self, boot: False)


def generations_go_back(patch: Mend) -> None:
    """The last one is not stored, and the clock not asked: after a kill they are handed out again."""
    patch.setattr(Generations, "peek", lambda self, wall: self.last + 1)
    patch.setattr(Holdings, "store_last", lambda self: None)


def mark_not_waited_for(patch: Mend) -> None:
    raise_mark = Holdings.raise_mark

    def mutant(self: Holdings) -> int:
        raise_mark(self)
        return 0

    patch.setattr(Holdings, "raise_mark", mutant)
    raised = Generations.wanted_mark
    patch.setattr(Generations, "wanted_mark", lambda self, wall: 0 if self.mark else raised(self, wall))


def deaf_time_counts(patch: Mend) -> None:
    deaf = Daemon._deaf

    def mutant(self: Daemon, boot: float) -> float:
        deaf(self, boot)
        return boot

    patch.setattr(Daemon, "_deaf", mutant)


def fence_never_presented(patch: Mend) -> None:
    """A request_id replays its grant after the fence has been used."""
    renewal = rules._renewal

    def mutant(*arguments: Any) -> Any:
        decision = renewal(*arguments)
        return decision._replace(lease=decision.lease._replace(presented=False))

    patch.setattr(rules, "_renewal", mutant)


def binds_ignored(patch: Mend) -> None:
    patch.setattr(Binds, "_died", lambda self, process: self._forget(process.descriptor))


def closed_connections_keep(patch: Mend) -> None:
    patch.setattr(Binds, "hung_up", lambda self, peer: None)


def sweep_trusts_its_heap(patch: Mend) -> None:
    """A renewed lease falls at its first deadline."""

    def mutant(self: Upkeep, due: list[bytes]) -> None:
        for key_hash in due:
            record = self.lessor.stored(key_hash)
            if record is not None:
                self.lessor.end(key_hash, record, "lapsed", "")
        self.lessor.store_last()

    patch.setattr(Upkeep, "_lapse", mutant)


def switch_takes_too_much(patch: Mend) -> None:
    """The leases of every scope go with one."""
    patch.setattr(
        Index, "of_scope", lambda self, namespace, scope: [key for unit in self._scopes.values() for key in unit.values()]
    )


def switch_forgets_to_disarm(patch: Mend) -> None:
    put = Switches._put

    def mutant(self: Switches, key: bytes, switch: Any) -> None:
        if switch.missed_wall and not switch.armed:
            switch = switch._replace(armed=True, due=self._lessor.now.boot + 3)
        put(self, key, switch)

    patch.setattr(Switches, "_put", mutant)


def stop_forgets_one(patch: Mend) -> None:
    """The copy of a stop in order lacks a lease."""
    copy_out = leased.daemon.copy_out

    def mutant(lessor: Lessor, *arguments: Any) -> bool:
        journal = lessor.journal
        put, journal.put = journal.put, lambda key_hash, entry: 0  # type: ignore[method-assign,assignment]
        try:
            return copy_out(lessor, *arguments)
        finally:
            journal.put = put  # type: ignore[method-assign]

    patch.setattr(leased.daemon, "copy_out", mutant)


def lapses_not_told(patch: Mend) -> None:
    tell = Watch.tell
    patch.setattr(Watch, "tell", lambda self, event: None if event["type"] == "lapsed" else tell(self, event))


def start_flushes_nothing(patch: Mend) -> None:
    """A start does not put into the ledger what it lacks: leases of a higher wait_out, and those a kill caught before their flush."""
    missing = leased.state.recovery._missing

    def mutant(*arguments: Any) -> Any:
        ops, known = missing(*arguments)
        return [op for op in ops if op[0] != "put"], known

    patch.setattr(leased.state.recovery, "_missing", mutant)


def superseded_keeps_waiting(patch: Mend) -> None:
    patch.setattr(Queues, "of_rid", lambda self, rid: None)


MUTANTS: list[Callable[[Mend], None]] = [
    live_at_the_deadline, release_without_fence, no_tombstones, second_in_line_first, line_not_served, gone_is_there,
    no_delete_before_regrant, answered_before_flush, undo_keeps_the_grant, ledger_said_to_hold_everything, nothing_waited_out,
    generations_go_back, mark_not_waited_for, deaf_time_counts, fence_never_presented, binds_ignored, closed_connections_keep,
    sweep_trusts_its_heap, switch_takes_too_much, switch_forgets_to_disarm, stop_forgets_one, lapses_not_told, start_flushes_nothing,
    superseded_keeps_waiting,
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("mutate", MUTANTS, ids=lambda mutate: mutate.__name__)
def test_a_broken_daemon_is_caught(mutate: Callable[[Mend], None], monkeypatch: Mend) -> None:
    mutate(monkeypatch)
    assert any(run_seed(seed).violations for seed in SEEDS), f"none of {len(SEEDS)} seeds notices"
