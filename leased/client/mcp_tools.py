"""The tools a model sees: their schemas, from the one table of fields and the one description of answers, and what is told beside them.

What the table cannot know is said here: what a refusal forbids, which number is the secret and which the order, and which fields a
model is not asked for.  `request_id` is drawn by the bridge: a model would draw a new one for a retry, which is what it must not be.
`agent_key` belongs in a header or the environment: arguments are kept in transcripts.  `holder` is the bridge's own label unless given.
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from typing import Any, Final, NamedTuple

from leased.doors.openapi_answers import ANSWERS, SCHEMAS
from leased.fields import HOLDER, shape
from leased.schema import OPERATIONS, json_schema

Schema = dict[str, Any]

NEVER_ASKED: Final[Mapping[str, str]] = {
    "request_id": "is not taken: this server draws it, and repeats a call whose answer was lost under the same one by itself",
    "agent_key": "is not taken as an argument, which is kept in transcripts: it belongs in the Authorization header (HTTP) or in "
    "LEASED_AGENT_KEY in this server's environment (stdio)",
}
LABELLED: Final = frozenset({"lease", "renew"})
"""Tools whose `holder` the protocol requires, and the bridge supplies."""

_HOLDER: Final = "The label of the asking instance. Leave it out: this server has a label of its own, the same for all your calls."
_BIND: Final = (
    "What else ends the lease: process or connection (this server ends, as it does when your host closes or crashes) or none (only "
    "time, release and the dead-man switch end it)."
)
_NO_BIND: Final = "Only none: over HTTP there is no process or connection of yours that a lease could end with."


class Tool(NamedTuple):
    """`hints` are MCP's four annotations, all of them, because what is left out counts as the worst case."""

    name: str
    title: str
    description: str
    input_schema: Schema
    output_schema: Schema
    hints: Mapping[str, bool]


def _hints(read_only: bool = False, destructive: bool = False, idempotent: bool = False) -> Mapping[str, bool]:
    """The daemon is a closed world: nothing outside this host is reached by any tool."""
    return {
        "readOnlyHint": read_only,
        "destructiveHint": destructive,
        "idempotentHint": idempotent,
        "openWorldHint": False,
    }


_VERDICTS: Final = (
    "`acquired` true: the lease is yours, for expires_in_seconds from now.\n"
    "`acquired` false: it is NOT yours. That is a decision, not advice: do not touch what the key protects, not even briefly, and do not "
    "work around it. Do other work, ask again after retry_after_seconds, or say that you are blocked and by whom.\n"
    "`acquired` null: nobody can tell now, so you do NOT have it. Exactly as false; ask again after retry_after_seconds.\n"
)
_NUMBERS: Final = (
    "`fence` is the SECRET that proves the lease is yours: pass it to `renew` and `release` and to nothing else. Never write it into a "
    "file, a command, a commit, a message or another tool.\n"
    "`generation` is the ORDER, not secret: it rises with every new grant. Hand it to a store that refuses writers with a smaller one.\n"
)
_TIME: Final = (
    "A lease ends by itself when its ttl_seconds are over, whether or not your work is. You do not feel time pass: call `renew` before "
    "every step that must not collide with others, and go on only if it answers acquired true."
)

_TEXTS: Final[Mapping[str, tuple[str, str, Mapping[str, bool]]]] = {
    "lease": (
        "Acquire a lease",
        _VERDICTS + _NUMBERS + _TIME + "\n"
        "While somebody else holds the key, wait_seconds queues you for it. Many hosts give up on a call after 60 s: wait 45 at most and "
        "call again.",
        _hints(),  # not idempotent: said again after the lease has ended, it takes the key again
    ),
    "renew": (
        "Renew your lease",
        "`acquired` true: still yours, with the same fence and generation. `acquired` false: it is lost. Stop at once what it protected; "
        "what you have not written yet must not be written. `acquired` null: nobody can tell; stop until a later call answers true.",
        _hints(idempotent=True),
    ),
    "release": (
        "Release your lease",
        "Call it as soon as the protected work is done, or given up. `released` false: it was not yours any more, so others may have "
        "worked meanwhile. `released` null: nobody can tell; it ends by itself at the latest when its time is up.",
        _hints(idempotent=True),
    ),
    "check": (
        "Who holds a key?",
        "Only looks. `held` false is no permission: somebody may take the key in the next moment, and only `lease` can make it yours. With "
        "`generation`, `current` false means that the lease of that generation is over: if it was yours, stop.",
        _hints(read_only=True, idempotent=True),
    ),
    "heartbeat": (
        "Arm a dead-man switch",
        "Call it again well within expect_within_seconds for as long as the work of the scope goes on, and with disarm true when it is "
        "done. A missed one releases every lease of the scope, also those of others.",
        _hints(destructive=True, idempotent=True),
    ),
    "resume_packet": (
        "Take stock of a scope",
        "Only looks: it makes no lease yours. To take over, wait until the old leases have ended, then acquire your own by `lease`.",
        _hints(read_only=True, idempotent=True),
    ),
    "agent_lock": (
        "Claim, release or check a key",
        "The same leases as by `lease`, in one tool; every answer true or false may cost money.\n"
        + _VERDICTS
        + "`token` is the SECRET of your claim, what `fence` is to `lease`: pass it to this tool to keep or release the claim, and to "
        "nothing else.\n" + _TIME.replace("`renew`", "this tool with your token"),
        _hints(),
    ),
}

