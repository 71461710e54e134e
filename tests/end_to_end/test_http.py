"""HTTP on the Unix socket and on TCP: every route, every status, and the same leases as through the other door."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from typing import Any

import pytest
from daemons import Daemon, MakeDaemon, run_leased
from http_peer import Http, request

CONFIG = """
[http]
listen = "127.0.0.1:0"

[limits]
message_seconds = 1
"""


@pytest.fixture(scope="module")
def served(make_shared_daemon: MakeDaemon) -> Daemon:
    return make_shared_daemon(CONFIG).start()


@pytest.fixture(scope="module")
def secret(served: Daemon) -> str:
    """An agent key for the namespace of the socket's callers, so that both transports see one another."""
    with served.rpc() as rpc:
        told = rpc.call("agent_add", name="tests", namespace="local")
    assert told["added"] is True and told["namespace"] == "local"
    return str(told["secret"])


def tcp(daemon: Daemon) -> tuple[str, int]:
    host, _, port = daemon.events("http.listening")[-1]["address"].rpartition(":")
    return host, int(port)


@pytest.fixture
def http(served: Daemon) -> Iterator[Http]:
    with Http(served.socket) as connection:
        yield connection


@pytest.fixture
def remote(served: Daemon) -> Iterator[Http]:
    with Http(tcp(served)) as connection:
        yield connection


# ---- the routes


def test_a_lease_goes_through_its_whole_life(http: Http) -> None:
    granted = http.post("/v1/lease", key="life", holder="a", ttl_seconds=30, scope="s life")
    assert granted.status == 200 and granted.json["acquired"] is True and granted.json["ttl_seconds"] == 30
    assert granted.headers["content-type"] == "application/json" and granted.headers["cache-control"] == "no-store"
    fence = granted.json["fence"]
    renewed = http.post("/v1/lease/renew", key="life", holder="a", fence=fence, ttl_seconds=40).json
    assert renewed["renewed"] is True and renewed["generation"] == granted.json["generation"] and renewed["ttl_seconds"] == 40
    checked = http.post("/v1/lease/check", key="life", generation=renewed["generation"]).json
    assert checked["held"] is True and checked["current"] is True and checked["held_by"] == "a"
    listed = http.ask("GET", "/v1/leases?scope=s%20life&holder=&limit=5&cursor=").json
    assert [entry["key"] for entry in listed["leases"]] == ["life"] and listed["cursor"] is None
    resumed = http.post("/v1/resume", scope="s life").json
    assert [entry["generation"] for entry in resumed["leases"]] == [renewed["generation"]] and resumed["switch"] is None
    armed = http.post("/v1/heartbeat", scope="s life", expect_within_seconds=60).json
    assert armed["armed"] is True and 59 < armed["due_in_seconds"] <= 60
    assert http.post("/v1/heartbeat", scope="s life", disarm=True).json["armed"] is False
    assert http.ask("GET", "/v1/usage").json["namespace"] == "local"
    assert http.post("/v1/lease/release", key="life", fence=fence).json["released"] is True
    again = http.post("/v1/lease/release", key="life", fence=fence)
    assert again.status == 200 and again.json["released"] is False and again.json["reason"] == "expired"
    assert "retry-after" not in again.headers


def test_every_parameter_of_lease_is_taken(http: Http) -> None:
    fields = {
        "key": "all parameters", "holder": "a", "ttl_seconds": "30", "scope": "s", "wait_seconds": 0, "bind": "connection",
        "request_id": "r" * 22, "fence": None, "agent_key": None,
    }  # fmt: skip
    granted = http.ask("POST", "/v1/lease", fields).json
    assert granted["acquired"] is True and granted["scope"] == "s"
    assert http.ask("POST", "/v1/lease", fields).json["fence"] == granted["fence"], "a repeat of the request_id is the same grant"


def test_a_refusal_is_an_answer_with_retry_after_rounded_up(http: Http) -> None:
    http.post("/v1/lease", key="held", holder="a", ttl_seconds=30)
    refused = http.post("/v1/lease", key="held", holder="b")
    assert refused.status == 200 and refused.json["acquired"] is False and refused.json["reason"] == "held"
    assert 29 <= refused.json["retry_after_seconds"] <= 30 and refused.headers["retry-after"] == "30"


