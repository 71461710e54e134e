"""What is said to systemd and taken from it: readiness, inherited sockets, stored descriptors.  Nothing happens where there is none."""

from __future__ import annotations

import os
import socket
from typing import Final, NamedTuple

FIRST_INHERITED: Final = 3


class Inherited(NamedTuple):
    name: str
    descriptor: int


def inherited() -> list[Inherited]:
    """The descriptors systemd passed to this very process, close-on-exec from here on.  The variables are taken out of the environment."""
    pid, number, names = (os.environ.pop(name, "") for name in ("LISTEN_PID", "LISTEN_FDS", "LISTEN_FDNAMES"))
    if pid != str(os.getpid()) or not number.isdigit():
        return []
    descriptors = range(FIRST_INHERITED, FIRST_INHERITED + int(number))
    called = names.split(":") if names else []
    for descriptor in descriptors:
        os.set_inheritable(descriptor, False)
    return [Inherited(called[at] if at < len(called) else "unknown", descriptor) for at, descriptor in enumerate(descriptors)]


class Notifier:
    """The notification socket of this service; every method does nothing when there is none, and never raises."""

    def __init__(self) -> None:
        address = os.environ.pop("NOTIFY_SOCKET", "")
        self._address = "\0" + address[1:] if address.startswith("@") else address
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) if address else None

    def __bool__(self) -> bool:
        return self._socket is not None

    def say(self, *lines: str, descriptor: int | None = None) -> None:
        if self._socket is None:
            return
        rights = [] if descriptor is None else [(socket.SOL_SOCKET, socket.SCM_RIGHTS, descriptor.to_bytes(4, "little"))]
        try:
            self._socket.sendmsg(["\n".join(lines).encode()], rights, socket.MSG_DONTWAIT, self._address)
        except OSError:
            pass

    def ready(self, status: str) -> None:
        self.say("READY=1", f"STATUS={status}")

    def status(self, status: str) -> None:
        self.say(f"STATUS={status}")

    def stopping(self) -> None:
        self.say("STOPPING=1")

    # ---- the descriptor store (binds.Keeper)

    def keep(self, name: str, descriptor: int) -> None:
        """FDPOLL=0: systemd must not drop a pidfd when its process dies; that is what we want to learn from it."""
        self.say("FDSTORE=1", "FDPOLL=0", f"FDNAME={name}", descriptor=descriptor)

    def drop(self, name: str) -> None:
        self.say("FDSTOREREMOVE=1", f"FDNAME={name}")
