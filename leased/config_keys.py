"""The keys of the configuration, their bounds and their defaults, as frozen values.

A field made by `_by` is a key of the file.  The defaults are the product's; what depends on the environment is added by config.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import Field, dataclass, field, fields
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from leased import config_values as values
from leased.config_values import Address, Reader, absolute_path, amount, boolean, integer, list_of, one_of, seconds

MAX_LEASES: Final = 10_000_000


def _by(read: Reader, *, secret: bool = False, show: Callable[[object], str] = values.shown) -> dict[str, Any]:
    """How a key is read and shown.  `secret`: a credential may have been put there by mistake, and is not repeated."""
    return {"read": read, "secret": secret, "show": show}


@dataclass(frozen=True, slots=True)
class Http:
    """[http]: where to listen on TCP besides the socket; empty: nowhere."""

    listen: tuple[Address, ...] = field(default=(), metadata=_by(list_of(values.tcp_address)))


@dataclass(frozen=True, slots=True)
class Namespaces:
    """[namespaces]: which namespace a caller without an agent key is in.

    `per_uid`: each uid in `uid:<uid>`.  `uids` and `gids` are the "uid:N" and "gid:N" entries; none of them is the overflow id.
    """

    per_uid: bool = field(default=False, metadata=_by(boolean))
    uids: Mapping[int, str] = field(default_factory=lambda: MappingProxyType({}))
    gids: Mapping[int, str] = field(default_factory=lambda: MappingProxyType({}))


@dataclass(frozen=True, slots=True)
class Limits:
    """[limits]: what one caller, one namespace and all together may use.  Each bounds memory or descriptors that callers cause.

    A part is never above its whole (per uid and connections, per key and namespace): unless given it follows the whole down.
    """

    max_connections: int = field(default=1024, metadata=_by(integer(1, 100_000)))  # a descriptor each, two more with a bound holder
    max_connections_per_uid: int = field(default=256, metadata=_by(integer(1, 100_000)))
    max_leases_per_namespace: int = field(default=100_000, metadata=_by(integer(1, MAX_LEASES)))  # unless given, max_leases
    max_waiters_per_namespace: int = field(default=10_000, metadata=_by(integer(0, 1_000_000)))  # 0: nobody may wait
    max_waiters_per_key: int = field(default=1_000, metadata=_by(integer(0, 1_000_000)))
    max_waiters_per_connection: int = field(default=256, metadata=_by(integer(0, 1_000_000)))
    max_spent_request_ids: int = field(
        default=200_000, metadata=_by(integer(1_000, 100_000_000))
    )  # 100 bytes of the map each, for a ttl
    max_watchers_per_uid: int = field(default=64, metadata=_by(integer(0, 10_000)))
    max_switches_per_namespace: int = field(default=10_000, metadata=_by(integer(1, 1_000_000)))  # a durable record each
    max_billed_once_records: int = field(default=1_000_000, metadata=_by(integer(1_000, 100_000_000)))  # 100 bytes of memory each
    message_seconds: float = field(default=10.0, metadata=_by(seconds(0.1, 300)))  # how long a message may stay unfinished
    requests_per_second_per_uid: int = field(default=0, metadata=_by(integer(0, 1_000_000)))  # 0: unlimited


class LimitsInForce(Limits):
    """The one object that all parts of a running daemon look at: a reload changes it in place, so that no part need be told."""

    __slots__ = ()

    def become(self, limits: Limits) -> None:
        for each in fields(limits):
            object.__setattr__(self, each.name, getattr(limits, each.name))


def in_force(limits: Limits) -> LimitsInForce:
    return LimitsInForce(**{each.name: getattr(limits, each.name) for each in fields(limits)})


@dataclass(frozen=True, slots=True)
class Billing:
    """[billing]: the tariff, in integer micro-units of `currency`."""

    enabled: bool = field(default=False, metadata=_by(boolean))
    currency: str = field(default="USDC", metadata=_by(values.CURRENCY))
    refusal: int = field(default=2_000, metadata=_by(amount(1_000), show=values.shown_amount))
    agent_lock_call: int = field(default=1_000, metadata=_by(amount(1_000), show=values.shown_amount))
    outbox_max_events: int = field(default=1_000_000, metadata=_by(integer(1, 100_000_000)))


@dataclass(frozen=True, slots=True)
class Upstream:
    """[upstream]: where billing events are shipped; without `url` nothing is shipped."""

    url: str | None = field(default=None, metadata=_by(values.upstream_url, secret=True, show=values.shown_url))
    token_file: Path | None = field(default=None, metadata=_by(values.secret_path, secret=True))
    batch_events: int = field(default=100, metadata=_by(integer(1, 100)))
    timeout_seconds: float = field(default=10.0, metadata=_by(seconds(0.1, 300)))
    proxy: str | None = field(default=None, metadata=_by(values.PROXY, secret=True))
    ca_file: Path | None = field(default=None, metadata=_by(absolute_path))


@dataclass(frozen=True, slots=True)
class X402:
    """[x402]: the wallet that pays upstream, and all it may do; amounts are micro-units of the asset.  No wallet: no payment."""

    wallet_key_file: Path | None = field(default=None, metadata=_by(values.secret_path, secret=True))
    networks: tuple[str, ...] = field(default=(), metadata=_by(list_of(values.NETWORK)))
    assets: tuple[str, ...] = field(default=(), metadata=_by(list_of(values.account)))
    payees: tuple[str, ...] = field(default=(), metadata=_by(list_of(values.account)))
    max_per_batch: int = field(default=0, metadata=_by(amount(1_000_000), show=values.shown_amount))
    max_per_day: int = field(default=0, metadata=_by(amount(1_000_000), show=values.shown_amount))


@dataclass(frozen=True, slots=True)
class Log:
    """[log]: from which level on, and how a line looks ("auto" looks at where it goes)."""

    level: str = field(default="info", metadata=_by(one_of("debug", "info", "warning", "error")))
    format: str = field(default="auto", metadata=_by(one_of("auto", "console", "json")))


@dataclass(frozen=True, slots=True)
class Config:
    """All of it.  Durations are seconds, amounts micro-units, modes numbers; `source` is the file, for messages.

    `socket_mode` unless given: 0660 with a `socket_group`, else 0600: nobody is let in whom the file does not name.
    """

    source: str
    socket: Path = field(metadata=_by(values.socket_path))
    state_dir: Path = field(metadata=_by(absolute_path))
    runtime_dir: Path = field(metadata=_by(absolute_path))
    socket_mode: int = field(default=0o600, metadata=_by(values.socket_mode, show=values.shown_mode))
    socket_group: str | None = field(default=None, metadata=_by(values.GROUP))
    wait_out_seconds: float = field(default=60.0, metadata=_by(seconds(0, 3600)))
    operator_group: str | None = field(default=None, metadata=_by(values.GROUP))
    max_leases: int = field(default=100_000, metadata=_by(integer(1, MAX_LEASES)))
    http: Http = Http()
    namespaces: Namespaces = Namespaces()
    limits: Limits = Limits()
    billing: Billing = Billing()
    upstream: Upstream = Upstream()
    x402: X402 = X402()
    log: Log = Log()


TABLES: Final[Mapping[str, type[Any]]] = MappingProxyType(
    {"http": Http, "namespaces": Namespaces, "limits": Limits, "billing": Billing, "upstream": Upstream, "x402": X402, "log": Log}
)


def _keys() -> Iterator[tuple[str, Field[Any]]]:
    for prefix, table in (("", Config), *((f"{name}.", table) for name, table in TABLES.items())):
        yield from ((prefix + each.name, each) for each in fields(table) if "read" in each.metadata)


KEYS: Final[Mapping[str, Field[Any]]] = MappingProxyType(dict(_keys()))
"""Every key of the file by its dotted name, but for the "uid:N" and "gid:N" entries of [namespaces]."""
