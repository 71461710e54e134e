"""A daemon that says what a test tells it to, over a real Unix socket, and a clock that only moves when told to."""

from __future__ import annotations

import os
import selectors
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import msgpack

from leased.client.host_time import HostTime
from leased.frames import Requests

PATIENCE_SECONDS = 5.0  # how long a test waits for what must happen, before it fails

DROP = object()  # close the connection instead of answering
SILENCE = object()  # do not answer (yet)


class Asked(NamedTuple):
    """One request as it arrived; `connection` counts from 1."""

    connection: int
    msgid: int
    method: str
    params: dict[str, Any]


class Fault(NamedTuple):
    """An error answer; with `msgid` 0 it is about the connection, which then ends."""

    text: str
    about_connection: bool = False


class Raw(NamedTuple):
    """Bytes instead of an answer."""

    octets: bytes


Script = Callable[[Asked], Any]


class FakeDaemon:
    """Answers each request with what `script` returns for it: a map, a Fault, Raw, DROP or SILENCE."""

    def __init__(self, path: Path, script: Script) -> None:
        self.path = str(path)
        self.script = script
        self.asked: list[Asked] = []
        self.closed: list[int] = []
        self._changed = threading.Condition()
        self._selector = selectors.DefaultSelector()
        self._connections: dict[int, socket.socket] = {}
        self._readers: dict[int, Requests] = {}
        self._count = 0
        self._wake_read, self._wake_write = os.pipe()
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(self.path)
        self._listener.listen()
        self._selector.register(self._wake_read, selectors.EVENT_READ, -1)
        self._selector.register(self._listener, selectors.EVENT_READ, 0)
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def __enter__(self) -> FakeDaemon:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Closes everything; clients are refused from then on."""
        if self._wake_write >= 0:
            os.close(self._wake_write)
            self._wake_write = -1
            self._thread.join(PATIENCE_SECONDS)
            os.close(self._wake_read)

    def methods(self) -> list[str]:
        return [asked.method for asked in list(self.asked)]

    def wait_until(self, true: Callable[[], Any]) -> None:
        """Waits for a condition on `asked` or `closed`; fails the test if it does not come true."""
        with self._changed:
            assert self._changed.wait_for(true, PATIENCE_SECONDS), f"did not happen; asked: {self.asked}"

    def answer(self, asked: Asked, result: Any) -> None:
        """Answers, from any thread, a request that was met with SILENCE."""
        self._connections[asked.connection].sendall(msgpack.packb((1, asked.msgid, None, result)))

    def send(self, connection: int, octets: bytes) -> None:
        """Anything, from any thread: what nobody asked for."""
        self._connections[connection].sendall(octets)

    def close_connection(self, number: int) -> None:
        self._connections[number].shutdown(socket.SHUT_RDWR)

    def _serve(self) -> None:
        try:
            while True:
                for key, _ in self._selector.select():
                    if key.data == -1:
                        return
                    if key.data == 0:
                        self._accept()
                    else:
                        self._read(key.data)
        finally:
            self._listener.close()
            for stream in self._connections.values():
                stream.close()
            self._selector.close()

    def _accept(self) -> None:
        stream, _ = self._listener.accept()
        self._count += 1
        self._connections[self._count] = stream
        self._readers[self._count] = Requests()
        self._selector.register(stream, selectors.EVENT_READ, self._count)

    def _read(self, number: int) -> None:
        stream, reader = self._connections[number], self._readers[number]
        octets = stream.recv(65536)
        if not octets:
            self._close(number)
            return
        reader.feed(octets)
        for msgid, method, params in reader.take():
            assert msgid is not None
            asked = Asked(number, msgid, method, params)
            with self._changed:
                self.asked.append(asked)
                self._changed.notify_all()
            response = self.script(asked)
            if response is SILENCE:
                continue
            if response is DROP:
                self._close(number)
                return
            try:
                stream.sendall(_octets(asked, response))
            except OSError:
                self._close(number)
                return
            if isinstance(response, Raw) or (isinstance(response, Fault) and response.about_connection):
                self._close(number)
                return

    def _close(self, number: int) -> None:
        self._selector.unregister(self._connections[number])
        self._connections[number].close()
        with self._changed:
            self.closed.append(number)
            self._changed.notify_all()


def _octets(asked: Asked, response: Any) -> bytes:
    if isinstance(response, Raw):
        return response.octets
    if isinstance(response, Fault):
        packed: bytes = msgpack.packb((1, 0 if response.about_connection else asked.msgid, response.text, None))
        return packed
    return bytes(msgpack.packb((1, asked.msgid, None, response)))


def granted(asked: Asked, fence: str = "9007199254740993", generation: int = 17, **more: Any) -> dict[str, Any]:
    """The reply to a request that is granted as asked."""
    ttl = asked.params.get("ttl_seconds") or 60.0
    return {
        "acquired": True,
        "renewed": asked.method == "renew",
        "key": asked.params["key"],
        "holder": asked.params["holder"],
        "fence": fence,
        "generation": generation,
        "scope": asked.params.get("scope"),
        "ttl_seconds": ttl,
        "expires_at": "2026-11-29T17:39:36.123Z",
        "expires_in_seconds": ttl,
        "expires_boottime": 5000.0,
        "boot_id": "of-another-boot",
        "charge": {"amount": "0", "currency": "USDC", "event_id": None},
        **more,
    }


def refused(asked: Asked, reason: str = "held", held_by: str | None = "worker-7", **more: Any) -> dict[str, Any]:
    """The reply to a request that is refused while `held_by` holds the key for 12.3 s more."""
    return {
        "acquired": False,
        "key": asked.params["key"],
        "holder": asked.params.get("holder"),
        "reason": reason,
        "held_by": held_by,
        "same_holder_label": reason == "same_label",
        "generation": None if held_by is None else 41,
        "expires_at": None if held_by is None else "2026-11-29T17:39:36.123Z",
        "expires_in_seconds": None if held_by is None else 12.3,
        "retry_after_seconds": None if held_by is None else 12.3,
        "charge": {"amount": "0", "currency": "USDC", "event_id": None},
        **more,
    }


class FakeTime(HostTime):
    """A boot clock that stands still until `advance`; waits end when it has moved far enough, or by notification."""

    def __init__(self, now: float = 1000.0) -> None:
        self._now = now
        self._lock = threading.Lock()
        self._seen = threading.local()
        self._waiting: set[threading.Condition] = set()

    def now(self) -> float:
        with self._lock:
            self._seen.now = self._now
            return self._now

    def wait(self, change: threading.Condition, seconds: float) -> None:
        with self._lock:
            if self._now > self._seen.now:  # moved since the waiter looked: it must look again
                return
            self._waiting.add(change)
        change.wait(PATIENCE_SECONDS)

    def advance(self, seconds: float) -> None:
        with self._lock:
            self._now += seconds
            waiting = list(self._waiting)
        for change in waiting:
            with change:
                change.notify_all()
