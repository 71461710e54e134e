"""How a cancelled call leaves the line.  Saying that it waits no more would be answered with a refusal, and a refusal is billed; hanging up
is free.  So the same attempt is made once more over a connection of its own, which takes over the place in the line, and that is hung up.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping
from typing import Any, Final

from leased.client.answers import Reply
from leased.client.attempt import FOR_EVER, LONGEST_WAIT_SECONDS
from leased.client.core import Conversation
from leased.client.face import Face
from leased.client.wire import BACKLOG_PAUSE_SECONDS, READ_BYTES, connect_now

_SENT: Final = ("key", "holder", "request_id", "agent_key")


async def left(face: Face, path: str, fields: Mapping[str, Any]) -> Reply | None:
    """`fields`: of a `lease` that was cancelled, and has been decided.  What it is answered: the grant it had or gets now; None where it waited,
    and does not any more.

    Where somebody of the same label holds the key it may be this very attempt, whose grant is on its way to the disk: then the attempt is
    still to be asked for, and Unsure is raised.  Cancelled, it has left.  Also raises what an error answer says, DaemonUnreachable and
    PermissionDenied.
    """
    while (stream := connect_now(path)) is None:
        await face.sleep(BACKLOG_PAUSE_SECONDS)
    conversation = Conversation()
    again = {name: fields[name] for name in _SENT if name in fields}
    lease, octets = conversation.ask("lease", again | {"wait_seconds": LONGEST_WAIT_SECONDS})
    look, more = conversation.ask("check", {"key": again["key"], "agent_key": again.get("agent_key")})
    try:
        stream.send(octets + more, socket.MSG_NOSIGNAL)  # far smaller than a new socket's buffer
        while not conversation.answered(lease) and not conversation.answered(look):  # the second is decided after the first
            await face.ready(stream, False, FOR_EVER)
            if not _heard(stream, conversation):
                break
        stream.shutdown(socket.SHUT_RDWR)  # what has arrived can still be read; what has not, the daemon cannot deliver
        while _heard(stream, conversation):
            pass
    except OSError:
        pass
    finally:
        stream.close()
    if conversation.answered(lease):
        return conversation.answer(lease)
    if not conversation.answered(look) or ours(conversation.answer(look), again["holder"]):
        raise Unsure
    return None


class Unsure(Exception):
    """Whether the attempt waited or was granted cannot be told."""


def ours(checked: Reply, holder: str) -> bool:
    """May this answer to `check` mean a lease of `holder`?"""
    return checked.get("held") is not False and checked.get("held_by") in {holder, None}


def _heard(stream: socket.socket, conversation: Conversation) -> bool:
    octets = stream.recv(READ_BYTES)
    conversation.receive(octets)
    return bool(octets) and conversation.fault is None
