"""Generations rise whatever the clock does and whatever is lost; a second, naive counter says what each next one must be."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from leased.generations import BLOCK, HEADROOM, MICROSECONDS, RAISE_WITHIN, Generations

BEGAN = 1_800_000_000 * MICROSECONDS


class Counter(RuleBasedStateMachine):
    """`stored_last` is what `leases` remembers, `stored_mark` what the ledger does.  A restart builds the counter from the two, as
    recovery does: with `leases` lost, the mark is taken for the last one handed out."""

    @initialize()
    def first_start(self) -> None:
        self.wall = BEGAN
        self.greatest = 0
        self.held: list[int] = []
        self.stored_last = 0
        self.stored_mark = 0
        self.counter = Generations(0, 0)

    # ---- life

    @rule(count=st.integers(1, 5))
    def grant(self, count: int) -> None:
        """One above the mark is decided, and told only when the mark that is under way, or the next, has arrived."""
        for _ in range(count):
            clock = self.wall if self.wall <= self.counter.mark else self.counter.mark - RAISE_WITHIN
            expected = max(self.counter.last + 1, clock)
            following = self.counter.peek(self.wall / MICROSECONDS)
            if following is None:  # so far above the mark that a start could not be sure to be above it
                assert expected > self.counter.mark + HEADROOM
                return
            assert abs(following - expected) <= 1  # a float of seconds does not hold every microsecond
            self.counter.last = self.stored_last = following
            if following <= self.counter.mark:
                self.tell(following)
            else:
                self.held.append(following)

    def tell(self, generation: int) -> None:
        assert generation > self.greatest, "a generation did not rise"
        assert generation <= self.stored_mark, "a generation above what the ledger has"
        self.greatest = generation

    @rule(flushed=st.booleans())
    def raise_mark(self, flushed: bool) -> None:
        """The daemon asks for a higher mark; the flush succeeds, or is under way until `mark_arrives`."""
        wanted = self.counter.wanted_mark(self.wall / MICROSECONDS)
        if wanted:
            assert wanted >= max(self.counter.mark, self.counter.last) + BLOCK
            assert not self.counter.raising
            self.counter.raising = wanted
        if flushed:
            self.mark_arrives()

    @precondition(lambda self: self.counter.raising)
    @rule()
    def mark_arrives(self) -> None:
        if self.counter.raising:
            self.stored_mark = max(self.stored_mark, self.counter.raising)
            self.counter.raised()
            told = [each for each in self.held if each <= self.counter.mark]
            self.held = self.held[len(told) :]
            for each in told:
                self.tell(each)

    @rule(seconds=st.sampled_from([0.000001, 0.001, 1, 20, 29, 31, 61, 86400]))
    def time_passes(self, seconds: float) -> None:
        self.wall += int(seconds * MICROSECONDS)

    @rule(seconds=st.sampled_from([-86400, -3600, -61, -1, 3600]))
    def the_wall_clock_steps(self, seconds: int) -> None:
        self.wall += seconds * MICROSECONDS

    # ---- ends and starts

    @rule(mark_was_written=st.booleans())
    def killed(self, mark_was_written: bool) -> None:
        """`leases` survives.  A mark under way may have reached the ledger."""
        if mark_was_written and self.counter.raising:
            self.stored_mark = max(self.stored_mark, self.counter.raising)
        self.stored_mark = max(self.stored_mark, self.stored_last)  # what the start flushes before it grants or tells
        self.start()

    def start(self) -> None:
        self.held = []
        self.counter = Generations(self.stored_last, self.stored_mark)

    @rule(mark_was_written=st.booleans())
    def leases_lost(self, mark_was_written: bool) -> None:
        """A power cut, or a lost runtime directory: the mark is all that is known."""
        if mark_was_written and self.counter.raising:
            self.stored_mark = max(self.stored_mark, self.counter.raising)
        self.stored_last = self.stored_mark + HEADROOM
        self.start()

    @rule(leases_kept=st.booleans())
    def stopped_in_order(self, leases_kept: bool) -> None:
        """The ledger is told the exact last one, which may lower its mark."""
        self.stored_mark = self.counter.last
        if not leases_kept:
            self.stored_last = self.stored_mark + HEADROOM
        self.start()

    @invariant()
    def the_mark_bounds_everything_that_was_told(self) -> None:
        assert self.greatest <= self.stored_mark
        assert self.counter.mark <= self.stored_mark

    @invariant()
    def it_can_always_go_on_once_the_mark_is_raised(self) -> None:
        trial = Generations(self.counter.last, self.counter.mark)
        for _ in range(2):
            trial.raising = trial.wanted_mark(self.wall / MICROSECONDS)
            trial.raised()
        assert trial.peek(self.wall / MICROSECONDS) is not None
        assert max(trial.last, self.wall) <= trial.mark - RAISE_WITHIN


TestCounter = Counter.TestCase
TestCounter.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