def test_the_same_lease_through_all_doors(served: Daemon, http: Http, remote: Http, secret: str) -> None:
    bearer = {"authorization": f"Bearer {secret}"}
    claimed = remote.ask("POST", "/agent-lock", {"arguments": {"key": "shared"}}, **bearer).json
    assert claimed["acquired"] is True
    assert http.post("/v1/lease", key="shared", holder="b").json["held_by"].startswith("agent-lock:")
    with served.rpc() as rpc:
        assert rpc.call("lease", key="shared", holder="c")["acquired"] is False
        assert rpc.call("check", key="shared", agent_key=secret)["generation"] == claimed["generation"]
        assert rpc.call("release", key="shared", fence=claimed["token"])["released"] is True
        mine = rpc.call("lease", key="shared", holder="c", ttl_seconds=20)
    assert remote.ask("POST", "/v1/lease/check", {"key": "shared"}, **bearer).json["held_by"] == "c"
    assert http.post("/v1/lease/release", key="shared", fence=mine["fence"]).json["released"] is True


def test_a_newcomer_over_http_serves_a_waiter_of_the_other_door(served: Daemon, http: Http) -> None:
    fence = http.post("/v1/lease", key="handed over", holder="a").json["fence"]
    with served.rpc() as rpc:
        waiting = rpc.post("lease", key="handed over", holder="b", wait_seconds=20)
        while http.post("/v1/lease/check", key="handed over").json["waiting"] != 1:
            pass
        assert http.post("/v1/lease/release", key="handed over", fence=fence).json["released"] is True
        assert rpc.answer(waiting)["acquired"] is True


# ---- /agent-lock


def test_agent_lock_claims_keeps_checks_and_releases(http: Http) -> None:
    claimed = http.ask("POST", "/agent-lock", {"arguments": {"op": "claim", "key": "al", "ttl_seconds": 20}}).json
    assert set(claimed) == {
        "op",
        "key",
        "acquired",
        "token",
        "generation",
        "ttl_seconds",
        "expires_at",
        "expires_in_seconds",
        "charge",
    }
    assert claimed["op"] == "claim" and claimed["ttl_seconds"] == 20 and claimed["charge"]["amount"] == "0"
    refused = http.ask("POST", "/agent-lock", {"key": "al"})
    assert refused.status == 200 and refused.json["acquired"] is False and refused.json["token"] is None
    assert refused.json["held_by"].startswith("agent-lock:") and refused.headers["retry-after"] == "20"
    kept = http.ask("POST", "/agent-lock", {"key": "al", "token": claimed["token"], "ttl_seconds": 50}).json
    assert kept["token"] == claimed["token"] and kept["generation"] == claimed["generation"] and kept["expires_in_seconds"] > 49
    checked = http.ask("POST", "/agent-lock", {"arguments": {"op": "check", "key": "al"}}).json
    assert checked["held"] is True and set(checked) == {
        "op",
        "key",
        "held",
        "held_by",
        "expires_at",
        "expires_in_seconds",
        "charge",
    }
    released = http.ask("POST", "/agent-lock", {"op": "release", "key": "al", "token": claimed["token"]})
    assert released.status == 200 and set(released.json) == {"op", "key", "released", "charge"}
    assert http.ask("POST", "/agent-lock", {"op": "check", "key": "al"}).json["held"] is False


def test_a_claim_with_a_dead_token_is_a_fresh_claim_and_with_a_wrong_one_refused(http: Http) -> None:
    first = http.ask("POST", "/agent-lock", {"key": "al2"}).json
    http.ask("POST", "/agent-lock", {"key": "al2", "op": "release", "token": first["token"]})
    second = http.ask("POST", "/agent-lock", {"key": "al2", "token": first["token"]}).json
    assert second["acquired"] is True and second["token"] != first["token"] and second["generation"] > first["generation"]
    assert http.ask("POST", "/agent-lock", {"key": "al2", "token": first["token"]}).json["reason"] == "wrong_fence"


