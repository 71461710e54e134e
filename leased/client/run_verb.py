"""The verb that runs a command under a lease: run.  What ends the command is in guardian.py."""

from __future__ import annotations

import os
import signal
import time

from leased.client import wording
from leased.client.answers import Grant, Refusal, Unknown
from leased.client.endgame import LEAST_TTL_SECONDS, Terms
from leased.client.errors import LeasedClientError
from leased.client.shell import EXIT_REFUSED, EXIT_UNKNOWN, Arguments, Option, Output, Usage, Verb
from leased.client.verbs import client_of

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import FrameType
    from typing import Final

    from leased.client.sync import Client

FORWARDED: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
_PARTING_SECONDS: Final = 1.0  # for an answer to what is asked after a signal: the caller wants us gone
LONGEST_WAIT_SECONDS: Final = 300.0  # that the daemon lets anybody queue for at once
_DEFAULT_TTL_SECONDS: Final = 60.0
_DEFAULT_KILL_AFTER_SECONDS: Final = 5.0


class Signalled(BaseException):
    """A signal came while the lease was waited for."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


def run(arguments: Arguments, out: Output) -> int:
    (key,) = arguments.operands
    terms, wait, conflict = _asked(arguments)
    for number in (
        signal.SIGCHLD,
        signal.SIGTSTP,
    ):  # ignored ones, as some parents leave them, would hide the command's end or stop
        signal.signal(number, signal.SIG_DFL)
    with client_of(arguments) as client:
        if not (arguments.text("--holder") or os.environ.get("LEASE_HOLDER")):
            client.holder = _own_label(client.holder)
        request_id = _drawn()
        try:
            signals = _raising()
            answer = _acquire(client, key, terms.ttl, wait, arguments, request_id)
            mask = signal.pthread_sigmask(signal.SIG_BLOCK, _all_blocked(signals))
        except Signalled as signalled:
            signal.pthread_sigmask(signal.SIG_BLOCK, FORWARDED)
            _leave_nothing(client, key, request_id)
            if signalled.number == signal.SIGINT:
                from leased.client.terminal import interrupted

                interrupted()
            return 128 + signalled.number
        if not isinstance(answer, Grant):
            out.record(answer.reply)
            out.aside(wording.refused(answer) if isinstance(answer, Refusal) else wording.unknown(answer))
            return conflict if isinstance(answer, Refusal) else EXIT_UNKNOWN
        from leased.client.running import Run

        return Run(client, answer, terms, out).to_the_end(arguments.command, signals, mask)


def _asked(arguments: Arguments) -> tuple[Terms, float | None, int]:
    """The terms, how long to wait (None: for ever), and the exit code of a refusal."""
    ttl, after = arguments.seconds("--ttl"), arguments.seconds("--kill-after")
    wait, conflict = arguments.seconds("--wait"), arguments.whole("--conflict-exit")
    if ttl is not None and ttl < LEAST_TTL_SECONDS:
        raise Usage(f"--ttl of `lease run` is at least {LEAST_TTL_SECONDS:g}s: below it a command cannot be ended in time")
    if arguments.switch("--no-wait"):
        if wait is not None:
            raise Usage("either --wait or --no-wait")
        wait = 0.0
    if conflict is not None and conflict > 255:
        raise Usage("--conflict-exit is an exit code, 0 to 255")
    return (
        Terms(
            _DEFAULT_TTL_SECONDS if ttl is None else ttl,
            arguments.text("--on-lost") or "term",
            _DEFAULT_KILL_AFTER_SECONDS if after is None else after,
        ),
        wait,
        EXIT_REFUSED if conflict is None else conflict,
    )


def _own_label(label: str) -> str:
    """Two commands that run from one shell are two holders: the process id is this one's."""
    return f"{label.rpartition(':')[0]}:{os.getpid()}"


def _drawn() -> str:
    from leased.client.core import draw_request_id

    return draw_request_id()


def _raising() -> list[signal.Signals]:
    """Makes each signal that is not ignored (nohup, a script's background job) end what waits; those it did that to.

    The first does; what comes with it (a terminal that closes, a service manager that is thorough) must not end the tidying up.
    """
    came: list[int] = []

    def end(number: int, _: FrameType | None) -> None:
        came.append(number)
        if len(came) == 1:
            raise Signalled(number)

    heeded = [number for number in FORWARDED if signal.getsignal(number) is not signal.SIG_IGN]
    for number in heeded:
        signal.signal(number, end)
    return heeded


