"""What `lease mcp` refuses before it serves anything."""

from __future__ import annotations

import socket
import sys

import pytest

from leased.client.command import main
from leased.client.mcp_address import Address, address, listener


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--http", "0.0.0.0:0"], "0.0.0.0 is not a loopback address, and whoever reaches it could take leases"),
        (["--http", "[::]:0"], ":: is not a loopback address"),
        (["--http", "192.0.2.7:8766"], "192.0.2.7 is not a loopback address"),
        (["--http", "here"], "--http is ADDR:PORT"),
        (["--http", "127.0.0.1:0", "--bind", "process"], "--bind is for stdio"),
        (["--hosts", "a"], "--hosts goes with --http"),
        (["--require-key"], "--require-key goes with --http"),
        (["--allow-remote"], "--allow-remote goes with --http"),
        (["--bind", "session"], "--bind is one of none, process, connection"),
    ],
)
def test_what_cannot_be_served_is_told_in_a_sentence(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["mcp", *arguments]) == 64
    assert said in capsys.readouterr().err


def test_without_its_packages_it_says_which_to_install(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "hypercorn", None)
    assert main(["mcp"]) == 69
    assert "pip install '.[mcp]'" in capsys.readouterr().err


def test_an_address_that_is_taken_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    with listener(Address("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main(["mcp", "--http", f"127.0.0.1:{port}"]) == 69
    assert capsys.readouterr().err.startswith(f"lease: --http 127.0.0.1:{port}: Address already in use")


@pytest.mark.parametrize(
    ("text", "host", "port", "loopback"),
    [
        ("127.0.0.1:8766", "127.0.0.1", 8766, True),
        ("127.9.9.9:1", "127.9.9.9", 1, True),
        ("localhost:0", "127.0.0.1", 0, True),
        ("[::1]:65535", "::1", 65535, True),
        ("[2001:db8::1]:80", "2001:db8::1", 80, False),
        ("10.0.0.1:80", "10.0.0.1", 80, False),
    ],
)
def test_addresses(text: str, host: str, port: int, loopback: bool) -> None:
    found = address(text)
    assert found == Address(host, port) and found.loopback is loopback
    assert str(found) == (text if "localhost" not in text else "127.0.0.1:0")


@pytest.mark.parametrize(
    "text", ["", ":80", "127.0.0.1", "127.0.0.1:", "127.0.0.1:65536", "127.0.0.1:-1", "::1:80", "host:80", "[::1]", "1:2:3"]
)
def test_what_is_no_address_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is ADDR:PORT with an IP address"):
        address(text)


def test_a_listener_takes_ipv6() -> None:
    with listener(Address("::1", 0)) as listening:
        assert listening.family == socket.AF_INET6
