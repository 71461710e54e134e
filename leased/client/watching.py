"""Watching leases: what happens to them, in order, on a connection of its own, and never silently incomplete.

Pulled, not pushed: nothing is read before it is asked for, so memory is bounded by one read, and what a slow caller leaves unread waits
in the socket, then in the daemon's buffer, then becomes a gap.
"""

from __future__ import annotations

import select
import socket
import threading
import time
from collections import deque

from leased.client.attempt import FIRST_PAUSE_SECONDS, FOR_EVER, LONGEST_PAUSE_SECONDS, jittered
from leased.client.core import Conversation
from leased.client.errors import ConnectionGone, DaemonUnreachable, LeasedClientError, OutcomeUnknown, ProtocolFault, RateLimited
from leased.client.forked import leave_to_parent
from leased.client.wire import READ_BYTES, connect, ready, why
from leased.light import NamedTuple

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Final

    from leased.client.sync import Client
    from leased.frames import Event

ENDINGS: Final = frozenset({"released", "lapsed", "revoked", "switch_missed"})


class LeaseEvent(NamedTuple):
    """One change of one lease.

    `type`: granted, renewed, released, lapsed, revoked or switch_missed; `reason` says more where there is more to say.  `seq` counts from
    1 on each connection.  `key` is None where the daemon has not seen its text since it started.
    """

    seq: int
    type: str
    key: str | None
    key_hash: str
    scope: str | None
    holder: str
    generation: int
    reason: str | None


class Gap(NamedTuple):
    """Events `from_seq` to `to_seq` were not told to a reader too slow for them; both None: nobody can tell how many were missed,
    because the connection was lost and a new one is watching now.  Whoever keeps a picture of the leases lists them again."""

    from_seq: int | None
    to_seq: int | None


