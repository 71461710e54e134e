"""What can be looked at through the real socket, and that no view shows a credential: check, list, info, and the operator's revoke."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator
from typing import Any

import pytest
from daemons import Daemon, MakeDaemon, Rpc

TTL = 0.15


@pytest.fixture(scope="module")
def served(make_shared_daemon: MakeDaemon) -> Daemon:
    return make_shared_daemon().start()


@pytest.fixture
def rpc(served: Daemon) -> Iterator[Rpc]:
    with served.rpc() as rpc:
        yield rpc


@pytest.fixture
def key(request: pytest.FixtureRequest) -> str:
    return str(request.node.name)


def lapse(grant: dict[str, Any]) -> None:
    while (left := grant["expires_boottime"] - time.clock_gettime(time.CLOCK_BOOTTIME)) > 0:
        time.sleep(left + 0.001)


def test_check_of_a_free_key(rpc: Rpc, key: str) -> None:
    assert rpc.call("check", key=key) == {
        "held": False, "key": key, "held_by": None, "generation": None, "expires_at": None, "expires_in_seconds": None, "waiting": 0,
    }  # fmt: skip


def test_check_of_a_held_key(rpc: Rpc, key: str) -> None:
    grant = rpc.call("lease", key=key, holder="a", ttl_seconds=30)
    told = rpc.call("check", key=key)
    assert (told["held"], told["held_by"], told["generation"], told["waiting"]) == (True, "a", grant["generation"], 0)
    assert 29 < told["expires_in_seconds"] <= 30 and "current" not in told


def test_check_tells_whether_a_generation_is_the_current_one(rpc: Rpc, key: str) -> None:
    first = rpc.call("lease", key=key, holder="a", ttl_seconds=TTL)
    assert rpc.call("check", key=key, generation=first["generation"])["current"] is True
    assert rpc.call("check", key=key, generation=str(first["generation"]))["current"] is True
    assert rpc.call("check", key=key, generation=first["generation"] + 1)["current"] is False
    lapse(first)
    assert rpc.call("check", key=key, generation=first["generation"])["current"] is False
    second = rpc.call("lease", key=key, holder="b")
    assert rpc.call("check", key=key, generation=first["generation"])["current"] is False
    assert rpc.call("check", key=key, generation=second["generation"])["current"] is True


def test_list_by_scope_and_holder_oldest_first(rpc: Rpc, key: str) -> None:
    grants = {
        name: rpc.call("lease", key=f"{key} {name}", holder=holder, scope=scope, ttl_seconds=30)
        for name, holder, scope in [("1", f"{key} x", key), ("2", f"{key} y", key), ("3", f"{key} x", None), ("4", f"{key} x", key)]
    }
    lapsing = rpc.call("lease", key=f"{key} 5", holder=f"{key} x", scope=key, ttl_seconds=TTL)

    def listed(**filters: Any) -> list[str]:
        page = rpc.call("list", **filters)
        assert page["cursor"] is None
        return [entry["key"].removeprefix(f"{key} ") for entry in page["leases"]]

    assert listed(scope=key) == ["1", "2", "4", "5"]
    assert listed(holder=f"{key} x") == ["1", "3", "4", "5"]
    assert listed(scope=key, holder=f"{key} x") == ["1", "4", "5"]
    assert listed(scope=key, holder=key) == []
    lapse(lapsing)
    assert listed(scope=key) == ["1", "2", "4"]
    rpc.call("release", key=f"{key} 1", fence=grants["1"]["fence"])
    rpc.call("renew", key=f"{key} 2", holder=f"{key} y", fence=grants["2"]["fence"])
    assert listed(scope=key) == ["2", "4"], "a renewal keeps its place"
    entry = rpc.call("list", scope=key)["leases"][0]
    assert set(entry) == {"key", "key_hash", "holder", "scope", "generation", "expires_at", "expires_in_seconds", "bind"}
    assert (entry["holder"], entry["scope"], entry["generation"], entry["bind"]) == (
        f"{key} y",
        key,
        grants["2"]["generation"],
        "none",
    )


def test_list_in_pages(rpc: Rpc, key: str) -> None:
    for number in range(25):
        rpc.call("lease", key=f"{key} {number}", holder="a", scope=key)
    seen, cursor, pages = [], None, 0
    while True:
        page = rpc.call("list", scope=key, limit=10, **({} if cursor is None else {"cursor": cursor}))
        seen += [entry["key"] for entry in page["leases"]]
        cursor, pages = page["cursor"], pages + 1
        if cursor is None:
            break
        assert len(page["leases"]) == 10 and isinstance(cursor, str)
    assert seen == [f"{key} {number}" for number in range(25)]
    assert pages == 3
    assert len(rpc.call("list", scope=key, limit=25)["leases"]) == 25


def test_a_key_not_seen_since_the_start_is_listed_by_its_hash_alone(make_daemon: MakeDaemon) -> None:
    daemon = make_daemon().start()
    with daemon.rpc() as rpc:
        rpc.call("lease", key="secret name", holder="a", scope="s", ttl_seconds=300)
        known = rpc.call("list")["leases"][0]
    daemon.restart()
    with daemon.rpc() as rpc:
        unseen = rpc.call("list")["leases"][0]
        assert (unseen["key"], unseen["key_hash"]) == (None, known["key_hash"])
        rpc.call("check", key="secret name")
        revoked = rpc.call("revoke", key_hash=known["key_hash"], reason="test")
        assert (revoked["revoked"], revoked["held_by"]) == (True, "a")
        assert rpc.call("check", key="secret name")["held"] is False


def test_info_tells_what_a_caller_may_rely_on(served: Daemon, rpc: Rpc) -> None:
    told = rpc.call("info")
    assert told["name"] == "leased" and told["namespace"] == "local" and told["operator"] is True
    assert {"version", "install_id", "limits", "store", "clock", "uptime_seconds"} <= set(told)
    limits = told["limits"]
    assert (limits["max_key_bytes"], limits["max_holder_bytes"], limits["max_message_bytes"]) == (1024, 256, 65536)
    assert (limits["min_ttl_seconds"], limits["max_ttl_seconds"], limits["max_wait_seconds"]) == (0.1, 3600, 300)
    assert (limits["max_connections"], limits["max_connections_per_uid"], limits["max_leases"]) == (1024, 256, 100_000)
    assert told["store"]["state"] == "ok"
    assert told["clock"]["boottime"] == pytest.approx(time.clock_gettime(time.CLOCK_BOOTTIME), abs=1)
    assert 0 < told["uptime_seconds"] < 600
    assert rpc.call("info")["install_id"] == told["install_id"]


def test_p13_a_fence_and_a_request_id_are_shown_once_and_stored_nowhere(make_daemon: MakeDaemon) -> None:
    """Everything the daemon says to others or writes is searched for the fence as text and in every binary form it could take."""
    daemon = make_daemon('[log]\nlevel = "debug"\n').start()
    key, request_id = "the key's own text 8f1c", secrets.token_urlsafe(24)
    with daemon.rpc() as holder, daemon.rpc() as stranger:
        grant = holder.call("lease", key=key, holder="a", scope="s", request_id=request_id, ttl_seconds=600)
        wrong = str(int(grant["fence"]) ^ 1)
        said = [
            stranger.call("lease", key=key, holder="b"),
            stranger.call("lease", key=key, holder="a"),
            stranger.call("lease", key=key, holder="b", fence=grant["fence"]),
            stranger.call("renew", key=key, holder="a", fence=wrong),
            stranger.call("release", key=key, fence=wrong),
            stranger.call("check", key=key, generation=grant["generation"]),
            stranger.call("list", scope="s"),
            stranger.call("list", all=True),
            stranger.call("info"),
            str(stranger.error("lease", key="other", holder="a", request_id=request_id)),
            str(stranger.error("lease", key=key, holder="a", fence=grant["fence"], ttl_second=3)),
            str(stranger.error("release", key=key, fence=f"{grant['fence']}x")),
            stranger.call("revoke", key=key, reason="test"),
        ]
    assert not any(grant["fence"] in str(answer) or request_id in str(answer) for answer in said)
    daemon.terminate()
    number = int(grant["fence"])
    forms = {grant["fence"].encode(), number.to_bytes(8, "big"), number.to_bytes(8, "little"), request_id.encode(), key.encode()}
    written = [path for home in (daemon.state_dir, daemon.runtime_dir) for path in home.rglob("*") if path.is_file()]
    assert any(b"local" in path.read_bytes() for path in written), "the stores are not where this test looks"
    for path in [*written, daemon.log_path]:
        octets = path.read_bytes()
        assert [form for form in forms if form in octets] == [], path
    assert len(daemon.events("lease.revoked")) == 1, "the log was not written at all"


def test_revoke_names_one_lease_and_a_reason(rpc: Rpc, key: str) -> None:
    rpc.call("lease", key=key, holder="a")
    key_hash = next(entry["key_hash"] for entry in rpc.call("list", holder="a", limit=1000)["leases"] if entry["key"] == key)
    assert rpc.error("revoke", key=key).text == "reason is required"
    assert rpc.error("revoke", reason="r").text.startswith("key is required")
    assert rpc.error("revoke", key=key, key_hash=key_hash, reason="r").text.startswith("key_hash ")
    assert rpc.call("revoke", key=key, namespace="elsewhere", reason="r") == {"revoked": False, "reason": "expired"}
    assert rpc.call("check", key=key)["held"] is True
    assert rpc.call("revoke", key=key, namespace="local", reason="r")["revoked"] is True
    assert rpc.call("check", key=key)["held"] is False


def test_a_revocation_is_logged_with_who_did_it_and_why(served: Daemon, rpc: Rpc, key: str) -> None:
    grant = rpc.call("lease", key=key, holder="a")
    rpc.call("revoke", key=key, reason="stuck since noon")
    line = next(line for line in served.events("lease.revoked") if line["generation"] == grant["generation"])
    assert (line["reason"], line["uid"]) == ("stuck since noon", 0) or line["uid"] > 0
    assert key not in str(line)
