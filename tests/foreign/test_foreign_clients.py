"""MessagePack-RPC libraries that nobody here wrote make real calls: pynvim's, Neovim's for Node, and msgpack5rpc."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import foreign
import pytest
from daemons import Daemon, MakeDaemon, environment

pytestmark = pytest.mark.packages


@pytest.fixture(scope="module")
def served(make_shared_daemon: MakeDaemon) -> Daemon:
    return make_shared_daemon().start()


def test_pynvim_makes_real_calls(served: Daemon, tmp_path: Path) -> None:
    outcomes = foreign.run(served, tmp_path, "--noconftest", foreign.HERE / "pynvim_inside.py")
    assert {name: outcome for name, outcome in outcomes.items() if outcome != "passed"} == {}
    assert len(outcomes) == 4


@pytest.mark.parametrize("library", ["neovim", "msgpack5rpc"])
def test_a_library_for_node_makes_real_calls(library: str, served: Daemon) -> None:
    node = shutil.which("node")
    assert node is not None, "node is missing: .ci/run installs it"
    run = subprocess.run(
        [node, foreign.HERE / "node_calls.cjs", library, served.socket], env=environment() | {"NODE_PATH": str(foreign.PLACE / "node_modules")},
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
        "told": [["event", "released"], ["event", "granted"]],
    }
