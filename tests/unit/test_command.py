from __future__ import annotations

import json
import os
import shlex
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgpack
import pytest
from fake_daemon import DROP, Asked, FakeDaemon, Fault, Raw, granted, refused

from leased.client import fences, shell, sync
from leased.client.command import VERBS, main
from leased.client.errors import DaemonUnreachable
from leased.client.shell import Usage, default_holder
from leased.client.verbs import quoted
from leased.client.watching import Gap, Watch

FENCE = "9007199254740993"
OTHER_FENCE = "4611686018427387904"


class Ran(NamedTuple):
    code: int
    out: str
    err: str


class Bench:
    """Runs the command in this process against a scripted daemon."""

    def __init__(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.answer: Any = Fault("internal: the test gave no answer")
        self.daemon = FakeDaemon(
            tmp_path / "leased.sock", lambda asked: self.answer(asked) if callable(self.answer) else self.answer
        )
        self._capsys = capsys

    def run(self, *words: str) -> Ran:
        code = main([words[0], "--socket", self.daemon.path, *words[1:]])
        out, err = self._capsys.readouterr()
        return Ran(code, out, err)

    @property
    def last(self) -> Asked:
        return self.daemon.asked[-1]


@pytest.fixture
def bench(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Iterator[Bench]:
    bench = Bench(tmp_path, capsys)
    yield bench
    bench.daemon.stop()


@pytest.fixture(autouse=True)
def bare_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("LEASE")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("LOGNAME", "ann")


def unknown(asked: Asked) -> dict[str, Any]:
    return {"acquired": None, "released": None, "held": None, "key": "k", "reason": "full", "retry_after_seconds": 1.0}


LAPSED: Callable[[Asked], Any] = lambda asked: refused(asked, "lapsed", None)  # noqa: E731  a table below
HELD = {"held": True, "key": "k", "held_by": "worker-7", "generation": 41, "expires_in_seconds": 12.3, "waiting": 2}
WATCHED = {"watching": True, "seq": 0}
ARMED = {"scope": "s", "armed": True, "agent_id": None, "due_in_seconds": 60.0, "last_missed_at": None}
FREE = {"held": False, "key": "k", "held_by": None, "generation": None, "waiting": 0}


@pytest.mark.parametrize(
    ("words", "answer", "code"),
    [
        ("acquire k", granted, 0),
        ("acquire k", refused, 75),
        ("acquire k", unknown, 69),
        ("acquire k", Fault("invalid_argument: ttl_seconds must be"), 64),
        ("acquire k", Fault("rate_limited: leases per namespace"), 69),
        ("acquire k", Fault("internal: broken"), 70),
        ("acquire k", Fault("unauthenticated: no such key"), 77),
        ("renew k", granted, 0),
        ("renew k", LAPSED, 79),
        ("renew k", lambda asked: refused(asked, "wrong_fence"), 79),
        ("renew k", unknown, 69),
        ("release k", {"released": True, "key": "k", "generation": 17}, 0),
        ("release k", {"released": False, "key": "k", "reason": "expired"}, 1),
        ("release k", {"released": False, "key": "k", "reason": "not_holder", "held_by": "x", "generation": 2}, 1),
        ("release k", unknown, 69),
        ("check k", HELD, 0),
        ("check k", FREE, 1),
        ("check k", unknown, 69),
        ("check k --generation 41", {**HELD, "current": True}, 0),
        ("check k --generation 40", {**HELD, "current": False}, 1),
        ("check k --generation 40", {**FREE, "current": False}, 1),
        ("check k --generation 40", {**unknown(None), "current": None}, 69),  # type: ignore[arg-type]
        ("list", {"leases": [], "cursor": None}, 0),
        ("list --all", Fault("permission_denied: operators only"), 77),
        ("revoke k --reason r", {"revoked": True, "generation": 17, "held_by": "x"}, 0),
        ("revoke k --reason r", {"revoked": False, "reason": "expired"}, 1),
        ("revoke k --reason r", {"revoked": None, "reason": "full"}, 69),
        ("revoke k --reason r", Fault("permission_denied: operators only"), 77),
        ("wait k", lambda asked: WATCHED if asked.method == "watch" else FREE, 0),
        ("wait k --timeout 0.01", lambda asked: WATCHED if asked.method == "watch" else HELD, 75),
        ("wait k", Fault("rate_limited: watches"), 69),
        ("heartbeat s --expect-within 60", ARMED, 0),
        ("heartbeat s --disarm", {**ARMED, "armed": False}, 0),
        ("heartbeat s --expect-within 60", Fault("internal: this cannot be done now (full); try again in 1 s"), 70),
        ("resume s", {"scope": "s", "empty": True, "leases": [], "switch": None}, 0),
        ("watch k", Fault("invalid_argument: key"), 64),
        ("watch", Fault("rate_limited: watches"), 69),
        ("info", {"name": "leased"}, 0),
        ("info", Fault("unknown_method: info"), 70),
        ("info", Raw(b"HTTP/1.1 400 Bad Request\r\n\r\n"), 70),
        ("info --timeout 0.05", DROP, 69),
    ],
)
def test_exit_codes(bench: Bench, monkeypatch: pytest.MonkeyPatch, words: str, answer: Any, code: int) -> None:
    monkeypatch.setenv("LEASE_FENCE", OTHER_FENCE)
    bench.answer = answer
    ran = bench.run(*words.split())
    assert ran.code == code, ran
    assert bool(ran.err) == (
        code in {64, 70, 77} or isinstance(answer, Fault) or answer is DROP or (words, code) == ("acquire k", 0)
    )
    assert OTHER_FENCE not in ran.out + ran.err
    assert "Traceback" not in ran.err
    quiet = bench.run(*words.split(), "-q")
    assert (quiet.code, quiet.out) == (code, "")


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("", "usage: lease VERB"),
        ("explode", "unknown verb 'explode'"),
        ("acquire", "expected: lease acquire KEY"),
        ("acquire a b", "expected: lease acquire KEY"),
        ("acquire k --ttl", "--ttl needs a value"),
        ("acquire k --ttl soon", "--ttl takes a duration"),
        ("acquire k --ttl nan", "--ttl takes a duration"),
        ("acquire k --ttl -5", "--ttl takes a duration"),
        ("acquire k --ttl 1e999", "--ttl takes a duration"),
        ("acquire k --ttl 5 --ttl 6", "given twice"),
        ("acquire k --format yaml", "one of text, json, env"),
        ("acquire k --json=yes", "takes no value"),
        ("acquire k --tt 5", "unknown option '--tt'"),
        ("acquire k --fence-out /nowhere/f", "No such file"),
        ("acquire k --bind process", "`lease run KEY -- COMMAND`"),
        ("acquire k --bind connection", "before anybody can use it"),
        ("acquire k --bind parent", "one of none, process, connection"),
        ("wait", "expected: lease wait KEY"),
        ("wait k --timeout soon", "--timeout takes a duration"),
        ("watch k --scope s", "either a KEY or --scope"),
        ("watch a b", "expected: lease watch"),
        ("heartbeat s", "either --expect-within DURATION or --disarm"),
        ("heartbeat s --disarm --expect-within 5", "either --expect-within DURATION or --disarm"),
        ("heartbeat s --disarm --agent-id a", "--agent-id goes with --expect-within"),
        ("heartbeat --expect-within 5", "expected: lease heartbeat SCOPE"),
        ("resume", "expected: lease resume SCOPE"),
        ("check k --generation -1", "whole number"),
        ("release k --fence-file /nowhere", "No such file"),
        ("revoke k", "needs --reason"),
        ("revoke --reason r", "either a KEY or --key-hash"),
        ("revoke k --key-hash h --reason r", "either a KEY or --key-hash"),
        ("check \udcff", "not valid UTF-8"),
    ],
)
def test_wrong_usage_is_told_and_nothing_is_asked(bench: Bench, words: str, told: str) -> None:
    ran = bench.run(*words.split()) if words else Ran(main([]), *bench._capsys.readouterr())
    assert ran.code == 64
    assert told in ran.err
    assert "Traceback" not in ran.err
    assert ran.out == ""
    assert bench.daemon.asked == []


