"""Rounding to a `CodeFormat`: a scale for each block of K, a zero point if the format has one, the nearest level."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from vishwamai.core.errors import ShapeError
from vishwamai.core.qtensor import expand, scale_values
from vishwamai.core.quantized.code_tensor import SCALES, CodeFormat, CodeTensor, planes
from vishwamai.core.types import AnyArray

_DEFAULTS = {"block_size": None, "scale": "absmax", "rounding": "nearest", "key": None}


def encoded(x: AnyArray, form: CodeFormat, axis: int | None, options: dict[str, object]) -> CodeTensor:
    """`quantize` to a `CodeFormat`; `options` are its other arguments.

    Raises:
      ShapeError: `x` is not a floating-point weight, scales are not to be shared along K, or an option is set that the
        format states itself.
    """
    if x.ndim < 2 or not jnp.issubdtype(x.dtype, jnp.floating):
        raise ShapeError(
            f"quantize: `x` is {x.dtype.name} of shape {x.shape}; with a CodeFormat pass floating-point weights "
            "[..., K, N]."
        )
    if axis is None or axis not in (-2, x.ndim - 2):
        raise ShapeError(f"quantize: `axis` is {axis}; with a CodeFormat pass axis=-2, along which K lies.")
    for name, default in _DEFAULTS.items():
        if options[name] != default:
            raise ShapeError(
                f"quantize: `{name}` is {options[name]!r}; leave it out with a CodeFormat, whose fields say how."
            )
    codes, scales, zeros = _encode(x.astype(jnp.float32), form)
    return CodeTensor(codes, scales, zeros, (x.shape[-2], x.shape[-1]), form)


@functools.partial(jax.jit, static_argnums=1)
def _encode(x: AnyArray, form: CodeFormat) -> tuple[AnyArray, AnyArray, AnyArray]:
    *lead, k, n = x.shape
    size = min(form.block_size or max(k, 1), max(k, 1))
    fill = ((0, 0),) * len(lead) + ((0, -k % size), (0, 0))
    blocks = jnp.pad(x, fill, mode="edge" if k else "constant").reshape(*lead, -1, size, n)
    levels = np.asarray(form.levels, np.float32)
    low, high = float(levels.min()), float(levels.max())
    if form.zero_point:
        least, most = blocks.min(-2, initial=0), blocks.max(-2, initial=0)
        exact = (most - least) / (high - low)
    else:
        exact = jnp.max(jnp.abs(blocks), -2, initial=0) / _largest(form, low, high)
    scales = _stored(jnp.where(exact == 0, 1, exact), form)
    wide = scale_values(scales, jnp.float32)
    zeros = None
    if form.zero_point:
        zeros = _nearest(low - blocks.min(-2, initial=0) / wide, levels)
    y = x / expand(wide, -2, size, k)
    if zeros is not None:
        y = y + expand(jnp.asarray(levels)[zeros], -2, size, k)
    return planes(_nearest(y, levels), form.bits), scales, zeros


def _largest(form: CodeFormat, low: float, high: float) -> float:
    """The level that the largest magnitude of a block becomes: of integers 2^(bits - 1) - 1, which has its opposite."""
    return high if form.codebook is None else max(abs(low), abs(high))


def _stored(scale: Any, form: CodeFormat) -> Any:
    """The scale as it is stored, NaN where it is not finite; a power of two is the next above, so that nothing
    saturates.
    """
    if form.scale_dtype != "e8m0":
        dtype = jnp.dtype(SCALES[form.scale_dtype])
        legal = jnp.clip(scale, float(jnp.finfo(dtype).tiny), float(jnp.finfo(dtype).max))
        return jnp.where(jnp.isfinite(scale), legal, jnp.nan).astype(dtype)
    mantissa, exponent = jnp.frexp(scale)  # scale = mantissa * 2^exponent, mantissa in [1/2, 1)
    power = jnp.clip(exponent - (mantissa == 0.5), -126, 127)
    return jnp.where(jnp.isfinite(scale), power + 127, 255).astype(jnp.uint8)


def _nearest(y: AnyArray, levels: np.ndarray) -> jax.Array:
    """The code of the nearest level to each number, the smaller of two as near; NaN has some code."""
    order = np.argsort(levels)
    ordered = levels[order].astype(np.float64)
    if np.array_equal(ordered, np.arange(len(levels)) + ordered[0]):
        place = jnp.clip(jnp.ceil(jnp.nan_to_num(y) - 0.5 - float(ordered[0])), 0, len(levels) - 1).astype(jnp.uint8)
    else:
        middles = ((ordered[1:] + ordered[:-1]) / 2).astype(np.float32)
        place = jnp.zeros(y.shape, jnp.uint8)
        for middle in middles if len(middles) < 16 else ():
            place = place + (y > middle).astype(jnp.uint8)
        if len(middles) >= 16:
            place = jnp.searchsorted(jnp.asarray(middles), y).astype(jnp.uint8)
    if np.array_equal(order, np.arange(len(order))):
        return place
    return jnp.asarray(order.astype(np.uint8))[place]
