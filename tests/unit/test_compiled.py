"""The compiled build (contrib/compiled): what is compiled there is what the list says, and here it is nothing."""

from __future__ import annotations

import os
from importlib.machinery import ExtensionFileLoader
from importlib.util import find_spec
from pathlib import Path

import leased.rules
from leased.doors import rpc

ROOT = Path(__file__).resolve().parents[2]
LISTED = [name.replace("/", ".") for name in (ROOT / "contrib/compiled/modules.txt").read_text().split()]
EXPECTED = os.environ.get("LEASED_TEST_COMPILED", "") not in {"", "0"}  # .ci/run says so of the tree it has compiled


def is_compiled(name: str) -> bool:
    spec = find_spec(f"leased.{name}")
    assert spec is not None, f"{name} is listed and is no module"
    return isinstance(spec.loader, ExtensionFileLoader)


def test_what_is_compiled_is_all_that_is_listed_or_nothing() -> None:
    compiled = [name for name in LISTED if is_compiled(name)]
    assert compiled == (LISTED if EXPECTED else [])


def test_the_tests_run_on_what_is_compiled() -> None:
    assert leased.rules.__file__.endswith(".so") is EXPECTED
    assert all(hasattr(each, "__code__") is not EXPECTED for each in (leased.rules.lease, rpc.RpcPeer.take))


def test_nothing_that_clients_import_is_listed() -> None:
    """The shared object takes longer to load than a `lease` takes to answer."""
    assert not {"frames", "clock", "errors", "light", "paths", "version"} & {*LISTED}
    assert not [name for name in LISTED if name.startswith(("client", "adapters"))]
