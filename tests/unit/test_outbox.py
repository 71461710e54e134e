"""The ledger's side of billing: every operation may be applied again, and no damaged record stops a flush."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from leased.state.environment import DirectoryLock
from leased.state.ledger import Ledger, Op
from leased.state.outbox import (
    OPS,
    REPEATABLE,
    SEQUENCE,
    DeadLetter,
    Waiting,
    dead_letters,
    decode_event,
    encode_event,
    oldest,
    read_state,
    these,
)
from leased.state.payments import DAYS_KEPT, Payment, read_spending
from leased.state.records import RecordDamaged
from leased.tariff import AGENT_LOCK, REFUSAL, Event

MOST = 100
WALL = 1_800_000_000.0


@pytest.fixture
def ledger(tmp_path: Path) -> Iterator[Ledger]:
    lock = DirectoryLock(tmp_path / "state")
    made = Ledger(tmp_path / "state")
    yield made
    made.close()
    lock.close()


def event(number: int, *, kind: str = REFUSAL, namespace: str = "local", wall: float = WALL) -> Event:
    return Event(f"{number:032x}", kind, namespace, 2_000 if kind == REFUSAL else 1_000, "USDC", "ab" * 20, "cd" * 16, wall)


def copied(number: int, what: Event | None = None, *, incarnation: str = "one", most: int = MOST) -> Op:
    return ("event", incarnation, number, encode_event(what or event(number)), most)


def letters(ledger: Ledger, after: int = 0) -> list[DeadLetter]:
    with ledger.environment.begin() as transaction:
        return list(dead_letters(transaction, ledger, after))


def spoil(ledger: Ledger, table: Any, key: bytes) -> None:
    with ledger.environment.begin(write=True) as transaction:
        raw = bytes(transaction.get(key, db=table))
        transaction.put(key, raw[:-1] + bytes([raw[-1] ^ 1]), db=table)


def waiting(ledger: Ledger) -> list[int]:
    return [row.sequence for row in oldest(ledger, 1 << 30)]


# ---- copying


def test_an_event_comes_back_as_it_was() -> None:
    whole = Event("ab" * 16, AGENT_LOCK, "team \N{GREEK SMALL LETTER ALPHA}", 1, "EURC", "0" * 40, "1" * 32, 1_764_000_000.123456)
    assert decode_event(encode_event(whole)) == whole


def test_events_of_both_kinds_are_counted_by_namespace_and_hour(ledger: Ledger) -> None:
    ledger.apply(
        [
            copied(1),
            copied(2, event(2, kind=AGENT_LOCK)),
            copied(3, event(3, namespace="team", wall=WALL + 3600)),
            copied(4, event(4, wall=WALL + 3599.9)),
        ]
    )
    state = read_state(ledger)
    assert state.hours == {("local", 500_000): (5_000, 2, 1), ("team", 500_001): (2_000, 1, 0)}
    assert state.copied == ("one", 4)
    assert [name for name, _ in state.waiting] == ["local", "local", "team", "local"]
    assert waiting(ledger) == [1, 2, 3, 4]


def test_a_copy_made_twice_is_one(ledger: Ledger) -> None:
    ops = [copied(1), copied(2, event(2, kind=AGENT_LOCK))]
    ledger.apply(ops)
    ledger.apply(ops)
    assert read_state(ledger).hours == {("local", 500_000): (3_000, 1, 1)}
    assert waiting(ledger) == [1, 2]


def test_the_same_refusal_by_another_incarnation_is_the_same_fact(ledger: Ledger) -> None:
    ledger.apply([copied(1), copied(1, incarnation="two"), copied(2, event(9, kind=AGENT_LOCK), incarnation="two")])
    state = read_state(ledger)
    assert (state.copied, state.hours) == (("two", 2), {("local", 500_000): (3_000, 1, 1)})
    assert waiting(ledger) == [1, 2]


def test_a_repeated_copy_behind_its_own_unbill_leaves_the_fact_billed(ledger: Ledger) -> None:
    """[unbill X, event X] may be applied again after a flush whose outcome was not known."""
    again = event(1)
    ledger.apply([copied(1)])
    ops: list[Op] = [("unbill", bytes.fromhex(again.id)), copied(2, again)]
    ledger.apply(ops)
    ledger.apply(ops)
    assert [event_id.hex() for event_id, _ in read_state(ledger).billed] == [again.id]
    assert read_state(ledger).hours == {("local", 500_000): (4_000, 2, 0)}


def test_a_full_outbox_counts_the_event_and_the_overflow(ledger: Ledger) -> None:
    ledger.apply([copied(number, most=2) for number in range(1, 6)])
    state = read_state(ledger)
    assert (len(state.waiting), state.overflow, state.hours) == (2, 3, {("local", 500_000): (10_000, 5, 0)})
    ledger.apply([copied(number, most=2) for number in range(1, 6)])
    assert read_state(ledger).overflow == 3


def test_a_place_in_the_outbox_is_never_given_twice(ledger: Ledger) -> None:
    ledger.apply([copied(1), copied(2), ("shipped", [1, 2]), copied(3)])
    assert waiting(ledger) == [3]
    ledger.apply([("shipped", [3])])
    ledger.apply([copied(4)])
    assert waiting(ledger) == [4]


# ---- shipping, dead letters


def test_shipped_events_are_gone_and_billed_once_records_stay(ledger: Ledger) -> None:
    ledger.apply([copied(1), copied(2), ("shipped", [1])])
    ledger.apply([("shipped", [1])])
    assert waiting(ledger) == [2]
    assert len(read_state(ledger).billed) == 2


def test_oldest_goes_on_behind_a_place_and_these_are_exactly_these(ledger: Ledger) -> None:
    ledger.apply([copied(number) for number in range(1, 6)])
    assert [row.sequence for row in oldest(ledger, 2)] == [1, 2]
    assert [row.sequence for row in oldest(ledger, 2, after=2)] == [3, 4]
    assert oldest(ledger, 5, after=5) == []
    assert [row.sequence for row in these(ledger, [2, 4, 77])] == [2, 4]


def test_a_dead_letter_tells_why_and_may_go_back_to_its_place(ledger: Ledger) -> None:
    ledger.apply([copied(1), copied(2), ("bury", 1, "upstream answered 422" + "!" * 1000)])
    (letter,) = letters(ledger)
    assert (letter.sequence, letter.event, letter.why[:21], len(letter.why)) == (1, event(1), "upstream answered 422", 500)
    assert (waiting(ledger), read_state(ledger).dead) == ([2], {"local": 1})
    for _ in range(2):
        ledger.apply([("unbury", [1], True)])
        assert (waiting(ledger), letters(ledger)) == ([1, 2], [])


def test_a_dropped_letter_is_gone(ledger: Ledger) -> None:
    ledger.apply([copied(1), ("bury", 1, "no"), ("unbury", [1, 5], False)])
    assert (waiting(ledger), letters(ledger)) == ([], [])


def test_letters_go_on_behind_a_place(ledger: Ledger) -> None:
    ledger.apply([op for number in (1, 2, 3) for op in (copied(number), ("bury", number, "no"))])
    assert [letter.sequence for letter in letters(ledger, after=1)] == [2, 3]
    assert letters(ledger, after=3) == []


@pytest.mark.parametrize("name", sorted(OPS))
def test_every_operation_is_repeated_after_a_failed_flush(name: str) -> None:
    assert name in REPEATABLE


# ---- damage


def test_a_damaged_event_is_shown_as_such_and_can_be_buried_and_dropped(ledger: Ledger) -> None:
    ledger.apply([copied(1), copied(2)])
    spoil(ledger, ledger.outbox, SEQUENCE.pack(1))
    assert oldest(ledger, 5) == [Waiting(1, None), Waiting(2, event(2))]
    assert [name for name, _ in read_state(ledger).waiting] == ["local"]
    ledger.apply([("bury", 1, "the record is damaged")])
    (letter,) = letters(ledger)
    assert (letter.event, letter.why) == (None, "the record is damaged")
    assert read_state(ledger).dead == {"": 1}


def test_a_letter_that_cannot_be_read_stays_until_it_is_dropped(ledger: Ledger) -> None:
    ledger.apply([copied(1), ("bury", 1, "no")])
    spoil(ledger, ledger.dead, SEQUENCE.pack(1))
    ledger.apply([("unbury", [1], True)])
    (letter,) = letters(ledger)
    assert (letter.sequence, letter.event) == (1, None)
    ledger.apply([("unbury", [1], False)])
    assert letters(ledger) == []


def test_damaged_counters_stop_nothing(ledger: Ledger) -> None:
    """An operation that can never succeed would keep every long grant from being flushed."""
    ledger.apply([copied(number, most=1) for number in (1, 2)])
    hour = next(bytes(key) for key in _keys(ledger, ledger.totals) if key.startswith(b"h"))
    for table, key in ((ledger.meta, b"copied"), (ledger.totals, b"overflow"), (ledger.totals, hour)):
        spoil(ledger, table, key)
    state = read_state(ledger)
    assert (state.copied, state.overflow, state.hours[("local", 500_000)]) == (("", 0), 0, (0, 0, 0))
    ledger.apply([copied(3, most=5), ("fold_hours", 500_001)])
    assert waiting(ledger) == [1, 2]  # behind what is there, dead letters included
    assert read_state(ledger).hours == {("local", 0): (2_000, 1, 0)}


def test_a_damaged_billed_once_record_still_says_that_it_was_billed(ledger: Ledger) -> None:
    ledger.apply([copied(1)])
    spoil(ledger, ledger.billed, bytes.fromhex(event(1).id))
    assert [event_id.hex() for event_id, _ in read_state(ledger).billed] == [event(1).id]


def _keys(ledger: Ledger, table: Any) -> list[bytes]:
    with ledger.environment.begin() as transaction:
        return [bytes(key) for key, _ in transaction.cursor(db=table)]


# ---- hours


def test_old_hours_are_added_up_once(ledger: Ledger) -> None:
    hours = [event(number, wall=WALL + 3600 * number) for number in range(1, 5)]
    ledger.apply([copied(number, what) for number, what in enumerate(hours, 1)])
    for _ in range(2):
        ledger.apply([("fold_hours", 500_003)])
        assert read_state(ledger).hours == {
            ("local", 0): (4_000, 2, 0),
            ("local", 500_003): (2_000, 1, 0),
            ("local", 500_004): (2_000, 1, 0),
        }


# ---- payments


def payment(nonce: str = "0x1", *, day: int = 20_000, amount: int = 5) -> Payment:
    return Payment([1, 2], "payment-signature", "e30=", amount, "eip155:84532", "0xa", "0xb", "0xc", nonce, 1_900_000_000, day)


def test_a_payment_is_kept_whole_and_its_day_counted_once(ledger: Ledger) -> None:
    for _ in range(2):
        ledger.apply([("pay", list(payment()))])
    assert read_spending(ledger) == (payment(), {20_000: 5})


def test_a_payment_that_is_over_stays_in_its_day(ledger: Ledger) -> None:
    ledger.apply([("pay", list(payment())), ("paid", "0x1"), ("pay", list(payment("0x2", amount=7))), ("paid", "0x1")])
    assert read_spending(ledger) == (payment("0x2", amount=7), {20_000: 12})
    ledger.apply([("paid", "0x2")])
    assert read_spending(ledger) == (None, {20_000: 12})


def test_days_long_over_are_forgotten(ledger: Ledger) -> None:
    ledger.apply([("pay", list(payment(f"0x{day}", day=20_000 + day))) for day in (0, 1, 1 + DAYS_KEPT)])
    assert set(read_spending(ledger).days) == {20_001, 20_001 + DAYS_KEPT}


def test_totals_and_payments_do_not_get_into_each_others_way(ledger: Ledger) -> None:
    ledger.apply([copied(1, most=0), ("pay", list(payment())), copied(2, event(2, namespace="d" * 8), most=0)])
    assert read_spending(ledger) == (payment(), {20_000: 5})
    state = read_state(ledger)
    assert (set(state.hours), state.overflow) == ({("local", 500_000), ("d" * 8, 500_000)}, 2)


def test_a_payment_that_cannot_be_read_is_not_signed_over(ledger: Ledger) -> None:
    ledger.apply([("pay", list(payment()))])
    spoil(ledger, ledger.totals, b"payment")
    with pytest.raises(RecordDamaged, match="payment"):
        read_spending(ledger)


def test_a_day_that_cannot_be_read_counts_as_spent(ledger: Ledger) -> None:
    ledger.apply([("pay", list(payment())), ("paid", "0x1")])
    spoil(ledger, ledger.totals, next(key for key in _keys(ledger, ledger.totals) if key.startswith(b"d")))
    assert read_spending(ledger).days[20_000] > 10**12
