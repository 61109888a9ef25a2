"""Where queries stand among the keys, and which keys exist, as operands: `q_offset`, `kv_lens` and `kv_starts`.

An offset that is an int belongs to the static mask. One that is an array becomes the position of every row. Lengths and
starts of the keys become segment ids: a key outside of them is of a segment that no query is of.
"""

from __future__ import annotations

import functools
import numbers
from typing import NoReturn

import jax.numpy as jnp
import numpy as np

from vishwamai.core.errors import ShapeError
from vishwamai.core.spec import as_array
from vishwamai.core.types import AnyArray
from vishwamai.core.value_checks import check_values

MOST = 1 << 30
"""Offsets and positions are smaller than this, so that sums of two stay within int32."""
NOWHERE = -(1 << 31)
"""The segment of keys that do not exist."""


def _fail(function: str, text: str) -> NoReturn:
    raise ShapeError(f"{function}: {text}")


def static_offset(function: str, q_offset: AnyArray) -> int | None:
    """`q_offset` as an int, or None where it is an array or absent.

    Raises:
      ShapeError: it is too large.
    """
    if isinstance(q_offset, bool) or not isinstance(q_offset, numbers.Integral):
        return None
    if abs(int(q_offset)) >= MOST:
        _fail(function, f"`q_offset` is {q_offset}; pass a position between -2**30 and 2**30.")
    return int(q_offset)


def row_positions(function: str, q_offset: AnyArray, batch: int, q_len: int) -> AnyArray:
    """int32 `[batch or 1, q_len]`: the key that every row stands at.

    Args:
      q_offset: an array of integers: `[]` or `[batch or 1]`, where the first row stands; `[batch or 1, q_len]`, where
        every row does.

    Raises:
      ShapeError: it is something else, or a known value is too large.
    """
    offset = _integers(function, "q_offset", q_offset)
    check_offset_shape(function, offset.shape, batch, q_len)
    check_values(functools.partial(check_offsets, function, q_len), q_offset)
    return rows_at(offset.astype(jnp.int32), jnp.arange(q_len, dtype=jnp.int32))


def check_offset_shape(function: str, shape: tuple[int, ...], batch: int, q_len: int) -> None:
    """Raises ShapeError where an array of such a shape does not say where the rows stand."""
    if len(shape) > 2 or (shape and shape[0] not in (1, batch)) or shape[1:] not in ((), (q_len,)):
        _fail(
            function,
            f"`q_offset` has shape {shape}, but there are {batch} batch elements of {q_len} queries; pass an int, or "
            f"integers of shape (), ({batch},) or ({batch}, {q_len}).",
        )


def rows_at(offset: AnyArray, rows: AnyArray) -> AnyArray:
    """`row_positions` of int32 arrays of any framework; `rows` counts from 0."""
    return offset if offset.ndim == 2 else offset.reshape(-1, 1) + rows


def check_offsets(function: str, q_len: int, values: np.ndarray) -> None:
    """Raises ShapeError where a position is too large."""
    _check_range(function, "q_offset", 1 - MOST, MOST - 1 - q_len, values)


def lengths(function: str, name: str, x: AnyArray, batch: int, most: int) -> AnyArray:
    """int32 `[]` or `[batch or 1]`: numbers of keys, from 0 to `most`.

    Raises:
      ShapeError: it is something else, or a known value is out of range.
    """
    lens = _integers(function, name, x)
    check_bound_shape(function, name, lens.shape, batch)
    check_values(functools.partial(check_bounds, function, name, most), x)
    return lens.astype(jnp.int32)


def check_bound_shape(function: str, name: str, shape: tuple[int, ...], batch: int) -> None:
    """Raises ShapeError where an array of such a shape is not a number of keys for each batch element."""
    if shape not in ((), (1,), (batch,)):
        _fail(
            function,
            f"`{name}` has shape {shape}, but there are {batch} batch elements; pass integers of shape () or "
            f"({batch},).",
        )


def check_bounds(function: str, name: str, most: int, values: np.ndarray) -> None:
    """Raises ShapeError where a number of keys is out of range."""
    _check_range(function, name, 0, most, values)


def existing_keys(
    function: str,
    segment_ids: tuple[AnyArray, AnyArray],
    kv_lens: AnyArray,
    kv_starts: AnyArray,
    batch: int,
    q_len: int,
    kv_len: int,
) -> tuple[AnyArray, AnyArray]:
    """(q_ids, kv_ids), by which a query sees no key before `kv_starts` or from `kv_lens` on.

    Args:
      segment_ids: the caller's, both None where there are none.
      kv_lens, kv_starts: integers `[]` or `[batch or 1]`, or None.

    Raises:
      ShapeError: an argument has another shape, or a known value is out of range.
    """
    lens, starts = (
        None if x is None else lengths(function, name, x, batch, kv_len)
        for name, x in (("kv_lens", kv_lens), ("kv_starts", kv_starts))
    )
    exists = between(jnp.arange(kv_len, dtype=jnp.int32), lens, starts)
    q_ids, kv_ids = segment_ids
    if kv_ids is None:
        return jnp.zeros((1, q_len), jnp.int32), jnp.where(exists, 0, NOWHERE)
    check_values(functools.partial(check_segments, function), q_ids)
    return q_ids, jnp.where(exists, kv_ids.astype(jnp.int32), NOWHERE)


def between(columns: AnyArray, lens: AnyArray, starts: AnyArray) -> AnyArray:
    """Which keys exist, `[batch or 1, kv_len]`, of arrays of any framework, of which one may be None."""
    inside = [] if lens is None else [columns < lens.reshape(-1, 1)]
    inside += [] if starts is None else [columns >= starts.reshape(-1, 1)]
    return inside[0] & inside[-1]


def check_segments(function: str, values: np.ndarray) -> None:
    """Raises ShapeError where the segment of a query is that of keys that do not exist."""
    _check_range(function, "segment_ids", NOWHERE + 1, -1 - NOWHERE, values)


def _integers(function: str, name: str, x: AnyArray) -> AnyArray:
    array = as_array(function, name, x)
    check_integers(function, name, array, bool(jnp.issubdtype(array.dtype, jnp.integer)))
    return array


def check_integers(function: str, name: str, x: AnyArray, integers: bool) -> None:
    """Raises ShapeError where an array of any framework does not hold `integers`."""
    if not integers:
        _fail(function, f"`{name}` has dtype {str(x.dtype).removeprefix('torch.')}; pass integers.")


def _check_range(function: str, name: str, least: int, most: int, values: np.ndarray) -> None:
    if values.size and (values.min() < least or values.max() > most):
        wrong = values.min() if values.min() < least else values.max()
        _fail(function, f"`{name}` holds {wrong}; pass values from {least} to {most}.")
