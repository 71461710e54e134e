"""MessagePack-RPC: what the bytes of one connection mean, and what goes back.  No socket here: unix.py moves the bytes."""

from __future__ import annotations

import os
from collections.abc import Callable, Hashable
from typing import Any, ClassVar, Final

from leased import frames
from leased.calls import Call, Undelivered
from leased.doors.proof import MAX_WAITING_CALLS, Challenge
from leased.errors import PeerError
from leased.model import Identity, Reply
from leased.schema import parse

MESSAGES_AT_ONCE: Final = 64  # of one connection in one batch: one peer's pipeline must not become everybody's latency
LARGE: Final = frozenset({"list", "resume_packet"})  # an answer may be a thousand times its request, and takes milliseconds
VIEWS: Final = LARGE | {"check", "info", "usage", "watch", "unwatch"}  # change nothing: not looked up for who has hung up
MAX_UNSENT_BYTES: Final = 64 * 1024  # answers that wait to be read; past it nothing more is taken from this peer

Known = Callable[[str, Identity, Hashable], Identity]
"""(agent key, the connection's identity, who answers for wrong keys) -> whom the call counts for.  Raises PeerError."""


class Allowance:
    """How many more requests one user may make in this second, over all its connections."""

    __slots__ = ("_each_second", "_left")

    def __init__(self, each_second: int) -> None:
        self._each_second = each_second
        self._left = each_second

    def refill(self) -> None:
        self._left = self._each_second

    def spend(self) -> None:
        """Raises PeerError when there are none left."""
        if self._left <= 0:
            raise PeerError(
                "rate_limited",
                f"your user makes more than {self._each_second} requests in a second (limits.requests_per_second_per_uid)",
            )
        self._left -= 1


class Room:
    """How many large answers this turn may still give, over all connections."""

    __slots__ = ("left",)

    def __init__(self) -> None:
        self.left = 1


