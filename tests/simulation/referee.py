"""The oracle, told by a running daemon what was decided, and judging each answer that leaves.

The model decides by itself; the daemon only says in which order and at which instant calls came to be decided, and what it noticed (a lapse,
a missed switch, a connection that is gone, a flush that failed).  Each such notice must be lawful: a lapse the model knows of, a switch that is
due, a grant taken back that nobody was told of.  What the contract leaves to time is bounded at each tick.

When null is lawful, precisely:

- `starting`: from the start until two flushes of the ledger have succeeded;
- `recovering`: after a start that may have forgotten leases, for a key of which no live lease is known, until wait_out has passed
  (stored or configured, whichever is longer) and one more flush has succeeded;
- `store`: a transaction of `leases` failed at this instant, or the flush this answer waited for failed;
- `ledger_slow`: it waited for a flush for min(2 s, half the ttl);
- `ended`: the lease ended while its answer waited;
- `superseded`: a repeat of the request_id took over the wait (the model says so by itself);
- `shutting_down`, `state_lost`: the daemon was told to stop, or its directory was taken away.
"""

from __future__ import annotations

import re
from typing import Any

from oracle import Attempt, nanoseconds
from parties import NEVER, NOT_ANSWERED, Asked, Connection, Slot
from replies import SECOND, Lease, Place
from told_model import ToldModel

MAX_HOLD_SECONDS = 2.0
QUANTUM_SLACK = 0.004  # seconds: two quanta of the simulated clock
GRACE_SECONDS = 2.5  # within which a tick and a flush have certainly been had
TRUTHS = {"lease": "acquired", "renew": "acquired", "release": "released", "check": "held", "revoke": "revoked"}
UNREADABLE = re.compile(r"internal: this cannot be done now \((\w+)\)")  # unknown, for an operation that has no null to say it with
EXCUSED = "refused as it may be"  # in place of a reason why it was not decided
JUDGED = {"lease", "renew", "release", "check", "list", "heartbeat", "resume_packet", "revoke"}


