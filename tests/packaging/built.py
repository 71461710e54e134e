"""How the package is built and what its next version is called."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import NamedTuple

BUILD_SECONDS = 300
DEBIAN_PYTHON = "/usr/bin/python3"
NEXT_PROGRAM, NEXT_PACKAGE = "0.1.1", "0.1.1-1"


class Packages(NamedTuple):
    """`later` has another version, and a program that says so."""

    first: Path
    later: Path


def outcome(*command: str | Path) -> str:
    done = subprocess.run(
        list(map(str, command)), stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=BUILD_SECONDS, check=False
    )
    assert done.returncode == 0, f"{command}:\n{done.stdout}{done.stderr}"
    return done.stdout
