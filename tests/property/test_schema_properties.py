"""Whatever a peer sends, `parse` answers with a request or a PeerError that betrays nothing; and it alters no valid value."""

from __future__ import annotations

from typing import Any

from hypothesis import example, given, settings
from hypothesis import strategies as st

from leased import model
from leased.errors import PeerError
from leased.schema import OPERATIONS, parse

NAMES = sorted({field.name for row in OPERATIONS.values() for field in row.fields})

scalars = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text(st.characters(), max_size=30)
    | st.binary(max_size=30)
    | st.sampled_from(["60", "none", "0" * 40, "\udcff", "1" * 19, "1970-01-01T00:00:00Z", 10**400, 60, 0.5, "r" * 22])
)
values = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3), max_leaves=5
)
names = st.sampled_from(NAMES) | st.text(st.characters(), max_size=12) | st.binary(max_size=4) | st.integers() | st.none()
operations = st.sampled_from(list(OPERATIONS))


def utf8(high: int) -> st.SearchStrategy[str]:
    return st.text(st.characters(codec="utf-8"), min_size=1, max_size=high // 4)


secrets = st.text("abcXYZ0189+/=-", min_size=6, max_size=150).map(lambda text: f"9Q{text}")  # no word of an error text


@given(operations | st.text(max_size=8), st.dictionaries(names, values, max_size=6))
@settings(max_examples=200, deadline=None)
@example("usage", {"since": "0001-01-01T00:00:00+23:59"})
def test_nothing_but_peer_error_is_raised(operation: str, params: dict[Any, Any]) -> None:
    try:
        parsed = parse(operation, params)
    except PeerError as error:
        assert error.code == ("invalid_argument" if operation in OPERATIONS else "unknown_method")
        str(error).encode()
        assert len(error.text) < 200
        assert error.text.isprintable()
    else:
        assert type(parsed) is OPERATIONS[operation].request


@given(operations, st.sampled_from(["fence", "request_id", "agent_key"]), secrets, st.data())
@settings(max_examples=100, deadline=None)
def test_no_credential_is_repeated(operation: str, name: str, secret: str, data: st.DataObject) -> None:
    params = data.draw(st.dictionaries(st.sampled_from(NAMES), values, max_size=3))
    for given_name in (name, data.draw(st.sampled_from(NAMES))):
        try:
            parse(operation, {**params, given_name: secret})
        except PeerError as error:
            assert secret not in error.text


@given(
    utf8(model.MAX_KEY_BYTES),
    utf8(model.MAX_HOLDER_BYTES),
    st.floats(model.MIN_TTL_SECONDS, model.MAX_TTL_SECONDS),
    st.integers(model.MIN_FENCE, model.MAX_FENCE),
    utf8(model.MAX_SCOPE_BYTES),
    st.floats(0, model.MAX_WAIT_SECONDS),
    st.sampled_from(model.BIND_NAMES),
    st.binary(min_size=22, max_size=128),
    st.sampled_from([lambda number: number, repr]),
)
@settings(max_examples=100, deadline=None)
def test_a_valid_lease_arrives_unaltered(
    key: str, holder: str, ttl: float, fence: int, scope: str, wait: float, bind: str, request_id: bytes, written: Any
) -> None:
    parsed = parse(
        "lease",
        {
            "key": key,
            "holder": holder,
            "ttl_seconds": written(ttl),
            "fence": written(fence),
            "scope": scope,
            "wait_seconds": written(wait),
            "bind": bind,
            "request_id": request_id,
        },
    )
    assert parsed == model.LeaseRequest(key, holder, ttl, fence, scope, wait, model.BIND_NAMES.index(bind), request_id)


@given(st.integers(0, 2**70), st.floats(0, 1e20), st.sampled_from(["ttl_seconds", "wait_seconds"]))
@settings(max_examples=100, deadline=None)
def test_a_string_is_judged_as_its_number(whole: int, real: float, name: str) -> None:
    for number in (whole, real):
        verdicts = []
        for form in (number, repr(number)):
            try:
                verdicts.append(parse("lease", {"key": "k", "holder": "h", name: form}))
            except PeerError as error:
                verdicts.append(error.text)
        assert verdicts[0] == verdicts[1]
