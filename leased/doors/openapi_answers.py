"""What answers look like, in JSON Schema, for the OpenAPI document.  Tests hold them against what the daemon says."""

from __future__ import annotations

from typing import Any, Final, NamedTuple

from leased import model

Schema = dict[str, Any]

_TEXT: Final[Schema] = {"type": "string"}
_TEXT_OR_NULL: Final[Schema] = {"type": ["string", "null"]}
_SECONDS: Final[Schema] = {"type": "number", "minimum": 0}
_SECONDS_OR_NULL: Final[Schema] = {"type": ["number", "null"], "minimum": 0}
_INSTANT: Final[Schema] = {"type": "string", "format": "date-time"}
_INSTANT_OR_NULL: Final[Schema] = {"type": ["string", "null"], "format": "date-time"}
_GENERATION: Final[Schema] = {"type": "integer", "minimum": 1, "maximum": model.MAX_GENERATION}
_GENERATION_OR_NULL: Final[Schema] = {"type": ["integer", "null"], "minimum": 1, "maximum": model.MAX_GENERATION}
_COUNT: Final[Schema] = {"type": "integer", "minimum": 0}
_FLAG: Final[Schema] = {"type": "boolean"}
_FENCE: Final[Schema] = {
    "type": "string",
    "pattern": "^[1-9][0-9]{15,18}$",
    "description": "SECRET: proves who may renew and release.",
}
_HASH: Final[Schema] = {"type": "string", "pattern": "^[0-9a-f]{40}$"}


def _ref(name: str) -> Schema:
    return {"$ref": f"#/components/schemas/{name}"}


def _any(*names: str) -> Schema:
    return {"anyOf": [_ref(name) for name in names]}


def _object(description: str, optional: str = "", /, **fields: Any) -> Schema:
    """`optional` names the fields that may be missing, between spaces."""
    return {
        "type": "object",
        "description": description,
        "properties": fields,
        "required": [name for name in fields if name not in optional.split()],
        "additionalProperties": False,
    }


def _only(value: Any) -> Schema:
    return {"const": value}


_LISTED: Final = {
    "key": {**_TEXT_OR_NULL, "description": "null when the daemon has not seen its text since it started."},
    "key_hash": _HASH,
    "holder": _TEXT,
    "scope": _TEXT_OR_NULL,
    "generation": _GENERATION,
    "expires_at": _INSTANT,
    "expires_in_seconds": _SECONDS,
    "bind": {"enum": list(model.BIND_NAMES)},
    "namespace": _TEXT,
}
_SWITCH: Final = {
    "armed": _FLAG,
    "agent_id": _TEXT_OR_NULL,
    "due_at": _INSTANT_OR_NULL,
    "due_in_seconds": _SECONDS_OR_NULL,
    "last_missed_at": _INSTANT_OR_NULL,
}
_EXPIRY: Final = {"expires_at": _INSTANT_OR_NULL, "expires_in_seconds": _SECONDS_OR_NULL}

