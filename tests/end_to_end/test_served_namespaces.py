"""The wall between tenants: who is in which namespace, by the credentials the kernel shows, and what operators may do across it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from daemons import Daemon, MakeDaemon, Rpc, effective_user

OPEN = 'socket_mode = "0666"\n'
MAPPED = f"""{OPEN}operator_group = "5000"
[namespaces]
"uid:1001" = "build"
"uid:1002" = "build"
"uid:1005" = "local"
"gid:3000" = "lab"
"gid:2000" = "attic"
"""
OVERFLOW = 65534

pytestmark = [pytest.mark.root, pytest.mark.slow]


def connected_as(daemon: Daemon, uid: int, gid: int = 9999, groups: tuple[int, ...] = ()) -> Rpc:
    with effective_user(uid, gid, groups):
        return daemon.rpc()


def whoami(daemon: Daemon, uid: int, gid: int = 9999, groups: tuple[int, ...] = ()) -> tuple[str, bool]:
    with connected_as(daemon, uid, gid, groups) as rpc:
        told = rpc.call("info")
        return told["namespace"], told["operator"]


@pytest.fixture(scope="module")
def mapped(make_shared_daemon: MakeDaemon) -> Daemon:
    return make_shared_daemon(MAPPED).start()


@pytest.fixture(scope="module")
def per_uid(make_shared_daemon: MakeDaemon) -> Daemon:
    return make_shared_daemon(f'{OPEN}[namespaces]\nper_uid = true\n"uid:1001" = "build"\n').start()


@pytest.fixture
def key(request: pytest.FixtureRequest) -> str:
    return str(request.node.name)


@pytest.fixture
def build(mapped: Daemon) -> Iterator[Rpc]:
    with connected_as(mapped, 1001) as rpc:
        yield rpc


@pytest.fixture
def root(mapped: Daemon) -> Iterator[Rpc]:
    with mapped.rpc() as rpc:
        yield rpc


@pytest.mark.parametrize(
    ("uid", "gid", "groups", "namespace", "operator"),
    [
        (0, 0, (), "local", True),
        (1000, 1000, (), "local", False),
        (1001, 1001, (), "build", False),
        (1002, 1002, (), "build", False),
        (1001, 3000, (2000,), "build", False),  # a rule for the uid wins
        (1005, 3000, (), "local", False),  # also one that says what is the default
        (1003, 3000, (2000,), "lab", False),  # then the primary group
        (1003, 9999, (3000, 2000), "attic", False),  # then the others, by number
        (1003, 9999, (3000,), "lab", False),
        (1000, 5000, (), "local", True),
        (1000, 9999, (1, 2, 5000), "local", True),
        (OVERFLOW, 9999, (), "local", False),
        (OVERFLOW, 3000, (2000, 5000), "local", False),  # an unmapped user proves nothing
        (1003, OVERFLOW, (OVERFLOW,), "local", False),
    ],
)
def test_who_is_where(mapped: Daemon, uid: int, gid: int, groups: tuple[int, ...], namespace: str, operator: bool) -> None:
    assert whoami(mapped, uid, gid, groups) == (namespace, operator)


@pytest.mark.parametrize("number", [64, 65, 256, 257, 5000])
def test_a_member_of_many_groups_is_known(make_daemon: MakeDaemon, number: int) -> None:
    daemon = make_daemon('socket_mode = "0666"\noperator_group = "5000"\n').start()
    with effective_user(1001, 9999, (*range(6000, 6000 + number - 1), 5000)):
        rpc = daemon.rpc()
    with rpc:
        assert rpc.call("info")["operator"] is True


def test_by_default_two_users_exclude_each_other(mapped: Daemon, key: str) -> None:
    with connected_as(mapped, 1000) as one, connected_as(mapped, 1003) as other:
        assert one.call("lease", key=key, holder="one")["acquired"] is True
        assert other.call("lease", key=key, holder="other")["held_by"] == "one"


def test_a_key_in_another_namespace_is_another_key(mapped: Daemon, build: Rpc, root: Rpc, key: str) -> None:
    theirs = build.call("lease", key=key, holder="a")
    ours = root.call("lease", key=key, holder="a")
    assert theirs["acquired"] is ours["acquired"] is True
    assert root.call("renew", key=key, holder="a", fence=theirs["fence"])["reason"] == "wrong_fence"
    assert root.call("release", key=key, fence=theirs["fence"])["released"] is False
    assert build.call("check", key=key, generation=ours["generation"])["current"] is False
    assert build.call("release", key=key, fence=theirs["fence"])["released"] is True
    assert root.call("check", key=key)["held"] is True


def test_a_request_id_in_another_namespace_is_another_one(build: Rpc, root: Rpc, key: str) -> None:
    attempt = {"key": key, "holder": "a", "request_id": "r" * 32}
    theirs, ours = build.call("lease", **attempt), root.call("lease", **attempt)
    assert theirs["acquired"] is ours["acquired"] is True and theirs["fence"] != ours["fence"]
    assert build.call("lease", **{**attempt, "key": key})["fence"] == theirs["fence"]


def test_a_queue_does_not_reach_through_the_wall(build: Rpc, root: Rpc, key: str) -> None:
    grant = build.call("lease", key=key, holder="a")
    root.call("lease", key=key, holder="b")
    waiting = root.post("lease", key=key, holder="c", wait_seconds=30)
    assert build.call("check", key=key)["waiting"] == 0
    build.call("release", key=key, fence=grant["fence"])
    assert root.unanswered(waiting, 0.1)


def test_a_list_shows_one_namespace(mapped: Daemon, build: Rpc, root: Rpc, key: str) -> None:
    with connected_as(mapped, 1002) as colleague:
        build.call("lease", key=f"{key} theirs", holder="a", scope=key)
        root.call("lease", key=f"{key} ours", holder="a", scope=key)

        def listed(rpc: Rpc, **filters: Any) -> list[str]:
            return [entry["key"] for entry in rpc.call("list", scope=key, **filters)["leases"]]

        assert listed(build) == listed(colleague) == [f"{key} theirs"]
        assert listed(root) == [f"{key} ours"]
        assert listed(root, all=True) == [f"{key} theirs", f"{key} ours"]
        assert [entry["namespace"] for entry in root.call("list", scope=key, all=True)["leases"]] == ["build", "local"]


def test_what_operators_alone_may_do(mapped: Daemon, build: Rpc, key: str) -> None:
    grant = build.call("lease", key=key, holder="a")
    key_hash = next(entry["key_hash"] for entry in build.call("list")["leases"] if entry["key"] == key)
    for asked in ({"key": key}, {"key_hash": key_hash}, {"key": key, "namespace": "build"}):
        assert build.error("revoke", **asked, reason="mine").code == "permission_denied"
    assert build.error("list", all=True).code == "permission_denied"
    assert build.call("info")["connections"] is None
    assert build.call("check", key=key, generation=grant["generation"])["current"] is True
    with connected_as(mapped, 1000, 5000) as operator:
        assert operator.call("revoke", key=key, reason="r") == {"revoked": False, "reason": "expired"}, "of its own namespace"
        revoked = operator.call("revoke", key=key, namespace="build", reason="r")
        assert revoked == {"revoked": True, "generation": grant["generation"], "held_by": "a"}
        again = build.call("lease", key=key, holder="a")
        assert operator.call("revoke", key_hash=key_hash, reason="r")["generation"] == again["generation"]
    assert {line["uid"] for line in mapped.events("lease.revoked")} == {1000}


def test_under_per_uid_each_user_is_alone(per_uid: Daemon, key: str) -> None:
    assert whoami(per_uid, 1000) == ("uid:1000", False)
    assert whoami(per_uid, 1001) == ("build", False)
    assert whoami(per_uid, 0) == ("uid:0", True)
    with connected_as(per_uid, 1000) as one, connected_as(per_uid, 1002) as other:
        assert one.call("lease", key=key, holder="a")["acquired"] is True
        assert other.call("lease", key=key, holder="a")["acquired"] is True


def test_under_per_uid_the_overflow_user_is_nobody(per_uid: Daemon, key: str) -> None:
    with connected_as(per_uid, OVERFLOW) as rpc:
        for operation, params in (("info", {}), ("lease", {"key": key, "holder": "a"}), ("list", {})):
            assert rpc.error(operation, **params).code == "unauthenticated"


def test_an_agent_key_nobody_knows_is_refused_and_not_repeated(build: Rpc, key: str) -> None:
    error = build.error("lease", key=key, holder="a", agent_key="lsk_not_a_key_of_ours")
    assert error.code == "unauthenticated" and "not_a_key_of_ours" not in error.text
    assert build.call("check", key=key)["held"] is False


def test_credentials_are_those_of_the_connect(mapped: Daemon, key: str) -> None:
    """Whoever a connected socket is handed to speaks as the one who connected it."""
    with connected_as(mapped, 1001) as rpc:
        assert rpc.call("info")["namespace"] == "build"  # asked by root's hand
        with effective_user(1000, 1000):
            assert rpc.call("info")["namespace"] == "build"


def test_the_mode_keeps_others_out(make_daemon: MakeDaemon) -> None:
    daemon = make_daemon('socket_mode = "0660"\nsocket_group = "3000"\n').start()
    for uid, gid, groups in ((1000, 1000, ()), (1000, 1000, (2999,))):
        with pytest.raises(PermissionError):
            connected_as(daemon, uid, gid, groups)
    for uid, gid, groups in ((1000, 3000, ()), (1000, 1000, (3000,))):
        assert whoami(daemon, uid, gid, groups) == ("local", False)
