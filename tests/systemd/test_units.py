"""The unit files as systemd's own tools judge them, and the settings that must never come back."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
from product import UNITS

pytestmark = pytest.mark.root  # needs systemd's tools, which .ci/run makes sure of

EXPOSURE = 12  # ten times what `systemd-analyze security` prints


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The units beside each other, with a command that exists."""
    for source in [UNITS / "leased.service", UNITS / "leased.socket", UNITS / "leased-http.socket"]:
        text = source.read_text()
        (tmp_path / source.name).write_text(text.replace("ExecStart=/usr/bin/leased ", "ExecStart=/bin/true "))
    return tmp_path


def analyze(*arguments: str | Path) -> tuple[int, str]:
    done = subprocess.run(
        ["systemd-analyze", *map(str, arguments)], capture_output=True, text=True, timeout=60, check=False, stdin=subprocess.DEVNULL
    )
    return done.returncode, done.stdout + done.stderr


def settings(path: Path) -> dict[str, list[str]]:
    """Every setting of a unit, of all sections, in order."""
    found: dict[str, list[str]] = {}
    for line in path.read_text().splitlines():
        if "=" in line and not line.startswith("#"):
            name, _, value = line.partition("=")
            found.setdefault(name, []).append(value)
    return found


def test_nothing_is_to_be_said_of_the_units_of_the_system(folder: Path) -> None:
    names = ["leased.service", "leased.socket", "leased-http.socket"]
    assert analyze("verify", "--man=no", "--recursive-errors=no", *[folder / name for name in names]) == (0, "")


def test_nothing_is_to_be_said_of_the_units_of_a_user(tmp_path: Path) -> None:
    for source in sorted((UNITS / "user").iterdir()):
        (tmp_path / source.name).write_text(source.read_text().replace("ExecStart=/usr/bin/leased ", "ExecStart=/bin/true "))
    names = [tmp_path / "leased.service", tmp_path / "leased.socket"]
    environment = {"PATH": "/usr/bin:/bin", "XDG_RUNTIME_DIR": str(tmp_path), "HOME": str(tmp_path)}
    done = subprocess.run(
        ["systemd-analyze", "--user", "verify", "--man=no", "--recursive-errors=no", *map(str, names)],
        capture_output=True, text=True, timeout=60, check=False, env=environment,
    )  # fmt: skip
    assert (done.returncode, done.stdout + done.stderr) == (0, "")


def test_a_mistake_in_a_unit_would_be_said(folder: Path) -> None:
    service = folder / "leased.service"
    service.write_text(service.read_text().replace("LimitCORE=0", "LimitCOREE=0"))
    _, said = analyze("verify", "--man=no", "--recursive-errors=no", service)
    assert "LimitCOREE" in said


def test_the_exposure_of_the_service(folder: Path) -> None:
    code, said = analyze("security", "--offline=true", f"--threshold={EXPOSURE}", folder / "leased.service")
    assert code == 0, said
    assert "exposure level for leased.service: 0." in said


def test_the_exposure_of_a_service_that_ships_to_upstream(folder: Path) -> None:
    shutil.copytree(UNITS / "leased.service.d", folder / "leased.service.d")
    code, said = analyze("security", "--offline=true", f"--threshold={EXPOSURE}", folder / "leased.service")
    assert code == 0, said
    assert "✗ PrivateNetwork=" in said, "the drop-in was not read"


def test_what_must_never_be_in_the_service() -> None:
    service = settings(UNITS / "leased.service")
    assert not {"PrivateUsers", "ProcSubset", "DynamicUser"} & set(service)
    assert (service["StartLimitIntervalSec"], service["Restart"], service["LimitCORE"]) == (["0"], ["always"], ["0"])
    assert "78" in service["RestartPreventExitStatus"][0].split()
    for socket in ("leased.socket", "leased-http.socket", "user/leased.socket"):
        assert settings(UNITS / socket)["TriggerLimitIntervalSec"] == ["0"], socket
    socket_directory = Path(settings(UNITS / "leased.socket")["ListenStream"][0]).parent
    assert socket_directory != Path("/run") / service["RuntimeDirectory"][0], "systemd would chown the socket to the service"


def test_the_users_can_be_made() -> None:
    done = subprocess.run(
        ["systemd-sysusers", "--dry-run", str(UNITS / "leased.sysusers")], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    lines = [line for line in (UNITS / "leased.sysusers").read_text().splitlines() if not line.startswith("#")]
    assert [line.split()[:2] for line in lines] == [["u", "leased"], ["g", "leased-clients"]]
