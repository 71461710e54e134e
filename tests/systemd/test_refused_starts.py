"""A daemon that must not start: the journal says why, the exit code ends the restarts, callers hear the truth, and repair is enough."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable, Iterator

import pytest
from inhabitants import SERVICE, eventually, settled
from lab import Lab

pytestmark = [pytest.mark.root, pytest.mark.slow]

Refuses = Callable[[str], None]


def caller(lab: Lab) -> tuple[int, str]:
    """An unprivileged member of the group asks, which starts the daemon where it is down."""
    asked = lab.run("lease", "check", "any", user="worker", check=False)
    return asked.returncode, asked.stderr


@pytest.fixture
def refuses(lab: Lab) -> Iterator[Refuses]:
    """`refuses(why)`: the daemon, which is down, does not start, says `why`, and neither loops nor closes its door.  Afterwards it starts."""

    def judge(why: str) -> None:
        mark = lab.journal_entries()[-1]["__CURSOR"]
        restarts = lab.show(SERVICE, "NRestarts")["NRestarts"]
        code, said = caller(lab)
        assert code == 70 and "leased cannot start on this host" in said and "journalctl -u leased" in said
        assert why not in said, "what is wrong is the operator's to know"
        begun = time.monotonic()
        code, said = caller(lab)
        assert code == 70 and time.monotonic() - begun < 4.0, "the same process tells those who come next"
        eventually(lambda: lab.show(SERVICE, "ActiveState")["ActiveState"] == "failed")
        told = lab.show(SERVICE, "ExecMainStatus", "NRestarts", "StatusText")
        assert (told["ExecMainStatus"], told["NRestarts"]) == ("78", restarts)
        assert why in told["StatusText"], "systemctl status tells it too"
        lines = [
            line for line in lab.journal_entries(SERVICE, f"--after-cursor={mark}") if "daemon.refused_start" in line["MESSAGE"]
        ]
        assert [line["PRIORITY"] for line in lines] == ["3"] and why in lines[0]["MESSAGE"]
        assert lines[0]["MESSAGE"].count(why) == 1, "it is said once"
        assert not any("Traceback" in line["MESSAGE"] for line in lab.journal_entries(SERVICE, f"--after-cursor={mark}"))
        assert lab.show("leased.socket", "SubState")["SubState"] == "listening", "the door stays"
        begun = time.monotonic()
        assert "failed" in lab.run("systemctl", "start", SERVICE, check=False).stderr
        assert time.monotonic() - begun < 4.5, "an operator who starts it by hand, with nobody waiting, is not kept waiting"

    settled(lab)
    lab.systemctl("stop", SERVICE)
    yield judge
    lab.systemctl("start", SERVICE)
    settled(lab)
    assert caller(lab) == (1, "")


def test_a_damaged_state(lab: Lab, refuses: Refuses) -> None:
    data = lab.path("/var/lib/leased/data.mdb")
    whole = data.read_bytes()
    data.write_bytes(b"not a database " * 4000)
    try:
        refuses("/var/lib/leased/data.mdb is damaged")
    finally:
        data.write_bytes(whole)


def test_a_wrong_configuration(lab: Lab, refuses: Refuses) -> None:
    file = lab.path("/etc/leased/leased.toml")
    right = file.read_text()
    file.write_text(right + "max_leeses = 5\n")
    try:
        refuses("max_leeses is not a key of the configuration")
        head, _, body = by_http(lab).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 500 ") and b"application/problem+json" in head
        assert json.loads(body)["code"] == "internal" and b"max_leeses" not in body
        eventually(lambda: lab.show(SERVICE, "ActiveState")["ActiveState"] == "failed")
    finally:
        file.write_text(right)


def by_http(lab: Lab) -> bytes:
    """All that a caller hears who asks in HTTP."""
    with socket.socket(socket.AF_UNIX) as asking:
        asking.settimeout(20)
        asking.connect(str(lab.path("/run/leased/leased.sock")))
        asking.sendall(b"GET /readyz HTTP/1.1\r\nHost: leased\r\n\r\n")
        return b"".join(iter(lambda: asking.recv(4096), b""))


@pytest.fixture(scope="module")
def small_disk(lab: Lab) -> Iterator[None]:
    """The state lies on a file system of its own, of 3 MiB."""
    settled(lab)
    lab.systemctl("stop", SERVICE)
    lab.run(
        "sh",
        "-c",
        "cp -a /var/lib/leased /root/state; mount -t tmpfs -o size=3m,mode=700,uid=leased,gid=leased disk /var/lib/leased",
    )
    lab.run("cp", "-a", "/root/state/.", "/var/lib/leased/")
    try:
        yield
    finally:
        lab.systemctl("stop", SERVICE)
        lab.run("sh", "-c", "umount /var/lib/leased; rm -r /root/state")
        settled(lab)


def test_a_read_only_state(lab: Lab, small_disk: None, refuses: Refuses) -> None:
    lab.run("mount", "-o", "remount,ro", "/var/lib/leased")
    try:
        refuses("/var/lib/leased: Read-only file system")
    finally:
        lab.run("mount", "-o", "remount,rw", "/var/lib/leased")


def test_a_new_state_on_a_full_disk(lab: Lab, small_disk: None, refuses: Refuses) -> None:
    lab.run("sh", "-c", "rm -r /var/lib/leased/*; dd if=/dev/zero of=/var/lib/leased/filled bs=4k", check=False)
    try:
        refuses("No space left on device")
    finally:
        lab.run("rm", "/var/lib/leased/filled")


def test_a_disk_that_fills_up_ends_no_daemon_and_no_lease(lab: Lab, small_disk: None) -> None:
    settled(lab)
    with lab.rpc() as rpc:
        grant = rpc.call("lease", key="full:before", holder="one", ttl_seconds=600)
    lab.run("sh", "-c", "dd if=/dev/zero of=/var/lib/leased/filled bs=4k", check=False)
    lab.run("sh", "-c", "while cat /etc/services >>/var/lib/leased/filled-too; do :; done", check=False)
    lab.systemctl("restart", SERVICE)
    with lab.rpc() as rpc:
        assert rpc.call("check", key="full:before")["held_by"] == "one"
        for number in range(40):  # until the pages LMDB has free are used up
            answer = rpc.call("lease", key=f"full:{number}", holder="one", ttl_seconds=600)
            if answer["acquired"] is None:
                break
        assert (answer["acquired"], answer["reason"] in {"store", "starting", "ledger_slow"}) == (None, True), answer
        assert rpc.call("release", key="full:before", holder="one", fence=grant["fence"])["released"] is True
    assert lab.show(SERVICE, "ActiveState", "SubState") == {"ActiveState": "active", "SubState": "running"}
    said = lab.journal(SERVICE, "--lines=20")
    assert "store.flush_failed" in said and "No space left on device" in said
    assert "loop.late" not in said
    lab.run("sh", "-c", "rm /var/lib/leased/filled*")
    settled(lab)
    eventually(lambda: "store.flush_recovered" in lab.journal(SERVICE, "--lines=20"))
