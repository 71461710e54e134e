"""`leased install-units`: what is written where, and what is refused.  Below a root of the test's own; nothing of this host is asked or changed."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from leased import __main__ as command
from leased import install_units
from leased.exits import WrongUse

Run = Callable[..., tuple[int, str, str]]
SYSTEM = "usr/local/lib/systemd/system"
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def opt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An installation at opt/leased below a root, which everybody may run."""
    place = tmp_path / "root/opt/leased/bin"
    place.mkdir(parents=True)
    (place / "leased").write_text("")
    monkeypatch.setattr(install_units.sys, "executable", str(place / "python3"))
    monkeypatch.setattr(install_units, "_must_be_everybodys", lambda: None)
    return place


@pytest.fixture
def run(tmp_path: Path, opt: Path, capsys: pytest.CaptureFixture[str]) -> Run:
    def ran(*words: str) -> tuple[int, str, str]:
        code = command.main(["install-units", f"--root={tmp_path / 'root'}", *words])
        return code, *capsys.readouterr()

    return ran


def files(root: Path) -> dict[str, str]:
    return {str(path.relative_to(root)): path.read_text() for path in root.rglob("*") if path.is_file() and "opt" not in path.parts}


def test_the_units_are_written_with_the_path_they_will_have(run: Run, tmp_path: Path) -> None:
    before = os.umask(0o077)
    try:
        code, out, err = run()
    finally:
        os.umask(before)
    assert (code, err) == (0, "")
    found = files(tmp_path / "root")
    assert set(found) == {
        *(f"{SYSTEM}/{name}" for name in ("leased.service", "leased.socket", "leased-http.socket")), "usr/local/lib/sysusers.d/leased.conf",
    }  # fmt: skip
    service = found[f"{SYSTEM}/leased.service"]
    assert "\nExecStart=/opt/leased/bin/leased serve\n" in service and "/usr/bin/leased" not in service
    for name in ("leased.service", "leased.socket"):
        text = (ROOT / "systemd" / name).read_text()
        assert found[f"{SYSTEM}/{name}"].partition("\n")[2] == text.replace("/usr/bin/leased", "/opt/leased/bin/leased"), (
            "one source"
        )
    assert {path.stat().st_mode & 0o777 for path in (tmp_path / "root/usr").rglob("*")} == {0o755, 0o644}, "whatever the umask is"
    assert f"systemd-sysusers --root={tmp_path}/root" in out and f"systemctl --root={tmp_path}/root enable leased.socket" in out
    assert "usermod -aG leased-clients NAME" in out


def test_again_changes_nothing_and_a_new_version_replaces_only_ours(run: Run, tmp_path: Path) -> None:
    run()
    service = tmp_path / "root" / SYSTEM / "leased.service"
    told = service.stat().st_mtime_ns
    assert run()[1].count("unchanged: ") == 4 and service.stat().st_mtime_ns == told
    service.write_text(service.read_text().replace("WatchdogSec=10s", "WatchdogSec=99s"))
    assert f"wrote {service}\n" in run()[1] and "WatchdogSec=99s" not in service.read_text()
    service.write_text("[Service]\nExecStart=/bin/own\n")
    code, out, err = run()
    assert (code, out) == (64, "") and err == (
        f"leased: {service} exists and is not of this command's making: move it away, or write a drop-in beside it\n"
    )
    assert service.read_text() == "[Service]\nExecStart=/bin/own\n"


def test_remove_takes_what_is_ours_and_nothing_else(run: Run, tmp_path: Path) -> None:
    assert run("--remove")[1] == "nothing to remove: this command has written no unit here\n"
    run()
    own = tmp_path / "root" / SYSTEM / "leased.socket"
    own.write_text("[Socket]\nListenStream=/x\n")
    code, out, err = run("--remove", "--dry-run")
    assert (code, err) == (0, "") and out.count("would remove") == 3 and len(files(tmp_path / "root")) == 4
    code, out, err = run("--remove")
    assert (code, err) == (0, "") and f"left alone: {own}" in out and "kept: /var/lib/leased" in out
    assert list(files(tmp_path / "root")) == [f"{SYSTEM}/leased.socket"]


def test_a_dry_run_shows_everything_and_writes_nothing(run: Run, tmp_path: Path) -> None:
    code, out, _ = run("--dry-run")
    assert code == 0 and files(tmp_path / "root") == {}
    assert out.count("# ---- ") == 4 and "ExecStart=/opt/leased/bin/leased serve" in out and "next:\n" in out


