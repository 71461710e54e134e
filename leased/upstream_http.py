"""The HTTP client of the shipper: httpx2 on trio, with a whole-exchange time limit and a bounded answer.  And the shipper put together.

An extra (`leased[upstream]`), imported only when `upstream.url` is set.
"""

from __future__ import annotations

import os
import re
import ssl
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import trio

from leased.clock import Clock
from leased.config import secret_file
from leased.config_keys import X402, Upstream
from leased.errors import ConfigError
from leased.state.payments import read_spending
from leased.upstream import MAX_ANSWER_BYTES, Answer, Payer, Shipper, retry_after_of

if TYPE_CHECKING:
    from leased.billing import Billing
    from leased.state.journal import Journal
    from leased.state.ledger import Ledger
    from leased.state.writer import WriterThread

MAX_TOKEN_BYTES: Final = 16 * 1024
MAX_HEADERS: Final = 100  # of an answer that are looked at
CONNECTIONS: Final = 2
MAX_REASON_CHARACTERS: Final = 200


class Poster:
    """Posts bodies to upstream.  The credential file is read again whenever it has changed.  Raises ConfigError from the constructor."""

    def __init__(self, config: Upstream, clock: Clock) -> None:
        try:
            import httpx2
        except ImportError:
            raise ConfigError(
                f"upstream.url: shipping needs more packages: in a checkout of leased, pip install '.[upstream]' for {sys.executable}"
            ) from None
        assert config.url is not None
        self._httpx = httpx2
        self._url = config.url
        self._clock = clock
        self._seconds = config.timeout_seconds
        self._token_file: Path | None = None
        if config.token_file is not None:
            self._token_file, _ = secret_file("upstream.token_file", config.token_file, os.environ)
        self._token_seen: tuple[int, int, int] | None = None
        self._token = ""
        try:  # without a file: the authorities the system trusts
            verify = ssl.create_default_context(cafile=None if config.ca_file is None else str(config.ca_file))
        except (OSError, ssl.SSLError) as error:
            raise ConfigError(f"upstream.ca_file: {config.ca_file}: {error}") from None
        limits = httpx2.Limits(max_connections=CONNECTIONS, max_keepalive_connections=CONNECTIONS)
        self._client: Any = httpx2.AsyncClient(
            verify=verify, proxy=config.proxy, trust_env=False, follow_redirects=False, timeout=config.timeout_seconds, http2=False,
            limits=limits,
        )  # fmt: skip

    async def post(self, body: bytes, headers: dict[str, str]) -> Answer:
        """One exchange.  Never raises but Cancelled, which leaves its outcome unknown."""
        try:
            token = await trio.to_thread.run_sync(self._read_token)
        except (OSError, ValueError) as error:
            said = error.strerror if isinstance(error, OSError) else "it does not hold one line of printable ASCII"
            return Answer(0, error=f"upstream.token_file: {self._token_file}: {said}")
        if token:
            headers = headers | {"authorization": f"Bearer {token}"}
        try:
            with trio.fail_after(self._seconds):
                return await self._exchange(body, headers)
        except trio.TooSlowError:
            return Answer(0, error=f"no answer within {self._seconds:g} s")
        except (self._httpx.ConnectError, self._httpx.ProxyError, OSError) as error:
            return Answer(0, error=f"{type(error).__name__}: {_reason(error)}"[:MAX_REASON_CHARACTERS])
        except Exception as error:  # its text may repeat what was sent: the credential
            return Answer(0, error=type(error).__name__)

    async def _exchange(self, body: bytes, headers: dict[str, str]) -> Answer:
        async with self._client.stream("POST", self._url, content=body, headers=headers) as response:
            answered = [(name.lower(), value) for name, value in response.headers.items()][:MAX_HEADERS]
            retry_after = retry_after_of(response.headers.get("retry-after"), self._clock.now().wall)
            answer = Answer(response.status_code, retry_after, tuple(answered))
            try:
                return answer._replace(body=await self._read(response))
            except (self._httpx.HTTPError, self._httpx.StreamError):
                return answer  # the status has been said, and that is what counts

    async def _read(self, response: Any) -> bytes:
        """What there is of the body within its bound, and within half of the time there is: the status is known, and a demand for payment
        is all that is ever read.  A connection left half read is closed."""
        kept = bytearray()
        with trio.move_on_after(self._seconds / 2):
            async for chunk in response.aiter_raw():
                kept += chunk[: MAX_ANSWER_BYTES - len(kept)]
                if len(kept) >= MAX_ANSWER_BYTES:
                    break
        return bytes(kept)

    def _read_token(self) -> str:
        """Raises OSError, or ValueError for what cannot stand in a header; neither repeats it."""
        if self._token_file is None:
            return ""
        path = self._token_file
        status = path.stat()
        seen = (status.st_mtime_ns, status.st_ino, status.st_size)
        if seen != self._token_seen:
            with path.open("rb") as file:
                octets = file.read(MAX_TOKEN_BYTES + 1).strip()
            if len(octets) > MAX_TOKEN_BYTES or not re.fullmatch(rb"[!-~]+", octets):
                raise ValueError
            self._token = octets.decode("ascii")
            self._token_seen = seen
        return self._token

    async def close(self) -> None:
        """Cancellation leaves connections to the end of the process."""
        await self._client.aclose()


def _reason(error: BaseException) -> str:
    """What the system or the TLS library says, however deep it was wrapped: nothing of a request is in that."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError) and str(cause):
            return str(cause)
        cause = cause.__cause__ or cause.__context__
    return str(error)


def make_shipper(
    upstream: Upstream,
    x402: X402,
    billing: Billing,
    journal: Journal,
    writer: WriterThread,
    ledger: Ledger,
    clock: Clock,
    install_id: str,
) -> Shipper:
    """Poster, payer if there is a wallet, and shipper.  Before the writer has work.  Raises ConfigError, or RecordDamaged for a payment under
    way that cannot be read."""
    payer: Payer | None = None
    if x402.wallet_key_file is not None:
        from leased.payer import X402Payer
        from leased.wallet import Wallet

        payer = X402Payer(x402, Wallet(x402.wallet_key_file), read_spending(ledger), billing, journal, clock)
    return Shipper(upstream, billing, journal, writer, clock, install_id, Poster(upstream, clock).post, payer)
