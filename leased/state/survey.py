"""What a start wants of a million lease records: one look at each, which proves it and takes it into columns, and how both tables compare.

Tables of a million rows are filled one after the other, from columns, in half the time that all of them together take row by row.
"""

from __future__ import annotations

import marshal
from array import array
from collections.abc import Callable, Iterable
from itertools import pairwise
from operator import eq
from struct import Struct, iter_unpack
from typing import Final, NamedTuple
from zlib import crc32

from leased.digests import KEY_HASH_BYTES, RID_BYTES
from leased.state.ledger import COPY_VERSION, GENERATION, LEASE_AT, ROW_KEY_BYTES
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
_SECONDS: Final = Struct(">d")
_PROMISE: Final = f">{KEY_HASH_BYTES}sQd"
_PLAIN_MARSHAL: Final = 2  # without references: no table of a million objects is made only to find out that none comes twice

_LAST: Final = b"\xff" * 512  # behind every key: LMDB has none as long
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
    """What the ledger's table of leases holds, by column, in the order of the keys.  The ttl of a record that cannot be read is 0.0: it promises
    nothing, and is written again or deleted like any other that is wrong.  `older`: (key, generation) of records that a later one of their key
    has made void."""

    def __init__(self) -> None:
        self.names: list[bytes] = []
        self.generations: list[int] = []
        self.ttls: array[float] = array("d")
        self.older: list[tuple[bytes, int]] = []

    @classmethod
    def of(cls, records: Iterable[tuple[bytes, bytes]]) -> Promises:
        """Raises StateRefused for a record of a future version."""
        return cls.unpacked(cls.packed(records))

    @staticmethod
    def packed(records: Iterable[tuple[bytes, bytes]]) -> bytes:
        """As Rows.packed."""
        look, number, seconds = GLANCE.unpack_from, GENERATION.pack, _SECONDS.pack
        least = LEASE_AT + TEXTS_AT + 4
        # By the first bits of the key: many small heaps are sorted in half the time of a large one.
        heaps: list[list[bytes]] = [[] for _ in range(4096)]
        for row_key, raw in records:
            if len(row_key) != ROW_KEY_BYTES:
                continue  # nothing of ours
            standing, promised = row_key[:-KEY_HASH_BYTES], 0.0
            if len(raw) >= least and crc32(raw) == RESIDUE:
                version, _, generation, ttl, _ = look(raw, LEASE_AT)
                if raw[0] != COPY_VERSION:
                    raise future("ledger lease", raw[0])
                if version != LEASE_VERSION:
                    raise future("lease", version)
                if number(generation) == standing:
                    promised = ttl
            name = row_key[-KEY_HASH_BYTES:]
            heaps[name[0] << 4 | name[1] >> 4].append(name + standing + seconds(promised))
        older: list[bytes] = []
        for at, heap in enumerate(heaps):
            heap.sort()
            names = [row[:KEY_HASH_BYTES] for row in heap]
            if any(map(eq, names, names[1:])):
                void = [before for before, after in pairwise(heap) if before.startswith(after[:KEY_HASH_BYTES])]
                older += void
                heaps[at] = sorted(set(heap).difference(void))
        return marshal.dumps((b"".join(map(b"".join, heaps)), b"".join(older)), _PLAIN_MARSHAL)

    @classmethod
    def unpacked(cls, packed: bytes) -> Promises:
        promises = cls()
        rows, older = marshal.loads(packed)
        promises.names = [name for name, _, _ in iter_unpack(_PROMISE, rows)]
        promises.generations = [generation for _, generation, _ in iter_unpack(_PROMISE, rows)]
        promises.ttls.extend(ttl for _, _, ttl in iter_unpack(_PROMISE, rows))
        promises.older = [(name, generation) for name, generation, _ in iter_unpack(_PROMISE, older)]
        return promises


def compare(rows: Rows, theirs: Promises, wait_out: float, boot: float) -> Compared:
    """`wait_out` is the one in force and `boot` is now, in seconds.  A key and a generation that both sides have are one object in `known` and
    in `rows`."""
    lacking: list[bytes] = []
    over = list(theirs.older)
    strangers: list[tuple[bytes, int]] = []
    names: list[bytes] = []
    values: list[tuple[int, float]] = []
    # A copy of a short lease goes with the clean mark, so a ttl up to `wait_out` is nothing to rely on later.  A million leases have few
    # different ttls: one object for each is enough.
    certain = {ttl: ttl if ttl > wait_out else 0.0 for ttl in set(theirs.ttls)}
    their_names, their_generations, their_ttls = [*theirs.names, _LAST], theirs.generations, theirs.ttls
    there = 0
    for here in range(0, len(rows.keys), _AT_ONCE):
        end = here + _AT_ONCE
        keys, generations = rows.keys[here:end], rows.generations[here:end]
        ttls, deadlines = rows.ttls[here:end], rows.deadlines[here:end]
        end = there + len(keys)
        if (
            keys == their_names[there:end]
            and generations == their_generations[there:end]
            and ttls.tobytes() == their_ttls[there:end].tobytes()
            and min(deadlines) > boot
        ):
            names += keys
            values += zip(generations, map(certain.__getitem__, ttls), strict=True)
            there = end
            continue
        for key, generation, ttl, deadline in zip(keys, generations, ttls, deadlines, strict=True):
            name = their_names[there]
            while name < key:
                names.append(name)
                values.append((their_generations[there], certain[their_ttls[there]]))
                strangers.append((name, their_generations[there]))
                there += 1
                name = their_names[there]
            covered = False
            if name == key:
                standing, promised = their_generations[there], their_ttls[there]
                if standing == generation:
                    standing = generation
                    covered = ttl <= promised
                names.append(key)
                values.append((standing, certain[promised]))
                if standing != generation or deadline <= boot:
                    over.append((key, standing))
                there += 1
            if not covered and ttl > wait_out and deadline > boot:
                lacking.append(key)
    names += theirs.names[there:]
    values += zip(their_generations[there:], map(certain.__getitem__, their_ttls[there:]), strict=True)
    strangers += zip(theirs.names[there:], their_generations[there:], strict=True)
    return Compared(dict(zip(names, values, strict=True)), lacking, over, strangers)
