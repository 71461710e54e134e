from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from fake_daemon import DROP, Asked, FakeDaemon, FakeTime, granted, refused
from loops import Loop, under_both, until
from test_client_sync import in_child

from leased import AsyncClient, LeaseLost, LeaseRefused, OutcomeUnknown
from leased.testing import FakeLeased


def operations(fake: FakeLeased) -> list[str]:
    return [operation for operation, _ in fake.calls]


@under_both
async def test_the_lease_is_renewed_at_a_third_of_its_ttl_and_released_at_the_end(loop: Loop) -> None:
    fake = FakeLeased()
    before = loop.living()
    async with fake.async_client("me") as client, client.lease("k", ttl=30, scope="night") as lease:
        assert (lease.holder, lease.deadline, lease.lost) == ("me", 1030, False)
        await fake.sleep(9.9)
        assert operations(fake) == ["lease"]
        await fake.sleep(0.2)
        assert operations(fake) == ["lease", "renew"]
        assert lease.deadline == 1040
        await fake.sleep(1000)
        lease.check()
    assert operations(fake) == ["lease", *["renew"] * 101, "release"]
    assert lease.released
    assert loop.living() == before  # whoever kept it is gone
    await fake.sleep(1000)
    assert operations(fake)[-1] == "release"


@under_both
async def test_a_lost_lease_cancels_the_block_and_comes_out_bare(loop: Loop) -> None:
    fake = FakeLeased()
    client = fake.async_client()
    seen: list[type[BaseException]] = []
    with pytest.raises(BaseException) as raised:
        async with client.lease("k", ttl=30) as lease:
            fake.lose("k")
            try:
                await fake.sleep(10.1)
                await loop.for_ever()
            except BaseException as cancelled:
                seen.append(type(cancelled))
                assert lease.lost
                raise
    assert type(raised.value) is LeaseLost
    assert (raised.value.key, raised.value.generation) == ("k", lease.generation)
    assert "lapsed" in raised.value.reason
    assert seen == [loop.Cancelled]
    assert operations(fake) == ["lease", "renew"]  # the daemon said itself that nothing is held: nothing is to be released
    await loop.turn()  # nothing of the cancellation is left over


@under_both
async def test_it_comes_out_bare_of_a_block_with_children_too(loop: Loop) -> None:
    fake = FakeLeased()
    client = fake.async_client()
    with pytest.raises(BaseException) as raised:
        async with client.lease("k", ttl=30):
            fake.lose("k")
            await loop.together(lambda: fake.sleep(11), loop.for_ever, loop.for_ever)
    assert type(raised.value) is LeaseLost


@under_both
async def test_silence_loses_it_at_the_local_deadline_while_the_renewal_hangs(loop: Loop) -> None:
    fake = FakeLeased()
    client = fake.async_client(timeout=60)
    ended_at: list[float] = []
    with pytest.raises(LeaseLost, match="before its deadline"):
        async with client.lease("k", ttl=30) as lease:
            with fake.unanswered():
                try:
                    await fake.sleep(29.9)
                    assert not lease.lost
                    assert operations(fake) == ["lease", "renew"]
                    await fake.sleep(0.2)
                    await loop.for_ever()
                finally:
                    ended_at.append(fake.now)
    assert ended_at == [1030]
    assert operations(fake)[-1] == "release"  # the daemon may still count it as held


@under_both
async def test_the_deadline_counts_from_before_the_request_was_sent(loop: Loop, tmp_path: Path) -> None:
    host_time = FakeTime()

    def take_long(asked: Asked) -> Any:
        host_time.advance(7)
        return granted(asked) if asked.method == "lease" else {"released": True, "key": "k", "generation": 17}

    with FakeDaemon(tmp_path / "socket", take_long):
        client = AsyncClient(tmp_path / "socket", host_time=host_time)
        async with client.lease("k", ttl=30) as lease:
            assert lease.deadline == 1030
        with pytest.raises(LeaseLost, match="before its deadline"):
            async with client.lease("k", ttl=6.9):
                pytest.fail("entered a lease that is over")


