"""Both stores as whoever examines or copies them reads them: everything there is, and every record that is not what it should be.

A daemon stops at the first thing it must not trust; here nothing is raised for a record, all of it is listed.  What the records say
together is judged in invariants.py.
"""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple, TypeVar
from zlib import crc32

import lmdb

from leased.digests import KEY_HASH_BYTES, RID_BYTES, SECRET_BYTES
from leased.errors import StateRefused
from leased.model import MAX_GENERATION, MAX_TTL_SECONDS, Lease, Tombstone
from leased.state import leases as leases_store
from leased.state import ledger as ledger_store
from leased.state.environment import PAGE_BYTES
from leased.state.leases import Start
from leased.state.ledger import ROW_KEY_BYTES, LedgerLease, decode_ledger_lease, key_hash_of, stands_under
from leased.state.records import decode_lease, decode_tombstone, unseal
from leased.state.switch_records import decode_switch

_T = TypeVar("_T")
_COUNTER = struct.Struct("<Q")
_SECONDS = struct.Struct("<d")
MAX_BOOT_SECONDS: Final = 1e10  # three centuries of CLOCK_BOOTTIME
_UNSEALED: Final = frozenset({b"proof"})  # random bytes that only make a flush happen


class Finding(NamedTuple):
    """Something that is not as it must be.  `code` is for programs, `text` for people; `closed`: because of it the state must not be
    opened at all.  A `note` is nothing wrong, only worth knowing."""

    code: str
    path: str
    text: str
    closed: bool = False
    note: bool = False


class LedgerContents(NamedTuple):
    """`meta` is None where there is none that can be read; `counts` are the records of each table."""

    meta: Mapping[str, Any] | None
    rows: dict[bytes, LedgerLease]
    counts: dict[str, int]


class LeasesContents(NamedTuple):
    """`last` and `tick` are None where there is none that can be read; `used_pages` are those the tables are made of."""

    meta: Mapping[str, Any] | None
    last: int | None
    tick: float | None
    rows: dict[bytes, Lease]
    tombstones: dict[bytes, Tombstone]
    counts: dict[str, int]
    used_pages: int


class Reader:
    """One environment, read in one transaction.  `store` is "ledger" or "leases"; what is wrong is appended to `findings`."""

    def __init__(self, environment: lmdb.Environment, store: str, path: str) -> None:
        self.environment = environment
        self.store = store
        self.path = path
        self.findings: list[Finding] = []
        with environment.begin() as transaction:
            present = {bytes(name) for name, _ in transaction.cursor()}
        names = ledger_store.TABLES if store == "ledger" else leases_store.TABLES
        self._tables = {name: environment.open_db(name.encode(), create=False) for name in names if name.encode() in present}
        self.counts: dict[str, int] = dict.fromkeys(names, 0)
        self.used_pages = 4

    def found(self, code: str, text: str, *, closed: bool = False) -> None:
        self.findings.append(Finding(f"{self.store}.{code}", self.path, text, closed))

    def table(self, transaction: Any, name: str, key_bytes: int, decode: Callable[[bytes], _T]) -> dict[bytes, _T]:
        """Every record of a table that can be read.  `key_bytes` 0: keys of any length."""
        if name not in self._tables:
            return {}
        table = self._tables[name]
        rows: dict[bytes, _T] = {}
        before: bytes | None = None
        walked = 0
        for key, raw in transaction.cursor(db=table):
            walked += 1
            shown = f"the {name} record {key[:40].hex()}"
            if before is not None and key <= before:
                self.found("order", f"{shown} is out of order: its page is damaged: {RESTORE[self.store]}")
            before = key
            if key_bytes and len(key) != key_bytes:
                self.found("key", f"{shown} has a key of {len(key)} bytes, not {key_bytes}: {RESTORE[self.store]}")
            try:
                rows[key] = decode(raw)
            except StateRefused as error:
                self.found("version", f"{shown}: {error}", closed=True)
            except (ValueError, TypeError, KeyError, struct.error) as error:
                self.found("record", f"{shown} cannot be read ({error}): {SET_ASIDE[self.store, name]}")
        status = transaction.stat(table)
        self.used_pages += status["branch_pages"] + status["leaf_pages"] + status["overflow_pages"]
        self.counts[name] = walked
        if status["entries"] != walked:
            self.found(
                "entries",
                f"the table {name} says {status['entries']} records and has {walked}: its pages are damaged: {RESTORE[self.store]}",
            )
        return rows


