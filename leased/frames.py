"""Bytes in, messages out, and back: MessagePack-RPC for both ends, without a socket and without a clock.

    [0, msgid, method, params]    a request            params is [map], or [] for an empty map
    [1, msgid, error, result]     its answer           error is nil or "code: text"
    [2, method, params]           a notification; one with other parameters, or a bin for a method, is for no server of our kind: ignored

`Requests` is the server's end of one connection, `Replies` the client's.  The theory of both:

* A message is first delimited, then decoded.  msgpack's streaming decoder keeps what it has built of an unfinished message where
  its buffer limit does not see it: 64 KiB of empty maps are 4 MB.  Its `skip` builds nothing, so a connection costs only the bytes
  that wait (twice: here and in msgpack's buffer), and a message is decoded by the same function however it was cut on its way.
* Most reads are exactly one flat request.  It is decoded in one call, and its bytes prove what the strict decoder would have
  proved (`single`).  Whatever is not as plain as that is decoded again with every rule in place (`_strict`).
* Damage is for ever: after a bad byte nobody knows where the next message begins.  The good messages before it are handed out
  first, then `take` raises `FrameError`, now and at every later call.

The names and bounds of parameters are not decided here: NaN, a bool for a number, or a bin for a string pass.
"""

from __future__ import annotations

import msgpack

from leased.errors import PeerError
from leased.light import Generic, NamedTuple, TypeVar

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, ClassVar, Final, NoReturn

MAX_MESSAGE_BYTES: Final = 64 * 1024  # thirty times the longest honest request; what one stranger may make the daemon remember
MAX_REPLY_BYTES: Final = 4 * 1024 * 1024  # a page of `list` ends near 128 KiB; the rest is room for daemons newer than the client
MAX_DEPTH: Final = 16  # containers, the message itself included; far below where repr, == or json would die of recursion
MAX_MSGID: Final = 2**32 - 1  # the MessagePack-RPC specification: a 32-bit number
MAX_ARRAY_ITEMS: Final = 1024  # the longest array in the protocol is a page of `list`, 1,000 entries
MAX_MAP_FIELDS: Final = 64  # several times the longest request
MAX_VALUES: Final = 2048  # in one message, as checking them costs the daemon time: 64 KiB can hold 65,000
MAX_FLAT_BYTES: Final = 512  # of a request for the fast path, which lets msgpack reserve a list per header as long as this
MAX_REPLY_MAP_FIELDS: Final = 1024  # `info` may grow
MAX_REPLY_VALUES: Final = 64 * 1024  # seven times a page of `list`
EVERYTHING: Final = 2**31  # a limit for `take` that no buffer reaches
SCANNER_BYTES: Final = 4096  # msgpack's first buffer per connection; it grows as needed, its own default is a megabyte

Octets = bytes | bytearray
Params = dict[str, "Any"]
Request = tuple[int | None, str, Params]
"""(msgid, method, params); msgid None is a notification."""


class FrameError(PeerError):
    """The byte stream is damaged: say so once with msgid 0 where that is still possible, then close.  Always fatal."""

    def __init__(self, code: str, text: str) -> None:
        super().__init__(code, text, fatal=True)


class Answer(NamedTuple):
    """The answer to request `msgid`.  `error` is "code: text" or None; an error with msgid 0 is about the connection."""

    msgid: int
    error: str | None
    result: Any


class Event(NamedTuple):
    """A notification from the daemon."""

    method: str
    params: Params


# msgpack's own exceptions are not all ValueErrors; a date beyond its Timestamp overflows, and its pure-Python twin recurses.
_DAMAGE: Final = (ValueError, TypeError, OverflowError, RecursionError, msgpack.UnpackException)
_OPENINGS: Final = frozenset({0x93, 0x94, 0xDC, 0xDD})  # the first byte of any array that could be a message
_CONTAINERS: Final = frozenset({list, dict})
_NAMES: Final = frozenset({str, bytes})  # of notifications: pynvim greets every server with one whose name is a bin
_SCALARS: Final = frozenset({str, int, float, bool, type(None), bytes})
_AFTER_MSGID: Final = bytes([3] * 128 + [0] * (0xCC - 128) + [4, 5, 7] + [0] * (256 - 0xCF))
"""By the third byte of a request: the index after its msgid if that is an int of 0..2^32-1, else 0, where no string begins."""


