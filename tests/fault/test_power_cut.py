"""Power cuts: the disk keeps what was flushed and nothing else, tmpfs is empty, the boot is another.

Each cut is FS_IOC_SHUTDOWN on a loop-mounted ext4 (nothing unflushed ever reaches the image), kill -9, the runtime directory deleted and
another boot id.  The daemon runs on for a moment after the disk has gone: what it promises then counts like any other promise.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable

import pytest
from plumbing import Disk, Gone, History, Promise, Rpc, Served, boottime, eventually

pytestmark = [pytest.mark.root, pytest.mark.slow]

WAIT_OUT = 2.5
LONG = 3600.0
Make = Callable[..., Served]


def cut(served: Served, disk: Disk) -> float:
    """The power goes and comes back.  Returns when the daemon was certainly dead."""
    disk.cut()
    served.kill()
    dead = boottime()
    served.lose_runtime()
    disk.detach()
    disk.attach()
    served.another_boot()
    return dead


@pytest.fixture
def powered(served: Make, disk: Disk) -> Served:
    made = served(disk.mount / "state", wait_out_seconds=WAIT_OUT)
    made.another_boot()
    return made


def test_a_long_lease_is_live_after_the_cut_and_its_fence_renews(powered: Served, disk: Disk) -> None:
    grant = powered.start().grant("k", LONG)
    cut(powered, disk)
    rpc = powered.start()
    assert rpc.check("k", generation=grant["generation"])["current"] is True
    refusal = rpc.lease("k", 1, "B")
    assert (refusal["acquired"], refusal["reason"], refusal["generation"]) == (False, "held", grant["generation"])
    renewal = rpc.renew(grant)  # a known key behaves normally while the rest is waited out
    assert (renewal["acquired"], renewal["renewed"]) == (True, True)
    assert (renewal["fence"], renewal["generation"], renewal["ttl_seconds"]) == (grant["fence"], grant["generation"], LONG)
    assert renewal["expires_in_seconds"] > LONG - 5


def test_after_a_short_lease_nothing_is_granted_until_the_wait_is_over(powered: Served, disk: Disk) -> None:
    rpc = powered.start()
    short = rpc.grant("short", WAIT_OUT)
    long = rpc.grant("long", LONG)
    cut(powered, disk)
    before = boottime()
    rpc = powered.start()
    asked = {
        "lease": {"key": "short", "holder": "A"},
        "renew": {"key": "short", "holder": "A", "fence": short["fence"]},
        "release": {"key": "short", "fence": short["fence"]},
        "check": {"key": "short"},
    }
    for method, fields in asked.items():
        remaining = before + WAIT_OUT - boottime()
        reply = rpc.call(method, **fields)
        verdict = reply["held" if method == "check" else "released" if method == "release" else "acquired"]
        assert verdict is None and reply["reason"] == "recovering", (method, reply)
        assert remaining - 0.01 <= reply["retry_after_seconds"] <= WAIT_OUT, (method, reply, remaining)
    assert rpc.lease("never seen", 1)["acquired"] is None
    assert rpc.check("long")["held"] is True
    assert rpc.release(long)["released"] is True
    assert rpc.lease("long", 1)["acquired"] is None  # free, but a grant of any key could be a second one
    granted = eventually(lambda: (reply := rpc.lease("short", 1, "B"))["acquired"] and reply, WAIT_OUT + 8)
    assert boottime() >= before + WAIT_OUT
    assert boottime() < before + WAIT_OUT + 6, "the wait has no end"
    assert granted["generation"] > max(short["generation"], long["generation"])


def test_a_waiter_waits_the_recovery_out(powered: Served, disk: Disk) -> None:
    powered.start().grant("k", WAIT_OUT)
    dead = cut(powered, disk)
    reply = powered.start().lease("k", 1, "B", wait_seconds=10)
    assert reply["acquired"] is True
    assert dead + WAIT_OUT <= boottime() < dead + WAIT_OUT + 8


def test_a_cut_during_the_wait_begins_it_anew(powered: Served, disk: Disk) -> None:
    """Of the second boot nothing is known but that it, too, may have granted."""
    rpc = powered.start()
    rpc.grant("k", WAIT_OUT)
    long = rpc.grant("long", LONG)
    cut(powered, disk)
    powered.start()
    cut(powered, disk)
    before = boottime()
    rpc = powered.start()
    assert rpc.lease("k", 1, "B")["acquired"] is None
    assert rpc.renew(long)["acquired"] is True
    eventually(lambda: rpc.lease("k", 1, "B")["acquired"], WAIT_OUT + 8)
    assert boottime() >= before + WAIT_OUT


def test_a_kill_during_the_wait_does_not_shorten_it(powered: Served, disk: Disk) -> None:
    powered.start().grant("k", WAIT_OUT)
    cut(powered, disk)
    before = boottime()
    powered.start()
    powered.kill()
    rpc = powered.start()  # the same boot: the runtime directory is there and says how long
    assert rpc.lease("k", 1, "B")["reason"] == "recovering"
    eventually(lambda: rpc.lease("k", 1, "B")["acquired"], WAIT_OUT + 8)
    assert boottime() >= before + WAIT_OUT


def test_a_renewal_to_a_longer_ttl_is_flushed_before_it_is_true(powered: Served, disk: Disk) -> None:
    rpc = powered.start()
    grant = rpc.grant("k", 1)
    assert rpc.renew(grant, ttl_seconds=LONG)["acquired"] is True
    cut(powered, disk)
    after = powered.start().check("k", generation=grant["generation"])
    assert (after["held"], after["current"]) == (True, True)
    assert after["expires_in_seconds"] > LONG - 10


def test_revoked_stays_revoked(powered: Served, disk: Disk) -> None:
    rpc = powered.start()
    grant = rpc.grant("k", LONG)
    other = rpc.grant("other", LONG)
    assert rpc.call("revoke", key="k", reason="test")["revoked"] is True
    cut(powered, disk)
    rpc = powered.start()
    assert rpc.check("other", generation=other["generation"])["current"] is True
    assert rpc.check("k")["held"] is None and rpc.renew(grant)["acquired"] is None  # not known: it is not there
    after = eventually(lambda: (reply := rpc.check("k"))["held"] is not None and reply, WAIT_OUT + 8)
    assert after["held"] is False
    assert rpc.renew(grant)["reason"] == "lapsed"
    assert rpc.grant("k", 1, "B")["generation"] > grant["generation"]


def test_a_released_long_lease_may_come_back_but_not_for_longer_than_its_ttl(powered: Served, disk: Disk) -> None:
    ttl = WAIT_OUT + 1.5
    rpc = powered.start()
    grant = rpc.grant("k", ttl)
    disk.cut()  # the delete can no longer reach the disk
    assert rpc.release(grant)["released"] is True
    cut(powered, disk)
    rpc = powered.start()
    started = boottime()
    back = rpc.check("k", generation=grant["generation"])
    assert (back["held"], back["current"]) == (True, True)
    assert back["expires_in_seconds"] <= ttl
    eventually(lambda: rpc.lease("k", 1, "B")["acquired"], ttl + 8)
    assert boottime() <= started + ttl + 4


def test_a_key_that_changed_hands_never_comes_back_as_the_old_lease(powered: Served, disk: Disk) -> None:
    """The ledger's record of the first holder is gone before the second one is told yes."""
    rpc = powered.start()
    first = rpc.grant("k", LONG)
    assert rpc.release(first)["released"] is True
    rpc.grant("k", WAIT_OUT, "B")
    cut(powered, disk)
    rpc = powered.start()
    assert rpc.renew(first)["acquired"] is None  # neither his nor, yet, anybody's
    assert rpc.check("k")["held"] is None
    eventually(lambda: rpc.check("k")["held"] is False, WAIT_OUT + 8)


