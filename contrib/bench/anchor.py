"""What every measured system has in common: started on throw-away directories, loaded, paused and stopped.

An anchor is a system whose speed is known from elsewhere and against which ours is read.  Anchors other than ours are paused
(SIGSTOP) while another system is measured, so that their checkpoints and ticks do not land in its numbers.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import time
from pathlib import Path
from typing import Any, ClassVar

from host import BenchError, Places

START_SECONDS = 180.0  # a daemon that opens a million leases on a busy machine is slow, not stuck
STOP_SECONDS = 20.0
PRELOADED_TTL_SECONDS = 3600
FEW_ROUNDS = 2

Run = dict[str, Any]
"""One measured run: `per_second`, `latency_us` by step (p50, p99, max), and what else the generator tells."""


def ask(path: str | Path | tuple[str, int], request: bytes) -> bytes:
    """What one read brings after `request` within a second; nothing when there is no server or no answer yet."""
    family = socket.AF_INET if isinstance(path, tuple) else socket.AF_UNIX
    with socket.socket(family, socket.SOCK_STREAM) as s:
        s.settimeout(1.0)
        try:
            s.connect(path if isinstance(path, tuple) else str(path))
            s.sendall(request)
            return s.recv(65536)
        except OSError:
            return b""


def first_line(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return (done.stdout or done.stderr).strip().splitlines()[0]


class Anchor:
    """One system.  `workloads` names what it can be asked: pairs, pairs-id (with request_id), renew, refuse, check."""

    name: ClassVar[str]
    title: ClassVar[str]
    protocol: ClassVar[str]
    workloads: ClassVar[tuple[str, ...]] = ("pairs",)
    pausable: ClassVar[bool] = True
    most_rounds: ClassVar[int] = 1000
    """Those that are there for orientation only take part in the first few rounds."""
    after_power_cut: ClassVar[str]

    def __init__(self, places: Places, load: Path) -> None:
        self.load = load
        self.directory = places.disk / self.name
        self.memory = places.memory / self.name
        self.process: subprocess.Popen[bytes] | None = None
        self.address = str(self.directory / "socket")

    def missing(self) -> str | None:
        """Why this system cannot be measured here, or None."""
        raise NotImplementedError

    def version(self) -> str:
        raise NotImplementedError

    def command(self) -> list[str]:
        raise NotImplementedError

    def ready(self) -> bool:
        raise NotImplementedError

    def prepare(self) -> None:
        self.directory.mkdir(mode=0o700)

    def spawn(self, **options: Any) -> None:
        """Starts the server and returns once it answers."""
        with (self.directory / "log").open("ab") as log:
            self.process = subprocess.Popen(self.command(), stdout=log, stderr=log, stdin=subprocess.DEVNULL, **options)
        give_up = time.monotonic() + START_SECONDS
        while not self.ready():
            if self.process.poll() is not None or time.monotonic() > give_up:
                log_end = (self.directory / "log").read_text(errors="replace")[-1500:]
                raise BenchError(f"{self.title} did not start (exit {self.process.poll()}):\n{log_end}")
            time.sleep(0.002)

    def start(self) -> None:
        self.prepare()
        self.spawn()

    def stop(self) -> None:
        if self.process is None:
            return
        self.resume()
        self.process.send_signal(signal.SIGINT)
        try:
            self.process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.process = None

    def kill(self) -> None:
        assert self.process is not None
        self.process.kill()
        self.process.wait()
        self.process = None

    def _signal(self, number: int) -> None:
        assert self.process is not None
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
        for pid in [self.process.pid, *map(int, children.read_text().split() if children.exists() else [])]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def pause(self) -> None:
        if self.pausable:
            self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        if self.pausable and self.process is not None and self.process.poll() is None:
            self._signal(signal.SIGCONT)

    def drive(self, mode: str, connections: int, *more: str) -> Run:
        command = [str(self.load), self.protocol, self.address, "--mode", mode, "--connections", str(connections), *more]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise BenchError(f"{self.title}, {mode}, {connections} connections: exit {done.returncode}\n{done.stderr}")
        answer: Run = json.loads(done.stdout)
        return answer

    def preload(self, count: int, first: int = 0) -> Run:
        """Creates `count` live leases that outlast the run (ttl one hour)."""
        more = ("--count", str(count), "--first", str(first), "--ttl", str(PRELOADED_TTL_SECONDS))
        return self.drive("preload", 16, "--in-flight", "16", *more)

    def run(self, workload: str, connections: int, seconds: float) -> Run:
        mode, _, with_id = workload.partition("-")
        return self.drive(mode, connections, "--seconds", str(seconds), *(["--request-id"] if with_id else []))
