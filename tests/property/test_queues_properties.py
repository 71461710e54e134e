"""The queues against one plain list of waiters."""

from __future__ import annotations

from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from leased.calls import Call
from leased.model import Ask, Identity, LeaseRequest
from leased.queues import Queues, Waiter

KEYS = [b"a", b"b"]


class Connection:
    def __init__(self) -> None:
        self.identity = Identity("local", 1000, 1, False)


class Lines(RuleBasedStateMachine):
    @initialize()
    def begin(self) -> None:
        self.queues = Queues()
        self.plain: list[Waiter] = []
        self.peers: list[Any] = [Connection(), Connection()]
        self.now = 0.0
        self.rids = 0

    def make(self, key_hash: bytes, peer: int, seconds: float, rid: bytes) -> Waiter:
        call = Call(self.peers[peer], 1, LeaseRequest("k", "h"))
        return Waiter(call, LeaseRequest("k", "h"), Ask("local" if peer else "uid:1", rid=rid), key_hash, self.now + seconds)

    @rule(key_hash=st.sampled_from(KEYS), peer=st.integers(0, 1), seconds=st.integers(1, 20), with_rid=st.booleans())
    def add(self, key_hash: bytes, peer: int, seconds: int, with_rid: bool) -> None:
        self.rids += 1
        waiter = self.make(key_hash, peer, float(seconds), b"%d" % self.rids if with_rid else b"")
        self.queues.add(waiter)
        self.plain.append(waiter)

    @precondition(lambda self: self.plain)
    @rule(at=st.integers(0), peer=st.integers(0, 1), seconds=st.integers(1, 20))
    def replace(self, at: int, peer: int, seconds: int) -> None:
        at %= len(self.plain)
        older = self.plain[at]
        newer = self.make(older.key_hash, peer, float(seconds), older.ask.rid)
        self.queues.replace(older, newer)
        self.plain[at] = newer

    @precondition(lambda self: self.plain)
    @rule(at=st.integers(0), twice=st.booleans())
    def remove(self, at: int, twice: bool) -> None:
        waiter = self.plain.pop(at % len(self.plain))
        self.queues.remove(waiter)
        if twice:
            self.queues.remove(waiter)

    @precondition(lambda self: self.plain)
    @rule(at=st.integers(0))
    def take_or_give_back(self, at: int) -> None:
        waiter = self.plain[at % len(self.plain)]
        waiter.taken = not waiter.taken

    @rule(seconds=st.integers(0, 15))
    def waits_end(self, seconds: int) -> None:
        self.now += seconds
        over = self.queues.ended(self.now)
        assert sorted(map(id, over)) == sorted(id(each) for each in self.plain if each.until <= self.now)
        assert [each.until for each in over] == sorted(each.until for each in over)
        for each in over:
            self.queues.remove(each)
        self.plain = [each for each in self.plain if each.until > self.now]

    @invariant()
    def every_view_agrees(self) -> None:
        queues = self.queues
        assert queues.total == len(self.plain)
        assert bool(queues) == bool(self.plain)
        assert queues.next_end() == min((each.until for each in self.plain), default=None)
        assert sorted(queues.waited_for()) == sorted({each.key_hash for each in self.plain})
        for key_hash in KEYS:
            line = [each for each in self.plain if each.key_hash == key_hash]
            assert queues.length(key_hash) == len(line)
            free = [each for each in line if not each.taken]
            assert queues.waiting(key_hash) == len(free)
            assert queues.first(key_hash) is (free[0] if free else None)
        for peer in self.peers:
            assert set(queues.of_peer(peer)) == {each for each in self.plain if each.call.peer is peer}
        for namespace in ("local", "uid:1"):
            assert queues.of_namespace(namespace) == sum(each.ask.namespace == namespace for each in self.plain)
        for each in self.plain:
            if each.ask.rid:
                assert queues.of_rid(each.ask.rid) is each


TestLines = Lines.TestCase
TestLines.settings = settings(max_examples=50, stateful_step_count=30, deadline=None)
