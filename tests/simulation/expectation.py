"""What one reply must look like, said as predicates over its fields.

The daemon draws fences and generations, so a reference model cannot foretell a reply: it can only say which replies are
allowed, and learn the drawn numbers from one that is. Every complaint quotes the rule of the contract that was broken.
"""

from __future__ import annotations

import math
import re
from bisect import bisect, insort
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

FENCE_LOWEST = 2**53
FENCE_BEYOND = 2**63
GENERATION_BEYOND = 2**53
RETRY_AFTER_FLOOR = 0.05
UNKNOWN_RETRY_AFTER = 1.0
INSTANT = re.compile(r"\d{4}-(0\d|1[0-2])-([0-2]\d|3[01])T([01]\d|2[0-3]):[0-5]\d:([0-5]\d|60)\.\d{3}Z")
DECIMAL = re.compile(r"[1-9]\d*")

Rule = Callable[[object], str | None]
"""Given a field's value, what is wrong with it, or None."""


def is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def equal(wanted: object, rule: str) -> Rule:
    """Exactly `wanted`, of its type: True is not 1 and "60" is not 60."""

    def check(value: object) -> str | None:
        same_kind = is_number(value) if is_number(wanted) else type(value) is type(wanted)
        return None if same_kind and value == wanted else f"is {value!r}, not {wanted!r} ({rule})"

    return check


def null(rule: str) -> Rule:
    return lambda value: None if value is None else f"is {value!r}, not null ({rule})"


def one_of(wanted: Iterable[object], rule: str) -> Rule:
    choices = list(wanted)
    return lambda value: (
        None if any(equal(choice, rule)(value) is None for choice in choices) else f"is {value!r}, none of {choices!r} ({rule})"
    )


def close_to(wanted: float, tolerance: float, rule: str) -> Rule:
    def check(value: object) -> str | None:
        if not is_number(value):
            return f"is {value!r}, not a number ({rule})"
        assert isinstance(value, int | float)
        return None if abs(value - wanted) <= tolerance else f"is {value!r}, not {wanted:.6f} within {tolerance} ({rule})"

    return check


def remainder(wanted: float, tolerance: float, rule: str) -> Rule:
    """A duration still to run: close to `wanted`, never below 0."""

    def check(value: object) -> str | None:
        if is_number(value) and isinstance(value, int | float) and value < 0:
            return f"is {value!r} (section 6: remainders never print below 0)"
        return close_to(max(wanted, 0.0), tolerance, rule)(value)

    return check


def retry_after(wanted: float, tolerance: float) -> Rule:
    """A refusal's: the holder's remaining time, at least 0.05."""

    def check(value: object) -> str | None:
        if is_number(value) and isinstance(value, int | float) and value < RETRY_AFTER_FLOOR:
            return f"is {value!r}, below 0.05 (section 6: the holder's remaining time, at least 0.05)"
        return close_to(max(wanted, RETRY_AFTER_FLOOR), tolerance, "section 6: the holder's remaining time, at least 0.05")(value)

    return check


def instant(rule: str = "section 1: instants are RFC 3339 UTC with milliseconds") -> Rule:
    return lambda value: None if isinstance(value, str) and INSTANT.fullmatch(value) else f"is {value!r} ({rule})"


def text(rule: str) -> Rule:
    return lambda value: None if isinstance(value, str) and value else f"is {value!r}, not a string with something in it ({rule})"


def either(*rules: Rule) -> Rule:
    """Where the contract leaves two readings open: one of `rules` holds."""

    def check(value: object) -> str | None:
        complaints = [rule(value) for rule in rules]
        return None if None in complaints else complaints[0]

    return check


