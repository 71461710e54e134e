"""The `lease` command: finds the verb, runs it, and turns whatever happens into a sentence and an exit code.

Starting is most of what it costs, so nothing is imported before it is needed: the help page needs no socket, JSON only --json.
"""

from __future__ import annotations

import gc
import os
import sys

from leased.client.shell import (
    EXIT_BROKEN_PIPE,
    EXIT_INTERNAL,
    EXIT_INTERRUPTED,
    EXIT_PERMISSION,
    EXIT_UNKNOWN,
    EXIT_USAGE,
    EXIT_YES,
    Output,
    Usage,
    Verb,
    page,
    parse,
)
from leased.version import VERSION

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Final

    from leased.client.errors import LeasedClientError

_LEASES: Final = "leased.client.verbs"
_WATCHING: Final = "leased.client.watch_verbs"
_SCOPES: Final = "leased.client.scope_verbs"
_USAGE: Final = "leased.client.usage_verb"
_MCP: Final = "leased.client.mcp_verb"
_RUN: Final = "leased.client.run_verb"
_TOP: Final = "leased.client.top_verb"
_DOCTOR: Final = "leased.client.doctor_verb"
_COMPLETION: Final = "leased.client.completion_verb"

VERBS: Final = {
    "acquire": (_LEASES, "take a lease"),
    "renew": (_LEASES, "make it last longer"),
    "release": (_LEASES, "give it back"),
    "check": (_LEASES, "who holds a key?"),
    "list": (_LEASES, "all live leases"),
    "run": (_RUN, "run a command under a lease"),
    "wait": (_WATCHING, "until a key is free"),
    "watch": (_WATCHING, "what happens to leases, as it happens"),
    "heartbeat": (_SCOPES, "arm a scope's dead-man switch"),
    "resume": (_SCOPES, "what a scope holds, and what its switch did"),
    "revoke": (_LEASES, "end somebody's lease by force (operators)"),
    "usage": (_USAGE, "what was billed"),
    "info": (_LEASES, "about the daemon"),
    "top": (_TOP, "who holds what, live"),
    "doctor": (_DOCTOR, "is anything wrong, and what to do about it"),
    "mcp": (_MCP, "serve the tools of agents, by MCP"),
    "completion": (_COMPLETION, "what a shell completes behind `lease`"),
}
"""Where each verb lives (a module with a `VERBS` of its own), and the line about it on the help page."""

_HELP_HEAD: Final = """usage: lease VERB [options] ...

Leases for the processes and agents of this host: one holder per key, until it is released or its time is up.
"""

_HELP_TAIL: Final = """
`lease VERB --help` tells more.  All verbs take --socket PATH, --timeout DURATION, --json and -q.
The fence, the secret that renews and releases a lease, comes by --fence-file FILE, in LEASE_FENCE or on standard input, never as
an argument.

exit codes: 0 yes; 1 no (free, not released); 64 wrong usage; 69 no daemon, or nobody can tell; 70 internal; 75 refused;
77 not permitted; 79 the lease is lost; 130 interrupted; `lease run`: its command's.

  lease run gpu:0 -- python3 train.py
  eval "$(lease acquire gpu:0 --ttl 5m --format env)" && { train; lease release gpu:0; }"""


_BRIEF: Final = frozenset({_LEASES, _SCOPES, _USAGE})
"""Whose verbs end with their answer: nothing they leave behind is worth a search for garbage."""


def main(arguments: list[str] | None = None) -> int:
    """The exit code.  `arguments` as in sys.argv[1:]; None: those of this process, which ends now."""
    if arguments is not None:
        return _answered(arguments)
    words = sys.argv[1:]
    if words and words[0] in VERBS and VERBS[words[0]][0] in _BRIEF:
        gc.disable()  # looking for garbage that is not there takes a tenth of such a verb's time
    try:
        return _answered(words)
    finally:
        gc.freeze()  # nor is it looked for while Python ends


def _answered(words: list[str]) -> int:
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")  # a terminal that cannot show a key must not make the answer fail
    code = EXIT_INTERNAL
    try:
        code = _run(words)
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # so that nothing complains while Python ends
        return EXIT_BROKEN_PIPE
    except KeyboardInterrupt:
        code = EXIT_INTERRUPTED
    if code != EXIT_YES and _is_for_eval(words):
        print(f"(exit {code})", flush=True)  # `eval ""` would succeed, and the script go on without the lease
    return code


def _run(words: list[str]) -> int:
    name, rest = (words[0], words[1:]) if words else ("", [])
    if name in {"--help", "-h", "help"} and not rest:
        print(_overview())
        return EXIT_YES
    if name == "help":
        name, rest = rest[0], ["--help"]
    if name == "--version":
        print(f"lease {VERSION}")
        return EXIT_YES
    if name not in VERBS:
        return _failed(EXIT_USAGE, f"unknown verb {name!r}; `lease --help` lists them" if name else _overview())
    verb = _find(name)
    socket = ""
    try:
        given = parse(rest, verb)
        if given.switch("--help"):
            print(page(verb))
            return EXIT_YES
        socket = given.text("--socket") or ""
        return verb.run(given, Output(quiet=given.switch("--quiet"), json=given.switch("--json")))
    except Usage as wrong:
        return _failed(EXIT_USAGE, f"{wrong}\n`lease {name} --help` shows how.")
    except (BrokenPipeError, KeyboardInterrupt):
        raise
    except Exception as wrong:
        return _failed(*_judged(wrong, socket))


def _overview() -> str:
    return _HELP_HEAD + "\n" + "\n".join(f"  {name:<10} {line}" for name, (_, line) in VERBS.items()) + "\n" + _HELP_TAIL


def _find(name: str) -> Verb:
    verb: Verb = __import__(VERBS[name][0], fromlist=["VERBS"]).VERBS[name]
    return verb


def _judged(wrong: Exception, socket: str) -> tuple[int, str]:
    """Exit code and sentence.  A mistake of this program is told by type and place: its text could hold anything."""
    from leased.client.errors import LeasedClientError

    if not isinstance(wrong, LeasedClientError):
        trace = wrong.__traceback__
        while trace is not None and trace.tb_next is not None:
            trace = trace.tb_next
        place = f"{trace.tb_frame.f_code.co_filename}:{trace.tb_lineno}" if trace is not None else "unknown place"
        return EXIT_INTERNAL, f"internal error: {type(wrong).__name__} at {place}; please report it"
    from leased.client import core, wording

    return _code(wrong), wording.failed(wrong, core.socket_path(socket or None))


def _code(wrong: LeasedClientError) -> int:
    from leased.client import errors

    codes: dict[type[LeasedClientError], int] = {
        errors.InvalidArgument: EXIT_USAGE,
        errors.DaemonUnreachable: EXIT_UNKNOWN,
        errors.OutcomeUnknown: EXIT_UNKNOWN,
        errors.RateLimited: EXIT_UNKNOWN,
        errors.PermissionDenied: EXIT_PERMISSION,
    }
    return codes.get(type(wrong), EXIT_INTERNAL)


def _failed(code: int, text: str) -> int:
    print(f"lease: {text}" if not text.startswith("usage:") else text, file=sys.stderr)
    return code


def _is_for_eval(words: list[str]) -> bool:
    if words[:1] != ["acquire"]:
        return False
    return "--format=env" in words or any(word == "--format" and words[at + 1 : at + 2] == ["env"] for at, word in enumerate(words))


if __name__ == "__main__":
    sys.exit(main())
