"""Answers that match a JSON schema, a regular expression or a grammar, by the library llguidance.

A grammar is compiled once for a request. Each answer has a matcher of its own, which gives the tokens that may come
next as a bit mask; sampling applies it on the device.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any

import llguidance
import numpy as np

from vishwamai.core.errors import ShapeError

_LIMITS = llguidance.LLParserLimits(initial_lexer_fuel=1_000_000, step_lexer_fuel=200_000)
"""Work that one grammar may cause, about a second; beyond it, it is an error of its request."""

_JSON_FORM: Any = {"whitespace_pattern": r"( |\r?\n[ \t]{0,40})?"}
"""Between the parts of a JSON text: nothing, a space, or a new line with its indentation. Without a bound, a weak model
writes whitespace until its tokens end. A schema with `x-guidance` of its own is left as it is."""


@dataclasses.dataclass(frozen=True)
class Vocabulary:
    """A tokenizer as llguidance reads it; made once for a model."""

    tokens: Any

    @classmethod
    def of(cls, tokenizer: Any, vocab: int, end_tokens: Sequence[int]) -> Vocabulary:
        """The vocabulary of a tokenizer.

        Args:
          tokenizer: of `vishwamai.models.read_tokenizer`.
          vocab: tokens of the model, which may be more than the tokenizer's.
          end_tokens: those that end an answer; at least one.

        Raises:
          ShapeError: the model has no tokenizer or no end token.
        """
        if tokenizer is None or not end_tokens:
            lacks = "tokenizer" if tokenizer is None else "end token"
            raise ShapeError(f"a grammar needs a tokenizer and an end token, but the model has no {lacks}.")
        return cls(llguidance.LLTokenizer(tokenizer.encoder.to_str(), n_vocab=vocab, eos_token=list(end_tokens)))

    def grammar(self, kind: str, source: str | Mapping[str, Any]) -> Grammar:
        """A grammar of kind "json_schema" (an object), "regex" or "lark".

        Raises:
          ShapeError: it is not valid; the text is the library's.
        """
        if kind == "json_schema":
            form = None if "x-guidance" in source else _JSON_FORM
            text = llguidance.LLMatcher.grammar_from_json_schema(json.dumps(source), defaults=form)
        elif kind == "regex":
            text = llguidance.LLMatcher.grammar_from_regex(str(source))
        else:
            text = llguidance.LLMatcher.grammar_from_lark(str(source))
        matcher = llguidance.LLMatcher(self.tokens, text, log_level=0, limits=_LIMITS)
        if matcher.is_error():
            raise ShapeError(f"the {kind.replace('_', ' ')} is not valid: {matcher.get_error().strip()}")
        return Grammar(matcher, -(-self.tokens.vocab_size // 32))


@dataclasses.dataclass(frozen=True)
class Grammar:
    """A compiled grammar, at its start; `words` are the int32 of a mask."""

    start: Any
    words: int

    def matcher(self) -> Matcher:
        """A matcher for one answer."""
        return Matcher(self.start.deep_copy(), self.words)


class Matcher:
    """Where one answer is in its grammar."""

    def __init__(self, matcher: Any, words: int):
        self._matcher = matcher
        self._words = words

    @property
    def ended(self) -> bool:
        """Whether nothing can follow."""
        return self._matcher.is_stopped()

    def mask(self) -> np.ndarray:
        """int32 `[ceil(vocab / 32)]`: the bits of the tokens that may follow."""
        # llguidance computes vocab // 32 + 1 words: one too many where 32 divides the vocab, as in published models.
        return np.frombuffer(self._matcher.compute_bitmask(), np.int32, count=self._words)

    def advance(self, tokens: Sequence[int]) -> str | None:
        """Takes the tokens that were drawn; the reason if the grammar could not go on."""
        if not self._matcher.is_stopped() and not self._matcher.consume_tokens(list(tokens)):
            return self._matcher.get_error()
        return None
