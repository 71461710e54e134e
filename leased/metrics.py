"""What Prometheus is told, and the little that has to be counted for it while the daemon works.

The counting costs integers for each batch, nothing for a request.  The library that writes the exposition is an extra, `leased[metrics]`:
its import takes 0.1 s, so the first scrape does it, in a thread, and nothing else.  No label has anything in it that a caller chose.
"""

from __future__ import annotations

import importlib
import importlib.util
import platform
from bisect import bisect_left
from collections.abc import Awaitable, Callable, Iterator
from typing import Any, Final, NamedTuple

import trio

from leased import health
from leased.agents import Agents
from leased.billing import Billing
from leased.clock import Clock
from leased.lessor import Lessor
from leased.state.journal import Writer
from leased.state.ledger import Op
from leased.version import VERSION

LIBRARY: Final = "prometheus_client"
TURN_BUCKETS: Final = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0)  # seconds
FLUSH_BUCKETS: Final = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.0)
ENDS: Final = ("released", "revoked", "lapsed", "switch_missed")
DECISIONS: Final = ("granted", "renewed", "replayed", "refused", "unknown", "undone")
REASONS: Final = ("starting", health.DRAINING, "state_lost", "recovering", "store", "ledger", "full")
_ANSWERS: Final = {True: "true", False: "false", None: "null", "other": "other", "error": "error"}


