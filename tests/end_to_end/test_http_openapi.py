"""A stranger's tool reads /openapi.json and tries to prove it wrong: schemathesis, every check, against the real daemon over TCP."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest
from daemons import MakeDaemon

ROOT = Path(__file__).resolve().parents[2]
SECONDS = 45
SEED = 20261129
DAEMON = """
[http]
listen = "127.0.0.1:0"

[limits]
max_waiters_per_namespace = 0  # waits of 300 s would be conforming answers that the tool takes for a daemon that hangs
"""
CONFIG = """
[checks]
positive_data_acceptance.expected-statuses = ["2xx", "401", "403", "404", "409", "429", "5xx"]

# A request_id that was used for another key is refused with 400, which a schema cannot say.
[[operations]]
include-operation-id = "lease"
checks.positive_data_acceptance.expected-statuses = ["2xx", "400", "401", "403", "404", "409", "429", "5xx"]
"""


@pytest.mark.packages
@pytest.mark.slow
def test_schemathesis_finds_nothing(make_daemon: MakeDaemon, tmp_path: Path) -> None:
    tool = os.environ.get("LEASED_SCHEMATHESIS") or shutil.which("schemathesis") or ROOT / "build/schemathesis/bin/schemathesis"
    assert Path(tool).exists(), "install schemathesis in an environment of its own and name it in LEASED_SCHEMATHESIS"
    daemon = make_daemon(DAEMON).start()
    with daemon.rpc() as rpc:
        secret = rpc.call("agent_add", name="schemathesis")["secret"]
    (tmp_path / "schemathesis.toml").write_text(CONFIG)
    address = daemon.events("http.listening")[-1]["address"]
    run = subprocess.run(
        [tool, "--config-file", tmp_path / "schemathesis.toml", "run", f"http://{address}/openapi.json", "-H", f"Authorization: Bearer {secret}",
         "--checks", "all", "--max-time", str(SECONDS), "--seed", str(SEED), "--no-color"],
        capture_output=True, text=True, check=False, timeout=SECONDS * 4, cwd=tmp_path,
    )  # fmt: skip
    assert run.returncode == 0, run.stdout[-8000:]
    assert "only 401/403" not in run.stdout, "the key was not taken, so nothing was tried"
    assert daemon.running and not daemon.events("lane.failed")
