"""What a new configuration comes to: which keys change at once, which wait for a start, and that a refused one changes nothing."""

from __future__ import annotations

import os
import pty
import signal
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import structlog
import trio
from billed import BilledWorld, billed_world
from upstreams import Scripted, bill, shipper_of

from leased.config import Config, parse
from leased.config_keys import KEYS, Limits, Upstream, in_force
from leased.errors import ConfigError
from leased.hangup import Hangups
from leased.peers import Policy
from leased.reload import STANDS_ON, Reloader, change_to
from leased.upstream import Answer
from leased.views import Views


def config(text: str = "") -> Config:
    return parse(text, source="f", root=True, environ={})


# ---- the pure part


def test_the_same_file_changes_nothing() -> None:
    one = config('operator_group = "g"\n[namespaces]\n"uid:5" = "five"\n')
    assert change_to(one, config('operator_group = "g"\n[namespaces]\n"uid:5" = "five"\n')) == (one, [], [])


def test_what_a_daemon_stands_on_keeps_its_value_and_is_named() -> None:
    new = config(
        'socket = "/run/x.sock"\nsocket_mode = "0666"\nstate_dir = "/s"\nruntime_dir = "/r"\nwait_out_seconds = 5\nmax_leases = 7\n'
        'socket_group = "g"\n[http]\nlisten = ["127.0.0.1:1"]\n[log]\nlevel = "debug"\n'
    )
    old = config()
    kept, changed, postponed = change_to(old, new)
    assert set(postponed) == STANDS_ON
    assert [getattr(kept, name) for name in STANDS_ON if "." not in name] == [
        getattr(old, name) for name in STANDS_ON if "." not in name
    ]
    assert kept.http == old.http
    assert changed == ["limits.max_leases_per_namespace", "log.level"], "a limit that follows max_leases is only a limit"
    assert kept.log.level == "debug"


def test_every_key_is_either_changed_or_postponed() -> None:
    assert set(KEYS) >= STANDS_ON
    assert {name.partition(".")[0] for name in set(KEYS) - STANDS_ON} == {
        "operator_group", "namespaces", "limits", "billing", "upstream", "x402", "log",
    }  # fmt: skip


def test_shipping_is_changed_but_begun_or_ended_by_a_start_only() -> None:
    none, one, other = config(), config('upstream.url = "https://a.test/"'), config('upstream.url = "https://b.test/"')
    for before, after in ((none, one), (one, none)):
        kept, changed, postponed = change_to(before, after)
        assert (kept.upstream.url, changed, postponed) == (before.upstream.url, [], ["upstream.url"])
    assert change_to(one, other) == (other, ["upstream.url"], [])
    with_credential = config('[upstream]\nurl = "https://a.test/"\ntoken_file = "/t"\n')
    kept, changed, postponed = change_to(with_credential, none)
    assert (kept.upstream, changed) == (with_credential.upstream, []), (
        "a daemon that still ships must not ship without its credential"
    )
    assert sorted(postponed) == ["upstream.token_file", "upstream.url"]


def test_rules_for_ids_are_named_one_by_one() -> None:
    old = config('[namespaces]\n"uid:5" = "five"\n"uid:6" = "six"\n"gid:7" = "seven"\n')
    new = config('[namespaces]\n"uid:5" = "fünf"\n"gid:7" = "seven"\n"gid:8" = "eight"\n')
    assert change_to(old, new).changed == ["namespaces.uid:5", "namespaces.uid:6", "namespaces.gid:8"]


# ---- the parts that change in place


def test_limits_in_force_are_one_object_for_all() -> None:
    limits = in_force(Limits(max_connections=3))
    seen_by_a_part: Limits = limits
    limits.become(Limits(max_connections=9, message_seconds=1.5))
    assert (seen_by_a_part.max_connections, seen_by_a_part.message_seconds) == (9, 1.5)
    with pytest.raises(AttributeError):
        limits.max_connections = 4  # type: ignore[misc]


def test_a_policy_becomes_another() -> None:
    policy = Policy(by_uid={}, by_gid={}, per_uid=False, operator_group=None)
    assert policy.namespace(5, 5, frozenset()) == "local"
    policy.become(Policy(by_uid={5: "five"}, by_gid={8: "eight"}, per_uid=True, operator_group="0"))
    assert [policy.namespace(*each, frozenset()) for each in ((5, 5), (6, 8), (6, 6))] == ["five", "eight", "uid:6"]


@pytest.fixture
def w() -> Iterator[BilledWorld]:
    with billed_world(instant=True) as made:
        yield made