class Histogram:
    """Counts by upper bound, the last one without."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def add(self, seconds: float, times: int = 1) -> None:
        self.counts[bisect_left(self.bounds, seconds)] += times
        self.total += seconds * times

    def cumulative(self) -> list[tuple[str, float]]:
        so_far, rows = 0, []
        for bound, count in zip((*map(str, self.bounds), "+Inf"), self.counts, strict=True):
            so_far += count
            rows.append((bound, float(so_far)))
        return rows


class TimedWriter:
    """A ledger writer whose flushes are timed."""

    def __init__(self, writer: Writer, clock: Clock, took: Histogram) -> None:
        self._writer = writer
        self._clock = clock
        self._took = took

    def write(self, ops: list[Op], done: Callable[[Exception | None], None]) -> None:
        begun = self._clock.now().boot

        def timed(error: Exception | None) -> None:
            self._took.add(max(0.0, self._clock.now().boot - begun))
            done(error)

        self._writer.write(ops, timed)


class Meters:
    """What is counted as it happens.  `requests` are those that were decided, by both doors."""

    __slots__ = ("batches", "flushes", "requests", "turns", "undone_turn")

    def __init__(self) -> None:
        self.requests = 0
        self.batches = 0
        self.undone_turn = 0  # requests of the turn that is being served
        self.turns = Histogram(TURN_BUCKETS)
        self.flushes = Histogram(FLUSH_BUCKETS)

    def batch(self, requests: int) -> None:
        self.batches += 1
        self.requests += requests
        self.undone_turn += requests

    def turned(self, seconds: float) -> None:
        """The turn is over: its requests have been read, decided, committed and, unless they wait for something, answered."""
        self.turns.add(max(0.0, seconds), self.undone_turn)
        self.undone_turn = 0


class Doors(NamedTuple):
    """What the switchboard tells when asked."""

    open: int
    accepted: int
    turned_away: int
    http_requests: int
    http_responses: dict[int, int]
    http_answers: dict[object, int]


class Exposition:
    """The page.  `spawn` starts a task; `answered` is called when answers were given outside of a turn."""

    def __init__(
        self,
        lessor: Lessor,
        meters: Meters,
        billing: Billing,
        agents: Agents,
        doors: Callable[[], Doors],
        upstream: Callable[[], str],
        spawn: Callable[[Callable[[], Awaitable[None]]], None],
        answered: Callable[[], None],
    ) -> None:
        self._lessor = lessor
        self._meters = meters
        self._billing = billing
        self._agents = agents
        self._doors = doors
        self._upstream = upstream
        self._spawn = spawn
        self._answered = answered
        self._waiting: list[tuple[str, Callable[[str, bytes], None]]] = []
        self._encoders: Any = None
        self._families: Any = None
        self._since = lessor.now.boot

    @staticmethod
    def available() -> bool:
        return importlib.util.find_spec(LIBRARY) is not None

    def scrape(self, accept: str, done: Callable[[str, bytes], None]) -> None:
        """`done(content type, body)`, at once or when the library is there."""
        if self._families is not None:
            done(*self._page(accept))
            return
        self._waiting.append((accept, done))
        if len(self._waiting) == 1:
            self._spawn(self._load)

    async def _load(self) -> None:
        """Cancellation leaves the scrapes that wait unanswered; the daemon is ending then."""
        self._encoders, families = await trio.to_thread.run_sync(_imported)
        self._families = families
        waiting, self._waiting = self._waiting, []
        for accept, done in waiting:
            done(*self._page(accept))
        self._answered()

    def _page(self, accept: str) -> tuple[str, bytes]:
        encoder, kind = self._encoders.choose_encoder(accept)
        return kind, encoder(self)

    def collect(self) -> Iterator[Any]:
        """What the library asks a registry for."""
        lessor, meters, doors, make = self._lessor, self._meters, self._doors(), self._families
        now = lessor.clock.now().boot

        def counter(name: str, text: str, rows: dict[str, float] | float, label: str = "") -> Any:
            return self._family(make.CounterMetricFamily, name, text, rows, label)

        def gauge(name: str, text: str, rows: dict[str, float] | float, label: str = "") -> Any:
            return self._family(make.GaugeMetricFamily, name, text, rows, label)

        def histogram(name: str, text: str, of: Histogram) -> Any:
            family = make.HistogramMetricFamily(name, text)
            family.add_metric([], of.cumulative(), of.total)
            return family

        counts = lessor.counts
        build = make.GaugeMetricFamily("leased_build_info", "The version that runs, always 1.", labels=["version", "python"])
        build.add_metric([VERSION, platform.python_version()], 1)
        yield build
        yield gauge("leased_uptime_seconds", "Since this process began to serve.", now - self._since)
        by_door = {"http": float(doors.http_requests), "rpc": float(max(0, meters.requests - doors.http_requests))}
        yield counter("leased_requests", "Requests decided, by door.", by_door, "door")
        answers = make.CounterMetricFamily(
            "leased_answers",
            "Answers to lease and renew (true, false, null) by door; over HTTP also others and errors.",
            labels=["door", "answer"],
        )
        http = doors.http_answers
        total = {
            True: counts["granted"] + counts["renewed"] + counts["replayed"] - counts["undone"],
            False: counts["refused"],
            None: counts["unknown"],
        }
        for answer, count in http.items():
            answers.add_metric(["http", _ANSWERS[answer]], count)  # type: ignore[index]
        for said, every in total.items():
            answers.add_metric(["rpc", _ANSWERS[said]], max(0, every - http[said]))
        yield answers
        yield counter("leased_decisions", "What was decided about leases.", {name: counts[name] for name in DECISIONS}, "decision")
        yield counter("leased_ends", "Leases that ended, by cause.", {name: counts[name] for name in ENDS}, "cause")
        responses = {str(status): float(count) for status, count in sorted(doors.http_responses.items())}
        yield counter("leased_http_responses", "HTTP responses by status.", responses, "status")
        yield counter("leased_batches", "Batches of requests, each decided in one transaction.", meters.batches)
        text = "From when a request was found readable to its answer, time in a queue or for a flush not counted."
        yield histogram("leased_request_seconds", text, meters.turns)
        yield histogram("leased_flush_seconds", "How long a flush of the ledger took, failed ones too.", meters.flushes)
        yield counter("leased_flushes", "Flushes of the ledger that succeeded.", lessor.journal.flushes)
        yield counter("leased_flush_failures", "Flushes of the ledger that failed.", lessor.journal.failures)
        yield gauge("leased_journal_operations", "Operations queued for the ledger or on their way to it.", len(lessor.journal))
        yield gauge("leased_answers_held", "Keys and revocations whose answers wait for a flush.", len(lessor.holds))
        yield gauge("leased_live_leases", "Leases that are live, of all namespaces.", len(lessor.index))
        yield gauge("leased_waiters", "Calls that wait for a lease.", lessor.queues.total)
        yield gauge("leased_damaged_records", "Keys set aside because their record cannot be read.", len(lessor.damaged))
        yield gauge("leased_connections", "Connections open.", doors.open)
        yield counter("leased_connections_accepted", "Connections accepted.", doors.accepted)
        yield counter("leased_connections_refused", "Connections turned away at a limit.", doors.turned_away)
        yield gauge("leased_agent_keys", "Agent keys that count.", len(self._agents))
        yield counter("leased_wrong_agent_keys", "Calls that brought an agent key nobody knows.", self._agents.wrong)
        reasons = health.reasons(lessor)
        yield gauge("leased_ready", "1 while leases are granted as they should be.", not reasons)
        yield gauge("leased_unready", "Why not, by reason.", {reason: float(reason in reasons) for reason in REASONS}, "reason")
        billing = self._billing
        oldest = min((waits[0] for waits in billing.waiting.values() if waits), default=None)
        yield gauge("leased_outbox_events", "Billing events not yet upstream.", billing.waiting_total)
        age = 0.0 if oldest is None else max(0.0, lessor.clock.now().wall - oldest)
        yield gauge("leased_outbox_oldest_seconds", "Age of the oldest of them.", age)
        yield gauge("leased_outbox_dead_letters", "Events upstream will never take.", sum(billing.dead.values()))
        yield counter("leased_outbox_overflow", "Events that did not fit into the outbox.", billing.overflow)
        yield counter("leased_unrecorded_charges", "Facts that could not be recorded and were not charged.", billing.unrecorded)
        yield gauge("leased_upstream_failing", "1 while upstream takes nothing.", bool(self._upstream()))

    def _family(self, kind: Any, name: str, text: str, rows: dict[str, float] | float, label: str) -> Any:
        if not isinstance(rows, dict):
            return kind(name, text, value=rows)
        family = kind(name, text, labels=[label])
        for value, number in rows.items():
            family.add_metric([value], number)
        return family


def _imported() -> tuple[Any, Any]:
    return importlib.import_module(f"{LIBRARY}.exposition"), importlib.import_module(f"{LIBRARY}.metrics_core")
