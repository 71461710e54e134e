#!/usr/bin/python3
"""leased against the systems people use instead of it, on this machine, in one run.

Starts real servers on throw-away directories, loads each with the same number of live leases, and measures them in turn: every
round visits every system, so that a slow minute of the machine falls on all of them.  See README.md beside this file.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import clients
import footprint
import report
from anchor import FEW_ROUNDS, PRELOADED_TTL_SECONDS, Anchor
from anchors import Etcd, RedisAlways, RedisEverysec, RedisNone
from host import TREE, BenchError, Places, build_load, facts, flush_cost
from ours import Bare, Leased, LeasedStrict
from postgresql import PostgreSQL

SYSTEMS: tuple[type[Anchor], ...] = (Leased, LeasedStrict, Bare, RedisAlways, RedisEverysec, RedisNone, PostgreSQL, Etcd)
WORKLOADS = ("pairs", "pairs-id", "renew", "refuse", "check")
FOOTPRINTS = {"startup": footprint.startup, "idle": footprint.idle, "million": footprint.million}
DAEMON_NEEDS = "import trio, msgpack, lmdb, h11, structlog"


def tell(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def daemon_python(asked: str | None) -> str | None:
    """The interpreter to run the daemon with: the one asked for, this one, or the distribution's, if it has the libraries."""
    for python in [asked] if asked else [sys.executable, footprint.SYSTEM_PYTHON]:
        if python and not subprocess.run([python, "-c", DAEMON_NEEDS], capture_output=True, check=False).returncode:
            return python
    return None


def compiled_tree(python: str | None) -> Path:
    """The sources with their hot path compiled for `python`; what the compiler says goes to standard error."""
    if python is None:
        raise BenchError("--compiled: no Python here can import the daemon's libraries (see --python)")
    tree = TREE / "build" / "compiled-bench"
    tell(f"compiling for {python}, a minute or two …")
    build = [python, TREE / "contrib" / "compiled" / "build", "--into", TREE / "build" / "wheels", "--tree", tree]
    done = subprocess.run(build, stdout=subprocess.PIPE, check=False)
    if done.returncode:
        raise BenchError(
            f"--compiled: {python} could not build it, see above; it needs mypy, setuptools 77 and the headers of Python"
        )
    return tree


def make(system: type[Anchor], places: Places, load: Path, python: str | None) -> Anchor:
    return system(places, load, python) if issubclass(system, Leased) else system(places, load)


def plan(options: argparse.Namespace) -> list[tuple[str, int]]:
    """What one round measures: pairs at every number of connections, single operations at the greatest."""
    return [
        (workload, connections)
        for workload in options.workloads
        for connections in (options.connections if workload.startswith("pairs") else options.connections[-1:])
    ]


def start_present(anchors: list[Anchor], leases: int) -> dict[str, str]:
    """Starts and preloads what is installed, leaves it paused; returns why the others are absent."""
    absent = {}
    for anchor in anchors:
        reason = anchor.missing()
        if reason:
            absent[anchor.name] = reason
            tell(f"{anchor.title}: {reason}")
            continue
        tell(f"{anchor.title}: starting, {leases:,} live leases …")
        anchor.start()
        if leases:
            anchor.preload(leases)
        anchor.pause()
    return absent


def measure(anchors: list[Anchor], disk: Path, options: argparse.Namespace) -> tuple[report.Measured, list[float]]:
    """The interleaved rounds, and what a flush cost (p50, µs) at the start of each.

    Each round begins with another system, so that none is always first or always after the same neighbour.
    """
    measured: report.Measured = {key: {} for key in plan(options)}
    flushes = []
    for number in range(options.rounds):
        flushes.append(flush_cost(disk)["p50_us"])
        tell(f"round {number + 1} of {options.rounds}, a flush costs {flushes[-1]:,.0f} µs")
        for (workload, connections), rounds in measured.items():
            turn = number % max(1, len(anchors))
            for anchor in [*anchors[turn:], *anchors[:turn]]:
                if workload not in anchor.workloads or number >= anchor.most_rounds:
                    continue
                os.sync()  # what others have written must not be written back in this one's time
                anchor.resume()
                run = anchor.run(workload, connections, options.seconds)
                anchor.pause()
                rounds.setdefault(anchor.name, []).append(run)
                tell(f"  {workload:9} {connections:3}  {anchor.name:15} {run['per_second']:>10,.0f}/s")
    return measured, flushes


def speed(places: Places, load: Path, options: argparse.Namespace) -> dict[str, Any]:
    anchors = [make(system, places, load, options.python) for system in SYSTEMS if system.name in options.only]
    started = time.monotonic()
    try:
        absent = start_present(anchors, options.leases)
        present = [anchor for anchor in anchors if anchor.name not in absent]
        if not present:
            raise BenchError("none of the systems asked for is installed")
        versions = {anchor.name: anchor.version() for anchor in present}
        measured, flushes = measure(present, places.disk, options)
    finally:
        for anchor in anchors:
            anchor.stop()
    if time.monotonic() - started > PRELOADED_TTL_SECONDS:
        raise BenchError("the run took longer than the preloaded leases live: ask for fewer rounds or seconds")
    titles = {system.name: system.title for system in SYSTEMS if system.name in options.only or system.name == report.YARDSTICK}
    floors, good = report.speed_floors(measured)
    promises = "\n".join(f"- {anchor.title}: {anchor.after_power_cut}." for anchor in anchors)
    noise = f"{report.generator_line(measured)} {report.flush_line(flushes)}"
    parts = [report.speed_tables(measured, titles, absent), noise, "**after a power cut**", promises, "**floors**", floors]
    text = "\n\n".join(parts) + "\n"
    missing = "".join(f"- {titles[name]}: {reason}\n" for name, reason in absent.items())
    if missing:
        text += f"\n**not measured**\n\n{missing}"
    figures = {"flush_p50_us_by_round": flushes, "results": report.summary(measured)}
    return {"versions": versions, "absent": absent, **figures, "text": text, "good": good}


