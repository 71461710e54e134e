"""Opening the state of a daemon: locks first, then proof that it can be read at all, then what the start finds there."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import structlog

from leased.clock import Clock
from leased.config import Config
from leased.errors import StateRefused, StoreError
from leased.generations import check_wall
from leased.state.environment import DirectoryLock, NotWritten
from leased.state.leases import Leases
from leased.state.ledger import Ledger
from leased.state.probe import Probe, Taken
from leased.state.recovery import TakenOver, take_over
from leased.state.survey import Promises, Rows
from leased.state_format import note_writer, refuse_another

log = structlog.get_logger()


class Opened(NamedTuple):
    """Both directories locked, both environments open, and what was found in them."""

    locks: list[DirectoryLock]
    leases: Leases
    ledger: Ledger
    taken: TakenOver


def open_state(config: Config, clock: Clock) -> Opened:
    """Lock, open, take over.  Raises StateLocked, StateRefused or StoreError: nothing is left open that a process about to exit would
    have to close."""
    check_wall(clock.now().wall)
    locks = [DirectoryLock(config.state_dir), DirectoryLock(config.runtime_dir)]
    proven = _prove(config)
    refuse_another(config.state_dir, config.runtime_dir)
    note_writer(config.state_dir)
    ledger = Ledger(config.state_dir)
    leases = _open_leases(config)
    try:
        taken = take_over(
            leases,
            ledger,
            wait_out=config.wait_out_seconds,
            boot=clock.now().boot,
            boot_id=clock.boot_id(),
            rows=_still(proven.rows, leases.environment),
            promised=_still(proven.promises, ledger.environment),
        )
    except NotWritten as error:
        raise StoreError(f"{config.state_dir} or {config.runtime_dir}: {error}") from error
    log.info("daemon.starting", story=taken.story, recovering=taken.waiting, long_leases=len(taken.known))
    if taken.rebuilt:
        log.warning(
            "ledger.rebuilt",
            state_dir=str(config.state_dir),
            lost="agent keys, billing events not yet shipped, switches told of elsewhere",
        )
    if taken.waiting:
        log.warning("daemon.recovering", seconds=round(taken.meta.no_grant_before - clock.now().boot, 3))
    return Opened(locks, leases, ledger, taken)


class _Proven(NamedTuple):
    """What children have made of the tables of leases while they read both files."""

    rows: Taken | None = None
    promises: Taken | None = None


def _prove(config: Config) -> _Proven:
    """A destroyed page would end this process with a signal, or an error that no restart mends, at every start.  Children read both files first,
    at the same time: a ledger that cannot be read is refused, a volatile state is discarded like one that LMDB cannot open."""
    data = config.state_dir / "data.mdb"
    ledger = Probe(config.state_dir, taking=(b"leases", Promises.packed)) if _written(data) else None
    leases = Probe(config.runtime_dir, taking=(b"leases", Rows.packed)) if _written(config.runtime_dir / "data.mdb") else None
    said_of_ledger = ledger.end() if ledger is not None else ""
    said_of_leases = leases.end() if leases is not None else ""
    if said_of_ledger:
        if said_of_ledger.startswith(str(data)):  # a whole sentence already
            raise StateRefused(said_of_ledger)
        raise StateRefused(
            f"{data} is damaged ({said_of_ledger}): run `leased fsck`, then restore a backup, or move the directory away"
        )
    if said_of_leases:
        _discard(config, said_of_leases)
    return _Proven(leases.taken if leases is not None else None, ledger.taken if ledger is not None else None)


def _still(taken: Taken | None, environment: Any) -> bytes:
    """What was taken from the file, if the environment that is open now is at the very same transaction; otherwise nothing."""
    return taken.made if taken is not None and environment.info()["last_txnid"] == taken.transaction else b""


def _written(data: Path) -> bool:
    return data.exists() and data.stat().st_size > 0


def _discard(config: Config, why: str) -> None:
    log.warning("leases.discarded", error=why)
    for name in ("data.mdb", "lock.mdb"):
        (config.runtime_dir / name).unlink(missing_ok=True)


def _open_leases(config: Config) -> Leases:
    """A volatile state that LMDB cannot open is worth nothing: it is made anew, and the ledger's rules say what waits for it."""
    try:
        return Leases(config.runtime_dir, config.max_leases)
    except StateRefused as error:
        _discard(config, str(error))
        return Leases(config.runtime_dir, config.max_leases)
