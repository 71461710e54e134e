"""One request under way, and what the middle needs to know of the connection it came by."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any, Protocol

from leased.errors import PeerError
from leased.model import Identity, Reply, Request


class Unproven(Exception):
    """A bind needs to know the process at the other end, and the kernel does not say: the door asks for a proof, then calls again."""


class Undelivered:
    """Grants passed on to one that waited, (key hash, generation), each until the last byte of its answer has left."""

    __slots__ = ("_answers", "_sent")

    def __init__(self) -> None:
        self._answers: deque[tuple[int, tuple[bytes, int]]] = deque()
        self._sent = 0

    def __bool__(self) -> bool:
        return bool(self._answers)

    def __iter__(self) -> Iterator[tuple[bytes, int]]:
        return iter([grant for _, grant in self._answers])

    def __contains__(self, grant: object) -> bool:
        return any(grant == each for _, each in self._answers)

    def add(self, grant: tuple[bytes, int], unsent_bytes: int) -> None:
        """`unsent_bytes` of this connection, the answer's last byte included."""
        self._answers.append((self._sent + unsent_bytes, grant))

    def sent(self, octets: int) -> None:
        self._sent += octets
        while self._answers and self._answers[0][0] <= self._sent:
            self._answers.popleft()


class Peer(Protocol):
    """A connection as the lane sees it.  The methods only fill buffers; they never block and never raise."""

    identity: Identity
    local: bool
    closed: bool
    watch: Any
    process: Any
    bound: dict[bytes, int]
    undelivered: Undelivered
    out_bytes: int
    unread_bytes: int

    def answer(self, call: Call, reply: Reply) -> None: ...

    def refuse(self, call: Call, error: PeerError) -> None: ...

    def notify(self, method: str, params: Reply) -> int: ...

    def challenge(self, call: Call) -> None:
        """Ask for the proof; `call` comes back when it has been given."""
        ...

    def pidfd(self) -> int:
        """A new descriptor of the process that opened this connection.  Raises OSError where the kernel gives none."""
        ...

    def gone(self) -> bool:
        """Has the other end hung up, as far as the kernel knows at this moment?"""
        ...


class Call:
    """A request with its way back.  `msgid` means something to the peer alone.  Answered exactly once.

    `identity` is whom it counts for: the connection's, or what the agent key in this one request says.
    `agent_lock`: it came in the agent-lock form, which has a price of its own.
    `passed_on` is set when the answer grants a lease to one that waited: (key hash, generation), for the door to give back if the answer
    cannot be delivered.
    """

    __slots__ = ("agent_lock", "identity", "msgid", "passed_on", "peer", "request")

    def __init__(self, peer: Peer, msgid: int | None, request: Request, identity: Identity | None = None) -> None:
        self.peer = peer
        self.identity = peer.identity if identity is None else identity
        self.msgid = msgid
        self.request = request
        self.agent_lock = False
        self.passed_on: tuple[bytes, int] | None = None

    def answer(self, reply: Reply) -> None:
        self.peer.answer(self, reply)

    def refuse(self, error: PeerError) -> None:
        self.peer.refuse(self, error)
