"""The configuration: defaults, precedence, every bound from both sides, and errors that tell what to do."""

from __future__ import annotations

import re
from dataclasses import FrozenInstanceError
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from leased.config import Address, Config, describe, load, parse
from leased.config_keys import KEYS, TABLES
from leased.config_values import amount_text
from leased.errors import ConfigError
from leased.paths import Paths, default_paths, default_socket

HOME = {"HOME": "/home/ann", "XDG_RUNTIME_DIR": "/run/user/1000"}
SERVICE = {"STATE_DIRECTORY": "/var/lib/leased", "RUNTIME_DIRECTORY": "/run/leased-state"}
ACCOUNT = "0x833589fCD6eDb6E08f4c7C32D4f71b54bdA02913"
FILE = "/etc/leased/leased.toml"


def read(text: str = "", *, root: bool = True, environ: dict[str, str] | None = None, **options: Any) -> Config:
    return parse(text, source=FILE, root=root, environ=environ or {}, **options)


def faults(text: str, **options: Any) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        read(text, **options)
    return str(caught.value).splitlines()


def fault(text: str, **options: Any) -> str:
    (line,) = faults(text, **options)
    return line


# -- defaults and precedence


def test_an_empty_file_is_the_defaults() -> None:
    config = read()
    assert (config.socket, config.state_dir, config.runtime_dir) == (
        Path("/run/leased/leased.sock"),
        Path("/var/lib/leased"),
        Path("/run/leased-state"),
    )
    assert (config.wait_out_seconds, config.max_leases, config.socket_mode, config.source) == (60.0, 100_000, 0o600, FILE)
    assert config.http.listen == ()
    assert (config.billing.enabled, config.billing.refusal, config.billing.agent_lock_call) == (False, 2_000, 1_000)
    assert (config.limits.max_connections, config.limits.message_seconds, config.upstream.batch_events) == (1024, 10.0, 100)
    with pytest.raises(FrozenInstanceError):
        config.max_leases = 1  # type: ignore[misc]
    with pytest.raises(TypeError):
        config.namespaces.uids[1] = "x"  # type: ignore[index]


@pytest.mark.parametrize(
    ("root", "environ", "expected"),
    [
        (True, {}, Paths(FILE, "/run/leased/leased.sock", "/var/lib/leased", "/run/leased-state")),
        (True, HOME, Paths(FILE, "/run/leased/leased.sock", "/var/lib/leased", "/run/leased-state")),
        (False, SERVICE, Paths(FILE, "/run/leased/leased.sock", "/var/lib/leased", "/run/leased-state")),
        (
            False,
            HOME,
            Paths(
                "/home/ann/.config/leased/leased.toml",
                "/run/user/1000/leased/leased.sock",
                "/home/ann/.local/state/leased",
                "/run/user/1000/leased-state",
            ),
        ),
        (
            False,
            {"XDG_RUNTIME_DIR": "/r", "XDG_CONFIG_HOME": "/c/", "XDG_STATE_HOME": "/s"},
            Paths("/c/leased/leased.toml", "/r/leased/leased.sock", "/s/leased", "/r/leased-state"),
        ),
        (False, {}, Paths(None, None, None, None)),
        (False, {"XDG_RUNTIME_DIR": "relative", "HOME": ""}, Paths(None, None, None, None)),
        (
            False,
            {**HOME, "RUNTIME_DIRECTORY": "/run/user/1000/leased:/run/user/1000/leased-state"},
            default_paths(False, HOME),
        ),
        (False, {**HOME, "STATE_DIRECTORY": "/var/lib/runner", "RUNTIME_DIRECTORY": "/run/runner"}, default_paths(False, HOME)),
        (
            False,
            {"STATE_DIRECTORY": "/var/lib/leased/blue"},
            Paths(FILE, "/run/leased/leased.sock", "/var/lib/leased/blue", "/run/leased-state"),
        ),
    ],
)
def test_default_paths(root: bool, environ: dict[str, str], expected: Paths) -> None:
    assert default_paths(root, environ) == expected


