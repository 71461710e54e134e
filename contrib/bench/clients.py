"""What a program gets that is written in Python: pairs/s through leased.Client against redis-py's Lock, at 1, 8 and 64 processes.

The rounds are interleaved as in the speed tables, and Redis is the same one: `appendfsync always`, on a Unix socket.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from anchor import Anchor
from anchors import RedisAlways
from host import TREE, BenchError, Places
from ours import Leased
from report import table

PROCESSES = (1, 8, 64)
FLOORS = {1: 2.0, 8: 2.0, 64: 3.0}
LOAD = Path(__file__).with_name("client_load.py")
VERSIONS = "import redis, sys; print('redis-py', redis.__version__, 'with hiredis' if redis.utils.HIREDIS_AVAILABLE else 'without hiredis')"


def version_of_redis_py(python: str) -> str:
    """Raises BenchError where the interpreter lacks redis-py."""
    told = subprocess.run([python, "-c", VERSIONS], capture_output=True, text=True, check=False)
    if told.returncode:
        raise BenchError(f"{python} cannot import redis: `pip install redis hiredis` there, or name another with --client-python")
    return told.stdout.strip()


def drive(python: str, system: str, anchor: Anchor, processes: int, seconds: float) -> dict[str, Any]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [str(TREE), os.environ.get("PYTHONPATH", "")]))}
    command = [python, str(LOAD), system, anchor.address, "--processes", str(processes), "--seconds", str(seconds)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise BenchError(f"{system}, {processes} processes: exit {done.returncode}\n{done.stderr}")
    run: dict[str, Any] = json.loads(done.stdout)
    return run


def clients(places: Places, load: Path, options: Any) -> dict[str, Any]:
    """Figures, `text` as Markdown, and `good`: no floor was missed."""
    python = options.client_python or options.python or sys.executable
    redis_py = version_of_redis_py(python)
    ours, theirs = Leased(places, load, options.python), RedisAlways(places, load)
    anchors = {"leased": ours, "redis": theirs}
    for anchor in anchors.values():
        if (absent := anchor.missing()) is not None:
            raise BenchError(f"{anchor.title}: {absent}")
    rounds: dict[int, list[dict[str, dict[str, Any]]]] = {processes: [] for processes in PROCESSES}
    try:
        for anchor in anchors.values():
            anchor.start()
            anchor.pause()
        for number in range(options.rounds):
            for processes, measured in rounds.items():
                turn: dict[str, dict[str, Any]] = {}
                for system in sorted(anchors, reverse=bool(number % 2)):
                    os.sync()
                    anchors[system].resume()
                    turn[system] = drive(python, system, anchors[system], processes, options.seconds)
                    anchors[system].pause()
                    print(f"  clients {processes:3}  {system:7} {turn[system]['per_second']:>9,.0f}/s", file=sys.stderr, flush=True)
                measured.append(turn)
        versions = {"leased": ours.version(), "redis": theirs.version(), "clients": redis_py}
    finally:
        for anchor in anchors.values():
            anchor.stop()
    return judged(rounds, versions)


def judged(rounds: dict[int, list[dict[str, dict[str, Any]]]], versions: dict[str, str]) -> dict[str, Any]:
    rows, figures, good = [], [], True
    for processes, measured in rounds.items():
        ratios = [turn["leased"]["per_second"] / turn["redis"]["per_second"] for turn in measured]
        middle = {name: statistics.median(turn[name]["per_second"] for turn in measured) for name in ("leased", "redis")}
        cpu = {name: statistics.median(turn[name]["cpu_us_per_pair"] for turn in measured) for name in middle}
        ratio = statistics.median(ratios)
        held = ratio >= FLOORS[processes]
        good = good and held
        rows.append(
            [
                str(processes),
                f"{middle['leased']:,.0f}",
                f"{middle['redis']:,.0f}",
                f"{ratio:.2f}× ({min(ratios):.2f} to {max(ratios):.2f})",
                f"{FLOORS[processes]:.0f}× {'held' if held else '**MISSED**'}",
                f"{cpu['leased']:,.0f} / {cpu['redis']:,.0f}",
            ]
        )
        figures.append({"processes": processes, "ratio": ratio, "per_second": middle, "cpu_us_per_pair": cpu, "rounds": measured})
    head = ["processes", "leased.Client, pairs/s", "redis-py Lock, pairs/s", "ratio (rounds)", "floor", "client CPU, µs per pair"]
    text = f"**through Python clients** ({versions['clients']}; acquire + release, ttl 60 s)\n\n{table(head, rows)}\n"
    return {"versions": versions, "results": figures, "text": text, "good": good}
