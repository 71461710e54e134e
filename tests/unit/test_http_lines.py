"""When an HTTP connection is of no use any more: kept alive for nothing, not read from, or only lingering."""

from __future__ import annotations

from typing import Any, cast

from leased.doors.http import IDLE_SECONDS, LINGER_SECONDS, UNREAD_SECONDS
from leased.doors.lines import LINGERING, Line, overdue


class Peer:
    """What `overdue` looks at."""

    def __init__(self) -> None:
        self.begun = 0
        self.out_bytes = 0
        self.unfinished = False
        self.idle = True


def line() -> tuple[Line, Peer]:
    peer = Peer()
    return Line(cast(Any, None), cast(Any, peer), "caller", 0), peer


def lives(made: Line, begin: float, seconds: float) -> bool:
    """Is it left alone for `seconds` and not longer, looked at each second?"""
    times = [begin + second for second in range(int(seconds))]
    return not any(overdue(made, now) for now in times) and overdue(made, begin + seconds)


def test_an_idle_connection_is_kept_for_a_while() -> None:
    made, _ = line()
    assert lives(made, 100.0, IDLE_SECONDS)


def test_each_request_begins_the_while_anew() -> None:
    made, peer = line()
    assert not overdue(made, 0.0) and not overdue(made, IDLE_SECONDS - 1)
    peer.begun += 1
    assert lives(made, IDLE_SECONDS - 1, IDLE_SECONDS)


def test_one_that_waits_for_its_answer_is_never_idle() -> None:
    made, peer = line()
    peer.idle = False
    assert not any(overdue(made, float(second)) for second in range(400))


def test_a_request_that_is_still_coming_has_a_limit_of_its_own() -> None:
    made, peer = line()
    peer.unfinished = True
    assert not any(overdue(made, float(second)) for second in range(400))


def test_answers_that_nobody_reads_are_not_kept() -> None:
    made, peer = line()
    peer.out_bytes = 1000
    assert not overdue(made, 0.0) and not overdue(made, UNREAD_SECONDS - 1)
    peer.out_bytes = 500
    assert lives(made, UNREAD_SECONDS - 1, UNREAD_SECONDS), "a little read begins it anew"


def test_one_that_lingers_ends_whatever_it_does() -> None:
    made, peer = line()
    made.seen = LINGERING
    assert not overdue(made, 50.0)
    peer.begun += 1
    assert overdue(made, 50.0 + LINGER_SECONDS)
