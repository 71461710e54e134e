"""Runs one asynchronous test under trio and under asyncio.  `@under_both` gives it a `loop` that names what the two call differently."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import trio

Work = Callable[[], Awaitable[Any]]
PATIENCE_SECONDS = 20.0  # of real time, for a test that hangs


class TrioLoop:
    name = "trio"
    Cancelled: type[BaseException] = trio.Cancelled

    def run(self, test: Work) -> None:
        async def bounded() -> None:
            with trio.fail_after(PATIENCE_SECONDS):
                await test()

        trio.run(bounded)

    async def for_ever(self) -> None:
        await trio.sleep_forever()

    async def turn(self) -> None:
        await trio.lowlevel.checkpoint()

    async def together(self, *works: Work) -> list[Any]:
        results: list[Any] = [None] * len(works)

        async def keep(at: int, work: Work) -> None:
            results[at] = await work()

        async with trio.open_nursery() as nursery:
            for at, work in enumerate(works):
                nursery.start_soon(keep, at, work)
        return results

    async def cancelled(self, work: Work, when: Work) -> bool:
        """Cancels `work` from outside once `when` is over.  True if that cancellation is what ended it."""
        with trio.CancelScope() as scope:
            async with trio.open_nursery() as nursery:

                async def cancel() -> None:
                    await when()
                    scope.cancel()

                nursery.start_soon(cancel)
                await work()
                nursery.cancel_scope.cancel()
        return scope.cancelled_caught

    def living(self) -> int:
        return trio.lowlevel.current_statistics().tasks_living


class AsyncioLoop:
    name = "asyncio"
    Cancelled: type[BaseException] = asyncio.CancelledError

    def run(self, test: Work) -> None:
        async def bounded() -> None:
            await asyncio.wait_for(test(), PATIENCE_SECONDS)

        asyncio.run(bounded())

    async def for_ever(self) -> None:
        await asyncio.get_running_loop().create_future()

    async def turn(self) -> None:
        await asyncio.sleep(0)

    async def together(self, *works: Work) -> list[Any]:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(_coroutine(work)) for work in works]
        return [task.result() for task in tasks]

    async def cancelled(self, work: Work, when: Work) -> bool:
        task = asyncio.create_task(_coroutine(work))
        await when()
        task.cancel()
        try:
            await task
        except asyncio.CancelledError:
            return True
        return False

    def living(self) -> int:
        return len(asyncio.all_tasks())


Loop = TrioLoop | AsyncioLoop
LOOPS: dict[str, Loop] = {"trio": TrioLoop(), "asyncio": AsyncioLoop()}


def under_both(test: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    @functools.wraps(test)
    def run(**fixtures: Any) -> None:
        loop = LOOPS[fixtures.pop("loop")]
        loop.run(lambda: test(loop=loop, **fixtures))

    return pytest.mark.parametrize("loop", list(LOOPS))(run)


async def _coroutine(work: Work) -> Any:
    return await work()


async def until(true: Callable[[], Any], loop: Loop) -> None:
    """Gives way until it has come true; a test that waits in vain is ended by its loop."""
    while not true():
        await loop.turn()
