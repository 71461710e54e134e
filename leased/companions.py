"""What the lessor tells and asks of its companions: watchers, binds, billing.  Each may be absent."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from leased.calls import Peer
from leased.model import Lease, Reply

Watching = Callable[[str, bytes, Lease, str, str | None], None]
"""(type, key hash, lease, reason, text of the key): what a watcher is told."""


class Binding(Protocol):
    """Told of leases with a bind, after the commit: see binds.py."""

    def prove(self, peer: Peer) -> object: ...

    def bound(self, key_hash: bytes, lease: Lease, peer: Peer) -> None: ...

    def ended(self, key_hash: bytes) -> None: ...


class Bills(Protocol):
    """Asked in the decision's transaction what it costs, and told when the environment had to be opened anew: see billing.py."""

    enabled: bool

    def reread(self) -> None: ...

    def refused(self, namespace: str, key_hash: bytes, holder: str) -> Reply: ...

    def called(self, namespace: str, key_hash: bytes, holder: str) -> Reply: ...
