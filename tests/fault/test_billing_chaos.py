"""Billing through everything at once: an upstream that takes and does not say so, kills at random, cut power.  Each fact arrives once.

The facts are refusals of many labels, so that asking again is harmless: a fact that was billed before its answer got lost is free the
second time.
"""

from __future__ import annotations

import contextlib
import json
import random
import threading
import time
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from chaos import TOKEN, ChaosUpstream
from plumbing import Disk, Gone, Rpc, Served, boottime, eventually

pytestmark = pytest.mark.slow

Make = Callable[..., Served]
FACTS = 10_000
CALLS = 600
CHUNK = 50
PRICE, CALL_PRICE = 2_000, 1_000
KEY = "resource-under-contention"
LABEL = "worker-label"


@pytest.fixture
def upstream(tmp_path: Path) -> Iterator[ChaosUpstream]:
    made = ChaosUpstream(tmp_path / "events.db", seed=7)
    yield made
    made.close()


def billing(made: Served, tmp_path: Path, url: str | None) -> Served:
    """Billing on; with `url`, shipping too.  From the next start."""
    token = tmp_path / "token"
    token.write_text(f"{TOKEN}\n")
    settings: dict[str, Any] = made.settings
    settings["billing.enabled"] = "true"
    if url is not None:
        settings |= {
            "upstream.url": json.dumps(url),
            "upstream.token_file": json.dumps(str(token)),
            "upstream.timeout_seconds": 0.4,
        }
    return made


def micro(amount: str) -> int:
    whole, _, rest = amount.partition(".")
    return int(whole) * 1_000_000 + int(rest.ljust(6, "0") or 0)


class Facts:
    """Asks for refusals and remembers what it was told."""

    def __init__(self) -> None:
        self.events: dict[str, str] = {}  # label -> event id, as told
        self.refused: set[str] = set()
        self.amount = 0
        self.calls_sent = self.calls_told = 0

    def ask(self, rpc: Rpc, labels: list[str], calls: int = 0) -> None:
        """All of them in one pipeline.  Raises Gone."""
        asked = [(label, rpc.send("lease", key=KEY, holder=label, ttl_seconds=1)) for label in labels]
        locks = [rpc.send("agent_lock", key=KEY, op="check") for _ in range(calls)]
        self.calls_sent += calls
        for label, number in asked:
            reply = rpc.receive(number)
            assert reply["acquired"] is False, reply
            self.refused.add(label)
            charge = reply["charge"]
            if charge["event_id"] is not None:
                assert self.events.setdefault(label, charge["event_id"]) == charge["event_id"]
                self.amount += micro(charge["amount"])
        for number in locks:
            assert rpc.receive(number)["charge"]["amount"] == "0.001"
            self.calls_told += 1


class Probe:
    """One holder among the others: leases, renews and releases, over and over, and notes how long each answer took."""

    def __init__(self, served: Served) -> None:
        self.took: list[float] = []
        self._served = served
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        for number in count():
            if self._ended.is_set():
                return
            with contextlib.suppress(Gone):
                rpc = Rpc(self._served.socket, 20.0)
                with rpc:
                    while not self._ended.wait(0.002):
                        self._turn(
                            rpc, f"probe-{number}"
                        )  # the lease of a connection that was cut stands for a while: refused, it would be billed
            self._ended.wait(0.02)

    def _turn(self, rpc: Rpc, key: str) -> None:
        began = boottime()
        grant = rpc.lease(key, 1, "prober")  # short: a long one waits for the disk
        self.took.append(boottime() - began)
        if grant["acquired"]:
            began = boottime()
            rpc.renew(grant)
            rpc.release(grant)
            self.took.append((boottime() - began) / 2)

    def end(self) -> float:
        """The 99th percentile, in seconds."""
        self._ended.set()
        self._thread.join()
        assert len(self.took) > 200, "hardly a probe"
        return sorted(self.took)[int(len(self.took) * 0.99)]


def drained(rpc: Rpc) -> dict[str, Any]:
    """`usage`, once nothing of it waits for upstream."""
    usage: dict[str, Any] = eventually(
        lambda: (reply := rpc.call("usage"))["pending_upstream"] == 0 and reply, seconds=60, every=0.05
    )
    return usage


def hold(rpc: Rpc) -> None:
    """Until somebody holds the key, now that what may have been forgotten is waited out.  Refused, the holder would be billed too."""
    eventually(lambda: rpc.check(KEY)["held"] or rpc.lease(KEY, 3600, "the-holder")["acquired"], 10)


def assert_nothing_was_told(stored: list[tuple[str, str, int, str]], secrets: list[str]) -> None:
    whole = "\n".join(row[3] for row in stored)
    for secret in secrets:
        assert secret not in whole