def test_a_client_finds_the_same_socket() -> None:
    assert default_socket(False, HOME) == str(read(root=False, environ=HOME).socket)
    assert default_socket(False, {**HOME, "LEASED_SOCKET": "/x.sock"}) == "/x.sock"
    assert default_socket(False, {}) is None


def test_the_socket_of_the_command_line_beats_the_environment_which_beats_the_file() -> None:
    text, environ = 'socket = "/file.sock"', {"LEASED_SOCKET": "/environment.sock"}
    assert read(text).socket == Path("/file.sock")
    assert read(text, environ={"LEASED_SOCKET": ""}).socket == Path("/file.sock")
    assert read(text, environ=environ).socket == Path("/environment.sock")
    assert read(text, environ=environ, socket="/option.sock").socket == Path("/option.sock")


def test_directories_of_the_command_line_beat_the_file_which_beats_systemd() -> None:
    environ = {"STATE_DIRECTORY": "/var/lib/leased-blue", "RUNTIME_DIRECTORY": "/run/leased-state-blue"}
    assert read(environ=environ).state_dir == Path("/var/lib/leased-blue")
    assert read(environ=environ).runtime_dir == Path("/run/leased-state-blue")
    assert read('state_dir = "/a"\nruntime_dir = "/b"', environ=environ).state_dir == Path("/a")
    config = read('state_dir = "/a"\nruntime_dir = "/b"', state_dir="/c", runtime_dir="/d")
    assert (config.state_dir, config.runtime_dir) == (Path("/c"), Path("/d"))


def test_http_of_the_command_line_replaces_the_list() -> None:
    assert read('[http]\nlisten = ["127.0.0.1:1", "127.0.0.1:2"]', http="[::1]:3").http.listen == (Address("::1", 3),)


def test_what_nothing_tells_is_asked_for() -> None:
    assert faults("", root=False) == [
        f"{FILE}: socket is not set, and $XDG_RUNTIME_DIR is not either: give --socket or set the key socket",
        f"{FILE}: state_dir is not set, and $HOME is not either: give --state-dir or set the key state_dir",
        f"{FILE}: runtime_dir is not set, and $XDG_RUNTIME_DIR is not either: give --runtime-dir or set the key runtime_dir",
    ]
    assert read(root=False, socket="/s", state_dir="/a", runtime_dir="/b").socket == Path("/s")


def test_an_error_names_the_option_or_variable_it_came_by() -> None:
    assert fault("", socket="x.sock").startswith('--socket = "x.sock" must be an absolute path')
    assert fault("", state_dir="x").startswith('--state-dir = "x" must be an absolute path')
    assert fault("", http="localhost").startswith('--http = "localhost" must be "ADDR:PORT"')
    assert fault("", environ={"LEASED_SOCKET": "~/s"}).startswith('$LEASED_SOCKET = "~/s" must be an absolute path')
    deep = {**HOME, "XDG_RUNTIME_DIR": "/" + "d" * 100}
    assert fault("", root=False, environ=deep).startswith(f'{FILE}: the default of socket = "/ddd')


# -- every key, from both sides of its bounds

