"""A world whose daemon bills: worlds.py, the tariff, and eyes for what is in both stores."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from worlds import World

from leased.agent_lock import AgentLock
from leased.billing import Billing
from leased.calls import Call
from leased.errors import StoreError
from leased.model import LOCK_OPS, AgentLockRequest, Identity, Reply, UsageRequest
from leased.state.ledger import Ledger, Op
from leased.state.outbox import BillingState, decode_event, oldest, read_state
from leased.tariff import Event, Tariff

TARIFF = Tariff(True, "USDC", 2_000, 1_000)
FREE: Reply = {"amount": "0", "currency": "USDC", "event_id": None}


class BilledWorld(World):
    """`instant`: every flush succeeds at once."""

    def __init__(
        self, root: Path, tariff: Tariff = TARIFF, *, max_waiting: int = 1000, max_once: int = 1000, instant: bool = False
    ) -> None:
        super().__init__(root)
        self.tariff = tariff
        self.max_waiting = max_waiting
        self.max_once = max_once
        self.instant = instant

    def equip(self) -> None:
        self.lessor.free = self.tariff.free()
        self.billing = Billing(
            self.lessor,
            self.tariff,
            read_state(self.ledger),
            self.taken.meta.incarnation,
            max_waiting=self.max_waiting,
            max_once=self.max_once,
        )
        self.upkeep.billing = self.billing
        AgentLock(self.lessor)

    def write(self, ops: list[Op], done: Callable[[Exception | None], None]) -> None:
        super().write(ops, done)
        if self.instant:
            self.flush()

    def read(self, question: Callable[[Ledger], Any], done: Callable[[Any, Exception | None], None]) -> None:
        """What the writer's thread does."""
        try:
            answer = question(self.ledger)
        except StoreError as error:
            done(None, error)
        else:
            done(answer, None)

    def heard(self, call: Call, reply: Reply) -> None:
        """The agent-lock form has other words, which the witness does not know."""
        if "op" in reply:
            assert call not in self.answers
            self.answers[call] = reply
        else:
            super().heard(call, reply)

    # ---- callers

    def refused(self, who: str, key: str = "k", **more: Any) -> Reply:
        """The charge of a refusal."""
        reply = self.lease(who, 20.0, key, **more)
        assert reply is not None
        assert reply["acquired"] is False, reply
        charge: Reply = reply["charge"]
        return charge

    def lock(self, op: str, key: str = "k", **more: Any) -> Reply | None:
        """One call of the agent-lock form."""
        return self.ask("agent", AgentLockRequest(key, LOCK_OPS.index(op), **more))

    def used(self, since: float | None = None) -> Reply:
        reply = self.ask("anybody", UsageRequest(since))
        assert reply is not None
        return reply

    def of_namespace(self, who: str, namespace: str) -> None:
        """From now on this caller is in that namespace."""
        self.caller(who).identity = Identity(namespace, 1000, 4321, False)

    # ---- looking

    def uncopied(self) -> list[Event]:
        """The events in `leases`."""
        with self.leases.environment.begin() as transaction:
            return [decode_event(bytes(raw)) for _, raw in transaction.cursor(db=self.leases.events)]

    def outbox(self) -> list[Event]:
        """The events in the ledger, as a read shows them."""
        return [row.event for row in oldest(self.ledger, 1 << 30) if row.event is not None]

    def in_ledger_state(self) -> BillingState:
        return read_state(self.ledger)

    def assert_accounts_agree(self) -> None:
        """With everything flushed, memory says what the ledger says."""
        state, billing = self.in_ledger_state(), self.billing
        assert billing.waiting_total == len(state.waiting)
        assert billing.overflow == state.overflow
        assert {name: count for name, count in billing.dead.items() if count} == state.dead
        for namespace in {name for name, _ in state.hours}:
            amount = sum(counts[0] for (name, _), counts in state.hours.items() if name == namespace)
            used = billing.used(namespace, None)
            assert round(float(used["amount"]) * 1_000_000) == amount


@contextmanager
def billed_world(tariff: Tariff = TARIFF, **settings: Any) -> Iterator[BilledWorld]:
    """A running one."""
    memory = Path("/dev/shm")
    root = Path(tempfile.mkdtemp(prefix="leased-billed-", dir=memory if os.access(memory, os.W_OK) else None))
    made = BilledWorld(root, tariff, **settings)
    try:
        made.run()
        yield made
    finally:
        made.close()
        shutil.rmtree(root)
