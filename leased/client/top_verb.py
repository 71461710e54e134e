"""The verb that shows all leases as they change: top.  Only the live table needs rich, and only then is it imported."""

from __future__ import annotations

import sys
import time
from typing import Final

from leased.client.shell import EXIT_UNKNOWN, EXIT_YES, Arguments, Option, Output, Usage, Verb
from leased.client.top_table import MOST_ROWS, View, look, plain
from leased.client.verbs import client_of

NOT_INSTALLED: Final = (
    "the live table needs the package rich, which {python} does not have: in a checkout of leased, install it into a virtual\n"
    "environment: python3 -m venv .venv && .venv/bin/pip install '.[top]'; `lease top --once` needs nothing"
)


def top(arguments: Arguments, out: Output) -> int:
    view = View(arguments)
    once = arguments.switch("--once")
    live = not (once or out.json)
    if live and not sys.stdout.isatty():
        raise Usage("the live table needs a terminal; --once prints it once, --json prints it for programs")
    if live:
        try:
            from leased.client import top_screen
        except ImportError:
            out.aside(NOT_INSTALLED.format(python=sys.executable))
            return EXIT_UNKNOWN
    with client_of(arguments) as client:
        if live:
            return top_screen.show(client, view)
        while True:
            seen = look(client, view)
            out.record(seen)
            for line in plain(seen):
                out.sentence(line)
            out.flush()
            if once:
                return EXIT_YES
            time.sleep(view.every)


VERBS: Final = {
    "top": Verb(
        top,
        "lease top [--once] [--sort lapse] [--scope SCOPE] [--holder LABEL] [--all] [--limit N] [--every DURATION]",
        "Shows who holds what, who waits, and what lapses next, until it is interrupted (or `q`).  The live table needs a\n"
        "terminal and the package rich; --once and --json need neither.  With --json: one object a look.",
        (
            Option("--once", "", "print the table once, as text"),
            Option(
                "--sort",
                "ORDER",
                "lapse: what lapses next first (default); waiting: most waited for; oldest",
                ("lapse", "waiting", "oldest"),
            ),
            Option("--scope", "SCOPE", "only this scope's"),
            Option("--holder", "LABEL", "only this holder's"),
            Option("--all", "", "of every namespace (operators only)"),
            Option("--limit", "N", f"at most N leases (default {MOST_ROWS})"),
            Option("--every", "DURATION", "how often to look (default 1)"),
        ),
        (0, 0),
        ("lease top", "lease top --once --sort waiting --limit 10", "lease top --once --json | jq .leases[0].key"),
    ),
}