# ---- under load


class Load:
    """Connections that acquire, renew and release at full speed until their daemon is gone."""

    def __init__(
        self, served: Served, history: History, seed: int, ttls: tuple[float, ...], keys: list[str], threads: int = 3
    ) -> None:
        self._ttls = ttls
        self._history = history
        self._keys = keys
        self._before = len(history.promises)
        self.unexpected: list[BaseException] = []
        self._threads = [
            threading.Thread(target=self._run, args=(served.connect(), random.Random(seed * 100 + number), f"h{number}"))
            for number in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    def _run(self, rpc: Rpc, dice: random.Random, holder: str) -> None:
        try:
            while True:
                self._act(rpc, dice, holder)
        except Gone:
            pass
        except BaseException as error:
            self.unexpected.append(error)

    def _act(self, rpc: Rpc, dice: random.Random, holder: str) -> None:
        key, ttl = dice.choice(self._keys), dice.choice(self._ttls)
        mine = self._history.ask(rpc, key, ttl, holder)
        if mine is None:
            return
        move = dice.random()
        if move < 0.3:
            self._history.give_up(rpc, mine)
        elif move < 0.5:
            self._history.prolong(rpc, mine, dice.choice([longer for longer in self._ttls if longer >= ttl]))

    def until(self, replies: int) -> None:
        """That many true replies are in, however slow the machine is."""
        before = self._before
        eventually(lambda: len(self._history.promises) >= before + replies, 30, every=0.001)

    def join(self) -> None:
        for thread in self._threads:
            thread.join(20)
            assert not thread.is_alive(), "a client hangs on a daemon that is gone"
        assert not self.unexpected, self.unexpected


def scramble(rpc: Rpc, history: History, keys: list[str], seconds: float) -> None:
    """A newcomer asks for every key, over and over, until it has been granted some: it must not be told yes too early."""
    until = boottime() + seconds
    granted = 0
    while granted < 20:
        assert boottime() < until, "nothing is granted any more"
        granted += sum(history.ask(rpc, key, 0.2, "newcomer") is not None for key in keys)


def still_there(rpc: Rpc, promises: list[Promise]) -> None:
    """The newest, which the cut could have reached; and the fences of the very last renew."""
    checks = [(promise, rpc.send("check", key=promise.key, generation=promise.generation)) for promise in promises[-400:]]
    for promise, number in checks:
        reply = rpc.receive(number)
        assert reply["current"] is True, f"lost: {promise} {reply}"
    for promise in promises[::-1][:60]:
        renewal = rpc.call("renew", key=promise.key, holder=promise.holder, fence=promise.fence)
        assert (renewal["acquired"], renewal["generation"]) == (True, promise.generation), (promise, renewal)


def test_cuts_under_load_lose_no_long_lease_and_grant_none_too_early(powered: Served, disk: Disk) -> None:
    powered.settings["wait_out_seconds"] = wait_out = 3.0
    history = History()
    endangered = 0
    for cycle in range(8):
        keys = [f"c{cycle}-{number}" for number in range(120)]
        powered.kill()  # the volatile state of this boot is kept: nothing to wait for
        rpc = powered.start()
        assert rpc.store()["state"] == "ok"
        newest = max((promise.generation for promise in history.promises), default=0)
        load = Load(powered, history, cycle, (0.3, wait_out - 0.2, wait_out, wait_out + 0.5, LONG), keys)
        load.until(80 + 13 * cycle)
        cut(powered, disk)
        load.join()
        these = [promise for promise in history.promises if promise.key in set(keys)]
        assert min(promise.generation for promise in these) > newest
        rpc = powered.start()
        endangered += len([promise for promise in history.standing(boottime()) if promise.ttl <= wait_out])
        scramble(rpc, history, keys, wait_out + 2)
        long = [promise for promise in these if promise.ttl == LONG and promise.generation not in history.given_up]
        assert len(long) > 5
        still_there(rpc, long)
    assert history.judge() > 100
    assert endangered > 8, "hardly a short lease was live when the power came back: nothing was proved about the wait"


def test_strict_mode_survives_with_every_grant_and_waits_for_nothing(powered: Served, disk: Disk) -> None:
    powered.settings["wait_out_seconds"] = 0
    history = History()
    for cycle in range(3):
        keys = [f"c{cycle}-{number}" for number in range(2000)]
        powered.kill()
        rpc = powered.start()
        load = Load(powered, history, cycle, (60.0, 600.0), keys)
        load.until(150)
        cut(powered, disk)
        load.join()
        rpc = powered.start()
        assert rpc.store()["no_grant_for_seconds"] == 0
        eventually(lambda rpc=rpc, cycle=cycle: rpc.lease(f"new{cycle}", 5, "B")["acquired"], 3)
        standing = history.standing(boottime() + 5)
        assert len(standing) > 20
        still_there(rpc, standing)
    history.judge()
