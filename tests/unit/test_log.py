"""What a log line looks like, and what never stands in one."""

from __future__ import annotations

import ast
import io
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import structlog
from structlog.testing import capture_logs

from leased import log
from leased.errors import StoreError

PACKAGE = Path(__file__).resolve().parents[2] / "leased"
FENCE = "9151314442816847872"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def configuration_given_back() -> Iterator[None]:
    yield
    structlog.reset_defaults()


def json_lines(stream: io.StringIO) -> list[dict[str, object]]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def journal_of(path: Path) -> dict[str, str]:
    status = path.stat()
    return {"JOURNAL_STREAM": f"{status.st_dev}:{status.st_ino}"}


def test_names_and_meanings_are_one_frozen_list() -> None:
    assert {"daemon.ready", "floor.lost", "lease.revoked", "scope.switch_missed", "log.unknown_event"} <= set(log.EVENTS)
    assert [name for name in log.EVENTS if not re.fullmatch(r"[a-z]+\.[a-z_]+", name)] == []
    assert [name for name, meaning in log.EVENTS.items() if len(meaning) < 15 or "\n" in meaning] == []
    with pytest.raises(TypeError):
        log.EVENTS["a.b"] = "c"  # type: ignore[index]


def test_json_is_the_form_where_nobody_looks() -> None:
    stream = io.StringIO()
    assert log.configure(stream=stream, environ={}) == "json"
    log.get_logger().info("lease.revoked", key_hash="ab12", generation=7)
    (line,) = json_lines(stream)
    stamp = line.pop("timestamp")
    assert line == {"event": "lease.revoked", "level": "info", "key_hash": "ab12", "generation": 7}
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}Z", str(stamp))


def test_a_terminal_gets_text_with_colours_unless_told_not_to() -> None:
    coloured, plain = Terminal(), Terminal()
    assert log.configure(stream=coloured, environ={"TERM": "xterm"}) == "console"
    log.get_logger().info("daemon.ready", clients=3)
    assert "\x1b[" in coloured.getvalue()
    log.configure(stream=plain, environ={"TERM": "xterm", "NO_COLOR": "1"})
    log.get_logger().info("daemon.ready", clients=3)
    assert re.fullmatch(r"\S+Z \[info     \] daemon\.ready           clients=3\n", plain.getvalue())


@pytest.mark.parametrize(
    ("method", "level", "priority"), [("debug", "debug", 7), ("info", "info", 6), ("warning", "info", 4), ("error", "error", 3)]
)
def test_the_journal_gets_priorities_and_no_stamp(tmp_path: Path, method: str, level: str, priority: int) -> None:
    path = tmp_path / "stderr"
    with path.open("w") as stream:
        assert log.configure(level, stream=stream, environ=journal_of(path)) == "journal"
        getattr(log.get_logger(), method)("peer.limit", uid=1000, limit="max connections", paused=True, holder=None)
    assert path.read_text() == f'<{priority}>peer.limit uid=1000 limit="max connections" paused=true holder=null\n'


def test_every_line_of_a_traceback_has_the_priority(tmp_path: Path) -> None:
    path = tmp_path / "stderr"
    with path.open("w") as stream:
        log.configure(stream=stream, environ=journal_of(path))
        try:
            raise OSError(28, "No space left\non device")
        except OSError:
            log.get_logger().exception("store.flush_failed")
    lines = path.read_text().splitlines()
    assert lines[0] == "<3>store.flush_failed"
    assert lines[1] == "<3>Traceback (most recent call last):"
    assert all(line.startswith("<3>") for line in lines)
    assert lines[-1] == "<3>OSError: [Errno 28] No space left\\non device"


def test_json_in_the_journal_keeps_its_priority(tmp_path: Path) -> None:
    path = tmp_path / "stderr"
    with path.open("w") as stream:
        assert log.configure(format="json", stream=stream, environ=journal_of(path)) == "json"
        log.get_logger().warning("loop.late", seconds=0.3)
    assert path.read_text().startswith("<4>{")
    assert json.loads(path.read_text()[3:])["seconds"] == 0.3


def test_a_redirected_stderr_is_not_the_journal(tmp_path: Path) -> None:
    journal, other = tmp_path / "journal", tmp_path / "other"
    journal.touch()
    with other.open("w") as stream:
        assert not log.is_journal(stream, journal_of(journal))
        assert log.is_journal(stream, journal_of(other))
    assert not log.is_journal(io.StringIO(), journal_of(journal))


def test_levels_below_the_configured_one_are_silent() -> None:
    stream = io.StringIO()
    log.configure("warning", stream=stream, environ={})
    logger = log.get_logger()
    logger.debug("loop.late")
    logger.info("loop.late")
    logger.warning("loop.late")
    assert [line["level"] for line in json_lines(stream)] == ["warning"]


def test_an_unknown_name_raises_where_tests_run_and_is_renamed_where_they_do_not() -> None:
    stream = io.StringIO()
    log.configure(stream=stream, environ={}, strict=True)
    with pytest.raises(log.UnknownEvent, match=r"'lease\.revokd' is not in leased\.log\.EVENTS"):
        log.get_logger().info("lease.revokd")
    assert stream.getvalue() == ""
    log.configure(stream=stream, environ={})
    log.get_logger().info("lease.revokd", generation=3)
    log.get_logger().info(f"lost the fence {FENCE}")
    first, second = json_lines(stream)
    assert (first["event"], first["name"], first["generation"]) == ("log.unknown_event", "lease.revokd", 3)
    assert (second["event"], second["name"]) == ("log.unknown_event", "(withheld)")


class Asked(NamedTuple):
    key: str
    fence: int


