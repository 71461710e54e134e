"""What every verb of the `lease` command shares with the shell: exit codes, options in, lines out, the help page.

Options are parsed here rather than by argparse: importing it costs a third of what `lease check` may take, and the refusals below
(a fence among the arguments) need their own words.
"""

from __future__ import annotations

import os
import sys

from leased.light import NamedTuple

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any, Final

EXIT_YES: Final = 0
EXIT_NO: Final = 1  # check of a free key, release false
EXIT_USAGE: Final = 64
EXIT_UNKNOWN: Final = 69  # unreachable, or nobody can tell
EXIT_INTERNAL: Final = 70
EXIT_REFUSED: Final = 75
EXIT_PERMISSION: Final = 77
EXIT_LOST: Final = 79
EXIT_INTERRUPTED: Final = 130  # 128 + SIGINT
EXIT_BROKEN_PIPE: Final = 141  # 128 + SIGPIPE

_UNITS: Final = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}


class Usage(Exception):
    """The command line is wrong; the text says what is, and what would be right."""


class Option(NamedTuple):
    """`metavar` is empty for a switch.  `choices`: the only values taken.  `short`: one letter with its dash."""

    name: str
    metavar: str
    text: str
    choices: tuple[str, ...] = ()
    short: str = ""


class Verb(NamedTuple):
    """One verb: what runs it, and its help page.  `operands`: least and most that may be given.

    `command`: what follows `--` is a command with arguments of its own, and has to be there.
    """

    run: Callable[[Arguments, Output], int]
    usage: str
    about: str
    options: tuple[Option, ...]
    operands: tuple[int, int]
    examples: tuple[str, ...]
    command: bool = False


COMMON: Final = (
    Option("--socket", "PATH", "the daemon's socket (default: $LEASED_SOCKET, else the usual place)"),
    Option("--timeout", "DURATION", "how long to wait for an answer (default 10s)"),
    Option("--json", "", "print the daemon's reply as JSON"),
    Option("--quiet", "", "print no sentence; the exit code tells", short="-q"),
    Option("--help", "", "this page", short="-h"),
)


class Arguments:
    """What was given to one verb."""

    def __init__(self, operands: list[str], given: dict[str, str], command: list[str] | None = None) -> None:
        self.operands = operands
        self.command = command or []
        self._given = given

    def switch(self, name: str) -> bool:
        return name in self._given

    def text(self, name: str) -> str | None:
        return self._given.get(name)

    def seconds(self, name: str) -> float | None:
        """A duration: a number of seconds, or one with a unit (500ms, 30s, 5m, 1h)."""
        given = self._given.get(name)
        if given is None:
            return None
        number = given.rstrip("msh")
        try:
            value = float(number) * _UNITS[given[len(number) :] or "s"]
        except (ValueError, KeyError):
            value = -1.0
        if not 0.0 <= value < float("inf"):
            raise Usage(f"{name} takes a duration such as 30, 500ms, 5m or 1h, not {given!r}")
        return value

    def whole(self, name: str) -> int | None:
        given = self._given.get(name)
        if given is None:
            return None
        if not (given.isascii() and given.isdigit()):
            raise Usage(f"{name} takes a whole number, not {given!r}")
        return int(given[:40])


def parse(words: list[str], verb: Verb) -> Arguments:
    """Options and operands in any order, `--name value`, `--name=value`, `-n value` or `-nvalue`; `--` ends the options.  Raises Usage."""
    known = {option.name: option for option in all_options(verb)}
    short = {option.short: option.name for option in known.values() if option.short}
    operands: list[str] = []
    command: list[str] = []
    given: dict[str, str] = {}
    left = iter(words)
    for word in left:
        if word == "--":
            (command if verb.command else operands).extend(left)
        elif word == "-" or not word.startswith("-"):
            operands.append(word)
        else:
            name, equals, value = word.partition("=")
            if word[:2] in short and len(word) > 2 and equals != word[2:3] and known[short[word[:2]]].metavar:
                name, equals, value = word[:2], "=", word[2:]
            name = short.get(name, name)
            if name == "--fence":
                raise Usage(
                    "a fence is a secret, and arguments are shown to every user by ps: "
                    "give it by --fence-file FILE, in LEASE_FENCE, or on standard input"
                )
            option = known.get(name)
            if option is None:
                raise Usage(f"unknown option {name!r}{'; a command and its options go behind --' if verb.command else ''}")
            if name in given:
                raise Usage(f"{name} was given twice")
            if not option.metavar:
                if equals:
                    raise Usage(f"{name} takes no value")
            elif not equals:
                value = next(left, "--")
                if value.startswith("--"):  # one that does begin so can be given as --name=--value
                    raise Usage(f"{name} needs a value: {name} {option.metavar}")
            if option.choices and value not in option.choices:
                raise Usage(f"{name} is one of {', '.join(option.choices)}, not {value!r}")
            given[name] = value
    least, most = verb.operands
    if "--help" not in given and not (least <= len(operands) <= most and bool(command) == verb.command):
        raise Usage(f"expected: {verb.usage}")
    for text in (*operands, *given.values()):
        if not text.isprintable() and any("\ud800" <= letter <= "\udfff" for letter in text):
            raise Usage("an argument is not valid UTF-8")
    return Arguments(operands, given, command)


def all_options(verb: Verb) -> list[Option]:
    """Its own, then the common ones it has not made its own."""
    own = {option.name for option in verb.options}
    return [*verb.options, *(option for option in COMMON if option.name not in own)]


def page(verb: Verb) -> str:
    """The help page of one verb."""
    lines = [f"usage: {verb.usage}", "", verb.about, "", "options:"]
    lines += [_described(option) for option in all_options(verb)]
    lines += ["", "examples:", *(f"  {example}" for example in verb.examples)]
    return "\n".join(lines)


def _described(option: Option) -> str:
    name = f"{f'{option.short}, ' if option.short else ''}{option.name} {option.metavar}".rstrip()
    text = f"\n{'':27}".join(line.strip() for line in option.text.splitlines())
    return f"  {name:<24} {text}" if len(name) <= 24 else f"  {name}\n{'':27}{text}"


class Output:
    """Where a verb speaks.  Sentences are for people and silenced by --quiet; records are for programs and are not."""

    def __init__(self, *, quiet: bool = False, json: bool = False) -> None:
        self.json = json
        self._quiet = quiet

    def sentence(self, text: str) -> None:
        if not self._quiet and not self.json:
            print(text)

    def aside(self, text: str) -> None:
        """A remark that is no answer: on standard error, so that it never mixes with what a program reads."""
        if not self._quiet:
            print(f"lease: {text}", file=sys.stderr)

    def line(self, text: str) -> None:
        print(text)

    def record(self, reply: dict[str, Any]) -> None:
        """One line of JSON, if --json was given."""
        if self.json:
            from leased.client.as_json import as_json

            print(as_json(reply))

    def flush(self) -> None:
        """Raises BrokenPipeError if nobody reads what was said."""
        sys.stdout.flush()


def default_holder() -> str:
    """$LEASE_HOLDER, else USER@HOST:PPID, the label of the shell or script that calls.

    The same for every `lease` it runs, so that it can renew, and is billed once per key; another for every other shell.  Where no
    parent can be named (process id 0 or 1: a container's first process, an orphan) the command's own process id is taken.
    """
    given = os.environ.get("LEASE_HOLDER")
    if given:
        return given
    user = os.environ.get("LOGNAME") or os.environ.get("USER") or f"uid{os.getuid()}"
    parent = os.getppid()
    return f"{user[:100]}@{os.uname().nodename[:100]}:{parent if parent > 1 else os.getpid()}"
