"""Two daemons, one state: exactly one serves, the other leaves with a message and touches nothing.  And whose socket it is."""

from __future__ import annotations

import hashlib
import os
import socket
import stat
import subprocess
import time
from pathlib import Path

import pytest
from daemons import Daemon, MakeDaemon

from leased.doors import listen

EXIT_UNAVAILABLE = 69
EXIT_CONFIG = 78


def contents(*directories: Path) -> dict[str, tuple[int, ...] | str]:
    """Everything a process could have touched: names, modes, owners, sizes, times of change, and bytes."""
    found: dict[str, tuple[int, ...] | str] = {}
    for directory in directories:
        for path in (directory, *sorted(directory.rglob("*"))):
            status = path.lstat()
            found[str(path)] = (
                status.st_mode,
                status.st_ino,
                status.st_uid,
                status.st_size,
                status.st_mtime_ns,
                status.st_ctime_ns,
            )
            if path.is_file():
                found[f"{path} holds"] = hashlib.sha256(path.read_bytes()).hexdigest()
    return found


def refused(daemon: Daemon) -> str:
    """The message of a daemon that must not start because another holds its directories."""
    code = daemon.wait()
    assert code == EXIT_CONFIG, f"{code}: {daemon.logs()}"
    lines = [line for line in daemon.logs().splitlines() if line.startswith("leased: ")]
    assert len(lines) == 1, daemon.logs()
    assert "is in use by another leased process: stop it first, or name another directory" in lines[0]
    return lines[0]


# ---- one state


@pytest.mark.slow
def test_of_two_started_at_once_exactly_one_serves(make_daemon: MakeDaemon) -> None:
    first = make_daemon()
    second = make_daemon(like=first)
    generations = []
    for turn in range(20):
        for each in (first, second) if turn % 2 else (second, first):
            each.log_path.unlink(missing_ok=True)
            each.spawn()
        until = time.monotonic() + 30
        while first.running and second.running and time.monotonic() < until:
            time.sleep(0.005)
        serving, other = (first, second) if first.running else (second, first)
        assert refused(other).startswith("leased: ")
        serving.wait_ready()
        with serving.rpc() as rpc:
            generations.append(rpc.call("lease", key=f"turn {turn}", holder="h")["generation"])
        serving.kill()
        assert not first.running and not second.running
    assert generations == sorted(set(generations)), "a loser has disturbed the order of grants"


@pytest.mark.slow
def test_a_second_leaves_a_stopped_first_alone(make_daemon: MakeDaemon) -> None:
    """A daemon that does not answer is not a dead one: SIGSTOP looks like death to every test but the lock."""
    first = make_daemon().start()
    with first.rpc() as rpc:
        granted = rpc.call("lease", key="k", holder="a", ttl_seconds=300)
        with first.stopped():
            before = contents(first.state_dir, first.runtime_dir, first.socket)
            message = refused(make_daemon(like=first).spawn())
            assert contents(first.state_dir, first.runtime_dir, first.socket) == before
        assert str(first.state_dir) in message
        assert rpc.call("renew", key="k", holder="a", fence=granted["fence"])["acquired"] is True
    with first.rpc() as rpc:
        assert rpc.call("check", key="k", generation=granted["generation"])["current"] is True


@pytest.mark.slow
def test_a_second_serves_as_soon_as_the_first_is_killed(make_daemon: MakeDaemon) -> None:
    first = make_daemon().start()
    with first.rpc() as rpc:
        granted = rpc.call("lease", key="k", holder="a", ttl_seconds=60)
    first.kill()
    second = make_daemon(like=first).start()
    with second.rpc() as rpc:
        refusal = rpc.call("lease", key="k", holder="b")
        assert (refusal["acquired"], refusal["held_by"], refusal["generation"]) == (False, "a", granted["generation"])
        assert rpc.call("lease", key="other", holder="b")["generation"] > granted["generation"]


@pytest.mark.slow
@pytest.mark.parametrize("shared", ["state_dir", "runtime_dir"])
def test_another_socket_and_one_directory_in_common_is_one_state(make_daemon: MakeDaemon, tmp_path: Path, shared: str) -> None:
    first = make_daemon().start()
    second = make_daemon(**{shared: getattr(first, shared)})
    with first.stopped():
        before = contents(first.state_dir, first.runtime_dir)
        message = refused(second.spawn())
        assert contents(first.state_dir, first.runtime_dir) == before
    assert str(getattr(first, shared)) in message
    assert not second.socket.exists()
    first.wait_ready()


