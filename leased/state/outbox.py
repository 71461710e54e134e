"""The ledger's side of billing: events on their way upstream, what has been billed once, and the totals.

Events come over from `leases` by a sequence number of that incarnation; the ledger remembers the last one it has, so that a copy repeated
after a crash is neither stored nor counted twice.  Operations here are `ledger.Op`s: the first word names the function.

No record read inside a ledger transaction may stop it: a counter that is damaged counts from nothing again (fsck names it), because
an operation that can never succeed would keep every long grant from being flushed.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterator
from typing import Any, Final, NamedTuple

from leased.state import payments
from leased.state.records import RecordDamaged, seal, unseal
from leased.tariff import REFUSAL, Event, hour_of

EVENT_VERSION: Final = 1
DEAD_VERSION: Final = 1
COUNT_VERSION: Final = 1
SEQUENCE: Final = struct.Struct(">Q")
_SECONDS: Final = struct.Struct("<d")
_COUNTS: Final = struct.Struct(">QQQ")  # micro-units, refusals, calls
_PLACES: Final = struct.Struct(">QQ")  # the last event of an incarnation, the last place given in the outbox; then the incarnation
_COPIED: Final = b"copied"
_OVERFLOW: Final = b"overflow"
FOLDED: Final = 0  # the hour that holds what was counted in hours too old to be told apart
MAX_WHY_CHARACTERS: Final = 500


def encode_event(event: Event) -> bytes:
    return seal(EVENT_VERSION, json.dumps(event, ensure_ascii=False, separators=(",", ":")).encode())


def decode_event(record: bytes) -> Event:
    """Raises RecordDamaged or StateRefused."""
    try:
        return Event(*json.loads(unseal(record, EVENT_VERSION, "event").decode()))  # of bytes, json would first guess the encoding
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
    known, last, place = _copied(transaction.get(_COPIED, db=ledger.meta))
    event = decode_event(record)
    if known == incarnation and number <= last:
        if event.kind == REFUSAL:  # a repeat may follow the `unbill` of an older record of the same fact
            transaction.put(bytes.fromhex(event.id), _when(event), db=ledger.billed, overwrite=False)
        return
    new = event.kind != REFUSAL or transaction.put(bytes.fromhex(event.id), _when(event), db=ledger.billed, overwrite=False)
    if new:  # else the same fact by another incarnation: it is in the outbox or shipped, and counted
        _count(ledger, transaction, event)
        if transaction.stat(ledger.outbox)["entries"] >= most:
            _add(ledger, transaction, _OVERFLOW, 1)
        else:
            place = _put_last(ledger, transaction, place, record)
    copied = seal(COUNT_VERSION, _PLACES.pack(number, place) + incarnation.encode())
    transaction.put(_COPIED, copied, db=ledger.meta)


def _put_last(ledger: Any, transaction: Any, place: int, record: bytes) -> int:
    """At the end of the outbox, at a place never given before.  Returns it."""
    following = place + 1
    if place == 0:  # none was given, or what said so is damaged
        for table in (ledger.outbox, ledger.dead):
            cursor = transaction.cursor(db=table)
            following = max(following, SEQUENCE.unpack(bytes(cursor.key()))[0] + 1) if cursor.last() else following
    transaction.put(SEQUENCE.pack(following), record, db=ledger.outbox)
    return following


def _when(event: Event) -> bytes:
    return seal(COUNT_VERSION, _SECONDS.pack(event.wall))


def _copied(raw: Any) -> tuple[str, int, int]:
    """(incarnation, its last event copied, the last place given in the outbox)."""
    try:
        body = unseal(bytes(raw), COUNT_VERSION, "copied") if raw is not None else bytes(_PLACES.size)
        last, place = _PLACES.unpack_from(body)
        return body[_PLACES.size :].decode(), last, place
    except (RecordDamaged, struct.error):
        return "", 0, 0


def drop_shipped(ledger: Any, transaction: Any, sequences: list[int]) -> None:
    for sequence in sequences:
        transaction.delete(SEQUENCE.pack(sequence), db=ledger.outbox)


def bury(ledger: Any, transaction: Any, sequence: int, why: str) -> None:
    """An event upstream will never take moves to the dead letters, with the reason, for an operator to retry or drop."""
    key = SEQUENCE.pack(sequence)
    raw = transaction.pop(key, db=ledger.outbox)
    if raw is not None:
        letter = seal(DEAD_VERSION, json.dumps([bytes(raw).hex(), why[:MAX_WHY_CHARACTERS]]).encode())
        transaction.put(key, letter, db=ledger.dead)


def unbury(ledger: Any, transaction: Any, sequences: list[int], keep: bool) -> None:
    """Dead letters go back into the outbox (`keep`) under their old place, or for good.  One that cannot be read only goes for good."""
    for sequence in sequences:
        key = SEQUENCE.pack(sequence)
        raw = transaction.get(key, db=ledger.dead)
        letter = _letter(bytes(raw)) if raw is not None else None
        if keep and letter is not None:
            transaction.put(key, letter[0], db=ledger.outbox)
        if not keep or letter is not None:
            transaction.delete(key, db=ledger.dead)


def _letter(raw: bytes) -> tuple[bytes, str] | None:
    """(event record, why) of a dead letter; None where it is damaged."""
    try:
        record, why = json.loads(unseal(raw, DEAD_VERSION, "dead letter"))
        return bytes.fromhex(record), str(why)
    except (ValueError, TypeError):
        return None


def unbill(ledger: Any, transaction: Any, event_id: bytes) -> None:
    """The oldest billed-once record goes when there are too many: a repeat would carry the same id."""
    transaction.delete(event_id, db=ledger.billed)


def fold_hours(ledger: Any, transaction: Any, before: int) -> None:
    """Hours older than `before` are added up, so that a namespace has a bounded number of them."""
    rows = [(bytes(key), bytes(raw)) for key, raw in transaction.cursor(db=ledger.totals) if bytes(key[:1]) == b"h"]
    for key, raw in rows:
        if FOLDED < _hour(key) < before:
            folded = key[:-8] + SEQUENCE.pack(FOLDED)
            sums = _counts(transaction.get(folded, db=ledger.totals)), _counts(raw)
            _put_counts(ledger, transaction, folded, *map(sum, zip(*sums, strict=True)))
            transaction.delete(key, db=ledger.totals)


OPS: Final[dict[str, Callable[..., None]]] = {
    "event": copy_event,
    "shipped": drop_shipped,
    "bury": bury,
    "unbury": unbury,
    "unbill": unbill,
    "fold_hours": fold_hours,
    **payments.OPS,
}
REPEATABLE: Final = frozenset(OPS)
"""All of them may be applied again after a flush whose outcome is not known."""


def _count(ledger: Any, transaction: Any, event: Event) -> None:
    key = b"h" + event.namespace.encode() + b"\0" + SEQUENCE.pack(hour_of(event.wall))
    amount, refusals, calls = _counts(transaction.get(key, db=ledger.totals))
    refusal = event.kind == REFUSAL
    _put_counts(ledger, transaction, key, amount + event.amount, refusals + refusal, calls + (not refusal))


def _put_counts(ledger: Any, transaction: Any, key: bytes, amount: int, refusals: int, calls: int) -> None:
    transaction.put(key, seal(COUNT_VERSION, _COUNTS.pack(amount, refusals, calls)), db=ledger.totals)


def _counts(raw: Any) -> tuple[int, int, int]:
    """(micro-units, refusals, calls) of one hour; nothing where it is damaged."""
    try:
        return _COUNTS.unpack(unseal(bytes(raw), COUNT_VERSION, "total")) if raw is not None else (0, 0, 0)
    except (RecordDamaged, struct.error):
        return 0, 0, 0


def _add(ledger: Any, transaction: Any, key: bytes, more: int) -> None:
    standing = _number(transaction.get(key, db=ledger.totals))
    transaction.put(key, seal(COUNT_VERSION, SEQUENCE.pack(standing + more)), db=ledger.totals)


def _number(raw: Any) -> int:
    try:
        return 0 if raw is None else int(SEQUENCE.unpack(unseal(bytes(raw), COUNT_VERSION, "counter"))[0])
    except (RecordDamaged, struct.error):
        return 0


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
        billed = sorted(_billed(transaction, ledger), key=lambda row: row[1])
        hours = {
            (bytes(key[1:-9]).decode(), _hour(bytes(key))): _counts(value)
            for key, value in transaction.cursor(db=ledger.totals)
            if bytes(key[:1]) == b"h"
        }
        waiting = list(_waiting_facts(transaction, ledger))
        dead: dict[str, int] = {}
        for letter in dead_letters(transaction, ledger):
            namespace = letter.event.namespace if letter.event is not None else ""
            dead[namespace] = dead.get(namespace, 0) + 1
        copied = _copied(transaction.get(_COPIED, db=ledger.meta))
        return BillingState(copied[:2], billed, hours, waiting, dead, _number(transaction.get(_OVERFLOW, db=ledger.totals)))


def _waiting_facts(transaction: Any, ledger: Any) -> Iterator[tuple[str, float]]:
    """(namespace, wall) of all that waits.  There may be a million: no Event is made for this."""
    namespace, wall = Event._fields.index("namespace"), Event._fields.index("wall")
    for _, raw in transaction.cursor(db=ledger.outbox):
        try:
            fields = json.loads(unseal(raw, EVENT_VERSION, "event").decode())
            yield fields[namespace], fields[wall]
        except RecordDamaged:
            continue


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


def these(ledger: Any, sequences: list[int]) -> list[Waiting]:
    """Exactly these of the outbox; those that are not there any more are missing."""
    with ledger.environment.begin() as transaction:
        found = [(sequence, transaction.get(SEQUENCE.pack(sequence), db=ledger.outbox)) for sequence in sequences]
        return [_waiting(sequence, raw) for sequence, raw in found if raw is not None]


class DeadLetter(NamedTuple):
    """`event` is None where its record, or the letter itself, is damaged."""

    sequence: int
    event: Event | None
    why: str


def dead_letters(transaction: Any, ledger: Any, after: int = 0) -> Iterator[DeadLetter]:
    """Every dead letter behind sequence `after`, oldest first."""
    cursor = transaction.cursor(db=ledger.dead)
    found = cursor.set_range(SEQUENCE.pack(after + 1))
    while found:
        sequence, letter = SEQUENCE.unpack(bytes(cursor.key()))[0], _letter(bytes(cursor.value()))
        if letter is None:
            yield DeadLetter(sequence, None, "the letter itself is damaged")
        else:
            yield DeadLetter(sequence, _waiting(sequence, letter[0]).event, letter[1])
        found = cursor.next()


def _events(transaction: Any, table: Any, most: int, after: int = 0) -> list[Waiting]:
    found: list[Waiting] = []
    cursor = transaction.cursor(db=table)
    if not cursor.set_range(SEQUENCE.pack(after + 1)):
        return found
    for key, raw in cursor:
        if len(found) >= most:
            break
        found.append(_waiting(SEQUENCE.unpack(bytes(key))[0], raw))
    return found


def _waiting(sequence: int, raw: Any) -> Waiting:
    try:
        return Waiting(sequence, decode_event(bytes(raw)))
    except RecordDamaged:
        return Waiting(sequence, None)
