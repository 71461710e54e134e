"""The configuration: one frozen value made from TOML text.

`parse` is a function of its arguments alone; `load` reads the file for it.  Nothing is clamped and nothing is guessed: an unknown
key, a wrong type and a value out of bounds are errors, and all errors of a file are reported at once, one per line, each with the
key, what was found, the bound and what to do.  Files that hold secrets are named here and never read here, and what was written in
their place is never repeated in an error.

Which value counts: the command line, then $LEASED_SOCKET (for the socket), the file, the directories systemd gives, the default.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from dataclasses import MISSING
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, TypedDict, Unpack

from leased import config_values as values
from leased.config_keys import KEYS, TABLES, X402, Billing, Config, Http, Limits, Log, Namespaces, Upstream
from leased.config_values import Address, Wrong
from leased.errors import ConfigError
from leased.paths import SOCKET_VARIABLE, default_paths

__all__ = [
    "X402",
    "Address",
    "Billing",
    "Config",
    "Http",
    "Limits",
    "Log",
    "Namespaces",
    "Options",
    "Upstream",
    "describe",
    "load",
    "parse",
    "secret_file",
]

OVERFLOW_ID: Final = 65534  # what unmapped users and groups of a user namespace show: a rule for it would be one for all of them
MAX_ID: Final = 2**32 - 2  # 2^32 - 1 is (uid_t) -1: nobody
NO_FILE: Final = "(no configuration file)"


class Options(TypedDict, total=False):
    """What the command line may say instead of the file; None: it does not."""

    socket: str | None
    state_dir: str | None
    runtime_dir: str | None
    http: str | None


_OPTIONS: Final = {"socket": "--socket", "state_dir": "--state-dir", "runtime_dir": "--runtime-dir", "http": "--http"}

_AT_MOST: Final = (  # the first can never exceed the second: unless given it follows it down, given it is an error
    ("limits.max_connections_per_uid", "limits.max_connections"),
    ("limits.max_leases_per_namespace", "max_leases"),
    ("limits.max_waiters_per_key", "limits.max_waiters_per_namespace"),
    ("x402.max_per_batch", "x402.max_per_day"),
)


def load(path: Path | str | None, *, root: bool, environ: Mapping[str, str], **options: Unpack[Options]) -> Config:
    """The configuration from the file at `path`, or from the default one if it exists.  Raises ConfigError."""
    chosen = path if path is not None else default_paths(root, environ).config_file
    if chosen is None:
        return parse("", source=NO_FILE, root=root, environ=environ, **options)
    try:
        text = Path(chosen).read_bytes().decode()
    except FileNotFoundError:
        if path is not None:
            raise ConfigError(f"{chosen}: there is no such file: correct --config, or leave it out for the defaults") from None
        return parse("", source=NO_FILE, root=root, environ=environ, **options)
    except UnicodeDecodeError as error:
        raise ConfigError(f"{chosen}: byte {error.start + 1} is not UTF-8: save the file as UTF-8 text") from None
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        raise ConfigError(f"{chosen}: cannot be read: {getattr(error, 'strerror', None) or error}") from None
    return parse(text, source=str(chosen), root=root, environ=environ, **options)


def parse(text: str, *, source: str, root: bool, environ: Mapping[str, str], **options: Unpack[Options]) -> Config:
    """The configuration that TOML `text` makes, with defaults for the caller (`root` or not) and its environment.

    `source` names the text in messages.  Raises ConfigError with every error of the text, one per line.
    """
    reading = _Reading(source)
    reading.take_document(_toml(text, source))
    if environ.get(SOCKET_VARIABLE):
        reading.take("socket", environ[SOCKET_VARIABLE], f"${SOCKET_VARIABLE}")
    for name, option in _OPTIONS.items():
        if (value := options.get(name)) is not None:
            reading.take("http.listen" if name == "http" else name, value, option)
    for name, default in default_paths(root, environ)._asdict().items():
        if name in KEYS and name not in reading.raw:
            if default is None:
                missing = "$HOME" if name == "state_dir" else "$XDG_RUNTIME_DIR"
                reading.fault(name, f"is not set, and {missing} is not either: give {_OPTIONS[name]} or set the key {name}")
            else:
                reading.take(name, default, f"{source}: the default of {name}")
    reading.read()
    reading.cross_check()
    if reading.faults:
        raise ConfigError("\n".join(reading.faults))
    return reading.config()


def secret_file(key: str, named: Path, environ: Mapping[str, str]) -> tuple[Path, bool]:
    """Where the file is that `key` names, and whether systemd guards it: "credential:NAME" is NAME in the directory that systemd made for
    this service alone.  Raises ConfigError where it made none."""
    name = str(named).removeprefix(values.CREDENTIAL)
    if name == str(named):
        return named, False
    directory = environ.get("CREDENTIALS_DIRECTORY", "")
    if not directory.startswith("/"):
        raise ConfigError(
            f'{key}: "{named}" is only there for a service whose unit has LoadCredential={name}:PATH: add that, or name a file by its path'
        )
    return Path(directory, name), True


def describe(config: Config) -> list[tuple[str, str]]:
    """Every key with its value as the file would say it, defaults included; "(none)" for what is not set."""
    rows = []
    for name, each in KEYS.items():
        table, _, key = name.rpartition(".")
        rows.append((name, each.metadata["show"](getattr(getattr(config, table) if table else config, key))))
        if name == "namespaces.per_uid":
            for kind, entries in (("uid", config.namespaces.uids), ("gid", config.namespaces.gids)):
                rows += [(f'namespaces."{kind}:{number}"', values.shown(to)) for number, to in sorted(entries.items())]
    return rows


def _toml(text: str, source: str) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    except RecursionError:
        raise ConfigError(f"{source}: is nested too deeply to be a configuration") from None
    except ValueError as error:
        match = re.fullmatch(r"(.*) \(at (?:line (\d+), column (\d+)|end of document)\)", str(error), re.DOTALL)
        line, column = (match[2], match[3]) if match and match[2] else (text.count("\n") + 1, len(text) - text.rfind("\n"))
        said = match[1] if match else "not a TOML value"  # what a ValueError of int() says repeats the digits
        raise ConfigError(f"{source}: line {line}, column {column}: {said}: this is not TOML (strings need quotes)") from None


class _Reading:
    """One file on its way to a Config: what was given, from where, what came of it, and all that is wrong."""

    def __init__(self, source: str) -> None:
        self.source = source
        self.faults: list[str] = []
        self.faulty: set[str] = set()
        self.raw: dict[str, object] = {}
        self.origin: dict[str, str] = {}
        self.good: dict[str, Any] = {}
        self.mapped: dict[str, dict[int, str]] = {"uid": {}, "gid": {}}

    def fault(self, name: str, sentence: str) -> None:
        self.faulty.add(name)
        self.faults.append(f"{self.origin.get(name, f'{self.source}: {name}')} {sentence}")

    def take(self, name: str, value: object, origin: str) -> None:
        self.raw[name] = value
        self.origin[name] = origin

    def take_document(self, document: dict[str, Any]) -> None:
        for name, value in document.items():
            if name not in TABLES:
                self._take_key(name, value, known=name in KEYS and "." not in name)
            elif not isinstance(value, dict):
                self.fault(name, f"must be a table: write [{name}] on a line of its own, and its keys below")
            else:
                for key, entry in value.items():
                    self._take_key(f"{name}.{key}", entry, known=f"{name}.{key}" in KEYS)

    def _take_key(self, name: str, value: object, *, known: bool) -> None:
        if known:
            self.raw[name] = value
        elif re.match(r"namespaces\.[ug]id:", name):
            self._map(name.removeprefix("namespaces."), value)
        else:
            self.fault(_named(name), f"is not a key of the configuration: {_suggestion(name)}")

    def _map(self, entry: str, value: object) -> None:
        kind, _, number = entry.partition(":")
        name = f"namespaces.{values.shown(entry)}"
        if not re.fullmatch(r"0|[1-9][0-9]{0,9}", number) or int(number) > MAX_ID:
            self.fault(name, f"must be named by a {kind} number from 0 to {MAX_ID}, not by a name, without leading zeros")
        elif int(number) == OVERFLOW_ID:
            self.fault(name, f"maps the overflow {kind}, which all unmapped users share: give those callers an agent key instead")
        else:
            try:
                self.mapped[kind][int(number)] = values.NAMESPACE(value)
            except Wrong as wrong:
                self.fault(name, f"= {values.found(value, secret=False)} {wrong}")

    def read(self) -> None:
        for name, value in self.raw.items():
            metadata = KEYS[name].metadata
            try:
                self.good[name] = metadata["read"](value)
            except Wrong as wrong:
                self.fault(name, f"= {values.found(value, secret=metadata['secret'])} {wrong}")

    def cross_check(self) -> None:
        """What no single value can tell.  Whatever is faulty already is left out."""
        good: dict[str, Any] = {name: None if each.default is MISSING else each.default for name, each in KEYS.items()} | self.good
        for name, bound in _AT_MOST:
            show = KEYS[bound].metadata["show"]
            if bound in self.faulty:
                continue
            if name not in self.good:
                self.good[name] = good[bound] if bound == "max_leases" else min(good[name], good[bound])
            elif good[name] > good[bound]:
                self.fault(name, f"= {show(good[name])} can never be reached: it must be at most {bound} ({show(good[bound])})")
        if good["socket_group"] is not None:
            if "socket_mode" not in self.raw:
                self.good["socket_mode"] = 0o660
            elif not good["socket_mode"] & 0o020 and "socket_mode" in self.good:
                self.fault(
                    "socket_mode", f'= {values.shown_mode(good["socket_mode"])} keeps socket_group out: it must be as in "0660"'
                )
        if good["state_dir"] is not None and good["state_dir"] == good["runtime_dir"]:
            self.fault(
                "runtime_dir", f"= {values.shown(good['runtime_dir'])} must differ from state_dir: one is volatile, one is kept"
            )
        if good["x402.wallet_key_file"] is not None:
            for name in ("x402.networks", "x402.assets", "x402.payees", "x402.max_per_batch", "x402.max_per_day", "upstream.url"):
                if not good[name] and name not in self.faulty:
                    self.fault(name, "is missing or nothing: a wallet pays only where everything it may do is named")

    def config(self) -> Config:
        tables = {
            table: made(**{key.removeprefix(f"{table}."): value for key, value in self.good.items() if key.startswith(f"{table}.")})
            for table, made in TABLES.items()
            if made is not Namespaces
        }
        mapped = (MappingProxyType(self.mapped[kind]) for kind in ("uid", "gid"))
        return Config(
            source=self.source,
            namespaces=Namespaces(self.good.get("namespaces.per_uid", False), *mapped),
            **tables,
            **{name: value for name, value in self.good.items() if "." not in name},
        )


def _named(name: str) -> str:
    """A dotted name as a message can bear it."""
    return name if re.fullmatch(r"[A-Za-z0-9_.-]{1,80}", name) else values.found(name, secret=False)


def _suggestion(name: str) -> str:
    from difflib import get_close_matches

    table, _, key = name.rpartition(".")
    for known in KEYS:
        home, _, last = known.rpartition(".")
        if last == key and home != table:
            return f"{key} belongs in [{home}]" if home else f"{key} belongs above the first [table]"
    if table == "namespaces":
        return 'did you mean per_uid, "uid:1000" or "gid:1000"?'
    close = get_close_matches(name, [*KEYS, *TABLES], 1, 0.75)
    siblings = [known.rpartition(".")[2] for known in KEYS if known.rpartition(".")[0] == table]
    return f"did you mean {close[0]}?" if close else "remove it; the keys here are " + ", ".join(siblings)
