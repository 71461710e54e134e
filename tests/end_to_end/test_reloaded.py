"""SIGHUP to a real daemon: new limits, prices, operators and levels without a restart; a wrong file changes nothing."""

from __future__ import annotations

import os
import pty
import re
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import readme
from daemons import Daemon, MakeDaemon, Rpc, RpcError, effective_user, environment

from leased.reload import ON_OR_OFF, STANDS_ON

pytestmark = pytest.mark.slow
SECONDS = 20.0


def eventually(holds: Callable[[], object]) -> None:
    until = time.monotonic() + SECONDS
    while not holds():
        assert time.monotonic() < until, "it did not come true"
        time.sleep(0.01)


def reload(daemon: Daemon, config: str) -> dict[str, Any]:
    """The line that says how it went."""
    before = len(daemon.events("config.reloaded")) + len(daemon.events("config.refused"))
    daemon.config_path.write_text(config)
    daemon.signal(signal.SIGHUP)
    eventually(lambda: len(daemon.events("config.reloaded")) + len(daemon.events("config.refused")) > before)
    return (daemon.events("config.reloaded") + daemon.events("config.refused"))[-1]


def test_limits_prices_and_levels_change_while_leases_stay(make_daemon: MakeDaemon) -> None:
    daemon = make_daemon('[limits]\nmax_connections_per_uid = 2\n[log]\nlevel = "info"\n').start()
    with daemon.rpc() as rpc:
        assert rpc.call("info")["limits"]["max_connections_per_uid"] == 2
        grant = rpc.call("lease", key="k", holder="a", bind="connection")
        line = reload(
            daemon,
            "max_leases = 5000\nwait_out_seconds = 1\n[limits]\nmax_connections_per_uid = 7\nmax_leases_per_namespace = 2\n"
            'max_waiters_per_key = 0\nmax_watchers_per_uid = 1\n[billing]\nenabled = true\nrefusal = "0.5"\n',
        )
        assert line["event"] == "config.reloaded" and sorted(line["needs_restart"]) == ["max_leases", "wait_out_seconds"]
        assert {"limits.max_connections_per_uid", "billing.enabled", "billing.refusal"} <= set(line["changed"])
        told = rpc.call("info")
        assert (told["limits"]["max_connections_per_uid"], told["limits"]["max_leases"]) == (7, 100_000)
        assert told["store"]["wait_out_seconds"] == 60
        assert rpc.call("renew", key="k", holder="a", fence=grant["fence"])["acquired"] is True, "no connection was lost"
        refusal = rpc.call("lease", key="k", holder="b")
        assert refusal["charge"]["amount"] == "0.5"
        assert rpc.error("lease", key="k", holder="b", wait_seconds=5).code == "rate_limited"
        assert rpc.call("lease", key="second", holder="a")["acquired"] is True
        assert "limits.max_leases_per_namespace" in rpc.error("lease", key="third", holder="a").text
        with Rpc(daemon.socket) as two, Rpc(daemon.socket) as three:
            assert two.call("watch", key="k")["watching"] is True
            assert three.error("watch", key="k").code == "rate_limited"


def test_a_bound_of_requests_counts_for_who_is_connected_too(daemon: Daemon) -> None:
    with daemon.rpc() as rpc:
        reload(daemon, "[limits]\nrequests_per_second_per_uid = 1\n")
        answers = [rpc.post("check", key="k") for _ in range(5)]
        refused = 0
        for msgid in answers:
            try:
                rpc.answer(msgid)
            except RpcError as error:
                refused += error.code == "rate_limited"
        assert refused >= 3
        reload(daemon, "")
        assert all(rpc.call("check", key="k")["held"] is False for _ in range(20))


def test_a_wrong_file_changes_nothing_and_says_what_is_wrong(make_daemon: MakeDaemon) -> None:
    daemon = make_daemon("[limits]\nmax_watchers_per_uid = 3\n").start()
    for wrong, said in (
        ("[limits]\nmax_watchers_per_uid = 9\nmax_watcher = 1\n", "limits.max_watcher is not a key"),
        ("[limits]\nmax_watchers_per_uid = 9\n[log\n", "line 3"),
        ('operator_group = "no-such-group"\n[limits]\nmax_watchers_per_uid = 9\n', "there is no group 'no-such-group'"),
        ('[limits]\nmax_watchers_per_uid = 9\n[upstream]\nurl = "https://user:pAssw0rd@x.test/"\n', "upstream.url"),
    ):
        line = reload(daemon, wrong)
        assert line["event"] == "config.refused" and said in line["error"], line
        with daemon.rpc() as rpc:
            assert rpc.call("info")["limits"]["max_watchers_per_uid"] == 3
    daemon.config_path.unlink()
    daemon.signal(signal.SIGHUP)
    eventually(lambda: "there is no such file" in daemon.events("config.refused")[-1]["error"])
    assert "pAssw0rd" not in daemon.logs() and "Traceback" not in daemon.logs()
    assert daemon.terminate() == 0


def test_many_signals_and_a_stop_among_them(daemon: Daemon) -> None:
    for _ in range(20):
        daemon.signal(signal.SIGHUP)
    daemon.signal(signal.SIGTERM)
    assert daemon.wait() == 0
    assert daemon.events("daemon.stopped")[0]["clean"] is True


def test_the_log_follows_its_level_and_form(make_daemon: MakeDaemon) -> None:
    daemon = make_daemon().start()
    reload(daemon, '[log]\nlevel = "error"\n')
    daemon.config_path.write_text('[log]\nlevel = "info"\nformat = "console"\n')
    daemon.signal(signal.SIGHUP)
    eventually(lambda: [line for line in daemon.logs().splitlines() if "config.reloaded" in line and not line.startswith("{")])


