"""The HTTP client of the shipper: httpx2 on trio, with a whole-exchange time limit and a bounded answer.

An extra (`leased[upstream]`), imported only when `upstream.url` is set.
"""

from __future__ import annotations

import ssl
from pathlib import Path
from typing import Any

import trio

from leased.clock import Clock
from leased.config_keys import Upstream
from leased.errors import ConfigError
from leased.upstream import MAX_ANSWER_BYTES, Answer, retry_after_of


class Poster:
    """Posts bodies to upstream.  The credential file is read again whenever it has changed.  Raises ConfigError from the constructor."""

    def __init__(self, config: Upstream, clock: Clock) -> None:
        try:
            import httpx2
        except ModuleNotFoundError:
            raise ConfigError("upstream.url: shipping needs the extra: pip install 'leased[upstream]'") from None
        assert config.url is not None
        self._httpx = httpx2
        self._url = config.url
        self._clock = clock
        self._seconds = config.timeout_seconds
        self._token_file = config.token_file
        self._token_seen: tuple[int, int] | None = None
        self._token = ""
        verify: ssl.SSLContext | bool = True
        if config.ca_file is not None:
            try:
                verify = ssl.create_default_context(cafile=str(config.ca_file))
            except (OSError, ssl.SSLError) as error:
                raise ConfigError(f"upstream.ca_file: {config.ca_file}: {error}") from None
        self._client: Any = httpx2.AsyncClient(
            verify=verify, proxy=config.proxy, trust_env=False, follow_redirects=False, timeout=config.timeout_seconds, http2=False
        )

    async def post(self, body: bytes, headers: dict[str, str]) -> Answer:
        """One exchange.  Never raises but Cancelled, which leaves its outcome unknown."""
        try:
            token = await trio.to_thread.run_sync(self._read_token)
        except OSError as error:
            return Answer(0, error=f"{self._token_file}: {error.strerror}")
        if token:
            headers = headers | {"authorization": f"Bearer {token}"}
        try:
            with trio.fail_after(self._seconds):
                return await self._exchange(body, headers)
        except trio.TooSlowError:
            return Answer(0, error=f"no answer within {self._seconds:g} s")
        except (self._httpx.HTTPError, self._httpx.StreamError, OSError, ssl.SSLError) as error:
            return Answer(0, error=f"{type(error).__name__}: {error}"[:200])

    async def _exchange(self, body: bytes, headers: dict[str, str]) -> Answer:
        async with self._client.stream("POST", self._url, content=body, headers=headers) as response:
            kept = bytearray()
            async for chunk in response.aiter_raw():
                kept += chunk[: MAX_ANSWER_BYTES - len(kept)]
                if len(kept) >= MAX_ANSWER_BYTES:
                    break  # the status is known; the rest of a hostile body is not waited for
            retry_after = retry_after_of(response.headers.get("retry-after"), self._clock.now().wall)
            return Answer(response.status_code, retry_after, tuple(response.headers.items()), bytes(kept))

    def _read_token(self) -> str:
        if self._token_file is None:
            return ""
        status = Path(self._token_file).stat()
        seen = (status.st_mtime_ns, status.st_ino)
        if seen != self._token_seen:
            self._token = Path(self._token_file).read_text().strip()
            self._token_seen = seen
        return self._token

    async def close(self) -> None:
        """Cancellation leaves connections to the end of the process."""
        await self._client.aclose()
