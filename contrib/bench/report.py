"""Runs to tables: medians over rounds, ratios taken within each round, and the floors this project holds itself to."""

from __future__ import annotations

import statistics
from typing import Any, NamedTuple

from anchor import Run

YARDSTICK = "redis-always"
PAIR_HEADINGS = {
    "pairs": "acquire + release, pairs/s",
    "pairs-id": "acquire + release, each acquire with a request_id, pairs/s",
}
Rounds = dict[str, list[Run]]
"""Runs of one workload at one number of connections, by system, in the order of the rounds."""
Measured = dict[tuple[str, int], Rounds]
"""All of it, by workload and number of connections."""


class Floor(NamedTuple):
    system: str
    workload: str
    connections: int
    least: float
    ratio: bool


FLOORS = (
    Floor("leased", "pairs", 1, 2.0, True),
    Floor("leased", "pairs", 8, 2.0, True),
    Floor("leased", "pairs", 64, 1.2, True),
    Floor("leased-strict", "pairs", 1, 0.55, True),
    Floor("leased-strict", "pairs", 8, 0.55, True),
    Floor("leased-strict", "pairs", 64, 0.55, True),
    Floor("leased", "renew", 64, 60_000, False),
    Floor("leased", "refuse", 64, 60_000, False),
)
FOOTPRINT_CEILINGS = (
    ("startup", ("lease", "median_ms"), 60, "`lease check`, ms"),
    ("startup", ("leasenc", "median_ms"), 40, "`leasenc check`, ms"),
    ("idle", ("resident_mb",), 45, "idle daemon, resident MB"),
    ("million", ("opening_seconds",), 6, "opening a million leases after kill -9, s"),
    ("million", ("memory_after_use", "beyond_maps_mb"), 600, "a million leases, resident MB beyond the maps"),
    ("million", ("acquire_ratio", "1"), 2, "acquire median, a million against 10,000 leases, 1 connection"),
    ("million", ("acquire_ratio", "8"), 2, "acquire median, a million against 10,000 leases, 8 connections"),
)


def rates(runs: list[Run]) -> list[float]:
    return [run["per_second"] for run in runs]


def ratio(measured: Measured, workload: str, connections: int, system: str) -> float | None:
    """Median over rounds of this system's rate divided by the yardstick's in the same round; pairs-id is held against plain pairs."""
    ours = rates(measured.get((workload, connections), {}).get(system, []))
    theirs = rates(measured.get((workload.removesuffix("-id"), connections), {}).get(YARDSTICK, []))
    quotients = [a / b for a, b in zip(ours, theirs, strict=False)]  # fewer rounds on one side: only those both took part in
    return statistics.median(quotients) if quotients else None


def spread(runs: list[Run]) -> float:
    """(greatest − least) / median over the rounds: how noisy the machine was."""
    values = rates(runs)
    return (max(values) - min(values)) / statistics.median(values)


def median_of(runs: list[Run], step: str, percentile: str) -> float:
    return float(statistics.median(run["latency_us"][step][percentile] for run in runs))


def summary(measured: Measured) -> list[dict[str, Any]]:
    """One record per workload, number of connections and system; the rounds' own figures with it."""
    return [
        {
            "workload": workload,
            "connections": connections,
            "system": system,
            "rounds": len(runs),
            "median_per_second": round(statistics.median(rates(runs)), 1),
            "ratio_to_" + YARDSTICK: ratio(measured, workload, connections, system),
            "spread": round(spread(runs), 3),
            "p50_us": median_of(runs, "loop", "p50"),
            "p99_us": median_of(runs, "loop", "p99"),
            "max_us": max(run["latency_us"]["loop"]["max"] for run in runs),
            "generator_cpu": max((run.get("generator_cpu", 0.0) for run in runs), default=0.0),
            "runs": runs,
        }
        for (workload, connections), rounds in measured.items()
        for system, runs in rounds.items()
    ]


def table(head: list[str], rows: list[list[str]]) -> str:
    return "\n".join("| " + " | ".join(row) + " |" for row in [head, ["---"] * len(head), *rows])


def _cell(measured: Measured, workload: str, connections: int, system: str) -> str:
    runs = measured[workload, connections].get(system)
    if not runs:
        return "–"
    times = ratio(measured, workload, connections, system)
    return f"{statistics.median(rates(runs)):,.0f}" + (f" ({times:.2f}×)" if times is not None else "")


def _latency(rounds: Rounds, system: str) -> str:
    runs = rounds.get(system)
    return f"{median_of(runs, 'loop', 'p50'):,.0f} / {median_of(runs, 'loop', 'p99'):,.0f}" if runs else "–"


