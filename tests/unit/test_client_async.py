from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgpack
import pytest
from fake_daemon import DROP, SILENCE, Asked, FakeDaemon, FakeTime, Fault, Raw, granted, refused
from loops import Loop, under_both, until
from test_client_sync import in_child, in_turn

import leased
from leased import AsyncClient
from leased.client import async_calling, errors
from leased.client.answers import Grant, Refusal, Unknown
from leased.client.face import NoLoop, running
from leased.client.watching import Gap, LeaseEvent
from leased.clock import HostClock
from leased.testing import FakeLeased

FENCE = "9007199254740993"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "leased.sock"


def test_it_is_for_tasks_only() -> None:
    with pytest.raises(NoLoop, match="neither runs here"):
        running()
    question = FakeLeased().async_client().check("k")
    with pytest.raises(RuntimeError, match="there is Client"):
        question.send(None)


@under_both
async def test_the_library_that_runs_is_found(loop: Loop) -> None:
    assert type(running()).__name__ == {"trio": "TrioFace", "asyncio": "AsyncioFace"}[loop.name]


def test_trio_within_a_thread_of_asyncio_is_told_apart() -> None:
    import trio

    async def name() -> str:
        return type(running()).__name__

    async def main() -> list[str]:
        return [await name(), await asyncio.to_thread(trio.run, name), await name()]

    assert asyncio.run(main()) == ["AsyncioFace", "TrioFace", "AsyncioFace"]


@under_both
async def test_requests_go_out_as_the_protocol_names_them(loop: Loop, path: Path) -> None:
    switch = {"scope": "s", "armed": True}
    pages = [{"leases": [{"key": "a"}, {"key": "b"}], "cursor": "7"}, {"leases": [{"key": "c"}], "cursor": None}]
    packet = {"scope": "s", "empty": True, "leases": [], "switch": None}
    script = in_turn(
        granted, granted, {"released": True, "key": "gpu:0", "generation": 17}, {"held": True, "key": "k", "held_by": "x"}, *pages,
        {"revoked": True, "generation": 4}, switch, {**switch, "armed": False}, packet, {"amount": "0"}, {"name": "leased"},
    )  # fmt: skip
    with FakeDaemon(path, script) as daemon:
        async with AsyncClient(path, "me", agent_key="secret") as client:
            grant = await client.try_acquire("gpu:0", 30, scope="night")
            assert isinstance(grant, Grant)
            assert isinstance(await client.renew(grant, ttl=20), Grant)
            assert await client.release(grant)
            assert (await client.check("k", 4)).held_by == "x"
            assert [lease["key"] async for lease in client.list(scope="s", page=2)] == ["a", "b", "c"]
            assert await client.revoke("k", "it hangs")
            assert await client.heartbeat("s", 60, "a")
            assert not await client.disarm("s")
            assert not await client.resume_packet("s")
            assert await client.usage("2026-01-01T00:00:00Z") == {"amount": "0"}
            assert await client.info() == {"name": "leased"}
        daemon.wait_until(lambda: daemon.closed == [1])
    assert all(asked.params.pop("agent_key") == "secret" for asked in daemon.asked)
    assert len(daemon.asked[0].params.pop("request_id")) >= 22
    assert [(asked.method, asked.params) for asked in daemon.asked] == [
        ("lease", {"key": "gpu:0", "holder": "me", "ttl_seconds": 30, "scope": "night", "bind": "none"}),
        ("renew", {"key": "gpu:0", "holder": "me", "fence": FENCE, "ttl_seconds": 20}),
        ("release", {"key": "gpu:0", "holder": "me", "fence": FENCE}),
        ("check", {"key": "k", "generation": 4}),
        ("list", {"scope": "s", "limit": 2}),
        ("list", {"scope": "s", "limit": 2, "cursor": "7"}),
        ("revoke", {"key": "k", "reason": "it hangs"}),
        ("heartbeat", {"scope": "s", "expect_within_seconds": 60, "agent_id": "a"}),
        ("heartbeat", {"scope": "s", "disarm": True}),
        ("resume_packet", {"scope": "s"}),
        ("usage", {"since": "2026-01-01T00:00:00Z"}),
        ("info", {}),
    ]


