"""The OpenAPI 3.1 document of the HTTP door, made from the table of fields and the routes; what answers look like is said in answers.py.

It is exact where JSON Schema can be: what the daemon takes conforms, and what conforms is taken, but for texts whose bounds count bytes where
the schema counts characters.  Numbers written as strings are taken everywhere, so they are announced too.
"""

from __future__ import annotations

from typing import Any, Final

from leased.doors.digits import decimal_pattern, integer_pattern
from leased.doors.http_routes import ROUTES, Route
from leased.doors.openapi_answers import ANSWERS, SCHEMAS
from leased.fields import Field, shape
from leased.schema import OPERATIONS
from leased.version import VERSION

Schema = dict[str, Any]
_INSTANT: Final = (  # RFC 3339 since 1970; offsets and the last days of long months are taken too
    "^(?:19[7-9][0-9]|[2-9][0-9]{3})-(?:0[1-9]|1[0-2])-(?:0[1-9]|1[0-9]|2[0-8])T(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\\.[0-9]{1,6})?Z$"
)
_PROBLEMS: Final = {
    "400": "A field is wrong: detail begins with its name. Or the request is not HTTP/1.1 or JSON.",
    "401": "An agent key is needed and is missing or not known.",
    "403": "Not allowed: the request came from a web page or for another host, or the operation is for operators.",
    "408": "The request was not complete in time.",
    "409": "The token is not that of a live claim.",
    "413": "The body is larger than 64 KiB.",
    "415": "The body is not application/json.",
    "429": "A limit was reached, or too many wrong agent keys came from this address.",
    "431": "The headers are larger than 16 KiB.",
    "500": "A fault of the daemon, or a state that cannot be read now.",
    "501": "Not built in: the extra `leased[metrics]` is not installed.",
}


def document(served: frozenset[str], *, local: bool) -> Schema:
    """The document, of the operations in `served`, as they can be called over a Unix socket (`local`) or over TCP.  A fresh dict."""
    paths: Schema = {}
    for path, route in ROUTES.items():
        if route.page or route.operation in served:
            described = _page(route) if route.page else _operation(route, local=local)
            paths[path] = {route.method.lower(): described}
            if route.method == "GET":
                paths[path]["head"] = _head(described)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "leased",
            "version": VERSION,
            "summary": "Leases for the processes and AI agents of one host.",
            "description": "Proceed only where `acquired` is true: false means that the key is held, null that nobody knows. Neither is permission.",
            "license": {"name": "MIT", "identifier": "MIT"},
        },
        "servers": [{"url": "/"}],
        "paths": paths,
        "components": {
            "securitySchemes": {
                "agentKey": {
                    "type": "http",
                    "scheme": "bearer",
                    "description": "An agent key. Over the Unix socket none is needed.",
                }
            },
            "schemas": SCHEMAS,
            "responses": {f"Problem{status}": _problem(status) for status in _PROBLEMS},
        },
    }


def _operation(route: Route, *, local: bool) -> Schema:
    row = OPERATIONS[route.operation]
    fields = [field for field in row.fields if route.method == "POST" or field.name != "agent_key"]
    answers = ANSWERS[route.operation]
    described: Schema = {
        "operationId": route.operation,
        "summary": row.summary.partition(".")[0] + ".",
        "description": row.summary,
        "security": [{"agentKey": []}],
        "responses": {
            "200": {
                "description": "The answer. One that is false is an answer too, and no permission.",
                "headers": {"Retry-After": _retry(required=False)},
                "content": {"application/json": {"schema": answers.yes_or_no}},
            },
            **_refusals("400", "401", "403", "408", "413", "415", "429", "431", "500"),
        },
    }
    if answers.unknown is not None:
        described["responses"]["503"] = {
            "description": "Nobody knows: the answer is null. Never permission to proceed.",
            "headers": {"Retry-After": _retry(required=True)},
            "content": {"application/json": {"schema": answers.unknown}},
        }
    if route.operation == "agent_lock":
        described["responses"] |= _refusals("409")
    if answers.links:
        described["responses"]["200"]["links"] = answers.links
    if route.method == "GET":
        described["parameters"] = [_parameter(field) for field in fields]
    else:
        described["requestBody"] = {"required": True, "content": {"application/json": {"schema": _body(route, local=local)}}}
    return described


