"""True answers that must not leave yet: a power cut could still make us forget what they say.

One hold for each key whose lease is marked unflushed.  It waits for one flush of the ledger, `number`, until its `bound`.  However many
renewals and repeats join it, it moves to the latest flush any of them needs; then all are answered, or all are told null.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, NamedTuple

from leased.calls import Call
from leased.model import Reply

MAX_HOLD_SECONDS: Final = 2.0  # out of the air: longer than any healthy disk needs, shorter than a caller's patience

NEVER: Final = 1 << 62  # no flush has this number: what waits for it can only be undone


def bound(now: float, ttl: float) -> float:
    """When a caller is told null instead: half the ttl at most, so that a true answer still leaves time to use the lease."""
    return now + min(MAX_HOLD_SECONDS, ttl / 2)


class Held(NamedTuple):
    call: Call
    reply: Reply


class Hold:
    """`failed`: why it is to be taken back, once that is known and could not be done at once."""

    __slots__ = ("bound", "failed", "generation", "held", "number")

    def __init__(self, generation: int, number: int, bound: float) -> None:
        self.generation = generation
        self.number = number
        self.bound = bound
        self.failed = ""
        self.held: list[Held] = []


class Holds:
    def __init__(self) -> None:
        self._by_key: dict[bytes, Hold] = {}
        self._plain: list[tuple[int, float, Held, Reply]] = []

    def __len__(self) -> int:
        return len(self._by_key) + len(self._plain)

    def add(self, key_hash: bytes, generation: int, number: int | None, bound: float, held: Held) -> None:
        """Hold `held` for flush `number`, or (None) for whatever the key's hold already waits for."""
        hold = self._by_key.get(key_hash)
        if hold is None or hold.generation != generation:
            hold = self._by_key[key_hash] = Hold(generation, number or 0, bound)
        elif number is not None and number > hold.number:
            hold.number = number
        hold.held.append(held)

    def __contains__(self, key_hash: bytes) -> bool:
        return key_hash in self._by_key

    def pop(self, key_hash: bytes) -> Hold | None:
        return self._by_key.pop(key_hash, None)

    def ready(self, number: int) -> list[tuple[bytes, Hold]]:
        """Holds that flush `number` was the last one they needed.  They stay until popped."""
        return [(key_hash, hold) for key_hash, hold in self._by_key.items() if hold.number <= number]

    def overdue(self, now: float) -> list[tuple[bytes, Hold]]:
        return [(key_hash, hold) for key_hash, hold in self._by_key.items() if hold.bound <= now]

    def next_bound(self) -> float | None:
        bounds = [hold.bound for hold in self._by_key.values()]
        bounds += [item[1] for item in self._plain]
        return min(bounds) if bounds else None

    # ---- answers about leases that are gone already (revocations): nothing to undo, only to be told or not

    def add_plain(self, number: int, bound: float, held: Held, otherwise: Reply) -> None:
        self._plain.append((number, bound, held, otherwise))

    def pop_plain(self, number: int) -> Iterator[Held]:
        """Those whose flush has succeeded."""
        ready = [item for item in self._plain if item[0] <= number]
        self._plain = [item for item in self._plain if item[0] > number]
        return iter([item[2] for item in ready])

    def pop_plain_failed(self, number: int, now: float) -> Iterator[Held]:
        """Those whose flush has failed or whose bound has passed, with the null answer."""
        failed = [item for item in self._plain if item[0] <= number or item[1] <= now]
        self._plain = [item for item in self._plain if item[0] > number and item[1] > now]
        return iter([Held(item[2].call, item[3]) for item in failed])
