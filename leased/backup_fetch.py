"""`leased backup` through the running daemon: the copy it makes, part by part."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any, Final

from leased.errors import PeerError, StoreError
from leased.operator_call import ask

_UNKNOWN: Final = "unknown_method"


def fetch(socket: Path, state_dir: Path, target: Path, mode: int) -> bool:
    """Write the copy to `target`, which must not exist.  False, and nothing written: no daemon answers at `socket`, or one of another state
    than `state_dir`, or one too old to be asked.  Raises PermissionError, StoreError, or OSError of `target`."""
    first = _asked(socket, {})
    if first is None or first["state_dir"] != os.path.realpath(state_dir):
        return False
    descriptor = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, mode)
    with os.fdopen(descriptor, "wb") as file:
        part, written = first, 0
        while True:
            octets = part["data"]
            if part["offset"] != written or not octets:
                raise StoreError(f"{socket}: the daemon's copy ends at {written} of {first['bytes']} bytes: try again")
            file.write(octets)
            written += len(octets)
            if written >= first["bytes"]:
                return True
            following = _asked(socket, {"copy": first["copy"], "offset": written})
            if following is None:
                raise StoreError(f"{socket}: the daemon went away in the middle of it: try again")
            part = following


def _asked(socket: Path, fields: dict[str, Any]) -> dict[str, Any] | None:
    try:
        return ask(socket, "backup", fields)
    except PeerError as error:
        if error.code == _UNKNOWN and not fields:
            return None
        if error.code == "permission_denied":
            raise PermissionError(errno.EACCES, error.text, str(socket)) from None
        raise StoreError(f"{socket}: {error.text}") from None
