"""What a seed plans: how many lives the daemon has, how each ends, and what goes wrong meanwhile."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

from store_faults import Trap

CLIENTS = 22
STEPS = 14
SHORT_TTLS = [0.5, 1.0, 2.0, 4.0]
LONG_TTLS = [8.0, 24.0]
KEYS = ["k1", "k2", "k3", "k4"]
SCOPES = ["s1", "s2"]
COMMITS = [
    "",
    "_decide_all",
    "_lapse",
    "_miss",
    "end_all",
    "_confirm",
    "_undo",
    "end_wait",
    "_store_next",
    "_adopt_next",
    "take_over",
]


@dataclass
class Life:
    """One life of the daemon.  It ends by itself after `seconds`, unless a trap or the disk ends it before."""

    wait_out: float
    seconds: float
    ending: str
    down: float
    traps: list[Trap] = field(default_factory=list)
    doomed_flush: int = 0
    doom: str = "crash_before"


@dataclass
class Plan:
    lives: list[Life]
    ttls: list[float]
    keeper: bool
    flaky_disk: float
    deaf: bool
    wall_steps: bool


def plan(seed: int) -> Plan:
    chance = random.Random(f"{seed}:plan")
    lives = []
    wait_out = chance.choice([0.0, 4.0, 4.0])
    for _ in range(chance.choice([1, 2, 3, 4])):
        life = Life(wait_out, chance.choice([1.0, 3.0, 6.0]), chance.choice(ENDINGS), chance.choice([0.0, 0.25, 2.0]))
        if chance.random() < 0.5:
            action: Any = chance.choice(["crash_before", "crash_after", "crash_after"])
            life.traps.append(Trap("commit", action, chance.choice([1, 1, 2, 3, 5, 10, 20]), chance.choice(COMMITS)))
        elif chance.random() < 0.4:
            life.doomed_flush, life.doom = chance.choice([1, 2, 3, 6]), chance.choice(["crash_before", "crash_after"])
        lives.append(life)
        if chance.random() < 0.3:
            wait_out = chance.choice([0.0, 4.0, 8.0])
    if chance.random() < 0.3:
        operation, action = chance.choice(
            [
                ("begin", "error"),
                ("put", "error"),
                ("put", "full"),
                ("commit", "error"),
                ("commit", "full"),
            ]
        )
        lives[0].traps.append(Trap(operation, action, chance.randrange(1, 60)))  # type: ignore[arg-type]
    lives.append(Life(wait_out, float("inf"), "stop", 0.0))
    return Plan(
        lives,
        SHORT_TTLS + LONG_TTLS * chance.choice([0, 1, 1]),
        keeper=chance.random() < 0.5,
        flaky_disk=chance.choice([0.0, 0.0, 0.1, 0.3]),
        deaf=chance.random() < 0.3,
        wall_steps=chance.random() < 0.3,
    )


ENDINGS = ["kill", "kill", "power", "power", "stop", "stop_reboot", "runtime_lost"]
