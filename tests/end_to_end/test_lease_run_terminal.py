"""`lease run` at a terminal: a job of an interactive shell, as people use it, on a pseudo-terminal."""

from __future__ import annotations

import os
import pty
import re
import select
import signal
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from daemons import Daemon, MakeDaemon, environment
from lease_runs import PATIENCE_SECONDS, tree, until

LEASE = f"{sys.executable} -m leased.client.command"
RESUMES = """\
import signal
signal.signal(signal.SIGCONT, lambda *_: print("resumed", flush=True))
print("begun", flush=True)
while True:
    signal.pause()
"""
"""No shell: dash stopped between its vfork and the exec of its child stays unstopped itself, whoever runs it."""


class Shell:
    """An interactive bash that leads a session with a terminal of its own."""

    def __init__(self, daemon: Daemon, tmp_path: Path) -> None:
        (tmp_path / "rc").write_text("PS1='prompt> '; bind 'set enable-bracketed-paste off'; unset HISTFILE\nstty cols 500\n")
        self.pid, self._file = pty.fork()
        if self.pid == 0:
            own = {"LEASED_SOCKET": str(daemon.socket), "TERM": "dumb", "HOME": str(tmp_path)}
            os.execvpe("bash", ["bash", "--noprofile", "--rcfile", str(tmp_path / "rc"), "-i"], environment() | own)
        self._seen = ""
        self.expect("prompt> ")

    def say(self, text: str) -> None:
        os.write(self._file, text.encode())

    def expect(self, pattern: str) -> str:
        """Reads until it has been printed; what it matched.  What came before is dropped."""
        limit = time.monotonic() + PATIENCE_SECONDS
        while (found := re.search(pattern, self._seen)) is None:
            left = limit - time.monotonic()
            assert left > 0 and select.select([self._file], [], [], left)[0], f"no {pattern!r} in {self._seen!r}"
            self._seen += os.read(self._file, 65536).decode()
        self._seen = self._seen[found.end() :]
        return found[0]

    def close(self) -> None:
        for pid in [*tree(self.pid), self.pid]:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        os.close(self._file)
        os.waitpid(self.pid, 0)


@pytest.fixture(scope="module")
def daemon(make_shared_daemon: MakeDaemon) -> Daemon:
    return make_shared_daemon().start()


@pytest.fixture
def shell(daemon: Daemon, tmp_path: Path) -> Iterator[Shell]:
    shell = Shell(daemon, tmp_path)
    yield shell
    shell.close()


@pytest.fixture
def key() -> str:
    return f"key-{uuid.uuid4()}"


def held(daemon: Daemon, key: str) -> bool:
    with daemon.rpc() as rpc:
        return bool(rpc.call("check", key=key)["held"])


def test_a_command_that_reads_the_terminal_gets_it_and_gives_it_back(shell: Shell, daemon: Daemon, key: str) -> None:
    shell.say(f"{LEASE} run {key} -- sh -c 'read line; echo \"<$line>\"'; echo code $?\n")
    shell.expect("code \\$")  # the echo of what was typed
    until(lambda: held(daemon, key))
    shell.say("typed\n")
    shell.expect("<typed>")
    shell.expect("code 0")
    shell.expect("prompt> ")
    shell.say("echo still $((1 + 1))\n")
    shell.expect("still 2")
    assert not held(daemon, key)


def test_ctrl_c_ends_command_and_script(shell: Shell, daemon: Daemon, key: str) -> None:
    """The whole job hears it, so that a script does not go on with its next line."""
    shell.say(f"bash -c '{LEASE} run {key} -- sh -c \"echo begun; exec sleep 300\"; echo went on; :'\n")
    shell.expect("\nbegun")
    shell.say("\x03")
    assert "\nwent on" not in shell.expect("(?s).*prompt> ")
    shell.say("echo code $?\n")
    shell.expect("code 130")
    assert not held(daemon, key)


def test_ctrl_c_while_waiting_ends_the_script_too(shell: Shell, daemon: Daemon, key: str) -> None:
    with daemon.rpc() as rpc:
        rpc.call("lease", key=key, holder="other")
        shell.say(f"bash -c '{LEASE} run {key} -- echo ran; echo went on; :'\n")
        until(lambda: rpc.call("check", key=key)["waiting"])
    shell.say("\x03")
    assert "\nwent on" not in shell.expect("(?s).*prompt> ")
    shell.say("echo code $?\n")
    shell.expect("code 130")


def test_ctrl_c_reaches_a_command_that_has_the_terminal(shell: Shell, daemon: Daemon, key: str) -> None:
    shell.say(f"{LEASE} run {key} -- sh -c 'read line; echo \"<$line>\"; exec cat'; echo code $?\n")
    shell.expect("code \\$")
    until(lambda: held(daemon, key))
    shell.say("typed\n")
    shell.expect("<typed>")
    shell.say("\x03")
    shell.expect("code 130")
    assert not held(daemon, key)


@pytest.mark.parametrize("command", ["cat", "resumes"])
def test_ctrl_z_stops_the_job_and_fg_resumes_it(shell: Shell, daemon: Daemon, key: str, command: str, tmp_path: Path) -> None:
    """Whether the command has the terminal (cat reads it) or the job still has."""
    (tmp_path / "resumes").write_text(RESUMES)
    shell.say(f"{LEASE} run {key} -- {'cat' if command == 'cat' else f'{sys.executable} {tmp_path}/resumes'}\n")
    if command == "cat":
        until(lambda: held(daemon, key))
        shell.say("typed\n")
        shell.expect("typed\r\ntyped")
    else:
        shell.expect("\nbegun")
    shell.say("\x1a")
    shell.expect("Stopped")
    shell.expect("prompt> ")
    assert held(daemon, key)
    shell.say("fg\n")
    shell.expect("fg\r\n.*run.*\n")
    if command == "cat":
        shell.say("again\n")
        shell.expect("again\r\nagain")
        shell.say("\x04")
    else:
        shell.expect("resumed\r\n")
        shell.say("\x03")
    shell.expect("prompt> ")
    shell.say("echo code $?\n")
    shell.expect("code 0" if command == "cat" else "code 130")
    assert not held(daemon, key)


def test_a_job_stopped_past_its_ttl_has_lost_its_lease_and_its_command(
    shell: Shell, daemon: Daemon, key: str, tmp_path: Path
) -> None:
    shell.say(f"{LEASE} run --ttl 1 {key} -- sh -c 'echo begun; exec sleep 301'\n")
    shell.expect("\nbegun")
    shell.say("\x1a")
    shell.expect("Stopped")
    until(lambda: not held(daemon, key))
    assert not [pid for pid in tree(shell.pid) if b"sleep\x00301" in Path(f"/proc/{pid}/cmdline").read_bytes()[:9]]
    shell.say("fg; echo code $?\n")
    shell.expect("is lost")
    shell.expect("code 79")


def test_a_job_in_the_background_waits_for_the_terminal(shell: Shell, daemon: Daemon, key: str) -> None:
    shell.say(f"{LEASE} run {key} -- cat &\n")
    shell.expect("prompt> ")
    until(lambda: held(daemon, key))
    shell.say("sleep 0.3; jobs\n")
    shell.expect("Stopped")
    shell.expect("prompt> ")
    shell.say("fg\n")
    shell.expect("fg\r\n.*cat\r\n")
    shell.say("typed\n")
    shell.expect("typed\r\ntyped")
    shell.say("\x04")
    shell.expect("prompt> ")
    assert not held(daemon, key)
