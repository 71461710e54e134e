"""The store the work is written to: SQLite, and the rule that makes leases safe.

A lease tells a process that it may begin.  It cannot hold back a process that was stopped for a minute between its last look at the
lease and its write: only the store can.  So the store keeps, for each file, the largest generation it has seen, and looks at it in the
same transaction as the write.  That is the whole trick, and any database that has transactions can do it.
"""

from __future__ import annotations

import contextlib
import sqlite3
from pathlib import Path

TABLES = """
CREATE TABLE IF NOT EXISTS guard (name TEXT PRIMARY KEY, generation INTEGER NOT NULL);
CREATE TABLE IF NOT EXISTS results (name TEXT, generation INTEGER, worker TEXT, result TEXT);
"""  # results has no key on purpose: a file that is done twice has two rows, and the demo finds them


class Stale(Exception):
    """Somebody with a larger generation has begun since: this write must not be."""


class Sink:
    def __init__(self, path: Path) -> None:
        self._path = path
        self._database = sqlite3.connect(path, timeout=30, isolation_level=None)
        self._database.executescript(TABLES)

    def begin(self, name: str, generation: int) -> bool:
        """From now on nothing below `generation` is written for this file.  False if the file is done already.  Raises Stale."""
        with _Transaction(self._database):
            self._guard(name, generation)
            return self._database.execute("SELECT 1 FROM results WHERE name = ?", (name,)).fetchone() is None

    def write(self, name: str, generation: int, worker: str, result: str) -> None:
        """The result, unless a larger generation has begun.  Raises Stale."""
        with _Transaction(self._database):
            self._guard(name, generation)
            self._database.execute("INSERT INTO results VALUES (?, ?, ?, ?)", (name, generation, worker, result))

    def _guard(self, name: str, generation: int) -> None:
        raised = self._database.execute(
            "INSERT INTO guard VALUES (?1, ?2) ON CONFLICT (name) DO UPDATE SET generation = ?2 WHERE ?2 >= generation",
            (name, generation),
        )
        if raised.rowcount != 1:
            raise Stale(f"a larger generation than {generation} has begun {name}")

    def done(self) -> set[str]:
        return {name for (name,) in self._database.execute("SELECT name FROM results")}

    def unlocked(self) -> bool:
        """Can a transaction begin within a second?"""
        with contextlib.closing(sqlite3.connect(self._path, timeout=1, isolation_level=None)) as other:
            try:
                other.execute("BEGIN IMMEDIATE")
                other.execute("ROLLBACK")
            except sqlite3.OperationalError:
                return False
        return True

    def rows(self) -> list[tuple[str, int, str, str]]:
        return list(self._database.execute("SELECT name, generation, worker, result FROM results ORDER BY generation"))


class _Transaction:
    """BEGIN IMMEDIATE: the look at the generation and the write behind it are one."""

    def __init__(self, database: sqlite3.Connection) -> None:
        self._database = database

    def __enter__(self) -> None:
        self._database.execute("BEGIN IMMEDIATE")

    def __exit__(self, kind: object, *_: object) -> None:
        self._database.execute("COMMIT" if kind is None else "ROLLBACK")
