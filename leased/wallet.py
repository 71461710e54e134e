"""The wallet that signs for upstream: the official package `x402`, which the extra `leased[x402]` brings.

Imported only when a wallet is configured: with what it needs it takes two seconds and 65 MiB.  The key is read once, from a file, and leaves
memory only as signatures: no message here repeats a byte of it, and no error is chained to one that might.
"""

from __future__ import annotations

import os
import re
import stat
import sys
from pathlib import Path
from typing import Any, Final

from leased.config import secret_file
from leased.errors import ConfigError
from leased.payer import Demand, Offer, Signed

MAX_KEY_FILE_BYTES: Final = 1024
IDENTIFIER: Final = "payment-identifier"


class Wallet:
    """Signs `exact` payments on EVM chains by EIP-3009.  Raises ConfigError from the constructor."""

    def __init__(self, key_file: Path) -> None:
        try:
            from eth_account import Account
            from x402 import x402ClientSync
            from x402.mechanisms.evm.exact import register_exact_evm_client
        except ImportError:
            raise ConfigError(
                f"x402.wallet_key_file: paying needs more packages: in a checkout of leased, pip install '.[x402]' for {sys.executable}"
            ) from None
        try:
            account = Account.from_key(read_key(key_file))
        except ConfigError:
            raise
        except Exception:
            raise ConfigError(f"x402.wallet_key_file: {key_file}: it does not hold a private key of secp256k1") from None
        self.address = str(account.address)
        client = x402ClientSync()
        register_exact_evm_client(client, account)
        client.set_spend_controls(False)  # the caps of the configuration have been applied to the one offer it is shown
        self._client: Any = client

    def sign(self, demand: Demand, offer: Offer, identifier: str) -> Signed:
        """Raises ValueError when the package cannot sign for this offer.  Blocks for some 15 ms."""
        from x402.http.utils import encode_payment_signature_header
        from x402.schemas import PaymentRequired
        from x402.schemas.v1 import PaymentRequiredV1

        only = dict(demand.whole) | {"accepts": [offer.raw], "x402Version": demand.version}
        if demand.version == 2:
            only["extensions"] = _identified(only.get("extensions"), identifier)
        try:
            required: Any = (PaymentRequired if demand.version == 2 else PaymentRequiredV1).model_validate(only)
            payload = self._client.create_payment_payload(required)
            value = encode_payment_signature_header(payload)
            authorization = payload.payload["authorization"]
            paid = (str(authorization["to"]).lower(), int(authorization["value"]))
            if paid != (offer.payee, offer.amount):
                raise ValueError("signed for something else")
            return Signed(value, self.address, str(authorization["nonce"]), int(authorization["validBefore"]))
        except Exception as error:
            raise ValueError(type(error).__name__) from None


def read_key(named: Path) -> str:
    """64 hexadecimal digits, with or without 0x before them.  Raises ConfigError, which does not repeat what is in the file.

    The mode of a credential says nothing: where systemd lets the service read it by an access list, that shows as the group's permission.
    """
    path, guarded = secret_file("x402.wallet_key_file", named, os.environ)
    try:
        with path.open("rb") as file:
            mode = stat.S_IMODE(path.stat().st_mode)
            octets = file.read(MAX_KEY_FILE_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"x402.wallet_key_file: {path}: {error.strerror}") from None
    if mode & 0o077 and not guarded:
        raise ConfigError(f"x402.wallet_key_file: {path} has mode {mode:04o}: a key must be nobody else's to read: chmod 600 it")
    if not re.fullmatch(rb"\s*(0x)?[0-9a-fA-F]{64}\s*", octets):
        raise ConfigError(
            f"x402.wallet_key_file: {path}: it must hold one private key: 64 hexadecimal digits, 0x before them or not"
        )
    return octets.decode().strip()


def _identified(extensions: Any, identifier: str) -> dict[str, Any] | None:
    """Upstreams that have this extension know a repeat by the name it gives the debt, and a batch has the same name for ever.  No other
    extension is taken up."""
    declared = extensions.get(IDENTIFIER) if isinstance(extensions, dict) else None
    if not isinstance(declared, dict):
        return None
    info = declared.get("info")
    return {IDENTIFIER: declared | {"info": (info if isinstance(info, dict) else {}) | {"id": identifier}}}