def listed(allowed: tuple[str, ...]) -> Any:
    def split(text: str) -> list[str]:
        names = [name for name in text.split(",") if name]
        unknown = [name for name in names if name not in allowed]
        if unknown or not names:
            raise argparse.ArgumentTypeError(f"{', '.join(unknown) or 'nothing'} is not among {', '.join(allowed)}")
        return names

    return split


def counts(text: str) -> list[int]:
    numbers = sorted({int(word) for word in text.split(",")})
    if not numbers or not 1 <= numbers[0] <= numbers[-1] <= 200:
        raise argparse.ArgumentTypeError("numbers of connections are 1 to 200")
    return numbers


def arguments() -> argparse.Namespace:
    names = tuple(system.name for system in SYSTEMS)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="?", default="speed", choices=["speed", "clients", *FOOTPRINTS, "all"])
    parser.add_argument("--seconds", type=float, default=3.0, help="measured seconds of each run (3)")
    parser.add_argument("--rounds", type=int, default=5, help=f"rounds (5); PostgreSQL and etcd: the first {FEW_ROUNDS}")
    parser.add_argument("--only", type=listed(names), default=list(names), metavar="A,B", help=f"systems, of {', '.join(names)}")
    parser.add_argument("--workloads", type=listed(WORKLOADS), default=list(WORKLOADS), metavar="A,B", help=", ".join(WORKLOADS))
    parser.add_argument("--connections", type=counts, default=[1, 8, 64], metavar="N,N", help="numbers of connections (1,8,64)")
    parser.add_argument("--leases", type=int, default=10_000, help="live leases present in every system (10000)")
    parser.add_argument("--python", help="interpreter for the daemon (default: this one, else /usr/bin/python3)")
    parser.add_argument("--compiled", action="store_true", help="measure leased's compiled build (contrib/compiled), for --python")
    parser.add_argument("--client-python", help="interpreter for `clients`, which needs redis-py (default: the daemon's)")
    parser.add_argument("--disk", help="parent of the state directories (default: /var/tmp if it is a disk)")
    parser.add_argument("--memory", help="parent of leased's runtime directory (default: /dev/shm if it is a tmpfs)")
    parser.add_argument("--json", type=Path, help="where the full results go (default: build/bench-WHAT.json)")
    parser.add_argument("--enforce", action="store_true", help="exit 1 when a measured floor or bound is missed")
    options = parser.parse_args()
    if not 0.1 <= options.seconds <= 25 or options.rounds < 1 or options.leases < 0:
        parser.error("--seconds is 0.1 to 25 (a lease of 60 s must not lapse under it), --rounds at least 1, --leases at least 0")
    options.python = daemon_python(options.python)
    return options


def main() -> int:
    options = arguments()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the servers are stopped
    path = options.json or TREE / "build" / f"bench-{options.what}.json"
    places: Places | None = None
    try:
        if options.compiled:
            Leased.tree = compiled_tree(options.python)
        places = Places(options.disk, options.memory)
        load = build_load(places.disk)
        load.chmod(0o755)
        results: dict[str, Any] = {"host": facts(places), "options": {name: str(value) for name, value in vars(options).items()}}
        good = True
        if options.what in ("speed", "all"):
            results["speed"] = speed(places, load, options)
            results["host"]["versions"] = results["speed"]["versions"]
            good = results["speed"].pop("good")
        if options.what in ("clients", "all"):
            tell("clients …")
            results["clients"] = clients.clients(places, load, options)
            results["host"]["versions"] = {**results["host"].get("versions", {}), **results["clients"]["versions"]}
            good = results["clients"].pop("good") and good
        wanted = [name for name in FOOTPRINTS if options.what in (name, "all")]
        for name in wanted:
            ours = Leased(places, load, options.python)
            absent = ours.missing()
            if absent:
                raise BenchError(f"leased cannot be started: {absent}")
            results["host"].setdefault("versions", {}).setdefault(ours.name, ours.version())
            tell(f"{name} …")
            inner = Places(options.disk, options.memory)
            try:
                results[name] = FOOTPRINTS[name](inner, load, options.python)
            finally:
                inner.close()
        print(report.host_lines(results["host"]) + "\n")
        if "speed" in results:
            print(results["speed"].pop("text"))
        if "clients" in results:
            print(results["clients"].pop("text"))
        if wanted:
            ceilings, small = report.footprint_ceilings(results)
            good = good and small
            print(f"**start-up, memory, a million leases**\n\n{ceilings}\n")
            for name in wanted:
                print(f"- {name}: {json.dumps(results[name])}")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(results, indent=1, default=str) + "\n")
        tell(f"all of it: {path}")
    except BenchError as error:
        tell(f"bench: {error}")
        return 2
    finally:
        if places is not None:
            places.close()
    return 0 if good or not options.enforce else 1


if __name__ == "__main__":
    sys.exit(main())
