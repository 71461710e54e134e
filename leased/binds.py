"""Leases that end with a process or with a connection.

A process is known by a pidfd the kernel gave for the connecting process (SO_PEERPIDFD), never by its number: it is readable exactly when
that process is no more.  A stopped process is alive; a child that inherited the connection is another process and keeps nothing.

`keeper` is told of every pidfd that holds a lease, by a name that says which; systemd's descriptor store gives them back after a
kill -9.  Without one, a restarted daemon knows the bind from the record but not the process: the ttl remains, until a renewal binds anew.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from typing import Final, Protocol

import structlog

from leased import model, rules
from leased.calls import Peer, Unproven
from leased.errors import PeerError
from leased.lane import Outcome
from leased.lessor import Lessor
from leased.model import Lease

log = structlog.get_logger()

PROCESS_EXITED: Final = "process_exited"
CONNECTION_CLOSED: Final = "connection_closed"
UNDELIVERED: Final = "undelivered"


class Keeper(Protocol):
    """Where descriptors survive the daemon."""

    def keep(self, name: str, descriptor: int) -> None: ...

    def drop(self, name: str) -> None: ...


class Process:
    """One living process and the leases that end with it: key hash -> generation.  `users` are its open connections."""

    __slots__ = ("dead", "descriptor", "leases", "users")

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self.leases: dict[bytes, int] = {}
        self.users = 0
        self.dead = False


class Binds:
    """`readable(descriptor, then)` calls `then` once the descriptor is readable; `forget(descriptor)` takes that back."""

    def __init__(
        self,
        lessor: Lessor,
        readable: Callable[[int, Callable[[], None]], None],
        forget: Callable[[int], None],
        keeper: Keeper | None,
    ) -> None:
        self._lessor = lessor
        self._readable = readable
        self._forget = forget
        self._keeper = keeper
        self._process_of: dict[bytes, Process] = {}
        self._peer_of: dict[bytes, Peer] = {}
        self._again: list[tuple[bytes, int, str]] = []
        lessor.binding = self

    def __len__(self) -> int:
        return len(self._process_of) + len(self._peer_of)

    # ---- before the decision

    def prove(self, peer: Peer) -> Process:
        """The process at the other end.  Raises PeerError where it cannot be proven, Unproven where its door must ask for a proof first."""
        process: Process | None = peer.process
        if process is None:
            try:
                descriptor = peer.pidfd()
            except OSError as error:
                if error.errno == errno.ENOPROTOOPT:
                    raise Unproven from None
                if error.errno in {errno.EMFILE, errno.ENFILE}:
                    raise PeerError("rate_limited", "bind: the daemon has no descriptor left to watch your process with") from None
                raise PeerError("invalid_argument", 'bind "process" cannot be proven on this connection') from None
            process = self.adopt(peer, descriptor)
        if process.dead or process.descriptor < 0:  # its pidfd was let go with its last connection
            raise PeerError("invalid_argument", 'bind "process": the process that opened this connection has ended')
        return process

    def adopt(self, peer: Peer, descriptor: int) -> Process:
        """`descriptor` is proven to be the pidfd of the process at the other end."""
        process = peer.process = Process(descriptor)
        process.users = 1
        self._watch(process)
        return process

    # ---- after the commit

    def bound(self, key_hash: bytes, lease: Lease, peer: Peer) -> None:
        """A grant, renewal or replay came by `peer`: the lease ends with it from now on; by TCP, the bind stays what it was."""
        if not peer.local:
            return
        if lease.bind == model.BIND_CONNECTION:
            self._loose(key_hash)
            self._peer_of[key_hash] = peer
            peer.bound[key_hash] = lease.generation
            if peer.closed:
                self._again.append((key_hash, lease.generation, CONNECTION_CLOSED))
            return
        try:
            process = self.prove(peer)
        except (PeerError, Unproven) as error:
            log.debug("bind.kept", error=str(error), key_hash=key_hash.hex())  # the bind stays what it was, or only the ttl remains
            return
        if self._process_of.get(key_hash) is process and process.leases.get(key_hash) == lease.generation:
            return
        self._loose(key_hash)
        self._hold(process, key_hash, lease.generation)
        if self._keeper is not None:
            self._keeper.keep(_name(key_hash, lease.generation), process.descriptor)

    def ended(self, key_hash: bytes) -> None:
        self._loose(key_hash)

    def restored(self, names: dict[str, int]) -> None:
        """Descriptors that came back from the keeper, by name.  One whose process died meanwhile is readable at once."""
        processes: dict[tuple[int, int], Process] = {}
        for name, descriptor in names.items():
            key_hash, generation = _parsed(name)
            if not self._lessor.is_live(key_hash, generation):
                os.close(descriptor)
                if self._keeper is not None:
                    self._keeper.drop(name)
                continue
            status = os.fstat(descriptor)
            process = processes.get((status.st_dev, status.st_ino)) if status.st_size == 0 and _unique_inodes(status) else None
            if process is None:
                process = Process(descriptor)
                processes[status.st_dev, status.st_ino] = process
                self._watch(process)
            else:
                os.close(descriptor)
            self._hold(process, key_hash, generation)

    # ---- ends

    def hung_up(self, peer: Peer) -> None:
        """A connection is gone: what was bound to it ends, and waiters' grants it was never told go on to the next."""
        ends = [(key_hash, generation, CONNECTION_CLOSED) for key_hash, generation in peer.bound.items()]
        ends += [(key_hash, generation, UNDELIVERED) for key_hash, generation in peer.undelivered]
        process = peer.process
        if process is not None:
            process.users -= 1
            self._let_go(process)
        self._end(ends)

    def _died(self, process: Process) -> None:
        process.dead = True
        self._forget(process.descriptor)
        ends = [(key_hash, generation, PROCESS_EXITED) for key_hash, generation in process.leases.items()]
        self._end(ends)

    def retry(self) -> None:
        """At each tick: ends that could not be written before."""
        if self._again:
            again, self._again = self._again, []
            self._end(again)

    def _end(self, ends: list[tuple[bytes, int, str]]) -> None:
        if not ends:
            return
        self._lessor.now = self._lessor.instant()  # no batch has set it: what is passed on counts from this moment
        if self._lessor.lane.run(self.end_all, ends) is not Outcome.COMMITTED:
            self._again += ends

    def end_all(self, ends: list[tuple[bytes, int, str]]) -> None:
        """Part of a transaction.  (key hash, generation, why) of leases that end with their process, their connection, or unheard of."""
        lessor = self._lessor
        for key_hash, generation, reason in ends:
            record = lessor.record(key_hash)
            if record is None or record.generation != generation:
                continue
            if reason == UNDELIVERED and lessor.replayed.get(key_hash) == generation:
                continue  # a repeat over another connection was told of it
            lessor.end(key_hash, record, rules.RELEASED, reason)
            if lessor.queues:
                lessor.pass_on(key_hash)
        lessor.store_last()

    # ---- small parts

    def _watch(self, process: Process) -> None:
        self._readable(process.descriptor, lambda: self._died(process))

    def _hold(self, process: Process, key_hash: bytes, generation: int) -> None:
        self._process_of[key_hash] = process
        process.leases[key_hash] = generation

    def _loose(self, key_hash: bytes) -> None:
        peer = self._peer_of.pop(key_hash, None)
        if peer is not None:
            peer.bound.pop(key_hash, None)
        process = self._process_of.pop(key_hash, None)
        if process is not None:
            generation = process.leases.pop(key_hash)
            if self._keeper is not None:
                self._keeper.drop(_name(key_hash, generation))
            self._let_go(process)

    def _let_go(self, process: Process) -> None:
        if process.users == 0 and not process.leases and process.descriptor >= 0:
            if not process.dead:
                self._forget(process.descriptor)
            os.close(process.descriptor)
            process.descriptor = -1


def _name(key_hash: bytes, generation: int) -> str:
    """Letters, digits and dots: what the descriptor store allows."""
    return f"bind.{key_hash.hex()}.{generation}"


def is_bind(name: str) -> bool:
    return name.startswith("bind.")


def _parsed(name: str) -> tuple[bytes, int]:
    _, key_hash, generation = name.split(".")
    return bytes.fromhex(key_hash), int(generation)


def _unique_inodes(status: os.stat_result) -> bool:
    """Since Linux 6.9 a pidfd's inode number is its process's own; before, all pidfds share one."""
    return status.st_ino > 1 << 20
