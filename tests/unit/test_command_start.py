"""What the `lease` command imports before it answers.  Modules are counted, not milliseconds: those depend on who else is at work."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from fake_daemon import Asked, FakeDaemon

from leased.client.command import main

ROOT = Path(__file__).resolve().parents[2]
NEVER = {
    "asyncio",
    "trio",
    "anyio",
    "lmdb",
    "structlog",
    "h11",
    "argparse",
    "subprocess",
    "logging",
    "inspect",
    "dataclasses",
    "pathlib",
    "leased__mypyc",
}
"""By `lease check`, `lease run` and every help page; the last is what the compiled build has (contrib/compiled).  Each costs a tenth of what an
answer may take, or more."""

TYPING = {"typing", "re", "enum", "contextlib", "functools", "warnings", "importlib"}
"""What `typing` brings, which alone is half of what a bare Python takes to start."""

PLAIN = [
    "acquire k --fence-out fence",
    "acquire k --wait 1s",
    "renew k",
    "release k",
    "check k",
    "list",
    "revoke k --reason r",
    "info",
    "usage",
    "heartbeat s --expect-within 60s",
    "resume s",
]
BEYOND_A_PLAIN_VERB = (
    NEVER | TYPING | {"socket", "selectors", "threading", "json", "signal", "ctypes", "tempfile", "random", "secrets"}
)


def loaded(words: list[str], environment: dict[str, str] | None = None) -> set[str]:
    """The modules there are after the command, beyond those a bare interpreter has."""
    return outcome(words, environment)[2]


def outcome(words: list[str], environment: dict[str, str] | None = None) -> tuple[int, str, set[str]]:
    """Exit code, output, and those modules."""
    code = f"""
import sys
before = {{*sys.modules}}
from leased.client.command import main
code = main({words!r})
print(code, *({{*sys.modules}} - before), file=sys.stderr)
"""
    run = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True, env=environment
    )
    code, *modules = run.stderr.splitlines()[-1].split()
    return int(code), run.stdout, set(modules)


def test_the_help_page_takes_no_more_than_it_needs() -> None:
    """Half of what a bare Python takes: five small files."""
    modules = loaded(["--help"])
    ours = {name for name in modules if name.partition(".")[0] == "leased"}
    assert ours == {"leased", "leased.version", "leased.light", "leased.client", "leased.client.command", "leased.client.shell"}
    assert len(modules) <= 16, sorted(modules)
    assert modules.isdisjoint(TYPING)
    assert modules.isdisjoint(NEVER | {"socket", "json", "msgpack", "threading", "select", "signal", "ctypes", "importlib.util"})


@pytest.mark.parametrize(
    "words", [["run", "--help"], ["top", "--help"], ["doctor", "--help"], ["completion", "--help"], ["acquire", "--help"]]
)
def test_a_verbs_help_page_needs_no_socket(words: list[str]) -> None:
    assert loaded(words).isdisjoint(NEVER | {"socket", "msgpack", "json", "ctypes", "rich"})


@pytest.mark.parametrize("words", [["check", "k"], ["run", "-n", "k", "--", "true"], ["top", "--once"]])
def test_an_answer_needs_a_socket_and_little_else(words: list[str]) -> None:
    modules = loaded([*words, "--socket", "/nowhere/leased.sock"])
    assert "leased.client.wire" in modules
    assert modules.isdisjoint(NEVER | {"json", "ctypes", "rich", "uuid", "secrets", "random", "hashlib", "ssl"})


def answered(asked: Asked) -> dict[str, Any]:
    """Something nested to every question, so that the strict decoder is needed too."""
    grant = {"acquired": True, "renewed": False, "key": "k", "holder": "me", "fence": "9007199254740993", "generation": 1}
    times = {"ttl_seconds": 60.0, "expires_in_seconds": 59.9, "expires_at": "2026-11-29T17:39:36.123Z"}
    lease = {**grant, **times}
    ended = {"key": "k", "generation": 1, "held_by": "me"}
    answers: dict[str, dict[str, Any]] = {
        "release": {"released": True, **ended},
        "revoke": {"revoked": True, **ended},
        "check": {"held": True, "key": "k", "held_by": "me", "generation": 1, "expires_in_seconds": 5.0, "waiting": 0},
        "list": {"leases": [lease], "cursor": None},
        "info": {"version": "0", "limits": {"max_leases": 1}, "peers": [1, 2]},
        "heartbeat": {"scope": "s", "armed": True, "due_in_seconds": 60.0, "released": [{"key": "k"}]},
        "resume_packet": {"scope": "s", "leases": [lease], "switch": None, "empty": False},
        "usage": {"namespace": "n", "amount": "0", "currency": "USDC", "refusals_billed": 0, "calls_billed": 0}
        | {"pending_upstream": 0, "dead_letters": 0, "more": [1]},
    }
    return answers.get(asked.method, lease)


@pytest.mark.parametrize("form", ["", " --json"])
@pytest.mark.parametrize("line", PLAIN)
def test_a_plain_verb_answers_without_anything_heavy(line: str, form: str, tmp_path: Path) -> None:
    words = [str(tmp_path / word) if word == "fence" else word for word in (line + form).split()]
    with FakeDaemon(tmp_path / "s", answered) as daemon:
        environment = {**os.environ, "LEASED_SOCKET": daemon.path, "LEASE_FENCE": "9007199254740993"}
        code, out, modules = outcome(words, environment)
    assert code == 0
    assert not form or json.loads(out.splitlines()[0])
    assert modules.isdisjoint(BEYOND_A_PLAIN_VERB), modules & BEYOND_A_PLAIN_VERB
    assert {name for name in modules if name.startswith("leased.") and not name.startswith("leased.client")} == {
        *("leased.errors", "leased.frames", "leased.light", "leased.paths", "leased.version"),
        *(["leased.clock"] if "--wait" in words else []),
    }
    assert len(modules) <= 60, sorted(modules)


def test_a_command_under_a_lease_starts_without_typing(tmp_path: Path) -> None:
    with FakeDaemon(tmp_path / "s", answered) as daemon:
        code, _, modules = outcome(["run", "k", "--socket", daemon.path, "--", "true"])
    assert code == 0
    assert "leased.client.running" in modules
    assert modules.isdisjoint(NEVER | {"typing", "re", "contextlib", "socket", "json", "tempfile", "random", "secrets"})


def test_only_the_process_that_ends_is_spared_the_search_for_garbage(capfd: pytest.CaptureFixture[str]) -> None:
    gc.enable()  # a daemon that could not start in another test left it off
    before = gc.get_freeze_count()
    assert main(["check", "k", "--socket", "/nowhere"]) == 69
    assert gc.isenabled()
    assert gc.get_freeze_count() == before
    told = "import gc; from leased.client.command import main; print(main(), gc.isenabled(), gc.get_freeze_count() > 0)"
    for words, ended in ((["check", "k"], "69 False True"), (["watch", "k"], "69 True True")):
        run = subprocess.run(
            [sys.executable, "-c", told, *words, "--socket", "/nowhere", "--timeout", "50ms"],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        )
        assert run.stdout.splitlines()[-1] == ended


def test_one_import_more_would_be_seen() -> None:
    code = "import sys; before = {*sys.modules}; import argparse; print(*({*sys.modules} - before))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert not set(run.stdout.split()).isdisjoint(NEVER)
