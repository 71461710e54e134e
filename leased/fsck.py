"""`leased fsck`: walk both stores of a stopped daemon and prove every invariant.  Changes nothing (but for an empty lock file where there
was none: without it nothing would keep a daemon from starting meanwhile).
"""

from __future__ import annotations

import contextlib
import json
import os
import stat
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple, TextIO

import lmdb

from leased import invariants
from leased.clock import Clock, HostClock
from leased.config import Config
from leased.errors import StoreError
from leased.exits import EXIT_CONFIG, EXIT_FINDINGS, EXIT_YES
from leased.state.environment import DIRECTORY_MODE, FILE_MODE, DirectoryLock, open_to_read
from leased.state.leases import map_bytes_for
from leased.state.ledger import INITIALISED
from leased.state.probe import MAX_TABLES, probe
from leased.state.reading import Finding, LeasesContents, LedgerContents, Reader, free_pages, read_leases, read_ledger

DATA: Final = "data.mdb"
NOTHING: Final = LedgerContents(None, {}, {})


class Report(NamedTuple):
    """`summary` is one line for people."""

    findings: list[Finding]
    summary: str


def run(config: Config, out: TextIO, *, as_json: bool = False) -> int:
    """Print the findings and return the exit code: 0 none, 1 some, 78 when the state must not be opened.  Raises StateLocked, StoreError
    or OSError."""
    report = examine(config, HostClock())
    if as_json:
        rows = [
            {"level": "note" if each.note else "finding", "code": each.code, "path": each.path, "text": each.text}
            for each in report.findings
        ]
        print(json.dumps(rows, indent=1, ensure_ascii=False), file=out)
    else:
        for each in report.findings:
            print(f"{'note: ' if each.note else ''}{each.path}: {each.text}", file=out)
        print(report.summary, file=sys.stderr)
    return exit_code(report.findings)


def exit_code(findings: list[Finding]) -> int:
    if any(each.closed for each in findings):
        return EXIT_CONFIG
    return EXIT_YES if all(each.note for each in findings) else EXIT_FINDINGS


def examine(config: Config, clock: Clock) -> Report:
    """All findings about both directories.  Takes their locks.  Raises StateLocked, StoreError or OSError."""
    with contextlib.ExitStack() as held:
        for directory in (config.state_dir, config.runtime_dir):
            if directory.is_dir():
                held.callback(DirectoryLock(directory, make=False).close)
        return _examine(config, invariants.Host(clock.now().boot, clock.boot_id(), config.wait_out_seconds))


def _examine(config: Config, host: invariants.Host) -> Report:
    findings = [*_of_files(config.state_dir, "ledger"), *_of_files(config.runtime_dir, "leases")]
    ledger = _read(config.state_dir, "ledger", findings)
    leases = _read(config.runtime_dir, "leases", findings)
    state = str(config.state_dir / DATA)
    file_pages = 0
    if isinstance(ledger, LedgerContents):
        findings += invariants.of_the_ledger(ledger, state)
        findings += _of_initialised(config.state_dir, ledger, leases)
    if isinstance(leases, LeasesContents):
        file_bytes = max((config.runtime_dir / DATA).stat().st_size, map_bytes_for(config.max_leases))
        file_pages = free_pages(leases, file_bytes)
        findings += invariants.of_the_leases(leases, str(config.runtime_dir / DATA), host, file_pages + leases.used_pages)
        if isinstance(ledger, LedgerContents):
            findings += invariants.of_both(ledger, leases, state, host)
    if not any(each.closed for each in findings):
        assert isinstance(ledger, LedgerContents)
        known = leases if isinstance(leases, LeasesContents) else None
        findings.append(Finding("next_start", state, invariants.next_start(ledger, known, host), note=True))
    wrong = sum(not each.note for each in findings)
    live = sum(lease.deadline > host.boot for lease in leases.rows.values()) if isinstance(leases, LeasesContents) else 0
    kept = len(ledger.rows) if isinstance(ledger, LedgerContents) else 0
    summary = f"leased fsck: {f'findings: {wrong}' if wrong else 'clean'}; live leases: {live}; in the ledger: {kept}"
    return Report(findings, summary + (f"; free pages: {file_pages}" if file_pages else ""))


