"""What is remembered beside the records: which lease falls next, whose scope, which request_id, what text a key had.

Rebuilt from the records at the start and changed only after the commit they belong to.  The heap is lazy: a renewal that moves a deadline
later touches nothing here; the entry popped at the old deadline is checked against its record and put back.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator
from heapq import heapify, heappop, heappush

from leased.model import Lease
from leased.state.records import Entry


class Index:
    """Every structure is keyed by key hash.  A namespace's leases are kept in the order of their generations, because a dict keeps the
    order of insertion and generations only rise."""

    def __init__(self) -> None:
        self._due: list[tuple[float, bytes]] = []
        self._due_of: dict[bytes, float] = {}  # the earliest heap entry that will look at this lease
        self._spaces: dict[str, dict[int, bytes]] = {}
        self._scopes: dict[tuple[str, str], dict[int, bytes]] = {}
        self.rids: dict[bytes, bytes] = {}  # request ids of live leases -> key hash
        self.texts: dict[bytes, str] = {}  # key texts, as far as seen since the start

    def __len__(self) -> int:
        return len(self._due_of)

    def count(self, namespace: str) -> int:
        space = self._spaces.get(namespace)
        return len(space) if space is not None else 0

    def namespaces(self) -> list[str]:
        return list(self._spaces)

    def load(self, rows: Iterable[Entry], known: dict[bytes, tuple[int, float]], texts: dict[bytes, str]) -> list[bytes]:
        """Fill an empty index from the records, in the order of their keys: two microseconds each.  Returns the keys marked unflushed.

        `known` is in the same order; where it has a key, its key and generation objects are used, not copies: 90 MB of a million leases.
        """
        spaces: dict[bytes, dict[int, bytes]] = {}
        scopes: dict[tuple[bytes, bytes], dict[int, bytes]] = {}
        unflushed: list[bytes] = []
        due, due_of, rids = self._due, self._due_of, self.rids
        names = iter(known.items())
        end: tuple[bytes | None, tuple[int, float]] = (None, (0, 0.0))
        name, (standing, _) = next(names, end)
        for key_hash, generation, deadline, namespace, scope, rid, marked in rows:
            while name is not None and name < key_hash:
                name, (standing, _) = next(names, end)
            if name is not None and name == key_hash:
                key_hash = name
                if standing == generation:
                    generation = standing
            due.append((deadline, key_hash))
            due_of[key_hash] = deadline
            space = spaces.get(namespace)
            if space is None:
                space = spaces[namespace] = {}
            space[generation] = key_hash
            if scope is not None:
                scopes.setdefault((namespace, scope), {})[generation] = key_hash
            if rid:
                rids[rid] = key_hash
            if marked:
                unflushed.append(key_hash)
        heapify(due)
        self._spaces = {namespace.decode(): _in_order(space) for namespace, space in spaces.items()}
        self._scopes = {(namespace.decode(), scope.decode()): _in_order(unit) for (namespace, scope), unit in scopes.items()}
        self.texts = {key_hash: text for key_hash, text in texts.items() if key_hash in due_of}
        return unflushed

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
        """(generation, key hash) in rising order, those above `after`."""
        table = self._spaces.get(namespace, {}) if scope is None else self._scopes.get((namespace, scope), {})
        if not after:
            yield from list(table.items())
            return
        generations = list(table)
        for generation in generations[bisect_right(generations, after) :]:
            yield generation, table[generation]

    def of_all(self, after: int) -> Iterator[tuple[int, bytes]]:
        """As of_namespace, over every namespace."""
        merged = sorted(item for space in self._spaces.values() for item in space.items() if item[0] > after)
        yield from merged


def _in_order(generations: dict[int, bytes]) -> dict[int, bytes]:
    return {generation: generations[generation] for generation in sorted(generations)}
