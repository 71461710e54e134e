"""What the daemon says on stderr: one line per fact, with a name from one list.

Console text for a terminal, JSON lines otherwise; when stderr is the journal, `<N>event key=value` with sd-daemon's priorities.  No
line carries a fence, a key's text or an agent secret: fields with such names, and values that may contain such fields, are withheld
here whoever logs them.  Only the daemon imports this (structlog costs a quarter of a second); inner modules ask structlog itself.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Mapping, MutableMapping
from pathlib import PurePath
from traceback import format_tb
from types import MappingProxyType
from typing import Any, Final, TextIO, cast

import structlog

from leased.errors import LeasedError

Fields = MutableMapping[str, Any]

EVENTS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "bind.kept": "a renewal came over a connection whose process cannot be proven; the bind stays what it was",
        "outbox.full": "the outbox holds all it may: further events are counted in the totals but cannot be shipped",
        "outbox.dropped": "an operator deleted dead letters for good",
        "outbox.retried": "an operator put dead letters back into the outbox",
        "upstream.refused": "upstream refuses our credentials: events are kept and tried again more and more slowly",
        "upstream.failed": "upstream could not be reached or is in trouble: events are kept and tried again",
        "upstream.recovered": "upstream takes events again",
        "upstream.buried": "upstream will never take this event: it is a dead letter now",
        "upstream.paid": "a demand for payment was met within the caps",
        "upstream.unpaid": "a demand for payment was not met (no wallet, outside the caps), or a payment is under way whose outcome is not known",
        "upstream.payment_forgotten": "an operator said that the payment under way is over: the next demand is paid anew",
        "accept.paused": "no new connections are accepted: descriptors or memory ran out",
        "accept.resumed": "new connections are accepted again",
        "agent.added": "an operator made an agent key",
        "agent.revoked": "an operator ended an agent key",
        "backup.failed": "the ledger could not be copied for an operator",
        "backup.made": "an operator took a copy of the ledger",
        "config.refused": "the configuration could not be read again: what was in force stays",
        "config.reloaded": "the configuration was read again: what changed, and what waits for a restart",
        "daemon.draining": "a stop was asked for: nothing new is decided, answers still leave",
        "daemon.ready": "the daemon serves",
        "daemon.recovered": "the wait is over: every lease that may have been forgotten has lapsed",
        "daemon.recovering": "leases may have been forgotten: keys not known are not granted until the wait is over",
        "daemon.refused_start": "the daemon does not start: the message says why and what to do",
        "daemon.started": "the start is written: what is known is renewed, and keys are granted once any wait is over",
        "daemon.starting": "the daemon opens its state",
        "daemon.stopped": "the daemon has ended",
        "floor.lost": "a path no longer leads to the daemon's own directory: nothing is granted and the daemon exits",
        "http.listening": "HTTP is served at a TCP address too",
        "lane.failed": "a request could not be decided: a fault of the daemon itself, with its traceback",
        "lease.revoked": "an operator ended a lease by force",
        "leases.discarded": "the volatile state was of another boot or incarnation and was not used",
        "ledger.rebuilt": "the durable state was missing or behind and was written anew from the volatile one",
        "log.unknown_event": "a line was logged under a name that is not in this list",
        "loop.late": "the daemon was deaf for a while; that time lapses no lease",
        "peer.limit": "a caller reached a limit and was refused",
        "record.set_aside": "a damaged record was taken out of use",
        "scope.switch_missed": "a dead-man switch fell: the leases of its scope were released",
        "store.commit_failed": "a decision could not be committed: its callers were answered null",
        "store.flush_failed": "the ledger could not be flushed: long grants answer null until it can",
        "store.flush_recovered": "the ledger is flushed again",
        "store.full": "no room: nothing is granted; releases and lapses go on",
        "store.reopened": "an environment was closed, opened and read again after an error",
    }
)
"""Every event name, and what it says.  Names are an interface: alerts are written against them."""

WITHHELD: Final = "(withheld)"
CREDENTIALS: Final = frozenset(
    {
        "agent_key",
        "agent_secret",
        "arguments",
        "authorization",
        "body",
        "fence",
        "key",
        "key_text",
        "params",
        "password",
        "private_key",
        "request",
        "request_id",
        "rid",
        "secret",
        "token",
        "wallet_key",
    }
)
"""Field names whose values never leave: credentials, key texts, and what may contain them."""

_PRIORITIES: Final = {"debug": 7, "info": 6, "warning": 4, "error": 3, "critical": 2}  # sd-daemon(3)
ERROR_PREFIX: Final = f"<{_PRIORITIES['error']}>"
"""For a line to the journal that is no log line."""
_LEVELS: Final = {"debug": 10, "info": 20, "warning": 30, "error": 40}


class UnknownEvent(ValueError):
    """A name that EVENTS lacks was logged: add it there with its meaning, or use one that is there."""


def get_logger() -> structlog.typing.FilteringBoundLogger:
    """The logger.  It may be taken before `configure`, which it follows when it is first used."""
    return cast(structlog.typing.FilteringBoundLogger, structlog.get_logger())


def configure(
    level: str = "info",
    format: str = "auto",
    stream: TextIO | None = None,
    *,
    environ: Mapping[str, str] | None = None,
    strict: bool = False,
) -> str:
    """Sends every line of `level` ("debug", "info", "warning", "error") and above to `stream` (stderr).  Returns the form chosen.

    `format` is "console", "json", or "auto": "journal" when the stream is the journal, else "console" on a terminal, else "json".
    A line to the journal carries its priority whatever the form.  `strict`, for tests, raises UnknownEvent for a name EVENTS lacks;
    otherwise such a line becomes `log.unknown_event`.  A stream that cannot be written loses lines and harms nothing else.
    """
    stream = sys.stderr if stream is None else stream
    environ = os.environ if environ is None else environ
    journal = is_journal(stream, environ)
    terminal = stream.isatty()
    form = format if format != "auto" else "journal" if journal else "console" if terminal else "json"
    named = known_event if strict else _renamed_event
    stamp = structlog.processors.TimeStamper(fmt="iso", utc=True)
    chain: list[structlog.typing.Processor] = [structlog.processors.add_log_level, named, withhold]
    if form == "json":
        chain += [stamp, structlog.processors.JSONRenderer(sort_keys=False)]
    elif form == "journal":  # which stamps lines itself
        chain += [_key_values]
    else:
        colors = terminal and not environ.get("NO_COLOR") and environ.get("TERM") != "dumb"
        look = structlog.dev.ConsoleRenderer(colors=colors, exception_formatter=structlog.dev.plain_traceback, pad_event_to=22)
        chain += [_printable, stamp, look]
    structlog.configure(
        processors=[*chain[:-1], _prioritised(chain[-1])] if journal else chain,
        wrapper_class=structlog.make_filtering_bound_logger(_LEVELS[level]),
        logger_factory=lambda *_: _Lines(stream),
        cache_logger_on_first_use=False,  # a cached logger would go on writing to the stream it met first
    )
    return form


def is_journal(stream: TextIO, environ: Mapping[str, str]) -> bool:
    """Whether the stream is the one systemd connected to the journal: the same device and inode, so not after a redirection."""
    try:
        status = os.fstat(stream.fileno())
    except (OSError, ValueError):  # no descriptor, or closed
        return False
    return environ.get("JOURNAL_STREAM") == f"{status.st_dev}:{status.st_ino}"


def known_event(_logger: Any, _method: str, fields: Fields) -> Fields:
    """Raises UnknownEvent for a name that EVENTS lacks."""
    if fields.get("event") not in EVENTS:
        raise UnknownEvent(f"{fields.get('event')!r} is not in leased.log.EVENTS: add it there with its meaning")
    return fields


def _renamed_event(_logger: Any, _method: str, fields: Fields) -> Fields:
    """A line is not lost for its name; but what is not a plain name may be a sentence with anything in it."""
    event = fields.get("event")
    if event not in EVENTS:
        fields["event"] = "log.unknown_event"
        fields["name"] = event if isinstance(event, str) and re.fullmatch(r"[a-z_]{1,32}\.[a-z_]{1,32}", event) else WITHHELD
    return fields


def withhold(_logger: Any, _method: str, fields: Fields) -> Fields:
    """Replaces what may be a credential or a key's text, at any depth; `exc_info` becomes `exception`, a traceback."""
    raised = fields.pop("exc_info", None)
    for name, value in fields.items():
        fields[name] = WITHHELD if name in CREDENTIALS else _plain(value)
    error = raised[1] if isinstance(raised, tuple) else sys.exception() if raised is True else raised
    if error is not None:
        fields["exception"] = "\n".join(_traceback(error, set()))
    return fields


