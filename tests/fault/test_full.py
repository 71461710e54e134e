"""Stores that cannot be written (P39, P21): no room on the disk, in the map, in the tmpfs; read-only; failing; hanging.

Each time the same is asked: is null all that is lost, do renewals, releases, checks and lapses go on, and does it heal without a restart?
"""

from __future__ import annotations

import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from plumbing import Disk, Rpc, Served, Tmpfs, boottime, eventually, fill

pytestmark = [pytest.mark.root, pytest.mark.slow]

LONG = 3600.0
NULL_SECONDS = 2.0  # the bound of a long grant: 2 s, at most half the ttl
SLACK = 0.6
Make = Callable[..., Served]


def timed(rpc: Rpc, key: str, ttl: float, holder: str = "A") -> tuple[Any, float]:
    began = boottime()
    reply = rpc.lease(key, ttl, holder)
    return reply, boottime() - began


def heals(rpc: Rpc, name: str, seconds: float = 5.0) -> None:
    """Long and short grants are true again, and the flush that makes them so has happened."""
    eventually(lambda: rpc.lease(f"{name} long {boottime()}", LONG)["acquired"], seconds)
    for number in range(5):
        rpc.grant(f"{name} long {number}", LONG)
        rpc.grant(f"{name} short {number}", 1)
    assert rpc.store()["ledger_settled"] is True


# ---- the disk of the ledger


def test_a_full_disk_makes_long_grants_unknown_and_nothing_else(served: Make, small: Tmpfs) -> None:
    daemon = served(small.mount / "state", wait_out_seconds=30)
    rpc = daemon.start()
    short, given_back, long = rpc.grant("short", 25), rpc.grant("given back", 25), rpc.grant("long", LONG)
    ballast = fill(small.mount)
    wide = "w" * 250  # records as wide as they come: the room LMDB can use again is soon taken
    unknown = []
    for number in range(400):
        reply = rpc.lease(f"k{number}", LONG, wide, scope=wide)
        if reply["acquired"] is None:
            unknown.append(reply)
            assert rpc.renew(short)["acquired"] is True
            if len(unknown) == 5:
                break
    assert len(unknown) == 5, "the disk is not full"
    assert all(reply["reason"] in {"store", "full", "ledger_slow"} and reply["retry_after_seconds"] == 1 for reply in unknown), (
        unknown
    )
    assert rpc.check("short", generation=short["generation"])["current"] is True
    assert rpc.check("nobody's")["held"] is False
    assert rpc.release(given_back)["released"] is True
    assert rpc.release(long)["released"] is True
    for number in range(20):
        assert rpc.renew(short)["acquired"] is True, number
    ballast.unlink()
    heals(rpc, "room")
    retried = rpc.lease("k0", 1, "someone else")
    assert retried["acquired"] is False, "what was told true before the disk was full still stands"


def test_a_failing_disk_makes_grants_unknown_within_the_bound(served: Make, disk: Disk) -> None:
    """EIO from every call.  Nothing read from this ledger counts as absent, so even a short grant cannot know whether an older record of its key
    might come back: null, for every key.  What is held goes on."""
    daemon = served(disk.mount / "state", wait_out_seconds=20)
    rpc = daemon.start()
    short, long, given_back = rpc.grant("short", 15), rpc.grant("long", LONG), rpc.grant("given back", 15)
    lapsing = rpc.grant("lapsing", 2.5)
    disk.cut()
    reply, seconds = timed(rpc, "l", LONG)
    assert reply["acquired"] is None and seconds < NULL_SECONDS + SLACK
    assert (reply["reason"], reply["retry_after_seconds"]) == ("store", 1)
    for ttl in (15.0, 1.0, 30.0, LONG):
        reply, seconds = timed(rpc, f"k{ttl}", ttl)
        assert reply["acquired"] is None and seconds < min(NULL_SECONDS, ttl / 2) + SLACK, (ttl, reply, seconds)
        assert rpc.renew(short)["acquired"] is True
    assert rpc.renew(long)["acquired"] is None, "whether the ledger still has it, nobody knows"
    assert rpc.check("long", generation=long["generation"])["current"] is True
    assert rpc.renew(short, ttl_seconds=LONG)["acquired"] is None
    assert rpc.renew(short)["acquired"] is True, "a renewal that came to nothing leaves the lease and its fence as they were"
    assert 0 < rpc.check("short")["expires_in_seconds"] < 15.001
    assert rpc.release(given_back)["released"] is True
    eventually(lambda: rpc.check("lapsing", generation=lapsing["generation"])["held"] is False, 5)
    assert rpc.call("revoke", key="short", reason="test")["revoked"] is None
    assert rpc.renew(short)["acquired"] is False, "revoked all the same: only whether a power cut could undo it is not known"
    store = rpc.store()
    assert store["ledger_settled"] is False and "Input/output error" in store["ledger_error"]
    assert daemon.running


