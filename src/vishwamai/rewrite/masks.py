"""The masks of an attention that was found in a program: which are constants, and what those are."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np

from vishwamai.core.types import AnyArray, PyTree
from vishwamai.rewrite.graph import Graph, Labels
from vishwamai.rewrite.match import NoMatch
from vishwamai.rewrite.names import Atom

HIDES = -3e4
"""A logit of this or less hides its position: after the row's maximum is subtracted, its exponential is zero."""
_LARGEST = 1 << 26


@dataclasses.dataclass(frozen=True)
class Mask:
    """One mask.

    Attributes:
      atom: the array, with the labels of its axes. shown: the value that lets a position be seen.
      fill: the logit of hidden positions. value: the positions that are seen, if the array is a constant.
    """

    atom: Atom
    labels: Labels
    visible: bool
    fill: float
    value: np.ndarray | None


def mask_of(graph: Graph, atom: Atom, labels: Labels, visible: bool, fill: float) -> Mask:
    """The mask of a `select_n` by `atom`, before it was broadcast."""
    atom, labels = graph.peel(atom, labels)
    while graph.name(atom) == "not":
        atom, labels = graph.peel(graph.producer[atom].invars[0], labels)
        visible = not visible
    value = graph.constant(atom)
    return Mask(atom, labels, visible, fill, None if value is None else value.astype(bool) == visible)


def mask_of_bias(graph: Graph, atom: Atom, labels: Labels, factor: float) -> Mask | None:
    """The mask that a constant bias is whose elements are 0 or hide their position; None for any other bias."""
    atom, labels = graph.peel(atom, labels, casts=True)
    value = graph.constant(atom)
    if value is None or not value.size:
        return None
    value = factor * value.astype(np.float64)
    hidden = value <= HIDES
    if not hidden.any() or not np.all(hidden | (value == 0)):
        return None
    return Mask(atom, labels, True, float(value.min()), ~hidden)


def ordered(x: AnyArray, labels: Labels, order: Labels, transpose: Any) -> Any:
    """`x` with its axes in `order`, of size 1 where it has none of that label; `transpose` of JAX or NumPy."""
    proper = [i for i, n in enumerate(x.shape) if n != 1]
    present = [label for label in order if any(labels[i] is label for i in proper)]
    if len(present) != len(proper):
        raise NoMatch("a mask or bias has an axis that the logits do not have")
    present_labels = [labels[i] for i in proper]
    x = x.reshape([x.shape[i] for i in proper])
    x = transpose(x, [present_labels.index(label) for label in present])
    sizes = dict(zip(present, x.shape))
    return x.reshape([sizes.get(label, 1) for label in order])


def band(seen: np.ndarray) -> tuple[int | None, int | None] | None:
    """(low, high) of a mask `[queries, keys]` that shows query i exactly the keys i + low ... i + high, None =
    unbounded; None for another mask.

    >>> band(np.tril(np.ones((3, 3), bool)))
    (None, 0)
    >>> band(np.eye(3, k=1, dtype=bool)), band(np.array([[True, False, True]]))
    ((1, 1), None)
    """
    rows, columns = seen.shape
    distance = np.arange(columns) - np.arange(rows)[:, None]
    inside = distance[seen]
    if not inside.size:
        return None
    low, high = int(inside.min()), int(inside.max())
    if not np.array_equal(seen, (distance >= low) & (distance <= high)):
        return None
    return None if low == 1 - rows else low, None if high == columns - 1 else high


def narrower(a: tuple[int | None, int | None], b: tuple[int | None, int | None]) -> tuple[int | None, int | None]:
    """The band in both bands."""
    lows = [x for x in (a[0], b[0]) if x is not None]
    highs = [x for x in (a[1], b[1]) if x is not None]
    return max(lows, default=None), min(highs, default=None)


def options(low: int | None, high: int | None, rows: int, columns: int) -> dict[str, Any]:
    """The options of `flash_attention` for a band, which must not be empty."""
    if high is None:
        return {} if low is None else {"window": (0, None), "q_offset": low}
    arguments: dict[str, PyTree] = {"causal": True}
    if low is not None:
        arguments["window"] = (high - low, None)
    if high and high == columns - rows:
        arguments["causal_align"] = "bottom_right"
    elif high:
        arguments["q_offset"] = high
    return arguments


def every_row_sees(masks: list[Mask], order: Labels) -> bool:
    """Whether constants show every row of the last axis of `order` a position; False if they are too large to see."""
    if any(mask.value is None for mask in masks):
        return False
    seen = np.ones((1,) * len(order), bool)
    for mask in masks:
        assert mask.value is not None
        values = ordered(mask.value, mask.labels, order, np.transpose)
        shape = np.broadcast_shapes(seen.shape, values.shape)
        if math.prod(shape) > _LARGEST:
            return False
        seen = seen & values
    return bool(seen.any(axis=-1).all())
