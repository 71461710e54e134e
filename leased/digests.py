"""Keyed hashes: how keys, fences, request ids and holders are known without being stored.

One secret per installation, drawn at the first start and kept in both stores.  A key's text can be guessed by whoever has the secret
and a list of candidates; a fence (63 random bits) or a request id cannot.  BLAKE2b, keyed, a different `person` for each use.
"""

from __future__ import annotations

import hashlib
from typing import Final

SECRET_BYTES: Final = 32
KEY_HASH_BYTES: Final = 20  # 80 bits against accidental collision; a collision would refuse, never grant twice
PROOF_BYTES: Final = 16
RID_BYTES: Final = 16
AGENT_BYTES: Final = 32
_MAX_CACHED_NAMESPACES: Final = 4096  # one small hash state each; past it the cache starts over


class Digests:
    """All keyed hashes of one installation.  `secret` is SECRET_BYTES long."""

    def __init__(self, secret: bytes) -> None:
        if len(secret) != SECRET_BYTES:
            raise ValueError(f"the hashing secret must be {SECRET_BYTES} bytes")
        self._key = hashlib.blake2b(key=secret, digest_size=KEY_HASH_BYTES, person=b"leased key")
        self._proof = hashlib.blake2b(key=secret, digest_size=PROOF_BYTES, person=b"leased fence")
        self._rid = hashlib.blake2b(key=secret, digest_size=RID_BYTES + 8, person=b"leased rid")
        self._holder = hashlib.blake2b(key=secret, digest_size=PROOF_BYTES, person=b"leased holder")
        self._refusal = hashlib.blake2b(key=secret, digest_size=PROOF_BYTES, person=b"leased refusal")
        self._scope = hashlib.blake2b(key=secret, digest_size=KEY_HASH_BYTES, person=b"leased scope")
        self._agent = hashlib.blake2b(key=secret, digest_size=AGENT_BYTES, person=b"leased agent")
        self._namespaces: dict[str, hashlib.blake2b] = {}
        self._rids: dict[str, hashlib.blake2b] = {}
        self._holders: dict[str, hashlib.blake2b] = {}

    def key_hash(self, namespace: str, key: str) -> bytes:
        """The KEY_HASH_BYTES that stand for (namespace, key) everywhere; the length prefix keeps ("a", "bc") from ("ab", "c")."""
        state = self._namespaces.get(namespace)
        digest = (_cached(self._namespaces, self._key, namespace) if state is None else state).copy()
        digest.update(key.encode())
        return digest.digest()

    def proof(self, fence: int) -> bytes:
        """What is stored of a fence.  Compare with hmac.compare_digest."""
        digest = self._proof.copy()
        digest.update(fence.to_bytes(8, "big"))
        return digest.digest()

    def rid(self, namespace: str, request_id: bytes) -> tuple[bytes, int]:
        """(name, mask) of a request id: the name finds the attempt, the mask unseals the fence it was answered with."""
        state = self._rids.get(namespace)
        digest = (_cached(self._rids, self._rid, namespace) if state is None else state).copy()
        digest.update(request_id)
        both = digest.digest()
        return both[:RID_BYTES], int.from_bytes(both[RID_BYTES:], "big")

    def scope_key(self, namespace: str, scope: str) -> bytes:
        """The key of a scope's switch in the stores."""
        digest = _prefixed(self._scope, namespace)
        digest.update(scope.encode())
        return digest.digest()

    def refusal_id(self, namespace: str, key_hash: bytes, holder: str) -> bytes:
        """The id of the fact that this key was refused to this label: the same fact cannot be two events."""
        digest = _prefixed(self._refusal, namespace)
        digest.update(key_hash)
        digest.update(holder.encode())
        return digest.digest()

    def holder_hash(self, namespace: str, holder: str) -> bytes:
        state = self._holders.get(namespace)
        digest = (_cached(self._holders, self._holder, namespace) if state is None else state).copy()
        digest.update(holder.encode())
        return digest.digest()

    def agent(self, secret: str) -> bytes:
        """What an agent key is known by.  `secret` may be any text that UTF-8 can carry."""
        digest = self._agent.copy()
        digest.update(secret.encode())
        return digest.digest()


def _cached(states: dict[str, hashlib.blake2b], state: hashlib.blake2b, namespace: str) -> hashlib.blake2b:
    if len(states) >= _MAX_CACHED_NAMESPACES:
        states.clear()
    states[namespace] = prefixed = _prefixed(state, namespace)
    return prefixed


def _prefixed(state: hashlib.blake2b, namespace: str) -> hashlib.blake2b:
    encoded = namespace.encode()
    prefixed = state.copy()
    prefixed.update(len(encoded).to_bytes(2, "big") + encoded)
    return prefixed
