"""Reboots, stops and power cuts of the host: what is kept, what is waited out, and what the socket does meanwhile."""

from __future__ import annotations

import re
import subprocess
import time
from typing import Any

import pytest
from inhabitants import SERVICE, eventually, held, running, settled
from lab import Lab
from product import WAIT_OUT_SECONDS

pytestmark = [pytest.mark.root, pytest.mark.slow]

SHORT, LONG = WAIT_OUT_SECONDS, 600


def granted(lab: Lab, key: str, ttl: float) -> dict[str, Any]:
    with lab.rpc() as rpc:
        grant = rpc.call("lease", key=key, holder="before", ttl_seconds=ttl)
    assert grant["acquired"] is True, grant
    return grant


def unless_starting(lab: Lab, key: str) -> subprocess.CompletedProcess[str] | None:
    """What a member of the group is told about a key, but for the instant between ready and the first flush."""
    told = lab.run("lease", "acquire", key, user="worker", check=False)
    return None if "(starting)" in told.stdout else told


def boot_id(lab: Lab) -> str:
    return lab.run("cat", "/proc/sys/kernel/random/boot_id").stdout.strip()


def end(lab: Lab, key: str, grant: dict[str, Any]) -> Any:
    with lab.rpc() as rpc:
        return rpc.call("release", key=key, holder="before", fence=grant["fence"])["released"]


def test_an_orderly_reboot_forgets_nothing_and_waits_for_nothing(lab: Lab) -> None:
    settled(lab)
    before = boot_id(lab)
    long = granted(lab, "reboot:long", LONG)
    short = granted(lab, "reboot:short", SHORT)
    lab.reboot()
    assert boot_id(lab) != before
    with lab.rpc() as rpc:  # the first call of this boot
        known = rpc.call("check", key="reboot:long", generation=long["generation"])
        assert (known["held_by"], known["current"]) == ("before", True)
        assert rpc.call("check", key="reboot:short")["held_by"] == "before", "it goes on with the time it had left"
    with lab.rpc() as rpc:
        fresh = eventually(
            lambda: [r for r in [rpc.call("lease", key="reboot:new", holder="after", ttl_seconds=1)] if r["acquired"]]
        )
        assert fresh[0]["generation"] > short["generation"]
    told = lab.journal(SERVICE)
    assert "stopped in order" in told and "daemon.recovering" not in told
    assert end(lab, "reboot:long", long) is True


def test_a_power_cut_is_waited_out_and_long_leases_are_back(lab: Lab) -> None:
    settled(lab)
    before = boot_id(lab)
    long = granted(lab, "cut:long", LONG)
    short = granted(lab, "cut:short", SHORT)
    lab.kill()
    lab.boot()
    begun = time.monotonic()
    assert boot_id(lab) != before
    refused = eventually(lambda: unless_starting(lab, "cut:short"))  # the first call of this boot
    assert refused.returncode == 69 and "recovering" in refused.stdout, refused
    with lab.rpc() as rpc:
        for key in ("cut:short", "cut:never-heard-of"):
            unknown = rpc.call("lease", key=key, holder="after", ttl_seconds=1)
            assert (unknown["acquired"], unknown["reason"]) == (None, "recovering"), unknown
            assert 0 < unknown["retry_after_seconds"] <= WAIT_OUT_SECONDS
        assert rpc.call("check", key="cut:long")["held_by"] == "before"
        assert rpc.call("lease", key="cut:long", holder="after", ttl_seconds=1)["acquired"] is False
    eventually(
        lambda: re.fullmatch(r"recovering until 20\d\d-\S+Z: .*; \d+ leases? held", lab.show(SERVICE, "StatusText")["StatusText"])
    )
    settled(lab)
    assert time.monotonic() - begun > WAIT_OUT_SECONDS / 2, "it did not wait at all"
    with lab.rpc() as rpc:
        again = rpc.call("lease", key="cut:short", holder="after", ttl_seconds=1)
    assert again["acquired"] is True and again["generation"] > short["generation"]
    eventually(lambda: re.fullmatch(r"serving; [1-9]\d* leases? held", lab.show(SERVICE, "StatusText")["StatusText"]))
    events = [line.split()[0] for line in lab.journal(SERVICE).splitlines()]
    assert events.index("daemon.recovering") < events.index("daemon.started") < events.index("daemon.recovered")
    assert end(lab, "cut:long", long) is True


def test_a_stop_in_order_leaves_the_door_and_every_lease(lab: Lab) -> None:
    settled(lab)
    owner = lab.run("stat", "-c", "%i %U:%G %a", "/run/leased/leased.sock").stdout
    grant = granted(lab, "stop:key", SHORT)
    lab.systemctl("stop", SERVICE)
    assert lab.show(SERVICE, "StatusText")["StatusText"].startswith("stopping: ")
    assert not lab.path("/run/leased-state").exists(), "a runtime directory is kept over restarts, not over a stop"
    assert lab.run("stat", "-c", "%i %U:%G %a", "/run/leased/leased.sock").stdout == owner, "the service must not touch the socket"
    assert lab.show("leased.socket", "ActiveState")["ActiveState"] == "active"
    assert held(lab, "stop:key") == "before", "the call that found this out has started the daemon"
    assert running(lab) > 0 and "daemon.recovering" not in lab.journal(SERVICE, "--lines=5")
    assert lab.run("stat", "-c", "%i %U:%G %a", "/run/leased/leased.sock").stdout == owner
    assert lab.run("stat", "-c", "%U %a", "/run/leased-state", "/var/lib/leased").stdout.split() == ["leased", "700"] * 2
    assert end(lab, "stop:key", grant) is True
