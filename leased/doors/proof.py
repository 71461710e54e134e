"""Proving which process is at the other end where the kernel does not say it (SO_PEERPIDFD needs Linux 6.5).

The number SO_PEERCRED gives was true when the client connected; by now another process may have it.  So: open a pidfd by that number, send a
nonce, and accept only an echo that the kernel says came from that number, with the pidfd still alive afterwards.  Then one and the same
process had the number from before the nonce until after its echo, and it is the one the pidfd stands for.  A child that inherited the
connection answers with a number of its own and is refused: the lease would not end with it.
"""

from __future__ import annotations

import os
import secrets
import select
import socket
import struct
from hmac import compare_digest
from typing import Any, Final

from leased.calls import Call

MAX_PROOF_SECONDS: Final = 2.0  # an echo takes microseconds; a client that knows no `prove` gets its refusal after this
MAX_WAITING_CALLS: Final = 64  # of one connection: what a client that never answers may make the daemon remember for that long
_CREDENTIALS: Final = struct.Struct("3i")
_SPACE: Final = socket.CMSG_SPACE(_CREDENTIALS.size) + socket.CMSG_SPACE(4)


class Challenge:
    """One challenge of one connection.  `waiting` are the calls that want the bind; `begun` is when it was first looked at, else 0.0."""

    __slots__ = ("_nonce", "_pid", "begun", "descriptor", "sender", "waiting")

    def __init__(self, connection: socket.socket, pid: int) -> None:
        """Raises OSError: the process is gone, or there is no descriptor left."""
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        self.descriptor = os.pidfd_open(pid)
        self._pid = pid
        self._nonce = secrets.token_hex(16)
        self.sender = 0
        self.waiting: list[Call] = []
        self.begun = 0.0

    @property
    def question(self) -> dict[str, Any]:
        return {"nonce": self._nonce}

    def overdue(self, now: float) -> bool:
        """Asked each second, on any one clock."""
        self.begun = self.begun or now
        return now - self.begun >= MAX_PROOF_SECONDS

    def read(self, connection: socket.socket, size: int) -> bytes:
        """recv, remembering who sent it.  The kernel never joins bytes of two senders in one read of such a socket.  Raises OSError."""
        chunk, rights, _, _ = connection.recvmsg(size, _SPACE)
        for level, kind, content in rights:
            if level == socket.SOL_SOCKET and kind == socket.SCM_CREDENTIALS:
                self.sender = _CREDENTIALS.unpack(content[: _CREDENTIALS.size])[0]
            elif level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:  # nobody asked for descriptors: they are not kept
                for at in range(0, len(content) // 4 * 4, 4):
                    os.close(int.from_bytes(content[at : at + 4], "little"))
        return chunk

    def proven_by(self, answer: Any) -> bool:
        """Is this the echo, from that process, which is alive still?"""
        nonce = answer.get("nonce") if isinstance(answer, dict) else None
        return (
            isinstance(nonce, str)
            and compare_digest(nonce.encode(), self._nonce.encode())
            and self.sender == self._pid
            and not select.select([self.descriptor], [], [], 0)[0]
        )
