"""What Prometheus scrapes, and that the alert rules and the dashboard ask for nothing it does not get."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from daemons import Daemon
from http_peer import Http

ROOT = Path(__file__).resolve().parents[2]
RULES = ROOT / "contrib/prometheus/leased.rules.yml"
DASHBOARD = ROOT / "contrib/grafana/leased.json"
CANARY = "canary-of-a-caller"


def scraped(daemon: Daemon, accept: str = "") -> str:
    with Http(daemon.socket) as http:
        answer = http.ask("GET", "/metrics", accept=accept)
    assert answer.status == 200, answer
    return answer.body.decode()


def value(page: str, sample: str) -> float:
    (line,) = [line for line in page.splitlines() if line.rpartition(" ")[0] == sample]
    return float(line.rpartition(" ")[2])


@pytest.mark.packages
def test_a_scrape_counts_what_happened_and_names_no_caller(daemon: Daemon) -> None:
    with daemon.rpc() as rpc, Http(daemon.socket) as http:
        rpc.call("agent_add", name=CANARY)
        grant = rpc.call("lease", key=CANARY, holder=CANARY, scope=CANARY, ttl_seconds=20)
        for _ in range(2):
            http.post("/v1/lease", key=CANARY, holder=f"other {CANARY}")
        http.ask("GET", f"/{CANARY}")
        rpc.call("renew", key=CANARY, holder=CANARY, fence=grant["fence"], ttl_seconds=200)
        page = scraped(daemon)
        assert value(page, 'leased_answers_total{answer="true",door="rpc"}') == 2
        assert value(page, 'leased_answers_total{answer="false",door="http"}') == 2
        assert value(page, 'leased_answers_total{answer="error",door="http"}') == 1
        assert value(page, 'leased_decisions_total{decision="refused"}') == 2
        assert value(page, "leased_live_leases") == 1
        assert value(page, "leased_ready") == 1
        assert value(page, 'leased_http_responses_total{status="404"}') == 1
        assert value(page, "leased_request_seconds_count") >= 5
        assert value(page, "leased_flush_seconds_count") >= 2
        assert value(page, 'leased_unready{reason="recovering"}') == 0
        rpc.call("release", key=CANARY, fence=grant["fence"])
        page = scraped(daemon)
    assert value(page, 'leased_ends_total{cause="released"}') == 1 and value(page, "leased_live_leases") == 0
    assert CANARY not in page and grant["fence"] not in page
    labels = set(re.findall(r'([a-z_]+)="', page))
    assert labels <= {"answer", "cause", "decision", "door", "le", "python", "reason", "status", "version"}


@pytest.mark.packages
def test_the_form_is_negotiated_and_the_library_is_loaded_by_the_first_scrape_alone(daemon: Daemon) -> None:
    with Http(daemon.socket) as http:
        http.ask("GET", "/healthz")
        before = daemon.memory_bytes()
        http.ask("GET", "/readyz")
        assert daemon.memory_bytes() < before + 500_000
        text = http.ask("GET", "/metrics")
        assert text.headers["content-type"].startswith("text/plain; version=")
        open_metrics = http.ask("GET", "/metrics", accept="application/openmetrics-text; version=1.0.0")
        assert open_metrics.headers["content-type"].startswith("application/openmetrics-text")
        assert open_metrics.body.endswith(b"# EOF\n")
    assert daemon.memory_bytes() > before + 1_000_000, "so it was not there before"


@pytest.mark.packages
def test_rules_and_dashboard_are_sound_and_ask_for_metrics_that_exist(daemon: Daemon) -> None:
    page = scraped(daemon)
    known = {line.split(" ")[0].partition("{")[0] for line in page.splitlines() if line and line[0] != "#"}
    dashboard = json.loads(DASHBOARD.read_text())
    panels = dashboard["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels) > 10
    expressions = [target["expr"] for panel in panels for target in panel["targets"]]
    expressions += re.findall(r"expr: (.*)", RULES.read_text())
    for expression in expressions:
        asked = set(re.findall(r"\bleased_[a-z_]+", expression))
        assert asked <= known, asked - known
    assert shutil.which("promtool"), "install the package prometheus"
    checked = subprocess.run(["promtool", "check", "rules", RULES], capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stdout + checked.stderr
    scrape = RULES.with_name("scrape.yml")
    checked = subprocess.run(["promtool", "check", "config", "--syntax-only", scrape], capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stdout + checked.stderr
    linted = subprocess.run(["promtool", "check", "metrics"], input=page, capture_output=True, text=True, check=False)
    assert linted.returncode == 0, linted.stdout + linted.stderr
