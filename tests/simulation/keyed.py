"""The judgement over one key: who was granted it when, who may have ended that, and whether any reply contradicts it."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import Counter, defaultdict
from itertools import pairwise
from typing import Any, Protocol

from recorded import LATCH, NEVER, Granted, Place, Record, Setter

FENCE_LOWEST = 2**53
FENCE_BEYOND = 2**63
GENERATION_BEYOND = 2**53
DEFAULT_TTL = 60.0
ROUNDING = 0.01  # seconds a printed duration may be off
BOOTTIME_ROUNDING = 0.001
REFUSALS = {"held", "same_label", "wrong_fence", "wrong_holder", "lapsed", "spent"}


class Circumstances(Protocol):
    """What the judge of one key needs to know of the whole history."""

    late_allowance: float
    check_boottime: bool

    def complain(self, rule: str, *records: Record) -> None: ...
    def decided_by(self, record: Record) -> float: ...
    def forgotten(self, grant: Granted, by: float) -> bool: ...
    def unclean_between(self, earliest: float, latest: float) -> bool: ...
    def ends_unseen(self, grant: Granted) -> float: ...


class KeyJudge:
    """Judges the `records` of one (namespace, key), given in the order sent."""

    def __init__(self, history: Circumstances, place: Place, records: list[Record]) -> None:
        self.history = history
        self.place = place
        self.records = records
        self.leases = [record for record in records if record.operation == "lease"]
        self.attempts: dict[tuple[str, object], list[Record]] = defaultdict(list)
        self.by_fence: dict[str, Granted] = {}
        self.by_generation: dict[int, Granted] = {}
        self.grants: list[Granted] = []
        self.highest: list[float] = []

    def judge(self) -> list[Granted]:
        for record in self.leases:
            if record.params.get("request_id") is not None and not record.renewal:
                self.attempts[record.params["holder"], record.params["request_id"]].append(record)
        self._gather_grants()
        for record in self.records:
            self._gather(record)
        self._seal()
        self._exclusion()
        for record in self.records:
            if isinstance(record.reply, dict):
                self._sighting(record)
        self._proofs_of_life()
        self._unknown_generations()
        for calls in self.attempts.values():
            self._repeats(calls)
        self._uses()
        return self.grants

    # -- putting the grants together -----------------------------------------------------------------------------------------

    def _gather_grants(self) -> None:
        bearing: dict[str, list[Record]] = defaultdict(list)
        for record in self.leases:
            self._shape(record)
            if record.grant:
                bearing[str(record.reply["fence"])].append(record)
        for fence, records in bearing.items():
            first = records[0]
            reply = first.reply
            lowest, highest = first.sent, min(record.by for record in records)
            request_id = first.params.get("request_id")
            for record in records[1:]:
                told = (record.reply["generation"], record.reply["holder"])
                if told != (reply["generation"], reply["holder"]) or record.params.get("request_id") is None:
                    self._complain("one fence, one grant (section 1: drawn anew for every acquisition)", first, record)
                elif (record.params["holder"], record.params["request_id"]) != (first.params["holder"], request_id):
                    self._complain(
                        "a grant replayed to another request_id (section 2: the same holder and request_id)", first, record
                    )
            if request_id is not None:
                lost = [call.sent for call in self.attempts[first.params["holder"], request_id] if call.undecided]
                lowest = min([lowest, *lost])
            grant = Granted(
                place=self.place,
                fence=fence,
                generation=reply["generation"],
                holder=reply["holder"],
                ttl=float(reply["ttl_seconds"]),
                scope=reply["scope"],
                lowest=lowest,
                highest=highest,
                setters=[Setter(lowest, highest, float(reply["ttl_seconds"]), True)],
                records=records,
                request_id=request_id,
                bearers={record.client for record in records},
            )
            self.by_fence[fence] = grant
            self.by_generation.setdefault(grant.generation, grant)
            self.grants.append(grant)
            self._boottime(grant.ttl, lowest, highest, *records)

    def _gather(self, record: Record) -> None:
        """Notes what `record` did, or may have done, to a grant."""
        if record.operation in ("lease", "renew"):
            self._gather_renewal(record)
        elif record.operation == "release":
            self._gather_release(record)
        elif record.operation == "revoke":
            named = self.by_generation.get(record.reply["generation"]) if record.answer else None
            if named:
                named.ended_maybe(record.sent)
                named.dies(record.by, "revoked")
            elif record.undecided:
                until = self.history.decided_by(record)
                for grant in self.grants:
                    if grant.lowest <= until:
                        grant.ended_maybe(record.sent)

    def _gather_renewal(self, record: Record) -> None:
        given = record.params.get("ttl_seconds")
        if record.renewal:
            reply = record.reply
            grant = self.by_fence.get(str(reply["fence"]))
            if record.fence != str(reply["fence"]):
                self._complain("a renewal answers another fence than was presented (section 2: the same fence)", record)
            if grant is None:
                self._complain("renewed with a fence nobody was granted (promise 6: only the fence's bearer renews)", record)
                return
            if reply["generation"] != grant.generation:
                self._complain(f"renewal changed generation {grant.generation} (section 1: unchanged by renewal)", record)
            if record.params["holder"] != grant.holder or reply["holder"] != grant.holder:
                self._complain("renewed for another holder (section 6: right fence, other holder: wrong_holder)", record)
            if given is not None and abs(float(given) - reply["ttl_seconds"]) > LATCH:
                self._complain("ttl on renewal is not exactly what was given (section 6)", record)
            grant.bearers.add(record.client)
            grant.setters.append(Setter(record.sent, record.by, float(reply["ttl_seconds"]), True))
            grant.presented_maybe(record.sent)
            grant.presented_surely(record.by)
            self._boottime(float(reply["ttl_seconds"]), record.sent, record.by, record)
        elif record.undecided and record.fence in self.by_fence:
            grant = self.by_fence[record.fence]
            ttl = math.nan if given is None else float(given)
            grant.bearers.add(record.client)
            grant.setters.append(Setter(record.sent, self.history.decided_by(record), ttl, False))
            grant.presented_maybe(record.sent)

    def _gather_release(self, record: Record) -> None:
        grant = self.by_fence.get(record.fence or "")
        if record.answer is True:
            if grant is None:
                self._complain("released with a fence nobody was granted (promise 6: only the fence's bearer releases)", record)
                return
            if record.reply["generation"] != grant.generation:
                self._complain(f"released another generation than the fence's {grant.generation} (section 2)", record)
            if record.params.get("holder", grant.holder) != grant.holder:
                self._complain("released for another holder (section 6: right fence, other holder: not_holder)", record)
            back = self.history.unclean_between(grant.lowest, record.by)  # promise 4: late by one ttl, a release may be forgotten
            if grant.dead_why == "released" and not back:
                self._complain(f"generation {grant.generation} released twice (section 6: own release repeated is expired)", record)
            grant.ended_maybe(record.sent)
            grant.presented_maybe(record.sent)
            grant.presented_surely(record.by)
            grant.dies(record.by, "released")
        elif record.undecided and grant:
            grant.ended_maybe(record.sent)
            grant.presented_maybe(record.sent)

    def _seal(self) -> None:
        self.grants.sort(key=lambda grant: grant.generation)
        for grant in self.grants:
            grant.ended_maybe(self.history.ends_unseen(grant))
            grant.seal()
        by = NEVER
        for grant in reversed(self.grants):  # decided in the order of generations, so by then this one was decided too
            by = min(by, grant.highest)
            self.highest.append(by)
        self.highest.reverse()

    # -- judging -------------------------------------------------------------------------------------------------------------

    def _exclusion(self) -> None:
        for (earlier, later), by in zip(pairwise(self.grants), self.highest[1:], strict=False):
            if earlier.lowest <= by and earlier.live_at(by):
                self._complain(
                    f"mutual exclusion (promise 1: at most one live lease): generation {later.generation} was granted by {by:.6f}, while "
                    f"{earlier.generation} lived until {earlier.shortest_deadline(by):.6f}",
                    earlier.records[0],
                    later.records[0],
                )
            earlier.dies(by, f"generation {later.generation} was granted")

    def _sighting(self, record: Record) -> None:
        """A reply that says who is live: compared with the latest grant certainly decided before the call was sent."""
        if record.grant or record.operation not in ("lease", "renew", "release", "check", "revoke") or record.answer is None:
            return
        generation = record.reply.get("generation")
        if record.answer is False and record.operation == "check":
            generation = None
        if record.answer is False and record.operation != "check":
            self._reason(record)
        named = self.by_generation.get(generation) if generation is not None else None
        if named:
            if record.by < named.lowest:
                self._complain(f"generation {generation} is named before it was asked for at {named.lowest:.6f}", record)
            if record.reply.get("held_by", named.holder) != named.holder:
                self._complain(
                    f"generation {generation} is {named.holder!r}'s (section 2: generation and expiry are the holder's)", record
                )
        index = bisect_right(self.highest, record.sent) - 1
        if index < 0 or generation == self.grants[index].generation:
            return
        grant = self.grants[index]
        if generation is not None and generation < grant.generation:
            return  # an older one named after this grant: _proofs_of_life says so
        if grant.live_at(record.by) and not self.history.forgotten(grant, record.by):
            self._complain(
                f"acknowledged generation {grant.generation} lost while live until {grant.shortest_deadline(record.by):.6f} "
                "(promises 2 and 4: never before its ttl, but by release, revocation, switch or bind)",
                grant.records[0],
                record,
            )
        grant.dies(record.by, "an answer showed it gone")

    def _reason(self, record: Record) -> None:
        """The reason of a refusal against the fence and holder presented."""
        reply, fence = record.reply, record.fence
        reason, generation = reply.get("reason"), reply.get("generation")
        named = self.by_generation.get(generation)
        if record.operation == "revoke" or reason == "spent":
            return
        if reason in ("lapsed", "expired"):
            if reason == "lapsed" and generation is not None:
                self._complain("lapsed with another lease live (section 2: lapsed is nothing live, else wrong_fence)", record)
            return
        if generation is None:
            self._complain(f"refused as {reason} with nothing live (section 2: refusal only while a lease is live)", record)
            return
        holder = record.params.get("holder", named.holder if named else None)
        if named and fence == named.fence and holder == named.holder:
            self._complain(
                f"the live fence's own bearer refused as {reason} (section 2: renewal; release of the live fence)", record
            )
        elif record.operation != "release":
            if fence is None:
                wanted = {"same_label" if reply["held_by"] == holder else "held"}
            elif named:
                wanted = {"wrong_holder" if fence == named.fence else "wrong_fence"}
            else:
                wanted = {"wrong_fence", "wrong_holder"}
            if reason not in wanted:
                self._complain(f"reason {reason}, not {'/'.join(sorted(wanted))} (section 2, section 6)", record)
            if reply["same_holder_label"] is not (reply["held_by"] == holder):
                self._complain("same_holder_label does not compare held_by with your own label (section 2)", record)
        elif reason != "not_holder":
            self._complain(f"release refused as {reason}, not not_holder (section 2)", record)

    def _proofs_of_life(self) -> None:
        """No reply shows a grant live after it certainly ended: a lapsed or ended lease is never revived."""
        for record in self.records:
            if record.answer is None or record.operation not in ("lease", "renew", "release", "check", "revoke"):
                continue
            if record.answer is False and record.operation == "check":
                continue
            grant = self.by_generation.get(record.reply.get("generation"))
            if grant is None:
                continue
            grant.last_proof = max(grant.last_proof, record.sent)
            superseded = grant.dead_why.endswith("was granted")
            if record.sent > grant.dead_by and (superseded or not self.history.unclean_between(grant.lowest, record.by)):
                why = f"{grant.dead_why} by {grant.dead_by:.6f}"
                self._complain(f"generation {grant.generation} shown live after it ended, {why} (section 1: never revived)", record)
            lapsed = grant.longest_deadline(record) + self.history.late_allowance
            left = record.reply.get("expires_in_seconds")
            if self.history.unclean_between(grant.lowest, record.by):
                continue
            if record.sent >= lapsed + LATCH:
                self._complain(
                    f"generation {grant.generation} shown live, but lapsed by {lapsed:.6f} (section 1: live is now < deadline)",
                    record,
                )
            elif left is not None and not record.renewal and not record.grant and left > lapsed - record.sent + ROUNDING:
                self._complain(
                    f"generation {grant.generation} shown with {left} s left, beyond its deadline {lapsed:.6f} (section 2)", record
                )

    def _unknown_generations(self) -> None:
        """A generation nobody was told must be the grant of a call whose answer was lost or null, one call each."""
        seen: dict[int, Record] = {}
        for record in self.records:
            generation = record.reply.get("generation") if isinstance(record.reply, dict) else None
            if (
                isinstance(generation, int)
                and record.answer is not None
                and record.operation != "use"
                and generation not in self.by_generation
            ):
                seen.setdefault(generation, record)
        unanswered: dict[str, list[float]] = defaultdict(list)
        for record in self.leases:
            if record.undecided:
                unanswered[record.params["holder"]].append(record.sent)
        counted: Counter[str | None] = Counter()
        for generation, record in sorted(seen.items(), key=lambda item: item[1].by):
            holder = record.reply.get("held_by")
            counted[holder] += 1
            if holder is None:
                possible = sum(bisect_right(sent, record.by) for sent in unanswered.values())
            else:
                possible = bisect_right(unanswered.get(holder, []), record.by)
            if counted[holder] > possible:
                self._complain(
                    f"generation {generation} is no grant of this key (section 2: generation and expiry are the holder's)", record
                )

    def _repeats(self, calls: list[Record]) -> None:
        """One request_id, one holder, one key: one grant, replayed until its fence is first presented, spent until its deadline."""
        grants = sorted({self.by_fence[call.reply["fence"]] for call in calls if call.grant}, key=lambda grant: grant.generation)
        for earlier, later in pairwise(grants):
            waited = any(float(record.params.get("wait_seconds", 0)) > 0 for record in later.records)
            if waited and earlier.presented_from <= later.highest:
                continue  # an ordinary wait begun after the presentation: the contract does not say what its grant is then
            if later.highest < earlier.lowest + earlier.ttl - LATCH and not self.history.unclean_between(
                earlier.lowest, later.highest
            ):
                self._complain(
                    "one request_id, two grants (section 2: the same grant again, and spent until its original deadline)",
                    earlier.records[0],
                    later.records[0],
                )
        lost = [call.sent for call in calls if call.undecided]
        for call in calls:
            if call.answer is None:
                continue
            spent = call.answer is False and call.reply.get("reason") == "spent"
            if spent and not any(grant.lowest <= call.by for grant in grants) and not any(sent <= call.by for sent in lost):
                self._complain("spent, though this request_id was never granted (section 2)", call)
            decided = [grant for grant in grants if grant.highest <= call.sent]
            if decided:
                self._repeat(call, decided[-1], spent, bool(lost))

    def _repeat(self, call: Record, grant: Granted, spent: bool, may_be_other: bool) -> None:
        history = self.history
        remembered = call.by < grant.lowest + grant.ttl - LATCH
        if call.grant and call.reply["fence"] == grant.fence:
            if grant.presented_by < call.sent:
                self._complain("replayed after its fence was presented (section 2: only until first presented with success)", call)
            return
        if call.fence is not None or call.answer is True:
            return
        if spent:
            if call.reply.get("generation") == grant.generation:
                self._complain(
                    f"spent, while its own generation {grant.generation} is live (section 2: after a release or lapse)", call
                )
            longest = grant.ttl + history.late_allowance + LATCH
            again = history.unclean_between(
                grant.lowest, call.sent
            )  # each may have given it its whole ttl once more, after a start no one saw
            if call.sent > grant.highest + longest and not again and not may_be_other:
                self._complain("spent past the grant's original deadline (section 2: remembered until then)", call)
            return
        if grant.live_at(call.by) and grant.presented_from >= call.by and not history.forgotten(grant, call.by):
            self._complain("a repeat refused instead of replayed (section 2: the same grant again until presented)", call)
        if grant.dead_by < call.sent and remembered and not history.unclean_between(grant.lowest, call.by):
            self._complain(
                f"a repeat of an ended grant ({grant.dead_why}) refused as {call.reply.get('reason')}, not spent (section 2)", call
            )

    def _uses(self) -> None:
        """Writes at a sink that compares generations: only a true grant is used, and no write lands after a newer one."""
        uses = [record for record in self.records if record.operation == "use" and record.answer is True]
        landed = sorted((record.by, record.params["generation"]) for record in uses)
        running: list[tuple[float, int]] = []
        for by, generation in landed:
            running.append((by, max(generation, running[-1][1] if running else generation)))
        for record in uses:
            generation = record.params["generation"]
            grant = self.by_generation.get(generation)
            if grant is None or not any(told.by <= record.sent and told.client == record.client for told in grant.records):
                self._complain("used without a true grant (section 2: acquired null is never permission to proceed)", record)
            index = bisect_right(running, (record.sent - LATCH, NEVER)) - 1
            if index >= 0 and running[index][1] > generation:
                self._complain(
                    f"a stale write landed after generation {running[index][1]}'s (section 1: refuse stale writers)", record
                )

    # -- shapes --------------------------------------------------------------------------------------------------------------

    def _shape(self, record: Record) -> None:
        reply: Any = record.reply
        if not isinstance(reply, dict):
            return
        if reply.get("acquired") is not True:
            if "fence" in reply:
                self._complain("a fence outside a grant (section 1: in the grant's own reply and nowhere else)", record)
            if reply.get("acquired") is None and (reply.get("charge") or {}).get("amount", "0") != "0":
                self._complain("an unknown was billed (section 2: never billed)", record)
            if reply.get("acquired") is False:
                self._refusal_shape(record)
            return
        fence, generation = reply["fence"], reply["generation"]
        if (
            not isinstance(fence, str)
            or not fence.isascii()
            or not fence.isdigit()
            or not FENCE_LOWEST <= int(fence) < FENCE_BEYOND
        ):
            self._complain("fence is not a decimal string of a 63-bit number from 2^53 (section 1)", record)
        if not isinstance(generation, int) or isinstance(generation, bool) or not 0 < generation < GENERATION_BEYOND:
            self._complain("generation is not an integer below 2^53 (section 1)", record)
        if (reply["key"], reply["holder"]) != (record.params["key"], record.params["holder"]):
            self._complain("a grant of another key or holder than asked for (section 2)", record)
        if reply["expires_in_seconds"] > reply["ttl_seconds"] + LATCH:
            self._complain("more time left than ttl_seconds (section 1: ttl counts from the grant)", record)
        asked = float(record.params.get("ttl_seconds", DEFAULT_TTL))
        if record.grant and record.params.get("request_id") is None and abs(reply["ttl_seconds"] - asked) > LATCH:
            self._complain(f"ttl_seconds is not the {asked} asked for (section 1: nothing is clamped silently)", record)

    def _refusal_shape(self, record: Record) -> None:
        reply = record.reply
        if reply["reason"] not in REFUSALS:
            self._complain(f"unknown reason {reply['reason']!r} (section 2)", record)
        left, wait = reply["expires_in_seconds"], reply["retry_after_seconds"]
        if (left is None) != (wait is None) or (left is not None and abs(max(left, 0.05) - wait) > ROUNDING):
            self._complain("retry_after_seconds is not the holder's remaining time, at least 0.05 (section 6)", record)

    def _boottime(self, ttl: float, lowest: float, highest: float, *records: Record) -> None:
        if not self.history.check_boottime:
            return
        for record in records:
            deadline = record.reply["expires_boottime"]
            if not lowest + ttl - BOOTTIME_ROUNDING <= deadline <= highest + ttl + BOOTTIME_ROUNDING:
                self._complain(
                    f"expires_boottime {deadline} is not the decision + ttl (section 2: the deadline now + ttl_seconds)", record
                )

    def _complain(self, rule: str, *records: Record) -> None:
        self.history.complain(f"{self.place[0]}/{self.place[1]}: {rule}", *records)
