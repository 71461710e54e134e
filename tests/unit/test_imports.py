"""The shape of the package: imports go downward only, pure modules stay pure, and clients stay light.

The table below alone says which layer a module is in.  Imports inside functions count; those under TYPE_CHECKING do not.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
MAX_LINES = 400

LAYERS: dict[str, tuple[str, ...]] = {
    "ground": ("version", "errors", "light", "model", "clock"),
    "pure": (
        *("rules", "tariff", "schema", "fields", "frames", "replies", "calls", "digests", "generations"),
        *("config", "config_keys", "config_values", "paths", "doors.openapi_answers"),
    ),
    "state": ("state", "state.*"),
    "middle": (
        *(
            "lessor",
            "lane",
            "gate",
            "start",
            "upkeep",
            "index",
            "rising",
            "fences",
            "outcomes",
            "tombs",
            "holds",
            "kept",
            "holdings",
            "queues",
            "switches",
        ),
        *(
            "watch",
            "peers",
            "views",
            "binds",
            "billing",
            "companions",
            "stop",
            "handler",
            "limits",
            "agents",
            "agent_lock",
            "backup_desk",
        ),
        *("metrics", "health", "upstream", "upstream_http", "payer", "wallet", "outbox_desk"),
    ),
    "doors": ("doors", "doors.*"),
    "roof": (
        "daemon",
        "opening",
        "install_units",
        "state_format",
        "reload",
        "hangup",
        "service",
        "systemd",
        "pulse",
        "not_started",
        "log",
        "exits",
        "invariants",
        "fsck",
        "backup",
        "backup_fetch",
        "agents",
        "metrics",
        "agent_command",
        "operator_call",
        "outbox_command",
        "__main__",
        "client",
        "client.*",
        "adapters",
        "adapters.*",
        "testing",
        "",
    ),  # "" is leased/__init__.py
}
"""From the bottom up, names without `leased.`.  Within one layer any import is allowed that makes no cycle."""

RANKS = {layer: rank for rank, layer in enumerate(LAYERS)}
NEVER_PURE = frozenset(
    {"trio", "lmdb", "h11", "structlog", "socket", "os", "time", "select", "selectors", "threading", "asyncio"}
    | {"subprocess", "multiprocessing", "signal", "random", "secrets"}
)
READS_FILES = frozenset(
    {"config", "config_keys", "config_values"}
)  # of the pure modules; `config.load` reads the one file there is
PURE_CLOCK_NAMES = frozenset({"Now", "rfc3339"})
NEVER_IN_CLIENT = frozenset({"trio", "lmdb", "structlog", "h11"})
TRIO_FACES = frozenset({"client.trio_face"})
MCP = frozenset({"client.mcp_verb", "client.mcp_server", "client.mcp_stdio", "client.mcp_http", "client.mcp_daemon"})
"""Run under trio when `lease mcp` runs, and imported by nothing else."""
NEVER_WITH_CLIENT = ("trio", "lmdb", "h11", "structlog", "asyncio")

Import = tuple[str, str | None]
"""A module's full name, and the name taken from it, if one is."""


def layer_of(module: str) -> str | None:
    for layer, names in LAYERS.items():
        if module in names or (module.partition(".")[0] + ".*" in names and "." in module):
            return layer
    return None


