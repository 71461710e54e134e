"""The copy an operator takes: one at a time, none for ever, and none of a disk that cannot hold it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import states
import structlog

from leased import model
from leased.backup_desk import IDLE_SECONDS, PART_BYTES, BackupDesk
from leased.errors import PeerError, StoreError
from leased.state.ledger import Ledger

OPERATOR = model.Identity("local", 0, 1, True)


class Asked:
    def __init__(self, identity: model.Identity = OPERATOR) -> None:
        self.identity = identity
        self.told: list[Any] = []

    def answer(self, reply: model.Reply) -> None:
        self.told.append(reply)

    def refuse(self, error: PeerError) -> None:
        self.told.append(error)


class Bench:
    """The desk with the ledger's thread in this one."""

    def __init__(self, root: Path) -> None:
        states.make(root)
        self.ledger = Ledger(root / "state")
        self.boot = 100.0
        clock = SimpleNamespace(now=lambda: SimpleNamespace(boot=self.boot))
        self.lessor: Any = SimpleNamespace(
            operations={},
            gate=SimpleNamespace(admit_reading=lambda: None),
            clock=clock,
            lane=SimpleNamespace(after=lambda do, *given: do(*given)),
        )
        self.answered = 0
        self.desk = BackupDesk(self.lessor, self, self._flush)

    def _flush(self) -> None:
        self.answered += 1

    def read(self, question: Callable[[Ledger], Any], done: Callable[[Any, Exception | None], None]) -> None:
        try:
            told = question(self.ledger)
        except Exception as error:
            done(None, StoreError(f"the ledger cannot be read: {error}"))
        else:
            done(told, None)

    def ask(self, identity: model.Identity = OPERATOR, **fields: Any) -> Any:
        self.lessor.now = SimpleNamespace(boot=self.boot)
        call: Any = Asked(identity)
        self.desk.backup(call, model.BackupRequest(**fields))
        (told,) = call.told
        return told

    @property
    def open_files(self) -> int:
        return sum("(deleted)" in str(each.readlink()) for each in Path("/proc/self/fd").iterdir() if each.is_symlink())


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    made = Bench(tmp_path)
    yield made
    made.desk._drop()
    made.ledger.close()


def test_all_parts_are_the_whole_and_the_last_one_ends_it(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("leased.backup_desk.PART_BYTES", 5000)
    before = bench.open_files
    part = bench.ask()
    assert (part["offset"], len(part["data"]), bench.open_files) == (0, 5000, before + 1)
    octets = part["data"]
    while len(octets) < part["bytes"]:
        octets += bench.ask(copy=part["copy"], offset=len(octets))["data"]
    assert len(octets) == part["bytes"] and octets[16:20] == bytes.fromhex("dec0efbe"), "an LMDB file"
    assert bench.open_files == before
    assert "begin anew" in bench.ask(copy=part["copy"], offset=0).text
    assert PART_BYTES <= 64 * 1024


def test_a_second_one_waits_until_nobody_reads_the_first(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("leased.backup_desk.PART_BYTES", 5000)
    first = bench.ask()
    bench.boot += IDLE_SECONDS
    assert bench.ask().code == "rate_limited"
    bench.ask(copy=first["copy"], offset=5000)  # it is read
    bench.boot += IDLE_SECONDS
    assert bench.ask().code == "rate_limited"
    bench.boot += 0.1
    second = bench.ask()
    assert second["copy"] != first["copy"] and bench.ask(copy=first["copy"], offset=10_000).code == "invalid_argument"


def test_what_nobody_reads_any_more_is_given_up(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("leased.backup_desk.PART_BYTES", 5000)
    before = bench.open_files
    bench.ask()
    bench.desk.give_up()
    assert bench.open_files == before + 1
    bench.boot += IDLE_SECONDS + 0.1
    bench.desk.give_up()
    assert bench.open_files == before


def test_a_full_disk_is_an_error_and_leaves_nothing(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    before = bench.open_files

    class Full:
        def copyfd(self, descriptor: int, *, compact: bool) -> None:
            raise OSError(28, "No space left on device")

    real = bench.ledger.environment
    monkeypatch.setattr(bench.ledger, "environment", Full())
    with structlog.testing.capture_logs() as lines:
        told = bench.ask()
    monkeypatch.setattr(bench.ledger, "environment", real)
    assert (told.code, [line["event"] for line in lines], bench.open_files) == ("internal", ["backup.failed"], before)
    assert bench.ask()["offset"] == 0, "the next one is made"
    assert bench.answered == 2


def test_it_is_for_operators(bench: Bench) -> None:
    with pytest.raises(PeerError, match="backup is for operators"):
        bench.ask(model.Identity("local", 1000, 1, False))