@under_both
async def test_a_lost_reply_is_asked_for_again_with_the_same_request_id(loop: Loop, path: Path) -> None:
    host_time = FakeTime()

    def lose(asked: Asked) -> object:
        host_time.advance(5)
        return DROP

    with FakeDaemon(path, in_turn(lose, DROP, granted)) as daemon:
        grant = await AsyncClient(path, host_time=host_time).try_acquire("gpu:0", 30)
    assert isinstance(grant, Grant)
    assert [asked.connection for asked in daemon.asked] == [1, 2, 3]
    assert len({asked.params["request_id"] for asked in daemon.asked}) == 1
    assert grant.deadline == 1000 + 5 + 30  # from before the attempt that was answered


@under_both
async def test_no_answer_in_time_is_unknown_and_its_connection_is_closed(loop: Loop, path: Path) -> None:
    with FakeDaemon(path, in_turn(SILENCE, granted)) as daemon:
        client = AsyncClient(path, timeout=0.05)
        unknown = await client.try_acquire("gpu:0")
        assert isinstance(unknown, Unknown)
        assert unknown.reason == "no_answer"
        daemon.wait_until(lambda: daemon.closed == [1])  # so that a waiting grant goes to somebody else
        assert await client.try_acquire("gpu:0", request_id=unknown.request_id)
        assert daemon.asked[0].params["request_id"] == daemon.asked[1].params["request_id"] == unknown.request_id


@under_both
async def test_what_cannot_be_answered_is_raised(loop: Loop, path: Path) -> None:
    client = AsyncClient(path, timeout=0.2)
    with pytest.raises(errors.DaemonUnreachable, match="there is no such socket"):
        await client.try_acquire("k")
    script = in_turn(
        Fault("invalid_argument: ttl_seconds must be a number from 0.1 to 3600"), Fault("rate_limited: full", True),
        Raw(b"HTTP/1.1 400 Bad Request\r\n\r\n"), *[DROP] * 9,
    )  # fmt: skip
    with FakeDaemon(path, script):
        for kind in (errors.InvalidArgument, errors.RateLimited, errors.ProtocolFault, errors.OutcomeUnknown):
            with pytest.raises(kind):
                await client.check("k")
        with pytest.raises(errors.OutcomeUnknown):
            await client.call("lease", key="k", holder="me")


@under_both
async def test_a_wait_that_meets_a_daemon_that_ends_queues_again(loop: Loop, path: Path) -> None:
    def null(asked: Asked) -> dict[str, Any]:
        return refused(asked, "shutting_down", None, acquired=None, retry_after_seconds=1.0)

    def grant(asked: Asked) -> dict[str, Any]:
        return granted(asked, expires_boottime=4321.5, boot_id=HostClock().boot_id())

    with FakeDaemon(path, in_turn(null, DROP, grant, granted, granted)) as daemon:
        client = AsyncClient(path)
        answer = await client.try_acquire("k", wait=7.5)
        assert isinstance(answer, Grant)
        assert answer.deadline == 4321.5
        waits = [asked.params["wait_seconds"] for asked in daemon.asked]
        assert 7.5 == waits[0] > waits[1] > waits[2] > 0
        assert len({asked.params["request_id"] for asked in daemon.asked}) == 1
        assert isinstance(await client.try_acquire("k", wait=1), Grant)  # of another boot: renewed at once, and counted from that
        assert daemon.methods()[-2:] == ["lease", "renew"]


