"""Who takes part in a simulated run, and what the referee remembers of each call."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from expectation import Expectation
from oracle import Caller
from replies import Lease, Place

NOT_ANSWERED = object()
NEVER = float("inf")


@dataclass(eq=False)
class Process:
    number: int
    dead_since: float | None = None


@dataclass(eq=False)
class Connection:
    """`gone`: its client has closed it, as the kernel would say.  `process` is None where no pidfd proves one."""

    number: int
    namespace: str
    operator: bool
    process: Process | None
    gone: bool = False
    half_closed: bool = False  # its client sends no more: the daemon ends it when nothing is owed to it
    noticed: bool = False  # the daemon knows that it is gone
    heard: Any = None
    refused: bool = False  # the daemon ended it after a mistake of its client

    @property
    def ending(self) -> bool:
        return self.gone or self.half_closed or self.refused

    @property
    def caller(self) -> Caller:
        return Caller(self.namespace, self.operator, self, self.process)

    def __repr__(self) -> str:
        return f"connection {self.number}"


@dataclass(eq=False)
class Asked:
    """One call as its client sent it.  `unknown`: why the daemon did not decide it."""

    connection: Connection
    msgid: int
    operation: str
    params: Mapping[str, Any]
    sent_at: float
    expectation: Expectation | None = None
    decided_at: float = NEVER
    unknown: str = ""
    answer: object = NOT_ANSWERED
    event: Told | None = None  # what watchers hear of it

    def __str__(self) -> str:
        shown = {name: "…" if name in ("fence", "request_id") else value for name, value in self.params.items()}
        return f"c{self.connection.number}#{self.msgid} {self.operation} {shown}"

    @property
    def decided(self) -> float:
        """When its answer was decided: after a wait, at its end."""
        if self.expectation is not None and self.expectation.decided_at is not None:
            return self.expectation.decided_at
        return self.decided_at

    @property
    def place(self) -> Place | None:
        key = self.params.get("key")
        return (self.params.get("namespace", self.connection.namespace), key) if isinstance(key, str) else None


@dataclass
class Slot:
    """The place of one decision among the consequences of its transaction."""

    asked: Asked
    unknown: str = ""
    failed: str = ""
    queued: bool = False


@dataclass
class Told:
    """Something watchers hear.  `optional`: its answer waits for the ledger, and it may come to nothing."""

    type: str
    place: Place
    scope: str | None
    holder: str
    generation: int
    optional: bool = False
    certain_at: float = -NEVER  # when the answer left, if it waited


@dataclass
class Heard:
    """One watch, from its beginning: what it asked for, and what came."""

    namespace: str
    key: str | None
    scope: str | None
    begun: int = -1
    ended: int | None = None
    ended_at: float = NEVER
    came: list[Mapping[str, Any]] = field(default_factory=list)
    on: bool = True  # the daemon said that it watches
    complete: bool = False  # it was ended in order, and everything told before that was read


@dataclass
class Trouble:
    """What may excuse an unknown, on the world's clock; of one life of the daemon."""

    began: float = 0.0
    ledger_at: float = -NEVER  # a flush failed, or ended late
    store_at: float = -NEVER  # a transaction failed
    flushes: int = 0
    waiting_until: float = -NEVER
    draining: bool = False
    lost: bool = False


@dataclass
class Ghost:
    """A lease a power cut made the daemon forget: nothing is granted before it would have lapsed."""

    lease: Lease
    until: int
