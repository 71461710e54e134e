"""contrib/leasenc: its MessagePack against the library's, its arguments, and both its forms against a scripted daemon."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import msgpack
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

SCRIPT = Path(__file__).parents[2] / "contrib" / "leasenc"
PYTHON = "/usr/bin/python3" if Path("/usr/bin/python3").exists() else sys.executable
FENCE = "4611686018427387905"
AWAIT_SECONDS = 20.0  # a limit for what takes milliseconds, so that a fault fails instead of hanging


def load() -> ModuleType:
    loader = importlib.machinery.SourceFileLoader("leasenc", str(SCRIPT))
    spec = importlib.util.spec_from_loader("leasenc", loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    before, sys.dont_write_bytecode = sys.dont_write_bytecode, True
    try:
        loader.exec_module(module)
    finally:
        sys.dont_write_bytecode = before
    return module


leasenc = load()


# --- MessagePack

scalars = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False)
    | st.text(max_size=40)
    | st.sampled_from(["x" * n for n in (31, 32, 255, 256, 65535, 65536)])
    | st.sampled_from([b"x" * n for n in (0, 1, 255, 256, 65535, 65536)])
)
values = st.recursive(
    scalars, lambda v: st.lists(v, max_size=20) | st.dictionaries(st.text(max_size=6), v, max_size=20), max_leaves=40
)


def depth(value: object) -> int:
    inner = value if isinstance(value, list) else value.values() if isinstance(value, dict) else None
    return 0 if inner is None else 1 + max(map(depth, inner), default=0)


@given(values)
def test_the_encoder_writes_what_the_library_writes_and_reads_it_back(value: Any) -> None:
    assume(depth(value) <= leasenc.MAX_DEPTH)
    wire = leasenc.pack(value)
    assert wire == msgpack.packb(value)
    assert list(leasenc.messages(bytearray(wire))) == [value]


@given(st.lists(values, min_size=1, max_size=3), st.data())
def test_messages_arrive_whole_whatever_the_pieces(several: list[Any], draw: st.DataObject) -> None:
    assume(all(depth(value) <= leasenc.MAX_DEPTH for value in several))
    wire = b"".join(map(msgpack.packb, several))
    cut = draw.draw(st.integers(0, len(wire)))
    buffer, found = bytearray(wire[:cut]), []
    found += leasenc.messages(buffer)
    buffer += wire[cut:]
    found += leasenc.messages(buffer)
    assert found == several
    assert not buffer


def test_single_precision_is_read() -> None:
    assert list(leasenc.messages(bytearray(msgpack.packb(0.5, use_single_float=True)))) == [0.5]


@given(st.binary(max_size=200) | values.map(msgpack.packb).flatmap(lambda w: st.binary(max_size=3).map(lambda b: b + w[1:] + b)))
def test_hostile_bytes_raise_the_codecs_own_error_only(wire: bytes) -> None:
    try:
        for value in leasenc.messages(bytearray(wire)):
            leasenc.to_json(value)
    except leasenc.CodecError as error:
        assert str(error)


@pytest.mark.parametrize(
    ("wire", "words"),
    [
        (b"\xc1", "0xc1"),
        (b"\xd6\xff\x00\x00\x00\x00", "0xd6"),
        (b"\xc7\x01\x05x", "0xc7"),
        (b"\xa1\xff", "not UTF-8"),
        (b"\x81\x01\x02", "key of a map"),
        (b"\x82\xa1a\x01\xa1a\x02", "twice"),
        (b"\x81\x91\x01\x02", "key of a map"),
        (b"\x91" * 3000, "nested deeper"),
        (b"\xdb\xff\xff\xff\xff", "exceeds 4194304 bytes"),
        (b"\xdd\x00\x10\x00\x00" + b"\xc0" * 300_000, "262144 values"),
    ],
)
def test_what_no_daemon_sends_is_refused_in_words(wire: bytes, words: str) -> None:
    with pytest.raises(leasenc.CodecError, match=words):
        list(leasenc.messages(bytearray(wire)))


@pytest.mark.parametrize("value", [2**64, -(2**63) - 1, "\ud800", object(), [[[[[[[[[[[[[[[[[1]]]]]]]]]]]]]]]]]])
def test_what_cannot_be_sent_is_refused(value: object) -> None:
    with pytest.raises(leasenc.CodecError):
        leasenc.pack(value)


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
        max_leaves=20,
    )
)
def test_printed_json_is_ascii_and_means_the_value(value: Any) -> None:
    line = leasenc.to_json(value)
    assert line.isascii() and "\n" not in line
    assert json.loads(line) == value


def test_what_json_cannot_say_is_null_or_hexadecimal() -> None:
    assert leasenc.to_json([float("inf"), float("-inf"), float("nan"), b"\x00\xff"]) == '[null,null,null,"00ff"]'


# --- a daemon that follows a script


class Peer:
    """The daemon's end of one connection."""

    def __init__(self, link: socket.socket) -> None:
        self.link = link
        self.unpacker = msgpack.Unpacker()

    def ask(self) -> list[Any]:
        """The next request: [msgid, method, fields]."""
        while True:
            for kind, number, method, params in self.unpacker:
                assert kind == 0
                return [number, method, params[0] if params else {}]
            chunk = self.link.recv(65536)
            assert chunk, "the client went away"
            self.unpacker.feed(chunk)

    def say(self, *message: Any) -> None:
        self.link.sendall(msgpack.packb(list(message)))

    def result(self, number: int, **result: Any) -> None:
        self.say(1, number, None, result)


