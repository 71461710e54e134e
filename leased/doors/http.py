"""HTTP/1.1: one connection of it, as the switchboard and the lane see one.  No socket here: unix.py moves the bytes.

A connection may have several requests under way; they are decided in the order they came and answered in it.  Each has a slot; an answer
that is ready waits for those before it.
"""

from __future__ import annotations

import errno
import time
from collections import deque
from collections.abc import Callable, Hashable, Mapping
from typing import Any, Final, NamedTuple

from leased import rules
from leased.calls import Call, Undelivered
from leased.doors.http_reading import Asked, Head, Reader
from leased.doors.http_routes import ROUTES, Judge, Route, fields_of, judged, request_of, secret_of, split
from leased.doors.problems import JSON, PROBLEM, Headers, Problem, encode, problem_of, response
from leased.doors.rpc import LARGE, MAX_UNSENT_BYTES, VIEWS, Allowance, Known, Room, gone_for_good
from leased.errors import PeerError
from leased.model import Identity, LeaseRequest, Reply

MAX_AHEAD: Final = 16  # requests of one connection under way: past it nothing more is read from it
MAX_BEHIND_BYTES: Final = 128 * 1024  # sent over TCP behind them; past it the connection ends
REQUESTS_AT_ONCE: Final = 16  # of one connection in one batch
IDLE_SECONDS: Final = 60.0  # a connection kept alive for nothing
UNREAD_SECONDS: Final = 30.0  # answers that nobody reads
LINGER_SECONDS: Final = 1.0  # after an answer that ends the connection, for a client that still sends: a reset would eat the answer
REMOTE: Final = Identity("", -1, 0, False)


class Page(NamedTuple):
    """An answer that is no operation's."""

    status: int
    kind: str
    body: bytes
    headers: Headers = ()


Pages = Mapping[str, Callable[[Head, bool, Callable[[Page], None]], None]]
"""By their names in the routes.  Each is given the request's head and whether it came over a Unix socket, and calls the last argument
once, at once or later."""


class HttpDoor:
    """What all HTTP connections share.  `answers` counts by answer: what `rpc.Answers` counts for the other door."""

    def __init__(self, pages: Pages, known: Known, wall: Callable[[], float]) -> None:
        self.pages = pages
        self.known = known
        self.draining = False
        self.decided = 0  # requests given to the lane
        self.responses: dict[int, int] = {200: 0}
        self.answers: dict[object, int] = {True: 0, False: 0, None: 0, "other": 0, "error": 0}
        self._wall = wall
        self._second = -1
        self._date = ""

    def date(self) -> str:
        second = int(self._wall())
        if second != self._second:
            self._second = second
            self._date = _http_date(second)
        return self._date

    def turned_away(self, text: str) -> bytes:
        """The whole answer to a connection that there is no room for."""
        problem = problem_of(PeerError("rate_limited", text))
        return response(problem.status, PROBLEM, problem.document(), date=self.date(), headers=problem.headers, close=True)


class _Slot:
    """One request under way.  `done` is its response once there is one."""

    __slots__ = ("call", "close", "done", "head_only", "passed_on", "route")

    def __init__(self, route: Route | None, close: bool, head_only: bool) -> None:
        self.route = route
        self.close = close
        self.head_only = head_only
        self.call: Call | None = None
        self.done: bytes | None = None
        self.passed_on: tuple[bytes, int] | None = None