GOOD: list[tuple[str, str, Any]] = [
    ("socket", '"/' + "s" * 106 + '"', Path("/" + "s" * 106)),
    ("socket_mode", '"0660"', 0o660),
    ("socket_mode", '"666"', 0o666),
    ("socket_group", '"leased-clients"', "leased-clients"),
    ("operator_group", '"1000"', "1000"),
    ("wait_out_seconds", "0", 0.0),
    ("wait_out_seconds", "3600", 3600.0),
    ("wait_out_seconds", "2.5", 2.5),
    ("max_leases", "10_000_000", 10_000_000),
    ("http.listen", '"127.0.0.1:8765"', (Address("127.0.0.1", 8765),)),
    ("http.listen", '["[::1]:0", "0.0.0.0:65535"]', (Address("::1", 0), Address("0.0.0.0", 65535))),
    ("http.listen", '["8765"]', (Address("127.0.0.1", 8765),)),
    ("http.listen", '"localhost:80"', (Address("127.0.0.1", 80),)),
    ("http.listen", "[]", ()),
    ("namespaces.per_uid", "true", True),
    ("limits.max_connections", "100_000", 100_000),
    ("limits.max_waiters_per_namespace", "0", 0),
    ("limits.message_seconds", "0.1", 0.1),
    ("limits.requests_per_second_per_uid", "1_000_000", 1_000_000),
    ("billing.enabled", "true", True),
    ("billing.currency", '"EURC"', "EURC"),
    ("billing.refusal", '"0"', 0),
    ("billing.refusal", '"1000"', 1_000_000_000),
    ("billing.refusal", '"0.000001"', 1),
    ("billing.agent_lock_call", '"0.30"', 300_000),
    ("billing.outbox_max_events", "1", 1),
    ("upstream.url", '"https://b.example/events?x=1"', "https://b.example/events?x=1"),
    ("upstream.url", '"http://127.0.0.1:8080/e"', "http://127.0.0.1:8080/e"),
    ("upstream.url", '"http://[::1]:8080"', "http://[::1]:8080"),
    ("upstream.token_file", '"/run/credentials/leased.service/upstream"', Path("/run/credentials/leased.service/upstream")),
    ("upstream.batch_events", "1", 1),
    ("upstream.timeout_seconds", "300", 300.0),
    ("upstream.proxy", '"http://proxy.example:3128"', "http://proxy.example:3128"),
    ("upstream.ca_file", '"/etc/ssl/ca.pem"', Path("/etc/ssl/ca.pem")),
    ("x402.networks", '"eip155:8453"', ("eip155:8453",)),
    ("x402.assets", f'["{ACCOUNT}"]', (ACCOUNT.lower(),)),
    ("x402.max_per_day", '"1000000"', 10**12),
    ("log.level", '"debug"', "debug"),
    ("log.format", '"json"', "json"),
]