@under_both
async def test_a_task_that_waits_holds_up_no_other_and_each_gets_its_own_answer(loop: Loop, path: Path) -> None:
    """The daemon answers in pairs, the later request first, so that tasks read each other's answers."""
    kept: list[Asked] = []
    asking_still = [8]  # the last task has nobody to be answered with

    def give() -> None:
        while kept:
            one = kept.pop()
            daemon.answer(one, {"held": True, "key": one.params["key"], "held_by": "of " + one.params["key"]})

    def script(asked: Asked) -> Any:
        if asked.method == "lease":
            return SILENCE
        kept.append(asked)
        if len(kept) == 2 or asking_still[0] < 2:
            give()
        return SILENCE

    with FakeDaemon(path, script) as daemon:
        client = AsyncClient(path, timeout=5)
        answers: list[Any] = []

        async def wait() -> None:
            answers.append(await client.try_acquire("busy", wait=60))

        def ask(name: int) -> Callable[[], Any]:
            async def asking() -> None:
                for n in range(25):
                    assert (await client.check(f"{name}/{n}")).held_by == f"of {name}/{n}"
                asking_still[0] -= 1
                if asking_still[0] == 1:
                    give()

            return asking

        async def all_ask() -> None:
            await until(lambda: daemon.asked, loop)
            await loop.together(*map(ask, range(8)))
            assert not answers
            daemon.answer(daemon.asked[0], refused(daemon.asked[0]))

        await loop.together(wait, all_ask)
    assert {asked.connection for asked in daemon.asked} == {1}
    assert isinstance(answers[0], Refusal)


@under_both
async def test_a_reader_that_is_cancelled_hands_on_the_reading(loop: Loop, path: Path) -> None:
    with FakeDaemon(path, lambda asked: SILENCE) as daemon:
        client = AsyncClient(path, timeout=5)
        answers: list[Any] = []

        async def second() -> None:
            await until(lambda: len(daemon.asked) == 1, loop)
            answers.append(await client.check("second"))

        async def cancel() -> None:
            async def both_asked() -> None:
                await until(lambda: len(daemon.asked) == 2, loop)

            assert await loop.cancelled(lambda: client.check("first"), both_asked)
            daemon.answer(daemon.asked[0], {"held": False, "key": "first"})  # nobody wants it any more
            daemon.answer(daemon.asked[1], {"held": False, "key": "second"})

        await loop.together(cancel, second)
        assert answers[0].key == "second"
        assert daemon.closed == []


@under_both
async def test_a_wait_that_is_cancelled_leaves_the_line(loop: Loop) -> None:
    fake = FakeLeased()
    fake.hold("k", ttl=60)
    client = fake.async_client("me")

    async def waiting() -> None:
        await until(lambda: "lease" in [operation for operation, fields in fake.calls if fields.get("holder") == "me"], loop)

    assert await loop.cancelled(lambda: client.try_acquire("k", wait=100), waiting)
    mine = [fields for operation, fields in fake.calls if operation == "lease" and fields["holder"] == "me"]
    assert len({fields["request_id"] for fields in mine}) == 1
    assert [fields.get("wait_seconds") for fields in mine] == [100, 300], "a repeat that waits is not refused, and so not billed"
    await fake.sleep(61)
    assert (await client.check("k")).held is False


@under_both
async def test_what_was_granted_to_a_call_that_is_cancelled_is_given_back(loop: Loop) -> None:
    fake = FakeLeased()
    client = fake.async_client("me")
    with fake.unanswered("lease"):

        async def granted_unheard() -> None:
            await until(lambda: fake.calls, loop)
            fake._silent = set()

        assert await loop.cancelled(lambda: client.try_acquire("k"), granted_unheard)
    assert [operation for operation, _ in fake.calls] == ["lease", "lease", "release"]
    assert (await client.check("k")).held is False


def test_a_call_that_is_thrown_away_waits_for_nothing_more() -> None:
    async def main() -> None:
        fake = FakeLeased()
        fake.hold("k")
        call = fake.async_client().try_acquire("k", wait=10)
        call.send(None)
        call.close()
        assert len(fake.calls) == 2

    asyncio.run(main())