async def pass_time(seconds: float) -> None:
    """Of the clock of the test, which jumps."""
    with trio.move_on_after(seconds):
        await trio.sleep_forever()


@pytest.mark.trio
async def test_a_shipper_that_backs_off_tries_at_once_by_the_new_way(
    w: BilledWorld, autojump_clock: trio.testing.MockClock
) -> None:
    bill(w, 30)
    down, up = Scripted(Answer(0, error="no connection")), Scripted()
    shipper = shipper_of(w, down, batch_events=10)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(shipper.run)
        await pass_time(5000)
        tried = len(down.requests)
        assert shipper.failures == tried and w.billing.waiting_total == 30
        shipper.change(Upstream("https://other.test/", batch_events=15), up.post)
        shipper.hurry()
        before = trio.current_time()
        await pass_time(0.01)
        assert up.requests and up.requests[0].at < before + 0.01, "not after what is left of a pause of minutes"
        await pass_time(10)
        nursery.cancel_scope.cancel()
    assert (len(down.requests), w.billing.waiting_total, max(up.sizes)) == (tried, 0, 15)


def test_prices_change_from_the_next_decision_on(w: BilledWorld) -> None:
    w.granted("A", 20)
    assert w.refused("one")["amount"] == "0.002"
    tariff = w.billing.tariff
    w.billing.change(tariff._replace(refusal=5_000), max_waiting=w.billing.max_waiting, max_once=w.billing.max_once)
    assert w.refused("two")["amount"] == "0.005"
    assert w.refused("one")["amount"] == "0", "it was billed, at the price of that time"
    w.billing.change(tariff._replace(enabled=False, currency="EUR"), max_waiting=1, max_once=1000)
    assert w.refused("three") == {"amount": "0", "currency": "EUR", "event_id": None}


# ---- all or nothing


class Recorded:
    """A daemon that remembers what was asked of it."""

    def __init__(self) -> None:
        self.config = config("operator_group = '0'")
        self.limits = in_force(self.config.limits)
        self.policy = Policy(by_uid={}, by_gid={}, per_uid=False, operator_group=None)
        self.switches = SimpleNamespace(max_per_namespace=1)
        self.watchers = SimpleNamespace(max_per_uid=1)
        self.views = object.__new__(Views)
        self.billing = SimpleNamespace(change=lambda tariff, **bounds: self.told.append((tariff, bounds)))
        self.shipper = None
        self.board = SimpleNamespace(relimit=lambda: None)
        self.told: list[Any] = []


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("max_leases = 0\nnonsense = 1", ["f: max_leases = 0", "f: nonsense is not a key"]),
        ("operator_group = 'no-such-group'", ["operator_group: there is no group 'no-such-group'"]),
    ],
)
@pytest.mark.trio
async def test_a_wrong_configuration_changes_nothing_and_every_mistake_is_logged(text: str, said: list[str]) -> None:
    daemon: Any = Recorded()
    before, limits = daemon.config, Limits(*(getattr(daemon.limits, name) for name in Limits.__slots__))
    reloader = Reloader(daemon, lambda: config(f"{text}\n[limits]\nmax_connections = 2\n"), daemon.told.append)
    with structlog.testing.capture_logs() as lines:
        assert await reloader.reload() is False
    assert daemon.config is before and daemon.told == []
    assert daemon.limits.max_connections == limits.max_connections
    assert [line["event"] for line in lines] == ["config.refused"] * len(said)
    told = sorted(line["error"] for line in lines)
    assert all(part in line for part, line in zip(sorted(said), told, strict=True)), told


@pytest.mark.trio
async def test_a_fault_of_the_reader_ends_no_daemon() -> None:
    daemon: Any = Recorded()

    def fails() -> Config:
        raise ZeroDivisionError

    with structlog.testing.capture_logs() as lines:
        assert await Reloader(daemon, fails, daemon.told.append).reload() is False
    assert [line["event"] for line in lines] == ["config.refused"] and daemon.told == []


@pytest.mark.trio
async def test_a_good_configuration_is_in_force_everywhere() -> None:
    daemon: Any = Recorded()
    new = config("max_leases = 9000\n[limits]\nmax_watchers_per_uid = 3\nmax_switches_per_namespace = 4\n[billing]\nenabled = true")
    with structlog.testing.capture_logs() as lines:
        assert await Reloader(daemon, lambda: new, daemon.told.append).reload() is True
    assert daemon.limits.max_watchers_per_uid == daemon.watchers.max_per_uid == 3
    assert daemon.switches.max_per_namespace == 4
    assert daemon.told[0][0].enabled and daemon.told[1] is daemon.config is daemon.views.config
    assert daemon.config.max_leases == 100_000
    assert [(line["event"], line["needs_restart"]) for line in lines] == [("config.reloaded", ["max_leases"])]
    assert lines[0]["changed"] == [
        "operator_group", "limits.max_leases_per_namespace", "limits.max_watchers_per_uid", "limits.max_switches_per_namespace",
        "billing.enabled",
    ]  # fmt: skip


