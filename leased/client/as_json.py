"""A daemon's reply as a line of JSON, without `json`, whose import costs as much as the whole of an answer from the daemon.

It says the same as `json.dumps(reply, ensure_ascii=False)`, which is asked for whatever is not as plain as replies are.
"""

from __future__ import annotations

try:
    from _json import encode_basestring as _quoted
except ImportError:  # a Python without that private name
    from json.encoder import encode_basestring as _quoted

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


def as_json(value: Any) -> str:
    """`value` is made of maps, lists, texts, numbers, true, false and null; the keys are texts.  Raises TypeError for bytes and the like."""
    kind = type(value)
    if kind is str:
        return _quoted(value)
    if value is None:
        return "null"
    if kind is bool:
        return "true" if value else "false"
    if kind is int:
        return str(value)
    if kind is float:
        return str(value) if -_INFINITY < value < _INFINITY else _NOT_FINITE[str(value)]
    if kind is dict:
        return "{" + ", ".join([f"{_quoted(name)}: {as_json(inner)}" for name, inner in value.items()]) + "}"
    if kind is list or kind is tuple:
        return "[" + ", ".join([as_json(inner) for inner in value]) + "]"
    import json

    return json.dumps(value, ensure_ascii=False)


_INFINITY = float("inf")
_NOT_FINITE = {"nan": "NaN", "inf": "Infinity", "-inf": "-Infinity"}  # no JSON, but what `json` writes and reads
