"""The tooz driver `leased+unix://`: `tooz.coordination.get_coordinator("leased+unix:///run/leased/leased.sock", b"member")`.

Without a path the socket is found as every client finds it ($LEASED_SOCKET, else the daemon's usual place).  Options, in the URL or
as arguments of get_coordinator:

    lock_timeout    the ttl of a lock in seconds, 0.1 to 3600, 30 unless given (`timeout` is taken as well, as other drivers do)
    bind            "process" (default): a lock also ends, at once, when the process dies; "none": by its ttl alone
    agent_key_file  a file with the agent key of a namespace

Locks are leases: the name is the key, so that a lock of tooz and a lease of anybody else exclude each other; the member id is the
holder label.  Each is renewed by a thread of its own at a third of its ttl: the coordinator's heart need not beat.  Groups have
members with capabilities, which leases have no room for: they raise tooz.NotImplemented, and so do watches and elections.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar, Final, NoReturn

import tooz
from tooz import coordination, locking, utils

from leased.adapters.acquiring import entered, until_granted
from leased.client.answers import Refusal
from leased.client.errors import DaemonUnreachable, LeasedClientError, LeaseLost, OutcomeUnknown
from leased.client.held import HeldLease
from leased.client.sync import Client

LOG = logging.getLogger(__name__)
DEFAULT_TTL_SECONDS: Final = 30.0  # what tooz's drivers for Redis and memcached take
OPTIONS: Final = frozenset({"lock_timeout", "timeout", "bind", "agent_key_file"})


class LeaseLock(locking.Lock):
    """One lock of one coordinator.  Not re-entrant: a second `acquire` waits for a `release`, whichever thread calls it."""

    def __init__(self, name: bytes, coordinator: LeasedDriver) -> None:
        super().__init__(name)
        self._key = text(name, "the name of a lock")
        self._coordinator = coordinator
        self._held: HeldLease | None = None

    def acquire(self, blocking: bool | float = True, shared: bool = False, timeout: float | None = None) -> bool:
        """True once it is acquired; False where somebody else has it, at once without `blocking`, else after the seconds given.

        Raises OperationTimedOut where nobody could tell until the end, ToozConnectionError where no daemon answers.
        """
        if shared:
            raise tooz.NotImplemented("a lease has one holder: there are no shared locks")
        waits, seconds = utils.convert_blocking(blocking, timeout)
        coordinator = self._coordinator
        with translated():
            client = coordinator.client()
            terms: dict[str, Any] = {"ttl": coordinator.ttl_seconds, "bind": coordinator.bind}
            answer = until_granted(lambda wait: entered(client, self._key, wait, **terms), seconds if waits else 0.0)
        if isinstance(answer, Refusal):
            return False
        self._held = answer
        if not coordinator.keep(self):
            self.release()
            raise tooz.ToozError("the coordinator was stopped meanwhile")
        return True

    def release(self) -> bool:
        """True if this call released it.  False where it was not acquired, was lost or broken before, or no daemon answered: in each
        case it is renewed no more."""
        held, self._held = self._held, None
        self._coordinator.drop(self)
        if held is None:
            return False
        try:
            ended = held.release()
        except LeaseLost:  # a forked child: the lock is the parent's
            return False
        if not ended:
            LOG.warning("the lock %r was not released: %s", self.name, "no answer" if ended is None else ended.reason)
        return bool(ended)

    def break_(self) -> bool:
        """Ends the lock whoever holds it; False where nobody does.  For operators of the daemon only: others get a ToozError."""
        with translated():
            return bool(self._coordinator.client().revoke(self._key, reason="broken by a tooz client"))

    def is_still_owner(self) -> bool:
        """The daemon is asked, unless this side knows already that it lost the lease."""
        held = self._held
        if held is None or held.lost:
            return False
        with translated():
            return self._coordinator.client().check(self._key, held.generation).current is True

    def heartbeat(self) -> bool:
        """Is it held, as far as this side knows?  It renews itself; there is nothing to call this for."""
        return self.acquired

    @property
    def acquired(self) -> bool:
        held = self._held
        return held is not None and not held.lost

    @property
    def generation(self) -> int | None:
        """What tooz has no word for: the number to hand to a store that must refuse stale writers.  None while not acquired."""
        held = self._held
        return None if held is None else held.generation


class LeasedDriver(coordination.CoordinationDriver):
    """The driver.  One daemon decides everything in one order, so every operation takes effect between its call and its return."""

    CHARACTERISTICS: ClassVar[tuple[Any, ...]] = (
        coordination.Characteristics.DISTRIBUTED_ACROSS_THREADS,
        coordination.Characteristics.DISTRIBUTED_ACROSS_PROCESSES,
        coordination.Characteristics.LINEARIZABLE,
        coordination.Characteristics.SERIALIZABLE,  # this and the next three follow from it
        coordination.Characteristics.SEQUENTIAL,
        coordination.Characteristics.CAUSAL,
        coordination.Characteristics.SAME_VIEW_ACROSS_CLIENTS,
    )
    """Not DISTRIBUTED_ACROSS_HOSTS: one host.  Not NON_TIMEOUT_BASED: a member that hangs loses its locks by the ttl."""

    def __init__(self, member_id: bytes | str, parsed_url: Any, options: dict[str, Any]) -> None:
        super().__init__(member_id, parsed_url, options)
        given = utils.collapse(options)
        unknown = sorted(given.keys() - OPTIONS)
        if unknown:
            raise tooz.ToozError(f"leased+unix knows no option {', '.join(unknown)}; there are {', '.join(sorted(OPTIONS))}")
        if parsed_url.netloc:
            raise tooz.ToozError(f"write leased+unix:///PATH with three slashes: {parsed_url.netloc!r} is no host here")
        self._socket: str | None = parsed_url.path or None
        self._holder = text(member_id, "a member id")
        self._agent_key_file: str | None = given.get("agent_key_file")
        self.bind: str = given.get("bind", "process")
        if self.bind not in ("process", "none"):
            raise tooz.ToozError("bind must be process or none")
        self.ttl_seconds = seconds(given.get("lock_timeout", given.get("timeout", DEFAULT_TTL_SECONDS)))
        self._client: Client | None = None
        self._guard = threading.Lock()
        self._acquired: set[LeaseLock] = set()

    def get_lock(self, name: bytes) -> LeaseLock:
        """The lock on the key `name`: UTF-8, 1 to 1,024 bytes."""
        return LeaseLock(name, self)

    def client(self) -> Client:
        """The connection of a started coordinator."""
        if self._client is None:
            raise tooz.ToozError("the coordinator is not started")
        return self._client

    def keep(self, lock: LeaseLock) -> bool:
        """False where the coordinator was stopped: nobody would release the lock."""
        with self._guard:
            if self._client is not None:
                self._acquired.add(lock)
            return self._client is not None

    def drop(self, lock: LeaseLock) -> None:
        with self._guard:
            self._acquired.discard(lock)

    def _start(self) -> None:
        try:
            key = Path(self._agent_key_file).read_text().strip() if self._agent_key_file else None
        except OSError as wrong:
            raise tooz.ToozError(f"agent_key_file: {wrong}", cause=wrong) from wrong
        client = Client(self._socket, self._holder, agent_key=key)
        with translated():
            client.info()
        self._client = client

    def _stop(self) -> None:
        """Releases every lock that is still acquired."""
        with self._guard:
            acquired = [*self._acquired]
            client, self._client = self._client, None
        for lock in acquired:
            lock.release()
        if client is not None:
            client.close()

    def _no_groups(self, *_: object, **__: object) -> NoReturn:
        raise tooz.NotImplemented("leases have no groups and no members: only locks")

    # tooz's own would take a callback that nothing ever calls
    watch_join_group = watch_leave_group = watch_elected_as_leader = _no_groups


def text(given: bytes | str, what: str) -> str:
    try:
        return given if isinstance(given, str) else given.decode()
    except UnicodeDecodeError as wrong:
        raise tooz.ToozError(f"{what} must be UTF-8", cause=wrong) from wrong


def seconds(given: Any) -> float:
    try:
        ttl = float(given)
    except (TypeError, ValueError):
        ttl = 0.0
    if not 0.1 <= ttl <= 3600:
        raise tooz.ToozError(f"lock_timeout must be 0.1 to 3600 seconds, not {given!r}")
    return ttl


@contextmanager
def translated() -> Iterator[None]:
    """tooz's exceptions for the client's."""
    try:
        yield
    except DaemonUnreachable as failed:
        raise coordination.ToozConnectionError(str(failed), cause=failed) from failed
    except OutcomeUnknown as unknown:
        raise coordination.OperationTimedOut(str(unknown), cause=unknown) from unknown
    except LeasedClientError as failed:
        raise tooz.ToozError(str(failed), cause=failed) from failed
