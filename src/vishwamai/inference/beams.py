"""Beam search: the most likely answers, as vLLM searches them.

Each step continues every beam with its likeliest tokens and keeps the best. A beam is a prompt of its own for the
engine, whose prefix cache has its pages; so beams share steps with other requests.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Awaitable, Callable, Collection, Sequence

from vishwamai.inference.answers import TokenLogprobs
from vishwamai.inference.sampling import MAX_LOGPROBS

MAX_WIDTH = MAX_LOGPROBS // 2

Likeliest = Callable[[Sequence[tuple[int, ...]]], Awaitable[list[TokenLogprobs]]]
"""For each of some sequences the log probabilities of its next token, the likeliest ones among them."""


@dataclasses.dataclass(frozen=True)
class Beam:
    """An answer so far.

    Attributes:
      entries: log probabilities of its tokens.
      total: their sum.
      complete: flag, its last token ends it.
    """

    entries: tuple[TokenLogprobs, ...] = ()
    total: float = 0.0
    complete: bool = False

    @property
    def tokens(self) -> tuple[int, ...]:
        """The tokens."""
        return tuple(entry.token for entry in self.entries)

    def score(self, prompt: int, penalty: float) -> float:
        """The sum over a power of the length, that of the prompt included and an end token not."""
        return self.total / max(prompt + len(self.entries) - self.complete, 1) ** penalty


def extended(beam: Beam, following: TokenLogprobs, ends: Collection[int]) -> list[Beam]:
    """The continuations of a beam by its likeliest tokens."""
    return [
        Beam(
            (*beam.entries, dataclasses.replace(following, token=token, logprob=logprob)),
            beam.total + logprob,
            token in ends,
        )
        for token, logprob in following.top
    ]


async def beam_search(
    likeliest: Likeliest, prompt: tuple[int, ...], width: int, most: int, ends: Collection[int], penalty: float = 1.0
) -> list[Beam]:
    """The best answers to a prompt, the best first.

    Args:
      likeliest: function that computes the next tokens of some sequences, twice `width` of them each.
      prompt: token ids.
      width: beams, and answers.
      most: tokens of an answer.
      ends: tokens that end one.
      penalty: exponent of the length by which sums are divided.
    """
    beams, complete = [Beam()], []
    for _ in range(most):
        followings = await likeliest([prompt + beam.tokens for beam in beams])
        candidates = [next for beam, entry in zip(beams, followings) for next in extended(beam, entry, ends)]
        complete += [beam for beam in candidates if beam.complete]
        running = (beam for beam in candidates if not beam.complete)
        beams = sorted(running, key=lambda beam: -beam.score(len(prompt), penalty))[:width]
    return sorted([*complete, *beams], key=lambda beam: -beam.score(len(prompt), penalty))[:width]
