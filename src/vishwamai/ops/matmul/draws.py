"""Random calls of matrix products: shapes at the edges of tiles, mixed dtypes, options in any combination."""

from __future__ import annotations

from typing import Any

import numpy as np

from vishwamai.core.activations import ACTIVATIONS
from vishwamai.core.cases import ArrayInit, Case
from vishwamai.core.draws import FLOATS, Sizes
from vishwamai.ops.matmul.api import gemm
from vishwamai.ops.matmul.cases import quantized_gemm


def draw(d: Sizes) -> Case:
    """A case that calls the op in any legal way."""
    return quantized(d) if d.flag(4) else dense(d)


def dense(d: Sizes) -> Case:
    m, n, k = d.size(), d.size(), d.size()
    dtype = d.choose((*FLOATS, "float32", "bfloat16", "int8", "float8_e4m3fn", "float8_e5m2"))
    b_dtype = d.choose(
        (dtype,) * 5 + {"bfloat16": ("float32", "int8", "float8_e4m3fn"), "float32": ("bfloat16",)}.get(dtype, (dtype,))
    )
    ta, tb = d.flag(3), d.flag(3)
    batch = tuple(d.choose((1, 2, 3)) for _ in range(d.choose((0, 0, 1, 2))))

    def batch_axes() -> tuple[int, ...]:
        return d.choose((batch, batch, (), batch[1:], tuple(1 if d.flag() else e for e in batch)))

    def matrix(shape: tuple[int, ...], dtype: str, scale: float) -> ArrayInit:
        narrow = dtype in ("int8", "float8_e4m3fn", "float8_e5m2")
        return ArrayInit(shape, dtype, "integers") if narrow else ArrayInit(shape, dtype, scale=scale)

    arrays = {
        "a": matrix((*batch_axes(), *((k, m) if ta else (m, k))), dtype, 1.0),
        "b": matrix((*batch_axes(), *((n, k) if tb else (k, n))), b_dtype, k**-0.5),
    }
    full = np.broadcast_shapes(arrays["a"].shape[:-2], arrays["b"].shape[:-2])
    vector = dtype if dtype in FLOATS else "float32"
    if d.flag(3):
        arrays["bias"] = ArrayInit((*(full if d.flag() else ()), n), vector)
    for name, extent in (("scale_a", m), ("scale_b", n)):
        if d.flag(4):
            shape = d.choose(((), (extent,), (extent,), (*full, extent)))
            arrays[name] = ArrayInit(shape, "float32", "positive")
    options: dict[str, Any] = {"transpose_a": ta, "transpose_b": tb} | d.precision(dtype)
    if d.flag(3):
        options["activation"] = d.choose((None, *ACTIVATIONS))
    if dtype != "int8" and b_dtype != "int8" and d.flag(4):
        options["out_dtype"] = d.choose(("float32", "bfloat16"))
    if dtype == "int8" and options.get("activation") and not {"scale_a", "scale_b"} & set(arrays):
        arrays["scale_b"] = ArrayInit((n,), "float32", "positive")
    return Case("", "gemm", gemm, arrays, options)


def quantized(d: Sizes) -> Case:
    m, n, k = d.size(), d.size(), d.size()
    format = d.choose(("int8", "int4", "fp8_e4m3", "fp8_e5m2", "mxfp8_e4m3", "mxfp8_e5m2", "mxfp4", "fp4_e2m1"))
    mx = format.startswith("mx")
    block = 32 if mx else d.choose((None, 16, 32, 64, 128))
    groups = 1 if block is None else -(-k // block)
    tb = d.flag(3)
    kind: tuple[str, str] = ("int8", "integers") if mx else ("float32", "positive")
    arrays = {
        "weight": ArrayInit((n, k) if tb else (k, n), "int8", "integers"),
        "scales": ArrayInit((n, groups) if tb else (groups, n), *kind),
    }
    if d.flag(4):
        arrays = {"a": ArrayInit((m, k), "int8", "integers"), **arrays, "scales_of_a": ArrayInit((m, groups), *kind)}
    else:
        arrays = {"a": ArrayInit((m, k), d.choose(("float32", "bfloat16", "bfloat16"))), **arrays}
    options = {"format": format, "block_size": block, "transpose_b": tb}
    if d.flag(4):
        options["activation"] = d.choose((None, *ACTIVATIONS))
    return Case("", "gemm", quantized_gemm, arrays, options)
