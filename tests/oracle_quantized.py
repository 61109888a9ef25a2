"""What a product with a quantized matrix means, in float64: every number is decoded by its format's definition, then the product is `oracle.gemm`."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import oracle

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
"""Every number of four bits with two of exponent and one of mantissa, by its code (OCP Microscaling Formats specification, table 5)."""


def decode(raw: Any, scales: Any, format: str, axis: int, block_size: int | None) -> Any:
    """The array that `vishwamai.ops.matmul.cases.quantized_gemm` makes of bytes and scales."""
    raw = np.asarray(raw).astype(np.int64)
    if format == "mxfp4":
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
    return oracle.gemm(a, b, transpose_b=transpose_b, **options)


ORACLES = {"quantized_gemm": quantized_gemm}
