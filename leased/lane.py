"""The lane: one write transaction on `leases` at a time, and what is to happen once it is committed.

Decisions stage their writes in the open transaction and their consequences (answers, index changes, ledger operations) in `after`.
A commit runs `after` in order; an abort forgets it, so nothing in memory ever runs ahead of the records.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import Any

import structlog

from leased.errors import LeasedError
from leased.state.environment import MapFull, NotWritten
from leased.state.leases import Leases

log = structlog.get_logger()


class Outcome(Enum):
    COMMITTED = "committed"
    ABORTED = "aborted"
    UNKNOWN = "unknown"


class Lane:
    """`transaction` is open only inside `run`.  `broken` says why nothing can be written at all; `reread` is called after the
    environment had to be opened anew, to rebuild what memory knows from the records."""

    def __init__(self, leases: Leases, reread: Callable[[], None]) -> None:
        self.leases = leases
        self.transaction: Any = None
        self.broken = ""
        self._reread = reread
        self._after: list[tuple[Callable[..., object], tuple[Any, ...]]] = []
        self._undo: list[Callable[[], None]] = []
        self.granted: dict[str, int] = {}  # by namespace, in this transaction: what the index does not count yet
        self.rids: dict[bytes, bytes] = {}  # request ids granted in this transaction -> key hash
        self.last_error = ""
        self.commits = 0
        self.aborts = 0

    def after(self, consequence: Callable[..., object], *arguments: Any) -> None:
        self._after.append((consequence, arguments))

    def on_abort(self, undo: Callable[[], None]) -> None:
        """For the rare decision that must mark something in memory so that a later one of the same transaction sees it."""
        self._undo.append(undo)

    def run(self, work: Callable[..., None], *arguments: Any) -> Outcome:
        """One transaction around `work`.  COMMITTED: its consequences have happened.  ABORTED: nothing has.  UNKNOWN: the commit
        failed half-way or nothing can be written; memory has been rebuilt from what is there, and callers are told null."""
        if self.broken and not self.mend():
            return Outcome.UNKNOWN
        self._after.clear()
        self._undo.clear()
        self.granted.clear()
        self.rids.clear()
        try:
            self.transaction = self.leases.environment.begin(write=True)
            work(*arguments)
        except NotWritten as error:
            self._abort()
            self.last_error = str(error)
            return Outcome.ABORTED
        except BaseException:
            self._abort()
            raise
        transaction, self.transaction = self.transaction, None
        try:
            transaction.commit()
        except MapFull as error:  # LMDB has aborted it: the outcome is known, nothing was written
            self._rolled_back()
            self.last_error = str(error)
            return Outcome.ABORTED
        except NotWritten as error:
            self._rolled_back()
            log.error("store.commit_failed", error=str(error))
            self.broken = str(error) or "commit failed"
            self.mend()
            return Outcome.UNKNOWN
        self.commits += 1
        consequences, self._after = self._after, []
        failed = False
        for consequence, arguments in consequences:
            try:
                consequence(*arguments)
            except (
                Exception
            ):  # a mistake of ours: what is written stands, the others are told, and memory is rebuilt from the records
                log.exception("lane.failed", consequence=getattr(consequence, "__qualname__", "?"))
                failed = True
        if failed:
            self.mend()
        return Outcome.COMMITTED

    def mend(self) -> bool:
        """Open the environment anew and rebuild memory from it.  True when it can be used again."""
        try:
            self.leases.reopen()
            self._reread()
        except (LeasedError, NotWritten, OSError) as error:
            self.broken = str(error)
            return False
        self.broken = ""
        log.warning("store.reopened")
        return True

    def _abort(self) -> None:
        if self.transaction is not None:
            try:
                self.transaction.abort()
            except NotWritten:
                pass
            self.transaction = None
        self._rolled_back()

    def _rolled_back(self) -> None:
        self.aborts += 1
        self._after.clear()
        for undo in reversed(self._undo):
            undo()
        self._undo.clear()
