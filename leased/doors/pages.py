"""The pages of the HTTP door that are no operation: is it alive, is it ready, what has it counted, what can it be asked."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import cache

from leased import health
from leased.agents import Agents
from leased.billing import Billing
from leased.doors.http import HttpDoor, Page, Pages
from leased.doors.http_reading import Head
from leased.doors.openapi import document
from leased.doors.problems import JSON, PROBLEM, Problem, encode
from leased.doors.unix import Switchboard
from leased.lessor import Lessor
from leased.metrics import Doors, Exposition, Meters
from leased.schema import OPERATIONS

Done = Callable[[Page], None]
NO_LIBRARY = Problem(
    501,
    "unknown_method",
    "metrics need the extra leased[metrics]: install the package prometheus-client beside leased",
)


def http_door(
    lessor: Lessor,
    meters: Meters,
    billing: Billing,
    agents: Agents,
    board: Switchboard,
    upstream: Callable[[], str],
    spawn: Callable[[Callable[[], Awaitable[None]]], None],
) -> HttpDoor:
    """The door with all its pages.  `spawn` starts a task beside the daemon's own."""

    def doors() -> Doors:
        return Doors(len(board), board.accepted, board.turned_away, door.decided, door.responses, door.answers)

    exposition = Exposition(lessor, meters, billing, agents, doors, upstream, spawn, board.flush)
    door = HttpDoor(pages(lessor, exposition, upstream), agents.identify, lambda: lessor.now.wall)
    return door


def pages(lessor: Lessor, exposition: Exposition, upstream: Callable[[], str]) -> Pages:
    """`upstream` says in a word why billing events are not taken, or nothing."""

    def healthz(head: Head, local: bool, done: Done) -> None:
        done(Page(200, JSON, b'{"alive":true}'))

    def readyz(head: Head, local: bool, done: Done) -> None:
        ready, told = health.readiness(lessor, upstream())
        done(Page(200 if ready else 503, JSON, encode(told).encode(), () if ready else (("Retry-After", "1"),)))

    def metrics(head: Head, local: bool, done: Done) -> None:
        if not exposition.available():
            done(Page(NO_LIBRARY.status, PROBLEM, NO_LIBRARY.document()))
            return
        accept = head.headers.get(b"accept", b"").decode("latin-1")
        exposition.scrape(accept, lambda kind, body: done(Page(200, kind, body)))

    @cache
    def described(local: bool) -> bytes:
        served = frozenset(name for name, row in OPERATIONS.items() if row.request in lessor.operations)
        return encode(document(served, local=local)).encode()

    def openapi(head: Head, local: bool, done: Done) -> None:
        done(Page(200, JSON, described(local)))

    return {"healthz": healthz, "readyz": readyz, "metrics": metrics, "openapi": openapi}
