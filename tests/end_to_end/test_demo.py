"""The demo as a stranger runs it, and that its verdict can be "not proven"."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from daemons import ROOT, environment

DEMO = ROOT / "contrib" / "demo"
sys.path.append(str(DEMO))

from proof import judge  # noqa: E402  (found by the line above)
from sink import Sink, Stale  # noqa: E402
from stage import Attempt  # noqa: E402
from worker import process  # noqa: E402

FILES = [f"order-{number:03}.txt" for number in range(1, 21)]


def leftovers() -> set[Path]:
    return {path for place in (Path("/dev/shm"), Path("/tmp")) for path in place.glob("leased-demo-*")}


@pytest.mark.slow
def test_the_demo_proves_its_case_and_leaves_nothing_behind(tmp_path: Path) -> None:
    # Its directories go where TMPDIR says, but for the one on tmpfs.
    before = leftovers()
    run = subprocess.run(
        [sys.executable, DEMO / "demo.py", "--files", "40"],
        env=environment() | {"TMPDIR": str(tmp_path)}, capture_output=True, text=True, timeout=110, check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stdout + run.stderr
    assert run.stderr == ""
    assert "Nothing was done twice and nothing was missed" in run.stdout and "FAILED" not in run.stdout
    assert run.stdout.count("is killed with -9, under leases on") == 2
    assert run.stdout.count("REFUSED BY THE SINK") >= 1
    assert "40 results for 40 files" in run.stdout
    assert list(tmp_path.iterdir()) == [] and leftovers() <= before


@pytest.mark.parametrize("option", ["--files=19", "--files=1000", "--workers=2", "--workers=x"])
def test_the_demo_refuses_a_story_it_cannot_play(option: str) -> None:
    run = subprocess.run([sys.executable, DEMO / "demo.py", option], env=environment(), capture_output=True, text=True, check=False)
    assert run.returncode == 2 and option.partition("=")[0] in run.stderr


def test_the_sink_refuses_a_write_that_has_been_overtaken(tmp_path: Path) -> None:
    sink = Sink(tmp_path / "sink.db")
    assert sink.begin("a", 10) is True
    assert sink.begin("a", 11) is True
    with pytest.raises(Stale):
        sink.write("a", 10, "late", "wrong")
    assert sink.done() == set()
    sink.write("a", 11, "present", "right")
    assert sink.rows() == [("a", 11, "present", "right")]
    assert sink.begin("a", 12) is False
    with pytest.raises(Stale):
        sink.begin("a", 11)


def test_the_sink_says_when_a_transaction_is_stuck_in_it(tmp_path: Path) -> None:
    sink, other = Sink(tmp_path / "sink.db"), Sink(tmp_path / "sink.db")
    assert sink.unlocked() is True
    other._database.execute("BEGIN IMMEDIATE")
    assert sink.unlocked() is False
    other._database.execute("ROLLBACK")


class Played:
    """A story that went well, for the judge.  Tests spoil it."""

    def __init__(self, home: Path) -> None:
        self.tasks = home / "tasks"
        self.tasks.mkdir()
        for name in FILES:
            (self.tasks / name).write_text("2 x 3\n")
        self.result = process("2 x 3\n")
        killed, frozen = Attempt("worker-1", FILES[0], 1), Attempt("worker-2", FILES[1], 2)
        under = [[Attempt("worker-3", FILES[at], 100 + at) for at in pair] for pair in ((2, 3), (4, 5))]
        self.rows = [(name, 100 + at, "worker-3", self.result) for at, name in enumerate(FILES)]
        self.events = [self.told("worker-1", "begun", FILES[0], 1), self.told("worker-2", "begun", FILES[1], 2)]
        self.events += [self.told("worker-3", "begun", name, generation) for name, generation, _, _ in self.rows]
        self.events += [self.told("worker-2", "stale", FILES[1], 2)]
        self.ends = [-signal.SIGKILL, -signal.SIGKILL, 0]
        self.stage: Any = SimpleNamespace(
            events=self.events, killed=[killed], frozen=[frozen], outlived=under, seconds=1.0,
            sink=SimpleNamespace(rows=lambda: self.rows),
        )  # fmt: skip

    @staticmethod
    def told(worker: str, event: str, name: str, generation: int) -> tuple[float, str, dict[str, Any]]:
        return (0.0, worker, {"event": event, "name": name, "generation": generation})

    def failures(self, printed: pytest.CaptureFixture[str]) -> list[str]:
        proven = judge(self.stage, self.tasks, self.ends)
        lines = [line.strip() for line in printed.readouterr().out.splitlines()]
        failed = [line for line in lines if line.startswith("FAILED")]
        assert proven is (not failed) and any(line.startswith("NOT PROVEN") for line in lines) is bool(failed)
        return failed


@pytest.fixture
def played(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Played:
    monkeypatch.setattr("worker.ROUNDS", 1)
    return Played(tmp_path)


def test_the_judge_believes_a_story_that_went_well(played: Played, capsys: pytest.CaptureFixture[str]) -> None:
    assert played.failures(capsys) == []


def spoil_twice(played: Played) -> None:
    played.rows.append((FILES[7], 500, "worker-1", played.result))


def spoil_missed(played: Played) -> None:
    del played.rows[9]


def spoil_result(played: Played) -> None:
    played.rows[8] = (*played.rows[8][:3], "7 0000000000000000")


def spoil_repeated_generation(played: Played) -> None:
    played.events.append(played.told("worker-1", "begun", FILES[9], 105))


def spoil_falling_generation(played: Played) -> None:
    played.events.append(played.told("worker-1", "begun", FILES[9], 50))


def spoil_forgotten_lease(played: Played) -> None:
    played.rows[3] = (FILES[3], 400, "worker-1", played.result)


def spoil_kill(played: Played) -> None:
    played.ends[1] = 0


def spoil_last_stop(played: Played) -> None:
    played.ends[2] = 70


def spoil_taking_over(played: Played) -> None:
    played.rows[0] = (FILES[0], 1, "worker-1", played.result)


def spoil_late_write(played: Played) -> None:
    del played.events[-1]


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (spoil_twice, "no file was done twice"),
        (spoil_missed, "no file was missed: order-010.txt"),
        (spoil_result, "every result is right"),
        (spoil_repeated_generation, "a generation nobody else ever had"),
        (spoil_falling_generation, "generations rose"),
        (spoil_forgotten_lease, "kill 1 of the daemon"),
        (spoil_kill, "the daemon ended twice by signal 9"),
        (spoil_last_stop, "the daemon ended twice by signal 9"),
        (spoil_taking_over, "of the killed worker-1"),
        (spoil_late_write, "late write was refused"),
    ],
)
def test_the_judge_finds_what_is_not_so(played: Played, capsys: pytest.CaptureFixture[str], spoil: Any, words: str) -> None:
    spoil(played)
    assert any(words in line for line in played.failures(capsys))
