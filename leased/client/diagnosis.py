"""What `lease doctor` makes of the facts: one finding each, with what to do about it.  No I/O: facts come in as values."""

from __future__ import annotations

import re
from typing import Any, Final, NamedTuple

OK: Final = "ok"
WARN: Final = "warn"
FAIL: Final = "fail"

_SERVED: Final = {"ok"}
_STORES: Final = {
    "recovering": (WARN, "nothing new is granted until it would have lapsed, had it been forgotten: wait"),
    "starting": (WARN, "it has only just started: ask again in a moment"),
    "shutting_down": (WARN, "it is being stopped; the next one is asked once it runs"),
    "state_lost": (FAIL, "its directories were taken away: it exits, and has to be started again; the log tells which"),
    "full": (FAIL, "no room for another lease: raise max_leases, or find out who takes so many (`lease list`)"),
}
_NETWORKED: Final = re.compile(
    r"^(nfs4?|cifs|smb3?|smbfs|9p|afs|ceph|glusterfs|lustre|ocfs2|gfs2|beegfs|fuse\.(sshfs|s3fs|glusterfs|ceph))"
)
_LAYERED: Final = frozenset({"overlay", "aufs", "overlayfs"})
_VOLATILE: Final = frozenset({"tmpfs", "ramfs"})
_LEAST_FREE_BYTES: Final = (
    64 << 20
)  # a commit of the ledger needs far less; its log of billing events may grow by this in a bad day
_LOW_FREE_BYTES: Final = 512 << 20
_SKEW_SECONDS: Final = 2.0
_NEAR_LIMIT: Final = 0.8
_KERNEL_PEERPIDFD: Final = (6, 5)
_KERNEL_PIDFD: Final = (5, 3)


class Finding(NamedTuple):
    """`level`: ok, warn or fail.  `advice` is empty where there is nothing to do."""

    level: str
    check: str
    what: str
    advice: str = ""


def of_version(client: str, daemon: object) -> Finding:
    if client == daemon:
        return Finding(OK, "version", f"client and daemon are {client}")
    newer = "restart the daemon, if it was upgraded while it ran; else upgrade whichever is older"
    return Finding(WARN, "version", f"the client is {client}, the daemon {daemon}", newer)


def of_store(store: dict[str, Any]) -> list[Finding]:
    state = str(store.get("state"))
    found = []
    if state in _SERVED:
        found.append(Finding(OK, "store", "the daemon's store is ok"))
    else:
        level, advice = _STORES.get(
            state, (FAIL, "nothing can be granted: see the daemon's log, and the space in both of its directories")
        )
        wait = store.get("no_grant_for_seconds") or 0.0
        found.append(
            Finding(level, "store", f"the daemon's store is {state}{f' for another {wait:.0f} s' if wait else ''}", advice)
        )
    if store.get("damaged_records"):
        advice = "stop the daemon, `leased fsck` tells which; the disk or the memory may be failing"
        found.append(Finding(FAIL, "store", f"{store['damaged_records']} damaged records", advice))
    if store.get("ledger_failures"):
        why = f" ({store['ledger_error']})" if store.get("ledger_error") else ""
        advice = "the disk was slow or full: see the daemon's log"
        found.append(
            Finding(WARN, "store", f"{store['ledger_failures']} flushes of the ledger failed since the start{why}", advice)
        )
    return found


def of_clock(told: dict[str, Any], boot_id: str | None, boot: float, wall_behind: float) -> Finding:
    """`boot`: this process's boot clock; `wall_behind`: seconds the daemon's wall clock, as told, stands behind this process's."""
    if boot_id is not None and told.get("boot_id") not in {None, boot_id}:
        advice = "nothing, if the daemon runs on another host; else a container shows another boot id"
        return Finding(
            WARN, "clock", "the daemon is of another boot or host: deadlines are counted from when a request was sent", advice
        )
    apart = abs(boot - float(told.get("boottime") or boot))
    if apart > _SKEW_SECONDS:
        advice = "one of the two runs in a time namespace of its own; leases are right, expires_boottime is not to be used"
        return Finding(WARN, "clock", f"the boot clocks of client and daemon are {apart:.0f} s apart", advice)
    if abs(wall_behind) > _SKEW_SECONDS:
        return Finding(
            WARN,
            "clock",
            f"the wall clocks of client and daemon are {abs(wall_behind):.0f} s apart",
            "expires_at is off by that; leases are not",
        )
    return Finding(OK, "clock", "client and daemon see the same clocks")


