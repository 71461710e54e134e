"""An upstream that answers as a test says, and a shipper before it."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, NamedTuple

import trio
from billed import BilledWorld

from leased.config_keys import Upstream
from leased.upstream import Answer, Payer, Shipper

TAKEN = Answer(202)
INSTALL_ID = "f" * 32


class Request(NamedTuple):
    ids: list[str]
    headers: dict[str, str]
    body: bytes
    at: float


class Scripted:
    """Answers in order; when they have all been given, the last one for ever.  One may be a function of the request."""

    def __init__(self, *answers: Answer | Callable[[Request], Answer]) -> None:
        self.answers = list(answers) or [TAKEN]
        self.requests: list[Request] = []

    async def post(self, body: bytes, headers: dict[str, str]) -> Answer:
        await trio.lowlevel.checkpoint()
        request = Request([event["id"] for event in json.loads(body)], headers, body, trio.current_time())
        self.requests.append(request)
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        return answer if isinstance(answer, Answer) else answer(request)

    @property
    def sizes(self) -> list[int]:
        return [len(request.ids) for request in self.requests]

    def taken(self) -> list[str]:
        return [each for request in self.requests for each in request.ids]


def shipper_of(world: BilledWorld, upstream: Scripted, payer: Payer | None = None, **settings: Any) -> Shipper:
    reading: Any = world
    config = Upstream("https://upstream.test/events", **settings)
    return Shipper(config, world.billing, world.journal, reading, world.clock, INSTALL_ID, upstream.post, payer)


def bill(world: BilledWorld, events: int) -> list[str]:
    """So many facts, and their ids in order.  They are in the ledger."""
    if world.record() is None:
        world.granted("A", 20)
    ids = [world.refused(f"h{len(world.answers)}-{number}")["event_id"] for number in range(events)]
    world.calm()
    return ids