def _read(directory: Path, store: str, findings: list[Finding]) -> LedgerContents | LeasesContents | None:
    """None: it cannot be read (a finding says so), or there is no volatile state (nothing wrong: a reboot takes it)."""
    data = directory / DATA
    if not data.exists() or data.stat().st_size == 0:
        return NOTHING if store == "ledger" else None
    said = probe(directory)
    if said:
        remedy = (
            "restore a backup with `leased restore`" if store == "ledger" else "remove it; the next start waits out what was in it"
        )
        text = said.removeprefix(f"{data} ").removeprefix(f"{data}: ")
        findings.append(Finding(f"{store}.unreadable", str(data), text if "leased" in text else f"{text}: {remedy}", closed=True))
        return None
    try:
        with open_to_read(directory, tables=MAX_TABLES) as environment:
            reader = Reader(environment, store, str(data))
            contents = read_ledger(reader) if store == "ledger" else read_leases(reader)
    except lmdb.Error as error:
        raise StoreError(f"{data}: {error}: it could be read a moment ago; look at the disk, then try again") from error
    findings += reader.findings
    return contents


def _of_files(directory: Path, store: str) -> Iterator[Finding]:
    if not directory.is_dir():
        if directory.exists():
            yield Finding(f"{store}.mode", str(directory), "it is not a directory: move it away, or name another", closed=True)
        return
    top = directory.stat()
    for path in (directory, *sorted(directory.iterdir())):
        status = path.lstat() if path != directory else top
        if path != directory and not stat.S_ISREG(status.st_mode):
            continue
        wanted = DIRECTORY_MODE if path == directory else FILE_MODE
        mode = stat.S_IMODE(status.st_mode)
        if mode & ~wanted:
            yield Finding(
                f"{store}.mode", str(path), f"its mode is {mode:04o}, so others may reach what is in it: chmod {wanted:04o} {path}"
            )
        if path != directory and status.st_uid != top.st_uid:
            yield Finding(
                f"{store}.owner",
                str(path),
                f"it belongs to uid {status.st_uid} and its directory to {top.st_uid}: chown {top.st_uid} {path}",
            )


def _of_initialised(directory: Path, ledger: LedgerContents, leases: LedgerContents | LeasesContents | None) -> Iterator[Finding]:
    path = directory / INITIALISED
    name = str(path)
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        started = isinstance(leases, LeasesContents) and leases.meta is not None and leases.meta["start"].number > 0
        if ledger.meta is not None:
            yield Finding(
                "ledger.initialised",
                name,
                "it is missing, as a crash in a first start leaves it: the next start makes it",
                note=True,
            )
        elif started and not ledger.counts.get("meta"):
            yield Finding("ledger.missing", str(directory), "the ledger is gone, and the volatile state says there was one: "
                          "start the daemon (it rebuilds it from there) before the power can fail")  # fmt: skip
        return
    with os.fdopen(descriptor, "rb") as file:
        text = file.read(200).decode(errors="replace").strip()
    if ledger.meta is None and not ledger.counts.get("meta"):
        yield Finding("ledger.emptied", str(directory / DATA), f"it is empty, but {INITIALISED} beside it says it was in use: restore a backup "
                      f"with `leased restore`, or, if no lease can be held any more, remove {path}")  # fmt: skip
    elif ledger.meta is not None and text != ledger.meta["install_id"]:
        shown = text if len(text) == 32 and text.isalnum() else "nothing that is one"
        yield Finding("ledger.initialised", name, f"it names the install id {shown}, the ledger {ledger.meta['install_id']}: if this ledger is "
                      f"the right one, remove {path} (the next start makes it anew), else restore a backup")  # fmt: skip
