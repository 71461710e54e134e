"""`leased serve` and `leased check-config`: what a restart keeps, exit codes, and messages that say what to do."""

from __future__ import annotations

import json
import os
import secrets
import signal
import subprocess
import time
import zlib
from pathlib import Path

import lmdb
import pytest
from daemons import Daemon, MakeDaemon, run_leased

EXIT_USAGE = 64
EXIT_CONFIG = 78

pytestmark = pytest.mark.slow


def ended(daemon: Daemon) -> tuple[int, str]:
    """The exit code of a daemon that must not start, and its last words."""
    code = daemon.spawn().wait()
    assert "Traceback" not in daemon.logs(), daemon.logs()
    return code, "\n".join(line for line in daemon.logs().splitlines() if not line.startswith("{"))


# ---- restarts


def test_a_clean_restart_keeps_every_lease_as_it_is_and_waits_for_nothing(make_daemon: MakeDaemon) -> None:
    daemon = make_daemon().start()
    attempt = {"key": "attempted", "holder": "a", "ttl_seconds": 50, "request_id": secrets.token_urlsafe(24)}
    with daemon.rpc() as rpc:
        short = rpc.call("lease", key="short", holder="a", ttl_seconds=30, scope="s")
        long = rpc.call("lease", key="long", holder="a", ttl_seconds=600)
        brief = rpc.call("lease", key="brief", holder="a", ttl_seconds=0.1)
        gone = rpc.call("lease", key="gone", holder="a", ttl_seconds=600)
        rpc.call("release", key="gone", fence=gone["fence"])
        attempted = rpc.call("lease", **attempt)
    daemon.restart()
    with daemon.rpc() as rpc:
        told = rpc.call("info")["store"]
        assert (told["state"], told["no_grant_for_seconds"]) == ("ok", 0)
        for key, before in (("short", short), ("long", long)):
            check = rpc.call("check", key=key, generation=before["generation"])
            assert check["current"] is True
            left = before["expires_boottime"] - time.clock_gettime(time.CLOCK_BOOTTIME)
            assert check["expires_in_seconds"] == pytest.approx(left, abs=0.5), "the deadline stands"
            assert rpc.call("lease", key=key, holder="b")["acquired"] is False
            renewed = rpc.call("renew", key=key, holder="a", fence=before["fence"])
            assert (renewed["acquired"], renewed["ttl_seconds"], renewed["scope"]) == (True, before["ttl_seconds"], before["scope"])
        again = rpc.call("lease", **attempt)
        assert (again["fence"], again["generation"]) == (attempted["fence"], attempted["generation"])
        for key in ("brief", "gone", "new"):
            fresh = rpc.call("lease", key=key, holder="b")
            assert fresh["acquired"] is True and fresh["generation"] > attempted["generation"]
        assert rpc.call("renew", key="brief", holder="a", fence=brief["fence"])["acquired"] is False
    assert len(daemon.events("daemon.stopped")) == 1 and daemon.events("daemon.stopped")[0]["clean"] is True
    assert daemon.events("daemon.recovering") == []


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_stop_in_order(make_daemon: MakeDaemon, number: signal.Signals) -> None:
    daemon = make_daemon().start()
    with daemon.rpc() as rpc:
        rpc.call("lease", key="k", holder="a")
        daemon.signal(number)
        assert daemon.wait(10) == 0
        assert rpc.rest() == [], "connections end"
    assert not daemon.socket.exists()
    assert [line["signal"] for line in daemon.events("daemon.draining")] == [number.name]


def test_what_was_sent_before_the_stop_is_answered_or_the_connection_ends(make_daemon: MakeDaemon) -> None:
    """A release that was under way is either told to be done and is, or is told null, or gets no answer: never a false one."""
    daemon = make_daemon().start()
    with daemon.rpc() as rpc:
        grants = rpc.answers(rpc.post_all([("lease", {"key": f"k{n}", "holder": "a", "ttl_seconds": 600}) for n in range(50)]))
        with daemon.stopped():
            posted = rpc.post_all([("release", {"key": f"k{n}", "fence": grant["fence"]}) for n, grant in enumerate(grants)])
            daemon.signal(signal.SIGTERM)
        assert daemon.wait(10) == 0
        answers = {message[1]: message[3]["released"] for message in rpc.rest()}
    daemon.start()
    with daemon.rpc() as rpc:
        for n, msgid in enumerate(posted):
            told = answers.get(msgid)
            assert told is not False
            if told is True:
                assert rpc.call("check", key=f"k{n}")["held"] is False


