"""`leased outbox list|retry|drop`: dead letters, through the running daemon, or in its ledger while none runs.

Imported for every help page of `leased`, so what it needs is imported when it runs.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final, TextIO

from leased.errors import PeerError, StateRefused

if TYPE_CHECKING:
    from leased.config import Config
    from leased.state.ledger import Ledger

PAGE: Final = 200
ABOUT: Final = """Billing events wait in the outbox until upstream takes them.  One that it refuses for good (400, 422) becomes a dead letter:
kept, counted, and shipped no more until an operator says so.  Through the running daemon where there is one (as root, the daemon's user or a member
of operator_group), else straight in the ledger.

exit codes: 0 done; 1 nothing done (there is no such dead letter, or the answer to the question was no); 64 wrong usage; 69 no answer, or
nobody can tell; 77 not permitted; 78 the configuration, or a state that must not be opened."""

_RETRY: Final = "Put dead letters back into the outbox under their old place: once upstream has been taught to take them."
_DROP: Final = """Delete dead letters for good: upstream is never told of these facts.  With --payment, forget the payment under way instead: the
next demand is then paid anew.  Look at the chain first whether its nonce was used: if it was, the debt would be paid twice."""


def configure(parser: argparse.ArgumentParser) -> None:
    """The verbs below `outbox`, on its parser."""
    verbs = parser.add_subparsers(dest="outbox_verb", required=True, metavar="VERB", title="verbs")
    listing = verbs.add_parser("list", help="the dead letters, and how the outbox stands")
    retry = verbs.add_parser("retry", help="ship dead letters again", description=_RETRY)
    drop = verbs.add_parser("drop", help="delete dead letters for good", description=_DROP)
    for verb in (retry, drop):
        which = verb.add_mutually_exclusive_group(required=True)
        which.add_argument("sequence", metavar="NUMBER", nargs="?", help="one of them, by its number in `leased outbox list`")
        which.add_argument("--all", action="store_true", help="every one of them")
        if verb is drop:
            which.add_argument("--payment", action="store_true", help="the payment under way")
            verb.add_argument("--yes", action="store_true", help="do not ask")
    for verb in (listing, retry, drop):
        verb.add_argument("--json", action="store_true", help="the answer as one JSON object")


def run(config: Config, options: argparse.Namespace, out: TextIO, complaints: TextIO, answers: TextIO) -> int:
    """The exit code.  `answers` is where a question is answered.  Raises StateLocked, StateRefused, StoreError and OSError."""
    from leased.exits import EXIT_FINDINGS, EXIT_PERMISSION, EXIT_UNAVAILABLE, EXIT_USAGE

    try:
        if options.outbox_verb == "list":
            return _tell_list(_listed(config), out, as_json=options.json)
        fields = _fields(options)
        if options.outbox_verb == "drop" and not options.yes and not _confirmed(options, complaints, answers):
            return _complain(complaints, "nothing was dropped", EXIT_FINDINGS)
        reply = _ask(config, f"outbox_{options.outbox_verb}", fields)
    except PeerError as error:
        code = {"permission_denied": EXIT_PERMISSION, "invalid_argument": EXIT_USAGE}.get(error.code, EXIT_UNAVAILABLE)
        return _complain(complaints, error.text, code)
    return _tell_done(reply, options, out, complaints)


def _fields(options: argparse.Namespace) -> dict[str, Any]:
    """Raises PeerError."""
    from leased.schema import parse

    given = {"sequence": options.sequence, "all": options.all or None, "payment": getattr(options, "payment", False) or None}
    fields = {name: value for name, value in given.items() if value is not None}
    parse(f"outbox_{options.outbox_verb}", fields)
    return fields


def _confirmed(options: argparse.Namespace, complaints: TextIO, answers: TextIO) -> bool:
    what = "the payment under way" if options.payment else "every dead letter" if options.all else f"dead letter {options.sequence}"
    print(f"leased: {'forget' if options.payment else 'delete'} {what} for good? [y/N] ", end="", file=complaints, flush=True)
    return answers.readline().strip().lower() in {"y", "yes"}


def _complain(complaints: TextIO, text: str, code: int) -> int:
    print(f"leased: {text}", file=complaints)
    return code


# ---- what people are told


def _tell_list(reply: dict[str, Any], out: TextIO, *, as_json: bool) -> int:
    from leased.exits import EXIT_YES

    if as_json:
        print(json.dumps(reply, ensure_ascii=False), file=out)
        return EXIT_YES
    for letter in reply["dead"]:
        what = "a damaged record" if letter["event_id"] is None else f"{letter['type']} {letter['amount']} {letter['currency']}"
        where = (
            "" if letter["namespace"] is None else f" in {json.dumps(letter['namespace'], ensure_ascii=False)} at {letter['time']}"
        )
        print(f"{letter['sequence']}\t{what}{where}: {letter['why']}", file=out)
    for line in _standing(reply):
        print(line, file=out)
    return EXIT_YES


def _standing(reply: dict[str, Any]) -> Iterator[str]:
    yield f"{reply['dead_letters']} dead letters; {reply['waiting']} events wait to be shipped"
    if reply["overflow"]:
        yield f"{reply['overflow']} events did not fit into the outbox: they are counted in `usage` and never shipped"
    if reply["failing"]:
        yield f"upstream takes nothing now: {reply['failing']}; the log says more"
    payment = reply["payment"]
    if payment is not None:
        yield (
            f"a payment is under way: {payment['amount']} of {payment['asset']} on {payment['network']} from {payment['payer']} "
            f"to {payment['payee']}, nonce {payment['nonce']}, valid until {payment['valid_before']}, for {payment['events']} events"
        )


def _tell_done(reply: dict[str, Any], options: argparse.Namespace, out: TextIO, complaints: TextIO) -> int:
    from leased.exits import EXIT_FINDINGS, EXIT_UNAVAILABLE, EXIT_YES

    if options.json:
        print(json.dumps(reply, ensure_ascii=False), file=out)
    done = reply["retried" if options.outbox_verb == "retry" else "dropped"]
    if done is None:
        return _complain(
            complaints, "the daemon could not write it in time: nobody can tell whether it was; ask again", EXIT_UNAVAILABLE
        )
    if getattr(options, "payment", False):
        if reply["payment"] is None:
            return _complain(complaints, "there is no payment under way", EXIT_FINDINGS)
        if not options.json:
            print(f"forgotten: the payment of {reply['payment']['amount']} with nonce {reply['payment']['nonce']}", file=out)
        return EXIT_YES
    if not done:
        return _complain(complaints, "there is no such dead letter that could be read", EXIT_FINDINGS)
    if not options.json:
        print(f"{'back in the outbox' if options.outbox_verb == 'retry' else 'deleted'}: {done}", file=out)
    return EXIT_YES


# ---- through the daemon, or without it


def _listed(config: Config) -> dict[str, Any]:
    """All pages as one."""
    whole = _ask(config, "outbox_list", {"limit": PAGE})
    page = whole
    while page["cursor"] is not None:
        page = _ask(config, "outbox_list", {"limit": PAGE, "cursor": page["cursor"]})
        whole["dead"] += page["dead"]
    del whole["cursor"]
    return whole


def _ask(config: Config, operation: str, fields: dict[str, Any]) -> dict[str, Any]:
    from leased.operator_call import ask

    reply = ask(config.socket, operation, fields)
    return _in_the_ledger(config, operation, fields) if reply is None else reply


def _in_the_ledger(config: Config, operation: str, fields: dict[str, Any]) -> dict[str, Any]:
    from leased.outbox_desk import chosen, page_of, shown
    from leased.schema import parse
    from leased.state.outbox import read_state
    from leased.state.payments import read_spending

    request: Any = parse(operation, fields)
    with _ledger(config) as ledger:
        if operation == "outbox_list":
            state, payment = read_state(ledger), read_spending(ledger).payment
            page = page_of(ledger, request.limit, request.cursor or 0)
            return {
                "waiting": len(state.waiting),
                "dead_letters": sum(state.dead.values()),
                "overflow": state.overflow,
                "upstream": config.upstream.url is not None,
                "failing": "",
                "payment": None if payment is None else shown(payment),
                "dead": page.letters,
                "cursor": page.cursor,
            }
        if operation == "outbox_drop" and request.payment:
            payment = read_spending(ledger).payment
            if payment is not None:
                ledger.apply([("paid", payment.nonce)])
            return {"dropped": 0, "payment": None if payment is None else shown(payment)}
        keep = operation == "outbox_retry"
        sequences = [letter.sequence for letter in chosen(ledger, request.sequence) if letter.event is not None or not keep]
        if sequences:
            ledger.apply([("unbury", sequences, keep)])
        return {"retried": len(sequences)} if keep else {"dropped": len(sequences), "payment": None}


@contextmanager
def _ledger(config: Config) -> Iterator[Ledger]:
    """The ledger of a stopped daemon, its directory locked.  Raises StateLocked, StateRefused, StoreError or OSError."""
    from leased.state.environment import DirectoryLock
    from leased.state.ledger import Ledger
    from leased.state_format import refuse_another

    if not (config.state_dir / "data.mdb").exists():
        raise StateRefused(
            f"{config.state_dir}: there is no state here yet: start the daemon once (`leased serve`), or correct --state-dir"
        )
    lock = DirectoryLock(config.state_dir, make=False)
    try:
        refuse_another(config.state_dir)
        ledger = Ledger(config.state_dir)
        try:
            if ledger.read_meta() is None:
                raise StateRefused(f"{config.state_dir}: the state was never written: start the daemon once (`leased serve`)")
            yield ledger
        finally:
            ledger.close()
    finally:
        lock.close()
