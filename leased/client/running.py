"""`lease run` from the grant to the exit code: renews, passes signals on, follows the shell's job control, releases.

The main thread only ever waits for signals, with all of them blocked, so there is no moment at which one could be missed; a second thread
renews, because an answer may take long.
"""

from __future__ import annotations

import os
import signal
import threading

from leased.client import family, guardian, wording
from leased.client.answers import Grant, Refusal
from leased.client.errors import LeasedClientError
from leased.client.guardian import WAKE, Board, boot_seconds
from leased.client.shell import EXIT_LOST, Output
from leased.client.terminal import MIRRORED, Terminal, interrupted, stop_too

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Final

    from leased.client.endgame import Terms
    from leased.client.sync import Client

_RETRY_SECONDS: Final = 1.0  # after a renewal that got no answer, or a tenth of the ttl if that is sooner
_PARTING_SECONDS: Final = 2.0  # for the release: a daemon that hangs must not hold up whoever waits for the command


class Run:
    """One command under one grant."""

    def __init__(self, client: Client, grant: Grant, terms: Terms, out: Output) -> None:
        self._client = client
        self._grant = grant
        self._terms = terms
        self._out = out
        self._board = Board()
        self._board.deadline = grant.deadline
        self._terminal = Terminal()
        self._over = threading.Event()
        self._told = False
        self._interrupted = False
        self._guardian = 0

    def to_the_end(self, command: list[str], signals: list[signal.Signals], mask: set[int]) -> int:
        """The exit code.  `signals` are passed on; they and those of job control are blocked, `mask` is what was blocked before."""
        try:
            self._guardian = guardian.spawn(self._board, command, self._environment(), self._terms, mask, self._release)
        except OSError as wrong:  # no room for another process
            self._release()
            self._out.aside(f"cannot run {wording.shown(command[0])}: {wrong.strerror}")
            return guardian.EXIT_CANNOT_RUN
        renewer = threading.Thread(target=self._renew, name=f"leased-renewer-{self._grant.generation}", daemon=True)
        renewer.start()
        code = self._follow(set(signals))
        self._over.set()
        self._terminal.take_back(int(self._board.child))
        lost = self._lost()
        if not lost:
            self._release()
        if self._board.wrong:
            self._out.aside(f"cannot run {wording.shown(command[0])}: {os.strerror(int(self._board.wrong))}")
        self._tell_loss()
        if self._interrupted and code == 128 + signal.SIGINT and not lost:
            interrupted()
        return EXIT_LOST if lost else code

    def _environment(self) -> dict[str, str]:
        own = {
            "LEASE_KEY": self._grant.key,
            "LEASE_FENCE": self._grant.fence,
            "LEASE_GENERATION": str(self._grant.generation),
            "LEASE_EXPIRES_AT": self._grant.expires_at,
            "LEASE_HOLDER": self._grant.holder,
            "LEASED_SOCKET": os.path.abspath(self._client.socket),  # noqa: PTH100
        }
        return {**os.environ, **own}

    # ---- the main thread

    def _follow(self, passed_on: set[signal.Signals]) -> int:
        """Until the command and all that came of it are gone; its exit code."""
        first = {signal.SIGCHLD, WAKE}
        following = first | passed_on | {signal.SIGTSTP, signal.SIGCONT, signal.SIGWINCH}
        while True:
            came = signal.sigtimedwait(following if self._board.child else first, 1.0)
            if self._guardian_is_gone():
                return int(self._board.code) - 1 if self._board.code else self._end_without_guardian()
            child = int(self._board.child)
            number = came.si_signo if came is not None else 0
            if self._lost():
                os.kill(self._guardian, WAKE)
                self._tell_loss()
            if child and not self._may_run():  # the guardian has been at it for a second, unless somebody stopped it
                family.signal_all(self._guardian, child, signal.SIGKILL)
            if self._board.stopped:
                self._join_stop(child)
            if number in passed_on or number in {signal.SIGTSTP, signal.SIGWINCH}:
                self._interrupted = self._interrupted or number == signal.SIGINT
                _pass_on(child, number)
            elif number == signal.SIGCONT and self._may_run() and not self._board.lost:
                self._terminal.give_again(child)
                _pass_on(child, number)

    def _guardian_is_gone(self) -> bool:
        pid, _ = os.waitpid(self._guardian, os.WNOHANG)
        return pid != 0

    def _end_without_guardian(self) -> int:
        """Somebody killed it.  The kernel killed the command; its orphans are this process's now, and go too."""
        child = int(self._board.child)
        code = 128 + signal.SIGKILL
        if child:
            own = os.getpid()
            while family.descendants(own):
                family.signal_all(own, child, signal.SIGKILL)
                family.reap_adopted(child)
                signal.sigtimedwait({signal.SIGCHLD}, 0.05)
            ended = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            code = ended if ended >= 0 else 128 - ended
        self._out.aside("the process that guards the command was killed, and the command with it")
        return code

    def _join_stop(self, child: int) -> None:
        number = int(self._board.stopped)
        self._board.stopped = 0
        if not self._terminal.exists or number not in MIRRORED:
            return
        if number != signal.SIGTSTP and self._terminal.give(child):
            _pass_on(child, signal.SIGCONT)
            return
        self._terminal.take_back(child)
        stop_too(number)
        if self._may_run() and not self._board.lost:
            if number != signal.SIGTSTP:
                self._terminal.give(child)
            self._terminal.give_again(child)
            _pass_on(child, signal.SIGCONT)

    def _may_run(self) -> bool:
        return self._terms.on_lost == "ignore" or boot_seconds() < self._board.deadline

    def _lost(self) -> bool:
        """The daemon said so, or no renewal came in time.  Once lost it stays lost."""
        if self._terms.on_lost == "ignore" and not self._over.is_set() and boot_seconds() >= self._board.deadline:
            self._board.lost = 1
        return bool(self._board.lost or self._board.ended)

    def _tell_loss(self) -> None:
        if self._lost() and not self._told:
            self._told = True
            why = "its renewal was refused" if self._board.lost and not self._board.ended else "no renewal was answered in time"
            what = "the command runs on without it" if self._terms.on_lost == "ignore" else "the command is ended"
            self._out.aside(f"the lease on {wording.shown(self._grant.key)} is lost ({why}); {what}")

    # ---- the second thread

    def _renew(self) -> None:
        at = self._grant.deadline - self._grant.ttl_seconds * 2 / 3
        while not self._over.wait(max(0.0, min(at - boot_seconds(), 1.0))) and not self._lost():
            before = boot_seconds()
            if before < at:  # timers stand still while the machine sleeps, the boot clock does not
                continue
            at = self._renew_once(before)
            if self._board.lost:
                os.kill(os.getpid(), WAKE)  # the main thread alone may signal the guardian: it knows whether that still lives

    def _renew_once(self, before: float) -> float:
        """One renewal, bounded by the deadline; when the next one is due."""
        deadline, ttl = self._board.deadline, self._grant.ttl_seconds
        try:
            answer = self._client.renew(self._grant, ttl=ttl, timeout=max(0.0, min(self._client.timeout, deadline - before)))
        except LeasedClientError:
            answer = None
        now = boot_seconds()
        if isinstance(answer, Grant) and now < deadline:
            self._board.deadline = answer.deadline
            return before + ttl / 3
        if isinstance(answer, Refusal) and not self._over.is_set():
            self._board.lost = 1
        return now + min(_RETRY_SECONDS, ttl / 10)

    def _release(self) -> None:
        self._client.timeout = _PARTING_SECONDS
        try:
            self._client.release(self._grant)
        except LeasedClientError:
            pass  # it lapses by itself


def _pass_on(child: int, number: int) -> None:
    """To the command's process group.  Its number is taken as long as the guardian lives, which leaves the command a zombie."""
    try:
        os.killpg(child, number)
    except (ProcessLookupError, PermissionError):
        pass
