"""Who waits for what, in order of arrival.  Memory only: a restart empties the queues and callers of ours queue again."""

from __future__ import annotations

from collections import deque
from heapq import heappop, heappush
from itertools import count

from leased.calls import Call, Peer
from leased.model import Ask, LeaseRequest


class Waiter:
    """One waiting `lease`.  `until` is when its wait ends (CLOCK_BOOTTIME).  `taken`: granted by a decision not committed yet.
    `gone`: answered, cancelled or hung up; its place in the line is skipped when reached."""

    __slots__ = ("ask", "call", "gone", "key_hash", "request", "taken", "until")

    def __init__(self, call: Call, request: LeaseRequest, ask: Ask, key_hash: bytes, until: float) -> None:
        self.call = call
        self.request = request
        self.ask = ask
        self.key_hash = key_hash
        self.until = until
        self.taken = False
        self.gone = False


class Queues:
    def __init__(self) -> None:
        self._lines: dict[bytes, deque[Waiter]] = {}
        self._lengths: dict[bytes, int] = {}
        self._spaces: dict[str, int] = {}
        self._of_peer: dict[int, set[Waiter]] = {}
        self._of_rid: dict[bytes, Waiter] = {}
        self._ends: list[tuple[float, int, Waiter]] = []
        self._numbers = count()
        self.total = 0

    def __bool__(self) -> bool:
        return self.total > 0

    def length(self, key_hash: bytes) -> int:
        return self._lengths.get(key_hash, 0)

    def waiting(self, key_hash: bytes) -> int:
        """Those in the line whom no decision of this transaction has granted yet."""
        line = self._lines.get(key_hash)
        return sum(not waiter.gone and not waiter.taken for waiter in line) if line is not None else 0

    def of_namespace(self, namespace: str) -> int:
        return self._spaces.get(namespace, 0)

    def of_peer(self, peer: Peer) -> list[Waiter]:
        return list(self._of_peer.get(id(peer), ()))

    def of_agent(self, name: str) -> list[Waiter]:
        """Those whose call brought this agent's key.  Looks at every waiter."""
        return [waiter for waiters in self._of_peer.values() for waiter in waiters if waiter.call.identity.agent == name]

    def of_rid(self, rid: bytes) -> Waiter | None:
        return self._of_rid.get(rid)

    def waited_for(self) -> list[bytes]:
        return list(self._lengths)

    def add(self, waiter: Waiter) -> None:
        self._lines.setdefault(waiter.key_hash, deque()).append(waiter)
        self._enter(waiter)

    def replace(self, older: Waiter, newer: Waiter) -> None:
        """`newer` takes over the place of `older`, which is out of the queue from now on."""
        line = self._lines[older.key_hash]
        line[line.index(older)] = newer
        self._leave(older)
        self._enter(newer)

    def put_back(self, newer: Waiter, older: Waiter) -> None:
        """Take a `replace` back: its transaction has failed."""
        if not newer.gone:
            older.gone = False
            self.replace(newer, older)

    def remove(self, waiter: Waiter) -> None:
        """Out of the queue; its place is dropped when the line reaches it.  Removing twice is harmless."""
        if waiter.gone:
            return
        self._leave(waiter)
        line = self._lines.get(waiter.key_hash)
        if line is None:
            return
        if waiter.key_hash not in self._lengths:
            del self._lines[waiter.key_hash]
        elif len(line) > 32 and len(line) > 2 * self._lengths[waiter.key_hash]:
            self._lines[waiter.key_hash] = deque(each for each in line if not each.gone)

    def first(self, key_hash: bytes) -> Waiter | None:
        """The head of the line that nobody has taken and that is still there."""
        line = self._lines.get(key_hash)
        if line is None:
            return None
        while line and line[0].gone:
            line.popleft()
        for waiter in line:
            if not waiter.gone and not waiter.taken:
                return waiter
        return None

    def next_end(self) -> float | None:
        while self._ends and self._ends[0][2].gone:
            heappop(self._ends)
        return self._ends[0][0] if self._ends else None

    def ended(self, now: float, limit: int = 1 << 62) -> list[Waiter]:
        """Up to `limit` of those whose wait is over.  They are still in the queue: `remove` them when answered."""
        found: dict[Waiter, None] = {}  # one that was put back is in the heap twice
        while self._ends and self._ends[0][0] <= now and len(found) < limit:
            waiter = heappop(self._ends)[2]
            if not waiter.gone:
                found[waiter] = None
        return list(found)

    def _enter(self, waiter: Waiter) -> None:
        self.total += 1
        self._lengths[waiter.key_hash] = self._lengths.get(waiter.key_hash, 0) + 1
        namespace = waiter.ask.namespace
        self._spaces[namespace] = self._spaces.get(namespace, 0) + 1
        self._of_peer.setdefault(id(waiter.call.peer), set()).add(waiter)
        if waiter.ask.rid:
            self._of_rid[waiter.ask.rid] = waiter
        heappush(self._ends, (waiter.until, next(self._numbers), waiter))

    def _leave(self, waiter: Waiter) -> None:
        waiter.gone = True
        self.total -= 1
        _less(self._lengths, waiter.key_hash)
        _less(self._spaces, waiter.ask.namespace)
        peers = self._of_peer[id(waiter.call.peer)]
        peers.discard(waiter)
        if not peers:
            del self._of_peer[id(waiter.call.peer)]
        if self._of_rid.get(waiter.ask.rid) is waiter:
            del self._of_rid[waiter.ask.rid]
        if len(self._ends) > 64 and len(self._ends) > 4 * self.total:
            self._ends = sorted(entry for entry in self._ends if not entry[2].gone)


def _less(counts: dict[bytes, int] | dict[str, int], key: bytes | str) -> None:
    left = counts[key] - 1  # type: ignore[index]
    if left:
        counts[key] = left  # type: ignore[index]
    else:
        del counts[key]  # type: ignore[arg-type]
