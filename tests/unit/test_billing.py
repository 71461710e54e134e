"""Billing in the lane: what is billed, once, in the transaction of its decision, and what never is."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import structlog
from billed import FREE, TARIFF, BilledWorld, billed_world
from worlds import volatile_state_fails

from leased.calls import Call
from leased.lane import Outcome
from leased.model import AgentLockRequest, Identity, LeaseRequest, RenewRequest, UsageRequest
from leased.tariff import Tariff

RID = b"r" * 22
OTHER_RID = b"s" * 22


@pytest.fixture
def w() -> Iterator[BilledWorld]:
    with billed_world() as made:
        yield made


@pytest.fixture
def held(w: BilledWorld) -> BilledWorld:
    """The key k is A's."""
    w.granted("A", 20)
    return w


# ---- what is billed


def test_a_refusal_names_its_price_and_its_event(held: BilledWorld) -> None:
    charge = held.refused("B")
    (event,) = held.uncopied()
    assert charge == {"amount": "0.002", "currency": "USDC", "event_id": event.id}
    assert (event.kind, event.namespace, event.amount, event.currency) == ("refusal", "local", 2_000, "USDC")
    assert event.wall == held.clock.now().wall
    digests = held.lessor.digests
    assert event.key_hash == digests.key_hash("local", "k").hex()
    assert event.holder_hash == digests.holder_hash("local", "B").hex()
    assert event.id == digests.refusal_id("local", bytes.fromhex(event.key_hash), "B").hex()


def test_each_reason_that_counts(held: BilledWorld) -> None:
    fence = held.fences["A"][0]
    for who, more, reason in (
        ("B", {}, "held"),
        ("A", {}, "same_label"),
        ("C", {"fence": 2**60 + 1}, "wrong_fence"),
        ("D", {"fence": fence}, "wrong_holder"),
    ):
        reply = held.lease(who, 20, **more)
        assert reply is not None
        assert (reply["reason"], reply["charge"]["amount"]) == (reason, "0.002")
    assert len(held.uncopied()) == 4


def test_grants_renewals_replays_releases_checks_and_lists_are_free(w: BilledWorld) -> None:
    grant = w.granted("A", 20, request_id=RID)
    replay = w.lease("A", 20, request_id=RID)
    by_lease = w.lease("A", 20, fence=w.fences["A"][0])
    renewal = w.renew("A")
    assert replay is not None and by_lease is not None and renewal is not None
    assert [reply["charge"] for reply in (grant, replay, by_lease, renewal)] == [FREE] * 4
    assert [reply["renewed"] for reply in (replay, by_lease, renewal)] == [False, True, True]
    w.check()
    w.release("A")
    w.release("A")
    assert w.uncopied() == []


def test_a_failed_renewal_and_a_spent_request_id_are_free(w: BilledWorld) -> None:
    w.granted("A", 20, request_id=RID)
    w.release("A")
    spent = w.lease("A", 20, request_id=RID)
    assert spent is not None
    assert (spent["reason"], spent["charge"]) == ("spent", FREE)
    w.granted("B", 20)
    lost = w.ask("A", RenewRequest("k", "A", w.fences["A"][0]))
    assert lost is not None
    assert (lost["acquired"], lost["reason"], lost["charge"]) == (False, "wrong_fence", FREE)
    assert w.uncopied() == []


def test_the_same_refusal_is_one_fact_for_ever(held: BilledWorld) -> None:
    """Whatever generation the lease has by then, whoever holds it, and in one batch too."""
    first, second = held.decide(("B", LeaseRequest("k", "B")), ("B", LeaseRequest("k", "B")))
    assert [held.answers[call]["charge"]["amount"] for call in (first, second)] == ["0.002", "0"]
    held.release("A")
    held.granted("C", 20)
    assert held.refused("B") == FREE
    held.pass_time(21)
    held.granted("A", 20)
    assert held.refused("B") == FREE
    assert held.used()["refusals_billed"] == 1


def test_another_label_another_key_another_namespace_is_another_fact(held: BilledWorld) -> None:
    held.granted("A", 20, "other")
    held.of_namespace("T", "tenant")
    held.of_namespace("U", "tenant")
    held.ask("T", AgentLockRequest("k", ttl=20.0))
    charges = [held.refused("B"), held.refused("C"), held.refused("B", "other")]
    call = held.decide(("U", LeaseRequest("k", "B", 20.0)))[0]
    charges.append(held.answers[call]["charge"])
    assert [charge["amount"] for charge in charges] == ["0.002"] * 4
    assert len({charge["event_id"] for charge in charges}) == 4
    assert held.billing.used("tenant", None)["amount"] == "0.003"