BAD: list[tuple[str, str, str]] = [
    ("socket", '"/' + "s" * 107 + '"', "has 108 bytes and must have at most 107"),
    ("socket", '"/' + "ä" * 54 + '"', "has 109 bytes"),
    ("socket", '"@abstract"', "absolute path"),
    ("state_dir", '"~/leased"', "absolute path"),
    ("runtime_dir", '"/a\\u0000b"', "absolute path"),
    ("socket_mode", "660", '= 660 must be an octal mode in quotes such as "0660"'),
    ("socket_mode", "0o660", "= 432 must be an octal mode in quotes"),
    ("socket_mode", '"0777"', "octal mode"),
    ("socket_mode", '"0460"', "octal mode"),
    ("socket_mode", '"4660"', "octal mode"),
    ("socket_group", '""', "group"),
    ("socket_group", '"a b"', "group"),
    ("operator_group", "1000", "= 1000 must be the name or the number of a group in quotes"),
    ("wait_out_seconds", "3600.1", "= 3600.1 must be a number of seconds from 0 to 3600"),
    ("wait_out_seconds", "-0.1", "seconds from 0 to 3600"),
    ("wait_out_seconds", "nan", "seconds from 0 to 3600"),
    ("wait_out_seconds", "inf", "seconds from 0 to 3600"),
    ("wait_out_seconds", "true", "= true must be a number"),
    ("wait_out_seconds", '"60"', '= "60" must be a number of seconds from 0 to 3600, without quotes'),
    ("max_leases", "0", "integer from 1 to 10000000"),
    ("max_leases", "10_000_001", "integer from 1 to 10000000"),
    ("max_leases", "1e3", "= 1000 must be an integer"),
    ("max_leases", "true", "integer from"),
    ("max_leases", "0x" + "f" * 5000, "= (a huge integer) must be an integer"),
    ("http.listen", '":8765"', "ADDR:PORT"),
    ("http.listen", '"127.0.0.1"', "ADDR:PORT"),
    ("http.listen", '"127.0.0.1:65536"', "ADDR:PORT"),
    ("http.listen", '"example.com:80"', "with an IP address"),
    ("http.listen", '"::1:80"', "ADDR:PORT"),
    ("http.listen", '"[127.0.0.1]:80"', "ADDR:PORT"),
    ("http.listen", "8765", "= 8765 must be"),
    ("http.listen", '["127.0.0.1:1", "localhost:1"]', "same entry twice"),
    ("namespaces.per_uid", '"yes"', "true or false"),
    ("namespaces.per_uid", "1", "true or false"),
    ("limits.max_connections", "0", "from 1 to 100000"),
    ("limits.max_watchers_per_uid", "-1", "from 0 to 10000"),
    ("limits.message_seconds", "0", "from 0.1 to 300"),
    ("billing.currency", '"usdc"', "capital letters"),
    ("billing.refusal", "0.002", "= 0.002 must be a decimal number in quotes"),
    ("billing.refusal", "2000", "= 2000 must be a decimal number in quotes"),
    ("billing.refusal", '"0.0000001"', "at most 6 decimals"),
    ("billing.refusal", '"1000.000001"', 'from "0" to "1000"'),
    ("billing.refusal", '"-0.1"', "decimal number"),
    ("billing.refusal", '".5"', "decimal number"),
    ("billing.refusal", '"٢"', "decimal number"),
    ("billing.outbox_max_events", "0", "from 1 to"),
    ("upstream.url", '"ftp://b.example"', "must be a URL such as"),
    ("upstream.url", '"https://"', "must be a URL such as"),
    ("upstream.url", '"https://:443/x"', "must name a host"),
    ("upstream.url", '"https://b.example:99999/"', "must name a host, and a port"),
    ("upstream.url", '"http://b.example/e"', "must begin with https://"),
    ("upstream.url", '"http://127.evil.example/e"', "must begin with https://"),
    ("upstream.url", '"https://b.example/ x"', "must be a URL such as"),
    ("upstream.batch_events", "101", "from 1 to 100"),
    ("upstream.proxy", '"socks5://p:1"', "http://HOST:PORT"),
    ("x402.networks", '["base"]', 'such as "eip155:8453"'),
    ("x402.payees", '["0x12"]', "40 hexadecimal digits"),
    ("x402.assets", f'["{ACCOUNT}", "{ACCOUNT.lower()}"]', "same entry twice"),
    ("log.level", '"verbose"', 'must be one of "debug", "info", "warning", "error"'),
    ("log.format", '"xml"', 'must be one of "auto", "console", "json"'),
    ("log.format", "1979-05-27T07:32:00Z", "= 1979-05-27 07:32:00+00:00 must be one of"),
    ("log.format", "{a = 1}", "= (a table) must be one of"),
]


def value_of(config: Config, name: str) -> Any:
    for part in name.split("."):
        config = getattr(config, part)
    return config


@pytest.mark.parametrize(("name", "value", "expected"), GOOD)
def test_a_value_within_its_bounds(name: str, value: str, expected: Any) -> None:
    assert value_of(read(f"{name} = {value}"), name) == expected


@pytest.mark.parametrize(("name", "value", "said"), BAD)
def test_a_value_out_of_its_bounds(name: str, value: str, said: str) -> None:
    line = fault(f"{name} = {value}")
    assert line.startswith(f"{FILE}: {name} ")
    assert said in line
    assert len(line) < 400


def test_every_key_of_the_contract_is_there() -> None:
    contract = {
        *("socket", "socket_mode", "socket_group", "state_dir", "runtime_dir", "wait_out_seconds", "operator_group", "max_leases"),
        *("http.listen", "namespaces.per_uid"),
        *("billing.enabled", "billing.currency", "billing.refusal", "billing.agent_lock_call", "billing.outbox_max_events"),
        *(
            "upstream.url",
            "upstream.token_file",
            "upstream.batch_events",
            "upstream.timeout_seconds",
            "upstream.proxy",
            "upstream.ca_file",
        ),
        *("x402.wallet_key_file", "x402.networks", "x402.assets", "x402.payees", "x402.max_per_batch", "x402.max_per_day"),
        *("log.level", "log.format"),
    }
    assert {name for name in KEYS if not name.startswith("limits.")} == contract


# -- namespaces