def _no_ext(code: int, _content: bytes) -> Any:
    raise FrameError("invalid_argument", f"message contains the extension type {code}; only plain MessagePack is spoken here")


def _fields(pairs: list[tuple[Any, Any]]) -> Params:
    """A map without surprises: with duplicate keys, two readers could each see another value."""
    fields = dict(pairs)
    if len(fields) != len(pairs):
        raise FrameError("invalid_argument", "message contains a map with a duplicate key")
    for key in fields:
        if type(key) is not str:
            raise FrameError("invalid_argument", "message contains a map with a key which is not a string")
    return fields


_RULES: Final[dict[str, Any]] = {
    "raw": False,
    "strict_map_key": True,
    "timestamp": 0,  # a Timestamp object, which _measure refuses: ext_hook is not asked about type -1, and datetimes overflow
    "max_array_len": MAX_ARRAY_ITEMS,
    "max_map_len": MAX_MAP_FIELDS,
    "ext_hook": _no_ext,
}
_REPLY_RULES: Final = {**_RULES, "max_map_len": MAX_REPLY_MAP_FIELDS}


def _strict(raw: Octets, rules: dict[str, Any], most: int) -> Any:
    """Decode exactly one whole message of at most `most` values.  Raises FrameError for what is not plain, flat enough MessagePack.

    Checking keys takes a call for each map, which nobody may ask for 65,000 times: what is long enough for that is counted first.
    """
    try:
        if len(raw) > most:
            _measure(msgpack.unpackb(raw, **rules), most)
        message = msgpack.unpackb(raw, object_pairs_hook=_fields, **rules)
    except FrameError:
        raise
    except UnicodeDecodeError:
        raise FrameError("invalid_argument", "message contains a string which is not UTF-8") from None
    except _DAMAGE:
        raise FrameError("invalid_argument", "message is not MessagePack, or is nested or counted beyond its limits") from None
    _measure(message, most)
    return message


def _measure(message: Any, most: int) -> None:
    """Refuse too many values, depth beyond MAX_DEPTH, and timestamps.

    Level by level: a recursive walk would itself be what it guards against.
    """
    level = [message] if type(message) in _CONTAINERS else []
    for _ in range(MAX_DEPTH):
        if not level:
            return
        inner = [item for outer in level for item in (outer.values() if type(outer) is dict else outer)]
        most -= len(inner)
        if most < 0:
            raise FrameError("invalid_argument", "message contains too many values")
        if msgpack.Timestamp in map(type, inner):
            raise FrameError("invalid_argument", "message contains a timestamp; instants are RFC 3339 strings here")
        level = [item for item in inner if type(item) in _CONTAINERS]
    if level:
        raise FrameError("invalid_argument", f"message is nested deeper than {MAX_DEPTH}")


def single(raw: Octets) -> Request | None:
    """The one request that `raw` is, if it is a short one with at most 15 scalar parameters and no oddity; else None.

    msgpack is called without the strict rules and their hook, which double its time.  What they would catch is read from the
    bytes: the map's header counts its fields, so duplicate keys come out fewer; containers, timestamps and extensions are not of a
    scalar type.  None means "ask the strict decoder", never "bad".  Short, because an array's room is reserved as its header claims,
    up to the length of `raw`: nested claims in 64 KiB make msgpack reserve 500 MB before it finds them false.
    """
    if len(raw) > MAX_FLAT_BYTES:
        return None
    try:
        at = _AFTER_MSGID[raw[2]]
        size = raw[at] - 0xA0
        at += size
        if raw[0] == 0x94 and raw[1] == 0 and 0 <= size < 32 and raw[at + 1] == 0x91:
            _, msgid, method, (params,) = msgpack.unpackb(raw)
            if 0x80 + len(params) == raw[at + 2] < 0x90:
                for key, value in params.items():
                    if type(key) is not str or type(value) not in _SCALARS:
                        return None
                return msgid, method, params
    except Exception:  # several messages, half of one, or damage: the strict decoder knows which
        return None
    return None