@under_both
async def test_a_renewal_that_is_cancelled_is_not_given_back(loop: Loop) -> None:
    fake = FakeLeased()
    client = fake.async_client("me")
    grant = await client.try_acquire("k")
    assert isinstance(grant, Grant)
    with fake.unanswered("lease"):

        async def asked_again() -> None:
            await until(lambda: len(fake.calls) == 2, loop)

        assert await loop.cancelled(lambda: client.try_acquire("k", fence=grant.fence), asked_again)
    assert (await client.check("k", grant.generation)).current


@under_both
async def test_requests_larger_than_the_socket_takes_go_out_whole(loop: Loop, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = socket.socketpair()
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 8192)
    ours.setblocking(False)
    monkeypatch.setattr(async_calling, "connect_now", lambda path: ours)
    client = AsyncClient(path, timeout=5)
    texts = [letter * 60_000 for letter in "abc"]
    answers: list[Any] = []

    def ask(text: str) -> Callable[[], Any]:
        async def asking() -> None:
            answers.append(await client.check(text))

        return asking

    async def read() -> None:
        for _ in range(20):
            await loop.turn()
        unpacker = msgpack.Unpacker()
        theirs.setblocking(False)
        left = len(texts)
        while left:
            try:
                unpacker.feed(theirs.recv(100_000))
            except BlockingIOError:
                await loop.turn()
            for _, msgid, _, (fields,) in unpacker:
                left -= 1
                theirs.send(msgpack.packb((1, msgid, None, {"held": False, "key": fields["key"][:1]})))

    await loop.together(*map(ask, texts), read)
    assert sorted(answer.key for answer in answers) == ["a", "b", "c"]
    client.close()
    theirs.close()


@under_both
async def test_a_daemon_that_reads_nothing_is_unreachable_in_the_end(
    loop: Loop, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ends = [socket.socketpair() for _ in range(50)]
    for ours, _ in ends:
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 8192)
        ours.setblocking(False)
    left = [ours for ours, _ in ends]
    monkeypatch.setattr(async_calling, "connect_now", lambda path: left.pop())
    with pytest.raises(errors.OutcomeUnknown):
        await AsyncClient(path, timeout=0.1).check("x" * 60_000)
    for pair in ends:
        for end in pair:
            end.close()


