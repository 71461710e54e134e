"""`lease top`: what is asked, and the table that comes of it; the live screen drawn into memory."""

from __future__ import annotations

import io
import json
import re
import subprocess
import sys
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fake_daemon import Asked, FakeDaemon

from leased.client import top_table
from leased.client.command import main

INFO: dict[str, Any] = {
    "name": "leased", "version": "0.1.0", "namespace": "local", "uptime_seconds": 90.0, "leases": 3, "waiting": 2,
    "store": {"state": "ok"}, "counts": {"granted": 10, "renewed": 0, "released": 0, "lapsed": 0, "refused": 0},
}  # fmt: skip


def lease(key: str | None, generation: int, left: float, **more: Any) -> dict[str, Any]:
    return {
        "key": key,
        "key_hash": "ab" * 20,
        "holder": "h",
        "scope": None,
        "generation": generation,
        "expires_in_seconds": left,
        "bind": "none",
    } | more


LEASES = [lease("old", 1, 50.0), lease("next\x1b[2J", 2, 3.0, scope="night", bind="process"), lease(None, 3, 20.0)]


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[FakeDaemon]:
    def answer(asked: Asked) -> Any:
        if asked.method == "info":
            return INFO
        if asked.method == "list":
            return {"leases": LEASES, "cursor": None}
        waiting = 2 if asked.params["key"] == "old" else 0
        return {"held": True, "key": asked.params["key"], "held_by": "h", "generation": 1, "waiting": waiting}

    daemon = FakeDaemon(tmp_path / "s", answer)
    yield daemon
    daemon.stop()


@pytest.mark.parametrize(
    ("words", "first"), [((), "next"), (("--sort", "waiting"), "old"), (("--sort", "oldest"), "old"), (("--sort", "lapse"), "next")]
)
def test_the_table_once(daemon: FakeDaemon, capsys: pytest.CaptureFixture[str], words: tuple[str, ...], first: str) -> None:
    assert main(["top", "--once", "--socket", daemon.path, *words]) == 0
    heading, _, columns, *rows = capsys.readouterr().out.splitlines()
    assert heading == "leased 0.1.0  namespace local  up 90 s  3 leases  2 waiting"
    assert columns.split() == list(top_table.COLUMNS)
    assert len(rows) == 3 and rows[0].startswith(first)
    table = {row.split()[0]: row.split() for row in rows}
    assert table["old"][-1] == "2" and table["next\\x1b[2J"][-2:] == ["night", "process"] and table["#" + "ab" * 20][-1] == "?"


def test_a_limit_hides_and_says_so(daemon: FakeDaemon, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["top", "--once", "--socket", daemon.path, "--limit", "1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 5 and lines[3].startswith("next") and lines[4] == "and 2 more"
    assert [asked.params["key"] for asked in daemon.asked if asked.method == "check"] == ["next\x1b[2J"]


def test_json_is_one_object(daemon: FakeDaemon, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["top", "--once", "--json", "--socket", daemon.path]) == 0
    seen = json.loads(capsys.readouterr().out)
    assert seen["total"] == 3 and seen["daemon"]["version"] == "0.1.0"
    assert [each["waiting"] for each in seen["leases"]] == [0, None, 2]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ((), "needs a terminal; --once"),
        (("--once", "--limit", "0"), "--limit is 1 to 200"),
        (("--once", "--every", "0.01"), "at least 0.2s"),
        (("--once", "--sort", "size"), "one of lapse, waiting, oldest"),
    ],
)
def test_wrong_usage(daemon: FakeDaemon, capsys: pytest.CaptureFixture[str], words: tuple[str, ...], told: str) -> None:
    assert main(["top", "--socket", daemon.path, *words]) == 64
    assert told in capsys.readouterr().err and daemon.asked == []


def test_counters_become_rates() -> None:
    later = {"daemon": {"counts": {**INFO["counts"], "granted": 30, "refused": 5}}}
    told = top_table.contention({"daemon": INFO}, later, 2.0)
    assert told == "each second: granted 10.0, renewed 0.0, released 0.0, lapsed 0.0, refused 2.5"
    assert (
        top_table.contention(None, later, 2.0) == ""
        and top_table.contention({"daemon": INFO}, {"daemon": {"counts": None}}, 2.0) == ""
    )


def test_the_screen_fits_its_terminal() -> None:
    from rich.console import Console

    from leased.client.top_screen import draw

    console = Console(file=io.StringIO(), width=100, height=12, force_terminal=False)
    many = [dict(lease(f"key-{at}", at, 50.0), waiting=at % 2) for at in range(50)]
    console.print(draw({"daemon": INFO, "total": 50, "leases": many}, "rates", deque(["event one"], maxlen=6), 12))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    lines = text.splitlines()
    assert len(lines) <= 12 and lines[0].startswith("leased 0.1.0") and "rates" in lines[1] and "event one" in lines[-1]
    assert re.search(r"key-0\s+h\s+0\s+50 s", text) and "and 48 more" in text


def test_without_rich_it_says_what_to_install() -> None:
    code = (
        "import sys; sys.modules['rich'] = None; sys.stdout.isatty = lambda: True; "
        "from leased.client.command import main; sys.exit(main(['top', '--socket', '/nowhere']))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert run.returncode == 69 and "pip install '.[top]'" in run.stderr and "Traceback" not in run.stderr
