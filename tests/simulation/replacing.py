"""What a simulated daemon finds in place of threads, time, proofs of processes and stores that always work."""

from __future__ import annotations

import os
import random
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import structlog
import trio
from hooks import judged_peer
from host import InOrder
from replies import Place
from scripted_disk import Flight, ScriptedWriter
from store_faults import FaultyEnvironment
from world import MAP_BYTES, World

import leased.daemon
import leased.doors.unix
import leased.fsck
import leased.opening
import leased.state.leases
import leased.state.recovery


@contextmanager
def world(seed: int, keys: list[Place], scopes: list[Place], *, keeper: bool = False) -> Iterator[World]:
    """A world in a directory of its own, in memory, since a real flush takes 5 ms; everything the daemon finds there is replaced."""
    memory = Path("/dev/shm")
    root = Path(tempfile.mkdtemp(prefix="leased-sim-", dir=memory if os.access(memory, os.W_OK) else None))
    made = World(root, seed, keys, scopes, keeper=keeper)
    chance = random.Random(f"{seed}:secrets")
    open_environment = leased.state.leases.open_environment
    make_lock = leased.opening.DirectoryLock
    make_ledger = leased.opening.Ledger

    def holding(make: Callable[..., Any]) -> Callable[..., Any]:
        def made_and_held(*arguments: Any, **more: Any) -> Any:
            held = make(*arguments, **more)
            made.held.append(held)
            return held

        return made_and_held

    def faulty(*arguments: Any, **more: Any) -> Any:
        environment = open_environment(*arguments, **more)
        made.held.append(environment)
        return FaultyEnvironment(environment, made.traps)

    def heard(certain: bool) -> None:
        trouble = made.referee.trouble
        if certain:
            trouble.flushes += 1
            if (
                trouble.flushes > 2 and made.time > trouble.began + 1.0
            ):  # the start's own carry no switches, nor does its first second
                made.certain_since = made._flight_began
        else:
            trouble.ledger_at = made.time

    def next_flight(ops: list[Any]) -> Flight:
        made._flight_began = made.time
        flight = made.next_flight(ops)
        if flight.seconds > 0.5:
            made.referee.trouble.ledger_at = made.time + flight.seconds
        return flight

    def writer(ledger: Any, notify: Any) -> ScriptedWriter:
        assert made.nursery is not None
        return ScriptedWriter(ledger, made.disk, made.nursery, made.awake, next_flight, notify, made.all_must_be_safe, heard)

    async def wait_readable(descriptor: int) -> None:
        await trio.lowlevel.wait_readable(descriptor)
        await made.awake()

    async def sleep_forever() -> None:
        try:
            await trio.sleep_forever()
        finally:
            with trio.CancelScope(shield=True):
                await made.awake()

    lowlevel = SimpleNamespace(**{**vars(trio.lowlevel), "wait_readable": wait_readable})
    fake_trio = SimpleNamespace(**{**vars(trio), "lowlevel": lowlevel, "sleep_forever": sleep_forever})
    with ExitStack() as replaced:
        for target, name, new in (
            (leased.daemon, "WriterThread", writer),
            (leased.daemon, "trio", fake_trio),
            (leased.daemon, "LINGER_SECONDS", 0.0),
            (leased.opening, "DirectoryLock", holding(make_lock)),
            (leased.opening, "Ledger", holding(make_ledger)),
            (leased.state.leases, "open_environment", faulty),
            (leased.state.leases, "FIXED_MAP_BYTES", MAP_BYTES),
            (leased.state.recovery, "secrets", SimpleNamespace(token_hex=lambda size: chance.randbytes(size).hex())),
            (leased.doors.unix, "RpcPeer", judged_peer(made)),
            (leased.doors.unix, "set", InOrder),
            (leased.opening, "Probe", lambda path, taking: SimpleNamespace(end=lambda: "", taken=None)),
            (leased.fsck, "probe", lambda path: ""),
        ):
            replaced.enter_context(patch.object(target, name, new, create=True))
        made.logged = replaced.enter_context(structlog.testing.capture_logs())
        try:
            yield made
        finally:
            made.kill()
            made.keeper.clear()
            for process, (reading, writing) in made.pipes.items():
                os.close(reading)
                if process.dead_since is None:
                    os.close(writing)
            shutil.rmtree(root)
