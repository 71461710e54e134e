"""A sequential reference of the service, written from the contract alone and naive on purpose.

`Model` is told every decision in its order and says what may be answered. It knows nothing of sockets, stores or batches: an
implementation agrees with it or one of the two is wrong. Instants are seconds on the boot clock, kept as whole nanoseconds so that
"a renewal at exactly ttl finds it lapsed" does not hang on float rounding.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import arguments
from expectation import Billing, Expectation, Grant, Rule, equal, mismatches, null, one_of
from replies import SECOND, Lease, Place, Replies, Switch

DEFAULT_TTL = 60.0
SWITCH_GRACE_AFTER_START = 10.0


@dataclass(frozen=True)
class Caller:
    """Who asks. `process` is what a pidfd proves (None: cannot be proven, or TCP); a TCP caller never re-binds a lease."""

    namespace: str = "local"
    operator: bool = False
    connection: object = None
    process: object = None
    tcp: bool = False


@dataclass
class Waiter:
    caller: Caller
    asked: dict[str, Any]
    deadline: int
    expectation: Expectation


@dataclass
class Attempt:
    """A request_id that was granted, remembered until the grant's original deadline."""

    lease: Lease
    until: int


@dataclass(frozen=True)
class Event:
    """What a watcher is told; the generation is `lease.numbers.generation` once known. `lease` is None for switch_missed."""

    at: float
    namespace: str
    type: str
    scope: str | None
    lease: Lease | None


def nanoseconds(seconds: float) -> int:
    return round(seconds * SECOND)


