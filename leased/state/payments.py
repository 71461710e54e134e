"""The ledger's side of paying upstream: the one payment that may be under way, and what each day has cost.

A payment is written, flushed, and only then sent.  While its record stands no other is signed: whatever became of the first sending, the same
bytes go again.  Both live in the table `totals`, beside the counts they belong to.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from typing import Any, Final, NamedTuple

from leased.state.records import RecordDamaged, seal, unseal

PAYMENT_VERSION: Final = 1
DAYS_KEPT: Final = 7  # a day that is over is looked at by nobody; a week of them helps whoever asks what happened
_PAYMENT: Final = b"payment"
_DAY: Final = struct.Struct(">cQ")


class Payment(NamedTuple):
    """What was signed for one batch, as it goes on the wire.  `amount` in millionths of the asset (its atomic units, for six decimals);
    `day` since the epoch (UTC) that it was counted for; `valid_before` in seconds since the epoch, after which no chain takes it."""

    sequences: list[int]
    header: str
    value: str
    amount: int
    network: str
    asset: str
    payee: str
    payer: str
    nonce: str
    valid_before: int
    day: int


class Spending(NamedTuple):
    """What the payer begins with: the payment under way, if any, and the amounts spent by day."""

    payment: Payment | None
    days: dict[int, int]


def begin_payment(ledger: Any, transaction: Any, record: list[Any]) -> None:
    """Remember a payment and count its day.  Again, it changes nothing."""
    payment = Payment(*record)
    standing = _payment(transaction.get(_PAYMENT, db=ledger.totals))
    if standing is not None and standing.nonce == payment.nonce:
        return
    transaction.put(_PAYMENT, seal(PAYMENT_VERSION, json.dumps(payment).encode()), db=ledger.totals)
    key = _DAY.pack(b"d", payment.day)
    spent = _amount(transaction.get(key, db=ledger.totals)) + payment.amount
    transaction.put(key, seal(PAYMENT_VERSION, json.dumps(spent).encode()), db=ledger.totals)
    for day in _days(ledger, transaction):
        if day < payment.day - DAYS_KEPT:
            transaction.delete(_DAY.pack(b"d", day), db=ledger.totals)


def end_payment(ledger: Any, transaction: Any, nonce: str) -> None:
    """It was taken, or an operator says that it is to be forgotten.  Its day goes on counting it."""
    standing = _payment(transaction.get(_PAYMENT, db=ledger.totals))
    if standing is not None and standing.nonce == nonce:
        transaction.delete(_PAYMENT, db=ledger.totals)


OPS: Final[dict[str, Callable[..., None]]] = {"pay": begin_payment, "paid": end_payment}


def read_spending(ledger: Any) -> Spending:
    """Raises RecordDamaged for a payment that cannot be read: what was sent is not known then, and nothing must be signed on top of it."""
    with ledger.environment.begin() as transaction:
        raw = transaction.get(_PAYMENT, db=ledger.totals)
        payment = None
        if raw is not None:
            try:
                payment = Payment(*json.loads(unseal(bytes(raw), PAYMENT_VERSION, "payment")))
            except TypeError as error:
                raise RecordDamaged("the payment record has other fields") from error
        return Spending(payment, _days(ledger, transaction))


def _days(ledger: Any, transaction: Any) -> dict[int, int]:
    """A day whose record is damaged counts as the most there is: rather no payment than one above the cap."""
    days: dict[int, int] = {}
    cursor = transaction.cursor(db=ledger.totals)
    found = cursor.set_range(b"d")
    while found and len(key := bytes(cursor.key())) == _DAY.size and key[:1] == b"d":
        days[_DAY.unpack(key)[1]] = _amount(cursor.value())
        found = cursor.next()
    return days


def _payment(raw: Any) -> Payment | None:
    try:
        return Payment(*json.loads(unseal(bytes(raw), PAYMENT_VERSION, "payment"))) if raw is not None else None
    except (RecordDamaged, TypeError):
        return None


def _amount(raw: Any) -> int:
    try:
        return int(json.loads(unseal(bytes(raw), PAYMENT_VERSION, "day"))) if raw is not None else 0
    except RecordDamaged:
        return 1 << 62
