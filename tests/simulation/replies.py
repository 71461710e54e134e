"""The shapes of the replies: for each answer of section 2, its fields and what each must be, given the model's leases and clock."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from expectation import (
    UNKNOWN_RETRY_AFTER,
    Billing,
    Drawn,
    Expectation,
    Grant,
    Rule,
    billed,
    close_to,
    either,
    equal,
    free,
    instant,
    is_number,
    mismatches,
    null,
    one_of,
    remainder,
    retry_after,
)

SECOND = 1_000_000_000
Place = tuple[str, str]
"""(namespace, key), or (namespace, scope)."""


@dataclass
class Lease:
    place: Place
    holder: str
    scope: str | None
    ttl: int
    deadline: int
    bind: str
    connection: object
    process: object
    numbers: Grant
    presented: bool = False


@dataclass
class Switch:
    armed: bool = False
    due: int = 0
    within: int = 0
    agent_ids: set[str | None] = field(default_factory=lambda: {None})
    missed: bool = False
    released: list[Lease] = field(default_factory=list)
    released_is_certain: bool = True
    graced: bool = False


class Replies:
    """What `Model` needs to phrase a reply: the tariff, the numbers drawn, the live leases and the moment of the decision."""

    def __init__(self, billing: Billing | None = None, tolerance: float = 0.001) -> None:
        self.billing = billing or Billing()
        self.tolerance = tolerance
        self.drawn = Drawn()
        self.now = 0
        self.leases: dict[Place, Lease] = {}
        self.billed: set[tuple[str, str, str]] = set()
        self.texts_seen: set[Place] = set()

    def _granted(self, lease: Lease, *, renewed: bool) -> dict[str, Rule]:
        left = (lease.deadline - self.now) / SECOND
        return {
            "acquired": equal(True, "section 2: key free: grant; the live fence and its holder: renewal"),
            "renewed": equal(renewed, "section 2: renewed tells a renewal from a fresh grant"),
            "key": equal(lease.place[1], "section 1: the key as the caller writes it"),
            "holder": equal(lease.holder, "section 2: holder"),
            "fence": lease.numbers.fence_rule,
            "generation": lease.numbers.generation_rule,
            "scope": equal(lease.scope, "section 2: scope; section 6: the scope of a renewal is ignored"),
            "ttl_seconds": close_to(
                lease.ttl / SECOND, 1e-9, "section 6: exactly what is given, even shorter; omitted keeps the lease's own"
            ),
            "expires_at": instant(),
            "expires_in_seconds": remainder(left, self.tolerance, "section 2: the deadline is now + ttl_seconds"),
            "expires_boottime": close_to(
                lease.deadline / SECOND, self.tolerance, "section 2: the deadline in CLOCK_BOOTTIME seconds"
            ),
            "boot_id": self.drawn.this_boot,
            "charge": free(self.billing),
        }

    def _holding(self, live: Lease | None) -> dict[str, Rule]:
        """Who holds the key: null throughout where nothing is live."""
        if live is None:
            nothing = null("section 6: the live lease's if there is one, else null")
            return {"held_by": nothing, "generation": nothing, "expires_at": nothing, "expires_in_seconds": nothing}
        left = (live.deadline - self.now) / SECOND
        return {
            "held_by": equal(live.holder, "section 2: generation and expiry are the holder's"),
            "generation": live.numbers.generation_rule,
            "expires_at": instant(),
            "expires_in_seconds": remainder(left, self.tolerance, "section 2: generation and expiry are the holder's"),
        }

    def _refusal(
        self, expectation: Expectation, place: Place, asked: dict[str, Any], reason: str, *, free_of_charge: bool = False
    ) -> Expectation:
        live = self.leases.get(place)
        fact = (place[0], place[1], asked["holder"])
        first = self.billing.enabled and reason != "spent" and not free_of_charge and fact not in self.billed
        if first:
            self.billed.add(fact)
        if live is None:
            wait = null("section 6: lapsed, spent: retry_after_seconds is null where nothing is live")
            same = either(equal(False, "section 2: same_holder_label with nothing live"), null("section 6: else null"))
        else:
            wait = retry_after((live.deadline - self.now) / SECOND, self.tolerance)
            same = equal(live.holder == asked["holder"], "section 2: same_holder_label tells that held_by is your own label")
        return expectation.answer(
            {
                "acquired": equal(False, "section 2: otherwise, while a lease is live: refusal; a lapsed one is never revived"),
                "key": equal(place[1], "section 1: the key as the caller writes it"),
                "holder": equal(asked["holder"], "section 2: holder is the asking one's"),
                "reason": equal(reason, "section 2: held, same_label, wrong_fence, lapsed, spent; section 6: wrong_holder"),
                "same_holder_label": same,
                "retry_after_seconds": wait,
                "charge": billed(self.billing, self.drawn, fact) if first else free(self.billing),
                **self._holding(live),
            }
        )

    def _unknown(self, place: Place, asked: dict[str, Any], reason: str) -> dict[str, Rule]:
        def none(value: object) -> str | None:
            return None if value is None else f"is {value!r} (section 2: the older call ends acquired null)"

        return {
            "acquired": none,
            "key": equal(place[1], "section 1: the key as the caller writes it"),
            "holder": equal(asked["holder"], "section 2: holder is the asking one's"),
            "reason": equal(reason, f"section 2: reason {reason}"),
            "retry_after_seconds": close_to(UNKNOWN_RETRY_AFTER, self.tolerance, "section 6: other unknowns 1.0"),
            "charge": free(self.billing),
        }

    def _key_rule(self, place: Place) -> Rule:
        known = equal(place[1], "section 2: the key's text")
        return (
            known if place in self.texts_seen else either(known, null("section 2: null when its text was not seen since the start"))
        )

    def _entry(self, lease: Lease, with_namespace: bool = False) -> dict[str, Rule]:
        fields = {
            **self._holding(lease),
            "key": self._key_rule(lease.place),
            "key_hash": self.drawn.key_hash(lease.place),
            "holder": equal(lease.holder, "section 2: holder"),
            "scope": equal(lease.scope, "section 2: scope"),
            "bind": equal(lease.bind, "section 2: bind"),
        }
        del fields["held_by"]
        if with_namespace:
            fields["namespace"] = equal(lease.place[0], "section 2: with all, entries gain namespace")
        return fields

    def _entries(self, leases: list[Lease], rule: str) -> Rule:
        rules = [self._entry(lease) for lease in leases]

        def check(value: object) -> str | None:
            if not isinstance(value, list) or len(value) != len(rules):
                return f"is {value!r}, not {len(rules)} entries ({rule})"
            return (
                "; ".join(complaint for entry, fields in zip(value, rules, strict=True) for complaint in mismatches(entry, fields))
                or None
            )

        return check

    def _switch_fields(self, switch: Switch) -> dict[str, Rule]:
        agent = one_of(switch.agent_ids, "section 2: agent_id")
        missed = instant() if switch.missed else null("section 2: last_missed_at, never missed")
        left = (switch.due - self.now) / SECOND
        unset = null("section 2: a switch that is not armed is not due")
        return {
            "armed": equal(switch.armed, "section 2: armed by a heartbeat, until missed or disarmed"),
            "agent_id": agent,
            "due_at": instant() if switch.armed else unset,
            "due_in_seconds": remainder(left, self.tolerance, "section 2: due expect_within_seconds later")
            if switch.armed
            else unset,
            "last_missed_at": missed,
        }

    def _switch_rule(self, switch: Switch | None) -> Rule:
        if switch is None:
            return null("section 2: switch is null where the scope never had one")
        fields = {**self._switch_fields(switch), "released": self._released_rule(switch)}
        whole: Rule = lambda value: "; ".join(mismatches(value, fields)) or None  # noqa: E731
        return whole if switch.armed or switch.missed else either(whole, null("section 2: switch|null"))

    def _released_rule(self, switch: Switch) -> Rule:
        ended = [
            {
                "key": self._key_rule(lease.place),
                "key_hash": self.drawn.key_hash(lease.place),
                "generation": lease.numbers.generation_rule,
            }
            for lease in sorted(switch.released, key=lambda lease: lease.numbers.serial)
        ]

        def check(value: object) -> str | None:
            if value == [] and not switch.released_is_certain:
                return None  # re-armed since: the contract does not say whether the last miss's list stays
            if not isinstance(value, list) or len(value) != len(ended):
                return f"is {value!r}, not the {len(ended)} leases the scope had when it was missed (section 2)"
            by_generation = sorted(
                value,
                key=lambda entry: (
                    entry.get("generation", 0) if isinstance(entry, dict) and is_number(entry.get("generation")) else 0
                ),
            )
            return (
                "; ".join(
                    complaint for entry, fields in zip(by_generation, ended, strict=True) for complaint in mismatches(entry, fields)
                )
                or None
            )

        return check
