"""Statuses, hosts and keys, without a socket: one table each."""

from __future__ import annotations

from typing import Any, cast

import pytest

from leased.doors.http import Page
from leased.doors.http_reading import Head
from leased.doors.http_routes import ROUTES, Judge, fields_of, judged, secret_of
from leased.doors.pages import pages
from leased.doors.problems import Problem, problem_of, response, retry_after
from leased.errors import CODES, PeerError


def head(method: str = "GET", target: str = "/healthz", **headers: str) -> Head:
    said = {name.replace("_", "-").encode(): value.encode() for name, value in ({"host": "localhost"} | headers).items()}
    return Head(method, target, said, True)


def status(judge: Judge, asked: Head) -> int:
    try:
        judge(asked)
    except Problem as problem:
        return problem.status
    return 200


@pytest.mark.parametrize(
    "host", ["localhost", "127.0.0.1", "127.0.0.1:1", "[::1]", "[::1]:65535", "10.0.0.7:8765", "10.0.0.7", "LocalHost"]
)
def test_our_own_names(host: str) -> None:
    assert status(Judge(frozenset({"10.0.0.7"})), head(host=host)) == 200


@pytest.mark.parametrize(
    "host",
    [
        "10.0.0.8",
        "evil.example",
        "localhost.",
        "localhost.evil.example",
        "evil.example:8765",
        "127.0.0.1.evil.example",
        "a@localhost",
        "::1",
        "",
        "localhost/x",
    ],
)
def test_foreign_names(host: str) -> None:
    judge = Judge(frozenset({"10.0.0.7"}))
    assert status(judge, head(host="localhost")) == 200
    assert status(judge, head(host=host)) == 403, "also after a right one on the same connection"


def test_a_target_that_names_another_host_is_foreign_too() -> None:
    judge = Judge(frozenset())
    assert status(judge, head(target="http://localhost:80/healthz")) == 200
    assert status(judge, head(target="http://evil.example/healthz")) == 403


@pytest.mark.parametrize("name", ["origin", "referer", "sec_fetch_site"])
def test_what_browsers_add_is_refused_on_every_route(name: str) -> None:
    for path, route in ROUTES.items():
        assert status(Judge(frozenset()), head(route.method, path)) == 200
        assert status(Judge(frozenset()), head(route.method, path, **{name: "cross-site"})) == 403


@pytest.mark.parametrize(
    ("route", "reply", "said"),
    [
        ("/v1/lease", {"acquired": True}, (200, ())),
        ("/v1/lease", {"acquired": False, "retry_after_seconds": 0.05}, (200, (("Retry-After", "1"),))),
        ("/v1/lease", {"acquired": False, "retry_after_seconds": 59.01}, (200, (("Retry-After", "60"),))),
        ("/v1/lease", {"acquired": False, "retry_after_seconds": None}, (200, ())),
        ("/v1/lease", {"acquired": None, "retry_after_seconds": 1.0}, (503, (("Retry-After", "1"),))),
        ("/v1/lease/release", {"released": False}, (200, ())),
        ("/v1/lease/check", {"held": None, "retry_after_seconds": 12.5}, (503, (("Retry-After", "13"),))),
        ("/agent-lock", {"op": "claim", "acquired": False, "retry_after_seconds": 3.0}, (200, (("Retry-After", "3"),))),
        ("/agent-lock", {"op": "release", "released": None, "retry_after_seconds": 1.0}, (503, (("Retry-After", "1"),))),
        ("/agent-lock", {"op": "check", "held": False}, (200, ())),
        ("/v1/heartbeat", {"armed": False}, (200, ())),
    ],
)
def test_the_status_of_an_answer(route: str, reply: dict[str, Any], said: tuple[int, Any]) -> None:
    assert judged(ROUTES[route], reply) == said


def test_a_release_in_the_agent_lock_form_that_is_false_is_a_conflict() -> None:
    with pytest.raises(Problem) as caught:
        judged(ROUTES["/agent-lock"], {"op": "release", "released": False})
    assert (caught.value.status, caught.value.code) == (409, "invalid_token")


def test_every_code_has_a_status_and_its_headers() -> None:
    statuses = {code: problem_of(PeerError(code, "text")) for code in CODES}
    assert {problem.status for problem in statuses.values()} == {400, 401, 403, 404, 413, 429, 500}
    assert dict(statuses["unauthenticated"].headers)["WWW-Authenticate"] == 'Bearer realm="leased"'
    assert "Retry-After" in dict(statuses["rate_limited"].headers)


@pytest.mark.parametrize(
    ("authorization", "field", "secret"),
    [
        (None, None, None),
        (None, "b", "b"),
        ("Bearer a", None, "a"),
        ("bearer  a ", "a", "a"),
        ("Bearer a", "b", 401),
        ("Basic a", None, 401),
        ("Bearer", None, 401),
        (None, 7, 400),
    ],
)
def test_which_key_counts(authorization: str | None, field: Any, secret: Any) -> None:
    asked = head() if authorization is None else head(authorization=authorization)
    if isinstance(secret, int):
        with pytest.raises(Problem) as caught:
            secret_of(asked, {"agent_key": field})
        assert caught.value.status == secret
    else:
        assert secret_of(asked, {"agent_key": field}) == secret


def test_the_query_is_read_strictly() -> None:
    route = ROUTES["/v1/leases"]
    assert fields_of(route, "/v1/leases", b"") == {}
    assert fields_of(route, "/v1/leases?scope=a%20b+c&limit=&all=true", b"") == {"scope": "a b c", "limit": None, "all": True}
    for query in ("scope=a&scope=b", "agent_key=s", "scope", "scope=%ff", "&".join(f"x{at}=1" for at in range(17))):
        with pytest.raises(Problem):
            fields_of(route, f"/v1/leases?{query}", b"")


def test_without_its_library_the_metrics_page_says_what_to_install() -> None:
    class Missing:
        @staticmethod
        def available() -> bool:
            return False

    said: list[Page] = []
    pages(cast(Any, None), cast(Any, Missing()), str)["metrics"](head(), True, said.append)
    assert said[0].status == 501 and b"leased[metrics]" in said[0].body


def test_a_response_is_whole() -> None:
    octets = response(
        200, "application/json", b"{}", date="Thu, 01 Jan 1970 00:00:00 GMT", headers=(retry_after(0.05),), close=True
    )
    lines = octets.decode().split("\r\n")
    assert lines[0] == "HTTP/1.1 200 OK" and lines[-1] == "{}" and lines[-2] == ""
    assert {"Content-Length: 2", "Retry-After: 1", "Connection: close", "Cache-Control: no-store"} <= set(lines)