Script = Callable[[Peer], None]


class Daemon:
    """Connection n is served by script n, then closed.  `fault` is what a script raised."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.listener = socket.socket(socket.AF_UNIX)
        self.listener.bind(str(path))
        self.listener.listen(8)
        self.listener.settimeout(AWAIT_SECONDS)
        self.fault: BaseException | None = None
        self.threads: list[threading.Thread] = []

    def serve(self, *scripts: Script) -> None:
        thread = threading.Thread(target=self._serve, args=(scripts,), daemon=True)
        self.threads.append(thread)
        thread.start()

    def _serve(self, scripts: tuple[Script, ...]) -> None:
        try:
            for script in scripts:
                link, _ = self.listener.accept()
                link.settimeout(AWAIT_SECONDS)
                with link:
                    script(Peer(link))
        except BaseException as fault:
            self.fault = fault

    def join(self) -> None:
        for thread in self.threads:
            thread.join(AWAIT_SECONDS)
            assert not thread.is_alive()
        if self.fault is not None:
            raise self.fault


@pytest.fixture
def daemon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Daemon]:
    for name in ("LEASE_FENCE", "LEASED_AGENT_KEY", "LEASE_REQUEST_ID"):
        monkeypatch.delenv(name, raising=False)
    served = Daemon(tmp_path / "s")
    monkeypatch.setenv("LEASED_SOCKET", str(served.path))
    yield served
    served.join()
    served.listener.close()


def answering(**result: Any) -> Script:
    return lambda peer: peer.result(peer.ask()[0], **result)


def run(arguments: list[str], stdin: bytes | str = b"", **environment: str) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        [PYTHON, "-I", str(SCRIPT), *arguments],
        input=stdin.encode() if isinstance(stdin, str) else stdin,
        capture_output=True,
        env={**os.environ, **environment},
        timeout=AWAIT_SECONDS,
        check=False,
    )


# --- one shot


@pytest.mark.parametrize(
    ("argv", "result", "code"),
    [
        (["lease", "key=k", "holder=h"], {"acquired": True}, 0),
        (["lease", "key=k", "holder=h"], {"acquired": False, "reason": "held"}, 75),
        (["lease", "key=k", "holder=h"], {"acquired": None, "reason": "full"}, 69),
        (["renew", "key=k", "holder=h", "fence@env"], {"acquired": True}, 0),
        (["renew", "key=k", "holder=h", "fence@env"], {"acquired": False, "reason": "lapsed"}, 79),
        (["renew", "key=k", "holder=h", "fence@env"], {"acquired": None}, 69),
        (["release", "key=k"], {"released": True}, 0),
        (["release", "key=k"], {"released": False, "reason": "expired"}, 1),
        (["release", "key=k"], {"released": None}, 69),
        (["check", "key=k"], {"held": True}, 0),
        (["check", "key=k"], {"held": False}, 1),
        (["check", "key=k"], {"held": None}, 69),
        (["revoke", "key=k", "reason=x"], {"revoked": False}, 1),
        (["info"], {"name": "leased"}, 0),
    ],
)
def test_an_answer_is_printed_and_told_by_the_exit_code(
    daemon: Daemon, capfd: Any, monkeypatch: Any, argv: list[str], result: dict[str, Any], code: int
) -> None:
    monkeypatch.setenv("LEASE_FENCE", FENCE)
    daemon.serve(answering(**result))
    assert leasenc.main(argv) == code
    out, err = capfd.readouterr()
    assert json.loads(out) == result and out.count("\n") == 1
    assert err == ""


@pytest.mark.parametrize(
    ("error", "code"),
    [
        ("invalid_argument: ttl_seconds must be a number from 0.1 to 3600", 64),
        ("unknown_method: frobnicate", 64),
        ("permission_denied: operators only", 77),
        ("unauthenticated: no such agent key", 77),
        ("rate_limited: 64 waiters", 69),
        ("internal: see the log", 70),
        ("strange", 70),
    ],
)
@pytest.mark.parametrize("whole_connection", [False, True])
def test_an_error_is_told_on_stderr(daemon: Daemon, capfd: Any, error: str, code: int, whole_connection: bool) -> None:
    daemon.serve(lambda peer: peer.say(1, peer.ask()[0] * (not whole_connection), error, None))
    assert leasenc.main(["check", "key=k"]) == code
    out, err = capfd.readouterr()
    assert out == ""
    assert err.startswith(f"leasenc: {error}") and err.count("\n") == 1


def test_words_of_the_daemon_cannot_steer_the_terminal(daemon: Daemon, capfd: Any) -> None:
    daemon.serve(lambda peer: peer.say(1, peer.ask()[0], "internal: \x1b[2J\r\n\x9b", None))
    assert leasenc.main(["check", "key=k"]) == 70
    assert capfd.readouterr().err == "leasenc: internal: ?[2J???\n"


def test_an_answer_to_nothing_asked_is_passed_over(daemon: Daemon, capfd: Any) -> None:
    def script(peer: Peer) -> None:
        number = peer.ask()[0]
        peer.result(number + 1, held=False)
        peer.result(number, held=True)

    daemon.serve(script)
    assert leasenc.main(["check", "key=k"]) == 0
    assert capfd.readouterr().out == '{"held":true}\n'


def test_fields_travel_as_written_and_typed_ones_as_json(daemon: Daemon, capfd: Any) -> None:
    asked = []

    def script(peer: Peer) -> None:
        asked.append(peer.ask())
        peer.result(asked[0][0])

    daemon.serve(script)
    assert leasenc.main(["list", "limit=5", "scope=a=b@c:=d", "all:=true", "cursor:=null"]) == 0
    daemon.join()
    assert asked == [[1, "list", {"limit": "5", "scope": "a=b@c:=d", "all": True, "cursor": None}]]


def test_an_operation_without_fields_sends_empty_params(daemon: Daemon) -> None:
    def script(peer: Peer) -> None:
        wire = peer.link.recv(100)
        assert msgpack.unpackb(wire) == [0, 1, "info", []]
        peer.result(1, name="leased")

    daemon.serve(script)
    assert leasenc.main(["info"]) == 0


@pytest.mark.parametrize("op", ["lease", "release", "check"])
def test_a_lost_reply_is_asked_for_again_as_the_same_attempt(daemon: Daemon, capfd: Any, monkeypatch: Any, op: str) -> None:
    asked = []
    monkeypatch.setenv("LEASE_FENCE", FENCE)

    def answered(peer: Peer) -> None:
        asked.append(peer.ask())
        peer.result(asked[-1][0], acquired=True, released=False, held=True, reason="expired")

    daemon.serve(lambda peer: asked.append(peer.ask()), answered)
    assert leasenc.main([op, "key=k"]) == (1 if op == "release" else 0)
    daemon.join()
    assert len(asked) == 2 and asked[0] == asked[1]
    if op == "lease":
        assert len(asked[0][2]["request_id"]) == 48
    assert ("the first may have done it" in capfd.readouterr().err) is (op == "release")


def test_half_an_answer_is_forgotten_with_its_connection(daemon: Daemon, capfd: Any) -> None:
    def dies(peer: Peer) -> None:
        peer.ask()
        peer.link.sendall(msgpack.packb([1, 1, None, {"held": False}])[:-1])

    daemon.serve(dies, answering(held=True))
    assert leasenc.main(["check", "key=k"]) == 0
    assert capfd.readouterr().out == '{"held":true}\n'


def test_a_repeat_waits_only_for_what_is_left(daemon: Daemon) -> None:
    asked = []

    def answered(peer: Peer) -> None:
        asked.append(peer.ask())
        peer.result(asked[-1][0], acquired=False)

    daemon.serve(lambda peer: asked.append(peer.ask()), answered)
    assert leasenc.main(["lease", "key=k", "holder=h", "wait_seconds=250"]) == 75
    daemon.join()
    assert asked[0][2]["wait_seconds"] == "250"
    assert 200 < asked[1][2]["wait_seconds"] < 250


def test_two_attempts_draw_two_request_ids(daemon: Daemon) -> None:
    drawn = set()

    def script(peer: Peer) -> None:
        number, _, fields = peer.ask()
        drawn.add(fields["request_id"])
        peer.result(number, acquired=True)

    daemon.serve(script, script)
    assert leasenc.main(["lease", "key=k", "holder=h"]) == leasenc.main(["lease", "key=k", "holder=h"]) == 0
    daemon.join()
    assert len(drawn) == 2


def test_what_is_lost_twice_or_may_not_be_repeated_is_unknown(daemon: Daemon, capfd: Any) -> None:
    count = []
    daemon.serve(*[lambda peer: count.append(peer.ask()[1])] * 3)
    assert leasenc.main(["lease", "key=k", "holder=h"]) == 69
    assert leasenc.main(["revoke", "key=k", "reason=x"]) == 69
    daemon.join()
    assert count == ["lease", "lease", "revoke"]
    out, err = capfd.readouterr()
    assert out == "" and err.count("whether it was done is not known") == 2


def test_a_silent_daemon_is_unknown_when_the_time_is_up(daemon: Daemon, capfd: Any) -> None:
    over = threading.Event()

    def script(peer: Peer) -> None:
        peer.ask()
        over.wait(AWAIT_SECONDS)

    daemon.serve(script)
    assert leasenc.main(["--timeout=0.05", "check", "key=k"]) == 69
    over.set()
    assert "no answer" in capfd.readouterr().err


@pytest.mark.parametrize(
    "wire", [b"HTTP/1.1 400 Bad Request\r\n\r\n", b"\xc1", b"\x93\x00\x01\x02", b"\x94\x01\x01\x05\xc0", b"\xa0"]
)
def test_a_socket_that_is_no_lease_daemon_is_unknown(daemon: Daemon, capfd: Any, wire: bytes) -> None:
    def script(peer: Peer) -> None:
        peer.ask()
        peer.link.sendall(wire)

    daemon.serve(script)
    assert leasenc.main(["check", "key=k"]) == 69
    assert "does not speak as a lease daemon" in capfd.readouterr().err


def test_the_return_of_a_daemon_is_awaited(daemon: Daemon, monkeypatch: Any) -> None:
    outcomes = [None, ConnectionRefusedError(111, "refused"), FileNotFoundError(2, "missing"), None]

    class Restarting(socket.socket):
        def connect(self, address: Any) -> None:
            if outcome := outcomes.pop(0):
                raise outcome
            super().connect(address)

    monkeypatch.setattr(leasenc, "Socket", Restarting)
    daemon.serve(lambda peer: peer.ask() and None, answering(held=True))
    assert leasenc.main(["check", "key=k"]) == 0
    assert outcomes == []


def test_a_daemon_that_does_not_return_leaves_the_answer_unknown(daemon: Daemon, capfd: Any, monkeypatch: Any) -> None:
    def goes(peer: Peer) -> None:
        daemon.path.unlink()
        peer.ask()

    monkeypatch.setattr(leasenc, "RECONNECT_SECONDS", 0.03)
    daemon.serve(goes)
    assert leasenc.main(["lease", "key=k", "holder=h"]) == 69
    assert "did not come back" in capfd.readouterr().err


# --- where the daemon is


def test_unreachable_sockets_are_named_with_what_to_do(tmp_path: Path, capfd: Any, monkeypatch: Any) -> None:
    monkeypatch.delenv("LEASED_SOCKET", raising=False)
    missing, dead = tmp_path / "none", tmp_path / "dead"
    assert leasenc.main(["--socket", str(missing), "check", "key=k"]) == 69
    err = capfd.readouterr().err
    assert f"no daemon at {missing}" in err and "systemctl start" in err
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(str(dead))
    assert leasenc.main(["check", f"--socket={dead}", "key=k"]) == 69
    assert "nobody listens" in capfd.readouterr().err
    assert leasenc.main(["--socket", "/" + "x" * 200, "check", "key=k"]) == 69
    assert "too long" in capfd.readouterr().err


def test_a_full_backlog_is_unreachable_when_the_time_is_up(tmp_path: Path, capfd: Any) -> None:
    path = str(tmp_path / "full")
    with socket.socket(socket.AF_UNIX) as listener, socket.socket(socket.AF_UNIX) as first:
        listener.bind(path)
        listener.listen(0)
        first.connect(path)
        assert leasenc.main(["--socket", path, "--timeout", "0.03", "check", "key=k"]) == 69
    assert "took no connection within 0.03 s" in capfd.readouterr().err


def test_permission_denied_names_the_socket_and_the_remedy(capfd: Any, monkeypatch: Any) -> None:
    class Denied(socket.socket):
        def connect(self, address: Any) -> None:
            raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(leasenc, "Socket", Denied)
    assert leasenc.main(["--socket", "/run/x.sock", "check", "key=k"]) == 77
    err = capfd.readouterr().err
    assert "/run/x.sock" in err and "join the group" in err


def test_the_socket_is_chosen_in_the_documented_order(monkeypatch: Any) -> None:
    monkeypatch.setattr(leasenc.os, "geteuid", lambda: 1000)
    monkeypatch.setenv("LEASED_SOCKET", "/l")
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/x")
    assert leasenc.parsed(["--socket", "/s", "info"])[0] == ["/s"]
    assert leasenc.parsed(["info"])[0] == ["/l"]
    monkeypatch.delenv("LEASED_SOCKET")
    assert leasenc.parsed(["info"])[0] == ["/x/leased/leased.sock", "/run/leased/leased.sock"]
    monkeypatch.setattr(leasenc.os, "geteuid", lambda: 0)
    assert leasenc.parsed(["info"])[0] == ["/run/leased/leased.sock"]


def test_only_a_missing_socket_leads_on_to_the_next(daemon: Daemon, tmp_path: Path) -> None:
    daemon.serve(answering(), answering())
    client = leasenc.Client([str(tmp_path / "none"), str(daemon.path)], 5.0, lambda entry: None)
    client.connect(0.0)
    assert client.paths == [str(daemon.path)]
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(str(tmp_path / "dead"))
    other = leasenc.Client([str(tmp_path / "dead"), str(daemon.path)], 5.0, lambda entry: None)
    with pytest.raises(leasenc.Trouble, match="nobody listens"):
        other.connect(0.0)
    client.submit(None, "info", {})
    client.turn(False)
    while client.pending:
        client.turn(False)
    client.socket.close()
    daemon.serve()
    assert leasenc.main(["info"]) == 0


# --- secrets


@pytest.mark.parametrize("name", ["fence", "agent_key", "request_id"])
@pytest.mark.parametrize("form", ["{}=" + FENCE, "{}:=" + FENCE, "{}=", "{}@"])
def test_a_secret_on_the_command_line_is_refused_and_not_repeated(capfd: Any, name: str, form: str) -> None:
    assert leasenc.main(["renew", "key=k", "holder=h", form.format(name)]) == 64
    out, err = capfd.readouterr()
    assert out == "" and f"{name}@FILE" in err and FENCE not in err


@pytest.mark.parametrize("argument", [FENCE, f"{FENCE}{FENCE}", f"=-{FENCE}", "clé"])
def test_a_stray_argument_is_refused_and_not_repeated(capfd: Any, argument: str) -> None:
    assert leasenc.main(["release", "key=k", argument]) == 64
    assert argument not in capfd.readouterr().err


@pytest.mark.parametrize("content", [FENCE + "\n", '{"acquired":true,"key":"k","fence":"' + FENCE + '"}\n'])
@pytest.mark.parametrize("source", ["fence@{file}", "fence=-", "fence@-", "fence@env", None])
def test_a_fence_comes_from_a_file_standard_input_or_the_environment(
    daemon: Daemon, tmp_path: Path, source: str | None, content: str
) -> None:
    (tmp_path / "kept").write_text(content)
    command = ["release", "key=k", *([source.format(file=tmp_path / "kept")] if source else [])]
    seen = {}
    started = threading.Event()

    def script(peer: Peer) -> None:
        number, _, fields = peer.ask()
        assert started.wait(AWAIT_SECONDS)
        seen["fence"] = fields["fence"]
        seen["argv"] = Path(f"/proc/{process.pid}/cmdline").read_bytes()
        peer.result(number, released=True)

    daemon.serve(script)
    environment = {**os.environ, **({"LEASE_FENCE": content} if source in ("fence@env", None) else {})}
    process = subprocess.Popen(
        [PYTHON, "-I", str(SCRIPT), *command],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment,
    )
    started.set()
    out, err = process.communicate(content.encode(), timeout=AWAIT_SECONDS)
    daemon.join()
    assert (process.returncode, err) == (0, b"")
    assert seen["fence"] == FENCE
    assert b"release" in seen["argv"] and FENCE.encode() not in seen["argv"]
    assert json.loads(out) == {"released": True}


def test_lease_takes_the_environments_fence_only_when_asked(daemon: Daemon, monkeypatch: Any) -> None:
    asked = []

    def script(peer: Peer) -> None:
        asked.append(peer.ask())
        peer.result(asked[-1][0], acquired=True)

    monkeypatch.setenv("LEASE_FENCE", FENCE)
    monkeypatch.setenv("LEASE_REQUEST_ID", "r" * 22)
    daemon.serve(script, script)
    assert leasenc.main(["lease", "key=k", "holder=h"]) == 0
    assert leasenc.main(["lease", "key=k", "holder=h", "fence@env", "request_id@env"]) == 0
    daemon.join()
    assert "fence" not in asked[0][2]
    assert asked[1][2] == {"key": "k", "holder": "h", "fence": FENCE, "request_id": "r" * 22}


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["renew", "key=k", "holder=h"], "LEASE_FENCE"),
        (["release", "key=k", "fence@env"], "LEASE_FENCE is not set"),
        (["check", "key=k", "agent_key@env"], "LEASED_AGENT_KEY is not set"),  # the name `lease` and `lease mcp` know it by
        (["release", "key=k", "fence@/nonexistent/f"], "fence cannot be read: No such file"),
        (["release", "key=k", "fence@/dev/null"], "nothing was read"),
        (["lease", "fence=-", "agent_key=-"], "one secret only"),
        (["lease", "key@file"], "key is no secret"),
        (["lease", "key=a", "key=b"], "key is given twice"),
        (["list", "all:=tru"], "all is not JSON"),
        (["list", "all:=NaN"], "NaN is not JSON"),
        (["--watch", "check", "key=k"], "a field is written name=value"),
        (["--follow", "check", "key=k"], "no option --follow"),
        (["watch"], "by --watch, or in the JSON lines form"),
        (["key=k"], "first argument is the operation"),
        (["--timeout", "0", "info"], "--timeout"),
        (["--timeout", "nan", "info"], "--timeout"),
        (["--timeout"], "--timeout"),
        (["--socket"], "--socket needs a path"),
        (["check", "key=\udcff"], "not UTF-8"),
    ],
)
def test_wrong_usage_is_explained(daemon: Daemon, capfd: Any, argv: list[str], words: str) -> None:
    assert leasenc.main(argv) == 64
    out, err = capfd.readouterr()
    assert out == "" and words in err and err.count("\n") == 1


def test_a_request_above_the_frame_limit_is_not_sent(daemon: Daemon, capfd: Any) -> None:
    assert leasenc.main(["check", "key=" + "k" * 65536]) == 64
    assert "exceeds 65536" in capfd.readouterr().err


# --- JSON lines


def parse(process: subprocess.CompletedProcess[bytes]) -> list[dict[str, Any]]:
    assert process.stderr == b""
    return [json.loads(line) for line in process.stdout.splitlines()]


def test_lines_are_pipelined_and_printed_in_order_of_arrival(daemon: Daemon) -> None:
    def script(peer: Peer) -> None:
        asked = [peer.ask() for _ in range(3)]
        assert [fields["key"] for _, _, fields in asked] == ["a", "b", "c"]
        for number, _, fields in reversed(asked):
            peer.result(number, key=fields["key"], held=False)

    daemon.serve(script)
    lines = ['{"op":"check","key":"a","id":"first"}', '{"op":"check","key":"b"}', '{"op":"check","key":"c","id":null}']
    done = run([], "\n".join(lines))
    assert parse(done) == [
        {"id": None, "result": {"key": "c", "held": False}},
        {"id": 2, "result": {"key": "b", "held": False}},
        {"id": "first", "result": {"key": "a", "held": False}},
    ]
    assert done.returncode == 0


def test_a_bad_line_is_answered_with_its_number_and_the_next_is_read(daemon: Daemon) -> None:
    daemon.serve(answering(held=True))
    bad = ["{", "[]", '{"id":7}', '{"op":"check","id":{}}', '{"op":"check","key":"a","key":"b"}', '{"op":"x","n":1e999}', "\xff"]
    bad += ['{"op":"check","n":18446744073709551616}', '{"op":"check","key":"\\ud800"}', "[" * 100_000]
    process = run(
        [], "\n".join(bad[:5]).encode() + b"\n\n" + "\n".join(bad[7:]).encode() + b"\n\xff\n" + b'{"op":"check","key":"k"}\n'
    )
    entries = parse(process)
    assert [entry["line"] for entry in entries[:-1]] == [1, 2, 3, 4, 5, 7, 8, 9, 10]
    assert all(entry["error"].startswith(f"invalid_argument: line {entry['line']} ") for entry in entries[:-1])
    assert entries[2]["id"] == 7
    assert entries[-1] == {"id": 11, "result": {"held": True}}
    assert process.returncode == 64


def test_a_line_without_end_is_refused_before_it_fills_the_memory(daemon: Daemon) -> None:
    process = run([], b"x" * (leasenc.MAX_LINE_BYTES + 70_000))
    assert [entry["line"] for entry in parse(process)] == [1]
    assert process.returncode == 64


def test_more_lines_than_may_be_in_flight_are_all_answered(daemon: Daemon) -> None:
    total = 3 * leasenc.MAX_PENDING

    def script(peer: Peer) -> None:
        for _ in range(total):
            number, _, fields = peer.ask()
            peer.result(number, n=fields["n"])

    daemon.serve(script)
    process = run([], "".join(f'{{"op":"check","n":{n},"id":{n}}}\n' for n in range(total)))
    assert [(entry["id"], entry["result"]["n"]) for entry in parse(process)] == [(n, n) for n in range(total)]
    assert process.returncode == 0


def test_what_was_in_flight_on_a_lost_connection_is_repeated_once_in_order(daemon: Daemon) -> None:
    before, after = [], []

    def dies(peer: Peer) -> None:
        before.extend(peer.ask() for _ in range(4))
        peer.result(before[1][0], held=True)

    def answers(peer: Peer) -> None:
        for _ in range(2):
            after.append(peer.ask())
            peer.result(after[-1][0], acquired=True)

    daemon.serve(dies, answers)
    lines = ['{"op":"lease","key":"a","id":1}', '{"op":"check","key":"a","id":2}', '{"op":"revoke","key":"b","id":3}']
    process = run([], "\n".join([*lines, '{"op":"lease","key":"c","id":4}\n']))
    entries = {entry["id"]: entry for entry in parse(process)}
    daemon.join()
    assert after == [before[0], before[3]]
    assert entries[1]["result"] == entries[4]["result"] == {"acquired": True}
    assert entries[2]["result"] == {"held": True}
    assert entries[3]["error"].startswith("unknown: ")
    assert process.returncode == 69


def test_half_a_request_is_not_carried_over_to_the_next_connection(daemon: Daemon) -> None:
    keys = [str(n) * 60_000 for n in range(9)]  # more than a socket holds

    def answers(peer: Peer) -> None:
        for key in keys:
            number, _, fields = peer.ask()
            assert fields == {"key": key}
            peer.result(number, held=True)

    daemon.serve(lambda peer: peer.link.recv(1) and None, answers)
    process = run([], "".join(f'{{"op":"check","key":"{key}"}}\n' for key in keys))
    assert parse(process) == [{"id": n, "result": {"held": True}} for n in range(1, 10)]
    assert process.returncode == 0


def test_a_refused_connection_takes_its_unsent_requests_with_it(daemon: Daemon) -> None:
    over = threading.Event()
    entries: list[dict[str, Any]] = []

    def script(peer: Peer) -> None:
        peer.say(1, 0, "rate_limited: 256 connections", None)
        over.wait(AWAIT_SECONDS)

    daemon.serve(script)
    client = leasenc.Client([str(daemon.path)], 5.0, entries.append)
    for n in range(9):
        client.submit(n, "check", {"key": str(n) * 60_000})
    while client.pending:
        client.turn(False)
    over.set()
    assert entries == [{"id": n, "error": "rate_limited: 256 connections"} for n in range(9)]
    assert client.socket is None and not client.unsent


def test_notifications_are_printed_and_the_end_of_a_watch_is_told(daemon: Daemon) -> None:
    def script(peer: Peer) -> None:
        number, method, _ = peer.ask()
        assert method == "watch"
        peer.result(number, watching=True, seq=1)
        peer.say(2, "event", [{"seq": 1, "type": "granted"}])
        peer.say(2, "gap", [{"from_seq": 2, "to_seq": 9}])
        assert peer.ask()[1] == "check"

    daemon.serve(script, answering(held=True))
    process = run([], '{"op":"watch","id":"w"}\n{"op":"check","key":"k","id":"c"}\n')
    assert parse(process) == [
        {"id": "w", "result": {"watching": True, "seq": 1}},
        {"event": {"seq": 1, "type": "granted"}},
        {"event": {"from_seq": 2, "to_seq": 9, "type": "gap"}},
        {"id": "w", "error": "unknown: the connection ended, and this watch with it"},
        {"id": "c", "result": {"held": True}},
    ]
    assert process.returncode == 69


def test_each_line_tells_that_the_daemon_is_unreachable(tmp_path: Path) -> None:
    process = run(["--socket", str(tmp_path / "none")], '{"op":"info"}\n{"op":"info","id":"b"}\n')
    entries = parse(process)
    assert [entry["id"] for entry in entries] == [1, "b"]
    assert all(entry["error"].startswith("unreachable: no daemon at") for entry in entries)
    assert process.returncode == 69


# --- as a process


def test_it_is_one_executable_file_that_imports_little(daemon: Daemon) -> None:
    assert SCRIPT.read_text().startswith("#!/usr/bin/python3 -I\n")
    assert os.access(SCRIPT, os.X_OK)
    daemon.serve(answering(held=False))
    command = [PYTHON, "-I", "-S", "-X", "importtime", str(SCRIPT), "check", "key=k"]
    done = subprocess.run(command, capture_output=True, timeout=AWAIT_SECONDS, check=False)
    assert (done.returncode, done.stdout) == (1, b'{"held":false}\n')
    imported = {line.rsplit("|", 1)[1].strip() for line in done.stderr.decode().splitlines() if "|" in line}
    assert "_socket" in imported
    assert not imported & {"json", "socket", "argparse", "re", "struct", "enum", "typing", "pathlib", "subprocess"}


# --- watching


def event(seq: int) -> list[Any]:
    return [2, "event", [{"seq": seq, "type": "granted", "key": "k"}]]


GAP = {"type": "gap", "from_seq": None, "to_seq": None}


class Watching:
    """A `leasenc --watch` as a process, its standard input a pipe; `line` is the next it prints."""

    def __init__(self, *arguments: str) -> None:
        self.process = subprocess.Popen(
            [PYTHON, "-I", str(SCRIPT), "--watch", *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )

    def line(self) -> Any:
        assert self.process.stdout is not None
        return json.loads(self.process.stdout.readline())

    def end(self) -> tuple[int, bytes, bytes]:
        """Closes its standard input; what it left with, and what it still said."""
        out, err = self.process.communicate(timeout=AWAIT_SECONDS)
        return self.process.returncode, out, err


def watching(peer: Peer) -> dict[str, Any]:
    number, op, fields = peer.ask()
    assert op == "watch"
    peer.result(number, watching=True, seq=0)
    return dict(fields)


def test_watch_prints_events_and_gaps_until_standard_input_ends(daemon: Daemon) -> None:
    asked: list[dict[str, Any]] = []

    def script(peer: Peer) -> None:
        asked.append(watching(peer))
        peer.say(*event(1))
        peer.say(2, "gap", [{"from_seq": 2, "to_seq": 9}])
        assert not peer.link.recv(10)

    daemon.serve(script)
    watch = Watching("key=k")
    assert watch.line() == {"seq": 1, "type": "granted", "key": "k"}
    assert watch.line() == {"type": "gap", "from_seq": 2, "to_seq": 9}
    assert watch.end() == (0, b"", b"")
    assert asked == [{"key": "k"}]


def test_a_lost_watch_is_replaced_and_a_gap_with_nulls_says_so(daemon: Daemon) -> None:
    def first(peer: Peer) -> None:
        watching(peer)
        peer.say(*event(1))

    def second(peer: Peer) -> None:
        watching(peer)
        peer.say(*event(1))
        assert not peer.link.recv(10)

    daemon.serve(first, lambda peer: peer.ask() and None, second)  # the one between goes before it has answered
    watch = Watching("scope=s")
    assert [watch.line() for _ in range(3)] == [event(1)[2][0], GAP, event(1)[2][0]]
    assert watch.end() == (0, b"", b"")


def test_a_watch_tries_on_while_its_daemon_is_away_and_says_it_once(daemon: Daemon, capfd: Any, monkeypatch: Any) -> None:
    attempts: list[int] = []
    monkeypatch.setattr(leasenc, "RECONNECT_SECONDS", 0.0)
    monkeypatch.setattr(leasenc, "AWAY_MS", 1)
    monkeypatch.setattr(leasenc, "LOST_MS", 1)

    class Away(socket.socket):
        def connect(self, address: Any) -> None:
            attempts.append(len(attempts))
            if 2 <= len(attempts) <= 5:
                raise ConnectionRefusedError(111, "refused")
            super().connect(address)

    def last(peer: Peer) -> None:
        watching(peer)
        peer.say(1, 0, "permission_denied: enough", None)

    monkeypatch.setattr(leasenc, "Socket", Away)
    daemon.serve(lambda peer: watching(peer) and None, last)
    assert leasenc.main(["--watch"]) == 77
    out, err = capfd.readouterr()
    assert [json.loads(line) for line in out.splitlines()] == [GAP]
    assert err.count("trying on") == 1 and err.endswith("permission_denied: enough\n") and err.count("\n") == 2
    assert len(attempts) == 6


@pytest.mark.parametrize(
    ("error", "code"), [("rate_limited: 64 watches", 69), ("invalid_argument: scope must not be given together with key", 64)]
)
def test_a_watch_that_never_began_ends_with_the_reason(daemon: Daemon, capfd: Any, error: str, code: int) -> None:
    daemon.serve(lambda peer: peer.say(1, peer.ask()[0], error, None))
    assert leasenc.main(["--watch", "key=k", "scope=s"]) == code
    assert capfd.readouterr() == ("", f"leasenc: {error}\n")


def test_a_watch_in_the_background_is_not_ended_by_dev_null(daemon: Daemon) -> None:
    told = threading.Event()

    def script(peer: Peer) -> None:
        watching(peer)
        assert told.wait(AWAIT_SECONDS)
        peer.say(*event(1))
        assert not peer.link.recv(10)

    daemon.serve(script)
    process = subprocess.Popen([PYTHON, "-I", str(SCRIPT), "--watch"], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE)
    told.set()
    assert process.stdout is not None
    assert json.loads(process.stdout.readline())["seq"] == 1
    process.send_signal(signal.SIGINT)
    assert process.wait(AWAIT_SECONDS) == 130
    process.stdout.close()


def test_help_is_short_and_names_every_exit_code() -> None:
    done = run(["--help"])
    assert done.returncode == 0 and len(done.stdout.splitlines()) <= 24
    assert all(f" {code} " in done.stdout.decode().replace("\n", " ") for code in (0, 1, 64, 69, 70, 75, 77, 79))


def test_a_closed_standard_output_takes_no_lease(daemon: Daemon) -> None:
    done = subprocess.run(
        ["/bin/sh", "-c", f"exec {PYTHON} -I {SCRIPT} lease key=k holder=h >&-"],
        stderr=subprocess.PIPE,
        timeout=AWAIT_SECONDS,
        check=False,
    )
    assert done.returncode == 70
    assert done.stderr == b"leasenc: standard output is closed: nothing was asked, since nobody could read the answer\n"


def test_a_reader_that_went_away_ends_it_quietly(daemon: Daemon) -> None:
    daemon.serve(answering(held=True))
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        [PYTHON, "-I", str(SCRIPT), "check", "key=k"], stdout=writer, stderr=subprocess.PIPE, timeout=AWAIT_SECONDS, check=False
    )
    os.close(writer)
    assert (done.returncode, done.stderr) == (141, b"")


def test_ctrl_c_leaves_with_130_and_no_traceback(daemon: Daemon) -> None:
    asked = threading.Event()
    over = threading.Event()

    def script(peer: Peer) -> None:
        peer.ask()
        asked.set()
        over.wait(AWAIT_SECONDS)

    daemon.serve(script)
    process = subprocess.Popen([PYTHON, "-I", str(SCRIPT), "check", "key=k"], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert asked.wait(AWAIT_SECONDS)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=AWAIT_SECONDS)
    over.set()
    assert (process.returncode, out, err) == (130, b"", b"")


def test_a_fault_of_its_own_is_one_line_without_the_text(capfd: Any, monkeypatch: Any) -> None:
    def broken(*_: Any) -> None:
        raise RuntimeError(FENCE)

    monkeypatch.setattr(leasenc, "one_shot", broken)
    assert leasenc.main(["info"]) == 70
    err = capfd.readouterr().err
    assert "RuntimeError at line" in err and FENCE not in err and err.count("\n") == 1
