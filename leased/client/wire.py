"""One connection to the daemon, shared by any number of threads.

Requests are pipelined: each thread sends its own and waits for its own answer, so a thread that waits 300 s for a lease holds
nobody up, least of all a renewal.  Whoever waits first reads for all; when it has its answer it wakes another to read on.
There is no reader thread: a client that only ever asks one thing at a time costs one send and one receive.
"""

from __future__ import annotations

import errno
import os
import select
import struct
import time
import weakref

from leased.client.core import Conversation
from leased.client.errors import ConnectionGone, DaemonUnreachable, LeasedClientError, OutcomeUnknown, PermissionDenied
from leased.frames import Event, proof
from leased.light import Protocol

TYPE_CHECKING = False
if TYPE_CHECKING:
    import socket
    from collections.abc import Mapping
    from threading import Lock
    from typing import Any, Final

    from leased.client.host_time import HostTime
else:
    from _thread import allocate_lock as Lock  # this, and no more, is what `threading` calls a Lock

    try:
        import _socket as socket  # what `socket` is made of, without its enums and selectors, which cost as much as all of ours
    except ImportError:  # a Python without that private name
        import socket

READ_BYTES: Final = 65536  # one read takes any answer
_PLAIN_READ_BYTES: Final = 8192  # takes any but a page of `list`, and costs a quarter less
_SLICE_SECONDS: Final = 1.0  # a signal that comes just before a wait begins does not end it, and is seen only after it
_SLICE: Final = struct.pack("@ll", int(_SLICE_SECONDS), 0)  # the same as a timeval
_SEND_FLAGS: Final = socket.MSG_NOSIGNAL | socket.MSG_DONTWAIT
BACKLOG_PAUSE_SECONDS: Final = 0.01  # a full accept queue empties within a tick of the daemon


class StandIn(Protocol):
    """What can answer in a daemon's place, within this process: `leased.testing.FakeLeased`."""

    @property
    def time(self) -> HostTime: ...

    def connect(self) -> socket.socket:
        """A connected, non-blocking stream.  Raises OSError."""


stand_ins: Final[weakref.WeakValueDictionary[str, StandIn]] = weakref.WeakValueDictionary()
"""By the path they are reached at, which no file has, for as long as anything refers to them."""


def connect(path: str, deadline: float) -> socket.socket:
    """A connected, non-blocking stream socket.  `deadline` is on the monotonic clock.

    Raises PermissionDenied where the socket's mode keeps this user out, else DaemonUnreachable.
    """
    while (stream := connect_now(path)) is None:
        if time.monotonic() >= deadline:
            raise backlog_is_full(path)
        select.select([], [], [], BACKLOG_PAUSE_SECONDS)
    return stream


def connect_now(path: str) -> socket.socket | None:
    """One attempt; None where the daemon's queue of connections is full, for a Unix socket does not queue one it has no room for."""
    stream = None
    try:
        if stand_ins and (stand_in := stand_ins.get(path)) is not None:
            return stand_in.connect()
        stream = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        stream.setblocking(False)
        stream.connect(path)
    except OSError as wrong:
        if stream is not None:
            stream.close()
        if isinstance(wrong, BlockingIOError):
            return None
        if isinstance(wrong, PermissionError):
            raise PermissionDenied(f"permission_denied: this user may not connect to {path}") from None
        raise DaemonUnreachable(path, why(wrong)) from None
    return stream


def backlog_is_full(path: str) -> DaemonUnreachable:
    return DaemonUnreachable(path, "it accepts no connections: stopped or overloaded")


def ready(stream: socket.socket, mask: int, deadline: float) -> bool:
    """Waits until `stream` is ready for `mask` (or has ended); False at `deadline`, monotonic seconds.  Raises OSError."""
    poll = select.poll()
    try:
        poll.register(stream, mask)
    except ValueError:  # closed by another thread
        raise OSError(errno.EBADF, "closed") from None
    while True:
        left = max(0.0, deadline - time.monotonic())
        if poll.poll(min(left, _SLICE_SECONDS) * 1000):
            return True
        if left <= _SLICE_SECONDS:
            return False


