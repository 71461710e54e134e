"""Plumbing shared by all tests: where modules that are not tests are found, and daemons that are gone afterwards, come what may."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

HERE = Path(__file__).parent
for each in (HERE, HERE / "simulation"):
    if str(each) not in sys.path:
        sys.path.append(str(each))

from daemons import Daemon, MakeDaemon  # noqa: E402  (found by the lines above)

pytest_plugins = ["selection"]

# A machine that was busy elsewhere for a moment has found nothing wrong.
settings.register_profile("unhurried", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("unhurried")


@pytest.fixture(scope="session", autouse=True)
def nothing_from_outside() -> None:
    """The environment of whoever runs the tests must not choose sockets or directories."""
    for name in ("LEASED_SOCKET", "LEASED_AGENT_KEY", "LEASE_FENCE", "LEASE_KEY", "LEASE_HOLDER"):
        os.environ.pop(name, None)


@pytest.fixture
def make_daemon(tmp_path: Path) -> Iterator[MakeDaemon]:
    """Makes daemons, not started yet: `make_daemon(config)`.  All are ended and cleaned up with the test."""
    yield from _making(tmp_path)


@pytest.fixture(scope="module")
def make_shared_daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MakeDaemon]:
    """The same for a daemon that the tests of one module share."""
    yield from _making(tmp_path_factory.mktemp("shared"))


@pytest.fixture
def daemon(make_daemon: MakeDaemon) -> Daemon:
    """A running daemon with the default configuration."""
    return make_daemon().start()


def _making(home: Path) -> Iterator[MakeDaemon]:
    made: list[Daemon] = []

    def make(config: str = "", *, like: Daemon | None = None, **paths: Path) -> Daemon:
        own = home / f"daemon{len(made)}"
        made.append(Daemon(own, config, **paths) if like is None else like.beside(own, config, **paths))
        return made[-1]

    try:
        yield make
    finally:
        for each in made:
            each.close()
