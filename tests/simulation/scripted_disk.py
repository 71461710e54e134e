"""The ledger's disk: what a power cut would bring back, and a writer whose flushes take as long and end as the seed says.

What the ledger shows when read and what is on the disk are two things: after a failed flush either may be the old or the new, until the next
success.  `Snapshot` reads the operations of the journal a second time, in plain dictionaries.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import trio
from host import pause
from store_faults import SimulatedCrash

from leased.errors import StoreError
from leased.state.ledger import NOT_A_COPY, Ledger, Op

META = ("mark", "wait_out", "clean", "incarnation", "boot_id")
Ending = Literal["written", "old", "new", "crash_before", "crash_after"]


@dataclass(frozen=True)
class Snapshot:
    """One state the disk may be in: (generation, ttl, is a clean copy) by key hash."""

    rows: dict[bytes, tuple[int, float, bool]] = field(default_factory=dict)
    mark: int = 0
    wait_out: float = 0.0
    clean: bool = False
    exists: bool = False
    incarnation: str = ""
    boot_id: str = ""

    def after(self, ops: list[Op]) -> Snapshot:
        rows = dict(self.rows)
        changed = self
        for op in ops:
            if op[0] == "put":
                lease, remaining = op[2]
                there = rows.get(op[1])
                if there and remaining == NOT_A_COPY and there[0] == lease.generation and there[1] > lease.ttl:
                    continue
                rows[op[1]] = (lease.generation, lease.ttl, remaining != NOT_A_COPY)
            elif op[0] == "del":
                if op[1] in rows and rows[op[1]][0] == op[2]:
                    del rows[op[1]]
            elif op[0] == "new" and not changed.exists:
                changed = replace(changed, exists=True, **{name: getattr(op[1], name) for name in META})
            elif op[0] == "mark":
                changed = replace(changed, mark=max(changed.mark, op[1]))
            elif op[0] == "meta":
                known = {name: op[1][name] for name in META if name in op[1]}
                changed = replace(changed, **known)
            elif op[0] == "uncopy":
                rows = {key: (row[0], row[1], False) for key, row in rows.items() if not row[2] or row[1] > op[1]}
        return replace(changed, rows=rows)


class Disk:
    """`shown` is what the ledger shows when read; `possible` what a power cut may leave, with the bytes to leave it with."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.shown = Snapshot()
        self.possible: list[tuple[Snapshot, bytes]] = [(self.shown, b"")]
        self.flying: list[Op] | None = None

    def all_possible(self) -> list[Snapshot]:
        """Every state a power cut at this moment may bring back, the flush under way included."""
        standing = [snapshot for snapshot, _ in self.possible]
        return standing if self.flying is None else [*standing, self.shown.after(self.flying)]

    def landed(self, ops: list[Op], *, certain: bool) -> None:
        """`ops` are in the file; `certain` when the flush said so."""
        self.shown = self.shown.after(ops)
        now = (self.shown, self.path.read_bytes())
        self.possible = [now] if certain else [*self.possible, now]

    def vanished(self, ops: list[Op], before: bytes) -> None:
        """The file shows nothing of `ops`, the disk may."""
        self.possible.append((self.shown.after(ops), self.path.read_bytes()))
        self.path.write_bytes(before)

    def cut(self, choice: int) -> None:
        """Power is back: the disk is one of what it may be."""
        snapshot, content = self.possible[choice % len(self.possible)]
        self.path.write_bytes(content)
        self.shown, self.possible, self.flying = snapshot, [(snapshot, content)], None


@dataclass
class Flight:
    """How one flush goes: it takes `seconds`, then ends."""

    seconds: float
    ending: Ending = "written"


class ScriptedWriter:
    """In place of the ledger's thread.  `next_flight` says how each flush goes."""

    def __init__(
        self,
        ledger: Ledger,
        disk: Disk,
        nursery: trio.Nursery,
        awake: Callable[[], Any],
        next_flight: Callable[[list[Op]], Flight],
        notify: Callable[[Callable[[], None]], None],
        landed: Callable[[], None],
        heard: Callable[[bool], None],
    ) -> None:
        self._ledger = ledger
        self._disk = disk
        self._nursery = nursery
        self._awake = awake
        self._next_flight = next_flight
        self._notify = notify
        self._landed = landed
        self._heard = heard
        self._unproven = True  # that the disk takes what is written

    def write(self, ops: list[Op], done: Callable[[Exception | None], None]) -> None:
        assert self._disk.flying is None, "two flushes at once"
        self._disk.flying = ops
        self._nursery.start_soon(self._fly, ops, done, self._next_flight(ops))

    def stop(self, timeout_seconds: float) -> bool:
        return self._disk.flying is None

    async def _fly(self, ops: list[Op], done: Callable[[Exception | None], None], flight: Flight) -> None:
        """A kill leaves the flush as it was: nothing of it in the file."""
        await pause(flight.seconds)
        await self._awake()
        disk = self._disk
        if flight.ending == "crash_before":
            raise SimulatedCrash
        before = disk.path.read_bytes() if flight.ending == "old" else b""
        self._ledger.apply(ops, prove=self._unproven)
        self._unproven = flight.ending != "written"
        disk.flying = None
        if flight.ending == "old":
            self._ledger.environment.close()
            disk.vanished(ops, before)
            self._ledger._open()
        else:
            disk.landed(ops, certain=flight.ending != "new")
        if flight.ending == "crash_after":
            raise SimulatedCrash
        self._landed()
        self._notify(lambda: self._told(done, certain=flight.ending == "written"))

    def _told(self, done: Callable[[Exception | None], None], *, certain: bool) -> None:
        self._heard(certain)
        done(None if certain else StoreError("injected: the flush failed"))