@pytest.mark.parametrize("token", [str(2**60 + 1), 2**60 + 1, "abc", "1", "", None], ids=repr)
def test_releasing_with_an_invalid_token_is_a_conflict(http: Http, token: Any) -> None:
    http.ask("POST", "/agent-lock", {"key": "al3"})
    answer = http.ask("POST", "/agent-lock", {"arguments": {"op": "release", "key": "al3", "token": token}})
    assert (answer.status, answer.code) == (409, "invalid_token")


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({}, "key"), ({"arguments": {}}, "key"), ({"key": "k", "op": "steal"}, "op"), ({"key": "k", "fence": "1"}, "fence"),
        ({"arguments": []}, "arguments"), ({"arguments": {"key": "k"}, "name": "agent_lock"}, "name"),
        ({"key": "k", "op": "release", "token": True}, "token"), ({"key": "k", "token": "abc"}, "token"),
    ],
)  # fmt: skip
def test_agent_lock_names_the_wrong_field(http: Http, fields: dict[str, Any], named: str) -> None:
    answer = http.ask("POST", "/agent-lock", fields)
    assert answer.status == 400 and answer.code == "invalid_argument" and answer.json["detail"].startswith(named)


# ---- every other status


@pytest.mark.parametrize(
    ("octets", "status", "code"),
    [
        (request("POST", "/v1/lease", {"key": "k", "holder": "h", "ttl_second": 5}), 400, "invalid_argument"),
        (request("POST", "/v1/lease", body=b"{"), 400, "invalid_argument"),
        (request("POST", "/v1/lease", body=b'{"key":"k","key":"l","holder":"h"}'), 400, "invalid_argument"),
        (request("POST", "/v1/lease", body=b'{"key":"k","holder":"h","ttl_seconds":NaN}'), 400, "invalid_argument"),
        (request("POST", "/v1/lease", body=b"[" * 60000), 400, "invalid_argument"),
        (request("POST", "/v1/lease", body=b"[]"), 400, "invalid_argument"),
        (request("POST", "/v1/lease", body=b'{"key":"\xff","holder":"h"}'), 400, "invalid_argument"),
        (request("POST", "/v1/lease", body=b'{"key":"\\ud800","holder":"h"}'), 400, "invalid_argument"),
        (request("GET", "/v1/leases?limit=0"), 400, "invalid_argument"),
        (request("GET", "/v1/leases?limit=1&limit=2"), 400, "invalid_argument"),
        (request("GET", "/v1/leases?agent_key=x"), 400, "invalid_argument"),
        (request("GET", "/v1/leases?scope=%ff"), 400, "invalid_argument"),
        (request("GET", "/v1/leases", host=None), 400, "invalid_argument"),
        (b"GET /v1/leases HTTP/2.0\r\nhost: localhost\r\n\r\n", 400, "invalid_argument"),
        (b"HELLO\r\n\r\n", 400, "invalid_argument"),
        (request("GET", "/v1/leases", authorization="Bearer nobody"), 401, "unauthenticated"),
        (request("GET", "/v1/leases", authorization="Basic YTpi"), 401, "unauthenticated"),
        (request("POST", "/v1/lease", {"key": "k", "holder": "h", "agent_key": "nobody"}), 401, "unauthenticated"),
        (request("GET", "/v1/leases", origin="http://localhost"), 403, "permission_denied"),
        (request("GET", "/healthz", referer="http://localhost/"), 403, "permission_denied"),
        (request("GET", "/healthz", sec_fetch_site="cross-site"), 403, "permission_denied"),
        (request("GET", "/healthz", host="evil.example"), 403, "permission_denied"),
        (request("GET", "/healthz", host="localhost.evil.example:80"), 403, "permission_denied"),
        (request("GET", "/healthz", host="localhost@evil.example"), 403, "permission_denied"),
        (request("GET", "http://evil.example/healthz"), 403, "permission_denied"),
        (request("GET", "/"), 404, "unknown_method"),
        (request("GET", "/v1/lease/"), 404, "unknown_method"),
        (request("GET", "/v1/%6cease"), 404, "unknown_method"),
        (request("DELETE", "/v1/lease"), 405, "unknown_method"),
        (request("HEAD", "/v1/lease").replace(b"HEAD", b"PUT", 1), 405, "unknown_method"),
        (request("POST", "/v1/lease", body=b"x" * 70000), 413, "too_large"),
        (request("POST", "/v1/lease", {"key": "k", "holder": "h"}, content_type="text/plain"), 415, "invalid_argument"),
        (request("GET", "/healthz", x_long="x" * 17000), 431, "too_large"),
        (request("POST", "/v1/lease", transfer_encoding="gzip", content_length=None), 501, "invalid_argument"),
    ],
)  # fmt: skip
def test_the_status_of_what_is_wrong(http: Http, octets: bytes, status: int, code: str) -> None:
    http.send(octets)
    answer = http.response()
    assert (answer.status, answer.code) == (status, code), answer
    if status == 401:
        assert answer.headers["www-authenticate"].startswith("Bearer ")
    if status == 405:
        assert answer.headers["allow"] == "POST"


