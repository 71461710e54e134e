from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
from fake_daemon import DROP, SILENCE, Asked, FakeDaemon, FakeTime, Fault, granted, refused
from test_client_sync import in_child

from leased.client.errors import LeaseLost, LeaseRefused, OutcomeUnknown
from leased.client.held import HeldLease
from leased.client.sync import Client

FENCE = "9007199254740993"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "leased.sock"


@pytest.fixture
def host_time() -> FakeTime:
    return FakeTime()


class Holding:
    """A script that grants, renews and releases, until told otherwise."""

    def __init__(self) -> None:
        self.to_renewals: Any = granted
        self.to_releases: Any = {"released": True, "key": "k", "generation": 17}

    def __call__(self, asked: Asked) -> Any:
        response = {"lease": granted, "renew": self.to_renewals, "release": self.to_releases}[asked.method]
        return response(asked) if callable(response) else response


def renewer_of(lease: HeldLease) -> threading.Thread:
    assert lease._renewer is not None
    return lease._renewer


def test_the_lease_is_renewed_at_a_third_of_its_ttl_and_released_at_the_end(path: Path, host_time: FakeTime) -> None:
    with FakeDaemon(path, Holding()) as daemon, Client(path, "me", host_time=host_time) as client:
        with client.lease("k", ttl=30, scope="night") as lease:
            assert (lease.generation, lease.fence, lease.holder, lease.deadline) == (17, FENCE, "me", 1030)
            host_time.advance(9.9)
            assert daemon.methods() == ["lease"]
            host_time.advance(0.2)
            daemon.wait_until(lambda: len(daemon.asked) == 2)
            host_time.advance(9.9)
            host_time.advance(0.2)
            daemon.wait_until(lambda: len(daemon.asked) == 3)
            lease.check()
            renewer = renewer_of(lease)
        assert not renewer.is_alive()
        assert daemon.methods() == ["lease", "renew", "renew", "release"]
    assert daemon.asked[1].params == {"key": "k", "holder": "me", "fence": FENCE, "ttl_seconds": 30}
    assert daemon.asked[3].params == {"key": "k", "holder": "me", "fence": FENCE}


def test_nothing_is_renewed_after_the_release(path: Path, host_time: FakeTime) -> None:
    with FakeDaemon(path, Holding()) as daemon, Client(path, host_time=host_time) as client:
        with client.lease("k", ttl=30) as lease:
            assert lease.release()
            with pytest.raises(LeaseLost, match="it was released"):
                lease.check()
        host_time.advance(1000)
        assert client.release("k", FENCE)
        assert daemon.methods() == ["lease", "release", "release"]


def test_the_release_waits_for_a_renewal_in_flight(path: Path, host_time: FakeTime) -> None:
    script = Holding()
    script.to_renewals = SILENCE
    with FakeDaemon(path, script) as daemon, Client(path, host_time=host_time) as client, client.lease("k", ttl=30) as lease:
        host_time.advance(10)
        daemon.wait_until(lambda: len(daemon.asked) == 2)
        releasing = threading.Thread(target=lease.release)
        releasing.start()
        releasing.join(0.05)
        assert daemon.methods() == ["lease", "renew"]
        daemon.answer(daemon.asked[1], granted(daemon.asked[1]))
        releasing.join(5)
        assert daemon.methods() == ["lease", "renew", "release"]


def test_a_daemon_that_falls_silent_loses_the_lease_at_the_local_deadline(path: Path, host_time: FakeTime) -> None:
    script = Holding()
    script.to_renewals = SILENCE
    script.to_releases = SILENCE
    losses: list[LeaseLost] = []
    with (
        FakeDaemon(path, script) as daemon,
        Client(path, timeout=0.05, host_time=host_time) as client,
        pytest.raises(LeaseLost, match="before its deadline"),
        client.lease("k", ttl=30, on_lost=losses.append) as lease,
    ):
        host_time.advance(10)
        daemon.wait_until(lambda: len(daemon.asked) == 2)
        host_time.advance(19.9)
        assert not lease.lost
        host_time.advance(0.2)
        assert lease.lost
        with pytest.raises(LeaseLost):
            lease.check()
        renewer_of(lease).join(5)
    assert [(loss.key, loss.generation) for loss in losses] == [("k", 17)]


