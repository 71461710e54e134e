"""What the demo moves about: its daemon, its workers, and the account of all they say."""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from sink import Sink

from leased import Client
from leased.client.errors import LeasedClientError

HERE = Path(__file__).parent


class Unproven(Exception):
    """The demo cannot go on."""


def fast_directory() -> str | None:
    """Where the daemon's volatile state belongs: a tmpfs.  None: there is none, and the usual temporary directory has to do."""
    mounts = [line.split() for line in Path("/proc/mounts").read_text().splitlines()]
    tmpfs = {Path(fields[1]).resolve() for fields in mounts if fields[2] == "tmpfs"}
    for place in ("/dev/shm", os.environ.get("XDG_RUNTIME_DIR", "")):
        if place.startswith("/") and Path(place).resolve() in tmpfs and os.access(place, os.W_OK):
            return place
    return None


def environment(socket: Path) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("LEASE")}
    return kept | {
        "LEASED_SOCKET": str(socket),
        "PYTHONPATH": os.pathsep.join([*filter(None, [kept.get("PYTHONPATH")]), str(HERE)]),
    }


class Daemon:
    """`leased serve` on directories of its own."""

    def __init__(self, home: Path, place: Path) -> None:
        self.socket = place / "leased.sock"
        self._log = home / "daemon.log"
        self._home = home
        config = home / "leased.toml"
        config.write_text("max_leases = 1000\n")  # 9 MiB of tmpfs instead of 69
        places = {"--config": config, "--socket": self.socket, "--state-dir": home / "state", "--runtime-dir": place / "volatile"}
        self._command = [sys.executable, "-m", "leased", "serve", *(str(word) for pair in places.items() for word in pair)]
        self._process: subprocess.Popen[bytes] | None = None
        self._deaths: list[int] = []

    def start(self) -> float:
        """Returns the seconds until it answered."""
        began = time.monotonic()
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                self._command, env=environment(self.socket), cwd=self._home, stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )
        with Client(self.socket) as client:
            while True:
                if self._process.poll() is not None or time.monotonic() > began + 30:
                    raise Unproven(f"the daemon does not start:\n{self._log.read_text()}")
                try:
                    if client.info()["store"]["state"] == "ok":
                        return time.monotonic() - began
                except LeasedClientError:
                    pass
                time.sleep(0.01)

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def kill(self) -> None:
        assert self._process is not None
        self._process.kill()
        self._deaths.append(self._process.wait())

    def stop(self) -> list[int]:
        """A stop in order.  Returns how each of its processes ended, as Popen tells it."""
        assert self._process is not None
        self._process.terminate()
        return [*self._deaths, self._process.wait(30)]

    def close(self) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.kill()
            self._process.wait()


class Attempt(NamedTuple):
    """A worker at work on a file: between the first look at the sink and the write."""

    worker: str
    name: str
    generation: int


