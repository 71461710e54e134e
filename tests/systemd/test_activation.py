"""The socket unit opens the door, the first call starts the daemon, and the group decides who may ask."""

from __future__ import annotations

import pytest
from lab import Lab

pytestmark = [pytest.mark.root, pytest.mark.slow]


def test_the_first_call_starts_the_daemon(lab: Lab) -> None:
    lab.run("systemctl", "stop", "leased.service")  # whichever test came before
    assert lab.show("leased.socket", "ActiveState", "SubState") == {"ActiveState": "active", "SubState": "listening"}
    assert lab.main_pid("leased.service") == 0
    told = lab.run("lease", "check", "first", user="worker", check=False)
    assert (told.returncode, told.stdout.strip()) == (1, "first is free.")
    assert lab.show("leased.service", "ActiveState", "SubState") == {"ActiveState": "active", "SubState": "running"}
    assert lab.main_pid("leased.service") > 0


def test_only_the_group_may_ask(lab: Lab) -> None:
    assert lab.run("stat", "-c", "%U:%G %a", "/run/leased", "/run/leased/leased.sock").stdout.splitlines() == [
        "root:root 755",
        "root:leased-clients 660",
    ]
    assert lab.run("lease", "check", "free", user="worker", check=False).returncode == 1
    refused = lab.run("lease", "check", "free", user="stranger", check=False)
    assert refused.returncode == 77
    assert refused.stdout == ""
    assert "/run/leased/leased.sock" in refused.stderr and "may not connect" in refused.stderr