def test_an_answer_after_the_deadline_revives_nothing(path: Path, host_time: FakeTime) -> None:
    script = Holding()
    script.to_renewals = SILENCE
    with (
        FakeDaemon(path, script) as daemon,
        Client(path, host_time=host_time) as client,
        pytest.raises(LeaseLost),
        client.lease("k", ttl=30) as lease,
    ):
        host_time.advance(10)
        daemon.wait_until(lambda: len(daemon.asked) == 2)
        host_time.advance(20)
        daemon.answer(daemon.asked[1], granted(daemon.asked[1]))
        renewer_of(lease).join(5)
        assert lease.lost
    assert daemon.methods()[-1] == "release"  # the daemon may still count it as held


def test_a_refused_renewal_is_a_loss_at_once(path: Path, host_time: FakeTime) -> None:
    script = Holding()
    script.to_renewals = lambda asked: refused(asked, "wrong_fence")
    script.to_releases = {"released": False, "key": "k", "reason": "not_holder"}
    losses: list[LeaseLost] = []
    with FakeDaemon(path, script) as daemon, Client(path, host_time=host_time) as client:
        with pytest.raises(LeaseLost, match="wrong_fence"), client.lease("k", ttl=30, on_lost=losses.append) as lease:
            host_time.advance(10)
            renewer_of(lease).join(5)
            assert lease.lost
        assert daemon.methods() == ["lease", "renew", "release"]
    assert len(losses) == 1


def test_failing_renewals_are_tried_again_until_one_succeeds(path: Path, host_time: FakeTime) -> None:
    script = Holding()
    failures = [DROP, Fault("rate_limited: requests"), Fault("internal: broken"), None]

    def renewal(asked: Asked) -> Any:
        return (failures.pop(0) or {**granted(asked), "acquired": None, "reason": "full"}) if failures else granted(asked)

    script.to_renewals = renewal
    with (
        FakeDaemon(path, script) as daemon,
        Client(path, timeout=0.2, host_time=host_time) as client,
        client.lease("k", ttl=30) as lease,
    ):
        host_time.advance(10)
        while daemon.methods().count("renew") < 5:
            host_time.advance(0.25)
            renewer_of(lease).join(0.01)
        while lease.deadline == 1030:
            renewer_of(lease).join(0.01)
        lease.check()
        assert lease.deadline > 1040


def test_the_body_s_exception_is_never_replaced(path: Path, host_time: FakeTime) -> None:
    script = Holding()
    script.to_releases = Fault("internal: broken")
    with FakeDaemon(path, script) as daemon, Client(path, host_time=host_time) as client:
        with pytest.raises(KeyError) as raised, client.lease("k", ttl=30):
            host_time.advance(31)
            raise KeyError("the body's")
        assert raised.value.__context__ is None
        assert daemon.methods()[-1] == "release"


def test_a_release_nobody_answers_is_no_error_of_the_body(path: Path, host_time: FakeTime) -> None:
    script = Holding()
    with (
        FakeDaemon(path, script) as daemon,
        Client(path, timeout=0.1, host_time=host_time) as client,
        client.lease("k", ttl=30) as lease,
    ):
        daemon.stop()
    assert lease.released is None


def test_a_lease_that_was_gone_before_its_release_is_reported(path: Path, host_time: FakeTime) -> None:
    script = Holding()
    script.to_releases = {"released": False, "key": "k", "reason": "expired"}
    with (
        FakeDaemon(path, script),
        Client(path, host_time=host_time) as client,
        pytest.raises(LeaseLost, match="expired"),
        client.lease("k", ttl=30),
    ):
        pass