@under_both
async def test_the_body_s_exception_stays_as_it_is(loop: Loop) -> None:
    fake = FakeLeased()
    client = fake.async_client()
    with pytest.raises(KeyError) as raised:
        async with client.lease("k", ttl=30):
            raise KeyError("the body's")
    assert raised.value.__context__ is None
    assert operations(fake) == ["lease", "release"]
    with pytest.raises(KeyError) as raised:  # of a body that cleans up after the cancellation, and fails
        async with client.lease("k", ttl=30):
            fake.lose("k")
            try:
                await fake.sleep(11)
                await loop.for_ever()
            finally:
                raise KeyError("the body's")
    assert raised.value.args == ("the body's",)
    group = ExceptionGroup("the body's", [ValueError("one")])
    with pytest.raises(ExceptionGroup) as grouped:
        async with client.lease("k", ttl=30):
            raise group
    assert grouped.value is group


@under_both
async def test_an_error_of_a_child_is_not_lost_in_the_cancellation(loop: Loop) -> None:
    fake = FakeLeased()

    async def clean_up_badly() -> None:
        try:
            await loop.for_ever()
        finally:
            raise ValueError("in the child")

    with pytest.raises(ExceptionGroup) as raised:
        async with fake.async_client().lease("k", ttl=30):
            fake.lose("k")
            await loop.together(clean_up_badly, lambda: fake.sleep(11), loop.for_ever)
    assert [str(each) for each in raised.value.exceptions] == ["in the child"]


@under_both
async def test_a_block_that_swallows_its_cancellation_still_ends_with_the_loss(loop: Loop) -> None:
    fake = FakeLeased()
    with pytest.raises(LeaseLost):
        async with fake.async_client().lease("k", ttl=30):
            fake.lose("k")
            try:
                await fake.sleep(11)
                await loop.for_ever()
            except loop.Cancelled:
                pass
    await loop.turn()


@under_both
async def test_a_cancellation_from_outside_passes_and_the_lease_is_released(loop: Loop) -> None:
    fake = FakeLeased()
    client = fake.async_client()
    inside: list[bool] = []

    async def hold() -> None:
        async with client.lease("k", ttl=30):
            inside.append(True)
            await loop.for_ever()

    assert await loop.cancelled(hold, lambda: until(lambda: inside, loop))
    assert operations(fake) == ["lease", "release"]
    assert (await client.check("k")).held is False