@pytest.mark.parametrize("words", [("--fence", FENCE), (f"--fence={FENCE}",)])
@pytest.mark.parametrize("verb", ["acquire", "renew", "release"])
def test_a_fence_is_never_taken_from_the_arguments(bench: Bench, verb: str, words: tuple[str, ...]) -> None:
    ran = bench.run(verb, "k", *words)
    assert ran.code == 64
    assert "secret" in ran.err
    assert "--fence-file" in ran.err
    assert FENCE not in ran.err + ran.out
    assert bench.daemon.asked == []


def test_the_fence_is_printed_only_where_asked_for(bench: Bench, tmp_path: Path) -> None:
    bench.answer = granted
    for words in ((), ("-q",), ("--fence-out", str(tmp_path / "f"))):
        ran = bench.run("acquire", "k", *words)
        assert ran.code == 0
        assert FENCE not in ran.out + ran.err, words
    for words in (("--show-fence",), ("--json",), ("--format", "json"), ("--format=env",)):
        assert FENCE in bench.run("acquire", "k", *words).out, words


def test_a_lease_whose_fence_nobody_kept_is_remarked_on(bench: Bench) -> None:
    bench.answer = granted
    assert "--fence-out" in bench.run("acquire", "k").err
    assert bench.run("acquire", "k", "--show-fence").err == ""


