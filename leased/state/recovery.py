"""What a start finds, and what may have been forgotten.

`take_over` runs with both directories locked and before anybody is listened to.  It decides between four situations, in one transaction
on `leases`:

* `leases` is of this boot and matches the ledger: it is the truth; the ledger is brought up to it.  Nothing waits.
* there is no ledger but `leases` is there: the ledger is rebuilt from it.  Nothing waits.
* `leases` is gone, of another boot, or not the one the ledger last saw: it is made anew from the ledger.  After a clean stop the
  ledger has every lease and nothing waits (unless a foreign `leases` shows that something else ran); otherwise leases up to wait_out seconds
  may have been forgotten, and nothing is granted until they must have lapsed.
* the ledger is a restored backup: every lease in it is of another time.  Nothing is granted for the longest ttl there is.

The wait counts from now, when this process holds the locks, never from the boot: the leases waited for may have been granted until then.
"""

from __future__ import annotations

import secrets
from typing import Final, NamedTuple

from leased.errors import StateRefused
from leased.generations import HEADROOM
from leased.model import MAX_GENERATION, MAX_TTL_SECONDS, Lease
from leased.state.leases import Leases, LeasesMeta, Start
from leased.state.ledger import INITIALISED, NOT_A_COPY, Ledger, LedgerLease, LedgerMeta, Op
from leased.state.records import RecordDamaged, decode_lease, encode_lease
from leased.state.survey import Promises, Rows, compare
from leased.state.switch_records import decode_switch, encode_switch

NEVER_STARTED: Final = Start(0, "")
UNREADABLE: Final = b"\0"  # no record is as short: its reader sets the key aside


class TakenOver(NamedTuple):
    """The outcome: what the start must flush (`first`, then `second`), and what the daemon begins with.  `story` says in a few words
    which situation was met; `known` is what the ledger holds: (generation, ttl) by key hash; `rows` is what
    `leases` holds, for whoever loads them."""

    meta: LeasesMeta
    first: list[Op]
    second: list[Op]
    known: dict[bytes, tuple[int, float]]
    rows: Rows
    last: int
    mark: int
    wait_out: float
    waiting: bool
    story: str
    rebuilt: bool = False


def take_over(
    leases: Leases,
    ledger: Ledger,
    *,
    wait_out: float,
    boot: float,
    boot_id: str,
    rows: bytes = b"",
    promised: bytes = b"",
) -> TakenOver:
    """Raises StateRefused for a ledger that must not be used as it is.  `wait_out` is the configured one, in seconds.  `rows` and `promised` are
    what both tables of leases hold at this moment, packed, if whoever calls knows: then they are not read again."""
    theirs = ledger.read_meta()
    ours, lost_because = _usable(leases, boot, boot_id)
    if theirs is None:
        if ours is None:
            found = _first_start(leases, ledger, lost_because, wait_out, boot, boot_id)
        else:
            found = _Found(
                ours, "the ledger was missing and is rebuilt from the volatile state", ours.wait_out, ours.no_grant_before
            )
    else:
        found = _compare(ours, theirs, ledger, lost_because, wait_out, boot, boot_id)
    waiting = found.no_grant_before > boot
    in_force = found.wait_out if waiting else wait_out
    meta = found.meta._replace(boot_id=boot_id, wait_out=found.wait_out, no_grant_before=found.no_grant_before if waiting else 0.0)
    last = _store(leases, ledger, found, meta, boot, theirs)
    if found.rows is not None:  # `leases` has been made anew
        rows = b""
    looked = Rows.unpacked(rows) if rows else _looked(leases)
    promises = Promises.unpacked(promised) if promised else _promised(ledger)
    first, known = _missing(leases, looked, promises, in_force, boot)
    first += _forgotten_switches(leases, ledger)
    if theirs is None:
        base = LedgerMeta(meta.install_id, meta.secret, last, meta.incarnation, boot_id, meta.start, found.wait_out)
        first.insert(0, ("new", base))
    number = 1 + max(meta.start.number, meta.next_start.number, theirs.start.number if theirs else 0)
    following = Start(number, secrets.token_hex(16))
    second: list[Op] = [
        *([("uncopy", in_force)] if theirs is not None and theirs.clean else []),
        ("mark", last),  # a generation of a lease nobody was told of may stand above the mark; from now on it may be told
        (
            "meta",
            {
                "incarnation": meta.incarnation,
                "boot_id": boot_id,
                "start": list(following),
                "wait_out": in_force,
                "clean": False,
                "restored": theirs.restored if theirs and waiting else 0,
            },
        ),
    ]
    adopted = meta._replace(start=theirs.start) if theirs and theirs.start == meta.next_start else meta
    return TakenOver(
        adopted._replace(next_start=following),
        first,
        second,
        known,
        looked,
        last,
        theirs.mark if theirs is not None else 0,
        in_force,
        waiting,
        found.story,
        theirs is None and ours is not None,
    )


