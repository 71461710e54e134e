"""`lease top` on a terminal and `lease doctor`, against the real daemon."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from daemons import Daemon, MakeDaemon, environment

LEASE = [sys.executable, "-m", "leased.client.command"]


@pytest.fixture(scope="module")
def daemon(make_shared_daemon: MakeDaemon) -> Daemon:
    return make_shared_daemon().start()


def test_the_live_table_shows_who_holds_who_waits_and_what_happens(daemon: Daemon) -> None:
    with daemon.rpc() as rpc, daemon.rpc() as other:
        fence = rpc.call("lease", key="gpu:0", holder="alice", ttl_seconds=100)["fence"]
        other.post("lease", key="gpu:0", holder="bob", wait_seconds=60)
        pid, file = pty.fork()
        if pid == 0:
            own = {"LEASED_SOCKET": str(daemon.socket), "TERM": "xterm", "COLUMNS": "120", "LINES": "24"}
            os.execvpe(LEASE[0], [*LEASE, "top", "--every", "0.2"], environment() | own)
        seen = ""

        def expect(pattern: str) -> None:
            nonlocal seen
            limit = time.monotonic() + 30
            while re.search(pattern, re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", seen), re.DOTALL) is None:
                left = limit - time.monotonic()
                assert left > 0 and select.select([file], [], [], left)[0], f"no {pattern!r} in {seen!r}"
                seen += os.read(file, 65536).decode()

        try:
            expect(r"1 lease .*1 waiting.*KEY.*gpu:0 +alice +\d+ +\d+ s +1 ")
            rpc.call("release", key="gpu:0", fence=fence)
            expect(r"gpu:0 +bob.*granted +gpu:0 +holder bob")
            os.write(file, b"q")
            status = 0
            while os.waitpid(pid, os.WNOHANG) == (0, 0):  # what it has still to say wants to be read
                if select.select([file], [], [], 0.05)[0]:
                    try:
                        seen += os.read(file, 65536).decode()
                    except OSError:
                        _, status = os.waitpid(pid, 0)
                        break
            pid = 0
        finally:
            if pid:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
            os.close(file)
    assert os.waitstatus_to_exitcode(status) == 0
    assert fence not in seen


def doctor(socket: Path, *words: str) -> tuple[int, dict[str, dict[str, str]]]:
    run = subprocess.run(
        [*LEASE, "doctor", "--json", "--socket", str(socket), *words],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert run.stderr == ""
    return run.returncode, {found["check"]: found for found in map(json.loads, run.stdout.splitlines())}


def test_doctor_finds_nothing_wrong_with_a_daemon_that_runs(daemon: Daemon) -> None:
    config = daemon.home / "doctor.toml"
    config.write_text(f'state_dir = "{daemon.state_dir}"\nruntime_dir = "{daemon.runtime_dir}"\n')
    code, found = doctor(daemon.socket, "--config", str(config))
    assert {found[check]["level"] for check in ("socket", "daemon", "namespace", "version", "store", "clock", "limits")} == {"ok"}
    assert str(daemon.runtime_dir) in found["runtime directory"]["what"] or "MiB are free" in found["runtime directory"]["what"]
    assert code == int(any(each["level"] == "fail" for each in found.values()))  # of this host's disks the test knows nothing


def test_doctor_finds_a_stale_socket_and_a_missing_one(make_daemon: MakeDaemon, tmp_path: Path) -> None:
    gone = make_daemon().start()
    gone.kill()
    code, found = doctor(gone.socket)
    assert code == 69 and found["socket"]["level"] == "ok" and found["daemon"]["level"] == "fail"
    assert "nobody listens" in found["daemon"]["what"] and "leased serve" in found["daemon"]["advice"]
    code, found = doctor(tmp_path / "none")
    assert code == 69 and found["socket"]["level"] == "fail" and "does not exist" in found["socket"]["what"]


def test_doctor_finds_a_daemon_that_hangs(make_daemon: MakeDaemon) -> None:
    hung = make_daemon().start()
    with hung.stopped():
        code, found = doctor(hung.socket, "--timeout", "0.5")
    assert code == 69 and "stopped or stuck" in found["daemon"]["advice"]


def test_doctor_names_a_broken_configuration_and_goes_on(daemon: Daemon, tmp_path: Path) -> None:
    (tmp_path / "broken.toml").write_text("sockte = 1\n")
    _, found = doctor(daemon.socket, "--config", str(tmp_path / "broken.toml"))
    assert found["configuration"]["level"] == "warn" and "sockte" in found["configuration"]["what"]
    assert found["kernel"]["check"] == "kernel" and found["daemon"]["level"] == "ok"
