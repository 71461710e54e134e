"""What is said to systemd and taken from it: readiness, inherited sockets, stored descriptors.  Nothing happens where there is none."""

from __future__ import annotations

import math
import os
import re
import select
import socket
import time
from pathlib import Path
from typing import Final, NamedTuple

from leased.errors import ConfigError

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


def listening(given: Inherited) -> socket.socket:
    """An inherited descriptor as the listening stream socket that it must be.  Raises ConfigError."""
    try:
        found = socket.socket(fileno=given.descriptor)
        listens = found.type == socket.SOCK_STREAM and found.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
    except OSError:
        listens = False
    if not listens or found.family not in {socket.AF_UNIX, socket.AF_INET, socket.AF_INET6}:
        raise ConfigError(
            f"descriptor {given.descriptor} ({given.name}), which the service manager passed, is no listening stream socket: "
            "correct the socket unit (ListenStream=, and Accept=no)"
        )
    return found


def pidfd_again(descriptor: int) -> int | None:
    """Another open file for the process of a pidfd.  None where there is none to be had: it has ended, or is of a foreign namespace."""
    try:
        told = Path(f"/proc/self/fdinfo/{descriptor}").read_text()
        found = re.search(r"^Pid:\t([1-9][0-9]*)$", told, re.MULTILINE)
        if found is None:
            return None
        again = os.pidfd_open(int(found[1]))
    except OSError:
        return None
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    if poll.poll(0):  # it ended meanwhile, and its number may be another's by now
        os.close(again)
        return None
    return again


class Notifier:
    """The notification socket of this service; every method does nothing when there is none, and never raises.

    `watchdog_seconds`: how long the service manager lets pass without a ping before it ends this process; infinite where it does not.
    The variables are taken out of the environment.
    """

    def __init__(self) -> None:
        pid, micro = os.environ.pop("WATCHDOG_PID", ""), os.environ.pop("WATCHDOG_USEC", "")
        watched = micro.isdigit() and int(micro) > 0 and pid in {"", str(os.getpid())}
        self.watchdog_seconds = int(micro) / 1e6 if watched else math.inf
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

    def reloading(self) -> None:
        """READY=1 is the end of it."""
        self.say("RELOADING=1", f"MONOTONIC_USEC={time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000}")

    def stopping(self, status: str) -> None:
        self.say("STOPPING=1", f"STATUS={status}")

    # ---- the descriptor store (binds.Keeper)

    def keep(self, name: str, descriptor: int) -> None:
        """FDPOLL=0: systemd must not drop a pidfd when its process dies; that is what we want to learn from it.

        Of two names for one open file systemd keeps the first, so each name gets an open file of its own.
        """
        if self._socket is None:
            return
        own = pidfd_again(descriptor)
        self.say("FDSTORE=1", "FDPOLL=0", f"FDNAME={name}", descriptor=descriptor if own is None else own)
        if own is not None:
            os.close(own)

    def drop(self, name: str) -> None:
        self.say("FDSTOREREMOVE=1", f"FDNAME={name}")
