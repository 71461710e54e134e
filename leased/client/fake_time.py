"""A clock that stands still until a test moves it, and that lets whoever slept by it do their part on the way."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Final

from leased.client.attempt import FOR_EVER
from leased.client.host_time import HostTime

if TYPE_CHECKING:
    from leased.client.face import Face, Gate

PATIENCE_SECONDS: Final = 5.0  # of real time, for those who were woken to come to rest: they take microseconds
TURNS: Final = 1000  # of the loop, for the same


class FakeTime(HostTime):
    """`due()` tells when something else is due, `tick()` does what is."""

    def __init__(self, now: float, due: Callable[[], float | None], tick: Callable[[], None]) -> None:
        self._now = now
        self._due = due
        self._tick = tick
        self._change = threading.Condition()  # guards all below
        self._asleep: dict[object, tuple[float, Callable[[], None]]] = {}
        self._awake: set[object] = set()
        self._seen = threading.local()

    def now(self) -> float:
        self._seen.now = self._now
        return self._now

    # ---- those who sleep

    def begins(self, keeper: object) -> None:
        with self._change:
            self._awake.add(keeper)

    def ends(self, keeper: object) -> None:
        with self._change:
            self._awake.discard(keeper)
            self._asleep.pop(keeper, None)
            self._change.notify_all()

    def wait(self, change: threading.Condition, seconds: float) -> None:
        keeper = threading.current_thread()

        def wake() -> None:
            with change:
                change.notify_all()

        if self._sleeps(keeper, self._seen.now + seconds, wake):
            change.wait()
            self._wakes(keeper)

    async def rest(self, face: Face, gate: Gate, seconds: float, keeper: object) -> None:
        if self._sleeps(keeper, self._seen.now + seconds, gate.open):
            try:
                await gate.passed(FOR_EVER)
            finally:
                self._wakes(keeper)
        else:
            await face.sleep(0)

    def _sleeps(self, keeper: object, until: float, wake: Callable[[], None]) -> bool:
        with self._change:
            if until <= self._now:
                return False
            self._awake.discard(keeper)
            self._asleep[keeper] = (until, wake)
            self._change.notify_all()
            return True

    def _wakes(self, keeper: object) -> None:
        with self._change:
            if self._asleep.pop(keeper, None) is not None:  # by its own doing, not the clock's
                self._awake.add(keeper)

    # ---- those who move the clock

    def advance(self, seconds: float) -> None:
        for _ in self._steps(seconds):
            self._settle_threads()

    async def sleep(self, face: Face, seconds: float) -> None:
        for _ in self._steps(seconds):
            for _ in range(TURNS):
                await face.sleep(0)
                if not self._moving(threads=False):
                    break
            self._settle_threads()
        for _ in range(10):  # for tasks that no clock knows of
            await face.sleep(0)

    def _steps(self, seconds: float) -> Iterator[None]:
        """One for each moment on the way at which something happens.  Between two of them, whoever was woken comes to rest."""
        target = self._now + seconds
        yield
        while True:
            due = self._due()
            with self._change:
                moments = [until for until, _ in self._asleep.values()]
                following = min(moments if due is None else [*moments, due], default=target)
                if following > target or not (moments or due is not None):
                    self._now = target
                    return
                self._now = max(self._now, following)
                woken = [(keeper, wake) for keeper, (until, wake) in self._asleep.items() if until <= self._now]
                for keeper, _ in woken:
                    del self._asleep[keeper]
                    self._awake.add(keeper)
            self._tick()
            for _, wake in woken:
                wake()
            yield

    def _moving(self, threads: bool) -> bool:
        with self._change:
            return any(isinstance(keeper, threading.Thread) is threads for keeper in self._awake)

    def _settle_threads(self) -> None:
        me = threading.current_thread()
        give_up = time.monotonic() + PATIENCE_SECONDS
        with self._change:
            while any(isinstance(keeper, threading.Thread) and keeper is not me for keeper in self._awake):
                left = give_up - time.monotonic()
                if left <= 0 or not self._change.wait(min(left, 0.05)):
                    self._awake = {each for each in self._awake if not isinstance(each, threading.Thread) or each.is_alive()}
                    if left <= 0:
                        return
