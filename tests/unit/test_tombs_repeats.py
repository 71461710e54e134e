"""Request ids of leases that ended, in a whole lessor: spent until the deadline of the grant, whatever happened in between."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from worlds import World, world

RID = b"r" * 22


@pytest.fixture
def w() -> Iterator[World]:
    with world() as made:
        made.run()
        yield made


def reason(w: World) -> object:
    reply = w.lease("A", 15, request_id=RID)
    assert reply is not None
    return reply["reason"] if reply["acquired"] is False else reply["acquired"]


def test_a_request_id_is_spent_until_the_deadline_its_lease_was_granted_with(w: World) -> None:
    w.granted("A", 15, request_id=RID)
    w.release("A")
    w.pass_time(14.5)
    assert reason(w) == "spent"
    w.pass_time(0.5)
    assert reason(w) is True


def test_a_renewal_moves_the_deadline_of_the_lease_but_not_of_its_request_id(w: World) -> None:
    w.granted("A", 10, request_id=RID)
    w.renew("A", 1)
    w.pass_time(1)
    assert w.record() is None
    assert reason(w) == "spent"
    w.pass_time(9)
    assert reason(w) is True


def test_a_restart_remembers_what_is_spent(w: World) -> None:
    w.granted("A", 15, request_id=RID)
    w.release("A")
    w.kill()
    w.run()
    assert reason(w) == "spent"


def test_a_request_id_used_again_after_its_time_is_spent_anew(w: World) -> None:
    """The row of the first use falls due while the second is remembered under the same name."""
    w.granted("A", 1, request_id=RID)
    w.release("A")
    w.pass_time(1.5)
    w.granted("A", 15, request_id=RID)
    w.release("A")
    w.pass_time(10)
    assert reason(w) == "spent"