def test_a_wrong_request_that_is_whole_does_not_end_the_connection(http: Http) -> None:
    for path, fields in (("/nowhere", {"key": "k"}), ("/v1/lease", {"key": 1}), ("/v1/lease", {"key": "k" * 2000, "holder": "h"})):
        assert http.ask("POST", path, fields).status in (400, 404)
    assert http.ask("GET", "/healthz").json == {"alive": True}


def test_a_head_is_answered_without_a_body(http: Http) -> None:
    head = http.ask("HEAD", "/healthz")
    assert head.status == 200 and head.headers["content-length"] == "14"
    assert http.ask("GET", "/healthz").body == b'{"alive":true}', "nothing of a body was sent"
    http.send(request("HEAD", "/v1/lease"))
    refused = http.response(bodiless=True)
    assert refused.status == 405 and refused.headers["allow"] == "POST"


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:80", "127.0.0.1", "[::1]:8765", "leased", ""], ids=repr)
def test_names_of_this_host_are_taken(http: Http, host: str) -> None:
    assert http.ask("GET", "/healthz", host=host).status == 200


def test_a_wait_that_ends_without_a_grant_and_an_answer_nobody_knows(make_daemon: MakeDaemon) -> None:
    daemon = make_daemon("wait_out_seconds = 3600\n").start()
    daemon.kill()
    (daemon.runtime_dir / "data.mdb").unlink()  # as a power cut would
    daemon.start()
    with Http(daemon.socket) as http:
        unknown = http.post("/v1/lease", key="k", holder="h")
        assert unknown.status == 503 and unknown.json["acquired"] is None and unknown.json["reason"] == "recovering"
        assert int(unknown.headers["retry-after"]) == pytest.approx(3600, abs=60)
        assert http.post("/v1/lease/check", key="k").status == 503
        assert http.ask("POST", "/agent-lock", {"key": "k"}).json["acquired"] is None
        ready = http.ask("GET", "/readyz")
        assert ready.status == 503 and ready.json == {"ready": False, "reasons": ["recovering"]}
        assert http.ask("GET", "/healthz").status == 200


# ---- TCP and keys


def test_tcp_needs_a_key_and_the_header_and_the_body_must_agree(remote: Http, secret: str) -> None:
    assert remote.ask("GET", "/v1/leases").status == 401
    assert remote.ask("GET", "/metrics").status == 401
    assert (
        remote.ask("GET", "/healthz").status
        == remote.ask("GET", "/readyz").status
        == remote.ask("GET", "/openapi.json").status
        == 200
    )
    fields = {"key": "tcp", "holder": "h"}
    assert remote.ask("POST", "/v1/lease", fields).status == 401
    assert remote.ask("POST", "/v1/lease", fields | {"agent_key": secret}).json["acquired"] is True
    bearer = {"authorization": f"bearer {secret}"}
    assert remote.ask("POST", "/v1/lease", fields, **bearer).json["reason"] == "same_label"
    assert remote.ask("POST", "/v1/lease", fields | {"agent_key": secret}, **bearer).status == 200
    differ = remote.ask("POST", "/v1/lease", fields | {"agent_key": secret + "x"}, **bearer)
    assert differ.status == 401 and differ.json["detail"].startswith("agent_key differs")
    assert secret not in differ.body.decode()


@pytest.mark.parametrize("bind", ["process", "connection"])
def test_nothing_is_bound_over_tcp(remote: Http, secret: str, bind: str) -> None:
    answer = remote.ask("POST", "/v1/lease", {"key": "b", "holder": "h", "bind": bind, "agent_key": secret})
    assert answer.status == 400 and answer.json["detail"].startswith("bind ")


def test_a_foreign_host_is_refused_over_tcp_too(served: Daemon, remote: Http) -> None:
    assert remote.ask("GET", "/healthz", host="leased").status == 403, "a name that only the Unix socket has"
    assert remote.ask("GET", "/healthz", host="10.1.2.3").status == 403
    assert remote.ask("GET", "/healthz", host=f"127.0.0.1:{tcp(served)[1]}").status == 200


