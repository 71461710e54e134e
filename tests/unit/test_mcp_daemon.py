"""The bridge's lines to the daemon: whoever goes away leaves no grant behind, and what breaks is asked again as the same attempt."""

from __future__ import annotations

import select
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import trio
from fake_daemon import DROP, SILENCE, Asked, FakeDaemon, Fault, granted, refused

from leased.client import mcp_daemon
from leased.client.errors import DaemonUnreachable, InvalidArgument, OutcomeUnknown, RateLimited
from leased.client.mcp_daemon import Lines, fresh_fence

pytestmark = pytest.mark.trio
LEASE = {"key": "k", "holder": "h", "request_id": "r" * 32}
PATIENCE_SECONDS = 20.0


@asynccontextmanager
async def lines_to(path: str) -> AsyncIterator[Lines]:
    with trio.fail_after(PATIENCE_SECONDS):
        async with trio.open_nursery() as nursery:
            yield Lines(path, nursery)
            nursery.cancel_scope.cancel()


async def until(true: Callable[[], Any]) -> None:
    """The scripted daemon is a thread of its own: the loop must go on while it works."""
    while not true():
        await trio.lowlevel.checkpoint()


async def cancelled_when(true: Callable[[], Any], lines: Lines, operation: str, fields: dict[str, Any]) -> None:
    async with trio.open_nursery() as nursery:
        nursery.start_soon(lines.ask, operation, fields)
        await until(true)
        nursery.cancel_scope.cancel()


def script(asked: Asked) -> Any:
    if asked.method == "check":
        return {"held": False, "key": asked.params["key"]}
    if asked.method == "release":
        return {"released": True, "key": asked.params["key"], "generation": 17}
    return granted(asked)


async def test_calls_share_one_line_and_its_answers_may_come_in_any_order(tmp_path: Path) -> None:
    kept: list[Asked] = []
    answers: dict[str, Any] = {}

    def late(asked: Asked) -> Any:
        kept.append(asked)
        return SILENCE

    with FakeDaemon(tmp_path / "s", late) as daemon:
        async with lines_to(daemon.path) as lines, trio.open_nursery() as nursery:

            async def check(key: str) -> None:
                answers[key] = (await lines.ask("check", {"key": key}))[0]

            for key in ("a", "b"):
                nursery.start_soon(check, key)
            await until(lambda: len(kept) == 2)
            for asked in reversed(kept):
                daemon.answer(asked, {"held": False, "key": asked.params["key"]})
        assert {key: reply["key"] for key, reply in answers.items()} == {"a": "a", "b": "b"}
        assert {asked.connection for asked in daemon.asked} == {1}


async def test_one_that_waits_has_a_line_of_its_own_and_hangs_up_when_it_is_cancelled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mcp_daemon, "UNDO_SECONDS", 10 * PATIENCE_SECONDS)  # it does not wait for an answer first

    def waits(asked: Asked) -> Any:
        return SILENCE if asked.params.get("wait_seconds") else script(asked)

    with FakeDaemon(tmp_path / "s", waits) as daemon:
        async with lines_to(daemon.path) as lines:
            await lines.ask("check", {"key": "k"})
            await cancelled_when(lambda: len(daemon.asked) == 2, lines, "lease", {**LEASE, "wait_seconds": 30})
            await until(lambda: daemon.closed == [2])
            await lines.ask("check", {"key": "k"})
        assert [asked.connection for asked in daemon.asked] == [1, 2, 1]
        assert daemon.methods() == ["check", "lease", "check"], "there was nothing to give back"


