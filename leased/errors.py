"""What may be raised, and whose fault it is.

A refusal is a reply, never an exception (see rules.py).  An exception means that one of three parties is broken: the peer
(its bytes or its arguments), the store (disk, map, files), or the configuration (the operator's).  Each error says what to do.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Final

CODES: Final = frozenset(
    {
        "invalid_argument",
        "unknown_method",
        "unauthenticated",
        "permission_denied",
        "too_large",
        "rate_limited",
        "internal",
    }
)


class LeasedError(Exception):
    """Base of every error this package raises on purpose."""


class PeerError(LeasedError):
    """The caller's mistake: one error reply of the form "code: text".

    `code` is one of CODES; `text` names the field and its bounds, never a secret; `fatal` ends the connection too.
    """

    def __init__(self, code: str, text: str, *, fatal: bool = False) -> None:
        super().__init__(f"{code}: {text}")
        self.code = code
        self.text = text
        self.fatal = fatal


def invalid(field: str, text: str) -> PeerError:
    """An `invalid_argument` that names the field first."""
    return PeerError("invalid_argument", f"{field} {text}")


class StoreError(LeasedError):
    """The state cannot be read or written now; it may heal (a full disk, an I/O error)."""


class StoreFull(StoreError):
    """The map or the file system has no room; releases and lapses still work."""


class StateRefused(LeasedError):
    """The state must not be opened as it is: another format, damage, a lost key.  Exit code 78; says what to do."""


class StateLocked(LeasedError):
    """Another daemon (or command) holds this directory.  Exit code 69 for commands, 78 for `serve`."""


class ConfigError(LeasedError):
    """The configuration is wrong: file, key, bound and remedy are in the message.  Exit code 78."""
