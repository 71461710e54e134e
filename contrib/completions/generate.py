"""Writes the completions that `lease completion` prints, by shtab (pip install shtab), from the same tables the help pages come from.

python contrib/completions/generate.py            writes leased/client/completions/
python contrib/completions/generate.py --check    exit 1 if what is there is not what would be written
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

import shtab

from leased.__main__ import _parser as leased_parser
from leased.client import command
from leased.client.completion_verb import COMMANDS, SHELLS
from leased.client.shell import Option, Verb, all_options

PLACE = Path(__file__).resolve().parents[2] / "leased/client/completions"
_COMPLETED = {"FILE": shtab.FILE, "PATH": shtab.FILE, "DIR": shtab.DIRECTORY}


def lease_parser() -> argparse.ArgumentParser:
    """The verbs as argparse would have them.  Nothing parses with it: shtab walks it."""
    parser = argparse.ArgumentParser("lease", add_help=False)
    parser.add_argument("--help", "-h", action="store_true", help="all verbs")
    parser.add_argument("--version", action="store_true", help="the version")
    verbs = parser.add_subparsers(metavar="VERB")
    for name, (_, line) in command.VERBS.items():
        verb: Verb = command._find(name)
        each = verbs.add_parser(name, help=line, add_help=False)
        for option in all_options(verb):
            _add(each, option)
        if name == "completion":
            each.add_argument("shell", choices=list(SHELLS))
    return parser


def _add(parser: argparse.ArgumentParser, option: Option) -> None:
    names = [option.name, *([option.short] if option.short else [])]
    text = _one_line(option.text)
    if not option.metavar:
        parser.add_argument(*names, action="store_true", help=text)
        return
    action = parser.add_argument(*names, metavar=option.metavar, choices=option.choices or None, help=text)
    if option.metavar in _COMPLETED:
        action.complete = _COMPLETED[option.metavar]  # type: ignore[attr-defined]


def _one_line(text: str) -> str:
    """What fits beside a name in a list: the first sentence, without what a shell could take for its own."""
    return re.sub(r"\s+", " ", text.split(";")[0].split("\n")[0]).replace("$", "").replace("`", "").replace("%", "%%")


def _walk(parser: argparse.ArgumentParser) -> None:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for each in action.choices.values():
                _walk(each)
        elif action.metavar in _COMPLETED:
            action.complete = _COMPLETED[action.metavar]  # type: ignore[attr-defined,index]


def scripts() -> dict[Path, str]:
    leased = leased_parser()
    _walk(leased)
    parsers = {"lease": lease_parser(), "leased": leased}
    assert tuple(parsers) == COMMANDS
    return {
        PLACE / f"{name}.{ending}": shtab.complete(parser, shell=shell)
        for name, parser in parsers.items()
        for shell, ending in SHELLS.items()
    }


def main(words: list[str]) -> int:
    stale = [path for path, text in scripts().items() if not path.exists() or path.read_text() != text]
    if words == ["--check"]:
        for path in stale:
            print(f"stale: {path}")
        return bool(stale)
    PLACE.mkdir(exist_ok=True)
    for path in stale:
        path.write_text(scripts()[path])
        print(f"written: {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
