"""What an asynchronous client needs of trio or asyncio, and which of the two is running.  Neither is imported before it runs.

sniffio comes with trio alone, so this looks for itself: what is not in `sys.modules` runs nothing.
"""

from __future__ import annotations

import sys
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import TYPE_CHECKING, Protocol

from leased.errors import LeasedError

if TYPE_CHECKING:
    import socket


class Gate(Protocol):
    """Opened once, by any thread; one task waits for it."""

    def open(self) -> None: ...

    async def passed(self, deadline: float) -> bool:
        """Waits until it is open; False at `deadline` (`Face.now`).  Always a checkpoint.  Cancelled, it can be waited for again."""
        ...


class Scope(Protocol):
    """Cancels the block between `enter` and `exit`, both called by the task that runs it, and nothing outside of it."""

    def enter(self) -> None: ...

    def cancel(self) -> None:
        """From another task of the same loop."""
        ...

    def exit(self, kind: type[BaseException] | None, raised: BaseException | None, trace: TracebackType | None) -> bool:
        """True if what ends the block is this scope's own cancellation and nothing else.  May raise what remains of a group."""
        ...


class Background(Protocol):
    """Work that belongs to no nursery or task group."""

    def cancel(self) -> None: ...

    async def ended(self) -> None: ...


class Face(Protocol):
    def now(self) -> float:
        """Seconds of the loop's own clock, by which deadlines are given."""
        ...

    def gate(self) -> Gate: ...

    def scope(self) -> Scope: ...

    def spawn(self, work: Callable[[], Awaitable[None]], then: Callable[[], None]) -> Background:
        """Runs `work` until it returns or the loop ends, and `then` however that came, even if it was cancelled before it began.

        `work` raises nothing but its own cancellation.
        """
        ...

    async def sleep(self, seconds: float) -> None: ...

    async def ready(self, stream: socket.socket, writing: bool, deadline: float) -> bool:
        """Waits until `stream` can be read (or written), or has ended; False at `deadline`.  Cancelled, nothing has happened.

        One task at a time for each direction.  Raises OSError for a closed stream.
        """
        ...

    async def shielded(self, work: Callable[[], Awaitable[None]], seconds: float) -> None:
        """Runs `work` to its end, at most `seconds`, whatever is cancelled outside meanwhile; that is delivered afterwards."""
        ...


def running() -> Face:
    """The face of the library whose task this is.  Raises NoLoop outside of both."""
    trio = sys.modules.get("trio")
    if trio is not None and hasattr(trio, "lowlevel") and trio.lowlevel.in_trio_task():
        from leased.client.trio_face import FACE

        return FACE
    asyncio = sys.modules.get("asyncio")
    if asyncio is not None and hasattr(asyncio, "_get_running_loop") and asyncio._get_running_loop() is not None:
        from leased.client.asyncio_face import FACE as ASYNCIO_FACE

        return ASYNCIO_FACE
    raise NoLoop("AsyncClient is for tasks of trio or asyncio, and neither runs here; outside of them there is Client")


class NoLoop(LeasedError, RuntimeError):
    """An asynchronous call outside of trio and asyncio."""
