"""Redis in three settings, and etcd: the anchors that the load generator itself can drive."""

from __future__ import annotations

import shutil
import socket
from pathlib import Path
from typing import ClassVar

from anchor import FEW_ROUNDS, PRELOADED_TTL_SECONDS, Anchor, Run, ask, first_line
from host import Places


def free_port() -> int:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


class RedisAlways(Anchor):
    name = "redis-always"
    title = "Redis, appendfsync always"
    protocol = "redis"
    workloads = ("pairs", "renew", "refuse", "check")
    persistence: ClassVar[tuple[str, ...]] = ("--appendonly", "yes", "--appendfsync", "always")
    after_power_cut = "every grant and release was flushed before its reply; expiry hangs on the wall clock"

    def missing(self) -> str | None:
        return None if shutil.which("redis-server") else "not installed (redis-server)"

    def version(self) -> str:
        return first_line(["redis-server", "--version"])

    def command(self) -> list[str]:
        # /dev/null as the configuration: only what stands here counts.  `--save ""`: no snapshots beside the append-only file.
        settings = ["--port", "0", "--unixsocket", self.address, "--dir", str(self.directory), "--save", "", *self.persistence]
        return ["redis-server", "/dev/null", *settings]

    def ready(self) -> bool:
        return ask(self.address, b"PING\r\n") == b"+PONG\r\n"


class RedisEverysec(RedisAlways):
    name = "redis-everysec"
    title = "Redis, appendfsync everysec"
    persistence = ("--appendonly", "yes", "--appendfsync", "everysec")
    after_power_cut = (
        "grants of the last second or two are forgotten and given out again while their holders work on: two holders are possible"
    )


class RedisNone(RedisAlways):
    name = "redis-none"
    title = "Redis, no persistence"
    persistence = ("--appendonly", "no")
    after_power_cut = (
        "everything is forgotten, as at any restart of the server: two holders are possible, and generations begin again at 1"
    )


class Etcd(Anchor):
    name = "etcd"
    title = "etcd, one member, JSON gateway"
    protocol = "etcd"
    most_rounds = FEW_ROUNDS
    after_power_cut = "every grant and release was flushed to its log before the reply; leases get their full ttl again"

    def __init__(self, places: Places, load: Path) -> None:
        super().__init__(places, load)
        self.port = free_port()
        self.peer_port = free_port()
        self.address = f"127.0.0.1:{self.port}"

    def missing(self) -> str | None:
        return None if shutil.which("etcd") else "not installed (etcd-server)"

    def version(self) -> str:
        return first_line(["etcd", "--version"])

    def command(self) -> list[str]:
        client, peer = f"http://127.0.0.1:{self.port}", f"http://127.0.0.1:{self.peer_port}"
        listen = ["--listen-client-urls", client, "--advertise-client-urls", client, "--listen-peer-urls", peer]
        cluster = ["--initial-advertise-peer-urls", peer, "--initial-cluster", f"default={peer}"]
        return ["etcd", "--data-dir", str(self.directory / "data"), *listen, *cluster, "--logger", "zap", "--log-level", "error"]

    def ready(self) -> bool:
        request = b"GET /health HTTP/1.1\r\nHost: bench\r\nConnection: close\r\n\r\n"
        return ask(("127.0.0.1", self.port), request).startswith(b"HTTP/1.1 200 ")

    def preload(self, count: int, first: int = 0) -> Run:
        more = ("--count", str(count), "--first", str(first), "--ttl", str(PRELOADED_TTL_SECONDS))
        return self.drive("preload", 64, *more)  # HTTP: one request at a time per connection