def test_a_retried_request_id_is_billed_once(held: BilledWorld) -> None:
    assert held.refused("B", request_id=RID)["amount"] == "0.002"
    assert held.refused("B", request_id=RID) == FREE
    assert held.refused("B", request_id=OTHER_RID) == FREE
    held.calm()
    assert len(held.outbox()) == 1


def test_nothing_waits_for_a_bill_and_no_text_or_fence_is_in_one(w: BilledWorld) -> None:
    w.granted("Holder-Alpha", 20, "secret-key-text")
    flushes = w.journal.flushes
    w.refused("Holder-Beta", "secret-key-text")
    assert w.journal.flushes == flushes
    (event,) = w.uncopied()
    w.calm()
    raw = (w.state / "data.mdb").read_bytes() + (w.runtime / "data.mdb").read_bytes()
    assert b"secret-key-text" not in raw
    for told in (repr(event), repr(w.outbox())):
        for secret in ("secret-key-text", "Holder-Beta", str(w.fences["Holder-Alpha"][0])):
            assert secret not in told


@pytest.mark.parametrize("tariff", [Tariff(False), Tariff(True, "USDC", 0, 0)])
def test_a_tariff_that_charges_nothing_writes_nothing(tariff: Tariff) -> None:
    with billed_world(tariff) as w:
        w.granted("A", 20)
        assert w.refused("B") == FREE
        w.lock("check")
        assert w.uncopied() == []
        assert w.used()["refusals_billed"] == 0


# ---- waiting


def test_a_wait_is_billed_when_it_ends_in_a_refusal(held: BilledWorld) -> None:
    (call,) = held.decide(("B", LeaseRequest("k", "B", 20.0, wait=5.0)))
    assert held.uncopied() == []
    held.pass_time(5.5)
    reply = held.answers[call]
    assert (reply["acquired"], reply["charge"]["amount"]) == (False, "0.002")
    assert held.refused("B") == FREE


def test_a_wait_that_ends_in_a_grant_costs_nothing(held: BilledWorld) -> None:
    (call,) = held.decide(("B", LeaseRequest("k", "B", 20.0, wait=300.0)))
    held.release("A")
    assert (held.answers[call]["acquired"], held.answers[call]["charge"]) == (True, FREE)
    held.calm()
    assert held.outbox() == []


def test_neither_a_superseded_wait_nor_one_that_hung_up_is_billed(held: BilledWorld) -> None:
    (older,) = held.decide(("B", LeaseRequest("k", "B", 20.0, wait=300.0, request_id=RID)))
    held.decide(("B", LeaseRequest("k", "B", 20.0, wait=300.0, request_id=RID)))
    assert held.answers[older]["reason"] == "superseded"
    held.decide(("C", LeaseRequest("k", "C", 20.0, wait=1.0)))
    held.lessor.hung_up(held.caller("C"))
    held.pass_time(2)
    assert held.uncopied() == held.outbox() == []


# ---- unknowns


def test_a_null_costs_nothing(w: BilledWorld) -> None:
    w.granted("A", 20)
    w.lessor.gate.closed = "state_lost"
    reply = w.lease("B", 20)
    assert reply is not None
    assert (reply["acquired"], reply["charge"]) == (None, FREE)
    assert w.uncopied() == []


def test_what_cannot_be_written_is_not_billed_and_the_next_refusal_is(held: BilledWorld) -> None:
    with volatile_state_fails(held):
        reply = held.lease("B", 20)
        assert reply is not None
        assert (reply["acquired"], reply["charge"]) == (None, FREE)
    assert held.billing.waiting_total == 0
    assert held.refused("B")["amount"] == "0.002"


