"""What `lease top` shows: which leases in which order, and the table's text.  Drawing it again and again is top_screen.py's."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from leased.client import wording
from leased.client.shell import Arguments, Usage

if TYPE_CHECKING:
    from leased.client.sync import Client

COLUMNS: Final = ("KEY", "HOLDER", "GENERATION", "LEFT", "WAITING", "SCOPE", "BIND")
MOST_ROWS: Final = 200  # each asks the daemon who waits, and a page of `list` is all a terminal shows
_DEFAULT_EVERY_SECONDS: Final = 1.0
_LEAST_EVERY_SECONDS: Final = 0.2


class View:
    """What is to be shown: which leases, in which order, how many, how often."""

    def __init__(self, arguments: Arguments) -> None:
        self.scope, self.holder = arguments.text("--scope"), arguments.text("--holder")
        self.all = arguments.switch("--all")
        self.order = arguments.text("--sort") or "lapse"
        limit = arguments.whole("--limit")
        self.limit = MOST_ROWS if limit is None else limit
        if not 1 <= self.limit <= MOST_ROWS:
            raise Usage(f"--limit is 1 to {MOST_ROWS}")
        every = arguments.seconds("--every")
        self.every = _DEFAULT_EVERY_SECONDS if every is None else every
        if self.every < _LEAST_EVERY_SECONDS:
            raise Usage(f"--every is at least {_LEAST_EVERY_SECONDS:g}s: each look asks about every lease shown")


def look(client: Client, view: View) -> dict[str, Any]:
    """The daemon and its leases as they are now: `leases` as `list` has them with `waiting` added, in the order asked for.

    `total` counts all that match, `leases` has at most `view.limit`.  `waiting` is None where the key's text is not known, or is another
    namespace's.  Raises what `Client` raises.
    """
    told = client.info()
    leases = list(client.list(scope=view.scope, holder=view.holder, page=1000, all=view.all))
    total = len(leases)
    if view.order == "lapse":
        leases.sort(key=lambda lease: lease.get("expires_in_seconds") or 0.0)
    if view.order != "waiting":  # which keys are waited for can only be asked one by one
        leases = leases[: view.limit]
    for lease in leases[: max(view.limit, MOST_ROWS)]:
        own = lease.get("namespace", told.get("namespace")) == told.get("namespace")
        key = lease.get("key")
        checked = client.check(key, lease["generation"]) if own and key is not None and told.get("waiting") != 0 else None
        lease["waiting"] = checked.waiting if checked is not None else (0 if told.get("waiting") == 0 else None)
    if view.order == "waiting":
        leases.sort(key=lambda lease: -(lease.get("waiting") or 0))
        leases = leases[: view.limit]
    return {"daemon": told, "total": total, "leases": leases}


def heading(seen: dict[str, Any]) -> str:
    """One line about the daemon and its counts."""
    daemon = seen["daemon"]
    store = daemon.get("store") or {}
    parts = [
        f"leased {wording.shown(daemon.get('version'))}",
        f"namespace {wording.shown(daemon.get('namespace'))}",
        f"up {wording.lasting(daemon.get('uptime_seconds') or 0.0)}",
        f"{seen['total']} lease{'' if seen['total'] == 1 else 's'}",
    ]
    if daemon.get("waiting") is not None:
        parts.append(f"{daemon['waiting']} waiting")
    if store.get("state") not in {None, "ok"}:
        more = store.get("no_grant_for_seconds")
        parts.append(f"store {wording.shown(store['state'])}{f', no grant for {wording.lasting(more)}' if more else ''}")
    return "  ".join(parts)


def contention(before: dict[str, Any] | None, now: dict[str, Any], seconds: float) -> str:
    """What happened between two looks, by the daemon's counters; empty where it does not tell them."""
    new = now["daemon"].get("counts") or {}
    old = (before or {}).get("daemon", {}).get("counts") or {}
    if not old or not new or seconds <= 0:
        return ""
    rates = {
        name: max(0, new.get(name, 0) - old.get(name, 0)) / seconds
        for name in ("granted", "renewed", "released", "lapsed", "refused")
    }
    return "each second: " + ", ".join(f"{name} {rate:.1f}" for name, rate in rates.items())


def cells(lease: dict[str, Any]) -> tuple[str, ...]:
    """One lease as the table's columns."""
    key = lease.get("key")
    name = wording.shown(key) if key is not None else f"#{wording.shown(lease.get('key_hash'))}"
    if lease.get("namespace") is not None:
        name = f"{wording.shown(lease['namespace'])}/{name}"
    waiting = lease.get("waiting")
    return (
        name,
        wording.shown(lease.get("holder")),
        str(lease.get("generation")),
        wording.lasting(lease.get("expires_in_seconds") or 0.0),
        "?" if waiting is None else str(waiting) if waiting else "",
        wording.shown(lease.get("scope") or ""),
        "" if lease.get("bind") in {None, "none"} else wording.shown(lease["bind"]),
    )


def plain(seen: dict[str, Any]) -> list[str]:
    """The heading and the table as text, columns as wide as they have to be."""
    rows = [COLUMNS, *map(cells, seen["leases"])]
    widths = [max(len(row[at]) for row in rows) for at in range(len(COLUMNS))]
    table = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    hidden = seen["total"] - len(seen["leases"])
    return [heading(seen), "", *(table if len(rows) > 1 else ["No live lease."]), *([f"and {hidden} more"] if hidden > 0 else [])]
