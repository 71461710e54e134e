"""A state as a daemon leaves it, made with the daemon's own parts, and changed behind its back.  Real LMDB, a clock that stands still.

The host has been up for BOOT seconds.  Of what was granted, `LONG` (600 s) is in the ledger, `SHORT` (30 s) is not, and `ENDED` was a long
lease whose delete has not been sent.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from leased.clock import Now
from leased.config import Config, parse
from leased.model import Lease, Tombstone
from leased.state.environment import DirectoryLock
from leased.state.leases import META_VERSION, Leases
from leased.state.ledger import Ledger, LedgerLease, encode_ledger_lease, row_key_of, write_initialised
from leased.state.records import seal, unseal
from leased.state.recovery import take_over
from leased.state.switch_records import Switch, encode_switch

BOOT = 5000.0
BOOT_ID = "boot-a"
WALL = 1_800_000_000.0
FIRST = 1_800_000_000_000_000
LONG, SHORT, ENDED, OTHER = (bytes([number]) * 20 for number in (1, 2, 3, 4))
LONG_ROW, SHORT_ROW, ENDED_ROW = (
    row_key_of(LONG, FIRST),
    row_key_of(SHORT, FIRST + 1),
    row_key_of(ENDED, FIRST + 2),
)  # in the ledger
RID, SPENT = b"r" * 16, b"s" * 16


class StoppedClock:
    def __init__(self, boot: float = BOOT, boot_id: str = BOOT_ID) -> None:
        self._now = Now(boot, WALL)
        self._boot_id = boot_id

    def now(self) -> Now:
        return self._now

    def boot_id(self) -> str:
        return self._boot_id


def config_of(root: Path, **changes: Any) -> Config:
    made = parse(
        "", source="test", root=False, environ={}, socket=str(root / "s"), state_dir=str(root / "state"), runtime_dir=str(root / "run")
    )  # fmt: skip
    return dataclasses.replace(made, max_leases=100, **changes)


def lease_of(generation: int, ttl: float, **changes: Any) -> Lease:
    return Lease("local", "worker", None, generation, b"p" * 16, ttl, BOOT + ttl - 1.0)._replace(**changes)


def make(root: Path, *, clean: bool = False) -> None:
    """Both directories below `root`.  `clean`: stopped in order, else killed."""
    for name in ("state", "run"):
        DirectoryLock(root / name).close()
    ledger, leases = Ledger(root / "state"), Leases(root / "run", 100)
    taken = take_over(leases, ledger, wait_out=60.0, boot=BOOT - 10.0, boot_id=BOOT_ID)
    rows = {LONG: lease_of(FIRST, 600.0, rid=RID, sealed=7, rid_until=BOOT + 599.0), SHORT: lease_of(FIRST + 1, 30.0)}
    switch = encode_switch(Switch("local", "night", True, 60.0, BOOT + 30.0, BOOT_ID))
    ledger.apply([*taken.first, *taken.second, ("mark", FIRST + 60_000_000), ("switch", b"k" * 20, switch)])
    with leases.environment.begin(write=True) as transaction:
        leases.put_meta(transaction, taken.meta._replace(start=taken.meta.next_start))
        leases.put_last(transaction, FIRST + 2)
        leases.put_tick(transaction, BOOT - 0.5)
        transaction.put(b"k" * 20, switch, db=leases.switches)
        for key_hash, lease in rows.items():
            leases.put(transaction, key_hash, lease)
        leases.put_tombstone(transaction, SPENT, Tombstone(ENDED, b"h" * 16, BOOT + 100.0))
    ledger.apply([("put", LONG, LedgerLease(rows[LONG])), ("put", ENDED, LedgerLease(lease_of(FIRST + 2, 900.0)))])
    if clean:
        copies = [("put", key_hash, LedgerLease(lease, lease.deadline - BOOT)) for key_hash, lease in rows.items()]
        ledger.apply([*copies, ("del", ENDED, FIRST + 2), ("meta", {"clean": True, "mark": FIRST + 2, "boot_id": BOOT_ID})])
    write_initialised(root / "state", taken.meta.install_id)
    ledger.close()
    leases.close()


def copy_of(template: Path, root: Path) -> Path:
    for name in ("state", "run"):
        shutil.copytree(template / name, root / name)
        (root / name).chmod(0o700)
    return root


@contextmanager
def opened_ledger(root: Path) -> Iterator[tuple[Ledger, Any]]:
    ledger = Ledger(root / "state")
    try:
        with ledger.environment.begin(write=True) as transaction:
            yield ledger, transaction
    finally:
        ledger.close()


@contextmanager
def opened_leases(root: Path) -> Iterator[tuple[Leases, Any]]:
    leases = Leases(root / "run", 100)
    try:
        with leases.environment.begin(write=True) as transaction:
            yield leases, transaction
    finally:
        leases.close()


def change_meta(transaction: Any, table: Any, **changes: Any) -> None:
    """A change of None takes the field away."""
    fields = json.loads(unseal(transaction.get(b"meta", db=table), META_VERSION, "meta")) | changes
    kept = {name: value for name, value in fields.items() if value is not None}
    transaction.put(b"meta", seal(META_VERSION, json.dumps(kept).encode()), db=table)


def put_in_ledger(ledger: Ledger, transaction: Any, key_hash: bytes, entry: LedgerLease) -> None:
    transaction.put(row_key_of(key_hash, entry.lease.generation), encode_ledger_lease(entry), db=ledger.leases)


def spoil(transaction: Any, key: bytes, table: Any) -> None:
    """Flip one bit of a record."""
    raw = bytearray(transaction.get(key, db=table))
    raw[len(raw) // 2] ^= 1
    transaction.put(key, bytes(raw), db=table)


def page_of(path: Path, text: bytes) -> int:
    """The number of the newest page that holds `text`."""
    return path.read_bytes().rindex(text) // 4096


def zero_page(path: Path, number: int) -> None:
    descriptor = os.open(path, os.O_WRONLY)
    os.pwrite(descriptor, bytes(4096), number * 4096)
    os.close(descriptor)