def _all_blocked(signals: list[signal.Signals]) -> set[int]:
    from leased.client.guardian import WAKE

    others = (signal.SIGCHLD, signal.SIGTSTP, signal.SIGCONT, signal.SIGWINCH, signal.SIGTTIN, signal.SIGTTOU)
    return {*signals, *others, WAKE}


def _acquire(
    client: Client, key: str, ttl: float, wait: float | None, arguments: Arguments, request_id: str
) -> Grant | Refusal | Unknown:
    """Queues again as long as there is time: the daemon lets nobody queue for more than 300 s at once."""
    until = None if wait is None else time.monotonic() + wait
    while True:
        left = LONGEST_WAIT_SECONDS if until is None else min(until - time.monotonic(), LONGEST_WAIT_SECONDS)
        answer = client.try_acquire(
            key,
            ttl,
            wait=max(0.0, left),
            scope=arguments.text("--scope"),
            bind=arguments.text("--bind") or "none",
            request_id=request_id,
        )
        if not isinstance(answer, Refusal) or answer.reason not in {"held", "same_label"}:
            return answer
        if until is not None and time.monotonic() >= until:
            return answer


def _leave_nothing(client: Client, key: str, request_id: str) -> None:
    """The grant may have been on its way.  Nobody is billed: the attempt is repeated only where this label holds the key."""
    client.timeout = _PARTING_SECONDS
    try:
        if client.check(key).held_by == client.holder:
            answer = client.try_acquire(key, request_id=request_id)
            if isinstance(answer, Grant):
                client.release(answer)
    except LeasedClientError:
        pass  # the daemon is gone or hangs; what it granted, if it did, lapses


VERBS: Final = {
    "run": Verb(
        run,
        "lease run KEY [options] -- COMMAND [ARGUMENT]...",
        "Runs COMMAND while it holds the lease on KEY: waits for it, renews it, releases it at the end.  If the lease is lost, COMMAND and\n"
        "all it started are ended before anybody else can hold KEY; likewise when `lease run` itself is killed, stopped or hangs.\n"
        "In COMMAND's environment: LEASE_KEY, LEASE_GENERATION (for stores that refuse stale writers), LEASE_FENCE (the secret),\n"
        "LEASE_HOLDER, LEASE_EXPIRES_AT (as of the start), LEASED_SOCKET.  INT, TERM, HUP, QUIT, USR1 and USR2 are passed on to it.\n"
        "What COMMAND leaves running when it ends is ended too.  A job stopped by Ctrl-Z is not renewed: past the ttl it is ended.\n"
        "Exit: COMMAND's code, 128 + its signal, 126 (cannot be run), 127 (not found); 75 refused; 69 no daemon, or nobody can tell;\n"
        "79 the lease was lost.  A signal while waiting ends the wait: 128 + the signal.",
        (
            Option("--ttl", "DURATION", "how long the lease lasts without a renewal, 1s to 1h (default 60)"),
            Option("--wait", "DURATION", "how long to wait for it at most (default: as long as it takes)", short="-w"),
            Option("--no-wait", "", "give up at once if somebody holds it", short="-n"),
            Option("--conflict-exit", "CODE", "exit code if it is not to be had (default 75)", short="-E"),
            Option(
                "--on-lost",
                "WHAT",
                "term: TERM, then KILL, both before the lease ends (default); kill: KILL at once;\n"
                "ignore: COMMAND runs on WITHOUT the lease, beside whoever gets it next; exit 79 all the same",
                ("term", "kill", "ignore"),
            ),
            Option("--kill-after", "DURATION", "from TERM to KILL, if the lease lasts that long (default 5)"),
            Option("--holder", "LABEL", "who asks (default: $LEASE_HOLDER, else USER@HOST:PID of this command)"),
            Option("--scope", "SCOPE", "the unit of work the lease belongs to"),
            Option(
                "--bind",
                "BIND",
                "none: when `lease run` is killed, COMMAND is ended first and the lease released then (default);\n"
                "process: the lease ends at that instant, a moment before COMMAND does",
                ("none", "process"),
            ),
        ),
        (1, 1),
        (
            "lease run gpu:0 -- python3 train.py",
            "lease run -n backup -E 0 --ttl 5m -- restic backup /srv",
            "lease run deploy --wait 10m --kill-after 30s -- sh -c './deploy --generation \"$LEASE_GENERATION\"'",
        ),
        True,
    ),
}
