from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgpack
import pytest
from fake_daemon import DROP, PATIENCE_SECONDS, SILENCE, Asked, FakeDaemon, Fault
from test_client_sync import in_child, in_turn

from leased.client import errors, watching
from leased.client.sync import Client
from leased.client.watching import Gap, LeaseEvent, Watch
from leased.client.wire import READ_BYTES

WATCHED = {"watching": True, "seq": 0}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "leased.sock"


class Pauses:
    """Stands for the event a watch waits on between attempts: no pause takes time, and each is noted."""

    def __init__(self, closed: threading.Event) -> None:
        self.closed = closed
        self.noted: list[float] = []

    def wait(self, seconds: float) -> bool:
        self.noted.append(seconds)
        return self.closed.is_set()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.closed, name)


def without_pauses(watch: Watch) -> Pauses:
    watch._closed = pauses = Pauses(watch._closed)  # type: ignore[assignment]
    return pauses


def event(seq: int, type: str = "granted", **more: Any) -> dict[str, Any]:
    told = {
        "seq": seq,
        "type": type,
        "key": "k",
        "key_hash": "00ff",
        "scope": None,
        "holder": "x",
        "generation": 17,
        "reason": None,
    }
    return {**told, **more}


def expected(seq: int, type: str = "granted") -> LeaseEvent:
    return LeaseEvent(**event(seq, type))


def tell(daemon: FakeDaemon, connection: int, *events: dict[str, Any], method: str = "event") -> None:
    daemon.send(connection, b"".join(msgpack.packb((2, method, (told,))) for told in events))


@pytest.fixture
def daemon(path: Path) -> Iterator[FakeDaemon]:
    with FakeDaemon(path, lambda asked: WATCHED) as daemon:
        yield daemon


def test_events_come_in_order_whatever_the_pieces(daemon: FakeDaemon) -> None:
    with Client(daemon.path, agent_key="secret").watch(scope="night") as watch:
        told = b"".join(msgpack.packb((2, "event", (event(n),))) for n in (1, 2, 3))
        daemon.send(1, told[:50])
        assert watch.take(0) is None
        daemon.send(1, told[50:])
        assert [watch.take(PATIENCE_SECONDS), next(watch), watch.take()] == [expected(1), expected(2), expected(3)]
        assert watch.take(0) is None
    assert daemon.asked[0].params == {"scope": "night", "agent_key": "secret"}
    assert "secret" not in repr(watch) + repr(vars(watch).keys())


def test_events_that_come_with_the_answer_are_not_lost(path: Path) -> None:
    def script(asked: Asked) -> Any:
        daemon.send(1, msgpack.packb((1, asked.msgid, None, WATCHED)) + msgpack.packb((2, "event", (event(1),))))
        return SILENCE

    with FakeDaemon(path, script) as daemon, Client(path).watch() as watch:
        assert watch.take(PATIENCE_SECONDS) == expected(1)


def test_a_gap_says_what_was_missed(daemon: FakeDaemon) -> None:
    with Client(daemon.path).watch() as watch:
        tell(daemon, 1, {"from_seq": 2, "to_seq": 7}, method="gap")
        tell(daemon, 1, {"anything": 1}, method="of_a_newer_daemon")
        assert [watch.take(PATIENCE_SECONDS), watch.take(PATIENCE_SECONDS)] == [Gap(2, 7), Gap(None, None)]


def test_no_more_than_one_read_is_held(daemon: FakeDaemon) -> None:
    """A caller that does not take leaves the rest to the socket, and so to the daemon, which then says gap."""
    with Client(daemon.path).watch() as watch:
        many = 3000
        writer = threading.Thread(target=tell, args=(daemon, 1, *(event(n, key="k" * 100) for n in range(many))))
        writer.start()
        seqs, most = [], 0
        while len(seqs) < many:
            told = watch.take(PATIENCE_SECONDS)
            assert isinstance(told, LeaseEvent)
            seqs.append(told.seq)
            most = max(most, len(watch._told))
        writer.join()
    assert seqs == list(range(many))
    assert 0 < most <= READ_BYTES // len(msgpack.packb((2, "event", (event(0, key="k" * 100),))))


def test_a_lost_connection_is_replaced_and_a_gap_stands_for_what_was_missed(daemon: FakeDaemon) -> None:
    with Client(daemon.path).watch("k") as watch:
        tell(daemon, 1, event(1))
        daemon.close_connection(1)
        assert watch.take(PATIENCE_SECONDS) == expected(1)
        assert watch.take(PATIENCE_SECONDS) == Gap(None, None)
        tell(daemon, 2, event(1, "lapsed"))
        assert watch.take(PATIENCE_SECONDS) == expected(1, "lapsed")
    assert [(asked.connection, asked.method, asked.params) for asked in daemon.asked] == [
        (1, "watch", {"key": "k"}),
        (2, "watch", {"key": "k"}),
    ]


