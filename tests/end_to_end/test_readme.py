"""README.md says what is so: its commands run, its tables are the program's own, its bytes are the daemon's."""

from __future__ import annotations

import json
import re
import shutil
import socket
import subprocess
import sys
from datetime import datetime
from functools import cache
from pathlib import Path
from typing import Any

import msgpack
import pytest
import readme
from daemons import ROOT, Daemon, MakeDaemon

from leased import errors, exits, frames, log, metrics, rules
from leased.__main__ import _parser as leased_parser
from leased.agents import WRONG_KEYS_AT_ONCE, WRONG_KEYS_EACH_SECOND
from leased.client import command, shell
from leased.client.async_held import RELEASE_SECONDS
from leased.config import describe, parse
from leased.config_keys import KEYS
from leased.config_values import Wrong
from leased.doors.http import IDLE_SECONDS, MAX_AHEAD
from leased.doors.http_reading import MAX_BODY_BYTES, MAX_HEAD_BYTES
from leased.doors.http_routes import ROUTES
from leased.doors.problems import PHRASES
from leased.doors.proof import MAX_PROOF_SECONDS
from leased.fields import Field, plain
from leased.schema import OPERATIONS
from leased.state.leases import map_bytes_for
from leased.state.switch_records import MAX_TOLD
from leased.tariff import REFUSAL, Event
from leased.upstream import cloud_event

WIRE = readme.section("On the wire")


# ---- commands


def test_the_two_commands_are_one_line_each_and_name_what_is_there() -> None:
    (run,) = readme.blocks(readme.section("Run it"), "sh")
    (test,) = readme.blocks(readme.section("Test it"), "sh")
    venv = "python3 -m venv .venv && .venv/bin/pip install -q "
    assert run == f"{venv}. && .venv/bin/python contrib/demo/demo.py\n"
    assert test == f"{venv}-e '.[test]' && .venv/bin/python -m pytest -n 2 --dist loadfile\n"
    assert (ROOT / "contrib/demo/demo.py").is_file() and (ROOT / ".ci/run").stat().st_mode & 0o111


@pytest.mark.parametrize(("title", "least", "place"), [
    ("Sixty seconds", 15, "leased-tour"), ("Running a command under a lease", 7, "leased-shell"),
])  # fmt: skip
def test_every_line_of_the_tour_runs_and_prints_what_is_printed_there(title: str, least: int, place: str, tmp_path: Path) -> None:
    (tmp_path / "contrib").symlink_to(ROOT / "contrib")
    steps = readme.session(readme.section(title))
    assert len(steps) > least
    try:
        for step, now in zip(steps, readme.played(steps, tmp_path), strict=True):
            assert readme.steady(now.output) == readme.steady(step.output), step.command
    finally:
        shutil.rmtree(f"/dev/shm/{place}", ignore_errors=True)


@pytest.mark.packages  # curl
@pytest.mark.parametrize("title", ["Agent keys", "The whole path on one machine"])
def test_every_line_of_a_session_prints_what_is_printed_there(title: str, tmp_path: Path) -> None:
    (tmp_path / "contrib").symlink_to(ROOT / "contrib")
    steps = [step._replace(command=_on_free_ports(step.command)) for step in readme.session(readme.section(title))]
    assert len(steps) > 5
    try:
        for step, now in zip(steps, readme.played(steps, tmp_path), strict=True):
            assert readme.steady(now.output) == readme.steady(step.output), step.command
    finally:
        for folder in set(re.findall(r"/dev/shm/[a-z-]+", readme.section(title))):
            shutil.rmtree(folder, ignore_errors=True)


def _on_free_ports(text: str) -> str:
    """The addresses README names, at ports nobody has on this host."""
    return re.sub(r"(?<=127\.0\.0\.1:)\d+", lambda port: str(_free_port(port[0])), text)


@cache
def _free_port(named: str) -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


