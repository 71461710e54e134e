"""The real daemon as a process, and the plainest client that can speak to it.  For tests only.

The client shares no code with `leased.client` and decodes with msgpack alone, so that a mistake in the product's own framing cannot
hide itself.  The daemon's volatile state and its socket lie in a directory of their own on a tmpfs, below /dev/shm where that is one;
`Daemon.close` removes it and ends the process, whatever state either is in.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Self

import msgpack

ROOT = Path(__file__).resolve().parent.parent
READY_SECONDS = 30.0  # a start takes half a second; other tests may want the processors too
ANSWER_SECONDS = 20.0
POLL_SECONDS = 0.01


class RpcError(Exception):
    """The daemon answered with an error.  `code` and `text` are the two halves of "code: text"."""

    def __init__(self, error: object) -> None:
        super().__init__(error)
        assert isinstance(error, str), f"an error must be a string: {error!r}"
        self.code, _, self.text = error.partition(": ")


class HungUp(Exception):
    """The daemon ended the connection before it had answered."""


def request(msgid: int, operation: str, params: dict[str, Any]) -> bytes:
    packed: bytes = msgpack.packb([0, msgid, operation, [params]])
    return packed


class Rpc:
    """One connection, blocking.  Answers may come in any order: those nobody has asked for yet are kept."""

    def __init__(self, path: Path | str, *, timeout: float = ANSWER_SECONDS) -> None:
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.socket.settimeout(timeout)
        try:
            self.socket.connect(str(path))
        except BaseException:
            self.socket.close()
            raise
        self._unpacker = msgpack.Unpacker(raw=False, max_buffer_size=0, strict_map_key=False)
        self._msgid = 0
        self._kept: dict[int, list[Any]] = {}
        self.order: list[int] = []  # msgids of all answers, as they came in

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self.socket.close()

    # ---- one question, one answer

    def call(self, operation: str, **params: Any) -> dict[str, Any]:
        """Raises RpcError, HungUp, and OSError (TimeoutError included)."""
        return self.answer(self.post(operation, **params))

    def error(self, operation: str, **params: Any) -> RpcError:
        """The error that this call must be answered with."""
        try:
            result = self.call(operation, **params)
        except RpcError as error:
            return error
        raise AssertionError(f"{operation} was answered {result} instead of an error")

    # ---- pipelining

    def post(self, operation: str, **params: Any) -> int:
        """Send without waiting.  Returns the msgid for `answer`."""
        self._msgid += 1
        self.send(request(self._msgid, operation, params))
        return self._msgid

    def post_all(self, calls: list[tuple[str, dict[str, Any]]]) -> list[int]:
        """Send all of them in one write.  Returns their msgids."""
        first = self._msgid + 1
        self._msgid += len(calls)
        self.send(b"".join(request(first + at, *call) for at, call in enumerate(calls)))
        return list(range(first, self._msgid + 1))

    def answer(self, msgid: int) -> dict[str, Any]:
        while msgid not in self._kept:
            message = self.receive()
            if message is None:
                raise HungUp
            assert message[0] == 1 and len(message) == 4, message
            self._kept[message[1]] = message
            self.order.append(message[1])
            if message[1] == 0 and msgid != 0:  # an error about the connection as a whole
                raise RpcError(message[2])
        _, _, error, result = self._kept.pop(msgid)
        if error is not None:
            raise RpcError(error)
        assert isinstance(result, dict), result
        return result

    def answers(self, msgids: list[int]) -> list[dict[str, Any]]:
        return [self.answer(msgid) for msgid in msgids]

    def unanswered(self, msgid: int, seconds: float) -> bool:
        """Does no answer to `msgid` come within `seconds`?  (The request was sent before: this waits for nothing to happen.)"""
        before = self.socket.gettimeout()
        self.socket.settimeout(seconds)
        try:
            self._kept[msgid] = self._expect(msgid)
        except TimeoutError:
            return True
        finally:
            self.socket.settimeout(before)
        return False

    def _expect(self, msgid: int) -> list[Any]:
        while msgid not in self._kept:
            message = self.receive()
            if message is None:
                raise HungUp
            self._kept[message[1]] = message
            self.order.append(message[1])
        return self._kept[msgid]

    # ---- bytes

    def send(self, octets: bytes) -> None:
        self.socket.sendall(octets)

    def half_close(self) -> None:
        """What `nc -N` does at the end of its input."""
        self.socket.shutdown(socket.SHUT_WR)

    def receive(self) -> Any:
        """The next message, or None where the daemon has hung up.  Raises TimeoutError."""
        while True:
            for message in self._unpacker:
                return message
            try:
                chunk = self.socket.recv(1 << 16)
            except ConnectionResetError:  # it closed with bytes of ours unread: all it said has been read before this
                return None
            if not chunk:
                return None
            self._unpacker.feed(chunk)

    def rest(self) -> list[Any]:
        """Every message up to the end of the connection.  Raises TimeoutError where it does not end."""
        return list(iter(self.receive, None))


class Daemon:
    """One installation: its directories, and the process that serves it now, if any.

    `config` is the TOML of its configuration file.  `beside` makes a second one of the same directories.
    """

    def __init__(
        self,
        home: Path,
        config: str = "",
        *,
        state_dir: Path | None = None,
        runtime_dir: Path | None = None,
        socket_path: Path | None = None,
    ) -> None:
        self.home = home
        self.place = throw_away_directory()
        self.state_dir = state_dir or home / "state"
        self.runtime_dir = runtime_dir or self.place / "volatile"
        self.socket = socket_path or self.place / "socket"
        self.log_path = home / "daemon.log"
        self.config_path = home / "leased.toml"
        home.mkdir(parents=True, exist_ok=True)
        self.config_path.write_text(config)
        self.umask = -1
        self._process: subprocess.Popen[bytes] | None = None

    # ---- the process

    def command(self, verb: str = "serve") -> list[str]:
        directories = ["--config", self.config_path, "--state-dir", self.state_dir, "--runtime-dir", self.runtime_dir]
        listening = ["--socket", self.socket] if verb == "serve" else []
        return [sys.executable, "-m", "leased", verb, *map(str, [*directories, *listening])]

    def spawn(self) -> Self:
        """Start the process and do not wait for it."""
        assert self._process is None or self._process.returncode is not None, "it runs already"
        with self.log_path.open("ab") as log:
            self._process = subprocess.Popen(
                self.command(), env=environment(), cwd="/", stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
                umask=self.umask,
            )  # fmt: skip
        return self

    def start(self) -> Self:
        self.spawn()
        self.wait_ready()
        return self

    def wait_ready(self, seconds: float = READY_SECONDS) -> dict[str, Any]:
        """Until it answers `info` and its start is written; `recovering` counts as ready.  Returns that `info`."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            if self.process.poll() is not None:
                raise AssertionError(f"the daemon ended with {self.process.returncode}:\n{self.logs()}")
            try:
                with Rpc(self.socket, timeout=max(0.1, until - time.monotonic())) as rpc:
                    told = rpc.call("info")
                    if told["store"]["state"] in {"ok", "recovering"}:
                        return told
            except (OSError, HungUp):
                pass
            time.sleep(POLL_SECONDS)
        raise AssertionError(f"the daemon is not ready after {seconds} s:\n{self.logs()}")

    @property
    def process(self) -> subprocess.Popen[bytes]:
        assert self._process is not None, "it was never started"
        return self._process

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def wait(self, seconds: float = READY_SECONDS) -> int:
        """Until the process ends by itself.  Returns its exit code; raises AssertionError where it does not end."""
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"the daemon still runs after {seconds} s:\n{self.logs()}") from None

    def kill(self) -> None:
        """kill -9, and gone when this returns."""
        self.signal(signal.SIGKILL)
        self.process.wait()

    def terminate(self) -> int:
        """A clean stop.  Returns the exit code."""
        self.signal(signal.SIGTERM)
        return self.wait()

    def restart(self) -> Self:
        self.terminate()
        return self.start()

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    @contextlib.contextmanager
    def stopped(self) -> Iterator[None]:
        """SIGSTOP, and SIGCONT at the end."""
        self.signal(signal.SIGSTOP)
        try:
            until = time.monotonic() + ANSWER_SECONDS
            while self.status("State")[0] not in "Tt":
                assert time.monotonic() < until, "SIGSTOP does not stop it"
                time.sleep(0.001)
            yield
        finally:
            self.signal(signal.SIGCONT)

    # ---- what can be seen of it

    def logs(self) -> str:
        return self.log_path.read_text(errors="replace") if self.log_path.exists() else ""

    def events(self, name: str) -> list[dict[str, Any]]:
        """The lines logged under this event name, of all its processes so far."""
        lines = [json.loads(line) for line in self.logs().splitlines() if line.startswith("{")]
        return [line for line in lines if line["event"] == name]

    def status(self, field: str) -> str:
        """A field of /proc/PID/status."""
        for line in Path(f"/proc/{self.pid}/status").read_text().splitlines():
            if line.startswith(f"{field}:"):
                return line.partition(":")[2].strip()
        raise KeyError(field)

    def memory_bytes(self, field: str = "VmRSS") -> int:
        """VmRSS, or VmHWM for the most it ever was."""
        return int(self.status(field).split()[0]) * 1024

    def descriptors(self) -> int:
        return len(list(Path(f"/proc/{self.pid}/fd").iterdir()))

    # ---- clients, neighbours and the end

    def rpc(self, *, timeout: float = ANSWER_SECONDS) -> Rpc:
        return Rpc(self.socket, timeout=timeout)

    def beside(self, home: Path, config: str = "", **paths: Path) -> Daemon:
        """Another daemon that is given the same directories and socket, but for what `paths` names."""
        return Daemon(
            home,
            config,
            **{"state_dir": self.state_dir, "runtime_dir": self.runtime_dir, "socket_path": self.socket, **paths},
        )

    def close(self) -> None:
        """End the process at once and remove the throw-away directory."""
        if self._process is not None and self._process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        shutil.rmtree(self.place, ignore_errors=True)