def _params(wrapped: Any) -> Params:
    if type(wrapped) is list:
        if not wrapped:
            return {}
        if len(wrapped) == 1 and type(wrapped[0]) is dict:
            fields: Params = wrapped[0]
            return fields
    raise FrameError("invalid_argument", "params must be [map], or [] for an empty map")


def _is_msgid(value: Any) -> bool:
    return type(value) is int and 0 <= value <= MAX_MSGID


def _request(message: Any) -> Request:
    """Check the envelope of a message sent to a server."""
    if type(message) is list and message and type(message[0]) is int:
        if len(message) == 4 and message[0] == 0 and _is_msgid(message[1]) and type(message[2]) is str:
            return message[1], message[2], _params(message[3])
        if len(message) == 3 and message[0] == 2 and type(message[1]) in _NAMES and type(message[2]) is list:
            if type(message[1]) is str and (not message[2] or (len(message[2]) == 1 and type(message[2][0]) is dict)):
                return None, message[1], _params(message[2])
            return None, "", {}  # for another kind of server: no operation, and whoever notifies expects no answer
    raise FrameError("invalid_argument", "message must be [0, msgid, method, params] or [2, method, params]")


def _answer(message: Any) -> Answer | Event:
    """Check the envelope of a message sent to a client."""
    if type(message) is list and message and type(message[0]) is int:
        if len(message) == 4 and message[0] == 1 and _is_msgid(message[1]) and (message[2] is None or type(message[2]) is str):
            return Answer(message[1], message[2], message[3])
        if len(message) == 3 and message[0] == 2 and type(message[1]) is str:
            return Event(message[1], _params(message[2]))
    raise FrameError("invalid_argument", "message must be [1, msgid, error, result] or [2, method, params]")


_M = TypeVar("_M")


class _Stream(Generic[_M]):
    """One direction of one connection: `feed` what was read, then `take` while `pending and not unfinished`.

    `pending` counts the bytes fed and not yet returned as messages.  `unfinished` says what the last `take` found: only the
    beginning of a message is left.  It is the same message as before for as long as `take` returns nothing: the time an unfinished
    message is given counts from when it was first seen, not from its latest byte.
    Feed only once everything was taken: then `pending` never exceeds the limit of one message plus one read.
    """

    __slots__ = ("_base", "_damage", "_fed", "_raw", "_scanner", "_start", "pending", "unfinished")
    _limit: ClassVar[int]  # bytes of one message

    def __init__(self) -> None:
        self._raw: Octets = b""
        self._scanner: Any = None  # exists (41 KB) only while more, or less, than one message waits
        self._base = 0  # what scanner.tell() said at _raw[0]
        self._fed = 0  # _raw[:_fed] is known to the scanner
        self._start = 0  # where the next message begins in _raw
        self._damage: FrameError | None = None
        self.pending = 0
        self.unfinished = False

    def feed(self, chunk: bytes) -> None:
        """Add what one read returned.  Never raises: only `take` does, so there is one place to end a connection.

        After damage the bytes are dropped.  A caller who reads on while complete messages wait untaken loses them, and this peer.
        """
        if self._damage is not None:
            return
        if not self.pending:
            self._raw = chunk
        else:
            if self.pending > self._limit:
                self._damage = FrameError("too_large", f"more than {self._limit} bytes of messages wait")
                self._raw, self._scanner = b"", None
                return
            if self._start or type(self._raw) is bytes:
                self._raw = bytearray(self._raw[self._start :])
                self._base += self._start
                self._fed -= self._start
                self._start = 0
            self._raw += chunk  # grows in place, so that one byte at a time is not quadratic
        self.pending += len(chunk)
        self.unfinished = False

    def take(self, limit: int = EVERYTHING) -> list[_M]:
        """Up to `limit` messages, oldest first.  Raises FrameError when damage is next, never before the messages ahead of it."""
        if self._damage is not None:
            self._refuse(self._damage)
        if not self.pending or limit < 1:
            return []
        if self._scanner is None:
            if (only := self._single(self._raw)) is not None:
                self._raw = b""
                self.pending = 0
                return [only]
            self._scanner = msgpack.Unpacker(read_size=SCANNER_BYTES, max_buffer_size=0)  # 0: no limit but ours on `pending`
        return self._scan(limit)

    def _scan(self, limit: int) -> list[_M]:
        raw, scanner, start, base = self._raw, self._scanner, self._start, self._base
        size = len(raw)
        messages: list[_M] = []
        damage = None
        try:
            if self._fed < size:
                scanner.feed(raw[self._fed :])
                self._fed = size
            while start < size and len(messages) < limit:
                scanner.skip()
                end = scanner.tell() - base
                if end - start > self._limit:
                    raise self._too_large()
                messages.append(self._decode(raw[start:end]))
                start = end
        except msgpack.OutOfData:
            if size - start >= self._limit:  # at least one byte is still to come
                damage = self._too_large()
            elif raw[start] not in _OPENINGS:
                damage = FrameError("invalid_argument", "message is not an array")
            else:
                self.unfinished = True
        except FrameError as error:
            damage = error
        except _DAMAGE:
            damage = FrameError("invalid_argument", "message is not MessagePack, or is nested beyond its limits")
        if start == size:
            self._clear()
            return messages
        self._start = start
        self.pending = size - start
        if damage is not None:
            if not messages:
                self._refuse(damage)
            self._damage = damage  # `pending` stays above 0: the caller comes back for it
        return messages

    def _too_large(self) -> FrameError:
        return FrameError("too_large", f"message exceeds {self._limit} bytes")

    def _clear(self) -> None:
        self._raw = b""
        self._scanner = None
        self._base = self._fed = self._start = self.pending = 0

    def _refuse(self, damage: FrameError) -> NoReturn:
        """Forget every byte, remember the damage, raise it."""
        self._clear()
        self.unfinished = False
        self._damage = damage
        raise damage.with_traceback(None)

    def _single(self, raw: Octets) -> _M | None:
        """The message if `raw` is exactly one and can be decoded at once; None leaves it to the scanner."""
        return None

    def _decode(self, raw: Octets) -> _M:
        """The message that `raw` is, all of it.  Raises FrameError."""
        raise NotImplementedError


