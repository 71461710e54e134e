"""Agent keys: who may call without being known to the kernel, and in which namespace those calls count.

A key is a secret of 256 random bits.  The ledger holds a keyed digest of it, and finding a key is finding its digest: what the time of
that search tells is about a digest made with a secret of this installation, which a guesser cannot compute.  Wrong keys are refused
the more bluntly the more there are; right ones never, or whoever shares an address with a guesser could be locked out by it.

A key counts from when it is flushed, its secret is told once, in that answer.  A revocation counts at once, before it is flushed.
"""

from __future__ import annotations

import secrets
from collections.abc import Hashable, Iterable
from typing import Final

import structlog

from leased import model
from leased.calls import Call
from leased.clock import rfc3339
from leased.digests import Digests
from leased.errors import PeerError
from leased.holds import MAX_HOLD_SECONDS, Held
from leased.lessor import Lessor
from leased.model import Identity, Reply
from leased.rules import UNKNOWN_RETRY_SECONDS
from leased.state.agent_records import Agent, encode_agent
from leased.views import require_operator
from leased.watch import Watchers

log = structlog.get_logger()

PREFIX: Final = "leased_"  # so that scanners for leaked secrets can know one
SECRET_BYTES: Final = 32
MAX_AGENTS: Final = 1000  # one `agent_list` shows them all, below the limit of a message
WRONG_KEYS_AT_ONCE: Final = 100  # of one peer: a deployment with a stale key makes a few
WRONG_KEYS_EACH_SECOND: Final = 10.0  # no bar to guessing, which 256 bits are, but to what it costs and what it fills logs with
MAX_GUESSERS: Final = 4096  # peers remembered for their wrong keys; past it the account starts over


def draw_secret() -> str:
    return PREFIX + secrets.token_urlsafe(SECRET_BYTES)