@dataclass
class Drawn:
    """The numbers the daemon drew so far: fences never twice, generations in the order of the grants.

    `serial` is the model's own count of grants in the order decided, so a generation learned late (a replay of a lost reply) is
    compared with its neighbours on both sides. Rules put what a reply teaches into `lessons`; they are taken in only when the whole
    reply was allowed, so a faulty one teaches nothing.
    """

    lessons: list[Callable[[], str | None]] = field(default_factory=list)

    fences: set[int] = field(default_factory=set)
    generations: list[tuple[int, int]] = field(default_factory=list)
    key_hashes: dict[tuple[str, str], str] = field(default_factory=dict)
    event_ids: dict[tuple[str, str, str], str] = field(default_factory=dict)
    boot_id: str | None = None

    def why_not_generation(self, serial: int, generation: int) -> str | None:
        rule = "section 1: strictly larger at every fresh acquisition"
        at = bisect(self.generations, (serial,))
        if at > 0 and self.generations[at - 1][1] >= generation:
            return f"is {generation}, not above {self.generations[at - 1][1]} of an earlier grant ({rule})"
        if at < len(self.generations) and self.generations[at][1] <= generation:
            return f"is {generation}, not below {self.generations[at][1]} of a later grant ({rule})"
        return None

    def learn(self, allowed: bool) -> list[str]:
        """Takes in the lessons of an allowed reply; what two parts of one reply say against each other shows here."""
        lessons, self.lessons = self.lessons, []
        return [complaint for lesson in lessons if (complaint := lesson())] if allowed else []

    def key_hash(self, place: tuple[str, str]) -> Rule:
        """Non-empty text, the same for one (namespace, key) and different for another; learned at sight."""

        def check(value: object) -> str | None:
            if not isinstance(value, str) or not value:
                return f"is {value!r} (section 1: a keyed hash of (namespace, key))"
            self.lessons.append(lambda: learn(value))
            return why_not(value)

        def why_not(value: str) -> str | None:
            known = self.key_hashes.get(place, value)
            if known != value:
                return f"is {value!r}, but was {known!r} for the same key (section 1: a keyed hash of (namespace, key))"
            if any(other != place and taken == value for other, taken in self.key_hashes.items()):
                return f"is {value!r}, which is another key's (section 1: a keyed hash of (namespace, key))"
            return None

        def learn(value: str) -> str | None:
            complaint = why_not(value)
            if complaint is None:
                self.key_hashes[place] = value
            return complaint

        return check

    def this_boot(self, value: object) -> str | None:
        if not isinstance(value, str) or not value:
            return f"is {value!r} (section 2: boot_id names the boot expires_boottime belongs to)"
        if self.boot_id is None:
            self.lessons.append(lambda: setattr(self, "boot_id", value))
        return (
            None
            if self.boot_id in (None, value)
            else f"is {value!r}, but was {self.boot_id!r} (section 2: one boot has one boot_id)"
        )


@dataclass
class Grant:
    """The numbers of one grant, None until a reply told them."""

    serial: int
    drawn: Drawn
    fence: int | None = None
    generation: int | None = None

    def fence_rule(self, value: object) -> str | None:
        if not isinstance(value, str) or not DECIMAL.fullmatch(value):
            return "is not a decimal string (section 1: the fence is a decimal string)"  # a credential: never printed
        number = int(value)
        if not FENCE_LOWEST <= number < FENCE_BEYOND:
            return "is out of range (section 1: a 63-bit number, never below 2^53)"
        self.drawn.lessons.append(lambda: self._learn_fence(number))
        return self._why_not_fence(number)

    def _why_not_fence(self, number: int) -> str | None:
        if self.fence is None:
            return "was another grant's (section 1: drawn anew for every acquisition)" if number in self.drawn.fences else None
        return None if number == self.fence else "is not this grant's (section 2: renewal and replay carry the same fence)"

    def _learn_fence(self, number: int) -> str | None:
        complaint = self._why_not_fence(number)
        if complaint is None:
            self.fence = number
            self.drawn.fences.add(number)
        return complaint

    def generation_rule(self, value: object) -> str | None:
        if not isinstance(value, int) or isinstance(value, bool) or not 0 < value < GENERATION_BEYOND:
            return f"is {value!r} (section 1: generation is an integer below 2^53)"
        if self.generation is not None:
            return (
                None
                if value == self.generation
                else f"is {value}, not {self.generation} (section 1: unchanged by renewal, the order of its grant)"
            )
        self.drawn.lessons.append(lambda: self._learn_generation(value))
        return self.drawn.why_not_generation(self.serial, value)

    def _learn_generation(self, value: int) -> str | None:
        if self.generation is not None:
            return None if value == self.generation else f"is {value} and {self.generation} in one reply (section 1)"
        complaint = self.drawn.why_not_generation(self.serial, value)
        if complaint is None:
            self.generation = value
            insort(self.drawn.generations, (self.serial, value))
        return complaint


@dataclass
class Billing:
    """The tariff the daemon was configured with (section 4)."""

    enabled: bool = False
    currency: str = "USDC"
    refusal: str = "0.002"


def free(billing: Billing) -> Rule:
    """A charge of nothing: amount "0", event_id null."""
    return _charge(billing, "0", null('section 4: amount "0" and event_id null where free'))


