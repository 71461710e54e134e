"""The MessagePack-RPC layer of pynvim, Neovim's Python client, on a real daemon.  Run by test_foreign_clients.py.

`socket_session` opens with a notification meant for an editor, in positional parameters: the daemon lets it pass.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
from pynvim.msgpack_rpc import socket_session


def connected() -> Any:
    session = socket_session(os.environ["LEASED_SOCKET"])
    session.error_wrapper = lambda error: RuntimeError(error)
    return session


@pytest.fixture
def session() -> Iterator[Any]:
    made = connected()
    yield made
    made.close()


def test_a_lease_from_grant_to_release(session: Any) -> None:
    assert session.request("info")["name"] == "leased"
    grant = session.request("lease", {"key": "vim", "holder": "first", "ttl_seconds": 30, "bind": "process"})
    assert grant["acquired"] is True and type(grant["fence"]) is str and type(grant["generation"]) is int
    assert session.request("lease", {"key": "vim", "holder": "second"})["reason"] == "held"
    renewed = session.request("renew", {"key": "vim", "holder": "first", "fence": grant["fence"], "ttl_seconds": 45.5})
    assert (renewed["renewed"], renewed["ttl_seconds"], renewed["generation"]) == (True, 45.5, grant["generation"])
    assert session.request("check", {"key": "vim", "generation": grant["generation"]})["current"] is True
    assert [lease["key"] for lease in session.request("list", {"holder": "first"})["leases"]] == ["vim"]
    number = int(grant["fence"])
    assert session.request("release", {"key": "vim", "fence": number})["released"] is True
    assert session.request("release", {"key": "vim", "fence": number})["reason"] == "expired"


def test_an_error_is_a_string_and_the_session_goes_on(session: Any) -> None:
    for method, params, said in (
        ("lease", {"key": "vim"}, "invalid_argument: holder is required"),
        ("steal", {}, "unknown_method: steal is not an operation"),
        ("check", {"key": b"vim"}, "invalid_argument: key must be a string (MessagePack str, UTF-8), not binary"),
    ):
        with pytest.raises(RuntimeError) as raised:
            session.request(method, params)
        assert raised.value.args == (said,)
    assert session.request("check", {"key": "vim"})["held"] is False


def test_a_waiting_lease_is_answered_when_its_turn_comes(session: Any) -> None:
    other = connected()
    assert other.request("lease", {"key": "turn", "holder": "first", "ttl_seconds": 0.5})["acquired"]
    granted = session.request("lease", {"key": "turn", "holder": "second", "wait_seconds": 60})
    assert granted["acquired"] is True
    refused = other.request("lease", {"key": "turn", "holder": "first", "wait_seconds": 0.2})
    assert (refused["acquired"], refused["held_by"]) == (False, "second")
    assert session.request("release", {"key": "turn", "fence": granted["fence"]})["released"]
    other.close()


def test_events_come_between_answers_and_are_kept(session: Any) -> None:
    assert session.request("watch", {"key": "seen"})["watching"] is True
    grant = session.request("lease", {"key": "seen", "holder": "first"})
    session.request("release", {"key": "seen", "fence": grant["fence"]})
    for expected in ("granted", "released"):
        kind, name, (event,) = session.next_message()
        assert (kind, name, event["type"], event["generation"]) == ("notification", "event", expected, grant["generation"])
    assert session.request("unwatch") == {"watching": False}


def test_the_question_of_an_older_kernel_can_be_answered(session: Any) -> None:
    """Before Linux 6.5 the daemon asks which process this is while the lease waits: pynvim's loop takes it and asks on."""
    answers: list[Any] = []

    def heard(name: str, params: list[Any]) -> None:
        assert name == "prove"
        answers.append(session.request("prove", params[0]))

    def ask() -> None:
        answers.append(session.request("lease", {"key": "old", "holder": "vim", "bind": "process"})["acquired"])
        session.stop()

    session.run(None, heard, ask)
    assert sorted(answers, key=str) == [True, {"proven": True}]