class Stage:
    """`events`: (seconds, worker, what it said), in the order heard.  `at_work`: who is at work on what, by worker."""

    def __init__(self, daemon: Daemon, tasks: Path, sink_path: Path, sink: Sink, until: float) -> None:
        self.daemon = daemon
        self.sink = sink
        self.events: list[tuple[float, str, dict[str, Any]]] = []
        self.counts: Counter[str] = Counter()
        self.at_work: dict[str, Attempt] = {}
        self.frozen: list[Attempt] = []
        self.killed: list[Attempt] = []
        self.outlived: list[list[Attempt]] = []  # for each kill of the daemon: who was at work under it
        self._arguments = [tasks, sink_path]
        self._began = time.monotonic()
        self._until = until
        self._heard: queue.SimpleQueue[tuple[str, str]] = queue.SimpleQueue()
        self._ears: list[threading.Thread] = []
        self._processes: dict[str, subprocess.Popen[str]] = {}

    # ---- telling

    def say(self, text: str) -> None:
        print(f"{time.monotonic() - self._began:6.2f} s  {text}", flush=True)

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._began

    @property
    def finished(self) -> int:
        return self.counts["done"]

    @property
    def all_left(self) -> bool:
        """Every worker has ended, and all they said has been heard."""
        return self._heard.empty() and not any(ear.is_alive() for ear in self._ears) and self._heard.empty()

    # ---- workers

    def hire(self) -> None:
        worker = f"worker-{len(self._processes) + 1}"
        process = subprocess.Popen(
            [sys.executable, HERE / "worker.py", worker, *self._arguments],
            env=environment(self.daemon.socket), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        self._processes[worker] = process
        self.say(f"{worker} begins (process {process.pid})")
        self._ears.append(threading.Thread(target=self._listen, args=(worker, process), daemon=True))
        self._ears[-1].start()

    def _listen(self, worker: str, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            self._heard.put((worker, line))
        process.wait()

    def until(self, question: Callable[[], bool], what: str) -> None:
        """Listen until it is so.  Raises Unproven when the time is up or a worker failed."""
        while not question():
            self._hear(0.05)
            if time.monotonic() > self._until:
                raise Unproven(f"gave up waiting: {what}")
            for worker, process in self._processes.items():
                if process.poll() not in {None, 0, -signal.SIGKILL}:
                    raise Unproven(f"{worker} failed")

    def _hear(self, seconds: float) -> None:
        try:
            worker, line = self._heard.get(timeout=seconds)
        except queue.Empty:
            return
        told = json.loads(line)
        event, name, generation = told["event"], told["name"], told.get("generation")
        self.events.append((self.seconds, worker, told))
        self.counts[event] += 1
        if event == "begun":
            self.at_work[worker] = Attempt(worker, name, generation)
        else:
            self.at_work.pop(worker, None)
        if event == "done":
            self.say(f"{worker}  {name}  generation {generation}  done ({self.finished})")
        elif event == "stale":
            self.say(f"{worker}  {name}  generation {generation}  REFUSED BY THE SINK: a larger generation has begun this file")
        elif event == "lost":
            self.say(f"{worker}  {name}  generation {generation}  its lease had ended when it came to release it")

    def _catch_up(self) -> None:
        while not self._heard.empty():
            self._hear(0)

    # ---- what goes wrong, on purpose

    def freeze_one_at_work(self) -> Attempt:
        """SIGSTOP a worker in the middle of a file: its lease is live, and its result not written."""
        idle = {attempt.worker for attempt in (*self.frozen, *self.killed)}
        with Client(self.daemon.socket) as client:
            while True:
                self.until(lambda: bool(self.at_work.keys() - idle), "a worker is in the middle of a file")
                attempt = next(attempt for worker, attempt in self.at_work.items() if worker not in idle)
                process = self._processes[attempt.worker]
                process.send_signal(signal.SIGSTOP)
                while Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0] not in "Tt":
                    time.sleep(0.001)
                between = self.sink.unlocked()  # it was not stopped inside a transaction, which would stop everybody
                self._catch_up()
                held = client.check(f"file:{attempt.name}", attempt.generation)
                at_it = self.at_work.get(attempt.worker) == attempt
                if between and at_it and held.current and attempt.name not in self.sink.done():
                    self.frozen.append(attempt)
                    self.say(
                        f"** {attempt.worker} is frozen (SIGSTOP) in the middle of {attempt.name}, generation {attempt.generation}"
                    )
                    return attempt
                process.send_signal(signal.SIGCONT)  # it was faster: take the next one
                self.at_work.pop(attempt.worker, None)

    def kill_worker(self, attempt: Attempt) -> None:
        self.frozen.remove(attempt)
        self.killed.append(attempt)
        self.at_work.pop(attempt.worker, None)
        self._processes[attempt.worker].kill()
        self.say(f"** {attempt.worker} is killed with -9; its lease on {attempt.name} must lapse before anybody else gets it")

    def thaw(self, attempt: Attempt) -> None:
        self.say(
            f"** {attempt.worker} wakes up (SIGCONT) and knows nothing of the time that passed: it is about to write {attempt.name}"
        )
        self._processes[attempt.worker].send_signal(signal.SIGCONT)

    def kill_daemon(self) -> None:
        """kill -9 while at least two workers are in the middle of files, and start it again."""
        idle = {attempt.worker for attempt in self.frozen}
        self._catch_up()
        self.until(lambda: len(self.at_work.keys() - idle) >= 2, "two workers are in the middle of files")
        pid = self.daemon.pid
        self.daemon.kill()
        self.outlived.append([attempt for worker, attempt in self.at_work.items() if worker not in idle])
        files = ", ".join(attempt.name for attempt in self.outlived[-1])
        self.say(f"** the daemon (process {pid}) is killed with -9, under leases on {files}")
        seconds = self.daemon.start()
        self.say(f"** a new daemon (process {self.daemon.pid}) serves after {seconds:.2f} s")

    def close(self) -> None:
        for process in self._processes.values():
            if process.poll() is None:
                process.kill()
            process.wait()
