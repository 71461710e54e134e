"""Writes the manual pages beside this file from what the programs themselves say: verbs, options, keys of the configuration, exit codes.

python contrib/man/generate.py            writes lease.1, leasenc.1, leased.toml.5 and leased.8
python contrib/man/generate.py --check    exit 1 if what is there is not what would be written
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(HERE), str(ROOT)]

from roff import Page  # noqa: E402

from leased.__main__ import _parser as leased_parser  # noqa: E402
from leased.client import command  # noqa: E402
from leased.client.shell import COMMON, Option  # noqa: E402
from leased.config_keys import KEYS  # noqa: E402
from leased.version import VERSION  # noqa: E402

README = (ROOT / "README.md").read_text()
SEE_ALSO = {
    "lease": "`leased`(8), `leasenc`(1), `leased.toml`(5)",
    "leasenc": "`lease`(1), `leased`(8)",
    "leased.toml": "`leased`(8), `lease`(1), `systemd.socket`(5)",
    "leased": "`lease`(1), `leased.toml`(5), `systemd.service`(5)",
}
ENVIRONMENT = (
    ("LEASED_SOCKET", "The daemon's socket, where `--socket` names none."),
    ("LEASE_HOLDER", "Who asks, where `--holder` does not say it."),
    ("LEASE_FENCE, LEASE_KEY", "The fence, and the key it belongs to: for another key it does not count."),
    ("LEASE_GENERATION, LEASE_EXPIRES_AT", "Set by `lease run` and `lease acquire --format env`, for what runs under the lease."),
    ("LEASED_AGENT_KEY", "The key of an agent's namespace. A secret: there is no option for it."),
)
FILES = (
    ("/etc/leased/leased.toml", "The configuration of root's and the system's daemon; else `$XDG_CONFIG_HOME/leased/leased.toml`."),
    ("/run/leased/leased.sock", "The socket; else `$XDG_RUNTIME_DIR/leased/leased.sock`."),
    ("/var/lib/leased", "The state that is kept; else `$XDG_STATE_HOME/leased`."),
    ("/run/leased-state", "The state of this boot; else `$XDG_RUNTIME_DIR/leased-state`."),
)


def rows(head: str, *, of: str) -> list[list[str]]:
    """The rows of README's table below heading `of` whose first column is `head`."""
    part = README[README.index(f"{of}\n") :]
    table = re.search(rf"^\| {re.escape(head)} \|.*\n\|[-|]+\n((?:\|.*\n)+)", part, re.MULTILINE)
    assert table is not None, head
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in table[1].splitlines()]


def codes(page: Page, column: int) -> None:
    page.section("EXIT STATUS")
    for row in rows("code", of="### Exit codes"):
        if row[column]:
            first = rows("code", of="### Exit codes")[[each[0] for each in rows("code", of="### Exit codes")].index(row[0])][1]
            page.item([row[0]], "", first if row[column].startswith("the same") else row[column])


def end(page: Page, name: str) -> str:
    page.section("SEE ALSO")
    page.says(SEE_ALSO[name])
    return page.text()


def lease() -> str:
    page = Page("lease", 1, "take, keep, watch and give back leases of this host", VERSION)
    page.section("SYNOPSIS")
    page.literal("lease VERB [options] ...", "lease run KEY [options] -- COMMAND [ARGUMENT]...")
    page.section("DESCRIPTION")
    page.says(
        "A lease on a key is its holder's until it is released or its time is up; nobody else is told yes for that key meanwhile. "
        "`leased`(8) is the daemon that hands them out. Each grant has a generation, a number that only rises, for stores that must refuse "
        "late writers, and a fence, the secret that renews and releases. The fence comes by `--fence-file`, in the environment or on standard "
        "input, never as an argument, where every user could read it."
    )
    page.section("VERBS")
    for name in command.VERBS:
        verb = command._find(name)
        page.part(f"lease {name}")
        page.literal(*verb.usage.split(" | "))
        page.says(verb.about)
        for option in verb.options:
            _option(page, option)
        page.paragraph("Examples:")
        page.literal(*verb.examples)
    page.section("COMMON OPTIONS")
    page.says("Durations are a number of seconds, or one with a unit: 500ms, 30s, 5m, 1h.")
    for option in COMMON:
        _option(page, option)
    page.item(["--version"], "", "the version; given in place of a verb")
    page.section("ENVIRONMENT")
    for variable, text in ENVIRONMENT:
        page.item([variable], "", text)
    codes(page, 1)
    return end(page, "lease")


def _option(page: Page, option: Option) -> None:
    choices = f" One of {', '.join(option.choices)}." if option.choices else ""
    page.item(
        [*([option.short] if option.short else []), option.name],
        option.metavar,
        option.text + "." * (option.text[-1] not in ".?") + choices,
    )


def leased() -> str:
    parser = leased_parser()
    page = Page("leased", 8, "the daemon that hands out leases, and what looks after its state", VERSION)
    page.section("SYNOPSIS")
    page.literal("leased VERB [options] ...")
    page.section("DESCRIPTION")
    page.says(parser.description or "")
    page.section("VERBS")
    _verbs(page, parser, "leased")
    page.section("FILES")
    for path, text in FILES:
        page.item([path], "", text)
    page.section("ENVIRONMENT")
    page.item(["LEASED_SOCKET"], "", "The socket, where `--socket` names none.")
    codes(page, 3)
    return end(page, "leased")


