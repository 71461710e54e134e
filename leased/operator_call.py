"""One question to the running daemon, as `leased` itself asks it: the plainest client there is, without the library's repeats."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any, Final

from leased import frames
from leased.errors import PeerError, StoreError

ANSWER_SECONDS: Final = 10.0  # the daemon says null after 2 when its disk hangs
_READ_BYTES: Final = 65_536


def ask(path: Path, operation: str, fields: dict[str, Any]) -> dict[str, Any] | None:
    """The daemon's answer, or None where nobody listens.  Raises PeerError, StoreError for a connection without an answer, OSError."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as stream:
        stream.settimeout(ANSWER_SECONDS)
        try:
            stream.connect(str(path))
        except (FileNotFoundError, ConnectionRefusedError):
            return None
        except PermissionError as error:
            raise PermissionError(error.errno, error.strerror, str(path)) from None
        try:
            stream.sendall(frames.request(1, operation, fields))
            answers = frames.Replies()
            while chunk := stream.recv(_READ_BYTES):
                answers.feed(chunk)
                for answer in answers.take():
                    if isinstance(answer, frames.Answer) and answer.msgid in (0, 1):
                        return _result(answer)
        except TimeoutError:
            raise StoreError(f"{path}: no answer within {ANSWER_SECONDS:g} s: nobody can tell whether it was done") from None
        except ConnectionError:
            pass
    raise StoreError(f"{path}: the daemon hung up without an answer: ask again")


def _result(answer: frames.Answer) -> dict[str, Any]:
    if answer.error is not None:
        code, _, text = str(answer.error).partition(": ")
        raise PeerError(code, text)
    assert isinstance(answer.result, dict)
    return answer.result
