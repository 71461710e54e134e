"""What the fault tests are made of: a real daemon, a bare client, disks that fail on purpose, and a judge of what was promised.

Everything that is mounted, started or made outside pytest's own directory belongs to an object with `close`, and every `close` may be
called twice.  A frozen disk is thawed before anybody is killed: what hangs in it cannot die.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import itertools
import os
import shutil
import signal
import socket
import struct
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgpack
from daemons import environment

READY_SECONDS = 15.0
FS_IOC_SHUTDOWN = 0x8004587D
NOLOGFLUSH = struct.pack("I", 2)
PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None, use_errno=True)


def boottime() -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def eventually(question: Callable[[], Any], seconds: float = 10.0, *, every: float = 0.02) -> Any:
    """The first true answer; fails the test when none came in time."""
    until = boottime() + seconds
    while not (answer := question()):
        if boottime() > until:
            raise AssertionError(f"not within {seconds} s: {question!r}, last answer {answer!r}")
        time.sleep(every)
    return answer


class Gone(Exception):
    """The connection ended, or never began."""


class Rpc:
    """One connection.  `call` for one answer; `send` and `receive` for many under way."""

    def __init__(self, path: Path, seconds: float = 20.0) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.settimeout(seconds)
        try:
            self._socket.connect(str(path))
        except OSError as error:
            self._socket.close()
            raise Gone(str(error)) from error
        self._unpacker = msgpack.Unpacker(max_buffer_size=64 << 20)
        self._number = 0
        self._early: dict[int, Any] = {}

    def send(self, method: str, **fields: Any) -> int:
        self._number += 1
        try:
            self._socket.sendall(msgpack.packb([0, self._number, method, [fields]]))
        except OSError as error:
            raise Gone(str(error)) from error
        return self._number

    def receive(self, number: int) -> Any:
        """The result of request `number`.  Raises Gone, or AssertionError for an error reply."""
        while number not in self._early:
            try:
                octets = self._socket.recv(1 << 16)
            except OSError as error:
                raise Gone(str(error)) from error
            if not octets:
                raise Gone("closed by the daemon")
            self._unpacker.feed(octets)
            for _, msgid, error, result in self._unpacker:
                assert error is None, error
                self._early[msgid] = result
        return self._early.pop(number)

    def call(self, method: str, **fields: Any) -> Any:
        return self.receive(self.send(method, **fields))

    def lease(self, key: str, ttl: float, holder: str = "A", **fields: Any) -> Any:
        return self.call("lease", key=key, holder=holder, ttl_seconds=ttl, **fields)

    def grant(self, key: str, ttl: float, holder: str = "A", **fields: Any) -> Any:
        """A fresh grant, or the test fails."""
        reply = self.lease(key, ttl, holder, **fields)
        assert reply["acquired"] is True and reply["renewed"] is False, reply
        return reply

    def renew(self, grant: Any, **fields: Any) -> Any:
        return self.call("renew", key=grant["key"], holder=grant["holder"], fence=grant["fence"], **fields)

    def release(self, grant: Any) -> Any:
        return self.call("release", key=grant["key"], fence=grant["fence"])

    def check(self, key: str, **fields: Any) -> Any:
        return self.call("check", key=key, **fields)

    def store(self) -> Any:
        return self.call("info")["store"]

    def close(self) -> None:
        self._socket.close()

    def __enter__(self) -> Rpc:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Served:
    """One `leased serve` after another on the same two directories.

    `prefix` is put before the command (unshare …), `environment` is added to it; both count from the next `start`.
    """

    def __init__(self, state_dir: Path, runtime_dir: Path, home: Path, **settings: float) -> None:
        self.state_dir = state_dir
        self.runtime_dir = runtime_dir
        self.home = home
        self.socket = home / "s"
        self.settings: dict[str, float] = {"wait_out_seconds": 2, "max_leases": 2000} | settings
        self.prefix: list[str] = []
        self.environment: dict[str, str] = {}
        self.log = home / "log"
        self._process: subprocess.Popen[bytes] | None = None
        self._clients: list[Rpc] = []

    # ---- life

    def spawn(self) -> subprocess.Popen[bytes]:
        """Start, and wait for nothing."""
        assert not self.running, "kill or stop the one before"
        config = self.home / "leased.toml"
        config.write_text("".join(f"{key} = {value}\n" for key, value in self.settings.items()))
        command = [*self.prefix, sys.executable, "-m", "leased", "serve", "--config", str(config), "--socket", str(self.socket)]
        command += ["--state-dir", str(self.state_dir), "--runtime-dir", str(self.runtime_dir)]
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment() | self.environment, cwd="/",
                start_new_session=True, preexec_fn=_die_with_parent,
            )  # fmt: skip
        return self._process

    def start(self, *, opened: bool = True) -> Rpc:
        """Start, and wait until it listens (and, when `opened`, until its start has been written)."""
        process = self.spawn()
        began = boottime()
        while True:
            try:
                rpc = self.connect()
            except Gone:
                assert process.poll() is None, f"exit code {process.returncode}:\n{self.said()}"
                assert boottime() < began + READY_SECONDS, f"does not listen:\n{self.said()}"
                time.sleep(0.01)
            else:
                break
        if opened:
            eventually(lambda: rpc.store()["state"] in {"ok", "recovering"}, READY_SECONDS)
        return rpc

    def refused(self, seconds: float = READY_SECONDS) -> int:
        """Start, and expect it to give up by itself.  Returns the exit code."""
        try:
            return self.spawn().wait(seconds)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"it runs, and should not:\n{self.said()}") from None

    def connect(self) -> Rpc:
        rpc = Rpc(self.socket)
        self._clients.append(rpc)
        return rpc

    def kill(self) -> None:
        """kill -9, to the whole session: under `unshare --fork` the daemon is a grandchild."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._process = None

    def stop(self) -> int:
        """SIGTERM, in order.  Returns the exit code."""
        assert self._process is not None
        self._process.terminate()
        return self.exit_code()

    def exit_code(self, seconds: float = 15.0) -> int:
        """Wait for it to exit by itself."""
        assert self._process is not None
        try:
            code = self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"it still runs after {seconds} s:\n{self.said()}") from None
        self._process = None
        return code

    def signal(self, number: int) -> None:
        assert self._process is not None
        self._process.send_signal(number)

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def said(self) -> str:
        """What the process now running (or the last one) and those before it wrote."""
        return self.log.read_text(errors="replace") if self.log.exists() else ""

    def forget_log(self) -> None:
        self.log.write_bytes(b"")

    def close(self) -> None:
        self.kill()
        for rpc in self._clients:
            rpc.close()

    # ---- what can be taken from it

    def lose_runtime(self) -> None:
        shutil.rmtree(self.runtime_dir, ignore_errors=True)

    def another_boot(self) -> None:
        """From the next start on /proc shows another boot id, in the daemon's own mount namespace."""
        boot = self.home / "boot_id"
        if boot.exists():
            boot.unlink()
        boot.write_text(f"{uuid.uuid4()}\n")
        bind = f'mount --bind {boot} /proc/sys/kernel/random/boot_id && exec "$@"'
        self.prefix = ["unshare", "--mount", "sh", "-c", bind, "sh"]

    def within_time_namespace(self, offset: int) -> None:
        self.prefix = ["unshare", "--time", "--boottime", str(offset), "--fork", "--kill-child"]


