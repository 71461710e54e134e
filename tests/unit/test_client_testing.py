"""`FakeLeased`, as a test of somebody else uses it.  That it answers as a daemon does: tests/end_to_end/test_client_fake_agrees.py."""

from __future__ import annotations

import os
import threading
import time
from typing import Any

import pytest

from leased import Client, DaemonUnreachable, LeaseLost, LeaseRefused, OutcomeUnknown
from leased.client.answers import Grant, Refusal, Unknown
from leased.client.watching import Gap, LeaseEvent
from leased.testing import FakeLeased


def operations(fake: FakeLeased) -> list[str]:
    return [operation for operation, _ in fake.calls]


def granted(answer: object) -> Grant:
    assert isinstance(answer, Grant), answer
    return answer


def test_hours_of_holding_take_no_time_and_every_renewal() -> None:
    fake = FakeLeased()
    started = time.monotonic()
    with fake.client("me").lease("k", ttl=30) as lease:
        fake.advance(3600)
        lease.check()
        assert lease.deadline == pytest.approx(fake.now + 30)
        assert operations(fake).count("renew") == 360
    assert operations(fake)[-1] == "release"
    assert time.monotonic() - started < 10


def test_a_lease_that_is_lost_is_known_after_its_next_renewal() -> None:
    fake = FakeLeased()
    told: list[LeaseLost] = []
    with pytest.raises(LeaseLost, match="lapsed"), fake.client().lease("k", ttl=30, on_lost=told.append) as lease:
        fake.lose("k")
        fake.advance(9.9)
        assert not lease.lost
        fake.advance(0.2)
        assert lease.lost
        assert [loss.generation for loss in told] == [lease.generation]
    with pytest.raises(AssertionError, match="nobody holds 'k'"):
        fake.lose("k")


def test_a_daemon_that_is_away_longer_than_the_ttl_costs_the_lease() -> None:
    fake = FakeLeased()
    client = fake.client()
    with client.lease("k", ttl=30) as lease:
        with fake.unreachable():
            with pytest.raises(DaemonUnreachable):
                client.check("k")
            fake.advance(20)
        fake.advance(2)
        lease.check()
    with pytest.raises(LeaseLost, match="before its deadline"), client.lease("k", ttl=30) as lease, fake.unreachable():
        fake.advance(29)
        lease.check()
        fake.advance(1.1)
        assert lease.lost


def test_what_nobody_can_tell_is_no_permission() -> None:
    fake = FakeLeased()
    client = fake.client()
    with fake.unknown("recovering"):
        answer = client.try_acquire("k")
        assert isinstance(answer, Unknown)
        assert answer.reason == "recovering"
        assert client.check("k").held is None
        with pytest.raises(OutcomeUnknown), client.lease("k"):
            pytest.fail("entered")
    assert client.check("k").held is False
    with fake.unanswered("lease"):
        lost = client.try_acquire("k")
    assert isinstance(lost, Unknown)
    assert client.check("k").held is True  # it was carried out
    assert granted(client.try_acquire("k", request_id=lost.request_id)).generation == client.check("k").generation


def test_somebody_else_may_hold_it_for_a_while() -> None:
    fake = FakeLeased()
    generation = fake.hold("k", ttl=5, holder="worker-7")
    client = fake.client()
    with pytest.raises(LeaseRefused) as raised, client.lease("k"):
        pytest.fail("entered")
    assert (raised.value.refusal.held_by, raised.value.refusal.generation) == ("worker-7", generation)
    with pytest.raises(AssertionError, match="'k' is held already"):
        fake.hold("k", holder="worker-8")
    fake.advance(5)
    assert granted(client.try_acquire("k")).generation > generation


def test_code_that_makes_its_own_client_finds_it_by_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeLeased()
    monkeypatch.setenv("LEASED_SOCKET", fake.socket)
    with Client() as client, client.lease("k", ttl=30) as lease:
        fake.advance(100)
        lease.check()
    assert not os.path.exists(fake.socket)  # noqa: PTH110
    another = FakeLeased()
    assert granted(another.client().try_acquire("k")).deadline == 1060.0
    assert len(fake.calls) == 12


