"""The least a Python server can do for a request: what this machine lets any of them reach.

Decodes, answers with a map of the same shape, sends: no decision, no store, no check of what came.  `leased` cannot be faster than this,
and a bound given as so many operations a second says more about a machine when this is measured beside it.
"""

from __future__ import annotations

import select
import socket
import sys
from typing import Any

FREE = {"amount": "0", "currency": "USDC", "event_id": None}


def answer(operation: str, fields: dict[str, Any], number: int) -> dict[str, Any]:
    """`number` is the generation of a grant, and its fence: so nothing has to be remembered."""
    told = {
        "key": fields["key"],
        "generation": number,
        "expires_at": "2026-01-01T00:00:00.000Z",
        "expires_in_seconds": 59.9,
        "charge": FREE,
    }
    if operation == "release":
        return {"released": True, **told}
    if operation == "check":
        return {"held": True, "held_by": "somebody", "waiting": 0, "current": None, **told}
    if fields["holder"].startswith("other-"):
        return {
            "holder": fields["holder"],
            "acquired": False,
            "reason": "held",
            "held_by": "somebody",
            "retry_after_seconds": 59.9,
            **told,
        }
    granted = {"holder": fields["holder"], "acquired": True, "replayed": False, "ttl_seconds": 60.0, "scope": None, **told}
    if operation == "renew":
        return {**granted, "renewed": True, "fence": fields["fence"], "generation": int(fields["fence"])}
    return {**granted, "renewed": False, "fence": str(number)}


def serve(path: str) -> None:
    import msgpack  # here, so that bench.py runs without it

    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    listener.listen(256)
    epoll = select.epoll()
    epoll.register(listener, select.EPOLLIN)
    lines: dict[int, tuple[socket.socket, Any]] = {}
    number, pack = 10**15, msgpack.Packer().pack
    while True:
        for descriptor, _ in epoll.poll():
            if descriptor == listener.fileno():
                connection, _ = listener.accept()
                lines[connection.fileno()] = (connection, msgpack.Unpacker())
                epoll.register(connection, select.EPOLLIN)
                continue
            connection, unpacker = lines[descriptor]
            chunk = connection.recv(65536)
            if not chunk:
                del lines[descriptor]
                connection.close()
                continue
            try:
                requests = [msgpack.unpackb(chunk)]
            except ValueError:  # several at once
                unpacker.feed(chunk)
                requests = list(unpacker)
            out = []
            for _, msgid, operation, params in requests:
                number += 1
                out.append(pack([1, msgid, None, answer(operation, params[0], number)]))
            connection.send(b"".join(out))


if __name__ == "__main__":
    serve(sys.argv[1])
