"""The ledger's side of billing: events on their way upstream, what has been billed once, and the totals.

Events come over from `leases` by a sequence number of that incarnation; the ledger remembers the last one it has, so that a copy repeated
after a crash is neither stored nor counted twice.  Operations here are `ledger.Op`s: the first word names the function.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterator
from typing import Any, Final, NamedTuple

from leased.state.records import RecordDamaged, seal, unseal
from leased.tariff import REFUSAL, Event, hour_of

EVENT_VERSION: Final = 1
DEAD_VERSION: Final = 1
COUNT_VERSION: Final = 1
SEQUENCE: Final = struct.Struct(">Q")
_SECONDS: Final = struct.Struct("<d")
_COPIED: Final = b"copied"
_OVERFLOW: Final = b"overflow"
_SEQUENCE: Final = b"sequence"


def encode_event(event: Event) -> bytes:
    return seal(EVENT_VERSION, json.dumps(event, ensure_ascii=False, separators=(",", ":")).encode())


def decode_event(record: bytes) -> Event:
    """Raises RecordDamaged or StateRefused."""
    try:
        return Event(*json.loads(unseal(record, EVENT_VERSION, "event")))
    except (ValueError, TypeError) as error:
        raise RecordDamaged(f"an event record cannot be read: {error}") from error


class Waiting(NamedTuple):
    """One event in the outbox, oldest first.  `event` is None where the record is damaged: it goes to the dead letters."""

    sequence: int
    event: Event | None


# ---- operations inside a ledger transaction


def copy_event(ledger: Any, transaction: Any, incarnation: str, number: int, record: bytes, most: int) -> None:
    """Take over event `number` of `incarnation`: into the outbox (unless `most` wait there already: then it is counted and
    the overflow with it), the billed-once records and the totals."""
    raw = transaction.get(_COPIED, db=ledger.meta)
    if raw is not None:
        known, last = json.loads(unseal(bytes(raw), COUNT_VERSION, "copied"))
        if known == incarnation and number <= last:
            return
    transaction.put(_COPIED, seal(COUNT_VERSION, json.dumps([incarnation, number]).encode()), db=ledger.meta)
    event = decode_event(record)
    if event.kind == REFUSAL:
        if transaction.get(bytes.fromhex(event.id), db=ledger.billed) is not None:
            return  # the same fact by another incarnation: it is in the outbox or shipped, and counted
        transaction.put(bytes.fromhex(event.id), seal(COUNT_VERSION, _SECONDS.pack(event.wall)), db=ledger.billed)
    _count(ledger, transaction, event)
    if transaction.stat(ledger.outbox)["entries"] >= most:
        _add(ledger, transaction, _OVERFLOW, 1)
        return
    cursor = transaction.cursor(db=ledger.outbox)
    following = SEQUENCE.unpack(cursor.key())[0] + 1 if cursor.last() else 1
    following = max(following, _number(transaction.get(_SEQUENCE, db=ledger.meta)) + 1)
    transaction.put(SEQUENCE.pack(following), record, db=ledger.outbox)
    transaction.put(_SEQUENCE, seal(COUNT_VERSION, SEQUENCE.pack(following)), db=ledger.meta)


def drop_shipped(ledger: Any, transaction: Any, sequences: list[int]) -> None:
    for sequence in sequences:
        transaction.delete(SEQUENCE.pack(sequence), db=ledger.outbox)


def bury(ledger: Any, transaction: Any, sequence: int, why: str) -> None:
    """An event upstream will never take moves to the dead letters, with the reason, for an operator to retry or drop."""
    key = SEQUENCE.pack(sequence)
    raw = transaction.pop(key, db=ledger.outbox)
    if raw is not None:
        letter = seal(DEAD_VERSION, json.dumps([bytes(raw).hex(), why[:500]]).encode())
        transaction.put(key, letter, db=ledger.dead)


def unbury(ledger: Any, transaction: Any, sequences: list[int], keep: bool) -> None:
    """Dead letters go back into the outbox (`keep`) under their old place, or for good."""
    for sequence in sequences:
        raw = transaction.pop(SEQUENCE.pack(sequence), db=ledger.dead)
        if raw is not None and keep:
            record, _ = json.loads(unseal(bytes(raw), DEAD_VERSION, "dead letter"))
            transaction.put(SEQUENCE.pack(sequence), bytes.fromhex(record), db=ledger.outbox)


def unbill(ledger: Any, transaction: Any, event_id: bytes) -> None:
    """The oldest billed-once record goes when there are too many: a repeat would carry the same id."""
    transaction.delete(event_id, db=ledger.billed)


def forget_hours(ledger: Any, transaction: Any, before: int) -> None:
    for key in [
        bytes(key) for key, _ in transaction.cursor(db=ledger.totals) if key.startswith(b"h") and _hour(bytes(key)) < before
    ]:
        transaction.delete(key, db=ledger.totals)


OPS: Final[dict[str, Callable[..., None]]] = {
    "event": copy_event,
    "shipped": drop_shipped,
    "bury": bury,
    "unbury": unbury,
    "unbill": unbill,
    "forget_hours": forget_hours,
}
REPEATABLE: Final = frozenset(OPS)
"""All of them may be applied again after a flush whose outcome is not known."""


def _count(ledger: Any, transaction: Any, event: Event) -> None:
    key = b"h" + event.namespace.encode() + b"\0" + SEQUENCE.pack(hour_of(event.wall))
    raw = transaction.get(key, db=ledger.totals)
    amount, refusals, calls = json.loads(unseal(bytes(raw), COUNT_VERSION, "total")) if raw is not None else (0, 0, 0)
    if event.kind == REFUSAL:
        refusals += 1
    else:
        calls += 1
    transaction.put(key, seal(COUNT_VERSION, json.dumps([amount + event.amount, refusals, calls]).encode()), db=ledger.totals)


def _add(ledger: Any, transaction: Any, key: bytes, more: int) -> None:
    standing = _number(transaction.get(key, db=ledger.totals))
    transaction.put(key, seal(COUNT_VERSION, SEQUENCE.pack(standing + more)), db=ledger.totals)


def _number(raw: Any) -> int:
    return 0 if raw is None else int(SEQUENCE.unpack(unseal(bytes(raw), COUNT_VERSION, "counter"))[0])


def _hour(key: bytes) -> int:
    return int(SEQUENCE.unpack(key[-8:])[0])


# ---- reading; at the start in the loop's thread, afterwards in the writer's


class BillingState(NamedTuple):
    """What the daemon begins with.  `billed` are (event id, wall) oldest first; `hours` by (namespace, hour)."""

    copied: tuple[str, int]
    billed: list[tuple[bytes, float]]
    hours: dict[tuple[str, int], tuple[int, int, int]]
    waiting: list[tuple[str, float]]
    dead: dict[str, int]
    overflow: int


def read_state(ledger: Any) -> BillingState:
    """Damaged rows are left out; fsck names them."""
    with ledger.environment.begin() as transaction:
        raw = transaction.get(_COPIED, db=ledger.meta)
        copied = tuple(json.loads(unseal(bytes(raw), COUNT_VERSION, "copied"))) if raw is not None else ("", 0)
        billed = sorted(_billed(transaction, ledger), key=lambda row: row[1])
        hours: dict[tuple[str, int], tuple[int, int, int]] = {}
        for key, value in transaction.cursor(db=ledger.totals):
            if bytes(key[:1]) == b"h":
                try:
                    hours[bytes(key[1:-9]).decode(), _hour(bytes(key))] = tuple(
                        json.loads(unseal(bytes(value), COUNT_VERSION, "total"))
                    )
                except RecordDamaged:
                    continue
        overflow = _number(transaction.get(_OVERFLOW, db=ledger.totals))
        waiting = [(event.namespace, event.wall) for _, event in _events(transaction, ledger.outbox, 1 << 62) if event is not None]
        dead: dict[str, int] = {}
        for _, event, _ in dead_letters(transaction, ledger):
            if event is not None:
                dead[event.namespace] = dead.get(event.namespace, 0) + 1
    return BillingState((str(copied[0]), int(copied[1])), billed, hours, waiting, dead, overflow)


def _billed(transaction: Any, ledger: Any) -> Iterator[tuple[bytes, float]]:
    for key, raw in transaction.cursor(db=ledger.billed):
        try:
            yield bytes(key), _SECONDS.unpack(unseal(bytes(raw), COUNT_VERSION, "billed-once"))[0]
        except RecordDamaged:
            yield bytes(key), 0.0  # its key says all that matters: this fact has been billed


def oldest(ledger: Any, most: int, after: int = 0) -> list[Waiting]:
    """Up to `most` events behind sequence `after`, oldest first."""
    with ledger.environment.begin() as transaction:
        return _events(transaction, ledger.outbox, most, after)


def dead_letters(transaction: Any, ledger: Any) -> list[tuple[int, Event | None, str]]:
    """(sequence, event or None where damaged, why) of every dead letter."""
    letters: list[tuple[int, Event | None, str]] = []
    for key, raw in transaction.cursor(db=ledger.dead):
        sequence = SEQUENCE.unpack(bytes(key))[0]
        try:
            record, why = json.loads(unseal(bytes(raw), DEAD_VERSION, "dead letter"))
            letters.append((sequence, decode_event(bytes.fromhex(record)), why))
        except ValueError as error:
            letters.append((sequence, None, str(error)))
    return letters


def _events(transaction: Any, table: Any, most: int, after: int = 0) -> list[Waiting]:
    found: list[Waiting] = []
    cursor = transaction.cursor(db=table)
    if not cursor.set_range(SEQUENCE.pack(after + 1)):
        return found
    for key, raw in cursor:
        if len(found) >= most:
            break
        try:
            found.append(Waiting(SEQUENCE.unpack(bytes(key))[0], decode_event(bytes(raw))))
        except RecordDamaged:
            found.append(Waiting(SEQUENCE.unpack(bytes(key))[0], None))
    return found
