"""The nouns: what a lease is, who asks, what may be asked, what was decided.  Frozen values only.

Named tuples, because one is built for every request and they cost a third of a frozen dataclass.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

MAX_KEY_BYTES: Final = 1024
MAX_HOLDER_BYTES: Final = 256
MAX_SCOPE_BYTES: Final = 256
MIN_TTL_SECONDS: Final = 0.1
MAX_TTL_SECONDS: Final = 3600.0
DEFAULT_TTL_SECONDS: Final = 60.0
MAX_WAIT_SECONDS: Final = 300.0
MIN_FENCE: Final = 2**53  # no fence can be mistaken for a generation, nor survive a float unnoticed
MAX_FENCE: Final = 2**63 - 1
MAX_GENERATION: Final = 2**53 - 1

BIND_NONE: Final = 0
BIND_PROCESS: Final = 1
BIND_CONNECTION: Final = 2
BIND_NAMES: Final = ("none", "process", "connection")

LOCK_CLAIM: Final = 0
LOCK_RELEASE: Final = 1
LOCK_CHECK: Final = 2
LOCK_OPS: Final = ("claim", "release", "check")

Reply = dict[str, Any]
"""A reply as the doors print it: the field names of the protocol, plain values."""


FREE: Final[Reply] = {"amount": "0", "currency": "USDC", "event_id": None}
"""The charge of what costs nothing, in the default currency."""


made: Final[Any] = tuple.__new__
"""`made(Lease, (...))`, with every field in its order, is `Lease(...)` for a third of its time.  For the hot path."""


class Identity(NamedTuple):
    """Who asks, established once at the door and passed inward.  `agent`: the name of the agent whose key was brought, if one was."""

    namespace: str
    uid: int
    pid: int
    operator: bool
    agent: str = ""


class Instant(NamedTuple):
    """The instant of one batch.  `judged` decides what has lapsed; `boot` is where new deadlines count from (both CLOCK_BOOTTIME
    seconds; they differ only while the daemon catches up with time it was deaf); `wall` is printed, and so is `free`, the charge of what is free."""

    judged: float
    boot: float
    wall: float
    boot_id: str
    free: Reply = FREE


class Fresh(NamedTuple):
    """The fence and the generation the next grant would get, drawn before the rules are asked."""

    generation: int
    fence: int
    proof: bytes


class Ask(NamedTuple):
    """A caller's credentials, digested: what the rules compare.  Empty bytes: not presented."""

    namespace: str
    proof: bytes = b""
    rid: bytes = b""
    rid_mask: int = 0
    spent: bool = False


class Lease(NamedTuple):
    """One lease as it is stored.  Instants are CLOCK_BOOTTIME seconds.

    `proof` is a keyed hash of the fence; the fence itself is never stored.  `sealed` is the fence masked by the request_id that asked
    for it, so that only whoever repeats that request_id can be told the fence again.  `unflushed`: no true answer about this lease may
    leave until the ledger has been flushed; then `previous_ttl` and `previous_deadline` are what a failed flush gives back
    (both 0 for a fresh grant, which it takes back altogether).
    """

    namespace: str
    holder: str
    scope: str | None
    generation: int
    proof: bytes
    ttl: float
    deadline: float
    bind: int = BIND_NONE
    rid: bytes = b""
    sealed: int = 0
    rid_until: float = 0.0
    presented: bool = False
    unflushed: bool = False
    previous_ttl: float = 0.0
    previous_deadline: float = 0.0


class Tombstone(NamedTuple):
    """What remains of a request_id whose lease ended before its original deadline: enough to answer `spent`."""

    key_hash: bytes
    holder_hash: bytes
    until: float


class LeaseRequest(NamedTuple):
    """`lease`.  `ttl` None: a fresh grant gets DEFAULT_TTL_SECONDS, a renewal keeps the lease's own."""

    key: str
    holder: str
    ttl: float | None = None
    fence: int | None = None
    scope: str | None = None
    wait: float = 0.0
    bind: int = BIND_NONE
    request_id: bytes | None = None
    agent_key: str | None = None


class RenewRequest(NamedTuple):
    key: str
    holder: str
    fence: int
    ttl: float | None = None
    agent_key: str | None = None


class ReleaseRequest(NamedTuple):
    key: str
    fence: int
    holder: str | None = None
    agent_key: str | None = None


class CheckRequest(NamedTuple):
    key: str
    generation: int | None = None
    agent_key: str | None = None


class ListRequest(NamedTuple):
    scope: str | None = None
    holder: str | None = None
    limit: int = 100
    cursor: int | None = None
    all: bool = False
    agent_key: str | None = None


class RevokeRequest(NamedTuple):
    """Exactly one of `key` and `key_hash` is given."""

    reason: str
    key: str | None = None
    key_hash: bytes | None = None
    namespace: str | None = None
    agent_key: str | None = None


class HeartbeatRequest(NamedTuple):
    scope: str
    expect_within: float | None = None
    agent_id: str | None = None
    disarm: bool = False
    agent_key: str | None = None


class ResumeRequest(NamedTuple):
    scope: str
    agent_key: str | None = None


class WatchRequest(NamedTuple):
    """At most one of `key` and `scope`; neither watches the whole namespace."""

    key: str | None = None
    scope: str | None = None
    agent_key: str | None = None


class UnwatchRequest(NamedTuple):
    agent_key: str | None = None


class UsageRequest(NamedTuple):
    since: float | None = None
    agent_key: str | None = None


class InfoRequest(NamedTuple):
    agent_key: str | None = None


class AgentLockRequest(NamedTuple):
    """`agent_lock`, the form of POST /agent-lock.  `op` is a position in LOCK_OPS; `token` is the fence; `holder` None: drawn anew."""

    key: str
    op: int = LOCK_CLAIM
    token: int | None = None
    ttl: float | None = None
    holder: str | None = None
    agent_key: str | None = None


class AgentAddRequest(NamedTuple):
    """`agent_add`.  `namespace` None: the name."""

    name: str
    namespace: str | None = None
    agent_key: str | None = None


class AgentListRequest(NamedTuple):
    agent_key: str | None = None


class AgentRevokeRequest(NamedTuple):
    name: str
    agent_key: str | None = None


class OutboxListRequest(NamedTuple):
    """`cursor`: the last sequence seen."""

    limit: int = 100
    cursor: int | None = None
    agent_key: str | None = None


class OutboxRetryRequest(NamedTuple):
    """Exactly one of `sequence` and `all`."""

    sequence: int | None = None
    all: bool = False
    agent_key: str | None = None


class OutboxDropRequest(NamedTuple):
    """Exactly one of `sequence`, `all` and `payment`, which is no dead letter but the payment under way."""

    sequence: int | None = None
    all: bool = False
    payment: bool = False
    agent_key: str | None = None


class BackupRequest(NamedTuple):
    """`copy` None: make one."""

    copy: str | None = None
    offset: int = 0
    agent_key: str | None = None


Request = (
    LeaseRequest
    | RenewRequest
    | ReleaseRequest
    | CheckRequest
    | ListRequest
    | RevokeRequest
    | HeartbeatRequest
    | ResumeRequest
    | WatchRequest
    | UnwatchRequest
    | UsageRequest
    | InfoRequest
    | AgentLockRequest
    | AgentAddRequest
    | AgentListRequest
    | AgentRevokeRequest
    | OutboxListRequest
    | OutboxRetryRequest
    | OutboxDropRequest
    | BackupRequest
)
