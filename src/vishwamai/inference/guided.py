"""Answers that match a JSON schema, a regular expression or a grammar, by the library llguidance.

A grammar is compiled once for a request. Each answer has a matcher of its own, which gives the tokens that may come
next as a bit mask; sampling applies it on the device.
"""

from __future__ import annotations

import dataclasses
import json
import re
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import llguidance
import numpy as np

from vishwamai.core.errors import ShapeError
from vishwamai.inference.grammar_forms import is_gbnf, lark_of, plain_schema

if TYPE_CHECKING:
    from vishwamai.models.tokenizer import Tokenizer

LIMITS: dict[str, Any] = {
    "initial_lexer_fuel": 1_000_000,
    "step_lexer_fuel": 200_000,
    "step_max_items": 50_000,
    "max_items_in_row": 500,
    "max_lexer_states": 50_000,
    "verbose_errors": False,
}
"""Work of llguidance for a grammar and for each of its masks. Beyond it, the request ends in an error."""

_MASK_SECONDS, _MOST_EXCESS = 0.05, 0.2
"""Time of a processor for a mask, and how far the masks of an answer may exceed it."""

MAX_BYTES = 1 << 20
MAX_REFERENCES = 200
MAX_RULES = 1000
"""Bounds of a grammar's text, its distinct `$ref`s and its rules: llguidance follows them by recursion, and ends the
process where the stack ends."""

_JSON_FORM: Any = {"whitespace_pattern": r"( |\r?\n[ \t]{0,40})?"}
"""Between the parts of a JSON text: nothing, a space, or a new line with its indentation. Without a bound, a weak model
writes whitespace until its tokens end. A schema with `x-guidance` of its own is left as it is."""


