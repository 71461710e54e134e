"""Secrets that systemd hands to the service: named in the configuration, found where it put them, and told by name only."""

from __future__ import annotations

from pathlib import Path

import pytest

from leased.clock import HostClock
from leased.config import describe, parse, secret_file
from leased.config_keys import Upstream
from leased.errors import ConfigError
from leased.upstream_http import Poster
from leased.wallet import read_key

KEY = "ab" * 32


@pytest.mark.parametrize("key", ["upstream.token_file", "x402.wallet_key_file"])
def test_a_credential_is_named_and_not_looked_for_before_it_is_needed(key: str) -> None:
    table, _, name = key.partition(".")
    more = 'networks="eip155:1"\nassets="0x' + "a" * 40 + '"\npayees="0x' + "b" * 40 + '"\nmax_per_batch="1"\nmax_per_day="1"\n'
    upstream = '[upstream]\nurl="https://b.example/"\n' if table == "x402" else ""
    text = f'{upstream}[{table}]\n{name} = "credential:one-2"\n' + (more if table == "x402" else "")
    config = parse(text, source="f", root=True, environ={})
    assert dict(describe(config))[key] == '"credential:one-2"'


@pytest.mark.parametrize("value", ["credential:", "credential:../x", "credential:a/b", "credential:.", "secret:x", "one"])
def test_what_is_neither_a_path_nor_a_name_is_refused_and_not_repeated(value: str) -> None:
    with pytest.raises(ConfigError) as refused:
        parse(f'[upstream]\ntoken_file = "{value}"', source="f", root=True, environ={})
    assert '"credential:NAME" where the unit has LoadCredential=NAME:PATH' in str(refused.value)
    assert f'"{value}"' not in str(refused.value)


def test_where_a_credential_lies() -> None:
    environ = {"CREDENTIALS_DIRECTORY": "/run/credentials/leased.service"}
    assert secret_file("k", Path("credential:one"), environ) == (Path("/run/credentials/leased.service/one"), True)
    assert secret_file("k", Path("/etc/leased/one"), environ) == (Path("/etc/leased/one"), False)
    for none in ({}, {"CREDENTIALS_DIRECTORY": ""}, {"CREDENTIALS_DIRECTORY": "here"}):
        with pytest.raises(ConfigError, match=r'^k: "credential:one" .* LoadCredential=one:PATH'):
            secret_file("k", Path("credential:one"), none)


def test_a_wallet_key_may_show_the_mode_of_an_access_list_only_as_a_credential(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "wallet"
    path.write_text(KEY)
    path.chmod(0o440)
    with pytest.raises(ConfigError, match="has mode 0440"):
        read_key(path)
    monkeypatch.setenv("CREDENTIALS_DIRECTORY", str(tmp_path))
    assert read_key(Path("credential:wallet")) == KEY
    with pytest.raises(ConfigError, match="No such file"):
        read_key(Path("credential:other"))


def test_shipping_does_not_start_without_the_credential_it_was_promised(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CREDENTIALS_DIRECTORY", raising=False)
    with pytest.raises(ConfigError, match=r"upstream\.token_file: .*LoadCredential=upstream-token:PATH"):
        Poster(Upstream("http://127.0.0.1:9/", token_file=Path("credential:upstream-token")), HostClock())
