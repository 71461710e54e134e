"""Hosts for the tests of this folder.  One of them, `lab`, has the product installed and is shared by all: each test leaves it serving."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from lab import Lab
from product import build, install

MakeLab = Callable[..., Lab]


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The environment that hosts have at /opt/leased."""
    home = tmp_path_factory.mktemp("opt")
    for folder in (home, *home.parents):
        if folder.stat().st_uid == os.geteuid() and folder.is_relative_to(tmp_path_factory.getbasetemp()):
            folder.chmod(0o755)
    return build(home / "leased")


@pytest.fixture(scope="session")
def make_lab(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[MakeLab]:
    """`make_lab(name)`: a host not booted yet, without the product; `make_lab(name, product=True)`: with it."""
    made: list[Lab] = []

    def make(name: str, *, product: bool = False) -> Lab:
        lab = Lab(tmp_path_factory.mktemp(name))
        made.append(lab)
        if product:
            install(lab, request.getfixturevalue("built"))
        return lab

    try:
        yield make
    finally:
        for each in made:
            each.close()


@pytest.fixture(scope="session")
def lab(make_lab: MakeLab) -> Lab:
    """A host that is up, with the product installed and `leased.socket` enabled."""
    return make_lab("lab", product=True).boot()
