"""AsyncClient against the real daemon, under trio and asyncio: what a frozen, killed or restarted daemon means to a block."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest
from daemons import ANSWER_SECONDS, Daemon, MakeDaemon, environment
from loops import Loop, under_both, until

from leased import AsyncClient, Client, LeaseLost
from leased.client.answers import Grant, Refusal


@pytest.fixture(scope="module")
def served(make_shared_daemon: MakeDaemon) -> Daemon:
    return make_shared_daemon("[billing]\nenabled = true\n").start()


@pytest.fixture
def key(request: pytest.FixtureRequest) -> str:
    return str(request.node.name)


@under_both
async def test_a_block_outlives_many_ttls_and_a_restart_of_the_daemon(loop: Loop, served: Daemon, key: str) -> None:
    async with AsyncClient(served.socket) as client, client.lease(key, ttl=3) as lease:
        generation, deadline = lease.generation, lease.deadline
        served.kill()
        served.start()
        await until(lambda: lease.deadline > deadline + 1, loop)
        lease.check()
        assert (await client.check(key, generation)).current
    assert lease.released
    assert Client(served.socket).check(key).held is False


@under_both
async def test_a_frozen_daemon_costs_the_lease_at_the_deadline_this_host_knows(loop: Loop, served: Daemon, key: str) -> None:
    client = AsyncClient(served.socket)
    ended_at: list[float] = []
    with pytest.raises(LeaseLost, match="before its deadline"):
        async with client.lease(key, ttl=1) as lease:
            with served.stopped():
                try:
                    await loop.for_ever()
                finally:
                    ended_at.append(time.clock_gettime(time.CLOCK_BOOTTIME))
    assert 0 <= ended_at[0] - lease.deadline < ANSWER_SECONDS
    assert lease.lost


@under_both
async def test_a_revocation_ends_the_block_and_the_line_moves_on(loop: Loop, served: Daemon, key: str) -> None:
    client, other = AsyncClient(served.socket, "me"), AsyncClient(served.socket, "other")
    told: list[object] = []

    async def work() -> None:
        with pytest.raises(LeaseLost) as raised:
            async with client.lease(key, ttl=1):
                await loop.for_ever()
        told.append(raised.value)

    async def wait() -> None:
        await until(lambda: Client(served.socket).check(key).held, loop)
        told.append(await other.try_acquire(key, wait=10))

    async def revoke() -> None:
        await until(lambda: Client(served.socket).check(key).waiting, loop)
        assert await other.revoke(key, "it hangs")

    await loop.together(work, wait, revoke)
    assert {type(each) for each in told} == {Grant, LeaseLost}
    assert Client(served.socket).check(key).held_by == "other"


@under_both
async def test_a_cancelled_wait_leaves_the_line_and_a_cancelled_block_the_lease(loop: Loop, served: Daemon, key: str) -> None:
    onlooker, client = Client(served.socket, "onlooker"), AsyncClient(served.socket, "me")
    grant = onlooker.try_acquire(key)
    assert isinstance(grant, Grant)
    billed = onlooker.usage()["refusals_billed"]

    async def hold() -> None:
        async with client.lease(key, wait=60, ttl=30):
            await loop.for_ever()

    assert await loop.cancelled(hold, lambda: until(lambda: onlooker.check(key).waiting, loop))
    await until(lambda: onlooker.check(key).waiting == 0, loop)
    assert onlooker.usage()["refusals_billed"] == billed, "nothing was refused"
    assert onlooker.release(grant)
    assert await loop.cancelled(hold, lambda: until(lambda: onlooker.check(key).held_by == "me", loop))
    assert onlooker.check(key).held is False


@under_both
async def test_a_wait_that_is_cancelled_after_its_grant_leaves_no_lease(loop: Loop, served: Daemon, key: str) -> None:
    """The grant is on its way while the caller is cancelled: it came to the connection of the client, and nobody read it."""
    onlooker, client = Client(served.socket, "onlooker"), AsyncClient(served.socket, "me")
    grant = onlooker.try_acquire(key)
    assert isinstance(grant, Grant)

    async def granted() -> None:
        await until(lambda: onlooker.check(key).waiting, loop)
        assert onlooker.release(grant)  # no checkpoint from here to the cancellation
        assert onlooker.check(key).held_by == "me"

    assert await loop.cancelled(lambda: client.try_acquire(key, ttl=120, wait=60), granted)
    assert onlooker.check(key).held is False


@under_both
async def test_many_tasks_share_one_connection(loop: Loop, served: Daemon, key: str) -> None:
    client = AsyncClient(served.socket)
    inside = 0

    async def work() -> None:
        nonlocal inside
        for _ in range(3):
            async with client.lease(key, wait=60, holder=f"{id(object())}"):
                inside += 1
                assert inside == 1
                await loop.turn()
                inside -= 1

    await loop.together(*[work] * 10)
    assert (await client.check(key)).held is False
    assert isinstance(await client.try_acquire(key), Grant)
    assert isinstance(await client.try_acquire(key), Refusal)


@under_both
async def test_a_lease_bound_to_this_process_is_proven_and_held(loop: Loop, served: Daemon, key: str) -> None:
    client = AsyncClient(served.socket)
    async with client.lease(key, ttl=30, bind="process"):
        (listed,) = [lease async for lease in client.list(holder=client.holder)]
        assert listed["bind"] == "process"


_PROGRAM = """
import sys
from leased import AsyncClient
from leased.client import async_client
assert not [name for name in ("trio", "asyncio") if name in sys.modules], "imported before it runs"
import {library}

async def main():
    async with AsyncClient({socket!r}) as client, client.lease({key!r}, ttl=30) as lease:
        async with client.watch() as watch:
            await client.call("lease", key={key!r} + "2", holder="x")
            print((await watch.take(20)).type)

{run}
print({other!r} in sys.modules)
"""


@pytest.mark.parametrize(
    ("library", "other", "run"), [("asyncio", "trio", "asyncio.run(main())"), ("trio", "asyncio", "trio.run(main)")]
)
def test_only_the_library_that_runs_is_imported(served: Daemon, key: str, library: str, other: str, run: str) -> None:
    source = _PROGRAM.format(library=library, other=other, run=run, socket=str(served.socket), key=key)
    ran = subprocess.run([sys.executable, "-c", source], env=environment(), capture_output=True, text=True, timeout=60, check=False)
    assert (ran.stdout, ran.stderr) == ("granted\nFalse\n", "")