class _Found(NamedTuple):
    """`rows` None: `leases` is kept as it is; otherwise it is emptied and these go in.  A row that is None was damaged in the ledger: it goes
    in as a record nobody can read, so that its key is set aside for as long as it may have been promised."""

    meta: LeasesMeta
    story: str
    wait_out: float
    no_grant_before: float
    rows: dict[bytes, Lease | None] | None = None


def _usable(leases: Leases, boot: float, boot_id: str) -> tuple[LeasesMeta | None, str]:
    """The meta of `leases` when it is of this boot; otherwise None and why."""
    try:
        meta, tick = leases.read_meta(), leases.read_tick()
        leases.read_last()  # without it no generation could be handed out that is known to be new
    except RecordDamaged as error:
        return None, str(error)
    if meta is None:
        return None, ""
    if meta.boot_id != boot_id:
        return None, "it is of another boot"
    if tick > boot:
        return None, "the boot clock stands behind its last tick"
    return meta, ""


def _read(ledger: Ledger) -> dict[bytes, LedgerLease | None]:
    """None where a row is damaged: whose lease it was cannot be told, but its key can."""
    with ledger.environment.begin() as transaction:
        return {key_hash: entry for key_hash, entry, _ in ledger.rows(transaction)}


def _first_start(leases: Leases, ledger: Ledger, lost_because: str, wait_out: float, boot: float, boot_id: str) -> _Found:
    if (ledger.directory / INITIALISED).exists():
        raise StateRefused(
            f"{ledger.directory}/data.mdb is empty but {INITIALISED} beside it says it was in use: restore a backup with `leased restore`, "
            f"or, if no lease can be held any more, remove {ledger.directory}/{INITIALISED} to begin anew"
        )
    install_id, secret = secrets.token_hex(16), secrets.token_hex(32)
    story, until = "first start", 0.0
    if lost_because:  # a volatile state without its ledger, and not of this boot: long leases may have been forgotten
        story = f"the ledger is missing and the volatile state is of no use ({lost_because}): waiting out the longest ttl"
        until = boot + MAX_TTL_SECONDS
    meta = LeasesMeta(secrets.token_hex(16), boot_id, NEVER_STARTED, NEVER_STARTED, wait_out, install_id, secret, until)
    return _Found(meta, story, wait_out, until, {})


def _compare(
    ours: LeasesMeta | None,
    theirs: LedgerMeta,
    ledger: Ledger,
    lost_because: str,
    wait_out: float,
    boot: float,
    boot_id: str,
) -> _Found:
    if ours is not None and not theirs.restored and _matches(ours, theirs):
        return _Found(ours, "the volatile state was kept", ours.wait_out, ours.no_grant_before)
    anew = LeasesMeta(
        secrets.token_hex(16), boot_id, NEVER_STARTED, NEVER_STARTED, theirs.wait_out, theirs.install_id, theirs.secret, 0.0
    )
    if theirs.restored:
        seconds = 0.0 if theirs.restored == 2 else MAX_TTL_SECONDS
        return _Found(anew, "a restored backup", theirs.wait_out, boot + seconds, {})
    entries = _read(ledger)
    why = lost_because or ("it is not the one the ledger last saw" if ours is not None else "it is gone")
    seconds = max(theirs.wait_out, wait_out)
    if theirs.clean:
        same_boot = theirs.boot_id == boot_id
        copies = {key_hash: entry and _copied(entry, same_boot, boot) for key_hash, entry in entries.items()}
        rows = {key_hash: copy for key_hash, copy in copies.items() if copy is not None or entries[key_hash] is None}
        story = f"stopped in order; the volatile state is made anew ({why})"
        return _Found(anew, story, theirs.wait_out, boot + seconds if ours is not None else 0.0, rows)
    rows = {key_hash: entry and _full(entry.lease, boot) for key_hash, entry in entries.items()}
    return _Found(anew, f"the volatile state is made anew ({why}): waiting out", theirs.wait_out, boot + seconds, rows)


