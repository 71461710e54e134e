"""Children that read a file before its daemon does, and what they hand over of it."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterable
from pathlib import Path

import lmdb
import pytest

from leased.errors import StateRefused
from leased.state.probe import Probe, probe

ROWS = [(b"%05d" % n, b"value" * 20) for n in range(5000)]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "data.mdb"
    with lmdb.open(str(path), subdir=False, lock=False, max_dbs=2, map_size=1 << 24) as environment:
        for name in (b"some", b"others"):
            table = environment.open_db(name)
            with environment.begin(write=True, db=table) as transaction:
                for key, value in ROWS:
                    transaction.put(key, name + value)
    return path


def joined(rows: Iterable[tuple[bytes, bytes]]) -> bytes:
    return b"".join(key + value for key, value in rows)


def last_transaction(path: Path) -> int:
    with lmdb.open(str(path), subdir=False, lock=False, readonly=True) as environment:
        return int(environment.info()["last_txnid"])


def test_what_is_made_of_a_table_is_handed_over_with_the_transaction_it_is_of(file: Path) -> None:
    one, other = Probe(file, taking=(b"some", joined)), Probe(file, taking=(b"others", joined))
    for child, name in ((one, b"some"), (other, b"others")):
        assert child.end() == ""
        assert child.taken is not None
        assert child.taken.made == joined((key, name + value) for key, value in ROWS)
        assert child.taken.transaction == last_transaction(file)


def refuse(rows: Iterable[tuple[bytes, bytes]]) -> bytes:
    next(iter(rows))
    raise StateRefused("not like this")


def mistake(rows: Iterable[tuple[bytes, bytes]]) -> bytes:
    raise AssertionError(next(iter(rows)))


def nothing(rows: Iterable[tuple[bytes, bytes]]) -> bytes:
    return b""


@pytest.mark.parametrize("make", [refuse, mistake, nothing])
def test_a_good_file_is_good_whatever_becomes_of_the_taking(file: Path, make: object) -> None:
    child = Probe(file, taking=(b"some", make))  # type: ignore[arg-type]
    assert (child.end(), child.taken) == ("", None)


def test_a_table_that_is_not_there_is_not_taken(file: Path) -> None:
    child = Probe(file, taking=(b"none", joined))
    assert (child.end(), child.taken) == ("", None)


def kill(rows: Iterable[tuple[bytes, bytes]]) -> bytes:
    os.kill(os.getpid(), signal.SIGBUS)
    return joined(rows)


def test_a_child_that_is_killed_has_taken_nothing(file: Path) -> None:
    child = Probe(file, taking=(b"some", kill))
    assert child.end().startswith("the file kills its reader (signal 7, SIGBUS)")
    assert child.taken is None


def test_a_file_that_is_cut_short_is_told_of_and_nothing_is_taken(file: Path) -> None:
    os.truncate(file, 8192)
    child = Probe(file, taking=(b"some", joined))
    assert child.end() != ""
    assert child.taken is None


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    assert probe(tmp_path / "none.mdb") == f"{tmp_path}/none.mdb: No such file or directory"
