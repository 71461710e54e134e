"""The record of an agent key in the ledger, under the digest of its secret: the secret itself is nowhere."""

from __future__ import annotations

import json
from typing import Final, NamedTuple

from leased.state.records import RecordDamaged, seal, unseal

AGENT_VERSION: Final = 1


class Agent(NamedTuple):
    """`name` is unique; calls that bring the key count in `namespace`.  `created` is wall-clock seconds, for people."""

    name: str
    namespace: str
    created: float


def encode_agent(agent: Agent) -> bytes:
    return seal(AGENT_VERSION, json.dumps(agent).encode())


def decode_agent(record: bytes) -> Agent:
    """Raises RecordDamaged, and StateRefused for a version that is not known."""
    try:
        name, namespace, created = json.loads(unseal(record, AGENT_VERSION, "agent key"))
        return Agent(str(name), str(namespace), float(created))
    except (ValueError, TypeError) as error:
        raise RecordDamaged(f"an agent key cannot be read: {type(error).__name__}") from None