def billed(billing: Billing, drawn: Drawn, fact: tuple[str, str, str]) -> Rule:
    """The price of a first refusal; its event id belongs to `fact` = (namespace, key, holder) alone."""

    def event_id(value: object) -> str | None:
        if not isinstance(value, str) or not value:
            return f"is {value!r} (section 4: a billed fact has an event_id)"
        if any(other != fact and taken == value for other, taken in drawn.event_ids.items()):
            return f"is {value!r}, another fact's (section 4: a keyed hash of (namespace, key hash, holder label))"
        known = drawn.event_ids.get(fact, value)
        drawn.lessons.append(lambda: drawn.event_ids.__setitem__(fact, value))
        return None if known == value else f"is {value!r}, but was {known!r} (section 4: the same fact cannot be two events)"

    return _charge(billing, billing.refusal, event_id)


def _charge(billing: Billing, amount: str, event_id: Rule) -> Rule:
    currency = (
        equal(billing.currency, "section 4: the configured currency")
        if billing.enabled
        else text("section 4: charge names a currency")
    )
    price = equal(amount, "section 4: a refusal is billed the first time for this key and label; everything else is free")
    fields = {"amount": price, "currency": currency, "event_id": event_id}
    return lambda value: "; ".join(mismatches(value, fields)) or None


def mismatches(value: object, fields: dict[str, Rule], optional: dict[str, Rule] | None = None) -> list[str]:
    """Compares `value` with exactly `fields` (and any of `optional`), names first."""
    if not isinstance(value, dict):
        return [f"is {value!r}, not an object with {sorted(fields)}"]
    found = []
    for name in fields.keys() - value.keys():
        found.append(f"{name} is missing (section 2 lists it)")
    for name in value.keys() - fields.keys() - (optional or {}).keys():
        found.append(f"{name} does not belong here (section 2 does not list it)")
    for name, rule in {**fields, **(optional or {})}.items():
        if name in value and (complaint := rule(value[name])):
            found.append(f"{name} {complaint}")
    return sorted(found)


class Expectation:
    """What may be answered to one call.

    `kind` is "result", "error", "pending" (a wait that must not be answered yet) or "nobody" (its connection is gone). A pending
    one turns into another kind when the model decides it; `decided_at` is that moment in seconds.
    """

    def __init__(self, operation: str, drawn: Drawn) -> None:
        self.operation = operation
        self.drawn = drawn
        self.kind = "pending"
        self.decided_at: float | None = None
        self.fields: dict[str, Rule] = {}
        self.optional: dict[str, Rule] = {}
        self.codes: set[str] = set()
        self.named: set[str] = set()
        self.after: Callable[[dict[str, object]], list[str]] = lambda reply: []

    def answer(self, fields: dict[str, Rule], optional: dict[str, Rule] | None = None) -> Expectation:
        self.kind, self.fields, self.optional = "result", fields, optional or {}
        return self

    def fail(self, codes: set[str], named: Iterable[str] = ()) -> Expectation:
        """An error of one of `codes`; an invalid_argument has to name one of the fields `named`."""
        self.kind, self.codes, self.named = "error", codes, set(named)
        return self

    def nobody(self) -> Expectation:
        self.kind = "nobody"
        return self

    def check(self, reply: object) -> list[str]:
        """The violations in `reply` (a result as dict, an error as the string "code: text", None for no answer); learns from it."""
        found = self._check(reply)
        found += self.drawn.learn(allowed=not found)
        return [f"{self.operation}: {complaint}" for complaint in found]

    def _check(self, reply: object) -> list[str]:
        if self.kind == "nobody":
            granted = isinstance(reply, dict) and reply.get("acquired") is True
            return ["granted (section 2: a waiter whose connection is gone never receives a grant)"] if granted else []
        if self.kind == "pending":
            return [] if reply is None else ["answered (section 2: a refused caller queues until granted or the wait ends)"]
        if self.kind == "error":
            return self._check_error(reply)
        if isinstance(reply, str):
            return [f"failed with {reply!r} (section 3.1: refusals are results, not errors)"]
        found = mismatches(reply, self.fields, self.optional)
        return found or (self.after(reply) if isinstance(reply, dict) else [])

    def _check_error(self, reply: object) -> list[str]:
        if not isinstance(reply, str):
            return [f"answered {reply!r}, where {sorted(self.codes)} {sorted(self.named)} must be refused"]
        code, _, words = reply.partition(":")
        if code not in self.codes:
            return [f"failed with {code!r}, not {sorted(self.codes)}"]
        if code == "invalid_argument" and self.named and not any(name in words for name in self.named):
            return [f"invalid_argument names none of {sorted(self.named)} (section 1: naming the field and its bounds): {words!r}"]
        return []
