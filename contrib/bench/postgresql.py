"""PostgreSQL as an anchor: a table of leases, driven by pgbench, whose script fails when a row it must get does not come back."""

from __future__ import annotations

import math
import os
import pwd
import re
import shutil
import statistics
import subprocess
from pathlib import Path
from typing import Any

from anchor import FEW_ROUNDS, Anchor, Run, first_line
from host import BenchError, Places

SCHEMA = """
CREATE SEQUENCE generation AS bigint;
CREATE TABLE lease (
  key text PRIMARY KEY, holder text NOT NULL, fence bigint NOT NULL, generation bigint NOT NULL, deadline timestamptz NOT NULL
);
"""
PRELOAD = """
INSERT INTO lease
  SELECT 'preload/' || lpad(n::text, 8, '0'), 'preload', n, nextval('generation'), clock_timestamp() + interval '1 hour'
  FROM generate_series({first}, {last}) AS n;
"""
# \\gset fails, and with it the client and the run, unless exactly one row comes back: a refusal cannot pass for a grant.
PAIR = r"""
\set k random(1, 1000000)
\set fence random(9007199254740992, 9223372036854775806)
INSERT INTO lease AS held (key, holder, fence, generation, deadline)
  VALUES ('bench/' || :client_id || '/' || :k, 'bench-holder-' || :client_id, :fence, nextval('generation'),
          clock_timestamp() + interval '60 seconds')
  ON CONFLICT (key) DO UPDATE SET holder = excluded.holder, fence = excluded.fence, generation = excluded.generation,
    deadline = excluded.deadline WHERE held.deadline <= clock_timestamp()
  RETURNING generation \gset granted_
DELETE FROM lease WHERE key = 'bench/' || :client_id || '/' || :k AND fence = :fence RETURNING generation \gset released_
"""


def binaries() -> Path | None:
    """The directory of the newest PostgreSQL that has server, initdb, psql and pgbench."""
    wanted = ("postgres", "initdb", "psql", "pgbench")
    versioned = sorted(Path("/usr/lib/postgresql").glob("[0-9]*/bin"), key=lambda path: float(path.parent.name), reverse=True)
    on_path = shutil.which("postgres")
    for directory in [*versioned, *([Path(on_path).parent] if on_path else [])]:
        if all((directory / name).exists() for name in wanted):
            return directory
    return None


class PostgreSQL(Anchor):
    name = "postgresql"
    title = "PostgreSQL, synchronous_commit on"
    most_rounds = FEW_ROUNDS
    after_power_cut = "every grant and release was flushed before its reply; expiry hangs on the wall clock"

    def __init__(self, places: Places, load: Path) -> None:
        super().__init__(places, load)
        self.bin = binaries()
        self.user = self._user()

    @staticmethod
    def _user() -> str | None:
        """PostgreSQL refuses to run as root: then its own user, else nobody."""
        if os.getuid() != 0:
            return None
        names = {entry.pw_name for entry in pwd.getpwall()}
        return next((name for name in ("postgres", "nobody") if name in names), None)

    def _as_user(self) -> dict[str, Any]:
        return {"user": self.user, "group": pwd.getpwnam(self.user).pw_gid, "extra_groups": []} if self.user else {}

    def _call(self, program: str, *arguments: str, text: str | None = None) -> str:
        assert self.bin is not None
        command = [str(self.bin / program), *arguments]
        options: dict[str, Any] = {"cwd": self.directory, "env": {**os.environ, "LC_ALL": "C"}, **self._as_user()}
        done = subprocess.run(command, input=text, capture_output=True, text=True, check=False, **options)
        if done.returncode:
            raise BenchError(f"{program}: exit {done.returncode}\n{done.stderr[-1500:]}")
        return str(done.stdout)

    def _sql(self, statements: str) -> None:
        self._call("psql", "-X", "-q", "-v", "ON_ERROR_STOP=1", "-h", str(self.directory), "-d", "postgres", text=statements)

    def missing(self) -> str | None:
        if self.bin is None:
            return "not installed (postgresql)"
        return "run as root without a user to run PostgreSQL under" if os.getuid() == 0 and self.user is None else None

    def version(self) -> str:
        assert self.bin is not None
        return first_line([str(self.bin / "postgres"), "--version"])

    def command(self) -> list[str]:
        assert self.bin is not None
        sockets = ["--listen_addresses=", f"--unix_socket_directories={self.directory}"]
        return [str(self.bin / "postgres"), "-D", str(self.directory / "data"), *sockets, "--fsync=on", "--synchronous_commit=on"]

    def prepare(self) -> None:
        super().prepare()
        if self.user:
            shutil.chown(self.directory, self.user)
        self._call("initdb", "-D", str(self.directory / "data"), "--auth=trust", "--no-locale", "--encoding=UTF8")

    def start(self) -> None:
        self.prepare()
        self.spawn(**self._as_user())
        self._sql(SCHEMA)
        script = self.directory / "pair.sql"
        script.write_text(PAIR)
        script.chmod(0o644)

    def ready(self) -> bool:
        try:
            self._sql("SELECT 1 \\g /dev/null")
        except BenchError:
            return False
        return True

    def preload(self, count: int, first: int = 0) -> Run:
        self._sql(PRELOAD.format(first=first, last=first + count - 1) + "ANALYZE lease;")
        return {"count": count}

    def _pgbench(self, connections: int, seconds: int, log: Path) -> str:
        load = ["-c", str(connections), "-j", str(min(2, connections)), "-T", str(seconds), "-f", str(self.directory / "pair.sql")]
        told = ["--log", f"--log-prefix={log}"]
        return self._call("pgbench", "-n", "-M", "prepared", *load, *told, "-h", str(self.directory), "postgres")

    def run(self, workload: str, connections: int, seconds: float) -> Run:
        log = self.directory / "pgbench"
        self._pgbench(connections, 1, log)  # warm-up
        for path in self.directory.glob("pgbench.*"):
            path.unlink()
        whole_seconds = math.ceil(seconds)
        told = self._pgbench(connections, whole_seconds, log)
        rate = re.search(r"^tps = ([0-9.]+)", told, re.MULTILINE)
        took: list[int] = []
        for path in self.directory.glob("pgbench.*"):
            took += [int(line.split()[2]) for line in path.read_text().splitlines()]
            path.unlink()
        if rate is None or len(took) < 100:
            raise BenchError(f"pgbench told too little:\n{told}")
        cuts = statistics.quantiles(took, n=100)
        latency = {"count": len(took), "p50": cuts[49], "p99": cuts[98], "max": float(max(took))}
        return {"per_second": float(rate[1]), "seconds": whole_seconds, "count": len(took), "latency_us": {"loop": latency}}