def _plain(value: Any) -> Any:
    """Scalars as they are, containers without credentials.  Anything else is named by its type: a request's repr shows a fence."""
    if value is None or type(value) in (str, int, float, bool):
        return value
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, Mapping):
        return {str(name): WITHHELD if name in CREDENTIALS else _plain(entry) for name, entry in value.items()}
    if type(value) in (list, tuple, set, frozenset):  # a named tuple is none of these
        return [_plain(entry) for entry in value]
    if isinstance(value, PurePath):
        return str(value)
    if isinstance(value, BaseException):
        return _told(value)
    return f"(withheld {type(value).__name__})"


def _told(error: BaseException) -> str:
    """The message of our own errors and the system's, whose contents are known; that of any other may quote what it choked on."""
    name = type(error).__name__
    if isinstance(error, LeasedError | OSError):
        return f"{name}: {error}"
    return f"{name}: {WITHHELD}" if error.args else name


def _traceback(error: BaseException, seen: set[int]) -> list[str]:
    """The lines of a traceback: frames, never the values in them; causes first, the members of a group indented below it."""
    seen.add(id(error))
    cause = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    lines = [*_traceback(cause, seen), "and then:"] if cause is not None and id(cause) not in seen else []
    lines += ["Traceback (most recent call last):", *"".join(format_tb(error.__traceback__)).splitlines(), _told(error)]
    if isinstance(error, BaseExceptionGroup):
        lines += [f"  | {line}" for member in error.exceptions if id(member) not in seen for line in _traceback(member, seen)]
    return [_escaped(line) for line in lines]


