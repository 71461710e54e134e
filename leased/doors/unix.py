"""The switchboard: one epoll of our own for all clients, one batch for all that is ready, one send for each answered.

One trio task waits until the epoll descriptor is readable; `turn` does the rest without waiting.  A task and a stream for each
connection cost four times as much per request.  HTTP connections, those of TCP too, are lines of it like any other, so that their requests are
decided in the same batches, by the same instant after a pause of the loop, and hang up the same way.
"""

from __future__ import annotations

import os
import select
import socket
from collections.abc import Callable, Hashable
from typing import Final

import structlog

from leased import frames
from leased.calls import Call
from leased.config_keys import Limits
from leased.doors.accepting import Accepting
from leased.doors.callers import Callers, in_turn
from leased.doors.http import REMOTE, HttpDoor
from leased.doors.lines import LINGERING, AnyPeer, Line, http_peer, hung_up, overdue, tuned, turn_away
from leased.doors.proof import Challenge
from leased.doors.rpc import Known, Room, RpcPeer, gone_for_good, nobody_known
from leased.errors import PeerError
from leased.peers import Policy, peer_pidfd

log = structlog.get_logger()

LOOK_AGAIN_FROM: Final = 2  # calls of one turn from which on others are likely to have come meanwhile
LARGE_AT_ONCE: Final = 4  # answers of one turn that may be a page of `list`: milliseconds each, which all others wait
READ_BYTES: Final = 64 * 1024
CALLS_AT_ONCE: Final = 1024  # of one turn, over all connections: ten milliseconds or so that everybody waits
EVENTS_BESIDE_CLIENTS: Final = 256  # listeners and pidfds in one turn; every client has a place of its own
_IN, _OUT, _GONE = select.EPOLLIN, select.EPOLLOUT, select.EPOLLHUP | select.EPOLLERR
_HALF: Final = select.EPOLLRDHUP  # over TCP the end of what a client sends is the end of its waiting, PROTOCOL calls it EOF
Events = list[tuple[int, int]]
Decide = Callable[[list[Call], float | None], None]
HungUp = Callable[[AnyPeer], None]


