"""A checked request: what the engine is asked for, and the form of the reply."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from vishwamai.inference.barred import Barred
from vishwamai.inference.guided import Grammar
from vishwamai.inference.sampling import Sampling
from vishwamai.inference.server.replies import Reply
from vishwamai.inference.thinking import Thinking


@dataclasses.dataclass(frozen=True)
class GrammarSource:
    """A grammar that a request asks for: kind and source of `Vocabulary.grammar`, and the argument that has it."""

    kind: str
    source: str | Mapping[str, object]
    param: str


@dataclasses.dataclass(frozen=True)
class Job:
    """A checked request.

    Attributes:
      prompts, priority, deadline, keep_special, shared: arguments of `Engine.stream`.
      grammar: grammar of the answer, and the same once it is `compiled`.
      thinking: limits of the reasoning before that.
      barred: words that it must not have.
      adapter: the name of the adapter that answers, or None.
      length_penalty: exponent of a beam search; None: tokens are drawn.
      options: None: no token is computed.
      reply: the form of the answer.
      scored: most likely tokens at each place of the prompts; None: prompts are not scored.
      stream: the answer comes in pieces.
      usage: a stream ends with its usage.
    """

    prompts: tuple[tuple[int, ...], ...]
    options: Sampling | None
    reply: Reply
    scored: int | None
    priority: float
    deadline: float | None
    grammar: GrammarSource | None
    keep_special: frozenset[int]
    stream: bool
    usage: bool
    thinking: Thinking | None = None
    barred: Barred | None = None
    adapter: str | None = None
    length_penalty: float | None = None
    compiled: Grammar | Thinking | Barred | None = None
    shared: int = 0

    def with_grammar(self, grammar: Grammar | None) -> Job:
        """The job with all that holds for its answer, around a compiled grammar."""
        rules: Grammar | Thinking | Barred | None = grammar
        for outer in (self.thinking, self.barred):
            rules = rules if outer is None else dataclasses.replace(outer, grammar=rules)
        return dataclasses.replace(self, compiled=rules)