def test_namespaces_by_uid_and_gid() -> None:
    text = f'[namespaces]\nper_uid = true\n"uid:1000" = "build"\n"uid:0" = "local"\n"gid:27" = "{"n" * 128}"'
    namespaces = read(text).namespaces
    assert namespaces.per_uid is True
    assert dict(namespaces.uids) == {1000: "build", 0: "local"}
    assert dict(namespaces.gids) == {27: "n" * 128}


@pytest.mark.parametrize(
    ("entry", "said"),
    [
        ('"uid:65534" = "x"', 'namespaces."uid:65534" maps the overflow uid'),
        ('"gid:65534" = "x"', "maps the overflow gid"),
        ('"uid:build" = "x"', "must be named by a uid number from 0 to 4294967294"),
        ('"uid:01" = "x"', "without leading zeros"),
        ('"uid:4294967295" = "x"', "uid number from 0"),
        ('"uid:" = "x"', "uid number from 0"),
        ('"uid:1" = ""', "1 to 128 bytes"),
        ('"uid:1" = "uid:2"', 'not beginning with "uid:"'),
        (f'"uid:1" = "{"é" * 65}"', "1 to 128 bytes"),
        ('"uid:1" = "a\\nb"', "printable"),
        ('"uid:1" = 5', "= 5 must be a namespace in quotes"),
        ('1000 = "x"', 'namespaces.1000 is not a key of the configuration: did you mean per_uid, "uid:1000" or "gid:1000"?'),
    ],
)
def test_namespace_entries_that_are_refused(entry: str, said: str) -> None:
    assert said in fault(f"[namespaces]\n{entry}")


# -- what no single value can tell


def test_the_mode_follows_the_group() -> None:
    assert read().socket_mode == 0o600
    assert read('socket_group = "g"').socket_mode == 0o660
    assert read('socket_group = "g"\nsocket_mode = "0666"').socket_mode == 0o666
    assert 'socket_mode = "0640" keeps socket_group out' in fault('socket_group = "g"\nsocket_mode = "0640"')


def test_a_part_follows_its_whole_down_but_must_not_exceed_it() -> None:
    limits = read("max_leases = 500\n[limits]\nmax_connections = 10\nmax_waiters_per_namespace = 3").limits
    assert (limits.max_leases_per_namespace, limits.max_connections_per_uid, limits.max_waiters_per_key) == (500, 10, 3)
    assert read("max_leases = 5_000_000").limits.max_leases_per_namespace == 5_000_000
    line = fault("max_leases = 500\n[limits]\nmax_leases_per_namespace = 501")
    assert line == f"{FILE}: limits.max_leases_per_namespace = 501 can never be reached: it must be at most max_leases (500)"
    assert "limits.max_connections (10)" in fault("[limits]\nmax_connections = 10\nmax_connections_per_uid = 11")


def test_the_two_directories_differ() -> None:
    assert 'runtime_dir = "/a" must differ from state_dir' in fault('state_dir = "/a"\nruntime_dir = "/a/"')


WALLET = f"""
upstream.url = "https://b.example"
[x402]
wallet_key_file = "/run/credentials/w"
networks = ["eip155:8453"]
assets = ["{ACCOUNT}"]
payees = ["{ACCOUNT}"]
max_per_batch = "0.1"
max_per_day = "2.5"
"""


def test_a_wallet_pays_only_where_everything_is_named() -> None:
    x402 = read(WALLET).x402
    assert (x402.max_per_batch, x402.max_per_day, x402.payees) == (100_000, 2_500_000, (ACCOUNT.lower(),))
    for name in ("networks", "assets", "payees", "max_per_batch", "max_per_day"):
        lines = faults("\n".join(line for line in WALLET.splitlines() if not line.startswith(f"{name} ")))
        assert any(line.startswith(f"{FILE}: x402.{name} is missing or nothing") for line in lines), lines
    assert "upstream.url is missing" in fault(WALLET.replace('upstream.url = "https://b.example"', ""))
    assert 'x402.max_per_batch = "3" can never be reached: it must be at most x402.max_per_day ("2.5")' in fault(
        WALLET.replace('"0.1"', '"3"')
    )
    assert "x402.payees is missing or nothing" in fault(re.sub(r"payees = .*", "payees = []", WALLET))