class Switchboard:
    """`decide` is the lessor's; `hung_up` is told of every connection that is no more, before its descriptor is closed."""

    def __init__(self, policy: Policy, limits: Limits, decide: Decide, hung_up: HungUp) -> None:
        self.epoll = select.epoll()
        self._policy = policy
        self._limits = limits
        self._decide = decide
        self._hung_up = hung_up
        self.proven: Callable[[RpcPeer, int], object] = lambda peer, descriptor: os.close(descriptor)
        self.known: Known = nobody_known
        self._accepting = Accepting(self.epoll)
        self._lines: dict[int, Line] = {}
        self.overslept: Callable[[], float | None] = lambda: None  # how to judge what came while we lingered for too long
        self.http: HttpDoor | None = None
        self._callers = Callers(limits)
        self._others: dict[int, Callable[[], None]] = {}
        self._scheduled: list[AnyPeer] = []
        self._line_of: dict[AnyPeer, Line] = {}
        self._http_lines: set[Line] = set()
        self._backlog: dict[Line, None] = {}  # in order: whoever was served last comes last
        self._first = -1  # the descriptor the next turn begins with, when this one had no room left
        self._room = Room()
        self._unfinished: set[Line] = set()
        self.accepted = 0
        self.turned_away = 0

    def __len__(self) -> int:
        return len(self._lines)

    @property
    def behind(self) -> bool:
        """Requests have been read that are not decided yet."""
        return bool(self._backlog)

    def listen(self, listener: socket.socket) -> None:
        self._accepting.listen(listener)

    def readable(self, descriptor: int, then: Callable[[], None]) -> None:
        """Call `then` in the turn that finds `descriptor` readable, until `forget`."""
        self._others[descriptor] = then
        self.epoll.register(descriptor, _IN)

    def forget(self, descriptor: int) -> None:
        if self._others.pop(descriptor, None) is not None:
            self.epoll.unregister(descriptor)

    # ---- one turn

    def turn(self, judged: float | None = None, wait: float = 0.0) -> bool:
        """Serve everything that is ready now, or within `wait` seconds.  True when something was done, so that another turn may find more."""
        events = self.epoll.poll(0.0 if self._backlog else wait, len(self._lines) + EVENTS_BESIDE_CLIENTS)
        if wait and judged is None:
            judged = self.overslept()
            if judged is not None:  # SIGCONT interrupts a poll, whose time is then up: it has told of nothing
                events = self.epoll.poll(0.0, len(self._lines) + EVENTS_BESIDE_CLIENTS)
        batch: list[Call] = []
        ended: list[Line] = []
        calling: list[socket.socket] = []
        self._room.left = LARGE_AT_ONCE
        most = CALLS_AT_ONCE if judged is None else frames.EVERYTHING
        served = self._serve_backlog(batch, most // 2) if self._backlog else set()  # the other half is for whoever has just come
        if judged is not None:
            served = set()  # everything counts: there is no next turn to wait for
        events, self._first = in_turn(events, self._first), -1
        if self._others:  # the dead first: what they held may be what the living ask for now
            for descriptor, _ in events:
                then = self._others.get(descriptor)
                if then is not None:
                    then()
        self._gather(events, batch, ended, calling, served, most)
        if len(batch) >= LOOK_AGAIN_FROM and judged is None:
            self._look_again(events, batch, ended, served, most)
        if batch:
            self._decide(batch, judged)
        self.flush()
        for line in ended:
            if line.peer.probe is gone_for_good:
                self.close(line)
            elif not line.peer.closed:
                line.extra = 0
                self._watch(line, line.mask & _OUT)
                line.peer.drain()
        if ended:
            self.flush()  # what they held has gone to others
        for listener in calling:  # last, so that whoever has gone has made room
            for connection in self._accepting.accept(listener):
                self._admit(connection)
        return bool(events or batch)

    def _gather(
        self, events: Events, batch: list[Call], ended: list[Line], calling: list[socket.socket], served: set[Line], most: int
    ) -> None:
        """Read from each that is ready, once."""
        for descriptor, event in events:
            line = self._lines.get(descriptor)
            if line is None:
                if descriptor in self._accepting.listeners:
                    calling.append(self._accepting.listeners[descriptor])
                continue
            if event & _OUT:
                self._send(line)
            if event & _GONE or (event & _HALF and line.peer.waits):
                line.peer.probe = gone_for_good
                while self._read(line, batch):  # what it sent before it hung up still counts: releases above all
                    pass
                ended.append(line)
            elif event & _IN and line not in self._backlog:
                if line in served:
                    continue  # the next turn will: what is said about bad bytes must not overtake the answers due before
                if len(batch) >= most:
                    self._first = descriptor if self._first < 0 else self._first
                elif line.peer.full:
                    self._watch(line, _OUT)
                elif not self._read(line, batch):
                    ended.append(line)

    def _look_again(self, events: Events, batch: list[Call], ended: list[Line], served: set[Line], most: int) -> None:
        """Take in who has asked while the others were read: one transaction for all costs less than two.  Nobody is read twice, and where a
        descriptor that is no client's has something to say, it is heard first: in the next turn."""
        seen = {descriptor for descriptor, _ in events}
        while len(seen) < len(self._lines) and len(batch) < most:
            fresh = [event for event in self.epoll.poll(0.0, len(self._lines) + EVENTS_BESIDE_CLIENTS) if event[0] not in seen]
            if not fresh or not all(descriptor in self._lines for descriptor, _ in fresh):
                return
            self._gather(fresh, batch, ended, [], served, most)
            seen.update([descriptor for descriptor, _ in fresh])

    def _serve_backlog(self, batch: list[Call], most: int) -> set[Line]:
        """What was read in earlier turns.  Returns whose turn this was; whoever was not served comes first in the next."""
        backlog, self._backlog = list(self._backlog), {}
        served: set[Line] = set()
        while len(served) < len(backlog) and len(batch) < most:
            line = backlog[len(served)]
            self._take(line, batch)
            served.add(line)
        self._backlog = dict.fromkeys(backlog[len(served) :]) | self._backlog
        return served

    def _read(self, line: Line, batch: list[Call]) -> bool:
        """Read once and take what is complete.  False when nothing more will come from this client."""
        peer = line.peer
        try:
            if peer.challenged is not None:
                chunk = peer.challenged.read(line.socket, READ_BYTES)
            else:
                chunk = line.socket.recv(READ_BYTES)
        except BlockingIOError:
            return peer.probe is not gone_for_good
        except OSError:
            return False
        if not chunk:
            return False
        if line.first:
            line.first = False
            if 0x41 <= chunk[0] <= 0x5A and self.http is not None:  # an upper-case letter never begins a MessagePack-RPC message
                peer = self._speak_http(line, self.http)
        if not peer.only(chunk, batch):
            peer.feed(chunk)
            self._take(line, batch)
        return True

    def _take(self, line: Line, batch: list[Call]) -> None:
        peer = line.peer
        if peer.closed:
            return
        if peer.probe is gone_for_good:
            while peer.take(batch):
                pass
        elif peer.full:  # it does not read: nothing is taken from it until it has, see _send
            self._watch(line, _OUT)
        elif peer.take(batch):
            self._backlog[line] = None
        elif not peer.unfinished:
            self._unfinished.discard(line)
        elif line not in self._unfinished or line.message != peer.begun:  # another message than the one before
            self._unfinished.add(line)
            line.message = peer.begun
            line.since = 0.0
        if peer.stalled:
            self._watch(line, 0)

    # ---- sending

    def _schedule(self, peer: AnyPeer) -> None:
        peer.scheduled = True
        self._scheduled.append(peer)

    def flush(self) -> None:
        """One send for each peer that has been answered."""
        while self._scheduled:
            scheduled, self._scheduled = self._scheduled, []
            for peer in scheduled:
                peer.scheduled = False
                line = self._line_of.get(peer)
                if line is None:
                    continue
                if line.mask & _OUT == 0:
                    self._send(line)
                else:  # the socket is still full: all of it waits for the reader
                    peer.unread_bytes = peer.out_bytes

    def _send(self, line: Line) -> None:
        peer = line.peer
        out = peer.out
        if out:
            packed = out[0] if len(out) == 1 else b"".join(out)
            try:
                sent = line.socket.send(packed)
            except BlockingIOError:
                sent = 0
            except OSError:
                self.close(line)
                return
            if peer.undelivered:
                peer.undelivered.sent(sent)
            if sent < len(packed):
                peer.out = [packed[sent:]]
                peer.out_bytes = peer.unread_bytes = len(packed) - sent
                waiting = peer.full or peer.ending or peer.draining
                if line.mask == _OUT and not waiting:
                    self._backlog[line] = None  # what was not taken while it was full comes before what it sends next
                self._watch(line, _OUT if waiting else _IN | _OUT)
                return
            peer.out = []
            peer.out_bytes = peer.unread_bytes = 0
            if peer.watch is not None:
                peer.watch.drained()
        if peer.ending:
            if peer.lingers:
                self._linger(line)
            else:
                self.close(line)
        elif line.mask & _OUT:
            self._watch(line, 0 if peer.draining else _IN)
            self._backlog[line] = None
        elif peer.more or (line.mask == 0 and not peer.stalled and not peer.draining):
            self._watch(line, _OUT if peer.draining else _IN | _OUT)  # which is ready at once: the next turn goes on with it

    def _linger(self, line: Line) -> None:
        """The last answer is out; what the client still sends is thrown away until it hangs up or LINGER_SECONDS are over."""
        line.peer.ending = line.peer.lingers = False
        try:
            line.socket.shutdown(socket.SHUT_WR)
        except OSError:
            self.close(line)
            return
        line.extra = 0
        line.seen = LINGERING
        self._watch(line, _IN)

    def _watch(self, line: Line, mask: int) -> None:
        if line.mask != mask:
            line.mask = mask
            self.epoll.modify(line.socket.fileno(), mask | (line.extra if mask or line.peer.waits else 0))

    # ---- connections

    def _admit(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        caller: Hashable
        try:
            if connection.family == socket.AF_UNIX:
                identity = self._policy.identify(connection)
                caller = identity.uid
            else:
                identity = REMOTE
                caller = tuned(connection)
        except OSError:
            connection.close()
            return
        text = self._callers.refusal(caller, local=identity is not REMOTE)
        if text:
            self.turned_away += 1
            told = self.http.turned_away(text) if identity is REMOTE and self.http else frames.error(0, "rate_limited", text)
            turn_away(connection, told)
            return
        self.accepted += 1
        descriptor = connection.fileno()
        peer = RpcPeer(identity, self._schedule, lambda: hung_up(descriptor), lambda: peer_pidfd(connection))
        peer.begin_proof = lambda: Challenge(connection, identity.pid)
        peer.proven = self.proven
        peer.known = self.known
        peer.room = self._room
        peer.allowance = self._callers.enter(caller)
        line = Line(connection, peer, caller, _HALF if identity is REMOTE else 0)
        self._lines[descriptor] = line
        self._line_of[peer] = line
        self.epoll.register(descriptor, _IN | line.extra)
        if identity is REMOTE and self.http is not None:
            line.first = False
            self._speak_http(line, self.http)

    def relimit(self) -> None:
        """The limits in force have changed: what each connection holds of them is made anew."""
        self._callers.change()
        for line in self._lines.values():
            line.peer.allowance = self._callers.allowance(line.caller)

    def _speak_http(self, line: Line, door: HttpDoor) -> AnyPeer:
        del self._line_of[line.peer]
        line.peer = http_peer(line, door, self._schedule)
        self._line_of[line.peer] = line
        self._http_lines.add(line)
        return line.peer

    def close(self, line: Line) -> None:
        peer = line.peer
        if peer.closed:
            return
        peer.closed = True
        peer.abandoned()
        self._http_lines.discard(line)
        self._hung_up(peer)
        descriptor = line.socket.fileno()
        del self._lines[descriptor], self._line_of[peer]
        self._backlog.pop(line, None)
        self._unfinished.discard(line)
        self._callers.leave(line.caller)
        self.epoll.unregister(descriptor)
        line.socket.close()
        peer.out = []
        self._accepting.resume()

    def each_second(self, now: float) -> None:
        """Close whoever has left a message unfinished too long; try accepting again."""
        self._accepting.resume()
        self._callers.each_second()
        for line in list(self._lines.values()):
            challenge = line.peer.challenged
            if challenge is not None and challenge.overdue(now):
                line.peer.give_up_proof(challenge)
        for line in list(self._unfinished):
            if line.since == 0.0:
                line.since = now
            elif now - line.since >= self._limits.message_seconds:
                self._unfinished.discard(line)
                line.peer.refuse_connection(
                    PeerError("invalid_argument", f"message was left unfinished for {self._limits.message_seconds:g} s")
                )
        for line in [line for line in self._http_lines if overdue(line, now)]:
            self.close(line)
        self.flush()

    def stop_listening(self) -> None:
        self._accepting.stop()

    def close_all(self) -> None:
        """Everybody is told what is left to tell, as far as their sockets take it, and hung up on."""
        for line in self._http_lines:
            line.peer.farewell()
        self.flush()
        for line in list(self._lines.values()):
            self.close(line)