class Requests(_Stream[Request]):
    """The server's end: (msgid, method, params), msgid None for notifications.  See the base class for feed and take."""

    __slots__ = ()
    _limit = MAX_MESSAGE_BYTES

    def _single(self, raw: Octets) -> Request | None:
        return single(raw)

    def _decode(self, raw: Octets) -> Request:
        return single(raw) or _request(_strict(raw, _RULES, MAX_VALUES))


class Replies(_Stream[Answer | Event]):
    """The client's end: answers and events.  The same hygiene with larger limits, for whoever listens on the path may be anyone."""

    __slots__ = ()
    _limit = MAX_REPLY_BYTES

    def _decode(self, raw: Octets) -> Answer | Event:
        return _answer(_strict(raw, _REPLY_RULES, MAX_REPLY_VALUES))


_pack: Final[Any] = msgpack.Packer().pack
"""One for all answers: building a Packer takes longer than packing.  Not for two threads; clients, which have some, use packb.

Raises TypeError, ValueError or OverflowError for what is not plain MessagePack; the next answer is not affected.
"""


def reply(msgid: int, result: Any) -> bytes:
    """[1, msgid, nil, result].  Only the daemon's own thread may call this, `error` and `notification`."""
    packed: bytes = _pack((1, msgid, None, result))
    return packed


def error(msgid: int, code: str, text: str) -> bytes:
    """[1, msgid, "code: text", nil]: a string, because several MessagePack-RPC clients break on a map."""
    packed: bytes = _pack((1, msgid, f"{code}: {text}", None))
    return packed


def notification(method: str, params: Params) -> bytes:
    """[2, method, [params]]."""
    packed: bytes = _pack((2, method, (params,)))
    return packed


def proof(nonce: Any) -> bytes:
    """The client's echo of a `prove` notification, from any thread: see doors/proof.py."""
    packed: bytes = msgpack.packb((2, "prove", ({"nonce": nonce},)))
    return packed


def request(msgid: int, method: str, params: Params) -> bytes:
    """[0, msgid, method, [params]], from any thread.  `msgid` is 0..2^32-1; 0 is best left to errors about the connection."""
    packed: bytes = msgpack.packb((0, msgid, method, (params,)))
    return packed
