"""The verbs about a scope: heartbeat and resume."""

from __future__ import annotations

from leased.client import wording
from leased.client.shell import EXIT_YES, Arguments, Option, Output, Usage, Verb
from leased.client.verbs import client_of

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Final


def heartbeat(arguments: Arguments, out: Output) -> int:
    (scope,) = arguments.operands
    within = arguments.seconds("--expect-within")
    disarm = arguments.switch("--disarm")
    if disarm == (within is not None):
        raise Usage("heartbeat takes either --expect-within DURATION or --disarm")
    if disarm and arguments.text("--agent-id") is not None:
        raise Usage("--agent-id goes with --expect-within: who is alive has no say when the work is done")
    with client_of(arguments) as client:
        switch = client.disarm(scope) if within is None else client.heartbeat(scope, within, arguments.text("--agent-id"))
    out.record(switch.reply)
    out.sentence(wording.armed(switch))
    return EXIT_YES


def resume(arguments: Arguments, out: Output) -> int:
    (scope,) = arguments.operands
    with client_of(arguments) as client:
        packet = client.resume_packet(scope)
    out.record(packet.reply)
    for line in wording.resumed(packet):
        out.sentence(line)
    return EXIT_YES


VERBS: Final = {
    "heartbeat": Verb(
        heartbeat,
        "lease heartbeat SCOPE --expect-within DURATION [--agent-id LABEL] | lease heartbeat SCOPE --disarm",
        "Arms the dead-man switch of SCOPE, or arms it anew: unless the next heartbeat comes in time, all leases of the scope are\n"
        "released, once.  Exit 0: armed (or disarmed).  A lease belongs to the scope it was taken with (lease acquire --scope).",
        (
            Option("--expect-within", "DURATION", "when the next heartbeat is due at the latest, 1s to 24h"),
            Option("--agent-id", "LABEL", "who is alive, for whoever resumes the scope (default: as before)"),
            Option("--disarm", "", "switch it off: the work is done"),
        ),
        (1, 1),
        ("lease heartbeat nightly --expect-within 60 --agent-id worker-7", "lease heartbeat nightly --disarm"),
    ),
    "resume": Verb(
        resume,
        "lease resume SCOPE",
        "Tells what a successor needs to take up SCOPE: its live leases, its switch, and what the switch released when it was missed.\n"
        "No fences: whoever lost one waits for the lapse or the switch.  Exit 0, also if there is nothing.",
        (),
        (1, 1),
        ("lease resume nightly", "lease resume nightly --json | jq -e .empty"),
    ),
}
