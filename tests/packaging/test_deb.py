"""The Debian package on a host with systemd and without a network, from the first installation to the purge.  In the order of a package's life:
each test begins where the one before it ended."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable

import pytest
from built import DEBIAN_PYTHON, NEXT_PACKAGE, NEXT_PROGRAM, Packages, outcome
from daemons import HungUp
from lab import Lab

pytestmark = [pytest.mark.root, pytest.mark.packages, pytest.mark.slow]
SECONDS = 20.0


def dpkg(lab: Lab, *words: str) -> str:
    """Without a network: a package that wanted one would not get it."""
    done = lab.run(
        "unshare", "--net", "dpkg", *words, env={"DEBIAN_FRONTEND": "noninteractive", "http_proxy": "http://127.0.0.1:9"}
    )
    assert "error" not in done.stderr.lower() and "warning" not in done.stderr.lower(), done.stderr
    return done.stdout


def eventually(holds: Callable[[], object]) -> None:
    until = time.monotonic() + SECONDS
    while not holds():
        assert time.monotonic() < until, "it did not come true"
        time.sleep(0.05)


def version(lab: Lab) -> str:
    with lab.rpc() as rpc:
        return str(rpc.call("info")["version"])


@pytest.fixture(scope="module")
def host(bare: Lab) -> Lab:
    dpkg(bare, "-i", "/root/first.deb")
    bare.run("gpasswd", "-a", "worker", "leased-clients")
    return bare


# ---- the file


def test_the_package_is_for_the_python_that_built_it_and_asks_for_nothing_else(packages: Packages) -> None:
    minor = int(outcome(DEBIAN_PYTHON, "-c", "import sys; print(sys.version_info[1])"))
    fields = outcome("dpkg-deb", "-f", packages.first, "Depends", "Architecture")
    assert f"python3 (>= 3.{minor}~), python3 (<< 3.{minor + 1})" in fields and "pip" not in fields
    names = [line.split()[5] for line in outcome("dpkg-deb", "-c", packages.first).splitlines()]
    assert not [name for name in names if "__pycache__" in name or "/_tests/" in name or name.endswith("direct_url.json")]
    assert not [name for name in names if name.startswith(("./var", "./run", "./usr/local", "./home"))]
    listed = {line.split()[5]: line.split()[:2] for line in outcome("dpkg-deb", "-c", packages.first).splitlines()}
    assert {owner for _, owner in listed.values()} == {"root/root"}
    assert {mode for mode, _ in listed.values()} == {"drwxr-xr-x", "-rw-r--r--", "-rwxr-xr-x"}


# ---- its life


def test_installed_the_door_is_open_and_the_first_call_starts_the_daemon(host: Lab) -> None:
    assert host.show("leased.socket", "ActiveState", "UnitFileState") == {"ActiveState": "active", "UnitFileState": "enabled"}
    assert host.main_pid("leased.service") == 0
    told = host.run("lease", "acquire", "k", "--ttl", "5m", "--json", user="worker")
    assert json.loads(told.stdout)["acquired"] is True
    assert host.main_pid("leased.service") > 0
    assert host.run("stat", "-c", "%U %a", "/var/lib/leased").stdout == "leased 700\n"
    assert host.run("leased", "--version").stdout.strip() == f"leased {version(host)}"
    assert host.run("leasenc", "check", "key=k", user="worker").returncode == 0
    refused = host.run("lease", "check", "k", user="stranger", check=False)
    assert refused.returncode == 77 and refused.stdout == ""


def test_it_keeps_to_itself(host: Lab) -> None:
    """Nothing of what is inside can be imported by others, and nothing of others by it."""
    assert host.run("/usr/bin/python3", "-c", "import leased", check=False).returncode == 1
    host.put("/usr/lib/python3/dist-packages/trio.py", "raise SystemExit('a foreign trio')\n")
    try:
        assert host.run("leased", "check-config", env={"PYTHONPATH": "/usr/lib/python3/dist-packages"}).returncode == 0
        told = host.run(
            "/usr/bin/python3", "-IS", "-c", "import sys; sys.path.insert(0, '/usr/lib/leased'); import trio; print(trio.__file__)"
        )
        assert told.stdout == "/usr/lib/leased/trio/__init__.py\n"
    finally:
        host.run("rm", "/usr/lib/python3/dist-packages/trio.py")


def test_its_files_are_as_dpkg_knows_them(host: Lab) -> None:
    assert host.run("dpkg", "--verify", "leased").stdout == ""
    refused = host.run("leased", "install-units", check=False)
    assert refused.returncode == 64 and "is there already, from a package or by hand" in refused.stderr


def test_a_reload_puts_the_file_in_force_or_says_what_is_wrong(host: Lab) -> None:
    before = host.main_pid("leased.service")
    file = host.path("/etc/leased/leased.toml")
    shipped = file.read_text()
    file.write_text(f"{shipped}\n[limits]\nmax_watchers_per_uid = 5\n")
    host.systemctl("reload", "leased.service")

    def limit() -> int:
        with host.rpc() as rpc:
            return int(rpc.call("info")["limits"]["max_watchers_per_uid"])

    eventually(lambda: limit() == 5)
    file.write_text("[limits]\nmax_watcher = 5\n")
    host.systemctl("reload", "leased.service")
    eventually(lambda: "limits.max_watcher is not a key of the configuration" in host.journal("leased.service"))
    assert (limit(), host.main_pid("leased.service")) == (5, before)
    assert host.show("leased.service", "ActiveState") == {"ActiveState": "active"}
    file.write_text(shipped)
    host.systemctl("reload", "leased.service")
    eventually(lambda: limit() == 64)


def test_a_backup_by_root_is_restored_for_the_services_user(host: Lab) -> None:
    assert "while the daemon runs" in host.run("leased", "backup", "/root/copy").stdout
    assert "backup.made" in host.journal("leased.service")
    refused = host.run("leased", "restore", "/root/copy", check=False)
    assert refused.returncode == 69 and "stop it first" in refused.stderr
    host.systemctl("stop", "leased.socket", "leased.service")
    assert "Lost: every lease" in host.run("leased", "restore", "--no-holders", "/root/copy").stdout
    owners = host.run("find", "/var/lib/leased", "-printf", "%u:%g %m %f\n").stdout.splitlines()
    assert {line.split()[0] for line in owners} == {"leased:leased"} and {line.split()[1] for line in owners} == {"700", "600"}
    host.run("rm", "-r", "/var/lib/leased")  # the disk died: what root's restore makes anew becomes the service's at its start
    assert "Nothing was there before" in host.run("leased", "restore", "--no-holders", "/root/copy").stdout
    host.systemctl("start", "leased.socket")
    told = json.loads(host.run("lease", "acquire", "k", "--ttl", "5m", "--json", user="worker").stdout)
    assert told["acquired"] is True, "it starts on what root put there, and grants at once"
    assert host.run("stat", "-c", "%U %a", "/var/lib/leased", "/var/lib/leased/data.mdb").stdout == "leased 700\nleased 600\n"
    assert host.run("leased", "fsck", check=False).returncode == 69


class Caller(threading.Thread):
    """Asks again and again over new connections, as `lease` would; keeps what nobody may see."""

    def __init__(self, lab: Lab) -> None:
        super().__init__()
        self.lab = lab
        self.wrong: list[str] = []
        self.answers = 0
        self.over = threading.Event()
        self.start()

    def run(self) -> None:
        while not self.over.is_set():
            try:
                with self.lab.rpc() as rpc:
                    self.wrong += [] if rpc.call("check", key="k")["held"] is True else ["not held"]
                    self.answers += 1
            except HungUp:
                pass  # its request was under way when the daemon went: a client asks again
            except OSError as error:
                self.wrong.append(repr(error))
            time.sleep(0.02)

    def __exit__(self, *_: object) -> None:
        self.over.set()
        self.join()

    def __enter__(self) -> Caller:
        return self


def test_an_upgrade_keeps_every_lease_and_what_is_bound_to_the_living(host: Lab) -> None:
    holder = host.spawn("sh", "-c", "echo $$; exec leasenc", user="worker")
    assert holder.stdin is not None and holder.stdout is not None
    pid = holder.stdout.readline().strip()
    holder.stdin.write('{"op":"lease","key":"bound","holder":"h","ttl_seconds":300,"bind":"process"}\n')
    holder.stdin.flush()
    grant = json.loads(holder.stdout.readline())["result"]
    assert grant["acquired"] is True
    before = host.main_pid("leased.service")
    with host.rpc() as rpc:
        held = rpc.call("check", key="k")
    with Caller(host) as caller:
        dpkg(host, "-i", "/root/later.deb")
    assert caller.wrong == [] and caller.answers > 10
    assert host.main_pid("leased.service") not in {0, before}
    assert version(host) == NEXT_PROGRAM and host.show("leased.socket", "ActiveState") == {"ActiveState": "active"}
    with host.rpc() as rpc:
        told = rpc.call("info")["store"]
        assert (told["state"], told["no_grant_for_seconds"]) == ("ok", 0)
        assert rpc.call("check", key="k", generation=held["generation"])["current"] is True
        assert rpc.call("check", key="bound", generation=grant["generation"])["current"] is True
        assert rpc.call("lease", key="bound", holder="x")["acquired"] is False
        host.run("kill", "-KILL", pid)
        assert rpc.call("lease", key="bound", holder="x", wait_seconds=10)["acquired"] is True, "its holder died"
    assert host.path("/var/lib/leased/version").read_text() == f"{NEXT_PROGRAM}\n"


def test_a_downgrade_within_one_format_keeps_them_too_and_what_an_administrator_disabled_stays_disabled(host: Lab) -> None:
    host.systemctl("disable", "--now", "leased.socket")
    host.systemctl("stop", "leased.service")
    assert "downgrading leased" in host.run("dpkg", "-i", "/root/first.deb").stderr
    assert host.systemctl("is-enabled", "leased.socket", check=False) == "disabled"
    assert host.show("leased.socket", "ActiveState") == {"ActiveState": "inactive"}
    host.systemctl("enable", "--now", "leased.socket")
    with host.rpc() as rpc:
        assert rpc.call("info")["store"]["no_grant_for_seconds"] == 0, "it was a stop in order"
        assert rpc.call("check", key="k")["held"] is True


def test_removed_it_leaves_the_state_and_purged_it_leaves_nothing(host: Lab) -> None:
    dpkg(host, "--remove", "leased")
    assert host.main_pid("leased.service") == 0
    assert not host.path("/run/leased/leased.sock").exists() and not host.path("/usr/lib/leased").exists()
    assert host.path("/var/lib/leased/data.mdb").exists() and host.path("/etc/leased/leased.toml").exists()
    dpkg(host, "-i", "/root/later.deb")
    with host.rpc() as rpc:
        assert rpc.call("check", key="k")["held"] is True, "what was held then is held again"
    assert host.run("dpkg-query", "-W", "-f", "${Version}", "leased").stdout == NEXT_PACKAGE
    dpkg(host, "--purge", "leased")
    places = ("/etc", "/run", "/usr/bin", "/usr/lib", "/usr/share/doc", "/lib/systemd", "/var/lib")
    left = host.run("find", *places, "-xdev", "-name", "leased*").stdout
    assert left == "" and not host.path("/usr/bin/lease").exists(), "neither a link, nor a mask, nor a state"
    assert host.systemctl("is-enabled", "leased.socket", check=False) != "masked"
