"""What a start makes of the two directories it finds: the story, the wait, the leases and what it will flush."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from worlds import World, world

from leased.errors import StateRefused
from leased.generations import HEADROOM
from leased.model import MAX_TTL_SECONDS
from leased.state.leases import Leases
from leased.state.records import seal


@pytest.fixture
def w() -> Iterator[World]:
    with world() as made:
        yield made


def ops(w: World, name: str) -> list[tuple[object, ...]]:
    return [op[1:] for op in w.taken.first + w.taken.second if op[0] == name]


def test_a_first_start_waits_for_nobody(w: World) -> None:
    taken = w.run()
    assert (taken.story, taken.waiting, taken.last) == ("first start", False, 0)
    w.granted("A", 20)


def test_two_installations_have_different_ids_and_secrets() -> None:
    with world() as one, world() as two:
        first, second = one.run().meta, two.run().meta
        assert first.install_id != second.install_id
        assert first.secret != second.secret
        assert first.incarnation != second.incarnation


def test_after_a_kill_the_volatile_state_is_the_truth_and_nothing_waits(w: World) -> None:
    w.run()
    w.granted("A", 20)
    w.granted("B", 40, "long")
    before = w.records()
    w.kill()
    taken = w.run()
    assert (taken.story, taken.waiting) == ("the volatile state was kept", False)
    assert w.records() == before
    assert (ops(w, "put"), ops(w, "del")) == ([], [])
    w.granted("C", 20, "another")


@pytest.mark.parametrize("how", ["another boot", "another time namespace", "boot clock behind"])
def test_a_volatile_state_of_another_boot_is_discarded(w: World, how: str) -> None:
    w.run()
    w.granted("R", 20)
    w.granted("R2", 40, "long")
    w.witness.memory_lost(20)
    w.kill()
    if how == "another boot":
        w.clock.reboot()
    elif how == "another time namespace":
        w.clock.boot_id = lambda: "boot-1+86400.0"  # type: ignore[method-assign]
    else:
        w.clock.booted += 50
    taken = w.run()
    assert taken.waiting
    assert w.record() is None
    long = w.record("long")
    assert long is not None
    assert long.deadline == pytest.approx(w.clock.now().boot + 40, abs=1)
    assert taken.meta.no_grant_before == pytest.approx(w.clock.now().boot + 20, abs=1)


def test_a_lost_volatile_state_begins_a_new_incarnation(w: World) -> None:
    first = w.run().meta
    w.lose_runtime()
    second = w.run().meta
    assert second.incarnation != first.incarnation
    assert (second.install_id, second.secret) == (first.install_id, first.secret)


def test_a_lost_ledger_is_rebuilt_with_every_long_lease_and_without_waiting(w: World) -> None:
    w.run()
    w.granted("A", 20, "short")
    w.granted("B", 40, "long")
    w.kill()
    w.lose_state()
    taken = w.run()
    assert not taken.waiting
    assert "rebuilt" in taken.story
    assert taken.first[0][0] == "new"
    assert w.in_ledger("long") is not None
    assert w.in_ledger("short") is None
    w.power_cut()
    w.run()
    assert w.record("long") is not None


def test_a_ledger_behind_in_the_same_incarnation_is_brought_up_without_waiting(w: World) -> None:
    w.run()
    w.kill()
    old = (w.state / "data.mdb").read_bytes()
    w.run()
    w.granted("A", 40)
    w.kill()
    (w.state / "data.mdb").write_bytes(old)
    taken = w.run()
    assert not taken.waiting
    assert w.in_ledger() is not None


def test_a_volatile_state_behind_the_ledger_is_discarded(w: World) -> None:
    w.run()
    w.kill()
    old = (w.runtime / "data.mdb").read_bytes()
    w.run()
    w.granted("A", 40)
    w.kill()
    w.run()
    w.kill()
    (w.runtime / "data.mdb").write_bytes(old)
    taken = w.run()
    assert taken.waiting
    assert w.record() is not None


def test_two_starts_of_one_number_are_told_apart(w: World) -> None:
    """A copied pair of directories that both went on: same incarnation, same number, another start."""
    w.run()
    w.kill()
    state, runtime = (w.state / "data.mdb").read_bytes(), (w.runtime / "data.mdb").read_bytes()
    w.run()
    w.granted("A", 20)
    w.kill()
    ahead = (w.state / "data.mdb").read_bytes()
    (w.state / "data.mdb").write_bytes(state)
    (w.runtime / "data.mdb").write_bytes(runtime)
    w.witness.everything_is_lost()
    w.run()
    w.kill()
    (w.state / "data.mdb").write_bytes(ahead)
    assert w.run().waiting


def test_a_foreign_volatile_state_beside_a_clean_ledger_is_waited_for(w: World) -> None:
    w.run()
    w.granted("A", 20)
    w.kill()
    w.swap_runtime()
    w.witness.everything_is_lost()  # two volatile states for one ledger: what the first promised is not at stake here
    w.run()
    w.pass_time(21)
    w.granted("B", 20)
    assert w.stop()
    w.swap_runtime()
    taken = w.run()
    assert taken.waiting
    assert w.record() is not None


def test_a_clean_copy_that_lapsed_while_the_daemon_was_down_does_not_come_back(w: World) -> None:
    w.run()
    w.granted("A", 20)
    assert w.stop()
    w.clock.elapsed += 21
    w.lose_runtime()
    w.run()
    assert w.record() is None
    assert w.in_ledger() is None
    w.granted("B", 20)


def test_short_copies_of_a_clean_stop_do_not_stay_in_the_ledger(w: World) -> None:
    w.run()
    w.granted("A", 20, "short")
    w.granted("B", 40, "long")
    assert w.stop()
    w.run()
    assert w.in_ledger("short") is None
    long = w.in_ledger("long")
    assert long is not None
    assert long.ttl == 40


def test_no_stop_is_clean_while_the_daemon_waits(w: World) -> None:
    w.run()
    w.lose_runtime()
    w.run()
    assert not w.stop()
    assert w.run().waiting


def test_no_stop_is_clean_before_the_start_was_written(w: World) -> None:
    w.run()
    w.kill()
    w.begin()
    assert not w.stop()


def test_no_stop_is_clean_while_an_answer_is_held(w: World) -> None:
    w.run()
    w.lease("A", 40)
    assert not w.stop()


def test_the_wait_of_a_crashed_wait_goes_on_from_where_it_was(w: World) -> None:
    w.run()
    w.lose_runtime()
    until = w.run().meta.no_grant_before
    w.pass_time(5)
    w.kill()
    assert w.run().meta.no_grant_before == until


def test_a_ledger_lost_during_a_wait_does_not_end_the_wait(w: World) -> None:
    w.run()
    w.lose_runtime()
    until = w.run().meta.no_grant_before
    w.kill()
    w.lose_state()
    assert w.run().meta.no_grant_before == until


def test_a_ledger_missing_beside_a_volatile_state_of_another_boot_waits_out_the_longest_ttl(w: World) -> None:
    w.run()
    w.kill()
    w.lose_state()
    w.clock.reboot()
    taken = w.run()
    assert taken.waiting
    assert taken.meta.no_grant_before == pytest.approx(w.clock.now().boot + MAX_TTL_SECONDS, abs=1)


def test_with_the_volatile_state_lost_generations_go_on_from_the_mark(w: World) -> None:
    w.run()
    before = w.granted("A", 20)["generation"]
    w.clock.wall -= 86400  # the clock is of no help
    w.lose_runtime()
    meta_mark = w.run().mark
    assert w.taken.last - HEADROOM == meta_mark >= before  # one above the mark may have been named in a refusal
    w.pass_time(21)
    assert w.granted("B", 20)["generation"] > meta_mark


def test_a_clean_stop_writes_the_exact_last_generation(w: World) -> None:
    w.run()
    last = w.granted("A", 20)["generation"]
    assert w.stop()
    assert w.run().mark == last


def test_the_mark_that_counts_after_a_start_is_the_ledgers(w: World) -> None:
    """A clean stop lowers it: what the daemon before had raised it to counts no more."""
    w.run()
    w.granted("A", 20)
    assert w.stop()
    taken = w.begin()
    assert taken.mark == taken.last
    w.calm()
    w.granted("B", 20, "other")


def test_a_damaged_last_generation_does_not_make_generations_fall(w: World) -> None:
    w.run()
    w.granted("A", 20)
    w.kill()
    w.clock.wall -= 3600
    with_damage = Leases(w.runtime, 100)
    with with_damage.environment.begin(write=True) as transaction:
        transaction.put(b"last", b"\1damaged", db=with_damage.meta)
    with_damage.close()
    w.witness.memory_lost(20)
    w.run()
    w.pass_time(21)
    w.granted("B", 20, "other")


def test_a_damaged_meta_of_the_volatile_state_discards_it(w: World) -> None:
    w.run()
    w.granted("R", 40)
    w.kill()
    damaged = Leases(w.runtime, 100)
    with damaged.environment.begin(write=True) as transaction:
        transaction.put(b"meta", b"\1damaged", db=damaged.meta)
    damaged.close()
    taken = w.run()
    assert taken.waiting
    assert "checksum" in taken.story
    assert w.record() is not None


def test_a_volatile_state_of_a_later_version_is_refused(w: World) -> None:
    w.run()
    w.kill()
    later = Leases(w.runtime, 100)
    with later.environment.begin(write=True) as transaction:
        transaction.put(b"meta", seal(9, b"{}"), db=later.meta)
    later.close()
    with pytest.raises(StateRefused, match="version 9"):
        w.begin()


def test_the_record_of_a_lease_that_is_damaged_in_the_volatile_state_stays_in_the_ledger(w: World) -> None:
    """It is the only copy left: a power cut now must bring the lease back, not free its key."""
    w.run()
    w.granted("R", 60)
    w.kill()
    damaged = Leases(w.runtime, 100)
    with damaged.environment.begin(write=True) as transaction:
        ((key_hash, _, raw),) = damaged.rows(transaction)
        transaction.put(key_hash, raw[:-1] + bytes((raw[-1] ^ 1,)), db=damaged.leases)
    damaged.close()
    w.witness.promises["k"].may_end = True  # it cannot be read: whoever asks is told null
    w.run()
    reply = w.lease("S", 20)
    assert reply is not None
    assert (reply["acquired"], reply["reason"]) == (None, "damaged")
    w.power_cut()
    w.run()
    w.pass_time(21)
    reply = w.lease("S", 20)
    assert reply is not None
    assert reply["acquired"] is False


def test_a_ledger_of_another_format_is_refused_and_left_alone(w: World) -> None:
    w.run()
    w.ledger.apply([("meta", {"format": 3})])
    w.kill()
    with pytest.raises(StateRefused, match="format 3"):
        w.begin()


def test_a_higher_wait_takes_effect_with_the_start_that_writes_it(w: World) -> None:
    w.run()
    w.kill()
    w.wait_out = 50
    w.run()
    assert w.lessor.gate.wait_out == 50
    reply = w.lease("A", 50)
    assert reply is not None
    assert reply["acquired"] is True
    w.lose_runtime()
    w.wait_out = 20
    locked = w.clock.now().boot
    assert w.run().meta.no_grant_before == locked + 50