def test_ten_thousand_facts_arrive_once_through_chaos_and_kills(served: Make, tmp_path: Path, upstream: ChaosUpstream) -> None:
    dice, began = random.Random(3), time.monotonic()
    made = billing(served(), tmp_path, None)
    rpc = made.start()
    grant = rpc.grant(KEY, 3600, "the-holder")
    facts = Facts()
    labels = [f"{LABEL}-{number}" for number in range(FACTS)]
    chunks = [labels[at : at + CHUNK] for at in range(0, FACTS, CHUNK)]
    quiet, rest = chunks[: len(chunks) // 4], chunks[len(chunks) // 4 :]

    probe = Probe(made)
    for chunk in quiet:  # nothing is shipped yet
        facts.ask(rpc, chunk)
        threading.Event().wait(0.02)
    p99_quiet = probe.end()

    made.kill()
    billing(made, tmp_path, upstream.url)
    rpc = made.start()
    probe = Probe(made)
    kills = 0
    todo = list(rest)
    while todo:
        chunk = todo[0]
        if dice.random() < 0.04:
            killer = threading.Timer(dice.uniform(0, 0.02), made.kill)
            killer.start()
            kills += 1
        else:
            killer = None
        try:
            facts.ask(rpc, chunk, calls=4)
            todo.pop(0)
            threading.Event().wait(0.02)
        except Gone:
            pass
        if killer is not None:
            killer.join()
            rpc = made.start()
    for _ in range(3):  # and while nothing but shipping is going on
        threading.Event().wait(dice.uniform(0.2, 0.8))
        made.kill()
        kills += 1
        rpc = made.start()
    usage = drained(rpc)
    p99_chaos = probe.end()
    seconds = time.monotonic() - began

    stored = upstream.stored()
    refusals = {row[0] for row in stored if row[1] == "leased.refusal.billed"}
    calls = {row[0] for row in stored if row[1] == "leased.agent_lock.called"}
    print(
        f"\nbilling chaos: {len(refusals)} refusals and {len(calls)} calls in {seconds:.1f} s, {kills} kills; "
        f"p99 {p99_quiet * 1e3:.2f} ms without shipping, {p99_chaos * 1e3:.2f} ms with; {dict(upstream.did)}"
    )
    assert kills >= 5
    assert sum(1 for fate, _ in upstream.FATES if upstream.did[fate]) > len(upstream.FATES) // 2, upstream.did
    assert facts.refused == set(labels)
    assert len(refusals) == FACTS
    assert set(facts.events.values()) <= refusals
    assert facts.amount <= FACTS * PRICE
    assert facts.calls_told <= len(calls) <= facts.calls_sent
    totals = upstream.store.totals()
    assert (totals["events"], totals["conflicts"]) == (FACTS + len(calls), 0)
    assert sum(row[2] for row in stored) == FACTS * PRICE + len(calls) * CALL_PRICE == micro(usage["amount"])
    assert (usage["refusals_billed"], usage["calls_billed"], usage["dead_letters"]) == (FACTS, len(calls), 0)
    assert_nothing_was_told(stored, [KEY, LABEL, "the-holder", grant["fence"], "probe"])
    assert p99_chaos < 3 * p99_quiet + 0.02, "leases wait for upstream"
    assert made.stop() == 0


@pytest.mark.root
def test_power_cuts_lose_at_most_what_was_not_copied_and_bill_nothing_twice(
    served: Make, disk: Disk, tmp_path: Path, upstream: ChaosUpstream
) -> None:
    made = billing(served(disk.mount / "state", wait_out_seconds=1), tmp_path, upstream.url)
    made.another_boot()
    facts = Facts()
    settled: set[str] = set()  # told a second or more before the power went
    number = 0
    for _ in range(2):
        rpc = made.start()
        hold(rpc)
        until = boottime() + 1.5
        while boottime() < until:
            labels = [f"{LABEL}-{number + at}" for at in range(CHUNK)]
            number += CHUNK
            facts.ask(rpc, labels)
            if boottime() < until - 1.0:
                settled.update(facts.events[label] for label in labels)
            threading.Event().wait(0.02)
        disk.cut()
        with contextlib.suppress(Gone):  # it runs on for a moment, and what it says then is not copied
            facts.ask(rpc, [f"{LABEL}-{number + at}" for at in range(CHUNK)])
        number += CHUNK
        made.kill()
        made.lose_runtime()
        disk.detach()
        disk.attach()
        made.another_boot()
    upstream.calm = True
    rpc = made.start()
    usage = drained(rpc)
    stored = upstream.stored()
    ids = {row[0] for row in stored}
    assert len(settled) > 500
    assert settled <= ids, "a fact that was copied is lost"
    assert ids <= set(facts.events.values()), "a fact nobody was told of"
    lost = len(facts.events) - len(ids)
    print(f"\npower cuts: {len(ids)} of {len(facts.events)} facts arrived, {lost} were the callers' gain")
    assert upstream.store.totals()["conflicts"] == 0
    # What was shipped and then forgotten by the ledger would show here: the ledger flushes an event before it can be shipped.
    assert sum(row[2] for row in stored) == len(ids) * PRICE == micro(usage["amount"])
    hold(rpc)
    told = sorted(facts.events)
    for at in range(0, len(told), CHUNK):  # asked again, the lost ones are billed under the ids they had, and no other is
        facts.ask(rpc, told[at : at + CHUNK])
    usage = drained(rpc)
    assert {row[0] for row in upstream.stored()} == set(facts.events.values())
    assert micro(usage["amount"]) == len(facts.events) * PRICE == sum(row[2] for row in upstream.stored())
    made.stop()