@pytest.mark.trio
async def test_an_unreadable_file_is_a_refusal_like_any_other(tmp_path: Path) -> None:
    daemon: Any = Recorded()

    def read() -> Config:
        raise ConfigError(f"{tmp_path}/f: cannot be read: Permission denied")

    with structlog.testing.capture_logs() as lines:
        assert await Reloader(daemon, read, daemon.told.append).reload() is False
    assert lines[0]["error"].endswith("Permission denied")


# ---- what a hang-up means


def test_what_comes_before_anybody_listens_is_kept() -> None:
    before = signal.getsignal(signal.SIGHUP)
    try:
        hangups = Hangups()
        assert not hangups.early
        signal.raise_signal(signal.SIGHUP)
        assert hangups.early
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize(("ignored", "expected"), [(False, [False, True]), (True, [False, False])])
def test_a_terminal_that_is_gone_is_known(ignored: bool, expected: list[bool]) -> None:
    """In a child with a terminal of its own, which is then taken away."""
    reading, writing = os.pipe()
    child, terminal = pty.fork()
    if child == 0:
        try:
            signal.signal(signal.SIGHUP, signal.SIG_IGN if ignored else signal.SIG_DFL)
            hangups = Hangups()
            os.write(writing, str(int(hangups.terminal_gone())).encode())
            os.read(0, 1)  # ends when the terminal does
        except OSError:
            pass
        finally:
            os.write(writing, str(int(hangups.terminal_gone())).encode())
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb", buffering=0) as told:
        first = told.read(1)
        os.close(terminal)
        second = told.read(1)
    os.waitpid(child, 0)
    assert [first == b"1", second == b"1"] == expected


# ---- shipping and paying


class Paying(SimpleNamespace):
    """A shipper with a payer, as far as a reload touches it."""


@pytest.fixture
def paying(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    daemon: Any = Recorded()
    payer = SimpleNamespace(change=lambda caps, signer: daemon.told.append(("payer", caps.max_per_day, signer)))
    daemon.shipper = Paying(
        payer=payer,
        change=lambda upstream, post: daemon.told.append(("shipper", upstream.url)),
        hurry=lambda: daemon.told.append("hurry"),
    )
    daemon.clock = None
    wallet = tmp_path / "key"
    wallet.write_text("one")

    class Wallet:
        def __init__(self, file: Path) -> None:
            if file.read_text() == "wrong":
                raise ConfigError(f"x402.wallet_key_file: {file}: it does not hold a private key")
            self.content = file.read_text()

    monkeypatch.setattr("leased.wallet.Wallet", Wallet)
    daemon.text = (
        f'[upstream]\nurl = "https://a.test/"\n[x402]\nwallet_key_file = "{wallet}"\nnetworks = ["eip155:8453"]\n'
        f'assets = ["0x{"a" * 40}"]\npayees = ["0x{"b" * 40}"]\nmax_per_batch = "1"\nmax_per_day = "5"\n'
    )
    daemon.config = config(daemon.text)
    daemon.wallet = wallet
    return daemon


@pytest.mark.trio
async def test_the_wallet_is_read_again_and_its_caps_change(paying: Any) -> None:
    paying.wallet.write_text("two")
    text = paying.text.replace('max_per_day = "5"', 'max_per_day = "2"')
    assert await Reloader(paying, lambda: config(text), lambda _: None).reload() is True
    (payer,) = [each for each in paying.told if each[0] == "payer"]
    assert (payer[1], payer[2].content) == (2_000_000, "two")
    assert "hurry" in paying.told and not [each for each in paying.told if each[0] == "shipper"], "the same upstream"


@pytest.mark.trio
async def test_a_wallet_that_cannot_be_read_keeps_everything(paying: Any) -> None:
    paying.wallet.write_text("wrong")
    text = paying.text.replace("https://a.test/", "https://b.test/") + "[limits]\nmax_connections = 2\n"
    with structlog.testing.capture_logs() as lines:
        assert await Reloader(paying, lambda: config(text), lambda _: None).reload() is False
    assert paying.told == [] and paying.limits.max_connections == 1024
    assert lines[0]["error"].endswith("it does not hold a private key")