class Referee(ToldModel):
    """Judges each call in the order decided, and each answer as it leaves."""

    def __init__(self, world: Any) -> None:
        super().__init__(world)
        self.asked: dict[tuple[Connection, int], Asked] = {}
        self.unanswered: dict[tuple[Connection, int], Asked] = {}
        self._last_of: dict[tuple[Connection, object], int] = {}

    # ---- one call

    def sent(self, connection: Connection, msgid: int, operation: str, params: dict[str, Any]) -> None:
        asked = Asked(connection, msgid, operation, params, self.world.time)
        self.asked[connection, msgid] = self.unanswered[connection, msgid] = asked

    def looked_at(self, place: Place) -> None:
        """The daemon looks at this key, for a decision whose turn has come."""
        self.catch_up()
        self.serve(place)

    def decided(self, slot: Slot) -> None:
        """This call's turn has come, in the order of the lane."""
        asked = slot.asked
        self.catch_up()
        asked.decided_at, asked.unknown = self.world.time, slot.unknown
        last = self._last_of.get((asked.connection, asked.place), -1)
        if asked.place is not None and asked.msgid <= last:
            self.complain(f"{asked} decided after a later call on its key (section 3.1: decided in the order sent)")
        self._last_of[asked.connection, asked.place] = asked.msgid
        if asked.operation not in JUDGED:
            self._watching(asked)
            return
        process = asked.connection.process
        if slot.failed and "bind" in slot.failed and process is not None and process.dead_since is not None:
            asked.unknown = EXCUSED
            return
        if "request_id" in slot.failed and self._outlived(asked):
            asked.unknown = EXCUSED
            return
        if not slot.failed:  # a mistake may be seen before the key is looked at
            self.serve(asked.place)
        if slot.unknown:
            return
        remembered = self._remember_while_deaf()
        self.queue_instead = slot.queued
        asked.expectation = self.apply(self.world.time, asked.connection.caller, asked.operation, asked.params)
        self.queue_instead = False
        for attempt, until in remembered:
            attempt.until = until
        if asked.operation == "heartbeat":
            self.world.recoveries.remember_switches()
        live = self.leases.get(asked.place) if asked.place is not None else None
        if live is not None and asked.operation == "lease":
            self.lease_of.setdefault(asked.expectation, live)

    def _remember_while_deaf(self) -> list[tuple[Attempt, int]]:
        """What is remembered until some instant is so by the instant the daemon judges by, for this one decision: the next may be judged by
        its own.  Returns what is to be put back then."""
        if self.judged is None:
            return []
        judged = nanoseconds(self.judged)
        late = [(each, each.until) for each in self.attempts.values() if judged < each.until <= self.now]
        for attempt, _ in late:
            attempt.until = self.now + 1
        return late

    def _outlived(self, asked: Asked) -> bool:
        """Has a renewal kept the lease of this request_id past its original deadline, or did the call that had it hang up while it waited?  The
        contract does not say whether it is known then."""
        request_id = asked.params.get("request_id")
        request = (asked.connection.namespace, request_id.encode() if isinstance(request_id, str) else request_id)
        hung_up = any(
            other.connection.gone and other.answer is NOT_ANSWERED and other.params.get("request_id") == request_id
            for other in self.asked.values()
        )
        return hung_up or any(self.request_of.get(id(lease)) == request for lease in self.leases.values())

    def _watching(self, asked: Asked) -> None:
        heard = asked.connection.heard
        if heard is not None and asked.operation == "watch":
            heard.begun = len(self.hearable)
        elif heard is not None and asked.operation == "unwatch":
            heard.ended, heard.ended_at = len(self.hearable), self.world.time

    def wait_ends(self, asked: Asked) -> None:
        """The daemon says that a wait is over: not before its time, and the key goes to it if it is free at that moment."""
        self.catch_up()
        place = asked.place
        assert place is not None
        waiter = next((each for each in self.queues.get(place, []) if each.expectation is asked.expectation), None)
        if waiter is None:
            return
        if waiter.deadline > self.now:
            self.complain(f"the wait of {asked} ends {(waiter.deadline - self.now) / SECOND:.3f} s early (section 2)")
        self.serve(place)
        if waiter not in self.queues.get(place, []):
            return
        self.queues[place].remove(waiter)
        if place in self.leases:
            self._settle(self._ordinary_refusal(waiter, place))
        else:
            asked.unknown, asked.expectation = "the wait ended with the key free", None

    # ---- its answer

    def answered(self, asked: Asked, reply: object) -> None:
        """`reply` is the result, or "code: text"."""
        if asked.answer is not NOT_ANSWERED:
            self.complain(f"{asked} answered twice: {reply}")
        asked.answer = reply
        self.unanswered.pop((asked.connection, asked.msgid), None)
        self.say(f"{asked} -> {_shown(reply)}")
        if asked.operation not in JUDGED:
            return
        truth = TRUTHS.get(asked.operation)
        if isinstance(reply, dict) and truth is not None and reply.get(truth) is None:
            self._unknown_answered(asked, reply, truth)
        elif asked.unknown == EXCUSED:
            return
        elif isinstance(reply, str) and (said := UNREADABLE.match(reply)):
            self._lawful(asked, said[1])
        else:
            if asked.expectation is None:  # refused by its door
                asked.expectation = self.apply(self.world.time, asked.connection.caller, asked.operation, asked.params)
                if asked.expectation.kind != "error":
                    self.complain(f"{asked} was answered without being decided: {_shown(reply)}")
            for complaint in asked.expectation.check(self._on_our_clock(reply)):
                self.complain(f"{asked} -> {_shown(reply)}: {complaint}")
            if isinstance(reply, dict) and reply.get("acquired") is True:
                self._true_answer(asked, reply)
            elif isinstance(reply, dict) and reply.get("revoked") is True:
                self.revoked.add(reply["generation"])
                self.world.must_be_forgotten(self.known[reply["generation"]].place, reply["generation"])

    def _on_our_clock(self, reply: object) -> object:
        if isinstance(reply, dict) and "expires_boottime" in reply:
            return {**reply, "expires_boottime": reply["expires_boottime"] + self.world.clock.booted}
        return reply

    def _true_answer(self, asked: Asked, reply: dict[str, Any]) -> None:
        lease = self.lease_of.get(asked.expectation) if asked.expectation is not None else None
        generation = reply["generation"]
        if lease is None or self.leases.get(lease.place) is not lease:
            self.complain(f"{asked} is told yes of a lease that is gone (promise 2)")
            return
        self.told.add(generation)
        self.held_until.pop(generation, None)
        self.before.pop(generation, None)
        if asked.event is not None and (asked.event.type == "granted" or asked.decided_at == self.world.time):
            asked.event.optional = False  # renewals that waited for one flush may be told as one
            asked.event.certain_at = self.world.time if asked.decided_at < self.world.time else -NEVER
        self.world.must_be_safe(lease)

    def _unknown_answered(self, asked: Asked, reply: dict[str, Any], truth: str) -> None:
        reason = str(reply.get("reason"))
        expectation = asked.expectation
        if expectation is not None and expectation.kind == "result" and reason == "superseded":
            for complaint in expectation.check(reply):
                self.complain(f"{asked} -> {_shown(reply)}: {complaint}")
            return
        if reply.get("charge", {"amount": "0"})["amount"] != "0":
            self.complain(f"{asked}: an unknown was billed (section 2)")
        if expectation is not None and expectation.kind == "pending":
            self._forget_wait(asked, reason)
        self._lawful(asked, reason)
        self._taken_back(asked, reason)
        self._shape(asked, reply, reason, truth)

    def _taken_back(self, asked: Asked, reason: str) -> None:
        """A flush that did not come leaves nothing of what waited for it."""
        lease = self.lease_of.get(asked.expectation) if asked.expectation is not None else None
        generation = lease.numbers.generation if lease is not None else None
        if (
            lease is None
            or generation is None
            or reason not in ("store", "ledger_slow")
            or self.trouble.store_at >= self.world.time
        ):
            return
        if self.leases.get(lease.place) is lease and (generation not in self.told or generation in self.before):
            self.complain(f"{asked} is unknown ({reason}), and what it waited for is not taken back")

    def _forget_wait(self, asked: Asked, reason: str) -> None:
        for queue in self.queues.values():
            for waiter in [each for each in queue if each.expectation is asked.expectation]:
                queue.remove(waiter)
                if waiter.deadline > self.now and reason != "store":
                    self.complain(f"the wait of {asked} ends early, unknown (section 2)")

    def _shape(self, asked: Asked, reply: dict[str, Any], reason: str, truth: str) -> None:
        wanted = {truth, "reason", "retry_after_seconds"} | ({"key"} if "key" in asked.params and truth != "revoked" else set())
        if not wanted <= reply.keys():
            self.complain(f"{asked}: an unknown lacks {sorted(wanted - reply.keys())} (section 2)")
        if "fence" in reply:
            self.complain(f"{asked}: an unknown shows a fence (section 1)")
        left = 1.0
        if reason == "recovering":
            left = max(0.05, self.trouble.waiting_until - self.world.time)
        if abs(reply.get("retry_after_seconds", left) - left) > QUANTUM_SLACK:
            self.complain(f"{asked}: retry_after_seconds {reply['retry_after_seconds']}, not {left} (section 6)")

    def _lawful(self, asked: Asked, reason: str) -> None:
        """May this be unknown, for this reason, now?"""
        now, trouble = self.world.time, self.trouble
        lease = self.lease_of.get(asked.expectation) if asked.expectation is not None else None
        since = min(asked.decided, now)
        excused = False
        if reason == "starting":
            excused = trouble.flushes < 2 or trouble.store_at >= trouble.began
        elif reason == "recovering":
            ends = trouble.waiting_until
            if self.world.deaf_from < ends + GRACE_SECONDS:  # it could not tell the ledger that the wait is over
                ends = max(ends, self.world.deaf_to)
            waiting = now < ends + GRACE_SECONDS or trouble.ledger_at >= trouble.waiting_until - GRACE_SECONDS
            excused = waiting and (asked.place is None or asked.place not in self.leases)
        elif reason == "store":
            excused = trouble.store_at >= since or trouble.ledger_at >= since
        elif reason == "ledger_slow":
            excused = now >= self._waits_until(lease, since) - QUANTUM_SLACK
        elif reason == "ended":
            excused = lease is not None and (self.leases.get(lease.place) is not lease or lease.deadline <= nanoseconds(now))
        elif reason == "shutting_down":
            excused = trouble.draining
        elif reason == "state_lost":
            excused = trouble.lost
        if not excused:
            self.complain(f"{asked} is unknown ({reason}) without a reason for it")

    def _waits_until(self, lease: Lease | None, since: float) -> float:
        """When an answer that began to wait for a flush at `since` may be null for want of it: all that wait for one lease are told at once."""
        generation = lease.numbers.generation if lease is not None else None
        if lease is None or generation is None:
            return since + MAX_HOLD_SECONDS
        undone_at, until = self.given_back.get(generation, (-NEVER, NEVER))
        if undone_at == self.world.time:
            return until
        return self.held_until.get(generation, since + min(MAX_HOLD_SECONDS, lease.ttl / SECOND / 2))


def _shown(reply: object) -> object:
    """Without what is secret or drawn from chance."""
    if not isinstance(reply, dict):
        return reply
    kept = (
        "acquired",
        "renewed",
        "reason",
        "released",
        "held",
        "revoked",
        "generation",
        "held_by",
        "waiting",
        "expires_in_seconds",
    )
    shown = {name: reply[name] for name in kept if name in reply}
    for name in ("leases", "armed", "watching"):
        if name in reply:
            shown[name] = len(reply[name]) if isinstance(reply[name], list) else reply[name]
    return shown
