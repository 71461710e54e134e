"""Maps to model: the fields of every operation, once, for every door and for the schemas that OpenAPI and MCP show.

The table says what a field is called on the wire, what it is called in the model, what it may hold, and what it means in one
line.  What is required and what the defaults are is the model's own statement, read from its tuples.  From the table come `parse`
(a plan for each operation, compiled once: `parse` runs for every request) and `json_schema`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import deepcopy
from types import MappingProxyType
from typing import Any, Final, NamedTuple

from leased import model
from leased.errors import PeerError, invalid
from leased.fields import (
    AGENT_KEY,
    FENCE,
    HOLDER,
    KEY,
    MAX_INSTANT,
    SCOPE,
    TTL,
    Check,
    Field,
    checker,
    named,
    plain,
    shape,
    suggestion,
)
from leased.model import Request

MAX_REASON_BYTES: Final = 256
MAX_AGENT_ID_BYTES: Final = 256
MAX_NAMESPACE_BYTES: Final = 128
MIN_REQUEST_ID_BYTES: Final = 22  # 128 bits in base 64: a credential must not be guessable
MAX_REQUEST_ID_BYTES: Final = 128
MIN_EXPECT_WITHIN_SECONDS: Final = 1
MAX_EXPECT_WITHIN_SECONDS: Final = 86_400
MAX_LIST_LIMIT: Final = 1000
MAX_SEQUENCE: Final = 2**53 - 1


class Operation(NamedTuple):
    """One row of the table.  `combination` is the JSON Schema of a rule between fields; `together` is the same rule for `parse`."""

    name: str
    request: type[Request]
    summary: str
    fields: tuple[Field, ...]
    together: Callable[[Any], None] | None = None
    combination: Mapping[str, Any] = MappingProxyType({})


def _about(field: Field, description: str) -> Field:
    return field._replace(description=description)


def _exactly_one_key(request: model.RevokeRequest) -> None:
    if request.key is None and request.key_hash is None:
        raise invalid("key", "is required (or key_hash in its place)")
    if request.key is not None and request.key_hash is not None:
        raise invalid("key_hash", "must not be given together with key")


def _at_most_one_target(request: model.WatchRequest) -> None:
    if request.key is not None and request.scope is not None:
        raise invalid("scope", "must not be given together with key")


def _armed_or_disarmed(request: model.HeartbeatRequest) -> None:
    if request.expect_within is None and not request.disarm:
        raise invalid(
            "expect_within_seconds",
            f"is required unless disarm is true: a number from {MIN_EXPECT_WITHIN_SECONDS} to {MAX_EXPECT_WITHIN_SECONDS}",
        )


def _fit_agent(request: model.AgentAddRequest) -> None:
    """Both are printed on lines of their own, and no key opens what belongs to a uid."""
    for field, value in (("name", request.name), ("namespace", request.namespace or "")):
        if not value.isprintable():
            raise invalid(field, "must be printable")
        if value.startswith("uid:") and (field == "namespace" or request.namespace is None):
            raise invalid(field, 'must not begin with "uid:": those namespaces belong to users')


def _one_target(request: model.OutboxRetryRequest | model.OutboxDropRequest) -> None:
    payment = isinstance(request, model.OutboxDropRequest) and request.payment
    if (request.sequence is not None) + request.all + payment != 1:
        others = "all" if isinstance(request, model.OutboxRetryRequest) else "all or payment"
        raise invalid("sequence", f"is required, or {others} in its place, and only one of them")


def _given(*names: str) -> dict[str, Any]:
    """The JSON Schema of an object that gives these fields a value: one that is null counts as absent."""
    return {"required": list(names), "properties": {name: {"not": {"type": "null"}} for name in names}}


def _true(name: str) -> dict[str, Any]:
    return {"required": [name], "properties": {name: {"const": True}}}


_SEQUENCE: Final = Field("sequence", "integer", "The number of one dead letter, as `outbox_list` shows it.", 1, MAX_SEQUENCE)
_COPY: Final = Field("copy", "text", "Which copy, as the first part names it; left out, one is made.", 1, 32)

_TABLE: Final = (
    Operation(
        "lease",
        model.LeaseRequest,
        "Acquire a lease on a key, or renew it with its fence. Proceed only if acquired is true: false means that it is held, null "
        "that nobody knows, and neither is permission.",
        (
            KEY,
            HOLDER,
            TTL,
            _about(FENCE, "SECRET: the fence of your own live lease, to renew it; none to acquire. Never print, log or share it."),
            _about(SCOPE, "The unit of work this lease belongs to; the dead-man switch of that scope can release it."),
            Field(
                "wait_seconds",
                "number",
                "How long to queue for the key while somebody else holds it, in seconds; 0 answers at once.",
                0,
                model.MAX_WAIT_SECONDS,
                attribute="wait",
            ),
            Field(
                "bind",
                "choice",
                "What else ends the lease: process (the calling process dies), connection (this connection closes) or none.",
                choices=model.BIND_NAMES,
            ),
            Field(
                "request_id",
                "secret",
                "SECRET: drawn at random for one attempt, so that repeating it after a lost reply yields the same grant.",
                MIN_REQUEST_ID_BYTES,
                MAX_REQUEST_ID_BYTES,
            ),
        ),
    ),
    Operation(
        "renew",
        model.RenewRequest,
        "Prolong your own live lease. Never a fresh grant: if acquired is not true, stop the work the lease protected.",
        (KEY, HOLDER, FENCE, _about(TTL, "How long it lasts, in seconds from now, even if shorter; left out, the lease's own.")),
    ),
    Operation(
        "release",
        model.ReleaseRequest,
        "Give your own lease back. Touches nobody else's.",
        (KEY, FENCE, _about(HOLDER, "The label the lease was granted to; if given, it must match.")),
    ),
    Operation(
        "check",
        model.CheckRequest,
        "Ask who holds a key, without taking it.",
        (
            KEY,
            Field(
                "generation",
                "integer",
                "The order number of a grant: the answer then tells, as current, whether the lease of exactly that grant is live.",
                1,
                model.MAX_GENERATION,
            ),
        ),
    ),
    Operation(
        "list",
        model.ListRequest,
        "The live leases of the namespace, oldest first, one page at a time.",
        (
            _about(SCOPE, "Only the leases of this scope."),
            _about(HOLDER, "Only the leases of this holder label."),
            Field("limit", "integer", "The most leases per page; a page may have fewer and still a cursor.", 1, MAX_LIST_LIMIT),
            Field("cursor", "decimal", "Where to go on: the cursor of the page before.", 0, model.MAX_GENERATION),
            Field("all", "flag", "Every namespace instead of the caller's own; operators only."),
        ),
    ),
    Operation(
        "revoke",
        model.RevokeRequest,
        "Take a lease away from its holder, by key or by key_hash; operators only.",
        (
            Field("reason", "text", "Why the lease is taken away, for the log and for whoever watches.", 1, MAX_REASON_BYTES),
            KEY,
            Field("key_hash", "hash", "The hash of the key as `list` shows it, in place of key: 40 hexadecimal digits."),
            Field("namespace", "text", "The namespace of the lease; left out, the caller's own.", 1, MAX_NAMESPACE_BYTES),
        ),
        _exactly_one_key,
        MappingProxyType({"oneOf": [_given("key"), _given("key_hash")]}),
    ),
    Operation(
        "heartbeat",
        model.HeartbeatRequest,
        "Arm or re-arm the dead-man switch of a scope: unless the next heartbeat comes in time, all its leases are released.",
        (
            SCOPE,
            Field(
                "expect_within_seconds",
                "number",
                "When the next heartbeat is due, in seconds from now; required unless disarm is true.",
                MIN_EXPECT_WITHIN_SECONDS,
                MAX_EXPECT_WITHIN_SECONDS,
                attribute="expect_within",
            ),
            Field("agent_id", "text", "A label of who is alive, shown to whoever resumes the scope.", 1, MAX_AGENT_ID_BYTES),
            Field("disarm", "flag", "Switch the alarm off instead: the work of this scope is done."),
        ),
        _armed_or_disarmed,
        MappingProxyType(
            {"anyOf": [_given("expect_within_seconds"), {"required": ["disarm"], "properties": {"disarm": {"const": True}}}]}
        ),
    ),
    Operation(
        "resume_packet",
        model.ResumeRequest,
        "What a successor needs to take up a scope: its live leases and the state of its switch. No fences.",
        (SCOPE,),
    ),
    Operation(
        "watch",
        model.WatchRequest,
        "Send an event for every change to a key or a scope, or to the whole namespace when neither is given.",
        (KEY, _about(SCOPE, "Watch the leases of this scope; not together with key.")),
        _at_most_one_target,
        MappingProxyType({"not": _given("key", "scope")}),
    ),
    Operation("unwatch", model.UnwatchRequest, "End the watch of this connection.", ()),
    Operation(
        "usage",
        model.UsageRequest,
        "What the namespace has been billed, and what has not reached upstream yet.",
        (Field("since", "instant", "Count from this instant: RFC 3339, or seconds since 1970.", 0, MAX_INSTANT),),
    ),
    Operation("info", model.InfoRequest, "What this daemon is, whom it takes the caller for, and its limits.", ()),
    Operation(
        "agent_lock",
        model.AgentLockRequest,
        "Claim a key, claim it again with its token to keep it, release it, or check it. Proceed only if acquired is true: false means "
        "that it is held, null that nobody knows, and neither is permission.",
        (
            Field("op", "choice", "What to do: claim, release or check.", choices=model.LOCK_OPS),
            KEY,
            FENCE._replace(
                name="token",
                description="SECRET: the token from the reply to your own claim; needed to keep it or to release it. Never print, log or "
                "share it.",
            ),
            _about(TTL, "How long a claim lasts, in seconds from now; left out, 60, or for a claim renewed what it had."),
            _about(HOLDER, "The label of the asking instance; left out, one is drawn for each claim."),
        ),
    ),
    Operation(
        "agent_add",
        model.AgentAddRequest,
        "Make a key for an agent; its secret is in this answer and nowhere else. Operators only.",
        (
            Field("name", "text", "A name for the agent, unique among its kind.", 1, MAX_NAMESPACE_BYTES),
            Field("namespace", "text", "Where its calls count; left out, a namespace of its name.", 1, MAX_NAMESPACE_BYTES),
        ),
        _fit_agent,
    ),
    Operation("agent_list", model.AgentListRequest, "The agents that have a key. Operators only.", ()),
    Operation(
        "agent_revoke",
        model.AgentRevokeRequest,
        "End an agent's key at once. Operators only.",
        (Field("name", "text", "The name the key was made under.", 1, MAX_NAMESPACE_BYTES),),
    ),
    Operation(
        "outbox_list",
        model.OutboxListRequest,
        "The dead letters: billing events that upstream will never take as they are; and how the outbox stands. Operators only.",
        (
            Field("limit", "integer", "The most dead letters per page.", 1, MAX_LIST_LIMIT),
            Field("cursor", "decimal", "Where to go on: the cursor of the page before.", 0, MAX_SEQUENCE),
        ),
    ),
    Operation(
        "outbox_retry",
        model.OutboxRetryRequest,
        "Put dead letters back into the outbox, to be shipped again. Operators only.",
        (_SEQUENCE, Field("all", "flag", "Every dead letter.")),
        _one_target,
        MappingProxyType({"oneOf": [_given("sequence"), _true("all")]}),
    ),
    Operation(
        "outbox_drop",
        model.OutboxDropRequest,
        "Delete dead letters for good, or forget the payment under way so that the next demand is paid anew. Operators only.",
        (
            _SEQUENCE,
            Field("all", "flag", "Every dead letter."),
            Field("payment", "flag", "The payment under way: look at the chain first, its money may have moved."),
        ),
        _one_target,
        MappingProxyType({"oneOf": [_given("sequence"), _true("all"), _true("payment")]}),
    ),
    Operation(
        "backup",
        model.BackupRequest,
        "The parts of a copy of the ledger, for `leased backup`. Operators only.",
        (_COPY, Field("offset", "integer", "Where the part begins.", 0, MAX_SEQUENCE)),
    ),
)


def _completed(operation: Operation) -> Operation:
    """Adds what the model states (attribute, default, required) and the field that every operation has."""
    defaults = operation.request._field_defaults
    fields = []
    for field in (*operation.fields, AGENT_KEY):
        attribute = field.attribute or field.name
        default = defaults.get(attribute)
        if default is not None and field.kind == "choice":
            default = field.choices[default]
        elif type(default) is float:
            default = plain(default)
        fields.append(field._replace(attribute=attribute, default=default, required=attribute not in defaults))
    return operation._replace(fields=tuple(fields))


OPERATIONS: Final[Mapping[str, Operation]] = MappingProxyType({row.name: _completed(row) for row in _TABLE})


class _Plan(NamedTuple):
    request: type[Request]
    fields: dict[str, tuple[int, Check]]
    defaults: list[Any]  # None where a required value must go; no checker returns None
    required: tuple[int, ...]
    together: Callable[[Any], None] | None


def _plan(operation: Operation) -> _Plan:
    request = operation.request
    position = request._fields.index
    return _Plan(
        request,
        {field.name: (position(field.attribute), checker(field)) for field in operation.fields},
        [request._field_defaults.get(attribute) for attribute in request._fields],
        tuple(position(field.attribute) for field in operation.fields if field.required),
        operation.together,
    )


_PLANS: Final = {name: _plan(operation) for name, operation in OPERATIONS.items()}
_new = tuple.__new__  # the model's own constructor takes keywords, at twice the price


def parse(operation: Any, params: Any) -> Request:
    """The request that `params` (as a door decoded them) means.  A field that is None counts as absent.

    Raises PeerError: `unknown_method` for an operation that is not in the table, else `invalid_argument` whose text begins with the
    name of the field.  Nothing is clamped or altered, and no value is repeated in the text.
    """
    try:
        request, fields, defaults, required, together = _PLANS[operation]
    except (KeyError, TypeError):  # TypeError: not even hashable
        text = f"{named(operation)} is not an operation{suggestion(operation, OPERATIONS)}"
        raise PeerError("unknown_method", text) from None
    if type(params) is not dict:
        raise invalid("params", "must be a map of fields")
    values = defaults[:]
    for name, value in params.items():
        entry = fields.get(name)
        if entry is None:
            raise invalid(named(name), f"is not a field of {operation}{suggestion(name, fields)}")
        if value is not None:
            position, check = entry
            values[position] = check(value)
    for position in required:
        if values[position] is None:
            raise invalid(next(name for name, entry in fields.items() if entry[0] == position), "is required")
    parsed = _new(request, values)
    if together is not None:
        together(parsed)
    return parsed


def json_schema(operation: str, *, exact: bool = False) -> dict[str, Any]:
    """The JSON Schema (draft 2020-12) of an operation's parameters, a fresh dict.  KeyError for an unknown operation.

    As it is, it suits MCP hosts that refuse lists of types and rules between fields.  `exact`, for OpenAPI, also says that an
    optional field may be null, where numbers are taken in place of strings, and which fields go together.
    """
    row = OPERATIONS[operation]
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "type": "object",
        "description": row.summary,
        "properties": {field.name: shape(field, exact=exact) for field in row.fields},
        "required": [field.name for field in row.fields if field.required],
        "additionalProperties": False,
        **(deepcopy(dict(row.combination)) if exact else {}),
    }
