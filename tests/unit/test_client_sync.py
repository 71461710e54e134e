from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgpack
import pytest
from fake_daemon import DROP, SILENCE, Asked, FakeDaemon, FakeTime, Fault, Raw, granted, refused

from leased import model
from leased.client import attempt, calling, errors, wire
from leased.client.answers import Grant, Refusal, Unknown
from leased.client.sync import Client
from leased.client.wire import Connection
from leased.clock import HostClock

FENCE = "9007199254740993"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "leased.sock"


def in_turn(*responses: Any) -> Callable[[Asked], Any]:
    """Each request gets the next response; a callable one is given the request."""
    left = list(responses)

    def respond(asked: Asked) -> Any:
        response = left.pop(0)
        return response(asked) if callable(response) else response

    return respond


def test_a_lease_goes_out_as_the_protocol_names_it(path: Path) -> None:
    with FakeDaemon(path, granted) as daemon, Client(path, "me") as client:
        assert client.try_acquire("gpu:0", 30, scope="night")
    (asked,) = daemon.asked
    rid = asked.params.pop("request_id")
    assert len(rid) >= 22
    assert asked.method == "lease"
    assert asked.params == {"key": "gpu:0", "holder": "me", "ttl_seconds": 30, "scope": "night", "bind": "none"}


def test_a_lost_reply_is_asked_for_again_with_the_same_request_id(path: Path) -> None:
    host_time = FakeTime()

    def lose(asked: Asked) -> object:
        host_time.advance(5)
        return DROP

    with FakeDaemon(path, in_turn(lose, DROP, granted)) as daemon, Client(path, host_time=host_time) as client:
        grant = client.try_acquire("gpu:0", 30)
    assert isinstance(grant, Grant)
    assert [asked.connection for asked in daemon.asked] == [1, 2, 3]
    assert len({asked.params["request_id"] for asked in daemon.asked}) == 1
    assert grant.deadline == 1000 + 5 + 30  # from before the attempt that was answered


def test_a_deadline_counts_from_before_the_request_was_sent(path: Path) -> None:
    host_time = FakeTime()

    def take_long(asked: Asked) -> Any:
        host_time.advance(7)
        return granted(asked)

    with FakeDaemon(path, take_long), Client(path, host_time=host_time) as client:
        grant = client.try_acquire("gpu:0", 30)
        assert isinstance(grant, Grant)
        assert grant.deadline == 1030
        renewed = client.renew(grant)
        assert isinstance(renewed, Grant)
        assert renewed.deadline == 1007 + 60


def test_two_attempts_of_the_caller_are_two_request_ids(path: Path) -> None:
    with FakeDaemon(path, refused) as daemon, Client(path) as client:
        client.try_acquire("k")
        client.try_acquire("k")
    assert daemon.asked[0].params["request_id"] != daemon.asked[1].params["request_id"]


def test_no_answer_in_time_is_unknown_and_can_be_asked_for_again(path: Path) -> None:
    with FakeDaemon(path, in_turn(SILENCE, granted)) as daemon, Client(path, timeout=0.05) as client:
        unknown = client.try_acquire("gpu:0")
        assert isinstance(unknown, Unknown)
        assert unknown.reason == "no_answer"
        daemon.wait_until(lambda: daemon.closed == [1])  # so that a waiting grant goes to somebody else
        assert client.try_acquire("gpu:0", request_id=unknown.request_id)
        assert daemon.asked[0].params["request_id"] == daemon.asked[1].params["request_id"] == unknown.request_id


def test_a_daemon_that_loses_every_reply_is_unknown_within_the_time(path: Path) -> None:
    started = time.monotonic()
    with FakeDaemon(path, lambda asked: DROP) as daemon, Client(path, timeout=0.3) as client:
        answer = client.try_acquire("k")
        assert isinstance(answer, Unknown)
        assert 2 <= len(daemon.asked) < 20  # it neither gives up at once nor hammers
        assert time.monotonic() - started > 0.05
        with pytest.raises(errors.OutcomeUnknown):
            client.check("k")
    assert time.monotonic() - started < 2


def test_an_unreachable_daemon_is_told_at_once(path: Path) -> None:
    started = time.monotonic()
    with pytest.raises(errors.DaemonUnreachable, match="there is no such socket"):
        Client(path).try_acquire("k")
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(str(path))
        with pytest.raises(errors.DaemonUnreachable, match="nobody listens there"):
            Client(path).check("k")
    with pytest.raises(errors.DaemonUnreachable, match="path too long"):
        Client("/tmp/" + "x" * 200).check("k")
    assert time.monotonic() - started < 1


