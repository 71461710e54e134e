"""The command's own JSON is `json`'s, letter for letter."""

from __future__ import annotations

import json
from enum import IntEnum
from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from leased.client.as_json import as_json

SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text()
VALUES = st.recursive(SCALARS, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=20)


@given(VALUES)
def test_it_is_what_json_writes(value: Any) -> None:
    assert as_json(value) == json.dumps(value, ensure_ascii=False)


@pytest.mark.parametrize(
    "text",
    [
        "",
        '"',
        "\\",
        "/",
        "\x00\x1f\x7f",
        "\t\r\n\b\f",
        "straße",
        "\u2028",
        "😀",
        "\ud800",
        float("inf"),
        float("-inf"),
        1e300,
        -0.0,
    ],
)
def test_what_is_quoted_is_quoted_alike(text: Any) -> None:
    assert as_json({text: [text]} if isinstance(text, str) else (text,)) == json.dumps(
        {text: [text]} if isinstance(text, str) else [text], ensure_ascii=False
    )


class Level(IntEnum):
    LOW = 1


class Pair(NamedTuple):
    first: str
    second: int


def test_what_is_not_plain_is_left_to_json() -> None:
    assert as_json({"level": Level.LOW, "pair": Pair("a", 2)}) == '{"level": 1, "pair": ["a", 2]}'
    with pytest.raises(TypeError, match="bytes is not JSON serializable"):
        as_json({"fence": b"secret"})