# ---- what it does not start with


def test_a_bad_configuration_is_told_in_full(make_daemon: MakeDaemon) -> None:
    daemon = make_daemon('wait_out_second = 3\nmax_leases = "many"\n[limits]\nmessage_seconds = 0\n')
    code, words = ended(daemon)
    assert code == EXIT_CONFIG
    assert "wait_out_second" in words and "wait_out_seconds" in words, "the key that was meant"
    assert "max_leases" in words and "limits.message_seconds" in words, "all mistakes at once"
    assert all(line.startswith(f"leased: {daemon.config_path}: ") for line in words.splitlines()), words
    assert not daemon.state_dir.exists() and not daemon.runtime_dir.exists(), "nothing is touched"


def test_what_is_not_toml_is_told_with_its_place(make_daemon: MakeDaemon) -> None:
    code, words = ended(make_daemon('socket_mode = "0600"\nstate_dir = /srv/leased\n'))
    assert code == EXIT_CONFIG and "line 2" in words


def test_a_missing_configuration_file_is_told(make_daemon: MakeDaemon) -> None:
    daemon = make_daemon()
    daemon.config_path.unlink()
    code, words = ended(daemon)
    assert code == EXIT_CONFIG and str(daemon.config_path) in words


def test_a_group_that_does_not_exist_is_told(make_daemon: MakeDaemon) -> None:
    for name in ("socket_group", "operator_group"):
        code, words = ended(make_daemon(f'{name} = "no-such-group-here"\n'))
        assert code == EXIT_CONFIG and "no-such-group-here" in words and "groupadd" in words and name in words


@pytest.mark.parametrize("name", ["state_dir", "runtime_dir"])
@pytest.mark.parametrize("there", ["file", "below a file", "dangling link"])
def test_a_directory_that_cannot_be_used_is_told(make_daemon: MakeDaemon, tmp_path: Path, name: str, there: str) -> None:
    path = tmp_path / "there"
    if there == "dangling link":
        path.symlink_to(tmp_path / "nowhere" / "at" / "all")
    else:
        path.write_text("precious")
    chosen = path / "state" if there == "below a file" else path
    code, words = ended(make_daemon(**{name: chosen}))
    assert code == EXIT_CONFIG and str(chosen) in words, words
    assert path.is_symlink() or path.read_text() == "precious"


@pytest.mark.root
@pytest.mark.parametrize("name", ["state_dir", "runtime_dir"])
def test_a_directory_of_another_user_is_not_trusted(make_daemon: MakeDaemon, tmp_path: Path, name: str) -> None:
    theirs = tmp_path / "theirs"
    theirs.mkdir(mode=0o700)
    os.chown(theirs, 1000, 1000)
    code, words = ended(make_daemon(**{name: theirs}))
    assert code == EXIT_CONFIG and f"{theirs} belongs to uid 1000" in words and "chown" in words
    assert list(theirs.iterdir()) == []


@pytest.mark.root
def test_a_read_only_directory_is_told(make_daemon: MakeDaemon, tmp_path: Path) -> None:
    mounted = tmp_path / "mounted"
    mounted.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "ro,size=1m,mode=0700", "tmpfs", mounted], check=True)
    try:
        code, words = ended(make_daemon(state_dir=mounted))
        assert code == EXIT_CONFIG and str(mounted) in words and "Read-only" in words
    finally:
        subprocess.run(["umount", "--lazy", mounted], check=True)


def test_an_emptied_store_is_not_taken_for_a_new_one(make_daemon: MakeDaemon) -> None:
    daemon = make_daemon().start()
    daemon.terminate()
    for path in (*daemon.state_dir.glob("*.mdb"), *daemon.runtime_dir.glob("*.mdb")):
        path.write_bytes(b"")
    code, words = ended(daemon)
    assert code == EXIT_CONFIG and str(daemon.state_dir) in words and "restore" in words


# ---- the command line


def test_check_config_says_what_it_comes_to(tmp_path: Path) -> None:
    file = tmp_path / "leased.toml"
    file.write_text(
        'wait_out_seconds = 5\n[namespaces]\n"uid:1000" = "build"\n[upstream]\nurl = "https://user:hunter2@bill.example/x"\n'
    )
    told = run_leased("check-config", "--config", file, "--state-dir", tmp_path / "state")
    if told.returncode == EXIT_CONFIG:  # credentials in a URL may be refused, but never be repeated
        assert "hunter2" not in told.stderr
        file.write_text(file.read_text().replace("user:hunter2@", ""))
        told = run_leased("check-config", "--config", file, "--state-dir", tmp_path / "state")
    assert (told.returncode, told.stderr) == (0, "")
    lines = dict(line.split(" = ", 1) for line in told.stdout.splitlines())
    assert float(lines["wait_out_seconds"]) == 5
    assert lines["state_dir"].strip('"') == str(tmp_path / "state")
    assert lines['namespaces."uid:1000"'].strip('"') == "build"
    assert "hunter2" not in told.stdout
    assert not (tmp_path / "state").exists(), "it only looks"