def test_a_key_that_is_revoked_counts_no_more_and_takes_its_waiters_along(served: Daemon) -> None:
    with served.rpc() as rpc, Http(tcp(served)) as first, Http(tcp(served)) as second:
        told = rpc.call("agent_add", name="short lived")
        bearer = {"authorization": f"Bearer {told['secret']}"}
        assert told["namespace"] == "short lived"
        assert rpc.call("agent_add", name="short lived") == {"added": False, "name": "short lived", "reason": "exists"}
        assert [agent["name"] for agent in rpc.call("agent_list")["agents"]][:1] == ["short lived"]
        assert first.ask("POST", "/v1/lease", {"key": "k", "holder": "a"}, **bearer).json["acquired"] is True
        second.send(request("POST", "/v1/lease", {"key": "k", "holder": "b", "wait_seconds": 60}, **bearer))
        while first.ask("POST", "/v1/lease/check", {"key": "k"}, **bearer).json["waiting"] != 1:
            pass
        assert rpc.call("agent_revoke", name="short lived") == {"revoked": True, "name": "short lived"}
        assert second.response().status == 401
        assert first.ask("POST", "/v1/lease/check", {"key": "k"}, **bearer).status == 401
        assert rpc.error("check", key="k", agent_key=told["secret"]).code == "unauthenticated"
        assert rpc.call("agent_revoke", name="short lived")["revoked"] is False
    assert told["secret"] not in served.logs()


def test_wrong_keys_are_answered_more_bluntly_the_more_there_are(make_daemon: MakeDaemon) -> None:
    daemon = make_daemon(CONFIG).start()
    with daemon.rpc() as rpc, Http(tcp(daemon)) as http:
        right = rpc.call("agent_add", name="right")["secret"]
        said = [http.ask("GET", "/v1/leases", authorization=f"Bearer wrong{at}").status for at in range(400)]
        assert said[:100] == [401] * 100 and 429 in said[100:]
        assert http.ask("GET", "/v1/leases", authorization=f"Bearer {right}").status == 200, "a right key is never locked out"
        assert rpc.error("check", key="k", agent_key="wrong").code == "unauthenticated", "another caller has its own account"


def test_keys_and_revocations_survive_restarts_and_the_command_works_with_and_without_a_daemon(make_daemon: MakeDaemon) -> None:
    daemon = make_daemon().start()
    place = ["--socket", daemon.socket, "--state-dir", daemon.state_dir, "--runtime-dir", daemon.runtime_dir]

    def agent(*arguments: str) -> subprocess.CompletedProcess[str]:
        return run_leased("agent", *place, *arguments)

    made = agent("add", "one", "--namespace", "shared")
    assert made.returncode == 0 and "not shown again" in made.stderr
    secret = made.stdout.strip()
    assert len(secret) >= 43 and agent("add", "one").returncode == 1
    assert agent("add", "uid:7").returncode == 64
    daemon.kill()
    offline = agent("add", "two").stdout.strip()
    assert agent("list").stdout.split("\t")[:2] == ["one", "shared"]
    daemon.start()
    with daemon.rpc() as rpc:
        assert rpc.call("info", agent_key=secret)["namespace"] == "shared"
        assert rpc.call("info", agent_key=offline)["namespace"] == "two"
    assert agent("revoke", "one").returncode == 0 and agent("revoke", "one").returncode == 1
    assert daemon.terminate() == 0
    assert agent("revoke", "two").returncode == 0
    daemon.start()
    with daemon.rpc() as rpc:
        assert rpc.error("info", agent_key=secret).code == rpc.error("info", agent_key=offline).code == "unauthenticated"
    for path in (*daemon.state_dir.iterdir(), *daemon.runtime_dir.iterdir(), daemon.log_path):
        if path.is_file():
            assert secret.encode() not in path.read_bytes() and offline.encode() not in path.read_bytes(), path


# ---- how HTTP is spoken


def test_pipelined_requests_are_answered_in_order_though_the_first_waits(http: Http, served: Daemon) -> None:
    fence = http.post("/v1/lease", key="pipe", holder="a").json["fence"]
    wait = {"key": "pipe", "holder": "b", "wait_seconds": 30}
    http.send(request("POST", "/v1/lease", wait) + request("GET", "/healthz"))
    with Http(served.socket) as other:
        while other.post("/v1/lease/check", key="pipe").json["waiting"] != 1:
            pass
    http.send(request("POST", "/v1/lease/release", {"key": "pipe", "fence": fence}) + request("GET", "/nowhere"))
    answers = [http.response() for _ in range(4)]
    assert [answer.status for answer in answers] == [200, 200, 200, 404]
    assert answers[0].json["acquired"] is True and answers[0].json["holder"] == "b", "the release that came later freed it"
    assert answers[2].json["released"] is True