@pytest.mark.slow
def test_a_directory_by_another_name_is_the_same_directory(make_daemon: MakeDaemon, tmp_path: Path) -> None:
    first = make_daemon().start()
    alias = tmp_path / "alias"
    alias.symlink_to(first.state_dir, target_is_directory=True)
    with first.stopped():
        before = contents(first.state_dir, first.runtime_dir)
        refused(make_daemon(state_dir=alias).spawn())
        assert contents(first.state_dir, first.runtime_dir) == before
    first.wait_ready()


@pytest.mark.slow
@pytest.mark.root
def test_a_bind_mount_is_the_same_directory(make_daemon: MakeDaemon, tmp_path: Path) -> None:
    first = make_daemon().start()
    mounted = tmp_path / "mounted"
    mounted.mkdir()
    subprocess.run(["mount", "--bind", first.state_dir, mounted], check=True)
    try:
        with first.stopped():
            before = contents(first.state_dir, first.runtime_dir)
            refused(make_daemon(state_dir=mounted).spawn())
            assert contents(first.state_dir, first.runtime_dir) == before
    finally:
        subprocess.run(["umount", "--lazy", mounted], check=True)
    first.wait_ready()


# ---- the socket


@pytest.mark.slow
def test_the_socket_file_of_a_dead_daemon_is_replaced(make_daemon: MakeDaemon) -> None:
    first = make_daemon().start()
    inode = first.socket.stat().st_ino
    first.kill()
    assert first.socket.exists()
    keeper = first.socket.with_name("keeper")  # keeps the inode in use, so that its number cannot be given out again
    keeper.hardlink_to(first.socket)
    first.start()
    assert first.socket.stat().st_ino != inode
    first.terminate()
    assert not first.socket.exists()


@pytest.mark.slow
@pytest.mark.parametrize("backlog", ["accepts", "full"])
def test_a_socket_that_somebody_else_listens_on_is_not_stolen(make_daemon: MakeDaemon, backlog: str) -> None:
    daemon = make_daemon()
    waiting = []
    with socket.socket(socket.AF_UNIX) as foreign:
        foreign.bind(str(daemon.socket))
        foreign.listen(0)
        if backlog == "full":
            waiting.append(socket.socket(socket.AF_UNIX))
            waiting[0].connect(str(daemon.socket))
        inode = daemon.socket.stat().st_ino
        assert daemon.spawn().wait() == EXIT_UNAVAILABLE
        assert f"{daemon.socket}: another process listens on this socket" in daemon.logs()
        assert "Traceback" not in daemon.logs()
        assert daemon.socket.stat().st_ino == inode
        if backlog == "accepts":
            foreign.accept()[0].close()  # the daemon's own probe, which must not be left to count as a client
            with socket.socket(socket.AF_UNIX) as client:
                client.connect(str(daemon.socket))
                foreign.accept()[0].close()
    for each in waiting:
        each.close()


@pytest.mark.slow
@pytest.mark.parametrize("there", ["file", "directory", "link"])
def test_what_is_no_socket_is_left_where_it_is(make_daemon: MakeDaemon, there: str) -> None:
    """A path typed wrongly must not cost somebody a file."""
    daemon = make_daemon()
    if there == "file":
        daemon.socket.write_text("precious")
    elif there == "directory":
        daemon.socket.mkdir()
    else:
        daemon.socket.symlink_to(daemon.place / "nowhere")
    before = daemon.socket.lstat()
    assert daemon.spawn().wait() == EXIT_UNAVAILABLE
    after = daemon.socket.lstat()
    assert (after.st_ino, after.st_mode, after.st_size) == (before.st_ino, before.st_mode, before.st_size)
    assert str(daemon.socket) in daemon.logs(), "the message must name the path"
    assert "Traceback" not in daemon.logs()


@pytest.mark.slow
def test_a_stop_leaves_a_successors_socket_alone(make_daemon: MakeDaemon) -> None:
    daemon = make_daemon().start()
    daemon.socket.unlink()
    with socket.socket(socket.AF_UNIX) as foreign:
        foreign.bind(str(daemon.socket))
        foreign.listen()
        daemon.terminate()
        assert daemon.socket.exists()