def test_the_gap_comes_once_the_new_connection_watches_and_not_before(path: Path) -> None:
    """So whoever lists when told of a gap misses nothing."""
    limit = Fault("rate_limited: your user has 64 watches")
    with FakeDaemon(path, in_turn(WATCHED, DROP, SILENCE, limit, WATCHED)) as daemon:
        with Client(path, timeout=0.2).watch() as watch:
            pauses = without_pauses(watch)
            daemon.close_connection(1)
            with pytest.raises(errors.OutcomeUnknown):  # the third hears nothing for the whole time-out
                watch.take()
            assert watch.take(PATIENCE_SECONDS) == Gap(None, None)
        assert len(daemon.asked) == 5
        assert len(pauses.noted) == 4
        assert pauses.noted[0] == 0.0 < pauses.noted[1] < pauses.noted[3]


def test_a_daemon_that_stays_away_is_told_and_can_be_awaited_on(daemon: FakeDaemon, path: Path) -> None:
    with Client(path, timeout=0.05).watch() as watch:
        daemon.stop()
        path.unlink()
        assert watch.take(0.001) is None
        for _ in range(2):
            with pytest.raises(errors.DaemonUnreachable):
                watch.take()
        with FakeDaemon(path, lambda asked: WATCHED):
            assert watch.take(PATIENCE_SECONDS) == Gap(None, None)


def test_a_daemon_that_hangs_up_again_and_again_is_not_stormed(path: Path) -> None:
    with FakeDaemon(path, lambda asked: WATCHED) as daemon, Client(path).watch() as watch:
        pauses = without_pauses(watch)
        for n in range(1, 8):
            daemon.close_connection(n)
            assert watch.take(PATIENCE_SECONDS) == Gap(None, None)
        assert pauses.noted[-1] >= 0.5


def test_a_watch_that_cannot_begin_says_why(path: Path) -> None:
    with pytest.raises(errors.DaemonUnreachable, match="no such socket"):
        Client(path).watch()
    answers = [Fault("invalid_argument: not together with key"), Fault("rate_limited: connections", True), SILENCE]
    with FakeDaemon(path, in_turn(*answers, *[DROP] * 50)):
        for wrong, timeout in (
            (errors.InvalidArgument, PATIENCE_SECONDS),
            (errors.RateLimited, PATIENCE_SECONDS),
            (errors.OutcomeUnknown, 0.05),
            (errors.DaemonUnreachable, 0.5),
        ):
            with pytest.raises(wrong):
                Client(path, timeout=timeout).watch("k", "s")


def test_a_watch_that_meets_a_restart_begins_without_a_gap(path: Path) -> None:
    with FakeDaemon(path, in_turn(DROP, WATCHED)) as daemon, Client(path).watch() as watch:
        tell(daemon, 2, event(1))
        assert watch.take(PATIENCE_SECONDS) == expected(1)


def test_what_is_no_event_is_a_fault_and_the_connection_is_given_up(daemon: FakeDaemon) -> None:
    with Client(daemon.path).watch() as watch:
        tell(daemon, 1, {"seq": 1})
        with pytest.raises(errors.ProtocolFault, match="without 'type'"):
            watch.take()
        assert watch.take(PATIENCE_SECONDS) == Gap(None, None)
        daemon.send(2, b"HTTP/1.1 400 Bad Request\r\n")
        with pytest.raises(errors.ProtocolFault, match="no leased daemon"):
            watch.take()


def test_close_ends_it_for_whoever_waits(daemon: FakeDaemon) -> None:
    watch = Client(daemon.path).watch()
    told: list[Any] = []
    reader = threading.Thread(target=lambda: told.extend(watch))
    reader.start()
    tell(daemon, 1, event(1))
    while not told:
        reader.join(0.001)
    watch.close()
    reader.join(PATIENCE_SECONDS)
    assert not reader.is_alive()
    assert told == [expected(1)]
    daemon.wait_until(lambda: daemon.closed == [1])
    watch.close()
    assert watch.closed
    assert watch.take() is None
    assert watch._stream is None


