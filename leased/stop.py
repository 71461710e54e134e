"""A stop in order: the ledger is told of every live lease, so that the next start has nothing to wait for."""

from __future__ import annotations

from leased.lessor import Lessor
from leased.start import Start
from leased.state.ledger import LedgerLease
from leased.switches import Switches


def copy_out(lessor: Lessor, start: Start, switches: Switches) -> bool:
    """Queue and start the one flush that copies every live lease and marks the ledger clean.

    False when it must not be marked: while the daemon waits out what may have been forgotten, before its start was written, or while
    a lease is not flushed yet.
    """
    if not start.started or not lessor.gate.settled or len(lessor.holds):
        return False
    now = lessor.instant()
    journal = lessor.journal
    live: set[bytes] = set()
    with lessor.leases.environment.begin() as transaction:
        for key_hash, lease, _ in lessor.leases.rows(transaction):
            if lease is None:
                return False  # what it promised cannot be copied
            if lease.unflushed:
                return False
            if lease.deadline > now.boot:
                live.add(key_hash)
                journal.put(key_hash, LedgerLease(lease, lease.deadline - now.boot))
    switches.each_second()
    for key_hash in journal.held():
        if key_hash not in live:
            journal.end(key_hash)
    journal.append(("meta", {"clean": True, "mark": lessor.generations.last, "boot_id": now.boot_id}))
    journal.kick(now.boot, force=True)
    return journal.busy
