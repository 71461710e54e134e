"""The examples for hosts name a command that is there, options it takes, and the path that is served."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

import pytest

from leased.client.command import _find
from leased.client.mcp_address import PATH, address
from leased.client.shell import parse

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "contrib/mcp"
FILES = sorted(path.name for path in FOLDER.iterdir() if path.suffix in {".json", ".toml"})


def server(name: str) -> dict[str, Any]:
    text = (FOLDER / name).read_text()
    whole = tomllib.loads(text) if name.endswith(".toml") else json.loads(text)
    (servers,) = whole.values()
    assert list(whole) == (["mcp_servers"] if name.endswith(".toml") else ["mcpServers"])
    assert list(servers) == ["leased"]
    return dict(servers["leased"])


def test_there_is_one_of_each_kind_for_each_host() -> None:
    assert (
        sorted(
            f"{host}{kind}"
            for host, end in (("claude-code", ".mcp.json"), ("codex", ".toml"), ("cursor", ".mcp.json"))
            for kind in (end, f"-http{end}")
        )
        == FILES
    )
    told = (FOLDER / "README.md").read_text()
    assert all(f"({name})" in told for name in FILES)


@pytest.mark.parametrize("name", [name for name in FILES if "http" not in name])
def test_over_stdio_the_command_is_ours_and_needs_no_key(name: str) -> None:
    given = server(name)
    assert given["command"] == "lease" and given["args"][0] == "mcp"
    parse(given["args"][1:], _find("mcp"))
    assert "env" not in given and "AGENT_KEY" not in str(given)


@pytest.mark.parametrize("name", [name for name in FILES if "http" in name])
def test_over_http_the_address_is_the_one_told_and_no_secret_is_in_the_file(name: str) -> None:
    given = server(name)
    scheme, _, rest = given["url"].partition("://")
    where, slash, path = rest.partition("/")
    assert (scheme, slash + path) == ("http", PATH)
    assert address(where).loopback
    assert f"lease mcp --http {where}" in (FOLDER / "README.md").read_text()
    bearer = given.get("bearer_token_env_var") or given["headers"]["Authorization"]
    assert "LEASED_AGENT_KEY" in bearer and (bearer == "LEASED_AGENT_KEY" or bearer.startswith("Bearer ${"))


def test_the_line_in_the_readme_is_the_example() -> None:
    section = (ROOT / "README.md").read_text().partition("\n## MCP for agents\n")[2].partition("\n## ")[0]
    shown = section.partition("```json\n")[2].partition("```")[0]
    assert json.loads(shown) == json.loads((FOLDER / "claude-code.mcp.json").read_text())
