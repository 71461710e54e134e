"""leased itself, in the two settings that are compared."""

from __future__ import annotations

import os
import re
import subprocess
import time
from pathlib import Path
from typing import Any, ClassVar

from anchor import START_SECONDS, Anchor, ask, first_line
from host import TREE, BenchError, Places

# [0, 1, "info", []] and the head of its answer, [1, 1, nil, ...
INFO_REQUEST = b"\x94\x00\x01\xa4info\x90"
INFO_ANSWER = b"\x94\x01\x01\xc0"
# [0, 1, "lease", [{"key": "bench-probe", "holder": "bench", "ttl_seconds": 1}]] and whether the answer holds "acquired" true or false.
PROBE_REQUEST = b"\x94\x00\x01\xa5lease\x91\x83\xa3key\xabbench-probe\xa6holder\xa5bench\xabttl_seconds\x01"
PROBE_DECIDED = re.compile(b"\xa8acquired[\xc2\xc3]")


class Leased(Anchor):
    name = "leased"
    title = "leased, default (short leases waited out)"
    protocol = "leased"
    workloads: ClassVar[tuple[str, ...]] = ("pairs", "pairs-id", "renew", "refuse", "check")
    # A daemon that was stopped finds that it was deaf and acts on it; an idle one wakes once a second.
    pausable = False
    wait_out_seconds: ClassVar[int] = 60
    tree: ClassVar[Path] = TREE  # where its sources are, or what was compiled of them
    after_power_cut = (
        "grants of ttl ≤ 60 s may be forgotten, but nothing is granted until all of them have lapsed (60 s): never two holders,"
        " a minute without grants; longer leases and generations were flushed before the reply"
    )

    def __init__(self, places: Places, load: Path, python: str | None, max_leases: int = 100_000) -> None:
        super().__init__(places, load)
        self.python = python
        self.max_leases = max_leases

    def environment(self) -> dict[str, str]:
        path = os.pathsep.join(filter(None, [str(self.tree), os.environ.get("PYTHONPATH", "")]))
        return {**os.environ, "PYTHONPATH": path, "LEASED_SOCKET": self.address}

    def missing(self) -> str | None:
        if self.python is None:
            return "no Python here can import trio, msgpack, lmdb, h11 and structlog (see --python)"
        return None if (self.tree / "leased" / "__main__.py").exists() else "leased/__main__.py is not there"

    def version(self) -> str:
        assert self.python is not None
        ask = [self.python, "-m", "leased", "--version"]
        done = subprocess.run(ask, env=self.environment(), capture_output=True, text=True, check=False)
        return f"{done.stdout.strip() or 'unknown'} under {first_line([self.python, '--version'])}"

    def prepare(self) -> None:
        super().prepare()
        self.memory.mkdir(mode=0o700)
        (self.directory / "leased.toml").write_text(
            f"wait_out_seconds = {self.wait_out_seconds}\nmax_leases = {self.max_leases}\n"
            f"[limits]\nmax_leases_per_namespace = {self.max_leases}\nmax_connections_per_uid = 256\n"
        )

    def command(self) -> list[str]:
        assert self.python is not None
        paths = {"socket": self.address, "state-dir": self.directory / "state", "runtime-dir": self.memory / "runtime"}
        options = [f"--{name}={path}" for name, path in paths.items()]
        return [self.python, "-m", "leased", "serve", *options, f"--config={self.directory / 'leased.toml'}"]

    def spawn(self, **options: Any) -> None:
        super().spawn(env=self.environment(), **options)

    def start(self) -> None:
        super().start()
        self.await_grants()

    def ready(self) -> bool:
        return ask(self.address, INFO_REQUEST).startswith(INFO_ANSWER)

    def await_grants(self) -> None:
        """Returns once the daemon decides: it answers from the first moment, but grants nothing before its first flush is done."""
        give_up = time.monotonic() + START_SECONDS
        while not PROBE_DECIDED.search(ask(self.address, PROBE_REQUEST)):
            if time.monotonic() > give_up:
                raise BenchError(f"{self.title} grants nothing {START_SECONDS:.0f} s after its start")
            time.sleep(0.002)


class LeasedStrict(Leased):
    name = "leased-strict"
    title = "leased, strict (wait_out_seconds = 0)"
    workloads = ("pairs",)
    wait_out_seconds = 0
    after_power_cut = (
        "every grant was flushed before its reply; a release may be forgotten: the lease then ends late (at its ttl), never early"
    )


class Bare(Leased):
    name = "bare"
    title = "bare Python server (decodes and answers, decides and keeps nothing)"
    workloads = ("pairs", "renew", "refuse", "check")
    pausable = True
    after_power_cut = "nothing was ever kept: it is here to tell what this machine lets a Python server reach"

    def version(self) -> str:
        assert self.python is not None
        return first_line([self.python, "--version"])

    def command(self) -> list[str]:
        assert self.python is not None
        return [self.python, str(Path(__file__).with_name("bare.py")), self.address]

    def ready(self) -> bool:
        return bool(ask(self.address, PROBE_REQUEST))