def name_of(path: Path, package: Path) -> str:
    parts = list(path.relative_to(package).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def sources() -> dict[str, str]:
    package = ROOT / "leased"
    return {name_of(path, package): path.read_text() for path in sorted(package.rglob("*.py"))}


def is_type_checking(test: ast.expr) -> bool:
    return (isinstance(test, ast.Name) and test.id == "TYPE_CHECKING") or (
        isinstance(test, ast.Attribute) and test.attr == "TYPE_CHECKING"
    )


def imports(source: str) -> Iterator[Import]:
    pending: list[ast.AST] = [ast.parse(source)]
    while pending:
        node = pending.pop()
        if isinstance(node, ast.Import):
            yield from ((alias.name, None) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "write imports with the full name of the module"
            yield from ((node.module or "", alias.name) for alias in node.names)
        elif isinstance(node, ast.If) and is_type_checking(node.test):
            pending.extend(node.orelse)
        else:
            pending.extend(ast.iter_child_nodes(node))


def own(imported: Import, modules: Mapping[str, str]) -> str | None:
    """The module of ours that an import leads to, without `leased.`; None for anybody else's."""
    module, name = imported
    if module.partition(".")[0] != "leased":
        return None
    inner = module.removeprefix("leased").removeprefix(".")
    deeper = f"{inner}.{name}".removeprefix(".")
    return deeper if name is not None and deeper in modules else inner


def faults(modules: Mapping[str, str]) -> list[str]:
    """Everything that is wrong with the imports of the package, one sentence each."""
    found = []
    for module, source in modules.items():
        layer = layer_of(module)
        if layer is None:
            found.append(f"leased.{module} is in no layer: add it to LAYERS in tests/unit/test_imports.py")
            continue
        for imported in imports(source):
            found += [f"leased.{module} ({layer}) {fault}" for fault in import_faults(module, layer, imported, modules)]
    return found + [f"the imports of {' -> '.join(cycle)} go in a circle" for cycle in cycles(modules)]


def import_faults(module: str, layer: str, imported: Import, modules: Mapping[str, str]) -> Iterator[str]:
    full, name = imported
    top = full.partition(".")[0]
    target = own(imported, modules)
    adapter = _within("adapters", module)
    client = adapter or module == "testing" or _within("client", module)
    pure = layer == "pure" or (layer == "ground" and module != "clock")
    if target is not None:
        lower = layer_of(target)
        if lower is not None and RANKS[lower] > RANKS[layer]:
            yield f"imports leased.{target} ({lower}), which is above it"
        own_side = _within("client", target) or (adapter and _within("adapters", target))
        if client and not (own_side or lower in ("ground", "pure")):
            yield f"imports leased.{target}: a client may import only itself, ground and pure"
        if not client and module != "" and (_within("client", target) or _within("adapters", target)):
            yield f"imports leased.{target}: the daemon does not use its own client"
        if layer == "pure" and target == "clock" and name not in PURE_CLOCK_NAMES:
            yield f"imports {name or 'all'} of leased.clock: a pure module is given the time"
        if module == "" and target != "version":
            yield f"imports leased.{target} at once: the public names are imported when first used"
    if pure and (top in NEVER_PURE or (top == "pathlib" and module not in READS_FILES)):
        yield f"imports {full}: a pure module does no I/O, reads no clock and draws nothing"
    if layer == "state" and top == "structlog":
        yield "imports structlog: the layers below the middle raise or return, and do not log"
    if client and top in NEVER_IN_CLIENT and not (top == "trio" and module in TRIO_FACES | MCP):
        yield f"imports {full}: a client must start in milliseconds with the standard library and msgpack"


def _within(package: str, module: str) -> bool:
    return module == package or module.startswith(f"{package}.")


def cycles(modules: Mapping[str, str]) -> list[list[str]]:
    """The cycles of the import graph, each from where it was entered; empty when there is none."""
    graph = {
        module: sorted({target for each in imports(source) if (target := own(each, modules)) in modules and target is not None})
        for module, source in modules.items()
    }
    found: list[list[str]] = []
    done: set[str] = set()

    def visit(module: str, trail: list[str]) -> None:
        if module in trail:
            found.append([*trail[trail.index(module) :], module])
        elif module not in done:
            for target in graph[module]:
                visit(target, [*trail, module])
            done.add(module)

    for module in graph:
        visit(module, [])
    return found


def loaded_by(statement: str) -> set[str]:
    """The top-level modules a fresh interpreter has after `statement`."""
    code = f"import sys; {statement}; print(' '.join(sorted({{name.partition('.')[0] for name in sys.modules}})))"
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True, timeout=60)
    return set(run.stdout.split())


def test_the_package_keeps_its_shape() -> None:
    assert faults(sources()) == []


def test_no_file_is_longer_than_one_idea() -> None:
    lengths = {path.relative_to(ROOT): len(path.read_text().splitlines()) for path in (ROOT / "leased").rglob("*.py")}
    assert {str(path): lines for path, lines in lengths.items() if lines > MAX_LINES} == {}
    assert len(lengths) > 5


LIGHT = ["import leased"] + [
    statement
    for module, statement in (
        ("sync", "from leased import Client"),
        ("sync", "import leased.client.sync"),
        ("async_client", "from leased import AsyncClient, LeaseLost"),
        ("fake_state", "from leased.testing import FakeLeased"),
        ("command", "import leased.client.command"),
    )
    if (ROOT / "leased/client" / f"{module}.py").exists()
]


@pytest.mark.parametrize("statement", LIGHT)
def test_what_a_client_imports_is_light(statement: str) -> None:
    loaded = loaded_by(statement)
    assert "leased" in loaded
    assert loaded.isdisjoint(NEVER_WITH_CLIENT), loaded & set(NEVER_WITH_CLIENT)


def test_a_heavy_import_would_be_seen() -> None:
    assert "asyncio" in loaded_by("import leased, asyncio")


@pytest.mark.parametrize(
    ("module", "source", "said"),
    [
        ("errors", "from leased.rules import decide", "leased.errors (ground) imports leased.rules (pure), which is above it"),
        ("rules", "def f():\n    from leased.lessor import x", "imports leased.lessor (middle), which is above it"),
        ("rules", "import os.path", "leased.rules (pure) imports os.path: a pure module does no I/O"),
        ("model", "import time", "leased.model (ground) imports time: a pure module"),
        ("schema", "from pathlib import Path", "imports pathlib: a pure module"),
        ("rules", "from leased.clock import HostClock", "imports HostClock of leased.clock"),
        ("rules", "import leased.clock", "imports all of leased.clock"),
        ("rules", "try:\n    import trio\nexcept ImportError: pass", "imports trio"),
        ("state.ledger", "import structlog", "imports structlog: the layers below"),
        ("state.ledger", "from leased import lessor", "imports leased.lessor (middle), which is above it"),
        ("client.sync", "import lmdb", "a client must start in milliseconds"),
        ("client.sync", "from leased.state.records import x", "a client may import only itself, ground and pure"),
        ("client.sync", "from leased.daemon import x", "a client may import only itself, ground and pure"),
        ("client.sync", "from leased.log import x", "a client may import only itself, ground and pure"),
        ("client.sync", "from leased.adapters.redis_lock import x", "a client may import only itself, ground and pure"),
        ("adapters.redis_lock", "from leased.daemon import x", "a client may import only itself, ground and pure"),
        ("adapters.redis_lock", "import trio", "a client must start in milliseconds"),
        ("testing", "import trio", "a client must start in milliseconds"),
        ("testing", "from leased.lessor import x", "a client may import only itself, ground and pure"),
        ("daemon", "from leased.client.sync import Client", "the daemon does not use its own client"),
        ("daemon", "from leased.adapters.redis_lock import x", "the daemon does not use its own client"),
        ("rules", "from leased import Client", "imports leased. (roof), which is above it"),
        ("", "from leased.client.sync import Client", "the public names are imported when first used"),
        ("helpers", "", "leased.helpers is in no layer: add it to LAYERS"),
        ("daemon.py.deep", "", "is in no layer"),
    ],
)
def test_each_fault_is_found(module: str, source: str, said: str) -> None:
    others = dict.fromkeys(
        (
            *("errors", "rules", "lessor", "clock", "state.records", "client.sync", "adapters.redis_lock"),
            *("daemon", "log", "version", ""),
        ),
        "",
    )
    found = faults({**others, module: source})
    assert len(found) == 1
    assert said in found[0]


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("rules", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from leased.lessor import Lessor"),
        ("rules", "import typing\nif typing.TYPE_CHECKING:\n    import trio"),
        ("rules", "from leased.clock import Now, rfc3339"),
        ("lessor", "import structlog, trio\nfrom leased import rules\nfrom leased.state.records import x"),
        ("client.trio_face", "import trio\nfrom leased.client.sync import x"),
        ("config", "from pathlib import Path"),
        ("adapters.tooz_driver", "import tooz\nfrom leased.client.sync import x\nfrom leased.adapters.redis_lock import y"),
        ("", "from leased.version import VERSION"),
    ],
)
def test_what_is_allowed_is_allowed(module: str, source: str) -> None:
    others = dict.fromkeys(("rules", "lessor", "clock", "state.records", "client.sync", "adapters.redis_lock", "version", ""), "")
    assert faults({**others, module: source}) == []


def test_a_circle_within_a_layer_is_found() -> None:
    modules = {
        "lessor": "from leased import queues",
        "queues": "def f():\n    import leased.watch",
        "watch": "import leased.lessor",
    }
    assert faults(modules) == ["the imports of lessor -> queues -> watch -> lessor go in a circle"]
