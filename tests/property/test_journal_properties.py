"""The journal against a naive disk: whatever a power cut now could bring back, the account says so."""

from __future__ import annotations

from collections.abc import Callable

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from leased.errors import StoreError
from leased.model import Lease
from leased.state.journal import Journal
from leased.state.ledger import LedgerLease, Op

KEYS = [b"a", b"b"]
Row = tuple[int, float]
Image = tuple[tuple[bytes, Row], ...]
"""What a disk may hold: (generation, ttl) by key, sorted."""


def applied(image: Image, ops: list[Op]) -> Image:
    """The ledger's rules, stated once more: a put never lowers its generation's ttl, a delete takes only its generation."""
    rows = dict(image)
    for op in ops:
        key = op[1]
        if op[0] == "put":
            lease = op[2].lease
            before = rows.get(key)
            if before is None or before[0] != lease.generation or before[1] < lease.ttl:
                rows[key] = (lease.generation, lease.ttl)
        elif op[0] == "del" and key in rows and rows[key][0] == op[2]:
            del rows[key]
    return tuple(sorted(rows.items()))


class Desk(RuleBasedStateMachine):
    """`images` are all the disks that are consistent with what has happened: a failed flush leaves the old or the new one, one under
    way may be there already.  The daemon's ledger reads one of them; a success settles all on the one that was read.

    Leases come and go as in the lessor: a put is of the living generation of its key, an end is queued once and for all."""

    @initialize(known=st.dictionaries(st.sampled_from(KEYS), st.tuples(st.integers(1, 3), st.integers(1, 5).map(float))))
    def start(self, known: dict[bytes, Row]) -> None:
        self.images: set[Image] = {tuple(sorted(known.items()))}
        self.read: Image = tuple(sorted(known.items()))
        self.flight: tuple[list[Op], Callable[[Exception | None], None]] | None = None
        self.now = 0.0
        self.generation = 10
        self.living: dict[bytes, int] = {key: row[0] for key, row in known.items()}
        self.succeeded: list[int] = []
        self.failed: list[int] = []
        self.deleted: dict[tuple[bytes, int], int] = {}  # (key, generation) -> the flush that must have deleted it
        self.journal = Journal(self, flushed=self.succeeded.append, failed=lambda number, error: self.failed.append(number))
        self.journal.settle_with(dict(known))

    def write(self, ops: list[Op], done: Callable[[Exception | None], None]) -> None:
        assert self.flight is None
        self.flight = (list(ops), done)

    # ---- the lessor's side

    @rule(key=st.sampled_from(KEYS), ttl=st.integers(1, 5), anew=st.booleans())
    def put(self, key: bytes, ttl: int, anew: bool) -> None:
        """A grant (the former lease has ended) or a renewal."""
        if anew or key not in self.living:
            if key in self.living:
                self.end(key)
            self.generation += 1
            self.living[key] = self.generation
        lease = Lease("local", "me", None, self.living[key], b"p" * 16, float(ttl), 0.0)
        self.journal.put(key, LedgerLease(lease))

    @rule(key=st.sampled_from(KEYS))
    def end(self, key: bytes) -> None:
        number = self.journal.end(key)
        if number is None:
            assert not any(key in dict(image) for image in self.possible()), "nothing to wait for, though it may come back"
        self.living.pop(key, None)

    @rule()
    def kick(self) -> None:
        self.journal.kick(self.now)

    @rule(seconds=st.sampled_from([0.05, 1.0, 5.0]))
    def tick(self, seconds: float) -> None:
        self.now += seconds
        self.journal.tick(self.now)

    # ---- the disk's side

    @precondition(lambda self: self.flight is not None)
    @rule()
    def succeeds(self) -> None:
        assert self.flight is not None
        (ops, done), self.flight = self.flight, None
        self.read = applied(self.read, ops)
        self.images = {self.read}
        done(None)
        assert not self.journal.unsettled

    @precondition(lambda self: self.flight is not None)
    @rule(read_new=st.booleans(), disk_is_known=st.none() | st.booleans())
    def fails(self, read_new: bool, disk_is_known: bool | None) -> None:
        assert self.flight is not None
        (ops, done), self.flight = self.flight, None
        new = applied(self.read, ops)
        if disk_is_known is None:
            self.images = self.images | {new}
        elif disk_is_known:
            self.images = {new}
        self.read = new if read_new else self.read
        done(StoreError("broken"))
        assert self.journal.unsettled

    # ---- what must always hold

    def possible(self) -> set[Image]:
        if self.flight is None:
            return self.images
        return self.images | {applied(self.read, self.flight[0])}

    @invariant()
    def whatever_may_come_back_is_said_to(self) -> None:
        for image in self.possible():
            for key, _ in image:
                assert self.journal.may_hold(key), f"{key!r} could come back"
                if not self.journal.unsettled:
                    assert self.journal.knows(key)

    @invariant()
    def what_is_certain_is_on_every_disk_there_may_be(self) -> None:
        for key in KEYS:
            generation = self.living.get(key)
            if generation is None:
                continue
            promised = self.journal.ttl_of(key, generation)
            for image in self.possible():
                if promised:
                    row = dict(image).get(key)
                    assert row is not None
                    assert row[0] == generation
                    assert row[1] >= promised

    @invariant()
    def a_dead_record_has_a_delete_on_its_way(self) -> None:
        """Nothing that was ended is left behind once all that is queued has succeeded."""
        image = self.read
        if self.flight is not None:
            image = applied(image, self.flight[0])
        image = applied(image, self.journal._queue)
        for key, row in image:
            assert self.living.get(key) == row[0], f"{key!r} of generation {row[0]} would stay for ever"

    @invariant()
    def flushes_are_numbered_in_order_and_reported_once(self) -> None:
        reported = sorted(self.succeeded + self.failed)
        assert reported == list(range(1, len(reported) + 1))
        assert self.journal.open_number == len(reported) + (2 if self.flight is not None else 1)


TestDesk = Desk.TestCase
TestDesk.settings = settings(max_examples=80, stateful_step_count=30, deadline=None)