def test_a_long_pipeline_is_answered_whole(http: Http) -> None:
    http.send(b"".join(request("POST", "/v1/lease/check", {"key": f"p{at}"}) for at in range(600)))
    assert [http.response().json["key"] for _ in range(600)] == [f"p{at}" for at in range(600)]


def test_chunked_bodies_in_any_pieces(http: Http) -> None:
    head = b"POST /v1/lease/check HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
    octets = head + b'6\r\n{"key"\r\n4;x=y\r\n:"c"\r\n1\r\n}\r\n0\r\nTrailer: t\r\n\r\n'
    for size in (len(octets), 7, 1):
        for at in range(0, len(octets), size):
            http.send(octets[at : at + size])
        assert http.response().json["key"] == "c"
    http.send(head + b"11000\r\n" + b"x" * 0x11000 + b"\r\n0\r\n\r\n")
    assert http.response().status == 413
    assert http.ended()


def test_a_client_that_waits_for_100_continue_gets_it(http: Http) -> None:
    body = b'{"key":"e"}'
    head = request("POST", "/v1/lease/check", body=body, expect="100-continue").removesuffix(body)
    http.send(head)
    assert http.response().status == 100
    http.send(body)
    assert http.response().json["key"] == "e"
    http.send(request("POST", "/nowhere", body=body, expect="100-continue").removesuffix(body))
    assert http.response().status == 404, "refused before the body was sent"


def test_connection_close_and_http_1_0_end_it(served: Daemon) -> None:
    with Http(served.socket) as http:
        answer = http.ask("GET", "/healthz", connection="close")
        assert answer.headers["connection"] == "close" and http.ended()
    with Http(served.socket) as http:
        http.send(b"GET /healthz HTTP/1.0\r\n\r\n")
        assert http.response().headers["connection"] == "close" and http.ended()


def test_a_half_closed_client_gets_its_answers(served: Daemon, secret: str) -> None:
    for where in (served.socket, tcp(served)):
        with Http(where) as http:
            http.send(request("POST", "/v1/lease/check", {"key": "half", "agent_key": secret}) * 3)
            http.socket.shutdown(socket.SHUT_WR)
            assert [http.response().status for _ in range(3)] == [200] * 3
            assert http.ended()


@pytest.mark.parametrize("over", ["unix", "tcp"])
def test_a_waiter_that_is_gone_never_gets_the_lease(served: Daemon, http: Http, secret: str, over: str) -> None:
    key = f"gone {over}"
    fence = http.post("/v1/lease", key=key, holder="a").json["fence"]
    waiter = Http(served.socket if over == "unix" else tcp(served))
    waiter.send(request("POST", "/v1/lease", {"key": key, "holder": "b", "wait_seconds": 60, "agent_key": secret}))
    while http.post("/v1/lease/check", key=key).json["waiting"] != 1:
        pass
    waiter.close()
    until = time.monotonic() + 10
    while http.post("/v1/lease/check", key=key).json["waiting"]:
        assert time.monotonic() < until, "it still waits"
    http.post("/v1/lease/release", key=key, fence=fence)
    assert http.post("/v1/lease/check", key=key).json["held"] is False


@pytest.mark.parametrize("over", ["unix", "tcp"])
def test_one_that_sends_more_than_it_is_answered_costs_nothing_and_is_seen_to_go(
    served: Daemon, http: Http, secret: str, over: str
) -> None:
    key = f"crowd {over}"
    http.post("/v1/lease", key=key, holder="a", ttl_seconds=600)
    crowd = Http(served.socket if over == "unix" else tcp(served), timeout=0.3)
    wait = {"key": key, "wait_seconds": 60, "agent_key": secret, "scope": "s" * 200}
    try:
        for at in range(3000):
            crowd.send(request("POST", "/v1/lease", wait | {"holder": f"w{at}"}))
    except OSError:
        assert at > 16
    waiting = http.post("/v1/lease/check", key=key).json["waiting"]
    assert 0 < waiting <= 16
    crowd.close()
    until = time.monotonic() + 10
    while http.post("/v1/lease/check", key=key).json["waiting"]:
        assert time.monotonic() < until, "they still wait"


