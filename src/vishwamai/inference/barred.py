"""Answers without some words, or without what processors bar: such a token is not drawn.

`Barred` has the form of `guided.Grammar`, and may hold another one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from vishwamai.core.errors import ShapeError
from vishwamai.inference.processors import Processor

if TYPE_CHECKING:
    from vishwamai.inference.guided import Grammar
    from vishwamai.inference.thinking import Thinking


@dataclasses.dataclass(frozen=True)
class Barred:
    """Words that an answer must not have.

    Attributes:
      sequences: their token ids.
      words: int32 of a mask.
      processors: functions from the answer's tokens to those that must not follow.
      grammar: further `guided.Grammar` of the answer, or None.
    """

    sequences: tuple[tuple[int, ...], ...]
    words: int
    grammar: Grammar | Thinking | None = None
    processors: tuple[Processor, ...] = ()

    def matcher(self) -> BarredMatcher:
        """A matcher for one answer."""
        return BarredMatcher(self)


class BarredMatcher:
    """The tokens of one answer: the last ones, or all where there are processors."""

    def __init__(self, rules: Barred):
        self._rules = rules
        self._matcher = None if rules.grammar is None else rules.grammar.matcher()
        self._longest = max(map(len, rules.sequences), default=1) - 1
        self._tokens: list[int] = []

    @property
    def finished(self) -> bool:
        """Whether nothing can follow."""
        return self._matcher is not None and self._matcher.finished

    def mask(self) -> np.ndarray:
        """int32 `[ceil(vocab / 32)]`: the bits of the tokens that may follow.

        Raises:
          ShapeError: none may.
        """
        mask = np.full(self._rules.words, -1, np.int32) if self._matcher is None else self._matcher.mask().copy()
        bits = mask.view(np.uint32)
        for sequence in self._rules.sequences:
            before = list(sequence[:-1])
            if not before or self._tokens[-len(before) :] == before:
                bits[sequence[-1] // 32] &= ~np.uint32(1 << sequence[-1] % 32)
        for processor in self._rules.processors:
            for token in processor(self._tokens):
                if 0 <= token < 32 * len(bits):
                    bits[token // 32] &= ~np.uint32(1 << token % 32)
        if not mask.any():
            raise ShapeError("the answer could not go on: `bad_words` and `logits_processors` leave no token.")
        return mask

    def advance(self, tokens: Sequence[int]) -> str | None:
        """Takes the tokens that were drawn; the reason if the grammar could not go on."""
        if self._rules.processors:
            self._tokens += tokens
        else:
            self._tokens = [*self._tokens, *tokens][-self._longest :] if self._longest else []
        return None if self._matcher is None else self._matcher.advance(tokens)