# -- errors


def test_all_errors_of_a_file_are_reported_together() -> None:
    lines = faults('wait_out_seconds = 1e9\nsokcet = "/x"\n[limits]\nmax_connections = "many"\n[log]\nlevel = "loud"')
    assert len(lines) == 4
    assert all(line.startswith(f"{FILE}: ") for line in lines)
    assert sorted(line.split()[1] for line in lines) == ["limits.max_connections", "log.level", "sokcet", "wait_out_seconds"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("wait_out_second = 5", "wait_out_second is not a key of the configuration: did you mean wait_out_seconds?"),
        (
            "[limits]\nmax_conections = 5",
            "limits.max_conections is not a key of the configuration: did you mean limits.max_connections?",
        ),
        ("[limit]\nmax_connections = 5", "limit is not a key of the configuration: did you mean limits?"),
        ('listen = "127.0.0.1:1"', "listen is not a key of the configuration: listen belongs in [http]"),
        ("[http]\nmax_leases = 5", "http.max_leases is not a key of the configuration: max_leases belongs above the first [table]"),
        ('"http.listen" = "127.0.0.1:1"', "http.listen is not a key"),
        ("[log]\nzzz = 5", "log.zzz is not a key of the configuration: remove it; the keys here are level, format"),
        ('"a\\nb" = 5', '"a\\U0000000Ab" is not a key'),
        ("http = 5", "http must be a table: write [http] on a line of its own"),
        ("[[log]]", "log must be a table"),
        ("[socket]", "socket = (a table) must be an absolute path"),
    ],
)
def test_an_unknown_key_is_an_error_that_helps(text: str, said: str) -> None:
    assert fault(text).startswith(f"{FILE}: {said}")


@pytest.mark.parametrize(
    ("text", "where"),
    [
        ("max_leases = 5\nlevel = debug", "line 2, column 9: "),
        ('socket = "/x', "line 1, column 13: "),
        ("[log]\n[log]", "line 2, column 5: "),
        ("a = 1\na = 2", "line 2, column 6: "),
        ("a = " + "9" * 5000, "line 1, column "),
        ("a = " + "[" * 100_000, "is nested too deeply"),
    ],
)
def test_what_is_not_toml_is_told_by_line_and_column(text: str, where: str) -> None:
    line = fault(text)
    assert line.startswith(f"{FILE}: {where}")
    assert len(line) < 300


@pytest.mark.parametrize(
    "text",
    [
        '[upstream]\ntoken_file = "s3cr3t"',
        '[upstream]\ntoken_file = ["s3cr3t"]',
        '[upstream]\nurl = "https://user:s3cr3t@b.example/"',
        '[upstream]\nurl = "http://b.example/?api_key=s3cr3t"',
        '[upstream]\nproxy = "http://user:s3cr3t@proxy:3128"',
        '[x402]\nwallet_key_file = "s3cr3t"',
        '[upstream]\ntokn_file = "s3cr3t"',
        'upstream = "s3cr3t"',
    ],
)
def test_a_secret_in_the_wrong_place_is_not_repeated(text: str) -> None:
    line = fault(text)
    assert "s3cr3t" not in line
    assert "must" in line or "did you mean" in line


def test_a_wrong_value_is_cut_and_kept_on_its_line() -> None:
    line = fault(f'[log]\nlevel = "{"x" * 1000}"')
    assert "x" * 79 + "…" in line
    assert "\\U0000000A" in fault('[log]\nlevel = "a\\nb"')


# -- describe


def test_describe_says_every_key_as_the_file_would() -> None:
    rows = dict(describe(read('[namespaces]\n"gid:5" = "a\\"b"\n[billing]\nrefusal = "0.0050"\n[http]\nlisten = "[::1]:80"')))
    assert set(KEYS) <= set(rows)
    assert rows['namespaces."gid:5"'] == '"a\\"b"'
    assert rows["billing.refusal"] == '"0.005"'
    assert rows["http.listen"] == '["[::1]:80"]'
    assert rows["socket_mode"] == '"0600"'
    assert rows["socket_group"] == "(none)"
    assert rows["wait_out_seconds"] == "60"
    assert (
        dict(describe(read('upstream.url = "https://b.example/e?key=s3cr3t"')))["upstream.url"]
        == '"https://b.example/e?(withheld)"'
    )