def test_a_users_units(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/ada")
    monkeypatch.setenv("XDG_CONFIG_HOME", "relative counts as unset")
    code, out, _ = run("--user")
    found = files(tmp_path / "root")
    assert code == 0 and set(found) == {f"home/ada/.config/systemd/user/leased.{kind}" for kind in ("service", "socket")}
    assert "ExecStart=/opt/leased/bin/leased serve" in found["home/ada/.config/systemd/user/leased.service"]
    assert "systemctl --user enable --now leased.socket" in out and "usermod" not in out
    monkeypatch.setenv("XDG_CONFIG_HOME", "/cfg")
    run("--user")
    assert (tmp_path / "root/cfg/systemd/user/leased.socket").exists()
    monkeypatch.delenv("HOME")
    monkeypatch.delenv("XDG_CONFIG_HOME")
    assert run("--user")[0] == 64


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--enable",), "--enable is for this host, --root for another"),
        (("--prefix=relative",), "--prefix relative: name it from the root on"),
        (("--user", "--prefix=/x"), "--prefix is for the system's units"),
    ],
)
def test_what_cannot_be_done_is_said(run: Run, tmp_path: Path, words: tuple[str, ...], said: str) -> None:
    code, out, err = run(*words)
    assert (code, out) == (64, "") and said in err and files(tmp_path / "root") == {}


def test_two_sets_of_units_are_one_too_many(run: Run, tmp_path: Path) -> None:
    packaged = tmp_path / "root/lib/systemd/system/leased.service"
    packaged.parent.mkdir(parents=True)
    packaged.write_text("")
    code, _, err = run()
    assert code == 64 and f"{packaged} is there already, from a package or by hand" in err
    packaged.unlink()
    packaged.symlink_to("/dev/null")  # masked, or what a removed package left
    assert run()[0] == 0


def test_another_prefix(run: Run, tmp_path: Path) -> None:
    assert run("--prefix=/usr")[0] == 0
    assert {path.partition("/leased")[0] for path in files(tmp_path / "root")} == {"usr/lib/systemd/system", "usr/lib/sysusers.d"}


def test_a_path_systemd_would_take_apart_is_refused(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = tmp_path / "root/opt/with space/bin"
    place.mkdir(parents=True)
    (place / "leased").write_text("")
    monkeypatch.setattr(install_units.sys, "executable", str(place / "python3"))
    code, _, err = run()
    assert code == 64 and "/opt/with space/bin/leased: systemd would take this path apart" in err


def test_without_a_script_the_interpreter_is_named(run: Run, opt: Path, tmp_path: Path) -> None:
    (opt / "leased").unlink()
    run()
    assert "ExecStart=/opt/leased/bin/python3 -P -m leased serve\n" in (tmp_path / "root" / SYSTEM / "leased.service").read_text()


# ---- whom the service could not run


@pytest.mark.parametrize("home", ["/home/ada/.local", "/root/.pyenv", "/run/user/1000/v"])
def test_a_python_below_a_home_is_refused_for_the_system(home: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(install_units.sys, "executable", f"{home}/bin/python3")
    with pytest.raises(WrongUse, match=re.escape(f"{home}/bin/python3 is below /{home.split('/')[1]}")) as refused:
        install_units._must_be_everybodys()
    assert "/usr/bin/python3 -m venv /opt/leased" in str(refused.value) and "--user" in str(refused.value)


def test_a_link_out_of_a_home_is_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    link = tmp_path / "python3"
    link.symlink_to("/home/ada/python3")
    monkeypatch.setattr(install_units.sys, "executable", str(link))
    tmp_path.chmod(0o755)
    monkeypatch.setattr(Path, "stat", lambda self, **_: os.stat_result((0o100755, *range(9))))
    with pytest.raises(WrongUse, match="/home/ada/python3 is below /home"):
        install_units._must_be_everybodys()


def test_a_folder_that_is_closed_to_others_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o700)
    (closed / "python3").write_text("")
    (closed / "python3").chmod(0o755)
    monkeypatch.setattr(install_units.sys, "executable", str(closed / "python3"))
    with pytest.raises(WrongUse, match=re.escape(f"{closed} (mode 0700) keeps the service's user from {closed}/python3: chmod it")):
        install_units._must_be_everybodys()


def test_the_help_page(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["install-units", "--help"]) == 0
    out = capsys.readouterr().out
    assert all(option in out for option in ("--user", "--root DIR", "--prefix DIR", "--enable", "--remove", "--dry-run"))