@dataclasses.dataclass(frozen=True)
class Vocabulary:
    """A tokenizer as llguidance reads it; made once for a model."""

    tokens: llguidance.LLTokenizer

    @classmethod
    def of(cls, tokenizer: Tokenizer | None, vocab: int, end_tokens: Sequence[int]) -> Vocabulary:
        """The vocabulary of a tokenizer.

        Args:
          tokenizer: result of `vishwamai.models.read_tokenizer`.
          vocab: tokens of the model, which may be more than the tokenizer's.
          end_tokens: ids that end an answer; at least one.

        Raises:
          ShapeError: the model has no tokenizer or no end token.
        """
        if tokenizer is None or not end_tokens:
            lacks = "tokenizer" if tokenizer is None else "end token"
            raise ShapeError(f"a grammar needs a tokenizer and an end token, but the model has no {lacks}.")
        return cls(llguidance.LLTokenizer(tokenizer.encoder.to_str(), n_vocab=vocab, eos_token=list(end_tokens)))

    def grammar(self, kind: str, source: str | Mapping[str, object]) -> Grammar:
        """A grammar of kind "json_schema" (an object), "regex" or "lark" (also GBNF).

        The compiler of llguidance runs in this process. A server compiles in a process with limits first
        (`server.compilation`).

        Raises:
          ShapeError: it is not valid or larger than the bounds; the text is the library's.
        """
        return self.compiled(kind, grammar_text(kind, source))

    def compiled(self, kind: str, text: str) -> Grammar:
        """The grammar of a text of `grammar_text`.

        Raises:
          ShapeError: it is not valid.
        """
        matcher = llguidance.LLMatcher(self.tokens, text, log_level=0, limits=llguidance.LLParserLimits(**LIMITS))
        if matcher.is_error():
            raise invalid(kind, matcher.get_error())
        return Grammar(matcher, -(-self.tokens.vocab_size // 32))


def grammar_text(kind: str, source: str | Mapping[str, object]) -> str:
    """A grammar as llguidance reads it; the arguments are those of `Vocabulary.grammar`.

    Raises:
      ShapeError: it is not JSON, or larger than the bounds.
    """
    try:
        text = json.dumps(source) if kind == "json_schema" else str(source)
        _check_bounds(kind, text)
        if kind == "json_schema":
            form = None if "x-guidance" in source else _JSON_FORM
            text = json.dumps(plain_schema(source))
            return llguidance.LLMatcher.grammar_from_json_schema(text, defaults=form)
        if kind == "lark" and is_gbnf(text):
            text = lark_of(text)
    except (ValueError, RecursionError) as error:
        if isinstance(error, ShapeError):
            raise
        raise invalid(kind, str(error)) from error
    if kind == "regex":
        return llguidance.LLMatcher.grammar_from_regex(text)
    return llguidance.LLMatcher.grammar_from_lark(text)


def _check_bounds(kind: str, text: str) -> None:
    counts = {
        "bytes": (len(text), MAX_BYTES),
        "distinct references": (len(set(_REFERENCE.findall(text))), MAX_REFERENCES),
        "rules": (max(len(_RULE.findall(text)), text.count("::=")) if kind == "lark" else 0, MAX_RULES),
    }
    for name, (count, most) in counts.items():
        if count > most:
            raise ShapeError(f"the {kind.replace('_', ' ')} has {count} {name}; the most is {most}. Make it smaller.")


_REFERENCE = re.compile(r'"\$(?:ref|dynamicRef)"\s*:\s*"((?:[^"\\]|\\.)*)"')
_RULE = re.compile(r"^\s*[?!]?\w+[^:\n\"/]*:", re.MULTILINE)


def invalid(kind: str, reason: str) -> ShapeError:
    """The error of a grammar that is not valid, in a few lines."""
    lines = [line for line in reason.strip().splitlines() if line.strip()]
    text = "; ".join(lines[:4])
    return ShapeError(f"the {kind.replace('_', ' ')} is not valid: {text[:400]}{'...' if len(text) > 400 else ''}")


@dataclasses.dataclass(frozen=True)
class Grammar:
    """A compiled grammar, at its start; `words` are the int32 of a mask."""

    start: llguidance.LLMatcher
    words: int

    def matcher(self) -> Matcher:
        """A matcher for one answer."""
        return Matcher(self.start.deep_copy(), self.words)


class Matcher:
    """Where one answer is in its grammar."""

    def __init__(self, matcher: llguidance.LLMatcher, words: int):
        self._matcher = matcher
        self._words = words
        self._excess = 0.0  # seconds of masks over their share

    @property
    def finished(self) -> bool:
        """Whether nothing can follow."""
        return self._matcher.is_stopped()

    def mask(self) -> np.ndarray:
        """int32 `[ceil(vocab / 32)]`: the bits of the tokens that may follow.

        Raises:
          ShapeError: the grammar gave up, because it is too ambiguous or because nothing can follow.
        """
        started = time.thread_time()
        # llguidance computes vocab // 32 + 1 words: one too many where 32 divides the vocab, as in published models.
        mask = np.frombuffer(self._matcher.compute_bitmask(), np.int32, count=self._words)
        self._excess += max(0.0, time.thread_time() - started - _MASK_SECONDS)
        if (reason := self._reason()) is not None:
            raise ShapeError(reason)
        if self._excess > _MOST_EXCESS:
            raise ShapeError(
                "the grammar could not go on: its masks take too long, because it is ambiguous. Write rules by which a "
                "text can be read in one way."
            )
        if not mask.any():
            raise ShapeError("the grammar could not go on: no token of the model may follow.")
        return mask

    def advance(self, tokens: Sequence[int]) -> str | None:
        """Takes the tokens that were drawn; the reason if the grammar could not go on."""
        if not self._matcher.is_stopped():
            self._matcher.consume_tokens(list(tokens))
        return self._reason()

    def _reason(self) -> str | None:
        stop = self._matcher.stop_reason()
        if not self._matcher.is_error() and stop not in ("ParserTooComplex", "LexerTooComplex", "InternalError"):
            return None
        text = (self._matcher.get_error().strip() or stop).splitlines()[0]
        return f"the grammar could not go on: {text[:300]}"
