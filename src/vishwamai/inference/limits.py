"""What a step and the pools hold."""

from __future__ import annotations

import dataclasses
import math

from vishwamai.core.arguments import checked
from vishwamai.core.errors import ShapeError


@checked
@dataclasses.dataclass(frozen=True)
class Limits:
    """What a step and the pools hold.

    Args:
      max_sequences: sequences in one step.
      max_tokens: tokens in one step, prompts and decodes together; more than `max_sequences`.
      max_length: tokens of one sequence, prompt and answer.
      page_size: tokens of a page.
      aging: seconds by which one unit of priority moves a request forward.
      mixed_tokens: tokens in one step of prompts and decodes together, so that prompts hold decodes up by little; None:
        a quarter of `max_tokens`, or all of them where that leaves no room for prompts.
      token_seconds: target time between two tokens of an answer while prompts are computed (`pace`): `mixed_tokens`
        then holds for the first steps only; None: it holds for all.
      state_pages: pages of a long prompt after which its states are kept each time, in models with states.
    """

    max_sequences: int = 32
    max_tokens: int = 512
    max_length: int = 4096
    page_size: int = 16
    aging: float = 10.0
    mixed_tokens: int | None = None
    state_pages: int = 64
    token_seconds: float | None = None

    def __post_init__(self) -> None:
        for field in ("max_sequences", "max_length", "page_size", "state_pages"):
            if getattr(self, field) < 1:
                raise ShapeError(f"Limits: `{field}` is {getattr(self, field)}; pass at least 1.")
        if self.max_tokens <= self.max_sequences:
            raise ShapeError(
                f"Limits: `max_tokens` is {self.max_tokens}, but {self.max_sequences} decoding sequences need a token "
                f"each; pass more than {self.max_sequences}, so that a step has room for prompts."
            )
        if self.token_seconds is not None and not 0 < self.token_seconds < math.inf:
            raise ShapeError(
                f"Limits: `token_seconds` is {self.token_seconds}; pass a number of seconds above 0, or None."
            )
        if not self.max_sequences < self.mixed <= self.max_tokens:
            raise ShapeError(
                f"Limits: `mixed_tokens` is {self.mixed_tokens}; pass {self.max_sequences + 1} to {self.max_tokens}: "
                "more than decoding sequences, and no more than `max_tokens`."
            )

    @property
    def mixed(self) -> int:
        """Tokens of a step in which any sequence decodes."""
        if self.mixed_tokens is not None:
            return self.mixed_tokens
        quarter = self.max_tokens // 4
        return quarter if quarter > self.max_sequences else self.max_tokens

    @property
    def mixed_sizes(self) -> tuple[int, ...]:
        """Tokens of the steps that compute prompts, for which programs are compiled: a finer choice for a target time.

        >>> Limits(max_sequences=8).mixed_sizes, Limits(max_sequences=8, token_seconds=0.1).mixed_sizes
        ((32, 128, 512), (16, 32, 64, 128, 256, 512))
        """
        ratio = 4 if self.token_seconds is None else 2
        sizes, tokens = {self.max_tokens, self.mixed}, self.mixed if ratio == 4 else self.max_tokens
        while (tokens := tokens // ratio) > max(8, self.max_sequences):
            sizes.add(tokens)
        return tuple(sorted(sizes))

    @property
    def pages_per_sequence(self) -> int:
        """Entries of a page table's row."""
        return self.pages_of(self.max_length)

    def pages_of(self, tokens: int) -> int:
        """Pages that hold so many tokens."""
        return -(-tokens // self.page_size)

    def check(self, prompt_length: int, max_length: int, num_pages: int) -> None:
        """Raises `ShapeError` for a sequence that could never end within these limits and so many pages."""
        if prompt_length < 1:
            raise ShapeError("the prompt has no tokens; pass at least one.")
        if not prompt_length < max_length <= self.max_length:
            raise ShapeError(
                f"the prompt has {prompt_length} tokens and may grow to {max_length}, but a sequence holds at most "
                f"{self.max_length} tokens; shorten the prompt, ask for fewer new tokens, or raise --max-length "
                "(`max_length`)."
            )
        if self.pages_of(max_length) > num_pages:
            raise ShapeError(
                f"a sequence of {max_length} tokens needs {self.pages_of(max_length)} pages of {self.page_size} "
                f"tokens, but there are {num_pages}; shorten it or give the pages more memory."
            )
