"""Who is at the other end of a Unix socket: what the kernel says, and which namespace that means.

Identity is established once, when a connection is accepted, and passed inward as a value.
"""

from __future__ import annotations

import errno
import grp
import os
import socket
import struct
from collections.abc import Mapping
from typing import Final

from leased.errors import ConfigError
from leased.model import Identity

SHARED: Final = "local"
OVERFLOW_ID: Final = 65534  # every unmapped user of a user namespace looks like this one, so it is nobody in particular
NOBODY_KNOWN: Final = ""  # the namespace of a peer that must bring an agent key
_CREDENTIALS: Final = struct.Struct("3i")
_SO_PEERGROUPS: Final = 59
_SO_PEERPIDFD: Final = 77
_GROUPS_AT_FIRST: Final = 64
_MAX_GROUPS: Final = 65536  # NGROUPS_MAX of the kernel


class Policy:
    """Which namespace and which powers a peer has, from the configuration.  Raises ConfigError for a group that does not exist."""

    def __init__(self, *, by_uid: Mapping[int, str], by_gid: Mapping[int, str], per_uid: bool, operator_group: str | None) -> None:
        self._by_uid = by_uid
        self._by_gid = by_gid
        self._per_uid = per_uid
        self._own_uid = os.geteuid()
        self._operator_gid = None if operator_group is None else group_id(operator_group, "operator_group")

    def become(self, other: Policy) -> None:
        """The rules of `other` for whoever connects from now on."""
        self._by_uid, self._by_gid, self._per_uid = other._by_uid, other._by_gid, other._per_uid
        self._operator_gid = other._operator_gid

    def identify(self, connection: socket.socket) -> Identity:
        """By SO_PEERCRED, fixed at connect: the process that connected, not whoever the socket was handed to.  Raises OSError."""
        pid, uid, gid = _CREDENTIALS.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
        groups: frozenset[int] = frozenset()
        if self._operator_gid is not None or self._by_gid:
            groups = peer_groups(connection) | {gid}
        operator = uid in {0, self._own_uid} or self._operator_gid in groups
        return Identity(self.namespace(uid, gid, groups), uid, pid, operator and uid != OVERFLOW_ID)

    def namespace(self, uid: int, gid: int, groups: frozenset[int]) -> str:
        """A rule for the uid wins over one for a group, the primary group over the others, those by number."""
        if uid != OVERFLOW_ID:
            if uid in self._by_uid:
                return self._by_uid[uid]
            for each in (gid, *sorted(groups)):
                if each in self._by_gid and each != OVERFLOW_ID:
                    return self._by_gid[each]
            return f"uid:{uid}" if self._per_uid else SHARED
        return NOBODY_KNOWN if self._per_uid else SHARED


def peer_pidfd(connection: socket.socket) -> int:
    """A pidfd of the process that called connect(), close-on-exec.  Raises OSError: ENOPROTOOPT before Linux 6.5, EMFILE without room."""
    return connection.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD)


def peer_groups(connection: socket.socket) -> frozenset[int]:
    """The supplementary groups of the connecting process.  Raises OSError."""
    try:
        raw = connection.getsockopt(socket.SOL_SOCKET, _SO_PEERGROUPS, _GROUPS_AT_FIRST * 4)
    except OSError as error:
        if error.errno != errno.ERANGE:  # more groups than there was room for
            raise
        raw = _many_groups(connection.fileno())
    return frozenset(struct.unpack(f"{len(raw) // 4}I", raw[: len(raw) // 4 * 4]))


def _many_groups(descriptor: int) -> bytes:
    """Python's own getsockopt takes at most 1,024 bytes, 256 groups; the kernel allows 65,536."""
    import ctypes

    libc = ctypes.CDLL(None, use_errno=True)
    room = ctypes.create_string_buffer(_MAX_GROUPS * 4)
    size = ctypes.c_uint32(len(room))
    if libc.getsockopt(descriptor, socket.SOL_SOCKET, _SO_PEERGROUPS, room, ctypes.byref(size)):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return room.raw[: size.value]


def group_id(name: str, key: str) -> int:
    """The gid of a group given by name or number.  `key` names the configuration key in the error."""
    if name.isdigit():
        return int(name)
    try:
        return grp.getgrnam(name).gr_gid
    except KeyError:
        raise ConfigError(
            f"{key}: there is no group {name!r} on this host: create it (groupadd --system {name}) or name another"
        ) from None