def test_close_ends_the_wait_for_a_daemon_that_is_away(daemon: FakeDaemon, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paused = threading.Event()
    monkeypatch.setattr(watching, "jittered", lambda pause: paused.set() or 60.0 if pause else 0.0)
    watch = Client(path).watch()
    daemon.stop()
    path.unlink()
    reader = threading.Thread(target=watch.take)
    reader.start()
    assert paused.wait(PATIENCE_SECONDS)
    watch.close()
    reader.join(PATIENCE_SECONDS)
    assert not reader.is_alive()


def test_an_interrupt_costs_a_gap_and_not_silence(daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch) -> None:
    with Client(daemon.path).watch() as watch:
        tell(daemon, 1, event(1))
        real = watching.understood

        def interrupted(told: Any) -> Any:
            signal.raise_signal(signal.SIGINT)
            return real(told)

        monkeypatch.setattr(watching, "understood", interrupted)
        with pytest.raises(KeyboardInterrupt):
            watch.take(PATIENCE_SECONDS)
        monkeypatch.setattr(watching, "understood", real)
        assert watch.take(PATIENCE_SECONDS) == Gap(None, None)


def test_a_forked_child_watches_anew(daemon: FakeDaemon) -> None:
    with Client(daemon.path).watch() as watch:
        assert in_child(lambda: str(watch.take(PATIENCE_SECONDS))) == str(Gap(None, None))
        tell(daemon, 1, event(1), event(2))
        assert watch.take(PATIENCE_SECONDS) == expected(1)  # the parent's goes on
        assert in_child(lambda: str(watch.take(PATIENCE_SECONDS))) == str(Gap(None, None))
        assert watch.take(PATIENCE_SECONDS) == expected(2)  # which was read already, and is the parent's
        watch.close()
        assert in_child(lambda: str(watch.take(PATIENCE_SECONDS))) == "None"


# --- wait_free


def checking(*answers: Any) -> Callable[[Asked], Any]:
    """The watch begins; each check gets the next answer: held, free, or null."""
    left = list(answers)

    def respond(asked: Asked) -> Any:
        if asked.method == "watch":
            return WATCHED
        held = left.pop(0)
        return {
            "held": held,
            "key": asked.params["key"],
            **({"reason": "recovering", "retry_after_seconds": 0.01} if held is None else {}),
        }

    return respond


def test_a_free_key_is_free_at_once_and_watched_before_it_was_asked_for(path: Path) -> None:
    with FakeDaemon(path, checking(False)) as daemon, Client(path) as client:
        assert client.wait_free("k") is True
        daemon.wait_until(lambda: daemon.closed)
        assert [(asked.method, asked.params) for asked in daemon.asked] == [("watch", {"key": "k"}), ("check", {"key": "k"})]


@pytest.mark.parametrize("ending", sorted(watching.ENDINGS))
def test_each_end_of_a_lease_is_looked_at_and_nothing_else_is(path: Path, ending: str) -> None:
    with FakeDaemon(path, checking(True, True, False)) as daemon, Client(path) as client:
        done: list[bool] = []
        waiter = threading.Thread(target=lambda: done.append(client.wait_free("k")))
        waiter.start()
        daemon.wait_until(lambda: len(daemon.asked) == 2)
        tell(daemon, 1, event(1, "renewed"), event(2, "released"), event(3, "granted"))  # handed over to somebody who queued
        daemon.wait_until(lambda: len(daemon.asked) == 3)
        tell(daemon, 1, event(4, "renewed"), event(5, ending))
        waiter.join(PATIENCE_SECONDS)
        assert done == [True]
        assert daemon.methods() == ["watch", "check", "check", "check"]


def test_a_gap_is_looked_at_too(path: Path) -> None:
    with FakeDaemon(path, checking(True, False)) as daemon, Client(path) as client:
        waiter = threading.Thread(target=client.wait_free, args=("k",))
        waiter.start()
        daemon.wait_until(lambda: len(daemon.asked) == 2)
        daemon.close_connection(1)
        waiter.join(PATIENCE_SECONDS)
        assert not waiter.is_alive()
        assert daemon.methods() == ["watch", "check", "watch", "check"]


def test_a_daemon_that_cannot_tell_yet_is_asked_again_when_it_said(path: Path) -> None:
    with FakeDaemon(path, checking(None, None, False)) as daemon, Client(path) as client:
        assert client.wait_free("k", PATIENCE_SECONDS) is True
        assert daemon.methods() == ["watch", "check", "check", "check"]


@pytest.mark.parametrize("timeout", [0, 0.01])
def test_the_time_is_up(path: Path, timeout: float) -> None:
    with FakeDaemon(path, checking(True)) as daemon, Client(path) as client:
        assert client.wait_free("k", timeout) is False
        assert daemon.methods() == ["watch", "check"]
