"""What a history is made of: the calls as clients saw them, and the grants they prove, each with what is certain of its life."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

NEVER = math.inf
LATCH = 1e-6
"""Seconds: float rounding of instants about a million seconds large."""

Place = tuple[str, str]
"""(namespace, key)."""
TRUTH = {"release": "released", "revoke": "revoked", "check": "held", "use": "accepted"}
"""The field that says yes, no or unknown; `acquired` elsewhere."""


@dataclass(slots=True, eq=False)
class Record:
    """One call. `reply` is the result (dict), the error string, or None when the answer was lost (`received` is None then too)."""

    client: object
    operation: str
    params: Mapping[str, Any]
    sent: float
    received: float | None
    reply: Any
    namespace: str = "local"
    answer: bool | None = field(init=False, default=None)  # yes, no or unknown; None too where there is no result
    undecided: bool = field(init=False, default=False)  # it may have taken effect or not: answer lost, null, or an internal error
    renewal: bool = field(init=False, default=False)
    grant: bool = field(init=False, default=False)

    def __post_init__(self) -> None:
        if isinstance(self.reply, dict):
            self.answer = self.reply.get(TRUTH.get(self.operation, "acquired"))
        if isinstance(self.reply, str):
            self.undecided = self.reply.startswith("internal")
        else:
            self.undecided = self.answer is None
        if self.answer is True and self.operation in ("lease", "renew"):
            self.renewal = self.reply["renewed"] is True
            self.grant = self.operation == "lease" and self.reply["renewed"] is False

    @property
    def place(self) -> Place:
        if self.operation == "revoke":
            return (self.params.get("namespace", self.namespace), self.params["key"])
        return (self.namespace, self.params["key"])

    @property
    def by(self) -> float:
        return NEVER if self.received is None else self.received

    @property
    def fence(self) -> str | None:
        """The fence presented, as replies write it."""
        return None if self.params.get("fence") is None else str(int(self.params["fence"]))

    def __str__(self) -> str:
        """For people; fences and request_ids are credentials and stay out."""
        told = dict(self.reply) if isinstance(self.reply, dict) else self.reply
        for secret in ("fence", "charge", "expires_at", "boot_id"):
            if isinstance(told, dict):
                told.pop(secret, None)
        until = "lost" if self.received is None else f"{self.received:.6f}"
        return f"[{self.client} {self.operation} {self.params.get('key', '')!r} {self.sent:.6f}..{until} -> {told}]"


@dataclass(frozen=True)
class Crash:
    """The daemon was certainly gone at `at` and started later. "kill" forgives nothing, the others leases of ttl <= wait_out."""

    kind: Literal["kill", "power", "runtime_lost"]
    at: float
    wait_out_seconds: float = 0.0

    @property
    def forgets(self) -> bool:
        return self.kind != "kill"


@dataclass(slots=True, eq=False)
class Setter:
    """A call that set, or may have set (`certain` False), a grant's deadline to its decision + ttl.

    `ttl` NaN: omitted, so the lease's own, whichever that was. Once sealed, `ttl` and `longest_ttl` bound it.
    """

    sent: float
    by: float
    ttl: float
    certain: bool
    longest_ttl: float = 0.0


@dataclass(slots=True, eq=False)
class Granted:
    """One fresh grant, put together from every reply that bears its fence. Its decision lies in [lowest, highest]."""

    place: Place
    fence: str
    generation: int
    holder: str
    ttl: float
    scope: str | None
    lowest: float
    highest: float
    setters: list[Setter]
    records: list[Record]
    request_id: object = None
    ended_from: float = NEVER  # the earliest instant at which something may have ended it
    presented_from: float = NEVER  # the earliest instant at which its fence may have been presented with success
    presented_by: float = NEVER  # by then it certainly was
    dead_by: float = NEVER
    dead_why: str = ""
    bearers: set[object] = field(default_factory=set)  # the clients that presented its fence or were given it
    last_proof: float = -NEVER  # the latest sending of a call whose answer proved it live
    shortest_ttl: float = NEVER  # of all its setters, once sealed
    _longest: list[tuple[float, float]] = field(default_factory=list)
    _sent: list[float] = field(default_factory=list)
    _highest_by: list[float] = field(default_factory=list)
    _latest: list[float] = field(default_factory=list)
    _endless: list[tuple[float, float]] = field(default_factory=list)

    def ended_maybe(self, since: float) -> None:
        self.ended_from = min(self.ended_from, max(since, self.lowest))

    def presented_maybe(self, since: float) -> None:
        self.presented_from = min(self.presented_from, since)

    def presented_surely(self, by: float) -> None:
        self.presented_by = min(self.presented_by, by)

    def dies(self, by: float, why: str) -> None:
        if by < self.dead_by:
            self.dead_by, self.dead_why = by, why

    def seal(self) -> None:
        """Sorts the setters and prepares their running extremes: no setter may be added from here on."""
        known = [setter.ttl for setter in self.setters if not math.isnan(setter.ttl)]
        self.shortest_ttl = min(known)
        for setter in self.setters:
            omitted = math.isnan(setter.ttl)
            setter.longest_ttl = max(known) if omitted else setter.ttl
            setter.ttl = self.shortest_ttl if omitted else setter.ttl
        self.setters.sort(key=lambda setter: setter.sent)
        shortest, longest = NEVER, 0.0
        for setter in self.setters:
            longest = max(longest, setter.longest_ttl)
            self._longest.append((setter.sent, longest))
            if setter.by == NEVER:
                shortest = min(shortest, setter.sent + setter.ttl)
                self._endless.append((setter.sent, shortest))
        highest = latest = -NEVER
        bounded = [setter for setter in self.setters if setter.by < NEVER]
        for setter in bounded:
            highest, latest = max(highest, setter.by), max(latest, setter.by + setter.longest_ttl)
            self._sent.append(setter.sent)
            self._highest_by.append(highest)
            self._latest.append(latest)
        self.setters = bounded

    def longest_ttl(self, at: float) -> float:
        """The longest ttl it may have had by `at`: with it, it comes back from a power cut."""
        index = bisect_right(self._longest, (at, NEVER)) - 1
        return self._longest[index][1] if index >= 0 else 0.0

    def shortest_deadline(self, at: float) -> float:
        """The earliest the deadline in force at `at` can be. A value <= `at` means only that the lease may have lapsed."""
        index = bisect_right(self._endless, (at, NEVER)) - 1
        shortest = self._endless[index][1] if index >= 0 else NEVER
        settled = -NEVER  # setters decided before this instant were overwritten by a later, certain one
        index = bisect_right(self._sent, at) - 1
        while shortest > at and index >= 0 and self._highest_by[index] >= settled:
            setter = self.setters[index]
            if setter.by >= settled:
                shortest = min(shortest, setter.sent + setter.ttl)
            if setter.certain and setter.by <= at:
                settled = max(settled, setter.sent)
            index -= 1
        return shortest

    def longest_deadline(self, record: Record) -> float:
        """The latest the deadline can be when `record` is decided, whatever `record` did itself."""
        if self._endless and self._endless[0][0] <= record.by:
            return NEVER
        index = bisect_left(self._sent, record.sent)
        latest = self._latest[index - 1] if index else -NEVER
        while index < len(self._sent) and self._sent[index] <= record.by:
            setter = self.setters[index]
            if not record.renewal or (setter.sent, setter.by) != (record.sent, record.by):
                latest = max(latest, setter.by + setter.longest_ttl)
            index += 1
        return latest

    def live_at(self, at: float) -> bool:
        """Certainly live at `at`, given that it was granted before: nothing sent before `at` may have ended it, nor a deadline."""
        return self.ended_from >= at and self.shortest_deadline(at) > at + LATCH
