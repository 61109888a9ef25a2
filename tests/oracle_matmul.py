"""What a matrix product means, in float64; a quantized matrix is decoded number by number, by its format's
definition.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from oracle import ACTIVATIONS

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
"""Every number of four bits with two of exponent and one of mantissa, by its code (OCP Microscaling Formats
specification, table 5).
"""


def decode(raw: Any, scales: Any, format: str, axis: int, block_size: int | None) -> Any:
    """The array that `vishwamai.core.cases.qtensor_of_bytes` makes of bytes and scales."""
    raw = np.asarray(raw).astype(np.int64)
    if format in ("mxfp4", "fp4_e2m1"):
        values = E2M1[(raw >> 4) & 15]
    else:
        values = raw.astype(np.float64) if format == "int8" else (raw >> 4).astype(np.float64)
    factors = jax.lax.stop_gradient(jnp.asarray(scales))
    if format.startswith("mx"):
        factors = 2.0 ** np.floor(np.asarray(scales).astype(np.float64) / 32)
    if block_size is None:
        return values * factors
    size = values.shape[axis]
    return values * jnp.take(factors, np.arange(size) // block_size, axis=axis)


def gemm(
    a: Any,
    b: Any,
    *,
    bias: Any = None,
    activation: str | None = None,
    transpose_a: bool = False,
    transpose_b: bool = False,
    scale_a: Any = None,
    scale_b: Any = None,
    **how: Any,
) -> Any:
    """`activation(scale_a * scale_b * (a @ b) + bias)`; a scale is one number, or one per row of `a` (column of
    `b`).
    """
    del how  # precision and out_dtype round, and the oracle does not
    a, b = (jnp.asarray(x, jnp.float64) for x in (a, b))
    a = jnp.swapaxes(a, -1, -2) if transpose_a else a
    b = jnp.swapaxes(b, -1, -2) if transpose_b else b
    out = (
        (a[..., :, :, None] * b[..., None, :, :]).sum(-2) if a.shape[-1] < 8 else jnp.einsum("...mk,...kn->...mn", a, b)
    )
    if scale_a is not None:
        out = out * (scale_a[..., :, None] if np.ndim(scale_a) else scale_a)
    if scale_b is not None:
        out = out * (scale_b[..., None, :] if np.ndim(scale_b) else scale_b)
    if bias is not None:
        out = out + (bias[..., None, :] if np.ndim(bias) > 1 else bias)
    return ACTIVATIONS[activation](out)


def quantized_gemm(
    a: Any,
    weight: Any,
    scales: Any,
    *,
    format: str,
    block_size: int | None = None,
    transpose_b: bool = False,
    scales_of_a: Any = None,
    **options: Any,
) -> Any:
    if scales_of_a is not None:
        a = decode(a, scales_of_a, format, -1, block_size)
    b = decode(weight, scales, format, -1 if transpose_b else -2, block_size)
    return gemm(a, b, transpose_b=transpose_b, **options)