@pytest.mark.parametrize("form", ["json", "console", "journal"])
def test_no_form_shows_a_credential_or_a_key(tmp_path: Path, form: str) -> None:
    path = tmp_path / "stderr"
    with path.open("w") as stream:
        environ = journal_of(path) if form == "journal" else {}
        assert log.configure(format="auto" if form == "journal" else form, stream=stream, environ=environ) == form
        named = dict.fromkeys(log.CREDENTIALS, FENCE)
        nested = {"fields": [{"fence": FENCE, "uid": 7}]}
        log.get_logger().error("peer.limit", asked=Asked("k", int(FENCE)), reply=nested, pair=(Asked("k", int(FENCE)),), **named)
    text = path.read_text()
    assert FENCE not in text
    assert "(withheld)" in text
    assert "(withheld Asked)" in text
    assert {"fence", "request_id", "agent_key", "secret", "key"} <= log.CREDENTIALS


def test_what_is_safe_is_shown_as_it_is() -> None:
    stream = io.StringIO()
    log.configure(stream=stream, environ={})
    log.get_logger().info(
        "record.set_aside", key_hash=b"\x01\xff", path=Path("/run/x"), error=StoreError("bad"), counts=(1, 2.5, None, True)
    )
    (line,) = json_lines(stream)
    assert line["key_hash"] == "01ff"
    assert line["path"] == "/run/x"
    assert line["error"] == "StoreError: bad"
    assert line["counts"] == [1, 2.5, None, True]


@pytest.mark.parametrize("form", ["console", "journal"])
def test_a_label_cannot_forge_a_line_or_drive_a_terminal(tmp_path: Path, form: str) -> None:
    path = tmp_path / "stderr"
    with path.open("w") as stream:
        log.configure(
            format="auto" if form == "journal" else form, stream=stream, environ=journal_of(path) if form == "journal" else {}
        )
        log.get_logger().info("lease.revoked", held_by="a\n<0>daemon.stopped\x1b[2J\u2028")
    text = path.read_text()
    assert len(text.splitlines()) == 1
    assert "\x1b" not in text
    assert "a\\n<0>daemon.stopped" in text


def fail(fence: str) -> None:
    """Raises with a fence in every place an exception has for it."""
    try:
        try:
            dict[str, int]()[fence]
        except KeyError as error:
            raise StoreError("no room") from error
    except StoreError as error:
        raise ExceptionGroup(f"group {fence}", [error, ValueError(fence)]) from None


@pytest.mark.parametrize("form", ["json", "console", "journal"])
def test_a_traceback_shows_frames_and_known_messages_only(tmp_path: Path, form: str) -> None:
    path = tmp_path / "stderr"
    with path.open("w") as stream:
        environ = {"JOURNAL_STREAM": journal_of(path)["JOURNAL_STREAM"] if form == "journal" else ""}
        assert log.configure(format="auto" if form == "journal" else form, stream=stream, environ=environ) == form
        try:
            fail(str(int(FENCE)))
        except ExceptionGroup as error:
            log.get_logger().exception("lane.failed", error=error)
            log.get_logger().error("lane.failed", exc_info=error)
            log.get_logger().error("lane.failed", exc_info=(type(error), error, error.__traceback__))
    text = path.read_text()
    assert FENCE not in text
    for said in (
        "dict[str, int]()[fence]",
        "KeyError: (withheld)",
        "StoreError: no room",
        "ValueError: (withheld)",
        "ExceptionGroup: (withheld)",
    ):
        assert text.count(said) >= 3, said


def test_a_stream_that_fails_loses_the_line_only() -> None:
    full = Path("/dev/full").open("w")  # noqa: SIM115  # closing it fails too
    log.configure(stream=full, environ={})
    log.get_logger().error("store.full")
    with pytest.raises(OSError, match="No space left"):
        full.close()
    log.get_logger().error("store.full")
    stream = io.StringIO()
    log.configure(stream=stream, environ={})
    log.get_logger().error("store.full")
    assert len(json_lines(stream)) == 1


def test_a_logger_taken_early_follows_and_can_be_captured() -> None:
    logger = log.get_logger()
    stream = io.StringIO()
    log.configure(stream=stream, environ={})
    logger.info("daemon.ready")
    with capture_logs() as captured:
        logger.info("daemon.stopped", signal="TERM")
    assert captured == [{"event": "daemon.stopped", "log_level": "info", "signal": "TERM"}]
    assert [line["event"] for line in json_lines(stream)] == ["daemon.ready"]


def logged(source: str) -> Iterator[tuple[str, list[str]]]:
    """The literal event names a module logs, each with its field names."""
    for node in ast.walk(ast.parse(source)):
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
            continue
        of = node.func.value
        name = of.id if isinstance(of, ast.Name) else of.attr if isinstance(of, ast.Attribute) else ""
        methods = {"debug", "info", "warning", "error", "exception", "critical"}
        if name.strip("_") in ("log", "logger") and node.func.attr in methods:
            event = node.args[0] if node.args else None
            text = event.value if isinstance(event, ast.Constant) else "(no literal name)"
            yield str(text), [word.arg or "**" for word in node.keywords]


def test_the_package_logs_only_names_of_the_list_and_no_credentials() -> None:
    wrong = []
    for path in sorted(PACKAGE.rglob("*.py")):
        for event, names in logged(path.read_text()):
            wrong += [f"{path.name}: {event} is not in leased.log.EVENTS"] if event not in log.EVENTS else []
            wrong += [f"{path.name}: {event} logs {name}" for name in names if name in log.CREDENTIALS]
    assert wrong == []


def test_the_search_for_logged_names_finds_them() -> None:
    source = 'self._log.info("a.b", fence=1)\nlog.error(f"x{1}")\nmath.log(3)\nother.info("c.d")'
    assert list(logged(source)) == [("a.b", ["fence"]), ("(no literal name)", [])]
