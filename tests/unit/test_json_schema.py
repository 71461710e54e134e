"""That the JSON Schema of each operation says the same as `parse`, and suits whom it is for."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from leased.errors import PeerError
from leased.schema import OPERATIONS, json_schema, parse

FENCE = str(2**62 + 1)

MINIMAL: dict[str, dict[str, Any]] = {
    "lease": {"key": "gpu0", "holder": "w-1"},
    "renew": {"key": "gpu0", "holder": "w-1", "fence": FENCE},
    "release": {"key": "gpu0", "fence": FENCE},
    "check": {"key": "gpu0"},
    "list": {},
    "revoke": {"key": "gpu0", "reason": "stuck"},
    "heartbeat": {"scope": "run-7", "expect_within_seconds": 30},
    "resume_packet": {"scope": "run-7"},
    "watch": {},
    "unwatch": {},
    "usage": {},
    "info": {},
    "agent_lock": {"key": "gpu0"},
    "agent_add": {"name": "ci"},
    "agent_list": {},
    "agent_revoke": {"name": "ci"},
    "outbox_list": {},
    "outbox_retry": {"sequence": 7},
    "outbox_drop": {"payment": True},
    "backup": {},
}


def conforms(schema: dict[str, Any], value: Any) -> bool:
    """The part of JSON Schema 2020-12 that these schemas use, by the letter of the specification; anything else is a KeyError."""
    kinds = {
        "object": lambda v: isinstance(v, dict),
        "string": lambda v: isinstance(v, str),
        "boolean": lambda v: isinstance(v, bool),
        "null": lambda v: v is None,
        "number": lambda v: isinstance(v, int | float) and not isinstance(v, bool),
        "integer": lambda v: isinstance(v, int | float) and not isinstance(v, bool) and v == v // 1,
    }
    number, text, members = kinds["number"](value), isinstance(value, str), isinstance(value, dict)
    words = {
        "$schema": lambda _: True,
        "description": lambda _: True,
        "default": lambda _: True,
        "format": lambda _: True,
        "type": lambda names: any(kinds[name](value) for name in ([names] if isinstance(names, str) else names)),
        "enum": lambda values: value in values,
        "const": lambda only: value is only,
        "minimum": lambda bound: not number or value >= bound,
        "maximum": lambda bound: not number or value <= bound,
        "minLength": lambda bound: not text or len(value) >= bound,
        "maxLength": lambda bound: not text or len(value) <= bound,
        "pattern": lambda pattern: not text or re.search(pattern, value) is not None,
        "required": lambda names: not members or all(name in value for name in names),
        "properties": lambda parts: not members or all(conforms(parts[name], value[name]) for name in parts if name in value),
        "additionalProperties": lambda allowed: allowed or not members or value.keys() <= schema["properties"].keys(),
        "not": lambda part: not conforms(part, value),
        "oneOf": lambda parts: sum(conforms(part, value) for part in parts) == 1,
        "anyOf": lambda parts: any(conforms(part, value) for part in parts),
    }
    return all(words[word](argument) for word, argument in schema.items())


def accepts(operation: str, params: dict[str, Any]) -> bool:
    try:
        parse(operation, params)
    except PeerError:
        return False
    return True


VALUES: list[Any] = [
    True,
    False,
    None,
    0,
    0.1,
    0.09,
    1,
    1.5,
    60,
    60.0,
    1000,
    1001,
    3601,
    86401,
    2**53 - 1,
    2**63,
    1e300,
    -1,
    [],
    {},
]
VALUES += ["", "x", "process", "x" * 22, "x" * 128, "x" * 129, "x" * 256, "x" * 257, "x" * 1025, "0" * 40, FENCE, f"0{FENCE}"]


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("exact", [False, True])
def test_the_json_schema_agrees_with_parse(operation: str, exact: bool) -> None:
    schema = json_schema(operation, exact=exact)
    assert conforms(schema, MINIMAL[operation])
    assert not conforms(schema, {**MINIMAL[operation], "ttl_second": 5})
    for field in OPERATIONS[operation].fields:
        for value in VALUES:
            params = {**MINIMAL[operation], field.name: value}
            if field.kind == "instant" and isinstance(value, str):
                continue  # `format` is an annotation: its strings are compared nowhere
            if field.name in ("key_hash", "scope") and operation in ("revoke", "watch"):
                params.pop("key", None)
            if operation in ("outbox_retry", "outbox_drop") and field.name != "agent_key":
                if value is None or value is False:
                    continue  # counts as absent; that one of them must be there is said by the exact schema alone
                params = {field.name: value}
            if conforms(schema, params) == accepts(operation, params):
                continue
            # JSON Schema here is never the wider one, and the narrower one only where it says so.
            assert accepts(operation, params), (field.name, value)
            digits = isinstance(value, str) and value.isdigit()
            loose = not exact and (value is None or field.kind in ("decimal", "instant"))
            assert digits or loose, (field.name, value)


def test_exact_schemas_say_what_goes_together() -> None:
    cases: list[tuple[str, dict[str, Any]]] = [
        ("revoke", {"reason": "r"}),
        ("revoke", {"reason": "r", "key": "k", "key_hash": "0" * 40}),
        ("revoke", {"reason": "r", "key": "k", "key_hash": None}),
        ("revoke", {"reason": "r", "key": None, "key_hash": "0" * 40}),
        ("watch", {"key": "k", "scope": "s"}),
        ("watch", {"key": "k", "scope": None}),
        ("heartbeat", {"scope": "s"}),
        ("heartbeat", {"scope": "s", "expect_within_seconds": None}),
        ("heartbeat", {"scope": "s", "disarm": False}),
        ("heartbeat", {"scope": "s", "disarm": True}),
        ("outbox_retry", {}),
        ("outbox_retry", {"sequence": 1}),
        ("outbox_retry", {"sequence": 1, "all": True}),
        ("outbox_drop", {"all": True}),
        ("outbox_drop", {"all": False, "payment": True}),
        ("outbox_drop", {"all": True, "payment": True}),
    ]
    verdicts = [conforms(json_schema(operation, exact=True), params) for operation, params in cases]
    assert verdicts == [accepts(operation, params) for operation, params in cases]
    assert True in verdicts
    assert False in verdicts


@pytest.mark.parametrize("operation", OPERATIONS)
def test_plain_schemas_suit_every_mcp_host(operation: str) -> None:
    schema = json_schema(operation)
    assert not {"oneOf", "anyOf", "allOf", "not"} & schema.keys()
    for name, part in schema["properties"].items():
        assert isinstance(part["type"], str), name
        assert part["description"]
    assert json.loads(json.dumps(schema)) == schema


def test_json_schema_of_lease() -> None:
    schema = json_schema("lease")
    assert schema["required"] == ["key", "holder"]
    assert list(schema["properties"])[:4] == ["key", "holder", "ttl_seconds", "fence"]
    ttl = schema["properties"]["ttl_seconds"]
    assert (ttl["type"], ttl["minimum"], ttl["maximum"]) == ("number", 0.1, 3600)
    assert schema["properties"]["bind"]["enum"] == ["none", "process", "connection"]
    assert schema["properties"]["bind"]["default"] == "none"
    assert repr(schema["properties"]["wait_seconds"]["default"]) == "0"
    assert "1 to 1024 bytes of UTF-8" in schema["properties"]["key"]["description"]


def test_a_schema_is_its_callers_own() -> None:
    for operation in OPERATIONS:
        spoiled = json_schema(operation, exact=True)
        before = json.dumps(spoiled)
        for value in spoiled.values():
            if isinstance(value, dict | list):
                for nested in value.values() if isinstance(value, dict) else value:
                    if isinstance(nested, dict):
                        nested.clear()
        assert json.dumps(json_schema(operation, exact=True)) == before