def test_a_daemon_that_hears_nothing_is_unreachable_in_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    def connect(*_: object) -> socket.socket:
        ours, theirs = socket.socketpair()
        theirs.close()
        return ours

    monkeypatch.setattr(calling, "connect", connect)
    with pytest.raises(errors.DaemonUnreachable):
        Client("/nowhere", timeout=0.2).check("k")


def test_the_reason_a_daemon_gave_before_it_closed_is_heard() -> None:
    ours, theirs = socket.socketpair()
    theirs.sendall(msgpack.packb((1, 0, "rate_limited: too many connections", None)))
    theirs.close()
    with pytest.raises(errors.RateLimited, match="too many connections"):
        Connection(ours).exchange("check", {"key": "k"}, time.monotonic() + 1)


def test_a_daemon_restarted_between_two_calls_is_not_noticed(path: Path) -> None:
    free = {"released": False, "key": "k", "reason": "expired"}
    with FakeDaemon(path, lambda asked: {"held": False, "key": "k"}) as daemon, Client(path) as client:
        assert client.check("k").held is False
        daemon.stop()
        path.unlink()
        with FakeDaemon(path, lambda asked: free) as restarted:
            released = client.release("k", FENCE)
            assert len(restarted.asked) == 1
    assert released.released is False
    assert not released.maybe_released


def test_a_release_whose_first_answer_was_lost_may_have_released(path: Path) -> None:
    free = {"released": False, "key": "k", "reason": "expired"}
    other = {"released": False, "key": "k", "reason": "not_holder", "held_by": "x", "generation": 9}
    with FakeDaemon(path, in_turn(DROP, free, free, DROP, other)) as daemon, Client(path) as client:
        assert client.release("k", FENCE).maybe_released
        assert not client.release("k", FENCE).maybe_released
        assert not client.release("k", FENCE).maybe_released  # another holds it: this release did nothing to it
        assert {asked.params["fence"] for asked in daemon.asked} == {FENCE}


def test_a_low_level_lease_without_request_id_is_never_repeated(path: Path) -> None:
    with FakeDaemon(path, lambda asked: DROP) as daemon, Client(path) as client:
        with pytest.raises(errors.OutcomeUnknown):
            client.call("lease", key="k", holder="me")
        assert len(daemon.asked) == 1


def test_call_hands_fields_and_reply_through(path: Path) -> None:
    with FakeDaemon(path, lambda asked: {"armed": True}) as daemon, Client(path, agent_key="secret") as client:
        assert client.call("heartbeat", scope="s", expect_within_seconds=5, agent_id=None) == {"armed": True}
    assert daemon.asked[0].params == {"scope": "s", "expect_within_seconds": 5, "agent_key": "secret"}


def test_errors_of_the_daemon_are_raised(path: Path) -> None:
    wrong = Fault("invalid_argument: ttl_seconds must be a number from 0.1 to 3600")
    with FakeDaemon(path, lambda asked: wrong) as daemon, Client(path) as client:
        with pytest.raises(errors.InvalidArgument, match="ttl_seconds must be"):
            client.try_acquire("k", 0)
        assert len(daemon.asked) == 1


def test_a_connection_refused_with_a_reason_tells_it(path: Path) -> None:
    limit = Fault("rate_limited: too many connections", about_connection=True)
    with FakeDaemon(path, lambda asked: limit), Client(path) as client, pytest.raises(errors.RateLimited, match="too many"):
        client.check("k")


def test_limits_met_after_a_lost_reply_leave_the_outcome_unknown(path: Path) -> None:
    limit = Fault("rate_limited: requests")
    script = in_turn(DROP, *[limit] * 50)
    with FakeDaemon(path, script), Client(path, timeout=0.3) as client:
        assert isinstance(client.try_acquire("k"), Unknown)


def test_what_is_no_daemon_is_a_protocol_fault(path: Path) -> None:
    http = Raw(b"HTTP/1.1 400 Bad Request\r\n\r\n")
    with (
        FakeDaemon(path, lambda asked: http),
        Client(path) as client,
        pytest.raises(errors.ProtocolFault, match="no leased daemon"),
    ):
        client.check("k")


def test_an_internal_error_is_a_fault_at_first_and_unknown_after_a_lost_reply(path: Path) -> None:
    internal = Fault("internal: broken")
    with FakeDaemon(path, in_turn(internal, DROP, internal)), Client(path) as client:
        with pytest.raises(errors.ProtocolFault, match="broken"):
            client.try_acquire("k")
        assert isinstance(client.try_acquire("k"), Unknown)


