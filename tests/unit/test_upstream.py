"""The shipper against every answer upstream may give.  No socket, no disk that waits; trio's clock jumps."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

import pytest
import structlog
import trio
import trio.testing
from billed import BilledWorld, billed_world
from upstreams import INSTALL_ID, TAKEN, Request, Scripted, bill, shipper_of

from leased.state.outbox import SEQUENCE
from leased.state.records import RecordDamaged
from leased.upstream import (
    IDLE_SECONDS,
    MAX_BACKOFF_SECONDS,
    MAX_RETRY_AFTER_SECONDS,
    Answer,
    Shipper,
    Verdict,
    retry_after_of,
    verdict,
)

DOWN = Answer(0, error="no answer within 10 s")


@pytest.fixture
def w() -> Iterator[BilledWorld]:
    with billed_world(instant=True) as made:
        yield made


async def drain(shipper: Shipper, steps: int = 50) -> list[float]:
    """Until nothing is left to ship.  Returns the pauses on the way."""
    pauses = []
    for _ in range(steps):
        pause = await shipper.step()
        if pause == IDLE_SECONDS:
            return pauses
        pauses.append(pause)
    raise AssertionError(f"not drained in {steps} steps: {pauses}")


# ---- the table


@pytest.mark.parametrize(
    ("statuses", "outcome"),
    [
        ((200, 201, 202, 204, 299, 409), Verdict.TAKEN),
        ((400, 422), Verdict.POISONED),
        ((413,), Verdict.TOO_LARGE),
        ((401, 403), Verdict.UNAUTHORIZED),
        ((402,), Verdict.UNPAID),
        ((0, 408, 429, 500, 502, 503, 504, 599, 301, 302, 307, 404, 405, 418, 100, 600), Verdict.LATER),
    ],
)
def test_the_table(statuses: tuple[int, ...], outcome: Verdict) -> None:
    assert {verdict(status) for status in statuses} == {outcome}


@pytest.mark.trio
@pytest.mark.parametrize("status", [200, 202, 204, 409])
async def test_what_is_taken_leaves_the_outbox(w: BilledWorld, status: int) -> None:
    ids = bill(w, 3)
    upstream = Scripted(Answer(status))
    shipper = shipper_of(w, upstream)
    assert await drain(shipper) == [0.0]
    assert upstream.taken() == ids
    assert (w.outbox(), w.billing.waiting_total, shipper.shipped, shipper.failing) == ([], 0, 3, "")
    w.assert_accounts_agree()


@pytest.mark.trio
@pytest.mark.parametrize("answer", [Answer(status) for status in (401, 402, 403, 404, 408, 429, 500, 503)] + [DOWN])
async def test_what_is_not_taken_is_kept_and_sent_again_byte_for_byte(w: BilledWorld, answer: Answer) -> None:
    ids = bill(w, 3)
    upstream = Scripted(answer, answer, TAKEN)
    shipper = shipper_of(w, upstream)
    for _ in range(2):
        assert await shipper.step() > 0
        assert len(w.outbox()) == 3
        assert shipper.failing == verdict(answer.status).value
    w.clock.wall += 7200  # a stepped clock stamps nothing anew
    assert await shipper.step() == 0.0
    assert shipper.failing == ""
    bodies = {request.body for request in upstream.requests}
    keys = {request.headers["idempotency-key"] for request in upstream.requests}
    assert (len(bodies), len(keys), upstream.requests[0].ids) == (1, 1, ids)
    w.assert_accounts_agree()


@pytest.mark.trio
async def test_what_is_said_of_a_failure_is_said_once_and_so_is_its_end(w: BilledWorld) -> None:
    bill(w, 1)
    shipper = shipper_of(w, Scripted(Answer(503), Answer(503), Answer(401), Answer(403), Answer(402), DOWN, TAKEN))
    with structlog.testing.capture_logs() as logs:
        for _ in range(7):
            await shipper.step()
    told = [(line["log_level"], line["event"]) for line in logs]
    assert told == [
        ("warning", "upstream.failed"),
        ("error", "upstream.refused"),
        ("error", "upstream.unpaid"),
        ("warning", "upstream.failed"),
        ("info", "upstream.recovered"),
    ]


# ---- the form of a batch


@pytest.mark.trio
async def test_a_batch_is_cloud_events_and_holds_hashes_only(w: BilledWorld) -> None:
    w.granted("Holder-Alpha", 20, "secret-key")
    w.refused("Holder-Beta", "secret-key")
    w.lock("check", "secret-key")
    upstream = Scripted()
    await drain(shipper_of(w, upstream))
    (request,) = upstream.requests
    assert request.headers["content-type"] == "application/cloudevents-batch+json"
    first, second = json.loads(request.body)
    assert set(first) == {"specversion", "id", "source", "type", "subject", "time", "datacontenttype", "data"}
    assert (first["specversion"], first["source"], first["subject"]) == ("1.0", f"urn:leased:{INSTALL_ID}", "local")
    assert (first["type"], second["type"]) == ("leased.refusal.billed", "leased.agent_lock.called")
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", first["time"])
    assert set(first["data"]) == {"amount", "currency", "key_hash", "holder_hash"}
    assert (first["data"]["amount"], second["data"]["amount"]) == ("0.002", "0.001")
    for secret in ("secret-key", "Holder-", str(w.fences["Holder-Alpha"][0])):
        assert secret not in request.body.decode()


@pytest.mark.trio
async def test_batches_are_bounded_oldest_first_and_have_keys_of_their_own(w: BilledWorld) -> None:
    ids = bill(w, 25)
    upstream = Scripted()
    await drain(shipper_of(w, upstream, batch_events=10))
    assert (upstream.sizes, upstream.taken()) == ([10, 10, 5], ids)
    assert len({request.headers["idempotency-key"] for request in upstream.requests}) == 3


@pytest.mark.trio
async def test_the_key_of_a_batch_is_the_same_after_a_restart(w: BilledWorld) -> None:
    bill(w, 3)
    first, second = Scripted(DOWN), Scripted()
    await shipper_of(w, first).step()
    w.kill()
    w.run()
    await drain(shipper_of(w, second))
    assert first.requests[0].headers == second.requests[0].headers
    assert first.requests[0].body == second.requests[0].body


@pytest.mark.trio
async def test_a_crash_before_the_drop_is_flushed_sends_again_under_the_same_ids(w: BilledWorld) -> None:
    ids = bill(w, 2)
    w.instant = False
    first, second = Scripted(), Scripted()
    assert await shipper_of(w, first).step() == 0.0
    w.kill()
    w.instant = True
    w.run()
    await drain(shipper_of(w, second))
    assert first.taken() == second.taken() == ids
    w.assert_accounts_agree()


@pytest.mark.trio
async def test_a_drop_that_is_not_flushed_yet_is_not_sent_again_meanwhile(w: BilledWorld) -> None:
    ids = bill(w, 4)
    w.instant = False
    upstream = Scripted()
    shipper = shipper_of(w, upstream, batch_events=2)
    for _ in range(2):
        await shipper.step()
    assert upstream.taken() == ids


# ---- poison and size


@pytest.mark.trio
async def test_one_poisoned_event_among_a_hundred_is_found_and_the_others_are_taken(w: BilledWorld) -> None:
    ids = bill(w, 100)
    poison = ids[61]
    upstream = Scripted(lambda request: Answer(422 if poison in request.ids else 202))
    shipper = shipper_of(w, upstream)
    with structlog.testing.capture_logs() as logs:
        await drain(shipper)
    refused = [request for request in upstream.requests if poison in request.ids]
    assert refused[-1].ids == [poison]
    assert len(refused) <= 8
    taken = [each for request in upstream.requests if poison not in request.ids for each in request.ids]
    assert taken == [each for each in ids if each != poison]
    (line,) = [line for line in logs if line["event"] == "upstream.buried"]
    assert (line["event_id"], line["why"]) == (poison, "upstream answered 422")
    assert (w.used()["dead_letters"], w.used()["pending_upstream"], shipper.buried) == (1, 0, 1)
    assert (shipper.shipped, w.used()["amount"]) == (99, "0.2")
    w.assert_accounts_agree()


@pytest.mark.trio
async def test_poison_at_both_ends_and_next_to_each_other(w: BilledWorld) -> None:
    ids = bill(w, 16)
    poison = {ids[0], ids[7], ids[8], ids[15]}
    upstream = Scripted(lambda request: Answer(400 if poison & set(request.ids) else 202))
    await drain(shipper_of(w, upstream))
    assert w.used()["dead_letters"] == 4
    taken = [each for request in upstream.requests if not poison & set(request.ids) for each in request.ids]
    assert taken == [each for each in ids if each not in poison]
    w.assert_accounts_agree()


@pytest.mark.trio
async def test_an_upstream_that_refuses_everything_is_asked_less_and_less(w: BilledWorld) -> None:
    bill(w, 12)
    shipper = shipper_of(w, Scripted(Answer(400)), batch_events=1)
    pauses = [await shipper.step() for _ in range(6)]
    assert pauses[:2] == [0.0, 0.0]
    assert all(pause > 0 for pause in pauses[2:])
    assert shipper.failing == "poisoned"


@pytest.mark.trio
async def test_dead_letters_are_bounded_like_the_outbox() -> None:
    with billed_world(instant=True, max_waiting=2) as w:
        w.granted("A", 20)
        for who in ("B", "C"):
            w.refused(who)
        shipper = shipper_of(w, Scripted(Answer(400)), batch_events=1)
        for _ in range(2):
            await shipper.step()
        w.refused("D")
        assert w.used()["dead_letters"] == 2
        assert await shipper.step() > 0
        assert (w.used()["dead_letters"], w.used()["pending_upstream"]) == (2, 1)


@pytest.mark.trio
async def test_413_halves_down_to_one_and_does_not_forget_at_the_next_success(w: BilledWorld) -> None:
    ids = bill(w, 60)
    upstream = Scripted(lambda request: Answer(413 if len(request.ids) > 1 else 202))
    shipper = shipper_of(w, upstream)
    await drain(shipper, 100)
    assert upstream.sizes[:7] == [60, 30, 15, 7, 3, 1, 1]
    assert upstream.sizes.count(1) == 60
    assert [each for request in upstream.requests if len(request.ids) == 1 for each in request.ids] == ids


@pytest.mark.trio
async def test_after_many_batches_a_larger_one_is_tried_again(w: BilledWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("leased.upstream.TAKEN_BEFORE_LARGER", 3)
    bill(w, 30)
    upstream = Scripted(Answer(413), TAKEN)
    await drain(shipper_of(w, upstream, batch_events=8))
    assert upstream.sizes == [8, 4, 4, 4, 8, 8, 2]


@pytest.mark.trio
async def test_413_for_a_single_event_says_nothing_about_that_event(w: BilledWorld) -> None:
    """All events are of one size: it is upstream that is set up wrongly, and nothing is given up for it."""
    bill(w, 1)
    shipper = shipper_of(w, Scripted(Answer(413), Answer(413), TAKEN))
    assert await shipper.step() > 0
    assert (shipper.failing, w.used()["dead_letters"]) == ("too_large", 0)
    assert await shipper.step() > 0
    assert await shipper.step() == 0.0


@pytest.mark.trio
async def test_a_damaged_record_is_buried_and_holds_nothing_up(w: BilledWorld) -> None:
    ids = bill(w, 5)
    for sequence in (1, 3):
        _spoil(w, sequence)
    w.kill()
    w.run()
    upstream = Scripted(DOWN, TAKEN)
    shipper = shipper_of(w, upstream)
    with structlog.testing.capture_logs() as logs:
        for _ in range(10):
            await shipper.step()
    assert set(upstream.taken()) == {ids[1], ids[3], ids[4]}
    assert upstream.requests[0].ids == upstream.requests[1].ids == [ids[1]]
    assert [line["sequence"] for line in logs if line["event"] == "upstream.buried"] == [1, 3]
    assert w.outbox() == []
    w.assert_accounts_agree()


@pytest.mark.trio
async def test_damaged_records_alone_are_buried_too(w: BilledWorld) -> None:
    bill(w, 1)
    _spoil(w, 1)
    w.kill()
    w.run()
    assert w.billing.waiting_total == 0
    shipper = shipper_of(w, Scripted())
    assert await shipper.step() == 0.0
    assert await shipper.step() == IDLE_SECONDS
    assert w.in_ledger_state().dead == {"": 1}


def _spoil(w: BilledWorld, sequence: int) -> None:
    with w.ledger.environment.begin(write=True) as transaction:
        raw = bytes(transaction.get(SEQUENCE.pack(sequence), db=w.ledger.outbox))
        transaction.put(SEQUENCE.pack(sequence), raw[:-1] + b"?", db=w.ledger.outbox)


# ---- dead letters come back


@pytest.mark.trio
async def test_a_retried_letter_is_shipped_before_younger_events(w: BilledWorld) -> None:
    ids = bill(w, 2)
    upstream = Scripted(Answer(422), Answer(422), TAKEN)
    shipper = shipper_of(w, upstream)
    await drain(shipper)
    more = bill(w, 1)
    w.journal.append(("unbury", [1], True))
    w.journal.kick(w.clock.now().boot)
    w.billing.exhumed("local", w.clock.now().wall - 9)
    shipper.look_again()
    await drain(shipper)
    assert upstream.requests[-1].ids == [ids[0], *more]
    assert w.used()["dead_letters"] == 0
    w.assert_accounts_agree()


# ---- pauses


@pytest.mark.trio
@pytest.mark.parametrize("failures", range(12))
async def test_back_off_is_full_jitter_below_a_doubling_ceiling(
    w: BilledWorld, monkeypatch: pytest.MonkeyPatch, failures: int
) -> None:
    bill(w, 1)
    asked: list[tuple[float, float]] = []
    monkeypatch.setattr("leased.upstream.random.uniform", lambda low, high: asked.append((low, high)) or high)
    shipper = shipper_of(w, Scripted(DOWN))
    for _ in range(failures + 1):
        pause = await shipper.step()
    assert asked[-1] == (0, min(MAX_BACKOFF_SECONDS, 2.0**failures))
    assert pause == asked[-1][1]


@pytest.mark.trio
async def test_a_success_begins_the_back_off_anew(w: BilledWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    bill(w, 2)
    monkeypatch.setattr("leased.upstream.random.uniform", lambda _low, high: high)
    shipper = shipper_of(w, Scripted(DOWN, DOWN, DOWN, TAKEN, DOWN), batch_events=1)
    assert [await shipper.step() for _ in range(5)] == [1.0, 2.0, 4.0, 0.0, 1.0]


@pytest.mark.trio
@pytest.mark.parametrize("status", [429, 503, 402, 401])
async def test_retry_after_is_the_least(w: BilledWorld, monkeypatch: pytest.MonkeyPatch, status: int) -> None:
    bill(w, 1)
    monkeypatch.setattr("leased.upstream.random.uniform", lambda _low, high: high)
    shipper = shipper_of(w, Scripted(Answer(status, 17.0), Answer(status, 0.5), Answer(status, 1e9)))
    assert [await shipper.step() for _ in range(3)] == [17.0, 2.0, MAX_RETRY_AFTER_SECONDS]


@pytest.mark.trio
async def test_even_the_luckiest_pause_is_one(w: BilledWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    bill(w, 1)
    monkeypatch.setattr("leased.upstream.random.uniform", lambda low, _high: low)
    assert await shipper_of(w, Scripted(DOWN)).step() == 0.05


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        (None, 0.0),
        ("0", 0.0),
        ("120", 120.0),
        (" 7 ", 7.0),
        ("Fri, 15 Jan 2027 08:01:00 GMT", 60.0),
        ("Fri, 15 Jan 2027 07:00:00 GMT", 0.0),
        ("-5", 0.0),
        ("1.5", 0.0),
        ("nan", 0.0),
        ("inf", 0.0),
        ("soon", 0.0),
        ("\u0663", 0.0),
        ("9" * 400, 999_999_999_999.0),
        ("Fri, 99 Foo 2027 08:01:00 GMT", 0.0),
    ],
)
def test_retry_after_in_both_its_forms(value: str | None, seconds: float) -> None:
    assert retry_after_of(value, 1_800_000_000.0) == seconds


@pytest.mark.trio
async def test_the_task_waits_between_attempts_and_survives_a_fault_of_its_own(
    w: BilledWorld, autojump_clock: trio.testing.MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("leased.upstream.random.uniform", lambda _low, high: high)
    bill(w, 1)

    def fault(_: Request) -> Answer:
        raise ZeroDivisionError

    upstream = Scripted(DOWN, Answer(503, 20.0), fault, TAKEN)
    shipper = shipper_of(w, upstream)
    with structlog.testing.capture_logs() as logs, trio.move_on_after(1000):
        await shipper.run()
    began = upstream.requests[0].at
    assert [round(request.at - began, 3) for request in upstream.requests] == [0.0, 1.0, 21.0, 21.0 + MAX_BACKOFF_SECONDS]
    assert (shipper.shipped, w.outbox()) == (1, [])
    assert [line["event"] for line in logs].count("upstream.failed") == 2


@pytest.mark.trio
async def test_an_idle_task_looks_twice_a_second_and_asks_nobody(w: BilledWorld, autojump_clock: trio.testing.MockClock) -> None:
    upstream = Scripted()
    shipper = shipper_of(w, upstream)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(shipper.run)
        await trio.testing.wait_all_tasks_blocked()
        autojump_clock.jump(10)
        await trio.testing.wait_all_tasks_blocked()
        assert upstream.requests == []
        bill(w, 1)
        autojump_clock.jump(IDLE_SECONDS)
        await trio.testing.wait_all_tasks_blocked(0.01)
        assert len(upstream.requests) == 1
        nursery.cancel_scope.cancel()


@pytest.mark.trio
async def test_a_task_cancelled_in_the_middle_of_an_exchange_leaves_the_outbox_as_it_is(w: BilledWorld) -> None:
    ids = bill(w, 2)
    hung = trio.Event()

    async def post(body: bytes, headers: dict[str, str]) -> Answer:
        hung.set()
        await trio.sleep_forever()
        raise AssertionError

    upstream = Scripted()
    shipper = shipper_of(w, upstream)
    shipper._post = post
    async with trio.open_nursery() as nursery:
        nursery.start_soon(shipper.run)
        await hung.wait()
        nursery.cancel_scope.cancel()
    assert [event.id for event in w.outbox()] == ids
    await drain(shipper_of(w, upstream))
    assert upstream.taken() == ids


@pytest.mark.trio
async def test_a_ledger_that_cannot_be_read_is_tried_again(w: BilledWorld) -> None:
    ids = bill(w, 1)
    upstream = Scripted()
    shipper = shipper_of(w, upstream)

    class Broken:
        def read(self, question: object, done: object) -> None:
            done(None, RecordDamaged("no"))  # type: ignore[operator]

    whole, shipper._writer = shipper._writer, Broken()  # type: ignore[assignment]
    assert await shipper.step() == IDLE_SECONDS
    shipper._writer = whole
    await drain(shipper)
    assert upstream.taken() == ids
