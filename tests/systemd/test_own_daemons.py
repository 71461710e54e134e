"""A daemon of one's own under `systemctl --user`: activated by the first call, kept by kill -9, and nobody else's."""

from __future__ import annotations

import pytest
from inhabitants import eventually
from lab import Lab

pytestmark = [pytest.mark.root, pytest.mark.slow]


class User:
    """Somebody whose service manager runs, logged in or not."""

    def __init__(self, lab: Lab, name: str) -> None:
        self._lab, self.name = lab, name
        self.uid = lab.run("id", "-u", name).stdout.strip()
        self.runtime = f"/run/user/{self.uid}"

    def run(self, *command: str, check: bool = True) -> tuple[int, str]:
        env = {"XDG_RUNTIME_DIR": self.runtime, "HOME": f"/home/{self.name}", "USER": self.name}
        done = self._lab.run(*command, user=self.name, env=env, check=check)
        return done.returncode, (done.stdout + done.stderr).strip()

    def main_pid(self) -> int:
        return int(self.run("systemctl", "--user", "show", "leased.service", "--property=MainPID", "--value")[1])


def test_a_daemon_of_ones_own(lab: Lab) -> None:
    mate = User(lab, "mate")
    lab.run("loginctl", "enable-linger", mate.name)
    eventually(lambda: lab.systemctl("is-active", f"user@{mate.uid}.service", check=False) == "active")
    try:
        mate.run("systemctl", "--user", "start", "leased.socket")
        assert mate.main_pid() == 0
        assert mate.run("lease", "check", "own", check=False) == (1, "own is free.")
        first = mate.main_pid()
        assert first > 0
        code, told = mate.run("lease", "acquire", "own", "--ttl", "10m", "--fence-out", "/home/mate/fence")
        assert code == 0, told
        private = [f"{mate.runtime}/leased", f"{mate.runtime}/leased-state", "/home/mate/.local/state/leased"]
        assert lab.run("stat", "-c", "%U %a", *private).stdout.split() == ["mate", "700"] * 3
        lab.run("kill", "-9", str(first))
        eventually(lambda: mate.main_pid() not in {0, first})
        assert mate.run("lease", "release", "own", "--fence-file", "/home/mate/fence")[0] == 0
        with lab.rpc() as rpc:
            assert rpc.call("check", key="own")["held"] is False, "the system's daemon is another"
        stranger = lab.run("lease", "check", "own", "--socket", f"{mate.runtime}/leased/leased.sock", user="worker", check=False)
        assert stranger.returncode == 77 and "may not connect" in stranger.stderr
        status = mate.run("systemctl", "--user", "show", "leased.service", "--property=StatusText", "--value")[1]
        assert status.startswith(("serving; ", "starting: "))
        mate.run("systemctl", "--user", "stop", "leased.service", "leased.socket")
        assert not lab.path(f"{mate.runtime}/leased/leased.sock").exists()
    finally:
        lab.run("loginctl", "disable-linger", mate.name)
        lab.systemctl("stop", f"user@{mate.uid}.service")