@under_both
async def test_a_full_queue_of_connections_is_waited_for(loop: Loop, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = async_calling.connect_now
    full = [True, True]
    monkeypatch.setattr(async_calling, "connect_now", lambda path: None if full and full.pop() else real(path))
    with FakeDaemon(path, lambda asked: {"held": False, "key": "k"}):
        assert (await AsyncClient(path).check("k")).held is False
    monkeypatch.setattr(async_calling, "connect_now", lambda path: None)
    with pytest.raises(errors.DaemonUnreachable, match="accepts no connections"):
        await AsyncClient(path, timeout=0.05).check("k")


@under_both
async def test_the_process_is_proven_when_the_daemon_asks(loop: Loop, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    theirs.setblocking(False)
    monkeypatch.setattr(async_calling, "connect_now", lambda path: ours)
    heard: list[Any] = []

    async def daemon() -> None:
        unpacker = msgpack.Unpacker()
        theirs.send(msgpack.packb((2, "prove", ({"nonce": "n" * 32},))))
        while len(heard) < 2:
            try:
                unpacker.feed(theirs.recv(65536))
            except BlockingIOError:
                await loop.turn()
            heard.extend(unpacker)
        theirs.send(msgpack.packb((1, heard[0][1], None, {"held": False, "key": "k"})))

    await loop.together(lambda: AsyncClient(path, timeout=5).check("k"), daemon)
    assert heard[1] == [2, "prove", [{"nonce": "n" * 32}]]
    ours.close()
    theirs.close()


@under_both
async def test_a_forked_child_has_a_connection_and_a_label_of_its_own(loop: Loop, path: Path) -> None:
    with FakeDaemon(path, granted) as daemon:
        client = AsyncClient(path)
        assert await client.try_acquire("k")
        label = client.holder

        def in_the_child() -> str:
            async def ask() -> str:
                return f"{bool(await client.try_acquire('k'))} {client.holder != label}"

            if loop.name == "asyncio":
                asyncio._set_running_loop(None)
                return asyncio.run(ask())
            return str(client._connection)

        assert in_child(in_the_child) == ("True True" if loop.name == "asyncio" else "None")
        assert await client.try_acquire("k")
        assert [asked.connection for asked in daemon.asked if asked.params["holder"] == label] == [1, 1]  # the parent's went on


@under_both
async def test_a_watch_tells_events_in_order_and_gaps_after_a_lost_connection(loop: Loop) -> None:
    fake = FakeLeased()
    client = fake.async_client("me", timeout=5)
    async with client.watch() as watch:
        grant = await client.try_acquire("k", scope="s")
        assert isinstance(grant, Grant)
        await client.renew(grant)
        await client.release(grant)
        told = [await watch.take() for _ in range(3)]
        assert [(each.seq, each.type, each.key, each.scope) for each in told if isinstance(each, LeaseEvent)] == [
            (1, "granted", "k", "s"), (2, "renewed", "k", "s"), (3, "released", "k", "s"),
        ]  # fmt: skip
        assert await watch.take(0) is None
        with fake.unreachable():
            pass
        assert await watch.take() == Gap(None, None)
        await client.try_acquire("k")
        async for told_next in watch:
            assert isinstance(told_next, LeaseEvent)
            assert (told_next.type, told_next.holder) == ("granted", "me")
            break
        closing = watch
    assert await closing.take() is None
    assert repr(closing) == "AsyncWatch({}, closed=True)"


@under_both
async def test_a_watch_is_ended_by_another_task(loop: Loop) -> None:
    fake = FakeLeased()
    watch = fake.async_client().watch(key="k")
    told: list[Any] = []

    async def read() -> None:
        async for each in watch:
            told.append(each)

    async def close() -> None:
        await until(lambda: watch._reading, loop)
        watch.close()

    await loop.together(read, close)
    assert told == []
    assert fake._state.watchers == []


@under_both
async def test_a_watch_of_a_daemon_that_stays_away_gives_up_and_can_be_asked_again(loop: Loop) -> None:
    fake = FakeLeased()
    watch = fake.async_client(timeout=0.1).watch()
    async with watch:
        with fake.unreachable():
            with pytest.raises(errors.DaemonUnreachable):
                await watch.take()
            assert await watch.take(0.01) is None
        assert await watch.take() == Gap(None, None)
    with fake.unreachable(), pytest.raises(errors.DaemonUnreachable):
        async with fake.async_client().watch():
            pytest.fail("it began")


@under_both
async def test_wait_free_sees_the_end_of_the_lease(loop: Loop) -> None:
    fake = FakeLeased()
    client = fake.async_client()
    assert await client.wait_free("k")
    fake.hold("k", ttl=60)
    assert not await client.wait_free("k", 0.01)
    free: list[bool] = []

    async def wait() -> None:
        free.append(await client.wait_free("k", 5))

    async def end() -> None:
        await until(lambda: ("check", {"key": "k"}) in fake.calls[3:], loop)
        assert not free
        await fake.sleep(61)

    await loop.together(wait, end)
    assert free == [True]


def test_public_names_are_there_and_others_are_not() -> None:
    assert set(leased.__all__) == {
        "AsyncClient", "Client", "DaemonUnreachable", "LeaseLost", "LeaseRefused", "OutcomeUnknown", "__version__",
    }  # fmt: skip
    assert all(hasattr(leased, name) for name in leased.__all__)
    with pytest.raises(AttributeError, match="no attribute 'Lease'"):
        leased.Lease  # noqa: B018