@pytest.mark.root
def test_operators_and_namespaces_count_for_whoever_connects_then(make_daemon: MakeDaemon) -> None:
    daemon = make_daemon().start()
    daemon.socket.chmod(0o666)
    daemon.socket.parent.chmod(0o755)

    def as_1000() -> Rpc:
        with effective_user(1000, 1000, (4321,)):
            return Rpc(daemon.socket)

    before = as_1000()
    assert (before.call("info")["operator"], before.call("info")["namespace"]) == (False, "local")
    line = reload(daemon, 'operator_group = "4321"\n[namespaces]\n"uid:1000" = "build"\n')
    assert line["changed"] == ["operator_group", "namespaces.uid:1000"]
    with as_1000() as after:
        assert (after.call("info")["operator"], after.call("info")["namespace"]) == (True, "build")
        assert after.call("revoke", key="k", reason="test")["revoked"] is False
    with pytest.raises(RpcError, match="permission_denied"):
        before.call("revoke", key="k", reason="test")
    before.close()
    reload(daemon, "")
    with as_1000() as after:
        assert after.call("info")["operator"] is False


def test_systemd_is_told_of_the_reload(make_daemon: MakeDaemon, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as hearing:
        hearing.bind(str(tmp_path / "notify"))
        hearing.settimeout(SECONDS)
        monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
        daemon = make_daemon().start()
        monkeypatch.delenv("NOTIFY_SOCKET")
        for config in ("[limits]\nmax_connections = 5\n", "nonsense"):  # a reload that is refused is over, too
            started = time.clock_gettime(time.CLOCK_MONOTONIC)
            reload(daemon, config)
            said = [hearing.recv(4096).decode()]
            while "RELOADING=1" not in said[-1].splitlines():
                said.append(hearing.recv(4096).decode())
            stamp = int(said[-1].partition("MONOTONIC_USEC=")[2].splitlines()[0]) / 1e6
            assert started <= stamp <= time.clock_gettime(time.CLOCK_MONOTONIC)
            while "READY=1" not in said[-1].splitlines():
                said.append(hearing.recv(4096).decode())


@pytest.mark.parametrize("nohup", [False, True])
def test_a_terminal_that_closes_stops_the_daemon_in_order(make_daemon: MakeDaemon, nohup: bool) -> None:
    daemon = make_daemon()
    controlling, terminal = pty.openpty()
    with daemon.log_path.open("ab") as log:
        process = subprocess.Popen(
            ["setsid", "--ctty", *(["nohup"] if nohup else []), *daemon.command()],
            env=environment(), cwd="/", stdin=terminal, stdout=log, stderr=log,
        )  # fmt: skip
    os.close(terminal)
    daemon._process = process  # type: ignore[assignment]
    daemon.wait_ready()
    os.close(controlling)
    if nohup:
        eventually(lambda: daemon.events("config.reloaded"))
        assert daemon.terminate() == 0
    else:
        assert daemon.wait() == 0, daemon.logs()
        assert daemon.events("daemon.draining")[0]["signal"] == "SIGHUP"
    assert daemon.events("daemon.stopped")[0]["clean"] is True


def test_readme_names_what_waits_for_a_restart() -> None:
    told = readme.section("Configuration").partition("**Changing it while it runs.**")[2].partition("\n\n")[0]
    stands, _, or_so = " ".join(told.split()).partition("wait for a restart")
    assert set(re.findall(r"`([a-z_.]+)`", stands.partition("stands on:")[2])) == STANDS_ON
    assert all(f"`{name}`" in or_so for name in ON_OR_OFF)


class Upstream(ThreadingHTTPServer):
    """Takes events from whoever brings the credential."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, int]] = []
        outer = self

        class Answering(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                self.rfile.read(int(self.headers["content-length"]))
                code = 202 if self.headers.get("authorization") == "Bearer right" else 401
                outer.asked.append((self.path, code))
                self.send_response(code)
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, *_: object) -> None: ...

        super().__init__(("127.0.0.1", 0), Answering)
        threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()

    def __exit__(self, *_: object) -> None:
        self.shutdown()
        self.server_close()


def test_shipping_goes_on_at_the_new_place_with_the_new_credential_at_once(make_daemon: MakeDaemon, tmp_path: Path) -> None:
    credential = tmp_path / "credential"
    credential.write_text("wrong\n")

    def text(url: str, more: str = "") -> str:
        return f'[billing]\nenabled = true\n[upstream]\nurl = "{url}"\ntoken_file = "{credential}"\n{more}'

    with Upstream() as upstream:
        port = upstream.server_address[1]
        daemon = make_daemon(text("http://127.0.0.1:1/dead")).start()
        with daemon.rpc() as rpc:
            rpc.call("lease", key="k", holder="a")
            assert rpc.call("lease", key="k", holder="b")["charge"]["amount"] == "0.002"
            eventually(lambda: daemon.events("upstream.failed"))
            assert reload(daemon, text(f"http://127.0.0.1:{port}/new"))["changed"] == ["upstream.url"]
            eventually(lambda: ("/new", 401) in upstream.asked)
            eventually(lambda: daemon.events("upstream.refused"))
            credential.write_text("right\n")
            reload(daemon, text(f"http://127.0.0.1:{port}/new"))
            eventually(lambda: upstream.asked[-1] == ("/new", 202))
            eventually(lambda: rpc.call("usage")["pending_upstream"] == 0)
        line = reload(daemon, "[billing]\nenabled = true\n")
        assert "upstream.url" in line["needs_restart"]
    assert "right" not in daemon.logs() and "wrong" not in daemon.logs()
