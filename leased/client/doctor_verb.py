"""The verb that looks for what may be wrong: doctor.  It collects facts; diagnosis.py judges them.  It changes nothing."""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Callable, Iterator
from typing import Any, Final

from leased.client import diagnosis, wording
from leased.client.diagnosis import FAIL, OK, WARN, Finding
from leased.client.errors import DaemonUnreachable, LeasedClientError, OutcomeUnknown, PermissionDenied
from leased.client.shell import EXIT_NO, EXIT_UNKNOWN, EXIT_YES, Arguments, Option, Output, Verb
from leased.client.verbs import client_of
from leased.version import VERSION

_UNIT_PLACES: Final = ("/etc/systemd", "/run/systemd", "/usr/local/lib/systemd", "/usr/lib/systemd", "/lib/systemd")
_START: Final = "start it: `systemctl start leased.socket` where units are installed, else `leased serve`"


def doctor(arguments: Arguments, out: Output) -> int:
    from leased.client.core import socket_path  # not before: a help page needs no messages

    socket = os.path.abspath(socket_path(arguments.text("--socket")))  # noqa: PTH100
    found = list(of_socket(socket))
    told: dict[str, Any] | None = None
    try:
        with client_of(arguments) as client:
            asked_at = time.monotonic()
            told = client.info()
            found.append(Finding(OK, "daemon", f"it answers, after {(time.monotonic() - asked_at) * 1000:.1f} ms"))
    except (DaemonUnreachable, OutcomeUnknown) as wrong:
        advice = "see whether it is stopped or stuck" if isinstance(wrong, OutcomeUnknown) else _START
        found.append(Finding(FAIL, "daemon", wording.shown(wrong), advice))
    except PermissionDenied as wrong:
        advice = (
            "the line about the socket tells who may"
            if "may not connect" in str(wrong)
            else "set LEASED_AGENT_KEY to a key that is valid"
        )
        found.append(Finding(FAIL, "daemon", wording.shown(wrong), advice))
    except LeasedClientError as wrong:
        found.append(Finding(FAIL, "daemon", wording.shown(wrong), "is it leased that listens there?"))
    if told is not None:
        found += of_daemon(told)
    found += [*of_host(socket, arguments.text("--config")), *of_environment(dict(os.environ))]
    for finding in found:
        out.record(finding._asdict())
        out.sentence(line(finding))
    if told is None:
        return EXIT_UNKNOWN
    return EXIT_NO if any(finding.level == FAIL for finding in found) else EXIT_YES


def line(finding: Finding) -> str:
    text = f"{finding.level:<4}  {finding.check}: {wording.shown(finding.what)}"
    return f"{text}  -> {finding.advice}" if finding.advice else text


def of_socket(path: str) -> Iterator[Finding]:
    """Is it there, is it a socket, and may this user connect?  Whether anybody listens is seen by asking."""
    try:
        seen = os.stat(path)  # noqa: PTH116
    except FileNotFoundError:
        yield Finding(FAIL, "socket", f"{path} does not exist", f"{_START}; or name another by --socket or LEASED_SOCKET")
        return
    except OSError as wrong:
        yield Finding(FAIL, "socket", f"{path}: {wrong.strerror}", "a directory on its way keeps this user out")
        return
    if not stat.S_ISSOCK(seen.st_mode):
        yield Finding(FAIL, "socket", f"{path} is no socket", "name the daemon's by --socket or LEASED_SOCKET")
        return
    mode = f"mode {stat.S_IMODE(seen.st_mode):04o}, user {_user(seen.st_uid)}, group {_group(seen.st_gid)}"
    if os.access(path, os.R_OK | os.W_OK):
        yield Finding(OK, "socket", f"{path} lets this user in ({mode})")
        return
    group = _group(seen.st_gid)
    if not seen.st_mode & stat.S_IWGRP:
        advice = "only its user may: set socket_mode and socket_group in the configuration"
    elif _in_database(seen.st_gid):
        advice = f"this user was added to {group} after this login: log in again, or run `newgrp {group}`"
    else:
        advice = f"an administrator can add you: `usermod -aG {group} {_user(os.getuid())}`, then log in again"
    yield Finding(FAIL, "socket", f"{path} keeps this user out ({mode})", advice)


