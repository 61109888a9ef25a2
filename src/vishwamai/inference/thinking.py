"""Answers that reason first: a grammar that holds behind the reasoning, and a bound of the reasoning's tokens.

`Thinking` has the form of `guided.Grammar`: its matchers give the tokens that may come next as a mask.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from vishwamai.inference.guided import Grammar


@dataclasses.dataclass(frozen=True)
class Thinking:
    """What an answer with reasoning must match.

    Attributes:
      begin: the tokens that begin reasoning, at the start of an answer; none: the answer starts inside of it.
      end: the tokens that end it.
      behind: the tokens that must follow the end, where a grammar does.
      words: int32 of a mask.
      lead: tokens that the answer begins with.
      budget: the most tokens of reasoning, before `end`; None: any number.
      grammar: `guided.Grammar` of the answer after the reasoning, or None.
    """

    begin: tuple[int, ...]
    end: tuple[int, ...]
    behind: tuple[int, ...]
    words: int
    lead: tuple[int, ...] = ()
    budget: int | None = None
    grammar: Grammar | None = None

    def matcher(self) -> ThinkingMatcher:
        """A matcher for one answer."""
        return ThinkingMatcher(self)


class ThinkingMatcher:
    """Where one answer is: before its reasoning, in it, at its end, or behind it."""

    def __init__(self, rules: Thinking):
        self._rules = rules
        self._matcher = None if rules.grammar is None else rules.grammar.matcher()
        self._tokens: list[int] = []
        self._forced = list(rules.lead)
        self._inside, self._behind = not rules.begin, False
        self._spend(0)

    @property
    def finished(self) -> bool:
        """Whether nothing can follow."""
        return self._behind and not self._forced and self._matcher is not None and self._matcher.finished

    def mask(self) -> np.ndarray:
        """int32 `[ceil(vocab / 32)]`: the bits of the tokens that may follow."""
        if self._forced:
            mask = np.zeros(self._rules.words, np.int32)
            token = self._forced[0]
            mask.view(np.uint32)[token // 32] = np.uint32(1) << np.uint32(token % 32)
            return mask
        if self._behind and self._matcher is not None:
            return self._matcher.mask()
        return np.full(self._rules.words, -1, np.int32)

    def advance(self, tokens: Sequence[int]) -> str | None:
        """Takes the tokens that were drawn; the reason if the grammar could not go on."""
        for token in tokens:
            if self._forced:
                self._forced.pop(0)
                continue
            if self._behind:
                if self._matcher is not None and (reason := self._matcher.advance([token])) is not None:
                    return reason
                continue
            self._tokens.append(token)
            if not self._inside:
                begin = self._rules.begin
                if tuple(self._tokens) == begin:
                    self._inside, self._tokens = True, []
                    self._spend(0)
                elif tuple(self._tokens) != begin[: len(self._tokens)]:
                    self._behind = True  # it does not reason
            elif tuple(self._tokens[-len(self._rules.end) :]) == self._rules.end:
                self._leave(())
            else:
                self._spend(len(self._tokens))
        return None

    def _spend(self, count: int) -> None:
        if self._inside and self._rules.budget is not None and count >= self._rules.budget:
            self._leave(self._rules.end)

    def _leave(self, end: Sequence[int]) -> None:
        self._behind = True
        self._forced = [*end, *(self._rules.behind if self._matcher is not None else ())]
