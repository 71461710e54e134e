"""What a model is shown: the protocol's own table, the secrets it is never asked for, and words that forbid."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
from jsonschema import Draft202012Validator, ValidationError

from leased.client.mcp_tools import INSTRUCTIONS, TOOLS, output_schema, tools
from leased.fields import Field, plain
from leased.schema import OPERATIONS

CATALOGUE = tools(local=True)
NEVER = {"request_id", "agent_key"}


def test_the_tools_are_those_of_the_protocol() -> None:
    assert list(CATALOGUE) == ["lease", "renew", "release", "check", "heartbeat", "resume_packet", "agent_lock"] == list(TOOLS)


def _bounds(field: Field) -> dict[str, Any]:
    low, high = plain(field.low), plain(field.high)
    return {
        "text": {"type": "string", "minLength": low, "maxLength": high},
        "number": {"type": "number", "minimum": low, "maximum": high},
        "integer": {"type": "integer", "minimum": low, "maximum": high},
        "decimal": {"type": "string", "maxLength": len(str(high))},
        "choice": {"type": "string", "enum": list(field.choices)},
        "flag": {"type": "boolean"},
    }[field.kind]


@pytest.mark.parametrize("name", TOOLS)
def test_the_input_schema_is_the_table_of_fields(name: str) -> None:
    schema = CATALOGUE[name].input_schema
    Draft202012Validator.check_schema(schema)
    table = {field.name: field for field in OPERATIONS[name].fields if field.name not in NEVER}
    assert list(schema["properties"]) == list(table)
    assert schema["additionalProperties"] is False
    for field in table.values():
        shown = schema["properties"][field.name]
        assert shown.items() >= _bounds(field).items(), field.name
        assert shown.get("default") == field.default
        assert (field.name in schema["required"]) == (
            field.required and not (field.name == "holder" and name in ("lease", "renew"))
        )


@pytest.mark.parametrize("name", TOOLS)
def test_a_model_is_asked_for_no_request_id_and_no_key_of_an_agent(name: str) -> None:
    shown = CATALOGUE[name]
    assert NEVER.isdisjoint(shown.input_schema["properties"])
    assert "unique" not in str(shown.input_schema["properties"].get("holder", "")), "it would mint a new one for a retry"


@pytest.mark.parametrize("name", TOOLS)
def test_all_four_annotations_are_set(name: str) -> None:
    hints = CATALOGUE[name].hints
    assert set(hints) == {"readOnlyHint", "destructiveHint", "idempotentHint", "openWorldHint"}
    assert hints["readOnlyHint"] == (name in ("check", "resume_packet"))
    assert hints["destructiveHint"] == (name == "heartbeat")
    assert hints["idempotentHint"] == (name not in ("lease", "agent_lock"))
    assert hints["openWorldHint"] is False


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("lease", "`acquired` false: it is NOT yours"),
        ("lease", "`acquired` null: nobody can tell now, so you do NOT have it"),
        ("lease", "do not touch what the key protects"),
        ("lease", "`fence` is the SECRET"),
        ("lease", "`generation` is the ORDER, not secret"),
        ("renew", "`acquired` false: it is lost. Stop at once"),
        ("renew", "`acquired` null: nobody can tell; stop"),
        ("release", "`released` null: nobody can tell"),
        ("check", "`held` false is no permission"),
        ("heartbeat", "releases every lease of the scope"),
        ("resume_packet", "it makes no lease yours"),
        ("agent_lock", "`acquired` null: nobody can tell now, so you do NOT have it"),
        ("agent_lock", "`token` is the SECRET"),
    ],
)
def test_the_descriptions_forbid(name: str, said: str) -> None:
    assert said in CATALOGUE[name].description
    assert CATALOGUE[name].description.startswith(OPERATIONS[name].summary)


def test_the_server_says_at_once_what_false_and_null_mean() -> None:
    assert "False and null both mean: you do not have it." in INSTRUCTIONS


def test_over_http_nothing_can_be_bound() -> None:
    assert tools(local=False)["lease"].input_schema["properties"]["bind"]["enum"] == ["none"]


def test_the_default_shown_for_bind_is_the_one_in_force() -> None:
    assert tools(local=True, bind="process")["lease"].input_schema["properties"]["bind"]["default"] == "process"
    assert tools(local=True)["lease"].input_schema["properties"]["bind"]["default"] == "none"


CHARGE = {"amount": "0", "currency": "USDC", "event_id": None}
GRANT = {
    "acquired": True,
    "renewed": False,
    "key": "k",
    "holder": "h",
    "fence": "9007199254740993",
    "generation": 7,
    "scope": None,
    "ttl_seconds": 60.0,
    "expires_at": "2026-11-29T17:39:36.123Z",
    "expires_in_seconds": 60.0,
    "expires_boottime": 5.0,
    "boot_id": "b",
    "charge": CHARGE,
}
UNKNOWN = {"acquired": None, "key": "k", "holder": "h", "reason": "full", "retry_after_seconds": 1.0, "charge": CHARGE}


def test_the_output_schemas_take_every_answer_and_no_other() -> None:
    for name in TOOLS:
        schema = output_schema(name)
        Draft202012Validator.check_schema(schema)
        assert schema["type"] == "object", "hosts of 2025 take no other root"
        assert "#/components" not in str(schema)
        assert "'type': [" not in str(schema), "there are clients that take no lists of types"
    check = Draft202012Validator(output_schema("lease"))
    check.validate(GRANT)
    check.validate(UNKNOWN)
    check.validate({**GRANT, "scope": "s"})
    for wrong in (
        {**GRANT, "scope": 7},
        {**GRANT, "acquired": None},
        {**UNKNOWN, "fence": "9007199254740993"},
        {**GRANT, "fence": 7},
        {},
    ):
        with pytest.raises(ValidationError):
            check.validate(wrong)


def test_each_caller_gets_schemas_of_its_own() -> None:
    tools(local=True)["lease"].input_schema["properties"].clear()
    output_schema("lease")["$defs"].clear()
    assert tools(local=True)["lease"].input_schema["properties"]
    assert output_schema("lease")["$defs"]


def test_no_other_verb_imports_the_sdk() -> None:
    find = "from leased.client import command; command._find('check'); command._find('mcp')"
    code = f"import sys; {find}; print('mcp' in sys.modules, 'trio' in sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert run.stdout == "False False\n"
