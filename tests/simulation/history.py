"""A judge of concurrent histories of a real daemon, written from the contract alone.

Clients record each call with the instants they sent it and had its answer, on one boot clock. A decision fell somewhere between the
two, so a rule is called broken only when it is broken wherever in that interval each decision fell: every complaint is certain,
some breaches go unseen. Three notions carry it, per grant:

- its window: the decision lies in [lowest, highest]; any call with its request_id whose answer was lost may have made it;
- certain life at t: no call that may have ended it was sent before t, and every call that may have set its deadline last
  (the grant, a renewal, a renewal whose answer was lost) puts it beyond t, counted from when that call was SENT;
- sightings: a reply that says who is live at its decision (renewal, refusal, check, release, list) proves life for one grant and
  death for the others.

Generations are trusted for the order of grants on one key; that they follow real time is a rule of its own.
"""

from __future__ import annotations

import gc
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Mapping
from typing import Any, Literal

from keyed import KeyJudge
from recorded import LATCH, NEVER, Crash, Granted, Place, Record


class History:
    """Records of many clients and the judgement over them.

    `late_allowance` (seconds) excuses a daemon that was stopped that long: a lease may end that much late.
    `lost_die_with_daemon`: a call whose answer was lost is decided before the daemon's next end or never; pass False where a
    listening socket outlives the daemon. `undone_seconds`: how much of the latest arming a power cut may undo ("the last second's"; more
    while the ledger cannot be written). `check_boottime` compares expires_boottime with the clients' clock (CLOCK_BOOTTIME then).
    """

    def __init__(
        self,
        *,
        late_allowance: float = 0.0,
        lost_die_with_daemon: bool = True,
        check_boottime: bool = False,
        undone_seconds: float = 1.0,
    ) -> None:
        self.late_allowance = late_allowance
        self.lost_die_with_daemon = lost_die_with_daemon
        self.check_boottime = check_boottime
        self.undone_seconds = undone_seconds
        self.records: list[Record] = []
        self.crashes: list[Crash] = []
        self.closings: dict[object, list[float]] = defaultdict(list)
        self.violations: list[str] = []
        self._crash_times: list[float] = []
        self._unclean: list[Crash] = []
        self._misses: dict[Place, float] = {}
        self._blind_revocations: dict[str, list[Record]] = defaultdict(list)
        self._revoked_generations: dict[int, Record] = {}

    def add(
        self,
        client: object,
        operation: str,
        params: Mapping[str, Any],
        sent: float,
        received: float | None,
        reply: object,
        namespace: str = "local",
    ) -> None:
        """One call; `reply` None or "lost" where no answer came.

        Operation "use" is a write at a sink that compares generations: params key and generation, reply {"accepted": bool}.
        """
        if received is None or reply is None or reply == "lost":
            received, reply = None, None
        assert received is None or sent <= received, "answered before it was sent: not one clock"
        self.records.append(Record(client, operation, params, sent, received, reply, namespace))

    def crash(self, kind: Literal["kill", "power", "runtime_lost"], at: float, wait_out_seconds: float = 0.0) -> None:
        """The daemon was gone at `at` and started later; `wait_out_seconds` as configured, for the kinds that forget."""
        self.crashes.append(Crash(kind, at, wait_out_seconds))

    def closed(self, client: object, at: float) -> None:
        """From `at` on the connection or process of `client` may be gone, which may end its leases with a bind."""
        self.closings[client].append(at)

    def judge(self) -> list[str]:
        """Every certain breach, each with the rule it breaks and the calls that show it."""
        collecting = gc.isenabled()
        gc.disable()  # hundreds of thousands of small live objects, no cycles: collections would double the time
        try:
            return self._judge()
        finally:
            if collecting:
                gc.enable()

    def _judge(self) -> list[str]:
        self.violations = []
        self.crashes.sort(key=lambda crash: crash.at)
        self._crash_times = [crash.at for crash in self.crashes]
        self._unclean = [crash for crash in self.crashes if crash.forgets]
        self.records.sort(key=lambda record: record.sent)
        by_place: dict[Place, list[Record]] = defaultdict(list)
        for record in self.records:
            if "key" in record.params:
                by_place[record.place].append(record)
            elif record.operation == "list" and isinstance(record.reply, dict):
                for listed in _listed(record):
                    by_place[listed.place].append(listed)
        self._gather_switches()
        self._gather_blind_revocations()
        grants: list[Granted] = []
        for place, records in by_place.items():
            grants += KeyJudge(self, place, records).judge()
        self._numbers(grants)
        self._borrowed_request_ids(grants)
        self._waiting_out(grants)
        self._bills()
        return self.violations

    # -- circumstances the judge of one key asks for -------------------------------------------------------------------------

    def complain(self, rule: str, *records: Record) -> None:
        self.violations.append(f"{rule}: {'; '.join(map(str, records))}" if records else rule)

    def decided_by(self, record: Record) -> float:
        """When `record` was decided at the latest, if it ever was."""
        if not record.undecided:
            return record.by
        if not self.lost_die_with_daemon:
            return NEVER
        index = bisect_left(self._crash_times, record.sent)
        return self._crash_times[index] if index < len(self._crash_times) else NEVER

    def forgotten(self, grant: Granted, by: float) -> bool:
        """Whether a crash before `by` may have made the daemon forget `grant` (promise 4: ttl within wait_out only)."""
        return any(grant.lowest <= crash.at <= by and grant.shortest_ttl <= crash.wait_out_seconds for crash in self._unclean)

    def unclean_between(self, earliest: float, latest: float) -> bool:
        return any(earliest <= crash.at <= latest for crash in self._unclean)

    def ends_unseen(self, grant: Granted) -> float:
        """The earliest instant at which its scope's switch, its bind or a revocation by key_hash may have ended `grant`."""
        ends = [NEVER]
        if grant.scope is not None:
            ends.append(self._misses.get((grant.place[0], grant.scope), NEVER))
        if any(record.params.get("bind", "none") != "none" for record in grant.records):
            ends += [at for bearer in grant.bearers for at in self.closings.get(bearer, []) if at >= grant.lowest]
        ends += [record.sent for record in self._blind_revocations[grant.place[0]] if self.decided_by(record) >= grant.lowest]
        revoked = self._revoked_generations.get(grant.generation)
        if revoked:
            ends.append(revoked.sent)
            grant.dies(revoked.by, "revoked")
        return min(ends)

    def _gather_switches(self) -> None:
        """Per (namespace, scope), the earliest instant at which its dead-man switch may have been missed."""
        beats: dict[Place, list[Record]] = defaultdict(list)
        for record in self.records:
            if record.operation == "heartbeat" and not (isinstance(record.reply, str) and not record.undecided):
                beats[record.namespace, record.params["scope"]].append(record)
        self._misses = {}
        for place, records in beats.items():
            for index, record in enumerate(records):
                if record.params.get("disarm"):
                    continue
                due = record.sent + float(record.params["expect_within_seconds"])
                decided = record.by if isinstance(record.reply, dict) else NEVER
                standing = [later for later in records[index + 1 :] if not self._undone(later)]
                if due < self._misses.get(place, NEVER) and not _relieved(standing, decided, due):
                    self._misses[place] = due

    def _undone(self, record: Record) -> bool:
        """Whether a power cut may have undone this arming."""
        return self.unclean_between(record.sent, record.by + self.undone_seconds)

    def _gather_blind_revocations(self) -> None:
        self._blind_revocations.clear()
        self._revoked_generations.clear()
        for record in self.records:
            if record.operation == "revoke" and "key" not in record.params:
                if record.answer is True:
                    self._revoked_generations[record.reply["generation"]] = record
                elif record.undecided:
                    self._blind_revocations[record.params.get("namespace", record.namespace)].append(record)

    # -- rules over all keys -------------------------------------------------------------------------------------------------

    def _numbers(self, grants: list[Granted]) -> None:
        """Fences and generations: never twice, generations in real-time order over all keys."""
        fences: dict[str, Granted] = {}
        for grant in grants:
            if grant.fence in fences:
                self.complain("one fence, one grant (section 1: drawn anew)", fences[grant.fence].records[0], grant.records[0])
            fences[grant.fence] = grant
        grants.sort(key=lambda grant: grant.generation)
        before: Granted | None = None
        latest: Granted | None = None  # of the lower generations the one that was asked for last
        for grant in grants:
            if before and before.generation == grant.generation:
                self.complain("one generation, two grants (section 1: strictly larger)", before.records[0], grant.records[0])
            elif latest and grant.highest < latest.lowest:
                self.complain("generations go back (promise 3: strictly larger)", grant.records[0], latest.records[0])
            if latest is None or grant.lowest > latest.lowest:
                latest = grant
            before = grant

    def _borrowed_request_ids(self, grants: list[Granted]) -> None:
        """A request_id remembered for one key and holder is invalid_argument for another."""
        owners: dict[tuple[str, object], list[Granted]] = defaultdict(list)
        for grant in grants:
            if grant.request_id is not None:
                owners[grant.place[0], grant.request_id].append(grant)
        for record in self.records:
            request_id = record.params.get("request_id")
            if record.operation != "lease" or request_id is None or record.answer is None or record.renewal:
                continue
            for grant in owners.get((record.namespace, request_id), []):
                same = grant.place == record.place and grant.holder == record.params["holder"]
                remembered = grant.highest <= record.sent and record.by < grant.lowest + grant.ttl - LATCH
                if not same and remembered and not self.unclean_between(grant.lowest, record.by):
                    self.complain(
                        "a request_id reused with another key or holder (section 2: invalid_argument)", grant.records[0], record
                    )

    def _waiting_out(self, grants: list[Granted]) -> None:
        """After a crash that forgets, no grant of any key until the leases it may have forgotten would have lapsed (promise 4).  One that was
        ever longer than what is waited out is not forgotten: it comes back, and nothing waits for it."""
        for crash in self._unclean:
            short = [
                grant
                for grant in grants
                if grant.highest <= crash.at
                and grant.longest_ttl(crash.at) <= crash.wait_out_seconds
                and grant.last_proof <= crash.at
            ]
            short = [grant for grant in short if grant.live_at(crash.at)]
            if not short:
                continue
            last = max(short, key=lambda grant: grant.shortest_deadline(crash.at))
            until = last.shortest_deadline(crash.at)
            for grant in grants:
                if grant.lowest >= crash.at and grant.highest < until - LATCH:
                    self.complain(
                        f"granted before {until:.6f}, when generation {last.generation} would have lapsed (promise 4: nothing is granted)",
                        last.records[0],
                        grant.records[0],
                    )

    def _bills(self) -> None:
        """A refusal is billed the first time for a key and label; one fact is one event id (a power cut may bill it again)."""
        facts: dict[tuple[Place, str], Record] = {}
        events: dict[str, tuple[Place, str]] = {}
        for record in self.records:
            charge = record.reply.get("charge") if isinstance(record.reply, dict) else None
            if not charge or charge["amount"] == "0":
                continue
            if record.operation != "lease" or record.answer is not False or record.reply["reason"] == "spent":
                self.complain("billed what is free (section 4: only refusals by lease, spent not)", record)
                continue
            fact = (record.place, record.params["holder"])
            first = facts.setdefault(fact, record)
            if first is not record:
                if first.reply["charge"]["event_id"] != charge["event_id"]:
                    self.complain("one fact, two events (promise 8)", first, record)
                elif not self.unclean_between(first.sent, record.by):
                    self.complain("billed twice (section 4: being refused again is free, for ever)", first, record)
            if events.setdefault(charge["event_id"], fact) != fact:
                self.complain("one event id, two facts (section 4)", record)


def _relieved(records: list[Record], decided: float, due: float) -> bool:
    """Whether one of the later heartbeats `records` was certainly decided before the switch fell due."""
    for later in records:
        if later.sent >= due:
            return False
        if later.sent > decided and isinstance(later.reply, dict) and later.by < due:
            return True
    return False


def _listed(record: Record) -> list[Record]:
    """A list entry says what a check of its key would have said."""
    return [
        Record(
            record.client,
            "check",
            {"key": entry["key"]},
            record.sent,
            record.received,
            {
                "held": True,
                "held_by": entry["holder"],
                "generation": entry["generation"],
                "expires_in_seconds": entry["expires_in_seconds"],
            },
            entry.get("namespace", record.namespace),
        )
        for entry in record.reply["leases"]
        if entry["key"] is not None
    ]
