"""Every field's bounds, and what is refused in which words: each value goes through the checker of the table's own field."""

from __future__ import annotations

from typing import Any

import pytest

from leased.errors import PeerError
from leased.fields import checker
from leased.schema import OPERATIONS


def one(operation: str, name: str, value: Any) -> Any:
    """What `value` becomes as the field `name` of `operation`."""
    (field,) = [field for field in OPERATIONS[operation].fields if field.name == name]
    return checker(field)(value)


def refused_one(operation: str, name: str, value: Any) -> str:
    with pytest.raises(PeerError) as caught:
        one(operation, name, value)
    assert caught.value.code == "invalid_argument"
    assert caught.value.text.startswith(f"{name} ")
    assert not caught.value.fatal
    cause = caught.value.__context__
    assert cause is None or not cause.args, "a chained error may carry the value"
    return caught.value.text


# Numbers

NUMBERS = [
    ("lease", "ttl_seconds", 0.1, 3600),
    ("renew", "ttl_seconds", 0.1, 3600),
    ("lease", "wait_seconds", 0, 300),
    ("heartbeat", "expect_within_seconds", 1, 86400),
    ("usage", "since", 0, 253402300799),
]
INTEGERS = [
    ("lease", "fence", 2**53, 2**63 - 1),
    ("renew", "fence", 2**53, 2**63 - 1),
    ("release", "fence", 2**53, 2**63 - 1),
    ("check", "generation", 1, 2**53 - 1),
    ("list", "limit", 1, 1000),
    ("list", "cursor", 0, 2**53 - 1),
]
NEVER_A_NUMBER: list[Any] = [
    True,
    False,
    float("nan"),
    float("inf"),
    float("-inf"),
    -1,
    -0.001,
    1e308,
    2**64 - 1,
    10**400,
    -(10**400),
]
NEVER_A_NUMBER += ["-1", "+60", "abc", "", " 60", "60 ", "60\n", "6_0", "0x3c", "１２", "nan", "inf", "Infinity", "1e999", "6" * 41]
NEVER_A_NUMBER += ["0" * 41, b"60", [], [60], {}, {"seconds": 60}, object()]


@pytest.mark.parametrize(("operation", "name", "low", "high"), NUMBERS + INTEGERS)
@pytest.mark.parametrize("value", NEVER_A_NUMBER, ids=lambda value: repr(value)[:12])
def test_what_is_no_number_within_bounds_is_refused_by_name_with_the_bounds(
    operation: str, name: str, low: float, high: float, value: Any
) -> None:
    assert refused_one(operation, name, value).endswith(f"from {low} to {high}")


@pytest.mark.parametrize(("operation", "name", "low", "high"), NUMBERS)
def test_bounds_of_numbers_are_inclusive(operation: str, name: str, low: float, high: float) -> None:
    for bound in (low, high):
        for form in (bound, float(bound), str(bound), f"{bound}e0", f"0{bound}"):
            parsed = one(operation, name, form)
            assert parsed == bound
            assert type(parsed) is float
    for outside in (low - 0.001, high + 0.001, -5e-324):
        refused_one(operation, name, outside)
        refused_one(operation, name, repr(outside))


def test_the_smallest_float_is_no_ttl_and_zero_is_not_the_default() -> None:
    for value in (0, 0.0, "0", 5e-324, "5e-324", 0.099, 3600.001):
        assert refused_one("lease", "ttl_seconds", value) == "ttl_seconds must be a number from 0.1 to 3600"
    for zero in (0, 0.0, -0.0, "0", "0.0"):
        assert str(one("lease", "wait_seconds", zero)) == "0.0"


@pytest.mark.parametrize(
    ("text", "number"), [("60", 60.0), ("6e1", 60.0), ("6E+1", 60.0), (".5", 0.5), ("60.", 60.0), ("0.250", 0.25)]
)
def test_decimal_strings_are_numbers(text: str, number: float) -> None:
    assert one("lease", "ttl_seconds", text) == number


@pytest.mark.parametrize(("operation", "name", "low", "high"), INTEGERS)
def test_bounds_of_integers_are_inclusive(operation: str, name: str, low: int, high: int) -> None:
    for bound in (low, high):
        for form in (bound, str(bound)):
            parsed = one(operation, name, form)
            assert parsed == bound
            assert type(parsed) is int
    assert type(one(operation, name, float(low))) is int
    for outside in (
        low - 1,
        high + 1,
        float(high) + 1.0,
        str(high + 1),
        low + 0.5 if low < 2**52 else 0.5,
        f"0{high}",
        f"{high}.0",
        f"+{high}",
    ):
        assert refused_one(operation, name, outside) == f"{name} must be an integer from {low} to {high}"


# Text

TEXTS = [
    ("lease", "key", 1024),
    ("check", "key", 1024),
    ("watch", "key", 1024),
    ("lease", "holder", 256),
    ("lease", "scope", 256),
    ("resume_packet", "scope", 256),
    ("revoke", "reason", 256),
    ("revoke", "namespace", 128),
    ("heartbeat", "agent_id", 256),
    ("info", "agent_key", 256),
]


