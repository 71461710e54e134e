"""`leased agent add|list|revoke`: keys for agents, through the running daemon, or in its ledger while none runs.

Imported for every help page of `leased`, so what it needs is imported when it runs.
"""

from __future__ import annotations

import argparse
import os
from typing import TYPE_CHECKING, Any, Final, TextIO

from leased.errors import ConfigError, PeerError, StateRefused, StoreError

if TYPE_CHECKING:
    from leased import frames
    from leased.config import Config

ANSWER_SECONDS: Final = 10.0  # the daemon says null after 2 when its disk hangs
ABOUT: Final = """Keys for agents: whoever brings one, over HTTP as `Authorization: Bearer` or as agent_key in any request, is in its namespace.
Through the running daemon where there is one (as root, the daemon's user or a member of operator_group), else straight in the ledger.

The secret is printed once and is stored nowhere; a lost one is revoked and made anew.  A revocation counts at once.

exit codes: 0 done; 1 nothing done (the name is taken, or there is no such agent); 64 wrong usage; 69 no answer, or nobody can tell;
77 not permitted; 78 the configuration, or a state that must not be opened."""


def configure(parser: argparse.ArgumentParser) -> None:
    """The verbs below `agent`, on its parser."""
    verbs = parser.add_subparsers(dest="agent_verb", required=True, metavar="VERB", title="verbs")
    add = verbs.add_parser("add", help="make a key and print its secret, once")
    add.add_argument("name", metavar="NAME", help="a name for the agent")
    add.add_argument("--namespace", metavar="NS", help="where its calls count; by default a namespace of its name")
    verbs.add_parser("list", help="the agents that have a key")
    revoke = verbs.add_parser("revoke", help="end a key at once")
    revoke.add_argument("name", metavar="NAME", help="the name it was made under")


def run(config: Config, options: argparse.Namespace, out: TextIO, complaints: TextIO) -> int:
    """The exit code.  Raises StateLocked, StateRefused, StoreError and OSError."""
    from leased.exits import EXIT_PERMISSION, EXIT_UNAVAILABLE, EXIT_USAGE
    from leased.schema import parse

    operation = f"agent_{options.agent_verb}"
    fields = {name: value for name in ("name", "namespace") if (value := getattr(options, name, None)) is not None}
    try:
        parse(operation, fields)
    except PeerError as error:
        return _complain(complaints, error.text, EXIT_USAGE)
    try:
        reply = _ask(config, operation, fields)
        if reply is None:
            reply = _in_the_ledger(config, operation, fields)
    except PeerError as error:
        code = {"permission_denied": EXIT_PERMISSION, "invalid_argument": EXIT_USAGE}.get(error.code, EXIT_UNAVAILABLE)
        return _complain(complaints, error.text, code)
    return _tell(reply, out, complaints)


def _tell(reply: dict[str, Any], out: TextIO, complaints: TextIO) -> int:
    from leased.exits import EXIT_FINDINGS, EXIT_UNAVAILABLE, EXIT_YES

    if "agents" in reply:
        for agent in reply["agents"]:
            print(f"{agent['name']}\t{agent['namespace']}\t{agent['created_at']}", file=out)
        return EXIT_YES
    done = reply.get("added", reply.get("revoked"))
    if done is None:
        return _complain(
            complaints, "the daemon could not write it in time: nobody can tell whether it was; ask again", EXIT_UNAVAILABLE
        )
    if done is False:
        said = {
            "exists": "there is an agent of this name: revoke it first, or take another",
            "unknown_agent": "there is no agent of this name",
        }
        return _complain(complaints, said[reply["reason"]], EXIT_FINDINGS)
    if "secret" in reply:
        print(reply["secret"], file=out)
        print(f"leased: agent {reply['name']} in namespace {reply['namespace']}; the secret is not shown again", file=complaints)
    return EXIT_YES


def _complain(complaints: TextIO, text: str, code: int) -> int:
    print(f"leased: {text}", file=complaints)
    return code


# ---- through the daemon


def _ask(config: Config, operation: str, fields: dict[str, Any]) -> dict[str, Any] | None:
    """The daemon's answer, or None where nobody listens.  Raises PeerError, StoreError for a connection without an answer, OSError."""
    import socket

    from leased import frames

    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as stream:
        stream.settimeout(ANSWER_SECONDS)
        try:
            stream.connect(str(config.socket))
        except (FileNotFoundError, ConnectionRefusedError):
            return None
        except PermissionError as error:
            raise PermissionError(error.errno, error.strerror, str(config.socket)) from None
        try:
            stream.sendall(frames.request(1, operation, fields))
            answers = frames.Replies()
            while chunk := stream.recv(65536):
                answers.feed(chunk)
                for answer in answers.take():
                    if isinstance(answer, frames.Answer) and answer.msgid in (0, 1):
                        return _answered(answer)
        except TimeoutError:
            raise StoreError(
                f"{config.socket}: no answer within {ANSWER_SECONDS:g} s: nobody can tell whether it was done"
            ) from None
        except ConnectionError:
            pass
    raise StoreError(f"{config.socket}: the daemon hung up without an answer: ask again")


def _answered(answer: frames.Answer) -> dict[str, Any]:
    if answer.error is not None:
        code, _, text = str(answer.error).partition(": ")
        raise PeerError(code, text)
    assert isinstance(answer.result, dict)
    return answer.result


# ---- without it


def _in_the_ledger(config: Config, operation: str, fields: dict[str, Any]) -> dict[str, Any]:
    from leased.agents import new_agent
    from leased.clock import HostClock, rfc3339
    from leased.digests import Digests
    from leased.state.agent_records import encode_agent
    from leased.state.environment import DirectoryLock
    from leased.state.ledger import Ledger
    from leased.state_format import refuse_another

    if not (config.state_dir / "data.mdb").exists():
        raise ConfigError(
            f"{config.state_dir}: there is no state here yet: start the daemon once (`leased serve`), or correct --state-dir"
        )
    os.umask(0o077)
    lock = DirectoryLock(config.state_dir, make=False)
    try:
        refuse_another(config.state_dir)
        ledger = Ledger(config.state_dir)
        try:
            meta = ledger.read_meta()
            if meta is None:
                raise StateRefused(f"{config.state_dir}: the state was never written: start the daemon once (`leased serve`)")
            known, _ = ledger.read_agents()
            names = {agent.name: digest for digest, agent in known.items()}
            if operation == "agent_list":
                rows = [
                    {"name": agent.name, "namespace": agent.namespace, "created_at": rfc3339(agent.created)}
                    for agent in sorted(known.values())
                ]
                return {"agents": rows}
            name = fields["name"]
            if operation == "agent_add":
                if name in names:
                    return {"added": False, "name": name, "reason": "exists"}
                digests = Digests(bytes.fromhex(meta.secret))
                secret, digest, agent = new_agent(name, fields.get("namespace"), HostClock().now().wall, digests)
                ledger.apply([("agent", digest, encode_agent(agent))])
                return {"added": True, "name": name, "namespace": agent.namespace, "secret": secret}
            if name not in names:
                return {"revoked": False, "name": name, "reason": "unknown_agent"}
            ledger.apply([("agent", names[name], None)])
            return {"revoked": True, "name": name}
        finally:
            ledger.close()
    finally:
        lock.close()
