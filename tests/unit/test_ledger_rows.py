"""What the leases of the ledger stand under: their generation first, so that what comes and goes together lies together."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from leased.model import Lease
from leased.state.leases import Start
from leased.state.ledger import (
    COPY_VERSION,
    FORMAT,
    OLD_COPY_VERSION,
    Ledger,
    LedgerLease,
    LedgerMeta,
    Op,
    encode_ledger_lease,
    key_hash_of,
    row_key_of,
)
from leased.state.records import seal

PAGE_BYTES = 4096
FIRST = 1_800_000_000_000_000
KEY, OTHER = b"k" * 20, b"o" * 20


def entry(generation: int, ttl: float = 300.0) -> LedgerLease:
    return LedgerLease(Lease("local", "worker", None, generation, b"p" * 16, ttl, ttl))


@pytest.fixture
def ledger(tmp_path: Path) -> Iterator[Ledger]:
    (tmp_path / "state").mkdir(mode=0o700)
    made = Ledger(tmp_path / "state")
    try:
        yield made
    finally:
        made.close()


def rows(ledger: Ledger) -> list[tuple[bytes, LedgerLease | None]]:
    with ledger.environment.begin() as transaction:
        return [(key_hash, found) for key_hash, found, _ in ledger.rows(transaction)]


def stored(ledger: Ledger, key: bytes, raw: bytes) -> None:
    with ledger.environment.begin(write=True) as transaction:
        transaction.put(key, raw, db=ledger.leases)


def test_each_generation_of_a_key_has_a_record_and_the_latest_comes_last(ledger: Ledger) -> None:
    ledger.apply([("put", KEY, entry(FIRST + 9)), ("put", OTHER, entry(FIRST + 5)), ("put", KEY, entry(FIRST))])
    assert rows(ledger) == [(KEY, entry(FIRST)), (OTHER, entry(FIRST + 5)), (KEY, entry(FIRST + 9))]
    assert dict(rows(ledger))[KEY] == entry(FIRST + 9)


def test_a_delete_takes_its_own_generation_only(ledger: Ledger) -> None:
    ledger.apply([("put", KEY, entry(FIRST)), ("put", KEY, entry(FIRST + 1)), ("del", KEY, FIRST), ("del", OTHER, FIRST + 1)])
    assert rows(ledger) == [(KEY, entry(FIRST + 1))]


@pytest.mark.parametrize(("first", "second", "kept"), [(300.0, 100.0, 300.0), (100.0, 300.0, 300.0)])
def test_a_put_never_lowers_the_ttl_of_its_generation(ledger: Ledger, first: float, second: float, kept: float) -> None:
    ledger.apply([("put", KEY, entry(FIRST, first)), ("put", KEY, entry(FIRST, second))])
    assert rows(ledger) == [(KEY, entry(FIRST, kept))]


def test_a_record_in_the_place_of_another_generation_counts_as_damaged(ledger: Ledger) -> None:
    stored(ledger, row_key_of(KEY, FIRST), encode_ledger_lease(entry(FIRST + 1)))
    assert rows(ledger) == [(KEY, None)]


def test_what_an_earlier_version_wrote_is_found_again_under_its_generation(tmp_path: Path, ledger: Ledger) -> None:
    old = {
        key: seal(OLD_COPY_VERSION, encode_ledger_lease(each)[1:-4])
        for key, each in ((KEY, entry(FIRST)), (OTHER, entry(FIRST + 1)))
    }
    damaged, ruin = b"d" * 20, bytes((OLD_COPY_VERSION,)) + b"nothing that is a record"
    for key, raw in [*old.items(), (damaged, ruin)]:
        stored(ledger, key, raw)
    meta = LedgerMeta("i" * 32, "s" * 64, FIRST, "n" * 32, "boot", Start(1, "a" * 32), 60.0, format=1)
    ledger.apply([("new", meta)])
    ledger.close()
    again = Ledger(tmp_path / "state")
    again.close()
    ledger._open()
    assert ledger.read_meta() == meta._replace(format=FORMAT)
    assert rows(ledger) == [(damaged, None), (KEY, entry(FIRST)), (OTHER, entry(FIRST + 1))]
    with ledger.environment.begin() as transaction:
        assert transaction.get(row_key_of(KEY, FIRST), db=ledger.leases)[0] == COPY_VERSION
    ledger.apply([("del", KEY, FIRST), ("del", OTHER, FIRST + 1)])
    assert rows(ledger) == [(damaged, None)]


def test_leases_that_come_and_go_among_many_change_few_pages(ledger: Ledger) -> None:
    draw = random.Random(7)

    def key() -> bytes:
        return draw.randbytes(20)

    ledger.apply([("put", key(), entry(FIRST + number)) for number in range(5000)])
    keys = [key() for _ in range(64)]
    come: list[Op] = [("put", each, entry(FIRST + 10_000 + number)) for number, each in enumerate(keys)]
    go: list[Op] = [("del", each, FIRST + 10_000 + number) for number, each in enumerate(keys)]
    ledger.apply([*come])
    before = pages(ledger)
    ledger.apply([*go, *[("put", each, entry(FIRST + 20_000 + number)) for number, each in enumerate(keys)]])
    after = pages(ledger)
    changed = sum(page != before[at] for at, page in enumerate(after[: len(before)])) + len(after) - len(before)
    assert changed < 40, "a page for each lease would be 128"
    assert len(dict(rows(ledger))) == 5064


def pages(ledger: Ledger) -> list[bytes]:
    content = (ledger.directory / "data.mdb").read_bytes()
    return [content[at : at + PAGE_BYTES] for at in range(0, len(content), PAGE_BYTES)]


def test_a_row_key_gives_its_key_hash_back_and_sorts_by_generation() -> None:
    made: list[Any] = [row_key_of(KEY, 2), row_key_of(OTHER, 1), row_key_of(KEY, 2**53 - 1)]
    assert sorted(made) == [made[1], made[0], made[2]]
    assert [key_hash_of(each) for each in made] == [KEY, OTHER, KEY]
