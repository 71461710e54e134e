"""Which program may open which state: asked before anything is opened for writing, so that a refusal has changed nothing.

The rule.  The ledger's meta record carries a format number.  Whatever a program writes that the last release could not read (a new version of
any record, in either store, or another meaning of an old one) gets the next number.  A program opens its own format; an older one is brought up
by a step of UPGRADES, in one transaction when the ledger is opened, or refused; a newer one is refused always.  The volatile store needs no
number of its own: it is only used together with the ledger that belongs to it, and its meta record has a version byte.

The file `version` beside the ledger names the program that last opened the state for writing.  It is there to be told to people.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Final

from leased.errors import StateRefused
from leased.state import leases as leases_store
from leased.state import ledger as ledger_store
from leased.state.environment import FILE_MODE, open_to_read, translated
from leased.state.probe import MAX_TABLES
from leased.state.records import RecordDamaged, unseal
from leased.version import VERSION

UPGRADES: Final[Mapping[int, str]] = MappingProxyType({1: "leases of the ledger stand under their generation: Ledger._bring_up"})
"""Older formats this program brings up, and how."""

WRITER: Final = "version"
MAX_WRITER_BYTES: Final = 64


def refuse_another(state_dir: Path, runtime_dir: Path | None = None) -> None:
    """For whoever holds the locks and knows that both can be read (probe.py).  Writes nothing.  Raises StateRefused with what to do, or StoreError.

    Damage is none of its business: whoever reads the record for its content says so.
    """
    meta = _meta_record(state_dir)
    if meta is not None and meta[0] != ledger_store.META_VERSION:
        raise _refused(state_dir, f"its meta record has version {meta[0]}, and", ledger_store.META_VERSION, meta[0])
    if meta is not None:
        found = json.loads(meta[1:-4]).get("format")
        if found != ledger_store.FORMAT and found not in UPGRADES:
            raise _refused(state_dir, f"the state has format {found!r}, and", ledger_store.FORMAT, found)
    volatile = _meta_record(runtime_dir) if runtime_dir is not None else None
    if volatile is not None and volatile[0] > leases_store.META_VERSION:
        what = f"the volatile state in {runtime_dir} has version {volatile[0]}, and"
        raise _refused(state_dir, what, leases_store.META_VERSION, volatile[0])


def note_writer(state_dir: Path) -> None:
    """This program opens the state for writing.  What cannot be written is only a name less in a message."""
    try:
        path, growing = state_dir / WRITER, state_dir / f"{WRITER}.new"
        if writer_of(state_dir) != VERSION:
            descriptor = os.open(growing, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, FILE_MODE)
            with os.fdopen(descriptor, "w") as file:
                file.write(f"{VERSION}\n")
            growing.replace(path)
    except OSError:
        pass


def writer_of(state_dir: Path) -> str:
    """The version of the program that last opened the state for writing; empty where nothing tells."""
    try:
        with (state_dir / WRITER).open("rb") as file:
            text = file.read(MAX_WRITER_BYTES).decode(errors="replace").strip()
    except OSError:
        return ""
    return text if re.fullmatch(r"[0-9A-Za-z.+!-]+", text) else ""


def _meta_record(directory: Path) -> bytes | None:
    """The sealed meta record; None where there is none that proves itself."""
    data = directory / "data.mdb"
    if not data.exists() or data.stat().st_size == 0:
        return None
    with translated(str(data)), open_to_read(directory, tables=MAX_TABLES) as environment:
        with environment.begin() as transaction:
            if transaction.get(b"meta") is None:
                return None
        table = environment.open_db(b"meta", create=False)
        with environment.begin() as transaction:
            raw = transaction.get(b"meta", db=table)
    if raw is None or len(raw) < 5:
        return None
    try:
        unseal(raw, raw[0], "meta")
    except RecordDamaged:
        return None
    return bytes(raw)


def _refused(state_dir: Path, found: str, known: int, number: object) -> StateRefused:
    writer = writer_of(state_dir)
    older = isinstance(number, int) and number < known
    named = f"leased {writer}" if writer and writer != VERSION else ""
    by = named or f"{'an older' if older else 'a newer'} leased"
    if older:
        remedy = f"start a version in between, which can bring it up, or go back to {named or 'the version that wrote it'}"
    else:
        remedy = f"install {named or 'the version that wrote it'} again, or restore a backup that was made before the upgrade (`leased restore`)"
    return StateRefused(
        f"{state_dir}: {found} was written by {by}; this is leased {VERSION}, which knows {known}: {remedy}; nothing was changed"
    )
