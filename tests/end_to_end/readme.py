"""README.md as a test reads it: sections, fenced blocks, tables, and shell sessions with what they printed."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

from daemons import ROOT, environment

TEXT = (ROOT / "README.md").read_text()
_BETWEEN = "\x1e"  # printed before each command of a session


def section(title: str) -> str:
    """From its heading to the next one of the same or a higher level."""
    match = re.search(rf"^(#+) {re.escape(title)}\n(.*?)(?=^#{{1,6}} |\Z)", TEXT, re.MULTILINE | re.DOTALL)
    assert match is not None, f"README has no section {title!r}"
    level, start = len(match[1]), match.start(2)
    rest = re.compile(rf"^#{{1,{level}}} ", re.MULTILINE).search(_unfenced(TEXT), start)
    return TEXT[start : rest.start() if rest else len(TEXT)]


def prose(title: str) -> str:
    """A section as one line: a sentence is the same wherever it is broken."""
    return " ".join(section(title).split())


def anchors() -> set[str]:
    """What a link may lead to within README: its headings as GitHub makes addresses of them."""
    heads = re.findall(r"^#+ (.*)$", _unfenced(TEXT), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


def _unfenced(text: str) -> str:
    """The same length, with fenced blocks blanked: a `#` in them is no heading."""
    return re.sub(r"^```.*?^```$", lambda block: re.sub(r"[^\n]", " ", block[0]), text, flags=re.MULTILINE | re.DOTALL)


def blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def table(text: str, *heads: str) -> list[list[str]]:
    """The rows of the one table whose header begins with `heads`."""
    found = [
        rows
        for rows in re.findall(r"((?:^\|.*\|\n)+)", text, re.MULTILINE)
        if _cells(rows.splitlines()[0])[: len(heads)] == list(heads)
    ]
    assert len(found) == 1, f"{len(found)} tables begin with {heads}"
    return [_cells(row) for row in found[0].splitlines()[2:]]


def _cells(row: str) -> list[str]:
    return [cell.strip() for cell in row.strip().strip("|").split("|")]


class Step(NamedTuple):
    """One command of a session and what it printed."""

    command: str
    output: str


def session(text: str) -> list[Step]:
    """The `$ command` lines of all console blocks, each with the lines below it."""
    steps: list[Step] = []
    for block in blocks(text, "console"):
        for line in block.splitlines():
            if line.startswith("$ "):
                steps.append(Step(line[2:], ""))
            else:
                steps[-1] = steps[-1]._replace(output=f"{steps[-1].output}{line}\n")
    return steps


def played(steps: list[Step], home: Path, seconds: float = 60) -> list[Step]:
    """The same session, run by one bash in `home`.  What it started is ended with it."""
    script = "\n".join(f"printf '{_BETWEEN}'\n{step.command}" for step in steps)
    bash = subprocess.Popen(
        ["bash", "-c", script], cwd=home, env=shell_environment(home), stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
    )  # fmt: skip
    stuck = ""
    try:
        printed, _ = bash.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        stuck = f"not over after {seconds} s"
        os.killpg(bash.pid, signal.SIGKILL)
        printed, _ = bash.communicate()
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(bash.pid, signal.SIGKILL)
    outputs = printed.split(_BETWEEN)[1:]
    logs = "".join(path.read_text() for path in home.glob("*.log"))
    assert len(outputs) == len(steps) and not stuck, f"{stuck}\n{printed}\n{logs}"
    return [step._replace(output=output) for step, output in zip(steps, outputs, strict=True)]


def shell_environment(home: Path) -> dict[str, str]:
    """A stranger's: the scripts of this very installation first in PATH."""
    own = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "HOME": str(home), "LOGNAME": "ada", "TZ": "UTC"}
    return environment() | own


_VARYING = (
    (r"(?<=free pages: )\d+", "PAGES"),
    (r"\d{4}-\d\d-\d\dT[\d:.]+Z", "INSTANT"),
    (r"\b\d\d:\d\d:\d\d\b", "CLOCK"),
    (r"\b[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}\b", "UUID"),
    (r"\b(?=[0-9a-f]*[a-f])[0-9a-f]{32,40}\b", "HEX"),
    (r"[\w.-]+@[\w.-]+:\d+|agent-lock:[0-9a-f]{8}", "HOLDER"),
    (r"/\S*/(?=leased\.sock|state\b)", "PATH/"),
    (r"\b\d+(\.\d+)?(?= (s|min)\b)", "DURATION"),
    (r"\b\d+\.\d+(e-?\d+)?\b", "FRACTION"),
    (r"\b\d{15,19}\b", "NUMBER"),
)


def steady(text: str) -> str:
    """Without what differs from run to run: times, numbers drawn, paths."""
    for pattern, name in _VARYING:
        text = re.sub(pattern, name, text)
    return text