# ---- who may open what


@pytest.mark.parametrize("mode", [0o600, 0o660, 0o666])
def test_the_socket_is_never_wider_than_configured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: int) -> None:
    """Looked at after every step between bind and listen, with a umask that takes nothing away."""
    path = tmp_path / "socket"
    seen: list[tuple[str, int]] = []
    real = {"bind": socket.socket.bind, "listen": socket.socket.listen, "chmod": os.chmod}

    def spy(name: str):  # type: ignore[no-untyped-def]
        def called(*arguments: object, **named: object) -> object:
            result = real[name](*arguments, **named)
            seen.append((name, stat.S_IMODE(path.stat().st_mode)))
            return result

        return called

    monkeypatch.setattr(socket.socket, "bind", spy("bind"))
    monkeypatch.setattr(socket.socket, "listen", spy("listen"))
    monkeypatch.setattr(os, "chmod", spy("chmod"))
    before = os.umask(0)
    try:
        listener = listen.bind_unix(path, mode, None)
        assert os.umask(0) == 0, "the umask is not put back"
    finally:
        os.umask(before)
    listener.close()
    assert [name for name, _ in seen] == ["bind", "chmod", "listen"]
    assert seen[0] == ("bind", 0o600), "connectable by others between bind and chmod"
    assert all(bits & ~mode == 0 for _, bits in seen), seen
    assert stat.S_IMODE(path.stat().st_mode) == mode


@pytest.mark.root
def test_the_group_is_set_before_the_mode_lets_it_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "socket"
    seen: list[tuple[str, int, int]] = []
    real = {"chown": os.chown, "chmod": os.chmod}

    def spy(name: str):  # type: ignore[no-untyped-def]
        def called(*arguments: object, **named: object) -> None:
            real[name](*arguments, **named)
            seen.append((name, stat.S_IMODE(path.stat().st_mode), path.stat().st_gid))

        return called

    for name in real:
        monkeypatch.setattr(os, name, spy(name))
    listen.bind_unix(path, 0o660, 4242).close()
    assert seen == [("chown", 0o600, 4242), ("chmod", 0o660, 4242)]


@pytest.mark.slow
@pytest.mark.root
def test_modes_do_not_depend_on_the_umask_of_whoever_starts_it(make_daemon: MakeDaemon) -> None:
    daemon = make_daemon('socket_mode = "0660"\nsocket_group = "4242"\n')
    daemon.umask = 0
    daemon.start()
    with daemon.rpc() as rpc:
        rpc.call("lease", key="k", holder="h", ttl_seconds=300)
    status = daemon.socket.stat()
    assert (stat.S_IMODE(status.st_mode), status.st_gid) == (0o660, 4242)
    _private(daemon)
    daemon.restart()
    _private(daemon)


@pytest.mark.slow
def test_by_default_only_its_own_user_is_let_in(make_daemon: MakeDaemon) -> None:
    daemon = make_daemon()
    daemon.umask = 0
    daemon.start()
    assert stat.S_IMODE(daemon.socket.stat().st_mode) == 0o600


def _private(daemon: Daemon) -> None:
    for directory in (daemon.state_dir, daemon.runtime_dir):
        assert stat.S_IMODE(directory.stat().st_mode) == 0o700
        files = [path for path in directory.rglob("*") if path.is_file()]
        assert len(files) >= 3
        assert {path.name: stat.S_IMODE(path.stat().st_mode) for path in files} == {path.name: 0o600 for path in files}


@pytest.mark.slow
def test_directories_that_were_open_are_closed(make_daemon: MakeDaemon) -> None:
    daemon = make_daemon()
    for directory in (daemon.state_dir, daemon.runtime_dir):
        directory.mkdir(mode=0o755)
        directory.chmod(0o755)
    daemon.start()
    _private(daemon)
    assert daemon.terminate() == 0


@pytest.mark.slow
def test_a_daemon_whose_directory_is_taken_away_ends(make_daemon: MakeDaemon) -> None:
    """Another daemon could start where the path leads now: what the first goes on granting could be granted twice."""
    first = make_daemon().start()
    first.runtime_dir.rename(first.place / "elsewhere")
    assert first.wait(10) == 70
    assert len(first.events("floor.lost")) == 1
