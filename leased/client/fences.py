"""How the command takes a fence and how it gives one away: never by arguments, never by accident."""

from __future__ import annotations

import os
import select
import sys

from leased.client.shell import Arguments, Usage

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Final

_STDIN_SECONDS: Final = 10.0  # out of the air: long enough for a pipe's other end to start, short enough not to hang a script
_MOST_BYTES: Final = 4096


def given_fence(arguments: Arguments, key: str, *, required: bool) -> str | None:
    """The fence by --fence-file, LEASE_FENCE or, only if one is required, standard input that is no terminal.

    LEASE_FENCE belongs to LEASE_KEY: where that names another key it does not count, so that a lease taken inside another one's
    environment does not present the other's fence.  Raises Usage; no message repeats what was read.
    """
    path = arguments.text("--fence-file")
    if path is not None:
        return _decimal(_from_stdin() if path == "-" else _from_file(path), f"--fence-file {path}")
    from_environment = os.environ.get("LEASE_FENCE")
    if from_environment and os.environ.get("LEASE_KEY", key) == key:
        return _decimal(from_environment, "LEASE_FENCE")
    if not required:
        return None
    text = "" if sys.stdin is None or sys.stdin.isatty() else _from_stdin()
    if not text.split():
        other = " (LEASE_FENCE is set, but LEASE_KEY names another key)" if from_environment else ""
        raise Usage(f"the lease's fence is needed: by --fence-file FILE, in LEASE_FENCE, or on standard input{other}")
    return _decimal(text, "standard input")


def _from_file(path: str) -> str:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:  # noqa: PTH123  pathlib costs as much as the socket
            return file.read(_MOST_BYTES)
    except OSError as wrong:
        raise Usage(f"--fence-file {path}: {wrong.strerror}") from None


def _from_stdin() -> str:
    """One line, or what comes before the end; bounded, because a pipe that nobody closes must not hang a script for ever."""
    read = b""
    try:
        while b"\n" not in read and len(read) < _MOST_BYTES:
            if not select.select([0], [], [], _STDIN_SECONDS)[0]:
                raise Usage(f"no fence arrived on standard input within {_STDIN_SECONDS:.0f} s")
            some = os.read(0, _MOST_BYTES)
            if not some:
                break
            read += some
    except OSError as wrong:
        raise Usage(f"standard input: {wrong.strerror}") from None
    return read.decode(errors="replace")


def _decimal(text: str, source: str) -> str:
    lines = text.split()
    if not lines:
        raise Usage(f"no fence in {source}")
    if not (lines[0].isascii() and lines[0].isdigit()) or len(lines) > 1:
        raise Usage(f"what {source} holds is no fence: a fence is one decimal number")
    return lines[0]


class FenceFile:
    """A file for a fence: made before the lease is asked for, mode 0600, in place all at once or not at all."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._draft = f"{path}.{os.getpid()}.{os.urandom(4).hex()}"
        try:
            self._file = os.open(self._draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        except OSError as wrong:
            raise Usage(f"--fence-out {path}: {wrong.strerror}") from None

    def keep(self, fence: str) -> None:
        """Raises OSError."""
        os.write(self._file, f"{fence}\n".encode())
        os.fsync(self._file)
        os.rename(self._draft, self._path)  # noqa: PTH104
        os.close(self._file)
        self._file = -1

    def discard(self) -> None:
        """Leaves nothing behind; after `keep` it does nothing."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
            os.unlink(self._draft)  # noqa: PTH108