class RpcPeer:
    """One connection as the middle sees it (`calls.Peer`): a list of answers not sent yet, and the frames not understood yet.

    `schedule` is called when there is something to send.  `pending` requests have no answer yet.  `draining`: this client sends no more
    and is kept until it has its answers.  `ending`: say what is left to say, then close.
    """

    __slots__ = (
        "_frames",
        "_later",
        "_schedule",
        "allowance",
        "begin_proof",
        "begun",
        "bound",
        "challenged",
        "closed",
        "draining",
        "ending",
        "identity",
        "known",
        "lingers",
        "out",
        "out_bytes",
        "pending",
        "pidfd",
        "probe",
        "process",
        "proven",
        "room",
        "scheduled",
        "undelivered",
        "unread_bytes",
        "watch",
    )  # fmt: skip

    local = True
    idle: ClassVar[bool] = False  # an HTTP connection can be in these states, see http.py
    more: ClassVar[bool] = False
    stalled: ClassVar[bool] = False
    waits: ClassVar[bool] = False

    def __init__(
        self, identity: Identity, schedule: Callable[[Any], None], probe: Callable[[], bool], pidfd: Callable[[], int]
    ) -> None:
        self.identity = identity
        self.closed = False
        self.ending = False
        self.draining = False
        self.lingers = False
        self.pending = 0
        self.out: list[bytes] = []
        self.out_bytes = 0
        self.scheduled = False
        self.undelivered = Undelivered()
        self.bound: dict[bytes, int] = {}
        self.watch: Any = None
        self.unread_bytes = 0  # of `out_bytes`, what the last attempt to send left behind
        self.process: Any = None
        self.allowance: Allowance | None = None
        self.challenged: Challenge | None = None
        self.begin_proof: Callable[[], Challenge] = _no_proof
        self.proven: Callable[[RpcPeer, int], object] = _no_proof
        self.known: Known = nobody_known
        self.probe = probe
        self.pidfd = pidfd
        self._schedule = schedule
        self._frames = frames.Requests()
        self._later: list[frames.Request] = []  # taken from the frames, but a large answer comes first
        self.room = Room()
        self.begun = 0  # messages

    # ---- bytes in

    def feed(self, chunk: bytes) -> None:
        self._frames.feed(chunk)

    def take(self, batch: list[Call]) -> bool:
        """Append up to MESSAGES_AT_ONCE calls, of those with large answers at most one, and none when this turn has no room for it.
        True when there may be more to take without reading.  Mistakes are answered here."""
        if self.ending:
            return False
        messages = self._later
        if messages:
            self._later = []
        else:
            try:
                messages = self._frames.take(MESSAGES_AT_ONCE)
            except frames.FrameError as error:
                self.refuse_connection(error)
                return False
            self.begun += len(messages)
        gone = self.probe is gone_for_good
        large = False
        for at, (msgid, method, params) in enumerate(messages):
            if method in VIEWS:
                if gone:
                    continue
                if method in LARGE:
                    if large or not self.room.left:
                        self._later = messages[at:]
                        return True
                    large = True
                    self.room.left -= 1
            self._understand(msgid, method, params, batch)
        return self._frames.pending > 0 and not self._frames.unfinished

    def only(self, chunk: bytes, batch: list[Call]) -> bool:
        """The common case by far: nothing of this client waits, and `chunk` is exactly one plain request.  False: it is not, and nothing
        has been done."""
        if self._frames.pending or self._later or self.ending or self.probe is gone_for_good:
            return False
        message = frames.single(chunk)
        if message is None:
            return False
        msgid, method, params = message
        if method in LARGE:
            return False
        self.begun += 1
        self._understand(msgid, method, params, batch)
        return True

    def _understand(self, msgid: int | None, method: str, params: frames.Params, batch: list[Call]) -> None:
        try:
            if self.allowance is not None:
                self.allowance.spend()
            if method == "prove":
                self._proof(msgid, params, batch)
                return
            request = parse(method, params)
            identity = self.identity
            if request[-1] is not None:
                identity = self.known(request[-1], identity, identity.uid)
            elif not identity.namespace:
                raise PeerError(
                    "unauthenticated",
                    "your user is not mapped here and the daemon gives each uid its own namespace: bring an agent_key",
                )
        except PeerError as error:
            if msgid is not None:
                self._say_error(msgid, error)
        else:
            if msgid is not None:
                self.pending += 1
            batch.append(Call(self, msgid, request, identity))

    # ---- proving a process

    def challenge(self, call: Call) -> None:
        try:
            if self.challenged is None:
                self.challenged = self.begin_proof()
                self.notify("prove", self.challenged.question)
        except OSError:
            call.refuse(_unproven())
            return
        if len(self.challenged.waiting) < MAX_WAITING_CALLS:
            self.challenged.waiting.append(call)
        else:
            call.refuse(PeerError("rate_limited", f"bind: {MAX_WAITING_CALLS} calls of this connection wait for its proof already"))

    def _proof(self, msgid: int | None, params: Reply, batch: list[Call]) -> None:
        """The echo: right, the calls that waited for it are decided now; wrong, they are refused."""
        challenge, self.challenged = self.challenged, None
        if challenge is None:
            raise PeerError("invalid_argument", "nonce was not asked for")
        if not challenge.proven_by(params):
            self.give_up_proof(challenge)
            raise PeerError("invalid_argument", "nonce does not prove the process that opened this connection")
        self.proven(self, challenge.descriptor)
        batch += challenge.waiting
        if msgid is not None:
            self._send(frames.reply(msgid, {"proven": True}))

    def give_up_proof(self, challenge: Challenge) -> None:
        self.challenged = None
        os.close(challenge.descriptor)
        for call in challenge.waiting:
            call.refuse(_unproven())

    @property
    def unfinished(self) -> bool:
        return self._frames.unfinished

    @property
    def full(self) -> bool:
        """Too much waits to be read by this peer: take nothing more from it until it has read."""
        return self.out_bytes > MAX_UNSENT_BYTES

    # ---- answers out

    def answer(self, call: Call, reply: Reply) -> None:
        if call.msgid is None or self.closed:
            return
        self.pending -= 1
        if self.draining and not self.pending:
            self.ending = True
        packed = frames.reply(call.msgid, reply)
        self.out.append(packed)
        self.out_bytes += len(packed)
        if call.passed_on is not None:
            self.undelivered.add(call.passed_on, self.out_bytes)
        if not self.scheduled:
            self.scheduled = True
            self._schedule(self)

    def refuse(self, call: Call, error: PeerError) -> None:
        if call.msgid is not None:
            self._answered()
            self._say_error(call.msgid, error)

    def farewell(self) -> None:
        """The daemon stops: nothing is said, and clients ask the next one."""

    def abandoned(self) -> None:
        """The connection is gone."""
        if self.challenged is not None:
            self.give_up_proof(self.challenged)

    def drain(self) -> None:
        """The client has closed its sending half: it gets the answers it is still owed, then the connection ends."""
        self.draining = True
        self.ending = not self.pending
        if self.ending and not self.scheduled:
            self.scheduled = True
            self._schedule(self)

    def refuse_connection(self, error: PeerError) -> None:
        """One error about the connection as a whole, then its end."""
        self._say_error(0, error)
        self.ending = True

    def _answered(self) -> None:
        self.pending -= 1
        if self.draining and not self.pending:
            self.ending = True

    def notify(self, method: str, params: Reply) -> int:
        """Returns the bytes queued for this peer now."""
        if not self.closed:
            self._send(frames.notification(method, params))
        return self.out_bytes

    def gone(self) -> bool:
        return self.closed or self.probe()

    def _say_error(self, msgid: int, error: PeerError) -> None:
        if not self.closed:
            self._send(frames.error(msgid, error.code, error.text))

    def _send(self, packed: bytes) -> None:
        self.out.append(packed)
        self.out_bytes += len(packed)
        if not self.scheduled:
            self.scheduled = True
            self._schedule(self)


def gone_for_good() -> bool:
    """The probe of a connection that is known to have been hung up."""
    return True


def nobody_known(*_: object) -> Identity:
    raise PeerError("unauthenticated", "agent_key is not known here")


def _unproven() -> PeerError:
    return PeerError(
        "invalid_argument",
        'bind "process" could not be proven: the client must echo the nonce of `prove` from the process that connected',
    )


def _no_proof(*_: object) -> Any:
    raise OSError("no proof can be asked for here")
