"""Lines of the switchboard: a client's socket, what is spoken on it, and when it is of no use any more."""

from __future__ import annotations

import select
import socket
from collections.abc import Callable, Hashable
from typing import Any, Final

from leased.doors.http import IDLE_SECONDS, LINGER_SECONDS, REMOTE, UNREAD_SECONDS, HttpDoor, HttpPeer
from leased.doors.rpc import RpcPeer

KEEPALIVE: Final = (
    (socket.TCP_KEEPIDLE, 15),
    (socket.TCP_KEEPINTVL, 5),
    (socket.TCP_KEEPCNT, 3),
)  # seconds; a dead host is seen in 30
LINGERING: Final = (-2, 0)
AnyPeer = RpcPeer | HttpPeer


class Line:
    """A client's socket with its peer.  `mask` is what the epoll watches for, `extra` what it watches for besides.  `caller` is who
    answers for it: a uid, or the address it came from."""

    __slots__ = ("caller", "extra", "first", "mask", "message", "peer", "quiet", "seen", "since", "socket")

    def __init__(self, connection: socket.socket, peer: AnyPeer, caller: Hashable, extra: int) -> None:
        self.socket = connection
        self.peer = peer
        self.caller = caller
        self.extra = extra
        self.seen = (-1, -1)  # what an HTTP connection had done when it was last looked at, and since when
        self.quiet = 0.0
        self.mask = select.EPOLLIN
        self.first = True
        self.message = -1  # which one is unfinished, by how many had begun before it
        self.since = 0.0  # when the message that is unfinished now began, 0.0 when none is


def http_peer(line: Line, door: HttpDoor, schedule: Callable[[Any], None]) -> HttpPeer:
    """The peer of a line on which HTTP is spoken, in the place of the one that was accepted."""
    before, descriptor = line.peer, line.socket.fileno()
    hosts = frozenset({"", "leased"})
    if before.identity is REMOTE:
        address = line.socket.getsockname()[0].partition("%")[0]
        hosts = frozenset({f"[{address}]" if ":" in address else address})
    peer = HttpPeer(
        door,
        before.identity,
        line.caller,
        hosts,
        schedule=schedule,
        probe=lambda: hung_up(descriptor, line.extra and select.POLLRDHUP),
        pidfd=before.pidfd,
        room=before.room,
    )
    peer.allowance = before.allowance
    return peer


def overdue(line: Line, now: float) -> bool:
    """Is this HTTP connection of no use any more: kept alive for nothing, not read from, or done?  Asked each second, on any clock."""
    peer = line.peer
    seen = (peer.begun, peer.out_bytes)
    if line.seen[0] == LINGERING[0]:
        limit = LINGER_SECONDS
        if not line.seen[1]:  # since now; nothing it does counts any more
            line.seen, line.quiet = (LINGERING[0], 1), now
    elif seen != line.seen or peer.unfinished:
        line.seen, line.quiet = seen, now
        return False
    elif peer.out_bytes:
        limit = UNREAD_SECONDS
    elif peer.idle:
        limit = IDLE_SECONDS
    else:
        return False
    return now - line.quiet >= limit


def hung_up(descriptor: int, besides: int = 0) -> bool:
    """Has the other end hung up?  `besides`: what else counts as that, POLLRDHUP over TCP."""
    poller = select.poll()
    poller.register(descriptor, besides)
    return bool(poller.poll(0))


def turn_away(connection: socket.socket, told: bytes) -> None:
    """Say one thing, if it can be said at once, and hang up."""
    try:
        connection.send(told)
    except OSError:
        pass
    connection.close()


def tuned(connection: socket.socket) -> str:
    """A TCP connection whose dead peer is noticed.  Returns the address that answers for it: of IPv6 the network, for one
    host has 2^64 addresses.  Raises OSError."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, seconds in KEEPALIVE:
        connection.setsockopt(socket.IPPROTO_TCP, option, seconds)
    address = str(connection.getpeername()[0])
    return socket.inet_pton(socket.AF_INET6, address.partition("%")[0])[:8].hex() if ":" in address else address
