"""What a field may hold: for each kind of field one checker (wire value to model value) and one JSON Schema shape.

A checker returns the model's value or raises PeerError `invalid_argument`, whose text begins with the field's name and says what is
accepted.  It never repeats the value given, which may be a credential; nor is the error chained to one that carries the value.
Checkers compare exact types: bool is an int to isinstance, and must not pass for the number 1.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Any, Final, Literal, NamedTuple

from leased import model
from leased.errors import PeerError, invalid

Kind = Literal["text", "secret", "number", "integer", "decimal", "choice", "flag", "hash", "instant"]
Check = Callable[[Any], Any]

MAX_NUMBER_CHARACTERS: Final = 40  # no number within any bound needs more, and none should cost time to read
MAX_INSTANT: Final = 253402300799  # 9999-12-31T23:59:59Z, the last second RFC 3339 can write
HASH_BYTES: Final = 20
MAX_AGENT_KEY_BYTES: Final = 256

_DECIMAL = re.compile(r"(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?")
_HASH = re.compile(rf"[0-9A-Fa-f]{{{2 * HASH_BYTES}}}")
_INSTANT = re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}[Tt][0-9]{2}:[0-9]{2}:[0-9]{2}(?:\.[0-9]+)?(?:[Zz]|[+-][0-9]{2}:[0-9]{2})")


class Field(NamedTuple):
    """One field of one operation.

    `low` and `high` are inclusive: UTF-8 bytes for `text` and `secret`, otherwise the number's own unit (the name ends in it).
    `attribute` is the name in the model's tuple.  `default` is as on the wire; None: absent means none.
    """

    name: str
    kind: Kind
    description: str
    low: int | float = 0
    high: int | float = 0
    choices: tuple[str, ...] = ()
    attribute: str = ""
    default: Any = None
    required: bool = False


def checker(field: Field) -> Check:
    """The function that turns a value from the wire (never None) into the model's value, or raises PeerError `invalid_argument`."""
    return _CHECKERS[field.kind](field)


def plain(number: int | float) -> int | float:
    """A bound as people write it: 3600, not 3600.0."""
    return int(number) if number == int(number) else number


def _utf8_bytes(text: str) -> int:
    """The size in UTF-8; -1 when it has none (a lone surrogate)."""
    try:
        return len(text.encode())
    except UnicodeEncodeError:
        return -1


def _text(field: Field) -> Check:
    name, low, high = field.name, int(field.low), int(field.high)

    def check(value: Any) -> str:
        if type(value) is str:
            if low <= len(value) <= high and value.isascii():
                return value  # measured without being encoded
            if len(value) <= high and low <= _utf8_bytes(value) <= high:
                return value
            raise invalid(name, f"must be valid UTF-8 from {low} to {high} bytes")
        if type(value) is bytes:
            raise invalid(name, "must be a string (MessagePack str, UTF-8), not binary")
        raise invalid(name, f"must be a string from {low} to {high} bytes of UTF-8")

    return check


def _secret(field: Field) -> Check:
    """Text or MessagePack bin, carried as bytes."""
    name, low, high = field.name, int(field.low), int(field.high)

    def check(value: Any) -> bytes:
        if type(value) is str and len(value) <= high and low <= _utf8_bytes(value) <= high:
            return value.encode()
        if type(value) is bytes and low <= len(value) <= high:
            return value
        raise invalid(name, f"must be a string (UTF-8) or binary from {low} to {high} bytes")

    return check


def _number(field: Field) -> Check:
    """Finite floats.  Comparing comes before converting: an int of 400 digits compares, but does not convert."""
    name, low, high = field.name, field.low, field.high
    refusal = f"must be a number from {plain(low)} to {plain(high)}"

    def check(value: Any) -> float:
        kind = type(value)
        if kind is str and len(value) <= MAX_NUMBER_CHARACTERS and _DECIMAL.fullmatch(value):
            value = float(value)
            kind = float
        if (kind is int or kind is float) and low <= value <= high:  # NaN compares false
            return value + 0.0  # type: ignore[no-any-return]  # makes an int a float, and -0.0 a 0.0
        raise invalid(name, refusal)

    return check


def _integer(field: Field) -> Check:
    """Integers, integral floats (JSON Schema counts 1000.0 as an integer), and digits without a sign or zeros ahead."""
    name, low, high = field.name, int(field.low), int(field.high)
    refusal = f"must be an integer from {low} to {high}"

    def check(value: Any) -> int:
        kind = type(value)
        if kind is str and len(value) <= MAX_NUMBER_CHARACTERS and value.isascii() and value.isdigit():
            if value[0] != "0" or len(value) == 1:
                value = int(value)
                kind = int
        elif kind is float and value.is_integer():
            value = int(value)
            kind = int
        if kind is int and low <= value <= high:
            return value  # type: ignore[no-any-return]
        raise invalid(name, refusal)

    return check


def _choice(field: Field) -> Check:
    """The position in `choices`: what the model counts in."""
    name = field.name
    positions = {choice: position for position, choice in enumerate(field.choices)}
    refusal = f"must be one of {', '.join(field.choices)}"

    def check(value: Any) -> int:
        position = positions.get(value) if type(value) is str else None
        if position is None:
            raise invalid(name, refusal)
        return position

    return check


def _flag(field: Field) -> Check:
    name = field.name

    def check(value: Any) -> bool:
        if value is True or value is False:
            return value
        raise invalid(name, "must be true or false")

    return check


