"""`lease run` up to the moment it starts anything: what it is given, what it asks, what it refuses."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from fake_daemon import SILENCE, Asked, FakeDaemon, granted, refused

from leased.client import run_verb
from leased.client.command import main
from leased.client.shell import Usage, parse

RUN = run_verb.VERBS["run"]


@pytest.fixture(autouse=True)
def as_it_was(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The verb is given this process's signals; they are put back."""
    for name in [name for name in os.environ if name.startswith("LEASE")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("LOGNAME", "ann")
    numbers = [*run_verb.FORWARDED, signal.SIGCHLD, signal.SIGTSTP]
    before = {number: signal.getsignal(number) for number in numbers}
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, set())
    yield
    for number, handler in before.items():
        signal.signal(number, handler)
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("k", "expected: lease run KEY"),
        ("k --", "expected: lease run KEY"),
        ("-- true", "expected: lease run KEY"),
        ("k true", "expected: lease run KEY"),
        ("k make -j4", "unknown option '-j4'; a command and its options go behind --"),
        ("k --ttl 0.5 -- true", "--ttl of `lease run` is at least 1s"),
        ("k -n -w 5 -- true", "either --wait or --no-wait"),
        ("k -E 256 -- true", "an exit code, 0 to 255"),
        ("k -E -1 -- true", "whole number"),
        ("k -w soon -- true", "--wait takes a duration"),
        ("k -w -w -- true", "--wait takes a duration"),
        ("k --on-lost pray -- true", "one of term, kill, ignore"),
        ("k --bind connection -- true", "one of none, process"),
        ("k --fence 1 -- true", "a fence is a secret"),
    ],
)
def test_wrong_usage(words: str, told: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "--socket", "/nowhere", *words.split()]) == 64
    assert told in capsys.readouterr().err


@pytest.mark.parametrize("words", ["-w5", "-w 5", "-w=5", "--wait 5", "--wait=5", "-w5s"])
def test_short_options(words: str) -> None:
    given = parse(["k", *words.split(), "-n", "--", "make", "-n", "--wait=7", "--", "x"], RUN)
    assert (given.seconds("--wait"), given.switch("--no-wait"), given.text("--no-wait")) == (5, True, "")
    assert (given.operands, given.command) == (["k"], ["make", "-n", "--wait=7", "--", "x"])


def test_a_command_may_have_arguments_that_are_no_text() -> None:
    assert parse(["k", "--", "rm", "\udcff"], RUN).command == ["rm", "\udcff"]
    with pytest.raises(Usage, match="not valid UTF-8"):
        parse(["\udcff", "--", "true"], RUN)


def test_what_is_asked_and_what_a_refusal_says(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    daemon = FakeDaemon(tmp_path / "s", lambda asked: refused(asked))
    try:
        for words, code in ((["-n"], 75), (["-n", "-E", "3"], 3), (["--wait", "0", "--ttl", "5m", "--scope", "night"], 75)):
            assert main(["run", "--socket", daemon.path, "k", *words, "--", "true"]) == code
            out, err = capsys.readouterr()
            assert out == "" and err.startswith("lease: k is held by worker-7")
        assert main(["run", "--socket", daemon.path, "k", "-n", "-q", "--json", "--", "true"]) == 75
        out, err = capsys.readouterr()
        assert err == "" and '"reason": "held"' in out
    finally:
        daemon.stop()
    first, _, third, _ = (asked.params for asked in daemon.asked)
    assert first["ttl_seconds"] == 60 and first["bind"] == "none" and first["holder"].endswith(f":{os.getpid()}")
    assert third["ttl_seconds"] == 300 and third["scope"] == "night"


def test_who_waits_as_long_as_it_takes_queues_again_under_the_same_request_id(tmp_path: Path) -> None:
    """The daemon lets nobody queue longer than 300 s; the last answer, of another reason, ends it."""
    answers = iter(["held", "same_label", "wrong_holder"])
    daemon = FakeDaemon(tmp_path / "s", lambda asked: refused(asked, next(answers)))
    try:
        assert main(["run", "--socket", daemon.path, "k", "--", "true"]) == 75
    finally:
        daemon.stop()
    assert [asked.params["wait_seconds"] for asked in daemon.asked] == [300, 300, 300]
    assert len({asked.params["request_id"] for asked in daemon.asked}) == 1


@pytest.mark.parametrize("ours", [True, False])
def test_an_interrupted_wait_asks_for_its_grant_only_where_it_has_one(tmp_path: Path, ours: bool) -> None:
    """A repeat of the attempt would be a refusal, and billed, if somebody else had the lease."""
    holder: list[str] = []

    def answer(asked: Asked) -> object:
        if asked.method == "lease" and len(holder) == 0:
            holder.append(asked.params["holder"])
            os.kill(os.getpid(), signal.SIGTERM)
            return SILENCE
        if asked.method == "check":
            return {"held": True, "key": "k", "held_by": holder[0] if ours else "other", "generation": 1}
        return granted(asked) if asked.method == "lease" else {"released": True, "key": "k", "generation": 17}

    daemon = FakeDaemon(tmp_path / "s", answer)
    try:
        assert main(["run", "--socket", daemon.path, "k", "--", "true"]) == 143
    finally:
        daemon.stop()
    asked = [each.method for each in daemon.asked]
    assert asked == (["lease", "check", "lease", "release"] if ours else ["lease", "check"])
    if ours:
        assert daemon.asked[0].params["request_id"] == daemon.asked[2].params["request_id"]
