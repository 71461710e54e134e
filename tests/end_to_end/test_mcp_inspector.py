"""The MCP inspector's command, which nobody here wrote, drives every tool over both transports."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from daemons import ROOT, MakeDaemon, environment
from mcp_bridge import COMMAND, Bridge

pytestmark = [pytest.mark.packages, pytest.mark.slow]
INSPECTOR = ROOT / "build/inspector/node_modules/.bin/mcp-inspector"
TOOLS = ["lease", "renew", "release", "check", "heartbeat", "resume_packet", "agent_lock"]


def inspect(home: Path, server: list[str], *arguments: str) -> subprocess.CompletedProcess[str]:
    """One run.  It keeps files of its own in HOME."""
    return subprocess.run(
        [INSPECTOR, "--cli", *server, *arguments],
        env=environment() | {"HOME": str(home), "PATH": os.environ["PATH"]}, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip


def drive(ask: Callable[..., Any], key: str) -> None:
    grant = ask("lease", key=key, ttl_seconds=600, scope=f"{key}/s")
    assert grant["acquired"] is True
    mine = {
        "key": key,
        "fence": json.dumps(grant["fence"]),
        "holder": grant["holder"],
    }  # it reads values as JSON: a bare fence is a number
    assert ask("renew", **mine)["renewed"] is True
    assert ask("check", key=key, generation=grant["generation"])["current"] is True
    assert ask("heartbeat", scope=f"{key}/s", expect_within_seconds=600)["armed"] is True
    assert [lease["key"] for lease in ask("resume_packet", scope=f"{key}/s")["leases"]] == [key]
    assert ask("release", **mine)["released"] is True
    assert ask("agent_lock", key=key)["acquired"] is True


def test_the_inspector_drives_every_tool_over_both_transports(make_daemon: MakeDaemon, tmp_path: Path) -> None:
    daemon = make_daemon().start()

    def asking(name: str, server: list[str]) -> Callable[..., Any]:
        home = tmp_path / name
        home.mkdir()

        def ask(tool: str, **arguments: Any) -> Any:
            pairs = [word for field, value in arguments.items() for word in ("--tool-arg", f"{field}={value}")]
            run = inspect(home, server, "--method", "tools/call", "--tool-name", tool, *pairs)
            assert run.returncode == 0, run.stdout + run.stderr
            result = json.loads(run.stdout)
            assert result["isError"] is False and json.loads(result["content"][0]["text"]) == result["structuredContent"]
            return result["structuredContent"]

        return ask

    with Bridge(daemon.socket, tmp_path / "log", "--http", "127.0.0.1:0") as bridge:
        remote = [bridge.url, "--transport", "http"]
        with ThreadPoolExecutor(2) as both:
            jobs = [
                both.submit(drive, asking("stdio", [*COMMAND, "--socket", str(daemon.socket)]), "by stdio"),
                both.submit(drive, asking("http", remote), "by http"),
            ]
            for job in jobs:
                job.result()
        listed = inspect(tmp_path, remote, "--method", "tools/list", "--strict")
        assert listed.returncode == 0 and "error" not in listed.stderr.lower().replace("0 errors", ""), listed.stderr
        assert "Warning" not in listed.stderr, "schemas that some clients cannot take"
        assert [tool["name"] for tool in json.loads(listed.stdout)["tools"]] == TOOLS