@pytest.mark.parametrize(("operation", "name", "high"), TEXTS)
def test_text_is_measured_in_bytes_of_utf8(operation: str, name: str, high: int) -> None:
    for fits in ("x", "x" * high, "é" * (high // 2), "𝄞" * (high // 4)):
        assert one(operation, name, fits) == fits
    for outside in ("", "x" * (high + 1), "é" * (high // 2) + "x", "𝄞" * (high // 4) + "x"):
        assert refused_one(operation, name, outside) == f"{name} must be valid UTF-8 from 1 to {high} bytes"
    for other in (0, 1, True, 1.5, [], {}, ["x"]):
        assert refused_one(operation, name, other) == f"{name} must be a string from 1 to {high} bytes of UTF-8"
    assert refused_one(operation, name, b"x") == f"{name} must be a string (MessagePack str, UTF-8), not binary"
    for surrogate in ("\ud800", "x\udfff", "\udcff" * 10):
        refused_one(operation, name, surrogate)


@pytest.mark.parametrize(
    "key",
    [
        "x" * 511,
        "x" * 512,
        "a/",
        "a//b",
        "../a",
        "a\0b",
        "\0",
        "\u00e9",
        "e\u0301",
        " a ",
        "\n",
        "\ufeffa",
        "A",
        "\U0010ffff",
        "\ufffe",
    ],
)
def test_keys_are_taken_as_they_are(key: str) -> None:
    assert one("lease", "key", key) == key


def test_keys_that_look_alike_stay_apart() -> None:
    assert one("lease", "key", "\u00e9") != one("lease", "key", "e\u0301")


# The other kinds


def test_request_id_is_text_or_binary_and_becomes_bytes() -> None:
    for given, carried in (
        ("r" * 22, b"r" * 22),
        (b"\0" * 128, b"\0" * 128),
        ("é" * 11, "é".encode() * 11),
        ("x" * 128, b"x" * 128),
    ):
        assert one("lease", "request_id", given) == carried
    for outside in ("", "x" * 21, "x" * 129, "é" * 65, b"x" * 21, b"x" * 129, "\udcff" * 22, 10**30, [b"x" * 22], True):
        assert refused_one("lease", "request_id", outside).endswith("from 22 to 128 bytes")


def test_bind_counts_in_the_names_of_the_model() -> None:
    assert [one("lease", "bind", name) for name in ("none", "process", "connection")] == [0, 1, 2]
    for other in ("", "None", "pid", 0, 1, True, b"none", ["none"], {}):
        assert refused_one("lease", "bind", other) == "bind must be one of none, process, connection"


@pytest.mark.parametrize(("operation", "name"), [("list", "all"), ("heartbeat", "disarm")])
def test_only_booleans_are_flags(operation: str, name: str) -> None:
    assert one(operation, name, True) is True
    assert one(operation, name, False) is False
    for other in (0, 1, 1.0, "true", "false", "", [], b"true"):
        assert refused_one(operation, name, other) == f"{name} must be true or false"


def test_key_hash_is_forty_hexadecimal_digits() -> None:
    for text in ("00" * 20, "aBcDef0123" * 4):
        assert one("revoke", "key_hash", text) == bytes.fromhex(text)
    for other in ("", "0" * 39, "0" * 41, "g" * 40, " " + "0" * 39, "00 " * 20, "０" * 40, b"0" * 40, 0, "0" * 40 + "\n"):
        assert refused_one("revoke", "key_hash", other) == "key_hash must be a string of 40 hexadecimal digits"


@pytest.mark.parametrize(
    ("instant", "seconds"),
    [
        ("1970-01-01T00:00:00Z", 0.0),
        ("2026-11-29T17:39:36.123Z", 1795973976.123),
        ("2026-11-29t17:39:36z", 1795973976.0),
        ("2026-11-29T19:39:36+02:00", 1795973976.0),
        ("2026-11-29T17:39:36.1234567891Z", 1795973976.123456),
        ("9999-12-31T23:59:59Z", 253402300799.0),
        (1795973976, 1795973976.0),
        ("1795973976.5", 1795973976.5),
    ],
)
def test_since_is_an_instant(instant: Any, seconds: float) -> None:
    assert one("usage", "since", instant) == pytest.approx(seconds, abs=1e-6)


@pytest.mark.parametrize(
    "instant",
    [
        "2026-11-29",
        "2026-11-29T17:39:36Z\n",
        "2026-11-29T17:39:36",
        "2026-11-29 17:39:36Z",
        "20261129T173936Z",
        "2026-W48-7",
        "2026-02-30T00:00:00Z",
        "2026-11-29T17:39:60Z",
        "2026-11-29T24:39:00Z",
        "2026-11-29T17:39:36+24:00",
        "1969-12-31T23:59:59Z",
        "1970-01-01T00:00:00+00:01",
        "9999-12-31T23:59:59-00:01",
        "0000-01-01T00:00:00Z",
        "yesterday",
    ],
)
def test_what_is_no_instant_is_refused(instant: str) -> None:
    assert refused_one("usage", "since", instant) == (
        "since must be an RFC 3339 instant, or a number of seconds since 1970 from 0 to 253402300799"
    )
