"""The manual pages: nothing the programs take is missing from them, and man and mandoc have nothing to say about them."""

from __future__ import annotations

import argparse
import os
import re
import subprocess

import pytest
from daemons import ROOT

from leased.__main__ import _parser as leased_parser
from leased.client import command
from leased.client.shell import EXIT_YES, all_options
from leased.config_keys import KEYS

PLACE = ROOT / "contrib/man"
PAGES = ("lease.1", "leasenc.1", "leased.toml.5", "leased.8")
ANEW = "python contrib/man/generate.py writes them anew"


def shown(page: str) -> str:
    """The page as text: what escapes stand for, and no change of font."""
    text = re.sub(r"\\f[BIR]|\\&", "", (PLACE / page).read_text())
    for escape, meant in ((r"\-", "-"), (r"\(aq", "'"), (r"\(ga", "`"), (r"\(ha", "^"), (r"\(ti", "~"), (r"\e", "\\")):
        text = text.replace(escape, meant)
    return text


def parts(page: str) -> dict[str, str]:
    """Subsections by title, whose options are items."""
    found = re.split(r'^\.SS "(.*)"\n', shown(page), flags=re.MULTILINE)[1:]
    return {title: re.split(r"^\.SH ", text, flags=re.MULTILINE)[0] for title, text in zip(found[::2], found[1::2], strict=True)}


def items(text: str) -> set[str]:
    return {
        word for names in re.findall(r"^\.TP\n(.*)$", text, re.MULTILINE) for word in re.findall(r"--?[A-Za-z][a-z0-9-]*", names)
    }


def test_every_verb_and_option_of_lease_has_its_lines() -> None:
    told = parts("lease.1")
    assert list(told) == [f"lease {name}" for name in command.VERBS], ANEW
    common = items(shown("lease.1").partition('.SH "COMMON OPTIONS"')[2])
    for name in command.VERBS:
        for option in all_options(command._find(name)):
            assert {option.name, *([option.short] if option.short else [])} <= items(told[f"lease {name}"]) | common, (name, ANEW)
        own = {option.name for option in command._find(name).options}
        assert {word for word in items(told[f"lease {name}"]) if word.startswith("--")} == own, (name, ANEW)


def test_every_verb_and_option_of_leased_has_its_lines() -> None:
    told = parts("leased.8")
    pending: list[tuple[str, argparse.ArgumentParser]] = [("leased", leased_parser())]
    seen = set()
    for prefix, parser in pending:
        if prefix != "leased":
            shown_actions = [action for action in parser._actions if action.help is not argparse.SUPPRESS]
            options = {word for action in shown_actions for word in action.option_strings} - {"-h", "--help"}
            assert options == items(told[prefix]), (prefix, ANEW)
            seen.add(prefix)
        for action in parser._actions:
            if isinstance(action, argparse._SubParsersAction):
                pending += [(f"{prefix} {name}", verb) for name, verb in action.choices.items()]
    assert seen == set(told), ANEW


def test_every_key_of_the_configuration_has_its_lines() -> None:
    names = re.findall(r"^\.TP\n(.*)$", shown("leased.toml.5"), re.MULTILINE)
    assert [name for name in names if not name.startswith('namespaces."')] == list(KEYS), ANEW


def test_every_option_and_exit_code_of_leasenc_has_its_lines() -> None:
    helped = subprocess.run([ROOT / "contrib/leasenc", "--help"], capture_output=True, text=True, check=True, timeout=30).stdout
    page = shown("leasenc.1")
    assert set(re.findall(r"--[a-z]+", helped)) == items(page), ANEW
    codes = set(re.findall(r"(?:^|; ?\n?|exit: )(\d+) [a-z]", helped.split(".  JSON")[0], re.MULTILINE))
    assert codes and codes <= set(re.findall(r"^\.TP\n(\d+)$", page, re.MULTILINE)), ANEW


@pytest.mark.packages  # man-db and mandoc
@pytest.mark.parametrize("page", PAGES)
def test_mandoc_and_man_find_nothing_wrong(page: str) -> None:
    lint = subprocess.run(
        ["mandoc", "-Tlint", "-W", "warning", PLACE / page], capture_output=True, text=True, timeout=60, check=False
    )
    assert (lint.stdout, lint.stderr, lint.returncode) == ("", "", EXIT_YES)
    man = subprocess.run(
        ["man", "--warnings", "--local-file", PLACE / page], env=os.environ | {"LC_ALL": "C.UTF-8", "MANWIDTH": "120", "MANROFFSEQ": ""},
        capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    assert man.stderr == "" and "SEE ALSO" in re.sub(".\b", "", man.stdout)
