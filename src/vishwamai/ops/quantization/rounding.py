"""Scales of a block, and rounding to the grid of a format: to the nearest, or stochastically.

Stochastic rounding takes the upper neighbour with the probability that makes the mean right (Gupta et al., "Deep Learning with Limited Numerical
Precision", ICML 2015). The neighbours of a float lie `2^(max(e, e_min) - m)` apart, where e is its exponent and m counts the mantissa's bits.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from vishwamai.core.qtensor import Format


def grouped(x: Any, axis: int | None, block_size: int | None) -> tuple[Any, int | None]:
    """x with the numbers that share a scale along one axis, and that axis; zeros fill the last block. None stands for all axes."""
    if block_size is None or axis is None:
        return x, axis
    size = x.shape[axis]
    blocks = -(-size // block_size)
    at = axis % x.ndim
    padding = [(0, 0)] * x.ndim
    padding[at] = (0, blocks * block_size - size)
    shape = (*x.shape[:at], blocks, block_size, *x.shape[at + 1 :])
    return jnp.pad(x, padding).reshape(shape), at + 1


def magnitude(x: Any, axis: int | None, method: str, percentile: float) -> Any:
    """What the largest number of the format is to stand for: the largest |x|, or a percentile of it; the axis is kept as 1."""
    size = jnp.abs(x)
    if method == "absmax" or x.size == 0:
        return jnp.max(size, axis=axis, keepdims=axis is not None, initial=0)
    return jnp.percentile(size, percentile, axis=axis, keepdims=axis is not None)


def scale_of(size: Any, form: Format) -> Any:
    """The scale for numbers up to `size`, in size's dtype, never 0.

    An MX scale is 2^(floor(log2 size) - floor(log2 largest)), as section 6.3 of its specification has it, so the largest numbers of a block may saturate.
    """
    if not form.power_of_two:
        return jnp.where(size == 0, 1, size / form.largest)
    _, exponent = jnp.frexp(size)  # size = mantissa * 2^exponent, mantissa in [1/2, 1)
    _, largest = jnp.frexp(jnp.asarray(form.largest, size.dtype))
    power = jnp.clip(exponent - largest, -126, 127)  # -127 would be subnormal in float32
    # Not finite: NaN, which e8m0 has, and infinity, which it has not.
    return jnp.where(jnp.isfinite(size), jnp.where(size == 0, 1, jnp.ldexp(jnp.ones_like(size), power)), jnp.nan)


def stored_scale(scale: Any, form: Format) -> Any:
    """The scale as a `QTensor` holds it."""
    if not form.power_of_two:
        return scale
    _, exponent = jnp.frexp(scale)
    return jnp.where(jnp.isnan(scale), 255, exponent - 1 + 127).astype(jnp.uint8)


def to_grid(y: Any, form: Format, rounding: str, key: Any) -> Any:
    """y, already divided by its scale, in the format's dtype; what is larger than the largest number saturates, NaN (whose block has the scale NaN) becomes 0."""
    quantum: Any = 1
    if jnp.issubdtype(form.dtype, jnp.floating):
        info = jnp.finfo(form.dtype)
        _, exponent = jnp.frexp(y)
        quantum = jnp.ldexp(jnp.ones_like(y), jnp.maximum(exponent - 1, int(info.minexp)) - int(info.nmant))
    steps = y / quantum
    if rounding == "nearest":
        steps = jnp.round(steps)
    else:
        steps = jnp.floor(steps + jax.random.uniform(key, y.shape, steps.dtype))
    rounded = jnp.clip(steps * quantum, -form.largest, form.largest)
    return jnp.where(jnp.isnan(rounded), 0, rounded).astype(form.dtype)
