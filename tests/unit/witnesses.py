"""An onlooker who hears every answer of a world and knows what each promised.  It shares no code with the daemon.

It holds four things against it: two callers who both believe they hold one key; a generation that does not rise; a grant before the ttl of
an earlier true answer has ended; a lease that ends before its ttl though nobody ended it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

SLACK = 1e-6  # seconds: boot clocks are floats


@dataclass
class Promise:
    """What the last true answer about a key promised.  `until` is on the world's own time.  `may_end`: a power cut, a lost runtime
    directory or a restore has happened since, after which promise 4 lets this lease end early (but not be granted again)."""

    generation: int
    holder: str
    until: float
    ttl: float
    may_end: bool = False


@dataclass
class Witness:
    promises: dict[str, Promise] = field(default_factory=dict)
    beliefs: dict[tuple[str, str], float] = field(default_factory=dict)  # (key, holder) -> until when it believes
    greatest: int = 0
    told: set[int] = field(default_factory=set)
    dead: set[int] = field(default_factory=set)  # generations whose revocation was told

    def asked_renewal(self, key: str, generation: int, until: float) -> None:
        """Asking for less is settling for less, whatever the answer."""
        promise = self.promises.get(key)
        if promise is not None and promise.generation == generation:
            promise.until = min(promise.until, until)
            belief = (key, promise.holder)
            if belief in self.beliefs:
                self.beliefs[belief] = min(self.beliefs[belief], until)

    def asked_revocation(self, key: str) -> None:
        promise = self.promises.pop(key, None)
        if promise is not None:
            self.beliefs.pop((key, promise.holder), None)

    def told_yes(self, reply: dict[str, Any], now: float, until: float) -> None:
        """`acquired: true`, fresh, renewed or repeated."""
        key, holder, generation = reply["key"], reply["holder"], reply["generation"]
        promise = self.promises.get(key)
        assert generation not in self.dead, f"{key}: a fence was accepted after its revocation was told"
        assert promise is None or promise.generation == generation or promise.until <= now + SLACK, (
            f"{key}: {holder} was told yes {promise.until - now:.3f} s before the ttl of an earlier true answer ended"
        )
        others = [who for (what, who), end in self.beliefs.items() if what == key and who != holder and end > now + SLACK]
        assert not others, f"{key}: {holder} was told yes while {others} believed to hold it"
        if generation not in self.told:
            assert generation > self.greatest, f"{key}: generation {generation} after {self.greatest}"
            self.told.add(generation)
            self.greatest = generation
        self.promises[key] = Promise(generation, holder, until, reply["ttl_seconds"])
        self.beliefs[key, holder] = until

    def told_released(self, key: str, generation: int) -> None:
        promise = self.promises.get(key)
        if promise is not None and promise.generation == generation:
            del self.promises[key]
            self.beliefs.pop((key, promise.holder), None)

    def told_revoked(self, generation: int) -> None:
        self.dead.add(generation)

    def memory_lost(self, wait_out: float, *, everything: bool = False) -> None:
        """A power cut or a lost runtime directory: leases up to `wait_out` may end; after a restore every lease may."""
        for promise in self.promises.values():
            promise.may_end = promise.may_end or everything or promise.ttl <= wait_out

    def everything_is_lost(self) -> None:
        """Both directories at once: outside every promise but that generations rise."""
        self.promises.clear()
        self.beliefs.clear()

    def died(self, holders: set[str]) -> None:
        """Callers of this host do not outlive its power; what they were promised stands nevertheless."""
        self.beliefs = {belief: until for belief, until in self.beliefs.items() if belief[1] not in holders}

    def owed(self, now: float) -> dict[str, Promise]:
        """Promises that must be seen in the daemon's state at this moment."""
        return {key: promise for key, promise in self.promises.items() if promise.until > now + SLACK and not promise.may_end}