RESTORE: Final = {
    "ledger": "restore a backup with `leased restore`",
    "leases": "remove this file; the next start makes it anew and waits until what was in it has lapsed",
}
SET_ASIDE: Final[Mapping[tuple[str, str], str]] = {
    (store, name): {
        ("ledger", "leases"): "this lease does not come back after a power cut; the next start writes it again or deletes it",
        ("ledger", "meta"): RESTORE["ledger"],
        ("leases", "leases"): "the daemon answers null for this key until the longest ttl has passed, then forgets it",
        ("leases", "meta"): RESTORE["leases"],
    }.get((store, name), f"it is lost; it goes when the {store} is made anew")
    for store, names in (("ledger", ledger_store.TABLES), ("leases", leases_store.TABLES))
    for name in names
}


def read_ledger(reader: Reader) -> LedgerContents:
    with reader.environment.begin(buffers=False) as transaction:
        metas = reader.table(transaction, "meta", 0, _as_it_is)
        rows = reader.table(transaction, "leases", 0, decode_ledger_lease)
        reader.table(transaction, "switches", 0, decode_switch)
        for name in ledger_store.TABLES:
            if name not in {"meta", "leases", "switches"}:
                reader.table(transaction, name, 0, _sealed)
    meta = _meta(reader, metas.get(b"meta"), ledger_store.META_VERSION, "ledger meta")
    _strangers(reader, metas, {b"meta"})
    return LedgerContents(_judge_meta(reader, meta, _LEDGER_FIELDS), _by_key_hash(reader, rows), reader.counts)


def _by_key_hash(reader: Reader, rows: dict[bytes, LedgerLease]) -> dict[bytes, LedgerLease]:
    """Of two generations of one key the later one counts."""
    found: dict[bytes, LedgerLease] = {}
    for row_key, entry in rows.items():
        shown = f"the leases record {row_key[:40].hex()}"
        if len(row_key) == KEY_HASH_BYTES:  # as an earlier version wrote it
            found[row_key] = entry
        elif len(row_key) != ROW_KEY_BYTES:
            reader.found("key", f"{shown} has a key of {len(row_key)} bytes, not {ROW_KEY_BYTES}: {RESTORE['ledger']}")
        elif not stands_under(row_key, entry):
            reader.found("key", f"{shown} is of another generation than it stands under: {SET_ASIDE['ledger', 'leases']}")
        else:
            found[key_hash_of(row_key)] = entry
    return found


def read_leases(reader: Reader) -> LeasesContents:
    with reader.environment.begin(buffers=False) as transaction:
        metas = reader.table(transaction, "meta", 0, _as_it_is)
        rows = reader.table(transaction, "leases", KEY_HASH_BYTES, decode_lease)
        tombstones = reader.table(transaction, "tombstones", RID_BYTES, decode_tombstone)
        reader.table(transaction, "switches", 0, decode_switch)
        for name in ("events", "billed"):
            reader.table(transaction, name, 0, _sealed)
    meta = _meta(reader, metas.get(b"meta"), leases_store.META_VERSION, "leases meta")
    last = _number(reader, metas.get(b"last"), _COUNTER, "last generation")
    tick = _number(reader, metas.get(b"tick"), _SECONDS, "tick")
    _strangers(reader, metas, {b"meta", b"last", b"tick"})
    return LeasesContents(
        _judge_meta(reader, meta, _LEASES_FIELDS), last, tick, rows, tombstones, reader.counts, reader.used_pages
    )  # fmt: skip


def free_pages(contents: LeasesContents, file_bytes: int) -> int:
    """Pages of the map that no table uses, as the daemon counts them."""
    return file_bytes // PAGE_BYTES - contents.used_pages


# ---- records


def _as_it_is(raw: bytes) -> bytes:
    return raw


def _sealed(raw: bytes) -> None:
    """Any record in the common envelope: its last four bytes are the checksum of the others."""
    if len(raw) < 5 or int.from_bytes(raw[-4:], "little") != crc32(raw[:-4]):
        raise ValueError("it does not match its checksum")


