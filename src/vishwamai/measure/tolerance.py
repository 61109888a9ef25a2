"""How far a result may be from the truth: the one tolerance of the contract suite and of the benchmark.

An implementation may err twice as much as the reference does in the same dtype, plus a floor. Entries of the truth that
are not finite must be equal, and so must integers.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

import jax.numpy as jnp
import numpy as np

if TYPE_CHECKING:
    from jax.typing import DTypeLike


@dataclasses.dataclass(frozen=True)
class Errors:
    """How far an array is from the truth: largest and root-mean-square difference."""

    largest: float
    rms: float


FLOOR = {2: Errors(2.0, 0.5), 4: Errors(8.0, 2.0), 8: Errors(8.0, 2.0)}
"""By the bytes of the dtype, in units of its eps times the array's own magnitude. In 16 bits the result's own rounding
rules: two units in the last place of the largest entry, and the root mean square of roundings to the nearest (0.29)
with some room. In 32 and 64 bits it is the rounding of sums, which grows with their length and differs with their
order.
"""
CEILING = {2: Errors(8.0, 2.0), 4: Errors(128.0, 32.0), 8: Errors(128.0, 32.0)}
"""The same for the reference itself, which has no other to be compared with."""
FLOOR[1], CEILING[1] = FLOOR[2], CEILING[2]

CANCELLATION = 1 / 4
"""The magnitude of a gradient counts as at least this share of the largest gradient of its case: where a sum cancels
(the gradient of one sink, or of a query with one key, which is 0), rounding is as large as the terms, not as the sum.
"""

MEAN_OF = 16
"""Entries from which the root mean square is checked, too; the mean of fewer errors is no steadier than the largest of
them.
"""

_PIECE = 1 << 16

NONE, INFINITE = Errors(0.0, 0.0), Errors(math.inf, math.inf)
NOTHING = Errors(-1.0, -1.0)
"""The bound where the reference itself is wrong: no error is within it."""


def errors(got: np.ndarray, true: np.ndarray) -> Errors:
    """The errors of the entries that are finite in `true`; infinite where the others, a shape or an integer differ, or
    an entry is NaN.
    """
    if got.shape != true.shape:
        return INFINITE
    if not jnp.issubdtype(got.dtype, jnp.floating):
        return NONE if np.array_equal(got, true) else INFINITE
    return _size(_differences(got, true))


def _differences(got: np.ndarray, true: np.ndarray) -> Iterator[np.ndarray]:
    """Of the entries that are finite in `true`; an infinite one where something cannot be compared."""
    for ours, right in zip(_pieces(got), _pieces(true), strict=True):
        finite = np.isfinite(right)
        same = finite.all() or np.array_equal(ours[~finite], right[~finite])
        difference = ours[finite] - right[finite]
        yield difference if same and np.isfinite(difference).all() else np.array([np.inf])


def magnitude(true: np.ndarray) -> Errors:
    """Largest and root-mean-square magnitude of the finite entries."""
    return _size(part[np.isfinite(part)] for part in _pieces(true))


def _pieces(x: np.ndarray) -> Iterator[np.ndarray]:
    """The entries in float64, as many at once as a cache holds: an array can have a hundred million."""
    flat = np.asarray(x).reshape(-1)
    return (flat[i : i + _PIECE].astype(np.float64) for i in range(0, flat.size, _PIECE))


def _size(parts: Iterable[np.ndarray]) -> Errors:
    """Largest and root-mean-square magnitude of the entries of all parts."""
    largest, squares, count = 0.0, 0.0, 0
    for part in parts:
        if part.size:
            largest = max(largest, float(np.abs(part).max()))
            squares, count = squares + float(np.square(part).sum()), count + part.size
    return Errors(largest, math.sqrt(squares / count)) if count else NONE


def largest_of(sizes: list[Errors]) -> Errors:
    """The largest of the magnitudes of a case's gradients: the `group` of each."""
    return Errors(max((s.largest for s in sizes), default=0.0), max((s.rms for s in sizes), default=0.0))


def bound(
    dtype: DTypeLike, true: np.ndarray, reference: np.ndarray | None, group: Errors = NONE, unit: float = 0.0
) -> Errors:
    """The errors that are allowed: twice the reference's and a floor; for the reference itself (None) a ceiling.

    Args:
      dtype: the result's dtype.
      true: the result in float64.
      reference: the reference's result in its own dtype; None where the reference is what is checked.
      group: `largest_of` the gradients of its case, for a gradient.
      unit: least relative rounding unit to allow for, where an implementation has a reason to be coarser than its
        dtypes.
    """
    if not jnp.issubdtype(dtype, jnp.floating):
        return NONE
    unit, result_size = max(unit, float(jnp.finfo(dtype).eps)), magnitude(true)
    size = Errors(
        max(result_size.largest, CANCELLATION * group.largest), max(result_size.rms, CANCELLATION * group.largest)
    )
    units = (CEILING if reference is None else FLOOR)[np.dtype(dtype).itemsize]
    theirs = NONE if reference is None else errors(reference, true)
    if math.isinf(theirs.largest):
        return NOTHING
    return Errors(
        2 * theirs.largest + units.largest * unit * size.largest, 2 * theirs.rms + units.rms * unit * size.rms
    )


def wrong(got: np.ndarray, true: np.ndarray, allowed: Errors, ours: Errors | None = None) -> str | None:
    """What is wrong with a result, in words; None if its errors (`ours`, where they are known) are within `allowed`."""
    ours = ours or errors(got, true)
    if ours.largest > allowed.largest:
        nan = jnp.issubdtype(got.dtype, jnp.floating) and np.isnan(got.astype(np.float64)).any()
        return ("NaN; " if nan else "") + f"largest error {ours.largest:.3g}, allowed {allowed.largest:.3g}"
    if true.size >= MEAN_OF and ours.rms > allowed.rms:
        return f"root-mean-square error {ours.rms:.3g}, allowed {allowed.rms:.3g}"
    return None
