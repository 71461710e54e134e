"""What can happen to a lease: it stands, is granted, renewed, ends, passes on to who waits, is confirmed by a flush or undone.

Each step has two halves.  The first is part of a decision and stages writes in the lane's open transaction; the second happens after the
commit: indexes, ledger operations, answers.  Nothing here reads a request's meaning: lessor.py asks rules.py for that.
"""

from __future__ import annotations

from typing import Final

import structlog

from leased import model, rules
from leased.calls import Call
from leased.errors import PeerError, StateRefused
from leased.gate import Unknown
from leased.holds import Held, Hold, bound
from leased.kept import Kept
from leased.model import Ask, Fresh, Lease, LeaseRequest, Reply, Tombstone
from leased.queues import Waiter
from leased.state.ledger import LedgerLease
from leased.state.records import RecordDamaged, decode_lease, decode_tombstone, encode_lease

log = structlog.get_logger()

LAPSED: Final = "lapsed"


class Holdings(Kept):
    """The leases of one daemon and everything remembered beside them."""

    # ---- halves that are part of a decision

    def standing(self, key_hash: bytes, text: str | None = None) -> Lease | None:
        """The live lease of a key.  One that has lapsed unnoticed is ended here, and the head of its line gets the key before
        whoever asked: in the same decision, so that nobody slips in between.  Raises Unknown for a record that cannot be read."""
        raw = self.lane.transaction.get(key_hash, db=self.leases.leases)
        if raw is None:
            return self.pass_on(key_hash) if self.queues else None
        try:
            record = decode_lease(raw)
        except RecordDamaged:
            self.set_aside(key_hash)
            raise Unknown("damaged") from None
        except StateRefused:
            raise Unknown("store") from None
        if self.now.judged < record.deadline:
            if text is not None and key_hash not in self.index.texts:
                self.index.seen(key_hash, text)
            return record
        self.end(key_hash, record, LAPSED, "")
        return self.pass_on(key_hash) if self.queues else None

    def grant(self, call: Call, request: LeaseRequest, ask: Ask, key_hash: bytes) -> Lease:
        """A fresh grant of a free key.  Raises Unknown (no room, no generation, no ledger yet) or PeerError (limits)."""
        namespace = ask.namespace
        new = self.lane.granted.get(namespace, 0)
        if self.index.count(namespace) + new >= self.limits.max_leases_per_namespace:
            raise PeerError(
                "rate_limited",
                f"namespace has {self.limits.max_leases_per_namespace} live leases, its limit (limits.max_leases_per_namespace)",
            )
        if ask.rid and self.tombs.total >= self.limits.max_spent_request_ids:
            raise PeerError(
                "rate_limited",
                f"{self.limits.max_spent_request_ids} request ids of ended leases are remembered, the limit (limits.max_spent_request_ids): "
                "ask for a shorter ttl_seconds, or without request_id",
            )
        if not self.has_room():
            self.counts["full"] += 1
            raise Unknown("full")
        generation = self.generations.peek(self.now.wall)
        if generation is None:
            raise Unknown("generations")
        fence = self._fences.draw()
        decision = rules.grant(request, ask, self.now, Fresh(generation, fence, self.digests.proof(fence)))
        lease = decision.lease
        assert lease is not None
        if lease.ttl > self.gate.wait_out or generation > self.generations.mark or self.journal.may_hold(key_hash):
            if self.journal.full:
                raise Unknown("store")
            lease = lease._replace(unflushed=True)
        elif call.agent_lock:
            self.price(call, key_hash, request.holder, decision.reply)
        self.generations.last = generation
        self.lane.granted[namespace] = new + 1
        if ask.rid:
            self.lane.rids[ask.rid] = key_hash
        self.lane.transaction.put(key_hash, encode_lease(lease), db=self.leases.leases)
        self.lane.after(self._granted, call, key_hash, lease, request.key, decision.reply)
        return lease

    def renew(self, call: Call, key_hash: bytes, before: Lease, lease: Lease, reply: Reply) -> None:
        put = rules.needs_flush(lease.ttl, self.gate.wait_out, self.journal.ttl_of(key_hash, lease.generation))
        if put and self.journal.full:
            raise Unknown("store")
        if put and not before.unflushed:
            lease = lease._replace(unflushed=True, previous_ttl=before.ttl, previous_deadline=before.deadline)
        if call.agent_lock and not lease.unflushed:
            self.price(call, key_hash, lease.holder, reply)
        self.lane.transaction.put(key_hash, encode_lease(lease), db=self.leases.leases)
        self.lane.after(self._after_renewal, call, key_hash, lease, reply, put)

    def end(self, key_hash: bytes, lease: Lease, change: str, reason: str) -> None:
        """A lease ends: by release, lapse, revocation, its switch or its bind.  Its request_id is remembered until the deadline it was
        granted with."""
        transaction = self.lane.transaction
        transaction.delete(key_hash, db=self.leases.leases)
        until = 0.0
        if lease.rid and self.now.judged < lease.rid_until:
            until = lease.rid_until
            holder_hash = self.digests.holder_hash(lease.namespace, lease.holder)
            self.leases.put_tombstone(transaction, lease.rid, Tombstone(key_hash, holder_hash, until))
        self.lane.after(self._ended, key_hash, lease, change, reason, until)

    def pass_on(self, key_hash: bytes) -> Lease | None:
        """The key is free: the first in its line that is still there gets it.  Part of the decision that freed it."""
        if self.gate.closed or self.gate.shut or self.gate.recovering(self.now.boot):
            return None
        while (waiter := self.queues.first(key_hash)) is not None:
            if waiter.call.peer.gone():
                self.lane.after(self.queues.remove, waiter)
            elif waiter.ask.rid and self.is_spent(
                waiter.ask.rid
            ):  # its own grant came and went while it waited: one attempt, one grant
                request = waiter.request
                self.lane.after(self.refuse, waiter.call, rules.refusal(None, request.key, request.holder, "spent", self.now))
                self.lane.after(self.queues.remove, waiter)
            else:
                try:
                    lease = self.grant(waiter.call, waiter.request, waiter.ask, key_hash)
                except Unknown:
                    self.stalled = True
                    return None  # no room or no generation now: the line stays as it is and is looked at again within a second
                except PeerError as error:
                    self.lane.after(waiter.call.refuse, error)
                else:
                    waiter.call.passed_on = (key_hash, lease.generation)
                    self._take(waiter)
                    self.lane.after(self.queues.remove, waiter)
                    return lease
                self.lane.after(self.queues.remove, waiter)
            self._take(waiter)
        return None

    def price(self, call: Call, key_hash: bytes, holder: str, reply: Reply) -> None:
        """A true or false answer to a call of the agent-lock form costs its price; one that is held for the ledger, when it leaves."""
        if call.agent_lock and self.billing is not None:
            reply["charge"] = self.billing.called(call.identity.namespace, key_hash, holder)

    def is_spent(self, rid: bytes) -> bool:
        """True for a row that cannot be read: an attempt that may have been spent gets no second grant."""
        raw = self.lane.transaction.get(rid, db=self.leases.tombstones)
        try:
            return raw is not None and self.now.judged < decode_tombstone(raw).until
        except (RecordDamaged, StateRefused):
            return True

    def _take(self, waiter: Waiter) -> None:
        waiter.taken = True
        self.lane.on_abort(lambda: setattr(waiter, "taken", False))

    def store_last(self) -> None:
        """The last generation is written with the grants that used it.  Part of every transaction that can grant."""
        last = self.generations.last
        if last != self._last_stored:
            self.leases.put_last(self.lane.transaction, last)
            self.lane.after(self._stored, last)

    def _stored(self, last: int) -> None:
        self._last_stored = last

    # ---- consequences, after the commit

    def refuse(self, call: Call, reply: Reply) -> None:
        self.counts["refused" if reply["acquired"] is False else "unknown"] += 1
        call.answer(reply)

    def _granted(self, call: Call, key_hash: bytes, lease: Lease, key: str, reply: Reply) -> None:
        self.counts["granted"] += 1
        self.index.granted(key_hash, lease, key)
        if lease.bind and self.binding is not None:
            self.binding.bound(key_hash, lease, call.peer)
        if lease.unflushed:
            if lease.ttl > self.gate.wait_out:
                number: int | None = self.journal.put(key_hash, LedgerLease(lease))
            else:
                number = self.journal.end(key_hash)
            if lease.generation > self.generations.mark:
                number = max(number or 0, self.raise_mark())
            assert number is not None  # nothing is flushed between a decision and its consequences
            self.holds.add(key_hash, lease.generation, number, bound(self.now.boot, lease.ttl), Held(call, reply))
            return
        if self.watching is not None:
            self.watching("granted", key_hash, lease, "", key)
        call.answer(reply)

    def _after_renewal(self, call: Call, key_hash: bytes, lease: Lease, reply: Reply, put: bool) -> None:
        self.counts["renewed"] += 1
        self.index.moved(key_hash, lease.deadline)
        if lease.bind and self.binding is not None:
            self.binding.bound(key_hash, lease, call.peer)
        put = put or (lease.unflushed and key_hash not in self.holds)  # marked, but what flushed it could not be noted: once more
        number = self.journal.put(key_hash, LedgerLease(lease)) if put else None
        if lease.unflushed:
            self.holds.add(key_hash, lease.generation, number, bound(self.now.boot, lease.ttl), Held(call, reply))
            return
        if self.watching is not None:
            self.watching("renewed", key_hash, lease, "", self.index.texts.get(key_hash))
        call.answer(reply)

    def _replay(self, call: Call, key_hash: bytes, lease: Lease, reply: Reply) -> None:
        self.counts["replayed"] += 1
        if (key_hash, lease.generation) not in call.peer.undelivered:
            self.replayed[key_hash] = lease.generation
        if lease.bind and self.binding is not None:
            self.binding.bound(key_hash, lease, call.peer)
        if lease.unflushed:
            number = self.journal.put(key_hash, LedgerLease(lease)) if key_hash not in self.holds else None
            self.holds.add(key_hash, lease.generation, number, bound(self.now.boot, lease.ttl), Held(call, reply))
        else:
            call.answer(reply)

    def confirmed(self, key_hash: bytes, record: bytes, hold: Hold) -> None:
        """The ledger has what a power cut needs: the answers that were held leave.  `record`: the lease as it stands now."""
        if self.watching is not None:
            lease = decode_lease(record)
            self.watching("renewed" if lease.presented else "granted", key_hash, lease, "", self.index.texts.get(key_hash))
        for held in hold.held:
            held.call.answer(held.reply)

    def undo_grant(self, key_hash: bytes, lease: Lease) -> None:
        """A fresh grant nobody was told of is taken back, its request_id forgotten, whatever the ledger has of it deleted."""
        self.lane.transaction.delete(key_hash, db=self.leases.leases)
        self.lane.after(self._undone, key_hash, lease)

    def _undone(self, key_hash: bytes, lease: Lease) -> None:
        self.counts["undone"] += 1
        self.replayed.pop(key_hash, None)
        self.index.ended(key_hash, lease)
        if lease.bind and self.binding is not None:
            self.binding.ended(key_hash)
        self.journal.forget(key_hash)

    def _ended(self, key_hash: bytes, lease: Lease, change: str, reason: str, spent_until: float) -> None:
        self.counts[change] += 1
        self.replayed.pop(key_hash, None)
        text = self.index.texts.get(key_hash)
        self.index.ended(key_hash, lease)
        if lease.bind and self.binding is not None:
            self.binding.ended(key_hash)
        if spent_until:
            self.tombs.add(lease.rid, spent_until)
        self.journal.forget(key_hash)
        hold = self.holds.pop(key_hash)
        if hold is not None:
            for held in hold.held:
                self.answer_unknown(held.call, Unknown("ended"))
        if self.watching is not None:
            self.watching(change, key_hash, lease, reason, text)

    def answer_unknown(self, call: Call, unknown: Unknown) -> None:
        self.counts["unknown"] += 1
        request = call.request
        if isinstance(request, model.LeaseRequest | model.RenewRequest | model.ReleaseRequest | model.CheckRequest):
            call.answer(rules.unknown(request, unknown.reason, unknown.retry_after, self.free))
        elif isinstance(request, model.RevokeRequest):
            call.answer({"revoked": None, "reason": unknown.reason, "retry_after_seconds": unknown.retry_after})
        else:
            call.refuse(
                PeerError("internal", f"this cannot be done now ({unknown.reason}); try again in {unknown.retry_after:g} s")
            )
