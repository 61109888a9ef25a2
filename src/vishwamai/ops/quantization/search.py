"""Rounding whose scales are searched: of several scales of each block, the one with the least squared error.

For one scale s the numbers are `q = clip(round(x / s))`, and of all scales the one that fits those numbers best is
`sum(w x q) / sum(w q q)`, as in llama.cpp's `make_qx_quants`. The scale may be negative, so that the block's largest
magnitude, of whatever sign, can become -8 of int4: one level more than 7 to each side.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from vishwamai.core.qtensor import FORMATS, QTensor
from vishwamai.ops.quantization.rounding import grouped

if TYPE_CHECKING:
    from jax import Array
    from jaxtyping import Float

_TRIALS = 25
_SPANS = {"int4": (0.74, 1.16), "int8": (0.96, 1.0)}
"""Trials place the largest magnitude at such multiples of the lowest level, evenly spaced."""


@functools.partial(jax.jit, static_argnames=("format", "block_size", "scale_dtype"))
def searched(
    x: Float[Array, "*lead K N"],
    format: str,
    block_size: int,
    importance: Float[Array, " K"] | None = None,
    scale_dtype: str = "float32",
) -> QTensor:
    """A weight rounded to int4 or int8 in blocks along its axis -2.

    Args:
      x: weight `[..., K, N]`.
      format: "int4" or "int8".
      block_size: int, numbers along K that share a scale.
      importance: `[K]`, weight of each row's squared error, such as the mean square of the activations that meet it;
        None weighs them alike.
      scale_dtype: name of the dtype whose numbers the scales are, although they are float32.

    >>> import jax.numpy as jnp
    >>> weight = searched(jnp.array([[8.0], [-7.0], [1.0], [3.0]]), "int4", 4)
    >>> weight.dequantize().ravel().tolist()  # exactly: -8 stands for 8, and the scale is -1
    [8.0, -7.0, 1.0, 3.0]
    """
    form = FORMATS[format]
    low, high = -form.largest - 1, form.largest
    blocks, along = grouped(x.astype(jnp.float32), -2, block_size)  # [..., blocks, size, N]
    assert along is not None
    weights = jnp.ones((), jnp.float32)
    if importance is not None:
        weights = grouped(importance.astype(jnp.float32)[:, None], -2, block_size)[0]  # [blocks, size, 1]
    largest = jnp.max(jnp.abs(blocks), axis=along, keepdims=True)
    most = jnp.where(jnp.max(blocks, axis=along, keepdims=True) == largest, largest, -largest)  # with its sign

    def fitted(inverse: Any) -> tuple[Any, Any]:
        """The best scale for the numbers that an inverse scale gives, and by how much it lessens the error."""
        q = jnp.clip(jnp.round(blocks * inverse), low, high)
        product = jnp.sum(weights * blocks * q, axis=along, keepdims=True)
        square = jnp.sum(weights * q * q, axis=along, keepdims=True)
        scale = jnp.where(square > 0, product / jnp.where(square > 0, square, 1), 0)
        return scale, product * scale

    def trial(i: Any, best: tuple[Any, Any]) -> tuple[Any, Any]:
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
    k = x.shape[-2]
    values = values.reshape(*x.shape[:-2], -1, x.shape[-1])[..., :k, :]
    return QTensor(values, scale.squeeze(along), format, -2, block_size)
