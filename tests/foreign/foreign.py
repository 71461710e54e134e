"""What `.ci/run` puts below build/foreign, and how tests run in it: other people's packages, in an environment of their own.

venv/           tooz, redis-py, pynvim, what their tests import, pytest, and leased itself
sdists/         redis-py as its authors publish it: its tests are in no wheel
node_modules/   what npm installed
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree

from daemons import ROOT, Daemon, environment

HERE = Path(__file__).parent
PLACE = ROOT / "build/foreign"
PYTHON = PLACE / "venv/bin/python"
DOCUMENT = ROOT / "contrib/adapters/README.md"
SUITE_SECONDS = 120.0  # each takes a few; the processors may have other work


class Suite(NamedTuple):
    """What the document says of one suite."""

    version: str
    passing: int
    total: int
    listed: list[str]


def documented(package: str) -> Suite:
    text = DOCUMENT.read_text()
    section = re.search(rf"^## {re.escape(package)} (\S+), .*?\n(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL)
    assert section is not None, f"{DOCUMENT} has no section about {package}"
    counts = re.match(r"(\d+) of (\d+) pass", section[2])
    assert counts is not None, "the section begins with how many pass"
    rows = [line for line in section[2].splitlines() if line.startswith("| ") and not line.startswith("| why")]
    listed = [name for row in rows for name in re.findall(r"`(test_\w+)`", row.rsplit(" | ", 1)[1])]
    return Suite(section[1], int(counts[1]), int(counts[2]), listed)


def installed(package: str) -> str:
    code = f"from importlib.metadata import version; print(version({package!r}))"
    return subprocess.run([PYTHON, "-c", code], capture_output=True, text=True, check=True, timeout=60).stdout.strip()


def run(daemon: Daemon, folder: Path, *arguments: str | Path) -> dict[str, str]:
    """Runs pytest in the foreign environment.  By the name of the test: passed, skipped, or failed and how."""
    assert PYTHON.exists(), f"{PYTHON} is missing: .ci/run makes it"
    report = folder / "report.xml"
    variables = {"LEASED_SOCKET": str(daemon.socket), "TOOZ_TEST_URL": f"leased+unix://{daemon.socket}"}
    options = ["-q", "-p", "no:cacheprovider", "-c", "/dev/null", f"--rootdir={folder}", f"--junitxml={report}"]
    ran = subprocess.run(
        [PYTHON, "-m", "pytest", *options, *map(str, arguments)], env=environment() | variables, cwd=folder,
        stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=SUITE_SECONDS, check=False,
    )  # fmt: skip
    assert report.exists(), f"{ran.stdout}\n{ran.stderr}"
    outcomes: dict[str, str] = {}
    for case in ElementTree.parse(report).iter("testcase"):
        name = case.attrib["name"]
        assert name not in outcomes, f"two tests are called {name}"
        outcomes[name] = next((_told(child) for child in case if child.tag in ("failure", "error", "skipped")), "passed")
    assert outcomes, f"{ran.stdout}\n{ran.stderr}"
    return outcomes


def _told(child: ElementTree.Element) -> str:
    return "skipped" if child.tag == "skipped" else f"failed: {child.get('message')}\n{(child.text or '')[-2000:]}"