def test_a_waiting_lease_says_how_long_and_a_repeat_only_what_is_left(path: Path) -> None:
    with FakeDaemon(path, in_turn(DROP, refused)) as daemon, Client(path) as client:
        assert isinstance(client.try_acquire("k", wait=7.5), Refusal)
    first, second = (asked.params["wait_seconds"] for asked in daemon.asked)
    assert first == 7.5
    assert 0 < second < 7.5


@pytest.mark.parametrize("reason", sorted(attempt.RESTARTING))
def test_a_wait_that_meets_a_daemon_that_ends_or_begins_queues_again(path: Path, reason: str) -> None:
    def null(asked: Asked) -> dict[str, Any]:
        return refused(asked, reason, None, acquired=None, retry_after_seconds=1.0)

    with FakeDaemon(path, in_turn(null, DROP, null, granted, granted)) as daemon, Client(path) as client:
        assert isinstance(client.try_acquire("k", wait=7.5), Grant)
        assert daemon.methods() == ["lease"] * 4 + ["renew"]  # which dates the grant
        assert len({asked.params["request_id"] for asked in daemon.asked[:4]}) == 1
        waits = [asked.params["wait_seconds"] for asked in daemon.asked[:4]]
        assert 7.5 == waits[0] > waits[1] > waits[2] > waits[3] > 0
        daemon.asked.clear()
        daemon.script = null
        assert isinstance(client.try_acquire("k"), Unknown)  # who does not wait is told
        assert isinstance(client.try_acquire("k", wait=0.05), Unknown)  # and who has waited
        assert 3 <= len(daemon.asked) <= 5


def test_a_wait_outlives_a_daemon_that_is_away_for_a_while(path: Path) -> None:
    answers: list[Any] = []
    with FakeDaemon(path, lambda asked: SILENCE) as daemon, Client(path) as client:
        waiter = threading.Thread(target=lambda: answers.append(client.try_acquire("k", wait=60)))
        waiter.start()
        daemon.wait_until(lambda: daemon.asked)
        path.unlink()
        daemon.stop()
        waiter.join(0.1)
        with FakeDaemon(path, granted) as restarted:
            waiter.join(5)
            first, again = daemon.asked[0].params, restarted.asked[0].params
    assert isinstance(answers[0], Grant)
    assert again["request_id"] == first["request_id"]
    assert 50 < again["wait_seconds"] < 60


@pytest.mark.parametrize("reason", ["superseded", "full", "store"])
def test_other_nulls_end_a_wait_at_once(path: Path, reason: str) -> None:
    """Above all the call whose place in the line was taken by a later one: two that asked again would take it from each other."""
    with FakeDaemon(path, lambda asked: refused(asked, reason, None, acquired=None)) as daemon, Client(path) as client:
        answer = client.try_acquire("k", wait=60, request_id="r" * 32)
        assert isinstance(answer, Unknown)
        assert answer.reason == reason
        assert len(daemon.asked) == 1


def test_a_grant_after_a_wait_is_dated_by_the_daemon_of_the_same_boot(path: Path) -> None:
    def grant(asked: Asked) -> dict[str, Any]:
        return granted(asked, expires_boottime=4321.5, boot_id=HostClock().boot_id())

    with FakeDaemon(path, grant) as daemon, Client(path, host_time=FakeTime()) as client:
        answer = client.try_acquire("k", 30, wait=5)
    assert isinstance(answer, Grant)
    assert answer.deadline == 4321.5
    assert daemon.methods() == ["lease"]


def test_a_grant_after_a_wait_elsewhere_is_renewed_at_once_and_counted_from_that(path: Path) -> None:
    host_time = FakeTime()

    def wait_long(asked: Asked) -> Any:
        host_time.advance(100)
        return granted(asked)

    with FakeDaemon(path, in_turn(wait_long, granted)) as daemon, Client(path, host_time=host_time) as client:
        answer = client.try_acquire("k", 60, wait=200)
    assert isinstance(answer, Grant)
    assert (answer.deadline, answer.renewed) == (1000 + 100 + 60, False)
    assert daemon.methods() == ["lease", "renew"]
    assert daemon.asked[1].params["fence"] == FENCE


