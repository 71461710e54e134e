"""The asynchronous client under asyncio.

A block is cancelled as `asyncio.timeout` does it: the task is cancelled, and the count of cancellations tells at the end of the block
whether somebody outside wanted it cancelled too.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final

from leased.client.attempt import FOR_EVER

if TYPE_CHECKING:
    import socket


class AsyncioGate:
    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._thread = threading.get_ident()
        self._is_open = False
        self._woken: asyncio.Future[bool] | None = None

    def open(self) -> None:
        self._is_open = True
        if threading.get_ident() == self._thread:
            self._wake()
            return
        try:
            self._loop.call_soon_threadsafe(self._wake)
        except RuntimeError:  # the loop is closed: nobody waits any more
            pass

    def _wake(self) -> None:
        if self._woken is not None:
            _settle(self._woken, True)

    async def passed(self, deadline: float) -> bool:
        if self._is_open:
            await asyncio.sleep(0)
            return True
        self._woken = self._loop.create_future()
        return await _until(self._woken, deadline) or self._is_open


class AsyncioScope:
    def __init__(self) -> None:
        self._task: asyncio.Task[Any] | None = None
        self._before = 0
        self._cancelled = False
        self._over = False

    def enter(self) -> None:
        self._task = asyncio.current_task()
        if self._task is None:
            raise RuntimeError("a lease is held by a task, and no task runs here")
        self._before = self._task.cancelling()

    def cancel(self) -> None:
        if not self._over and not self._cancelled and self._task is not None:
            self._cancelled = True
            self._task.cancel("the lease is lost")

    def exit(self, kind: type[BaseException] | None, raised: BaseException | None, trace: TracebackType | None) -> bool:
        self._over = True
        if not self._cancelled or self._task is None:
            return False
        ours = self._task.uncancel() <= self._before
        return ours and kind is not None and issubclass(kind, asyncio.CancelledError)


class AsyncioBackground:
    def __init__(self, work: Callable[[], Awaitable[None]], then: Callable[[], None] | None = None) -> None:
        async def run() -> None:
            await work()

        self._task = asyncio.get_running_loop().create_task(run(), name="leased keeper")
        if then is not None:
            self._task.add_done_callback(lambda _: then())

    def cancel(self) -> None:
        self._task.cancel()

    async def ended(self) -> None:
        await asyncio.wait({self._task})


class AsyncioFace:
    def now(self) -> float:
        return asyncio.get_running_loop().time()

    def gate(self) -> AsyncioGate:
        return AsyncioGate()

    def scope(self) -> AsyncioScope:
        return AsyncioScope()

    def spawn(self, work: Callable[[], Awaitable[None]], then: Callable[[], None]) -> AsyncioBackground:
        return AsyncioBackground(work, then)

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    async def ready(self, stream: socket.socket, writing: bool, deadline: float) -> bool:
        loop = asyncio.get_running_loop()
        descriptor = stream.fileno()
        if descriptor < 0:
            raise OSError("closed")
        woken = loop.create_future()
        listen, forget = (loop.add_writer, loop.remove_writer) if writing else (loop.add_reader, loop.remove_reader)
        listen(descriptor, _settle, woken, True)
        try:
            return await _until(woken, deadline)
        finally:
            forget(descriptor)

    async def shielded(self, work: Callable[[], Awaitable[None]], seconds: float) -> None:
        sheltered = AsyncioBackground(work)
        timer = asyncio.get_running_loop().call_later(seconds, sheltered.cancel)
        from_outside: asyncio.CancelledError | None = None
        while not sheltered._task.done():
            try:
                await sheltered.ended()
            except asyncio.CancelledError as cancelled:
                from_outside = cancelled
        timer.cancel()
        if from_outside is not None:
            raise from_outside
        if not sheltered._task.cancelled():
            sheltered._task.result()


async def _until(woken: asyncio.Future[bool], deadline: float) -> bool:
    timer = None if deadline == FOR_EVER else woken.get_loop().call_at(deadline, _settle, woken, False)
    try:
        return await woken
    finally:
        if timer is not None:
            timer.cancel()


def _settle(woken: asyncio.Future[bool], value: bool) -> None:
    if not woken.done():
        woken.set_result(value)


FACE: Final = AsyncioFace()
