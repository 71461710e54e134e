"""What must be true of a stopped state, whatever crash or power cut came before: each rule a function from contents to findings.

The rules follow from the order in which the daemon writes: `leases` commits before any answer leaves, the ledger is written behind it, a
long lease is told of only when the ledger has it, any lease only when the ledger's mark is not below its generation, and deletes ride
behind.  So the ledger may hold too much and never too little.
Instants are CLOCK_BOOTTIME seconds.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from enum import Enum
from typing import Any, Final, NamedTuple

from leased.model import (
    BIND_NAMES,
    MAX_HOLDER_BYTES,
    MAX_SCOPE_BYTES,
    MAX_TTL_SECONDS,
    MIN_TTL_SECONDS,
    Lease,
)
from leased.state.leases import RESERVED_PAGES
from leased.state.ledger import NOT_A_COPY
from leased.state.reading import RESTORE, Finding, LeasesContents, LedgerContents
from leased.state.recovery import NEVER_STARTED

SLACK_SECONDS: Final = 0.001


class Host(NamedTuple):
    """Where and when the state is looked at; `wait_out` is the configured one."""

    boot: float
    boot_id: str
    wait_out: float


class Match(Enum):
    """How the volatile state stands to the ledger.  Only the first two let one be measured by the other."""

    SAME = "of the start the ledger last saw"
    NEXT = "one step before the start the ledger last saw, as a crash during a start leaves it"
    LEDGER_BEHIND = "of a later start than the ledger: an older copy of the ledger was put back"
    LEASES_BEHIND = "of an earlier start than the ledger: an older copy of the volatile state was put back"
    UNFINISHED = "made anew by a start that did not get as far as the ledger"
    OTHER = "of another incarnation than the ledger: they do not belong together"


def match(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> Match:
    start, following, seen = ours["start"], ours["next_start"], theirs["start"]
    if ours["incarnation"] != theirs["incarnation"]:
        return Match.UNFINISHED if start == NEVER_STARTED else Match.OTHER
    if seen == start:
        return Match.SAME
    if seen == following:
        return Match.NEXT
    return Match.LEDGER_BEHIND if seen.number < start.number else Match.LEASES_BEHIND


def of_the_ledger(ledger: LedgerContents, path: str) -> Iterator[Finding]:
    """The ledger alone."""

    def finding(code: str, text: str) -> Finding:
        return Finding(f"ledger.{code}", path, text)

    for key_hash, (lease, remaining) in ledger.rows.items():
        name = named(key_hash, lease)
        for text in out_of_bounds(lease):
            yield finding("bounds", f"{name} {text}: {RESTORE['ledger']}")
        if remaining != NOT_A_COPY and not (0.0 < remaining <= lease.ttl + SLACK_SECONDS):
            yield finding("bounds", f"{name} had {remaining!r} seconds left at the stop, of {lease.ttl!r}: {RESTORE['ledger']}")
    yield from (
        finding("generation_twice", text) for text in twice((row.lease.generation, key) for key, row in ledger.rows.items())
    )
    meta = ledger.meta
    if meta is None:
        return
    for key_hash, (lease, remaining) in ledger.rows.items():
        name = named(key_hash, lease)
        if lease.generation > meta["mark"]:
            yield finding(
                "above_mark",
                f"{name} is above the mark {meta['mark']}, up to which generations were handed out: {RESTORE['ledger']}",
            )
        if remaining != NOT_A_COPY and not meta["clean"] and not meta["restored"]:
            yield finding(
                "copy",
                f"{name} is a copy of a stop in order, but the ledger is not marked clean: after a reboot it lives its whole ttl again",
            )
        if remaining == NOT_A_COPY and meta["clean"]:
            yield finding(
                "not_copied", f"{name} is not a copy, though the ledger is marked clean: after a reboot it does not come back"
            )
        if remaining != NOT_A_COPY and lease.unflushed:
            yield finding("copy", f"{name} was copied at a stop before it was flushed: nobody may have been told of it")


def of_the_leases(leases: LeasesContents, path: str, host: Host, file_pages: int) -> Iterator[Finding]:
    """The volatile state alone."""

    def finding(code: str, text: str) -> Finding:
        return Finding(f"leases.{code}", path, f"{text}: {RESTORE['leases']}")

    here = of_this_boot(leases, host)
    if leases.meta is not None and leases.meta["boot_id"] == host.boot_id and not here:
        yield finding(
            "tick", f"its last tick {leases.tick!r} is ahead of the boot clock {host.boot!r}, though the boot is the same"
        )
    for key_hash, lease in leases.rows.items():
        name = named(key_hash, lease)
        for text in out_of_bounds(lease):
            yield finding("bounds", f"{name} {text}")
        if here and lease.deadline > host.boot + lease.ttl + SLACK_SECONDS:
            yield finding("bounds", f"{name} has {lease.deadline - host.boot:.3f} seconds left, of a ttl of {lease.ttl!r}")
        if here and lease.rid and lease.rid_until > host.boot + MAX_TTL_SECONDS + SLACK_SECONDS:
            yield finding("bounds", f"{name} remembers its request_id for more than the longest ttl")
        if leases.last is not None and lease.generation > leases.last:
            yield finding("above_last", f"{name} is above {leases.last}, the last generation handed out")
    if leases.last is None and leases.rows:
        yield finding("no_last", "it has leases but does not say which generation was the last")
    yield from (finding("generation_twice", text) for text in twice((row.generation, key) for key, row in leases.rows.items()))
    if not here:
        return
    live = {key: lease for key, lease in leases.rows.items() if lease.deadline > host.boot}
    asked = [(lease.rid, key) for key, lease in live.items() if lease.rid]
    yield from (finding("rid_twice", text) for text in twice(asked, "one request_id"))
    for rid, key_hash in asked:
        tombstone = leases.tombstones.get(rid)
        if tombstone is not None and tombstone.until > host.boot:
            yield finding("rid_spent", f"{named(key_hash, live[key_hash])} has a request_id that is also remembered as spent")
    for rid, tombstone in leases.tombstones.items():
        if not math.isfinite(tombstone.until) or tombstone.until > host.boot + MAX_TTL_SECONDS + SLACK_SECONDS:
            yield finding("bounds", f"the spent request_id {rid.hex()} is remembered for more than the longest ttl")
    if file_pages - leases.used_pages <= RESERVED_PAGES:
        yield Finding(
            "leases.room",
            path,
            f"{file_pages - leases.used_pages} of {file_pages} pages are free and {RESERVED_PAGES} are kept for releases: nothing can be "
            "granted until leases end; raise max_leases",
        )
    if unflushed := sum(lease.unflushed for lease in live.values()):
        yield Finding(
            "leases.unflushed",
            path,
            f"live leases that wait for their flush: {unflushed} (nothing true was said of them yet; the next start flushes them first)",
            note=True,
        )


def of_both(ledger: LedgerContents, leases: LeasesContents, path: str, host: Host) -> Iterator[Finding]:
    """The one measured by the other.  Nothing to say of a restored ledger (both sides' leases are discarded) or of a volatile state of
    another boot."""
    theirs, ours = ledger.meta, leases.meta
    if theirs is None or ours is None:
        return

    def finding(code: str, text: str) -> Finding:
        return Finding(f"both.{code}", path, text)

    for field, what in (("install_id", "install id"), ("secret", "hashing secret")):
        if theirs[field] != ours[field]:
            yield finding(
                "install",
                f"the {what} of the volatile state is not the ledger's: it is of another installation: {RESTORE['leases']}",
            )
    if theirs["restored"] or not of_this_boot(leases, host):
        return
    how = match(ours, theirs)
    if how not in {Match.SAME, Match.NEXT}:
        text = f"the volatile state is {how.value}; the next start discards it and waits"
        if how is Match.LEDGER_BEHIND:
            text = f"the volatile state is {how.value}; the next start brings the ledger up to it"
        yield Finding("both.match", path, text, note=how is Match.UNFINISHED)
        return
    yield from _rows_of_both(ledger, leases, path, host)


def _rows_of_both(ledger: LedgerContents, leases: LeasesContents, path: str, host: Host) -> Iterator[Finding]:
    def finding(code: str, text: str) -> Finding:
        return Finding(f"both.{code}", path, text)

    assert ledger.meta is not None
    live = {key: lease for key, lease in leases.rows.items() if lease.deadline > host.boot}
    for key_hash, lease in live.items():
        name = named(key_hash, lease)
        there = ledger.rows[key_hash].lease if key_hash in ledger.rows else None
        promised = lease.previous_ttl if lease.unflushed else lease.ttl  # 0.0: nobody was told of it yet
        same = there is not None and there.generation == lease.generation
        told = promised > 0.0
        if told and lease.generation > ledger.meta["mark"]:
            yield finding(
                "mark",
                f"{name} was told of, above the ledger's mark {ledger.meta['mark']}: after a power cut its generation may come again",
            )
        if promised > ledger.meta["wait_out"] and not (same and there is not None and there.ttl >= promised):
            has = "does not have it" if not same or there is None else f"has it with {there.ttl:g} s"
            yield finding(
                "long_missing",
                f"{name} was promised for {promised:g} s, longer than the {ledger.meta['wait_out']:g} s that are waited out, and the ledger "
                f"{has}: start the daemon (it writes it first) before the power can fail",
            )
        elif ledger.meta["clean"] and not same:
            yield finding(
                "clean_missing", f"{name} is live, but the ledger is marked clean without it: a reboot now would forget it"
            )
        if there is not None and not same and not lease.unflushed:
            yield finding(
                "other_generation",
                f"{name} was told of while the ledger still held generation {there.generation} of its key: after a power cut that one comes back",
            )
    late = 0
    for key_hash, (lease, _) in ledger.rows.items():
        if leases.last is not None and lease.generation > leases.last:
            yield finding(
                "ledger_ahead",
                f"{named(key_hash, lease)} is in the ledger, and the volatile state never handed it out: {RESTORE['leases']}",
            )
        late += key_hash not in live
    if late:
        yield Finding(
            "both.late_deletes",
            path,
            f"late deletes: {late} (leases that have ended and are still in the ledger; deletes ride behind, and the next start sends them)",
            note=True,
        )


def next_start(ledger: LedgerContents, leases: LeasesContents | None, host: Host) -> str:
    """What the next start will do, in a sentence."""
    theirs = ledger.meta
    ours = leases.meta if leases is not None and of_this_boot(leases, host) else None
    if theirs is None:
        return "the next start is the first one" if ours is None else "the next start rebuilds the ledger from the volatile state"
    if theirs["restored"]:
        wait = "nothing is waited for" if theirs["restored"] == 2 else f"nothing is granted for {MAX_TTL_SECONDS:.0f} s"
        return f"the next start takes the restored backup: no lease comes back, and {wait}"
    seconds = max(theirs["wait_out"], host.wait_out)
    if ours is not None and match(ours, theirs) in {Match.SAME, Match.NEXT, Match.LEDGER_BEHIND}:
        seconds = max(0.0, ours["no_grant_before"] - host.boot)
        story = "the next start keeps the volatile state"
    elif theirs["clean"]:
        seconds = 0.0 if ours is None else seconds
        story = "the next start makes the volatile state anew from a ledger that was stopped in order"
    else:
        story = "the next start makes the volatile state anew from the ledger"
    return f"{story}; " + (f"nothing is granted for {seconds:.0f} s" if seconds else "nothing is waited for")


def of_this_boot(leases: LeasesContents, host: Host) -> bool:
    return leases.meta is not None and leases.meta["boot_id"] == host.boot_id and (leases.tick or 0.0) <= host.boot


def named(key_hash: bytes, lease: Lease) -> str:
    return f"the lease of key hash {key_hash.hex()} (generation {lease.generation})"


def out_of_bounds(lease: Lease) -> Iterator[str]:
    """What no daemon would have written."""
    if not MIN_TTL_SECONDS <= lease.ttl <= MAX_TTL_SECONDS:
        yield f"has a ttl of {lease.ttl!r} seconds, outside {MIN_TTL_SECONDS:g} to {MAX_TTL_SECONDS:.0f}"
    if not (math.isfinite(lease.deadline) and lease.deadline >= 0.0):
        yield f"has the deadline {lease.deadline!r}"
    if lease.generation < 1:
        yield "has no generation"
    if not lease.namespace or not 1 <= len(lease.holder.encode()) <= MAX_HOLDER_BYTES:
        yield "has no namespace or no holder"
    if lease.scope is not None and not 1 <= len(lease.scope.encode()) <= MAX_SCOPE_BYTES:
        yield "has a scope that is empty or too long"
    if lease.bind >= len(BIND_NAMES):
        yield f"is bound in a way nobody knows ({lease.bind})"
    if (lease.previous_ttl or lease.previous_deadline) and not lease.unflushed:
        yield "keeps what a failed flush would give back, though it is flushed"
    if lease.previous_ttl and not MIN_TTL_SECONDS <= lease.previous_ttl <= MAX_TTL_SECONDS:
        yield f"had a ttl of {lease.previous_ttl!r} seconds before its renewal"


def twice(pairs: Any, what: str = "") -> Iterator[str]:
    """A sentence for each value that stands with two keys."""
    seen: dict[Any, bytes] = {}
    for value, key_hash in pairs:
        if value in seen:
            yield f"{what or f'generation {value}'} is on two leases, of key hashes {seen[value].hex()} and {key_hash.hex()}"
        seen[value] = key_hash
