"""`lease run` as tests start it, and what they look at: who descends from it, and who is left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from daemons import Daemon, environment

PATIENCE_SECONDS = 30.0
LEASE = [sys.executable, "-m", "leased.client.command"]


def start(daemon: Daemon, *words: str, stdin: int | None = subprocess.DEVNULL, **variables: str) -> subprocess.Popen[str]:
    """`lease run WORDS`, in a session of its own so that it has no terminal."""
    return subprocess.Popen(
        [*LEASE, "run", *words], env=environment() | {"LEASED_SOCKET": str(daemon.socket)} | variables, cwd="/", stdin=stdin,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip


def ended(run: subprocess.Popen[str]) -> tuple[int, str, str]:
    """Exit code, output, errors; at the end of both streams, so nobody who inherited them is left."""
    try:
        out, err = run.communicate(timeout=PATIENCE_SECONDS)
    except subprocess.TimeoutExpired:
        for pid in [*tree(run.pid), run.pid]:
            os.kill(pid, signal.SIGKILL)
        out, err = run.communicate()
        raise AssertionError(f"it does not end; {out!r}, {err!r}") from None
    return run.returncode, out, err


def until(true: Callable[[], object], what: str = "") -> None:
    limit = time.monotonic() + PATIENCE_SECONDS
    while not true():
        assert time.monotonic() < limit, what or "it never happens"
        time.sleep(0.005)


def tree(pid: int) -> list[int]:
    """All who descend from `pid`, zombies included, parents first."""
    parents: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except (OSError, IndexError):
                continue
            parents.setdefault(parent, []).append(int(entry.name))
    found = [pid]
    for each in found:
        found += parents.get(each, ())
    return found[1:]


def marked(mark: str) -> list[int]:
    """The living processes whose environment says MARK=mark, of all that this user may look at."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if f"MARK={mark}".encode() in (entry / "environ").read_bytes().split(b"\0"):
                    found.append(int(entry.name))
            except OSError:
                continue
    return found


def boot() -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def stopped(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