def of_daemon(told: dict[str, Any]) -> Iterator[Finding]:
    operator = ", as an operator" if told.get("operator") else ""
    yield Finding(OK, "namespace", f"it sees you in {told.get('namespace')}{operator}")
    yield diagnosis.of_version(VERSION, told.get("version"))
    yield from diagnosis.of_store(told.get("store") or {})
    clock = told.get("clock") or {}
    yield diagnosis.of_clock(clock, _boot_id(), time.clock_gettime(time.CLOCK_BOOTTIME), _behind(clock.get("wall")))
    yield from diagnosis.of_limits(told)


def of_host(socket: str, file: str | None) -> Iterator[Finding]:
    """What can be seen of the host and of the daemon's directories, as far as the configuration tells where they are."""
    from leased.config import load
    from leased.errors import LeasedError

    system = os.geteuid() == 0 or socket.startswith("/run/leased/")
    directories: list[tuple[str, Callable[[str, str, int], list[Finding]]]] = []
    try:
        config = load(file, root=system, environ=os.environ)
        directories += [
            (str(config.state_dir), diagnosis.of_state_directory),
            (str(config.runtime_dir), diagnosis.of_runtime_directory),
        ]
    except LeasedError as wrong:
        first = str(wrong).splitlines()[0]
        yield Finding(WARN, "configuration", first, "`leased check-config` tells all of it; nothing is said of the directories")
    for path, judge in directories:
        kind, free = _place(path)
        if kind is not None and free is not None:
            yield from judge(path, kind, free)
        else:
            yield Finding(OK, "directories", f"{path} is not there, or this user may not look: nothing is said of it")
    yield diagnosis.of_kernel(os.uname().release)
    kind_of = "system" if system else "user"
    units = [
        f"{place}/{kind_of}/{name}"
        for place in _UNIT_PLACES
        for name in ("leased.service", "leased.socket")
        if os.path.exists(f"{place}/{kind_of}/{name}")  # noqa: PTH110
    ]
    yield diagnosis.of_units(units, os.path.isdir("/run/systemd/system"), not system)  # noqa: PTH112


def of_environment(environ: dict[str, str]) -> Iterator[Finding]:
    """Variables that change what `lease` does, and are easily left over.  No value of a secret is shown."""
    if environ.get("LEASE_FENCE") and not environ.get("LEASE_KEY"):
        advice = "unset LEASE_FENCE, or set LEASE_KEY beside it: it is presented for every key that is asked for"
        yield Finding(WARN, "environment", "LEASE_FENCE is set without LEASE_KEY", advice)
    if environ.get("LEASED_SOCKET", "/")[:1] != "/":
        yield Finding(
            WARN, "environment", "LEASED_SOCKET is a relative path", "make it absolute: it means another file in each directory"
        )
    if environ.get("LEASED_AGENT_KEY"):
        yield Finding(OK, "environment", "LEASED_AGENT_KEY is set: its namespace is used")


def _place(path: str) -> tuple[str | None, int | None]:
    """Type of the file system and free bytes; None where this user cannot see the directory."""
    real = os.path.realpath(path)
    try:
        space = os.statvfs(real)
        with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as mounts:  # noqa: PTH123
            return diagnosis.file_system(real, mounts.read()), space.f_bavail * space.f_frsize
    except OSError:
        return None, None


def _behind(wall: object) -> float:
    from datetime import datetime

    try:
        return time.time() - datetime.fromisoformat(str(wall)).timestamp()
    except ValueError:
        return 0.0


def _boot_id() -> str | None:
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:  # noqa: PTH123
            return file.read().strip()
    except OSError:
        return None


def _user(uid: int) -> str:
    import pwd

    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def _group(gid: int) -> str:
    import grp

    try:
        return grp.getgrgid(gid).gr_name
    except KeyError:
        return str(gid)


def _in_database(gid: int) -> bool:
    """Is this user a member by the group database, although this process is not?"""
    return gid in os.getgrouplist(_user(os.getuid()), os.getgid())


VERBS: Final = {
    "doctor": Verb(
        doctor,
        "lease doctor [--config FILE]",
        "Looks for what may be wrong between you and the daemon, and on this host; changes nothing.  One line each: ok, warn or fail, what,\n"
        "and what to do.  With --json one object each.  Exit 0: nothing fails.  1: something does.  69: no daemon answers.",
        (Option("--config", "FILE", "the daemon's configuration, which tells where its directories are (default: the usual one)"),),
        (0, 0),
        ("lease doctor", "lease doctor --json | jq -r 'select(.level != \"ok\") | .advice'"),
    ),
}
