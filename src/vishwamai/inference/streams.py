"""Sequences of tokens as the scheduler sees them: what is known and computed of each, and its part of a step."""

from __future__ import annotations

import dataclasses
import math

import numpy as np

from vishwamai.inference.pages import ROOT
from vishwamai.inference.prefixes import Part
from vishwamai.inference.windows import Span


@dataclasses.dataclass(eq=False)
class Stream:
    """One sequence of tokens on its way: what is known of it, what was computed, and what it holds.

    Args:
      tokens: the prompt, then every token that was read back.
      max_length: last position, prompt included.
      rank: its place in the order; `Scheduler.rank` makes it.
      deadline: when it ends unfinished, in the seconds of `schedule(now)`.
      synchronous: its next step needs the values of the last one's tokens (a grammar, or drafts).
      shared: tokens of the prompt with which other prompts are expected to begin, such as a system message.
      root: bytes before the digests of its pages; streams of another root do not share them.
      leader: a stream of the same prompt and an earlier rank; while that one computes the prompt, this one waits, and
        then shares its pages.
    """

    tokens: list[int]
    max_length: int
    rank: tuple[float, int] = (0.0, 0)
    deadline: float = math.inf
    synchronous: bool = False
    leader: Stream | None = None
    root: bytes = ROOT
    shared: int = 0
    prompt_length: int = dataclasses.field(init=False)
    slot: int | None = None  # its row in the device's history of tokens; None while it waits
    pages: list[int] = dataclasses.field(default_factory=list)
    spans: dict[int, Span] = dataclasses.field(default_factory=dict)  # pages of layers with a window, by window
    digests: list[bytes] = dataclasses.field(default_factory=list)  # of its full pages, from the first on
    published: int = 0
    computed: int = 0  # tokens whose keys and values are in the pages, or will be after the steps that were sent off
    in_flight: int = 0  # tokens sampled by those steps and not read yet
    cached: int = 0  # prompt tokens that the prefix cache had when it was admitted first
    preemptions: int = 0
    finished: bool = False
    blocked: bool = False  # its next step needs the mask of its grammar, which is being computed
    state: int | None = None  # the slot of the states after `computed` tokens, in models that have states
    marks: tuple[int, ...] = ()  # lengths of its prompt, in rising order, after which the states are to be kept
    checkpoint: tuple[int, int] | None = None  # the slot, and the tokens, of the states before guesses in flight
    rolling: bytes | None = None  # the digest of the state that was kept last of its answer
    ready: bool = False  # what is stored of its prefix was read, where anything may be (`Scheduler.lacking`)
    parts: dict[Part, np.ndarray] = dataclasses.field(default_factory=dict)  # what was read
    turned: int = 0  # its keys are rotated as those of a sequence of at least so many tokens

    def __post_init__(self) -> None:
        self.prompt_length = len(self.tokens)

    @property
    def length(self) -> int:
        """Tokens that exist, read or not."""
        return len(self.tokens) + self.in_flight

    @property
    def remaining(self) -> int:
        """Tokens to compute before the next one can be sampled; 0 at its end."""
        return 0 if self.length >= self.max_length else self.length - self.computed


@dataclasses.dataclass(frozen=True)
class Work:
    """A step's part of one sequence: tokens `start` ... `start + count - 1`, the last `len(drafts)` of them guesses;
    `samples`: a token is drawn at its end (and after each guess); `states`: the slots from which the states before it
    are read, and to which those after it are written.
    """

    stream: Stream
    start: int
    count: int
    samples: bool
    drafts: tuple[int, ...] = ()
    states: tuple[int, int] = (0, 0)
