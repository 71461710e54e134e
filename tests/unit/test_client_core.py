from __future__ import annotations

import json
import random
import string
from typing import Any

import msgpack
import pytest

from leased.client import core, errors
from leased.client.answers import Checked, Grant, Refusal, Released, Unknown, answer_to_lease
from leased.client.core import SYSTEM_SOCKET, Conversation, draw_holder, draw_request_id, socket_path
from leased.frames import Answer, Replies

FENCE = "9007199254740993"
GRANT = {
    "acquired": True,
    "renewed": False,
    "key": "gpu:0",
    "holder": "me",
    "fence": FENCE,
    "generation": 17,
    "scope": "night",
    "ttl_seconds": 30.0,
    "expires_at": "2026-11-29T17:39:36.123Z",
    "expires_in_seconds": 29.5,
}


def answer(msgid: int, result: Any, error: str | None = None) -> bytes:
    return bytes(msgpack.packb((1, msgid, error, result)))


def test_request_ids_are_long_url_safe_and_never_repeat() -> None:
    drawn = {draw_request_id() for _ in range(1000)}
    assert len(drawn) == 1000
    assert all(len(rid) == 32 and set(rid) <= set(string.ascii_letters + string.digits + "-_") for rid in drawn)


def test_a_holder_label_differs_for_every_instance_of_one_process() -> None:
    first, second = draw_holder(), draw_holder()
    assert first != second
    assert first.rsplit(":", 1)[0] == second.rsplit(":", 1)[0]
    assert len(first.encode()) <= 256


@pytest.mark.parametrize(
    ("given", "environ", "root", "there", "path"),
    [
        ("/x", {"LEASED_SOCKET": "/y"}, False, set(), "/x"),
        (None, {"LEASED_SOCKET": "/y", "XDG_RUNTIME_DIR": "/run/user/7"}, False, {SYSTEM_SOCKET}, "/y"),
        (None, {"XDG_RUNTIME_DIR": "/run/user/7"}, True, set(), SYSTEM_SOCKET),
        (None, {"XDG_RUNTIME_DIR": "/run/user/7"}, False, {"/run/user/7/leased/leased.sock"}, "/run/user/7/leased/leased.sock"),
        (None, {"XDG_RUNTIME_DIR": "/run/user/7"}, False, {SYSTEM_SOCKET}, SYSTEM_SOCKET),
        (None, {"XDG_RUNTIME_DIR": "/run/user/7"}, False, set(), "/run/user/7/leased/leased.sock"),
        (None, {}, False, set(), SYSTEM_SOCKET),
    ],
)
def test_socket_path(given: str | None, environ: dict[str, str], root: bool, there: set[str], path: str) -> None:
    assert socket_path(given, environ, root, there.__contains__) == path


def test_answers_find_their_requests_in_any_order_and_in_any_pieces() -> None:
    conversation = Conversation()
    first, octets = conversation.ask("check", {"key": "a", "generation": None})
    second, _ = conversation.ask("check", {"key": "b"})
    assert msgpack.unpackb(octets) == [0, first, "check", [{"key": "a"}]]
    both = answer(second, {"held": False}) + answer(first, {"held": True})
    assert conversation.receive(both[:5]) == ([], [])
    answered, events = conversation.receive(both[5:] + bytes(msgpack.packb((2, "event", [{"seq": 1}]))))
    assert answered == [second, first]
    assert [event.params for event in events] == [{"seq": 1}]
    assert conversation.answer(first) == {"held": True}
    assert conversation.answer(second) == {"held": False}
    assert conversation.fault is None


def test_an_answer_to_a_request_that_was_given_up_is_dropped() -> None:
    conversation = Conversation()
    msgid, _ = conversation.ask("info", {})
    conversation.forget(msgid)
    assert conversation.receive(answer(msgid, {})) == ([], [])
    assert not conversation.answered(msgid)


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        ("invalid_argument", errors.InvalidArgument),
        ("too_large", errors.InvalidArgument),
        ("permission_denied", errors.PermissionDenied),
        ("unauthenticated", errors.PermissionDenied),
        ("rate_limited", errors.RateLimited),
        ("unknown_method", errors.ProtocolFault),
        ("internal", errors.ProtocolFault),
        ("not_yet_invented", errors.ProtocolFault),
    ],
)
def test_error_strings_become_exceptions(code: str, kind: type[Exception]) -> None:
    conversation = Conversation()
    msgid, _ = conversation.ask("info", {})
    conversation.receive(answer(msgid, None, f"{code}: ttl_seconds: too short"))
    with pytest.raises(errors.LeasedClientError, match=f"{code}: ttl_seconds: too short") as raised:
        conversation.answer(msgid)
    assert type(raised.value) is kind


def test_an_error_about_the_connection_is_its_fault() -> None:
    conversation = Conversation()
    conversation.ask("info", {})
    assert conversation.receive(answer(0, None, "rate_limited: too many connections")) == ([], [])
    assert isinstance(conversation.ended("closed"), errors.RateLimited)


def test_answers_before_damage_count_and_the_damage_is_told() -> None:
    conversation = Conversation()
    msgid, _ = conversation.ask("info", {})
    answered, _ = conversation.receive(answer(msgid, {}) + b"HTTP/1.1 400 Bad Request\r\n")
    assert answered == [msgid]
    assert isinstance(conversation.fault, errors.ProtocolFault)