@under_both
async def test_a_cancellation_waits_only_so_long_for_a_daemon_that_is_silent(loop: Loop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("leased.client.async_held.RELEASE_SECONDS", 0.05)
    fake = FakeLeased()
    client = fake.async_client(timeout=60)
    inside: list[bool] = []

    async def hold() -> None:
        async with client.lease("k", ttl=30):
            inside.append(True)
            await loop.for_ever()

    with fake.unanswered("release"):
        assert await loop.cancelled(hold, lambda: until(lambda: inside, loop))


@under_both
async def test_a_cancellation_from_outside_wins_over_a_loss(loop: Loop) -> None:
    fake = FakeLeased()
    inside: list[bool] = []
    outcome: list[BaseException] = []

    async def hold() -> None:
        try:
            async with fake.async_client().lease("outer"), fake.async_client().lease("k", ttl=30):
                inside.append(True)
                await loop.for_ever()
        except BaseException as raised:
            outcome.append(raised)
            raise

    async def lose_it() -> None:
        await until(lambda: inside, loop)
        fake.lose("k")
        fake.advance(10.1)  # the keeper is awake, and has its turn together with the cancellation

    assert await loop.cancelled(hold, lose_it)
    assert [type(each) for each in outcome] == [loop.Cancelled]
    assert (await fake.async_client().check("outer")).held is False


@under_both
async def test_of_two_leases_the_one_that_is_lost_ends_its_own_block(loop: Loop) -> None:
    fake = FakeLeased()
    client = fake.async_client()
    async with client.lease("outer", ttl=30) as outer:
        with pytest.raises(LeaseLost) as raised:
            async with client.lease("inner", ttl=30):
                fake.lose("inner")
                await fake.sleep(11)
                await loop.for_ever()
        assert raised.value.key == "inner"
        outer.check()
        await loop.turn()
    with pytest.raises(LeaseLost) as raised:
        async with client.lease("outer", ttl=30), client.lease("inner", ttl=30):
            fake.lose("outer")
            await fake.sleep(11)
            await loop.for_ever()
    assert raised.value.key == "outer"
    assert (await client.check("inner")).held is False
    with pytest.raises(LeaseLost) as raised:
        async with client.lease("outer", ttl=30), client.lease("inner", ttl=30):
            fake.lose("outer")
            fake.lose("inner")
            await fake.sleep(11)
            await loop.for_ever()
    await loop.turn()


def test_a_loss_leaves_no_trace_in_the_count_of_a_task_s_cancellations() -> None:
    async def main() -> None:
        fake = FakeLeased()
        for _ in range(3):
            with pytest.raises(LeaseLost):
                async with fake.async_client().lease("k", ttl=30):
                    fake.lose("k")
                    await fake.sleep(11)
                    await asyncio.sleep(60)
        task = asyncio.current_task()
        assert task is not None
        assert task.cancelling() == 0
        async with asyncio.timeout(60):
            await asyncio.sleep(0)
        with pytest.raises(TimeoutError):  # a time-out around the block is a cancellation from outside
            async with asyncio.timeout(0.01), fake.async_client().lease("k", ttl=30):
                await asyncio.sleep(60)
        assert operations(fake)[-1] == "release"

    asyncio.run(main())


def test_whoever_cancels_the_keepers_cancels_the_block() -> None:
    async def main() -> None:
        fake = FakeLeased()
        with pytest.raises(LeaseLost, match="its renewals were cancelled"):
            async with fake.async_client().lease("k", ttl=30):
                for task in asyncio.all_tasks():
                    if task.get_name() == "leased keeper":
                        task.cancel()
                await asyncio.sleep(60)

    asyncio.run(main())


@under_both
async def test_a_fault_of_the_keeper_s_own_ends_the_block_too(loop: Loop, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeLeased()
    client = fake.async_client()

    async def renew(*_: object, **__: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(client, "renew", renew)
    with pytest.raises(LeaseLost, match="its renewals failed: ZeroDivisionError"):
        async with client.lease("k", ttl=30):
            await fake.sleep(11)
            await loop.for_ever()
    assert (await client.check("k")).held is False


@under_both
async def test_failing_renewals_are_tried_again_until_one_succeeds(loop: Loop) -> None:
    fake = FakeLeased()
    async with fake.async_client().lease("k", ttl=30) as lease:
        with fake.unknown("full"):
            await fake.sleep(12)
        with fake.unreachable():
            await fake.sleep(12)
        assert lease.deadline == 1030
        await fake.sleep(2)
        assert lease.deadline > 1050
        lease.check()


@under_both
async def test_refused_and_unknown_never_enter_the_block(loop: Loop) -> None:
    fake = FakeLeased()
    generation = fake.hold("k", holder="worker-7")
    with pytest.raises(LeaseRefused) as raised:
        async with fake.async_client().lease("k"):
            pytest.fail("entered")
    assert (raised.value.refusal.held_by, raised.value.refusal.generation) == ("worker-7", generation)
    with fake.unknown("recovering"), pytest.raises(OutcomeUnknown, match="recovering"):
        async with fake.async_client().lease("j"):
            pytest.fail("entered")


@under_both
async def test_an_early_release_ends_the_renewals_and_cancels_nothing(loop: Loop) -> None:
    fake = FakeLeased()
    async with fake.async_client().lease("k", ttl=30) as lease:
        assert await lease.release()
        with pytest.raises(LeaseLost, match="it was released"):
            lease.check()
        await fake.sleep(100)
        assert await lease.release() is lease.released
    assert operations(fake) == ["lease", "release"]


@under_both
async def test_two_tasks_that_release_at_once_hear_the_same_and_not_before_it_is_done(loop: Loop) -> None:
    fake = FakeLeased()
    client = fake.async_client("me")
    heard: list[Any] = []

    async def release() -> None:
        heard.append(await lease.release())
        assert (await client.check("k")).held is False

    async with client.lease("k") as lease:
        await loop.together(release, release, release)
    assert [bool(each) for each in heard] == [True] * 3
    assert [operation for operation, _ in fake.calls].count("release") == 1


@under_both
async def test_a_lease_that_was_gone_before_its_release_is_reported(loop: Loop) -> None:
    fake = FakeLeased()
    with pytest.raises(LeaseLost, match="expired"):
        async with fake.async_client().lease("k", ttl=30):
            fake.lose("k")


@under_both
async def test_a_release_nobody_answers_is_no_error_of_the_body(loop: Loop) -> None:
    fake = FakeLeased()
    async with fake.async_client().lease("k", ttl=30) as lease:
        gone = fake.unreachable()
        gone.__enter__()
    gone.__exit__(None, None, None)
    assert lease.released is None


@under_both
async def test_a_lease_is_entered_once(loop: Loop) -> None:
    fake = FakeLeased()
    lease = fake.async_client().lease("k")
    with pytest.raises(LeaseLost, match="never entered"):
        await lease.release()
    async with lease:
        pass
    with pytest.raises(LeaseLost, match="entered once"):
        async with lease:
            pytest.fail("entered again")


@under_both
async def test_a_bound_lease_is_renewed_at_once_when_its_connection_is_lost(loop: Loop) -> None:
    fake = FakeLeased()
    client = fake.async_client()
    with pytest.raises(LeaseLost, match="lapsed"):
        async with client.lease("k", ttl=30, bind="connection"):
            client.close()
            await loop.for_ever()
    async with client.lease("j", ttl=30):  # one that is not bound is not in a hurry
        client.close()
        await fake.sleep(5)
        assert operations(fake)[-1] == "lease"


@under_both
async def test_a_bound_lease_learns_of_a_connection_that_others_find_lost(loop: Loop, tmp_path: Path) -> None:
    def script(asked: Asked) -> Any:
        answers = {"lease": granted, "renew": lambda asked: refused(asked, "lapsed", None)}
        return answers[asked.method](asked) if asked.method in answers else DROP

    with FakeDaemon(tmp_path / "socket", script):
        client = AsyncClient(tmp_path / "socket", timeout=0.2)
        with pytest.raises(LeaseLost, match="lapsed"):
            async with client.lease("k", ttl=30, bind="process"):
                with pytest.raises(OutcomeUnknown):
                    await client.check("other")
                await loop.for_ever()


@under_both
async def test_a_lease_is_inert_in_a_forked_child(loop: Loop) -> None:
    fake = FakeLeased()
    async with fake.async_client().lease("k", ttl=30) as lease:

        def leave() -> str:
            try:
                lease.__aexit__(None, None, None).send(None)
            except StopIteration:
                return "left"
            return "waited"

        assert in_child(lambda: str(lease.check())) == "raised LeaseLost"
        assert in_child(lambda: lease.fence) == "raised LeaseLost"
        assert in_child(lambda: str(lease.lost)) == "True"
        assert in_child(leave) == "raised LeaseLost"
        assert in_child(lambda: str(len(fake.calls))) == "1"
        await fake.sleep(11)
        lease.check()
    assert operations(fake) == ["lease", "renew", "release"]


@under_both
async def test_no_repr_shows_the_fence(loop: Loop) -> None:
    fake = FakeLeased()
    client = fake.async_client()
    async with client.lease("k", ttl=30) as lease:
        assert lease.fence not in repr(lease) + repr(client) + repr(vars(lease)) + repr(vars(client))
        assert str(lease.generation) in repr(lease)
    assert "not held" in repr(client.lease("k"))