def test_a_read_only_state_is_refused_with_a_message(served: Make, tmp_path: Path) -> None:
    state = tmp_path / "state"
    daemon = served(state)
    grant = daemon.start().grant("k", LONG)
    assert daemon.stop() == 0
    tree = sorted((path.name, path.read_bytes()) for path in state.iterdir() if path.name != "lock.mdb")
    for command in (("--bind", str(state), str(state)), ("-o", "remount,bind,ro", str(state))):
        subprocess.run(["mount", *command], check=True)
    try:
        daemon.forget_log()
        assert daemon.refused() in {69, 78}
        last = daemon.said().strip().splitlines()[-1]
        assert last.startswith("leased: ") and str(state) in last and "Read-only file system" in last
    finally:
        subprocess.run(["umount", str(state)], check=True)
    assert sorted((path.name, path.read_bytes()) for path in state.iterdir() if path.name != "lock.mdb") == tree
    assert daemon.start().renew(grant)["acquired"] is True


# ---- the volatile map and the tmpfs it lies on


def fill_map(rpc: Rpc) -> list[Any]:
    """Leases as large as they come, until the answer is null.  Returns the grants."""
    wide = "w" * 256
    granted: list[Any] = []
    while True:
        asked = range(len(granted), len(granted) + 100)
        numbers = [
            rpc.send("lease", key=f"k{at}", holder=wide, scope=wide, ttl_seconds=60, request_id=f"{at:064d}") for at in asked
        ]
        replies = [rpc.receive(number) for number in numbers]
        granted += [reply for reply in replies if reply["acquired"]]
        refused = [reply for reply in replies if not reply["acquired"]]
        if refused:
            assert all(reply["acquired"] is None and reply["reason"] == "full" for reply in refused), refused[0]
            return granted


def test_a_full_map_grants_nothing_lets_everything_end_and_heals(served: Make) -> None:
    """The map is sized for leases of usual width: with labels and scopes of 256 bytes it is full before max_leases is reached."""
    rpc = served(max_leases=50_000, wait_out_seconds=60).start()
    stands, given_back = rpc.grant("stands", 60), rpc.grant("given back", 60)
    granted = fill_map(rpc)
    lapsing = [lease for lease in granted[100:200] if rpc.renew(lease, ttl_seconds=0.5)["acquired"]]
    assert len(lapsing) == 100, "a renewal needs room only for a moment"
    for number in range(20):
        reply = rpc.lease(f"one more {number}", 1)
        assert (reply["acquired"], reply["reason"], reply["retry_after_seconds"]) == (None, "full", 1)
    assert all(rpc.renew(lease)["acquired"] for lease in granted[200:400])
    assert rpc.lease("stands", 1, "B")["reason"] == "held"
    assert rpc.check("stands", generation=stands["generation"])["current"] is True
    assert rpc.release(given_back)["released"] is True
    eventually(lambda: rpc.check(lapsing[-1]["key"])["held"] is False, 5)
    for many in range(1000, len(granted), 100):
        numbers = [rpc.send("release", key=lease["key"], fence=lease["fence"]) for lease in granted[many : many + 100]]
        replies = [rpc.receive(number) for number in numbers]
        assert all(reply["released"] is True for reply in replies), (many, [reply for reply in replies if not reply["released"]])
    eventually(lambda: rpc.lease(f"again {boottime()}", 1)["acquired"], 5)
    assert all(rpc.grant(f"after {number}", 1) for number in range(100))


def test_a_tmpfs_without_room_for_the_map_is_refused_with_a_message(served: Make, small: Tmpfs, tmp_path: Path) -> None:
    daemon = served(tmp_path / "state")
    daemon.runtime_dir = small.mount / "runtime"
    assert daemon.refused() == 69  # it may heal: the service manager tries again
    last = daemon.said().strip().splitlines()[-1]
    assert last.startswith("leased: ") and str(daemon.runtime_dir) in last and "MiB" in last and "max_leases" in last
    small.resize("64m")
    daemon.start().grant("k", LONG)