def of_limits(told: dict[str, Any]) -> list[Finding]:
    """What is used of what there is, where the daemon tells both."""
    limits = told.get("limits") or {}
    found = []
    for used, limit, key in (
        ("leases", "max_leases_per_namespace", "limits.max_leases_per_namespace"),
        ("connections", "max_connections", "limits.max_connections"),
    ):
        most = limits.get(limit)
        if told.get(used) is None or not most:
            continue
        if told[used] >= _NEAR_LIMIT * most:
            found.append(
                Finding(
                    WARN, "limits", f"{told[used]} of {most} {used}", f"raise {key} in the configuration, or find out who has them"
                )
            )
        else:
            found.append(Finding(OK, "limits", f"{told[used]} of {most} {used}"))
    return found


def of_state_directory(path: str, kind: str, free: int) -> list[Finding]:
    if _NETWORKED.match(kind):
        advice = "move it to a local disk: two hosts would not lock each other out, and a flush there proves nothing"
        return [Finding(FAIL, "state directory", f"{path} is on {kind}", advice)]
    if kind in _VOLATILE:
        advice = "set state_dir to a place on a disk: after a reboot it would be a new installation, and forget long leases"
        return [Finding(FAIL, "state directory", f"{path} is on {kind}", advice), *_of_space("state directory", path, free)]
    if kind in _LAYERED:
        advice = "mount a volume there: it is gone with its container, and its leases with it"
        return [Finding(WARN, "state directory", f"{path} is on {kind}", advice), *_of_space("state directory", path, free)]
    return [Finding(OK, "state directory", f"{path} is on {kind}"), *_of_space("state directory", path, free)]


def of_runtime_directory(path: str, kind: str, free: int) -> list[Finding]:
    if kind in _VOLATILE:
        return [Finding(OK, "runtime directory", f"{path} is on {kind}"), *_of_space("runtime directory", path, free)]
    advice = "set runtime_dir to a place on tmpfs, as below /run: it is written for every lease, and is of this boot only"
    return [Finding(WARN, "runtime directory", f"{path} is on {kind}", advice), *_of_space("runtime directory", path, free)]


def _of_space(check: str, path: str, free: int) -> list[Finding]:
    text = f"{free >> 20:,} MiB are free at {path}"
    if free >= _LOW_FREE_BYTES or (check == "runtime directory" and free >= _LEAST_FREE_BYTES):
        return [Finding(OK, check, text)]
    return [Finding(FAIL if free < _LEAST_FREE_BYTES else WARN, check, text, "make room")]


def of_kernel(release: str) -> Finding:
    numbers = re.match(r"(\d+)\.(\d+)", release)
    version = (int(numbers[1]), int(numbers[2])) if numbers else (0, 0)
    if version >= _KERNEL_PEERPIDFD:
        return Finding(OK, "kernel", f"Linux {release} names the process behind a connection: bind process works")
    if version >= _KERNEL_PIDFD:
        advice = (
            "use the Python client for bind process: it proves its process; other clients are refused (Linux 6.5 needs no proof)"
        )
        return Finding(WARN, "kernel", f"Linux {release} does not name the process behind a connection", advice)
    return Finding(WARN, "kernel", f"Linux {release} has no pidfds", "bind process is refused here: use Linux 6.5 or later")


def of_units(found: list[str], systemd_runs: bool, user: bool) -> Finding:
    """`found`: paths of leased.service and leased.socket among systemd's directories."""
    if not systemd_runs:
        return Finding(OK, "units", "systemd does not run here: something else has to start `leased serve` again when it ends")
    if found:
        return Finding(OK, "units", f"installed: {', '.join(found)}")
    command = "leased install-units --user" if user else "leased install-units --enable"
    return Finding(WARN, "units", "no leased.service and leased.socket among systemd's units", f"`{command}` writes them")


def file_system(path: str, mounts: str) -> str | None:
    """The type of the file system `path` (absolute, resolved) is on, by /proc/self/mountinfo; None where that does not tell."""
    best: tuple[int, str] | None = None
    for line in mounts.splitlines():
        before, _, after = line.partition(" - ")
        fields = before.split()
        if len(fields) < 5 or not after:
            continue
        where = re.sub(r"\\(\d{3})", lambda octal: chr(int(octal[1], 8)), fields[4])
        inside = path == where or path.startswith(where.rstrip("/") + "/")
        if inside and (best is None or len(where) >= best[0]):  # of several mounts at one place the last one is seen
            best = (len(where), after.split()[0])
    return best[1] if best else None
