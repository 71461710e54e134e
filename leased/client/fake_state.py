"""What a daemon of one namespace would answer, in memory: for tests of those who use the client.

Arguments are read by schema.py and leases are decided by rules.py, the daemon's own.  Here is only what stands around them: who waits,
what was spent, switches, and who is told.  Bounds of a daemon (limits, full stores) are not simulated.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, Final, NamedTuple, Protocol

from leased import model, rules, schema
from leased.client.fake_switches import FakeSwitches
from leased.clock import HostClock, rfc3339
from leased.digests import SECRET_BYTES, Digests
from leased.errors import PeerError
from leased.model import Ask, Fresh, Instant, Lease, LeaseRequest, Reply
from leased.version import VERSION

NAMESPACE: Final = "local"
FIRST_WALL: Final = 1_767_225_600.0  # 2026-01-01: generations of a test are the same in every run
_QUEUED_FOR: Final = frozenset({"held", "same_label"})


class Line(Protocol):
    """One connection, as the state sees it."""

    watch: model.WatchRequest | None
    seq: int

    def answer(self, msgid: int, reply: Reply) -> None: ...

    def refuse(self, msgid: int, error: PeerError) -> None: ...

    def notify(self, method: str, params: Reply) -> None: ...


class Waiter(NamedTuple):
    line: Line
    msgid: int
    request: LeaseRequest
    ask: Ask
    until: float


class FakeState:
    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._begun = now()
        self._digests = Digests(bytes(SECRET_BYTES))
        self._last = 0
        self._leases: dict[str, Lease] = {}
        self._bound: dict[str, Line] = {}
        self._spent: dict[bytes, tuple[str, str, float]] = {}
        self._waiters: list[Waiter] = []
        self._switches = FakeSwitches()
        self.watchers: list[Line] = []
        try:
            self._boot_id = HostClock().boot_id()
        except OSError:
            self._boot_id = ""
        self._operations: dict[type, Callable[[Line, int, Any], Reply | None]] = {
            model.LeaseRequest: self._lease,
            model.RenewRequest: self._renew,
            model.ReleaseRequest: self._release,
            model.CheckRequest: self._check,
            model.ListRequest: self._list,
            model.RevokeRequest: self._revoke,
            model.HeartbeatRequest: self._heartbeat,
            model.ResumeRequest: self._resume,
            model.WatchRequest: self._watch,
            model.UnwatchRequest: self._unwatch,
            model.UsageRequest: self._usage,
            model.InfoRequest: self._info,
        }

    def asked(self, line: Line, msgid: int, operation: str, params: dict[str, Any], null: str | None = None) -> None:
        """Decides and answers; a `lease` that waits is answered later.  `null`: the reason why nobody can tell now."""
        try:
            request = schema.parse(operation, params)
            if null is not None and isinstance(
                request, LeaseRequest | model.RenewRequest | model.ReleaseRequest | model.CheckRequest
            ):
                reply: Reply | None = rules.unknown(request, null)
            elif type(request) in self._operations:
                reply = self._operations[type(request)](line, msgid, request)
            else:
                raise PeerError("unknown_method", f"{operation} is not something FakeLeased can do")
        except PeerError as error:
            line.refuse(msgid, error)
        else:
            if reply is not None:
                line.answer(msgid, reply)

    # ---- time, and connections that end

    def due(self) -> float | None:
        """When the next thing happens by itself."""
        moments = [lease.deadline for lease in self._leases.values()] + [waiter.until for waiter in self._waiters]
        return min(moments + self._switches.due(), default=None)

    def tick(self) -> None:
        now = self._now()
        for key, lease in [*self._leases.items()]:
            if now >= lease.deadline:
                self.end(key, "lapsed")
        for scope in self._switches.fallen(now):
            held = self._of_scope(scope)
            for key in held:
                self.end(key, "switch_missed", "switch")
            self._switches.missed(scope, self._instant().wall, [(key, self._key_hash(key), lease) for key, lease in held.items()])
        for waiter in [*self._waiters]:
            if now >= waiter.until and waiter in self._waiters:
                self._waiters.remove(waiter)
                record = self._leases.get(waiter.request.key)
                ask = Ask(NAMESPACE)
                decision = rules.lease(record, waiter.request._replace(fence=None), ask, self._instant(), Fresh(0, 0, b""))
                waiter.line.answer(waiter.msgid, decision.reply)

    def hung_up(self, line: Line) -> None:
        self._waiters = [waiter for waiter in self._waiters if waiter.line is not line]
        self.watchers = [each for each in self.watchers if each is not line]
        for key, bound in [*self._bound.items()]:
            if bound is line:
                self.end(key, "released", "connection_closed")

    def end(self, key: str, change: str, reason: str = "") -> Lease | None:
        """The lease on `key`, ended; whoever waits first gets the key."""
        lease = self._leases.pop(key, None)
        if lease is None:
            return None
        self._bound.pop(key, None)
        if lease.rid and self._now() < lease.rid_until:
            self._spent[lease.rid] = (key, lease.holder, lease.rid_until)
        self._tell(change, key, lease, reason)
        for waiter in [*self._waiters]:
            if waiter.request.key == key:
                self._waiters.remove(waiter)
                now = self._instant()
                if self._is_spent(waiter.ask.rid):
                    waiter.line.answer(waiter.msgid, rules.refusal(None, key, waiter.request.holder, "spent", now))
                    continue
                waiter.line.answer(waiter.msgid, self._grant(waiter.line, waiter.request, waiter.ask))
                break
        return lease

    # ---- operations

    def _lease(self, line: Line, msgid: int, request: LeaseRequest) -> Reply | None:
        ask = self._ask(request)
        record = self._leases.get(request.key)
        if record is None and not ask.spent:
            return self._grant(line, request, ask)
        decision = rules.lease(record, request, ask, self._instant(), Fresh(0, 0, b""))
        if decision.change == rules.RENEWED:
            assert decision.lease is not None
            self._keep(line, request.key, decision.lease, rules.RENEWED)
        elif decision.change == rules.REPLAYED and record is not None and record.bind == model.BIND_CONNECTION:
            self._bound[request.key] = line
        older = [waiter for waiter in self._waiters if ask.rid and waiter.ask.rid == ask.rid]
        for waiter in older:
            waiter.line.answer(waiter.msgid, rules.unknown(waiter.request, "superseded"))
        if request.wait and decision.change == rules.REFUSED and decision.reply["reason"] in _QUEUED_FOR:
            newer = Waiter(line, msgid, request, ask, self._now() + request.wait)
            if older:
                self._waiters[self._waiters.index(older[0])] = newer
            else:
                self._waiters.append(newer)
            return None
        self._waiters = [waiter for waiter in self._waiters if waiter not in older]
        return decision.reply

    def _renew(self, line: Line, msgid: int, request: model.RenewRequest) -> Reply:
        ask = Ask(NAMESPACE, self._digests.proof(request.fence))
        decision = rules.renew(self._leases.get(request.key), request, ask, self._instant())
        if decision.lease is not None:
            self._keep(line, request.key, decision.lease, rules.RENEWED)
        return decision.reply

    def _release(self, line: Line, msgid: int, request: model.ReleaseRequest) -> Reply:
        ask = Ask(NAMESPACE, self._digests.proof(request.fence))
        decision = rules.release(self._leases.get(request.key), request, ask, self._instant())
        if decision.lease is not None:
            self.end(request.key, rules.RELEASED)
        return decision.reply

    def _check(self, line: Line, msgid: int, request: model.CheckRequest) -> Reply:
        waiting = sum(waiter.request.key == request.key for waiter in self._waiters)
        return rules.check(self._leases.get(request.key), request, self._instant(), waiting)

    def _list(self, line: Line, msgid: int, request: model.ListRequest) -> Reply:
        after = request.cursor or 0
        found = sorted(
            (lease.generation, key)
            for key, lease in self._leases.items()
            if lease.generation > after and request.scope in {None, lease.scope} and request.holder in {None, lease.holder}
        )
        entries = [self._listed(key) | ({"namespace": NAMESPACE} if request.all else {}) for _, key in found[: request.limit]]
        cursor = str(entries[-1]["generation"]) if len(found) > request.limit else None
        return {"leases": entries, "cursor": cursor}

    def _revoke(self, line: Line, msgid: int, request: model.RevokeRequest) -> Reply:
        key = request.key
        if request.key_hash is not None:
            key = next((each for each in self._leases if self._key_hash(each) == request.key_hash), None)
        record = self._leases.get(key) if key is not None and request.namespace in {None, NAMESPACE} else None
        decision = rules.revoke(record, self._instant())
        if decision.lease is not None and key is not None:
            self.end(key, rules.REVOKED, request.reason)
        return decision.reply

    def _heartbeat(self, line: Line, msgid: int, request: model.HeartbeatRequest) -> Reply:
        return self._switches.heartbeat(request, self._instant())

    def _resume(self, line: Line, msgid: int, request: model.ResumeRequest) -> Reply:
        leases = [self._listed(key) for key in self._of_scope(request.scope)]
        told = self._switches.told(request.scope, self._instant())
        return {"scope": request.scope, "empty": not leases and told is None, "leases": leases, "switch": told}

    def _watch(self, line: Line, msgid: int, request: model.WatchRequest) -> Reply:
        if line.watch is not None:
            raise PeerError("invalid_argument", "watch is on already for this connection: unwatch first, or open another")
        line.watch = request
        self.watchers.append(line)
        return {"watching": True, "seq": line.seq}

    def _unwatch(self, line: Line, msgid: int, request: model.UnwatchRequest) -> Reply:
        line.watch = None
        self.watchers = [each for each in self.watchers if each is not line]
        return {"watching": False}

    def _usage(self, line: Line, msgid: int, request: model.UsageRequest) -> Reply:
        nothing = {
            "refusals_billed": 0,
            "calls_billed": 0,
            "pending_upstream": 0,
            "oldest_pending_seconds": None,
            "dead_letters": 0,
        }
        return {"namespace": NAMESPACE, "currency": model.FREE["currency"], "amount": "0", **nothing}

    def _info(self, line: Line, msgid: int, request: model.InfoRequest) -> Reply:
        now = self._instant()
        return {
            "name": "leased",
            "version": VERSION,
            "namespace": NAMESPACE,
            "operator": True,
            "install_id": "fake",
            "clock": {"boottime": now.boot, "boot_id": now.boot_id, "wall": rfc3339(now.wall)},
            "uptime_seconds": now.boot - self._begun,
            "leases": len(self._leases),
            "waiting": len(self._waiters),
        }

    # ---- parts

    def _instant(self) -> Instant:
        now = self._now()
        return Instant(now, now, FIRST_WALL + now - self._begun, self._boot_id)

    def _key_hash(self, key: str) -> bytes:
        return self._digests.key_hash(NAMESPACE, key)

    def _ask(self, request: LeaseRequest) -> Ask:
        proof = b"" if request.fence is None else self._digests.proof(request.fence)
        if request.request_id is None:
            return Ask(NAMESPACE, proof)
        rid, mask = self._digests.rid(NAMESPACE, request.request_id)
        here = (request.key, request.holder)
        used = [(key, lease.holder) for key, lease in self._leases.items() if lease.rid == rid]
        used += [(waiter.request.key, waiter.request.holder) for waiter in self._waiters if waiter.ask.rid == rid]
        used += [self._spent[rid][:2]] if self._is_spent(rid) else []
        if any(each != here for each in used):
            raise PeerError("invalid_argument", "request_id was used for another key or holder: draw a new one for each attempt")
        return Ask(NAMESPACE, proof, rid, mask, self._is_spent(rid))

    def _is_spent(self, rid: bytes) -> bool:
        return rid in self._spent and self._now() < self._spent[rid][2]

    def _grant(self, line: Line, request: LeaseRequest, ask: Ask) -> Reply:
        now = self._instant()
        self._last = max(self._last + 1, int(now.wall * 1_000_000))
        fence = (int.from_bytes(os.urandom(8), "big") >> 1) | model.MIN_FENCE
        decision = rules.grant(request, ask, now, Fresh(self._last, fence, self._digests.proof(fence)))
        assert decision.lease is not None
        self._keep(line, request.key, decision.lease, rules.GRANTED)
        return decision.reply

    def _keep(self, line: Line, key: str, lease: Lease, change: str) -> None:
        self._leases[key] = lease
        if lease.bind == model.BIND_CONNECTION:
            self._bound[key] = line
        self._tell(change, key, lease, "")

    def _of_scope(self, scope: str) -> dict[str, Lease]:
        held = [(key, lease) for key, lease in self._leases.items() if lease.scope == scope]
        return dict(sorted(held, key=lambda item: item[1].generation))

    def _listed(self, key: str) -> Reply:
        return rules.listed(self._leases[key], key, self._key_hash(key), self._instant())

    def _tell(self, change: str, key: str, lease: Lease, reason: str) -> None:
        for line in self.watchers:
            watch = line.watch
            if watch is not None and watch.key in {None, key} and watch.scope in {None, lease.scope}:
                line.seq += 1
                event = {"seq": line.seq, "type": change, "key": key, "key_hash": self._key_hash(key).hex(), "scope": lease.scope}
                line.notify("event", {**event, "holder": lease.holder, "generation": lease.generation, "reason": reason or None})
