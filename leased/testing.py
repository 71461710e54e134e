"""For the tests of those who use leased: `FakeLeased`, a stand-in for the daemon within this process, with a clock that tests move.

Nothing here is needed by, or imported with, a program that only uses a client.
"""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

from leased.client.answers import Grant
from leased.client.async_client import AsyncClient
from leased.client.face import running
from leased.client.fake_state import FakeState
from leased.client.fake_streams import FakeLine
from leased.client.fake_time import FakeTime
from leased.client.sync import Client
from leased.client.wire import stand_ins

if TYPE_CHECKING:
    import socket

FIRST_INSTANT: Final = 1000.0  # on the fake's boot clock
CLIENT_TIMEOUT_SECONDS: Final = 0.2  # of real time; an answer, if there is one, is there when a request has been sent

__all__ = ["FakeLeased"]


class FakeLeased:
    """A daemon that is none: real clients talk to it without a socket in the file system and without waiting for real time to pass.

    It decides by the daemon's own rules.  Leases live by the clock of the fake, which stands still until `advance` (in code with
    threads) or `sleep` (in tasks of trio or asyncio) moves it: renewals, lapses and switches that are due on the way happen on the way.
    `client()` and `async_client()` give clients; code that makes its own finds the fake at `socket`, for instance by $LEASED_SOCKET.
    `autojump`: a `wait` for a key moves the clock to its end instead of waiting for another thread to move it; not for tasks.
    `calls`: every request that arrived, as (operation, fields).  There is one namespace, the caller is an operator, nothing is billed,
    and limits are not simulated.  Usable from several threads.
    """

    def __init__(self, *, autojump: bool = False) -> None:
        self.socket = f"/leased.testing/{os.urandom(8).hex()}"
        self.autojump = autojump
        self.calls: list[tuple[str, dict[str, Any]]] = []
        self._deciding = threading.RLock()
        self._lines: list[FakeLine] = []
        self._null: str | None = None
        self._away = False
        self._silent: set[str] = set()
        self.time = FakeTime(FIRST_INSTANT, self._due, self._tick)
        self._state = FakeState(self.time.now)
        stand_ins[self.socket] = self

    def client(self, holder: str | None = None, timeout: float = CLIENT_TIMEOUT_SECONDS) -> Client:
        return Client(self.socket, holder, timeout)

    def async_client(self, holder: str | None = None, timeout: float = CLIENT_TIMEOUT_SECONDS) -> AsyncClient:
        return AsyncClient(self.socket, holder, timeout)

    # ---- time

    @property
    def now(self) -> float:
        """The instant of the fake's boot clock, in seconds."""
        return self.time.now()

    def advance(self, seconds: float) -> None:
        """Moves the clock.  Threads that renew leases have done so when this returns."""
        self.time.advance(seconds)

    async def sleep(self, seconds: float) -> None:
        """Moves the clock, from a task.  Tasks that keep leases have renewed them, or cancelled their blocks, when this returns."""
        await self.time.sleep(running(), seconds)

    # ---- what others do, and what goes wrong

    def hold(self, key: str, ttl: float = 60, holder: str = "somebody else", scope: str | None = None) -> int:
        """Somebody else takes `key`; the generation of their lease.  Raises AssertionError if the key is held."""
        grant = self.client(holder).try_acquire(key, ttl, scope=scope)
        assert isinstance(grant, Grant), f"{key!r} is held already"
        return grant.generation

    def lose(self, key: str) -> None:
        """Ends the lease on `key` as an operator's revocation does: its next renewal, or its release, is refused.

        Raises AssertionError if nobody holds it.
        """
        with self._deciding:
            assert self._state.end(key, "revoked", "FakeLeased.lose") is not None, f"nobody holds {key!r}"

    @contextmanager
    def unreachable(self) -> Iterator[None]:
        """No daemon is there: connections end, and none can be made.  What is held goes on counting down."""
        with self._deciding:
            self._away = True
            lines, self._lines = self._lines, []
        for line in lines:
            line.close()
        try:
            yield
        finally:
            self._away = False

    @contextmanager
    def unknown(self, reason: str = "store") -> Iterator[None]:
        """Nobody can tell: `lease`, `renew`, `release` and `check` answer null, for this reason."""
        self._null = reason
        try:
            yield
        finally:
            self._null = None

    @contextmanager
    def unanswered(self, *operations: str) -> Iterator[None]:
        """Requests (of these operations, or all) are carried out, but their answers are lost: clients wait in vain, for their timeout."""
        self._silent = set(operations) or {"*"}
        try:
            yield
        finally:
            self._silent = set()

    # ---- for the clients

    def connect(self) -> socket.socket:
        """A new connection.  Raises OSError while the fake is unreachable."""
        with self._deciding:
            if self._away:
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
            line = FakeLine(self._asked, self._hung_up)
            self._lines.append(line)
            return line.stream

    def _asked(self, line: FakeLine, msgid: int, operation: str, params: dict[str, Any]) -> None:
        with self._deciding:
            self.calls.append((operation, dict(params)))
            line.mute = bool(self._silent & {operation, "*"})
            self._state.asked(line, msgid, operation, params, self._null)
            line.mute = False
        while self.autojump and msgid not in line.answered and (due := self._due()) is not None:
            self.advance(max(0.0, due - self.now))
        line.answered.discard(msgid)

    def _hung_up(self, line: FakeLine) -> None:
        with self._deciding:
            if line in self._lines:
                self._lines.remove(line)
            self._state.hung_up(line)

    def _due(self) -> float | None:
        with self._deciding:
            return self._state.due()

    def _tick(self) -> None:
        with self._deciding:
            self._state.tick()
