"""Waiting for longer than the daemon lets anybody wait, and what is said when the time is over."""

from __future__ import annotations

import pytest

from leased.adapters.acquiring import LEAST_PAUSE_SECONDS, LONGEST_WAIT_SECONDS, RETRY_SECONDS, until_granted
from leased.client.answers import Refusal, Unknown
from leased.client.errors import DaemonUnreachable, OutcomeUnknown, RateLimited

HELD = Refusal({"key": "k", "reason": "held", "held_by": "a"})


class Asked:
    """Answers in turn, the last one for ever.  A refusal takes all of the wait it was asked with; time passes only here."""

    def __init__(self, *answers: object) -> None:
        self.answers = list(answers)
        self.waits: list[float] = []
        self.pauses: list[float] = []
        self.now = 1000.0

    def __call__(self, wait: float) -> Refusal | Unknown | str:
        self.waits.append(wait)
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, Refusal):
            self.now += wait
        if isinstance(answer, Exception):
            raise answer
        assert isinstance(answer, str | Refusal | Unknown)
        return answer

    def sleep(self, seconds: float) -> None:
        self.pauses.append(seconds)
        self.now += seconds

    def until(self, seconds: float | None) -> object:
        return until_granted(self, seconds, lambda: self.now, self.sleep)


def test_who_does_not_wait_asks_once() -> None:
    asked = Asked(HELD)
    assert asked.until(0.0) is HELD
    assert (asked.waits, asked.pauses) == ([0.0], [])


def test_a_long_wait_is_made_of_the_longest_there_are_and_ends_in_time() -> None:
    asked = Asked(HELD)
    assert asked.until(700.0) is HELD
    assert asked.waits == pytest.approx([LONGEST_WAIT_SECONDS, LONGEST_WAIT_SECONDS, 100 - 2 * LEAST_PAUSE_SECONDS])
    assert asked.now == pytest.approx(1700.0)


def test_without_an_end_it_asks_until_it_is_granted() -> None:
    asked = Asked(HELD, HELD, HELD, "mine")
    assert asked.until(None) == "mine"
    assert asked.waits == [LONGEST_WAIT_SECONDS] * 4


@pytest.mark.parametrize(
    ("answer", "pause"),
    [
        (Unknown({"reason": "recovering", "retry_after_seconds": 7.5}), 7.5),
        (Unknown({"reason": "full"}), 1.0),
        (OutcomeUnknown("lease", "no answer"), RETRY_SECONDS),
        (RateLimited("rate_limited: too many"), RETRY_SECONDS),
    ],
)
def test_who_waits_asks_again_where_nobody_could_tell(answer: object, pause: float) -> None:
    asked = Asked(answer, answer, "mine")
    assert asked.until(60.0) == "mine"
    assert asked.pauses == [pause, pause]


def test_what_is_unknown_to_the_end_is_no_refusal() -> None:
    recovering = Asked(Unknown({"reason": "recovering", "retry_after_seconds": 7.5}))
    with pytest.raises(OutcomeUnknown, match="recovering"):
        recovering.until(10.0)
    assert recovering.pauses == [7.5, 2.5]
    with pytest.raises(OutcomeUnknown, match="recovering"):
        recovering.until(0.0)
    with pytest.raises(RateLimited):
        Asked(RateLimited("rate_limited: too many")).until(0.0)


def test_a_daemon_that_is_not_there_is_said_at_once() -> None:
    with pytest.raises(DaemonUnreachable):
        Asked(DaemonUnreachable("/nowhere", "nobody listens there"), "mine").until(None)
