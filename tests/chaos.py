"""An upstream that does everything wrong but lose what it has taken.  It stores by the reference collector, and misbehaves around it."""

from __future__ import annotations

import importlib.util
import random
import socket
import struct
import sys
import threading
from collections import Counter
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Any

from daemons import ROOT

HANG_SECONDS = 0.8  # longer than the shipper of these tests waits
TOKEN = "t0ken-of-the-tests"


def collector_module() -> Any:
    """contrib/collector/collector.py, which is a program and in no package."""
    if "collector" not in sys.modules:
        spec = importlib.util.spec_from_file_location("collector", ROOT / "contrib/collector/collector.py")
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules["collector"] = module
        spec.loader.exec_module(module)
    return sys.modules["collector"]


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A daemon that is killed in the middle of an exchange is what these tests are about."""


class ChaosUpstream:
    """Listens at `url`.  `calm` ends the misbehaviour.  `did` counts what was done."""

    FATES = (
        ("take", 72), ("take, then hang", 4), ("take, then reset", 5), ("take, then 500", 3), ("take, then 409", 3), ("reset", 3), ("hang up", 2),
        ("500", 3), ("503 with Retry-After", 2), ("429 with a date", 2), ("repeat an old batch", 2),
    )  # fmt: skip

    def __init__(self, database: Path, seed: int) -> None:
        module = collector_module()
        self.store = module.Store(database)
        self.did: Counter[str] = Counter()
        self.calm = False
        self._module = module
        self._dice = random.Random(seed)
        self._lock = threading.Lock()
        self._seen: list[bytes] = []
        self._ended = threading.Event()
        self._server = _Server(("127.0.0.1", 0), self._door())
        self.url = f"http://127.0.0.1:{self._server.server_port}/events"
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05})
        self._thread.start()

    def _door(self) -> type:
        chaos = self

        class Door(chaos._module.Door):  # type: ignore[name-defined,misc]
            def do_POST(self) -> None:
                chaos.serve(self)

        return Door

    def serve(self, door: Any) -> None:
        with self._lock:
            fate = "take" if self.calm else self._dice.choices(*zip(*self.FATES, strict=True))[0]
            self.did[fate] += 1
        if fate == "reset":
            _reset(door)
            return
        body = door.rfile.read(int(door.headers["Content-Length"]))
        if door.headers["Authorization"] != f"Bearer {TOKEN}":
            door.answer(401, {})
            return
        if fate == "hang up":
            door.close_connection = True
            return
        if fate in {"500", "503 with Retry-After", "429 with a date"}:
            headers = {
                "503 with Retry-After": {"Retry-After": "1"},
                "429 with a date": {"Retry-After": "Thu, 01 Jan 1970 00:00:00 GMT"},
            }
            door.answer(int(fate[:3]), {"error": fate}, headers.get(fate))
            return
        self._take(body, repeat=fate == "repeat an old batch")
        if fate == "take, then hang":
            self._ended.wait(HANG_SECONDS)
            door.close_connection = True
        elif fate == "take, then reset":
            _reset(door)
        elif fate.startswith("take, then "):
            door.answer(int(fate[-3:]), {})
        else:
            door.answer(202, {})

    def _take(self, body: bytes, *, repeat: bool) -> None:
        """As if something between had kept a batch and sent it once more, backwards and late."""
        with self._lock:
            self._seen.append(body)
            old = self._dice.choice(self._seen) if repeat else None
        if old is not None:
            self.store.take(self._module.read_batch(old)[::-1])
        self.store.take(self._module.read_batch(body))

    def stored(self) -> list[tuple[str, str, int, str]]:
        """(id, type, micro-units, whole) of every event."""
        with self.store._lock:
            rows = self.store._database.execute("SELECT id, type, micro, whole FROM events").fetchall()
        return [(str(row[0]), str(row[1]), int(row[2]), str(row[3])) for row in rows]

    def close(self) -> None:
        self._ended.set()
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()
        self.store.close()


def _reset(door: Any) -> None:
    door.close_connection = True
    door.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    door.connection.close()
    door.wfile = door.rfile = _Nothing()


class _Nothing:
    """The standard library flushes what is closed."""

    closed = True

    def flush(self) -> None: ...

    def close(self) -> None: ...

    def write(self, octets: bytes) -> int:
        return len(octets)