MakeDaemon = Callable[..., Daemon]
"""The fixtures `make_daemon` and `make_shared_daemon`: (config, like=another Daemon, state_dir=, runtime_dir=, socket_path=)."""


def run_leased(*arguments: str | Path, seconds: float = READY_SECONDS, **variables: str) -> subprocess.CompletedProcess[str]:
    """`leased ARGUMENTS`, to its end."""
    return subprocess.run(
        [sys.executable, "-m", "leased", *map(str, arguments)],
        env=environment() | variables, cwd="/", stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=seconds, check=False,
    )  # fmt: skip


def environment() -> dict[str, str]:
    """Ours, with the package found where these tests lie and nothing that would tell the daemon of other directories."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("LEASE", "XDG_", "STATE_DIR", "RUNTIME_DIR"))}
    return kept | {"PYTHONPATH": str(ROOT), "XDG_RUNTIME_DIR": tempfile.gettempdir()}  # a login has one; cron and CI may not


def throw_away_directory() -> Path:
    """A new directory with a short name, on /dev/shm where that is a tmpfs.  Others may enter it, so that modes of what is in it count."""
    parent = "/dev/shm" if _is_tmpfs("/dev/shm") else None
    place = Path(tempfile.mkdtemp(prefix="leased-test-", dir=parent))
    place.chmod(0o755)
    return place


def _is_tmpfs(path: str) -> bool:
    for line in Path("/proc/self/mounts").read_text().splitlines():
        _, where, kind, *_ = line.split()
        if where == path:
            return kind == "tmpfs" and os.access(path, os.W_OK)
    return False


@contextlib.contextmanager
def effective_user(uid: int, gid: int, groups: tuple[int, ...] = ()) -> Iterator[None]:
    """This process under another effective user for a moment.  Needs root.  What it connects meanwhile shows these credentials for ever:
    SO_PEERCRED and SO_PEERGROUPS are fixed at connect."""
    before = os.getgroups()
    os.setgroups(groups)
    try:
        os.setegid(gid)
        os.seteuid(uid)
        yield
    finally:
        os.seteuid(0)
        os.setegid(0)
        os.setgroups(before)