@pytest.mark.parametrize("title", ["Sixty seconds", "The one thing to get right", "The Python client"])
def test_every_python_example_prints_what_is_printed_there(title: str, daemon: Daemon, tmp_path: Path) -> None:
    sources, outputs = (readme.blocks(readme.section(title), language) for language in ("python", "text"))
    assert sources
    for source, printed in zip(sources, outputs, strict=True):
        run = subprocess.run(
            [sys.executable, "-c", source], env=readme.shell_environment(tmp_path) | {"LEASED_SOCKET": str(daemon.socket)},
            cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip
        assert (run.stdout, run.stderr, run.returncode) == (printed, "", 0)


def test_files_and_sections_that_are_linked_exist() -> None:
    links = re.findall(r"\]\(([^)]+)\)", readme.TEXT)
    assert links
    for link in links:
        path, _, anchor = link.partition("#")
        assert (ROOT / path).exists() and (not anchor or anchor in readme.anchors()), link


# ---- tables


def test_the_table_of_the_configuration_is_the_configuration() -> None:
    shown = dict(describe(parse("", source="-", root=True, environ={})))
    rows = {row[0]: row for row in readme.table(readme.section("Configuration"), "key", "default", "takes")}
    del rows['`namespaces."uid:N"`, `namespaces."gid:N"`']
    assert list(rows) == [f"`{name}`" for name in KEYS]
    for name, key in KEYS.items():
        with pytest.raises(Wrong) as wrong:
            key.metadata["read"](object())
        takes = str(wrong.value).removeprefix("must be ").removesuffix(", without quotes")
        assert rows[f"`{name}`"][1:3] == [f"`{shown[name]}`", takes]


def test_the_table_of_operations_is_the_schema() -> None:
    told: list[tuple[str, str, str, str]] = []
    for operation, field, takes, default, _ in readme.table(readme.section("Operations"), "operation", "field"):
        told.append((operation.strip("`") or told[-1][0], field, takes, default))
    expected = []
    for name, operation in OPERATIONS.items():
        fields = [field for field in operation.fields if field.name != "agent_key"]
        expected += [(name, *_told(field)) for field in fields] or [(name, "", "", "")]
    assert told == expected


def _told(field: Field) -> tuple[str, str, str]:
    low, high = plain(field.low), plain(field.high)
    takes = {
        "text": f"{low} to {high} bytes",
        "secret": f"{low} to {high} bytes",
        "number": f"{low:,} to {high:,}",
        "integer": f"{low} to {high}",
        "decimal": f"{low} to {high}, as a string",
        "choice": ", ".join(field.choices),
        "flag": "true, false",
        "hash": "40 hex digits",
        "instant": "RFC 3339",
    }[field.kind]
    default = json.dumps(field.default) if isinstance(field.default, bool) else str("" if field.default is None else field.default)
    return (f"**{field.name}**", takes, "") if field.required else (field.name, takes, default)


def test_the_table_of_exit_codes_is_the_programs() -> None:
    columns: dict[str, set[int]] = {"lease": set(), "leasenc": set(), "leased": set()}
    for code, *cells in readme.table(readme.section("Exit codes"), "code", "`lease`", "`leasenc`", "`leased`"):
        for name, cell in zip(columns, cells, strict=True):
            if cell:
                columns[name].add(int(code))
    assert columns["lease"] == {value for name, value in vars(shell).items() if name.startswith("EXIT_")}
    assert columns["leased"] == {value for name, value in vars(exits).items() if name.startswith("EXIT_")}
    source = (ROOT / "contrib/leasenc").read_text()
    spoken = re.search(r'^exit: (.*?)"""', source, re.MULTILINE | re.DOTALL)
    assert spoken is not None
    helped = {int(code) for code in re.findall(r"(?:^|; ?\n?)(\d+) [a-z]", spoken[1].split(".  JSON")[0])}
    assert columns["leasenc"] == helped | {130, 141}
    assert "return 130" in source and "return 141" in source


def test_the_verbs_are_the_programs() -> None:
    verbs = [re.match(r"`lease ([a-z]+)", row[0]) for row in readme.table(readme.section("The `lease` command"), "verb")]
    assert [verb[1] for verb in verbs if verb] == list(command.VERBS)
    text = readme.section("Backup, restore, check, upgrade")
    told = {re.match(r"`leased ([a-z-]+)", row[0])[1] for row in readme.table(text, "command")}  # type: ignore[index]
    (choices,) = [action.choices for action in leased_parser()._actions if action.choices]
    assert told | {"serve"} == set(choices)


def test_every_option_named_for_a_verb_is_one() -> None:
    for name, text in readme.table(readme.section("The `lease` command"), "verb"):
        verb = command._find(re.match(r"`lease ([a-z]+)", name)[1])  # type: ignore[index]
        known = {option.name for option in (*verb.options, *shell.COMMON)}
        own = re.sub(r"`lease .*?`", "", text)  # another verb's options are its own
        assert set(re.findall(r"--[a-z-]+", own)) <= known, name


def test_the_reasons_and_codes_are_the_programs() -> None:
    sources = "\n".join(path.read_text() for path in (ROOT / "leased").rglob("*.py") if "client" not in path.parts)
    told = {row[0].strip("`") for row in readme.table(WIRE, "reason of null")}
    raised = set(re.findall(r'\bUnknown\("([a-z_]+)"', sources)) | set(re.findall(r'(?:closed|shut) ?= ?"([a-z_]+)"', sources))
    assert told == raised | {"ledger_slow"} and '"ledger_slow"' in sources
    refused = {row[0].strip("`") for row in readme.table(WIRE, "reason of a refusal")}
    decided = set(re.findall(r'"(held|same_label|wrong_[a-z]+|lapsed|spent)"', Path(rules.__file__).read_text()))
    assert refused == decided
    assert {row[0].strip("`") for row in readme.table(WIRE, "error code")} == errors.CODES


def test_the_sizes_named_are_those_of_the_store() -> None:
    for leases, mebibytes in ((100_000, 69), (1_000_000, 618)):
        assert map_bytes_for(leases) // (1 << 20) == mebibytes
        assert f"{mebibytes} MiB" in readme.prose("Running it")


def test_the_bounds_named_are_those_of_the_code() -> None:
    spent = parse("", source="-", root=True, environ={}).limits.max_spent_request_ids
    for bound, title in (
        (f"more than {frames.MAX_VALUES:,} values", "On the wire"),
        (f"nested deeper than {frames.MAX_DEPTH}", "On the wire"),
        (f"above {frames.MAX_MESSAGE_BYTES:,} bytes", "On the wire"),
        (f"Within {MAX_PROOF_SECONDS:g} s", "On the wire"),
        (f"at most {MAX_TOLD:,}", "Replies"),
        (f"at most {MAX_TOLD:,} leases are told", "Waiting, binding, switches, watching"),
        (f"at most {RELEASE_SECONDS:g} s, and only where the daemon", "The Python client"),
        (f"{spent // 60 // 100 * 100:,} early releases", "What is promised, and where it ends"),
        (f"for {IDLE_SECONDS:g} s without a request", "HTTP"),
        (f"to {MAX_AHEAD} pipelined", "HTTP"),
        (f"above {MAX_BODY_BYTES >> 10} KiB", "HTTP"),
        (f"above {MAX_HEAD_BYTES >> 10} KiB", "HTTP"),
        (f"{WRONG_KEYS_AT_ONCE} wrong keys at once and {WRONG_KEYS_EACH_SECOND:g} a second", "Agent keys"),
    ):  # fmt: skip
        assert bound in readme.prose(title)


def test_the_paths_of_http_are_the_doors() -> None:
    told = {}
    for path, text in readme.table(readme.section("HTTP"), "path", "operation"):
        operation = re.match(r"`(\w+)`", text)
        told[path.strip("`")] = operation[1] if operation else ""
    assert told == {f"{route.method} {path}": route.operation for path, route in ROUTES.items()}
    statuses = set(map(int, re.findall(r"\b[345]\d\d\b", readme.section("HTTP"))))
    assert statuses == {status for status in PHRASES if status != 200}


def test_the_metrics_told_are_those_there_are() -> None:
    source = Path(metrics.__file__).read_text()
    made = re.findall(r'(counter|gauge|histogram|\w+MetricFamily)\(\s*"(leased_\w+)"', source)
    there = {f"{name}_total" if kind in {"counter", "CounterMetricFamily"} else name for kind, name in made}
    told = [
        name for row in readme.table(readme.section("Metrics and alerts"), "metric") for name in re.findall(r"leased_\w+", row[0])
    ]
    assert sorted(told) == sorted(there)
    rules = (ROOT / "contrib/prometheus/leased.rules.yml").read_text()
    assert f"{rules.count('- alert:')} alert rules" in readme.prose("Metrics and alerts")


def test_the_events_told_are_in_the_list() -> None:
    told = set(
        re.findall(r"`([a-z]+\.[a-z_]+)`", "".join(row[0] for row in readme.table(readme.section("Metrics and alerts"), "event")))
    )
    assert len(told) > 15 and told <= set(log.EVENTS)


def test_the_billing_event_shown_has_the_form_of_one() -> None:
    (shown,) = map(json.loads, readme.blocks(readme.section("Upstream"), "json"))
    amount = int(shown["data"]["amount"].removeprefix("0.") + "000")
    event = Event(
        shown["id"], REFUSAL, "local", amount, "USDC", "…", "…", datetime.fromisoformat(shown["time"]).timestamp()
    )  # fmt: skip
    assert cloud_event(event, shown["source"]) == shown


# ---- bytes


def _pairs(language: str) -> list[list[str]]:
    """The `>` and `<` halves of each exchange; a line without either goes on."""
    return [re.split(r"^[<>] ", block, flags=re.MULTILINE)[1:] for block in readme.blocks(WIRE, language)]


def test_the_bytes_shown_are_the_bytes_spoken(daemon: Daemon) -> None:
    exchanges = list(zip(_pairs("hex"), _pairs("json"), strict=True))
    assert len(exchanges) == 2
    for (asked, answered), (meant, told) in exchanges:
        request, response = bytes.fromhex(asked), bytes.fromhex(answered)
        assert msgpack.unpackb(request) == json.loads(meant)
        assert msgpack.unpackb(response) == json.loads(told)
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(20)
            connection.connect(str(daemon.socket))
            connection.sendall(request)
            received = b""
            while len(received) < len(response):
                received += connection.recv(65536)
        assert received == response


def test_the_http_exchange_shown_is_the_one_spoken(daemon: Daemon) -> None:
    (block,) = readme.blocks(readme.section("HTTP"), "http")
    asked, answered = ([line[2:] for line in block.splitlines() if line[0] == mark] for mark in "><")
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(20)
        connection.connect(str(daemon.socket))
        connection.sendall("\r\n".join(asked).encode())
        connection.shutdown(socket.SHUT_WR)
        received = b"".join(iter(lambda: connection.recv(65536), b"")).decode()
    head, _, body = received.partition("\r\n\r\n")
    assert [head.splitlines()[0], body] == answered


def _names(operation: str) -> list[str]:
    rows = [row[1] for row in readme.table(WIRE, "operation", "result") if row[0] == operation]
    return re.findall(r"`([a-z_]+)`", rows[0])


def test_the_replies_have_the_fields_named(make_daemon: MakeDaemon) -> None:
    running = make_daemon().start()
    with running.rpc() as rpc:
        grant = rpc.call("lease", key="k", holder="a", scope="s")
        renewal = rpc.call("renew", key="k", holder="a", fence=grant["fence"])
        for granted in (grant, renewal):
            assert sorted(granted) == sorted(_names("`lease`, `renew`: granted or renewed"))
        refusal = rpc.call("lease", key="k", holder="b")
        assert sorted(refusal) == sorted(_names("`lease`, `renew`: refused"))
        check: dict[str, Any] = rpc.call("check", key="k", generation=grant["generation"])
        assert sorted(check) == sorted(_names("`check`"))
        assert sorted(rpc.call("info")) == sorted(_names("`info`"))
        assert sorted(rpc.call("heartbeat", scope="s", expect_within_seconds=60)) == sorted(_names("`heartbeat`"))
        entry = rpc.call("list", all=True)["leases"][0]
        packet = rpc.call("resume_packet", scope="s")
        assert {"leases", "cursor", *entry} <= {*_names("`list`"), "all"} | {"leases"}
        assert set(packet) | set(packet["switch"]) - set(_names("`heartbeat`")) <= set(_names("`resume_packet`"))
        with running.rpc() as watcher:
            assert sorted(watcher.call("watch")) == ["seq", "watching"]
            refused = rpc.call("release", key="k", fence=str(2**53))
            released = rpc.call("release", key="k", fence=grant["fence"])
            assert {*refused, *released} <= set(_names("`release`"))
            kind, name, (event,) = watcher.receive()
            assert (kind, name) == (2, "event") and set(event) <= set(_names("`watch`"))
            assert watcher.call("unwatch") == {"watching": False}
        rpc.call("lease", key="k", holder="a")
        assert {*rpc.call("revoke", key="k", reason="x")} <= set(_names("`revoke`"))
