"""Watching: what happens to leases, told as it happens, numbered, and never silently incomplete.

One watch for a connection.  What it is told goes out with the connection's other answers; a reader too slow for its buffer is told nothing
until it has read, and then how much it missed.
"""

from __future__ import annotations

from typing import Any, Final, Protocol

from leased import model
from leased.calls import Call
from leased.errors import PeerError
from leased.lessor import Lessor
from leased.model import Lease, Reply

MAX_UNREAD_BYTES: Final = 48 * 1024  # of one watcher, below what stops the connection's own requests
MAX_BURST_BYTES: Final = 512 * 1024  # of one decision: a scope of thousands may end at once, and a quick reader is told of each


class WatchingPeer(Protocol):
    """A connection that can be told things it did not ask for.  `notify` returns the bytes that wait to be read."""

    watch: Any
    out_bytes: int
    unread_bytes: int

    def notify(self, method: str, params: Reply) -> int: ...


class Watch:
    """One connection's watch.  `seq` is the last number used, from 1; it goes on over unwatch and watch again."""

    __slots__ = ("identity", "key_hash", "missed_from", "peer", "scope", "seq")

    def __init__(self, peer: WatchingPeer, identity: model.Identity, key_hash: bytes | None, scope: str | None, seq: int) -> None:
        self.peer = peer
        self.identity = identity
        self.key_hash = key_hash
        self.scope = scope
        self.seq = seq
        self.missed_from = 0

    def wants(self, key_hash: bytes, lease: Lease) -> bool:
        if self.key_hash is not None:
            return self.key_hash == key_hash
        return self.scope is None or self.scope == lease.scope

    def tell(self, event: Reply) -> None:
        self.seq += 1
        if self.missed_from or self.peer.unread_bytes > MAX_UNREAD_BYTES or self.peer.out_bytes > MAX_BURST_BYTES:
            self.missed_from = self.missed_from or self.seq
            return
        self.peer.notify("event", {"seq": self.seq, **event})

    def drained(self) -> None:
        """The peer has read everything: say what it missed."""
        if self.missed_from:
            missed_from, self.missed_from = self.missed_from, 0
            self.peer.notify("gap", {"from_seq": missed_from, "to_seq": self.seq})


class Watchers:
    """Who watches what.  Costs a decision nothing while nobody does."""

    def __init__(self, lessor: Lessor, max_per_uid: int) -> None:
        self._lessor = lessor
        self.max_per_uid = max_per_uid
        self._spaces: dict[str, dict[int, Watch]] = {}
        self._of_uid: dict[int, int] = {}
        self._last_seq: dict[int, int] = {}
        lessor.operations[model.WatchRequest] = self.watch
        lessor.operations[model.UnwatchRequest] = self.unwatch

    def __len__(self) -> int:
        return sum(map(len, self._spaces.values()))

    def watch(self, call: Call, request: model.WatchRequest) -> None:
        self._lessor.lane.after(self._begin, call, request)

    def unwatch(self, call: Call, request: model.UnwatchRequest) -> None:
        self._lessor.lane.after(self._end, call)

    def _begin(self, call: Call, request: model.WatchRequest) -> None:
        peer = call.peer
        identity = call.identity
        if peer.watch is not None:
            call.refuse(PeerError("invalid_argument", "watch is on already for this connection: unwatch first, or open another"))
            return
        standing = self._of_uid.get(identity.uid, 0)
        if standing >= self.max_per_uid:
            call.refuse(PeerError("rate_limited", f"watch: your user has {standing} watches (limits.max_watchers_per_uid)"))
            return
        key_hash = None if request.key is None else self._lessor.digests.key_hash(identity.namespace, request.key)
        watch = Watch(peer, identity, key_hash, request.scope, self._last_seq.pop(id(peer), 0))
        peer.watch = watch
        self._of_uid[identity.uid] = standing + 1
        self._spaces.setdefault(identity.namespace, {})[id(peer)] = watch
        self._lessor.watching = self.publish
        call.answer({"watching": True, "seq": watch.seq})

    def _end(self, call: Call) -> None:
        watch = call.peer.watch
        if isinstance(watch, Watch):
            self._last_seq[id(call.peer)] = watch.seq
        self.forget(call.peer)
        call.answer({"watching": False})

    def end_of_agent(self, name: str) -> None:
        """An agent's key was revoked: its watches end, and say so by a last event."""
        for watch in [watch for watches in self._spaces.values() for watch in watches.values() if watch.identity.agent == name]:
            watch.peer.notify("ended", {"reason": "agent_key was revoked"})
            self.forget(watch.peer)

    def hung_up(self, peer: WatchingPeer) -> None:
        self.forget(peer)
        self._last_seq.pop(id(peer), None)

    def forget(self, peer: WatchingPeer) -> None:
        watch = peer.watch
        if not isinstance(watch, Watch):
            return
        peer.watch = None
        namespace, uid = watch.identity.namespace, watch.identity.uid
        del self._spaces[namespace][id(peer)]
        if not self._spaces[namespace]:
            del self._spaces[namespace]
        self._of_uid[uid] -= 1
        if not self._of_uid[uid]:
            del self._of_uid[uid]
        if not self._spaces:
            self._lessor.watching = None

    def publish(self, change: str, key_hash: bytes, lease: Lease, reason: str, text: str | None) -> None:
        watches = self._spaces.get(lease.namespace)
        if watches is None:
            return
        event: Reply = {
            "type": change,
            "key": text,
            "key_hash": key_hash.hex(),
            "scope": lease.scope,
            "holder": lease.holder,
            "generation": lease.generation,
            "reason": reason or None,
        }
        for watch in watches.values():
            if watch.wants(key_hash, lease):
                watch.tell(event)
