"""Scales of a block, and rounding to the grid of a format: to the nearest, or stochastically. Arrays of JAX
and tensors of torch alike.

Stochastic rounding takes the upper neighbour with the probability that makes the mean right (Gupta et al., "Deep
Learning with Limited Numerical Precision", ICML 2015). The neighbours of a float lie `2^(max(e, e_min) - m)` apart,
where e is its exponent and m counts the mantissa's bits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import jax.numpy as jnp

from vishwamai.core.arrays import cast, namespace, padded
from vishwamai.core.qtensor import Format
from vishwamai.core.types import AnyArray, PyTree


def rounded(
    x: AnyArray,
    form: Format,
    axis: int | None,
    block_size: int | None,
    magnitude: Callable[[AnyArray, int | None], AnyArray],
    noise: Callable[[AnyArray], AnyArray] | None,
) -> tuple[AnyArray, AnyArray]:
    """(values, scales) of a `QTensor`.

    Args:
      x: float32 or float64.
      magnitude: `(blocks, axis) -> size`: what the largest number of the format is to stand for, of the numbers along
        that axis, which stays as 1; None stands for all axes.
      noise: `(blocks) -> uniform numbers` of [0, 1), for stochastic rounding; None rounds to the nearest.
    """
    blocks, along = grouped(x, axis, block_size)
    scale = _scale_of(magnitude(blocks, along), form)
    scaled = blocks / scale
    values = _to_grid(scaled, form, None if noise is None else noise(scaled))
    stored = _stored_scale(scale, form)
    return (values, stored) if along is None or block_size is None else _ungrouped(values, stored, x.shape, along)


def grouped(x: AnyArray, axis: int | None, block_size: int | None) -> tuple[AnyArray, int | None]:
    """x with the numbers that share a scale along one axis, and that axis; zeros fill the last block. None stands for
    all axes.
    """
    if block_size is None or axis is None:
        return x, axis
    size = x.shape[axis]
    block_size = min(block_size, max(1, size))  # a longer block holds only padding beyond that
    blocks = -(-size // block_size)
    axis_index = axis % x.ndim
    shape = (*x.shape[:axis_index], blocks, block_size, *x.shape[axis_index + 1 :])
    return padded(x, axis_index, blocks * block_size - size).reshape(shape), axis_index + 1


def _ungrouped(values: AnyArray, stored: AnyArray, shape: Sequence[int], along: int) -> tuple[PyTree, PyTree]:
    """(values, scales) in the shapes of a `QTensor`; `shape` is that of the array that was cut along `along`."""
    axis = along - 1
    merged = values.reshape(*shape[:axis], values.shape[axis] * values.shape[along], *shape[along:])
    return merged[(slice(None),) * axis + (slice(shape[axis]),)], stored.squeeze(along)


def magnitude(x: AnyArray, axis: int | None, method: str, percentile: float) -> AnyArray:
    """What the largest number of the format is to stand for: the largest |x|, or a percentile of it; the axis is kept
    as 1.
    """
    size = jnp.abs(x)
    if method == "absmax" or x.size == 0:
        return jnp.max(size, axis=axis, keepdims=axis is not None, initial=0)
    return jnp.percentile(size, percentile, axis=axis, keepdims=axis is not None)


def _scale_of(size: AnyArray, form: Format) -> AnyArray:
    """The scale for numbers up to `size`, in size's dtype, never 0.

    An MX scale is 2^(floor(log2 size) - floor(log2 largest)), as section 6.3 of its specification has it, so the
    largest numbers of a block may saturate.
    """
    xp = namespace(size)
    if not form.power_of_two:
        return xp.where(size == 0, 1, size / form.largest)
    _, exponent = xp.frexp(size)  # size = mantissa * 2^exponent, mantissa in [1/2, 1)
    _, largest = math.frexp(form.largest)
    power = xp.clip(exponent - largest, -126, 127)  # -127 would be subnormal in float32
    # Not finite: NaN, which e8m0 has, and infinity, which it has not.
    return xp.where(xp.isfinite(size), xp.where(size == 0, 1, xp.ldexp(xp.ones_like(size), power)), xp.nan)


def _stored_scale(scale: AnyArray, form: Format) -> AnyArray:
    """The scale as a `QTensor` holds it."""
    if not form.power_of_two:
        return scale
    xp = namespace(scale)
    _, exponent = xp.frexp(scale)
    return cast(xp.where(xp.isnan(scale), 255, exponent - 1 + 127), jnp.uint8)


def _to_grid(y: AnyArray, form: Format, noise: AnyArray) -> AnyArray:
    """y, already divided by its scale, in the format's dtype; what is larger than the largest number saturates, NaN
    (whose block has the scale NaN) becomes 0.

    Args:
      noise: uniform numbers of [0, 1) like `y`, for stochastic rounding; None rounds to the nearest.
    """
    xp, quantum = namespace(y), 1
    if jnp.issubdtype(form.dtype, jnp.floating):
        info = jnp.finfo(form.dtype)
        _, exponent = xp.frexp(y)
        quantum = xp.ldexp(xp.ones_like(y), xp.clip(exponent - 1, int(info.minexp), None) - int(info.nmant))
    steps = y / quantum
    steps = xp.round(steps) if noise is None else xp.floor(steps + noise)
    rounded = xp.clip(steps * quantum, -form.largest, form.largest)
    return cast(xp.where(xp.isnan(rounded), 0, rounded), form.dtype)
