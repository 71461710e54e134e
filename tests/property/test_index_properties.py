"""The index against plain dicts of leases, over any sequence of grants, renewals, sweeps and ends."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from leased.index import Index
from leased.model import Lease
from leased.state.records import encode_lease
from leased.state.survey import Rows

KEYS = [bytes((n,)) for n in range(6)]


class Remembered(RuleBasedStateMachine):
    @initialize()
    def begin(self) -> None:
        self.index = Index()
        self.live: dict[bytes, Lease] = {}
        self.generation = 0
        self.now = self.retry_at = 0.0

    @rule(
        key_hash=st.sampled_from(KEYS),
        ttl=st.integers(1, 40),
        namespace=st.sampled_from(["local", "uid:1"]),
        scope=st.sampled_from([None, "s", "t"]),
        rid=st.booleans(),
    )
    def grant(self, key_hash: bytes, ttl: int, namespace: str, scope: str | None, rid: bool) -> None:
        if key_hash in self.live:
            return
        self.generation += 1
        lease = Lease(
            namespace, "me", scope, self.generation, b"p" * 16, float(ttl), self.now + ttl,
            rid=self.generation.to_bytes(16, "big") if rid else b"",
        )  # fmt: skip
        self.live[key_hash] = lease
        self.index.granted(key_hash, lease, key_hash.hex())

    @precondition(lambda self: self.live)
    @rule(chosen=st.integers(0, 5), ttl=st.integers(1, 40))
    def renew(self, chosen: int, ttl: int) -> None:
        key_hash = sorted(self.live)[chosen % len(self.live)]
        self.live[key_hash] = self.live[key_hash]._replace(deadline=self.now + ttl)
        self.index.moved(key_hash, self.now + ttl)

    @precondition(lambda self: self.live)
    @rule(chosen=st.integers(0, 5))
    def end(self, chosen: int) -> None:
        key_hash = sorted(self.live)[chosen % len(self.live)]
        self.index.ended(key_hash, self.live.pop(key_hash))

    @rule(seconds=st.integers(0, 30), limit=st.integers(1, 4), fails=st.booleans())
    def sweep(self, seconds: int, limit: int, fails: bool) -> None:
        """As the daemon sweeps: whatever is found is ended if it has lapsed, else looked at again; a failed sweep looks again soon."""
        self.now += seconds
        due = {key_hash for key_hash, lease in self.live.items() if max(lease.deadline, self.retry_at) <= self.now}
        swept: set[bytes] = set()
        while found := self.index.pop_due(self.now, limit):
            assert len(found) <= limit
            assert not swept & set(found) or fails
            swept |= set(found)
            for key_hash in found:
                if fails:
                    self.index.again(key_hash, self.now + 0.5)
                elif self.live[key_hash].deadline <= self.now:
                    self.index.ended(key_hash, self.live.pop(key_hash))
                else:
                    self.index.again(key_hash, self.live[key_hash].deadline)
        assert due <= swept, "a lapsed lease was not found"
        if fails:
            self.retry_at = self.now + 0.5

    @rule()
    def restart(self) -> None:
        """Filled again from the records, in the order of their keys, some of them known to the ledger."""
        texts = dict(self.index.texts)
        self.index = Index()
        rows = [(key_hash, encode_lease(lease)) for key_hash, lease in sorted(self.live.items())]
        known = {key_hash: (lease.generation, lease.ttl) for key_hash, lease in sorted(self.live.items())[::2]}
        taken = Rows()
        taken.read(rows)
        assert taken.damaged == []
        taken.share(known)
        self.index.load(taken)
        self.index.texts = texts

    @invariant()
    def the_next_look_is_never_too_late(self) -> None:
        if self.live:
            due = self.index.next_due()
            assert due is not None
            assert due <= max(min(lease.deadline for lease in self.live.values()), self.now + 0.5)
        else:
            assert self.index.next_due() is None

    @invariant()
    def every_view_is_of_the_live_leases(self) -> None:
        by_generation = sorted((lease.generation, key_hash) for key_hash, lease in self.live.items())
        assert len(self.index) == len(self.live)
        assert list(self.index.of_all(0)) == by_generation
        for namespace in ("local", "uid:1"):
            here = [(g, k) for g, k in by_generation if self.live[k].namespace == namespace]
            assert list(self.index.of_namespace(namespace, 0)) == here
            assert self.index.count(namespace) == len(here)
            half = here[len(here) // 2][0] if here else 1
            assert list(self.index.of_namespace(namespace, half)) == [each for each in here if each[0] > half]
            for scope in ("s", "t"):
                assert self.index.of_scope(namespace, scope) == [k for _, k in here if self.live[k].scope == scope]
        assert self.index.rids == {lease.rid: key_hash for key_hash, lease in self.live.items() if lease.rid}
        assert self.index.texts == {key_hash: key_hash.hex() for key_hash in self.live}


TestRemembered = Remembered.TestCase
TestRemembered.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
