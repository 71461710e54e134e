"""SIGHUP: the configuration is read again, and what can change while the daemon runs is changed: all of it, or nothing.

Whatever can fail (the file, a group that must exist, a wallet, certificates) is tried in a thread before anything is touched; what is left
are assignments.  What a running daemon stands on keeps its value until the next start, and is named.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import structlog
import trio

from leased.config_keys import KEYS, TABLES, Config
from leased.errors import ConfigError
from leased.peers import Policy
from leased.tariff import Tariff

if TYPE_CHECKING:
    from leased.daemon import Daemon
    from leased.payer import Signer
    from leased.upstream_http import Poster

log = structlog.get_logger()

STANDS_ON: Final = frozenset(
    {"socket", "state_dir", "runtime_dir", "socket_mode", "socket_group", "wait_out_seconds", "max_leases", "http.listen"}
)
"""Paths, sockets, the size of the map, and what the ledger says is waited out: only a start can change them."""

ON_OR_OFF: Final = ("upstream.url", "x402.wallet_key_file")
"""May change, but a start alone brings what was not there before, or takes it away; until then their tables stay whole."""


class Change(NamedTuple):
    """What a new configuration comes to.  `config` is what will be in force; `changed` and `postponed` are names of keys."""

    config: Config
    changed: list[str]
    postponed: list[str]


def change_to(old: Config, new: Config) -> Change:
    """Pure.  Keys that need a start keep their old value."""
    different = [name for name in KEYS if _value(old, name) != _value(new, name)]
    postponed = [name for name in different if name in STANDS_ON]
    for name in ON_OR_OFF:
        if name in different and None in {_value(old, name), _value(new, name)}:
            postponed += [each for each in different if each.partition(".")[0] == name.partition(".")[0]]
    kept = new
    for name in postponed:
        kept = _with(kept, name, _value(old, name))
    changed = [name for name in different if name not in postponed]
    for kind, before, after in (
        ("uid", old.namespaces.uids, new.namespaces.uids),
        ("gid", old.namespaces.gids, new.namespaces.gids),
    ):
        changed += [f"namespaces.{kind}:{each}" for each in sorted({*before, *after}) if before.get(each) != after.get(each)]
    return Change(kept, changed, postponed)


def _value(config: Config, name: str) -> Any:
    table, _, key = name.rpartition(".")
    return getattr(getattr(config, table) if table else config, key)


def _with(config: Config, name: str, value: Any) -> Config:
    table, _, key = name.rpartition(".")
    if table in TABLES:
        return dataclasses.replace(config, **{table: dataclasses.replace(getattr(config, table), **{key: value})})
    return dataclasses.replace(config, **{key: value})


def policy_of(config: Config) -> Policy:
    """Raises ConfigError for a group that does not exist."""
    spaces = config.namespaces
    return Policy(by_uid=spaces.uids, by_gid=spaces.gids, per_uid=spaces.per_uid, operator_group=config.operator_group)


def tariff_of(config: Config) -> Tariff:
    billing = config.billing
    return Tariff(billing.enabled, billing.currency, billing.refusal, billing.agent_lock_call)


class Ready(NamedTuple):
    """All that could have failed, done.  None where nothing of that kind runs, or where it stays as it is."""

    change: Change
    policy: Policy
    poster: Poster | None
    wallet: Signer | None


class Reloader:
    """`read` gives the configuration anew (and raises ConfigError); `speak` makes the log follow [log]."""

    def __init__(self, daemon: Daemon, read: Callable[[], Config], speak: Callable[[Config], object]) -> None:
        self._daemon = daemon
        self._read = read
        self._speak = speak

    async def reload(self) -> bool:
        """True when the new configuration is in force.  Never raises but Cancelled, which leaves the old one whole, or the new one."""
        try:
            ready = await trio.to_thread.run_sync(self._prepare)
        except ConfigError as error:
            for line in str(error).splitlines():
                log.error("config.refused", error=line)
            return False
        except Exception:
            log.exception("config.refused", error="a fault of the daemon itself")
            return False
        self._apply(ready)
        return True

    def _prepare(self) -> Ready:
        """In a thread: files are read, groups looked up.  Raises ConfigError."""
        daemon = self._daemon
        change = change_to(daemon.config, self._read())
        poster: Poster | None = None
        wallet: Signer | None = None
        if daemon.shipper is not None:
            if change.config.upstream != daemon.config.upstream:
                from leased.upstream_http import Poster

                poster = Poster(change.config.upstream, daemon.clock)
            if daemon.shipper.payer is not None and change.config.x402.wallet_key_file is not None:
                from leased.wallet import Wallet

                wallet = Wallet(change.config.x402.wallet_key_file)  # also when only the file's content is another
        return Ready(change, policy_of(change.config), poster, wallet)

    def _apply(self, ready: Ready) -> None:
        """Nothing here can fail, and no decision falls in between."""
        daemon, config = self._daemon, ready.change.config
        daemon.limits.become(config.limits)
        daemon.board.relimit()
        daemon.policy.become(ready.policy)
        daemon.switches.max_per_namespace = config.limits.max_switches_per_namespace
        daemon.watchers.max_per_uid = config.limits.max_watchers_per_uid
        daemon.billing.change(
            tariff_of(config), max_waiting=config.billing.outbox_max_events, max_once=config.limits.max_billed_once_records
        )
        if daemon.shipper is not None:
            if ready.wallet is not None and daemon.shipper.payer is not None:
                daemon.shipper.payer.change(config.x402, ready.wallet)
            if ready.poster is not None:
                daemon.shipper.change(config.upstream, ready.poster.post)
            daemon.shipper.hurry()
        daemon.config = daemon.views.config = config
        if config.log.level in {"warning", "error"}:  # the last that is told below it
            log.info("config.reloaded", changed=ready.change.changed, needs_restart=ready.change.postponed)
            self._speak(config)
        else:
            self._speak(config)
            log.info("config.reloaded", changed=ready.change.changed, needs_restart=ready.change.postponed)