def test_a_commit_of_unknown_outcome_bills_nobody(held: BilledWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    """The caller was told null; what the commit left behind all the same is deleted, not shipped."""
    import lmdb

    lane = held.lessor.lane
    begin = type(held.leases.environment).begin

    class Torn:
        """A transaction that reaches the file and says that it failed."""

        def __init__(self, inner: object) -> None:
            self._inner = inner

        def commit(self) -> None:
            self._inner.commit()  # type: ignore[attr-defined]
            raise lmdb.PanicError("after the write")

        def __getattr__(self, name: str) -> object:
            return getattr(self._inner, name)

    class Environment:
        def __init__(self, inner: object) -> None:
            self._inner = inner

        def begin(self, *arguments: object, **options: object) -> object:
            made = begin(self._inner, *arguments, **options)  # type: ignore[arg-type]
            return Torn(made) if options.get("write") else made

        def __getattr__(self, name: str) -> object:
            return getattr(self._inner, name)

    held.leases.environment = Environment(held.leases.environment)  # type: ignore[assignment]
    reply = held.lease("B", 20)  # the lane opens the environment anew, and is whole again
    assert reply is not None
    assert (reply["acquired"], reply["charge"]) == (None, FREE)
    assert not lane.broken
    assert len(held.uncopied()) == 1
    held.pass_time(1.5)
    held.calm()
    assert held.uncopied() == held.outbox() == []
    assert held.used()["amount"] == "0"
    assert held.refused("B")["amount"] == "0.002"


@pytest.mark.interpreted
def test_an_aborted_batch_bills_each_of_its_facts_once(held: BilledWorld) -> None:
    """It is decided again, one request at a time."""
    lane, failed = held.lessor.lane, []
    run = lane.run

    def first_fails(work: object, *arguments: object) -> Outcome:
        if not failed and work == held.lessor._decide_all:
            failed.append(1)
            with volatile_state_fails(held):
                return run(work, *arguments)  # type: ignore[arg-type]
        return run(work, *arguments)  # type: ignore[arg-type]

    lane.run = first_fails  # type: ignore[method-assign]
    calls = held.decide(("B", LeaseRequest("k", "B")), ("C", LeaseRequest("k", "C")), ("B", LeaseRequest("k", "B")))
    assert [held.answers[call]["charge"]["amount"] for call in calls] == ["0.002", "0.002", "0"]
    assert len(held.uncopied()) == 2


def test_beyond_a_quarter_of_the_map_nothing_is_charged_and_nobody_hears_null(held: BilledWorld) -> None:
    held.billing._most_uncopied = 2
    charges = [held.refused(who) for who in ("B", "C", "D", "E")]
    assert [charge["amount"] for charge in charges] == ["0.002", "0.002", "0", "0"]
    assert held.billing.unrecorded == 2
    held.calm()
    assert held.refused("D")["amount"] == "0.002"  # a fact that was not recorded has not been billed


# ---- the way into the ledger


def test_an_event_is_in_leases_until_the_ledger_has_it(held: BilledWorld) -> None:
    held.refused("B")
    assert (len(held.uncopied()), len(held.outbox())) == (1, 0)
    assert held.billing.uncopied == 1
    held.calm()
    assert (len(held.uncopied()), len(held.outbox())) == (0, 1)
    assert held.billing.uncopied == 0
    held.assert_accounts_agree()


def test_a_crash_between_commit_and_copy_loses_nothing_and_repeats_nothing(held: BilledWorld) -> None:
    before = held.refused("B")
    held.kill()
    held.run()
    assert held.refused("B") == FREE
    assert [event.id for event in held.outbox()] == [before["event_id"]]
    assert held.uncopied() == []
    assert held.used()["amount"] == "0.002"
    held.assert_accounts_agree()


def test_a_crash_between_copy_and_deletion_counts_once(held: BilledWorld) -> None:
    held.refused("B")
    held.lock("check")
    held.kill("new", "new")  # the flush under way reached the disk, and nobody was told
    assert held.runtime.joinpath("data.mdb").exists()
    held.run()
    assert (len(held.outbox()), len(held.uncopied())) == (2, 0)
    used = held.used()
    assert (used["amount"], used["refusals_billed"], used["calls_billed"]) == ("0.003", 1, 1)
    held.assert_accounts_agree()


@pytest.mark.parametrize("read", ["old", "new"])
def test_a_flush_that_fails_is_repeated_and_counted_once(held: BilledWorld, read: str) -> None:
    held.refused("B")
    held.lock("check")
    held.flush_fails("old", "old") if read == "old" else held.flush_fails("new", "new")
    held.refused("C")
    held.calm_after_retries()
    assert [event.kind for event in held.outbox()] == ["refusal", "agent_lock", "refusal"]
    assert held.used()["amount"] == "0.005"
    held.assert_accounts_agree()


def test_after_a_power_cut_what_was_copied_is_billed_and_what_was_not_is_the_callers_gain(held: BilledWorld) -> None:
    copied = held.refused("B")
    held.calm()
    lost = held.refused("C")
    held.power_cut()
    held.run()
    held.pass_time(25)
    held.granted("A", 20)
    assert held.used()["amount"] == "0.002"
    assert held.refused("B") == FREE
    assert held.refused("C") == lost  # the same fact, under the same id
    held.calm()
    assert [event.id for event in held.outbox()] == [copied["event_id"], lost["event_id"]]
    held.assert_accounts_agree()


def test_events_of_a_new_incarnation_count_from_one_again_and_are_not_taken_for_repeats(held: BilledWorld) -> None:
    held.refused("B")
    held.refused("C")
    held.calm()
    held.lose_runtime()
    held.run()
    held.pass_time(25)
    held.granted("A", 20)
    held.refused("D")
    held.calm()
    assert len(held.outbox()) == 3
    held.assert_accounts_agree()


def test_a_ledger_that_is_lost_is_told_again_what_leases_still_has(held: BilledWorld) -> None:
    held.refused("B")
    held.kill()
    held.lose_state()
    held.run()
    assert len(held.outbox()) == 1
    assert held.refused("B") == FREE


def test_a_damaged_event_is_set_aside_and_the_others_go_on(held: BilledWorld) -> None:
    held.refused("B")
    held.refused("C")
    with held.leases.environment.begin(write=True) as transaction:
        cursor = transaction.cursor(db=held.leases.events)
        assert cursor.first()
        cursor.put(cursor.key(), bytes(cursor.value())[:-1] + b"?")
    held.kill()
    with structlog.testing.capture_logs() as logs:
        held.run()
    assert [line["table"] for line in logs if line["event"] == "record.set_aside"] == ["events"]
    held.pass_time(1.5)
    assert (len(held.outbox()), len(held.uncopied())) == (1, 0)


def test_a_backlog_is_deleted_a_piece_at_a_time(held: BilledWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("leased.billing.DELETED_AT_ONCE", 2)
    for number in range(5):
        held.refused(f"h{number}")
    held.flush() if held.flight is not None else None
    while held.flight is not None:
        held.flush()
    left = len(held.uncopied())
    assert left < 5
    held.pass_time(4)
    assert held.uncopied() == []
    assert len(held.outbox()) == 5


# ---- bounds


def test_a_full_outbox_goes_on_counting_loudly() -> None:
    with billed_world(max_waiting=2) as w:
        w.granted("A", 20)
        charges = [w.refused(who) for who in ("B", "C", "D", "E")]
        assert [charge["amount"] for charge in charges] == ["0.002"] * 4
        with structlog.testing.capture_logs() as logs:
            w.pass_time(70)
        full = [line for line in logs if line["event"] == "outbox.full"]
        assert [(line["events"], line["overflow"], line["log_level"]) for line in full] == [(2, 2, "error")] * 2
        assert len(w.outbox()) == 2
        used = w.used()
        assert (used["amount"], used["refusals_billed"], used["pending_upstream"]) == ("0.008", 4, 2)
        w.assert_accounts_agree()
        w.kill()
        w.run()
        w.assert_accounts_agree()
        assert w.billing.overflow == 2


def test_room_in_the_outbox_is_used_again() -> None:
    with billed_world(max_waiting=1) as w:
        w.granted("A", 20)
        w.refused("B")
        w.calm()
        w.journal.append(("shipped", [1]))
        w.billing.delivered(["local"])
        w.refused("C")
        w.calm()
        assert [event.namespace for event in w.outbox()] == ["local"]
        assert w.billing.overflow == 0
        w.assert_accounts_agree()


def test_the_oldest_billed_once_records_go_and_a_repeat_has_the_same_id() -> None:
    with billed_world(max_once=2) as w:
        w.granted("A", 20)
        first = w.refused("B")
        w.refused("C")
        w.calm()
        w.refused("D")
        w.calm()
        assert w.refused("C") == FREE
        assert w.refused("B") == first
        w.calm()
        assert len(w.in_ledger_state().billed) == 2
        w.kill()
        w.run()
        assert w.refused("B") == FREE
        assert w.refused("D") == FREE


# ---- the agent-lock form


def test_every_agent_lock_call_with_an_answer_has_its_price(w: BilledWorld) -> None:
    claim = w.lock("claim", ttl=20.0)
    assert claim is not None
    token = int(claim["token"])
    refused, kept, check = w.lock("claim"), w.lock("claim", token=token), w.lock("check")
    released = w.lock("release", token=token)
    free_check = w.lock("check")
    replies = [claim, refused, kept, check, released, free_check]
    assert [reply["charge"]["amount"] for reply in replies if reply is not None] == ["0.001"] * 6
    assert len({reply["charge"]["event_id"] for reply in replies if reply is not None}) == 6
    used = w.used()
    assert (used["calls_billed"], used["refusals_billed"], used["amount"]) == (6, 0, "0.006")


def test_an_agent_lock_refusal_never_costs_the_refusal_price(held: BilledWorld) -> None:
    for _ in range(2):
        reply = held.lock("claim", holder="B")
        assert reply is not None
        assert (reply["acquired"], reply["charge"]["amount"]) == (False, "0.001")
    assert held.refused("B")["amount"] == "0.002"  # as a refusal by `lease` it is a fact of its own


def test_an_invalid_token_is_free_and_so_is_a_null(held: BilledWorld) -> None:
    reply = held.lock("release", token=2**60 + 1)
    assert reply is not None
    assert (reply["released"], reply["charge"]) == (False, FREE)
    held.lessor.gate.closed = "state_lost"
    reply = held.lock("claim", "other")
    assert reply is not None
    assert (reply["acquired"], reply["charge"]) == (None, FREE)
    assert held.uncopied() == []


def test_a_claim_held_for_the_ledger_is_billed_when_it_is_answered(w: BilledWorld) -> None:
    assert w.lock("claim", ttl=40.0) is None
    assert w.uncopied() == []
    w.flush()
    (reply,) = [reply for reply in w.answers.values() if reply.get("op") == "claim"]
    assert (reply["acquired"], reply["charge"]["amount"]) == (True, "0.001")
    assert len(w.uncopied()) == 1


def test_a_claim_that_could_not_be_flushed_is_not_billed(w: BilledWorld) -> None:
    w.lock("claim", ttl=40.0)
    w.flush_fails()
    (reply,) = [reply for reply in w.answers.values() if reply.get("op") == "claim"]
    assert (reply["acquired"], reply["charge"]) == (None, FREE)
    w.calm_after_retries()
    assert w.outbox() == []


# ---- usage


def test_usage_says_what_waits_and_for_how_long(held: BilledWorld) -> None:
    held.refused("B")
    held.pass_time(7)
    used = held.used()
    assert used == {
        "namespace": "local",
        "currency": "USDC",
        "amount": "0.002",
        "refusals_billed": 1,
        "calls_billed": 0,
        "pending_upstream": 1,
        "oldest_pending_seconds": pytest.approx(7.0, abs=0.2),
        "dead_letters": 0,
    }


def test_usage_since_begins_with_that_hour(w: BilledWorld) -> None:
    began = w.clock.now().wall
    w.granted("A", 20)
    w.refused("B")
    w.clock.wall += 3600
    w.refused("C")
    assert w.used()["refusals_billed"] == 2
    assert w.used(began)["refusals_billed"] == 2
    assert w.used(began + 3600)["refusals_billed"] == 1
    assert w.used(began + 7200)["refusals_billed"] == 0


def test_usage_is_of_the_namespace_the_call_counts_for(held: BilledWorld) -> None:
    """One request may bring an agent key that its connection does not have."""
    held.refused("B")
    call = Call(held.caller("A"), 1, UsageRequest(), Identity("tenant", 1000, 4321, False, "agent"))
    held.lessor.decide([call])
    assert (held.answers[call]["namespace"], held.answers[call]["amount"]) == ("tenant", "0")


def test_hours_too_old_to_be_told_apart_still_count(held: BilledWorld) -> None:
    began = held.clock.now().wall
    held.refused("B")
    held.calm()
    held.clock.wall += 401 * 86_400
    held.pass_time(1.5)
    held.calm()
    held.refused("C")
    held.calm()
    assert held.used()["refusals_billed"] == 2
    assert held.used(began)["refusals_billed"] == 1
    assert sorted(hour == 0 for _, hour in held.in_ledger_state().hours) == [False, True]
    held.assert_accounts_agree()
    held.kill()
    held.run()
    assert held.used()["refusals_billed"] == 2


def test_the_prices_of_the_test_are_the_defaults() -> None:
    assert Tariff(True) == TARIFF