class Agents:
    """All agent keys.  `rows` are (digest, Agent) from the ledger."""

    def __init__(self, lessor: Lessor, watchers: Watchers, rows: Iterable[tuple[bytes, Agent]]) -> None:
        self._lessor = lessor
        self._watchers = watchers
        self._known: dict[bytes, Agent] = dict(rows)
        self._digests: dict[str, bytes] = {agent.name: digest for digest, agent in self._known.items()}
        self._guessers: dict[Hashable, tuple[float, float]] = {}  # what is left of the allowance, and at which CLOCK_BOOTTIME
        self.wrong = 0
        lessor.operations[model.AgentAddRequest] = self.add
        lessor.operations[model.AgentListRequest] = self.list
        lessor.operations[model.AgentRevokeRequest] = self.revoke

    def __len__(self) -> int:
        return len(self._known)

    # ---- who is it?

    def identify(self, secret: str, peer: Identity, guesser: Hashable) -> Identity:
        """The identity of a call that brings `secret` over a connection of `peer`.  `guesser` is who answers for wrong ones: a uid or
        an address.  Raises PeerError `unauthenticated`, or `rate_limited` when that peer has brought too many wrong ones."""
        agent = self._known.get(self._lessor.digests.agent(secret))
        if agent is None:
            raise self._wrong(guesser)
        return Identity(agent.namespace, peer.uid, peer.pid, peer.operator, agent.name)

    def _wrong(self, guesser: Hashable) -> PeerError:
        self.wrong += 1
        now = self._lessor.clock.now().boot
        left, before = self._guessers.get(guesser, (float(WRONG_KEYS_AT_ONCE), now))
        left = min(float(WRONG_KEYS_AT_ONCE), left + (now - before) * WRONG_KEYS_EACH_SECOND)
        if left < 1.0:
            return PeerError("rate_limited", "agent_key: too many wrong ones came from here; the right one is still taken")
        if len(self._guessers) >= MAX_GUESSERS:
            self._guessers.clear()
        self._guessers[guesser] = (left - 1.0, now)
        return PeerError("unauthenticated", "agent_key is not known here: it was revoked, or never made (`leased agent list`)")

    # ---- operations, for operators

    def add(self, call: Call, request: model.AgentAddRequest) -> None:
        require_operator(call.identity, "agent_add")
        self._lessor.gate.admit()
        self._lessor.lane.after(self._add, call, request)

    def _add(self, call: Call, request: model.AgentAddRequest) -> None:
        lessor, name = self._lessor, request.name
        if name in self._digests:
            call.answer({"added": False, "name": name, "reason": "exists"})
            return
        if len(self._digests) >= MAX_AGENTS:
            call.refuse(PeerError("rate_limited", f"name cannot be added: there are {MAX_AGENTS} agent keys, the limit"))
            return
        secret = draw_secret()
        digest = lessor.digests.agent(secret)
        agent = Agent(name, request.namespace or name, lessor.now.wall)
        self._digests[name] = digest
        number = lessor.journal.append(("agent", digest, encode_agent(agent)))
        reply: Reply = {"added": True, "name": name, "namespace": agent.namespace, "secret": secret}
        self._hold(_Adding(call, self, digest, agent), reply, {"added": None, "name": name}, number)

    def kept(self, digest: bytes, agent: Agent, uid: int) -> None:
        self._known[digest] = agent
        log.info("agent.added", agent=agent.name, namespace=agent.namespace, uid=uid)

    def withdrawn(self, digest: bytes, agent: Agent) -> None:
        """Nobody was told the secret, and nobody will be: whatever the ledger has of it goes."""
        del self._digests[agent.name]
        self._lessor.journal.append(("agent", digest, None))

    def list(self, call: Call, request: model.AgentListRequest) -> None:
        require_operator(call.identity, "agent_list")
        agents = [
            {"name": agent.name, "namespace": agent.namespace, "created_at": rfc3339(agent.created)}
            for agent in sorted(self._known.values())
        ]
        self._lessor.lane.after(call.answer, {"agents": agents})

    def revoke(self, call: Call, request: model.AgentRevokeRequest) -> None:
        require_operator(call.identity, "agent_revoke")
        self._lessor.gate.admit_reading()
        self._lessor.lane.after(self._revoke, call, request.name)

    def _revoke(self, call: Call, name: str) -> None:
        lessor = self._lessor
        digest = self._digests.get(name)
        if digest is None or self._known.pop(digest, None) is None:  # one whose first flush is under way is nobody's yet
            call.answer({"revoked": False, "name": name, "reason": "unknown_agent"})
            return
        del self._digests[name]
        log.warning("agent.revoked", agent=name, uid=call.identity.uid)
        for waiter in lessor.queues.of_agent(name):
            lessor.queues.remove(waiter)
            waiter.call.refuse(PeerError("unauthenticated", "agent_key was revoked while this call waited"))
        self._watchers.end_of_agent(name)
        number = lessor.journal.append(("agent", digest, None))
        self._hold(call, {"revoked": True, "name": name}, {"revoked": None, "name": name}, number)

    def _hold(self, call: Call, reply: Reply, otherwise: Reply, number: int) -> None:
        """What a power cut could undo is not said before the ledger has it."""
        otherwise |= {"reason": "store", "retry_after_seconds": UNKNOWN_RETRY_SECONDS}
        self._lessor.holds.add_plain(number, self._lessor.now.boot + MAX_HOLD_SECONDS, Held(call, reply), otherwise)


class _Adding(Call):
    """An `agent_add` whose answer also says whether the key counts from now on."""

    __slots__ = ("_agent", "_agents", "_digest", "_outer")

    def __init__(self, outer: Call, agents: Agents, digest: bytes, agent: Agent) -> None:
        super().__init__(outer.peer, outer.msgid, outer.request, outer.identity)
        self._outer = outer
        self._agents = agents
        self._digest = digest
        self._agent = agent

    def answer(self, reply: Reply) -> None:
        if reply["added"] is True:
            self._agents.kept(self._digest, self._agent, self.identity.uid)
        else:
            self._agents.withdrawn(self._digest, self._agent)
        self._outer.answer(reply)


def new_agent(name: str, namespace: str | None, created: float, digests: Digests) -> tuple[str, bytes, Agent]:
    """(secret, digest, record) of a key made while no daemon runs."""
    secret = draw_secret()
    return secret, digests.agent(secret), Agent(name, namespace or name, created)
