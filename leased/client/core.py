"""The heart of every client face: requests to bytes, bytes to answers.  No socket, no thread, no clock.

A face opens a stream, sends what `Conversation.ask` returns, feeds what arrives to `Conversation.receive`, and takes answers by
message number.  One conversation per connection: after a fault it is over.
"""

from __future__ import annotations

import binascii
import os

import msgpack

from leased.client.errors import ConnectionGone, InvalidArgument, LeasedClientError, ProtocolFault, fault_of
from leased.frames import MAX_MESSAGE_BYTES, MAX_MSGID, Answer, Event, FrameError, Replies
from leased.paths import SOCKET_VARIABLE, default_socket

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import Any, Final

SYSTEM_SOCKET: Final = "/run/leased/leased.sock"
REQUEST_ID_BYTES: Final = 24  # 32 characters: past guessing, and above the protocol's least of 22


def draw_request_id() -> str:
    """A credential for one attempt: 192 bits of the operating system's, as 32 characters of base64url."""
    return binascii.b2a_base64(os.urandom(REQUEST_ID_BYTES), newline=False).translate(_URL_SAFE).decode()


_URL_SAFE: Final = bytes.maketrans(b"+/", b"-_")


def draw_holder() -> str:
    """A label for one live instance: host, process and 8 hexadecimal digits, so that a reused process id is another holder."""
    return f"{os.uname().nodename[:200]}:{os.getpid()}:{os.urandom(4).hex()}"


def socket_path(
    given: str | None = None,
    environ: Mapping[str, str] = os.environ,
    root: bool | None = None,
    exists: Callable[[str], bool] = os.path.exists,
) -> str:
    """Where the daemon listens: as given, else $LEASED_SOCKET, else the caller's default.

    A user who runs no daemon of their own reaches the system's: where the default is not there, the system's path is taken.
    """
    if given:
        return given
    usual = default_socket(os.geteuid() == 0 if root is None else root, environ)
    if usual is None or (not environ.get(SOCKET_VARIABLE) and not exists(usual)):
        return SYSTEM_SOCKET if usual is None or exists(SYSTEM_SOCKET) else usual
    return usual


_PACKER_BYTES: Final = 4096  # grows when it has to
_MAX_PLAIN_BYTES: Final = (
    1024  # any answer about one lease; msgpack reserves a list for each header that claims to be as long as this
)
_SCALARS: Final = frozenset({str, int, float, bool, type(None)})
_AFTER_MSGID: Final = {**dict.fromkeys(range(0x80), 3), 0xCC: 4, 0xCD: 5, 0xCE: 7}  # by the byte at 2, where the number begins


def _plain(octets: bytes) -> Answer | None:
    """The answer that `octets` is, if it is exactly one: a short one, no error, a map of at most 15 scalars and maps of scalars.

    None means "ask the strict decoder", never "bad".  That one costs a client most of its own time, and this one a sixth of it; what it
    would refuse is read from the bytes and the types: fields are counted by the map's header, so that a key said twice comes out fewer.
    (Said twice within a charge it passes, and the last counts.)
    """
    if len(octets) > _MAX_PLAIN_BYTES or octets[:2] != b"\x94\x01":
        return None
    try:
        at = _AFTER_MSGID[octets[2]]
        if octets[at] != 0xC0:
            return None
        _, msgid, _, result = msgpack.unpackb(octets)
        if 0x80 + len(result) != octets[at + 1]:
            return None
        for key, value in result.items():
            if type(key) is not str:
                return None
            if type(value) not in _SCALARS:
                for inner, scalar in value.items():
                    if type(inner) is not str or type(scalar) not in _SCALARS:
                        return None
    except Exception:  # several messages, half of one, or damage
        return None
    return Answer(msgid, None, result)


class Conversation:
    """One connection's requests and answers.  Not thread-safe: the face serialises its calls."""

    def __init__(self) -> None:
        self._replies = Replies()
        self._pack = msgpack.Packer(buf_size=_PACKER_BYTES).pack  # one for all: making a Packer takes longer than packing
        self._next = 1  # 0 is what the daemon answers to bytes it could not read
        self._open: set[int] = set()
        self._answers: dict[int, Answer] = {}
        self.fault: LeasedClientError | None = None

    def ask(self, operation: str, fields: Mapping[str, Any]) -> tuple[int, bytes]:
        """A message number, and the bytes to send.  Fields that are None are left out: absent is the protocol's default.

        Raises InvalidArgument for what cannot be sent at all (no Unicode text, a number past 64 bits, more than 64 KiB).
        """
        msgid = self._next
        try:
            if None in fields.values():
                fields = {name: value for name, value in fields.items() if value is not None}
            octets: bytes = self._pack((0, msgid, operation, (fields,)))
        except UnicodeEncodeError:
            raise InvalidArgument("invalid_argument: a field is not valid Unicode text") from None
        except (OverflowError, TypeError, ValueError) as wrong:
            raise InvalidArgument(f"invalid_argument: a field cannot be sent: {type(wrong).__name__}") from None
        if len(octets) > MAX_MESSAGE_BYTES:
            raise InvalidArgument(f"too_large: the request has {len(octets)} bytes, more than {MAX_MESSAGE_BYTES}")
        self._next = msgid + 1 if msgid < MAX_MSGID else 1
        self._open.add(msgid)
        return msgid, octets

    def receive(self, octets: bytes) -> tuple[list[int], list[Event]]:
        """Takes bytes as they came: the message numbers answered by now, and the events told.

        Bytes that are no answers, or an error that belongs to no request, set `fault`: then the connection is to be closed.
        Answers to requests that were given up are dropped.
        """
        if not self._replies.pending and (only := _plain(octets)) is not None:
            msgid = only.msgid
            if msgid in self._open:
                self._open.discard(msgid)
                self._answers[msgid] = only
                return [msgid], []
        answered: list[int] = []
        events: list[Event] = []
        arrived: list[Answer | Event] = []
        try:
            self._replies.feed(octets)
            while self._replies.pending and not self._replies.unfinished:
                arrived += self._replies.take()
        except FrameError as damage:
            self.fault = ProtocolFault(f"what answers is no leased daemon: {damage.text}")
        for message in arrived:
            if isinstance(message, Event):
                events.append(message)
            elif message.msgid in self._open:
                self._open.discard(message.msgid)
                self._answers[message.msgid] = message
                answered.append(message.msgid)
            elif message.msgid == 0 and message.error is not None:
                self.fault = fault_of(message.error)
        return answered, events

    def answered(self, msgid: int) -> bool:
        return msgid in self._answers

    def answer(self, msgid: int) -> dict[str, Any]:
        """Takes the answer, once.  Raises what its error says; ProtocolFault if the result is no map."""
        message = self._answers.pop(msgid)
        if message.error is not None:
            raise fault_of(message.error)
        if not isinstance(message.result, dict):
            raise ProtocolFault("a result that is no map")
        return message.result

    def forget(self, msgid: int) -> None:
        """Gives a request up: its answer will be dropped."""
        self._open.discard(msgid)
        self._answers.pop(msgid, None)

    def ended(self, why: str, *, sent: bool = True) -> LeasedClientError:
        """What an unanswered request raises now that the connection is over: the fault, if there was one."""
        return self.fault or ConnectionGone(why, sent=sent)
