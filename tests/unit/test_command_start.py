"""What the `lease` command imports before it answers.  Modules are counted, not milliseconds: those depend on who else is at work."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

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
}
"""By `lease check`, `lease run` and every help page; each costs a tenth of what an answer may take, or more."""


def loaded(words: list[str]) -> set[str]:
    """The modules there are after the command, beyond those a bare interpreter has."""
    code = f"""
import sys
before = {{*sys.modules}}
from leased.client.command import main
main({words!r})
print(*({{*sys.modules}} - before), file=sys.stderr)
"""
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True)
    return set(run.stderr.splitlines()[-1].split())


def test_the_help_page_takes_no_more_than_it_needs() -> None:
    """Under 60 ms where a bare Python takes 15: the interpreter, `typing` and what that brings, and four small files."""
    modules = loaded(["--help"])
    ours = {name for name in modules if name.partition(".")[0] == "leased"}
    assert ours == {"leased", "leased.version", "leased.client", "leased.client.command", "leased.client.shell"}
    assert len(modules) <= 40, sorted(modules)
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


def test_one_import_more_would_be_seen() -> None:
    code = "import sys; before = {*sys.modules}; import argparse; print(*({*sys.modules} - before))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert not set(run.stdout.split()).isdisjoint(NEVER)
