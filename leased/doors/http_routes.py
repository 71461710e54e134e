"""What the paths of the HTTP door mean: which operation, where its fields are, and which status an answer gets.  No bytes and no socket."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final, NamedTuple
from urllib.parse import parse_qsl

from leased import model
from leased.doors.http_reading import Head
from leased.doors.problems import JSON, Headers, Problem, decoded, problem_of, retry_after
from leased.errors import PeerError, invalid
from leased.fields import named
from leased.model import Reply, Request
from leased.schema import OPERATIONS, parse


class Route(NamedTuple):
    """`verdict` is the field whose null makes the answer a 503.  Exactly one of `operation` and `page` is there."""

    method: str
    operation: str = ""
    verdict: str = ""
    page: str = ""
    open: bool = False  # answered without a key on TCP too: it tells nothing of any lease


ROUTES: Final[Mapping[str, Route]] = {
    "/v1/lease": Route("POST", "lease", "acquired"),
    "/v1/lease/renew": Route("POST", "renew", "acquired"),
    "/v1/lease/release": Route("POST", "release", "released"),
    "/v1/lease/check": Route("POST", "check", "held"),
    "/v1/leases": Route("GET", "list"),
    "/v1/heartbeat": Route("POST", "heartbeat"),
    "/v1/resume": Route("POST", "resume_packet"),
    "/v1/usage": Route("GET", "usage"),
    "/agent-lock": Route("POST", "agent_lock"),
    "/healthz": Route("GET", page="healthz", open=True),
    "/readyz": Route("GET", page="readyz", open=True),
    "/metrics": Route("GET", page="metrics"),
    "/openapi.json": Route("GET", page="openapi", open=True),
}
LOCK_VERDICTS: Final = {"claim": "acquired", "release": "released", "check": "held"}
MAX_QUERY_FIELDS: Final = 16
_LOOPBACK: Final = frozenset({"localhost", "127.0.0.1", "[::1]"})
_HOST: Final = re.compile(r"(\[[0-9a-fA-F:.]+\]|[^\[\]:@/\s]*)(?::[0-9]{0,5})?")


class Judge:
    """Whether a head will be answered at all.  `hosts` are the names this door goes by, besides those of loopback."""

    def __init__(self, hosts: frozenset[str]) -> None:
        self._hosts = _LOOPBACK | hosts
        self._heard = b""  # the last Host that was right: a connection says the same one every time

    def __call__(self, head: Head) -> None:
        """Raises Problem.  A web page must not be able to take locks: whatever a browser adds to what a page sends is refused, and so is
        a name that is not ours (DNS rebinding)."""
        headers = head.headers
        for foreign in (b"origin", b"referer"):
            if foreign in headers:
                raise Problem(403, "permission_denied", f"{foreign.decode().title()}: requests of web pages are not answered")
        if headers.get(b"sec-fetch-site", b"none").strip() != b"none":
            raise Problem(403, "permission_denied", "Sec-Fetch-Site: requests of web pages are not answered")
        path, _, authority = split(head.target)
        host = headers.get(b"host", b"localhost")
        if host != self._heard or authority != "localhost":
            for name in (host.decode("latin-1"), authority):
                match = _HOST.fullmatch(name.strip())
                if match is None or match[1].lower() not in self._hosts:
                    raise Problem(
                        403, "permission_denied", "Host is not a name of this daemon: use localhost, or the address it listens at"
                    )
            self._heard = host
        route = ROUTES.get(path)
        if route is None:
            raise Problem(404, "unknown_method", "there is nothing at this path: GET /openapi.json tells what there is")
        if head.method != route.method and not (head.method == "HEAD" and route.method == "GET"):
            allowed = "GET, HEAD" if route.method == "GET" else route.method
            raise Problem(405, "unknown_method", f"this path answers {allowed} only", (("Allow", allowed),))
        if route.method == "POST" and headers.get(b"content-type") != b"application/json":
            kind = headers.get(b"content-type", JSON.encode()).partition(b";")[0].strip().lower()
            if kind != JSON.encode():
                raise Problem(415, "invalid_argument", f"Content-Type must be {JSON}")


def split(target: str) -> tuple[str, str, str]:
    """(path, query, authority) of a request target; authority "localhost" where it has none."""
    authority = "localhost"
    if target[:7].lower() == "http://":
        authority, slash, rest = target[7:].partition("/")
        target = slash + rest or "/"
    path, _, query = target.partition("?")
    return path, query, authority


# ---- the fields of a request


def fields_of(route: Route, target: str, body: bytes) -> dict[str, Any]:
    """The fields as they came, not checked yet.  Raises Problem."""
    if route.method == "GET":
        return _queried(route.operation, split(target)[1])
    fields = decoded(body)
    if type(fields) is not dict:
        raise Problem(400, "invalid_argument", "body must be a JSON object")
    if route.operation == "agent_lock" and "arguments" in fields:
        return _inner(fields)
    return fields


def _inner(fields: dict[str, Any]) -> dict[str, Any]:
    """The object within `arguments`; beside it only an agent_key may stand."""
    inner = fields["arguments"]
    if type(inner) is not dict:
        raise Problem(400, "invalid_argument", "arguments must be a JSON object")
    for name in fields:
        if name not in ("arguments", "agent_key"):
            raise problem_of(invalid(named(name), "is not a field beside arguments"))
    if fields.get("agent_key") is None:
        return inner
    if inner.get("agent_key") not in (None, fields["agent_key"]):
        raise problem_of(PeerError("unauthenticated", "agent_key is there twice, and the two differ"))
    return inner | {"agent_key": fields["agent_key"]}


def _queried(operation: str, query: str) -> dict[str, Any]:
    """A name without a value counts as absent."""
    try:
        pairs = parse_qsl(
            query, keep_blank_values=True, strict_parsing=bool(query), errors="strict", max_num_fields=MAX_QUERY_FIELDS
        )
    except ValueError:
        raise Problem(400, "invalid_argument", "query must be name=value pairs joined by &, percent-encoded UTF-8") from None
    kinds = {field.name: field.kind for field in OPERATIONS[operation].fields}
    fields: dict[str, Any] = {}
    for name, value in pairs:
        if name in fields:
            raise problem_of(invalid(named(name), "is there twice"))
        if name == "agent_key":
            raise problem_of(invalid(name, "is a secret and belongs in the Authorization header: addresses get logged"))
        flag = {"true": True, "false": False}.get(value, value) if kinds.get(name) == "flag" else value
        fields[name] = flag if value or name not in kinds else None
    return fields


def secret_of(head: Head, fields: Mapping[str, Any]) -> str | None:
    """The agent key a request brings.  Raises Problem for one that is none, or for two that differ."""
    given = fields.get("agent_key")
    header = head.headers.get(b"authorization")
    if header is None:
        if given is not None and type(given) is not str:
            raise problem_of(invalid("agent_key", "must be a string"))
        return given
    scheme, _, secret = header.decode("latin-1").partition(" ")
    secret = secret.strip()
    if scheme.lower() != "bearer" or not secret:
        raise problem_of(PeerError("unauthenticated", "Authorization must be: Bearer and an agent key"))
    if given is not None and given != secret:
        raise problem_of(PeerError("unauthenticated", "agent_key differs from the one in the Authorization header"))
    return secret


def request_of(route: Route, fields: dict[str, Any], *, local: bool) -> Request:
    """The checked request.  Raises Problem."""
    try:
        request = parse(route.operation, fields)
        if not local and isinstance(request, model.LeaseRequest) and request.bind:
            raise invalid("bind", "must be none over TCP: only the Unix socket tells when a process or a connection ends")
    except PeerError as error:
        releasing = route.operation == "agent_lock" and fields.get("op") == "release"
        if releasing and error.text.startswith("token ") and type(fields.get("token")) in (str, int):
            raise invalid_token() from None
        raise problem_of(error) from None
    if isinstance(request, model.AgentLockRequest) and request.op == model.LOCK_RELEASE and request.token is None:
        raise invalid_token()
    return request


def invalid_token() -> Problem:
    return Problem(
        409, "invalid_token", "token is not that of a live claim on this key: it was released, has expired, or never was one"
    )


# ---- the status of an answer


def judged(route: Route, reply: Reply) -> tuple[int, Headers]:
    """(status, headers).  Raises Problem where the answer is one."""
    verdict = route.verdict or LOCK_VERDICTS.get(reply.get("op", ""), "")
    said = reply.get(verdict, True)
    if said is True:
        return 200, ()
    if said is False and route.operation == "agent_lock" and verdict == "released":
        raise invalid_token()
    seconds = reply.get("retry_after_seconds")
    headers: Headers = () if seconds is None else (retry_after(seconds),)
    return (503 if said is None else 200), headers