class Model(Replies):
    """The reference. Feed it every decision in order; `tolerance` is in seconds and covers the reply's own age and rounding.

    `settled` collects waiting expectations as they are decided; `events` what watchers must hear.
    """

    def __init__(self, billing: Billing | None = None, tolerance: float = 0.001) -> None:
        super().__init__(billing, tolerance)
        self.queues: dict[Place, list[Waiter]] = {}
        self.attempts: dict[tuple[str, bytes], Attempt] = {}
        self.switches: dict[Place, Switch] = {}
        self.settled: list[Expectation] = []
        self.events: list[Event] = []
        self._grants = 0

    # -- time and connections ------------------------------------------------------------------------------------------------

    def advance(self, now: float) -> None:
        """Everything that falls due up to and including `now`, in order of time; at one instant lapses, switches, then waits."""
        until = nanoseconds(now)
        assert until >= self.now, "the boot clock never goes back"
        while True:
            due = [(lease.deadline, 0, place) for place, lease in self.leases.items()]
            due += [(switch.due, 1, place) for place, switch in self.switches.items() if switch.armed]
            due += [(waiter.deadline, 2, place) for place, queue in self.queues.items() for waiter in queue]
            first = min(due, default=(until + 1, 0, ("", "")))
            if first[0] > until:
                break
            self.now = max(self.now, first[0])
            if first[1] == 0:
                self._end(self.leases[first[2]], "lapsed")
            elif first[1] == 1:
                self._miss(first[2])
            else:
                self._end_wait(first[2])
        self.now = until

    def close(self, connection: object, now: float) -> None:
        """The connection closed: its waiters never receive a grant, its connection-bound leases end."""
        self.advance(now)
        for place, queue in list(self.queues.items()):
            for waiter in [waiter for waiter in queue if waiter.caller.connection == connection]:
                queue.remove(waiter)
                self._settle(waiter.expectation.nobody())
            self.queues[place] = queue
        for lease in list(self.leases.values()):
            if lease.bind == "connection" and lease.connection == connection:
                self._end(lease, "released")

    def died(self, process: object, now: float) -> None:
        """The process died: its process-bound leases end. Close its connections first, or its own waiters inherit them."""
        self.advance(now)
        for lease in list(self.leases.values()):
            if lease.bind == "process" and lease.process is not None and lease.process == process:
                self._end(lease, "released")

    def restart(self, now: float, *, pidfds_kept: bool) -> None:
        """The daemon ended (same boot; `advance` to its end first) and serves again at `now`: waits are lost, leases stand."""
        for queue in self.queues.values():
            for waiter in queue:
                self._settle(waiter.expectation.nobody())
        self.queues.clear()
        for place, switch in self.switches.items():
            floor = nanoseconds(now + SWITCH_GRACE_AFTER_START)
            if switch.armed and not switch.graced and switch.due < floor:
                self.switches[place].due, self.switches[place].graced = floor, True
        self.advance(now)
        self.texts_seen.clear()
        for lease in self.leases.values():
            lease.connection = None
            if not pidfds_kept:
                lease.process = None

    # -- calls ---------------------------------------------------------------------------------------------------------------

    def apply(self, now: float, caller: Caller, operation: str, params: Mapping[str, object]) -> Expectation:
        """Decides one call at `now` and says what may be answered."""
        self.advance(now)
        expectation = Expectation(operation, self.drawn)
        decide = getattr(self, f"_{operation}", None) if operation in arguments.READERS else None
        if decide is None:
            return expectation.fail({"unknown_method"})
        asked, faults = arguments.read(operation, params)
        forbidden = not caller.operator and (operation == "revoke" or (operation == "list" and asked.get("all")))
        if faults:
            return expectation.fail({"invalid_argument", "permission_denied"} if forbidden else {"invalid_argument"}, faults)
        if forbidden:
            return expectation.fail({"permission_denied"})
        if isinstance(asked.get("key"), str):
            self.texts_seen.add((asked.get("namespace", caller.namespace), asked["key"]))
        decided: Expectation = decide(expectation, caller, asked)
        if decided.kind != "pending":
            decided.decided_at = self.now / SECOND
        return decided

    def _lease(self, expectation: Expectation, caller: Caller, asked: dict[str, Any]) -> Expectation:
        place = (caller.namespace, asked["key"])
        live = self.leases.get(place)
        if live and asked.get("fence") is not None and asked["fence"] == live.numbers.fence and asked["holder"] == live.holder:
            return self._renewal(expectation, caller, live, asked)
        request = (caller.namespace, asked["request_id"]) if "request_id" in asked else None
        if request:
            attempt = self.attempts.get(request)
            if attempt and self.now < attempt.until:
                if attempt.lease.place != place or attempt.lease.holder != asked["holder"]:
                    return expectation.fail({"invalid_argument"}, {"request_id"})
                if attempt.lease is not live:
                    return self._refusal(expectation, place, asked, "spent")
                if not live.presented:
                    self._rebind(live, caller)
                    return expectation.answer(self._granted(live, renewed=False))
            waiting = [
                (where, waiter)
                for where, queue in self.queues.items()
                for waiter in queue
                if self._same_attempt(where, waiter, request)
            ]
            for where, waiter in waiting:
                if where != place or waiter.asked["holder"] != asked["holder"]:
                    return expectation.fail({"invalid_argument"}, {"request_id"})
                return self._take_over(expectation, caller, place, waiter, asked)
        if asked.get("bind") == "process" and (caller.tcp or caller.process is None):
            return expectation.fail({"invalid_argument"}, {"bind"})
        if live is None:
            return self._grant(expectation, caller, place, asked)
        if "fence" in asked:
            return self._refusal(expectation, place, asked, self._why_not_bearer(live, asked))
        waiter = Waiter(caller, asked, self.now + nanoseconds(asked.get("wait_seconds", 0)), expectation)
        if waiter.deadline > self.now:
            self.queues.setdefault(place, []).append(waiter)
            return expectation
        return self._ordinary_refusal(waiter, place)

    def _same_attempt(self, where: Place, waiter: Waiter, request: tuple[str, bytes]) -> bool:
        return where[0] == request[0] and waiter.asked.get("request_id") == request[1]

    def _take_over(
        self, expectation: Expectation, caller: Caller, place: Place, older: Waiter, asked: dict[str, Any]
    ) -> Expectation:
        """The repeat takes the older call's place in the queue; only its wait_seconds and its connection are its own."""
        self._settle(older.expectation.answer(self._unknown(place, asked, "superseded")))
        newer = Waiter(caller, older.asked, self.now + nanoseconds(asked.get("wait_seconds", 0)), expectation)
        queue = self.queues[place]
        if newer.deadline > self.now:
            queue[queue.index(older)] = newer
            return expectation
        queue.remove(older)
        return self._ordinary_refusal(newer, place)

    def _renew(self, expectation: Expectation, caller: Caller, asked: dict[str, Any]) -> Expectation:
        place = (caller.namespace, asked["key"])
        live = self.leases.get(place)
        if live is None:
            return self._refusal(expectation, place, asked, "lapsed", free_of_charge=True)
        reason = self._why_not_bearer(live, asked)
        if reason:
            return self._refusal(expectation, place, asked, reason, free_of_charge=True)
        return self._renewal(expectation, caller, live, asked)

    def _why_not_bearer(self, live: Lease, asked: dict[str, Any]) -> str:
        """Empty for the bearer; a fence that is not the live lease's is wrong_fence whoever holds it."""
        if asked["fence"] != live.numbers.fence:
            return "wrong_fence"
        return "" if asked["holder"] == live.holder else "wrong_holder"

    def _release(self, expectation: Expectation, caller: Caller, asked: dict[str, Any]) -> Expectation:
        place = (caller.namespace, asked["key"])
        live = self.leases.get(place)
        key = equal(asked["key"], "section 1: the key as the caller writes it")
        refused = {
            "released": equal(False, "section 2: only the live fence's bearer; section 6: own release repeated is expired"),
            "key": key,
        }
        if live is None:
            refused["reason"] = equal("expired", "section 2: expired, nothing live; section 6: own release repeated")
            names = ("held_by", "generation", "expires_at", "expires_in_seconds", "retry_after_seconds")
            return expectation.answer(
                refused, {name: null("section 6: the live lease's if there is one, else null") for name in names}
            )
        if asked["fence"] != live.numbers.fence or asked.get("holder", live.holder) != live.holder:
            refused["reason"] = equal(
                "not_holder", "section 2: never touches another's lease; section 6: right fence, other holder"
            )
            return expectation.answer({**refused, **self._holding(live)})
        live.presented = True
        self._end(live, "released")
        return expectation.answer(
            {
                "released": equal(True, "section 2: the live fence's bearer releases"),
                "key": key,
                "generation": live.numbers.generation_rule,
            }
        )

    def _check(self, expectation: Expectation, caller: Caller, asked: dict[str, Any]) -> Expectation:
        place = (caller.namespace, asked["key"])
        live = self.leases.get(place)
        fields: dict[str, Rule] = {
            "held": equal(live is not None, "section 1: live means now < deadline"),
            "key": equal(asked["key"], "section 1: the key as the caller writes it"),
            "waiting": equal(len(self.queues.get(place, [])), "section 2: waiting is the length of the queue"),
            **self._holding(live),
        }
        if "generation" in asked:
            wanted = asked["generation"]
            if live and live.numbers.generation is None:
                fields["current"] = one_of([True, False], "section 2: current is a boolean")
            else:
                current = live is not None and live.numbers.generation == wanted
                fields["current"] = equal(current, "section 2: is the lease of exactly that generation live?")
        return expectation.answer(fields)

    def _list(self, expectation: Expectation, caller: Caller, asked: dict[str, Any]) -> Expectation:
        everything = asked.get("all", False)
        wanted = [
            lease
            for lease in sorted(self.leases.values(), key=lambda lease: lease.numbers.serial)
            if (everything or lease.place[0] == caller.namespace)
            and asked.get("scope", lease.scope) == lease.scope
            and asked.get("holder", lease.holder) == lease.holder
            and not ("cursor" in asked and lease.numbers.generation is not None and lease.numbers.generation <= asked["cursor"])
        ]
        rules = [self._entry(lease, everything) for lease in wanted]
        limit = asked.get("limit", 100)

        def page(reply: dict[str, object]) -> list[str]:
            entries, cursor = reply["leases"], reply["cursor"]
            if not isinstance(entries, list):
                return [f"leases is {entries!r}, not a list (section 2)"]
            found = []
            if len(entries) > limit:
                found.append(f"{len(entries)} leases, more than limit {limit} (section 2)")
            if len(entries) > len(wanted):
                found.append(f"{len(entries)} leases where {len(wanted)} are live (section 2: the namespace's live leases)")
            if cursor is None and len(entries) < len(wanted):
                found.append(
                    f"{len(entries)} leases and no cursor where {len(wanted)} are live (section 2: the namespace's live leases)"
                )
            if cursor is not None and not entries:
                found.append("an empty page with a cursor would never end (section 2: cursor|null)")
            for position, (fields, entry) in enumerate(zip(rules, entries, strict=False)):
                found += [f"entry {position}, oldest generation first: {complaint}" for complaint in mismatches(entry, fields)]
            return found

        def cursor_rule(value: object) -> str | None:
            return None if value is None or (isinstance(value, str) and value) else f"is {value!r} (section 2: cursor|null)"

        expectation.after = page
        return expectation.answer({"leases": lambda value: None, "cursor": cursor_rule})

    def _revoke(self, expectation: Expectation, caller: Caller, asked: dict[str, Any]) -> Expectation:
        namespace = asked.get("namespace", caller.namespace)
        if "key" in asked:
            live = self.leases.get((namespace, asked["key"]))
        else:
            named = [
                place
                for place, key_hash in self.drawn.key_hashes.items()
                if key_hash == asked["key_hash"] and place[0] == namespace
            ]
            live = self.leases.get(named[0]) if named else None
        if live is None:
            return expectation.answer(
                {
                    "revoked": equal(False, 'section 2: revoked:false, reason:"expired" for a free key'),
                    "reason": equal("expired", "section 2: a free key is expired"),
                }
            )
        self._end(live, "revoked")
        return expectation.answer(
            {
                "revoked": equal(True, "section 2: force release"),
                "generation": live.numbers.generation_rule,
                "held_by": equal(live.holder, "section 2: held_by"),
            }
        )

    def _heartbeat(self, expectation: Expectation, caller: Caller, asked: dict[str, Any]) -> Expectation:
        switch = self.switches.setdefault((caller.namespace, asked["scope"]), Switch())
        if asked.get("disarm"):
            switch.armed = False
        else:
            switch.armed, switch.graced = True, False
            switch.within = nanoseconds(asked["expect_within_seconds"])
            switch.due = self.now + switch.within
            switch.released_is_certain = not switch.missed
        # An omitted agent_id may keep the one before or clear it: the contract is silent.
        switch.agent_ids = {asked["agent_id"]} if "agent_id" in asked else {*switch.agent_ids, None}
        return expectation.answer({"scope": equal(asked["scope"], "section 2: scope"), **self._switch_fields(switch)})

    def _resume_packet(self, expectation: Expectation, caller: Caller, asked: dict[str, Any]) -> Expectation:
        switch = self.switches.get((caller.namespace, asked["scope"]))
        leases = [lease for lease in self.leases.values() if lease.place[0] == caller.namespace and lease.scope == asked["scope"]]
        leases.sort(key=lambda lease: lease.numbers.serial)
        if leases:
            empty = equal(False, "section 2: empty is false while the scope has leases")
        elif switch is None:
            empty = equal(True, "section 2: empty is true where the scope has neither leases nor a switch")
        else:
            empty = one_of([True, False], "section 2: empty is a boolean")
        return expectation.answer(
            {
                "scope": equal(asked["scope"], "section 2: scope"),
                "empty": empty,
                "leases": self._entries(leases, "section 2: leases as in list"),
                "switch": self._switch_rule(switch),
            }
        )

    # -- decisions -----------------------------------------------------------------------------------------------------------

    def _grant(self, expectation: Expectation, caller: Caller, place: Place, asked: dict[str, Any]) -> Expectation:
        self._grants += 1
        ttl = nanoseconds(asked.get("ttl_seconds", DEFAULT_TTL))
        lease = Lease(
            place=place,
            holder=asked["holder"],
            scope=asked.get("scope"),
            ttl=ttl,
            deadline=self.now + ttl,
            bind=asked.get("bind", "none"),
            connection=caller.connection,
            process=caller.process,
            numbers=Grant(self._grants, self.drawn),
        )
        self.leases[place] = lease
        if "request_id" in asked:
            self.attempts[place[0], asked["request_id"]] = Attempt(lease, lease.deadline)
        self._tell("granted", lease)
        return expectation.answer(self._granted(lease, renewed=False))

    def _renewal(self, expectation: Expectation, caller: Caller, live: Lease, asked: dict[str, Any]) -> Expectation:
        """The ttl given, even shorter; omitted keeps the lease's own (section 6, for `renew` and for a renewal by `lease`)."""
        if "ttl_seconds" in asked:
            live.ttl = nanoseconds(asked["ttl_seconds"])
        live.deadline = self.now + live.ttl
        live.presented = True
        self._rebind(live, caller)
        self._tell("renewed", live)
        return expectation.answer(self._granted(live, renewed=True))

    def _rebind(self, live: Lease, caller: Caller) -> None:
        if caller.tcp:
            return
        live.connection = caller.connection
        if caller.process is not None:
            live.process = caller.process

    def _end(self, lease: Lease, type: str) -> None:
        """The lease is gone and, in the same decision, the head of the queue has the key."""
        del self.leases[lease.place]
        self._tell(type, lease)
        queue = self.queues.get(lease.place)
        if queue:
            waiter = queue.pop(0)
            self._settle(self._grant(waiter.expectation, waiter.caller, lease.place, waiter.asked))

    def _end_wait(self, place: Place) -> None:
        queue = self.queues[place]
        waiter = min(queue, key=lambda waiter: waiter.deadline)
        queue.remove(waiter)
        self._settle(self._ordinary_refusal(waiter, place))

    def _miss(self, place: Place) -> None:
        """Every live lease the scope has at this moment is released, exactly once; the waiters get theirs."""
        switch = self.switches[place]
        switch.armed, switch.missed, switch.released_is_certain = False, True, True
        switch.released = [lease for lease in self.leases.values() if lease.place[0] == place[0] and lease.scope == place[1]]
        self.events.append(Event(self.now / SECOND, place[0], "switch_missed", place[1], None))
        for lease in switch.released:
            self._end(lease, "released")

    def _ordinary_refusal(self, waiter: Waiter, place: Place) -> Expectation:
        same = self.leases[place].holder == waiter.asked["holder"]
        return self._refusal(waiter.expectation, place, waiter.asked, "same_label" if same else "held")

    def _settle(self, expectation: Expectation) -> None:
        expectation.decided_at = self.now / SECOND
        self.settled.append(expectation)

    def _tell(self, type: str, lease: Lease) -> None:
        self.events.append(Event(self.now / SECOND, lease.place[0], type, lease.scope, lease))
