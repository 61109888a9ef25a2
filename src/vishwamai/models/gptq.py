"""Rounding with error feedback: the inputs that are rounded later make up for the errors of the earlier ones.

E. Frantar et al., "GPTQ: Accurate Post-Training Quantization for Generative Pre-trained Transformers" (2022). A weight
`[in, out]` whose inputs have the second moments H loses `trace(E^T H E)` by an error E. Once the first rows are
rounded, the best change of the rows after row i is `-error_i U[i, i+1:] / U[i, i]`, with U the upper Cholesky factor of
the inverse of H. The blocks of rows that share a scale are taken in the order of their moments, and so are the rows of
each block; a block's scale is searched once its turn comes.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np

from vishwamai.core.errors import ShapeError
from vishwamai.core.qtensor import FORMATS, ZERO_FORMATS, QTensor, of_zero_words
from vishwamai.ops.quantization.search import searched

if TYPE_CHECKING:
    from jaxtyping import Float

_DAMPING = 0.01
"""Part of the mean of H's diagonal that is added to it, so that few tokens do not make it singular."""


def gptq(
    weight: Float[np.ndarray, "K N"],
    moments: Float[np.ndarray, "K K"],
    format: str,
    block_size: int,
    scale_dtype: str = "float32",
) -> QTensor:
    """A weight rounded to int4, uint4 or int8 in blocks along its inputs, so that its product's error is small.

    Args:
      weight: float32 `[in, out]`.
      moments: mean of `x x^T` over the inputs of the product, `[in, in]`.
      format: "int4", "int8", or "uint4" with whole zero points.
      block_size: int, numbers along `in` that share a scale; it divides `in`.
      scale_dtype: name of the dtype whose numbers the scales are, although they are float32.

    >>> import numpy as np
    >>> rng = np.random.default_rng(0)
    >>> x, weight = rng.normal(size=(256, 8)) @ rng.normal(size=(8, 64)), rng.normal(size=(64, 16)).astype(np.float32)
    >>> def error(q):
    ...     return float(np.square(x @ (np.asarray(q.dequantize()) - weight)).mean())
    >>> bool(error(gptq(weight, x.T @ x / 256, "int4", 32)) < 0.2 * error(searched(weight, "int4", 32)))
    True
    """
    size = weight.shape[0]
    if size % block_size or moments.shape != (size, size):
        raise ShapeError(
            f"gptq: `weight` has shape {weight.shape}, `moments` {moments.shape}, and `block_size` is {block_size}; "
            "pass moments [in, in] of the weight's inputs, whose number the blocks divide."
        )
    if not np.isfinite(moments).all():
        raise ShapeError("gptq: `moments` has values that are not finite; the model overflows on the calibration text.")
    damped = moments.astype(np.float64)
    mean = np.trace(damped) / size
    damped[np.diag_indices(size)] += _DAMPING * mean if mean > 0 else 1.0
    diagonal = np.diagonal(damped).reshape(-1, block_size)
    blocks = np.argsort(-diagonal.sum(axis=1), kind="stable")
    order = (np.argsort(-diagonal, axis=1, kind="stable") + block_size * np.arange(len(blocks))[:, None])[blocks]
    order = order.reshape(-1)
    factor, importance = _factor(damped[np.ix_(order, order)]), np.diagonal(damped)[order].astype(np.float32)
    rest = np.array(weight[order], np.float32)
    form = (FORMATS | ZERO_FORMATS)[format]
    values, scales = np.empty(weight.shape, np.int8), np.empty((len(blocks), weight.shape[1]), form.scale_dtype)
    for block, start in zip(blocks, range(0, size, block_size)):
        end = start + block_size
        rows = slice(start, end)
        codes, scale, errors = _rounded_block(rest[rows], factor[rows, rows], importance[rows], format, scale_dtype)
        values[order[rows]], scales[block] = codes, scale
        rest[end:] -= factor[rows, end:].T @ np.asarray(errors)
    return QTensor(jnp.asarray(values, form.dtype), jnp.asarray(scales), format, -2, block_size)


def _factor(moments: np.ndarray) -> np.ndarray:
    """float32 U, upper triangular, with `U^T U` the inverse of the matrix: by the Cholesky factor of the matrix in
    reversed order, which is V, upper triangular, with `V V^T` the matrix.
    """
    upper = np.linalg.cholesky(moments[::-1, ::-1])[::-1, ::-1]
    return np.triu(np.linalg.inv(upper)).astype(np.float32)


@functools.partial(jax.jit, static_argnames=("format", "scale_dtype"))
def _rounded_block(
    x: jax.Array, factor: jax.Array, importance: jax.Array | None, format: str, scale_dtype: str
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Numbers `[size, out]`, scales or their words `[out]`, and errors over the factor's diagonal `[size, out]` of rows
    that share a scale, each of which corrects the rows after it.
    """
    scales = searched(x, format, x.shape[0], importance, scale_dtype=scale_dtype, zero_steps=1).scales[0]
    if format in ZERO_FORMATS:
        (scale, zero), low, high = of_zero_words(scales), 0.0, ZERO_FORMATS[format].largest
    else:
        scale, zero, low, high = scales, 0.0, -FORMATS[format].largest - 1, FORMATS[format].largest

    def row(i: jax.Array, state: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        x, values, errors = state
        value = jnp.clip(jnp.round(x[i] / scale + zero), low, high)
        value = jnp.where(jnp.isnan(value), 0, value)
        error = (x[i] - (value - zero) * scale) / factor[i, i]
        return x - factor[i][:, None] * error, values.at[i].set(value), errors.at[i].set(error)

    _, values, errors = jax.lax.fori_loop(0, x.shape[0], row, (x, jnp.zeros_like(x), jnp.zeros_like(x)))
    return values.astype(jnp.int8), scales, errors