SCHEMAS: Final[Schema] = {
    "Problem": _object(
        "RFC 9457.",
        type=_TEXT,
        title=_TEXT,
        status={"type": "integer", "minimum": 400, "maximum": 599},
        detail=_TEXT,
        code=_TEXT,
    ),
    "Charge": _object(
        "What this answer cost, a decimal string.",
        amount={"type": "string", "pattern": r"^[0-9]+(\.[0-9]{1,6})?$"},
        currency=_TEXT,
        event_id=_TEXT_OR_NULL,
    ),
    "Granted": _object(
        "The lease is yours.",
        acquired=_only(True),
        renewed=_FLAG,
        key=_TEXT,
        holder=_TEXT,
        fence=_FENCE,
        generation=_GENERATION,
        scope=_TEXT_OR_NULL,
        ttl_seconds=_SECONDS,
        expires_at=_INSTANT,
        expires_in_seconds=_SECONDS,
        expires_boottime=_SECONDS,
        boot_id=_TEXT,
        charge=_ref("Charge"),
    ),
    "Refused": _object(
        "Held, or no longer yours: no permission.",
        acquired=_only(False),
        key=_TEXT,
        holder=_TEXT,
        reason={"enum": ["held", "same_label", "wrong_fence", "wrong_holder", "lapsed", "spent"]},
        held_by=_TEXT_OR_NULL,
        same_holder_label=_FLAG,
        generation=_GENERATION_OR_NULL,
        **_EXPIRY,
        retry_after_seconds=_SECONDS_OR_NULL,
        charge=_ref("Charge"),
    ),
    "Unknown": _object(
        "Nobody knows: no permission.",
        acquired=_only(None),
        key=_TEXT,
        holder=_TEXT,
        reason=_TEXT,
        retry_after_seconds=_SECONDS,
        charge=_ref("Charge"),
    ),
    "Released": _object("It is free, or somebody else's already.", released=_only(True), key=_TEXT, generation=_GENERATION),
    "NotReleased": _object(
        "It was not yours to release.",
        "retry_after_seconds",
        released=_only(False),
        key=_TEXT,
        reason={"enum": ["expired", "not_holder"]},
        held_by=_TEXT_OR_NULL,
        generation=_GENERATION_OR_NULL,
        **_EXPIRY,
        retry_after_seconds=_SECONDS_OR_NULL,
    ),
    "ReleaseUnknown": _object("Nobody knows.", released=_only(None), key=_TEXT, reason=_TEXT, retry_after_seconds=_SECONDS),
    "Checked": _object(
        "What stands.",
        "current",
        held=_FLAG,
        key=_TEXT,
        held_by=_TEXT_OR_NULL,
        generation=_GENERATION_OR_NULL,
        **_EXPIRY,
        waiting=_COUNT,
        current=_FLAG,
    ),
    "CheckUnknown": _object(
        "Nobody knows.",
        "current",
        held=_only(None),
        key=_TEXT,
        reason=_TEXT,
        retry_after_seconds=_SECONDS,
        held_by=_only(None),
        generation=_only(None),
        expires_at=_only(None),
        expires_in_seconds=_only(None),
        waiting=_COUNT,
        current=_only(None),
    ),
    "Listed": _object("A live lease.", "namespace", **_LISTED),
    "Page": _object("One page.", leases={"type": "array", "items": _ref("Listed")}, cursor=_TEXT_OR_NULL),
    "Switch": _object("The dead-man switch of a scope.", scope=_TEXT, **_SWITCH),
    "Packet": _object(
        "What a scope holds, and what its switch did.",
        scope=_TEXT,
        empty=_FLAG,
        leases={"type": "array", "items": _ref("Listed")},
        switch={
            "anyOf": [
                {"type": "null"},
                _object(
                    "Its switch.",
                    **_SWITCH,
                    released={
                        "type": "array",
                        "items": _object("Released by the last miss.", key=_TEXT_OR_NULL, key_hash=_HASH, generation=_GENERATION),
                    },
                ),
            ]
        },
    ),
    "Usage": _object(
        "What the namespace has been billed.",
        namespace=_TEXT,
        currency=_TEXT,
        amount={"type": "string", "pattern": r"^[0-9]+(\.[0-9]{1,6})?$"},
        refusals_billed=_COUNT,
        calls_billed=_COUNT,
        pending_upstream=_COUNT,
        oldest_pending_seconds=_SECONDS_OR_NULL,
        dead_letters=_COUNT,
    ),
    "Claimed": _object(
        "The claim is yours.",
        op=_only("claim"),
        key=_TEXT,
        acquired=_only(True),
        token=_FENCE,
        generation=_GENERATION,
        ttl_seconds=_SECONDS,
        expires_at=_INSTANT,
        expires_in_seconds=_SECONDS,
        charge=_ref("Charge"),
    ),
    "NotClaimed": _object(
        "Held: no permission.",
        op=_only("claim"),
        key=_TEXT,
        acquired=_only(False),
        token=_only(None),
        ttl_seconds=_SECONDS,
        generation=_GENERATION_OR_NULL,
        **_EXPIRY,
        held_by=_TEXT_OR_NULL,
        reason=_TEXT,
        retry_after_seconds=_SECONDS_OR_NULL,
        charge=_ref("Charge"),
    ),
    "ClaimReleased": _object("Given back.", op=_only("release"), key=_TEXT, released=_only(True), charge=_ref("Charge")),
    "ClaimChecked": _object(
        "What stands.", op=_only("check"), key=_TEXT, held=_FLAG, held_by=_TEXT_OR_NULL, **_EXPIRY, charge=_ref("Charge")
    ),
    "LockUnknown": _object(
        "Nobody knows: no permission.",
        "acquired token released held held_by expires_at expires_in_seconds",
        op={"enum": list(model.LOCK_OPS)},
        key=_TEXT,
        acquired=_only(None),
        token=_only(None),
        released=_only(None),
        held=_only(None),
        held_by=_only(None),
        expires_at=_only(None),
        expires_in_seconds=_only(None),
        reason=_TEXT,
        retry_after_seconds=_SECONDS,
        charge=_ref("Charge"),
    ),
    "Ready": _object(
        "Whether leases are granted as they should be, and why not.",
        "upstream",
        ready=_FLAG,
        reasons={"type": "array", "items": _TEXT},
        upstream=_TEXT,
    ),
    "Alive": _object("It answers.", alive=_only(True)),
}


class Answers(NamedTuple):
    """`yes_or_no` comes with 200, `unknown` with 503.  `links`: what to do with a grant."""

    yes_or_no: Schema
    unknown: Schema | None = None
    links: Schema | None = None
    kind: str = "application/json"
    summary: str = ""


def _link(operation: str, description: str, **fields: str) -> Schema:
    body = {name: f"$response.body#/{field}" for name, field in fields.items()}
    return {"operationId": operation, "description": description, "requestBody": body}


_LINKS: Final = {
    "renew": _link("renew", "The fence proves that it is yours.", key="key", holder="holder", fence="fence"),
    "release": _link("release", "The fence proves that it is yours.", key="key", fence="fence"),
    "check": _link("check", "Whether this very lease stands.", key="key", generation="generation"),
}

ANSWERS: Final = {
    "lease": Answers(_any("Granted", "Refused"), _ref("Unknown"), _LINKS),
    "renew": Answers(_any("Granted", "Refused"), _ref("Unknown")),
    "release": Answers(_any("Released", "NotReleased"), _ref("ReleaseUnknown")),
    "check": Answers(_ref("Checked"), _ref("CheckUnknown")),
    "list": Answers(_ref("Page")),
    "heartbeat": Answers(_ref("Switch")),
    "resume_packet": Answers(_ref("Packet")),
    "usage": Answers(_ref("Usage")),
    "agent_lock": Answers(_any("Claimed", "NotClaimed", "ClaimReleased", "ClaimChecked"), _ref("LockUnknown")),
    "healthz": Answers(_ref("Alive"), summary="Whether the daemon answers at all."),
    "readyz": Answers(_ref("Ready"), _ref("Ready"), summary="Whether leases are granted as they should be, and why not."),
    "metrics": Answers(_TEXT, kind="text/plain", summary="Prometheus text, or OpenMetrics where it is asked for."),
    "openapi": Answers({"type": "object"}, summary="This document."),
}