def test_a_fake_that_is_gone_is_a_daemon_that_is_gone() -> None:
    fake = FakeLeased()
    path = fake.socket
    del fake
    import gc

    gc.collect()
    with pytest.raises(DaemonUnreachable):
        Client(path).check("k")


def test_a_wait_ends_with_the_release_of_another_thread_or_with_the_clock() -> None:
    fake = FakeLeased()
    fake.hold("k", ttl=60)
    client = fake.client("me", timeout=5)
    answers: list[Any] = []

    def wait(seconds: float) -> threading.Thread:
        thread = threading.Thread(target=lambda: answers.append(client.try_acquire("k", 30, wait=seconds)))
        thread.start()
        while not client.check("k").waiting:
            pass
        return thread

    thread = wait(10)
    fake.advance(9.9)
    assert not answers
    fake.advance(0.2)
    thread.join(5)
    assert isinstance(answers.pop(), Refusal)
    thread = wait(100)
    fake.advance(50)
    thread.join(5)
    grant = granted(answers.pop())
    assert grant.deadline == 1060 + 30  # it began when the other one lapsed


def test_autojump_moves_the_clock_to_the_end_of_a_wait() -> None:
    fake = FakeLeased(autojump=True)
    fake.hold("k", ttl=60)
    client = fake.client("me")
    assert isinstance(client.try_acquire("k", wait=20), Refusal)
    assert fake.now == 1020
    assert granted(client.try_acquire("k", wait=100)).holder == "me"
    assert fake.now == 1060


def test_a_switch_falls_when_its_time_has_come() -> None:
    fake = FakeLeased()
    client = fake.client()
    with pytest.raises(LeaseLost), client.lease("k", ttl=30, scope="night") as lease:
        client.heartbeat("night", 20, "a")
        fake.advance(15)
        client.heartbeat("night", 20)
        fake.advance(19.9)
        lease.check()
        fake.advance(6)
        switch = client.resume_packet("night").switch
        assert switch is not None
        assert (switch.armed, switch.agent_id, switch.released[0]["generation"]) == (False, "a", lease.generation)


def test_watches_are_told() -> None:
    fake = FakeLeased()
    with fake.client(timeout=5).watch(key="k") as watch:
        fake.hold("k", ttl=60, holder="x")
        fake.hold("other")
        fake.advance(60)
        told = [watch.take(1), watch.take(1)]
        assert [(each.type, each.holder) for each in told if isinstance(each, LeaseEvent)] == [("granted", "x"), ("lapsed", "x")]
        assert watch.take(0) is None
        with fake.unreachable():
            pass
        assert watch.take(1) == Gap(None, None)


def test_a_bound_lease_ends_with_its_connection() -> None:
    fake = FakeLeased()
    client, other = fake.client(), fake.client()
    granted(client.try_acquire("k", bind="connection"))
    granted(client.try_acquire("j", bind="process"))
    client.close()
    assert (other.check("k").held, other.check("j").held) == (False, True)


def test_many_threads_hold_what_they_hold_one_at_a_time() -> None:
    fake = FakeLeased()
    inside: list[int] = []
    most = 0

    def work(number: int) -> None:
        nonlocal most
        client = fake.client(f"w{number}", timeout=20)
        for _ in range(10):
            with client.lease("k", wait=300):
                inside.append(number)
                most = max(most, len(inside))
                inside.pop()

    threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert (most, inside) == (1, [])
    assert operations(fake).count("release") == 60


def test_what_a_daemon_refuses_it_refuses_and_what_it_cannot_do_it_says() -> None:
    client = FakeLeased().client()
    with pytest.raises(Exception, match=r"ttl_seconds must be a number from 0\.1 to 3600"):
        client.try_acquire("k", 0)
    with pytest.raises(Exception, match="unknown_method"):
        client.call("no_such_operation")
    with pytest.raises(Exception, match="FakeLeased"):
        client.call("agent_list")
