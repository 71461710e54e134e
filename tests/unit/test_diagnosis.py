"""What `lease doctor` makes of facts: the level, and that there is something to do wherever not all is well."""

from __future__ import annotations

import os
import socket
import stat
from pathlib import Path
from typing import Any

import pytest

from leased.client import diagnosis, doctor_verb
from leased.client.diagnosis import FAIL, OK, WARN, Finding

PLENTY = 10 << 30


def levels(found: list[Finding]) -> list[str]:
    assert all(bool(each.advice) or each.level == OK for each in found), found
    return [each.level for each in found]


def test_versions() -> None:
    assert diagnosis.of_version("0.1.0", "0.1.0").level == OK
    skewed = diagnosis.of_version("0.2.0", "0.1.0")
    assert skewed.level == WARN and "0.2.0" in skewed.what and "0.1.0" in skewed.what and "restart" in skewed.advice


@pytest.mark.parametrize(
    ("store", "expected"),
    [
        ({"state": "ok"}, [OK]),
        ({"state": "recovering", "no_grant_for_seconds": 31.0}, [WARN]),
        ({"state": "state_lost"}, [FAIL]),
        ({"state": "No space left on device"}, [FAIL]),
        ({"state": "ok", "damaged_records": 2}, [OK, FAIL]),
        ({"state": "ok", "ledger_failures": 3, "ledger_error": "I/O error"}, [OK, WARN]),
    ],
)
def test_store(store: dict[str, Any], expected: list[str]) -> None:
    found = diagnosis.of_store(store)
    assert levels(found) == expected
    assert "31 s" in found[0].what or "no_grant_for_seconds" not in store


@pytest.mark.parametrize(
    ("told", "boot_id", "boot", "behind", "level", "says"),
    [
        ({"boot_id": "a", "boottime": 100.0}, "a", 100.4, 0.3, OK, "same clocks"),
        ({"boot_id": "b", "boottime": 100.0}, "a", 100.0, 0.0, WARN, "another boot or host"),
        ({"boot_id": "a", "boottime": 100.0}, "a", 3700.0, 0.0, WARN, "3600 s apart"),
        ({"boot_id": "a", "boottime": 100.0}, "a", 100.0, -7200.0, WARN, "7200 s apart"),
        ({"boot_id": "a", "boottime": 100.0}, None, 100.0, 0.0, OK, "same clocks"),
    ],
)
def test_clock(told: dict[str, Any], boot_id: str | None, boot: float, behind: float, level: str, says: str) -> None:
    found = diagnosis.of_clock(told, boot_id, boot, behind)
    assert levels([found]) == [level] and says in found.what


def test_limits_are_told_where_they_are_near() -> None:
    limits = {"max_leases_per_namespace": 10, "max_connections": 100}
    assert levels(diagnosis.of_limits({"limits": limits, "leases": 7, "connections": 80})) == [OK, WARN]
    assert diagnosis.of_limits({"limits": limits, "leases": None}) == []


@pytest.mark.parametrize(
    ("kind", "free", "expected"),
    [
        ("ext4", PLENTY, [OK, OK]), ("xfs", 100 << 20, [OK, WARN]), ("btrfs", 1 << 20, [OK, FAIL]), ("nfs4", PLENTY, [FAIL]),
        ("9p", PLENTY, [FAIL]), ("fuse.sshfs", PLENTY, [FAIL]), ("overlay", PLENTY, [WARN, OK]), ("tmpfs", PLENTY, [FAIL, OK]),
    ],
)  # fmt: skip
def test_state_directory(kind: str, free: int, expected: list[str]) -> None:
    assert levels(diagnosis.of_state_directory("/var/lib/leased", kind, free)) == expected


@pytest.mark.parametrize(
    ("kind", "free", "expected"), [("tmpfs", 100 << 20, [OK, OK]), ("ext4", PLENTY, [WARN, OK]), ("tmpfs", 1 << 20, [OK, FAIL])]
)
def test_runtime_directory(kind: str, free: int, expected: list[str]) -> None:
    assert levels(diagnosis.of_runtime_directory("/run/leased-state", kind, free)) == expected


@pytest.mark.parametrize(
    ("release", "level"), [("6.18.1-x", OK), ("6.5.0", OK), ("6.1.0-26-amd64", WARN), ("5.2.1", WARN), ("odd", WARN)]
)
def test_kernel(release: str, level: str) -> None:
    assert levels([diagnosis.of_kernel(release)]) == [level]


def test_units() -> None:
    assert diagnosis.of_units([], False, False).level == OK
    assert diagnosis.of_units(["/lib/systemd/system/leased.service"], True, False).level == OK
    assert "install-units --enable" in diagnosis.of_units([], True, False).advice
    assert "install-units --user" in diagnosis.of_units([], True, True).advice


MOUNTS = """\
22 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw
30 22 0:5 / /run rw - tmpfs tmpfs rw
40 22 0:9 / /mnt/with\\040space rw master:1 - nfs4 server:/x rw
50 22 0:7 / /var/lib rw - xfs /dev/sdb rw
51 50 0:8 / /var/lib rw - btrfs /dev/sdc rw
"""


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/home/x", "ext4"),
        ("/run", "tmpfs"),
        ("/run/leased", "tmpfs"),
        ("/running", "ext4"),
        ("/mnt/with space/a", "nfs4"),
        ("/var/lib/leased", "btrfs"),
    ],
)
def test_the_file_system_of_a_path(path: str, kind: str) -> None:
    assert diagnosis.file_system(path, MOUNTS) == kind
    assert diagnosis.file_system(path, "garbage\n") is None


def test_socket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "s"
    (missing,) = doctor_verb.of_socket(str(path))
    assert missing.level == FAIL and "does not exist" in missing.what and "leased serve" in missing.advice
    path.write_text("")
    (plain,) = doctor_verb.of_socket(str(path))
    assert plain.level == FAIL and "is no socket" in plain.what
    path.unlink()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        path.chmod(0o660)
        (let_in,) = doctor_verb.of_socket(str(path))
        assert let_in.level == OK and "mode 0660" in let_in.what
        monkeypatch.setattr(os, "access", lambda path, mode: False)
        monkeypatch.setattr(os, "getgrouplist", lambda user, group: [])
        (kept_out,) = doctor_verb.of_socket(str(path))
        assert kept_out.level == FAIL and "usermod -aG" in kept_out.advice
        monkeypatch.setattr(os, "getgrouplist", lambda user, group: [path.stat().st_gid])
        (not_yet,) = doctor_verb.of_socket(str(path))
        assert "log in again, or run `newgrp" in not_yet.advice
        path.chmod(stat.S_IRUSR | stat.S_IWUSR)
        (owner,) = doctor_verb.of_socket(str(path))
        assert "socket_mode and socket_group" in owner.advice


def test_environment_shows_no_secret() -> None:
    secret = "9007199254740993"
    found = list(doctor_verb.of_environment({"LEASE_FENCE": secret, "LEASED_SOCKET": "s", "LEASED_AGENT_KEY": secret}))
    assert levels(found) == [WARN, WARN, OK]
    assert secret not in repr(found)
    assert list(doctor_verb.of_environment({"LEASE_FENCE": secret, "LEASE_KEY": "k", "LEASED_SOCKET": "/s"})) == []