class Connection:
    """One stream and its conversation.  After `ConnectionGone` it is of no more use."""

    def __init__(self, stream: socket.socket) -> None:
        self._stream = stream
        stream.setblocking(
            True
        )  # reads wait in the kernel: asking first whether there is something to read costs as much as reading
        stream.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _SLICE)
        self._conversation = Conversation()
        self._sending = Lock()
        self._state = Lock()  # guards all below; never held across a system call that waits
        self._reading = False
        self._gates: dict[int, Lock] = {}
        self._gone: str | None = None

    @property
    def gone(self) -> bool:
        return self._gone is not None

    def exchange(self, operation: str, fields: Mapping[str, Any], deadline: float) -> dict[str, Any]:
        """Sends one request and waits for its answer until `deadline` (monotonic seconds).

        Raises ConnectionGone when the stream ended first, OutcomeUnknown at the deadline, and what an error answer says.
        """
        msgid = 0
        try:
            with self._sending:
                with self._state:
                    if self._gone is not None:
                        raise ConnectionGone(self._gone, sent=False)
                    msgid, octets = self._conversation.ask(operation, fields)
                self._send(octets, deadline)
            return self._await(operation, msgid, deadline)
        except LeasedClientError:
            raise
        except BaseException:  # an interrupt: the daemon grants nothing to a connection that is gone, and what was read may be lost
            self.close("interrupted")
            raise
        finally:
            with self._state:
                self._conversation.forget(msgid)
                self._gates.pop(msgid, None)
                self._pass_on()

    def close(self, why: str = "closed by this client") -> None:
        """Ends the connection; calls in flight raise ConnectionGone.  The descriptor lives on until nobody reads from it."""
        with self._state:
            if self._gone is not None:
                return
            self._gone = why
            for gate in self._gates.values():
                _open(gate)
        try:
            self._stream.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass
        if not self._reading:
            self._stream.close()

    def abandon(self) -> None:
        """In a forked child: drops the child's copy of the descriptor and says nothing on it.  The parent's goes on."""
        self._gone = "left to the parent process"
        self._stream.close()

    def _send(self, octets: bytes, deadline: float) -> None:
        sent = 0
        try:
            while sent < len(octets):
                try:
                    sent += self._stream.send(octets[sent:] if sent else octets, _SEND_FLAGS)
                except BlockingIOError:
                    if not ready(self._stream, select.POLLOUT, deadline):
                        raise TimeoutError("the daemon reads nothing") from None
        except OSError as wrong:  # part of a message may have left: nothing can follow it on this stream
            self._hear_last_words()
            self.close(why(wrong))
            raise self._conversation.ended(why(wrong), sent=sent > 0) from None

    def _hear_last_words(self) -> None:
        """A daemon that closes a connection at once has said why, and the bytes are still there to be read."""
        with self._state:
            if not self._reading:
                try:
                    self._conversation.receive(self._stream.recv(READ_BYTES, socket.MSG_DONTWAIT))
                except OSError:
                    pass

    def _await(self, operation: str, msgid: int, deadline: float) -> dict[str, Any]:
        conversation = self._conversation
        while True:
            with self._state:
                if conversation.answered(msgid):
                    return conversation.answer(msgid)
                if self._gone is not None:
                    raise conversation.ended(self._gone)
                lead = not self._reading
                if lead:
                    self._reading = True
                else:
                    gate = self._gates[msgid] = Lock()
                    gate.acquire()
            if lead:
                in_time = self._read(deadline)
            else:
                left = max(0.0, deadline - time.monotonic())
                in_time = gate.acquire(timeout=min(left, _SLICE_SECONDS)) or left > _SLICE_SECONDS
            if not in_time and not conversation.answered(msgid):
                raise OutcomeUnknown(operation, "the daemon did not answer in time")

    def _read(self, deadline: float) -> bool:
        """Reads once for all who wait; False if nothing came until the deadline."""
        try:
            if deadline - time.monotonic() < _SLICE_SECONDS and not ready(self._stream, select.POLLIN, deadline):
                return False
            octets = self._stream.recv(_PLAIN_READ_BYTES)  # waits for a slice at most
            with self._state:
                answered, events = self._conversation.receive(octets)
                if self._gates:
                    for msgid in answered:
                        if msgid in self._gates:
                            _open(self._gates[msgid])
            if events:
                self._prove(events, deadline)
            if not octets or self._conversation.fault is not None:
                self.close("the daemon closed the connection")
        except BlockingIOError:
            pass
        except OSError as wrong:
            self.close(why(wrong))
        finally:
            with self._state:
                self._reading = False
                if self._gone is not None:
                    self._stream.close()
        return True

    def _prove(self, events: list[Event], deadline: float) -> None:
        """Before Linux 6.5 the daemon asks which process this is: the kernel signs what we send."""
        for event in events:
            if event.method == "prove":
                with self._sending:
                    self._send(proof(event.params.get("nonce")), deadline)

    def _pass_on(self) -> None:
        """Wakes one of those who wait, to read on; one that is woken for nothing waits again."""
        if not self._reading:
            for gate in self._gates.values():
                _open(gate)
                return


def _open(gate: Lock) -> None:
    if gate.locked():
        gate.release()


def why(wrong: BaseException) -> str:
    """What failed, in words that name no secret."""
    if isinstance(wrong, OSError) and wrong.errno is not None:
        if wrong.errno == errno.ENOENT:
            return "there is no such socket"
        if wrong.errno == errno.ECONNREFUSED:
            return "nobody listens there"
        return os.strerror(wrong.errno)
    return str(wrong) or type(wrong).__name__
