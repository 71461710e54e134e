"""What the daemon can answer, as types.  Truth means permission: a grant is true; a refusal and an unknown are false.

Plain classes, not tuples and not dataclasses: a grant carries a credential, which no repr, unpacking, `%` or json.dumps may spill,
and importing dataclasses costs the command more than half of what Python itself costs.  `reply` is always the daemon's own map.
"""

from __future__ import annotations

from leased.client.errors import ProtocolFault

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

Reply = dict[str, "Any"]


class Grant:
    """`acquired` true: the lease is the caller's until `deadline`.

    `deadline`: CLOCK_BOOTTIME seconds of this host, counted from before the request was sent, so never later than the daemon's
    own.  `fence` is the credential: kept out of the repr, and to be kept out of logs and argument lists.  `generation` is the
    number for stores that must refuse stale writers.
    """

    __slots__ = (
        "deadline",
        "expires_at",
        "expires_in_seconds",
        "fence",
        "generation",
        "holder",
        "key",
        "renewed",
        "reply",
        "scope",
        "ttl_seconds",
    )

    def __init__(self, reply: Reply, deadline: float) -> None:
        try:
            self.key: str = reply["key"]
            self.holder: str = reply["holder"]
            self.fence: str = str(reply["fence"])
            self.generation: int = reply["generation"]
            self.ttl_seconds: float = reply["ttl_seconds"]
            self.expires_in_seconds: float = reply["expires_in_seconds"]
        except KeyError as missing:
            raise ProtocolFault(f"a grant without {missing}") from None
        self.scope: str | None = reply.get("scope")
        self.renewed: bool = reply.get("renewed") is True
        self.expires_at: str = reply.get("expires_at", "")
        self.deadline = deadline
        self.reply = reply

    def __bool__(self) -> bool:
        return True

    def __repr__(self) -> str:
        return (
            f"Grant(key={self.key!r}, holder={self.holder!r}, generation={self.generation}, scope={self.scope!r}, "
            f"ttl_seconds={self.ttl_seconds}, renewed={self.renewed}, deadline={self.deadline:.3f})"
        )


class Refusal:
    """`acquired` false: somebody else's, or no longer the caller's.  `reason` is one of the protocol's words.

    The other fields are the live lease's, None where there is none.  `retry_after_seconds` is when it makes sense to ask again.
    """

    __slots__ = (
        "expires_at",
        "expires_in_seconds",
        "generation",
        "held_by",
        "holder",
        "key",
        "reason",
        "reply",
        "retry_after_seconds",
        "same_holder_label",
    )

    def __init__(self, reply: Reply) -> None:
        self.key: str = reply.get("key", "")
        self.holder: str = reply.get("holder", "")
        self.reason: str = reply.get("reason", "")
        self.held_by: str | None = reply.get("held_by")
        self.same_holder_label: bool = reply.get("same_holder_label") is True
        self.generation: int | None = reply.get("generation")
        self.expires_at: str | None = reply.get("expires_at")
        self.expires_in_seconds: float | None = reply.get("expires_in_seconds")
        self.retry_after_seconds: float | None = reply.get("retry_after_seconds")
        self.reply = reply

    def __bool__(self) -> bool:
        return False

    def __repr__(self) -> str:
        return (
            f"Refusal(key={self.key!r}, reason={self.reason!r}, held_by={self.held_by!r}, generation={self.generation}, "
            f"retry_after_seconds={self.retry_after_seconds})"
        )


class Unknown:
    """`acquired` null, or no answer in time: never permission to proceed, and no proof that nothing was granted.

    `request_id` (a credential, kept out of the repr) given to `try_acquire` again asks for the same grant; None for renewals.
    """

    __slots__ = ("holder", "key", "reason", "reply", "request_id", "retry_after_seconds")

    def __init__(self, reply: Reply, request_id: str | None = None) -> None:
        self.key: str = reply.get("key", "")
        self.holder: str = reply.get("holder", "")
        self.reason: str = reply.get("reason", "")
        self.retry_after_seconds: float = reply.get("retry_after_seconds") or 1.0
        self.request_id = request_id
        self.reply = reply

    def __bool__(self) -> bool:
        return False

    def __repr__(self) -> str:
        return f"Unknown(key={self.key!r}, reason={self.reason!r}, retry_after_seconds={self.retry_after_seconds})"