def speed_tables(measured: Measured, titles: dict[str, str], absent: dict[str, str]) -> str:
    """Markdown: rates with ratios, latencies, the single operations, the spread."""
    parts = []
    for workload, heading in PAIR_HEADINGS.items():
        counts = [connections for name, connections in measured if name == workload]
        if not counts:
            continue
        rows, slow = [], []
        for system, title in titles.items():
            runs = [measured[workload, count] for count in counts]
            if system in absent:
                rows.append([title, "not measured: " + absent[system], *["–"] * len(counts)])
            elif any(system in rounds for rounds in runs):
                noise = " / ".join(f"{spread(rounds[system]):.0%}" if rounds.get(system) else "–" for rounds in runs)
                rows.append([title, *(_cell(measured, workload, count, system) for count in counts), noise])
                slow.append([title, *(_latency(rounds, system) for rounds in runs)])
        if not slow and workload != "pairs":
            continue
        at = [f"{count} connection{'s' if count > 1 else ''}" for count in counts]
        parts.append(f"**{heading}** (× {titles[YARDSTICK]}, median of the rounds' ratios; spread = (max − min) / median)\n")
        parts.append(table(["system", *at, "spread"], rows) + "\n")
        parts.append(f"**latency of one pair, µs, p50 / p99** ({heading})\n\n" + table(["system", *at], slow) + "\n")
    single = {key: rounds for key, rounds in measured.items() if not key[0].startswith("pairs")}
    if single:
        heads = [f"{workload}, {connections} connections" for workload, connections in single]
        measured_here = [system for system in titles if any(system in rounds for rounds in single.values())]
        rows = [[titles[system], *(_cell(measured, *key, system) for key in single)] for system in measured_here]
        parts.append("**single operations/s** (each connection on one held key)\n\n" + table(["system", *heads], rows) + "\n")
    return "\n".join(parts)


def generator_line(measured: Measured) -> str:
    """How near the load generator came to being the limit itself (PostgreSQL's is pgbench, which does not tell)."""
    shares = [
        (run.get("generator_cpu", 0.0), f"{system}, {workload}, {connections} connections")
        for (workload, connections), rounds in measured.items()
        for system, runs in rounds.items()
        for run in runs
    ]
    most, where = max(shares)
    return f"The load generator used at most {most:.0%} of one core ({where})."


def flush_line(flushes: list[float]) -> str:
    """A disk whose flush changes threefold between rounds makes every flushed number of the run worthless; that must be said."""
    told = f"A flush at the start of each round, p50: {', '.join(f'{cost:,.0f}' for cost in flushes)} µs."
    if max(flushes) > 3 * min(flushes):
        told += " **The disk was not steady: repeat this on a quiet machine.**"
    return told


def _verdict(value: float | None, held: bool, told: str) -> str:
    return "not measured" if value is None else f"{told} {'held' if held else '**MISSED**'}"


def speed_floors(measured: Measured) -> tuple[str, bool]:
    """(markdown, whether no measured floor was missed)."""
    rows, good = [], True
    for floor in FLOORS:
        runs = measured.get((floor.workload, floor.connections), {}).get(floor.system, [])
        if floor.ratio:
            value = ratio(measured, floor.workload, floor.connections, floor.system)
        else:
            value = statistics.median(rates(runs)) if runs else None
        held = value is not None and value >= floor.least
        good = good and (held or value is None)
        unit = "×" if floor.ratio else "/s"
        told = f"{value or 0:,.2f}{unit}" if floor.ratio else f"{value or 0:,.0f}{unit}"
        rows.append([floor.system, floor.workload, str(floor.connections), f"{floor.least:,}{unit}", _verdict(value, held, told)])
    return table(["system", "workload", "connections", "at least", "measured"], rows), good


def footprint_ceilings(measured: dict[str, Any]) -> tuple[str, bool]:
    rows, good = [], True
    for part, path, most, title in FOOTPRINT_CEILINGS:
        if part not in measured:
            continue
        value: Any = measured[part]
        for name in path:
            value = value[name]
        good = good and value < most
        rows.append([title, f"under {most}", _verdict(value, value < most, f"{value:,}")])
    return table(["what", "bound", "measured"], rows), good


def host_lines(host: dict[str, Any]) -> str:
    flush, disk = host["flush"], host["disk"]
    return "\n".join(
        [
            f"- {host['cpu']}, {host['cores']} cores, {host['memory_mib']:,} MiB, kernel {host['kernel']},"
            f" load {host['load_average_at_start']:.2f} at the start",
            f"- state on {disk['path']} ({disk['filesystem']}); a flush (4 KiB overwrite + fdatasync) p50 {flush['p50_us']} µs,"
            f" p99 {flush['p99_us']} µs; whether the disk keeps what it acknowledges cannot be known from here",
            f"- runtime directory of leased on {host['runtime']['path']} ({host['runtime']['filesystem']})",
            *(f"- {name}: {version}" for name, version in host.get("versions", {}).items()),
        ]
    )
