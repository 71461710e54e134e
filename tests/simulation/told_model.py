"""The model, told by a daemon what it noticed: lapses come by themselves, everything else when the daemon says so."""

from __future__ import annotations

from typing import Any

from expectation import Expectation, Rule
from oracle import Caller, Model, Waiter, nanoseconds
from parties import Ghost, Told, Trouble
from replies import Lease, Place, Switch


class ToldModel(Model):
    """`world` is asked for the time and for the daemon that runs."""

    def __init__(self, world: Any) -> None:
        super().__init__(tolerance=1e-6)
        self.world = world
        self.violations: list[str] = []
        self.trace: list[str] = []
        self.lease_of: dict[Expectation, Lease] = {}
        self.request_of: dict[int, tuple[str, bytes]] = {}  # by id of the lease
        self.known: dict[int, Lease] = {}  # by generation: every grant there ever was
        self.unnoticed: dict[int, tuple[Lease, str, float]] = {}  # ended here, not yet there
        self.ungranted: dict[int, Lease] = {}  # granted here, not yet there, by id
        self.told: set[int] = set()  # generations of which a true answer has left
        self.revoked: set[int] = set()  # those whose revocation was told
        self.before: dict[int, tuple[int, int]] = {}  # by generation: what a failed flush gives back
        self.held_until: dict[int, float] = {}  # by generation: how long its answers may wait for a flush, told null then
        self.given_back: dict[int, tuple[float, float]] = {}  # by generation: when its renewal was undone, and its held_until
        self.ended_at: dict[int, float] = {}
        self.ghosts: list[Ghost] = []
        self.hearable: list[Told] = []  # what watchers must hear
        self.trouble = Trouble()
        self.judged: float | None = None
        self.queue_instead = False

    def say(self, text: str) -> None:
        self.trace.append(f"{self.world.time:9.3f} {text}")

    def complain(self, text: str) -> None:
        self.say(f"VIOLATION {text}")
        self.violations.append(f"{self.world.time:.3f}: {text}")

    # ---- the model, but for what the daemon notices later

    def advance(self, now: float) -> None:
        """Only lapses come by themselves here, judged as the daemon may judge them after it was deaf.  The line is served when the lapse is
        noticed; switches fall and waits end when the daemon says so, and `ticked` sees that it does in time."""
        until = nanoseconds(now if self.judged is None else min(now, self.judged))
        due = sorted((lease.deadline, place) for place, lease in self.leases.items() if lease.deadline <= until)
        for _, place in due:
            self._end(self.leases[place], "lapsed")
        self.now = nanoseconds(now)

    def catch_up(self) -> None:
        self.advance(self.world.time)

    def open(self) -> bool:
        """Can a key that falls free be granted at this moment?  How long it may not is bounded in `ticked`."""
        gate = self.world.daemon.lessor.gate
        return not (gate.closed or gate.shut or gate.recovering(self.world.clock.now().boot))

    def _grant(self, expectation: Expectation, caller: Caller, place: Place, asked: dict[str, Any]) -> Expectation:
        if self.queue_instead:
            waiter = Waiter(caller, asked, self.now + nanoseconds(asked["wait_seconds"]), expectation)
            self.queues.setdefault(place, []).append(waiter)
            return expectation
        super()._grant(expectation, caller, place, asked)
        lease = self.leases[place]
        self.ungranted[id(lease)] = lease
        self.lease_of[expectation] = lease
        if "request_id" in asked:
            self.request_of[id(lease)] = (place[0], asked["request_id"])
        return expectation

    def _renewal(self, expectation: Expectation, caller: Caller, live: Lease, asked: dict[str, Any]) -> Expectation:
        assert live.numbers.generation is not None
        self.before.setdefault(live.numbers.generation, (live.ttl, live.deadline))
        self.lease_of[expectation] = live
        return super()._renewal(expectation, caller, live, asked)

    def _rebind(self, live: Lease, caller: Caller) -> None:
        """A process that is dead already takes nothing over: the contract does not say which of the two ends the lease."""
        if caller.process is not None and caller.process.dead_since is not None:  # type: ignore[attr-defined]
            caller = Caller(caller.namespace, caller.operator, caller.connection, None)
        super()._rebind(live, caller)

    def _released_rule(self, switch: Switch) -> Rule:
        """Of what a switch gave back the contract says key|null, and not when it is null."""
        seen, self.texts_seen = self.texts_seen, set()
        try:
            return super()._released_rule(switch)
        finally:
            self.texts_seen = seen

    def _end(self, lease: Lease, type: str) -> None:
        del self.leases[lease.place]
        generation = lease.numbers.generation
        if generation is None:
            self.complain(f"a lease of {lease.place} ends that the daemon never granted")
        else:
            self.unnoticed[generation] = (lease, type, self.world.time)
        if type != "lapsed" and self.open():
            self._pass_on(lease.place)

    def _first(self, place: Place) -> Waiter | None:
        """The head of the line that is still there."""
        for waiter in self.queues.get(place, []):
            if not waiter.caller.connection.gone:  # type: ignore[attr-defined]
                return waiter
        return None

    def _pass_on(self, place: Place) -> None:
        """The key goes to the head of its line.  Those before it whose connection is gone leave it, and so do those whose request_id has
        been granted and spent while they waited: one attempt, one grant."""
        while place not in self.leases and (waiter := self._first(place)) is not None:
            queue = self.queues[place]
            del queue[: queue.index(waiter) + 1]
            attempt = self.attempts.get((place[0], waiter.asked.get("request_id", b"")))
            if attempt and self.now < attempt.until:
                self._settle(self._refusal(waiter.expectation, place, waiter.asked, "spent"))
            else:
                self._settle(self._grant(waiter.expectation, waiter.caller, place, waiter.asked))
        if place not in self.leases:
            for gone in self.queues.pop(place, []):
                self._settle(gone.expectation.nobody())

    def owed(self, place: Place) -> bool:
        return place not in self.leases and self._first(place) is not None

    def serve(self, place: Place | None) -> None:
        """Whoever looks at a key that has fallen free serves its line first."""
        if place is not None and place not in self.leases and self.open():
            self._pass_on(place)

    def _tell(self, type: str, lease: Lease) -> None:
        """Watchers hear of things as the daemon notices them: see notices.py."""
