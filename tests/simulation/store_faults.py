"""What can go wrong with the volatile store, at a place the seed chooses.

A trap counts write transactions and their operations.  Sprung, it kills the daemon before or after a commit (`SimulatedCrash`, which nothing
in the daemon may catch), or makes LMDB report an error, having done nothing: a commit that fails after its meta page was written writes the
old one back before it says so.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import lmdb

Operation = Literal["begin", "put", "commit"]
Action = Literal["crash_before", "crash_after", "error", "full"]


class SimulatedCrash(BaseException):
    """kill -9: the process is no more.  Not an Exception, so that no `except` of the daemon survives its own death."""


@dataclass
class Trap:
    """`number` counts from 1, over commits of `kind` only when one is given: the name of the work the lane runs."""

    operation: Operation
    action: Action
    number: int
    kind: str = ""


class Traps:
    """`unseen` is called when something has been committed of which the daemon's memory will not hear."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self.armed: list[Trap] = []
        self.kind = ""
        self.unseen: Callable[[], None] = lambda: None
        self.crashed: Counter[tuple[str, str]] = Counter()
        self.sprung = 0
        self.sprung_at = float("-inf")

    def meets(self, operation: Operation) -> Action | None:
        for trap in self.armed:
            crash = trap.action.startswith("crash")
            if trap.operation == operation and trap.kind in ("", self.kind) and (crash or self.kind != "take_over"):
                trap.number -= 1
                if trap.number == 0:
                    self.armed.remove(trap)
                    self.sprung += 1
                    self.sprung_at = self._now()
                    if crash:
                        self.crashed[self.kind, trap.action] += 1
                    return trap.action
        return None


class FaultyEnvironment:
    """An LMDB environment whose write transactions can fail.  Reads are the real ones."""

    def __init__(self, real: Any, traps: Traps) -> None:
        self._real = real
        self._traps = traps

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def begin(self, *, write: bool = False, **more: Any) -> Any:
        if not write:
            return self._real.begin(**more)
        if self._traps.meets("begin") is not None:
            raise lmdb.Error("injected: mdb_txn_begin")
        return FaultyTransaction(self._real.begin(write=True, **more), self._traps)


class FaultyTransaction:
    def __init__(self, real: Any, traps: Traps) -> None:
        self._real = real
        self._traps = traps
        self.get = real.get
        self.delete = real.delete
        self.cursor = real.cursor
        self.stat = real.stat
        self.drop = real.drop
        self.abort = real.abort

    def put(self, *arguments: Any, **more: Any) -> bool:
        if self._traps.armed and (action := self._traps.meets("put")) is not None:
            raise (lmdb.MapFullError if action == "full" else lmdb.Error)("injected: mdb_put")
        written: bool = self._real.put(*arguments, **more)
        return written

    def commit(self) -> None:
        action = self._traps.meets("commit") if self._traps.armed else None
        if action is None:
            self._real.commit()
            return
        if action == "crash_after":
            self._real.commit()
            self._traps.unseen()
        else:
            self._real.abort()
        if action.startswith("crash"):
            raise SimulatedCrash
        raise (lmdb.MapFullError if action == "full" else lmdb.Error)("injected: mdb_txn_commit")

    def __enter__(self) -> FaultyTransaction:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if kind is None:
            self.commit()
        else:
            self._real.abort()
