"""Keyed hashes: what must differ differs, and nothing that must stay secret shows."""

from __future__ import annotations

import itertools
import unicodedata

import pytest

from leased.digests import KEY_HASH_BYTES, PROOF_BYTES, RID_BYTES, SECRET_BYTES, Digests

SECRET = bytes(range(SECRET_BYTES))
LONG = "k" * 1023

# Keys that a store of paths, C strings, case-blind or normalising text would take for one another.
NASTY_KEYS = [
    "key", "KEY", "Key", "key ", " key", "key\n", "key\r\n", "key\t", "key\0", "key\0x", "\0key", "key/", "/key", "//key", "key//", "./key",
    "../key", "key/.", "key/..", "a/b", "a//b", "a\\b", "a:b", "a;b", "a,b", "a%2Fb", "a%2fb", "a+b", "a b", "a%20b", "key?x=1", "key#x",
    "*", "?", "[k]", "k*", "'", '"', "`", "$(k)", "{}", "[]", "null", "None", "0", "00", "-0", "0.0", "1", "1.0", "1e0", "true",
    unicodedata.normalize("NFC", "é"), unicodedata.normalize("NFD", "é"), "ﬁ", "fi", "ß", "ss", "ẞ", "SS", "ı", "i", "İ", "I", "K", "\u212a",
    "\u200bkey", "key\u200b", "\ufeffkey", "k\u00ade\u00ady", "\u202ekey", "ｋｅｙ", "к", "k", "а", "a", "🔒", "🔓", "\U0001f512\ufe0f",
    "local", "local:key", "local/key", "uid:0", "uid:0/key", LONG + "a", LONG + "b", LONG, "\x7f", "\x01", "é" * 512, "é" * 511 + "è",
]  # fmt: skip


@pytest.fixture
def digests() -> Digests:
    return Digests(SECRET)


def test_no_two_keys_that_look_alike_are_one_key(digests: Digests) -> None:
    assert len(set(NASTY_KEYS)) == len(NASTY_KEYS)
    hashes = {digests.key_hash("local", key) for key in NASTY_KEYS}
    assert len(hashes) == len(NASTY_KEYS)
    assert {len(each) for each in hashes} == {KEY_HASH_BYTES}


def test_the_wall_between_namespaces_is_no_character_of_a_key(digests: Digests) -> None:
    pairs = [
        ("a", "bc"),
        ("ab", "c"),
        ("abc", "k"),
        ("a", "b"),
        ("", "ab"),
        ("ab", "k"),
        ("a\0", "b"),
        ("a", "\0b"),
        ("a:", "b"),
        ("a", ":b"),
    ]
    for both in itertools.product(["a", "ab", "a\0", "uid:1", "uid:10", "ä"], ["b", "0", "bc", "\0b", "0b"]):
        pairs.append(both)
    distinct = set(pairs)
    for name in (
        {digests.key_hash(space, key) for space, key in distinct},
        {digests.rid(space, key.encode())[0] for space, key in distinct},
        {digests.holder_hash(space, key) for space, key in distinct},
        {digests.scope_key(space, key) for space, key in distinct},
    ):
        assert len(name) == len(distinct)


def test_the_same_question_has_the_same_answer_in_any_order_and_after_a_restart(digests: Digests) -> None:
    keys = [(space, key) for space in ("local", "uid:1") for key in NASTY_KEYS[:10]]
    forth = [digests.key_hash(*each) for each in keys]
    other = Digests(SECRET)
    back = [other.key_hash(*each) for each in reversed(keys)]
    assert forth == back[::-1]


def test_more_namespaces_than_are_remembered_change_no_hash(digests: Digests) -> None:
    first = digests.key_hash("space-0", "k")
    seen = {digests.key_hash(f"space-{n}", "k") for n in range(5000)}
    assert len(seen) == 5000
    assert digests.key_hash("space-0", "k") == first


def test_another_secret_changes_every_hash(digests: Digests) -> None:
    other = Digests(bytes(SECRET_BYTES))
    assert digests.key_hash("local", "k") != other.key_hash("local", "k")
    assert digests.proof(2**53) != other.proof(2**53)
    assert digests.scope_key("local", "s") != other.scope_key("local", "s")
    assert digests.holder_hash("local", "h") != other.holder_hash("local", "h")
    ours, theirs = digests.rid("local", b"r" * 22), other.rid("local", b"r" * 22)
    assert ours[0] != theirs[0]
    assert ours[1] != theirs[1]


@pytest.mark.parametrize("size", [0, SECRET_BYTES - 1, SECRET_BYTES + 1])
def test_a_secret_of_another_size_is_refused(size: int) -> None:
    with pytest.raises(ValueError, match="32 bytes"):
        Digests(bytes(size))


def test_each_use_has_hashes_of_its_own(digests: Digests) -> None:
    fence = 2**53 + 1
    text = fence.to_bytes(8, "big")
    outputs = [
        digests.key_hash("local", "x" * 8)[:16],
        digests.holder_hash("local", "x" * 8),
        digests.scope_key("local", "x" * 8)[:16],
        digests.rid("local", b"x" * 8)[0],
        digests.proof(int.from_bytes(b"x" * 8, "big")),
        digests.proof(fence),
        digests.rid("", text)[0],
    ]
    assert len(set(outputs)) == len(outputs)


def test_nothing_of_a_fence_or_a_text_shows_in_what_is_stored(digests: Digests) -> None:
    fence = 7_777_777_777_777_777_777
    proof = digests.proof(fence)
    assert len(proof) == PROOF_BYTES
    assert fence.to_bytes(8, "big") not in proof
    assert str(fence).encode()[:6] not in proof
    key = "password-in-a-key"
    assert b"pass" not in digests.key_hash("local", key)
    name, mask = digests.rid("local", key.encode() + b"-0123456789")
    assert b"pass" not in name + mask.to_bytes(8, "big")
    assert len(name) == RID_BYTES


def test_neighbouring_fences_and_generous_numbers_of_them_have_different_proofs(digests: Digests) -> None:
    proofs = {digests.proof(2**53 + n) for n in range(1000)} | {digests.proof(2**63 - 1 - n) for n in range(1000)}
    assert len(proofs) == 2000


def test_the_mask_of_a_request_id_is_not_found_in_its_name(digests: Digests) -> None:
    masks = set()
    for n in range(200):
        name, mask = digests.rid("local", b"%022d" % n)
        assert 0 <= mask < 2**64
        assert mask.to_bytes(8, "big") not in name
        masks.add(mask)
    assert len(masks) == 200
