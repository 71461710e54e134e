"""What a client can raise.  A refusal is a value (`answers.Refusal`), but for `LeaseRefused`, which a `with` block needs."""

from __future__ import annotations

from leased.errors import LeasedError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from leased.client.answers import Refusal


class LeasedClientError(LeasedError):
    """Base of all that follows.  No message ever holds a fence, a request id or an agent key."""


class DaemonUnreachable(LeasedClientError):
    """No connection could be made, and nothing was sent: nothing happened."""

    def __init__(self, path: str, why: str) -> None:
        super().__init__(f"no daemon answers at {path}: {why}")
        self.path = path
        self.why = why


class OutcomeUnknown(LeasedClientError):
    """A request may have been carried out, but its answer was not seen in time.  Never permission to proceed."""

    def __init__(self, operation: str, why: str) -> None:
        super().__init__(f"the outcome of {operation!r} is not known: {why}")
        self.operation = operation
        self.why = why


class InvalidArgument(LeasedClientError):
    """The daemon (or the encoding) refused an argument; the message names the field and its bounds."""


class PermissionDenied(LeasedClientError):
    """Not for this caller: the socket's mode, a missing or wrong agent key, or an operation for operators only."""


class RateLimited(LeasedClientError):
    """A limit of the daemon is reached (they are all in `info`).  Nothing happened; try again later."""


class ProtocolFault(LeasedClientError):
    """The two ends do not understand each other: an unknown operation, an internal error, bytes that are no answer."""


class LeaseRefused(LeasedClientError):
    """`with client.lease(...)` got no lease; `refusal` tells who holds it and for how long."""

    def __init__(self, refusal: Refusal) -> None:
        super().__init__(f"the lease on {refusal.key!r} was refused: {refusal.reason}, held by {refusal.held_by!r}")
        self.refusal = refusal


class LeaseLost(LeasedClientError):
    """The lease is no longer held by this caller, or it can no longer be known that it is.  Stop touching the resource."""

    def __init__(self, key: str, reason: str, generation: int | None = None) -> None:
        super().__init__(f"the lease on {key!r} is lost: {reason}")
        self.key = key
        self.reason = reason
        self.generation = generation


class ConnectionGone(LeasedClientError):
    """The connection ended before the answer.  `sent`: some of the request had left.  Callers of `Client` never see it."""

    def __init__(self, why: str, *, sent: bool) -> None:
        super().__init__(why)
        self.sent = sent


_BY_CODE: dict[str, type[LeasedClientError]] = {
    "invalid_argument": InvalidArgument,
    "too_large": InvalidArgument,
    "permission_denied": PermissionDenied,
    "unauthenticated": PermissionDenied,
    "rate_limited": RateLimited,
}


def fault_of(error: object) -> LeasedClientError:
    """The exception for an error as it stands in a response: a string "code: text".  Unknown codes are protocol faults."""
    if not isinstance(error, str):
        return ProtocolFault(f"an error that is no text but {type(error).__name__}")
    code, _, _ = error.partition(":")
    return _BY_CODE.get(code, ProtocolFault)(error)
