"""The table against the model, defaults, rules between fields, and names that are in no table."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from leased import model
from leased.errors import PeerError
from leased.schema import OPERATIONS, parse

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


def refused(operation: str, params: Any) -> str:
    with pytest.raises(PeerError) as caught:
        parse(operation, params)
    assert not caught.value.fatal
    assert caught.value.code == "invalid_argument"
    assert caught.value.__context__ is None or not caught.value.__context__.args, "a chained error may carry the value"
    return caught.value.text


# The table and the model


def test_the_table_has_the_operations_of_the_protocol() -> None:
    assert list(OPERATIONS) == list(MINIMAL)
    with pytest.raises(TypeError):
        OPERATIONS["lease"] = OPERATIONS["info"]  # type: ignore[index]


@pytest.mark.parametrize("operation", OPERATIONS)
def test_each_field_of_the_model_has_one_name_on_the_wire(operation: str) -> None:
    row = OPERATIONS[operation]
    assert sorted(field.attribute for field in row.fields) == sorted(row.request._fields)
    assert len({field.name for field in row.fields}) == len(row.fields)
    assert "agent_key" in {field.name for field in row.fields}
    assert {field.name for field in row.fields if field.required} <= MINIMAL[operation].keys()
    assert all(field.description.endswith((".", "digits.")) and "\n" not in field.description for field in row.fields)


@pytest.mark.parametrize(
    ("operation", "expected"),
    [
        ("lease", model.LeaseRequest("gpu0", "w-1")),
        ("renew", model.RenewRequest("gpu0", "w-1", 2**62 + 1)),
        ("release", model.ReleaseRequest("gpu0", 2**62 + 1)),
        ("check", model.CheckRequest("gpu0")),
        ("list", model.ListRequest()),
        ("revoke", model.RevokeRequest("stuck", "gpu0")),
        ("heartbeat", model.HeartbeatRequest("run-7", 30.0)),
        ("resume_packet", model.ResumeRequest("run-7")),
        ("watch", model.WatchRequest()),
        ("unwatch", model.UnwatchRequest()),
        ("usage", model.UsageRequest()),
        ("info", model.InfoRequest()),
    ],
)
def test_absent_fields_get_the_defaults_of_the_model(operation: str, expected: model.Request) -> None:
    parsed = parse(operation, MINIMAL[operation])
    assert parsed == expected
    assert type(parsed) is type(expected)


def test_every_field_of_a_lease_arrives() -> None:
    params = {
        "agent_key": "a",
        "bind": "connection",
        "fence": 2**53,
        "holder": "h",
        "key": "k",
        "request_id": b"\xff" * 22,
        "scope": "s",
        "ttl_seconds": "5",
        "wait_seconds": 7,
    }
    assert parse("lease", params) == model.LeaseRequest("k", "h", 5.0, 2**53, "s", 7.0, model.BIND_CONNECTION, b"\xff" * 22, "a")


def test_two_requests_share_nothing() -> None:
    assert parse("lease", {"key": "a", "holder": "h", "scope": "s"}) == model.LeaseRequest("a", "h", scope="s")
    assert parse("lease", {"key": "b", "holder": "h"}) == model.LeaseRequest("b", "h")


@pytest.mark.parametrize("operation", OPERATIONS)
def test_nil_is_absent(operation: str) -> None:
    fields = OPERATIONS[operation].fields
    nils = {field.name: None for field in fields if field.name not in MINIMAL[operation]}
    assert parse(operation, {**nils, **MINIMAL[operation]}) == parse(operation, MINIMAL[operation])
    for field in fields:
        if field.required:
            without = {name: value for name, value in MINIMAL[operation].items() if name != field.name}
            assert refused(operation, without) == f"{field.name} is required"
            assert refused(operation, {**without, field.name: None}) == f"{field.name} is required"


# Rules between fields


def test_scope_and_key_are_not_run_together() -> None:
    assert parse("lease", {"key": "b/c", "holder": "h", "scope": "a"}) != parse(
        "lease", {"key": "c", "holder": "h", "scope": "a/b"}
    )


def test_revoke_names_exactly_one_lease() -> None:
    assert refused("revoke", {"reason": "r"}).startswith("key is required")
    assert refused("revoke", {"reason": "r", "key": "k", "key_hash": "0" * 40}) == "key_hash must not be given together with key"
    assert parse("revoke", {"reason": "r", "key": "k", "key_hash": None}) == model.RevokeRequest("r", "k")
    assert parse("revoke", {"reason": "r", "key_hash": "0a" * 20}) == model.RevokeRequest("r", None, b"\n" * 20)


def test_watch_has_at_most_one_target() -> None:
    assert refused("watch", {"scope": "s", "key": "k"}) == "scope must not be given together with key"
    assert parse("watch", {"key": "k"}) == model.WatchRequest("k")
    assert parse("watch", {"scope": "s"}) == model.WatchRequest(None, "s")


def test_a_heartbeat_arms_for_a_time_or_disarms() -> None:
    for params in ({"scope": "s"}, {"scope": "s", "disarm": False}, {"scope": "s", "expect_within_seconds": None}):
        assert refused("heartbeat", params).startswith("expect_within_seconds is required unless disarm is true")
    assert parse("heartbeat", {"scope": "s", "disarm": True}) == model.HeartbeatRequest("s", disarm=True)


# Names


@pytest.mark.parametrize(
    ("operation", "name", "text"),
    [
        ("lease", "ttl_second", "ttl_second is not a field of lease (did you mean ttl_seconds?)"),
        ("lease", "TTL_SECONDS", "TTL_SECONDS is not a field of lease (did you mean ttl_seconds?)"),
        ("heartbeat", "expect_within", "expect_within is not a field of heartbeat (did you mean expect_within_seconds?)"),
        ("info", "zzz", "zzz is not a field of info"),
        ("lease", "generation", "generation is not a field of lease"),
        ("lease", "", "(a name that is not plain text) is not a field of lease"),
        ("lease", FENCE, "(a name that is not plain text) is not a field of lease"),
        ("lease", "x" * 33, "(a name that is not plain text) is not a field of lease"),
        ("lease", "key\n", "(a name that is not plain text) is not a field of lease"),
        ("lease", "\udcff", "(a name that is not plain text) is not a field of lease"),
        ("lease", b"key", "(a name that is not plain text) is not a field of lease"),
        ("lease", 1, "(a name that is not plain text) is not a field of lease"),
        ("lease", None, "(a name that is not plain text) is not a field of lease"),
        ("lease", ("key",), "(a name that is not plain text) is not a field of lease"),
    ],
)
def test_unknown_fields_are_refused_by_name(operation: str, name: Any, text: str) -> None:
    assert refused(operation, {**MINIMAL[operation], name: 5}) == text
    assert refused(operation, {name: None, **MINIMAL[operation]}) == text, "even when nil"


@pytest.mark.parametrize(
    ("operation", "text"),
    [
        ("leese", "leese is not an operation (did you mean lease?)"),
        ("LEASE", "LEASE is not an operation (did you mean lease?)"),
        ("zzz", "zzz is not an operation"),
        ("", "(a name that is not plain text) is not an operation"),
        (b"lease", "(a name that is not plain text) is not an operation"),
        (["lease"], "(a name that is not plain text) is not an operation"),
        (None, "(a name that is not plain text) is not an operation"),
    ],
)
def test_unknown_operations(operation: Any, text: str) -> None:
    with pytest.raises(PeerError) as caught:
        parse(operation, {})
    assert (caught.value.code, caught.value.text) == ("unknown_method", text)


@pytest.mark.parametrize("params", [None, [], [{}], "key", 5, b""])
def test_parameters_are_a_map(params: Any) -> None:
    assert refused("info", params) == "params must be a map of fields"


def test_nothing_but_mistakes_pays_for_suggestions_and_dates() -> None:
    program = (
        "import sys; from leased.schema import parse; parse('lease', {'key': 'k', 'holder': 'h', 'ttl_seconds': 5});"
        "print(sorted({'difflib', 'datetime', 'trio', 'lmdb', 'msgpack', 'socket', 'asyncio'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout == "[]\n"