def test_refused_and_unknown_never_enter_the_block(path: Path) -> None:
    answers = [refused, lambda asked: {"acquired": None, "key": "k", "reason": "recovering", "retry_after_seconds": 9.0}]
    with FakeDaemon(path, lambda asked: answers.pop(0)(asked)), Client(path) as client:
        with pytest.raises(LeaseRefused) as raised, client.lease("k"):
            pytest.fail("entered")
        assert raised.value.refusal.held_by == "worker-7"
        with pytest.raises(OutcomeUnknown, match="recovering"), client.lease("k"):
            pytest.fail("entered")


def test_a_bound_lease_is_renewed_at_once_when_its_connection_is_lost(path: Path, host_time: FakeTime) -> None:
    script = Holding()
    script.to_renewals = lambda asked: refused(asked, "lapsed", None)
    with (
        FakeDaemon(path, script) as daemon,
        Client(path, host_time=host_time) as client,
        pytest.raises(LeaseLost, match="lapsed"),
        client.lease("k", ttl=30, bind="connection") as lease,
    ):
        daemon.close_connection(1)
        client.call("renew", key="other")  # whoever uses the connection next finds it gone
        renewer_of(lease).join(5)
        assert lease.lost


@pytest.mark.parametrize("bind", ["none", "process"])
def test_closing_the_client_binds_again_what_was_bound_and_nothing_else(path: Path, host_time: FakeTime, bind: str) -> None:
    with FakeDaemon(path, Holding()) as daemon, Client(path, host_time=host_time) as client, client.lease("k", ttl=30, bind=bind):
        client.close()
        if bind == "process":
            daemon.wait_until(lambda: "renew" in daemon.methods())
            assert daemon.asked[1].connection == 2
        else:
            daemon.wait_until(lambda: daemon.closed == [1])
    assert daemon.methods() == (["lease", "renew", "release"] if bind == "process" else ["lease", "release"])


def test_a_lease_is_inert_in_a_forked_child(path: Path, host_time: FakeTime) -> None:
    with FakeDaemon(path, Holding()) as daemon, Client(path, host_time=host_time) as client:
        with client.lease("k", ttl=30) as lease:

            def leave() -> str:
                lease.__exit__(None, None, None)
                return "left"

            assert in_child(lambda: str(lease.check())) == "raised LeaseLost"
            assert in_child(lambda: str(lease.release())) == "raised LeaseLost"
            assert in_child(lambda: lease.fence) == "raised LeaseLost"
            assert in_child(leave) == "raised LeaseLost"
            assert in_child(lambda: str(lease.lost)) == "True"
            assert daemon.methods() == ["lease"]
            host_time.advance(10)
            daemon.wait_until(lambda: len(daemon.asked) == 2)  # the parent's renewals go on
            lease.check()
        assert daemon.methods() == ["lease", "renew", "release"]


def test_where_no_thread_can_be_started_nothing_stays_held(
    path: Path, host_time: FakeTime, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_thread(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with FakeDaemon(path, Holding()) as daemon, Client(path, host_time=host_time) as client:
        monkeypatch.setattr("leased.client.held.threading.Thread.start", no_thread)
        with pytest.raises(RuntimeError, match="can't start new thread"), client.lease("k", ttl=30):
            pytest.fail("entered")
        monkeypatch.undo()
        assert daemon.methods() == ["lease", "release"]


def test_a_renewal_that_fails_for_any_reason_is_judged_by_the_deadline(
    path: Path, host_time: FakeTime, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried = threading.Event()

    def renew(*_: object, **__: object) -> None:
        tried.set()
        raise ZeroDivisionError

    with (
        FakeDaemon(path, Holding()),
        Client(path, host_time=host_time) as client,
        pytest.raises(LeaseLost, match="before its deadline"),
        client.lease("k", ttl=30) as lease,
    ):
        monkeypatch.setattr(client, "renew", renew)
        host_time.advance(10)
        assert tried.wait(5)
        assert not lease.lost
        host_time.advance(20)
        assert lease.lost
        renewer_of(lease).join(5)


def test_no_repr_shows_the_fence(path: Path, host_time: FakeTime) -> None:
    with FakeDaemon(path, Holding()), Client(path, host_time=host_time) as client, client.lease("k", ttl=30) as lease:
        assert FENCE not in repr(lease) + repr(client) + repr(vars(lease)) + repr(vars(client))
