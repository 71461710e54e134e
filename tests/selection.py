"""Which tests are run, and what a skipped one means.

The plain command runs what any user can run on any Linux host.  What needs root or packages is left out by name, and said at the
end and at the start; LEASED_TEST_ALL=1 runs everything and lets nothing be skipped: a test that cannot run there has failed.

In a tree whose hot path is compiled (contrib/compiled), tests marked `interpreted` are left out too, whatever else was asked for: they put
something of their own in the place of a method or a constant, and compiled code does not look there.  The ordinary run has them all.

With `-n 2 --dist loadfile` two files are under way at a time, and the tests of one file run in their order.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from importlib.machinery import ExtensionFileLoader
from importlib.util import find_spec
from typing import Any

import pytest

ALL = os.environ.get("LEASED_TEST_ALL", "") not in {"", "0"}
_RULES = find_spec("leased.rules")
COMPILED = _RULES is not None and isinstance(_RULES.loader, ExtensionFileLoader)
LEFT_OUT = {
    "root": "need root (mounts, namespaces, power cuts)",
    "packages": "need packages (libfaketime, curl, promtool, prometheus-client, schemathesis, x402, tooz, redis-py, pynvim, node)",
}
INTERPRETED = "interpreted"
HOW = "LEASED_TEST_ALL=1 runs them, as root; .ci/run installs what they need first"
_counted = pytest.StashKey[Counter[str]]()


def pytest_report_header() -> list[str]:
    told = [f"leased: tests that need root or packages are left out; {HOW}"]
    if ALL:
        told = ["leased: every test is run, and a skipped one counts as failed (LEASED_TEST_ALL)"]
    if COMPILED:
        told.append("leased: the hot path is compiled here: tests of what only interpreted code does are left out")
    return told


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """An expression given by -m decides alone, but not that compiled code can be what it is not."""
    counted = config.stash[_counted] = Counter()
    reasons = [] if ALL or config.option.markexpr else list(LEFT_OUT)
    reasons += [INTERPRETED] if COMPILED else []
    kept, dropped = [], []
    for item in items:
        needs = next((name for name in reasons if item.get_closest_marker(name)), None)
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
    kinds = ", ".join(f"{count} that {LEFT_OUT[name]}" for name, count in counted.items() if name in LEFT_OUT)
    if kinds:
        terminalreporter.write_line(f"leased: left out {kinds}; {HOW}", yellow=True)
    if counted[INTERPRETED]:
        terminalreporter.write_line(
            f"leased: left out {counted[INTERPRETED]} that are about interpreted code: the hot path is compiled here", yellow=True
        )


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
