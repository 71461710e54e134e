"""What only shows in a real process: a daemon that was stopped, thousands of leases that fall together, a kernel that names no process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from daemons import Daemon, MakeDaemon, Rpc

WITHOUT_PEERPIDFD = """
import errno, sys
import leased.doors.unix as door
def none(connection):
    raise OSError(errno.ENOPROTOOPT, "as before Linux 6.5")
door.peer_pidfd = none
from leased.__main__ import main
sys.exit(main(sys.argv[1:]))
"""

CLIENT = """
import os, socket, sys, msgpack
path, how = sys.argv[1:]
connection = socket.socket(socket.AF_UNIX)
connection.connect(path)
if how == "child" and os.fork():
    os.wait()
    os._exit(0)
connection.sendall(msgpack.packb([0, 1, "lease", [{"key": "k", "holder": how, "ttl_seconds": 60, "bind": "process"}]]))
unpacker = msgpack.Unpacker()
while True:
    unpacker.feed(connection.recv(65536))
    for message in unpacker:
        if message[0] == 2 and message[1] == "prove" and how != "silent":
            connection.sendall(msgpack.packb([2, "prove", message[2]]))
        if message[0] == 1:
            print(message[2] or message[3]["acquired"], flush=True)
            sys.stdin.read()
            os._exit(0)
"""


@pytest.mark.slow
def test_p20_a_stopped_daemon_serves_what_waited_before_it_expires_anything(daemon: Daemon) -> None:
    """Stopped past the ttl of fifty leases, with half of their renewals in its sockets: those live on, and nobody who waited gets them."""
    ttl = 1.0
    with daemon.rpc() as holder, daemon.rpc() as other:
        grants = [holder.call("lease", key=f"k{n}", holder="h", ttl_seconds=ttl) for n in range(50)]
        waits = [other.post("lease", key=f"k{n}", holder="w", wait_seconds=20) for n in range(50)]
        while holder.call("check", key="k49")["waiting"] != 1:
            time.sleep(0.01)
        for grant in grants:
            assert holder.call("renew", key=grant["key"], holder="h", fence=grant["fence"])["acquired"] is True
        os.kill(daemon.pid, signal.SIGSTOP)
        try:
            renewals = holder.post_all(
                [("renew", {"key": g["key"], "holder": "h", "fence": g["fence"], "ttl_seconds": 30}) for g in grants[:25]]
            )
            time.sleep(3 * ttl)
        finally:
            os.kill(daemon.pid, signal.SIGCONT)
        answers = holder.answers(renewals)
        assert [answer["acquired"] for answer in answers] == [True] * 25
        assert [answer["generation"] for answer in answers] == [grant["generation"] for grant in grants[:25]]
        passed = other.answers(waits[25:])
        assert [answer["acquired"] for answer in passed] == [True] * 25, "what nobody renewed goes to who waited"
        assert all(other.unanswered(wait, 0.01) for wait in waits[:25])
        late = holder.call("renew", key="k30", holder="h", fence=grants[30]["fence"])
        assert (late["acquired"], late["reason"]) == (False, "wrong_fence")


@pytest.mark.slow
def test_p29_twenty_thousand_leases_that_fall_together_keep_nobody_waiting(make_daemon: MakeDaemon) -> None:
    """One `lapsed` each, and an acquire meanwhile takes nowhere near the time that all of them take."""
    daemon = make_daemon().start()
    with daemon.rpc() as crowd, daemon.rpc() as other:
        deadline = time.monotonic() + 15
        for at in range(0, 20_000, 500):
            left = deadline - time.monotonic()
            crowd.answers(
                crowd.post_all([("lease", {"key": f"c{n}", "holder": "crowd", "ttl_seconds": left}) for n in range(at, at + 500)])
            )
        assert crowd.call("info")["leases"] == 20_000
        before = crowd.call("info")["counts"]["lapsed"]
        taken = []
        while crowd.call("info")["leases"] > 0:
            began = time.monotonic()
            grant = other.call("lease", key="mine", holder="me")
            taken.append(time.monotonic() - began)
            assert other.call("release", key="mine", fence=grant["fence"])["released"] is True
        assert crowd.call("info")["counts"]["lapsed"] - before == 20_000
        taken.sort()
        assert taken[int(len(taken) * 0.99)] < 0.5, (
            "the benchmark measures this on a quiet machine; here it must only not be seconds"
        )


OUR_CLIENT = """
import sys
from leased import Client
client = Client(sys.argv[1])
print(bool(client.try_acquire("k", ttl=60, bind="process")), flush=True)
sys.stdin.read()
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "answer"),
    [("honest", "True"), ("ours", "True"), ("silent", "invalid_argument: bind"), ("child", "invalid_argument: bind")],
)
def test_where_the_kernel_names_no_process_the_client_proves_it(
    make_daemon: MakeDaemon, tmp_path: Path, how: str, answer: str
) -> None:
    """Proven by an echo from the very process that connected; a forked child and a client that knows no proof are refused."""
    daemon = make_daemon()
    command = [
        sys.executable,
        "-c",
        WITHOUT_PEERPIDFD,
        "serve",
        "--config",
        str(daemon.config_path),
        "--socket",
        str(daemon.socket),
    ]
    command += ["--state-dir", str(daemon.state_dir), "--runtime-dir", str(daemon.runtime_dir)]
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen(command, stderr=log, start_new_session=True)
    try:
        while not daemon.socket.exists():
            assert process.poll() is None, (tmp_path / "log").read_text()
            time.sleep(0.01)
        client = subprocess.Popen(
            [sys.executable, "-c", OUR_CLIENT if how == "ours" else CLIENT, str(daemon.socket), how],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert client.stdout is not None and client.stdin is not None
        assert client.stdout.readline().decode().startswith(answer)
        with Rpc(daemon.socket) as rpc:
            assert rpc.call("check", key="k")["held"] is (how in {"honest", "ours"})
            client.kill()
            client.wait()
            give_up = time.monotonic() + 10
            while rpc.call("check", key="k")["held"]:
                assert time.monotonic() < give_up, "the lease outlived its process"
                time.sleep(0.005)
    finally:
        process.kill()
        process.wait()
