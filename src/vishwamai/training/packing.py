"""Documents packed into rows of one length: which pieces of which documents make each row.

A plan is three arrays, made once from the documents' lengths, so that any row can be built alone and in any order.
`best_fit` is the algorithm of Ding et al., "Fewer Truncations Improve Language Modeling" (2024).
"""

from __future__ import annotations

import bisect
import dataclasses

import numpy as np

from vishwamai.core.errors import ConfigError

IGNORED = -100
"""Label of a token that is not in the loss; the default `ignore_index` of `linear_cross_entropy`."""

REFERENCE = "reference"
"""Key of the one array of a batch that has no tokens: float32 `[rows, 2]`, of pairs of answers."""


@dataclasses.dataclass(frozen=True)
class PackingPlan:
    """Pieces in the order of their rows: row r holds the pieces `row_starts[r]` to `row_starts[r + 1]`.

    Attributes:
      starts: int64 `[pieces]`, place of a piece's first token in the token array.
      lengths: int64 `[pieces]`, tokens of each piece.
      row_starts: int64 `[rows + 1]`.
    """

    starts: np.ndarray
    lengths: np.ndarray
    row_starts: np.ndarray

    def __len__(self) -> int:
        return len(self.row_starts) - 1


def plan_rows(
    method: str, offsets: np.ndarray, order: np.ndarray, length: int, label: str = "the documents"
) -> PackingPlan:
    """The plan of rows of `length` tokens.

    Args:
      method: "concat" cuts documents where a row ends and drops the last, partial row. "best_fit" cuts only documents
        that are longer than a row, and puts each piece where the least room is left.
      offsets: int64 `[documents + 1]`, where each document begins in the token array.
      order: the documents to pack, in this order.
      length: tokens in a row.
      label: name of the documents in errors.

    Raises:
      ConfigError: the documents do not fill one row.

    >>> plan = plan_rows("concat", np.array([0, 3, 10]), np.array([1, 0]), 4)
    >>> plan.starts.tolist(), plan.lengths.tolist(), plan.row_starts.tolist()
    ([3, 7, 0], [4, 3, 1], [0, 1, 3])
    """
    sizes = offsets[order + 1] - offsets[order]
    pieces = _concat(sizes, offsets[order], length) if method == "concat" else _best_fit(sizes, offsets[order], length)
    if not len(pieces):
        raise ConfigError(f"data: {label} have {int(sizes.sum())} tokens, less than one row of {length}; pass more.")
    return pieces


def pair_rows(offsets: np.ndarray, order: np.ndarray) -> PackingPlan:
    """A row for each pair of documents: pair p is documents 2p and 2p + 1, which become segments 1 and 2.

    >>> pair_rows(np.array([0, 3, 5, 9, 12]), np.array([1, 0])).starts.tolist()
    [5, 9, 0, 3]
    """
    documents = (2 * order[:, None] + np.arange(2)).reshape(-1)
    return PackingPlan(
        offsets[documents], offsets[documents + 1] - offsets[documents], np.arange(0, len(documents) + 1, 2)
    )


def row(
    plan: PackingPlan, tokens: np.ndarray, targets: np.ndarray | None, index: int, length: int
) -> dict[str, np.ndarray]:
    """Row `index`, four int32 arrays `[length]`.

    `tokens`; `labels`, the next token of the same piece, or -100 where it is not in the loss; `segment_ids`, 1, 2, ...
    by piece, and 0 for padding; `positions`, counted from each piece's start.

    Args:
      plan: result of `plan_rows`.
      tokens: `[all tokens]`.
      targets: bool `[all tokens]`: the token counts in the loss; None if all do.
      index: number of the row.
      length: tokens in a row.
    """
    arrays = {name: np.zeros(length, np.int32) for name in ("tokens", "segment_ids", "positions")}
    arrays["labels"] = np.full(length, IGNORED, np.int32)
    position = 0
    for segment, piece in enumerate(range(plan.row_starts[index], plan.row_starts[index + 1]), 1):
        start, size = int(plan.starts[piece]), int(plan.lengths[piece])
        span = slice(position, position + size)
        arrays["tokens"][span] = tokens[start : start + size]
        labels = arrays["tokens"][position + 1 : position + size]
        is_label = True if targets is None else targets[start + 1 : start + size]
        arrays["labels"][position : position + size - 1] = np.where(is_label, labels, IGNORED)
        arrays["segment_ids"][span] = segment
        arrays["positions"][span] = np.arange(size)
        position += size
    return arrays


def _concat(sizes: np.ndarray, begins: np.ndarray, length: int) -> PackingPlan:
    ends = np.cumsum(sizes)
    rows = int(ends[-1]) // length if len(ends) else 0
    if not rows:
        return PackingPlan(*(np.zeros(n, np.int64) for n in (0, 0, 1)))
    # A piece begins where a document or a row does.
    cuts = np.unique(np.concatenate([[0], ends[:-1], np.arange(1, rows) * length]))
    cuts = cuts[cuts < rows * length]
    document = np.searchsorted(ends, cuts, side="right")
    starts = begins[document] + cuts - (ends - sizes)[document]
    lengths = np.diff(np.append(cuts, rows * length))
    return PackingPlan(starts, lengths, np.searchsorted(cuts, np.arange(rows + 1) * length))


def _best_fit(sizes: np.ndarray, begins: np.ndarray, length: int) -> PackingPlan:
    pieces = [
        (begin + done, min(length, size - done))
        for begin, size in zip(begins.tolist(), sizes.tolist())
        for done in range(0, size, length)
    ]
    rows: list[list[tuple[int, int]]] = []
    open_rows: list[tuple[int, int]] = []  # (room left, row), sorted
    for piece in sorted(pieces, key=lambda p: -p[1]):
        best = bisect.bisect_left(open_rows, (piece[1], -1))
        if best < len(open_rows):
            room, number = open_rows.pop(best)
        else:
            room, number = length, len(rows)
            rows.append([])
        rows[number].append(piece)
        if room > piece[1]:
            bisect.insort(open_rows, (room - piece[1], number))
    flat = np.array([piece for pieces in rows for piece in pieces], np.int64).reshape(-1, 2)
    return PackingPlan(flat[:, 0], flat[:, 1], np.cumsum([0, *map(len, rows)], dtype=np.int64))
