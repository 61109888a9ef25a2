"""Answers without some words: a token that would complete one is not drawn.

`Barred` has the form of `guided.Grammar`, and may hold another one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from vishwamai.core.errors import ShapeError


@dataclasses.dataclass(frozen=True)
class Barred:
    """Words that an answer must not have.

    Attributes:
      sequences: their token ids.
      words: int32 of a mask.
      grammar: further `guided.Grammar` of the answer, or None.
    """

    sequences: tuple[tuple[int, ...], ...]
    words: int
    grammar: Any = None

    def matcher(self) -> BarredMatcher:
        """A matcher for one answer."""
        return BarredMatcher(self)


class BarredMatcher:
    """The last tokens of one answer."""

    def __init__(self, rules: Barred):
        self._rules = rules
        self._matcher = None if rules.grammar is None else rules.grammar.matcher()
        self._longest = max(map(len, rules.sequences)) - 1
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
        if not mask.any():
            raise ShapeError("the answer could not go on: `bad_words` leave no token.")
        return mask

    def advance(self, tokens: Sequence[int]) -> str | None:
        """Takes the tokens that were drawn; the reason if the grammar could not go on."""
        self._tokens = [*self._tokens, *tokens][-self._longest :] if self._longest else []
        return None if self._matcher is None else self._matcher.advance(tokens)