def _matches(ours: LeasesMeta, theirs: LedgerMeta) -> bool:
    """Is `leases` the one the ledger last saw, or one that has gone on since?"""
    return ours.incarnation == theirs.incarnation and (
        theirs.start in {ours.start, ours.next_start} or theirs.start.number < ours.start.number
    )


def _full(lease: Lease, boot: float) -> Lease:
    """A lease that comes back from the ledger lives its whole ttl again: it may end late, never early."""
    deadline = boot + lease.ttl
    return lease._replace(
        deadline=deadline, rid_until=deadline if lease.rid else 0.0, unflushed=False, previous_ttl=0.0, previous_deadline=0.0
    )


def _copied(entry: LedgerLease, same_boot: bool, boot: float) -> Lease | None:
    """A lease written at a clean stop: within one boot its deadline stands, after a reboot what remained of it."""
    if entry.remaining == NOT_A_COPY:
        return None
    lease = entry.lease if same_boot else entry.lease._replace(deadline=boot + entry.remaining)
    if lease.rid and not same_boot:
        lease = lease._replace(rid_until=boot + max(0.0, entry.lease.rid_until - entry.lease.deadline + entry.remaining))
    return lease if lease.deadline > boot else None


def _store(leases: Leases, ledger: Ledger, found: _Found, meta: LeasesMeta, boot: float, theirs: LedgerMeta | None) -> int:
    """The one transaction that takes `leases` over.  Returns the last generation handed out, as far as is known."""
    try:
        last = leases.read_last()
    except RecordDamaged:
        last = 0
    if found.rows is not None and theirs is not None:
        last = min(MAX_GENERATION, theirs.mark + HEADROOM)  # a refusal may have named one above the mark that nobody was granted
    with leases.environment.begin(write=True) as transaction:
        if found.rows is not None:
            for table in (leases.leases, leases.tombstones, leases.meta, leases.events, leases.billed, leases.switches):
                transaction.drop(table, delete=False)
            for key_hash, lease in found.rows.items():
                transaction.put(key_hash, UNREADABLE if lease is None else encode_lease(lease), db=leases.leases)
            leases.put_last(transaction, last)
            with ledger.environment.begin() as reading:
                for key, record in reading.cursor(db=ledger.switches):
                    transaction.put(
                        bytes(key),
                        _of_another_boot(bytes(record)) if theirs and theirs.restored else bytes(record),
                        db=leases.switches,
                    )
        leases.put_meta(transaction, meta)
        leases.put_tick(transaction, boot)
    return last


def _of_another_boot(record: bytes) -> bytes:
    """A switch from a backup: whatever boot it was armed in, it gets its whole time again."""
    try:
        return encode_switch(decode_switch(record)._replace(boot_id=""))
    except RecordDamaged:
        return record


def _looked(leases: Leases) -> Rows:
    rows = Rows()
    with leases.environment.begin() as transaction:
        rows.read(transaction.cursor(db=leases.leases))
    return rows


def _promised(ledger: Ledger) -> Promises:
    with ledger.environment.begin() as transaction:
        return Promises.of(transaction.cursor(db=ledger.leases))


def _missing(
    leases: Leases, rows: Rows, promises: Promises, wait_out: float, boot: float
) -> tuple[list[Op], dict[bytes, tuple[int, float]]]:
    """What the ledger lacks: every live lease above `wait_out`; and what it should not have: records of leases that are no more.
    With it, what the ledger holds."""
    found = compare(rows, promises, wait_out, boot)
    with leases.environment.begin() as ours:
        ops: list[Op] = [("del", key_hash, generation) for key_hash, generation in found.over]
        for key_hash, generation in found.strangers:
            if (
                ours.get(key_hash, db=leases.leases) is None
            ):  # else: one that cannot be read, and this may be the only account of it
                ops.append(("del", key_hash, generation))
        for key_hash in found.lacking:
            raw = ours.get(key_hash, db=leases.leases)
            if raw is not None:
                ops.append(("put", key_hash, LedgerLease(decode_lease(raw))))
    return ops, found.known


def _forgotten_switches(leases: Leases, ledger: Ledger) -> list[Op]:
    """Deletes of the switches only the ledger has: disarmed, and the daemon ended before it had told the ledger.  Those in `leases` are written
    anew by whoever loads them; of these nobody else knows, and the next power cut would arm them again."""
    with leases.environment.begin() as ours, ledger.environment.begin() as theirs:
        keys = [bytes(key) for key in theirs.cursor(db=ledger.switches).iternext(values=False)]
        return [("switch", key, None) for key in keys if ours.get(key, db=leases.switches) is None]