def test_a_thread_that_waits_holds_up_no_other(path: Path) -> None:
    def script(asked: Asked) -> Any:
        return SILENCE if asked.method == "lease" else {"held": True, "key": asked.params["key"], "held_by": asked.params["key"]}

    answers: list[Any] = []
    with FakeDaemon(path, script) as daemon, Client(path) as client:
        waiter = threading.Thread(target=lambda: answers.append(client.try_acquire("busy", wait=60)))
        waiter.start()
        daemon.wait_until(lambda: daemon.asked)
        for n in range(20):
            assert client.check(f"k{n}").held_by == f"k{n}"
        assert not answers
        daemon.answer(daemon.asked[0], refused(daemon.asked[0]))
        waiter.join(5)
    assert {asked.connection for asked in daemon.asked} == {1}
    assert isinstance(answers[0], Refusal)


def test_many_threads_on_one_connection_each_get_their_own_answer(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The daemon answers in pairs, the later request first, so that threads read each other's answers."""
    kept: list[Asked] = []
    threads, rounds = 8, 25
    monkeypatch.setattr(wire, "_SLICE_SECONDS", 60.0)  # nobody looks by itself: each must be woken

    def script(asked: Asked) -> Any:
        kept.append(asked)
        if len(kept) == 2:
            for one in reversed(kept):
                daemon.answer(one, {"held": True, "key": one.params["key"], "held_by": "of " + one.params["key"]})
            kept.clear()
        return SILENCE

    wrong: list[Any] = []

    def ask(name: int) -> None:
        try:
            for n in range(rounds):
                key = f"{name}/{n}"
                if client.check(key).held_by != f"of {key}":
                    wrong.append(key)
        except Exception as raised:
            wrong.append(raised)

    with FakeDaemon(path, script) as daemon, Client(path, timeout=5) as client:
        workers = [threading.Thread(target=ask, args=(name,)) for name in range(threads)]
        for worker in workers:
            worker.start()
        while alive := [worker for worker in workers if worker.is_alive()]:
            alive[0].join(0.05)
            if len(alive) == 1 and kept:  # the last one's request waits for a partner
                client.check("partner")
    assert wrong == []
    assert {asked.connection for asked in daemon.asked} == {1}


def test_a_lost_connection_is_repeated_by_all_threads_that_waited_on_it(path: Path) -> None:
    def script(asked: Asked) -> Any:
        return SILENCE if asked.connection == 1 else {"held": False, "key": asked.params["key"]}

    answers: list[Any] = []
    with FakeDaemon(path, script) as daemon, Client(path) as client:
        workers = [threading.Thread(target=lambda n=n: answers.append(client.check(f"k{n}"))) for n in range(4)]
        for worker in workers:
            worker.start()
        daemon.wait_until(lambda: len(daemon.asked) == 4)
        daemon.close_connection(1)
        for worker in workers:
            worker.join(5)
    assert sorted(answer.key for answer in answers) == ["k0", "k1", "k2", "k3"]
    assert {asked.connection for asked in daemon.asked} == {1, 2}


def test_an_interrupt_while_waiting_closes_the_connection(path: Path) -> None:
    """So the daemon passes the grant on; and the client works on."""
    main = threading.main_thread().ident
    assert main is not None

    def script(asked: Asked) -> Any:
        if asked.method == "lease":
            signal.pthread_kill(main, signal.SIGINT)
            return SILENCE
        return {"held": False, "key": "k"}

    with FakeDaemon(path, script) as daemon, Client(path) as client:
        with pytest.raises(KeyboardInterrupt):
            client.try_acquire("k", wait=60)
        daemon.wait_until(lambda: daemon.closed == [1])
        assert client.check("k").held is False


def test_the_longest_wait_is_the_protocol_s() -> None:
    assert attempt.LONGEST_WAIT_SECONDS == model.MAX_WAIT_SECONDS


def test_list_fetches_a_page_when_it_is_needed(path: Path) -> None:
    pages = in_turn({"leases": [{"key": "a"}, {"key": "b"}], "cursor": "7"}, {"leases": [{"key": "c"}], "cursor": None})
    with FakeDaemon(path, pages) as daemon, Client(path) as client:
        leases = client.list(scope="s", page=2)
        assert [next(leases)["key"], next(leases)["key"]] == ["a", "b"]
        assert len(daemon.asked) == 1
        assert [lease["key"] for lease in leases] == ["c"]
    assert [asked.params for asked in daemon.asked] == [{"scope": "s", "limit": 2}, {"scope": "s", "limit": 2, "cursor": "7"}]


def test_a_cursor_that_stands_still_does_not_loop_for_ever(path: Path) -> None:
    with (
        FakeDaemon(path, lambda asked: {"leases": [], "cursor": "7"}),
        Client(path) as client,
        pytest.raises(errors.ProtocolFault, match="cursor"),
    ):
        list(client.list())


def test_a_switch_is_armed_and_disarmed(path: Path) -> None:
    armed = {"scope": "s", "armed": True, "agent_id": "a", "due_at": "2026-11-29T17:39:36.123Z", "due_in_seconds": 60.0}
    unarmed = {"scope": "s", "armed": False, "agent_id": "a", "due_at": None, "due_in_seconds": None, "last_missed_at": "then"}
    with FakeDaemon(path, in_turn(armed, unarmed, {"scope": "s"})) as daemon, Client(path) as client:
        switch = client.heartbeat("s", 60, "a")
        assert switch
        assert (switch.scope, switch.due_in_seconds, switch.agent_id, switch.released) == ("s", 60.0, "a", [])
        switch = client.disarm("s")
        assert not switch
        assert (switch.due_in_seconds, switch.last_missed_at) == (None, "then")
        with pytest.raises(errors.ProtocolFault, match="neither armed"):
            client.heartbeat("s", 60)
    assert [asked.params for asked in daemon.asked] == [
        {"scope": "s", "expect_within_seconds": 60, "agent_id": "a"},
        {"scope": "s", "disarm": True},
        {"scope": "s", "expect_within_seconds": 60},
    ]


def test_a_resume_packet_tells_leases_and_switch(path: Path) -> None:
    released = [{"key": None, "key_hash": "00ff", "generation": 4}]
    switch = {
        "armed": False,
        "agent_id": None,
        "due_at": None,
        "due_in_seconds": None,
        "last_missed_at": "then",
        "released": released,
    }
    full = {"scope": "s", "empty": False, "leases": [{"key": "k"}], "switch": switch}
    nothing = {"scope": "s", "empty": True, "leases": [], "switch": None}
    with FakeDaemon(path, in_turn(full, nothing)) as daemon, Client(path) as client:
        packet = client.resume_packet("s")
        assert packet
        assert packet.leases == [{"key": "k"}]
        assert packet.switch is not None
        assert (packet.switch.scope, packet.switch.armed, packet.switch.released) == ("s", False, released)
        packet = client.resume_packet("s")
        assert not packet
        assert packet.switch is None
    assert [(asked.method, asked.params) for asked in daemon.asked] == [("resume_packet", {"scope": "s"})] * 2


def test_revoke_and_info(path: Path) -> None:
    script = in_turn({"revoked": True, "generation": 4, "held_by": "x"}, {"name": "leased"})
    with FakeDaemon(path, script) as daemon, Client(path) as client:
        revoked = client.revoke("k", "it hangs")
        assert revoked
        assert (revoked.held_by, revoked.generation) == ("x", 4)
        assert client.info() == {"name": "leased"}
    assert daemon.asked[0].params == {"key": "k", "reason": "it hangs"}


def in_child(check: Callable[[], str]) -> str:
    """What `check` returns in a forked child; its exception's type if it raised."""
    read, write = os.pipe()
    if (child := os.fork()) == 0:
        try:
            told = check()
        except BaseException as raised:
            told = f"raised {type(raised).__name__}"
        os.write(write, told.encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        told = pipe.read()
    os.waitpid(child, 0)
    return told


def test_a_forked_child_has_a_connection_and_a_label_of_its_own(path: Path) -> None:
    with FakeDaemon(path, granted) as daemon, Client(path) as client:
        assert client.try_acquire("k")
        label = client.holder
        told = in_child(lambda: f"{bool(client.try_acquire('k'))} {client.holder != label}")
        assert told == "True True"
        daemon.wait_until(lambda: 2 in daemon.closed)
        assert client.try_acquire("k")
        assert [asked.connection for asked in daemon.asked] == [1, 2, 1]  # the parent's went on
        assert daemon.asked[0].params["holder"] == daemon.asked[2].params["holder"] != daemon.asked[1].params["holder"]


def test_a_fork_while_another_thread_waits_does_not_hang_the_child(path: Path) -> None:
    def script(asked: Asked) -> Any:
        return SILENCE if asked.method == "lease" else {"held": False, "key": "k"}

    with FakeDaemon(path, script) as daemon, Client(path) as client:
        waiter = threading.Thread(target=client.try_acquire, args=("k",), kwargs={"wait": 60})
        waiter.start()
        daemon.wait_until(lambda: daemon.asked)
        assert in_child(lambda: str(client.check("k").held)) == "False"
        daemon.answer(daemon.asked[0], refused(daemon.asked[0]))
        waiter.join(5)
        assert not waiter.is_alive()
