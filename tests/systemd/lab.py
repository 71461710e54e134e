"""A host of one's own: a private systemd as PID 1, booted in about a second on a throw-away overlay of this machine's root.

    lab.boot()                               # start it; raises AssertionError with its console where it does not come up
    lab.run("systemctl", "start", "x")       # a command in it, as root; `user=`, `stdin=`, `check=False`, `seconds=`, `env=`
    lab.spawn("sleep", "9", user="worker")   # the same, not waited for: a Popen
    lab.systemctl("stop", "x")               # lab.show("x", "MainPID") -> {"MainPID": "…"};  lab.main_pid("x"): as seen in there
    lab.path("/run/x")                       # a path in there, for this process to read, write or connect to
    lab.journal("x")                         # messages of a unit's lines, of this boot; lab.journal_entries for all fields
    lab.reboot()                             # an orderly shutdown and a new boot, with another boot id
    lab.kill(); lab.boot()                   # a power cut, and the next boot
    lab.close()                              # gone, whatever state it is in

Before `boot`: `lab.files` is a tree laid over the root at each boot (`lab.put("/etc/x", text)` writes into it and, when it is up, into the
running host too); `lab.keep("/var/lib/x")` makes a directory outlive a boot; `lab.prepare` is bash that is run before PID 1, `$1` its root.
Everything else that is written in there is gone with the boot.  The network is this machine's.  Needs root.

The fixture `lab` (one boot for all tests of this folder) has the product in it: see product.py.  `make_lab()` makes another host, by
default without the product: for packages.  Not to be had in there: memory, task and CPU limits, and whatever changes the kernel.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any, Self

from daemons import Rpc

HERE = Path(__file__).resolve().parent
BOOT_SECONDS = 60.0
RUN_SECONDS = 60.0
POLL_SECONDS = 0.02


class Lab:
    def __init__(self, home: Path) -> None:
        home.mkdir(parents=True, exist_ok=True)
        self.home = home
        self.files = home / "files"
        self.files.mkdir(exist_ok=True)
        self.prepare = ""
        self._kept: dict[str, Path] = {}
        self._cgroup = _unified() / f"leased-lab-{os.getpid()}-{home.name}"
        self._outer: subprocess.Popen[bytes] | None = None
        self._init = 0

    # ---- what it is made of

    def put(self, path: str, text: str, mode: int = 0o644) -> None:
        """A file at the next boot, and at once if it is up."""
        for target in [self.files / path.lstrip("/"), *([self.path(path)] if self.up else [])]:
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(text)
            target.chmod(mode)

    def keep(self, path: str) -> Path:
        """The directory `path` outlives a boot from now on.  Returns where it lies outside."""
        source = self.home / "kept" / path.strip("/").replace("/", "-")
        source.mkdir(parents=True, exist_ok=True)
        self._kept[path] = source
        return source

    # ---- its life

    @property
    def up(self) -> bool:
        return self._init > 0

    def boot(self) -> Self:
        assert not self.up, "it is up already"
        (self.home / "keep").write_text("".join(f"{source} {target}\n" for target, source in self._kept.items()))
        (self.home / "prepare").write_text(self.prepare)
        self._cgroup.mkdir(exist_ok=True)
        with (self.home / "console").open("wb") as console:
            self._outer = subprocess.Popen(
                [
                    *("bash", "-c", 'echo $$ >"$1"/cgroup.procs; shift; exec "$@"', "lab", str(self._cgroup)),
                    *("unshare", "--cgroup", "--pid", "--mount", "--uts", "--ipc", "--fork", "--kill-child=SIGKILL"),
                    *("--propagation", "private", "bash", str(HERE / "lab_init.sh"), str(self.home)),
                ],
                stdin=subprocess.DEVNULL,
                stdout=console,
                stderr=console,
                start_new_session=True,
            )
        until = time.monotonic() + BOOT_SECONDS
        while not self._come_up():
            if self._outer.poll() is not None or time.monotonic() > until:
                console_text = (self.home / "console").read_text(errors="replace")
                self.kill()
                raise AssertionError(f"the lab did not come up:\n{console_text}")
            time.sleep(POLL_SECONDS)
        return self

    def _come_up(self) -> bool:
        assert self._outer is not None
        if not self.up:
            try:
                children = Path(f"/proc/{self._outer.pid}/task/{self._outer.pid}/children").read_text().split()
                if not children or Path(f"/proc/{children[0]}/comm").read_text() != "systemd\n":
                    return False
            except FileNotFoundError:
                return False
            self._init = int(children[0])
        state = self.run("systemctl", "is-system-running", check=False).stdout.strip()
        return state in {"running", "degraded"}

    def shut_down(self, seconds: float = 30.0) -> None:
        """In order, as `systemctl halt` would."""
        assert self._outer is not None
        os.kill(self._init, signal.SIGRTMIN + 3)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._outer.wait(seconds)
        ended = self._outer.poll() is not None
        self.kill()
        assert ended, "it did not shut down:\n" + (self.home / "console").read_text(errors="replace")

    def kill(self) -> None:
        """The power is cut.  Returns when nothing of it runs any more."""
        self._init = 0
        if self._outer is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._outer.pid, signal.SIGKILL)  # unshare, which takes PID 1 along, which takes all others
            self._outer.wait()
            self._outer = None
        until = time.monotonic() + 10.0
        while self._cgroup.exists() and time.monotonic() < until:
            for folder, _, _ in os.walk(self._cgroup, topdown=False):
                with contextlib.suppress(OSError):  # the kernel empties them a moment later
                    Path(folder).rmdir()
            time.sleep(POLL_SECONDS)

    def reboot(self) -> Self:
        self.shut_down()
        return self.boot()

    close = kill

    # ---- in there

    def path(self, inside: str) -> Path:
        """Where this process finds `inside`, symbolic links not followed."""
        assert self.up, "it is not up"
        return Path(f"/proc/{self._init}/root{inside}")

    def _command(self, command: tuple[str, ...], user: str | None) -> list[str]:
        assert self.up, "it is not up"
        as_user = []
        if user is not None:
            group = self.run("id", "-g", user).stdout.strip()
            as_user = ["setpriv", f"--reuid={user}", f"--regid={group}", "--init-groups", "--"]
        return ["nsenter", "-t", str(self._init), "-a", "--wdns=/", "--", *as_user, *command]

    def run(
        self,
        *command: str,
        user: str | None = None,
        stdin: str | None = None,
        check: bool = True,
        seconds: float = RUN_SECONDS,
        env: dict[str, str] | None = None,
    ) -> subprocess.CompletedProcess[str]:
        """To its end.  Raises AssertionError for another exit status than 0 unless told not to `check`."""
        done = subprocess.run(
            self._command(command, user), input=stdin or "", capture_output=True, text=True, timeout=seconds, check=False,
            env=_environment(env),
        )  # fmt: skip
        if check and done.returncode != 0:
            raise AssertionError(f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
        return done

    def spawn(self, *command: str, user: str | None = None, env: dict[str, str] | None = None) -> subprocess.Popen[str]:
        """With pipes for all three streams.  It ends with the host, if not before."""
        return subprocess.Popen(
            self._command(command, user), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            env=_environment(env),
        )  # fmt: skip

    def systemctl(self, *arguments: str, check: bool = True, seconds: float = RUN_SECONDS) -> str:
        return self.run("systemctl", *arguments, check=check, seconds=seconds).stdout.strip()

    def show(self, unit: str, *properties: str) -> dict[str, str]:
        lines = self.systemctl("show", unit, f"--property={','.join(properties)}").splitlines()
        return dict(line.partition("=")[::2] for line in lines)

    def main_pid(self, unit: str) -> int:
        """0: it does not run."""
        return int(self.show(unit, "MainPID")["MainPID"])

    def journal_entries(self, unit: str = "", *more: str) -> list[dict[str, Any]]:
        """Lines as the journal has them, of a unit or of all; `more` as for journalctl."""
        self.run("journalctl", "--sync", "--quiet")
        which = [f"--unit={unit}"] if unit else []
        told = self.run("journalctl", "--quiet", "--no-pager", "--output=json", "--all", *which, *more).stdout
        return [json.loads(line) for line in told.splitlines()]

    def journal(self, unit: str, *more: str) -> str:
        return "\n".join(str(entry["MESSAGE"]) for entry in self.journal_entries(unit, *more))

    def rpc(self, socket: str = "/run/leased/leased.sock", *, timeout: float = 20.0) -> Rpc:
        """A connection of this very process, which the daemon sees as root's."""
        return Rpc(self.path(socket), timeout=timeout)


def _environment(more: dict[str, str] | None) -> dict[str, str]:
    """Nothing of whoever runs the tests."""
    return {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "LANG": "C.UTF-8", **(more or {})}


def _unified() -> Path:
    """Where cgroup v2 is mounted, beside version 1 or alone."""
    beside = Path("/sys/fs/cgroup/unified")
    return beside if beside.is_dir() else Path("/sys/fs/cgroup")
