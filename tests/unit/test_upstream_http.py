"""The HTTP client against servers that misbehave: bounded in time and memory, and silent about its credential."""

from __future__ import annotations

import socket
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import trio

from leased.clock import HostClock
from leased.config_keys import Upstream
from leased.errors import ConfigError
from leased.upstream import MAX_ANSWER_BYTES, Answer
from leased.upstream_http import Poster

Serve = Callable[[trio.SocketStream], Awaitable[None]]
BODY = b'[{"id":"1"}]'
QUICK = 0.3  # seconds an exchange may take here
PATIENT = 10.0


@asynccontextmanager
async def serving(serve: Serve, tls: ssl.SSLContext | None = None) -> AsyncIterator[int]:
    """A server on loopback.  Yields its port."""
    listeners = await trio.open_tcp_listeners(0, host="127.0.0.1")

    async def served(stream: Any) -> None:
        whole = trio.SSLStream(stream, tls, server_side=True) if tls is not None else stream
        try:
            await serve(whole)
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            pass
        await trio.aclose_forcefully(whole)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(trio.serve_listeners, served, listeners)
        yield listeners[0].socket.getsockname()[1]
        nursery.cancel_scope.cancel()


async def request_of(stream: Any) -> bytes:
    """Head and body of one request."""
    octets = b""
    while not octets.endswith(BODY):
        octets += await stream.receive_some()
    return octets


def answering(octets: bytes, seen: list[bytes] | None = None) -> Serve:
    async def serve(stream: trio.SocketStream) -> None:
        request = await request_of(stream)
        if seen is not None:
            seen.append(request)
        await stream.send_all(octets)

    return serve


async def posted(serve: Serve, *, seconds: float = PATIENT, **settings: Any) -> Answer:
    async with serving(serve) as port:
        poster = Poster(Upstream(f"http://127.0.0.1:{port}/events", timeout_seconds=seconds, **settings), HostClock())
        with trio.fail_after(PATIENT + 5):
            answer = await poster.post(BODY, {"content-type": "application/json", "idempotency-key": "k"})
        await poster.close()
    return answer


