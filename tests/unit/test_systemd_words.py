"""What is said to systemd and taken from it, without a systemd: the datagrams, the variables and the descriptors."""

from __future__ import annotations

import os
import select
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from leased.errors import ConfigError
from leased.systemd import FIRST_INHERITED, Inherited, Notifier, inherited, listening, pidfd_again


@pytest.fixture
def manager(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as made:
        made.bind(str(tmp_path / "notify"))
        made.settimeout(20)
        monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
        yield made


def test_the_life_of_a_service_in_its_own_words(manager: socket.socket) -> None:
    notifier = Notifier()
    notifier.status("starting")
    notifier.ready("serving")
    notifier.reloading()
    notifier.stopping("stopping")
    heard = [manager.recv(4096).decode().split("\n") for _ in range(4)]
    assert heard[0] == ["STATUS=starting"]
    assert heard[1] == ["READY=1", "STATUS=serving"]
    assert heard[2][0] == "RELOADING=1" and int(heard[2][1].removeprefix("MONOTONIC_USEC=")) > 0
    assert heard[3] == ["STOPPING=1", "STATUS=stopping"]


def test_an_address_without_a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    name = f"leased-test-{os.getpid()}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind("\0" + name)
        manager.settimeout(20)
        monkeypatch.setenv("NOTIFY_SOCKET", "@" + name)
        Notifier().say("READY=1")
        assert manager.recv(4096) == b"READY=1"


def test_nobody_there_harms_nobody(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("NOTIFY_SOCKET", raising=False)
    silent = Notifier()
    silent.ready("serving")
    silent.keep("bind.00.1", 0)
    assert not silent
    monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "gone"))
    Notifier().ready("serving")


def test_each_name_in_the_descriptor_store_has_an_open_file_of_its_own(manager: socket.socket) -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    descriptor = os.pidfd_open(child.pid)
    try:
        notifier = Notifier()
        received = []
        for name in ("bind.aa.1", "bind.bb.2"):
            notifier.keep(name, descriptor)
            message, descriptors, _, _ = socket.recv_fds(manager, 4096, 4)
            assert message.decode().split("\n") == ["FDSTORE=1", "FDPOLL=0", f"FDNAME={name}"]
            received += descriptors
        assert not same_open_file(received[0], received[1]) and not same_open_file(received[0], descriptor)
        child.communicate(b"\n")
        for each in (*received, descriptor):
            assert select.select([each], [], [], 20)[0], "it tells of the same process"
            os.close(each)
    finally:
        child.kill()
        child.wait()


def same_open_file(one: int, other: int) -> bool:
    """kcmp(2), as systemd asks."""
    import ctypes
    import platform

    number = {"x86_64": 312, "aarch64": 272}[platform.machine()]
    return bool(ctypes.CDLL(None, use_errno=True).syscall(number, os.getpid(), os.getpid(), 0, one, other) == 0)


def test_a_process_that_has_ended_has_no_second_descriptor() -> None:
    child = subprocess.Popen([sys.executable, "-c", ""])
    descriptor = os.pidfd_open(child.pid)
    assert os.waitid(os.P_PIDFD, descriptor, os.WEXITED | os.WNOWAIT) is not None
    assert pidfd_again(descriptor) is None, "a zombie: its number may soon be another's"
    child.wait()
    assert pidfd_again(descriptor) is None
    os.close(descriptor)
    reading, writing = os.pipe()
    assert pidfd_again(reading) is None, "no pidfd at all"
    os.close(reading)
    os.close(writing)


@pytest.mark.parametrize(
    ("names", "found"),
    [("clients:http", ["clients", "http"]), ("clients", ["clients", "unknown"]), ("", ["unknown", "unknown"])],
)
def test_two_listeners_are_told_apart_by_their_names(names: str, found: list[str]) -> None:
    code = (
        "import os, sys, socket\n"
        "a = socket.socket(socket.AF_UNIX); b = socket.socket()\n"
        "os.dup2(a.fileno(), 13); os.dup2(b.fileno(), 14); a.close(); b.close(); os.dup2(13, 3); os.dup2(14, 4)\n"
        f"os.environ.update(LISTEN_PID=str(os.getpid()), LISTEN_FDS='2', LISTEN_FDNAMES='{names}')\n"
        "from leased.systemd import inherited\n"
        "print([tuple(each) for each in inherited()], inherited(), os.get_inheritable(3), 'LISTEN_FDS' in os.environ)\n"
    )
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True).stdout
    assert told.strip() == f"{[(name, FIRST_INHERITED + at) for at, name in enumerate(found)]} [] False False"


@pytest.mark.parametrize("pid", ["", "1", "x"])
def test_what_was_passed_to_another_process_is_not_taken(pid: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LISTEN_PID", pid)
    monkeypatch.setenv("LISTEN_FDS", "1")
    assert inherited() == []


def test_only_a_listening_stream_socket_is_a_door(tmp_path: Path) -> None:
    with (
        socket.socket(socket.AF_UNIX) as idle,
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as datagrams,
        socket.socket() as door,
    ):
        door.bind(("127.0.0.1", 0))
        door.listen()
        for wrong in (idle, datagrams):
            with pytest.raises(ConfigError, match=r"\(web\), which the service manager passed, is no listening stream socket"):
                listening(Inherited("web", os.dup(wrong.fileno())))
        found = listening(Inherited("web", os.dup(door.fileno())))
        assert found.getsockname() == door.getsockname()
        found.close()