class Watch:
    """An iterator of `LeaseEvent | Gap`, made by `Client.watch`.  Everything from then on is told, or there is a Gap in its place.

    For the whole picture, watch first and then list; list again after each Gap:

        with client.watch(scope="night") as watch:
            show(client.list(scope="night"))
            for told in watch: ...

    It ends with `close`, which any thread may call, or with the block.  A lost connection is replaced; a daemon that stays away for the
    client's `timeout` raises DaemonUnreachable, and asking once more tries once more.  One watch may be read by several threads: each
    event goes to one of them.  In a forked child it begins anew, with a Gap.
    """

    def __init__(self, path: str, fields: dict[str, Any], patience: float) -> None:
        self._path = path
        self._fields = fields
        self._patience = patience
        self._closed = threading.Event()
        self._taking = threading.Lock()
        self._conversation = Conversation()
        self._stream: socket.socket | None = None
        self._told: deque[LeaseEvent | Gap] = deque()
        self._pause = 0.0
        self._given_up_at = 0.0
        try:
            self._begin(time.monotonic() + patience)
        except ConnectionGone:  # a daemon that restarts at this moment
            while self._stream is None:
                self._begin_again(FOR_EVER)
        leave_to_parent(self)

    def __repr__(self) -> str:
        watched = {name: value for name, value in self._fields.items() if name != "agent_key" and value is not None}
        return f"Watch({watched}, closed={self.closed})"

    def __enter__(self) -> Watch:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __iter__(self) -> Watch:
        return self

    def __next__(self) -> LeaseEvent | Gap:
        told = self.take()
        if told is None:
            raise StopIteration
        return told

    @property
    def closed(self) -> bool:
        return self._closed.is_set()

    def close(self) -> None:
        """Ends the watch; who waits in it gets no more.  Closing twice is harmless."""
        self._closed.set()
        stream = self._stream
        if stream is not None:
            try:
                stream.shutdown(socket.SHUT_RDWR)  # wakes whoever reads, and who then closes the descriptor
            except OSError:
                pass
        self._hang_up_if_idle()

    def take(self, timeout: float | None = None) -> LeaseEvent | Gap | None:
        """What was told next; None after `timeout` seconds without anything, or once the watch is closed.

        Raises what `Client.watch` does.
        """
        deadline = FOR_EVER if timeout is None else time.monotonic() + timeout
        if not self._taking.acquire(timeout=-1 if timeout is None else max(0.0, timeout)):
            return None
        try:
            while not self.closed:
                if self._told:
                    return self._told.popleft()
                if not (self._read(deadline) if self._stream is not None else self._begin_again(deadline, Gap(None, None))):
                    return None
            return None
        except LeasedClientError:
            raise
        except BaseException:  # an interrupt: what was read may be lost, and a Gap has to say so
            self._hang_up()
            raise
        finally:
            self._taking.release()
            if self.closed:
                self._hang_up_if_idle()

    def _read(self, deadline: float) -> bool:
        """Reads once; False if nothing came until the deadline.  Only while nothing waits to be taken: so memory stays bounded."""
        stream = self._stream
        assert stream is not None
        try:
            if not ready(stream, select.POLLIN, deadline):
                return False
            octets = stream.recv(READ_BYTES)
            _, events = self._conversation.receive(octets)
            self._told += map(understood, events)
        except BlockingIOError:
            return True
        except OSError:
            octets = b""
        except ProtocolFault:
            self._hang_up()
            raise
        fault = self._conversation.fault
        if not octets or fault is not None:
            self._hang_up()
            if isinstance(fault, ProtocolFault):
                raise fault
        else:
            self._pause = 0.0
        return True

    def _begin(self, deadline: float, *ahead: Gap) -> None:
        """A new connection that watches.  `ahead` is told before what it tells."""
        self._conversation = Conversation()
        self._stream = stream = connect(self._path, deadline)
        told: list[LeaseEvent | Gap] = [*ahead]
        try:
            msgid, octets = self._conversation.ask("watch", self._fields)
            if self.closed:
                raise ConnectionGone("closed by this client", sent=False)
            try:
                stream.send(octets, socket.MSG_NOSIGNAL)  # far smaller than a new socket's buffer
            except OSError:
                pass  # it has hung up already; what it said before can still be read
            while not self._conversation.answered(msgid):
                if not ready(stream, select.POLLIN, deadline):
                    raise OutcomeUnknown("watch", "the daemon did not answer in time")
                octets = stream.recv(READ_BYTES)
                told += map(understood, self._conversation.receive(octets)[1])
                if self._conversation.fault is not None or (not octets and not self._conversation.answered(msgid)):
                    raise self._conversation.ended("the daemon closed the connection")
            self._conversation.answer(msgid)
        except (OSError, ConnectionGone) as wrong:
            self._hang_up()
            raise ConnectionGone(why(wrong), sent=True) from None
        except BaseException:
            self._hang_up()
            raise
        self._told += told

    def _begin_again(self, deadline: float, *ahead: Gap) -> bool:
        """One attempt to replace a lost connection, and the pause before it; False at the deadline."""
        now = time.monotonic()
        self._given_up_at = self._given_up_at or now + self._patience
        pause = jittered(self._pause)
        if now + pause >= deadline:
            self._closed.wait(max(0.0, deadline - now))
            return False
        if self._closed.wait(pause):
            return False
        self._pause = min(2 * self._pause or FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS)
        try:
            self._begin(min(deadline, time.monotonic() + self._patience), *ahead)
        except (DaemonUnreachable, ConnectionGone, OutcomeUnknown, RateLimited) as wrong:
            if self.closed or time.monotonic() < self._given_up_at:
                return True
            self._given_up_at = 0.0
            raise DaemonUnreachable(self._path, str(wrong)) if isinstance(wrong, ConnectionGone) else wrong from None
        self._given_up_at = 0.0
        return True

    def _hang_up_if_idle(self) -> None:
        if self._taking.acquire(blocking=False):
            self._hang_up()
            self._taking.release()

    def _hang_up(self) -> None:
        stream, self._stream = self._stream, None
        if stream is not None:
            stream.close()

    def left_to_parent(self) -> None:
        """In a forked child: the connection, and what was read from it, are the parent's."""
        self._taking = threading.Lock()
        closed, self._closed = self.closed, threading.Event()
        if closed:
            self._closed.set()
        self._told.clear()
        self._pause = self._given_up_at = 0.0
        self._hang_up()


def understood(event: Event) -> LeaseEvent | Gap:
    """A method that this client does not know is something missed."""
    told = event.params
    try:
        if event.method == "event":
            return LeaseEvent(
                told["seq"],
                told["type"],
                told.get("key"),
                told["key_hash"],
                told.get("scope"),
                told["holder"],
                told["generation"],
                told.get("reason"),
            )
        if event.method == "gap":
            return Gap(told["from_seq"], told["to_seq"])
    except KeyError as missing:
        raise ProtocolFault(f"an event without {missing}") from None
    return Gap(None, None)


def wait_free(client: Client, key: str, timeout: float | None) -> bool:
    """See `Client.wait_free`.  Watched first and then asked, so no end of a lease falls between the two."""
    deadline = FOR_EVER if timeout is None else time.monotonic() + timeout
    with client.watch(key=key) as watch:
        while True:
            checked = client.check(key)
            if checked.held is False:
                return True
            ask_again_at = FOR_EVER
            if checked.held is None:  # no event will say when the daemon can tell
                ask_again_at = time.monotonic() + (checked.reply.get("retry_after_seconds") or 1.0)
            if not _until_it_may_be_free(watch, min(deadline, ask_again_at)) and time.monotonic() >= deadline:
                return False


def _until_it_may_be_free(watch: Watch, deadline: float) -> bool:
    while True:
        left = deadline - time.monotonic()
        told = watch.take(None if left == FOR_EVER else max(0.0, left))
        if told is None:
            return False
        if isinstance(told, Gap) or told.type in ENDINGS:
            return True