def test_slow_and_silent_peers_are_timed_out_and_harm_nobody(served: Daemon, http: Http, secret: str) -> None:
    for where in (served.socket, tcp(served)):
        slow = Http(where)
        slow.send(b"POST /v1/lease HTTP/1.1\r\nHost: localhost\r\n")
        begun = time.monotonic()
        try:
            while slow.silent(0.1):
                slow.send(b"x-slow: 1\r\n")
                assert http.ask("GET", "/healthz").status == 200
                assert time.monotonic() < begun + 10
            assert slow.response().status == 408
        finally:
            slow.close()
        assert time.monotonic() - begun > 0.9


def test_a_lease_bound_to_its_connection_ends_with_it(served: Daemon, http: Http) -> None:
    with Http(served.socket) as other:
        assert other.post("/v1/lease", key="bound", holder="a", bind="connection").json["acquired"] is True
        assert http.post("/v1/lease/check", key="bound").json["held"] is True
    until = time.monotonic() + 10
    while http.post("/v1/lease/check", key="bound").json["held"]:
        assert time.monotonic() < until


def test_a_stop_answers_what_is_under_way(make_daemon: MakeDaemon) -> None:
    daemon = make_daemon(CONFIG).start()
    with Http(daemon.socket) as http, Http(daemon.socket) as waiter:
        http.post("/v1/lease", key="k", holder="a")
        waiter.send(request("POST", "/v1/lease", {"key": "k", "holder": "b", "wait_seconds": 60}))
        while http.post("/v1/lease/check", key="k").json["waiting"] != 1:
            pass
        assert daemon.terminate() == 0
        answer = waiter.response()
        assert answer.status == 503 and answer.json["acquired"] is None and answer.json["reason"] == "shutting_down"
        assert answer.headers["connection"] == "close" and waiter.ended()


def test_connections_over_tcp_are_limited_for_each_address(make_daemon: MakeDaemon) -> None:
    daemon = make_daemon(CONFIG + "max_connections_per_uid = 3\n").start()
    open_ones = [Http(tcp(daemon)) for _ in range(3)]
    try:
        for each in open_ones:
            assert each.ask("GET", "/healthz").status == 200
        with Http(tcp(daemon)) as fourth:
            assert fourth.response().code == "rate_limited" and fourth.ended()
        with Http(daemon.socket) as local:
            assert local.ask("GET", "/healthz").status == 200
    finally:
        for each in open_ones:
            each.close()


# ---- curl


def curl(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["curl", "-sS", "--max-time", "20", *arguments], capture_output=True, text=True, check=False, timeout=30)


@pytest.mark.packages
def test_curl_over_the_socket_and_over_tcp(served: Daemon, secret: str) -> None:
    assert shutil.which("curl"), "install curl"
    kind = ["-H", "Content-Type: application/json"]
    host, port = tcp(served)
    for where in (
        ["--unix-socket", str(served.socket), "http://leased"],
        [*["-H", f"Authorization: Bearer {secret}"], f"http://{host}:{port}"],
    ):
        base = where.pop()
        done = curl(*where, *kind, "-d", '{"key":"curl","holder":"c"}', f"{base}/v1/lease")
        fence = json.loads(done.stdout)["fence"]
        done = curl(*where, *kind, "-d", json.dumps({"key": "curl", "fence": fence}), f"{base}/v1/lease/release")
        assert json.loads(done.stdout)["released"] is True
        big = json.dumps({"key": "curl", "holder": "c", "scope": "s" * 20000})
        done = curl(*where, *kind, "-H", "Expect: 100-continue", "-d", big, "-w", "%{http_code}", f"{base}/v1/lease")
        assert done.stdout.endswith("400") and "scope" in done.stdout
        done = curl(*where, *kind, "-H", "Transfer-Encoding: chunked", "-d", '{"key":"curl"}', f"{base}/v1/lease/check")
        assert json.loads(done.stdout)["held"] is False
        both = curl(*where, f"{base}/healthz", f"{base}/readyz", "-w", " %{num_connects}\n")
        assert both.stdout.split() == ['{"alive":true}', "1", '{"ready":true,"reasons":[]}', "0"], "one connection for both"