class Ended:
    """The answer to `release` and `revoke`; true if this call ended the lease.

    `ended` is None where the outcome is not known.  `maybe` is true when the answer is "nothing live", but an earlier attempt of
    the same call lost its answer: then either that attempt ended the lease, or it had lapsed before.
    """

    __slots__ = ("ended", "generation", "held_by", "key", "maybe", "reason", "reply")

    def __init__(self, reply: Reply, ended: bool | None, maybe: bool) -> None:
        self.key: str | None = reply.get("key")
        self.ended = ended
        self.reason: str | None = reply.get("reason")
        self.generation: int | None = reply.get("generation")
        self.held_by: str | None = reply.get("held_by")
        self.maybe = maybe
        self.reply = reply

    def __bool__(self) -> bool:
        return self.ended is True

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}(key={self.key!r}, ended={self.ended}, reason={self.reason!r}, "
            f"generation={self.generation}, maybe={self.maybe})"
        )


class Released(Ended):
    """The answer to `release`."""

    __slots__ = ()

    @property
    def released(self) -> bool | None:
        return self.ended

    @property
    def maybe_released(self) -> bool:
        return self.maybe


class Revoked(Ended):
    """The answer to `revoke`; `held_by` and `generation` are of the lease that was ended."""

    __slots__ = ()

    @property
    def revoked(self) -> bool | None:
        return self.ended

    @property
    def maybe_revoked(self) -> bool:
        return self.maybe


class Checked:
    """The answer to `check`; true if somebody holds the key.  `held` is None where unknown; `current` is about one generation."""

    __slots__ = (
        "current",
        "expires_at",
        "expires_in_seconds",
        "generation",
        "held",
        "held_by",
        "key",
        "reason",
        "reply",
        "waiting",
    )

    def __init__(self, reply: Reply) -> None:
        self.key: str = reply.get("key", "")
        self.held: bool | None = verdict(reply, "held")
        self.held_by: str | None = reply.get("held_by")
        self.generation: int | None = reply.get("generation")
        self.expires_at: str | None = reply.get("expires_at")
        self.expires_in_seconds: float | None = reply.get("expires_in_seconds")
        self.waiting: int = reply.get("waiting") or 0
        self.current: bool | None = reply.get("current")
        self.reason: str | None = reply.get("reason")
        self.reply = reply

    def __bool__(self) -> bool:
        return self.held is True

    def __repr__(self) -> str:
        return (
            f"Checked(key={self.key!r}, held={self.held}, held_by={self.held_by!r}, generation={self.generation}, "
            f"current={self.current})"
        )


def verdict(reply: Reply, name: str) -> bool | None:
    """The three-valued field an answer turns on.  Anything but true, false or null is no answer: `ProtocolFault`."""
    value = reply.get(name, reply)
    if value is None or isinstance(value, bool):
        return value
    raise ProtocolFault(f"an answer without a true, false or null {name!r}")


def answer_to_lease(reply: Reply, key: str, sent_at: float, request_id: str | None = None) -> Grant | Refusal | Unknown:
    """`sent_at`: CLOCK_BOOTTIME seconds from before the request that got this reply was sent."""
    acquired = verdict(reply, "acquired")
    if reply.get("key", key) != key:
        raise ProtocolFault("an answer about another key than the one asked for")
    if acquired is None:
        return Unknown(reply, request_id)
    if not acquired:
        return Refusal(reply)
    remaining = reply.get("expires_in_seconds")
    if not isinstance(remaining, int | float):
        raise ProtocolFault("a grant without 'expires_in_seconds'")
    return Grant(reply, sent_at + remaining)