def test_what_acquire_sends(bench: Bench) -> None:
    bench.answer = granted
    bench.run("acquire", "gpu:0", "--ttl", "5m", "--wait=500ms", "--holder", "me", "--scope", "night")
    sent = dict(bench.daemon.asked[0].params)
    assert len(sent.pop("request_id")) >= 22
    assert sent == {"key": "gpu:0", "holder": "me", "ttl_seconds": 300, "wait_seconds": 0.5, "scope": "night", "bind": "none"}
    bench.run("acquire", "--", "--odd key")
    assert bench.last.params["key"] == "--odd key"
    assert bench.last.params["ttl_seconds"] == 60
    assert bench.last.params["holder"] == default_holder()


def test_sentences(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("leased.client.wording.at", lambda seconds: "17:39:36")
    monkeypatch.setenv("LEASE_FENCE", OTHER_FENCE)
    bench.answer = granted
    assert bench.run("acquire", "k", "--holder", "me").out == "k is yours until 17:39:36 (60 s): holder me, generation 17.\n"
    assert bench.run("renew", "k", "--holder", "me").out == "k is renewed until 17:39:36 (60 s): holder me, generation 17.\n"
    bench.answer = refused
    assert bench.run("acquire", "k").out == "k is held by worker-7 (generation 41), free in about 12 s at 17:39:36.\n"
    bench.answer = LAPSED
    assert bench.run("renew", "k").out.startswith("The lease on k is lost")
    bench.answer = lambda asked: refused(asked, "wrong_holder")
    assert "--holder or LEASE_HOLDER" in bench.run("renew", "k").out
    bench.answer = HELD
    assert bench.run("check", "k").out == "k is held by worker-7 (generation 41), free in about 12 s at 17:39:36; 2 waiting.\n"
    bench.answer = FREE
    assert bench.run("check", "k").out == "k is free.\n"
    bench.answer = unknown
    assert bench.run("acquire", "k").out == "Nobody can tell now who holds k (full). Do not go on; ask again in 1.0 s.\n"
    bench.answer = {"revoked": True, "generation": 17, "held_by": "worker-7"}
    assert bench.run("revoke", "k", "--reason", "r").out == "k is revoked (generation 17 of worker-7).\n"


def test_sentences_about_scopes(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("leased.client.wording.at", lambda seconds: "17:39:36")
    bench.answer = ARMED
    told = "The switch of s is armed: without another heartbeat in 60 s (at 17:39:36) its leases are released.\n"
    assert bench.run("heartbeat", "s", "--expect-within", "1m").out == told
    assert bench.last.params == {"scope": "s", "expect_within_seconds": 60}
    bench.answer = {**ARMED, "agent_id": "worker-7", "last_missed_at": "then"}
    told = bench.run("heartbeat", "s", "--expect-within", "60", "--agent-id", "worker-7").out
    assert "armed, agent worker-7: " in told
    assert told.endswith("are released; it was last missed at then.\n")
    assert bench.last.params == {"scope": "s", "expect_within_seconds": 60, "agent_id": "worker-7"}
    bench.answer = {**ARMED, "armed": False, "due_in_seconds": None}
    assert bench.run("heartbeat", "s", "--disarm").out == "The switch of s is not armed.\n"
    assert bench.last.params == {"scope": "s", "disarm": True}
    bench.answer = {"scope": "s", "empty": True, "leases": [], "switch": None}
    assert bench.run("resume", "s").out.startswith("Nothing is known of s")
    lease = {
        "key": "a",
        "key_hash": "00ff",
        "holder": "x",
        "scope": "s",
        "generation": 4,
        "expires_in_seconds": 5.0,
        "bind": "process",
    }
    released = [{"key": "b", "key_hash": "01", "generation": 2}, {"key": None, "key_hash": "02", "generation": 3}]
    missed = {"armed": False, "last_missed_at": "then", "released": released}
    bench.answer = {"scope": "s", "empty": False, "leases": [lease], "switch": missed}
    assert bench.run("resume", "s").out.splitlines() == [
        "a  held by x  generation 4  free in 5.0 s  scope s  bind process",
        "The switch of s is not armed; it was last missed at then.",
        "  it released b  generation 2",
        "  it released #02  generation 3",
    ]
    assert json.loads(bench.run("resume", "s", "--json").out) == bench.answer


def test_a_wait_is_bounded_by_its_own_timeout_and_answers_by_the_usual_one(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []

    def wait_free(client: sync.Client, key: str, timeout: float | None) -> bool:
        seen.append((client.timeout, key, timeout))
        return timeout is None

    monkeypatch.setattr(sync.Client, "wait_free", wait_free)
    assert bench.run("wait", "k") == Ran(0, "k is free.\n", "")
    ran = bench.run("wait", "k", "--timeout", "5m", "--json")
    assert (ran.code, json.loads(ran.out)) == (75, {"key": "k", "free": False})
    assert seen == [(10.0, "k", None), (10.0, "k", 300.0)]


EVENT = {"seq": 1, "type": "granted", "key": "k", "key_hash": "00ff", "scope": None, "holder": "x", "generation": 4, "reason": None}


def watched(bench: Bench, *words: str, events: list[dict[str, Any]], gap: dict[str, Any] | None = None) -> Ran:
    """The first connection tells these, the second is refused for good."""

    def script(asked: Asked) -> Any:
        if len(bench.daemon.asked) > 1:
            return Fault("permission_denied: enough")
        messages = [(1, asked.msgid, None, WATCHED), *((2, "event", (event,)) for event in events)]
        messages += [(2, "gap", (gap,))] if gap else []
        bench.daemon.send(1, b"".join(map(msgpack.packb, messages)))
        return DROP

    bench.answer = script
    bench.daemon.asked.clear()
    return bench.run("watch", *words)


def test_watch_shows_a_line_for_each_event_and_for_what_is_missing(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("leased.client.wording.at", lambda seconds: "17:39:36")
    ended = {**EVENT, "seq": 2, "type": "switch_missed", "key": None, "scope": "s", "holder": "\x1b[2J", "reason": "switch"}
    bound = {**EVENT, "seq": 3, "type": "released", "reason": "process_exited"}
    ran = watched(bench, events=[EVENT, ended, bound], gap={"from_seq": 4, "to_seq": 6})
    assert ran.code == 77
    assert ran.out.splitlines() == [
        "17:39:36  granted        k  holder x  generation 4",
        "17:39:36  switch missed  #00ff  holder \\x1b[2J  generation 4  scope s",
        "17:39:36  released       k  holder x  generation 4  (its process ended)",
        "17:39:36  gap: 3 events came faster than they were read, and are not shown",
    ]
    assert ran.err.splitlines() == ["lease: watching all leases of the namespace", "lease: permission_denied: enough"]


def test_watch_as_json_says_gap_too(bench: Bench) -> None:
    ran = watched(bench, "--scope", "s", "--json", "-q", events=[EVENT], gap={"from_seq": 2, "to_seq": 3})
    assert [json.loads(line) for line in ran.out.splitlines()] == [EVENT, {"type": "gap", "from_seq": 2, "to_seq": 3}]
    assert bench.last.params == {"scope": "s"}
    assert "watching" not in ran.err


def test_watch_says_once_that_the_daemon_is_away_and_goes_on(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    gone = DaemonUnreachable("/s", "nobody listens there")
    turns: list[Any] = [gone, gone, Gap(None, None), gone, None]

    def take(watch: Watch) -> Any:
        told = turns.pop(0)
        if isinstance(told, Exception):
            raise told
        return told

    monkeypatch.setattr(Watch, "take", take)
    bench.answer = WATCHED
    ran = bench.run("watch", "k")
    assert ran.code == 0
    assert "the connection was lost and is back" in ran.out
    assert ran.err.count("no daemon answers at /s: nobody listens there; trying on until it is back") == 2
    assert ran.err.startswith("lease: watching k\n")


def test_json_is_the_daemon_s_reply(bench: Bench) -> None:
    bench.answer = HELD
    assert json.loads(bench.run("check", "k", "--json").out) == HELD
    bench.answer = refused
    ran = bench.run("acquire", "k", "--format", "json")
    assert (ran.code, json.loads(ran.out)["held_by"]) == (75, "worker-7")


def test_what_another_tenant_wrote_cannot_move_the_cursor(bench: Bench) -> None:
    bench.answer = {**HELD, "held_by": "\x1b[2Jann\nk is free."}
    assert bench.run("check", "k").out.count("\n") == 1
    assert "\x1b" not in bench.run("check", "k").out


def test_list_prints_a_line_per_lease_and_stops_at_the_limit(bench: Bench) -> None:
    one = {"key": "a", "key_hash": "00ff", "holder": "x", "scope": "s", "generation": 4, "expires_in_seconds": 5.0, "bind": "none"}
    bench.answer = {"leases": [one, {**one, "key": None}], "cursor": None}
    assert bench.run("list").out == (
        "a  held by x  generation 4  free in 5.0 s  scope s\n#00ff  held by x  generation 4  free in 5.0 s  scope s\n"
    )
    ran = bench.run("list", "--limit", "1", "--scope", "s", "--json")
    assert [json.loads(line)["key"] for line in ran.out.splitlines()] == ["a"]
    assert bench.last.params == {"scope": "s", "limit": 1}


def test_lines_for_eval_make_an_environment_to_renew_from(bench: Bench, tmp_path: Path) -> None:
    bench.answer = granted
    ran = bench.run("acquire", "it's; $(boom)", "--holder", "me", "--format", "env")
    script = f"{ran.out}\nprintf '%s\\n' \"$LEASE_KEY\" \"$LEASE_HOLDER\"; env | grep -c '^LEASED\\?_'"
    shell = subprocess.run(["sh", "-c", f"eval {shlex.quote(ran.out)}; {script}"], capture_output=True, text=True, check=True)
    assert shell.stdout.splitlines() == ["it's; $(boom)", "me", "6"]


@pytest.mark.parametrize(
    ("answer", "words", "code"), [(refused, (), 75), (unknown, (), 69), (Fault("internal: x"), (), 70), (granted, ("--bad",), 64)]
)
def test_eval_fails_when_there_is_no_lease(bench: Bench, answer: Any, words: tuple[str, ...], code: int) -> None:
    """`eval ""` succeeds: a script would go on without the lease."""
    bench.answer = answer
    ran = bench.run("acquire", "k", "--format", "env", *words)
    assert ran.code == code
    assert ran.err
    shell = subprocess.run(["sh", "-c", f"eval {shlex.quote(ran.out)} && echo worked"], capture_output=True, text=True, check=False)
    assert (shell.returncode, shell.stdout) == (code, "")


def test_quoting_survives_the_shell() -> None:
    odd = "a'b\"c\n$d `e` \\f"
    assert shlex.split(quoted(odd)) == [odd]


def test_a_fence_file_is_private_whole_and_good_for_a_release(bench: Bench, tmp_path: Path) -> None:
    kept = tmp_path / "fence"
    kept.write_text("older")
    kept.chmod(0o644)
    bench.answer = granted
    assert bench.run("acquire", "k", "--fence-out", str(kept)).code == 0
    assert stat.S_IMODE(kept.stat().st_mode) == 0o600
    assert kept.read_text() == FENCE + "\n"
    bench.answer = {"released": True, "key": "k", "generation": 17}
    assert bench.run("release", "k", "--fence-file", str(kept)).code == 0
    assert bench.last.params == {"key": "k", "fence": FENCE}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["fence", "leased.sock"]


def test_a_refusal_leaves_the_fence_file_as_it_was(bench: Bench, tmp_path: Path) -> None:
    kept = tmp_path / "fence"
    kept.write_text("older")
    bench.answer = refused
    assert bench.run("acquire", "k", "--fence-out", str(kept)).code == 75
    assert kept.read_text() == "older"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["fence", "leased.sock"]


def test_a_grant_whose_fence_cannot_be_kept_is_released(bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(fences.os, "rename", full)
    bench.answer = lambda asked: granted(asked) if asked.method == "lease" else {"released": True, "key": "k"}
    ran = bench.run("acquire", "k", "--fence-out", str(tmp_path / "fence"))
    assert ran.code == 70
    assert "No space left" in ran.err
    assert bench.daemon.methods() == ["lease", "release"]
    assert [path.name for path in tmp_path.iterdir()] == ["leased.sock"]


def test_the_environment_s_fence_belongs_to_the_environment_s_key(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LEASE_FENCE", FENCE)
    monkeypatch.setenv("LEASE_KEY", "k")
    bench.answer = granted
    bench.run("acquire", "k")
    assert bench.last.params["fence"] == FENCE
    bench.run("acquire", "other")
    assert "fence" not in bench.last.params


@pytest.mark.parametrize("text", ["", "\n", "not a number", "12 34", "-5", "１２"])
def test_what_is_no_fence_is_refused_and_not_repeated(bench: Bench, tmp_path: Path, text: str) -> None:
    (tmp_path / "f").write_text(text)
    ran = bench.run("release", "k", "--fence-file", str(tmp_path / "f"))
    assert ran.code == 64
    assert not text.strip() or text not in ran.err.replace(str(tmp_path), "")
    assert bench.daemon.asked == []


def test_the_holder_of_a_shell_stays_the_same_and_can_be_given(monkeypatch: pytest.MonkeyPatch) -> None:
    assert default_holder() == f"ann@{os.uname().nodename}:{os.getppid()}"
    monkeypatch.setattr(os, "getppid", lambda: 1)
    assert default_holder() == f"ann@{os.uname().nodename}:{os.getpid()}"
    monkeypatch.setenv("LEASE_HOLDER", "given")
    assert default_holder() == "given"


def test_release_checks_the_holder_only_if_one_was_given(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LEASE_FENCE", FENCE)
    bench.answer = {"released": True, "key": "k", "generation": 17}
    bench.run("release", "k")
    assert "holder" not in bench.last.params
    monkeypatch.setenv("LEASE_HOLDER", "given")
    bench.run("release", "k")
    assert bench.last.params["holder"] == "given"


def test_an_agent_key_comes_from_the_environment(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LEASED_AGENT_KEY", "secret")
    bench.answer = FREE
    bench.run("check", "k")
    assert bench.last.params["agent_key"] == "secret"


def test_no_daemon_tells_which_socket_and_what_to_do(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "k", "--socket", str(tmp_path / "none")]) == 69
    told = capsys.readouterr().err
    assert str(tmp_path / "none") in told
    assert "leased serve" in told
    assert "LEASED_SOCKET" in told


def test_an_interrupt_is_130_and_a_mistake_of_ours_is_70(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    def raising(wrong: BaseException) -> Callable[..., Any]:
        def check(*_: object) -> Any:
            raise wrong

        return check

    monkeypatch.setattr(sync.Client, "check", raising(KeyboardInterrupt()))
    assert bench.run("check", "k") == Ran(130, "", "")
    monkeypatch.setattr(sync.Client, "check", raising(ZeroDivisionError(FENCE)))
    ran = bench.run("check", "k")
    assert ran.code == 70
    assert "ZeroDivisionError at " in ran.err
    assert FENCE not in ran.err


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_has_a_page_with_examples(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([verb, "--help"]) == 0
    page = capsys.readouterr().out
    assert page.startswith(f"usage: lease {verb}")
    assert "examples:\n  " in page
    options = [line.split()[0] for line in page.splitlines() if line.startswith("  --")]
    assert "--socket" in options
    assert len(set(options)) == len(options)
    assert max(len(line) for line in page.splitlines()) <= 132
    assert main(["help", verb]) == 0
    assert capsys.readouterr().out == page


def test_the_overview_lists_every_verb(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    page = capsys.readouterr().out
    assert all(f"\n  {verb} " in page for verb in VERBS)
    assert "exit codes:" in page
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("lease ")


def run_alone(*words: str, **more: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "leased.client.command", *words], capture_output=True, text=True, check=False, timeout=20, **more
    )


def test_the_lines_of_an_options_text_stand_below_each_other() -> None:
    told = shell.page(shell.Verb(lambda *_: 0, "lease x", "About.", (shell.Option("--what", "WHAT", "one\n  two"),), (0, 0), ()))
    assert f"  --what WHAT              one\n{'':27}two\n" in told


def test_a_fence_comes_by_standard_input_and_never_shows(bench: Bench) -> None:
    bench.answer = {"released": True, "key": "k", "generation": 17}
    for words in (("release", "k"), ("release", "k", "--fence-file", "-")):
        ran = run_alone(*words, "--socket", bench.daemon.path, input=FENCE + "\n")
        assert (ran.returncode, ran.stderr) == (0, "")
        assert bench.last.params["fence"] == FENCE
        assert FENCE not in ran.stdout
    refused = run_alone("release", "k", "--socket", bench.daemon.path, input="")
    assert (refused.returncode, "by --fence-file FILE, in LEASE_FENCE, or on standard input" in refused.stderr) == (64, True)


def test_a_pipe_that_never_ends_does_not_hang_a_script(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fences.select, "select", lambda read, write, wrong, seconds: ([], [], []) if seconds <= 10 else 1 / 0)
    with pytest.raises(Usage, match="within 10 s"):
        fences._from_stdin()


def test_a_closed_pipe_is_quiet_and_a_grant_nobody_reads_is_given_back(bench: Bench) -> None:
    read, write = os.pipe()
    os.close(read)
    bench.answer = lambda asked: granted(asked) if asked.method == "lease" else {"released": True, "key": "k"}
    with os.fdopen(write, "w") as closed:
        ran = subprocess.run(
            [sys.executable, "-m", "leased.client.command", "acquire", "k", "--json", "--socket", bench.daemon.path],
            stdout=closed,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
            timeout=20,
        )
    assert (ran.returncode, ran.stderr) == (141, "")
    assert bench.daemon.methods() == ["lease", "release"]


def test_the_command_loads_nothing_it_does_not_need(bench: Bench) -> None:
    """Start-up is most of what it costs: measured at half of the 60 ms it may take, without these."""
    bench.answer = FREE
    code = (
        "import sys; from leased.client.command import main; main(sys.argv[1:]);"
        "print(*sorted({'argparse', 'json', 'dataclasses', 'inspect', 'pathlib', 'asyncio', 'secrets', 'random', 'hashlib', 'trio',"
        "'lmdb', 'h11', 'structlog', 'leased.model', 'subprocess', 'shutil', 'tempfile', 'logging'} & set(sys.modules) - before))"
    )
    ran = subprocess.run(
        [sys.executable, "-I", "-c", "import sys; before = set(sys.modules);" + code, "check", "k", "--socket", bench.daemon.path],
        capture_output=True,
        text=True,
        check=True,
        timeout=20,
    )
    assert ran.stdout.splitlines() == ["k is free.", ""]
    for verb in ("wait", "watch", "heartbeat", "resume"):
        code = "import sys, leased.client.command as c; c.main([sys.argv[1], '--help']); print('leased.client.sync' in sys.modules)"
        ran = subprocess.run([sys.executable, "-I", "-c", code, verb], capture_output=True, text=True, check=True, timeout=20)
        assert ran.stdout.splitlines()[-1] == "False"