def test_check_config_finds_what_serve_would_find(tmp_path: Path) -> None:
    file = tmp_path / "leased.toml"
    file.write_text('socket_mode = "0999"\n')
    told = run_leased("check-config", "--config", file)
    assert (told.returncode, told.stdout) == (EXIT_CONFIG, "")
    assert told.stderr.startswith(f"leased: {file}: socket_mode")


def test_a_wrong_command_line_is_a_usage_error(tmp_path: Path) -> None:
    for arguments in ([], ["serv"], ["serve", "--sock", tmp_path / "s"], ["serve", "extra"], ["serve", "--socket"]):
        told = run_leased(*arguments)
        assert told.returncode == EXIT_USAGE, arguments
        assert "usage:" in told.stderr and told.stdout == ""


def test_version() -> None:
    told = run_leased("--version")
    assert told.returncode == 0 and told.stdout.startswith("leased ")


def test_the_socket_of_the_environment_counts_where_none_is_given(tmp_path: Path) -> None:
    file = tmp_path / "leased.toml"
    file.write_text('socket = "/run/from-the-file"\n')
    assert 'socket = "/run/from-the-file"' in run_leased("check-config", "--config", file).stdout
    assert 'socket = "/run/chosen"' in run_leased("check-config", "--config", file, LEASED_SOCKET="/run/chosen").stdout


def test_log_lines_are_json_with_known_names(make_daemon: MakeDaemon) -> None:
    daemon = make_daemon().start()
    assert daemon.terminate() == 0
    lines = [json.loads(line) for line in daemon.logs().splitlines()]
    names = [line["event"] for line in lines]
    assert "log.unknown_event" not in names
    assert (
        names.index("daemon.starting")
        < names.index("daemon.ready")
        < names.index("daemon.draining")
        < names.index("daemon.stopped")
    )


def test_a_newer_state_is_left_as_it_is_and_served_again_by_its_own_program(make_daemon: MakeDaemon) -> None:
    """An upgrade, a downgrade that must not work, and the way back."""
    daemon = make_daemon().start()
    with daemon.rpc() as rpc:
        grant = rpc.call("lease", key="k", holder="a", ttl_seconds=600)
    daemon.terminate()

    def rewrite(number: int, writer: str) -> None:
        environment = lmdb.open(str(daemon.state_dir), max_dbs=16, map_size=1 << 30)
        table = environment.open_db(b"meta", create=False)
        with environment.begin(write=True, db=table) as transaction:
            fields = json.loads(transaction.get(b"meta")[1:-4]) | {"format": number}
            body = b"\x01" + json.dumps(fields).encode()
            transaction.put(b"meta", body + zlib.crc32(body).to_bytes(4, "little"))
        environment.close()
        (daemon.state_dir / "version").write_text(f"{writer}\n")

    def everything() -> dict[Path, tuple[bytes, int]]:
        files = [*daemon.state_dir.iterdir(), *daemon.runtime_dir.iterdir()]
        return {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in files}

    rewrite(3, "0.9.7")
    before = everything()
    code, said = ended(daemon)
    assert code == EXIT_CONFIG and everything() == before
    assert "was written by leased 0.9.7; this is leased" in said and "install leased 0.9.7 again" in said
    rewrite(2, "0.1.0")
    daemon.start()
    with daemon.rpc() as rpc:
        assert rpc.call("renew", key="k", holder="a", fence=grant["fence"])["generation"] == grant["generation"]


def test_the_very_first_call_is_a_grant(make_daemon: MakeDaemon) -> None:
    """Whoever comes while the start is being written waits for it in the backlog, and is not told null."""
    daemon = make_daemon().spawn()
    until = time.monotonic() + 30
    while True:
        try:
            with daemon.rpc() as rpc:
                told = rpc.call("lease", key="k", holder="a")
                break
        except (FileNotFoundError, ConnectionRefusedError):
            assert time.monotonic() < until
    assert told["acquired"] is True, told
