"""What `redis_lock.Lock` raises: redis-py's own exceptions where redis is installed, so that code which catches them goes on doing so.

Elsewhere classes of the same names and shape, below the same built-in exceptions.
"""

from __future__ import annotations

try:
    from redis.exceptions import ConnectionError as _Unreachable
    from redis.exceptions import LockError, LockNotOwnedError
except ImportError:
    from builtins import ConnectionError as _Unreachable

    class LockError(ValueError):  # type: ignore[no-redef]
        """A lock could not be acquired, extended or released."""

        def __init__(self, message: str | None = None, lock_name: str | None = None) -> None:
            super().__init__(message)
            self.message = message
            self.lock_name = lock_name

    class LockNotOwnedError(LockError):  # type: ignore[no-redef]
        """It was this lock's, and is not any more."""


class LockUnreachable(_Unreachable):
    """No answer that means anything: no daemon, no permission, or one that cannot tell at the moment.  Never permission to proceed.

    A `redis.exceptions.ConnectionError` where redis is installed, else a built-in ConnectionError; the client's own error is its
    cause.
    """


__all__ = ["LockError", "LockNotOwnedError", "LockUnreachable"]
