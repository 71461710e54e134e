"""What a world is made of besides the daemon: a clock, callers, flushes under way, and stores that refuse."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import lmdb

from leased.calls import Call, Undelivered
from leased.clock import Now
from leased.errors import PeerError
from leased.model import Identity, Reply
from leased.state.leases import Leases
from leased.state.ledger import Op

BOOT_AT = 100.0  # CLOCK_BOOTTIME when a world's daemon can first run
WALL_AT = 1_800_000_000.0


class Listener(Protocol):
    def heard(self, call: Call, reply: Reply) -> None: ...


class WorldClock:
    """`elapsed` is the world's own time: it never steps and knows nothing of boots."""

    def __init__(self) -> None:
        self.elapsed = 0.0
        self.booted = -BOOT_AT
        self.boots = 1
        self.wall = WALL_AT

    def now(self) -> Now:
        return Now(self.elapsed - self.booted, self.wall + self.elapsed)

    def boot_id(self) -> str:
        return f"boot-{self.boots}"

    def reboot(self) -> None:
        self.boots += 1
        self.booted = self.elapsed - BOOT_AT


class Caller:
    """One connection.  It counts how often each call was answered."""

    def __init__(self, listener: Listener, namespace: str = "local") -> None:
        self.identity = Identity(namespace, 1000, 4321, True)
        self.closed = False
        self.hung_up = False
        self.watch: Any = None
        self.process: Any = None
        self.bound: dict[bytes, int] = {}
        self.undelivered = Undelivered()
        self.out_bytes = 0
        self._listener = listener

    def answer(self, call: Call, reply: Reply) -> None:
        self._listener.heard(call, reply)

    def refuse(self, call: Call, error: PeerError) -> None:
        self._listener.heard(call, {"error": error.code, "text": error.text})

    def notify(self, method: str, params: Reply) -> int:
        raise AssertionError(f"nobody watches here: {method} {params}")

    def challenge(self, call: Call) -> None:
        raise AssertionError(f"nobody binds to a process here: {call.request}")

    def pidfd(self) -> int:
        raise OSError("no process behind this caller")

    def gone(self) -> bool:
        return self.hung_up


class Flight:
    """A flush under way."""

    def __init__(self, ops: list[Op], done: Callable[[Exception | None], None]) -> None:
        self.ops = ops
        self.done = done


class Unallocated(Leases):
    """Allocating 8 MiB is most of what a start costs, and these worlds do not run out of room."""

    def _allocate(self) -> None:
        pass


class Refusing:
    """Stands before an LMDB environment and fails its write transactions, when they begin or when they are committed."""

    def __init__(self, environment: Any, at: str) -> None:
        self._environment = environment
        self._at = at

    def begin(self, *arguments: Any, **options: Any) -> Any:
        if not options.get("write"):
            return self._environment.begin(*arguments, **options)
        if self._at == "begin":
            raise lmdb.DiskError("no room")
        return _Uncommitted(self._environment.begin(*arguments, **options))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._environment, name)


class _Uncommitted:
    def __init__(self, transaction: Any) -> None:
        self._transaction = transaction

    def commit(self) -> None:
        self._transaction.abort()
        raise lmdb.MapFullError("no room")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transaction, name)
