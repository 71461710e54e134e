"""What the daemon notices, each held against the model: grants, ends, flushes that failed, switches, connections, ticks.

`Notices` is told after the commit, at the place in the order of consequences where the daemon itself acts.
"""

from __future__ import annotations

from typing import Any

from oracle import nanoseconds
from parties import NEVER, Asked, Connection, Told
from referee import GRACE_SECONDS, MAX_HOLD_SECONDS, Referee
from replies import SECOND, Lease, Place

TICK_SECONDS = 1.0


class Notices:
    def __init__(self, referee: Referee) -> None:
        self.referee = referee
        self._owed_since: dict[Place, float] = {}
        self._last_tick = 0.0

    # ---- grants

    def granted(self, asked: Asked, place: Place, record: Any) -> None:
        """The daemon has granted: what the model has granted to this call, or now grants to the head of the line."""
        referee = self.referee
        referee.catch_up()
        expectation = asked.expectation
        first = referee._first(place)
        if expectation is not None and expectation.kind == "pending" and first is not None and first.expectation is expectation:
            referee._pass_on(place)
        lease = referee.leases.get(place)
        if (
            expectation is None
            or lease is None
            or referee.lease_of.get(expectation) is not lease
            or id(lease) not in referee.ungranted
        ):
            referee.complain(f"generation {record.generation} of {place} is granted to {asked}, whose turn it is not (section 2)")
            return
        del referee.ungranted[id(lease)]
        referee._grants += 1
        lease.numbers.serial = referee._grants
        complaint = lease.numbers.generation_rule(record.generation) or "; ".join(referee.drawn.learn(allowed=True))
        if complaint:
            referee.complain(f"the generation of {asked} {complaint}")
            lease.numbers.generation = record.generation
        referee.known[record.generation] = lease
        self._may_wait(record)
        self._compare(lease, record)
        for ghost in referee.ghosts:
            if referee.now < ghost.until:
                left = (ghost.until - referee.now) / SECOND
                referee.complain(
                    f"{asked} is granted {left:.3f} s before the forgotten {_named(ghost.lease)} would have lapsed (promise 4)"
                )
        if asked.connection.gone and asked.params.get("wait_seconds") and asked.decided_at < referee.world.time:
            referee.complain(f"{asked} is granted, whose connection is gone (section 2)")
        asked.event = Told("granted", place, lease.scope, lease.holder, record.generation, optional=True)
        referee.hearable.append(asked.event)
        referee.say(f"  granted {place} to {asked.connection} as {record.generation}")

    def renewed(self, asked: Asked, place: Place, record: Any) -> None:
        referee = self.referee
        lease = referee.leases.get(place)
        if lease is None or lease.numbers.generation != record.generation:
            referee.complain(f"{asked} renews generation {record.generation}, which is not live (section 1)")
            return
        self._compare(lease, record)
        self._may_wait(record)
        asked.event = Told("renewed", place, lease.scope, lease.holder, record.generation, optional=True)
        referee.hearable.append(asked.event)

    def _may_wait(self, record: Any) -> None:
        """Should its answer need a flush: for 2 s and half the ttl at most, counted from the first that waits, and by its ttl."""
        wait = min(MAX_HOLD_SECONDS, record.ttl / 2)
        self.referee.held_until.setdefault(record.generation, self.referee.world.time + wait)

    def _compare(self, lease: Lease, record: Any) -> None:
        referee = self.referee
        deadline = nanoseconds(record.deadline + referee.world.clock.booted)
        theirs = (record.holder, record.scope, nanoseconds(record.ttl), deadline, ("none", "process", "connection")[record.bind])
        ours = (lease.holder, lease.scope, lease.ttl, lease.deadline, lease.bind)
        if theirs != ours:
            referee.complain(f"{_named(lease)} is recorded as {theirs}, not as {ours}")

    # ---- ends

    def ended(self, place: Place, record: Any, change: str, reason: str) -> None:
        referee = self.referee
        referee.catch_up()
        generation = record.generation
        wanted = "released" if change == "switch_missed" else change
        live = referee.leases.get(place)
        if change == "lapsed" and live is not None and live.numbers.generation == generation and live.deadline <= referee.now:
            referee._end(live, "lapsed")  # what the daemon was deaf to it may excuse, and need not
        found = referee.unnoticed.pop(generation, None)
        if found is None:
            referee.complain(
                f"generation {generation} of {place} is ended ({change} {reason}), which the contract does not (promise 4)"
            )
            lease = referee.leases.pop(place, None)
        else:
            lease = found[0]
            if found[1] != wanted:
                referee.complain(f"{_named(lease)} is ended as {change}, not as {found[1]}")
        if change == "lapsed":
            referee.serve(place)
        if lease is not None:
            referee.hearable.append(Told(change, place, lease.scope, lease.holder, generation))
            referee.ended_at[generation] = referee.world.time
        referee.say(f"  {change} {place} {generation} {reason}")

    def bind_ends(self, ends: list[tuple[Place, int, str]]) -> None:
        """Leases that end with their process or connection, or whose waiter was never told."""
        referee = self.referee
        referee.catch_up()
        for place, generation, reason in ends:
            lease = referee.leases.get(place)
            if lease is None or lease.numbers.generation != generation or lease.deadline <= referee.now:
                continue
            connection: Any = lease.connection
            process: Any = lease.process
            lawful = {
                "process_exited": lease.bind == "process" and process is not None and process.dead_since is not None,
                "connection_closed": lease.bind == "connection" and connection is not None and connection.ending,
                "undelivered": connection is not None and connection.ending,
            }[reason]
            if not lawful:
                referee.complain(f"{_named(lease)} is ended ({reason}), which nothing shows (section 2: bind)")
            referee._end(lease, "released")

    def missed(self, place: Place) -> None:
        referee = self.referee
        referee.catch_up()
        switch = referee.switches.get(place)
        if switch is None or not switch.armed or switch.due > referee.now:
            referee.complain(f"the switch of {place} falls, which is not due (section 2: missed)")
            return
        referee._miss(place)
        referee.world.recoveries.remember_switches()

    def hung_up(self, connection: Connection) -> None:
        """The daemon has seen that it is gone: its waiters leave."""
        referee = self.referee
        if not connection.ending and not referee.trouble.draining:
            referee.complain(f"{connection} is hung up on, though it is there")
        connection.noticed = True
        if connection.heard is not None and connection.heard.ended is None:
            connection.heard.ended, connection.heard.ended_at = len(referee.hearable), referee.world.time
        for queue in referee.queues.values():
            for waiter in [each for each in queue if each.caller.connection is connection]:
                queue.remove(waiter)
                referee._settle(waiter.expectation.nobody())

    # ---- flushes that failed

    def grant_undone(self, place: Place, record: Any) -> None:
        referee = self.referee
        referee.catch_up()
        lease = referee.leases.get(place)
        ended = referee.unnoticed.get(record.generation)
        if ended is not None and ended[1] == "lapsed" and record.generation not in referee.told:
            del referee.unnoticed[
                record.generation
            ]  # it has lapsed untold while the daemon was deaf: nothing of it is left either way
            referee.say(f"  undone {place} {record.generation}, lapsed")
            referee.serve(place)
            return
        if lease is None or lease.numbers.generation != record.generation:
            referee.complain(f"generation {record.generation} of {place} is taken back, but is not live")
            return
        if record.generation in referee.told:
            referee.complain(f"{_named(lease)} is taken back, though a true answer had left (promise 4)")
        del referee.leases[place]
        for name, attempt in list(referee.attempts.items()):
            if attempt.lease is lease:
                del referee.attempts[name]
        referee.say(f"  undone {place} {record.generation}")
        if referee.open():
            referee._pass_on(place)

    def renewal_undone(self, place: Place, deadline: float) -> None:
        referee = self.referee
        referee.catch_up()
        lease = referee.leases.get(place)
        generation = lease.numbers.generation if lease is not None else None
        if any(ended.place == place and type == "lapsed" for ended, type, _ in referee.unnoticed.values()):
            return  # as above: it has lapsed, and more so with the deadline it had before
        if lease is None or generation is None or generation not in referee.before:
            referee.complain(f"a renewal of {place} is taken back, though none waits for its flush (promise 4)")
            return
        lease.ttl, lease.deadline = referee.before.pop(generation)
        if nanoseconds(deadline + referee.world.clock.booted) != lease.deadline:
            referee.complain(f"{_named(lease)} gets back another deadline than it had")
        referee.given_back[generation] = (referee.world.time, referee.held_until.pop(generation, NEVER))
        referee.say(f"  renewal undone {place} {generation}")

    # ---- time

    def ticked(self) -> None:
        """After each tick that nothing kept from its work: whatever was due has been done."""
        referee = self.referee
        referee.catch_up()
        now, trouble = referee.world.time, referee.trouble
        quiet = now - max(trouble.store_at, trouble.began) > GRACE_SECONDS
        self._lines(now, quiet)
        if not quiet:
            return
        for place, switch in referee.switches.items():
            if switch.armed and switch.due <= referee.now:
                referee.complain(f"the switch of {place} was due at {switch.due / SECOND} and has not fallen (section 2)")
        for queue in referee.queues.values():
            for waiter in queue:
                if waiter.deadline <= referee.now:
                    referee.complain(f"a wait for {waiter.asked} of {waiter.caller.connection} goes on past its end (section 2)")
        for lease, type, since in referee.unnoticed.values():
            if since < now:
                referee.complain(f"{_named(lease)} has {type}, and the daemon keeps it (section 1)")
        for lease in referee.leases.values():
            connection: Any = lease.connection
            if lease.bind == "connection" and connection is not None and connection.noticed:
                referee.complain(f"{_named(lease)} outlives its connection (section 2: bind)")
                lease.connection = None
            process: Any = lease.process
            dead = process.dead_since if lease.bind == "process" and process is not None else None
            if dead is not None and dead < now - TICK_SECONDS:
                referee.complain(f"{_named(lease)} outlives its process (section 2: bind)")
        for name, asked in list(referee.unanswered.items()):
            pending = asked.expectation is None or asked.expectation.kind in ("pending", "nobody")
            if asked.connection.noticed:
                del referee.unanswered[name]
            elif now - asked.decided > MAX_HOLD_SECONDS + GRACE_SECONDS and not pending:
                referee.complain(f"{asked} has not been answered (at most 2 s are waited for a flush)")
                del referee.unanswered[name]

    def _lines(self, now: float, quiet: bool) -> None:
        """No key stays free while somebody waits for it; and the daemon opens when it must."""
        referee = self.referee
        for lease in list(referee.ungranted.values()):
            referee.complain(f"{lease.place} should have gone to the head of its line (section 2: in the same decision)")
            del referee.ungranted[id(lease)]
        owed = {place for place in referee.queues if referee.owed(place)}
        self._owed_since = {place: self._owed_since.get(place, now) for place in owed}
        for place, since in self._owed_since.items():
            if referee.open() and quiet and (since < self._last_tick or now - since > TICK_SECONDS):
                referee.complain(f"{place} is free since {since:.3f} and its line is not served (section 2)")
                self._owed_since[place] = float("inf")
        self._last_tick = now
        trouble = referee.trouble
        ledger_quiet = now - max(trouble.ledger_at, trouble.waiting_until, trouble.began) > 2 * GRACE_SECONDS
        if quiet and ledger_quiet and not referee.open() and not trouble.draining and not trouble.lost:
            referee.complain("nothing is granted, and nothing shows why (section 2)")


def _named(lease: Lease) -> str:
    return f"generation {lease.numbers.generation} of {lease.place}"