def _hash(field: Field) -> Check:
    name = field.name

    def check(value: Any) -> bytes:
        if type(value) is str and _HASH.fullmatch(value):
            return bytes.fromhex(value)
        raise invalid(name, f"must be a string of {2 * HASH_BYTES} hexadecimal digits")

    return check


def _instant(field: Field) -> Check:
    """Wall-clock seconds since 1970.  A leap second (:60) has none, and is refused."""
    name = field.name
    number = _number(field)

    def check(value: Any) -> float:
        if type(value) is str and len(value) <= MAX_NUMBER_CHARACTERS and _INSTANT.fullmatch(value):
            value = _seconds_since_1970(value)
        try:
            return number(value)  # type: ignore[no-any-return]
        except PeerError:
            pass
        raise invalid(name, f"must be an RFC 3339 instant, or a number of seconds since 1970 from 0 to {MAX_INSTANT}")

    return check


def _seconds_since_1970(text: str) -> float | None:
    """None for a date or an offset that does not exist."""
    from datetime import datetime  # only `usage` needs it, and every command starts by importing this module

    try:
        return datetime.fromisoformat(text.upper()).timestamp()
    except ValueError:
        return None


_CHECKERS: Final[dict[Kind, Callable[[Field], Check]]] = {
    "text": _text,
    "secret": _secret,
    "number": _number,
    "integer": _integer,
    "decimal": _integer,
    "choice": _choice,
    "flag": _flag,
    "hash": _hash,
    "instant": _instant,
}


def shape(field: Field, *, exact: bool) -> dict[str, Any]:
    """The JSON Schema of one field; see `schema.json_schema` for `exact`.

    It differs from the checker where JSON Schema cannot say it or models need not know: lengths count characters where the bounds
    count bytes, the pattern of a `decimal` shows its form but not its range, and numbers written as strings are not announced.
    """
    kind, low, high = field.kind, plain(field.low), plain(field.high)
    bounds = {"minimum": low, "maximum": high}
    note = ""
    rest: dict[str, Any] = {}
    if kind in ("text", "secret"):
        types, rest = ["string"], {"minLength": low, "maxLength": high}
        note = f" {low} to {high} bytes of UTF-8."
    elif kind in ("number", "integer"):
        types, rest = [kind], bounds
    elif kind == "decimal":  # a string, since readers of JSON round integers from 2^53 up
        types, rest = ["string"], {"pattern": "^(0|[1-9][0-9]*)$", "maxLength": len(str(high))}
        note = f" A decimal number from {low} to {high}, as a string."
    elif kind == "choice":
        types, rest = ["string"], {"enum": list(field.choices)}
    elif kind == "flag":
        types = ["boolean"]
    elif kind == "hash":
        types, rest = ["string"], {"pattern": f"^{_HASH.pattern}$"}
    else:
        types, rest = ["string"], {"format": "date-time"}
    if exact:
        if kind in ("decimal", "instant"):
            types.append("integer" if kind == "decimal" else "number")
            rest |= bounds
        if not field.required:
            types.append("null")
            if kind == "choice":
                rest["enum"].append(None)
    if field.default is not None:
        rest["default"] = field.default
    return {"type": types[0] if len(types) == 1 else types, "description": field.description + note, **rest}


_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_-]{0,31}")


def named(name: object) -> str:
    """A field's or operation's name as an error may repeat it: short and plain, so no fence, and nothing that breaks a log line."""
    return name if isinstance(name, str) and _NAME.fullmatch(name) else "(a name that is not plain text)"


def suggestion(name: object, known: Iterable[str]) -> str:
    """ " (did you mean ...?)" where a known name is near, else nothing."""
    if not (isinstance(name, str) and _NAME.fullmatch(name)):
        return ""
    from difflib import get_close_matches  # milliseconds to import, and only mistakes need it

    nearest = get_close_matches(name.lower(), known, n=1)
    return f" (did you mean {nearest[0]}?)" if nearest else ""


KEY: Final = Field(
    "key",
    "text",
    "The name of the resource, exactly as all who contend for it write it: compared byte for byte, never trimmed or normalised.",
    1,
    model.MAX_KEY_BYTES,
)
HOLDER: Final = Field(
    "holder",
    "text",
    "The label of the asking instance, unique to it while it lives. Others see it; it proves nothing.",
    1,
    model.MAX_HOLDER_BYTES,
)
FENCE: Final = Field(
    "fence",
    "decimal",
    "SECRET: the fence from the reply to your own grant; it alone proves that the lease is yours. Never print, log or share it.",
    model.MIN_FENCE,
    model.MAX_FENCE,
)
TTL: Final = Field(
    "ttl_seconds",
    "number",
    f"How long it lasts, in seconds from now; left out, {plain(model.DEFAULT_TTL_SECONDS)}, or for a renewal the lease's own.",
    model.MIN_TTL_SECONDS,
    model.MAX_TTL_SECONDS,
    attribute="ttl",
)
SCOPE: Final = Field(
    "scope", "text", "The unit of work (a task, a run) that leases are recorded against.", 1, model.MAX_SCOPE_BYTES
)
AGENT_KEY: Final = Field(
    "agent_key",
    "text",
    "SECRET: the key of an agent, which puts the call into that agent's namespace. Not needed on the Unix socket.",
    1,
    MAX_AGENT_KEY_BYTES,
)
