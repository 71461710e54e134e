"""tooz's and redis-py's own tests against us, from what their authors published; contrib/adapters/README.md says which do not pass."""

from __future__ import annotations

import re
import shutil
import subprocess
import tarfile
from pathlib import Path

import foreign
import pytest
from daemons import ROOT, Daemon, MakeDaemon, environment

pytestmark = pytest.mark.packages


@pytest.fixture(scope="module")
def served(make_shared_daemon: MakeDaemon) -> Daemon:
    return make_shared_daemon().start()


def compare(package: str, outcomes: dict[str, str], otherwise: str) -> None:
    """`otherwise`: how what does not pass must end."""
    said = foreign.documented(package)
    assert foreign.installed(package.removesuffix("-py")) == said.version
    others = {name: outcome for name, outcome in outcomes.items() if outcome != "passed"}
    assert {name: outcome for name, outcome in others.items() if name not in said.listed} == {}, "not listed, and does not pass"
    assert sorted(set(said.listed) - set(others)) == [], "listed, but passes or is not there"
    assert len(said.listed) == len(set(said.listed))
    assert [name for name, outcome in others.items() if not outcome.startswith(otherwise)] == []
    assert (len(outcomes) - len(others), len(outcomes)) == (said.passing, said.total)


def test_tooz_finds_what_its_suite_asks_for(served: Daemon, tmp_path: Path) -> None:
    compare("tooz", foreign.run(served, tmp_path, "--pyargs", "tooz.tests.test_coordination"), "skipped")


def test_a_stale_list_and_a_new_failure_are_seen() -> None:
    said = foreign.documented("tooz")
    as_said = {f"test_{number}": "passed" for number in range(said.passing)} | dict.fromkeys(said.listed, "skipped")
    compare("tooz", as_said, "skipped")
    for changed, why in (
        ({said.listed[0]: "passed"}, "listed, but passes"),
        ({"test_0": "failed: x"}, "not listed, and does not pass"),
        ({said.listed[0]: "failed: x"}, said.listed[0]),
        ({"test_more": "passed"}, str(said.total + 1)),
    ):
        with pytest.raises(AssertionError, match=why):
            compare("tooz", as_said | changed, "skipped")


def test_redis_py_finds_what_its_suite_asks_for(served: Daemon, tmp_path: Path) -> None:
    suite = tmp_path / "suite"
    suite.mkdir()
    (archive,) = (foreign.PLACE / "sdists").glob("redis-*.tar.gz")
    with tarfile.open(archive) as sdist:
        theirs = sdist.extractfile(f"{archive.name.removesuffix('.tar.gz')}/tests/test_lock.py")
        assert theirs is not None
        (suite / "test_lock.py").write_bytes(theirs.read())
    (suite / "__init__.py").touch()
    shutil.copy(foreign.HERE / "redis_conftest.py", suite / "conftest.py")
    compare("redis-py", foreign.run(served, tmp_path, suite), "failed")


@pytest.mark.parametrize(("beginning", "expected"), [("tooz_inside", 16), ("redis_inside", 3)])
def test_the_adapters_beside_what_they_stand_in_for(beginning: str, expected: int, served: Daemon, tmp_path: Path) -> None:
    outcomes = foreign.run(served, tmp_path, "--noconftest", foreign.HERE / f"{beginning}.py")
    assert {name: outcome for name, outcome in outcomes.items() if outcome != "passed"} == {}
    assert len(outcomes) == expected


def test_what_readme_shows_of_tooz_is_so(served: Daemon) -> None:
    text = (ROOT / "README.md").read_text()
    shown = re.search(r"^```python\n(from tooz .*?)^```\n\n```text\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    table = re.search(r"^\| option of the URL .*?\n\n", text, re.MULTILINE | re.DOTALL)
    assert shown is not None and table is not None
    rows = [line.split("|") for line in table[0].splitlines()[2:] if line]
    options = sorted(name for row in rows for name in re.findall(r"`(\w+)`", row[1]))
    asked = f"{shown[1]}\nfrom leased.adapters.tooz_driver import DEFAULT_TTL_SECONDS, OPTIONS\nprint(sorted(OPTIONS), DEFAULT_TTL_SECONDS)\n"
    run = subprocess.run(
        [foreign.PYTHON, "-c", asked], env=environment() | {"LEASED_SOCKET": str(served.socket)},
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert (run.stdout, run.stderr) == (f"{shown[2]}{options} {float(rows[0][2])}\n", "")
