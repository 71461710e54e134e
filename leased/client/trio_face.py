"""The asynchronous client under trio.

Background work is a system task: a nursery of ours around the caller's block would wrap the caller's exceptions in groups.
"""

from __future__ import annotations

import threading
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import TYPE_CHECKING, Final

import trio

if TYPE_CHECKING:
    import socket


class TrioGate:
    def __init__(self) -> None:
        self._event = trio.Event()
        self._trio = trio.lowlevel.current_trio_token()
        self._thread = threading.get_ident()

    def open(self) -> None:
        if threading.get_ident() == self._thread:
            self._event.set()
            return
        try:
            self._trio.run_sync_soon(self._event.set)
        except trio.RunFinishedError:
            pass

    async def passed(self, deadline: float) -> bool:
        with trio.move_on_at(deadline):
            await self._event.wait()
        return self._event.is_set()


class TrioScope:
    def __init__(self) -> None:
        self._scope = trio.CancelScope()

    def enter(self) -> None:
        self._scope.__enter__()

    def cancel(self) -> None:
        self._scope.cancel()

    def exit(self, kind: type[BaseException] | None, raised: BaseException | None, trace: TracebackType | None) -> bool:
        caught = self._scope.__exit__(kind, raised, trace)
        return kind is not None and caught


class TrioBackground:
    def __init__(self, work: Callable[[], Awaitable[None]], then: Callable[[], None]) -> None:
        self._work = work
        self._then = then
        self._scope = trio.CancelScope()
        self._ended = trio.Event()
        trio.lowlevel.spawn_system_task(self._run, name="leased keeper")

    async def _run(self) -> None:
        try:
            with self._scope:
                await self._work()
        finally:
            self._then()
            self._ended.set()

    def cancel(self) -> None:
        self._scope.cancel()

    async def ended(self) -> None:
        await self._ended.wait()


class TrioFace:
    def now(self) -> float:
        return trio.current_time()

    def gate(self) -> TrioGate:
        return TrioGate()

    def scope(self) -> TrioScope:
        return TrioScope()

    def spawn(self, work: Callable[[], Awaitable[None]], then: Callable[[], None]) -> TrioBackground:
        return TrioBackground(work, then)

    async def sleep(self, seconds: float) -> None:
        await trio.sleep(seconds)

    async def ready(self, stream: socket.socket, writing: bool, deadline: float) -> bool:
        if stream.fileno() < 0:
            raise OSError("closed")
        with trio.move_on_at(deadline) as scope:
            await (trio.lowlevel.wait_writable if writing else trio.lowlevel.wait_readable)(stream)
        return not scope.cancelled_caught

    async def shielded(self, work: Callable[[], Awaitable[None]], seconds: float) -> None:
        with trio.move_on_after(seconds, shield=True):
            await work()


FACE: Final = TrioFace()
