"""What is remembered beside the records: which lease falls next, whose scope, which request_id, what text a key had.

Rebuilt from the records at the start and changed only after the commit they belong to.  The heap is lazy: a renewal that moves a deadline
later touches nothing here; the entry popped at the old deadline is checked against its record and put back.
"""

from __future__ import annotations

from collections.abc import Iterator
from heapq import heapify, heappop, heappush
from itertools import pairwise, takewhile

from leased.model import Lease
from leased.rising import Rising
from leased.state.survey import Rows


class Index:
    """Every structure is keyed by key hash.  The leases of a namespace or scope are kept in the order of their generations, because a dict
    keeps the order of insertion and generations only rise.  Only those a namespace was loaded with, which come first, are in any order:
    to put a million of them in order would take seconds, so that is done as far as somebody looks at them."""

    def __init__(self) -> None:
        self._due: list[tuple[float, bytes]] = []
        self._due_of: dict[bytes, float] = {}  # the earliest heap entry that will look at this lease
        self._spaces: dict[str, dict[int, bytes]] = {}
        self._loaded: dict[str, Rising] = {}  # by namespace; of leases that have ended since, too
        self._scopes: dict[tuple[str, str], dict[int, bytes]] = {}
        self.unflushed: list[bytes] = []  # keys of the records that were marked so when they were loaded
        self.rids: dict[bytes, bytes] = {}  # request ids of live leases -> key hash
        self.texts: dict[bytes, str] = {}  # key texts, as far as seen since the start

    def __len__(self) -> int:
        return len(self._due_of)

    def __contains__(self, key_hash: bytes) -> bool:
        return key_hash in self._due_of

    def count(self, namespace: str) -> int:
        space = self._spaces.get(namespace)
        return len(space) if space is not None else 0

    def namespaces(self) -> list[str]:
        return list(self._spaces)

    def load(self, rows: Rows) -> None:
        """Fill an empty index from the records.  What is large in `rows` is gone afterwards."""
        keys, generations, deadlines = rows.keys, rows.generations, rows.deadlines
        self._due = list(zip(deadlines, keys, strict=True))
        heapify(self._due)
        self._due_of = dict(zip(keys, deadlines, strict=True))
        spaces: dict[bytes, dict[int, bytes]] = {}
        for (at, namespace), (end, _) in pairwise([*rows.spaces, (len(keys), b"")]):
            space = spaces.setdefault(namespace, {})
            if end == at + 1:
                space[generations[at]] = keys[at]
            else:
                space.update(zip(generations[at:end], keys[at:end], strict=True))
        for namespace, space in spaces.items():
            self._spaces[namespace.decode()] = space
            self._loaded[namespace.decode()] = Rising(list(space))
        scopes: dict[tuple[bytes, bytes], dict[int, bytes]] = {}
        for at, namespace, scope in rows.scopes:
            scopes.setdefault((namespace, scope), {})[generations[at]] = keys[at]
        self._scopes = {(namespace.decode(), scope.decode()): _in_order(unit) for (namespace, scope), unit in scopes.items()}
        self.rids = dict(rows.rids)
        self.unflushed = rows.unflushed
        rows.keys, rows.generations, rows.deadlines = [], [], []

    # ---- changes

    def granted(self, key_hash: bytes, lease: Lease, text: str | None) -> None:
        heappush(self._due, (lease.deadline, key_hash))
        self._due_of[key_hash] = lease.deadline
        space = self._spaces.get(lease.namespace)
        if space is None:
            space = self._spaces[lease.namespace] = {}
        space[lease.generation] = key_hash
        if lease.scope is not None:
            self._scopes.setdefault((lease.namespace, lease.scope), {})[lease.generation] = key_hash
        if lease.rid:
            self.rids[lease.rid] = key_hash
        if text is not None:
            self.texts[key_hash] = text

    def moved(self, key_hash: bytes, deadline: float) -> None:
        """A renewal set another deadline.  Only a sooner one needs an entry of its own."""
        if deadline < self._due_of[key_hash]:
            heappush(self._due, (deadline, key_hash))
            self._due_of[key_hash] = deadline

    def seen(self, key_hash: bytes, text: str) -> None:
        """Somebody wrote the key of a lease from before the start."""
        if key_hash in self._due_of:
            self.texts[key_hash] = text

    def ended(self, key_hash: bytes, lease: Lease) -> None:
        del self._due_of[key_hash]
        space = self._spaces[lease.namespace]
        del space[lease.generation]
        if not space:
            del self._spaces[lease.namespace]
            self._loaded.pop(lease.namespace, None)
        if lease.scope is not None:
            scope = self._scopes[lease.namespace, lease.scope]
            del scope[lease.generation]
            if not scope:
                del self._scopes[lease.namespace, lease.scope]
        if lease.rid and self.rids.get(lease.rid) == key_hash:  # else it is of a later attempt with another key
            del self.rids[lease.rid]
        self.texts.pop(key_hash, None)
        self._compact()

    def forget(self, key_hash: bytes) -> None:
        """A lease whose record could not be read any more: taken out wherever it stands.  Slow, and rare."""
        if self._due_of.pop(key_hash, None) is None:
            return
        for tables in (self._spaces, self._scopes):
            for name in list(tables):
                left = {generation: each for generation, each in tables[name].items() if each != key_hash}  # type: ignore[index]
                if left:
                    tables[name] = left  # type: ignore[index]
                else:
                    del tables[name]  # type: ignore[arg-type]
        self.rids = {rid: each for rid, each in self.rids.items() if each != key_hash}
        self.texts.pop(key_hash, None)

    def _compact(self) -> None:
        """Start the heap over once most entries are of leases released or of deadlines moved since."""
        if len(self._due) > 64 and len(self._due) > 4 * len(self._due_of):
            self._due = sorted((deadline, key_hash) for key_hash, deadline in self._due_of.items())

    # ---- questions

    def next_due(self) -> float | None:
        """When to look next; it may be too early, never too late."""
        due = self._due
        while due and self._due_of.get(due[0][1]) != due[0][0]:
            heappop(due)
        return due[0][0] if due else None

    def pop_due(self, now: float, limit: int) -> list[bytes]:
        """Up to `limit` key hashes whose entry is at or before `now`.  Each must be answered by `ended`, `moved`-like `again`, or be lost."""
        found: list[bytes] = []
        due, due_of = self._due, self._due_of
        while due and due[0][0] <= now and len(found) < limit:
            deadline, key_hash = heappop(due)
            if due_of.get(key_hash) == deadline:
                found.append(key_hash)
        return found

    def again(self, key_hash: bytes, deadline: float) -> None:
        """Look at this lease again at `deadline` (it was renewed, or the sweep failed)."""
        if key_hash in self._due_of:
            heappush(self._due, (deadline, key_hash))
            self._due_of[key_hash] = deadline
            self._compact()

    def of_scope(self, namespace: str, scope: str) -> list[bytes]:
        return list(self._scopes.get((namespace, scope), {}).values())

    def of_namespace(self, namespace: str, after: int, scope: str | None = None) -> Iterator[tuple[int, bytes]]:
        """(generation, key hash) in rising order, those above `after`.  Leases may end meanwhile."""
        table = self._spaces.get(namespace, {}) if scope is None else self._scopes.get((namespace, scope), {})
        loaded = self._loaded.get(namespace) if scope is None else None
        if loaded is not None:
            if len(loaded) > 2 * len(table):  # most have ended, and each page would look for them
                loaded = self._loaded[namespace] = Rising([each for each in loaded.after(0) if each in table])
            for generation in loaded.after(after):
                after = generation
                key_hash = table.get(generation)
                if key_hash is not None:
                    yield generation, key_hash
        later = list(takewhile(after.__lt__, reversed(table)))
        for generation in reversed(later):
            key_hash = table.get(generation)
            if key_hash is not None:
                yield generation, key_hash

    def of_all(self, after: int) -> Iterator[tuple[int, bytes]]:
        """As of_namespace, over every namespace."""
        merged = sorted(item for space in self._spaces.values() for item in space.items() if item[0] > after)
        yield from merged


def _in_order(generations: dict[int, bytes]) -> dict[int, bytes]:
    return {generation: generations[generation] for generation in sorted(generations)}
