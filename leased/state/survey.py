"""What a start wants of a million lease records: one look at each, which proves it and takes it into columns, and how both tables compare.

Tables of a million rows are filled one after the other, from columns, in half the time that all of them together take row by row.
"""

from __future__ import annotations

import marshal
from array import array
from collections.abc import Callable, Iterable
from itertools import repeat
from struct import iter_unpack
from typing import Final, NamedTuple
from zlib import crc32

from leased.digests import KEY_HASH_BYTES, RID_BYTES
from leased.state.ledger import COPY_VERSION, GENERATION, LEASE_AT, ROW_KEY, ROW_KEY_BYTES
from leased.state.records import (
    GLANCE,
    HAS_RID,
    HAS_SCOPE,
    LEASE_VERSION,
    LOOK,
    RESIDUE,
    RID_AT,
    TEXTS_AT,
    UNFLUSHED,
    future,
)

_RARE: Final = HAS_SCOPE | HAS_RID | UNFLUSHED
_PLAIN_MARSHAL: Final = 2  # without references: no table of a million objects is made only to find out that none comes twice

_AT_ONCE: Final = 128  # rows; a list is cut and compared in a fraction of what its elements cost one by one


class Rows:
    """The records of `leases`, by column.

    `keys`, `generations`, `ttls`, `deadlines`: of every sound record, in the order of the keys.
    `spaces`: (row, namespace) wherever that is another than in the row before.
    `scopes`: (row, namespace, scope), `rids`: (request id, key), and `unflushed`: keys, of the few records that have them.
    `damaged`: keys of the records that cannot be read.
    `strange`: is there a key that is none of ours, by its length?
    """

    def __init__(self) -> None:
        self.keys: list[bytes] = []
        self.generations: list[int] = []
        self.ttls: array[float] = array("d")
        self.deadlines: list[float] = []
        self.spaces: list[tuple[int, bytes]] = []
        self.scopes: list[tuple[int, bytes, bytes]] = []
        self.rids: list[tuple[bytes, bytes]] = []
        self.unflushed: list[bytes] = []
        self.damaged: list[bytes] = []
        self.strange = False

    def read(self, records: Iterable[tuple[bytes, bytes]]) -> None:
        """Take in (key, record), in the order of the keys.  Raises StateRefused for a record of a future version."""
        self._read(records, self.keys.append, self.generations.append, self.deadlines.append)

    def _read(
        self,
        records: Iterable[tuple[bytes, bytes]],
        add_key: Callable[[bytes], None],
        add_generation: Callable[[int], None],
        add_deadline: Callable[[float], None],
    ) -> None:
        unpack, least = LOOK.unpack_from, TEXTS_AT + 4
        add_ttl = self.ttls.append
        row = 0
        latest: bytes | None = None
        for key, raw in records:
            size = len(raw)
            if size < least or crc32(raw) != RESIDUE:
                self.damaged.append(key)
                continue
            version, flags, generation, ttl, deadline, n_space, n_label, n_unit = unpack(raw)
            if version != LEASE_VERSION:
                raise future("lease", version)
            label_at = TEXTS_AT + n_space
            if label_at + n_label + n_unit + 4 != size:
                self.damaged.append(key)
                continue
            namespace = raw[TEXTS_AT:label_at]
            if namespace != latest:
                latest = namespace
                self.spaces.append((row, namespace))
            if flags & _RARE:
                if flags & HAS_SCOPE:
                    self.scopes.append((row, namespace, raw[label_at + n_label : size - 4]))
                if flags & HAS_RID:
                    self.rids.append((raw[RID_AT : RID_AT + RID_BYTES], key))
                if flags & UNFLUSHED:
                    self.unflushed.append(key)
            if len(key) != KEY_HASH_BYTES:
                self.strange = True
            add_key(key)
            add_generation(generation)
            add_ttl(ttl)
            add_deadline(deadline)
            row += 1

    @classmethod
    def packed(cls, records: Iterable[tuple[bytes, bytes]]) -> bytes:
        """The columns of these records, for another process of this program.  Raises StateRefused, and ValueError for keys that are none of
        ours."""
        rows = cls()
        keys, generations, deadlines = bytearray(), array("Q"), array("d")
        rows._read(records, keys.extend, generations.append, deadlines.append)
        if rows.strange:
            raise ValueError("there are keys of another length")
        few = rows.spaces, rows.scopes, rows.rids, rows.unflushed, rows.damaged
        numbers = generations.tobytes(), rows.ttls.tobytes(), deadlines.tobytes()
        return marshal.dumps((bytes(keys), *numbers, *few), _PLAIN_MARSHAL)

    @classmethod
    def unpacked(cls, packed: bytes) -> Rows:
        rows = cls()
        keys, generations, ttls, deadlines, *few = marshal.loads(packed)
        rows.keys = [key for (key,) in iter_unpack(f"{KEY_HASH_BYTES}s", keys)]
        rows.generations, rows.deadlines = array("Q", generations).tolist(), array("d", deadlines).tolist()
        rows.ttls.frombytes(ttls)
        rows.spaces, rows.scopes, rows.rids, rows.unflushed, rows.damaged = few
        return rows

    def share(self, known: dict[bytes, tuple[int, float]]) -> None:
        """Use the keys and generations of `known` where they are the same: of a million leases two objects for each would be 90 MB."""
        names = dict(zip(known, known, strict=True))
        keys = self.keys
        for at, key in enumerate(keys):
            name = names.get(key)
            if name is not None:
                keys[at] = name
                if known[name][0] == self.generations[at]:
                    self.generations[at] = known[name][0]