def _escaped(text: str) -> str:
    """On one line, without control characters: a holder's label must not forge lines or drive a terminal."""
    return text if text.isprintable() else json.dumps(text)[1:-1]


def _printable(_logger: Any, _method: str, fields: Fields) -> Fields:
    for name, value in fields.items():
        if isinstance(value, str) and name != "exception":  # its lines are printable already
            fields[name] = _escaped(value)
    return fields


def _key_values(_logger: Any, _method: str, fields: Fields) -> str:
    """`event key=value …`, values quoted where they are not one plain word; a traceback on the lines below."""
    fields.pop("level", None)  # the priority tells
    traceback = str(fields.pop("exception", ""))
    words = [str(fields.pop("event"))]
    for name, value in fields.items():
        word = value if isinstance(value, str) and re.fullmatch(r"[!#-<>-~]+", value) else json.dumps(value)
        words.append(f"{name}={word}")
    return "\n".join([" ".join(words), *traceback.splitlines()])


def _prioritised(render: structlog.typing.Processor) -> structlog.typing.Processor:
    """Each line with sd-daemon's prefix: without it journald gives a traceback's further lines the default priority."""

    def prioritise(logger: Any, method: str, fields: Fields) -> str:
        prefix = f"<{_PRIORITIES.get(str(fields.get('level')), 6)}>"
        return "\n".join(prefix + line for line in str(render(logger, method, fields)).splitlines())

    return prioritise


class _Lines:
    """The end of the chain.  A stream that is full, closed or gone must not end the daemon: the line is lost."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def _line(self, message: str) -> None:
        try:
            self._stream.write(message + "\n")
            self._stream.flush()
        except (OSError, ValueError):
            pass

    debug = info = warning = error = critical = msg = _line
