"""What clients do: seeded random programs over few keys, scopes and holders, so that they meet.

A client knows only what it was told.  It checks that each answer arrives as the daemon gave it, once, and tells `History` what it saw.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from client_wire import PATIENCE_SECONDS, Wire
from history import History
from host import QUANTUM, pause
from parties import Heard, Process
from world import World

INSTANT = 1e-4  # the judge of histories takes no two instants for one; here many calls share one


@dataclass
class Mine:
    """A lease as its holder knows it."""

    key: str
    holder: str
    fence: str
    generation: int
    ttl: float
    until: float  # on the world's clock, counted from when the answer was asked for
    request_id: str | None


class Client:
    """`steps` random things, then it is done.  Its name and its holders are the same in every life of its connection."""

    def __init__(self, world: World, history: History, number: int, seed: int, ttls: list[float]) -> None:
        self.world = world
        self.history = history
        self.number = number
        self.name = f"client{number}"
        self.chance = random.Random(f"{seed}:client:{number}")
        self.namespace = "local" if number % 5 else "other"
        self.operator = number % 11 == 0
        self.provable = number % 7 != 3
        self.holders = [f"h{number % 9}", f"h{(number + 1) % 9}"]
        self.ttls = ttls
        self.process: Process | None = None
        self.wire: Wire | None = None
        self.mine: list[Mine] = []
        self.lost: list[dict[str, Any]] = []  # leases asked for with a request_id, answer unknown
        self.heard: list[Heard] = []
        self.generations: list[int] = []
        self.drawn = 0

    def note(
        self, operation: str, params: Mapping[str, Any], sent: float, received: float | None, reply: Any, namespace: str
    ) -> None:
        if operation in ("lease", "renew", "release", "check", "list", "heartbeat", "revoke"):
            apart = len(self.history.records) * 1e-9
            until = None if received is None else received + INSTANT + apart
            self.history.add(self.name, operation, params, sent - INSTANT + apart, until, reply, namespace)

    # ---- connecting

    async def connected(self) -> Wire:
        while self.wire is None or not self.wire.alive:
            if self.process is None and self.provable:
                self.process = self.world.process()
            try:
                connection, ours = self.world.connect(self.namespace, self.operator, self.process)
            except ConnectionRefusedError:
                await pause(self.chance.choice([64, 128, 256]) * QUANTUM)
                continue
            self.wire = Wire(self, connection, ours)
        return self.wire

    async def ask(self, operation: str, params: dict[str, Any], seconds: float = PATIENCE_SECONDS) -> Any:
        """The answer, or None when none came."""
        return (await self.ask_all((operation, params), seconds=seconds))[0]

    async def ask_all(self, *requests: tuple[str, dict[str, Any]], seconds: float = PATIENCE_SECONDS) -> list[Any]:
        wire = await self.connected()
        began = self.world.time
        numbers = wire.send(*requests)
        if not numbers:
            return [None] * len(requests)
        await wire.read(*numbers, seconds=seconds)
        answers = [wire.answers.get(number) for number in numbers]
        for (operation, params), answer in zip(requests, answers, strict=True):
            self.learn(operation, params, answer, began)
        return answers

    def learn(self, operation: str, params: dict[str, Any], answer: Any, began: float) -> None:
        if operation == "lease" and "request_id" in params and (answer is None or self.chance.random() < 0.2):
            self.lost = [*self.lost[-3:], params]
        if not isinstance(answer, dict):
            return
        if isinstance(answer.get("generation"), int):
            self.generations = [*self.generations[-5:], answer["generation"]]
        if answer.get("acquired") is True:
            self.mine = [each for each in self.mine if each.key != answer["key"]]
            until = (
                began + answer["expires_in_seconds"]
                if not params.get("wait_seconds")
                else self.world.time + answer["expires_in_seconds"]
            )
            self.mine.append(
                Mine(answer["key"], answer["holder"], answer["fence"], answer["generation"], answer["ttl_seconds"], until, params.get("request_id"))
            )  # fmt: skip

    # ---- the program

    async def run(self, steps: int) -> None:
        await pause(self.chance.randrange(64) * QUANTUM)
        for _ in range(steps):
            action = self.chance.choices(ACTIONS, WEIGHTS)[0]
            await action(self)
            await pause(self._pause())
        if self.wire is not None:
            self.wire.close()
        if self.process is not None:
            self.world.dies(self.process)

    def _pause(self) -> float:
        """Often until the next quarter of a second, where others come too."""
        if self.chance.random() < 0.5:
            return 0.25 - self.world.time % 0.25
        return self.chance.choice([0, 1, 2, 16, 64, 256, 512]) * QUANTUM

    def key(self) -> str:
        return self.chance.choice([key for namespace, key in self.world.keys if namespace == self.namespace])

    def scope(self) -> str:
        return self.chance.choice([scope for namespace, scope in self.world.scopes if namespace == self.namespace])

    def request_id(self) -> str:
        self.drawn += 1
        return f"{self.name}-attempt-{self.drawn:08d}-of-many"

    def wanted(self, *, wait: bool = False) -> dict[str, Any]:
        chance = self.chance
        params: dict[str, Any] = {"key": self.key(), "holder": chance.choice(self.holders), "ttl_seconds": chance.choice(self.ttls)}
        if chance.random() < 0.4:
            params["request_id"] = self.request_id()
        if chance.random() < 0.4:
            params["scope"] = self.scope()
        if chance.random() < 0.3:
            params["bind"] = chance.choice(["process", "connection"]) if self.provable else "connection"
        if wait:
            params["wait_seconds"] = chance.choice([0.5, 1, 3, 8])
        return params

    async def acquire(self) -> None:
        params = self.wanted(wait=self.chance.random() < 0.5)
        if self.mine and self.chance.random() < 0.15:
            old = self.chance.choice(self.mine)
            params |= {"fence": old.fence, "key": old.key}
            params.pop(
                "wait_seconds", None
            )  # a fence is answered at once; what ends a wait begun while nothing was known is not said
        await self.ask("lease", params)

    async def work(self) -> None:
        """Acquire, hold, release."""
        answer = await self.ask("lease", self.wanted(wait=True))
        if isinstance(answer, dict) and answer["acquired"]:
            await pause(self.chance.choice([0, 16, 128]) * QUANTUM)
            await self.release()

    async def renew(self) -> None:
        if not self.mine:
            return await self.acquire()
        mine = self.chance.choice(self.mine)
        if self.chance.random() < 0.5 and mine.until > self.world.time + QUANTUM:
            moment = mine.until + self.chance.choice([-1, 0, 1]) * QUANTUM
            if moment - self.world.time < 5:
                await pause(moment - self.world.time)
        params: dict[str, Any] = {"key": mine.key, "holder": mine.holder, "fence": mine.fence}
        if self.chance.random() < 0.5:
            params["ttl_seconds"] = self.chance.choice(self.ttls)
        if self.chance.random() < 0.1:
            params["holder"] = "somebody"
        if self.chance.random() < 0.1:
            params["fence"] = str(2**60 + self.chance.randrange(2**20))
        await self.ask(self.chance.choice(["renew", "renew", "lease"]), params)
        return None

    async def release(self) -> None:
        if not self.mine:
            return await self.look()
        mine = self.chance.choice(self.mine)
        params: dict[str, Any] = {"key": mine.key, "fence": mine.fence}
        if self.chance.random() < 0.3:
            params["holder"] = self.chance.choice([mine.holder, "somebody"])
        answer = await self.ask("release", params)
        if isinstance(answer, dict) and answer["released"] and self.chance.random() < 0.8:
            self.mine.remove(mine)
        return None

    async def look(self) -> None:
        params: dict[str, Any] = {"key": self.key()}
        if self.generations and self.chance.random() < 0.5:
            params["generation"] = self.chance.choice(self.generations)
        await self.ask("check", params)

    async def list(self) -> None:
        params: dict[str, Any] = {}
        if self.chance.random() < 0.3:
            params["scope"] = self.scope()
        if self.chance.random() < 0.3:
            params["holder"] = self.chance.choice(self.holders)
        if self.operator and self.chance.random() < 0.5:
            params["all"] = True
        if self.chance.random() < 0.3:
            params["limit"] = 1
        answer = await self.ask("list", params)
        if isinstance(answer, dict) and answer["cursor"] is not None:
            await self.ask("list", {**params, "cursor": answer["cursor"]})

    async def beat(self) -> None:
        params: dict[str, Any] = {"scope": self.scope()}
        if self.chance.random() < 0.2:
            params["disarm"] = True
        else:
            params["expect_within_seconds"] = self.chance.choice([1, 2, 5, 15])
        if self.chance.random() < 0.4:
            params["agent_id"] = self.name
        await self.ask("heartbeat", params)

    async def resume(self) -> None:
        await self.ask("resume_packet", {"scope": self.scope()})

    async def revoke(self) -> None:
        await self.ask("revoke", {"key": self.key(), "reason": "a test"})

    async def pipeline(self) -> None:
        """Several requests in one write, some about one key, some of them about each other."""
        lease = self.wanted(wait=self.chance.random() < 0.3)
        requests: list[tuple[str, dict[str, Any]]] = [("lease", lease), ("check", {"key": lease["key"]})]
        if self.chance.random() < 0.5:
            other = {**lease, "key": self.key()} if self.chance.random() < 0.3 else dict(lease)
            requests.append(("lease", other))
        if self.mine and self.chance.random() < 0.6:
            mine = self.chance.choice(self.mine)
            requests.insert(self.chance.randrange(len(requests) + 1), ("release", {"key": mine.key, "fence": mine.fence}))
        await self.ask_all(*requests)

    async def lose_reply(self) -> None:
        """Ask, hang up before reading, ask again by another connection."""
        params = {**self.wanted(wait=self.chance.random() < 0.4), "request_id": self.request_id()}
        wire = await self.connected()
        wire.send(("lease", params))
        await pause(self.chance.choice([0, 0, 1, 8, 64]) * QUANTUM)
        wire.close()
        self.lost = [*self.lost[-3:], params]
        await self.repeat()

    async def repeat(self) -> None:
        if not self.lost:
            return await self.acquire()
        params = dict(self.chance.choice(self.lost))
        if self.chance.random() < 0.1:
            params["holder"] = "somebody"
        if self.chance.random() < 0.1:
            params["key"] = self.key()
        if self.chance.random() < 0.2:
            params["wait_seconds"] = self.chance.choice([0, 1, 4])
        await self.ask("lease", params)
        return None

    async def hang_up(self) -> None:
        """Gone in the middle of a wait, or with a lease bound to the connection."""
        wire = await self.connected()
        wire.send(("lease", self.wanted(wait=True)))
        await pause(self.chance.choice([0, 1, 32, 256]) * QUANTUM)
        wire.close()

    async def half_close(self) -> None:
        wire = await self.connected()
        numbers = wire.send(("lease", self.wanted(wait=self.chance.random() < 0.3)), ("check", {"key": self.key()}))
        wire.half_close()
        if numbers:
            await wire.read(*numbers)
            await wire.read(seconds=1.0)
        wire.close()

    async def die(self) -> None:
        """kill -9 for the client's process, and a new one."""
        if self.process is not None and self.chance.random() < 0.5:
            process, self.process = self.process, None
            if self.wire is not None:
                self.wire.close()
            self.world.dies(process)
            self.mine.clear()

    async def err(self) -> None:
        """Mistakes: refused, and nothing else happens."""
        wrong: dict[str, Any] = self.chance.choice(
            [{"ttl_seconds": 0.05}, {"ttl_seconds": "long"}, {"wait_seconds": 301}, {"ttl_second": 5}, {"bind": "thread"}, {"request_id": "short"}]
        )  # fmt: skip
        await self.ask("lease", {**self.wanted(), **wrong})

    async def watch(self) -> None:
        """A connection of its own that watches for a while."""
        chance = self.chance
        wanted: dict[str, Any] = chance.choice([{}, {"key": self.key()}, {"scope": self.scope()}])
        try:
            connection, ours = self.world.connect(self.namespace, self.operator, self.process)
        except ConnectionRefusedError:
            return
        wire = Wire(self, connection, ours)
        wire.watch = Heard(self.namespace, wanted.get("key"), wanted.get("scope"))
        connection.heard = wire.watch
        heard = wire.watch
        if begun := wire.send(("watch", wanted)):
            await wire.read(seconds=chance.choice([0.5, 2, 6]))
        heard.on = bool(begun) and isinstance(wire.answers.get(begun[0]), dict)
        if wire.alive and (numbers := wire.send(("unwatch", {}))):
            await wire.read(*numbers)
            heard.complete = isinstance(wire.answers.get(numbers[0]), dict)
        wire.close()


ACTIONS = [
    Client.acquire, Client.work, Client.renew, Client.release, Client.look, Client.list, Client.beat, Client.resume, Client.revoke,
    Client.pipeline, Client.lose_reply, Client.repeat, Client.hang_up, Client.half_close, Client.die, Client.err, Client.watch,
]  # fmt: skip
WEIGHTS = [18, 14, 16, 8, 8, 3, 3, 3, 1, 8, 4, 5, 3, 2, 1, 1, 2]
