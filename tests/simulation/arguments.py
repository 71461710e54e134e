"""Which parameters of a call are well formed, by sections 1 and 2 of the contract, and what they mean once read."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

Reader = Callable[[object], Any]
"""Turns a raw value into its meaning, or raises ValueError."""

NUMBER_DIGITS = 400  # longer than any in-range number needs; keeps int() cheap


def _text(lowest: int, highest: int) -> Reader:
    def read(value: object) -> str:
        if not isinstance(value, str):
            raise ValueError
        size = len(value.encode("utf-8"))  # a lone surrogate raises UnicodeEncodeError, a ValueError
        if not lowest <= size <= highest:
            raise ValueError
        return value

    return read


def _number(lowest: float, highest: float) -> Reader:
    def read(value: object) -> float:
        if (
            isinstance(value, bool)
            or not isinstance(value, int | float | str)
            or (isinstance(value, str) and len(value) > NUMBER_DIGITS)
        ):
            raise ValueError
        number = float(value) if not isinstance(value, int) or abs(value) < 2**64 else math.inf
        if not lowest <= number <= highest:  # NaN fails both
            raise ValueError
        return number

    return read


def _whole(lowest: int, highest: int) -> Reader:
    def read(value: object) -> int:
        if (
            isinstance(value, bool)
            or not isinstance(value, int | float | str)
            or (isinstance(value, str) and len(value) > NUMBER_DIGITS)
        ):
            raise ValueError
        if isinstance(value, float) and not value.is_integer():
            raise ValueError
        number = int(value)
        if not lowest <= number <= highest:
            raise ValueError
        return number

    return read


def _flag(value: object) -> bool:
    if not isinstance(value, bool):
        raise ValueError
    return value


def _bind(value: object) -> str:
    if value not in ("none", "process", "connection"):
        raise ValueError
    return str(value)


def _request_id(value: object) -> bytes:
    raw = value.encode("utf-8") if isinstance(value, str) else value
    if not isinstance(raw, bytes) or not 22 <= len(raw) <= 128:
        raise ValueError
    return raw


KEY = _text(1, 1024)
LABEL = _text(1, 256)
FENCE = _whole(2**53, 2**63 - 1)
TTL = _number(0.1, 3600)

READERS: dict[str, dict[str, Reader]] = {
    "lease": {
        "key": KEY,
        "holder": LABEL,
        "ttl_seconds": TTL,
        "fence": FENCE,
        "scope": LABEL,
        "wait_seconds": _number(0, 300),
        "bind": _bind,
        "request_id": _request_id,
    },
    "renew": {"key": KEY, "holder": LABEL, "fence": FENCE, "ttl_seconds": TTL},
    "release": {"key": KEY, "holder": LABEL, "fence": FENCE},
    "check": {"key": KEY, "generation": _whole(1, 2**53 - 1)},
    "list": {"scope": LABEL, "holder": LABEL, "limit": _whole(1, 1000), "cursor": _whole(0, 2**53), "all": _flag},
    "heartbeat": {"scope": LABEL, "expect_within_seconds": _number(1, 86400), "agent_id": LABEL, "disarm": _flag},
    "resume_packet": {"scope": LABEL},
    "revoke": {"key": KEY, "key_hash": _text(1, 256), "reason": _text(1, 65536), "namespace": LABEL},
}
REQUIRED: dict[str, set[str]] = {
    "lease": {"key", "holder"},
    "renew": {"key", "holder", "fence"},
    "release": {"key", "fence"},
    "check": {"key"},
    "list": set(),
    "heartbeat": {"scope"},
    "resume_packet": {"scope"},
    "revoke": {"reason"},
}


def read(operation: str, params: Mapping[str, object]) -> tuple[dict[str, Any], set[str]]:
    """The meaning of `params` (what is omitted is absent; agent_key is the door's affair) and the names of all fields at fault."""
    meaning: dict[str, Any] = {}
    faults = REQUIRED[operation] - params.keys()
    for name, value in params.items():
        if name == "agent_key":
            continue
        if name not in READERS[operation]:
            faults.add(name)
            continue
        try:
            meaning[name] = READERS[operation][name](value)
        except (ValueError, OverflowError):
            faults.add(name)
    if operation == "revoke" and ("key" in params) == ("key_hash" in params):
        faults |= {"key", "key_hash"}
    if operation == "heartbeat" and not params.get("disarm") and "expect_within_seconds" not in params:
        faults.add("expect_within_seconds")
    return meaning, faults
