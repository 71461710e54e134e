"""The two clocks, and how a boot is told from another.

Deadlines are counted on CLOCK_BOOTTIME: it never steps and it counts suspend.  The wall clock is only printed, and
pushes generations forward.  Nothing else in the package reads a clock; tests hand in their own `Clock`.
"""

from __future__ import annotations

import time

from leased.light import NamedTuple, Protocol

BOOT_ID_PATH = "/proc/sys/kernel/random/boot_id"
TIME_NAMESPACE_PATH = "/proc/self/timens_offsets"


class Now(NamedTuple):
    """One instant on both clocks, in seconds.  `boot` judges; `wall` is for people and for generations."""

    boot: float
    wall: float


class Clock(Protocol):
    """Where instants come from.  `boot_id` names the boot together with its time namespace."""

    def now(self) -> Now: ...

    def boot_id(self) -> str: ...


class HostClock:
    """The host's clocks.  Raises OSError from `boot_id` where /proc hides it (a unit with ProcSubset=pid)."""

    def now(self) -> Now:
        return Now(time.clock_gettime(time.CLOCK_BOOTTIME), time.time())

    def boot_id(self) -> str:
        """The kernel's boot id, with the time namespace's boottime offset: one without the other proves nothing."""
        return f"{_read(BOOT_ID_PATH).strip()}{_boottime_offset()}"


def _boottime_offset() -> str:
    """The offset of this time namespace as text, empty when there is none or the kernel has no time namespaces."""
    try:
        lines = _read(TIME_NAMESPACE_PATH).splitlines()
    except OSError:
        return ""
    for line in lines:
        name, *numbers = line.split()
        if name in {"boottime", "7"} and any(int(number) for number in numbers):
            return "+" + ".".join(numbers)
    return ""


def _read(path: str) -> str:
    with open(path, encoding="ascii") as file:  # noqa: PTH123  pathlib takes as long as all of a `lease` that waited for its grant
        return file.read()


_stamp_second = -1
_stamp_text = ""
_stamp_millisecond = -1
_stamp = ""


def rfc3339(wall: float) -> str:
    """A wall-clock instant as RFC 3339 UTC with milliseconds, truncated.  Years 1970 to 9999."""
    global _stamp_second, _stamp_text, _stamp_millisecond, _stamp
    milliseconds = int(wall * 1000)
    if milliseconds == _stamp_millisecond:  # grants of one batch mostly end together
        return _stamp
    _stamp_millisecond = milliseconds
    second = milliseconds // 1000
    if second != _stamp_second:  # formatting a date costs 2 µs, and most stamps of a batch share a second
        _stamp_text = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(second))
        _stamp_second = second
    _stamp = f"{_stamp_text}.{milliseconds % 1000:03d}Z"
    return _stamp