def _strangers(reader: Reader, metas: Mapping[bytes, bytes], known: set[bytes]) -> None:
    for key in metas.keys() - known - _UNSEALED:
        try:
            _sealed(metas[key])
        except ValueError as error:
            reader.found("record", f"the meta record {key[:40].hex()} cannot be read ({error}): {SET_ASIDE[reader.store, 'meta']}")


def _number(reader: Reader, raw: bytes | None, form: struct.Struct, what: str) -> Any:
    if raw is None:
        return None
    try:
        return form.unpack(unseal(raw, leases_store.META_VERSION, what))[0]
    except (ValueError, struct.error) as error:
        reader.found("counter", f"the {what} cannot be read ({error}): {RESTORE[reader.store]}")
    except StateRefused as error:
        reader.found("version", str(error), closed=True)
    return None


def _meta(reader: Reader, raw: bytes | None, version: int, what: str) -> dict[str, Any] | None:
    if raw is None:
        return None
    try:
        fields = json.loads(unseal(raw, version, what))
        if isinstance(fields, dict):
            return fields
        reader.found("meta", f"the meta record is not a map: {RESTORE[reader.store]}")
    except ValueError as error:
        reader.found("meta", f"the meta record cannot be read ({error}): {RESTORE[reader.store]}")
    except StateRefused as error:
        reader.found("version", str(error), closed=True)
    return None


# ---- what the meta records must say


def _hex_of(size: int) -> Callable[[object], bool]:
    form = re.compile(f"[0-9a-f]{{{2 * size}}}")
    return lambda value: isinstance(value, str) and form.fullmatch(value) is not None


def _seconds_to(most: float) -> Callable[[object], bool]:
    return lambda value: isinstance(value, int | float) and not isinstance(value, bool) and 0.0 <= value <= most


def _whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MAX_GENERATION


def _start(value: object) -> bool:
    match value:
        case [int(number), str(name)]:
            return number >= 0 and (name == "" if number == 0 else re.fullmatch("[0-9a-f]{32}", name) is not None)
    return False


_COMMON: Final[dict[str, Callable[[object], bool]]] = {
    "install_id": _hex_of(16),
    "secret": _hex_of(SECRET_BYTES),
    "incarnation": _hex_of(16),
    "boot_id": lambda value: isinstance(value, str) and value != "",
    "start": _start,
    "wait_out": _seconds_to(MAX_TTL_SECONDS),
}
_LEDGER_FIELDS: Final = _COMMON | {
    "mark": _whole,
    "clean": lambda value: isinstance(value, bool),
    "restored": lambda value: _whole(value) and value in (0, 1, 2),
    "format": lambda value: value == ledger_store.FORMAT or value in ledger_store.BROUGHT_UP,
}
_LEASES_FIELDS: Final = _COMMON | {
    "next_start": _start,
    "no_grant_before": _seconds_to(MAX_BOOT_SECONDS),
}


def _judge_meta(
    reader: Reader, fields: dict[str, Any] | None, rules: Mapping[str, Callable[[object], bool]]
) -> Mapping[str, Any] | None:
    """The meta with its starts as starts; None, with findings, when a field is not what it must be."""
    if fields is None:
        return None
    if "format" in rules and not rules["format"](fields.get("format")):
        reader.found(
            "format",
            f"the state has format {fields.get('format')!r} and this version of leased knows {ledger_store.FORMAT}: "
            "install the version that wrote it",
            closed=True,
        )
        return None
    wrong = [name for name, good in rules.items() if name not in fields or not good(fields[name])]
    strange = sorted(fields.keys() - rules.keys())
    for name in wrong:
        shown = "is missing" if name not in fields else "is not what it may be" if name == "secret" else f"is {fields[name]!r:.80}"
        reader.found("meta", f"the field {name} of the meta record {shown}: {RESTORE[reader.store]}")
    if strange:
        reader.found("meta", f"the meta record has fields nobody knows ({', '.join(strange):.80}): {RESTORE[reader.store]}")
    if wrong:
        return None
    return fields | {name: Start(*fields[name]) for name in ("start", "next_start") if name in fields}