def _verbs(page: Page, parser: argparse.ArgumentParser, prefix: str) -> None:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            helps = {each.dest: each.help or "" for each in action._choices_actions}
            for name, verb in action.choices.items():
                page.part(f"{prefix} {name}")
                page.says(f"{helps.get(name, '').capitalize()}.\n\n{verb.description or ''}".replace("\n\n\n", "\n\n").strip())
                for each in verb._actions:
                    if each.help is argparse.SUPPRESS or isinstance(each, argparse._SubParsersAction | argparse._HelpAction):
                        continue
                    metavar = "" if each.nargs == 0 else (each.metavar or each.dest.upper())
                    names = list(each.option_strings)
                    page.item(
                        names or [str(metavar)],
                        str(metavar) if names else "",
                        (each.help or "") % {"prog": prefix, "default": each.default},
                    )
                _verbs(page, verb, f"{prefix} {name}")


def leased_toml() -> str:
    page = Page("leased.toml", 5, "the configuration of leased", VERSION)
    page.section("SYNOPSIS")
    page.literal("/etc/leased/leased.toml", "$XDG_CONFIG_HOME/leased/leased.toml")
    page.section("DESCRIPTION")
    page.says(
        "TOML; none is needed. An unknown key, a wrong type and a value out of bounds are errors, and all of them are reported at once. "
        "Keys with a dot belong in the table before the dot: `limits.max_connections` is `max_connections` under `[limits]`. "
        "`leased check-config` prints every key with its value, defaults included, or every mistake."
    )
    page.section("KEYS")
    told = set()
    for key, default, takes, text in rows("key", of="### Configuration"):
        names = re.findall(r"`([^`]+)`", key)
        told.update(names)
        more = f" {text[0].upper()}{text[1:]}{'' if text.endswith('.') else '.'}" if text else ""
        page.item(names, "", f"Takes {takes}. Default: {default}.{more}")
    assert told >= set(KEYS), set(KEYS) - told
    page.section("EXAMPLE")
    page.literal(
        'socket_group = "leased-clients"', "", "[namespaces]", '"uid:1000" = "build"', "", "[limits]", "max_connections = 4096"
    )
    return end(page, "leased.toml")


def leasenc() -> str:
    helped = subprocess.run([sys.executable, ROOT / "contrib/leasenc", "--help"], capture_output=True, text=True, check=True).stdout
    page = Page("leasenc", 1, "ask a lease daemon from a host where nothing of it is installed", VERSION)
    usage, rest = helped.split("\n\n", 1)
    page.section("SYNOPSIS")
    page.literal(
        *(
            re.sub(r"^(usage:| +) ", "", re.split(r"   +(?=\S)", line.strip())[0] if at else re.split(r"   +", line)[0])
            for at, line in enumerate(usage.splitlines())
        )
    )
    page.section("DESCRIPTION")
    page.says(
        "One file of standard-library Python. With an operation it makes one request and prints the reply as a line of JSON; without one it "
        "reads requests as lines of JSON (`op`, `id` and the fields) and answers each with a line, pipelined, in whatever order the answers "
        "come. With `--watch` it prints events until it is interrupted. A connection that ends before an answer is replaced once, and what "
        "is safe to ask again is asked again. The operations and their fields are those of the daemon: lease, renew, release, check, list, "
        "heartbeat, resume_packet, revoke, usage, info."
    )
    page.section("OPTIONS")
    fields, examples, _ = (part.strip("\n") for part in rest.split("\n\n", 2))
    page.item(["--socket"], "PATH", "the daemon's socket: else LEASED_SOCKET, else the usual place")
    page.item(["--timeout"], "SECONDS", "to connect and be answered, 10 unless given; wait_seconds is added to it")
    page.item(["--watch"], "", "events, of a key or a scope where `key=K` or `scope=S` is given")
    page.item(["field=value"], "", "the text as it is, numbers too")
    page.item(["field:=JSON"], "", "a typed value, such as all:=true")
    page.item(["fence=-"], "", "a secret (fence, agent_key, request_id) from standard input: it is never taken as an argument")
    page.item(["fence@FILE"], "", "the same from a file; a saved reply of leasenc serves too")
    page.item(
        ["fence@env"],
        "",
        "the same from LEASE_FENCE (LEASED_AGENT_KEY, LEASE_REQUEST_ID); renew and release use LEASE_FENCE by themselves",
    )
    assert all(f"{word}" in fields for word in ("--socket", "--timeout", "field:=JSON", "fence@FILE", "fence@env"))
    codes(page, 2)
    page.section("EXAMPLES")
    page.literal(*(re.split(r"   +", line.strip())[0] for line in examples.splitlines()))
    return end(page, "leasenc")


def pages() -> dict[Path, str]:
    made = {"lease.1": lease(), "leasenc.1": leasenc(), "leased.toml.5": leased_toml(), "leased.8": leased()}
    return {HERE / name: text for name, text in made.items()}


def main(words: list[str]) -> int:
    stale = {path: text for path, text in pages().items() if not path.exists() or path.read_text() != text}
    for path, text in stale.items():
        print(f"{'stale' if words == ['--check'] else 'written'}: {path}")
        if words != ["--check"]:
            path.write_text(text)
    return bool(stale) and words == ["--check"]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
