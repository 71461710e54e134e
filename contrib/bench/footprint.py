"""What speed tables do not show: start-up of the commands, memory of an idle daemon, and a million live leases."""

from __future__ import annotations

import os
import socket
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from host import TREE, BenchError, Places
from ours import Leased

STARTUP_RUNS = 30
SYSTEM_PYTHON = "/usr/bin/python3"
FEW_LEASES = 10_000
MANY_LEASES = 1_000_000
HEADROOM_LEASES = 100_000
LATENCY_SECONDS = 2.0
LATENCY_RUNS = 3
LATENCY_CONNECTIONS = (1, 8)


def _resident(pid: int) -> dict[str, float]:
    """Resident memory in MB (10^6 bytes): all of it, the part that is pages of the LMDB maps, and the rest."""
    total = mapped = 0
    in_map = False
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        words = line.split()
        if not words[0].endswith(":"):
            in_map = words[-1].endswith(".mdb")
        elif words[0] == "Rss:":
            total += int(words[1]) * 1024
            mapped += int(words[1]) * 1024 if in_map else 0
    sizes = {"resident_mb": total, "maps_mb": mapped, "beyond_maps_mb": total - mapped}
    return {name: round(size / 1e6, 1) for name, size in sizes.items()}


def _process_id(daemon: Leased) -> int:
    assert daemon.process is not None
    return daemon.process.pid


def _wall_ms(command: list[str], environment: dict[str, str], expected_exit: int) -> float:
    """Milliseconds from posix_spawn to the end of the process; its output goes nowhere."""
    quiet = [(os.POSIX_SPAWN_OPEN, fd, os.devnull, os.O_RDWR, 0) for fd in (0, 1, 2)]
    start = time.perf_counter()
    pid = os.posix_spawn(command[0], command, environment, file_actions=quiet)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    took = (time.perf_counter() - start) * 1000
    if status != expected_exit:
        raise BenchError(f"{' '.join(command)}: exit {status}, the first time {expected_exit}")
    return took


def _time_command(command: list[str], environment: dict[str, str], must_print: str) -> dict[str, Any]:
    first = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if must_print not in first.stdout:
        raise BenchError(f"{' '.join(command)}: exit {first.returncode}, printed {first.stdout!r} {first.stderr[-800:]!r}")
    for _ in range(3):
        _wall_ms(command, environment, first.returncode)
    took = [_wall_ms(command, environment, first.returncode) for _ in range(STARTUP_RUNS)]
    return {"command": " ".join(command), "median_ms": round(statistics.median(took), 1), "least_ms": round(min(took), 1)}


def _lease_command(daemon: Leased) -> tuple[list[str], dict[str, str]]:
    """(command, environment) of `lease check`, as an installed console script runs it.

    Under the distribution's Python if that can run the client, with the libraries of the daemon's Python lent to it when it has none
    of its own; else under the daemon's Python.
    """
    assert daemon.python is not None
    where = [daemon.python, "-c", "import sysconfig; print(sysconfig.get_path('platlib'))"]
    libraries = subprocess.run(where, capture_output=True, text=True, check=True).stdout.strip()
    script = daemon.directory / "lease"
    command = [str(script), "check", "bench/startup", "--json"]
    tried = ""
    for python, path in [(SYSTEM_PYTHON, str(TREE)), (SYSTEM_PYTHON, f"{TREE}{os.pathsep}{libraries}"), (daemon.python, str(TREE))]:
        script.write_text(f"#!{python}\nimport sys\nfrom leased.client.command import main\nsys.exit(main())\n")
        script.chmod(0o755)
        environment = {**daemon.environment(), "PYTHONPATH": path}
        environment.pop("PYTHONDONTWRITEBYTECODE", None)  # what is installed has its bytecode written
        if Path(python).exists():
            done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
            tried = f"{python}: exit {done.returncode}, {done.stdout!r} {done.stderr[-500:]!r}"
            if "held" in done.stdout:
                return command, environment
    raise BenchError(f"no Python here can run the lease command; last tried {tried}")


