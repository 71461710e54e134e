"""Which tests are run, and what a skipped one means.

The plain command runs what any user can run on any Linux host.  What needs root or packages is left out by name, and said at the
end and at the start; LEASED_TEST_ALL=1 runs everything and lets nothing be skipped: a test that cannot run there has failed.

With `-n 2 --dist loadfile` two files are under way at a time, and the tests of one file run in their order.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

ALL = os.environ.get("LEASED_TEST_ALL", "") not in {"", "0"}
LEFT_OUT = {
    "root": "need root (mounts, namespaces, power cuts)",
    "packages": "need packages (libfaketime, curl, promtool, prometheus-client, schemathesis, x402, tooz, redis-py, pynvim, node)",
}
HOW = "LEASED_TEST_ALL=1 runs them, as root; .ci/run installs what they need first"
_counted = pytest.StashKey[Counter[str]]()


def pytest_report_header() -> str:
    if ALL:
        return "leased: every test is run, and a skipped one counts as failed (LEASED_TEST_ALL)"
    return f"leased: tests that need root or packages are left out; {HOW}"


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """An expression given by -m decides alone."""
    counted = config.stash[_counted] = Counter()
    if ALL or config.option.markexpr:
        return
    kept, dropped = [], []
    for item in items:
        needs = next((name for name in LEFT_OUT if item.get_closest_marker(name)), None)
        (dropped if needs else kept).append(item)
        if needs:
            counted[needs] += 1
    if dropped:
        config.hook.pytest_deselected(items=dropped)
        items[:] = kept


@pytest.hookimpl
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Every worker collects everything; the one that reports collects nothing, and is told."""
    output = getattr(session.config, "workeroutput", None)
    if output is not None:
        output["left_out"] = dict(session.config.stash.get(_counted, Counter()))


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    node.config.stash[_counted] = Counter(getattr(node, "workeroutput", {}).get("left_out", {}))


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    counted = config.stash.get(_counted, Counter())
    if counted:
        kinds = ", ".join(f"{count} that {LEFT_OUT[name]}" for name, count in counted.items())
        terminalreporter.write_line(f"leased: left out {kinds}; {HOW}", yellow=True)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    report: Any = yield
    return _unskipped(report)  # type: ignore[return-value]


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector) -> Iterator[None]:
    report: Any = yield
    return _unskipped(report)  # type: ignore[return-value]


def _unskipped(report: Any) -> Any:
    if ALL and report.skipped and not hasattr(report, "wasxfail"):
        report.outcome = "failed"
        report.longrepr = f"skipped, which counts as failed under LEASED_TEST_ALL: {report.longrepr}"
    return report
