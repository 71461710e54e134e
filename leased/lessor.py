"""The lessor: gathers what is ready, decides it in one transaction, commits, answers.

A batch is whatever is ready now.  Each request is decided by rules.py on the record of its key, as the decisions before it left that
record; then one commit; then the answers.  A batch that cannot be written is tried again one request at a time, and what fails
alone is told null.

Time.  `now.boot` is this instant.  `now.judged` decides what has lapsed: it is the same but for the one pass after the daemon was deaf (the
loop was late), where it is the last instant the daemon was known to listen, so that a renewal that waited in a socket is not
punished for our sleep.  What is granted or renewed always counts from `now.boot`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import structlog

from leased import model, rules
from leased.calls import Call, Peer, Unproven
from leased.clock import Clock
from leased.config_keys import Limits
from leased.digests import Digests
from leased.errors import PeerError
from leased.gate import Gate, Unknown
from leased.generations import Generations
from leased.holdings import Holdings
from leased.lane import Outcome
from leased.model import Ask, Fresh, Lease, LeaseRequest, Reply
from leased.queues import Waiter
from leased.state.journal import Journal
from leased.state.leases import Leases
from leased.state.records import decode_tombstone
from leased.tariff import BILLED_REASONS

log = structlog.get_logger()

WHOLE_VIEWS: Final = frozenset({model.ListRequest, model.ResumeRequest})
MAX_KEPT_ASKS: Final = 1024
QUEUED_FOR: Final = frozenset({"held", "same_label", "recovering"})  # what will pass, so that waiting for it makes sense
_NOTHING_FRESH: Final = Fresh(0, 0, b"")


class Lessor(Holdings):
    """Everything that is decided.  Synchronous: no call here waits for anything."""

    def __init__(
        self, leases: Leases, digests: Digests, generations: Generations, journal: Journal, gate: Gate, clock: Clock, limits: Limits
    ) -> None:
        super().__init__(leases, digests, generations, journal, gate, clock, limits)
        self._asks: dict[str, Ask] = {}
        self.operations: dict[type, Callable[[Call, Any], None]] = {
            model.LeaseRequest: self._lease,
            model.RenewRequest: self._renew,
            model.ReleaseRequest: self._release,
            model.CheckRequest: self._check,
        }

    # ---- batches

    def decide(self, calls: Sequence[Call], judged: float | None = None) -> None:
        """Decide and answer `calls`, in order.  Every call is answered, held for the ledger, or queued.

        What looks at many leases looks at the index, which knows what is committed: it gets a transaction of its own.
        """
        begin = 0
        for at, call in enumerate(calls):
            if type(call.request) in WHOLE_VIEWS:
                if at > begin:
                    self._decide(calls[begin:at], judged)
                self._decide(calls[at : at + 1], judged)
                begin = at + 1
        if begin < len(calls):
            self._decide(calls[begin:] if begin else calls, judged)

    def _decide(self, calls: Sequence[Call], judged: float | None) -> None:
        self.now = self.instant(judged)
        try:
            outcome = self.lane.run(self._decide_all, calls)
        except Exception:
            outcome = Outcome.ABORTED
            if len(calls) == 1:
                log.exception("lane.failed", operation=type(calls[0].request).__name__)
                calls[0].refuse(PeerError("internal", "this request could not be decided; the daemon's log says why"))
                return
        if outcome is not Outcome.COMMITTED:
            if outcome is Outcome.ABORTED and len(calls) > 1:
                for call in calls:
                    self._decide((call,), judged)
                return
            for call in calls:
                self.answer_unknown(call, Unknown("store"))
        self.journal.kick(self.now.boot)

    def _decide_all(self, calls: Sequence[Call]) -> None:
        operations, after = self.operations, self.lane.after
        for call in calls:
            request = call.request
            try:
                operations[type(request)](call, request)
            except Unknown as unknown:
                after(self.answer_unknown, call, unknown)
            except PeerError as error:
                after(call.refuse, error)
            except Unproven:
                after(call.peer.challenge, call)
        self.store_last()

    # ---- operations

    def _lease(self, call: Call, request: LeaseRequest) -> None:
        self.gate.admit()
        namespace = call.identity.namespace
        key_hash = self.digests.key_hash(namespace, request.key)
        record = self.standing(key_hash, request.key)
        if request.fence is None and request.request_id is None:
            ask = self._asks.get(namespace) or self._plain_ask(namespace)
        else:
            ask = self._ask(namespace, key_hash, record, request)
        if record is None and not ask.spent:
            self._prove(call, request)
            try:
                self.gate.admit_unknown_key(self.now.boot)
                self.grant(call, request, ask, key_hash)
            except Unknown as unknown:
                if unknown.reason != "recovering" or not request.wait:
                    raise
                self._wait(call, request, ask, key_hash, rules.unknown(request, unknown.reason, unknown.retry_after, self.free))
            return
        decision = rules.lease(record, request, ask, self.now, _NOTHING_FRESH)
        change = decision.change
        if change is rules.REFUSED:
            self._prove(call, request)
            bills = self.billing
            if bills is not None and bills.enabled and not (request.wait and decision.reply["reason"] in QUEUED_FOR):
                self._bill(call, key_hash, request, decision.reply)
            if request.wait or self.queues:
                self._wait(call, request, ask, key_hash, decision.reply)
            else:
                self.lane.after(self.refuse, call, decision.reply)
        elif change is rules.RENEWED:
            assert record is not None and decision.lease is not None
            self.renew(call, key_hash, record, decision.lease, decision.reply)
        else:
            assert record is not None
            if not record.unflushed:
                self.price(call, key_hash, record.holder, decision.reply)
            self.lane.after(self._replay, call, key_hash, record, decision.reply)

    def _renew(self, call: Call, request: model.RenewRequest) -> None:
        self.gate.admit()
        namespace = call.identity.namespace
        key_hash = self.digests.key_hash(namespace, request.key)
        record = self.standing(key_hash, request.key)
        if record is None:
            self.gate.admit_unknown_key(self.now.boot)
        decision = rules.renew(record, request, self._presented(namespace, request.fence), self.now)
        if decision.lease is None:
            self.lane.after(self.refuse, call, decision.reply)
        else:
            assert record is not None
            self.renew(call, key_hash, record, decision.lease, decision.reply)

    def _release(self, call: Call, request: model.ReleaseRequest) -> None:
        self.gate.admit_reading()
        namespace = call.identity.namespace
        key_hash = self.digests.key_hash(namespace, request.key)
        record = self.standing(key_hash, request.key)
        if record is None:
            self.gate.admit_unknown_key(self.now.boot)
        decision = rules.release(record, request, self._presented(namespace, request.fence), self.now)
        if decision.lease is not None:
            self.end(key_hash, decision.lease, rules.RELEASED, "")
            if call.agent_lock:
                self.price(call, key_hash, decision.lease.holder, decision.reply)
        self.lane.after(call.answer, decision.reply)
        if decision.lease is not None and self.queues:
            self.pass_on(key_hash)

    def _check(self, call: Call, request: model.CheckRequest) -> None:
        self.gate.admit_reading()
        key_hash = self.digests.key_hash(call.identity.namespace, request.key)
        record = self.standing(key_hash, request.key)
        if record is None:
            self.gate.admit_unknown_key(self.now.boot)
        waiting = self.queues.waiting(key_hash) if self.queues else 0
        reply = rules.check(record, request, self.now, waiting)
        if call.agent_lock:
            self.price(call, key_hash, record.holder if record is not None else "", reply)
        self.lane.after(call.answer, reply)

    # ---- credentials and lines

    def _bill(self, call: Call, key_hash: bytes, request: LeaseRequest, refusal: Reply) -> None:
        """A refusal by `lease` is billed once for its key and label; a call of the agent-lock form is priced by its door's own rule."""
        if call.agent_lock:
            self.price(call, key_hash, request.holder, refusal)
        elif self.billing is not None and refusal["reason"] in BILLED_REASONS:
            refusal["charge"] = self.billing.refused(call.identity.namespace, key_hash, request.holder)

    def _presented(self, namespace: str, fence: int) -> Ask:
        ask: Ask = model.made(Ask, (namespace, self.digests.proof(fence), b"", 0, False))
        return ask

    def _plain_ask(self, namespace: str) -> Ask:
        """Of a caller without credentials, the same for all of a namespace.  A few namespaces are kept."""
        if len(self._asks) >= MAX_KEPT_ASKS:
            self._asks.clear()
        ask = self._asks[namespace] = Ask(namespace)
        return ask

    def _prove(self, call: Call, request: LeaseRequest) -> None:
        """Raises PeerError for a bind that could not be kept, whatever the answer would have been.  A renewal or repeat ignores its bind."""
        if request.bind == model.BIND_PROCESS and self.binding is not None:
            self.binding.prove(call.peer)

    def _ask(self, namespace: str, key_hash: bytes, record: Lease | None, request: LeaseRequest) -> Ask:
        """The caller's credentials, digested.  Raises PeerError when a request_id was used for another key or holder."""
        proof = b"" if request.fence is None else self.digests.proof(request.fence)
        if request.request_id is None:
            return Ask(namespace, proof)
        rid, mask = self.digests.rid(namespace, request.request_id)
        if proof and record is not None and record.proof == proof and record.holder == request.holder:
            return Ask(namespace, proof)  # a renewal: its request_id is ignored
        if record is not None and record.rid == rid:
            if record.holder != request.holder:
                raise _reused()
            return Ask(namespace, proof, rid, mask)
        waiter = self.queues.of_rid(rid) if self.queues else None
        if waiter is not None and (waiter.key_hash != key_hash or waiter.request.holder != request.holder):
            raise _reused()
        elsewhere = self.lane.rids.get(rid) or self.index.rids.get(rid)
        if elsewhere is not None and elsewhere != key_hash:
            there = self.stored(elsewhere)
            if there is not None and there.rid == rid and self.now.judged < max(there.deadline, there.rid_until):
                raise _reused()
        raw = self.lane.transaction.get(rid, db=self.leases.tombstones)
        if raw is not None:
            tombstone = decode_tombstone(raw)
            if self.now.judged < tombstone.until:
                if tombstone.key_hash != key_hash or tombstone.holder_hash != self.digests.holder_hash(namespace, request.holder):
                    raise _reused()
                return Ask(namespace, proof, rid, mask, spent=True)
        return Ask(namespace, proof, rid, mask)

    def _wait(self, call: Call, request: LeaseRequest, ask: Ask, key_hash: bytes, refusal: Reply) -> None:
        """A caller that would be refused queues instead, if it asked to and what refuses it will pass."""
        older = self.queues.of_rid(ask.rid) if ask.rid else None
        if older is not None and older.taken:
            older = None
        if not request.wait or refusal["reason"] not in QUEUED_FOR:
            if older is not None:
                self._take(older)
                self.lane.after(self.queues.remove, older)
                self.lane.after(self.answer_unknown, older.call, Unknown("superseded"))
            self.lane.after(self.refuse, call, refusal)
            return
        waiter = Waiter(call, request, ask, key_hash, self.now.boot + request.wait)
        if older is not None:
            self.queues.replace(older, waiter)
            self.lane.on_abort(lambda: self.queues.put_back(waiter, older))
            self.lane.after(self.answer_unknown, older.call, Unknown("superseded"))
            return
        for limit, standing in (
            ("max_waiters_per_key", self.queues.length(key_hash)),
            ("max_waiters_per_namespace", self.queues.of_namespace(ask.namespace)),
            ("max_waiters_per_connection", len(self.queues.of_peer(call.peer))),
        ):
            most = getattr(self.limits, limit)
            if standing >= most:
                raise PeerError("rate_limited", f"wait_seconds cannot be honoured: {most} callers wait already (limits.{limit})")
        self.queues.add(waiter)  # at once: a release later in this batch is for whoever queued before it
        self.lane.on_abort(lambda: self.queues.remove(waiter))

    def end_wait(self, waiter: Waiter) -> None:
        """The wait is over: the refusal that stands now, or, if the key is free at this very moment, the grant."""
        try:
            record = self.standing(waiter.key_hash)
        except Unknown as unknown:
            self.lane.after(self.queues.remove, waiter)
            self.lane.after(self.answer_unknown, waiter.call, unknown)
            return
        self.store_last()  # whoever got the key: it may be another than this waiter
        if waiter.taken:
            return
        self.lane.after(self.queues.remove, waiter)
        request, ask = waiter.request, waiter.ask
        if record is None:
            self.lane.after(self.answer_unknown, waiter.call, self._why_not())
        else:
            decision = rules.lease(record, request._replace(fence=None), Ask(ask.namespace), self.now, _NOTHING_FRESH)
            if self.billing is not None:
                self._bill(waiter.call, waiter.key_hash, request, decision.reply)
            self.lane.after(self.refuse, waiter.call, decision.reply)

    def _why_not(self) -> Unknown:
        """Why a free key is not granted to the head of its line."""
        try:
            self.gate.admit()
            self.gate.admit_unknown_key(self.now.boot)
        except Unknown as unknown:
            return unknown
        return Unknown("full")

    def hung_up(self, peer: Peer) -> None:
        """A connection is gone: its waiters leave their lines."""
        if self.queues:
            for waiter in self.queues.of_peer(peer):
                self.queues.remove(waiter)


def _reused() -> PeerError:
    return PeerError("invalid_argument", "request_id was used for another key or holder: draw a new one for each attempt")
