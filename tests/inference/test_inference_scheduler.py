"""The scheduler and the pages under random requests, on a device that is simulated: what it would attend to is compared
with the tokens themselves.
"""

import collections
import math
import random

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from vishwamai.core.errors import ShapeError
from vishwamai.inference.drafting import UNREAD
from vishwamai.inference.limits import Limits
from vishwamai.inference.pages import PagePool
from vishwamai.inference.scheduler import Scheduler, StepPlan
from vishwamai.inference.streams import Stream

LIMITS = Limits(max_sequences=3, max_tokens=7, max_length=24, page_size=2, aging=2.0)
PAGES = 14
SWITCH = 9
WINDOWS = (5, 2)
RINGS = {window: -(-(window + LIMITS.max_tokens - 2) // LIMITS.page_size) + 1 for window in WINDOWS}


def next_token(tokens):
    """The model of these tests: few values make shared prefixes likely."""
    return hash(tuple(tokens)) % 3


class Device:
    """Pages with the tokens that were written to them, and the order of the steps; those of a draft model, too."""

    def __init__(self, switch=None):
        self.switch = switch
        self.random = random.Random(1)
        self.rows = {}
        self.draft_rows = {}
        self.window_rows = {}  # of layers with a window: all tokens up to the one whose key it is
        self.history = {}

    def run(self, plan):
        """What the plan samples: a list of tokens for each work, or None."""
        for stream in plan.admitted:
            self.history[stream.slot] = list(stream.tokens)
        sampled = []
        for work in plan.works:
            history = self.history[work.stream.slot]
            first = work.start + work.count - len(work.drafts)
            history[first:] = (*self.guesses(work, history[:first]), *history[first:])
            guesses = tuple(history[first : first + len(work.drafts)])
            assert len(history) >= work.start + work.count, "a token is computed before it exists"
            for position in range(work.start, work.start + work.count):
                page = work.stream.pages[position // LIMITS.page_size]
                row = history[position], bool(work.stream.turned)
                for rows in (self.rows, self.draft_rows):  # each step of the model is one of the draft
                    rows[page, position % LIMITS.page_size] = row
            self.windows(work, history)
            found = [
                self.rows[work.stream.pages[p // LIMITS.page_size], p % LIMITS.page_size]
                for p in range(work.start + work.count)
            ]
            seen = [token for token, _ in found]
            assert {turned for _, turned in found} == {bool(work.stream.turned)}, "keys of both rotations"
            if work.samples and self.switch is not None:
                assert bool(work.stream.turned) == (len(seen) > self.switch)
            assert seen == history[: work.start + work.count], "a page holds another sequence's keys"
            if not work.samples:
                sampled.append(None)
                continue
            drawn = [next_token(seen[: first + i]) for i in range(len(work.drafts) + 1)]
            wrong = next((i for i, guess in enumerate(guesses) if guess != drawn[i]), len(guesses))
            history[first:] = drawn[: wrong + 1]
            sampled.append(drawn[: wrong + 1])
        return sampled

    def windows(self, work, history):
        turned = bool(work.stream.turned)
        for window, span in work.stream.spans.items():
            for position in range(max(0, work.start - window + 1), work.start + work.count):
                page = span.pages[position // LIMITS.page_size - span.first]
                at, row = (window, page, position % LIMITS.page_size), (tuple(history[: position + 1]), turned)
                if position >= work.start:
                    self.window_rows[at] = row
                assert self.window_rows[at] == row, "a window lacks a key"

    def guesses(self, work, known):
        """Those of the plan; where only a draft model knows them, it makes them over its pages, one after another."""
        found = []
        for place, guess in enumerate(work.drafts):
            if guess == UNREAD:
                seen = [*known, *found]
                at = len(seen) - 1  # the token that is computed for the next guess
                page = work.stream.pages[at // LIMITS.page_size]
                self.draft_rows[page, at % LIMITS.page_size] = seen[-1], bool(work.stream.turned)
                pages = [work.stream.pages[p // LIMITS.page_size] for p in range(at + 1)]
                rows = [self.draft_rows[page, p % LIMITS.page_size] for p, page in enumerate(pages)]
                assert rows == [(token, bool(work.stream.turned)) for token in seen], f"guess {place}: another's keys"
                guess = next_token(seen) if self.random.random() < 0.5 else 2
            found.append(guess)
        return found


class Serving(RuleBasedStateMachine):
    rings = {}

    def __init__(self):
        super().__init__()
        self.pool = PagePool(PAGES)
        self.scheduler = Scheduler(LIMITS, self.pool, SWITCH, self.rings)
        self.device = Device(SWITCH)
        self.unread = []
        self.now = 0.0
        self.streams = []
        self.random = random.Random(0)

    @rule(
        prompt=st.lists(st.integers(0, 1), min_size=1, max_size=18),
        new=st.integers(1, 12),
        priority=st.integers(-1, 2),
        deadline=st.one_of(st.just(math.inf), st.integers(1, 30)),
        synchronous=st.booleans(),
        answers=st.integers(1, 3),
    )
    def add(self, prompt, new, priority, deadline, synchronous, answers):
        leader = None
        for _ in range(answers):
            stream = Stream(list(prompt), min(len(prompt) + new, LIMITS.max_length), synchronous=synchronous)
            stream.rank = self.scheduler.rank(self.now, priority)
            stream.deadline = self.now + deadline
            stream.leader, leader = leader, leader or stream
            self.scheduler.add(stream)
            self.streams.append(stream)

    def guess(self, stream, most):
        """Right, half of the times; half of them by a draft model, so that their values are not known here."""
        if not stream.synchronous:
            return ()
        if self.random.random() < 0.5:
            return (UNREAD,) * min(most, 3)
        tokens = list(stream.tokens)
        for _ in range(min(most, 3)):
            tokens.append(next_token(tokens) if self.random.random() < 0.5 else 2)
        return tokens[len(stream.tokens) :]

    @rule()
    def step(self):
        self.now += 1
        plan = self.scheduler.schedule(self.now, self.guess)
        assert sum(work.count for work in plan.works) <= LIMITS.max_tokens + 3 * LIMITS.max_sequences
        assert len({work.stream for work in plan.works}) == len(plan.works) <= LIMITS.max_sequences
        assert not any(work.stream.synchronous and work.stream.in_flight > 1 for work in plan.works)
        assert all(work.count > len(work.drafts) and (work.samples or not work.drafts) for work in plan.works)
        self.unread.append((plan, self.device.run(plan)))
        if len(self.unread) > 1:
            self.read()

    @precondition(lambda self: self.unread)
    @rule()
    def read(self):
        plan, sampled = self.unread.pop(0)
        for work, tokens in zip(plan.works, sampled, strict=True):
            if tokens is not None and not work.stream.finished:
                self.scheduler.read(work.stream, tokens)
                if len(work.stream.tokens) >= work.stream.max_length:
                    self.scheduler.finish(work.stream)

    @precondition(lambda self: any(not s.finished for s in self.streams))
    @rule(data=st.data())
    def cancel(self, data):
        self.scheduler.finish(data.draw(st.sampled_from([s for s in self.streams if not s.finished])))

    @invariant()
    def no_page_is_lost_or_owned_twice(self):
        held = [0] * PAGES
        for stream in self.scheduler.running:
            assert len(set(stream.pages)) == len(stream.pages)
            for page in stream.pages:
                held[page] += 1
        assert held == [self.pool.holders(page) for page in range(PAGES)]
        assert self.pool.available == held.count(0)
        slots = [stream.slot for stream in self.scheduler.running]
        assert len(set(slots)) == len(slots) <= LIMITS.max_sequences
        for window, pool in self.scheduler.windows.pools.items():
            spans = [stream.spans[window].pages for stream in self.scheduler.running]
            assert all(len(set(pages)) == len(pages) <= self.rings[window] for pages in spans)
            counts = collections.Counter(page for pages in spans for page in pages)
            assert [counts[page] for page in range(pool.num_pages)] == [pool.holders(p) for p in range(pool.num_pages)]
            assert pool.available == pool.num_pages - len(counts)
        assert not any(
            s.pages or s.spans or s.slot is not None for s in self.streams if s not in self.scheduler.running
        )

    @invariant()
    def answers_are_the_models_own(self):
        for stream in self.streams:
            for i in range(stream.prompt_length, len(stream.tokens)):
                assert stream.tokens[i] == next_token(stream.tokens[:i])
            assert len(stream.tokens) <= stream.max_length

    def teardown(self):
        """Everything ends: in a bounded number of steps, for the first by rank always advances."""
        for _ in range(40 * (len(self.streams) + 1)):
            if not self.scheduler.unfinished:
                break
            self.step()
            self.no_page_is_lost_or_owned_twice()
        assert not self.scheduler.unfinished and self.pool.available == PAGES


class Windowed(Serving):
    """Layers with windows keep few pages, and prompts that begin alike share those too."""

    rings = RINGS


@pytest.mark.parametrize("machine", [Serving, Windowed])
def test_random_requests(machine):
    run_state_machine_as_test(machine, settings=settings(stateful_step_count=40))


@pytest.mark.soak
@pytest.mark.parametrize("machine", [Serving, Windowed])
def test_ten_thousand_random_runs(machine):
    run_state_machine_as_test(machine, settings=settings(max_examples=10_000, stateful_step_count=40, deadline=None))


def simulate(scheduler, device, steps, now=0.0):
    for step in range(steps):
        plan = scheduler.schedule(now + step)
        for work, tokens in zip(plan.works, device.run(plan), strict=True):
            if tokens is not None:
                scheduler.read(work.stream, tokens)
                if len(work.stream.tokens) >= work.stream.max_length:
                    scheduler.finish(work.stream)


def test_a_request_is_served_while_others_of_higher_priority_keep_coming():
    scheduler, device = Scheduler(LIMITS, PagePool(PAGES)), Device()
    low = Stream([0], 5, rank=scheduler.rank(0.0, priority=0))
    scheduler.add(low)
    for now in range(40):
        for _ in range(3):
            urgent = Stream([1] * 6, 12, rank=scheduler.rank(now, priority=3))
            scheduler.add(urgent)
        simulate(scheduler, device, 1, now)
        if low.finished:
            break
    assert low.finished and now > 3 * LIMITS.aging  # later than the urgent ones that came first, but it is


def test_a_long_prompt_does_not_stop_a_decoding_sequence():
    scheduler, device = Scheduler(LIMITS, PagePool(100)), Device()
    short = Stream([0], 20, rank=scheduler.rank(0.0))
    scheduler.add(short)
    simulate(scheduler, device, 2)
    scheduler.add(Stream([1] * 20, 22, rank=scheduler.rank(0.0)))
    for _ in range(4):
        before = len(short.tokens)
        simulate(scheduler, device, 1)
        assert len(short.tokens) == before + 1


def test_a_prompt_takes_little_of_a_step_that_decodes():
    limits = Limits(max_sequences=2, max_tokens=16, max_length=40, page_size=2)
    scheduler = Scheduler(limits, PagePool(100))
    scheduler.add(Stream([0] * 20, 30, rank=scheduler.rank(0.0)))
    assert [work.count for work in scheduler.schedule(0.0).works] == [16]
    scheduler.schedule(0.0)
    scheduler.add(Stream([1] * 20, 30, rank=scheduler.rank(0.0)))
    assert [work.count for work in scheduler.schedule(0.0).works] == [1, 3]  # a quarter of 16
    with pytest.raises(ShapeError, match="`mixed_tokens` is 17; pass 3 to 16"):
        Limits(max_sequences=2, max_tokens=16, mixed_tokens=17)


def test_whom_an_urgent_prompt_preempts_leaves_its_tokens_to_it():
    limits = Limits(max_sequences=2, max_tokens=6, mixed_tokens=6, max_length=20, page_size=2)
    scheduler = Scheduler(limits, PagePool(20))

    def plan():
        plan = scheduler.schedule(0.0, lambda stream, most: (2,) * min(most, 1))
        for work in plan.works:
            if work.samples:
                scheduler.read(work.stream, [2] * (1 + len(work.drafts)))
        return [(work.start, work.count, work.samples, work.drafts) for work in plan.works], len(plan.preempted)

    for rank, tokens, expected in (
        (1.0, [0, 1], [(0, 2, True, ())]),
        (2.0, [0] * 9, [(2, 1, True, ()), (0, 5, False, ())]),
    ):
        scheduler.add(Stream(tokens, 12, rank=(rank, 0), synchronous=True))
        assert plan() == (expected, 0)
    scheduler.add(Stream([1, 0, 1], 12, rank=(0.0, 0), synchronous=True))
    assert plan() == ([(3, 1, True, ()), (0, 3, True, ())], 1)  # and no guesses in a step with a prompt
    assert plan() == ([(3, 2, True, (2,)), (4, 2, True, (2,))], 0)


def test_a_prompt_seen_before_is_not_computed_again():
    scheduler, device = Scheduler(LIMITS, PagePool(PAGES)), Device()
    prompt = [0, 1, 0, 0, 1]
    first, second = (Stream(list(prompt), 7, rank=scheduler.rank(0.0)) for _ in range(2))
    scheduler.add(first)
    simulate(scheduler, device, 4)
    scheduler.add(second)
    plan = scheduler.schedule(9.0)
    assert (second.cached, [(w.start, w.count) for w in plan.works]) == (4, [(4, 1)])


@pytest.mark.parametrize(("sequences", "cached"), [(1, 0), (2, 4)])
def test_a_prefix_is_taken_up_where_its_windows_are_known(sequences, cached):
    """The pages of all tokens are known; those of a window at the middle of a prompt only where the pool holds them."""
    limits = Limits(sequences, max_tokens=4, mixed_tokens=4, max_length=24, page_size=2)
    scheduler, device = Scheduler(limits, PagePool(100), rings={3: 4}), Device()
    prompt = [0, 1, 0, 0, 1, 1, 0, 0, 0, 1, 1, 1]
    scheduler.add(Stream(list(prompt), 13, rank=scheduler.rank(0.0)))
    simulate(scheduler, device, 4)
    assert scheduler.windows.pools[3].num_pages == 4 * sequences
    found = []
    for tokens in (prompt, prompt[:4] + [0] * 8):  # the second begins like the first only up to token 4
        stream = Stream(tokens, 13, rank=scheduler.rank(0.0))
        scheduler.add(stream)
        simulate(scheduler, device, 4)
        assert stream.finished
        found.append(stream.cached)
    assert found == [10, cached]


def test_answers_to_one_prompt_compute_it_once():
    limits = Limits(max_sequences=5, max_tokens=8, max_length=24, page_size=2)
    scheduler, device = Scheduler(limits, PagePool(40)), Device()
    streams = [Stream([0, 1, 1, 0, 1, 0, 1, 0, 0, 1, 1], 13, rank=scheduler.rank(0.0)) for _ in range(3)]
    streams[1].leader = streams[2].leader = streams[0]
    other = Stream([1, 1], 4, rank=scheduler.rank(0.0))
    for stream in (*streams, other):
        scheduler.add(stream)
    prompts = []
    for now in range(6):
        plan = scheduler.schedule(now)
        prompts += [(now, w.stream, w.count) for w in plan.works if w.start < w.stream.prompt_length]
        for work, tokens in zip(plan.works, device.run(plan), strict=True):
            if tokens is not None:
                scheduler.read(work.stream, tokens)
    first, *rest = streams
    # The last token is computed for each, for its logits; whoever comes later does not wait for them.
    assert prompts == [(0, first, 8), (1, first, 3), (1, other, 2), *((2, stream, 1) for stream in rest)]
    assert [stream.cached for stream in streams] == [0, 10, 10]
    assert len({tuple(stream.pages[:5]) for stream in streams}) == 1


def test_what_can_never_be_served_is_declined_at_once():
    scheduler = Scheduler(LIMITS, PagePool(3))
    with pytest.raises(ShapeError, match="a sequence holds at most 24 tokens"):
        scheduler.add(Stream([0] * 20, 25))
    with pytest.raises(ShapeError, match="needs 4 pages of 2 tokens, but there are 3"):
        scheduler.add(Stream([0], 8))
    with pytest.raises(ShapeError, match="room for prompts"):
        Limits(max_sequences=4, max_tokens=4)


def test_an_empty_plan_says_nothing_to_do():
    assert Scheduler(LIMITS, PagePool(3)).schedule(0.0) == StepPlan()
