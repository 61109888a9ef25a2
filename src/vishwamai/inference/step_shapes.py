"""The few shapes of steps, each of which is a program, and the host arrays of a step of one shape."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

import numpy as np

from vishwamai.core.types import PyTree
from vishwamai.inference.limits import Limits


@dataclasses.dataclass(frozen=True, order=True)
class StepShape:
    """The sizes of a step's arrays: its tokens, its sequences, the rows of logits, and most tokens of one sequence."""

    tokens: int
    sequences: int
    rows: int
    longest: int


def step_shapes(limits: Limits, drafts: int = 0) -> tuple[StepShape, ...]:
    """The shapes of every step: decodes of 1, 2, 4, ... sequences, guesses for as many, prompts alone, and mixed steps
    of `Limits.mixed_sizes`.

    >>> [(s.tokens, s.sequences) for s in step_shapes(Limits(max_sequences=3, max_tokens=128))]
    [(1, 1), (2, 2), (3, 3), (32, 3), (128, 3)]
    """
    most = limits.max_sequences
    counts = sorted({min(2**i, most) for i in range(most.bit_length() + 1)})
    shapes = [StepShape(n, n, n, 1) for n in counts]
    if drafts:
        shapes += checking_shapes(limits, drafts)
    shapes += [StepShape(n, most, most, n) for n in limits.mixed_sizes]
    return tuple(sorted(shapes))


def checking_shapes(limits: Limits, drafts: int) -> tuple[StepShape, ...]:
    """The shapes of steps that check guesses: of 1, 2, 4, ... sequences."""
    most = limits.max_sequences
    counts = sorted({min(2**i, most) for i in range(most.bit_length() + 1)})
    return tuple(StepShape(n * (drafts + 1), n, n * (drafts + 1), drafts + 1) for n in counts)


class Tables(dict[str, PyTree]):
    """Host arrays of one step, by name; see `host_tables`."""


def host_tables(
    shape: StepShape, limits: Limits, windows: Iterable[int], adapters: bool = False, states: bool = False
) -> Tables:
    """The arrays of an empty step, for the caller to fill in.

    Returns:
      slots: `[sequences]` int32, rows of the history.
      kv_lens: `[sequences]` int32, tokens of each sequence, the new ones included.
      lengths: `[sequences]` int32, the lengths that scalings of the rotation go by (`PagedBatch.lengths`).
      cu_q_lens: `[sequences + 1]` int32, where each sequence's new tokens start.
      table: `[sequences, pages_per_sequence]` int32.
      windows: the same, by window, of layers that have page tables of their own.
      rows: `[rows]` int32, the tokens of the step whose logits are wanted.
      adapters: `[sequences]` int32, the place of each sequence's adapter, -1 for none; where there are any.
      states: `[2, sequences]` int32, as of `PagedBatch`, in models that have states.
    """
    table = np.zeros((shape.sequences, limits.pages_per_sequence), np.int32)
    extra: dict[str, PyTree] = {"adapters": np.full(shape.sequences, -1, np.int32)} if adapters else {}
    if states:
        extra = {"adapters": extra.get("adapters"), "states": np.zeros((2, shape.sequences), np.int32)}
    return Tables(
        slots=np.zeros(shape.sequences, np.int32),
        kv_lens=np.zeros(shape.sequences, np.int32),
        lengths=np.zeros(shape.sequences, np.int32),
        cu_q_lens=np.zeros(shape.sequences + 1, np.int32),
        table=table,
        windows={window: table.copy() for window in windows},
        rows=np.zeros(shape.rows, np.int32),
        **extra,
    )
