"""The product as it is installed on a host without a package: a virtual environment in /opt/leased, and what systemd/ has.

Built once for a test run, with Debian's own Python, and mounted into every host that `install` prepares; made to be entered by anybody.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from lab import Lab

ROOT = Path(__file__).resolve().parents[2]
UNITS = ROOT / "systemd"
HOME = "/opt/leased"
WAIT_OUT_SECONDS = 6  # longer than an orderly reboot takes, on a busy machine too
CONFIG = f"wait_out_seconds = {WAIT_OUT_SECONDS}\n"
COMMANDS = ("leased", "lease")
USERS = """\
u worker - "may ask" /home/worker /bin/bash
u mate - "may ask too" /home/mate /bin/bash
u stranger - "may not ask" /home/stranger /bin/bash
m worker leased-clients
m mate leased-clients
"""


def build(home: Path) -> Path:
    """The environment, at `home`; its commands begin with the path it will have, HOME."""
    source = home.with_name(home.name + "-source")
    for name in ("leased", "systemd"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    quiet = {"PIP_DISABLE_PIP_VERSION_CHECK": "1", "PIP_NO_INPUT": "1", "PIP_ROOT_USER_ACTION": "ignore"}
    environment = {name: value for name, value in os.environ.items() if name not in {"PYTHONDONTWRITEBYTECODE", "PYTHONPATH"}}
    for command in (
        ["/usr/bin/python3", "-m", "venv", "--without-pip", str(home)],
        [sys.executable, "-m", "pip", f"--python={home}/bin/python", "install", "--quiet", f"{source}[upstream]"],
    ):
        done = subprocess.run(
            command, env=environment | quiet, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=300, check=False
        )
        assert done.returncode == 0, f"{' '.join(command)}:\n{done.stdout}{done.stderr}"
    for name in COMMANDS:
        script = home / "bin" / name
        script.write_text(script.read_text().replace(str(home), HOME))
    subprocess.run(["chmod", "-R", "a+rX", str(home)], check=True)
    shutil.rmtree(source)
    return home


def install(lab: Lab, built: Path, *, enabled: bool = True) -> None:
    """The product into a host that is not up yet, with three users: worker and mate are of leased-clients, stranger is not."""
    lab.files.joinpath("usr/lib/systemd/system").mkdir(parents=True)
    lab.files.joinpath("usr/lib/systemd/user").mkdir(parents=True)
    for name in ("leased.socket", "leased.service"):
        shutil.copy(UNITS / name, lab.files / "usr/lib/systemd/system")
        if (UNITS / "user" / name).exists():
            shutil.copy(UNITS / "user" / name, lab.files / "usr/lib/systemd/user")
    lab.put("/usr/lib/sysusers.d/leased.conf", (UNITS / "leased.sysusers").read_text())
    lab.put("/usr/lib/sysusers.d/zz-lab.conf", USERS)
    lab.keep("/var/lib/leased")
    (lab.keep("/etc/leased") / "leased.toml").write_text(CONFIG)
    lab.prepare += f"""
mkdir -p "$1{HOME}" "$1/home"
mount --bind {built} "$1{HOME}"
mount -o remount,bind,ro "$1{HOME}"
for name in {" ".join(COMMANDS)}; do ln -sfn {HOME}/bin/$name "$1/usr/bin/$name"; done
systemd-sysusers --root="$1"
for name in worker mate stranger; do chroot "$1" install -d -m 700 -o $name -g $name /home/$name; done
"""
    if enabled:
        lab.prepare += 'systemctl --root="$1" --quiet enable leased.socket\n'
