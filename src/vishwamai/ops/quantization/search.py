"""Rounding whose scales are searched: of several scales of each block, the one with the least squared error.

For one scale s the numbers are `q = clip(round(x / s))`, and of all scales the one that fits those numbers best is
`sum(w x q) / sum(w q q)`, as in llama.cpp's `make_qx_quants`. The scale may be negative, so that the block's largest
magnitude, of whatever sign, can become -8 of int4: one level more than 7 to each side.

uint4 has a zero point too. Its trials are ranges around that of the block. For the numbers `q` of a trial, the scale
and the zero point that fit best solve a least-squares problem of two unknowns (as in llama.cpp's `make_qkx2_quants`).
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from vishwamai.core.qtensor import FORMATS, ZERO_FORMATS, ZERO_STEPS, QTensor, of_zero_words, zero_words
from vishwamai.ops.quantization.rounding import grouped

if TYPE_CHECKING:
    from jax import Array
    from jaxtyping import Float

_TRIALS = 25
_SPANS = {"int4": (0.74, 1.16), "int8": (0.96, 1.0)}
"""Trials place the largest magnitude at such multiples of the lowest level, evenly spaced."""

_RANGE_TRIALS = 13
_RANGES = (0.76, 1.06)
"""Trials of uint4 spread the 16 levels over such multiples of a block's range, evenly spaced."""


