"""The wall clock steps (P19): leases live by the boot clock, only `expires_at` moves, and generations rise all the same.

The daemon's wall clock is libfaketime's; its boot clock and the test's own clocks stay true.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import datetime
from typing import Any

import pytest
from plumbing import Served, boottime, eventually

pytestmark = [pytest.mark.packages, pytest.mark.slow]

Make = Callable[..., Served]
Step = Callable[[Served, str], None]
HOUR = 3600.0


def printed(reply: Any) -> float:
    """`expires_at` in seconds of the true wall clock."""
    return datetime.fromisoformat(reply["expires_at"]).timestamp()


@pytest.fixture
def daemon(served: Make, stepped: Step) -> Served:
    made = served(wait_out_seconds=1)
    stepped(made, "+0")
    return made


def test_the_fake_clock_is_the_wall_clock_alone(daemon: Served, stepped: Step) -> None:
    """The recipe itself: without it the tests below would prove nothing."""
    rpc = daemon.start()
    before = rpc.call("info")["clock"]
    stepped(daemon, "+7200")
    after = rpc.call("info")["clock"]
    assert 0 <= after["boottime"] - before["boottime"] < 5
    assert 7200 <= (datetime.fromisoformat(after["wall"]) - datetime.fromisoformat(before["wall"])).total_seconds() < 7210


@pytest.mark.parametrize("hours", [1, -1, 24 * 365, -24 * 365])
def test_a_step_moves_expires_at_and_nothing_else(daemon: Served, stepped: Step, hours: int) -> None:
    rpc = daemon.start()
    grant = rpc.grant("k", 60)
    granted = boottime()
    assert abs(printed(grant) - (time.time() + 60)) < 2
    stepped(daemon, f"{hours * 3600:+d}")
    seen = rpc.check("k", generation=grant["generation"])
    assert seen["current"] is True
    assert abs(seen["expires_in_seconds"] - (granted + 60 - boottime())) < 1
    assert abs(printed(seen) - (time.time() + hours * HOUR + seen["expires_in_seconds"])) < 2
    refusal = rpc.lease("k", 1, "B")
    assert refusal["reason"] == "held" and abs(refusal["retry_after_seconds"] - (granted + 60 - boottime())) < 1
    renewal = rpc.renew(grant)
    assert (renewal["acquired"], renewal["generation"]) == (True, grant["generation"])
    assert 59 < renewal["expires_in_seconds"] < 60.001
    assert abs(renewal["expires_boottime"] - (boottime() + 60)) < 1
    last = grant["generation"]
    for number in range(3):
        generation = rpc.grant(f"n{number}", 1)["generation"]
        assert generation > last
        last = generation


@pytest.mark.parametrize("step", ["+3600", "-3600"])
def test_a_lease_lapses_after_its_ttl_whatever_the_wall_clock_does(daemon: Served, stepped: Step, step: str) -> None:
    rpc = daemon.start()
    sent = boottime()
    rpc.grant("k", 1.5)
    answered = boottime()
    stepped(daemon, step)
    rpc.lease("k", 1, "B", wait_seconds=5)
    assert sent + 1.5 <= boottime() < answered + 1.5 + 1


def test_generations_rise_from_life_to_life_under_a_wall_clock_that_stepped_back(daemon: Served, stepped: Step) -> None:
    """After a stop in order, a kill, and a kill that lost the runtime directory: the number is kept, not derived from the clock."""
    rpc = daemon.start()
    last = rpc.grant("first", HOUR)["generation"]
    stepped(daemon, "-3600")
    for number, ending in enumerate(("stop", "kill", "lose")):
        generation = rpc.grant(f"before {number}", HOUR)["generation"]
        assert generation > last
        if ending == "stop":
            assert daemon.stop() == 0
        else:
            daemon.kill()
        if ending == "lose":
            daemon.lose_runtime()
        rpc = daemon.start()
        assert rpc.check("first")["held"] is True
        reply = eventually(lambda rpc=rpc, number=number: (reply := rpc.lease(f"after {number}", 1))["acquired"] and reply, 5)
        last = reply["generation"]
        assert last > generation


def test_many_grants_under_a_clock_that_stepped_back_do_not_run_out_of_generations(daemon: Served, stepped: Step) -> None:
    """The high-water mark follows the numbers handed out, not only the clock."""
    rpc = daemon.start()
    last = rpc.grant("first", 1)["generation"]
    stepped(daemon, "-86400")
    numbers = [rpc.send("lease", key=f"k{number}", holder="A", ttl_seconds=1) for number in range(300)]
    generations = [rpc.receive(number)["generation"] for number in numbers]
    assert generations == sorted(set(generations)) and generations[0] > last


def test_a_step_forward_past_the_mark_costs_no_grant(daemon: Served, stepped: Step) -> None:
    """The mark is a minute ahead of the clock.  A step of a day leaves it behind, and until it has caught up numbers go on where they were."""
    rpc = daemon.start()
    last = rpc.grant("a", 1)["generation"]
    stepped(daemon, "+86400")
    until = boottime() + 2
    while boottime() < until:
        generation = rpc.grant(f"b{boottime()}", 0.1)["generation"]
        assert generation > last
        last = generation
    assert last > (time.time() + 86400 - 10) * 1e6, "the numbers no longer follow the clock"


def test_past_the_year_2200_it_refuses_to_start(daemon: Served, stepped: Step) -> None:
    daemon.start().grant("k", HOUR)
    assert daemon.stop() == 0
    stepped(daemon, "2200-01-02 00:00:00")
    assert daemon.refused() == 78
    assert "2200" in daemon.said().splitlines()[-1] and "clock" in daemon.said().splitlines()[-1]
    stepped(daemon, "+0")
    assert daemon.start().check("k")["held"] is True
