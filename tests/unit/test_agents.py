"""Agent keys: made, found, revoked, and what a failing disk leaves of each; and the agent-lock form over the same rules."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from worlds import World

from leased.agent_lock import AgentLock
from leased.agents import MAX_AGENTS, WRONG_KEYS_AT_ONCE, Agents
from leased.errors import PeerError
from leased.model import (
    LOCK_CHECK,
    LOCK_RELEASE,
    AgentAddRequest,
    AgentListRequest,
    AgentLockRequest,
    AgentRevokeRequest,
    Identity,
    LeaseRequest,
    Reply,
)
from leased.state.agent_records import Agent, decode_agent, encode_agent
from leased.state.records import RecordDamaged
from leased.watch import Watchers

PEER = Identity("local", 1000, 1, False)


class AgentWorld(World):
    """A world with agents in it."""

    def equip(self) -> None:
        known, damaged = self.ledger.read_agents()
        assert damaged == []
        self.agents = Agents(self.lessor, Watchers(self.lessor, 10), known.items())
        AgentLock(self.lessor)

    def heard(self, call: Any, reply: Reply) -> None:
        """These answers are told in other words than those a witness understands."""
        assert call not in self.answers, "answered twice"
        self.answers[call] = reply


@pytest.fixture
def agents() -> Iterator[AgentWorld]:
    root = Path(tempfile.mkdtemp(prefix="leased-agents-"))
    made = AgentWorld(root)
    made.run()
    try:
        yield made
    finally:
        made.close()
        shutil.rmtree(root, ignore_errors=True)


def secret_of(world: AgentWorld, name: str = "ci", namespace: str | None = None) -> str:
    (call,) = world.decide(("operator", AgentAddRequest(name, namespace)))
    world.calm()
    told = world.answers[call]
    assert told["added"] is True and told["namespace"] == (namespace or name)
    return str(told["secret"])


def namespace_of(world: AgentWorld, secret: str) -> str | None:
    try:
        return world.agents.identify(secret, PEER, "peer").namespace
    except PeerError as error:
        assert error.code == "unauthenticated"
        assert secret not in error.text
        return None


def test_a_key_counts_once_it_is_flushed_and_its_secret_is_in_no_store(agents: AgentWorld) -> None:
    (call,) = agents.decide(("operator", AgentAddRequest("ci", "shared")))
    assert call not in agents.answers, "nothing is said before the ledger has it"
    agents.calm()
    secret = agents.answers[call]["secret"]
    assert len(secret) >= 43 and namespace_of(agents, secret) == "shared"
    assert agents.agents.identify(secret, PEER, "peer") == Identity("shared", 1000, 1, False, "ci")
    assert agents.ask("operator", AgentListRequest()) == {
        "agents": [
            {"name": "ci", "namespace": "shared", "created_at": agents.answers[list(agents.answers)[-1]]["agents"][0]["created_at"]}
        ]
    }
    for store in (agents.state, agents.runtime):
        for path in store.iterdir():
            assert secret.encode() not in path.read_bytes()


def test_two_secrets_are_never_the_same_and_a_name_is_taken_once(agents: AgentWorld) -> None:
    secrets = {secret_of(agents, f"agent{at}") for at in range(20)}
    assert len(secrets) == 20
    assert agents.ask("operator", AgentAddRequest("agent3")) == {"added": False, "name": "agent3", "reason": "exists"}


def test_only_operators_may(agents: AgentWorld) -> None:
    agents.caller("x").identity = agents.caller("x").identity._replace(operator=False)
    for request in (AgentAddRequest("a"), AgentListRequest(), AgentRevokeRequest("a")):
        reply = agents.ask("x", request)
        assert reply is not None and reply["error"] == "permission_denied"
    assert len(agents.agents) == 0


def test_a_key_whose_flush_failed_is_nobodys_and_leaves_nothing(agents: AgentWorld) -> None:
    (call,) = agents.decide(("operator", AgentAddRequest("ci")))
    agents.flush_fails(read="new", disk="new")
    told = agents.answers[call]
    assert told["added"] is None and told["reason"] == "store" and "secret" not in told
    agents.calm_after_retries()
    assert len(agents.agents) == 0 and agents.ledger.read_agents() == ({}, [])
    secret = secret_of(agents)
    assert namespace_of(agents, secret) == "ci", "the name is free again"


def test_a_disk_that_hangs_ends_in_null_and_not_in_a_key(agents: AgentWorld) -> None:
    (call,) = agents.decide(("operator", AgentAddRequest("ci")))
    agents.pass_time(3.0, disk_works=False)
    assert agents.answers[call]["added"] is None
    agents.flush()
    agents.calm()
    assert agents.ledger.read_agents() == ({}, [])


def test_a_revocation_counts_at_once_and_is_repeated_until_it_is_written(agents: AgentWorld) -> None:
    secret = secret_of(agents)
    (call,) = agents.decide(("operator", AgentRevokeRequest("ci")))
    assert namespace_of(agents, secret) is None, "before it is flushed"
    agents.flush_fails()
    assert agents.answers[call]["revoked"] is None
    agents.calm_after_retries()
    assert agents.ledger.read_agents() == ({}, [])
    again = agents.ask("operator", AgentRevokeRequest("ci"))
    assert again == {"revoked": False, "name": "ci", "reason": "unknown_agent"}


@pytest.mark.parametrize("end", ["kill", "power_cut", "stop"])
def test_keys_survive_and_revocations_too(agents: AgentWorld, end: str) -> None:
    kept, gone = secret_of(agents, "kept"), secret_of(agents, "gone")
    (call,) = agents.decide(("operator", AgentRevokeRequest("gone")))
    agents.calm()
    assert agents.answers[call] == {"revoked": True, "name": "gone"}
    getattr(agents, end)()
    agents.run()
    assert namespace_of(agents, kept) == "kept" and namespace_of(agents, gone) is None


def test_a_revocation_takes_the_waiters_of_the_key_along(agents: AgentWorld) -> None:
    secret_of(agents)
    theirs = agents.caller("theirs")
    theirs.identity = Identity("local", 1000, 1, False, "ci")
    agents.decide(("A", LeaseRequest("k", "A", 10.0)))
    (waiting,) = agents.decide(("theirs", LeaseRequest("k", "w", 10.0, wait=60.0)))
    (other,) = agents.decide(("B", LeaseRequest("k", "B", 10.0, wait=60.0)))
    agents.decide(("operator", AgentRevokeRequest("ci")))
    assert agents.answers[waiting]["error"] == "unauthenticated"
    assert other not in agents.answers and agents.lessor.queues.total == 1


def test_wrong_keys_are_limited_for_each_peer_and_right_ones_are_not(agents: AgentWorld) -> None:
    secret = secret_of(agents)

    def code(peer: str) -> str:
        with pytest.raises(PeerError) as caught:
            agents.agents.identify("wrong", PEER, peer)
        return caught.value.code

    assert [code("guesser") for _ in range(WRONG_KEYS_AT_ONCE + 1)][-2:] == ["unauthenticated", "rate_limited"]
    assert code("neighbour") == "unauthenticated"
    assert agents.agents.identify(secret, PEER, "guesser").namespace == "ci"
    agents.clock.elapsed += 1.0
    assert code("guesser") == "unauthenticated"
    assert agents.agents.wrong == WRONG_KEYS_AT_ONCE + 3


def test_the_number_of_keys_is_bounded(agents: AgentWorld) -> None:
    for at in range(MAX_AGENTS):
        agents.agents._digests[f"agent{at}"] = bytes(32)
    reply = agents.ask("operator", AgentAddRequest("one more"))
    assert reply is not None and reply["error"] == "rate_limited"


def test_a_record_says_what_it_was_and_damage_is_found() -> None:
    agent = Agent("ci", "shared", 1_800_000_000.5)
    record = encode_agent(agent)
    assert decode_agent(record) == agent
    for at in range(len(record)):
        with pytest.raises(Exception) as caught:
            decode_agent(record[:at] + bytes([record[at] ^ 1]) + record[at + 1 :])
        assert isinstance(caught.value, RecordDamaged) or at == 0


# ---- the agent-lock form


def lock(world: AgentWorld, key: str = "k", **more: Any) -> Reply:
    (call,) = world.decide(("L", AgentLockRequest(key, **more)))
    world.calm()
    return world.answers[call]


def test_each_claim_draws_a_label_and_the_live_token_keeps_it(agents: AgentWorld) -> None:
    first, other = lock(agents, ttl=10.0), lock(agents, "other")
    assert first["acquired"] is True and first["ttl_seconds"] == 10.0 and other["ttl_seconds"] == 60.0
    label = lock(agents, op=LOCK_CHECK)["held_by"]
    assert label.startswith("agent-lock:") and len(label) == 19 and label != lock(agents, "other", op=LOCK_CHECK)["held_by"]
    kept = lock(agents, token=int(first["token"]))
    assert kept["acquired"] is True and kept["token"] == first["token"] and kept["ttl_seconds"] == 10.0, "its own ttl"
    assert lock(agents, op=LOCK_CHECK)["held_by"] == label
    assert lock(agents, token=int(first["token"]), holder="another")["reason"] == "wrong_holder"


def test_a_claim_that_is_refused_says_who_holds_it_and_no_token(agents: AgentWorld) -> None:
    first = lock(agents, holder="me")
    refused = lock(agents)
    assert refused["acquired"] is False and refused["token"] is None and refused["held_by"] == "me" and refused["reason"] == "held"
    assert first["token"] not in str(refused)
    assert lock(agents, op=LOCK_RELEASE, token=2**60)["released"] is False
    assert lock(agents, op=LOCK_RELEASE, token=int(first["token"])) == {
        "op": "release", "key": "k", "released": True, "charge": {"amount": "0", "currency": "USDC", "event_id": None},
    }  # fmt: skip


def test_what_nobody_knows_is_null_in_this_form_too(agents: AgentWorld) -> None:
    agents.lessor.gate.shut = "shutting_down"
    for op, verdict in ((0, "acquired"), (LOCK_CHECK, "held"), (LOCK_RELEASE, "released")):
        told = agents.ask("L", AgentLockRequest("k", op, 2**60))
        assert told is not None and told[verdict] is None and told["reason"] == "shutting_down" and told["charge"]["amount"] == "0"


def test_a_long_claim_is_told_only_when_it_is_flushed(agents: AgentWorld) -> None:
    (call,) = agents.decide(("L", AgentLockRequest("k", ttl=3000.0)))
    assert call not in agents.answers
    agents.calm()
    assert agents.answers[call]["acquired"] is True