class Compared(NamedTuple):
    """`known`: what the ledger holds, (generation, ttl) by key, with a ttl of 0.0 where that is nothing to rely on.
    `lacking`: keys of live leases above `wait_out` that the ledger has not, or of another generation, or with a lower ttl.
    `over`: (key, generation) of what it should not have: leases that have lapsed or are of another generation here.
    `strangers`: (key, generation) of keys that have no sound record here."""

    known: dict[bytes, tuple[int, float]]
    lacking: list[bytes]
    over: list[tuple[bytes, int]]
    strangers: list[tuple[bytes, int]]


class Promises:
    """What the ledger's table of leases holds, by column, in the order of generations.  The ttl of a record that cannot be read is 0.0: it
    promises nothing, and is written again or deleted like any other that is wrong."""

    def __init__(self) -> None:
        self.names: list[bytes] = []
        self.generations: list[int] = []
        self.ttls: array[float] = array("d")

    @classmethod
    def of(cls, records: Iterable[tuple[bytes, bytes]]) -> Promises:
        """Raises StateRefused for a record of a future version."""
        return cls.unpacked(cls.packed(records))

    @staticmethod
    def packed(records: Iterable[tuple[bytes, bytes]]) -> bytes:
        """As Rows.packed."""
        look, number = GLANCE.unpack_from, GENERATION.pack
        least = LEASE_AT + TEXTS_AT + 4
        row_keys, ttls = bytearray(), array("d")
        for row_key, raw in records:
            if len(row_key) != ROW_KEY_BYTES:
                continue  # nothing of ours
            promised = 0.0
            if len(raw) >= least and crc32(raw) == RESIDUE:
                version, _, generation, ttl, _ = look(raw, LEASE_AT)
                if raw[0] != COPY_VERSION:
                    raise future("ledger lease", raw[0])
                if version != LEASE_VERSION:
                    raise future("lease", version)
                if row_key.startswith(number(generation)):
                    promised = ttl
            row_keys += row_key
            ttls.append(promised)
        return marshal.dumps((bytes(row_keys), ttls.tobytes()), _PLAIN_MARSHAL)

    @classmethod
    def unpacked(cls, packed: bytes) -> Promises:
        promises = cls()
        row_keys, ttls = marshal.loads(packed)
        promises.names = [name for _, name in iter_unpack(ROW_KEY, row_keys)]
        promises.generations = [generation for generation, _ in iter_unpack(ROW_KEY, row_keys)]
        promises.ttls.frombytes(ttls)
        return promises


def compare(rows: Rows, theirs: Promises, wait_out: float, boot: float) -> Compared:
    """`wait_out` is the one in force and `boot` is now, in seconds.  Of two generations of a key the later one counts, and the other is `over`.
    A key and a generation that both sides have are one object in `known` and in `rows`."""
    generations, ttls = theirs.generations, theirs.ttls
    # A copy of a short lease goes with the clean mark, so a ttl up to `wait_out` is nothing to rely on later.  A million leases have few
    # different ttls: one object for each is enough.
    certain = {ttl: ttl if ttl > wait_out else 0.0 for ttl in set(ttls)}
    place_of = dict(zip(theirs.names, range(len(theirs.names)), strict=True))
    found = Compared({}, [], [], [])
    if len(place_of) < len(theirs.names):
        found.over.extend((name, generations[at]) for at, name in enumerate(theirs.names) if place_of[name] != at)
    for here in range(0, len(rows.keys), _AT_ONCE):
        end = here + _AT_ONCE
        keys, ours, promised = rows.keys[here:end], rows.generations[here:end], rows.ttls[here:end]
        deadlines = rows.deadlines[here:end]
        places = list(map(place_of.pop, keys, repeat(-1)))
        if (
            -1 not in places
            and list(map(generations.__getitem__, places)) == ours
            and array("d", map(ttls.__getitem__, places)) == promised
            and min(deadlines) > boot
        ):
            found.known.update(zip(keys, zip(ours, map(certain.__getitem__, promised), strict=True), strict=True))
            continue
        for key, generation, ttl, deadline, place in zip(keys, ours, promised, deadlines, places, strict=True):
            covered = False
            if place >= 0:
                standing = generations[place]
                if standing == generation:
                    standing = generation
                    covered = ttl <= ttls[place]
                found.known[key] = (standing, certain[ttls[place]])
                if standing != generation or deadline <= boot:
                    found.over.append((key, standing))
            if not covered and ttl > wait_out and deadline > boot:
                found.lacking.append(key)
    for name, place in place_of.items():
        found.known[name] = (generations[place], certain[ttls[place]])
        found.strangers.append((name, generations[place]))
    return found
