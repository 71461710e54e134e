"""Leases for the processes and AI agents of one host.

The public names are imported when first used: `import leased` costs a client neither trio nor lmdb.
"""

from __future__ import annotations

from leased.version import VERSION as __version__

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from leased.client.async_client import AsyncClient as AsyncClient
    from leased.client.errors import DaemonUnreachable as DaemonUnreachable
    from leased.client.errors import LeaseLost as LeaseLost
    from leased.client.errors import LeaseRefused as LeaseRefused
    from leased.client.errors import OutcomeUnknown as OutcomeUnknown
    from leased.client.sync import Client as Client

_HOMES = {
    "AsyncClient": "leased.client.async_client",
    "Client": "leased.client.sync",
    "DaemonUnreachable": "leased.client.errors",
    "LeaseLost": "leased.client.errors",
    "LeaseRefused": "leased.client.errors",
    "OutcomeUnknown": "leased.client.errors",
}

__all__ = ["AsyncClient", "Client", "DaemonUnreachable", "LeaseLost", "LeaseRefused", "OutcomeUnknown", "__version__"]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'leased' has no attribute {name!r}")
    from importlib import import_module

    value = getattr(import_module(home), name)
    globals()[name] = value
    return value
