"""MessagePack-RPC libraries that nobody here wrote make real calls: pynvim's, Neovim's for Node, and msgpack5rpc."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import foreign
import pytest
from daemons import Daemon, MakeDaemon, environment

pytestmark = pytest.mark.packages


AS_BEFORE_LINUX_6_5 = """
import errno, sys
import leased.doors.unix as door
def none(connection):
    raise OSError(errno.ENOPROTOOPT, "as before Linux 6.5")
door.peer_pidfd = none
from leased.__main__ import main
sys.exit(main(sys.argv[1:]))
"""


@pytest.fixture(scope="module")
def served(make_shared_daemon: MakeDaemon) -> Daemon:
    return make_shared_daemon().start()


@pytest.fixture(scope="module")
def older(make_shared_daemon: MakeDaemon) -> Daemon:
    """On a kernel that does not name the process at the other end: a notification asks for it in the middle of a call."""
    daemon = make_shared_daemon()
    arguments = daemon.command()[3:]
    daemon.command = lambda verb="serve": [sys.executable, "-c", AS_BEFORE_LINUX_6_5, *arguments]  # type: ignore[method-assign]
    return daemon.start()


@pytest.mark.parametrize(("kernel", "chosen", "expected"), [("served", "not older", 4), ("older", "older", 1)])
def test_pynvim_makes_real_calls(kernel: str, chosen: str, expected: int, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    daemon = request.getfixturevalue(kernel)
    outcomes = foreign.run(daemon, tmp_path, "--noconftest", foreign.HERE / "pynvim_inside.py", "-k", chosen)
    assert {name: outcome for name, outcome in outcomes.items() if outcome != "passed"} == {}
    assert len(outcomes) == expected


@pytest.mark.parametrize("kernel", ["served", "older"])
@pytest.mark.parametrize("library", ["neovim", "msgpack5rpc"])
def test_a_library_for_node_makes_real_calls(library: str, kernel: str, request: pytest.FixtureRequest) -> None:
    daemon = request.getfixturevalue(kernel)
    node = shutil.which("node")
    assert node is not None, "node is missing: .ci/run installs it"
    run = subprocess.run(
        [node, foreign.HERE / "node_calls.cjs", library, daemon.socket], env=environment() | {"NODE_PATH": str(foreign.PLACE / "node_modules")},
        stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert (run.returncode, run.stderr) == (0, "")
    assert json.loads(run.stdout) == {
        "name": "leased",
        "grant": [True, "string", True],  # acquired; the fence; is the generation a number JavaScript can hold?
        "refusal": "held",
        "renewed": 45.5,
        "check": True,
        "list": [f"node:{library}"],
        "errors": [
            "invalid_argument: holder is required",
            "unknown_method: steal is not an operation",
            "invalid_argument: key must be a string (MessagePack str, UTF-8), not binary",
        ],
        "rounded": "not_holder",  # a fence that went through Number() is another number
        "released": True,
        "waited": True,
        "told": [*([["prove", None]] if kernel == "older" else []), ["event", "released"], ["event", "granted"]],
    }
