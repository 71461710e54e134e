"""Bytes that are not what was written (P47): in records, in pages, in whole files, and records of a version to come.

Never a crash loop: a start either serves, or exits 78 (the service manager leaves it) with a sentence that names the file.  Never a grant on a
record that cannot be read: whoever it was written for may still hold the lease.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from zlib import crc32

import lmdb
import pytest
from plumbing import Rpc, Served, boottime, eventually

pytestmark = pytest.mark.slow

WAIT_OUT = 2.0
LONG = 3600.0
MARKED = "holder-whose-record-is-damaged"
PAGE = 4096
Make = Callable[..., Served]


@pytest.fixture
def daemon(served: Make) -> Served:
    return served(wait_out_seconds=WAIT_OUT)


def places(data: Path, marker: bytes) -> list[int]:
    content = data.read_bytes()
    found, at = [], content.find(marker)
    while at >= 0:
        found.append(at)
        at = content.find(marker, at + 1)
    assert found, f"{marker!r} is not in {data}"
    return found


def flip(data: Path, marker: str = MARKED) -> None:
    """Another byte in every copy of the record: LMDB leaves older copies of pages lying about."""
    at = places(data, marker.encode())
    with data.open("r+b") as file:
        for place in at:
            file.seek(place + 3)
            file.write(b"\xff")


def zero_page(data: Path, marker: str = MARKED) -> None:
    at = places(data, marker.encode())
    with data.open("r+b") as file:
        for place in at:
            file.seek(place // PAGE * PAGE)
            file.write(bytes(PAGE))


def spoil_magic(data: Path) -> None:
    with data.open("r+b") as file:
        for page in (0, 1):
            file.seek(page * PAGE + 16)
            file.write(b"\0\0\0\0")


@contextmanager
def opened(directory: Path, table: str) -> Iterator[tuple[Any, Any]]:
    """A write transaction on a store whose daemon is stopped."""
    environment = lmdb.open(str(directory), map_size=(directory / "data.mdb").stat().st_size + (4 << 20), max_dbs=16)
    named = environment.open_db(table.encode(), create=False)
    with environment.begin(write=True) as transaction:
        yield transaction, named
    environment.close()


def copied(daemon: Served, name: str) -> int:
    """How many rows the ledger has of that table; read from a copy, while the daemon runs."""
    copy = daemon.home / "copy.mdb"
    shutil.copyfile(daemon.state_dir / "data.mdb", copy)
    environment = lmdb.open(str(copy), subdir=False, lock=False, readonly=True, max_dbs=16, map_size=16 << 20)
    try:
        table = environment.open_db(name.encode(), create=False)
        with environment.begin() as transaction:
            return int(transaction.stat(table)["entries"])
    finally:
        environment.close()


def sealed(version: int, body: bytes) -> bytes:
    framed = bytes((version,)) + body
    return framed + crc32(framed).to_bytes(4, "little")


def refused_for_good(daemon: Served, *words: str) -> str:
    """Two starts, two times exit code 78, the same sentence, and nothing touched.  Returns the sentence."""
    said = []
    before = content(daemon.state_dir)
    for _ in range(2):
        daemon.forget_log()
        code = daemon.refused()
        assert code == 78, f"exit code {code}:\n{daemon.said()}"
        assert "Traceback" not in daemon.said()
        said.append(daemon.said().strip().splitlines()[-1])
    assert said[0] == said[1] and said[0].startswith("leased: ")
    for word in words:
        assert word in said[0], said[0]
    assert content(daemon.state_dir) == before, "it changed what it refused"
    return said[0]


def content(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir() if path.name not in {"lock", "lock.mdb"}}


def prepared(daemon: Served, ttl: float) -> tuple[Any, Any]:
    """A daemon killed with two leases.  Returns (the one whose record will be damaged, another)."""
    rpc = daemon.start()
    marked, other = rpc.grant("marked", ttl, MARKED), rpc.grant("other", LONG, "B")
    daemon.kill()
    return marked, other


def nothing_is_said_of(rpc: Rpc, lease: Any) -> None:
    """Null to everybody, the holder included."""
    replies = [
        rpc.lease(lease["key"], 1, "stranger"),
        rpc.lease(lease["key"], 1, lease["holder"]),
        rpc.lease(lease["key"], 1, lease["holder"], fence=lease["fence"]),
        rpc.renew(lease),
    ]
    assert [reply["acquired"] for reply in replies] == [None] * 4, replies
    assert {reply["reason"] for reply in replies} == {"damaged"}, replies
    assert rpc.release(lease)["released"] is None
    assert rpc.check(lease["key"])["held"] is None


# ---- one record


@pytest.mark.parametrize("ttl", [30.0, LONG])
def test_a_damaged_record_of_the_volatile_state_is_set_aside(daemon: Served, ttl: float) -> None:
    daemon.settings["wait_out_seconds"] = 60
    marked, other = prepared(daemon, ttl)
    flip(daemon.runtime_dir / "data.mdb")
    rpc = daemon.start()
    nothing_is_said_of(rpc, marked)
    assert rpc.renew(other)["acquired"] is True
    assert rpc.grant("free", 1)["generation"] > other["generation"]
    assert [entry["holder"] for entry in rpc.call("list")["leases"]] == ["B", "A"]
    assert rpc.store()["damaged_records"] == 1
    lines = [json.loads(line) for line in daemon.said().splitlines() if "record.set_aside" in line]
    assert len(lines) == 1 and lines[0]["level"] == "error" and MARKED not in daemon.said()
    assert daemon.stop() == 0
    rpc = daemon.start()  # no crash loop, and no forgetting
    assert rpc.lease("marked", 1, "stranger")["acquired"] is None
    assert rpc.renew(other)["acquired"] is True


def test_the_ledger_keeps_what_the_volatile_state_can_no_longer_read(daemon: Served) -> None:
    """Its record is the last that knows of this lease: a start must not take it for one of a lease that has ended."""
    marked, _ = prepared(daemon, LONG)
    flip(daemon.runtime_dir / "data.mdb")
    assert daemon.start().renew(marked)["acquired"] is not False
    daemon.kill()
    daemon.lose_runtime()
    rpc = daemon.start()
    eventually(lambda: rpc.lease("free", 1)["acquired"], WAIT_OUT + 8)
    assert rpc.lease("marked", 1, "stranger")["acquired"] is not True
    assert rpc.renew(marked)["acquired"] is True


def test_a_damaged_record_of_the_ledger_is_written_anew_from_the_volatile_state(daemon: Served) -> None:
    marked, other = prepared(daemon, LONG)
    flip(daemon.state_dir / "data.mdb")
    rpc = daemon.start()
    assert rpc.renew(marked)["acquired"] is True
    daemon.kill()
    daemon.lose_runtime()
    rpc = daemon.start()
    for lease in (marked, other):
        assert rpc.check(lease["key"], generation=lease["generation"])["current"] is True


def test_nothing_is_granted_on_a_damaged_record_of_the_ledger(daemon: Served) -> None:
    """The volatile state is lost too: whose lease it was cannot be told, but which key it is for can, and it may have been promised for an hour."""
    marked, other = prepared(daemon, LONG)
    flip(daemon.state_dir / "data.mdb")
    daemon.lose_runtime()
    rpc = daemon.start()
    assert rpc.renew(other)["acquired"] is True
    eventually(lambda: rpc.lease("free", 1)["acquired"], WAIT_OUT + 8)
    reply = rpc.lease("marked", 1, "stranger")
    assert reply["acquired"] is None, reply
    nothing_is_said_of(rpc, marked)
    assert "record.set_aside" in daemon.said()


@pytest.mark.parametrize("name", ["last", "tick", "meta"])
def test_a_damaged_counter_of_the_volatile_state_ends_no_start(daemon: Served, name: str) -> None:
    marked, other = prepared(daemon, 30)
    with opened(daemon.runtime_dir, "meta") as (transaction, table):
        transaction.put(name.encode(), b"\1damaged, and long enough", db=table)
    before = boottime()
    rpc = daemon.start()
    assert rpc.check("other", generation=other["generation"])["current"] is True
    reply = eventually(lambda: (reply := rpc.lease("free", 1))["acquired"] and reply, WAIT_OUT + 8)
    assert reply["generation"] > other["generation"]
    held = rpc.lease("marked", 1, "stranger")["acquired"] is False
    assert held or boottime() >= before + WAIT_OUT
    if not held:
        assert marked["ttl_seconds"] > WAIT_OUT and rpc.check("marked", generation=marked["generation"])["current"] is True


@pytest.mark.parametrize("store", ["state", "runtime"])
def test_a_damaged_switch_ends_no_start(daemon: Served, store: str) -> None:
    rpc = daemon.start()
    lease = rpc.grant("k", LONG, scope="work")
    for scope in ("work", "other"):
        assert rpc.call("heartbeat", scope=scope, expect_within_seconds=3600)["armed"] is True
    eventually(lambda: copied(daemon, "switches") == 2)
    daemon.kill()
    with opened(daemon.state_dir if store == "state" else daemon.runtime_dir, "switches") as (transaction, table):
        rows = list(transaction.cursor(db=table))
        assert len(rows) == 2
        key, record = rows[0]
        transaction.put(bytes(key), bytes(record)[:-5] + bytes((record[-5] ^ 255,)) + bytes(record[-4:]), db=table)
    if store == "state":
        daemon.lose_runtime()
    rpc = daemon.start()
    assert rpc.renew(lease)["acquired"] is True
    assert rpc.call("heartbeat", scope="work", expect_within_seconds=3600)["armed"] is True
    assert rpc.call("resume_packet", scope="other")["empty"] in {True, False}


# ---- whole files


def test_an_emptied_ledger_is_not_taken_for_a_new_installation(daemon: Served) -> None:
    prepared(daemon, LONG)
    daemon.lose_runtime()
    assert (daemon.state_dir / "initialised").exists()
    (daemon.state_dir / "data.mdb").write_bytes(b"")
    for _ in range(2):
        daemon.forget_log()
        assert daemon.refused() == 78
        said = daemon.said().strip().splitlines()[-1]
        assert said.startswith("leased: ") and "initialised" in said and str(daemon.state_dir) in said and "restore" in said
    (daemon.state_dir / "initialised").unlink()  # the way out it names
    daemon.start().grant("marked", 1, "stranger")


def test_an_emptied_ledger_is_rebuilt_while_the_volatile_state_is_there(daemon: Served) -> None:
    marked, other = prepared(daemon, LONG)
    (daemon.state_dir / "data.mdb").write_bytes(b"")
    rpc = daemon.start()
    assert rpc.renew(marked)["acquired"] is True and rpc.renew(other)["acquired"] is True
    daemon.kill()
    daemon.lose_runtime()
    assert daemon.start().renew(marked)["acquired"] is True


DAMAGE: dict[str, Callable[[Path], None]] = {
    "magic": spoil_magic,
    "zeroed page": zero_page,
    "truncated to its heads": lambda data: os.truncate(data, 2 * PAGE),
    "truncated to half a page": lambda data: os.truncate(data, PAGE // 2),
    "last page missing": lambda data: os.truncate(data, max(places(data, MARKED.encode())) // PAGE * PAGE),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_file_of_the_volatile_state_is_discarded_and_waited_out(daemon: Served, damage: str) -> None:
    rpc = daemon.start()
    other = rpc.grant("other", LONG, "B")
    short = rpc.grant("marked", WAIT_OUT, MARKED)
    daemon.kill()
    DAMAGE[damage](daemon.runtime_dir / "data.mdb")
    before = boottime()
    rpc = daemon.start()
    assert rpc.renew(other)["acquired"] is True
    assert rpc.lease("marked", 1, "stranger")["acquired"] is None
    reply = eventually(lambda: (reply := rpc.lease("marked", 1, "stranger"))["acquired"] and reply, WAIT_OUT + 8)
    assert boottime() >= before + WAIT_OUT
    assert reply["generation"] > short["generation"]


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_file_of_the_ledger_is_refused_with_a_sentence(daemon: Served, damage: str) -> None:
    prepared(daemon, LONG)
    daemon.lose_runtime()
    DAMAGE[damage](daemon.state_dir / "data.mdb")
    refused_for_good(daemon, str(daemon.state_dir), "data.mdb")


# ---- versions to come


def newer_format(directory: Path) -> None:
    with opened(directory, "meta") as (transaction, table):
        fields = json.loads(bytes(transaction.get(b"meta", db=table))[1:-4])
        transaction.put(b"meta", sealed(1, json.dumps(fields | {"format": 3, "unheard_of": 1}).encode()), db=table)


def newer_meta(directory: Path) -> None:
    with opened(directory, "meta") as (transaction, table):
        transaction.put(b"meta", sealed(9, bytes(transaction.get(b"meta", db=table))[1:-4]), db=table)


def newer_lease(directory: Path) -> None:
    with opened(directory, "leases") as (transaction, table):
        key, record = next(iter(transaction.cursor(db=table)))
        transaction.put(bytes(key), sealed(9, bytes(record)[1:-4]), db=table)


@pytest.mark.parametrize("newer", [newer_format, newer_meta, newer_lease])
def test_a_state_of_a_later_version_is_refused_and_left_as_it_is(daemon: Served, newer: Callable[[Path], None]) -> None:
    prepared(daemon, LONG)
    newer(daemon.state_dir)
    refused_for_good(daemon, "version", "meta record" if newer is newer_meta else "format 3" if newer is newer_format else "ledger")
