"""Listening sockets: who calls is accepted, a few at a time, and left waiting while there is no descriptor for them."""

from __future__ import annotations

import errno
import select
import socket
from collections.abc import Iterator
from typing import Final

import structlog

log = structlog.get_logger()

ACCEPTED_AT_ONCE: Final = 64
_FULL: Final = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})


class Accepting:
    """`listeners` are watched by `epoll` unless `paused`."""

    def __init__(self, epoll: select.epoll) -> None:
        self._epoll = epoll
        self.listeners: dict[int, socket.socket] = {}
        self.paused = False
        self._short = False  # of descriptors, since this was logged

    def listen(self, listener: socket.socket) -> None:
        listener.setblocking(False)
        self.listeners[listener.fileno()] = listener
        self._epoll.register(listener.fileno(), select.EPOLLIN)

    def accept(self, listener: socket.socket) -> Iterator[socket.socket]:
        for _ in range(ACCEPTED_AT_ONCE):
            try:
                connection, _ = listener.accept()
            except BlockingIOError:
                if self._short:
                    self._short = False
                    log.info("accept.resumed")
                return
            except OSError as error:
                if error.errno in _FULL:
                    self._pause(error)
                    return
                continue  # this one client went away before it was accepted
            yield connection

    def _pause(self, error: OSError) -> None:
        """No descriptor left: clients wait in the backlog, where they lose nothing, until one is free or the next second."""
        if not self.paused:
            self.paused = True
            if not self._short:
                self._short = True
                log.warning("accept.paused", error=error.strerror)
            for descriptor in self.listeners:
                self._epoll.unregister(descriptor)

    def resume(self) -> None:
        """A descriptor may be free again."""
        if self.paused:
            self.paused = False
            for descriptor in self.listeners:
                self._epoll.register(descriptor, select.EPOLLIN)

    def stop(self) -> None:
        for descriptor, listener in self.listeners.items():
            if not self.paused:
                self._epoll.unregister(descriptor)
            listener.close()
        self.listeners.clear()
