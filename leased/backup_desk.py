"""`backup`: a copy of the ledger, made where the ledger is written and handed out in parts, for operators who may not read its directory.

The copy is made in the ledger's thread, between two flushes, into a file without a name: it is of one moment, and a crash leaves nothing.  Its
parts are read there too, since the loop never touches the disk.  One copy at a time; one that nobody asks for any more is given up.
"""

from __future__ import annotations

import os
import secrets
import tempfile
from collections.abc import Callable
from typing import IO, Any, Final, NamedTuple

import structlog

from leased import model
from leased.calls import Call
from leased.errors import PeerError
from leased.lessor import Lessor
from leased.outbox_desk import Reading
from leased.state.ledger import Ledger
from leased.views import require_operator

log = structlog.get_logger()

PART_BYTES: Final = 48 * 1024  # with its envelope below the size of any other message
IDLE_SECONDS: Final = 30.0  # after which the next may begin; whoever still reads asks again within milliseconds


class _Copy(NamedTuple):
    name: str
    file: IO[bytes]
    size: int


class BackupDesk:
    """`answered` is called when answers were given outside of a turn."""

    def __init__(self, lessor: Lessor, reading: Reading, answered: Callable[[], object]) -> None:
        self._lessor = lessor
        self._reading = reading
        self._answered = answered
        self._copy: _Copy | None = None  # changed in the ledger's thread only
        self._used = 0.0
        lessor.operations[model.BackupRequest] = self.backup

    def backup(self, call: Call, request: model.BackupRequest) -> None:
        require_operator(call.identity, "backup")
        self._lessor.gate.admit_reading()
        now = self._lessor.now.boot

        def question(ledger: Ledger) -> model.Reply | str:
            return self._begin(ledger, now) if request.copy is None else self._part(request.copy, request.offset, ledger, now)

        def done(reply: Any, error: Exception | None) -> None:
            if error is not None:
                call.refuse(PeerError("internal", "the ledger cannot be copied now (is its disk full?); the log says more"))
                log.error("backup.failed", error=error)
            elif isinstance(reply, str):
                call.refuse(PeerError("rate_limited" if request.copy is None else "invalid_argument", reply))
            else:
                if request.copy is None:
                    log.info("backup.made", bytes=reply["bytes"], uid=call.identity.uid)
                call.answer(reply)
            self._answered()

        self._lessor.lane.after(self._reading.read, question, done)

    def give_up(self) -> None:
        """Call it now and then: a copy that is read no more holds room on the disk."""
        now = self._lessor.clock.now().boot
        if self._copy is not None:
            self._reading.read(lambda ledger: self._drop() if now > self._used + IDLE_SECONDS else None, lambda *_: None)

    # ---- in the ledger's thread

    def _begin(self, ledger: Ledger, now: float) -> model.Reply | str:
        if self._copy is not None and now <= self._used + IDLE_SECONDS:
            return f"another backup is under way; ask again in {IDLE_SECONDS:.0f} s"
        self._drop()
        file = tempfile.TemporaryFile(dir=ledger.directory)  # noqa: SIM115  it outlives this call
        try:
            ledger.environment.copyfd(file.fileno(), compact=True)
        except BaseException:
            file.close()
            raise
        self._copy = _Copy(secrets.token_hex(8), file, os.fstat(file.fileno()).st_size)
        return self._part(self._copy.name, 0, ledger, now)

    def _part(self, name: str, offset: int, ledger: Ledger, now: float) -> model.Reply | str:
        copy = self._copy
        if copy is None or copy.name != name:
            return "copy is not known any more: begin anew"
        self._used = now
        octets = os.pread(copy.file.fileno(), PART_BYTES, offset)
        if offset + len(octets) >= copy.size:
            self._drop()
        return {
            "copy": name,
            "bytes": copy.size,
            "offset": offset,
            "data": octets,
            "state_dir": os.path.realpath(ledger.directory),
        }

    def _drop(self) -> None:
        copy, self._copy = self._copy, None
        if copy is not None:
            copy.file.close()
