"""The judgement every face shares, without any of them: when a lease is renewed, when it is lost, what is asked again."""

from __future__ import annotations

from typing import Any

import pytest

from leased.client.answers import Grant, Refusal, Released, Unknown
from leased.client.attempt import FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS, Attempt
from leased.client.errors import (
    ConnectionGone,
    DaemonUnreachable,
    InvalidArgument,
    LeasedClientError,
    OutcomeUnknown,
    ProtocolFault,
    RateLimited,
)
from leased.client.keeping import INHERITED, Keeping, not_released

GRANT = {"key": "k", "holder": "me", "fence": "9007199254740993", "generation": 17, "ttl_seconds": 30.0, "expires_in_seconds": 30.0}
REFUSED = Refusal({"acquired": False, "key": "k", "reason": "wrong_fence"})
UNKNOWN = Unknown({"acquired": None, "key": "k", "reason": "store"})


def kept(deadline: float = 1030.0) -> Keeping:
    keeping = Keeping()
    keeping.begin(Grant(GRANT, deadline))
    return keeping


def test_a_renewal_is_due_at_a_third_of_the_ttl_and_again_a_third_after_it_was_asked_for() -> None:
    keeping = kept()
    assert keeping.rest(1000) == pytest.approx(10)
    keeping.answered(Grant(GRANT, 1042), before=1012, now=1015)
    assert (keeping.deadline, keeping.rest(1015)) == (1042, pytest.approx(7))
    assert keeping.judged(1041.9) is None


@pytest.mark.parametrize("answer", [UNKNOWN, None])
def test_what_fails_is_tried_again_within_a_tenth_of_the_ttl_or_a_second(answer: Any) -> None:
    keeping = kept()
    keeping.answered(answer, before=1010, now=1011)
    assert keeping.rest(1011) == 1.0
    keeping.begin(Grant({**GRANT, "ttl_seconds": 2.0}, 1030))
    keeping.answered(answer, before=1029, now=1029)
    assert keeping.rest(1029) == pytest.approx(0.2)
    assert keeping.rest(1029.9) == pytest.approx(-0.7)
    assert keeping.judged(1029.99) is None


def test_at_its_deadline_it_is_lost_and_nothing_brings_it_back() -> None:
    keeping = kept()
    assert keeping.rest(1029) < 1
    assert keeping.judged(1030) == "no renewal was answered before its deadline"
    keeping.answered(Grant(GRANT, 1060), before=1020, now=1031)
    assert keeping.judged(1031) == keeping.judged(1000) == "no renewal was answered before its deadline"
    assert not keeping.refused


def test_an_answer_past_the_deadline_revives_nothing_even_if_nobody_had_looked() -> None:
    keeping = kept()
    keeping.answered(Grant(GRANT, 1060), before=1020, now=1030)
    assert keeping.deadline == 1030
    assert keeping.judged(1030) is not None


def test_a_refusal_is_a_loss_at_once_and_the_first_loss_stays() -> None:
    keeping = kept()
    keeping.answered(REFUSED, before=1010, now=1010)
    assert (keeping.judged(1010), keeping.refused) == ("its renewal was refused: wrong_fence", True)
    keeping.lose("something else")
    assert keeping.judged(2000) == "its renewal was refused: wrong_fence"
    assert keeping.rest(1010) == 0


def test_once_ended_nothing_is_due_and_it_was_released() -> None:
    keeping = kept()
    assert [keeping.end(), keeping.end()] == [True, False]
    assert (keeping.judged(1001), keeping.judged(5000), keeping.loss) == ("it was released",) * 2 + (None,)
    assert keeping.rest(1001) == 0


def test_what_was_never_entered_and_what_is_the_parent_s_is_held_by_nobody_here() -> None:
    keeping = Keeping()
    assert (keeping.judged(0), keeping.entered) == ("it was never entered", False)
    keeping.left_to_parent()
    assert (keeping.judged(0), keeping.entered, keeping.end()) == (INHERITED, True, False)


def test_a_release_that_found_nothing_is_a_loss_unless_it_may_have_been_its_own_repeat() -> None:
    gone = {"released": False, "key": "k", "reason": "expired"}
    assert not_released(Released(gone, False, False)) == "its release was answered with 'expired'"
    assert not_released(Released(gone, False, True)) is None
    assert not_released(Released({}, None, False)) is None
    assert not_released(Released({}, True, False)) is None
    assert not_released(None) is None


# ---- asking again