NAMED = 'namespaces."uid:7" = "seven \\\\ \\"7\\""'


@pytest.mark.parametrize("text", ["", WALLET, NAMED, *(f"{name} = {value}" for name, value, _ in GOOD if "?" not in value)])
def test_what_describe_says_reads_back_as_the_same_configuration(text: str) -> None:
    config = read(text)
    again = "\n".join(f"{name} = {value}" for name, value in describe(config) if value != "(none)")
    assert read(again) == config


# -- load


def test_a_missing_default_file_is_the_defaults_and_a_missing_named_one_an_error(tmp_path: Path) -> None:
    environ = {"HOME": str(tmp_path), "XDG_RUNTIME_DIR": "/run/user/1"}
    config = load(None, root=False, environ=environ)
    assert (config.source, config.max_leases) == ("(no configuration file)", 100_000)
    assert load(None, root=False, environ={}, socket="/s", state_dir="/a", runtime_dir="/b").socket == Path("/s")
    missing = tmp_path / "missing.toml"
    with pytest.raises(ConfigError, match=f"^{missing}: there is no such file: correct --config"):
        load(missing, root=False, environ=environ)


def test_a_file_is_read_from_its_default_place_or_where_it_is_said_to_be(tmp_path: Path) -> None:
    environ = {"HOME": str(tmp_path), "XDG_RUNTIME_DIR": "/run/user/1"}
    default = tmp_path / ".config/leased/leased.toml"
    default.parent.mkdir(parents=True)
    default.write_text("max_leases = 7")
    other = tmp_path / "other.toml"
    other.write_text("max_leases = 8")
    assert (load(None, root=False, environ=environ).max_leases, load(None, root=False, environ=environ).source) == (7, str(default))
    assert load(other, root=False, environ=environ).max_leases == 8
    assert load(str(other), root=False, environ=environ, socket="/s").socket == Path("/s")


def test_a_file_that_cannot_be_read_is_an_error(tmp_path: Path) -> None:
    latin = tmp_path / "latin.toml"
    latin.write_bytes(b"# \xe9")
    with pytest.raises(ConfigError, match="byte 3 is not UTF-8"):
        load(latin, root=True, environ={})
    with pytest.raises(ConfigError, match="cannot be read: Is a directory"):
        load(tmp_path, root=True, environ={})
    with pytest.raises(ConfigError, match="cannot be read"):
        load("a\0b", root=True, environ={})


# -- properties


@given(st.integers(0, 10**15))
def test_amounts_go_to_text_and_back(micro: int) -> None:
    text = amount_text(micro)
    assert not re.search(r"\.$|\.\d*0$", text)
    whole, _, rest = text.partition(".")
    assert int(whole) * 10**6 + int(rest.ljust(6, "0")) == micro


VALUES = st.sampled_from(
    ["1", "-1", '"x"', "true", "[]", '["/x"]', "1.5", "nan", '"0660"', '"/p"', "{a=1}", "1979-05-27", '"\\u0007"']
)


@given(st.dictionaries(st.sampled_from([*KEYS, *TABLES, "unknown", 'namespaces."uid:1"']), VALUES, max_size=4))
def test_any_values_give_a_configuration_or_an_error_of_ours(entries: dict[str, str]) -> None:
    try:
        config = read("\n".join(f"{name} = {value}" for name, value in entries.items()))
    except ConfigError as error:
        assert all(line.isprintable() and line.startswith(FILE) for line in str(error).splitlines())
    else:
        assert {name for name, _ in describe(config)} >= set(entries) - set(TABLES)


@given(st.text(max_size=60))
def test_any_text_gives_a_configuration_or_an_error_of_ours(text: str) -> None:
    try:
        assert isinstance(read(text), Config)
    except ConfigError as error:
        assert str(error).startswith(FILE)
