"""What a request may be: its token ids and its length, checked before anything is loaded or computed for it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

from vishwamai.core.errors import ShapeError
from vishwamai.inference.limits import Limits
from vishwamai.inference.sampling import Sampling

if TYPE_CHECKING:
    from vishwamai.models.tokenizer import Tokenizer


@dataclasses.dataclass(frozen=True)
class Prompts:
    """The requests that an engine serves.

    Attributes:
      vocab: token ids are below it.
      limits: sizes of steps and sequences.
      num_pages: pages of keys and values.
      tokenizer: None where prompts are token ids.

    >>> prompts = Prompts(vocab=64, limits=Limits(max_length=16, page_size=4), num_pages=8)
    >>> prompts.encode([1, 2, 3]), prompts.check([1, 2, 3], Sampling(max_new_tokens=5))
    ((1, 2, 3), 8)
    """

    vocab: int
    limits: Limits
    num_pages: int
    tokenizer: Tokenizer | None = None

    def encode(self, prompt: str | Sequence[int]) -> tuple[int, ...]:
        """The token ids of a prompt.

        Raises:
          ShapeError: it is a text and there is no tokenizer, or an id is not of the vocab.
        """
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise ShapeError("the prompt is a text, but the model has no tokenizer; pass token ids.")
            return tuple(self.tokenizer.encode(prompt))
        for token in prompt:
            if not 0 <= token < self.vocab:
                raise ShapeError(f"the prompt has token id {token}; ids are 0 to {self.vocab - 1}.")
        return tuple(int(token) for token in prompt)

    def check_text(self, characters: int) -> None:
        """Declines a text that has too many tokens whatever it says, before it is tokenized.

        Raises:
          ShapeError: so many characters do not fit.
        """
        longest = None if self.tokenizer is None else self.tokenizer.longest
        if longest is not None and characters > longest * self.limits.max_length:
            raise ShapeError(
                f"the prompt has {characters} characters, and a token has at most {longest}, so it is longer than the "
                f"{self.limits.max_length} tokens of a sequence (--max-length); shorten it."
            )

    def check(self, prompt: Sequence[int], options: Sampling) -> int:
        """The length that each answer's sequence may reach, prompt included.

        Raises:
          ShapeError: the request cannot be served; the text says what would fit.
        """
        options.check_tokens(self.vocab)
        if options.stop and self.tokenizer is None:
            raise ShapeError("Sampling: `stop` needs a tokenizer, which the model lacks; pass `stop_token_ids`.")
        room = self.limits.max_length - len(prompt) if options.max_new_tokens is None else options.max_new_tokens
        if len(prompt) >= self.limits.max_length:
            room = 1
        self.limits.check(len(prompt), len(prompt) + room, self.num_pages)
        return len(prompt) + room