def startup(places: Places, load: Path, python: str | None) -> dict[str, Any]:
    """Wall time of `lease check` and `leasenc check` of a free key, median of 30, run as an installed console script would be."""
    daemon = Leased(places, load, python)
    daemon.start()
    try:
        command, environment = _lease_command(daemon)
        leasenc = str(TREE / "contrib" / "leasenc")
        nc = [leasenc] if os.access(leasenc, os.X_OK) else [SYSTEM_PYTHON, "-I", leasenc]
        return {
            "bare": _time_command([SYSTEM_PYTHON, "-I", "-c", "print('held')"], environment, "held"),
            "lease": _time_command(command, environment, "held"),
            "lease_runs_under": Path(command[0]).read_text().splitlines()[0],
            "leasenc": _time_command([*nc, "check", "key=bench/startup"], environment, "held"),
        }
    finally:
        daemon.stop()


def idle(places: Places, load: Path, python: str | None) -> dict[str, Any]:
    """Resident memory of a daemon that has answered a few requests and has had nothing to do for two seconds."""
    daemon = Leased(places, load, python)
    daemon.start()
    try:
        daemon.preload(100)
        daemon.run("pairs", 1, 0.2)
        time.sleep(2)
        return _resident(_process_id(daemon))
    finally:
        daemon.stop()


def _held(address: str, key: str) -> bool:
    """`check` by hand: [0, 1, "check", [{"key": key}]], key of 16 bytes, `held` true in the answer."""
    assert len(key) == 16
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as s:
        s.settimeout(5.0)
        s.connect(address)
        s.sendall(b"\x94\x00\x01\xa5check\x91\x81\xa3key\xb0" + key.encode())
        return b"\xa4held\xc3" in s.recv(65536)


def _acquire_medians(daemon: Leased) -> dict[str, float]:
    """Median over runs of an acquire's median latency in µs, by number of connections."""
    medians = {}
    for connections in LATENCY_CONNECTIONS:
        runs = [daemon.run("pairs", connections, LATENCY_SECONDS)["latency_us"]["acquire"]["p50"] for _ in range(LATENCY_RUNS)]
        medians[str(connections)] = round(statistics.median(runs), 1)
    return medians


def million(places: Places, load: Path, python: str | None) -> dict[str, Any]:
    """A million live leases of one hour: kill -9, time to the first answer and grant, memory, an acquire's median against 10,000."""
    daemon = Leased(places, load, python, max_leases=MANY_LEASES + HEADROOM_LEASES)
    daemon.start()
    try:
        print(f"  {FEW_LEASES:,} leases …", file=sys.stderr)
        daemon.preload(FEW_LEASES)
        few = _acquire_medians(daemon)
        print(f"  {MANY_LEASES:,} leases …", file=sys.stderr)
        filled = daemon.preload(MANY_LEASES - FEW_LEASES, first=FEW_LEASES)
        many = _acquire_medians(daemon)
        before = _resident(_process_id(daemon))
        daemon.kill()
        start = time.perf_counter()
        daemon.spawn()
        answered = time.perf_counter() - start
        daemon.await_grants()
        opened = time.perf_counter() - start
        opened_memory = _resident(_process_id(daemon))
        for n in (0, FEW_LEASES, MANY_LEASES // 2, MANY_LEASES - 1):
            if not _held(daemon.address, f"preload/{n:08}"):
                raise BenchError(f"preload/{n:08} is not held after kill -9 and restart")
        many_again = _acquire_medians(daemon)
        return {
            "leases": MANY_LEASES,
            "filled_per_second": filled["per_second"],
            "first_answer_seconds": round(answered, 2),
            "opening_seconds": round(opened, 2),  # until it grants, which is what a holder waits for
            "memory_before_kill": before,
            "memory_after_opening": opened_memory,
            "memory_after_use": _resident(_process_id(daemon)),
            "acquire_p50_us": {"few": few, "many": many, "many_after_restart": many_again},
            "acquire_ratio": {c: round(max(many[c], many_again[c]) / few[c], 2) for c in few},
        }
    finally:
        daemon.stop()