def _page(route: Route) -> Schema:
    answers = ANSWERS[route.page]
    responses: Schema = {
        "200": {"description": "The answer.", "content": {answers.kind: {"schema": answers.yes_or_no}}},
        **_refusals("400", "403", "408", "429", "431", "500"),
    }
    if not route.open:
        responses |= _refusals("401", "501")
    if answers.unknown is not None:
        responses["503"] = {"description": "Not now.", "content": {answers.kind: {"schema": answers.unknown}}}
    return {
        "operationId": route.page,
        "summary": answers.summary,
        "security": [] if route.open else [{"agentKey": []}],
        "responses": responses,
    }


def _head(get: Schema) -> Schema:
    """The same without bodies."""
    responses = {status: {"description": _PROBLEMS.get(status, "As GET, without the body.")} for status in get["responses"]}
    return get | {"operationId": f"{get['operationId']}_head", "responses": responses}


def _refusals(*statuses: str) -> Schema:
    return {status: {"$ref": f"#/components/responses/Problem{status}"} for status in statuses}


def _problem(status: str) -> Schema:
    answer: Schema = {
        "description": _PROBLEMS[status],
        "content": {"application/problem+json": {"schema": {"$ref": "#/components/schemas/Problem"}}},
    }
    if status == "401":
        answer["headers"] = {"WWW-Authenticate": {"required": True, "schema": {"type": "string"}}}
    elif status == "429":
        answer["headers"] = {"Retry-After": _retry(required=True)}
    return answer


def _retry(*, required: bool) -> Schema:
    text = "Whole seconds until it is worth asking again, rounded up."
    return {"required": required, "description": text, "schema": {"type": "integer", "minimum": 1}}


# ---- what is asked


def _body(route: Route, *, local: bool) -> Schema:
    """The body of a POST; /agent-lock takes it within `arguments` too.  Nothing can be bound over TCP."""
    row = OPERATIONS[route.operation]
    exact: Schema = {
        "type": "object",
        "properties": {field.name: _exact(field) for field in row.fields},
        "required": [field.name for field in row.fields if field.required],
        "additionalProperties": False,
        **row.combination,
    }
    if not local and "bind" in exact["properties"]:
        exact["properties"]["bind"]["enum"] = ["none", None]
    if route.operation != "agent_lock":
        return exact
    keyless = {name: part for name, part in exact["properties"].items() if name != "agent_key"}
    wrapped: Schema = {
        "type": "object",
        "properties": {"arguments": exact | {"properties": keyless}, "agent_key": exact["properties"]["agent_key"]},
        "required": ["arguments"],
        "additionalProperties": False,
    }
    return {"anyOf": [wrapped, exact]}


def _exact(field: Field) -> Schema:
    said = shape(field, exact=True)
    head = {name: said.pop(name) for name in ("description", "default") if name in said}
    numeric = {"number": decimal_pattern, "integer": integer_pattern, "decimal": integer_pattern}.get(field.kind)
    if numeric is None:
        return head | said
    kind = "number" if field.kind == "number" else "integer"
    forms: list[Schema] = [
        {"type": kind, "minimum": said["minimum"], "maximum": said["maximum"]},
        {"type": "string", "pattern": numeric(field.low, field.high)},
    ]
    if not field.required:
        forms.append({"type": "null"})
    return head | {"anyOf": forms}


def _parameter(field: Field) -> Schema:
    """A field in a query: always a string there, and absent when it is empty."""
    said = shape(field, exact=False)
    description = said.pop("description") + " Left empty, it counts as absent."
    said.pop("default", None)
    if field.kind == "flag":
        said = {"type": "string", "enum": ["true", "false", ""]}
    elif field.kind in ("integer", "decimal"):
        said = {"type": "string", "pattern": f"^$|{integer_pattern(field.low, field.high)}"}
    elif field.kind == "instant":
        said = {"type": "string", "pattern": f"^$|{_INSTANT}|{decimal_pattern(field.low, field.high)}"}
    else:
        said |= {"minLength": 0}
    return {"name": field.name, "in": "query", "required": False, "description": description, "schema": said}
