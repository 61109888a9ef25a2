"""What the engine keeps of a request on its way: its answers, each with its sequence and its text so far."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from vishwamai.inference.adapters import Adapter
from vishwamai.inference.answers import Delta, Writer
from vishwamai.inference.sampling import Sampling
from vishwamai.inference.streams import Stream

if TYPE_CHECKING:
    from vishwamai.inference.barred import Barred, BarredMatcher
    from vishwamai.inference.guided import Grammar, Matcher
    from vishwamai.inference.thinking import Thinking, ThinkingMatcher


@dataclasses.dataclass(eq=False)
class Branch:
    """One of a request's answers on its way."""

    request: Request
    choice: int
    seed: int
    stream: Stream
    writer: Writer
    matcher: Matcher | ThinkingMatcher | BarredMatcher | None = None  # of a grammar; see `guided`
    mask: np.ndarray | None = None  # of the next token, once its grammar has it


@dataclasses.dataclass(eq=False)
class Request:
    """A prompt, what is wanted, and who is told: `sink` is called with every delta, on the engine's thread.

    `keep_special` are special tokens that the answer's text has, which it has not otherwise. `shared` is the number of
    tokens with which other prompts are expected to begin, such as those of a system message: models with states keep
    the states after them.
    """

    prompt: tuple[int, ...]
    options: Sampling
    sink: Callable[[Delta], None]
    priority: float = 0.0
    deadline: float | None = None  # seconds from its arrival
    grammar: Grammar | Thinking | Barred | None = None  # see `guided.Grammar`
    keep_special: frozenset[int] = frozenset()
    adapter: Adapter | None = None
    shared: int = 0
    branches: list[Branch] = dataclasses.field(default_factory=list)


@dataclasses.dataclass
class Statistics:
    """What the engine did so far, for metrics."""

    steps: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    computed_tokens: int = 0
    new_tokens: int = 0
    guesses: int = 0
    guesses_accepted: int = 0
    preemptions: int = 0
    finished: dict[str, int] = dataclasses.field(default_factory=dict)

    @property
    def cached_share(self) -> float:
        """Tokens of prompts that the prefix cache had, of all; 0 where there were none."""
        return self.cached_tokens / max(self.prompt_tokens, 1)

    @property
    def accepted_share(self) -> float:
        """Guesses that were right, of all that were checked; 0 where there were none."""
        return self.guesses_accepted / max(self.guesses, 1)
