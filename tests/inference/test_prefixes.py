"""Prefixes that come back, as plans: whatever gives way or is removed meanwhile, steps read what they should."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from vishwamai.inference.limits import Limits
from vishwamai.inference.pages import ROOT, PagePool, chain
from vishwamai.inference.prefixes import PAGES, STATES, Part, window_group
from vishwamai.inference.scheduler import Scheduler, StepPlan
from vishwamai.inference.streams import Stream

LIMITS = Limits(max_sequences=3, max_tokens=12, max_length=64, page_size=4, state_pages=3)
WINDOW = 6


class Device:
    """What pages and slots hold: the tokens before their end. A step that reads anything else fails here."""

    def __init__(self, scheduler: Scheduler):
        assert scheduler.prefixes is not None
        self.scheduler, self.pools = scheduler, scheduler.prefixes.pools
        self.held: dict[str, dict[int, tuple[int, ...]]] = {group: {} for group in self.pools}
        self.stored: dict[Part, np.ndarray] = {}
        self.restored = self.computed = 0

    def exchange(self, plan: StepPlan) -> None:
        back = {entry.part for entry in plan.restored}
        for group, pool in self.pools.items():
            evicted, pool.evicted = pool.evicted or [], []
            for page, digest in evicted:
                if Part(group, digest) not in back:
                    tokens = self.held[group][page]
                    assert digest_of(tokens) == digest
                    self.stored[Part(group, digest)] = np.array(tokens)
        for entry in plan.restored:
            self.held[entry.part.group][entry.page] = tuple(entry.data.tolist())
        self.restored += len(plan.restored)

    def run(self, plan: StepPlan, texts: dict[Stream, list[int]]) -> None:
        size, states = LIMITS.page_size, {}
        for work in plan.works:
            text, end = tuple(texts[work.stream]), work.start + work.count
            tables = {PAGES: (0, 0, work.stream.pages)}
            for window, span in work.stream.spans.items():
                first = self.scheduler.windows.first_page(window, work.start)
                tables[window_group(window)] = (first, span.first, span.pages)
            for group, (first, offset, pages) in tables.items():
                for place in range(first, work.start // size):
                    assert self.held[group][pages[place - offset]] == text[: (place + 1) * size], (group, place)
                for place in range(max(offset, work.start // size), -(-end // size)):
                    self.held[group][pages[place - offset]] = text[: min(end, (place + 1) * size)]
            if self.scheduler.states is not None:
                assert not work.start or self.held[STATES][work.states[0]] == text[: work.start]
                states[work.states[1]] = text[:end]
            self.computed += work.count
        if states:
            self.held[STATES] |= states


def digest_of(tokens: tuple[int, ...]) -> bytes:
    digest = ROOT
    for first in range(0, len(tokens), LIMITS.page_size):
        digest = chain(digest, tokens[first : first + LIMITS.page_size])
    return digest


def serve(device: Device, prompts: list[list[int]], draw: random.Random, removes: float) -> None:
    """Answers prompts; what is stored of them is read a few steps late, and some of it is removed meanwhile."""
    scheduler, texts = device.scheduler, {}
    for prompt in prompts:
        stream = Stream(list(prompt), len(prompt) + draw.randint(1, 9), scheduler.rank(0.0))
        texts[stream] = list(prompt)
        scheduler.add(stream)
    sent = StepPlan()
    while scheduler.unfinished:
        for stream in scheduler.waiting:
            if not stream.ready and draw.random() < 0.6:
                parts = scheduler.lacking(stream, device.stored)
                stream.parts = {part: device.stored[part] for part in parts if draw.random() >= removes}
                stream.ready = True
        for part in list(device.stored):
            if draw.random() < removes / 10:
                del device.stored[part]
        plan = scheduler.schedule(0.0)
        device.exchange(plan)
        device.run(plan, texts)
        for work in plan.works:
            if work.samples and len(texts[work.stream]) < work.stream.max_length:
                texts[work.stream].append(sum(texts[work.stream]) % 11)
        for work in sent.works:
            stream = work.stream
            if work.samples and not stream.finished:
                scheduler.read(stream, [texts[stream][len(stream.tokens)]])
                if len(stream.tokens) == stream.max_length or draw.random() < 0.02:
                    scheduler.finish(stream)
        sent = plan


CASES: dict[str, dict[str, Any]] = {
    "pages": {},
    "windows": {"rings": {WINDOW: 6}},
    "states": {"num_states": 4},
    "states and windows": {"rings": {WINDOW: 6}, "num_states": 4},
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("removes", [0.0, 0.2])
def test_steps_read_what_they_should(case: str, removes: float) -> None:
    draw = random.Random(f"{case} {removes}")
    scheduler = Scheduler(LIMITS, PagePool(20), restores=True, **CASES[case])
    device = Device(scheduler)
    beginnings = [[draw.randrange(11) for _ in range(24)] for _ in range(4)]
    for _ in range(60):
        prompts = [
            [*draw.choice(beginnings)[: draw.randint(1, 24)], *(draw.randrange(11) for _ in range(draw.randint(0, 12)))]
            for _ in range(draw.randint(1, 5))
        ]
        serve(device, prompts, draw, removes)
        assert scheduler.pool.available == scheduler.pool.num_pages
        assert scheduler.states is None or scheduler.states.available == scheduler.states.num_states
    assert device.restored > 30


def test_a_prompt_waits_until_what_is_stored_of_it_was_read() -> None:
    scheduler = Scheduler(LIMITS, PagePool(20), restores=True)
    first, second = (Stream([i] * 9, 12, scheduler.rank(0.0)) for i in (1, 2))
    for stream in (first, second):
        scheduler.add(stream)
    second.ready = True
    assert [work.stream for work in scheduler.schedule(0.0).works] == [second]
    digests = [chain(ROOT, [1] * 4), chain(chain(ROOT, [1] * 4), [1] * 4)]
    stored = {Part(PAGES, digest): np.array([i]) for i, digest in enumerate(digests)}
    assert scheduler.lacking(first, stored) == list(stored)
    first.parts, first.ready = dict(stored), True
    plan = scheduler.schedule(0.0)
    assert [(work.stream, work.start, work.count) for work in plan.works if work.stream is first] == [(first, 8, 1)]
    assert [(entry.part, entry.page) for entry in plan.restored] == list(zip(stored, first.pages)) and first.cached == 8
