"""The completions, loaded by the shells they are for, and held to the tables of verbs and options."""

from __future__ import annotations

import argparse
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from daemons import environment

from leased.__main__ import _parser as leased_parser
from leased.client import command
from leased.client.completion_verb import COMMANDS, SHELLS, script
from leased.client.shell import all_options

LEASE = f"{sys.executable} -m leased.client.command"


def tree(name: str) -> dict[str, set[str]]:
    """Each verb with its long options, those argparse hides left out."""
    if name == "lease":
        return {verb: {option.name for option in all_options(command._find(verb))} for verb in command.VERBS}
    (verbs,) = [action for action in leased_parser()._actions if isinstance(action, argparse._SubParsersAction)]
    found = {}
    for verb, parser in verbs.choices.items():
        shown = [action for action in parser._actions if action.help is not argparse.SUPPRESS]
        found[verb] = {word for action in shown for word in action.option_strings if word.startswith("--")}
    return found


@pytest.mark.parametrize("name", COMMANDS)
def test_every_verb_and_option_is_in_every_shells_file(name: str) -> None:
    """contrib/completions/generate.py writes them anew."""
    bash, zsh, fish = (script(shell, name) for shell in SHELLS)
    for verb, options in tree(name).items():
        inner = verb.replace("-", "_")
        told = re.search(rf"^_shtab_{name}_{inner}_option_strings=\((.*)\)$", bash, re.MULTILINE)
        assert told is not None, f"bash knows no {verb}"
        assert {word for word in told[1].split() if word.startswith("--")} - {"--help"} == options - {"--help"}, verb
        block = re.search(rf"^_shtab_{name}_{inner}_options=\((.*?)^\)", zsh, re.MULTILINE | re.DOTALL)
        assert block is not None, f"zsh knows no {verb}"
        assert options <= set(re.findall(r"--[a-z0-9-]+", block[1])), verb
        for option in options - {"--help"}:
            assert re.search(rf"-l '?{option[2:]}\b", fish), f"fish knows no {option}"
        assert re.search(rf"-a '?{verb}\b", fish), f"fish knows no {verb}"


def run(*words: str, **more: str) -> str:
    done = subprocess.run(words, env=environment() | more, capture_output=True, text=True, timeout=60, check=True)
    assert done.stderr == ""
    return done.stdout


def test_bash_completes() -> None:
    asks = [("lease re", 1), ("lease run --on", 2), ("lease run --on-lost _", 3), ("lease check _", 2)]
    lines = [f'eval "$({LEASE} completion bash)"', "complete -p lease"]
    for line, at in asks:
        words = " ".join("''" if word == "_" else word for word in line.split())
        lines.append(f'COMP_WORDS=({words}); COMP_CWORD={at}; COMPREPLY=(); _shtab_lease; echo "${{COMPREPLY[*]}}"')
    registered, *answers = run("bash", "--norc", "-c", "\n".join(lines)).splitlines()
    assert registered.endswith("lease")
    assert answers == ["renew release resume revoke", "--on-lost", "term kill ignore", ""]


@pytest.mark.packages  # fish
def test_fish_completes(tmp_path: Path) -> None:
    asks = ("lease re", "lease run --on", "lease run --on-lost ", "lease check ", "leased agent ")
    code = f"{LEASE} completion fish | source; {LEASE} completion fish --for leased | source\n"
    code += "\n".join(f"echo =; complete -C '{line}'" for line in asks)
    home = {"HOME": str(tmp_path), "XDG_CONFIG_HOME": str(tmp_path), "XDG_DATA_HOME": str(tmp_path), "TERM": "dumb"}
    answers = run("fish", "--no-config", "-c", code, **home).split("=\n")[1:]
    told = [[line.split("\t")[0] for line in answer.splitlines() if line.strip()] for answer in answers]
    assert told == [
        ["release", "renew", "resume", "revoke"],
        ["--on-lost"],
        ["term", "kill", "ignore"],
        [],
        ["add", "list", "revoke"],
    ]


@pytest.mark.packages  # zsh
def test_zsh_completes(tmp_path: Path) -> None:
    """At its prompt, as it only completes there: a tab, and what is on the line or below it then."""
    (tmp_path / ".zshrc").write_text(
        "PS1='ready> '; stty cols 300; unset zle_bracketed_paste\n"
        f'autoload -U compinit && compinit -u -D\neval "$({LEASE} completion zsh)"\n'
    )
    pid, file = pty.fork()
    if pid == 0:
        os.execvpe("zsh", ["zsh", "-d", "-i"], environment() | {"ZDOTDIR": str(tmp_path), "HOME": str(tmp_path), "TERM": "dumb"})
    seen = ""

    def expect(pattern: str) -> None:
        nonlocal seen
        limit = time.monotonic() + 60
        while (found := re.search(pattern, seen, re.DOTALL)) is None:
            left = limit - time.monotonic()
            assert left > 0 and select.select([file], [], [], left)[0], f"no {pattern!r} in {seen!r}"
            seen += os.read(file, 65536).decode(errors="replace")
        seen = seen[found.end() :]

    try:
        expect("ready> ")
        for typed, pattern in (
            ("lease re\t", "release .*renew .*resume .*revoke "),
            ("\x15lease run --on-\t", "lease run --on-lost "),
            ("\x15lease run --on-lost \t", "ignore +kill +term"),
        ):
            os.write(file, typed.encode())
            expect(pattern)
    finally:
        os.kill(pid, signal.SIGKILL)
        os.close(file)
        os.waitpid(pid, 0)


def test_a_shell_nobody_knows_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["completion", "tcsh"]) == 64
    assert "bash, zsh, fish" in capsys.readouterr().err
