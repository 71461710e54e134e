"""`Lock`: the arguments, methods and exceptions of redis-py's `redis.lock.Lock`, on a lease.  Needs no redis.

    from leased import Client
    from leased.adapters.redis_lock import Lock

    with Lock(Client(), "gpu:0", timeout=30, blocking_timeout=10): ...

What differs, and why:

- `timeout` is the ttl: 0.1 to 3600 seconds.  None means "until released" in redis-py; a lease always has an end, so it is renewed
  in the background while the process lives, and ends with the process.
- `sleep` is taken and not used: waiting is a place in the daemon's queue, first come first served, and nothing is polled.
- `token` is the holder label that others see, not the credential, which the daemon draws.  Knowing it releases nothing.
- a forked child holds nothing.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Literal

from leased.adapters.acquiring import entered, until_granted
from leased.adapters.redis_errors import LockError, LockNotOwnedError, LockUnreachable
from leased.client.answers import Grant, Refusal, Unknown
from leased.client.errors import InvalidArgument, LeasedClientError

if TYPE_CHECKING:
    from leased.client.held import HeldLease
    from leased.client.sync import Client

LOG = logging.getLogger(__name__)
RENEWED_TTL_SECONDS: Final = (
    60.0  # of a lock without a timeout: the longest that the daemon's default keeps without a flush to disk
)
SHORTEST_TIMEOUT_SECONDS: Final = 0.1
LONGEST_TIMEOUT_SECONDS: Final = 3600.0


class _Own:
    """What one thread knows (or all, with thread_local=False): redis-py reads `lock.local.token`, and so do its users."""

    token: bytes | None = None
    lease: Grant | HeldLease | None = None
    process: int = 0


class _OwnOfThread(threading.local, _Own):
    pass


class Lock:
    """See the head of this module.  `redis`: a `leased.Client`, under the name that redis-py gave its first argument.

    Raises LockError (a ValueError) for what can never be leased: a timeout out of bounds, a name that is no UTF-8 text of 1 to 1,024
    bytes.  Any method that asks the daemon may raise LockUnreachable.
    """

    def __init__(
        self,
        redis: Client,
        name: str | bytes,
        timeout: float | None = None,
        sleep: float = 0.1,
        blocking: bool = True,
        blocking_timeout: float | None = None,
        thread_local: bool = True,
        raise_on_release_error: bool = True,
    ) -> None:
        if timeout and not SHORTEST_TIMEOUT_SECONDS <= timeout <= LONGEST_TIMEOUT_SECONDS:
            bounds = f"{SHORTEST_TIMEOUT_SECONDS:g} to {LONGEST_TIMEOUT_SECONDS:g} seconds"
            raise LockError(f"timeout must be {bounds}, or None: renewed while this process lives", lock_name=str(name))
        self.redis = redis
        self.name = name
        self.timeout = timeout or None
        self.sleep = sleep
        self.blocking = blocking
        self.blocking_timeout = blocking_timeout
        self.thread_local = bool(thread_local)
        self.raise_on_release_error = raise_on_release_error
        self.local: Any = _OwnOfThread() if thread_local else _Own()
        self._key = self._text(name, "a name")

    def __enter__(self) -> Lock:
        if self.acquire():
            return self
        raise self._error("Unable to acquire lock within the time specified")

    def __exit__(self, kind: type[BaseException] | None, raised: BaseException | None, trace: TracebackType | None) -> None:
        """Releases.  A release that fails is raised only where nothing else is: an exception of the block is never replaced."""
        try:
            self.release()
        except (LockError, LockUnreachable) as failed:
            if self.raise_on_release_error and kind is None:
                raise
            LOG.warning("at the end of its block a lock was not released: %s", failed)

    def acquire(
        self,
        sleep: float | None = None,
        blocking: bool | None = None,
        blocking_timeout: float | None = None,
        token: str | bytes | None = None,
    ) -> bool:
        """True once it is this lock's.  False where somebody else has it: at once without `blocking`, else after `blocking_timeout`
        seconds (None: as long as it takes).  Raises LockUnreachable where nobody can tell."""
        label = self._text(token, "a token") if token is not None else self.redis.holder
        seconds = blocking_timeout if blocking_timeout is not None else self.blocking_timeout
        if not (self.blocking if blocking is None else blocking):
            seconds = 0.0
        with self._translated():
            answer = until_granted(lambda wait: self._attempt(label, wait), seconds)
        if isinstance(answer, Refusal):
            return False
        self.local.lease, self.local.token, self.local.process = answer, label.encode(), os.getpid()
        return True

    def locked(self) -> bool:
        """Does anybody hold it?"""
        with self._translated():
            held = self.redis.check(self._key).held
        if held is None:
            raise LockUnreachable("the daemon cannot tell at the moment")
        return held

    def owned(self) -> bool:
        """Is it this lock's?  The daemon is asked, and a lock that renews itself and knows that it was lost is not."""
        lease = self._lease()
        if lease is None or (self.timeout is None and lease.lost):
            return False
        with self._translated():
            current = self.redis.check(self._key, lease.generation).current
        if current is None:
            raise LockUnreachable("the daemon cannot tell at the moment")
        return current

    @property
    def generation(self) -> int | None:
        """What redis-py has no word for: the number to hand to a store that must refuse stale writers.  None while not held."""
        lease = self._lease()
        return None if lease is None else lease.generation

    def release(self) -> None:
        """Raises LockError where this lock (this thread of it) holds nothing, LockNotOwnedError where it lapsed or was ended before.

        After LockUnreachable it is not known to be released: with a timeout it can be released again, without one it is renewed no
        more.  Either way it ends by itself.
        """
        lease = self._lease()
        if lease is None:
            raise self._error("Cannot release a lock that's not owned or is already unlocked")
        with self._translated():
            ended = self.redis.release(lease) if isinstance(lease, Grant) else lease.release()
        if ended is None or ended.ended is None:
            raise LockUnreachable("the release was not answered: the lease ends by itself")
        self.local.lease = self.local.token = None
        if not (ended or (ended.maybe and _boottime() < lease.deadline)):  # an answer was lost on the way: the first request did it
            raise self._error("Cannot release a lock that's no longer owned", LockNotOwnedError)

    def extend(self, additional_time: float, replace_ttl: bool = False) -> Literal[True]:
        """Adds seconds to what is left of it, or, with `replace_ttl`, makes that what is left.  At most 3600 in all."""
        lease = self._timed("extend")
        left = 0.0 if replace_ttl else max(0.0, lease.deadline - _boottime())
        return self._renewed(lease, left + additional_time, "extend")

    def reacquire(self) -> Literal[True]:
        """Makes what is left of it the timeout again."""
        lease = self._timed("reacquire")
        return self._renewed(lease, self.timeout, "reacquire")

    def _attempt(self, label: str, wait: float) -> Grant | HeldLease | Refusal | Unknown:
        if self.timeout is None:
            return entered(self.redis, self._key, wait, ttl=RENEWED_TTL_SECONDS, bind="process", holder=label)
        return self.redis.try_acquire(self._key, self.timeout, holder=label, wait=wait)

    def _lease(self) -> Any:
        return self.local.lease if self.local.process == os.getpid() else None

    def _timed(self, verb: str) -> Grant:
        lease = self._lease()
        if lease is None:
            raise self._error(f"Cannot {verb} an unlocked lock")
        if not isinstance(lease, Grant):
            raise self._error(f"Cannot {verb} a lock with no timeout")
        return lease

    def _renewed(self, lease: Grant, ttl: float | None, verb: str) -> Literal[True]:
        with self._translated():
            answer = self.redis.renew(lease, ttl=ttl)
        if isinstance(answer, Refusal):
            raise self._error(f"Cannot {verb} a lock that's no longer owned", LockNotOwnedError)
        if not isinstance(answer, Grant):
            raise LockUnreachable(f"whether it was renewed is not known: {answer.reason}")
        self.local.lease = answer
        return True

    def _text(self, given: str | bytes, what: str) -> str:
        try:
            return given if isinstance(given, str) else given.decode()
        except UnicodeDecodeError:
            raise LockError(f"{what} must be UTF-8 text", lock_name=repr(given)) from None

    def _error(self, text: str, kind: type[LockError] = LockError) -> LockError:
        return kind(text, lock_name=self.name)

    @contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except InvalidArgument as wrong:
            raise self._error(str(wrong)) from wrong
        except LeasedClientError as failed:
            raise LockUnreachable(str(failed)) from failed


def _boottime() -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME)