@pytest.mark.trio
async def test_an_exchange(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("s3cret\n")
    seen: list[bytes] = []
    answer = await posted(
        answering(b"HTTP/1.1 202 Accepted\r\nRetry-After: 7\r\nX-One: 1\r\nContent-Length: 2\r\n\r\nok", seen), token_file=token
    )
    assert (answer.status, answer.retry_after, answer.header("x-one"), answer.body, answer.error) == (202, 7.0, "1", b"ok", "")
    head = seen[0].lower()
    assert head.startswith(b"post /events http/1.1\r\n")
    assert b"authorization: bearer s3cret\r\n" in head and b"idempotency-key: k\r\n" in head


@pytest.mark.trio
async def test_nobody_there() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    poster = Poster(Upstream(f"http://127.0.0.1:{port}/"), HostClock())
    answer = await poster.post(BODY, {})
    assert (answer.status, "ConnectError" in answer.error) == (0, True)


@pytest.mark.parametrize(
    "octets",
    [
        b"",
        b"HTTP/1.1 2",
        b"HTTP/9.9 xyz\r\n\r\n",
        b"\x00\xff" * 100,
        b"HTTP/1.1 200 OK\r\n" + b"X: " + b"y" * 300_000 + b"\r\n\r\n",
    ],
)
@pytest.mark.trio
async def test_what_is_no_answer_is_an_unknown_outcome(octets: bytes) -> None:
    answer = await posted(answering(octets))
    assert answer.status == 0
    assert answer.error


@pytest.mark.trio
async def test_silence_ends_at_the_time_limit() -> None:
    async def serve(stream: trio.SocketStream) -> None:
        await request_of(stream)
        await trio.sleep_forever()

    assert await posted(serve, seconds=QUICK) == Answer(0, error="no answer within 0.3 s")


@pytest.mark.trio
async def test_a_head_that_drips_ends_at_the_time_limit_of_the_whole() -> None:
    """Each byte comes well within any time limit for one."""

    async def serve(stream: trio.SocketStream) -> None:
        await request_of(stream)
        await stream.send_all(b"HTTP/1.1 200 OK\r\nX: ")
        while True:
            await stream.send_all(b"y")
            with trio.move_on_after(0.02):
                await trio.sleep_forever()

    assert (await posted(serve, seconds=QUICK)).status == 0


@pytest.mark.parametrize("status", [200, 402, 503])
@pytest.mark.trio
async def test_a_body_without_end_is_read_up_to_its_bound(status: int) -> None:
    async def serve(stream: trio.SocketStream) -> None:
        await request_of(stream)
        await stream.send_all(f"HTTP/1.1 {status} Said\r\nContent-Length: {1 << 40}\r\n\r\n".encode())
        while True:
            await stream.send_all(b"z" * 65536)

    answer = await posted(serve)
    assert (answer.status, len(answer.body)) == (status, MAX_ANSWER_BYTES)


@pytest.mark.parametrize("status", [202, 402])
@pytest.mark.trio
async def test_a_body_that_hangs_does_not_unsay_the_status(status: int) -> None:
    """Else a batch that was taken would be sent for ever."""

    async def serve(stream: trio.SocketStream) -> None:
        await request_of(stream)
        await stream.send_all(f"HTTP/1.1 {status} Said\r\nContent-Length: 100\r\n\r\nhalf".encode())
        await trio.sleep_forever()

    assert await posted(serve, seconds=QUICK * 2) == Answer(status, 0.0, (("content-length", "100"),), b"half")


@pytest.mark.trio
async def test_a_body_cut_short_does_not_unsay_it_either() -> None:
    answer = await posted(answering(b"HTTP/1.1 202 Accepted\r\nContent-Length: 100\r\n\r\nhalf"))
    assert answer.status == 202


@pytest.mark.trio
async def test_a_redirect_is_an_answer_and_not_followed() -> None:
    """The credential and the bill go where the configuration says."""
    seen: list[bytes] = []
    answer = await posted(answering(b"HTTP/1.1 307 Go\r\nLocation: http://127.0.0.1:1/\r\nContent-Length: 0\r\n\r\n", seen))
    assert (answer.status, len(seen)) == (307, 1)


@pytest.mark.trio
async def test_compressed_bodies_are_not_unpacked() -> None:
    answer = await posted(answering(b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nContent-Length: 4\r\n\r\nbomb"))
    assert (answer.status, answer.body) == (200, b"bomb")


@pytest.mark.trio
async def test_the_environment_chooses_no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:1")
    monkeypatch.setenv("ALL_PROXY", "http://127.0.0.1:1")
    assert (await posted(answering(b"HTTP/1.1 204 No\r\n\r\n"))).status == 204


@pytest.mark.trio
async def test_a_configured_proxy_is_used() -> None:
    seen: list[bytes] = []
    async with serving(answering(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n", seen)) as port:
        poster = Poster(Upstream("http://localhost:1/events", proxy=f"http://127.0.0.1:{port}"), HostClock())
        assert (await poster.post(BODY, {})).status == 200
    assert seen[0].startswith(b"POST http://localhost:1/events HTTP/1.1\r\n")


# ---- the credential


@pytest.mark.trio
async def test_the_credential_is_read_again_when_its_file_has_changed(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("first")
    seen: list[bytes] = []

    async def serve(stream: trio.SocketStream) -> None:
        while True:
            seen.append(await request_of(stream))
            await stream.send_all(b"HTTP/1.1 204 No\r\n\r\n")

    async with serving(serve) as port:
        poster = Poster(Upstream(f"http://127.0.0.1:{port}/", token_file=token), HostClock())
        await poster.post(BODY, {})
        await poster.post(BODY, {})
        fresh = tmp_path / "fresh"
        fresh.write_text("second")
        fresh.replace(token)
        await poster.post(BODY, {})
    assert [b"Bearer first" in request for request in seen] == [True, True, False]
    assert b"Bearer second" in seen[2]


@pytest.mark.parametrize("content", [b"", b"two\nlines", b"sp ace", b"\xff\xfe", "caf\u00e9".encode(), b"x" * 20_000])
@pytest.mark.trio
async def test_a_credential_that_cannot_be_sent_is_not_repeated(tmp_path: Path, content: bytes) -> None:
    token = tmp_path / "token"
    token.write_bytes(content)
    poster = Poster(Upstream("http://127.0.0.1:9/", token_file=token), HostClock())
    answer = await poster.post(BODY, {})
    assert (answer.status, "it does not hold one line of printable ASCII" in answer.error) == (0, True)
    assert not content or content.decode(errors="replace") not in answer.error


@pytest.mark.trio
async def test_a_credential_that_is_not_there_is_waited_for(tmp_path: Path) -> None:
    poster = Poster(Upstream("http://127.0.0.1:9/", token_file=tmp_path / "none"), HostClock())
    answer = await poster.post(BODY, {})
    assert (answer.status, answer.error.endswith("No such file or directory")) == (0, True)


# ---- TLS


CERTIFICATE = """\
-----BEGIN CERTIFICATE-----
MIIBlTCCATugAwIBAgIUf8IyWfSGzow9dg1LLLEw0UEuOIUwCgYIKoZIzj0EAwIw
FDESMBAGA1UEAwwJbG9jYWxob3N0MCAXDTI2MTEyOTIxNDUzN1oYDzIxMjYxMTA1
MjE0NTM3WjAUMRIwEAYDVQQDDAlsb2NhbGhvc3QwWTATBgcqhkjOPQIBBggqhkjO
PQMBBwNCAATXWB0LkDk9WyNunZeYbUxPCSky/VlYjKDS7H3c/00an8wcLrzxX9uM
tSYJ3tB77zcxsP+oFtZoq7pxzBsQ5cBjo2kwZzAdBgNVHQ4EFgQUYAgAcQDqX9ZH
7TpgYa9j/5NhsQowHwYDVR0jBBgwFoAUYAgAcQDqX9ZH7TpgYa9j/5NhsQowDwYD
VR0TAQH/BAUwAwEB/zAUBgNVHREEDTALgglsb2NhbGhvc3QwCgYIKoZIzj0EAwID
SAAwRQIgdQKx642HH0j/GMEx2t2vl8GLuAQgNKKVF/kpG3ztCqUCIQD2F1kV6bmd
/+sTRLJrD16H7SWp5WK5wKfL1drYiz9l8Q==
-----END CERTIFICATE-----
"""
KEY = """\
-----BEGIN PRIVATE KEY-----
MIGHAgEAMBMGByqGSM49AgEGCCqGSM49AwEHBG0wawIBAQQg2XjuawsoHbIdQImt
CbNkyeaiRRDZiJhzcIn0BKqR1kmhRANCAATXWB0LkDk9WyNunZeYbUxPCSky/VlY
jKDS7H3c/00an8wcLrzxX9uMtSYJ3tB77zcxsP+oFtZoq7pxzBsQ5cBj
-----END PRIVATE KEY-----
"""
"""Of localhost, its own authority, good for a hundred years, and worth nothing."""


@pytest.fixture
def certificate(tmp_path: Path) -> tuple[Path, Path]:
    """(certificate, key)."""
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    cert.write_text(CERTIFICATE)
    key.write_text(KEY)
    return cert, key


@pytest.mark.trio
async def test_tls_is_verified_against_the_configured_authority_alone(certificate: tuple[Path, Path]) -> None:
    cert, key = certificate
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(cert, key)
    async with serving(answering(b"HTTP/1.1 204 No\r\n\r\n"), context) as port:
        url = f"https://localhost:{port}/events"
        trusting = Poster(Upstream(url, ca_file=cert), HostClock())
        assert (await trusting.post(BODY, {})).status == 204
        strict = Poster(Upstream(url), HostClock())
        answer = await strict.post(BODY, {})
        assert (answer.status, "certificate verify failed" in answer.error.lower()) == (0, True)
        elsewhere = Poster(Upstream(url.replace("localhost", "127.0.0.1"), ca_file=cert), HostClock())
        assert (await elsewhere.post(BODY, {})).status == 0


def test_an_authority_that_cannot_be_read_is_the_configurations_fault(tmp_path: Path) -> None:
    (tmp_path / "ca.pem").write_text("nothing")
    for path in (tmp_path / "ca.pem", tmp_path / "none"):
        with pytest.raises(ConfigError, match=r"upstream\.ca_file"):
            Poster(Upstream("https://localhost/", ca_file=path), HostClock())