def attempt(operation: str = "check", wait: Any = 0, **fields: Any) -> Attempt:
    return Attempt("/socket", operation, {"key": "k", **fields}, 10.0, wait, 100.0)


def test_a_lost_connection_is_asked_again_with_growing_pauses_until_the_time_is_up() -> None:
    asking = attempt()
    pauses = []
    now = 100.0
    with pytest.raises(OutcomeUnknown, match="broken"):
        while True:
            asking.failed(ConnectionGone("broken", sent=True))
            pauses.append(asking.pause(now))
            now += pauses[-1]
    assert pauses[0] == 0  # a daemon that restarted since the last call is not to be noticed
    assert all(0 < pause <= LONGEST_PAUSE_SECONDS for pause in pauses[1:])
    assert FIRST_PAUSE_SECONDS / 2 <= pauses[1] <= FIRST_PAUSE_SECONDS
    assert pauses[-1] >= LONGEST_PAUSE_SECONDS / 2
    assert 108 < now < 110


def test_as_long_as_nothing_was_sent_a_daemon_that_is_away_is_told_at_once() -> None:
    asking = attempt()
    asking.failed(ConnectionGone("closed before", sent=False))
    away = DaemonUnreachable("/socket", "nobody listens there")
    with pytest.raises(DaemonUnreachable) as raised:
        asking.failed(away)
    assert raised.value is away
    asking.failed(ConnectionGone("broken", sent=True))
    asking.failed(away)  # now it may have been carried out: it is waited for
    assert asking.pause(100.0) == 0
    with pytest.raises(OutcomeUnknown, match="nobody listens there"):
        asking.pause(110.0)


def test_when_nothing_was_ever_sent_the_end_of_the_time_is_unreachable() -> None:
    asking = attempt()
    asking.failed(ConnectionGone("closed before", sent=False))
    with pytest.raises(DaemonUnreachable, match="closed before"):
        asking.pause(110.0)


@pytest.mark.parametrize(
    ("wrong", "at_first", "after_a_loss"),
    [
        (InvalidArgument("invalid_argument: key"), InvalidArgument, InvalidArgument),
        (RateLimited("rate_limited: requests"), RateLimited, None),
        (ProtocolFault("internal: broken"), ProtocolFault, OutcomeUnknown),
        (OutcomeUnknown("check", "no answer"), OutcomeUnknown, OutcomeUnknown),
    ],
)
def test_what_is_raised_and_what_is_asked_again(
    wrong: LeasedClientError, at_first: type[Exception], after_a_loss: type[Exception] | None
) -> None:
    with pytest.raises(at_first):
        attempt().failed(wrong)
    asking = attempt()
    asking.failed(ConnectionGone("broken", sent=True))
    if after_a_loss is None:
        asking.failed(wrong)
    else:
        with pytest.raises(after_a_loss):
            asking.failed(wrong)


def test_a_lease_without_request_id_is_never_asked_twice() -> None:
    asking = attempt("lease")
    asking.failed(ConnectionGone("broken", sent=True))
    with pytest.raises(OutcomeUnknown):
        asking.pause(100.0)
    asking = attempt("lease", request_id="r" * 32)
    asking.failed(ConnectionGone("broken", sent=True))
    assert asking.pause(100.0) == 0
    assert asking.hangs_up_after(OutcomeUnknown("lease", "no answer"))
    assert not attempt("renew").hangs_up_after(OutcomeUnknown("renew", "no answer"))


def test_a_repeat_waits_only_for_what_is_left() -> None:
    asking = attempt("lease", 20, request_id="r" * 32)
    assert asking.deadline == 130.0
    assert asking.fields(105.0) == {"key": "k", "request_id": "r" * 32, "wait_seconds": 20}
    assert not asking.settles({"acquired": None, "reason": "shutting_down"}, 107.0)
    assert asking.repeated
    assert asking.fields(108.0)["wait_seconds"] == 12.0
    assert asking.fields(125.0)["wait_seconds"] == 0.0
    assert asking.settles({"acquired": None, "reason": "shutting_down"}, 120.0)
    assert asking.settles({"acquired": None, "reason": "superseded"}, 107.0)
    assert asking.settles({"acquired": False, "reason": "held"}, 107.0)


@pytest.mark.parametrize("wait", ["much", float("nan"), -3, 10**400, None])
def test_a_wait_that_makes_no_sense_is_the_daemon_s_to_refuse(wait: Any) -> None:
    asking = attempt("lease", wait, request_id="r" * 32)
    assert asking.deadline == 110.0
    if wait:
        assert asking.fields(100.0)["wait_seconds"] is wait
