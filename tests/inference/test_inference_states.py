"""Models with states in the engine: which states are kept, what a later turn computes, and what a step may read."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence
from typing import Any

import pytest

from vishwamai import UnsupportedError
from vishwamai.inference.limits import Limits
from vishwamai.inference.pages import PagePool
from vishwamai.inference.scheduler import Scheduler, StepPlan
from vishwamai.inference.server.jobs import shared_beginning
from vishwamai.inference.streams import Stream

LIMITS = Limits(max_sequences=3, max_tokens=12, max_length=64, page_size=4, state_pages=3)


@dataclasses.dataclass
class Device:
    """What slots and pages hold: the tokens before them. A step that reads anything else fails here."""

    scheduler: Scheduler
    slots: dict[int, tuple[int, ...]] = dataclasses.field(default_factory=dict)
    pages: dict[int, tuple[int, ...]] = dataclasses.field(default_factory=dict)
    texts: dict[Stream, list[int]] = dataclasses.field(default_factory=dict)
    computed: int = 0

    def run(self, plan: StepPlan) -> None:
        """Computes a step; all reads come before any write."""
        size = self.scheduler.limits.page_size
        written: dict[int, tuple[int, ...]] = {}
        for work in plan.works:
            text, end = tuple(self.texts[work.stream]), work.start + work.count
            source, target = work.states
            assert not work.start or self.slots[source] == text[: work.start]
            assert target not in written
            written[target] = text[:end]
            for place in range(work.start // size):
                assert self.pages[work.stream.pages[place]] == text[: (place + 1) * size]
            for place in range(work.start // size, -(-end // size)):
                self.pages[work.stream.pages[place]] = text[: min(end, (place + 1) * size)]
            self.computed += work.count
        self.slots |= written


def scheduler(num_states: int = 9, num_pages: int = 64, limits: Limits = LIMITS) -> Scheduler:
    return Scheduler(limits, PagePool(num_pages), num_states=num_states)


def answer(prompt: list[int]) -> int:
    """The token that the toy model draws after a text."""
    return (7 * sum(prompt) + len(prompt)) % 11


def run(
    device: Device, prompts: list[list[int]], new: int, cancels: random.Random | None = None, shared: int = 0
) -> list[list[int]]:
    """Texts of prompts with their answers; tokens are read a step after they were drawn, as the engine does."""
    plans = device.scheduler
    streams = [Stream(list(prompt), len(prompt) + new, plans.rank(0.0), shared=shared) for prompt in prompts]
    for stream in streams:
        device.texts[stream] = list(stream.tokens)
        plans.add(stream)
    sent = StepPlan()
    while plans.unfinished:
        plan = plans.schedule(0.0)
        device.run(plan)
        for work in plan.works:
            if work.samples and len(device.texts[work.stream]) < work.stream.max_length:
                device.texts[work.stream].append(answer(device.texts[work.stream]))
        for work in sent.works:
            stream = work.stream
            if work.samples and not stream.finished:
                plans.read(stream, [device.texts[stream][len(stream.tokens)]])
                if len(stream.tokens) == stream.max_length:
                    plans.finish(stream)
        if cancels is not None and cancels.random() < 0.05:
            plans.finish(cancels.choice(streams))
        sent = plan
    return [stream.tokens for stream in streams]


def needed(prompt: list[int], known: int) -> int:
    """Tokens to compute of a prompt whose first `known` were computed in an earlier turn, and of 6 new ones."""
    return len(prompt) - known // LIMITS.page_size * LIMITS.page_size + 6 - 1


def test_every_turn_of_a_conversation_computes_its_new_tokens() -> None:
    device = Device(scheduler())
    text, known = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10], 0
    for turn in range(6):
        before = device.computed
        prompt, text = text, run(device, [text], 6)[0]
        # A token of the last step may be computed though nobody reads what it draws.
        assert device.computed - before - needed(prompt, known) in (0, 1)
        known, text = len(text) - 1, [*text, 3, 2, turn]


def test_conversations_with_one_system_prompt_compute_it_twice() -> None:
    """The second one finds where they part, and keeps the states there for those that follow."""
    device, system, cached = Device(scheduler()), list(range(17)), []
    for user in range(20, 24):
        before = device.computed
        run(device, [[*system, *[user] * 6]], 6)
        cached.append(23 + 6 - (device.computed - before))
    assert cached[0] <= cached[1] <= 1 + 12 and {cached[2], cached[3]} <= {16, 17}


@pytest.mark.parametrize("shared", [16, 17, 19])
def test_a_system_prompt_whose_length_is_known_is_computed_once(shared: int) -> None:
    """The first conversation keeps the states after its last full page: the second goes on from there."""
    device, system, cached = Device(scheduler()), list(range(17)), []
    for user in range(20, 24):
        before = device.computed
        run(device, [[*system, *[user] * 6]], 6, shared=shared)
        cached.append(23 + 6 - (device.computed - before))
    assert cached[0] <= 1 and set(cached[1:]) <= {16, 17}


def test_chats_share_what_their_first_user_does_not_change() -> None:
    def tokens(messages: Sequence[dict[str, object]]) -> list[int]:
        if messages[0]["role"] == "tool":
            raise UnsupportedError("the template begins with a user or a system message.")
        return [ord(letter) for message in messages for letter in f"<{message['role']}>{message['content']}"]

    user: dict[str, object] = {"role": "user", "content": "+1?"}
    chats: list[tuple[list[dict[str, object]], str]] = [
        (
            [{"role": "system", "content": "Be brief."}, user, {"role": "assistant", "content": "2"}, user],
            "<system>Be brief.<user>",
        ),
        ([{"role": "developer", "content": "Be brief."}, {**user, "content": "+"}], "<developer>Be brief.<user>"),
        ([user], "<user>"),
        ([{"role": "tool", "content": "3"}], ""),
    ]
    for messages, expected in chats:
        prompt = tokens(messages) if expected else []
        assert prompt[: shared_beginning(tokens, messages, prompt)] == [ord(letter) for letter in expected]


def test_states_of_long_prompts_are_kept_every_few_pages() -> None:
    device = Device(scheduler())
    run(device, [list(range(40))], 1)
    before = device.computed
    run(device, [[*range(29), 50, 51, 52]], 1)
    assert device.computed - before == 32 - 24  # 24 = 2 * 3 pages


def test_pages_and_states_are_evicted_as_one() -> None:
    plans = scheduler(num_states=4)
    device = Device(plans)
    for first in range(10):
        run(device, [[first, *range(20)]], 5)
        states = plans.states
        assert states is not None and states.available == 4 and plans.pool.available == 64
        pages = {page for page in range(64) if plans.pool.published(page) is not None}
        # Each page that is kept is one of a kept state, which takes its last page with it.
        assert len(pages) == plans.pool.idle <= 6 * states.idle
    assert states.evicted > 0


@pytest.mark.parametrize(("num_states", "num_pages"), [(2, 24), (4, 30), (3, 64), (9, 20)])
@pytest.mark.parametrize("cancels", [False, True])
def test_no_step_reads_what_is_not_its_prefix(num_states: int, num_pages: int, cancels: bool) -> None:
    """Conversations of several turns at once, with few states and pages."""
    draw = random.Random(num_states * num_pages)
    plans = scheduler(num_states, num_pages)
    device, texts = Device(plans), [[1, 1, 2, 2, 3][: 2 + i % 4] for i in range(5)]
    for _ in range(12):
        prompts = [draw.choice(texts)[: draw.randint(1, 40)] + [draw.randrange(9)] * draw.randint(1, 7) for _ in "four"]
        found = run(device, prompts, 12, draw if cancels else None)
        for prompt, text in zip(prompts, found):
            for place in range(len(prompt), len(text)):
                assert text[place] == answer(text[:place])
        texts = [*texts[-4:], *found]
        states: Any = plans.states
        assert states.available == num_states and plans.pool.available == num_pages
        assert plans.pool.idle <= states.idle * LIMITS.pages_per_sequence
    assert states.reused > 0 or num_states < 3


def test_without_prefix_cache_nothing_is_kept() -> None:
    plans = Scheduler(LIMITS, PagePool(64, shared=False), num_states=3)
    device = Device(plans)
    for _ in range(2):
        before = device.computed
        run(device, [list(range(20))], 4)
        assert device.computed - before in (23, 24)
    assert plans.states is not None and plans.states.idle == 0


@pytest.mark.parametrize("num_states", [3, 6, 12])
def test_wrong_guesses_go_back_to_the_states_before_them(num_states: int) -> None:
    draw = random.Random(num_states)
    plans = scheduler(num_states, 40)
    device, checked, wrong = Device(plans), 0, 0

    def guess(stream: Stream, most: int) -> list[int]:
        text = list(stream.tokens)
        for _ in range(min(most, 3)):
            text.append(answer(text) if draw.random() < 0.7 else draw.randrange(11))
        return text[len(stream.tokens) :]

    for turn in range(6):
        prompts = [[turn % 2, *range(draw.randint(1, 20))] for _ in range(4)]
        streams = [Stream(list(prompt), len(prompt) + 20, plans.rank(0.0), synchronous=True) for prompt in prompts]
        for stream in streams:
            plans.add(stream)
        while plans.unfinished:
            plan = plans.schedule(0.0, guess)
            device.texts |= {work.stream: [*work.stream.tokens, *work.drafts] for work in plan.works}
            device.run(plan)
            for work in plan.works:
                if not work.samples:
                    continue
                tokens = [answer(work.stream.tokens)]
                for guessed in work.drafts:
                    if guessed != tokens[-1]:
                        wrong += 1
                        break
                    tokens.append(answer([*work.stream.tokens, *tokens]))
                checked += len(work.drafts)
                room = work.stream.max_length - len(work.stream.tokens)
                plans.read(work.stream, tokens[:room])
                if len(work.stream.tokens) == work.stream.max_length or draw.random() < 0.02:
                    plans.finish(work.stream)
        for prompt, stream in zip(prompts, streams):
            assert all(stream.tokens[i] == answer(stream.tokens[:i]) for i in range(len(prompt), len(stream.tokens)))
        states: Any = plans.states
        assert states.available == num_states and plans.pool.available == 40
    assert wrong and checked or num_states == 3
