"""One value of the configuration: read and bounded, and shown again as the file would say it.

A reader takes a TOML value and returns the checked one.  It raises `Wrong` with the end of a sentence that begins with the key and
what was found, so that every message has the bound and the remedy in it.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, NamedTuple

MAX_SOCKET_PATH_BYTES: Final = 107  # sun_path holds 108 bytes, the last one NUL
MAX_NAMESPACE_BYTES: Final = 128
MAX_FOUND_CHARACTERS: Final = 80  # of a wrong value, in an error: enough to find it again
MICRO: Final = 1_000_000

Reader = Callable[[object], Any]


class Wrong(Exception):
    """What a value must be, as the end of a sentence."""


def text(must: str, pattern: str = r".+", longest: int = 4096) -> Reader:
    """A string of 1 to `longest` UTF-8 bytes without control characters that matches `pattern` as a whole."""

    def read(value: object) -> str:
        if isinstance(value, str) and value.isprintable() and re.fullmatch(pattern, value) and len(value.encode()) <= longest:
            return value
        raise Wrong(must)

    return read


def boolean(value: object) -> bool:
    if not isinstance(value, bool):
        raise Wrong("must be true or false, without quotes")
    return value


def integer(low: int, high: int) -> Reader:
    def read(value: object) -> int:
        if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
            raise Wrong(f"must be an integer from {low} to {high}, without quotes")
        return value

    return read


def seconds(low: float, high: float) -> Reader:
    def read(value: object) -> float:
        if not isinstance(value, int | float) or isinstance(value, bool) or not low <= value <= high:  # NaN fails the comparison
            raise Wrong(f"must be a number of seconds from {low:g} to {high:g}, without quotes")
        return float(value)

    return read


def one_of(*choices: str) -> Reader:
    def read(value: object) -> str:
        if not isinstance(value, str) or value not in choices:
            raise Wrong("must be one of " + ", ".join(f'"{choice}"' for choice in choices))
        return value

    return read


def absolute_path(value: object) -> Path:
    if not isinstance(value, str) or not value.startswith("/") or not value.isprintable():
        raise Wrong('must be an absolute path in quotes, beginning with "/" ("~" and $VARIABLES are not expanded)')
    return Path(value)


CREDENTIAL: Final = "credential:"


def secret_path(value: object) -> Path:
    """A path, or the name of a credential that systemd hands to the service: "credential:NAME" stays as it is (see `config.secret_file`)."""
    if isinstance(value, str) and re.fullmatch(CREDENTIAL + r"[A-Za-z0-9_][A-Za-z0-9._-]{0,100}", value):
        return Path(value)
    try:
        return absolute_path(value)
    except Wrong:
        raise Wrong(
            'must be an absolute path in quotes, beginning with "/", or "credential:NAME" where the unit has LoadCredential=NAME:PATH'
        ) from None


def socket_path(value: object) -> Path:
    path = absolute_path(value)
    if (size := len(str(path).encode())) > MAX_SOCKET_PATH_BYTES:
        raise Wrong(f"has {size} bytes and must have at most {MAX_SOCKET_PATH_BYTES}, the kernel's limit: choose a shorter path")
    return path


def socket_mode(value: object) -> int:
    if not isinstance(value, str) or not re.fullmatch(r"0?6[0246]{2}", value):
        raise Wrong('must be an octal mode in quotes such as "0660": 6 for the owner, then 0, 2, 4 or 6 (connecting needs the 2)')
    return int(value, 8)


def amount(highest: int) -> Reader:
    """A decimal string as integer micro-units; a float would already have been rounded."""

    def read(value: object) -> int:
        match = re.fullmatch(r"(0|[1-9][0-9]{0,9})(?:\.([0-9]{1,6}))?", value) if isinstance(value, str) else None
        micro = int(match[1]) * MICRO + int((match[2] or "").ljust(6, "0")) if match else -1
        if not 0 <= micro <= highest * MICRO:
            raise Wrong(f'must be a decimal number in quotes from "0" to "{highest}" with at most 6 decimals, such as "0.002"')
        return micro

    return read


def list_of(read_one: Reader) -> Reader:
    """A list, or a single value as a list of one.  No entry may be there twice."""

    def read(value: object) -> tuple[Any, ...]:
        entries = tuple(read_one(entry) for entry in (value if isinstance(value, list) else [value]))
        if len(set(entries)) < len(entries):
            raise Wrong("must not name the same entry twice")
        return entries

    return read


class Address(NamedTuple):
    """A TCP address to listen at: a literal IP address, and a port (0: the kernel chooses)."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def tcp_address(value: object) -> Address:
    """ADDR:PORT, [ADDR]:PORT, or a port alone, which is one of loopback: the world is let in only by name."""
    from ipaddress import IPv4Address, IPv6Address

    match = re.fullmatch(r"(?:(?:\[([^]%]+)\]|([^][:]+)):)?([0-9]{1,5})", value) if isinstance(value, str) else None
    try:
        if match is None or int(match[3]) > 65535:
            raise ValueError
        host = str(IPv6Address(match[1]) if match[1] else IPv4Address("127.0.0.1" if match[2] in (None, "localhost") else match[2]))
    except ValueError:
        raise Wrong('must be "ADDR:PORT" in quotes with an IP address, such as "127.0.0.1:8765" or "[::1]:8765"') from None
    return Address(host, int(match[3]))


