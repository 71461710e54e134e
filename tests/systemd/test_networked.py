"""HTTP over TCP and shipping to upstream: what the hardened service may do by itself, what systemd does for it, and who sees the secrets."""

from __future__ import annotations

import json
import secrets
import shutil
import socket
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from inhabitants import PYTHON, SERVICE, Holder, eventually, kill_daemon, running, settled
from lab import Lab
from product import UNITS

pytestmark = [pytest.mark.root, pytest.mark.slow]

OPENING = "sudo systemctl stop leased.service && sudo systemctl enable --now leased-http.socket\n"
DROP_INS = f"/etc/systemd/system/{SERVICE}.d"


def free_port() -> int:
    """The lab has the network of this machine."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def namespace(lab: Lab, kind: str, pid: int) -> str:
    return str(lab.path(f"/proc/{pid}/ns/{kind}").readlink())


class Door:
    """HTTP at a port, with an agent key."""

    def __init__(self, port: int, key: str) -> None:
        self.url, self.key = f"http://127.0.0.1:{port}", key

    def post(self, path: str, body: dict[str, object], key: str | None = None) -> tuple[int, dict[str, object]]:
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {self.key if key is None else key}"}
        request = urllib.request.Request(self.url + path, json.dumps(body).encode(), headers)
        try:
            with urllib.request.urlopen(request, timeout=20) as answer:
                return answer.status, json.load(answer)
        except urllib.error.HTTPError as error:
            with error:
                return error.code, json.load(error)


@pytest.fixture
def door(lab: Lab) -> Iterator[Door]:
    """leased-http.socket, at a port that is free, and a key."""
    port = free_port()
    unit = (UNITS / "leased-http.socket").read_text()
    lab.put("/etc/systemd/system/leased-http.socket", unit.replace("127.0.0.1:8765", f"127.0.0.1:{port}"))
    lab.systemctl("daemon-reload")
    settled(lab)
    lab.run("sh", "-c", OPENING.removesuffix("\n").replace("sudo ", ""))
    settled(lab)
    key = lab.run("leased", "agent", "add", f"agent-{port}").stdout.split()[-1]
    yield Door(port, key)
    lab.systemctl("stop", SERVICE)
    lab.systemctl("disable", "--now", "leased-http.socket")
    settled(lab)


def test_readme_opens_the_door_like_this() -> None:
    assert f"```sh\n{OPENING}```" in (UNITS.parent / "README.md").read_text()


def test_systemd_listens_for_http_and_the_daemon_has_no_network(lab: Lab, door: Door) -> None:
    daemon = running(lab)
    assert namespace(lab, "net", daemon) != namespace(lab, "net", 1)
    taken = door.post("/v1/lease", {"key": "http:key", "holder": "agent", "ttl_seconds": 30})
    assert (taken[0], taken[1]["acquired"]) == (200, True)
    assert door.post("/v1/lease", {"key": "http:key"}, key="wrong")[0] == 401
    with lab.rpc() as rpc:
        assert rpc.call("check", key="http:key", agent_key=door.key)["held_by"] == "agent", "both listeners lead to the same leases"
    assert f"http.listening address={door.url.removeprefix('http://')}" in lab.journal(SERVICE, "--lines=6")
    kill_daemon(lab)
    fence = taken[1]["fence"]
    assert door.post("/v1/lease/release", {"key": "http:key", "holder": "agent", "fence": fence})[1]["released"] is True


@pytest.fixture
def upstream() -> Iterator[ThreadingHTTPServer]:
    """Takes whatever comes; `.heard` has the Authorization of each batch."""

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            heard.append(self.headers["Authorization"])
            self.send_response(202)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    heard: list[str] = []
    server = ThreadingHTTPServer(("127.0.0.1", 0), Collector)
    server.heard = heard  # type: ignore[attr-defined]
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


def test_what_is_billed_leaves_with_a_credential_that_only_root_can_read(lab: Lab, upstream: ThreadingHTTPServer) -> None:
    token = secrets.token_hex(16)
    settled(lab)
    file = lab.path("/etc/leased/leased.toml")
    before = file.read_text()
    lab.path("/etc/leased/upstream-token").touch(0o600)
    lab.path("/etc/leased/upstream-token").write_text(token + "\n")
    lab.path(DROP_INS).mkdir(parents=True)
    shutil.copy(UNITS / "leased.service.d/upstream.conf", lab.path(DROP_INS))
    file.write_text(
        f'{before}[billing]\nenabled = true\n[upstream]\nurl = "http://127.0.0.1:{upstream.server_port}/events"\n'
        'token_file = "credential:upstream-token"\n'
    )
    try:
        lab.systemctl("daemon-reload")
        lab.systemctl("restart", SERVICE)
        assert "credential:upstream-token" in lab.run("leased", "check-config").stdout, "it can be checked without the credential"
        settled(lab)
        with lab.rpc() as rpc:
            assert rpc.call("lease", key="billed", holder="first", ttl_seconds=5)["acquired"] is True
            assert rpc.call("lease", key="billed", holder=f"second-{token[:8]}")["charge"]["amount"] == "0.002"
        assert eventually(lambda: upstream.heard) == [f"Bearer {token}"]  # type: ignore[attr-defined]
        environment = lab.path(f"/proc/{running(lab)}/environ").read_bytes()
        assert token.encode() not in environment
        assert token not in whole_journal(lab)
    finally:
        file.write_text(before)
        shutil.rmtree(lab.path(DROP_INS))
        lab.path("/etc/leased/upstream-token").unlink()
        lab.systemctl("daemon-reload")
        lab.systemctl("restart", SERVICE)
        settled(lab)


def test_a_wallet_key_is_read_as_a_credential_whatever_its_mode_shows(lab: Lab) -> None:
    lab.put("/root/wallet", "ab" * 32 + "\n", 0o600)
    code = "import os, pathlib, leased.wallet as w; p = pathlib.Path(os.environ['CREDENTIALS_DIRECTORY'], 'wallet-key')\n"
    code += "print(oct(p.stat().st_mode & 0o777), len(w.read_key(pathlib.Path('credential:wallet-key'))))"
    told = lab.run(
        *("systemd-run", "--quiet", "--pipe", "--wait", "--property=User=leased"),
        *("--property=LoadCredential=wallet-key:/root/wallet", PYTHON, "-c", code),
    )
    mode, length = told.stdout.split()
    assert (mode in {"0o400", "0o440"}, length) == (True, "64"), told.stdout


def whole_journal(lab: Lab) -> str:
    """Every field of every line of this boot, whoever wrote it."""
    lab.run("journalctl", "--sync", "--quiet")
    return lab.run("journalctl", "--quiet", "--no-pager", "--output=export", "--all").stdout


def test_no_secret_is_in_the_journal_in_a_status_or_in_an_argument(lab: Lab, door: Door) -> None:
    file = lab.path("/etc/leased/leased.toml")
    before = file.read_text()
    file.write_text(before + '[log]\nlevel = "debug"\n')
    try:
        lab.systemctl("restart", SERVICE)
        settled(lab)
        known = [door.key]
        with Holder(lab, "secretive", "secret:a", "secret:b") as holder, lab.rpc() as rpc:
            known += holder.fences.values()
            fence = holder.fences["secret:a"]
            assert rpc.call("renew", key="secret:a", holder="another", fence=fence)["acquired"] is False
            assert rpc.call("renew", key="secret:b", holder="secretive", fence=fence)["acquired"] is False
            assert (
                rpc.error("renew", key="secret:a", holder="secretive", fence=fence, ttl_seconds="soon").code == "invalid_argument"
            )
            assert rpc.error("lease", key="secret:a", holder="x", agent_key=door.key + "x").code == "unauthenticated"
            status, grant = door.post("/v1/lease", {"key": "secret:c", "holder": "agent", "ttl_seconds": 30})
            assert status == 200
            known.append(str(grant["fence"]))
            assert door.post("/v1/lease", {"key": "secret:c", "fence": fence, "ttl_seconds": -1})[0] == 400
            rpc.send(b"\xc1" + fence.encode())
            daemon = running(lab)
            command_line = lab.path(f"/proc/{daemon}/cmdline").read_bytes() + lab.path(f"/proc/{daemon}/environ").read_bytes()
            lab.run("kill", "-ABRT", str(daemon))  # as the watchdog does: every thread's place goes into the journal
            eventually(lambda: lab.main_pid(SERVICE) not in {0, daemon})
            shown = lab.systemctl("status", SERVICE, "--lines=1000", "--full", check=False) + str(lab.show(SERVICE, "StatusText"))
        journal = whole_journal(lab)
        assert "Fatal Python error: Aborted" in journal and "daemon.ready" in journal
        assert len(set(known)) == 4 and min(map(len, known)) >= 16
        for secret in known:
            assert secret not in journal and secret not in shown and secret.encode() not in command_line
        for key in ("secret:a", "secret:b", "secret:c"):
            assert key not in journal, "key texts are their holders' too"
    finally:
        file.write_text(before)
        lab.systemctl("restart", SERVICE)