def test_a_tmpfs_filled_by_others_stops_nothing(served: Make, small: Tmpfs, tmp_path: Path) -> None:
    """All the room the volatile state will ever need is taken at its first start."""
    small.resize("24m")
    daemon = served(tmp_path / "state")
    daemon.runtime_dir = small.mount / "runtime"
    rpc = daemon.start()
    fill(small.mount)
    numbers = [rpc.send("lease", key=f"k{number}", holder="h" * 250, ttl_seconds=60) for number in range(400)]
    grants = [rpc.receive(number) for number in numbers]
    assert all(grant["acquired"] for grant in grants)
    assert all(rpc.release(grant)["released"] for grant in grants[200:])
    daemon.kill()
    rpc = daemon.start()
    assert all(rpc.renew(grant)["acquired"] for grant in grants[:200:20])


# ---- a flush that hangs (P21)


@pytest.fixture
def hung(served: Make, disk: Disk) -> Iterator[Served]:
    daemon = served(disk.mount / "state", wait_out_seconds=5)
    yield daemon
    disk.thaw()


def test_a_flush_that_hangs_holds_up_nothing_that_needs_none(hung: Served, disk: Disk) -> None:
    rpc = hung.start()
    punctual, widened, renewed = rpc.grant("punctual", 4), rpc.grant("widened", 4), rpc.grant("renewed", LONG)
    disk.freeze()
    frozen = boottime()
    answers: list[tuple[Any, float]] = []
    slow = threading.Thread(target=lambda: answers.extend(timed(hung.connect(), f"long {ttl}", ttl) for ttl in (LONG, 6.0)))
    slow.start()
    widening = hung.connect().send("renew", key="widened", holder="A", fence=widened["fence"], ttl_seconds=LONG)
    del widening
    taken = 0
    while boottime() < frozen + 5:
        for _ in range(10):
            began = boottime()
            assert rpc.renew(punctual)["acquired"] is True
            assert rpc.renew(renewed)["acquired"] is True, "its ttl is in the ledger: nothing has to be flushed"
            rpc.release(rpc.grant(f"other {taken}", 4))
            assert rpc.check("nobody's")["held"] is False
            assert boottime() < began + 0.5, "something waited for the disk"
            taken += 1
        time.sleep(0.1)
    slow.join(20)
    assert [reply["acquired"] for reply, _ in answers] == [None, None]
    assert all(NULL_SECONDS - 0.1 < seconds < NULL_SECONDS + SLACK for _, seconds in answers), answers
    assert all(reply["reason"] == "ledger_slow" for reply, _ in answers)
    assert hung.running
    disk.thaw()
    heals(rpc, "thawed", 3)
    retry = rpc.lease(f"long {LONG}", LONG, "B")
    assert retry["acquired"] is True, "the grant that came to nothing blocks nobody"


def test_a_long_renewal_that_hangs_gives_back_the_lease_as_it_was(hung: Served, disk: Disk) -> None:
    rpc = hung.start()
    lease = rpc.grant("k", 5)
    disk.freeze()
    began = boottime()
    assert rpc.renew(lease, ttl_seconds=LONG)["acquired"] is None
    assert NULL_SECONDS - 0.1 < boottime() - began < NULL_SECONDS + SLACK
    assert rpc.check("k", generation=lease["generation"])["expires_in_seconds"] < 4
    assert rpc.renew(lease)["ttl_seconds"] == 5, "the fence is good, and the ttl is the old one"
    disk.thaw()
    assert eventually(lambda: rpc.renew(lease, ttl_seconds=LONG)["acquired"], 5) is True


def test_what_hung_when_the_power_went_is_not_there_afterwards(hung: Served, disk: Disk) -> None:
    """Null was said, so nobody holds it: after the cut it must at most block its key, never for a caller with a fence."""
    rpc = hung.start()
    sure = rpc.grant("sure", LONG)
    disk.freeze()
    assert rpc.lease("unsure", LONG, request_id="r" * 64)["acquired"] is None
    disk.thaw()
    heals(rpc, "thawed", 3)
    assert rpc.check("unsure")["held"] is False
    disk.cut()
    hung.kill()
    hung.lose_runtime()
    disk.detach()
    disk.attach()
    rpc = hung.start()
    assert rpc.check("sure", generation=sure["generation"])["current"] is True
    assert rpc.check("unsure")["held"] is None
    assert rpc.lease("unsure", LONG, request_id="r" * 64)["acquired"] is None
