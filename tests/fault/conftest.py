"""Fixtures: a daemon on throw-away directories, and disks that can be made to fail.  All of them clean up after a failed test too."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from plumbing import Disk, Served, Tmpfs, room

MakeServed = Callable[..., Served]


@pytest.fixture
def volatile(request: pytest.FixtureRequest) -> Iterator[Path]:
    """A directory on tmpfs."""
    with room(request.node.name[:24].replace("[", "-").replace("/", "-")) as path:
        yield path


@pytest.fixture
def closing() -> Iterator[contextlib.ExitStack]:
    with contextlib.ExitStack() as stack:
        yield stack


@pytest.fixture
def disk(closing: contextlib.ExitStack, tmp_path: Path) -> Disk:
    """An ext4 file system whose power can be cut.  Needs root."""
    disk = Disk(tmp_path)
    closing.callback(disk.close)
    return disk


@pytest.fixture
def small(closing: contextlib.ExitStack, tmp_path: Path) -> Tmpfs:
    """4 MiB of room for a state directory.  Needs root."""
    tmpfs = Tmpfs(tmp_path / "small", "4m")
    closing.callback(tmpfs.close)
    return tmpfs


@pytest.fixture
def served(closing: contextlib.ExitStack, tmp_path: Path, volatile: Path) -> MakeServed:
    """Make a Served; by default its state is on the test's own disk.  Closed before the disks it uses."""

    def make(state_dir: Path | None = None, **settings: float) -> Served:
        home = volatile / "home"
        home.mkdir(exist_ok=True)
        made = Served(tmp_path / "state" if state_dir is None else state_dir, volatile / "runtime", home, **settings)
        closing.callback(made.close)
        return made

    return make


@pytest.fixture
def stepped(volatile: Path) -> Callable[[Served, str], None]:
    """Step the wall clock of a daemon, now and while it runs: "+7200", "-3600", or an instant.  The other clocks stay true."""
    library = next(Path("/usr/lib").glob("*/faketime/libfaketimeMT.so.1"), None)
    if library is None:
        pytest.fail("libfaketimeMT.so.1 is missing: install the package libfaketime")
    instant = volatile / "wall"

    def step(served: Served, to: str) -> None:
        fresh = volatile / "wall.new"
        fresh.write_text(f"{to}\n")
        fresh.rename(instant)
        served.environment = {
            "LD_PRELOAD": str(library),
            "FAKETIME_TIMESTAMP_FILE": str(instant),
            "FAKETIME_NO_CACHE": "1",
            "FAKETIME_DONT_FAKE_MONOTONIC": "1",
        }

    return step
