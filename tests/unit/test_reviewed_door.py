"""What a hostile reading of the doors and of the daemon's loop found, each as the story that showed it.  The switchboard is real, and so
are the sockets; who decides is not."""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import trio
from http_peer import request

import leased.daemon
from leased import frames
from leased.calls import Call
from leased.clock import HostClock
from leased.config import Config
from leased.config_keys import Limits
from leased.daemon import Daemon
from leased.doors.http import HttpDoor
from leased.doors.rpc import MESSAGES_AT_ONCE, Known, nobody_known
from leased.doors.unix import Switchboard
from leased.model import Identity, LeaseRequest
from leased.opening import open_state
from leased.peers import Policy
from leased.state.ledger import INITIALISED, write_initialised
from leased.systemd import Notifier

KEY_HASH = b"k" * 20
SOCKET_BYTES = 212_992  # Linux's default; set, because what stops where depends on it
LARGE = "x" * 400_000  # more than a socket takes at once
PATIENCE = 20_000  # turns


class Desk:
    """A switchboard, one client's end of a connection to it, and what the daemon behind it came to know."""

    def __init__(self) -> None:
        self.deciding: Callable[[Call], object] = lambda call: call.answer({})
        self.decided: list[Call] = []
        self.batches: list[list[Call]] = []
        self.undelivered: list[list[tuple[bytes, int]]] = []
        policy = Policy(by_uid={}, by_gid={}, per_uid=False, operator_group=None)
        self.board = Switchboard(policy, Limits(), self._decide, lambda peer: self.undelivered.append(list(peer.undelivered)))
        self.known: Known = nobody_known
        self.board.known = lambda secret, identity, caller: self.known(secret, identity, caller)
        self.client = self.another()
        self.replies = frames.Replies()
        self.unsent = b""

    def another(self) -> socket.socket:
        """The client's end of one more connection."""
        client, theirs = socket.socketpair()
        client.setblocking(False)
        for end in (client, theirs):
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SOCKET_BYTES // 2)  # which the kernel doubles
        self.board._admit(theirs)
        return client

    def _decide(self, batch: list[Call], judged: float | None) -> None:
        self.decided += batch
        self.batches.append(list(batch))
        for call in batch:
            self.deciding(call)

    def say(self, *requests: tuple[str, dict[str, Any]]) -> None:
        """Numbered from 1; as much is sent as the socket takes."""
        self.unsent += b"".join(frames.request(n, method, params) for n, (method, params) in enumerate(requests, 1))
        try:
            self.unsent = self.unsent[self.client.send(self.unsent) :]
        except (BlockingIOError, BrokenPipeError):  # full, or cut off: what is read says why
            pass

    def hear(self, octets: int = 1 << 20) -> list[Any]:
        """What one read brings; nothing when there is nothing to read."""
        try:
            self.replies.feed(self.client.recv(octets))
        except BlockingIOError:
            return []
        return self.replies.take()


@pytest.fixture
def desk() -> Iterator[Desk]:
    made = Desk()
    try:
        yield made
    finally:
        made.client.close()
        made.board.close_all()
        made.board.epoll.close()


# ---- who asks while others are read


def asked(desk: Desk, said: Callable[[], object], judged: float | None = None) -> list[list[str]]:
    """Two clients have asked; `said` happens while the second is read.  The keys of each batch of the turn and of the one after it."""

    def known(secret: str, identity: Identity, caller: object) -> Identity:
        said()
        return identity

    desk.known = known
    first, second = desk.another(), desk.another()
    first.send(frames.request(1, "check", {"key": "first"}))
    second.send(frames.request(1, "check", {"key": "second", "agent_key": "k"}))
    try:
        desk.board.turn(judged)
        desk.board.turn()
    finally:
        first.close()
        second.close()
    return [[call.request.key for call in batch] for batch in desk.batches]


def test_who_asks_while_others_are_read_is_decided_with_them(desk: Desk) -> None:
    assert asked(desk, lambda: desk.say(("check", {"key": "late"}))) == [["first", "second", "late"]]


def test_after_a_pause_only_what_had_come_by_then_is_judged_by_its_instant(desk: Desk) -> None:
    assert asked(desk, lambda: desk.say(("check", {"key": "late"})), 1.0) == [["first", "second"], ["late"]]


def test_nobody_is_read_twice_in_a_turn(desk: Desk) -> None:
    third = desk.another()
    more: list[Callable[[], object]] = [
        lambda: desk.say(("check", {"key": "late", "agent_key": "k"})),
        lambda: third.send(frames.request(1, "check", {"key": "later"})) and desk.say(("check", {"key": "again"})),
    ]
    assert asked(desk, lambda: more.pop(0)()) == [["first", "second", "late", "later"], ["again"]]
    third.close()


def test_what_is_no_client_is_heard_before_who_asks_after_it(desk: Desk) -> None:
    heard: list[int] = []
    read, write = os.pipe()
    desk.board.readable(read, lambda: heard.append(len(desk.batches)) or desk.board.forget(read))

    def said() -> None:
        os.write(write, b"x")
        desk.say(("check", {"key": "late"}))

    assert asked(desk, said) == [["first", "second"], ["late"]]
    assert heard == [1]
    os.close(read)
    os.close(write)


# ---- long pipelines


