"""The verbs that wait for what happens: wait and watch."""

from __future__ import annotations

from leased.client import wording
from leased.client.errors import DaemonUnreachable
from leased.client.shell import EXIT_REFUSED, EXIT_YES, Arguments, Option, Output, Usage, Verb
from leased.client.verbs import client_of

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Final

    from leased.client.watching import Watch


def wait(arguments: Arguments, out: Output) -> int:
    (key,) = arguments.operands
    from leased.client.calling import DEFAULT_TIMEOUT_SECONDS

    with client_of(arguments) as client:
        client.timeout = DEFAULT_TIMEOUT_SECONDS  # of one answer: --timeout is about the key here
        free = client.wait_free(key, arguments.seconds("--timeout"))
    out.record({"key": key, "free": free})
    out.sentence(wording.free(key) if free else f"{wording.shown(key)} was not free in time.")
    return EXIT_YES if free else EXIT_REFUSED


def watch(arguments: Arguments, out: Output) -> int:
    """Until it is interrupted, or nobody reads any more."""
    key = arguments.operands[0] if arguments.operands else None
    scope = arguments.text("--scope")
    if key is not None and scope is not None:
        raise Usage("watch takes either a KEY or --scope SCOPE, or neither for the whole namespace")
    with client_of(arguments) as client, client.watch(key, scope) as watching:
        what = key if key is not None else f"scope {scope}" if scope is not None else "all leases of the namespace"
        out.aside(f"watching {wording.shown(what)}")
        _tell_all(watching, out)
    return EXIT_YES


def _tell_all(watching: Watch, out: Output) -> None:
    from leased.client.watching import Gap

    away = False
    while True:
        try:
            told = watching.take()
        except DaemonUnreachable as wrong:
            if not away:
                out.aside(f"{wording.shown(wrong)}; trying on until it is back")
            away = True
            continue
        if told is None:
            return
        away = False
        if isinstance(told, Gap):
            out.record({"type": "gap", **told._asdict()})
            out.sentence(wording.missed(told))
        else:
            out.record(told._asdict())
            out.sentence(wording.happened(told))
        out.flush()


VERBS: Final = {
    "wait": Verb(
        wait,
        "lease wait KEY [--timeout DURATION]",
        "Waits until nobody holds KEY.  Exit 0: it is free.  75: not free before the time was up.  69: no daemon.\n"
        "It takes nothing, and another may be faster: whoever wants the key takes it by `lease acquire KEY --wait DURATION`.",
        (Option("--timeout", "DURATION", "how long to wait at most (default: as long as it takes)"),),
        (1, 1),
        ("lease wait deploy && echo done", "lease wait gpu:0 --timeout 5m || echo still busy"),
    ),
    "watch": Verb(
        watch,
        "lease watch [KEY | --scope SCOPE]",
        "Shows what happens to the leases on KEY, of SCOPE, or of the whole namespace: one line each, with --json one object each, until\n"
        "it is interrupted.  What could not be shown is said to be missing: a line `gap`, with --json an object of type gap.\n"
        "To see everything, start it first, and then `lease list`.",
        (Option("--scope", "SCOPE", "only this scope's"),),
        (0, 1),
        ("lease watch", "lease watch gpu:0 --json | jq --unbuffered -r .type"),
    ),
}
