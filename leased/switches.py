"""Dead-man switches: an alarm on a scope, re-armed by each heartbeat; missed, the scope's leases go back, exactly once.

The miss and its releases are one transaction: the switch is unarmed by the same commit that ends the leases, and only leases that
were the scope's at that moment end.  The ledger hears of changes within a second, behind the answer.
"""

from __future__ import annotations

from heapq import heappop, heappush
from typing import Final

import structlog

from leased import model, rules
from leased.calls import Call
from leased.clock import rfc3339
from leased.errors import PeerError
from leased.gate import Unknown
from leased.lane import Outcome
from leased.lessor import Lessor
from leased.model import Reply
from leased.state.records import RecordDamaged
from leased.state.switch_records import MAX_TOLD, Switch, decode_switch, encode_switch

log = structlog.get_logger()

START_GRACE_SECONDS: Final = 10.0  # nobody could reach a daemon that was down: a switch does not fall before they had a chance
SWITCH_MISSED: Final = "switch_missed"


class Switches:
    """All switches, by their key in the stores.  Changed only after the commit they belong to, like the index."""

    def __init__(self, lessor: Lessor, max_per_namespace: int) -> None:
        self._lessor = lessor
        self.max_per_namespace = max_per_namespace
        self._all: dict[bytes, Switch] = {}
        self._due: list[tuple[float, bytes]] = []
        self._spaces: dict[str, int] = {}
        self._texts: dict[bytes, dict[bytes, str]] = {}  # of the keys the last miss released
        self._unwritten: dict[bytes, Switch | None] = {}
        lessor.operations[model.HeartbeatRequest] = self.heartbeat
        lessor.operations[model.ResumeRequest] = self.resume

    @property
    def armed(self) -> int:
        return sum(switch.armed for switch in self._all.values())

    def next_due(self) -> float | None:
        while self._due:
            due, key = self._due[0]
            switch = self._all.get(key)
            if switch is not None and switch.armed and switch.due == due:
                return due
            heappop(self._due)
        return None

    def load(self) -> None:
        """What the stores remember, at the start.  A switch of this boot keeps its due time, but for one grace after a restart; one
        of another boot gets its whole time again."""
        lessor = self._lessor
        now = lessor.instant()
        changed: list[tuple[bytes, Switch]] = []
        with lessor.leases.environment.begin() as transaction:
            for key, raw in transaction.cursor(db=lessor.leases.switches):
                try:
                    switch = decode_switch(bytes(raw))
                except RecordDamaged as error:
                    log.error("record.set_aside", table="switches", key_hash=bytes(key).hex(), error=str(error))
                    continue
                started = _after_start(switch, now.boot, now.boot_id)
                if started != switch:
                    changed.append((bytes(key), started))
                self._keep(bytes(key), started)
                self._unwritten[bytes(key)] = started
        if changed:
            lessor.lane.run(self._store_all, changed)

    def _store_all(self, switches: list[tuple[bytes, Switch]]) -> None:
        for key, switch in switches:
            self._lessor.lane.transaction.put(key, encode_switch(switch), db=self._lessor.leases.switches)

    # ---- operations

    def heartbeat(self, call: Call, request: model.HeartbeatRequest) -> None:
        lessor = self._lessor
        lessor.gate.admit_reading()
        now = lessor.now
        namespace = call.identity.namespace
        key = lessor.digests.scope_key(namespace, request.scope)
        before = self._all.get(key)
        agent_id = request.agent_id if request.agent_id is not None else before.agent_id if before is not None else None
        base = before or Switch(namespace, request.scope, False, 0.0, 0.0, now.boot_id)
        if request.disarm:
            switch = base._replace(armed=False, agent_id=agent_id, due=0.0)
            if before is None:
                lessor.lane.after(call.answer, self._told(switch))
                return
        else:
            assert request.expect_within is not None
            if (
                before is None
                and self._spaces.get(namespace, 0) >= self.max_per_namespace
                and not self._forget_oldest_miss(namespace)
            ):
                raise PeerError(
                    "rate_limited",
                    f"scope cannot be armed: {self.max_per_namespace} switches are armed (limits.max_switches_per_namespace)",
                )
            if not lessor.has_room():
                raise Unknown("full")
            due = now.boot + request.expect_within
            switch = base._replace(
                armed=True, agent_id=agent_id, expect_within=request.expect_within, due=due, boot_id=now.boot_id, graced=False
            )
        self._put(key, switch)
        lessor.lane.after(call.answer, self._told(switch))

    def _forget_oldest_miss(self, namespace: str) -> bool:
        """Scopes are often named after a task, so those that were missed once would fill the namespace for ever.  False: all are armed."""
        fallen = ((each.missed_wall, key) for key, each in self._all.items() if each.namespace == namespace and not each.armed)
        _, key = min(fallen, default=(0.0, b""))
        if key:
            self._put(key, self._all[key]._replace(missed_wall=0.0))
        return key != b""

    def resume(self, call: Call, request: model.ResumeRequest) -> None:
        """`resume_packet`: what the scope holds, and what its switch did."""
        lessor = self._lessor
        lessor.gate.admit_reading()
        namespace = call.identity.namespace
        entries: list[Reply] = []
        for key_hash in lessor.index.of_scope(namespace, request.scope)[:MAX_TOLD]:
            record = lessor.record(key_hash)
            if record is not None and record.scope == request.scope:
                entries.append(rules.listed(record, lessor.index.texts.get(key_hash), key_hash, lessor.now))
        key = lessor.digests.scope_key(namespace, request.scope)
        switch = self._all.get(key)
        told: Reply | None = None
        if switch is not None:
            told = self._told(switch)
            del told["scope"]
            texts = self._texts.get(key, {})
            told["released"] = [
                {"key": texts.get(key_hash), "key_hash": key_hash.hex(), "generation": generation}
                for key_hash, generation in switch.released
            ]
        reply = {"scope": request.scope, "empty": not entries and told is None, "leases": entries, "switch": told}
        lessor.lane.after(call.answer, reply)

    def _told(self, switch: Switch) -> Reply:
        now = self._lessor.now
        remaining = max(0.0, switch.due - now.boot)
        return {
            "scope": switch.scope,
            "armed": switch.armed,
            "agent_id": switch.agent_id,
            "due_at": rfc3339(now.wall + remaining) if switch.armed else None,
            "due_in_seconds": remaining if switch.armed else None,
            "last_missed_at": rfc3339(switch.missed_wall) if switch.missed_wall else None,
        }

    # ---- misses

    def fall(self) -> None:
        """Every switch that is due, each in a transaction of its own.  One that cannot be written is tried again at the next tick."""
        lessor = self._lessor
        while (due := self.next_due()) is not None and due <= lessor.now.judged:
            key = heappop(self._due)[1]
            if lessor.lane.run(self._miss, key) is not Outcome.COMMITTED:
                heappush(self._due, (due, key))
                return

    def _miss(self, key: bytes) -> None:
        lessor = self._lessor
        switch = self._all[key]
        released: list[tuple[bytes, int]] = []
        texts: dict[bytes, str] = {}
        for key_hash in lessor.index.of_scope(switch.namespace, switch.scope):
            record = lessor.record(key_hash)
            if record is None or record.scope != switch.scope:
                continue
            if (text := lessor.index.texts.get(key_hash)) is not None and len(released) < MAX_TOLD:
                texts[key_hash] = text
            released.append((key_hash, record.generation))
            lessor.end(key_hash, record, SWITCH_MISSED, "switch")
            if lessor.queues:
                lessor.pass_on(key_hash)
        lessor.store_last()
        self._put(
            key,
            switch._replace(
                armed=False, due=0.0, missed_wall=lessor.now.wall, released=tuple(released[:MAX_TOLD]), released_count=len(released)
            ),
        )
        lessor.lane.after(self._texts.__setitem__, key, texts)
        lessor.lane.after(_say_missed, key, len(released))

    # ---- the stores

    def _put(self, key: bytes, switch: Switch) -> None:
        """Staged, and known at once to later decisions of the same batch; a switch that says nothing any more (unarmed and never missed)
        is forgotten."""
        lessor = self._lessor
        before = self._all.get(key)
        lessor.lane.on_abort(lambda: self._forget(key) if before is None else self._keep(key, before))
        if switch.armed or switch.missed_wall:
            lessor.lane.transaction.put(key, encode_switch(switch), db=lessor.leases.switches)
            self._keep(key, switch)
        else:
            lessor.lane.transaction.delete(key, db=lessor.leases.switches)
            self._forget(key)

    def _keep(self, key: bytes, switch: Switch) -> None:
        if key not in self._all:
            self._spaces[switch.namespace] = self._spaces.get(switch.namespace, 0) + 1
        self._all[key] = switch
        self._unwritten[key] = switch
        if switch.armed:
            heappush(self._due, (switch.due, key))
            if len(self._due) > 64 and len(self._due) > 4 * len(
                self._all
            ):  # most are of heartbeats that have been answered by later ones
                self._due = sorted((each.due, name) for name, each in self._all.items() if each.armed)

    def _forget(self, key: bytes) -> None:
        switch = self._all.pop(key, None)
        self._texts.pop(key, None)
        if switch is not None:
            self._spaces[switch.namespace] -= 1
            self._unwritten[key] = None

    def each_second(self) -> None:
        """Tell the ledger what has changed; at a stop too."""
        unwritten, self._unwritten = self._unwritten, {}
        for key, switch in unwritten.items():
            self._lessor.journal.append(("switch", key, None if switch is None else encode_switch(switch)))


def _say_missed(key: bytes, released: int) -> None:
    log.warning("scope.switch_missed", scope_hash=key.hex(), released=released)


def _after_start(switch: Switch, boot: float, boot_id: str) -> Switch:
    if not switch.armed:
        return switch
    if switch.boot_id != boot_id:
        return switch._replace(due=boot + switch.expect_within, boot_id=boot_id, graced=False)
    if switch.due < boot + START_GRACE_SECONDS and not switch.graced:
        return switch._replace(due=boot + START_GRACE_SECONDS, graced=True)
    return switch
