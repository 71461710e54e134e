"""The package, built once, and a host of these tests' own to install it on.  The hosts are those of tests/systemd."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from built import DEBIAN_PYTHON, NEXT_PACKAGE, NEXT_PROGRAM, Packages, outcome
from daemons import ROOT

SYSTEMD_TESTS = str(ROOT / "tests" / "systemd")
if SYSTEMD_TESTS not in sys.path:
    sys.path.append(SYSTEMD_TESTS)

from lab import Lab  # noqa: E402  (found by the lines above)

USERS = """\
u worker - "may ask" /home/worker /bin/bash
u stranger - "may not ask" /home/stranger /bin/bash
"""


@pytest.fixture(scope="session")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Packages:
    home = tmp_path_factory.mktemp("packages")
    first = Path(outcome(DEBIAN_PYTHON, ROOT / "contrib/deb/build", "--output", home).strip())
    tree = home / "tree"
    outcome("dpkg-deb", "-R", first, tree)
    control, version = tree / "DEBIAN/control", tree / "usr/lib/leased/leased/version.py"
    for path, before, after in (
        (control, "Version: 0.1.0-1", f"Version: {NEXT_PACKAGE}"),
        (version, '"0.1.0"', f'"{NEXT_PROGRAM}"'),
    ):
        assert path.read_text().count(before) == 1
        path.write_text(path.read_text().replace(before, after))
    later = home / f"leased_{NEXT_PACKAGE}.deb"
    outcome("dpkg-deb", "--root-owner-group", "-Zgzip", "-z1", "--build", tree, later)
    return Packages(first, later)


@pytest.fixture(scope="session")
def bare(packages: Packages, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    """A host that is up, with two users, without leased.  /root has the packages, and the same program is at /opt/leased as an installation by pip
    would have it."""
    lab = Lab(tmp_path_factory.mktemp("bare"))
    lab.put("/usr/lib/sysusers.d/zz-lab.conf", USERS)
    for name, package in packages._asdict().items():
        target = lab.files / "root" / f"{name}.deb"
        target.parent.mkdir(exist_ok=True)
        target.hardlink_to(package)
    lab.prepare = """
rm -f "$1/usr/sbin/policy-rc.d" # images for containers have one that lets no package start anything
systemd-sysusers --root="$1"
dpkg-deb -x "$1/root/first.deb" "$1/root/unpacked"
mkdir -p "$1/opt/leased/bin"
mv "$1/root/unpacked/usr/lib/leased" "$1/opt/leased/lib"
sed 's,/usr/bin/python3,/opt/leased/bin/python3,; s,/usr/lib/leased,/opt/leased/lib,' "$1/root/unpacked/usr/bin/leased" >"$1/opt/leased/bin/leased"
ln -s /usr/bin/python3 "$1/opt/leased/bin/python3"
chmod 755 "$1/opt/leased" "$1/opt/leased/bin" "$1/opt/leased/bin/leased"
rm -r "$1/root/unpacked"
"""
    try:
        yield lab.boot()
    finally:
        lab.close()
