"""Processes that live on a lab's host and hold leases there, and what the tests ask about them."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

from lab import Lab
from product import HOME

SERVICE = "leased.service"
PYTHON = f"{HOME}/bin/python"
_HOLDER = """
import json, os, sys
from leased import Client
name, bind, *keys = sys.argv[1:]
client = Client(holder=name)
grants = [client.try_acquire(key, 600, bind=bind) for key in keys]
told = {grant.key: {"generation": grant.generation, "fence": grant.fence} for grant in grants if grant}
print(json.dumps({"pid": os.getpid(), "grants": told}), flush=True)
sys.stdin.read()
"""


def eventually(question: Callable[[], Any], seconds: float = 20.0) -> Any:
    """The first true answer.  Raises AssertionError where none comes in time."""
    until = time.monotonic() + seconds
    while not (answer := question()):
        assert time.monotonic() < until, f"not within {seconds} s; the last answer was {answer!r}"
        time.sleep(0.02)
    return answer


class Holder:
    """A process that has taken leases and goes on living.  `pid` is its number inside; `fences` by key."""

    def __init__(self, lab: Lab, name: str, *keys: str, bind: str = "process", user: str = "worker") -> None:
        self._process = lab.spawn(PYTHON, "-c", _HOLDER, name, bind, *keys, user=user)
        assert self._process.stdout is not None and self._process.stderr is not None
        line = self._process.stdout.readline()
        assert line, self._process.stderr.read()
        told = json.loads(line)
        self.pid: int = told["pid"]
        self.fences: dict[str, str] = {key: grant["fence"] for key, grant in told["grants"].items()}
        self.generations: dict[str, int] = {key: grant["generation"] for key, grant in told["grants"].items()}
        assert set(self.fences) == set(keys), told
        self._lab = lab

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def kill(self) -> None:
        if self._process.poll() is None:
            self._lab.run("kill", "-9", str(self.pid), check=False)
        self._process.wait(20)
        for stream in (self._process.stdin, self._process.stdout, self._process.stderr):
            if stream is not None:
                stream.close()


def held(lab: Lab, key: str) -> Any:
    """Who holds it, None: nobody."""
    with lab.rpc() as rpc:
        return rpc.call("check", key=key)["held_by"]


def kill_daemon(lab: Lab) -> int:
    """kill -9 of the daemon that runs, and until another does.  Returns the pid that was killed, as seen in the lab."""
    before = running(lab)
    lab.run("kill", "-9", str(before))
    eventually(lambda: lab.main_pid(SERVICE) not in {0, before})
    return before


def running(lab: Lab) -> int:
    """The daemon's pid; it is started if it does not run."""
    with lab.rpc() as rpc:
        rpc.call("info")
    return int(eventually(lambda: lab.main_pid(SERVICE)))


def outside(lab: Lab, pid: int) -> int:
    """The number this process sees for process `pid` of the lab.  Raises AssertionError where there is none."""
    namespace = (lab.path("/proc/1/ns/pid")).readlink()
    for status in Path("/proc").glob("[0-9]*/status"):
        with contextlib.suppress(OSError, StopIteration):
            numbers = next(line for line in status.read_text().splitlines() if line.startswith("NSpid:")).split()
            if numbers[-1] == str(pid) and len(numbers) > 2 and (status.parent / "ns/pid").readlink() == namespace:
                return int(status.parent.name)
    raise AssertionError(f"no process {pid}")


def settled(lab: Lab, seconds: float = 30.0) -> dict[str, Any]:
    """`info`, once keys are granted again."""

    def told() -> dict[str, Any] | None:
        with lab.rpc() as rpc:
            info = rpc.call("info")
        return info if info["store"]["state"] == "ok" else None

    info: dict[str, Any] = eventually(told, seconds)
    return info
