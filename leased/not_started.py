"""A daemon that cannot start says why: to the log, to the service manager, and, without the why, to those who called it.

Under socket activation a caller waits in the backlog of a socket that outlives the daemon.  If nobody took it from there, systemd would start
the daemon for it again, at once and for ever: the exit code that forbids a restart does not forbid that.  So whoever waits is answered first.
"""

from __future__ import annotations

import contextlib
import selectors
import socket
import sys
import time
from email.utils import formatdate
from typing import Final

import structlog

from leased import frames
from leased.doors.problems import PROBLEM, problem_of, response
from leased.errors import ConfigError, LeasedError, PeerError
from leased.exits import EXIT_CONFIG, EXIT_PERMISSION, EXIT_USAGE, judged
from leased.log import configure
from leased.systemd import Inherited, Notifier, inherited, listening

log = structlog.get_logger()

FINAL: Final = frozenset({EXIT_USAGE, EXIT_PERMISSION, EXIT_CONFIG})  # the units do not restart after these
ANSWERING_SECONDS: Final = 3.0  # for callers that go on trying: a start that fails costs half a second of processor time
ASKED_SECONDS: Final = 0.5  # for one connection to say in which language it asks
TEXT: Final = "leased cannot start on this host; `systemctl status leased` and `journalctl -u leased` tell its operator why"


class NotStarted(LeasedError):
    """The daemon does not start because of `error`, and the log and whoever waited for it have been told."""

    def __init__(self, error: Exception) -> None:
        super().__init__(str(error))
        self.error = error


def tell(
    error: Exception,
    given: list[Inherited] | None = None,
    notifier: Notifier | None = None,
    *,
    socket: str = "",
    seconds: float = ANSWERING_SECONDS,
) -> NotStarted:
    """Tells of `error`, and returns what to raise, when no caller waits any more or after about `seconds`.

    `given` and `notifier` are made here when the start had not come to that.  Nothing of the error is told to callers: it may name
    paths and quote the configuration.
    """
    if given is None or notifier is None:
        configure()  # the configuration, which was to say how, has not been read
        given, notifier = inherited(), Notifier()
    code, text = judged(error, serving=True, socket=socket)
    lines = text.splitlines() or [type(error).__name__]
    if not sys.stderr.isatty():  # there the sentence itself follows, and is enough
        for line in lines:
            log.error("daemon.refused_start", error=line, exit_code=code)
    notifier.status(f"cannot start: {lines[0]}")
    if given:
        _answer(given, always=code not in FINAL, seconds=seconds)
    return NotStarted(error)


def _answer(given: list[Inherited], *, always: bool, seconds: float) -> None:
    """Everybody who calls within `seconds`; at once when nobody does, unless `always`: before a restart that nothing else slows down."""
    until = time.monotonic() + seconds
    with selectors.DefaultSelector() as waiting:
        for each in given:
            with contextlib.suppress(ConfigError):  # what is in the descriptor store is no socket
                listener = listening(each)
                listener.setblocking(False)
                waiting.register(listener, selectors.EVENT_READ)
        if not waiting.get_map() or not (always or waiting.select(0)):
            return
        while (left := until - time.monotonic()) > 0:
            for key, _ in waiting.select(left):
                if isinstance(key.fileobj, socket.socket):
                    _answer_one(key.fileobj)


def _answer_one(listener: socket.socket) -> None:
    """A caller that has gone, or that says nothing, harms nobody."""
    try:
        connection, _ = listener.accept()
    except OSError:
        return
    with connection:
        try:
            connection.settimeout(ASKED_SECONDS)
            try:
                asked = connection.recv(1 << 16)
            except TimeoutError:
                asked = b""
            connection.sendall(_http() if asked[:1].isupper() else frames.error(0, "internal", TEXT))
            connection.shutdown(socket.SHUT_WR)
        except OSError:
            pass


def _http() -> bytes:
    problem = problem_of(PeerError("internal", TEXT))
    return response(problem.status, PROBLEM, problem.document(), date=formatdate(usegmt=True), close=True)