class HttpPeer:
    """One connection as the switchboard sees it (like `rpc.RpcPeer`) and as the middle does (`calls.Peer`).

    `local`: a Unix socket, whose peer the kernel knows.  `lingers`: it sent what will not be read, see LINGER_SECONDS.
    """

    challenged: Any = None

    def __init__(
        self,
        door: HttpDoor,
        identity: Identity,
        guesser: Hashable,
        hosts: frozenset[str],
        *,
        schedule: Callable[[Any], None],
        probe: Callable[[], bool],
        pidfd: Callable[[], int],
        room: Room,
    ) -> None:
        self.identity = identity
        self.local = identity is not REMOTE
        self.closed = False
        self.ending = False
        self.draining = False
        self.lingers = False
        self.out: list[bytes] = []
        self.out_bytes = 0
        self.unread_bytes = 0
        self.scheduled = False
        self.undelivered = Undelivered()
        self.bound: dict[bytes, int] = {}
        self.watch: Any = None
        self.process: Any = None
        self.allowance: Allowance | None = None
        self.probe = probe
        self.begun = 0  # requests that have begun on this connection
        self._pidfd = pidfd
        self._door = door
        self._guesser = guesser
        self._schedule = schedule
        self._reader = Reader(Judge(hosts))
        self._slots: deque[_Slot] = deque()
        self._first = 0  # the number of the first slot
        self._deaf = False  # nothing more is read from this connection
        self._later: Asked | None = None  # a request for a large answer, which this turn had no room for
        self.room = room

    # ---- bytes in

    def only(self, chunk: bytes, batch: list[Call]) -> bool:
        """There is no shorter way here: see RpcPeer.only."""
        return False

    def feed(self, chunk: bytes) -> None:
        if self._deaf:
            return
        self._reader.feed(chunk)
        if not self.local and self._crowded and self._reader.untouched_bytes > MAX_BEHIND_BYTES:
            self._end_with(
                Problem(
                    429,
                    "rate_limited",
                    f"{MAX_AHEAD} requests of this connection are under way: read their answers before you send more",
                )
            )

    def take(self, batch: list[Call]) -> bool:
        """Append the calls of up to REQUESTS_AT_ONCE requests.  True when there may be more to take without reading."""
        for _ in range(REQUESTS_AT_ONCE):
            if self._deaf or (self._crowded and not self.probe()):
                return False
            try:
                asked = self._later or self._reader.take()
            except Problem as problem:
                self._end_with(problem)
                return False
            if asked is None:
                self._go_ahead()
                return False
            self._later = None
            route = ROUTES.get(split(asked.head.target)[0])
            if route is not None and asked.problem is None:
                if route.operation in VIEWS and self.probe is gone_for_good:
                    continue
                if route.operation in LARGE and not self.room.left:
                    self._later = asked
                    return True
                self.room.left -= route.operation in LARGE
            self._begin(asked, route, batch)
        return self._reader.untouched

    @property
    def unfinished(self) -> bool:
        return self._reader.partial and not self._deaf

    @property
    def full(self) -> bool:
        return self.out_bytes > MAX_UNSENT_BYTES

    @property
    def stalled(self) -> bool:
        """As many requests as may be are under way: nothing is read until one of them has been answered.  Never over TCP, where only
        whoever reads on sees that the client has gone."""
        return self.local and self._crowded

    @property
    def _crowded(self) -> bool:
        return len(self._slots) >= MAX_AHEAD

    @property
    def more(self) -> bool:
        """Something can be taken without reading."""
        return (self._reader.untouched or self._later is not None) and not self._crowded and not self._deaf

    @property
    def waits(self) -> bool:
        """A call of this connection is in a queue for a lease."""
        return any(
            slot.done is None and slot.call is not None and isinstance(slot.call.request, LeaseRequest) and slot.call.request.wait
            for slot in self._slots
        )

    @property
    def idle(self) -> bool:
        return not self._slots

    def _go_ahead(self) -> None:
        """100 Continue, when it is this request's turn to be answered."""
        if self._reader.wants_continue and not self._slots:
            self._send(b"HTTP/1.1 100 Continue\r\n\r\n")
            self._reader.told_to_continue()

    # ---- a request

    def _begin(self, asked: Asked, route: Route | None, batch: list[Call]) -> None:
        head = asked.head
        slot = _Slot(route, not head.keep_alive or self._door.draining, head.method == "HEAD")
        number = self._first + len(self._slots)
        self._slots.append(slot)
        self.begun += 1
        self._deaf = not head.keep_alive
        try:
            if self.allowance is not None:
                self.allowance.spend()
            if asked.problem is not None:
                raise asked.problem
            assert route is not None  # or there were a problem
            if route.page:
                if not route.open:
                    self._identify(secret_of(head, {}))
                self._door.pages[route.page](
                    head, self.local, lambda page: self._fill(slot, page.status, page.kind, page.body, page.headers)
                )
                return
            fields = fields_of(route, head.target, asked.body)
            identity = self._identify(secret_of(head, fields))
            call = Call(self, number, request_of(route, fields, local=self.local), identity)
        except Problem as problem:
            self._say(slot, problem)
        except PeerError as error:
            self._say(slot, problem_of(error))
        else:
            slot.call = call
            self._door.decided += 1
            batch.append(call)

    def _identify(self, secret: str | None) -> Identity:
        """Raises PeerError."""
        if secret is not None:
            try:
                secret.encode()
            except UnicodeEncodeError:
                raise PeerError("invalid_argument", "agent_key must be valid UTF-8") from None
            return self._door.known(secret, self.identity, self._guesser)
        if not self.identity.namespace:
            raise PeerError(
                "unauthenticated", "bring an agent key, as Authorization: Bearer or as agent_key (`leased agent add` makes one)"
            )
        return self.identity

    # ---- answers out

    def answer(self, call: Call, reply: Reply) -> None:
        if self.closed:
            return
        slot = self._slot(call)
        slot.passed_on = call.passed_on
        assert slot.route is not None
        answers = self._door.answers
        answers[reply.get("acquired", "other")] += 1
        try:
            status, headers = judged(slot.route, reply)
        except Problem as problem:
            self._say(slot, problem)
        else:
            self._fill(slot, status, JSON, encode(reply).encode(), headers)

    def refuse(self, call: Call, error: PeerError) -> None:
        if not self.closed:
            self._say(self._slot(call), problem_of(error))

    def _slot(self, call: Call) -> _Slot:
        assert call.msgid is not None
        return self._slots[call.msgid - self._first]

    def _say(self, slot: _Slot, problem: Problem) -> None:
        self._door.answers["error"] += 1
        self._fill(slot, problem.status, PROBLEM, problem.document(), problem.headers)

    def _fill(self, slot: _Slot, status: int, kind: str, body: bytes, headers: Headers = ()) -> None:
        """The response of one request; it leaves once those before it have."""
        door = self._door
        door.responses[status] = door.responses.get(status, 0) + 1
        if self.closed:
            return
        slot.done = response(
            status, kind, body, date=door.date(), headers=headers, close=slot.close or door.draining, head_only=slot.head_only
        )
        slots = self._slots
        while slots and (done := slots[0].done) is not None:
            first = slots.popleft()
            self._first += 1
            self._send(done)
            if first.passed_on is not None:
                self.undelivered.add(first.passed_on, self.out_bytes)
            if first.close:
                self._deaf = self.ending = True
        if not slots:
            if self.draining and not self.more:
                self.ending = True
            self._go_ahead()

    def _send(self, octets: bytes) -> None:
        self.out.append(octets)
        self.out_bytes += len(octets)
        if not self.scheduled:
            self.scheduled = True
            self._schedule(self)

    # ---- ends

    def _end_with(self, problem: Problem) -> None:
        """An answer after which nothing more is read: where the next request would begin is not known, or nobody will wait for it."""
        slot = _Slot(None, True, False)
        self._slots.append(slot)
        self._deaf = self.lingers = True
        self._say(slot, problem)

    def refuse_connection(self, error: PeerError) -> None:
        """A request that was left unfinished for too long."""
        self._end_with(Problem(408, error.code, error.text))

    def drain(self) -> None:
        """The client has closed its sending half: it gets the answers it is still owed, then the connection ends."""
        self.draining = True
        if not self._slots and not self.more:
            self.ending = True
            if not self.scheduled:
                self.scheduled = True
                self._schedule(self)

    def farewell(self) -> None:
        """The daemon stops: what is still under way is answered that nobody knows, and the connection ends."""
        for slot in list(self._slots):
            if slot.done is None and slot.call is not None:
                slot.call.answer(
                    rules.unknown(slot.call.request, "shutting_down")
                ) if slot.route and slot.route.verdict else self._say(
                    slot, problem_of(PeerError("internal", "the daemon is shutting down"))
                )

    def abandoned(self) -> None:
        """The connection is gone: grants that wait behind other answers will not be told of."""
        for slot in self._slots:
            if slot.passed_on is not None:
                self.undelivered.add(slot.passed_on, self.out_bytes + 1)
        self._slots.clear()

    # ---- what the middle asks

    def gone(self) -> bool:
        return self.closed or self.probe()

    def pidfd(self) -> int:
        if not self.local:
            raise OSError(errno.ENOTSUP, "the peer is not a process of this host's kernel")
        return self._pidfd()

    def challenge(self, call: Call) -> None:
        """The kernel does not name the process, and a proof needs a client that echoes what it is told."""
        call.refuse(PeerError("invalid_argument", 'bind "process" cannot be proven over HTTP on this kernel (Linux 6.5 can)'))

    def give_up_proof(self, challenge: Any) -> None:
        """None was asked for."""

    def notify(self, method: str, params: Reply) -> int:
        """Nothing is told over HTTP that was not asked for."""
        return self.out_bytes


_DAYS: Final = ("Mon", "Tue", "Wed", "Thu", "Fri", "Sat", "Sun")
_MONTHS: Final = ("Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec")


def _http_date(second: int) -> str:
    """IMF-fixdate (RFC 9110), whatever the locale."""
    at = time.gmtime(second)
    clock = f"{at.tm_hour:02d}:{at.tm_min:02d}:{at.tm_sec:02d}"
    return f"{_DAYS[at.tm_wday]}, {at.tm_mday:02d} {_MONTHS[at.tm_mon - 1]} {at.tm_year} {clock} GMT"
