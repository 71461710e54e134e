"""The ping of the watchdog: it leaves only after a turn of the lane that the task of the time has asked for."""

from __future__ import annotations

import math
import os
import select
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from leased.pulse import Pulse, Standing, standing
from leased.systemd import Notifier


class Manager:
    """The other end of $NOTIFY_SOCKET."""

    def __init__(self, path: Path) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(str(path))
        self._socket.setblocking(False)

    def heard(self) -> list[list[str]]:
        messages = []
        while True:
            try:
                messages.append(self._socket.recv(4096).decode().split("\n"))
            except BlockingIOError:
                return messages

    def close(self) -> None:
        self._socket.close()


class Lane:
    """A switchboard of one descriptor, and what waits for the end of its turn."""

    def __init__(self) -> None:
        self._then: dict[int, Callable[[], None]] = {}
        self._after: list[Callable[[], None]] = []

    def readable(self, descriptor: int, then: Callable[[], None]) -> None:
        self._then[descriptor] = then

    def after(self, call: Callable[[], None]) -> None:
        self._after.append(call)

    @property
    def asked(self) -> bool:
        return bool(select.select(list(self._then), [], [], 0)[0])

    def turn(self) -> None:
        for descriptor in select.select(list(self._then), [], [], 0)[0]:
            self._then[descriptor]()
        calls, self._after = self._after, []
        for call in calls:
            call()


@pytest.fixture
def manager(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Manager]:
    made = Manager(tmp_path / "notify")
    monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
    yield made
    made.close()


def watched(monkeypatch: pytest.MonkeyPatch, seconds: float, pid: int | None = None) -> None:
    monkeypatch.setenv("WATCHDOG_USEC", str(int(seconds * 1e6)))
    monkeypatch.setenv("WATCHDOG_PID", str(os.getpid() if pid is None else pid))


def test_time_that_passes_pings_nobody_and_a_turn_does(manager: Manager, monkeypatch: pytest.MonkeyPatch) -> None:
    watched(monkeypatch, 9)
    lane = Lane()
    pulse = Pulse(Notifier(), lambda: Standing("serving", 0), lane.readable, lane.after)
    for second in range(30):
        pulse.each_second(float(second))
    assert manager.heard() == [], "the lane has not turned"
    lane.turn()
    assert manager.heard() == [["WATCHDOG=1", "STATUS=serving; 0 leases held"]]
    lane.turn()
    assert manager.heard() == [], "a turn that nobody asked for is no proof that the time goes on"


def test_three_pings_in_the_time_of_the_watchdog(manager: Manager, monkeypatch: pytest.MonkeyPatch) -> None:
    watched(monkeypatch, 9)
    lane = Lane()
    pulse = Pulse(Notifier(), lambda: Standing("serving", 0), lane.readable, lane.after)
    pings = []
    for second in range(10):
        pulse.each_second(float(second))
        lane.turn()
        pings += [second] if manager.heard() else []
    assert pings == [0, 3, 6, 9]


def test_news_is_told_at_once_and_a_count_seldom(manager: Manager) -> None:
    lane = Lane()
    now = Standing("recovering until 2026-11-29T20:00:00Z", 1)
    pulse = Pulse(Notifier(), lambda: now, lane.readable, lane.after)

    def told(second: float) -> list[list[str]]:
        pulse.each_second(second)
        lane.turn()
        return manager.heard()

    assert told(0) == [["STATUS=recovering until 2026-11-29T20:00:00Z; 1 lease held"]]
    now = now._replace(leases=2)
    assert [told(second) for second in (1, 5, 9)] == [[], [], []]
    assert told(10) == [["STATUS=recovering until 2026-11-29T20:00:00Z; 2 leases held"]]
    now = Standing("serving", 2)
    assert told(11) == [["STATUS=serving; 2 leases held"]]
    assert told(12) == []


def test_without_a_service_manager_the_lane_gets_no_descriptor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NOTIFY_SOCKET", raising=False)
    lane = Lane()
    pulse = Pulse(Notifier(), lambda: Standing("serving", 0), lane.readable, lane.after)
    pulse.each_second(1.0)
    assert not lane.asked


@pytest.mark.parametrize(
    ("variables", "seconds"),
    [
        ({"WATCHDOG_USEC": "10000000"}, 10.0),
        ({"WATCHDOG_USEC": "10000000", "WATCHDOG_PID": str(os.getpid())}, 10.0),
        ({"WATCHDOG_USEC": "10000000", "WATCHDOG_PID": "1"}, math.inf),
        ({"WATCHDOG_USEC": "0"}, math.inf),
        ({"WATCHDOG_USEC": "soon"}, math.inf),
        ({}, math.inf),
    ],
)
def test_whose_watchdog_it_is(variables: dict[str, str], seconds: float, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WATCHDOG_USEC", "WATCHDOG_PID"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert Notifier().watchdog_seconds == seconds
    assert not {"WATCHDOG_USEC", "WATCHDOG_PID", "NOTIFY_SOCKET"} & set(os.environ), "no child must think that it is watched"


class _Gate:
    def __init__(self, *, shut: str = "", closed: str = "", no_grant_before: float = 0.0) -> None:
        self.shut, self.closed, self.no_grant_before = shut, closed, no_grant_before

    def recovering(self, boot: float) -> bool:
        return boot < self.no_grant_before


class _Lessor:
    """What `standing` looks at."""

    def __init__(self, gate: _Gate, *, failures: int = 0, room: int = 1) -> None:
        class Now:
            boot, wall = 100.0, 1_796_000_000.0

        class Clock:
            def now(self) -> Now:
                return Now()

        class Lane:
            broken = ""

        class Journal:
            unsettled = failures

        self.gate, self.clock, self.lane, self.journal, self.room, self.index = gate, Clock(), Lane(), Journal(), room, [1, 2]
        self.journal.failures = failures  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("lessor", "upstream", "told"),
    [
        (_Lessor(_Gate()), "", "serving; 2 leases held"),
        (_Lessor(_Gate()), "401", "serving; upstream: 401; 2 leases held"),
        (_Lessor(_Gate(closed="starting")), "", "starting: checks and releases are served, grants wait for the first flush; 2 leases held"),
        (
            _Lessor(_Gate(no_grant_before=140.0)), "",
            "recovering until 2026-11-30T00:54:00Z: keys not known are not granted before; 2 leases held",
        ),
        (_Lessor(_Gate(), failures=3, room=-1), "", "grants may be refused (ledger, full); what is held stays held; 2 leases held"),
    ],
)  # fmt: skip
def test_how_it_stands(lessor: _Lessor, upstream: str, told: str) -> None:
    assert str(standing(lessor, upstream)) == told  # type: ignore[arg-type]
