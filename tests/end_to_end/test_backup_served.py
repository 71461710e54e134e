"""`leased backup` beside a running daemon, and what a restore makes of it: through the socket for operators, beside it where it does not answer."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from daemons import ROOT, Daemon, MakeDaemon, Rpc, effective_user, environment, run_leased

from leased import backup_desk
from leased.backup_fetch import fetch

pytestmark = pytest.mark.slow


def places(daemon: Daemon) -> list[str]:
    return [f"--config={daemon.config_path}", f"--state-dir={daemon.state_dir}", f"--runtime-dir={daemon.runtime_dir}"]


def back_up(daemon: Daemon, file: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return run_leased("backup", file, *places(daemon), *(words or (f"--socket={daemon.socket}",)))


def test_the_daemon_makes_the_copy_and_goes_on(make_daemon: MakeDaemon, tmp_path: Path) -> None:
    daemon = make_daemon().start()
    with daemon.rpc() as rpc:
        for number in range(300):  # several parts
            rpc.call("lease", key=f"k{number}", holder="h" * 200, scope="s" * 200, ttl_seconds=600)
        stop, failed = threading.Event(), []

        def renew() -> None:
            with daemon.rpc() as other:
                grant = other.call("lease", key="busy", holder="b", ttl_seconds=600)
                while not stop.is_set():
                    if other.call("renew", key="busy", holder="b", fence=grant["fence"])["acquired"] is not True:
                        failed.append("a renewal was not answered true")

        busy = threading.Thread(target=renew)
        busy.start()
        try:
            done = back_up(daemon, tmp_path / "copy")
        finally:
            stop.set()
            busy.join()
        assert (done.returncode, done.stderr, failed) == (0, "", [])
        size = (tmp_path / "copy").stat().st_size
        assert size > 2 * backup_desk.PART_BYTES
        assert f"{tmp_path}/copy: {size} bytes, while the daemon runs: 30" in done.stdout
        assert daemon.events("backup.made")[0]["uid"] == os.geteuid()
        assert not [each for each in daemon.state_dir.iterdir() if each.name.startswith("tmp")]
        held = rpc.call("check", key="k7")["generation"]
    daemon.terminate()
    done = run_leased("restore", tmp_path / "copy", *places(daemon))
    assert done.returncode == 0 and "Lost: every lease" in done.stdout
    daemon.start()
    with daemon.rpc() as rpc:
        told = rpc.call("info")["store"]
        assert told["state"] == "recovering" and 3500 < told["no_grant_for_seconds"] <= 3600
        assert rpc.call("lease", key="k7", holder="x")["reason"] == "recovering"
    daemon.terminate()
    assert run_leased("restore", "--no-holders", tmp_path / "copy", *places(daemon)).returncode == 0
    daemon.start()
    with daemon.rpc() as rpc:
        fresh = rpc.call("lease", key="k7", holder="x")
        assert fresh["acquired"] is True and fresh["generation"] > held, "generations jump forward"


def test_a_restore_is_refused_while_it_runs(daemon: Daemon, tmp_path: Path) -> None:
    assert back_up(daemon, tmp_path / "copy").returncode == 0
    before = (daemon.state_dir / "data.mdb").stat().st_ino
    done = run_leased("restore", tmp_path / "copy", *places(daemon))
    assert done.returncode == 69 and "is in use by another leased process: stop it first" in done.stderr
    assert (daemon.state_dir / "data.mdb").stat().st_ino == before
    assert sorted(each.name for each in daemon.state_dir.iterdir() if "restor" in each.name) == []


def test_where_it_does_not_answer_its_ledger_is_read_beside_it(daemon: Daemon, make_daemon: MakeDaemon, tmp_path: Path) -> None:
    """Another socket, or another daemon's: what counts is the state that was named."""
    other = make_daemon().start()
    for number, socket in enumerate((tmp_path / "nobody", other.socket)):
        done = back_up(daemon, tmp_path / f"copy{number}", f"--socket={socket}")
        assert (done.returncode, done.stderr) == (0, "") and "while the daemon runs" in done.stdout
    assert daemon.events("backup.made") == []
    mine = (daemon.state_dir / "initialised").read_bytes().strip()
    for number in range(2):
        assert mine in (tmp_path / f"copy{number}").read_bytes(), "of the state that was named"


def test_one_copy_at_a_time_and_none_that_nobody_reads_for_ever(daemon: Daemon) -> None:
    with daemon.rpc() as rpc:
        for number in range(200):
            rpc.call("lease", key=f"k{number}", holder="h" * 200, scope="s" * 200, ttl_seconds=600)
        first = rpc.call("backup")
        assert 0 < len(first["data"]) == backup_desk.PART_BYTES < first["bytes"] and first["offset"] == 0
        assert rpc.error("backup").code == "rate_limited"
        assert rpc.error("backup", copy="0" * 16, offset=0).code == "invalid_argument"
        octets = first["data"]
        while len(octets) < first["bytes"]:
            octets += rpc.call("backup", copy=first["copy"], offset=len(octets))["data"]
        assert len(octets) == first["bytes"]
        assert "begin anew" in rpc.error("backup", copy=first["copy"], offset=0).text, "it is over with its last part"
        assert rpc.call("backup")["copy"] != first["copy"]


def test_a_backup_that_is_killed_leaves_no_reader_behind(daemon: Daemon, tmp_path: Path) -> None:
    """Read beside the daemon it enters itself in LMDB's table; that entry must not keep the ledger from using its pages again for ever."""
    code = (
        "import sys, time; from pathlib import Path; from leased.state.environment import open_to_read\n"
        "e = open_to_read(Path(sys.argv[1]), tables=64, beside_writer=True); t = e.begin(); t.get(b'meta'); print('in', flush=True); time.sleep(60)"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, str(daemon.state_dir)], stdout=subprocess.PIPE, env=environment(), cwd="/"
    ) as reader:
        assert reader.stdout is not None and reader.stdout.readline() == b"in\n"
        reader.kill()
    code = (
        "import sys, lmdb; from pathlib import Path; from leased.state.environment import open_to_read\n"
        "print(open_to_read(Path(sys.argv[1]), tables=64, beside_writer=True).reader_check())"
    )
    told = subprocess.run(
        [sys.executable, "-c", code, str(daemon.state_dir)], capture_output=True, text=True, env=environment(), cwd="/", check=True
    )
    assert told.stdout == "1\n", "what the daemon asks each minute finds and clears it"
    assert "READERS_SECONDS" in (ROOT / "leased/service.py").read_text()


@pytest.mark.root
def test_operators_may_and_others_may_not(make_daemon: MakeDaemon) -> None:
    daemon = make_daemon('operator_group = "4321"\nsocket_mode = "0666"\n').start()
    for gid, answered in ((4321, True), (1000, False)):
        with effective_user(1000, gid):
            rpc = Rpc(daemon.socket)
        with rpc:
            if answered:
                assert rpc.call("backup")["offset"] == 0
            else:
                assert rpc.error("backup").code == "permission_denied"
    drop = daemon.place / "drop"
    drop.mkdir()
    drop.chmod(0o777)
    with effective_user(1000, 4321):
        assert fetch(daemon.socket, daemon.state_dir, drop / "copy", 0o600) is True
    with effective_user(1000, 1000), pytest.raises(PermissionError, match="backup is for operators"):
        fetch(daemon.socket, daemon.state_dir, drop / "other", 0o600)
    assert [(each.name, each.stat().st_uid, each.stat().st_mode & 0o777) for each in drop.iterdir()] == [("copy", 1000, 0o600)]
