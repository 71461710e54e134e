"""Making the Unix socket: never wider than configured, and never another daemon's."""

from __future__ import annotations

import errno
import os
import socket
from pathlib import Path


def bind_unix(path: Path, mode: int, gid: int | None) -> socket.socket:
    """A listening socket at `path`, never wider than `mode` for a moment: bound under a closed umask, then opened.

    Only for a daemon that holds the lock of its state: a socket file that nobody listens on is replaced, a live one raises OSError.
    """
    path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        if path.is_socket():
            probe = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            probe.setblocking(False)
            try:
                probe.connect(str(path))
            except (ConnectionRefusedError, FileNotFoundError):
                path.unlink(missing_ok=True)
            except BlockingIOError:  # its backlog is full: somebody is there
                raise OSError(errno.EADDRINUSE, f"{path}: another process listens on this socket") from None
            else:
                raise OSError(errno.EADDRINUSE, f"{path}: another process listens on this socket")
            finally:
                probe.close()
        before = os.umask(0o177)
        try:
            listener.bind(str(path))
        finally:
            os.umask(before)
        if gid is not None:
            os.chown(path, -1, gid)
        path.chmod(mode)
        listener.listen(512)
    except BaseException:
        listener.close()
        raise
    return listener


def bind_tcp(host: str, port: int) -> socket.socket:
    """A listening TCP socket at a literal IP address; of IPv6 only that.  Raises OSError that names the address."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        listener.bind((host, port))
        listener.listen(512)
    except OSError as error:
        listener.close()
        raise OSError(error.errno, error.strerror, f"{host} port {port}") from None
    return listener