def upstream_url(value: object) -> str:
    """https, or http to this host only: a bearer credential goes with every request."""
    from urllib.parse import urlsplit

    if not isinstance(value, str) or not re.fullmatch(r"https?://[!-~]+", value) or "#" in value:
        raise Wrong('must be a URL such as "https://billing.example.com/events"')
    try:
        parts = urlsplit(value)
        host, port = parts.hostname, parts.port
    except ValueError:
        host, port = None, None
    if not host or port == 0:
        raise Wrong('must name a host, and a port from 1 to 65535 if any, such as "https://billing.example.com/events"')
    if "@" in parts.netloc:
        raise Wrong("must not contain a user or password: the bearer credential belongs in upstream.token_file")
    if parts.scheme == "http" and not re.fullmatch(r"localhost|::1|127(\.[0-9]{1,3}){3}", host):
        raise Wrong("must begin with https:// (http:// is for this host only): the credential could be read on the way")
    return value


PROXY: Final = text(
    'must be "http://HOST:PORT" without a user or password (https goes through it by CONNECT)',
    r"http://(?:\[[0-9a-fA-F:.]+\]|[A-Za-z0-9.-]+):[1-9][0-9]{0,4}/?",
)
GROUP: Final = text("must be the name or the number of a group in quotes", r"[^\s:/,]+", 256)
CURRENCY: Final = text('must be 1 to 16 capital letters or digits in quotes, such as "USDC"', r"[A-Z0-9]{1,16}")
NETWORK: Final = text('must be chains by their CAIP-2 names in quotes, such as "eip155:8453"', r"eip155:[1-9][0-9]{0,19}")
NAMESPACE: Final = text(
    f'must be a namespace in quotes: 1 to {MAX_NAMESPACE_BYTES} bytes, printable, not beginning with "uid:"',
    r"(?!uid:).+",
    MAX_NAMESPACE_BYTES,
)
_ACCOUNT: Final = text('must be EVM addresses in quotes: "0x" and 40 hexadecimal digits', r"0x[0-9a-fA-F]{40}")


def account(value: object) -> str:
    """An EVM address, in lower case so that addresses compare as text."""
    return str(_ACCOUNT(value)).lower()


def amount_text(micro: int) -> str:
    """Integer micro-units (0 or more) as the shortest decimal string: 2000 is "0.002"."""
    whole, rest = divmod(micro, MICRO)
    return f"{whole}.{rest:06d}".rstrip("0").rstrip(".")


def shown(value: object) -> str:
    """A value as the file would say it, wrong ones included: on one line, without control characters."""
    match value:
        case None:
            return "(none)"
        case bool():
            return "true" if value else "false"
        case float():
            return f"{value:g}" if value == float(f"{value:g}") else repr(value)
        case int():
            return str(value) if abs(value) < 10**20 else "(a huge integer)"
        case dict():
            return "(a table)"
        case list() | tuple() if not isinstance(value, Address):
            return "[" + ", ".join(shown(entry) for entry in value) + "]"
        case str() | Path() | Address():
            return '"' + "".join(map(_escaped, str(value))) + '"'
        case _:  # the dates and times of TOML
            return str(value)


def _escaped(character: str) -> str:
    if character in '"\\':
        return "\\" + character
    return character if character.isprintable() else f"\\U{ord(character):08X}"


def found(value: object, *, secret: bool) -> str:
    """A wrong value for an error: cut to size; a `secret` one by its kind only."""
    if secret:
        return f"(a string of {len(value)} characters, not repeated here)" if isinstance(value, str) else "(not a string)"
    whole = shown(value)
    return whole if len(whole) <= MAX_FOUND_CHARACTERS else whole[:MAX_FOUND_CHARACTERS] + "…"


def shown_amount(micro: object) -> str:
    """As a decimal string in quotes."""
    return shown(amount_text(micro)) if isinstance(micro, int) else shown(micro)


def shown_mode(mode: object) -> str:
    """As an octal string in quotes."""
    return f'"{mode:04o}"' if isinstance(mode, int) else shown(mode)


def shown_url(url: object) -> str:
    """Without the query: it may carry a credential, and what `check-config` prints is pasted into tickets."""
    return shown(url.partition("?")[0] + "?(withheld)") if isinstance(url, str) and "?" in url else shown(url)
