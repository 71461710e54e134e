"""The verbs about one lease, and those of the operator: acquire, renew, release, check, list, revoke, info.

Each takes what was given and where to speak, and returns the exit code.  Other groups of verbs live in modules of their own, each
with such a `VERBS`; `command.py` knows which verb is where.
"""

from __future__ import annotations

import os

from leased.client import wording
from leased.client.answers import Grant, Refusal
from leased.client.errors import LeasedClientError
from leased.client.fences import FenceFile, given_fence
from leased.client.shell import (
    EXIT_INTERNAL,
    EXIT_LOST,
    EXIT_NO,
    EXIT_REFUSED,
    EXIT_UNKNOWN,
    EXIT_YES,
    Arguments,
    Option,
    Output,
    Usage,
    Verb,
    default_holder,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Final

    from leased.client.sync import Client

_FENCE_FILE: Final = Option("--fence-file", "FILE", "read the fence from FILE, '-' for standard input (default: $LEASE_FENCE)")
_HOLDER: Final = Option("--holder", "LABEL", "who asks (default: $LEASE_HOLDER, else USER@HOST:PID of the calling shell)")


_BIND_REFUSED: Final = (
    "a lease that `lease acquire` binds to its process or its connection ends when `lease acquire` does, before anybody can use it, "
    "and it cannot be bound to the process that called: only a process itself can prove to the daemon which one it is.  "
    "`lease run KEY -- COMMAND` holds a lease as long as COMMAND runs; a program binds by the client library; "
    "else take a short --ttl and renew it"
)


def client_of(arguments: Arguments) -> Client:
    """The client all verbs ask through.  LEASED_AGENT_KEY is a secret, so the environment is the only way to give it."""
    from leased.client.sync import Client  # not before: a help page needs neither sockets nor threads

    timeout = arguments.seconds("--timeout")
    client = Client(
        arguments.text("--socket"),
        arguments.text("--holder") or default_holder(),
        agent_key=os.environ.get("LEASED_AGENT_KEY") or None,
    )
    if timeout is not None:
        client.timeout = timeout
    return client


def acquire(arguments: Arguments, out: Output) -> int:
    (key,) = arguments.operands
    form = arguments.text("--format") or "text"
    out.json = out.json or form == "json"
    if (arguments.text("--bind") or "none") != "none":
        raise Usage(_BIND_REFUSED)
    fence = given_fence(arguments, key, required=False)
    path = arguments.text("--fence-out")
    ttl, wait = arguments.seconds("--ttl"), arguments.seconds("--wait")
    fence_file = FenceFile(path) if path is not None else None
    try:
        with client_of(arguments) as client:
            answer = client.try_acquire(
                key, 60.0 if ttl is None else ttl, wait=wait or 0.0, scope=arguments.text("--scope"), fence=fence
            )
            if not isinstance(answer, Grant):
                out.record(answer.reply)
                refused = isinstance(answer, Refusal)
                sentence = wording.refused(answer) if isinstance(answer, Refusal) else wording.unknown(answer)
                (out.aside if form == "env" else out.sentence)(sentence)
                return EXIT_REFUSED if refused else EXIT_UNKNOWN
            try:
                if fence_file is not None:
                    fence_file.keep(answer.fence)
                _tell_grant(answer, form, arguments, out)
                out.flush()
            except OSError as wrong:  # a full disk, a closed pipe: a lease whose fence nobody has must not stay
                if not answer.renewed and (path is None or not isinstance(wrong, BrokenPipeError)):
                    _let_go(client, answer)
                if isinstance(wrong, BrokenPipeError):
                    raise
                out.aside(f"the fence could not be handed over ({wrong.strerror}), so the lease was released")
                return EXIT_INTERNAL
    finally:
        if fence_file is not None:
            fence_file.discard()
    return EXIT_YES


def _tell_grant(grant: Grant, form: str, arguments: Arguments, out: Output) -> None:
    show = arguments.switch("--show-fence")
    out.record(grant.reply)
    if form == "env":
        socket = arguments.text("--socket")
        for name, value in (
            ("LEASE_KEY", grant.key),
            ("LEASE_FENCE", grant.fence),
            ("LEASE_GENERATION", str(grant.generation)),
            ("LEASE_EXPIRES_AT", grant.expires_at),
            ("LEASE_HOLDER", grant.holder),
            *([("LEASED_SOCKET", socket)] if socket else ()),
        ):
            out.line(f"export {name}={quoted(value)}")
        return
    out.sentence(wording.granted(grant, show_fence=show))
    if not (show or out.json or grant.renewed or arguments.switch("--fence-out")):
        out.aside(wording.FENCE_NOT_KEPT)


def _let_go(client: Client, grant: Grant) -> None:
    try:
        client.release(grant)
    except LeasedClientError:
        pass  # it lapses by itself


def quoted(text: str) -> str:
    """Text as one word of a POSIX shell."""
    return "'" + text.replace("'", "'\\''") + "'"


def renew(arguments: Arguments, out: Output) -> int:
    (key,) = arguments.operands
    fence = given_fence(arguments, key, required=True)
    with client_of(arguments) as client:
        answer = client.renew(key, fence, ttl=arguments.seconds("--ttl"))
    out.record(answer.reply)
    if isinstance(answer, Grant):
        out.sentence(wording.granted(answer))
        return EXIT_YES
    if isinstance(answer, Refusal):
        out.sentence(wording.refused(answer))
        return EXIT_LOST
    out.sentence(wording.unknown(answer))
    return EXIT_UNKNOWN


def release(arguments: Arguments, out: Output) -> int:
    """The fence alone proves the right to release; a holder label is checked only if one was given."""
    (key,) = arguments.operands
    fence = given_fence(arguments, key, required=True)
    holder = arguments.text("--holder") or os.environ.get("LEASE_HOLDER")
    with client_of(arguments) as client:
        answer = client.release(key, fence, holder=holder)
    out.record(answer.reply)
    out.sentence(wording.ended(answer, key, "released"))
    return _verdict(answer.ended)


def check(arguments: Arguments, out: Output) -> int:
    (key,) = arguments.operands
    generation = arguments.whole("--generation")
    with client_of(arguments) as client:
        answer = client.check(key, generation)
    out.record(answer.reply)
    if generation is None or answer.held is None:
        out.sentence(wording.checked(answer))
        return _verdict(answer.held)
    out.sentence(wording.current(answer, generation))
    return _verdict(answer.current)


def list_leases(arguments: Arguments, out: Output) -> int:
    limit = arguments.whole("--limit")
    count = 0
    page = 1000 if limit is None else max(1, min(limit, 1000))
    with client_of(arguments) as client:
        leases = client.list(
            scope=arguments.text("--scope"), holder=arguments.text("--holder"), page=page, all=arguments.switch("--all")
        )
        for lease in leases:
            if limit is not None and count >= limit:
                break
            out.record(lease)
            out.sentence(wording.listed(lease))
            count += 1
    if not count:
        out.sentence("No live lease.")
    return EXIT_YES


def revoke(arguments: Arguments, out: Output) -> int:
    key_hash, reason = arguments.text("--key-hash"), arguments.text("--reason")
    if bool(arguments.operands) == (key_hash is not None):
        raise Usage("revoke takes either a KEY or --key-hash HASH")
    if not reason:
        raise Usage("revoke needs --reason TEXT: it is logged, for whoever asks who ended the lease and why")
    key = arguments.operands[0] if arguments.operands else None
    with client_of(arguments) as client:
        answer = client.revoke(key, reason, key_hash=key_hash, namespace=arguments.text("--namespace"))
    out.record(answer.reply)
    out.sentence(wording.ended(answer, key or f"#{key_hash}", "revoked"))
    return _verdict(answer.ended)


def tell_info(arguments: Arguments, out: Output) -> int:
    with client_of(arguments) as client:
        reply = client.info()
        socket = client.socket
    out.record(reply)
    for line in wording.told({"socket": socket, **reply}):
        out.sentence(line)
    return EXIT_YES


def _verdict(answer: bool | None) -> int:
    return EXIT_UNKNOWN if answer is None else EXIT_YES if answer else EXIT_NO


VERBS: Final = {
    "acquire": Verb(
        acquire,
        "lease acquire KEY [--ttl 60] [--wait 0] [--holder LABEL] [--scope SCOPE] [--bind none] [--format FORM] [--fence-out FILE]",
        "Takes the lease on KEY.  Exit 0: it is yours.  75: somebody else's.  69: nobody can tell; do not go on.\n"
        "The fence in the answer is the secret that renews and releases the lease.  It is printed only where asked for.",
        (
            Option("--ttl", "DURATION", "how long it lasts, 0.1s to 1h (default 60)"),
            Option("--wait", "DURATION", "how long to queue while it is held, up to 5m (default 0)"),
            _HOLDER,
            Option("--scope", "SCOPE", "the unit of work it belongs to"),
            Option(
                "--bind", "BIND", "none: this command ends at once, and a bound lease with it", ("none", "process", "connection")
            ),
            Option("--fence-file", "FILE", "present the fence in FILE, '-' for standard input: a live lease's renews it"),
            Option("--fence-out", "FILE", "write the fence to FILE, readable by you alone"),
            Option("--show-fence", "", "print the fence with the answer"),
            Option("--format", "FORM", "text, json, or env: lines for eval, the fence among them", ("text", "json", "env")),
        ),
        (1, 1),
        (
            'eval "$(lease acquire gpu:0 --ttl 5m --format env)" && { train; lease release gpu:0; }',
            "lease acquire backup --wait 30s --fence-out ~/.backup.fence && lease release backup --fence-file ~/.backup.fence",
        ),
    ),
    "renew": Verb(
        renew,
        "lease renew KEY [--ttl DURATION] [--holder LABEL] [--fence-file FILE]",
        "Renews the lease on KEY.  Exit 0: it is still yours.  79: it is lost; stop.  69: nobody can tell.",
        (Option("--ttl", "DURATION", "how long it lasts from now (default: as before)"), _HOLDER, _FENCE_FILE),
        (1, 1),
        ("lease renew gpu:0", "lease renew backup --ttl 10m --fence-file ~/.backup.fence"),
    ),
    "release": Verb(
        release,
        "lease release KEY [--holder LABEL] [--fence-file FILE]",
        "Ends the lease on KEY.  Exit 0: released.  1: it was not yours, or already over.  69: nobody can tell.",
        (Option("--holder", "LABEL", "also check who holds it (default: $LEASE_HOLDER)"), _FENCE_FILE),
        (1, 1),
        ("lease release gpu:0", "lease release backup --fence-file - < ~/.backup.fence"),
    ),
    "check": Verb(
        check,
        "lease check KEY [--generation N]",
        "Tells who holds KEY.  Exit 0: held.  1: free.  69: nobody can tell.\n"
        "With --generation: 0 if the lease of exactly that generation is live, else 1.",
        (Option("--generation", "N", "is this generation's lease the live one?"),),
        (1, 1),
        ("lease check gpu:0", 'lease check gpu:0 --generation "$LEASE_GENERATION" -q || echo lost'),
    ),
    "list": Verb(
        list_leases,
        "lease list [--scope SCOPE] [--holder LABEL] [--limit N] [--all]",
        "Lists the live leases, oldest first; with --json one object per line.  A key the daemon has not seen since its start is\n"
        "shown by its hash.",
        (
            Option("--scope", "SCOPE", "only this scope's"),
            Option("--holder", "LABEL", "only this holder's"),
            Option("--limit", "N", "at most N"),
            Option("--all", "", "of every namespace (operators only)"),
        ),
        (0, 0),
        ("lease list", "lease list --scope nightly --json | jq -r .key"),
    ),
    "revoke": Verb(
        revoke,
        "lease revoke KEY --reason TEXT [--namespace NAME] | lease revoke --key-hash HASH --reason TEXT",
        "Ends somebody's lease by force (operators only).  Its fence is dead from then on.  Exit 0: revoked.  1: nothing was held.",
        (
            Option("--reason", "TEXT", "why; it is logged"),
            Option("--key-hash", "HASH", "the lease by its hash, as `lease list` shows it"),
            Option("--namespace", "NAME", "in this namespace"),
        ),
        (0, 1),
        ('lease revoke gpu:0 --reason "worker 7 hangs, ticket 4711"',),
    ),
    "info": Verb(
        tell_info,
        "lease info",
        "Tells about the daemon: version, limits, store, and how it sees you.",
        (),
        (0, 0),
        ("lease info", "lease info --json | jq .limits"),
    ),
}