def test_a_result_that_is_no_map_is_a_fault() -> None:
    conversation = Conversation()
    msgid, _ = conversation.ask("info", {})
    conversation.receive(answer(msgid, [1]))
    with pytest.raises(errors.ProtocolFault):
        conversation.answer(msgid)


ODD_RESULTS: list[Any] = [
    {**GRANT, "charge": {"amount": "0", "event_id": None}},
    {"held": True, "list": [1]},
    {"a": {"b": {"c": 1}}},
    {"a": b"bytes"},
    {b"a": 1},
    {"a": msgpack.Timestamp(1)},
    [1],
    None,
    {str(n): n for n in range(16)},
    {"long": "x" * 2000},
]


@pytest.mark.parametrize("result", ODD_RESULTS)
@pytest.mark.parametrize("msgid", [1, 127, 128, 255, 256, 65535, 65536, 2**32 - 1])
def test_what_is_decoded_the_short_way_is_what_the_strict_way_decodes(result: Any, msgid: int) -> None:
    octets = answer(msgid, result)
    if result == ODD_RESULTS[0]:
        assert core._plain(octets) == Answer(msgid, None, result)
    else:
        assert core._plain(octets) is None
    assert core._plain(octets + octets) is None
    assert core._plain(octets[:-1]) is None


def test_no_damage_passes_the_short_way_that_the_strict_way_refuses() -> None:
    """Bytes of a real answer, changed at random: whatever is accepted is accepted by both, and means the same."""
    draw = random.Random(7)
    whole = answer(5, {"acquired": True, "key": "k", "n": 1.5, "charge": {"amount": "0", "id": None}, "generation": 2**52})
    accepted = 0
    for _ in range(5000):
        octets = bytearray(whole)
        for _ in range(draw.randrange(1, 4)):
            octets[draw.randrange(len(octets))] = draw.choice([draw.randrange(256), 0xC0, 0x81, 0x91, 0xA1, 0xC4, 0xD4, 0xDE])
        plain = core._plain(bytes(octets))
        if plain is not None:
            accepted += 1
            assert repr([plain]) == repr(strictly(bytes(octets)))
    assert accepted > 500


def test_keys_said_twice_are_left_to_the_strict_way() -> None:
    twice = bytes(msgpack.packb((1, 1, None))) + b"\x82\xa1a\x01\xa1a\x02"
    octets = b"\x94" + twice[1:]
    assert msgpack.unpackb(octets) == [1, 1, None, {"a": 2}]
    assert core._plain(octets) is None
    conversation = Conversation()
    conversation.ask("info", {})
    conversation.receive(octets)
    assert isinstance(conversation.fault, errors.ProtocolFault)


def strictly(octets: bytes) -> list[Any]:
    replies = Replies()
    replies.feed(octets)
    return replies.take()


@pytest.mark.parametrize("value", ["\ud800", 2**64, object(), "x" * 70_000])
def test_what_cannot_be_sent_is_an_invalid_argument_and_harms_nothing(value: object) -> None:
    conversation = Conversation()
    with pytest.raises(errors.InvalidArgument):
        conversation.ask("check", {"key": value})
    msgid, _ = conversation.ask("info", {})
    conversation.receive(answer(msgid, {"name": "leased"}))
    assert conversation.answer(msgid) == {"name": "leased"}


def test_a_grant_is_true_and_keeps_its_fence_to_itself() -> None:
    grant = answer_to_lease(GRANT, "gpu:0", 1000.0)
    assert isinstance(grant, Grant)
    assert grant
    assert (grant.fence, grant.generation, grant.scope, grant.deadline) == (FENCE, 17, "night", 1029.5)
    assert FENCE not in f"{grant} {grant!r} " + "{}".format(grant)  # noqa: UP032  the very form that could leak
    with pytest.raises(TypeError):
        json.dumps(grant)
    with pytest.raises(TypeError):
        tuple(grant)  # type: ignore[arg-type]


def test_refusals_and_unknowns_are_false() -> None:
    refusal = answer_to_lease({"acquired": False, "key": "k", "reason": "held", "held_by": "x", "generation": 4}, "k", 0.0)
    assert isinstance(refusal, Refusal)
    assert not refusal
    assert (refusal.reason, refusal.held_by, refusal.generation, refusal.same_holder_label) == ("held", "x", 4, False)
    unknown = answer_to_lease({"acquired": None, "key": "k", "reason": "full", "retry_after_seconds": 1.0}, "k", 0.0, "secret-rid")
    assert isinstance(unknown, Unknown)
    assert not unknown
    assert unknown.request_id == "secret-rid"
    assert "secret-rid" not in repr(unknown)


@pytest.mark.parametrize(
    "reply",
    [
        {},
        {"acquired": 1, **{name: GRANT[name] for name in GRANT if name != "acquired"}},
        {**GRANT, "acquired": "true"},
        {**GRANT, "key": "gpu:1"},
        {name: GRANT[name] for name in GRANT if name != "fence"},
        {name: GRANT[name] for name in GRANT if name != "expires_in_seconds"},
        {**GRANT, "expires_in_seconds": "30"},
    ],
)
def test_what_is_no_clear_answer_is_never_permission(reply: dict[str, Any]) -> None:
    with pytest.raises(errors.ProtocolFault):
        answer_to_lease(reply, "gpu:0", 0.0)


def test_truth_of_the_other_answers() -> None:
    assert Checked({"held": True, "key": "k"})
    assert not Checked({"held": None, "key": "k"})
    assert Released({}, True, False)
    assert not Released({}, None, False)
