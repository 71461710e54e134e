"""`leased install-units` on a host without a package: in force, and gone again without a trace."""

from __future__ import annotations

import pytest
from lab import Lab

pytestmark = [pytest.mark.root, pytest.mark.packages, pytest.mark.slow]
LEASED = "/opt/leased/bin/leased"
UNITS = "/usr/local/lib/systemd/system"


def test_an_installation_by_pip_gets_its_units(bare: Lab) -> None:
    assert bare.run("systemctl", "cat", "leased.socket", check=False).returncode != 0
    told = bare.run(LEASED, "install-units", "--enable").stdout
    assert f"wrote {UNITS}/leased.service\n" in told and "running systemctl enable --now leased.socket\n" in told
    verified = bare.run(
        "systemd-analyze",
        "verify",
        "--man=no",
        "--recursive-errors=no",
        *(f"{UNITS}/leased.{kind}" for kind in ("service", "socket")),
    )
    assert (verified.stdout, verified.stderr) == ("", "")
    assert bare.run("id", "-u", "leased").stdout.strip().isdigit()
    assert bare.show("leased.socket", "ActiveState", "UnitFileState") == {"ActiveState": "active", "UnitFileState": "enabled"}
    with bare.rpc() as rpc:
        assert rpc.call("lease", key="k", holder="a")["acquired"] is True
    command = bare.path(f"/proc/{bare.main_pid('leased.service')}/cmdline").read_text().split("\0")
    assert command[:4] == ["/opt/leased/bin/python3", "-IS", LEASED, "serve"]
    again = bare.run(LEASED, "install-units", "--enable").stdout
    assert again.count("unchanged: ") == 4 and "running systemctl try-restart leased.service" in again
    with bare.rpc() as rpc:
        assert rpc.call("lease", key="k", holder="b")["acquired"] is False, "the lease was kept over it"


def test_the_units_of_a_user_hold_what_systemd_asks_of_them(bare: Lab) -> None:
    home = {"HOME": "/tmp/worker", "XDG_RUNTIME_DIR": "/run"}
    told = bare.run(LEASED, "install-units", "--user", env=home).stdout
    assert "wrote /tmp/worker/.config/systemd/user/leased.socket" in told and "systemctl --user enable --now leased.socket" in told
    files = [f"/tmp/worker/.config/systemd/user/leased.{kind}" for kind in ("service", "socket")]
    verified = bare.run("systemd-analyze", "--user", "verify", "--man=no", "--recursive-errors=no", *files, env=home)
    assert (verified.stdout, verified.stderr) == ("", "")
    assert bare.run(LEASED, "install-units", "--user", "--remove", env=home).stdout.count("removed ") == 2


def test_the_units_go_and_the_state_stays(bare: Lab) -> None:
    told = bare.run(LEASED, "install-units", "--remove").stdout
    assert told.count("removed ") == 4 and "kept: /var/lib/leased" in told
    assert bare.main_pid("leased.service") == 0 and not bare.path("/run/leased/leased.sock").exists()
    assert bare.run("systemctl", "cat", "leased.socket", check=False).returncode != 0
    assert not bare.path("/etc/systemd/system/sockets.target.wants/leased.socket").is_symlink()
    assert bare.path("/var/lib/leased/data.mdb").exists()
    bare.run("rm", "-r", "/var/lib/leased", "/opt/leased")