def _die_with_parent() -> None:
    _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


class Disk:
    """An ext4 file system in a file, mounted at `mount`."""

    def __init__(self, home: Path, megabytes: int = 64) -> None:
        self.image = home / "disk.img"
        self.mount = home / "disk"
        self.frozen = False
        self.mount.mkdir(parents=True)
        with self.image.open("wb") as image:
            image.truncate(megabytes << 20)
        _run("mkfs.ext4", "-qF", "-m", "0", str(self.image))
        self.attach()

    def attach(self) -> None:
        _run("mount", "-o", "loop", str(self.image), str(self.mount))

    def detach(self) -> None:
        """Returns when the last mount namespace has forgotten it and its loop device is free."""
        eventually(lambda: subprocess.run(["umount", str(self.mount)], capture_output=True).returncode == 0)
        eventually(lambda: not _run("losetup", "-j", str(self.image)))

    def cut(self) -> None:
        """From now on nothing reaches the disk, and nothing that was not flushed ever will: every call answers EIO."""
        descriptor = os.open(self.mount, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.ioctl(descriptor, FS_IOC_SHUTDOWN, NOLOGFLUSH)
        finally:
            os.close(descriptor)

    def freeze(self) -> None:
        _run("fsfreeze", "-f", str(self.mount))
        self.frozen = True

    def thaw(self) -> None:
        if self.frozen:
            _run("fsfreeze", "-u", str(self.mount))
            self.frozen = False

    def close(self) -> None:
        self.thaw()
        while self.mount.is_mount():
            if subprocess.run(["umount", str(self.mount)], capture_output=True).returncode:
                _run("umount", "-l", str(self.mount))
        self.image.unlink(missing_ok=True)


class Tmpfs:
    def __init__(self, mount: Path, size: str) -> None:
        self.mount = mount
        self.mount.mkdir(parents=True)
        _run("mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(mount))

    def resize(self, size: str) -> None:
        _run("mount", "-o", f"remount,size={size}", str(self.mount))

    def close(self) -> None:
        if self.mount.is_mount():
            _run("umount", "-l", str(self.mount))


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, f"{' '.join(command)}: {done.stderr.strip()}"
    return done.stdout


def fill(directory: Path) -> Path:
    """Take all the room there is.  Returns the file to delete to give it back."""
    ballast = directory / "ballast"
    with ballast.open("wb", buffering=0) as file:
        for size in (1 << 20, 1 << 16, 4096, 1):
            try:
                while file.write(b"\0" * size) == size:
                    pass
            except OSError:
                pass
    return ballast


class Promise(NamedTuple):
    """One true reply: the key is this generation's from the reply until `until` (counted from when the request was SENT), unless released
    before.  CLOCK_BOOTTIME."""

    key: str
    holder: str
    generation: int
    fence: str
    ttl: float
    sent: float
    answered: float

    @property
    def until(self) -> float:
        return self.sent + self.ttl


class History:
    """What one test was told, by all its clients, in all lives of the daemon."""

    def __init__(self) -> None:
        self.promises: list[Promise] = []
        self.given_up: dict[int, float] = {}  # generation -> when its release or revocation was SENT

    def ask(self, rpc: Rpc, key: str, ttl: float, holder: str) -> Promise | None:
        sent = boottime()
        reply = rpc.lease(key, ttl, holder)
        return self.note(reply, sent) if reply["acquired"] else None

    def prolong(self, rpc: Rpc, promise: Promise, ttl: float) -> None:
        """A renewal to at least the same ttl: a shorter one would take back what was promised."""
        assert ttl >= promise.ttl
        sent = boottime()
        reply = rpc.call("renew", key=promise.key, holder=promise.holder, fence=promise.fence, ttl_seconds=ttl)
        if reply["acquired"]:
            self.note(reply, sent)

    def note(self, reply: Any, sent: float) -> Promise:
        fields = (reply[name] for name in ("key", "holder", "generation", "fence", "ttl_seconds"))
        promise = Promise(*fields, sent, boottime())
        self.promises.append(promise)
        return promise

    def give_up(self, rpc: Rpc, promise: Promise) -> Any:
        """Once a release is on its way its holder may no longer rely on the lease, whatever the answer."""
        self.given_up.setdefault(promise.generation, boottime())
        return rpc.call("release", key=promise.key, fence=promise.fence)

    def owed(self, promise: Promise) -> float:
        """Until when nobody else may have been told yes."""
        return min(promise.until, self.given_up.get(promise.generation, promise.until))

    def standing(self, at: float, above: float = 0.0) -> list[Promise]:
        """The longest promise of each generation of ttl > `above` that must be live at `at`."""
        best: dict[int, Promise] = {}
        for promise in self.promises:
            if promise.ttl > above and self.owed(promise) > at and promise.generation not in self.given_up:
                known = best.get(promise.generation)
                if known is None or known.until < promise.until:
                    best[promise.generation] = promise
        return list(best.values())

    def judge(self) -> int:
        """Mutual exclusion and order, over everything: of two generations of one key the later was never told yes while the earlier was still
        owed.  Returns how many hand-overs were judged."""
        by_key: dict[str, dict[int, list[Promise]]] = {}
        holders: dict[int, tuple[str, str]] = {}
        for promise in self.promises:
            by_key.setdefault(promise.key, {}).setdefault(promise.generation, []).append(promise)
            assert holders.setdefault(promise.generation, (promise.key, promise.fence)) == (promise.key, promise.fence), (
                f"generation {promise.generation} was given twice"
            )
        judged = 0
        for key, generations in by_key.items():
            ordered = sorted(generations)
            for earlier, later in itertools.pairwise(ordered):
                owed = max(self.owed(promise) for promise in generations[earlier])
                told = min(promise.answered for promise in generations[later])
                assert told >= owed, f"{key}: {later} was granted {owed - told:.3f} s before {earlier} had lapsed"
                judged += 1
        return judged


@contextlib.contextmanager
def room(name: str) -> Iterator[Path]:
    """A directory of one's own on tmpfs, as volatile as a runtime directory should be."""
    path = Path("/dev/shm") / f"leased-fault-{name}-{uuid.uuid4().hex[:12]}"
    path.mkdir(mode=0o700)
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)