TOOLS: Final = tuple(_TEXTS)
INSTRUCTIONS: Final = (
    "Leases make sure that only one process or agent of this host works on something at a time. Before you change something that others "
    "may change too (a deployment, a database migration, a shared checkout, a device), acquire its key with `lease`; go on only if "
    "`acquired` is true; `renew` before each critical step; `release` at the end. False and null both mean: you do not have it."
)


def tools(*, local: bool, bind: str = "none") -> dict[str, Tool]:
    """All tools by name, fresh dicts.  `local`: the bridge serves one host over stdio, so that a lease can be bound to it.

    `bind` is what a call of `lease` means that does not say: the operator's choice, shown as the default.
    """
    return {name: _tool(name, local, bind) for name in TOOLS}


def _tool(name: str, local: bool, bind: str) -> Tool:
    title, told, hints = _TEXTS[name]
    return Tool(name, title, f"{OPERATIONS[name].summary}\n{told}", _input(name, local, bind), output_schema(name), hints)


def _input(name: str, local: bool, bind: str) -> Schema:
    schema = json_schema(name)
    fields = schema["properties"]
    for never in NEVER_ASKED:
        fields.pop(never, None)
    if name in LABELLED:
        schema["required"].remove("holder")
        fields["holder"] = shape(HOLDER._replace(description=_HOLDER), exact=False)
    if "bind" in fields:
        fields["bind"] |= {"description": _BIND, "default": bind} if local else {"description": _NO_BIND, "enum": ["none"]}
    return schema


def output_schema(name: str) -> Schema:
    """One object with every answer there is, unknown included.  References are turned to definitions within the schema itself."""
    answers = ANSWERS[name]
    choices = [*answers.yes_or_no.get("anyOf", [answers.yes_or_no]), *([answers.unknown] if answers.unknown else [])]
    bodies = [_inlined(choice) for choice in choices]
    needed: Schema = {}
    for body in bodies:
        _gather(body, needed)
    schema: Schema = bodies[0] if len(bodies) == 1 else {"type": "object", "anyOf": bodies}
    return schema | ({"$defs": needed} if needed else {})


_PREFIX: Final = "#/components/schemas/"


def _inlined(schema: Schema) -> Schema:
    return deepcopy(SCHEMAS[schema["$ref"].removeprefix(_PREFIX)]) if "$ref" in schema else deepcopy(schema)


def _gather(part: Any, needed: Schema) -> None:
    """Points the references in `part` to $defs, and puts what they name there."""
    if isinstance(part, list):
        for each in part:
            _gather(each, needed)
    elif isinstance(part, dict):
        reference = part.get("$ref")
        if isinstance(reference, str):
            name = reference.removeprefix(_PREFIX)
            part["$ref"] = f"#/$defs/{name}"
            if name not in needed:
                needed[name] = deepcopy(SCHEMAS[name])
                _gather(needed[name], needed)
        if isinstance(part.get("type"), list):
            _split(part)
        for each in part.values():
            _gather(each, needed)


def _split(part: Schema) -> None:
    """One type each: there are clients that take no lists of types."""
    types = part.pop("type")
    bounds = {name: part.pop(name) for name in [*part] if name != "description"}
    part["anyOf"] = [{"type": kind, **(bounds if kind != "null" else {})} for kind in types]