@functools.partial(jax.jit, static_argnames=("format", "block_size", "scale_dtype", "zero_steps"))
def searched(
    x: Float[Array, "*lead K N"],
    format: str,
    block_size: int,
    importance: Float[Array, " K"] | None = None,
    scale_dtype: str = "float32",
    zero_steps: int = ZERO_STEPS,
) -> QTensor:
    """A weight rounded to int4, uint4 or int8 in blocks along its axis -2.

    Args:
      x: weight `[..., K, N]`.
      format: "int4", "uint4" or "int8".
      block_size: int, numbers along K that share a scale.
      importance: `[K]`, weight of each row's squared error, such as the mean square of the activations that meet it;
        None weighs them alike.
      scale_dtype: name of the dtype whose numbers the scales are, although they are float32.
      zero_steps: int, zero points of uint4 are multiples of 1 / zero_steps; 1 for whole ones.

    >>> import jax.numpy as jnp
    >>> weight = searched(jnp.array([[8.0], [-7.0], [1.0], [3.0]]), "int4", 4)
    >>> weight.dequantize().ravel().tolist()  # exactly: -8 stands for 8, and the scale is -1
    [8.0, -7.0, 1.0, 3.0]
    """
    blocks, along = grouped(x.astype(jnp.float32), -2, block_size)  # [..., blocks, size, N]
    assert along is not None
    weights = jnp.ones((), jnp.float32)
    if importance is not None:
        weights = grouped(importance.astype(jnp.float32)[:, None], -2, block_size)[0]  # [blocks, size, 1]
    k = x.shape[-2]
    if format in ZERO_FORMATS:
        filled = jnp.arange(blocks.shape[along - 1] * blocks.shape[along]) < k
        present = filled.reshape(blocks.shape[along - 1], blocks.shape[along], 1)
        values, scales = _with_zeros(blocks, weights * present, present, along, scale_dtype, zero_steps)
        values = values.reshape(*x.shape[:-2], -1, x.shape[-1])[..., :k, :].astype(ZERO_FORMATS[format].dtype)
        return QTensor(values, scales.squeeze(along), format, -2, block_size)
    form = FORMATS[format]
    low, high = -form.largest - 1, form.largest
    largest = jnp.max(jnp.abs(blocks), axis=along, keepdims=True)
    most = jnp.where(jnp.max(blocks, axis=along, keepdims=True) == largest, largest, -largest)  # with its sign

    def fitted(inverse: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The best scale for the numbers that an inverse scale gives, and by how much it lessens the error."""
        q = jnp.clip(jnp.round(blocks * inverse), low, high)
        product = jnp.sum(weights * blocks * q, axis=along, keepdims=True)
        square = jnp.sum(weights * q * q, axis=along, keepdims=True)
        scale = jnp.where(square > 0, product / jnp.where(square > 0, square, 1), 0)
        return scale, product * scale

    def trial(i: jax.Array, best: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        first, last = _SPANS[format]
        level = low * (first + (last - first) * i / (_TRIALS - 1))
        scale, gain = fitted(jnp.where(most == 0, 0, level / jnp.where(most == 0, 1, most)))
        better = gain > best[1]
        return jnp.where(better, scale, best[0]), jnp.where(better, gain, best[1])

    nothing = jnp.zeros_like(most)
    scale, gain = jax.lax.fori_loop(0, _TRIALS, trial, (nothing, nothing - 1))
    again, more = fitted(jnp.where(scale == 0, 0, 1 / jnp.where(scale == 0, 1, scale)))
    scale = jnp.where(more > gain, again, scale)
    scale = jnp.where(scale == 0, 1, scale).astype(scale_dtype).astype(jnp.float32)
    scale = jnp.where(jnp.isfinite(largest), scale, jnp.nan)
    values = jnp.clip(jnp.round(blocks / scale), low, high)
    values = jnp.where(jnp.isnan(values), 0, values).astype(form.dtype)
    values = values.reshape(*x.shape[:-2], -1, x.shape[-1])[..., :k, :]
    return QTensor(values, scale.squeeze(along), format, -2, block_size)


def _with_zeros(blocks: Any, weights: Any, present: Any, along: int, dtype: str, steps: int) -> tuple[Any, Any]:
    """(values 0 to 15, `zero_words` of the scales) of `blocks`, whose numbers share a scale along one axis.

    Args:
      weights: factors of the squared errors, 0 of numbers that are not `present`.
      dtype, steps: arguments `scale_dtype` and `zero_steps` of `searched`.
    """
    levels = 15.0

    def total(terms: Any) -> Any:
        return jnp.sum(terms, axis=along, keepdims=True)

    def divided(a: jax.Array, b: jax.Array) -> jax.Array:
        return jnp.where(b > 0, a / jnp.where(b > 0, b, 1), 0)

    def numbers(scale: jax.Array, zero: Any) -> Any:
        return jnp.clip(jnp.round(divided(blocks, scale) + zero), 0, levels)

    least = jnp.min(jnp.where(present, blocks, 0), axis=along, keepdims=True, initial=0)  # a zero point stands for 0
    most = jnp.max(jnp.where(present, blocks, 0), axis=along, keepdims=True, initial=0)
    width = jnp.maximum(most - least, 1e-30)
    weight_sum, x_sum = total(weights * jnp.ones_like(blocks)), total(weights * blocks)

    def trial(i: Any, best: tuple[Any, Any, Any]) -> tuple[Any, Any, Any]:
        first, last = _RANGES
        scale = width * (first + (last - first) * i / (_RANGE_TRIALS - 1)) / levels
        q = numbers(scale, levels / 2 - (most + least) / (2 * scale))
        q_sum, q_square, q_x = total(weights * q), total(weights * q * q), total(weights * q * blocks)
        fitted = divided(weight_sum * q_x - x_sum * q_sum, weight_sum * q_square - q_sum * q_sum)
        scale = jnp.where(fitted > 0, fitted, scale)
        zero = (q_sum - x_sum / scale) / jnp.maximum(weight_sum, 1e-30)
        zero = jnp.clip(jnp.round(zero * steps), 0, levels * steps) / steps
        shifted = numbers(scale, zero) - zero
        product, square = total(weights * shifted * blocks), total(weights * shifted * shifted)
        scale = divided(product, square)
        gain = product * scale
        better = (gain > best[2]) & (scale > 0)
        return jax.tree.map(lambda new, old: jnp.where(better, new, old), (scale, zero, gain), best)

    nothing = jnp.zeros_like(width)
    scale, zero, _ = jax.lax.fori_loop(0, _RANGE_TRIALS, trial, (nothing, nothing, nothing - 1))
    scale = jnp.where(scale > 0, scale, 1).astype(dtype).astype(jnp.float32)
    scale = jnp.where(jnp.isfinite(least) & jnp.isfinite(most), scale, jnp.nan)
    words = zero_words(scale, zero)
    scale, zero = of_zero_words(words)
    values = numbers(scale, zero)
    return jnp.where(jnp.isnan(values), 0, values), words
