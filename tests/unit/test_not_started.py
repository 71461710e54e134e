"""What is heard of a daemon that cannot start: by the log, the service manager, and whoever has called."""

from __future__ import annotations

import io
import json
import os
import socket
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import msgpack
import pytest
import structlog

from leased import log
from leased.errors import ConfigError, StateRefused, StoreError
from leased.not_started import tell
from leased.systemd import Inherited, Notifier

WHY = "/var/lib/leased/data.mdb is damaged: run `leased fsck`"


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch) -> Iterator[io.StringIO]:
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    log.configure(stream=stream, environ={})
    yield stream
    structlog.reset_defaults()


@pytest.fixture
def listener(tmp_path: Path) -> Iterator[socket.socket]:
    made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    made.bind(str(tmp_path / "door"))
    made.listen(16)
    yield made
    made.close()


def given(listener: socket.socket) -> list[Inherited]:
    """As systemd would pass it: a descriptor that nothing else closes."""
    return [Inherited("clients", os.dup(listener.fileno()))]


def calling(listener: socket.socket, says: bytes = b"") -> socket.socket:
    caller = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    caller.settimeout(20)
    caller.connect(listener.getsockname())
    caller.sendall(says)
    return caller


def heard(caller: socket.socket) -> bytes:
    with caller:
        return b"".join(iter(lambda: caller.recv(4096), b""))


def test_whoever_waits_is_answered_in_the_language_it_asks_in(listener: socket.socket, quiet: io.StringIO) -> None:
    packed = msgpack.packb([0, 7, "check", [{"key": "a"}]])
    callers = [calling(listener, packed), calling(listener, b"GET / HTTP/1.1\r\n\r\n"), calling(listener)]
    not_started = tell(StateRefused(WHY), given(listener), Notifier(), seconds=0.7)
    assert str(not_started) == WHY
    plain, http, silent = map(heard, callers)
    text = "internal: leased cannot start on this host; `systemctl status leased` and `journalctl -u leased` tell its operator why"
    assert msgpack.unpackb(plain) == [1, 0, text, None] == msgpack.unpackb(silent)
    head, _, body = http.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 500 Internal Server Error\r\n") and b"Connection: close" in head
    assert json.loads(body)["detail"] == text.removeprefix("internal: ")
    (line,) = [json.loads(each) for each in quiet.getvalue().splitlines()]
    assert (line["event"], line["level"], line["error"], line["exit_code"]) == ("daemon.refused_start", "error", WHY, 78)


def test_whoever_comes_while_others_are_told_is_told_too(listener: socket.socket) -> None:
    first = calling(listener, b"x")
    late: list[bytes] = []

    def come() -> None:
        late.append(heard(first))
        late.append(heard(calling(listener, b"x")))

    thread = threading.Thread(target=come)
    thread.start()
    tell(StateRefused(WHY), given(listener), Notifier(), seconds=2.0)
    thread.join()
    assert len(late) == 2 and all(b"cannot start" in each for each in late)


@pytest.mark.parametrize("error", [StateRefused(WHY), ConfigError("a\nb"), PermissionError(13, "Permission denied")])
def test_with_nobody_waiting_what_no_restart_mends_ends_at_once(listener: socket.socket, error: Exception) -> None:
    tell(error, given(listener), Notifier(), seconds=3600.0)  # it would outlast the test


def test_before_a_restart_callers_are_waited_for_so_that_restarts_are_slow(listener: socket.socket) -> None:
    thread = threading.Thread(target=tell, args=(StoreError("no room"), given(listener), Notifier()), kwargs={"seconds": 1.5})
    thread.start()
    assert b"cannot start" in heard(calling(listener, b"x"))  # it came when nobody was there yet, or a moment before
    thread.join()


def test_every_mistake_of_a_file_is_a_line_of_its_own(quiet: io.StringIO) -> None:
    tell(ConfigError("one\ntwo"), [], Notifier())
    lines = [json.loads(each) for each in quiet.getvalue().splitlines()]
    assert [(line["error"], line["exit_code"]) for line in lines] == [("one", 78), ("two", 78)]


def test_the_service_manager_can_show_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(tmp_path / "notify"))
        monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
        tell(ConfigError("one\ntwo"), [], Notifier())
        assert manager.recv(4096) == b"STATUS=cannot start: one"


def test_what_is_in_the_descriptor_store_is_no_door(listener: socket.socket) -> None:
    reading, writing = os.pipe()
    caller = calling(listener, b"x")
    tell(StateRefused(WHY), [Inherited("bind.00.1", reading), *given(listener)], Notifier(), seconds=0.2)
    assert b"cannot start" in heard(caller)
    for descriptor in (reading, writing):
        os.close(descriptor)