@pytest.mark.parametrize(
    ("many", "key", "filling", "slowly"),
    [(6000, 10, 400, 1 << 13), (1500, 300, 3000, 1 << 13), (1500, 300, 3000, 1 << 16), (1500, 900, 3000, 1 << 16)],
)
def test_a_long_pipeline_that_is_read_slowly_is_answered_whole_and_in_order(
    desk: Desk, many: int, key: int, filling: int, slowly: int
) -> None:
    """`many` calls; octets in a key, in an answer, and in each read of the client's."""
    desk.deciding = lambda call: call.answer({"held": False, "filling": "x" * filling})
    desk.say(*[("check", {"key": f"{n:0{key}}"}) for n in range(many)])
    heard: list[Any] = []
    for _ in range(PATIENCE):
        desk.say()
        desk.board.turn()
        heard += desk.hear(slowly)
        if len(heard) == many or any(reply.error for reply in heard[-100:]):
            break
    assert [reply.error for reply in heard if reply.error] == []
    assert [reply.msgid for reply in heard] == list(range(1, many + 1))


# ---- grants passed on

LEASE = ("lease", {"key": "k", "holder": "h", "wait_seconds": 9})
CHECK = ("check", {"key": "other"})


def passing_on(call: Call) -> None:
    """Each `lease` is answered by a grant passed on, its generation the number of the call; each `check` by more than a socket takes."""
    if isinstance(call.request, LeaseRequest):
        assert call.msgid is not None
        call.passed_on = (KEY_HASH, call.msgid)
        call.answer({"acquired": True})
    else:
        call.answer({"held": False, "filling": LARGE})


@pytest.mark.parametrize(
    ("requests", "read", "given_back"),
    [
        ([LEASE, CHECK, CHECK], [1], []),
        ([CHECK, LEASE], [], [2]),
        ([LEASE, LEASE, CHECK, LEASE, LEASE], [1, 2], [4, 5]),
    ],
    ids=["answered-first", "behind-what-was-not-read", "some-of-both"],
)
def test_only_a_grant_whose_answer_has_not_left_is_given_back(
    desk: Desk, requests: list[Any], read: list[int], given_back: list[int]
) -> None:
    desk.deciding = passing_on
    desk.say(*requests)
    desk.board.turn()
    assert [reply.msgid for reply in desk.hear(4096)] == read
    desk.client.close()
    desk.board.turn()
    assert desk.undelivered == [[(KEY_HASH, generation) for generation in given_back]]


def test_over_http_too_a_grant_whose_answer_was_read_is_not_given_back(desk: Desk) -> None:
    desk.deciding = passing_on
    desk.board.http = HttpDoor({}, nobody_known, lambda: 1_800_000_000.0)
    lease, check = request("POST", "/v1/lease", LEASE[1]), request("POST", "/v1/lease/check", CHECK[1])
    desk.client.sendall(lease + check + lease)
    desk.board.turn()
    assert desk.client.recv(4096).count(b'{"acquired":true}') == 1
    desk.client.close()
    desk.board.turn()
    assert [len(grants) for grants in desk.undelivered] == [1], "the second, which waited behind what was not read"


# ---- proofs


def test_a_client_that_never_proves_its_process_is_remembered_for_64_calls_and_no_more(desk: Desk) -> None:
    proven: list[Call] = []
    desk.deciding = lambda call: call.peer.challenge(call)
    desk.say(*[("lease", {"key": f"k{n}", "holder": "h", "bind": "process"}) for n in range(200)])
    heard: list[Any] = []
    for _ in range(10):
        desk.board.turn()
        heard += desk.hear()
    assert len(desk.decided) == 200
    (question,) = [each for each in heard if isinstance(each, frames.Event)]
    refused = [each for each in heard if isinstance(each, frames.Answer)]
    assert [each.msgid for each in refused] == list(range(65, 201))
    assert all("rate_limited: bind: 64 calls" in str(each.error) for each in refused)

    desk.deciding = proven.append
    desk.say(("prove", question.params))
    desk.board.turn()
    assert [call.msgid for call in proven] == list(range(1, 65)), "those that were kept are decided once it has proven itself"


# ---- the daemon's loop


def test_a_first_mark_that_cannot_be_written_is_tried_again_and_ends_no_daemon(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tries: list[Path] = []

    async def live() -> bool:
        written = trio.Event()

        def write(directory: Path, install_id: str) -> None:
            tries.append(directory)
            if len(tries) == 1:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            write_initialised(directory, install_id)
            written.set()

        monkeypatch.setattr(leased.daemon, "write_initialised", write)
        state, runtime = tmp_path / "state", tmp_path / "run"
        for directory in (state, runtime):
            directory.mkdir(mode=0o700)
        config = Config("", tmp_path / "socket", state, runtime, max_leases=100)
        clock = HostClock()
        daemon = Daemon(config, clock, open_state(config, clock), Notifier())
        with trio.fail_after(20):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(daemon.serve, [], lambda: None)
                await written.wait()
                daemon.stop()
            return await daemon.shut()

    assert trio.run(live) is True
    assert len(tries) == 2
    assert (tmp_path / "state" / INITIALISED).exists()


# ---- bad bytes that arrive while earlier requests wait for their turn


def test_what_is_said_about_bad_bytes_does_not_overtake_the_answers_due_before(desk: Desk) -> None:
    desk.say(*[("check", {"key": "k"})] * (MESSAGES_AT_ONCE + 9))
    desk.board.turn()
    desk.client.send(b"\xc1")  # in the turn that takes the nine
    while desk.board.turn():
        pass
    told = desk.hear()
    assert [message.msgid for message in told] == [*range(1, MESSAGES_AT_ONCE + 10), 0]
