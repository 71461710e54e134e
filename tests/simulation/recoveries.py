"""What a start may find and what it may have forgotten, held against the model.

After a kill, or a stop in order, on a runtime directory that is still there, everything stands.  After a power cut or the loss of the
runtime directory the model takes over what the daemon brings back, as far as the contract lets it: long leases of which anybody was told
must be there, short ones may be missing and are then waited out (`Ghost`), ended ones may be back for one ttl, revoked ones may not.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from notices import Notices, _named
from oracle import SWITCH_GRACE_AFTER_START, Attempt, nanoseconds
from parties import Ghost, Trouble
from referee import Referee
from replies import SECOND, Lease, Place, Switch

ARMING_UNDONE_SECONDS = 1.01  # "a power cut may undo the last second's arming, disarming or miss"
MAX_DRAIN_SECONDS = 6.0


class Recoveries:
    def __init__(self, referee: Referee, notices: Notices) -> None:
        self.referee = referee
        self.notices = notices
        self._boots = 1  # the boot of this life
        self._past: dict[Place, list[tuple[float, int, Switch]]] = {}  # when, in which boot, and how it stood

    def remember_switches(self) -> None:
        """Notes how the switches stand, so that a power cut can be seen to bring back one of the last second's states."""
        now = self.referee.world.time
        for place, switch in self.referee.switches.items():
            states = self._past.setdefault(place, [])
            if not states or states[-1][2] != switch:
                states.append((now, self._boots, replace(switch, agent_ids=set(switch.agent_ids), released=list(switch.released))))

    # ---- starts

    def kept(self, *, pidfds_kept: bool) -> None:
        """The runtime directory is that of before: nothing may be missing."""
        referee = self.referee
        waiting = referee.trouble.waiting_until
        referee.judged = None
        referee.advance(referee.world.time)
        referee.restart(referee.world.time, pidfds_kept=pidfds_kept)
        for lease in referee.leases.values():
            if not self._process_kept(lease):
                lease.process = None
        referee.before.clear()
        self._new_life(waiting)
        self.compare_all()

    def made_anew(self, *, clean: bool, waits: bool, same_boot: bool, wait_seconds: float, since_down: float) -> None:
        """The runtime directory is gone.  `clean`: after a stop in order, so nothing is forgotten, and nothing `waits` but for a volatile
        state that is somebody else's."""
        referee, world = self.referee, self.referee.world
        now = world.time
        self.remember_switches()
        for queue in referee.queues.values():
            for waiter in queue:
                referee._settle(waiter.expectation.nobody())
        referee.queues.clear()
        referee.texts_seen.clear()
        standing = dict(referee.leases)
        referee.leases.clear()
        referee.unnoticed.clear()
        referee.now = nanoseconds(now)
        if not same_boot:
            referee.drawn.boot_id = None
        for place, record in world.records().items():
            self._comes_back(place, record, standing.get(place), clean=clean, same_boot=same_boot, since_down=since_down)
        for lease in standing.values():
            if referee.leases.get(lease.place) is not lease:
                self._forgotten(lease, clean=clean, same_boot=same_boot, since_down=since_down, wait_seconds=wait_seconds)
        for name, attempt in list(referee.attempts.items()):
            lease = referee.leases.get(attempt.lease.place)
            if lease is not attempt.lease:
                del referee.attempts[name]
        referee.before.clear()
        self._new_life(now + wait_seconds if waits else float("-inf"))
        self._switches(clean=clean)

    def _new_life(self, waiting_until: float) -> None:
        referee, world = self.referee, self.referee.world
        referee.trouble = Trouble(began=world.time, waiting_until=waiting_until)
        self._boots = world.clock.boots
        for lease in list(referee.ungranted.values()):
            referee.complain(f"{_named(lease)} was granted by the contract and not by the daemon")
        referee.ungranted.clear()
        referee.held_until.clear()
        gate = world.daemon.lessor.gate
        stands = gate.no_grant_before + world.clock.booted if gate.no_grant_before else float("-inf")
        if waiting_until > world.time and stands < waiting_until - 1e-6:
            referee.complain(f"the daemon waits out {stands - world.time:.3f} s, not {waiting_until - world.time:.3f} (promise 4)")

    def _comes_back(
        self, place: Place, record: Any, standing: Lease | None, *, clean: bool, same_boot: bool, since_down: float
    ) -> None:
        referee, world = self.referee, self.referee.world
        lease = referee.known.get(record.generation)
        if lease is None or lease.place != place:
            referee.complain(f"generation {record.generation} of {place} comes back and never was")
            return
        deadline = nanoseconds(record.deadline + world.clock.booted)
        copied = since_down - MAX_DRAIN_SECONDS
        ended_after_copy = referee.ended_at.get(record.generation, 0.0) >= copied or lease.deadline >= nanoseconds(copied)
        if lease is not standing and ((clean and not ended_after_copy) or record.generation in referee.revoked):
            referee.complain(f"{_named(lease)} comes back, though it had ended (section 2: the old fence is dead)")
        if clean and lease is standing:
            wanted = lease.deadline if same_boot else lease.deadline + nanoseconds(world.time - since_down)
            drained = (
                0 if same_boot else nanoseconds(MAX_DRAIN_SECONDS)
            )  # what remains is written before the last flush, and counts from the start
            if not wanted - 2 <= deadline <= wanted + 2 + drained:
                referee.complain(f"{_named(lease)} comes back until {deadline / SECOND}, not {wanted / SECOND} (promise 4)")
        elif lease is standing and deadline < self._earliest(lease):
            referee.complain(f"{_named(lease)} comes back until {deadline / SECOND}, ending early (promise 4)")
        if deadline <= referee.now:
            return
        lease.ttl, lease.deadline, lease.presented = nanoseconds(record.ttl), deadline, record.presented
        lease.connection = None
        if not self._process_kept(lease):
            lease.process = None
        referee.leases[place] = lease
        request = referee.request_of.get(id(lease))
        if request is not None:  # remembered until its original deadline, as far as that is known still
            referee.attempts[request] = Attempt(lease, nanoseconds(record.rid_until + world.clock.booted))

    def _earliest(self, lease: Lease) -> int:
        """How soon a lease that comes back may lapse: at the deadline it had, or after its whole ttl.  While a renewal of it was told nobody
        yet, both as it is and as it was before are lawful (section 2: the outcome is not known)."""
        stands = (lease.ttl, lease.deadline)
        known = {stands, self.referee.before.get(lease.numbers.generation or 0, stands)}
        return min(min(deadline, self.referee.now + ttl) for ttl, deadline in known)

    def _process_kept(self, lease: Lease) -> bool:
        return any(name.endswith(f".{lease.numbers.generation}") for name in self.referee.world.keeper.kept)

    def _forgotten(self, lease: Lease, *, clean: bool, same_boot: bool, since_down: float, wait_seconds: float) -> None:
        """A lease that stood and is not back."""
        referee, world = self.referee, self.referee.world
        told = lease.numbers.generation in referee.told
        deadline = lease.deadline + (nanoseconds(world.time - since_down) if clean and not same_boot else 0)
        if deadline <= referee.now or not told:
            return
        ttl, until = referee.before.get(lease.numbers.generation or 0, (lease.ttl, deadline))
        if clean:
            referee.complain(f"{_named(lease)} is not back after a stop in order (promise 4)")
        elif min(ttl, lease.ttl) > nanoseconds(wait_seconds):
            referee.complain(f"{_named(lease)}, longer than is waited out, is not back (promise 2)")
        else:
            referee.ghosts.append(Ghost(lease, min(until, deadline)))

    # ---- switches

    def _switches(self, *, clean: bool) -> None:
        referee, world = self.referee, self.referee.world
        durable = world.certain_since - (0.0 if clean else ARMING_UNDONE_SECONDS)
        for place, states in self._past.items():
            theirs = world.switch_record(place)
            current = [(boots, state) for at, boots, state in states if at > durable]
            earlier = [(boots, state) for at, boots, state in states if at <= durable]
            possible = [*reversed(current), earlier[-1] if earlier else (0, Switch())]
            for boots, state in possible:
                back = self._after_start(state, same_boot=boots == world.clock.boots)
                if self._same(back, theirs):
                    referee.switches[place] = back
                    break
            else:
                referee.complain(f"the switch of {place} comes back as it never was in the last second: {theirs} (section 2)")
        self.remember_switches()

    def _after_start(self, state: Switch, *, same_boot: bool) -> Switch:
        now = self.referee.now
        back = replace(state, agent_ids=set(state.agent_ids), released=list(state.released))
        floor = now + nanoseconds(SWITCH_GRACE_AFTER_START)
        if back.armed and not same_boot:
            back.due, back.graced = now + back.within, False
        elif back.armed and not back.graced and back.due < floor:
            back.due, back.graced = floor, True
        return back

    def _same(self, ours: Switch, theirs: Any) -> bool:
        if theirs is None:
            return not ours.armed and not ours.missed
        due = nanoseconds(theirs.due + self.referee.world.clock.booted)
        released = {generation for _, generation in theirs.released}
        return (
            ours.armed == theirs.armed
            and theirs.agent_id in ours.agent_ids
            and ours.missed == bool(theirs.missed_wall)
            and (not ours.armed or (abs(ours.due - due) <= 2 and ours.within == nanoseconds(theirs.expect_within)))
            and (not ours.missed or released == {lease.numbers.generation for lease in ours.released})
        )

    # ---- the records against the model

    def compare_all(self) -> None:
        referee = self.referee
        referee.catch_up()
        records = referee.world.records()
        for place, record in records.items():
            lease = referee.leases.get(place)
            if lease is not None and lease.numbers.generation == record.generation:
                self.notices._compare(lease, record)
            elif nanoseconds(record.deadline + referee.world.clock.booted) > referee.now:
                referee.complain(f"generation {record.generation} of {place} is recorded as live, which it is not")
        for place, lease in referee.leases.items():
            if place not in records:
                referee.complain(f"{_named(lease)} has no record (promise 2)")