async def test_a_grant_that_had_arrived_when_its_asker_was_cancelled_is_released(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The answer is whole in the kernel's buffer, and read only after the line was hung up."""
    reading = trio.Event()
    read = mcp_daemon.Line.read
    opened: list[mcp_daemon.Line] = []

    def arrived() -> bool:
        return bool(opened and select.select([opened[0]._stream.socket.fileno()], [], [], 0)[0])

    async def late(line: mcp_daemon.Line) -> None:
        opened.append(line)
        await reading.wait()
        await read(line)

    with FakeDaemon(tmp_path / "s", script) as daemon:
        async with lines_to(daemon.path) as lines:
            monkeypatch.setattr(mcp_daemon.Line, "read", late)
            with trio.CancelScope() as scope:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(lines.ask, "lease", {**LEASE, "wait_seconds": 30, "agent_key": "k3y"})
                    await until(arrived)
                    scope.cancel()
                    reading.set()
        assert daemon.methods() == ["lease", "release"]
        assert daemon.asked[1].params == {"key": "k", "fence": "9007199254740993", "agent_key": "k3y"}


@pytest.mark.parametrize("wait", [0, 30])
async def test_a_grant_that_comes_in_the_moment_its_asker_is_cancelled_is_released(
    wait: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer = mcp_daemon.Line.answer
    scope = trio.CancelScope()

    async def answered(line: mcp_daemon.Line, msgid: int) -> dict[str, Any]:
        reply = await answer(line, msgid)
        scope.cancel()
        return reply

    monkeypatch.setattr(mcp_daemon.Line, "answer", answered)
    with FakeDaemon(tmp_path / "s", script) as daemon:
        async with lines_to(daemon.path) as lines:
            with scope:
                await lines.ask("lease", {**LEASE, "wait_seconds": wait})
            assert scope.cancelled_caught
        assert daemon.methods() == ["lease", "release"]


@pytest.mark.parametrize(
    ("operation", "fields", "reply", "given_back"),
    [
        ("lease", LEASE, {}, True),
        ("lease", {**LEASE, "fence": "9007199254740993"}, {"renewed": True}, False),
        ("agent_lock", {"key": "k", "holder": "h"}, {"token": "9007199254740993"}, True),
        ("agent_lock", {"key": "k", "holder": "h", "token": "9007199254740993"}, {"token": "9007199254740993"}, False),
        ("renew", {"key": "k", "holder": "h", "fence": "9007199254740993"}, {"renewed": True}, False),
    ],
)
async def test_a_call_on_the_shared_line_that_is_cancelled_gives_back_a_fresh_grant(
    tmp_path: Path, operation: str, fields: dict[str, Any], reply: dict[str, Any], given_back: bool
) -> None:
    kept: list[Asked] = []

    def late(asked: Asked) -> Any:
        if asked.method in ("release", "check"):
            return script(asked)
        kept.append(asked)
        return SILENCE

    with FakeDaemon(tmp_path / "s", late) as daemon:
        async with lines_to(daemon.path) as lines, trio.open_nursery() as nursery:
            with trio.CancelScope() as scope:
                async with trio.open_nursery() as asking:
                    asking.start_soon(lines.ask, operation, fields)
                    await until(lambda: kept)
                    scope.cancel()
                    nursery.start_soon(trio.to_thread.run_sync, daemon.answer, kept[0], granted(kept[0], **reply))
            assert (await lines.ask("check", {"key": "k"}))[0]["held"] is False, "the line is everybody's"
        assert daemon.methods() == [operation, *["release"] * given_back, "check"]
        assert {asked.connection for asked in daemon.asked} == {1}


async def test_a_broken_connection_is_asked_again_under_the_same_request_id(tmp_path: Path) -> None:
    with FakeDaemon(tmp_path / "s", lambda asked: DROP if asked.connection == 1 else granted(asked)) as daemon:
        async with lines_to(daemon.path) as lines:
            reply, repeated = await lines.ask("lease", dict(LEASE))
        assert reply["acquired"] is True and repeated
        assert [asked.params["request_id"] for asked in daemon.asked] == [LEASE["request_id"]] * 2


async def test_a_wait_goes_on_after_a_restart_for_what_is_left_of_it(tmp_path: Path) -> None:
    def restarting(asked: Asked) -> Any:
        if asked.connection == 1:
            return {"acquired": None, "key": "k", "holder": "h", "reason": "shutting_down", "retry_after_seconds": 1.0}
        return granted(asked)

    with FakeDaemon(tmp_path / "s", restarting) as daemon:
        async with lines_to(daemon.path) as lines:
            reply, _ = await lines.ask("lease", {**LEASE, "wait_seconds": 30})
        assert reply["acquired"] is True
        assert daemon.asked[0].params["wait_seconds"] == 30
        assert 0 < daemon.asked[1].params["wait_seconds"] < 30


async def test_a_claim_that_may_have_been_granted_is_not_claimed_again(tmp_path: Path) -> None:
    with FakeDaemon(tmp_path / "s", lambda asked: DROP) as daemon:
        async with lines_to(daemon.path) as lines:
            with pytest.raises(OutcomeUnknown):
                await lines.ask("agent_lock", {"key": "k"})
        assert len(daemon.asked) == 1


async def test_a_lease_bound_to_its_connection_is_moved_to_the_line_that_stays(tmp_path: Path) -> None:
    with FakeDaemon(tmp_path / "s", script) as daemon:
        async with lines_to(daemon.path) as lines:
            await lines.ask("lease", {**LEASE, "wait_seconds": 5, "bind": "connection"})
            await until(lambda: daemon.closed == [1])
        assert [(asked.connection, asked.params["request_id"]) for asked in daemon.asked] == [(1, "r" * 32), (2, "r" * 32)]


async def test_no_answer_in_time_is_told_and_hangs_up_a_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mcp_daemon, "ANSWER_SECONDS", 0.05)
    with FakeDaemon(tmp_path / "s", lambda asked: SILENCE) as daemon:
        async with lines_to(daemon.path) as lines:
            with pytest.raises(OutcomeUnknown):
                await lines.ask("lease", dict(LEASE))
            with pytest.raises(OutcomeUnknown):
                await lines.ask("lease", {**LEASE, "wait_seconds": 0.01})
            await until(lambda: 2 in daemon.closed)
        assert {asked.params["request_id"] for asked in daemon.asked} == {LEASE["request_id"]}


async def test_errors_and_a_missing_daemon_are_told(tmp_path: Path) -> None:
    with FakeDaemon(tmp_path / "s", lambda asked: Fault("invalid_argument: key must be shorter")) as daemon:
        async with lines_to(daemon.path) as lines:
            with pytest.raises(InvalidArgument, match="key must be shorter"):
                await lines.ask("check", {"key": "k"})
    async with lines_to(str(tmp_path / "nothing")) as lines:
        with pytest.raises(DaemonUnreachable, match="there is no such socket"):
            await lines.ask("check", {"key": "k"})


async def test_no_more_wait_than_the_daemon_has_lines_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mcp_daemon, "MAX_WAITING", 1)
    with FakeDaemon(tmp_path / "s", lambda asked: SILENCE if asked.params.get("wait_seconds") else refused(asked)) as daemon:
        async with lines_to(daemon.path) as lines, trio.open_nursery() as nursery:
            nursery.start_soon(lines.ask, "lease", {**LEASE, "wait_seconds": 30})
            await until(lambda: daemon.asked)
            with pytest.raises(RateLimited):
                await lines.ask("lease", {**LEASE, "wait_seconds": 30})
            assert (await lines.ask("lease", dict(LEASE)))[0]["acquired"] is False
            nursery.cancel_scope.cancel()


@pytest.mark.parametrize("acquired", [False, None])
async def test_what_is_no_grant_has_nothing_to_give_back(acquired: bool | None) -> None:
    assert fresh_fence("lease", {}, {"acquired": acquired}) is None
