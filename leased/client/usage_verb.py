"""The verb about money: usage."""

from __future__ import annotations

from leased.client.shell import EXIT_YES, Arguments, Option, Output, Verb
from leased.client.verbs import client_of

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Final


def usage(arguments: Arguments, out: Output) -> int:
    with client_of(arguments) as client:
        reply = client.call("usage", since=arguments.text("--since"))
    out.record(reply)
    for line in told(reply):
        out.sentence(line)
    return EXIT_YES


def told(reply: dict[str, Any]) -> list[str]:
    """What was billed, then what has not reached upstream, if anything."""
    refusals, calls, waiting, dead = (
        reply[name] for name in ("refusals_billed", "calls_billed", "pending_upstream", "dead_letters")
    )
    lines = [
        f"{reply['amount']} {reply['currency']} in {reply['namespace']}: {_counted(refusals, 'refusal')}, {_counted(calls, 'agent-lock call')}."
    ]
    if waiting:
        lines.append(f"{_counted(waiting, 'event')} not upstream yet, the oldest for {reply['oldest_pending_seconds']:.0f} s.")
    if dead:
        lines.append(f"{_counted(dead, 'event')} that upstream will not take; an operator sees them by `leased outbox list`.")
    return lines


def _counted(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


VERBS: Final = {
    "usage": Verb(
        usage,
        "lease usage [--since INSTANT]",
        "Tells what your namespace has been billed, and what of it has not reached upstream.  Exit 0.",
        (Option("--since", "INSTANT", "from the hour of this instant on, such as 2026-11-01T00:00:00Z (default: all there is)"),),
        (0, 0),
        ("lease usage", "lease usage --since 2026-11-01T00:00:00Z --json | jq -r .amount"),
    ),
}
