"""The OpenAPI document: numbers as strings by exact patterns, every operation there, every reference leading somewhere."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest

from leased.doors.digits import decimal_pattern, integer_pattern
from leased.doors.http_routes import ROUTES
from leased.doors.openapi import document
from leased.schema import OPERATIONS

SERVED = frozenset(OPERATIONS)
BOUNDS = [(0, 0), (0, 9), (1, 1000), (7, 123), (1, 86_400), (0, 300), (190, 2110), (2**53, 2**63 - 1), (1, 2**53 - 1)]


@pytest.mark.parametrize(("low", "high"), BOUNDS)
def test_an_integer_pattern_matches_the_numbers_within_and_nothing_else(low: int, high: int) -> None:
    pattern = re.compile(integer_pattern(low, high))
    near = {edge + step for edge in (0, low, high, 10, 99, 100, (low + high) // 2) for step in range(-12, 13)}
    for number in near | set(range(min(high, 3000) + 20)):
        assert (pattern.search(str(number)) is not None) == (low <= number <= high), number
    for text in ("", "01", "+1", "1.0", "1 ", "a", "1\n2"):
        assert pattern.search(text) is None


@pytest.mark.parametrize(("low", "high"), [(0.1, 3600), (0, 300), (1, 86_400), (0, 253402300799)])
def test_a_decimal_pattern_matches_numbers_within(low: float, high: float) -> None:
    pattern = re.compile(decimal_pattern(low, high))
    for text in [
        "0",
        "0.0",
        "0.09",
        "0.1",
        "0.15",
        "00.5",
        "1",
        "01",
        "1.",
        "1.99",
        "299.9",
        "300",
        "300.0",
        "300.1",
        "3599.99",
        "3600",
        "3600.00",
        "3600.1",
        "86400",
    ]:
        assert (pattern.search(text) is not None) == (low <= float(text) <= high), text
    for text in ("", ".", "-1", "1e2", " 1", "1,0", "nan"):
        assert pattern.search(text) is None


@pytest.mark.parametrize("local", [True, False])
def test_every_route_is_described_and_every_reference_leads_somewhere(local: bool) -> None:
    told = document(SERVED, local=local)
    assert set(told["paths"]) == set(ROUTES) and told["openapi"].startswith("3.1")
    for reference in references(told):
        at: Any = told
        for part in reference.removeprefix("#/").split("/"):
            at = at[part]
    named = [method["operationId"] for path in told["paths"].values() for method in path.values()]
    assert len(named) == len(set(named))
    json.dumps(told, allow_nan=False)


def test_only_what_is_served_is_described() -> None:
    assert "/v1/usage" not in document(SERVED - {"usage"}, local=True)["paths"]


def test_nothing_can_be_bound_over_tcp() -> None:
    def choices(local: bool) -> Any:
        body = document(SERVED, local=local)["paths"]["/v1/lease"]["post"]["requestBody"]["content"]["application/json"]["schema"]
        return body["properties"]["bind"]["enum"]

    assert choices(True) == ["none", "process", "connection", None]
    assert choices(False) == ["none", None]


def test_the_agent_lock_is_taken_in_both_forms_and_a_key_is_never_asked_for_in_an_address() -> None:
    told = document(SERVED, local=True)["paths"]
    wrapped, bare = told["/agent-lock"]["post"]["requestBody"]["content"]["application/json"]["schema"]["anyOf"]
    assert wrapped["required"] == ["arguments"] and set(bare["properties"]) - {"agent_key"} == set(
        wrapped["properties"]["arguments"]["properties"]
    )
    for path in ("/v1/leases", "/v1/usage"):
        assert "agent_key" not in {parameter["name"] for parameter in told[path]["get"]["parameters"]}


def references(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        for name, part in value.items():
            if name == "$ref":
                yield part
            else:
                yield from references(part)
    elif isinstance(value, list):
        for part in value:
            yield from references(part)
