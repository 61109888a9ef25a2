"""Random calls of grouped products: shapes at the edges of tiles, mixed dtypes, options in any combination."""

from __future__ import annotations

from typing import Any

import numpy as np

from vishwamai.core.cases import ArrayInit, Case
from vishwamai.core.draws import Sizes
from vishwamai.ops.moe.api import grouped_gemm
from vishwamai.ops.moe.cases import quantized_grouped_gemm


def draw(d: Sizes) -> Case:
    """A case that calls the op in any legal way."""
    rows, depth, columns, groups = d.size(), d.size(), d.size(), d.choose((1, 2, 3, 5, 9))
    batch = d.choose(((), (), (1,), (2,)))
    rng = d.rng()
    share = rng.dirichlet(np.full(groups, 0.5), batch) * rows * d.choose((1.0, 0.7, 1.0, 0.0))
    sizes = np.floor(share).astype(np.int32)
    dtype = d.dtype()
    local = d.choose((1, groups)) if d.flag(4) else groups
    lhs, matrices = ArrayInit((*batch, rows, depth), dtype), (*batch, local, depth, columns)
    options: dict[str, Any] = {"group_sizes": sizes}
    if local < groups:
        options["group_offset"] = int(rng.integers(0, groups - local + 1))
    if d.flag(4):
        options["out_dtype"] = "float32"
    if d.flag(4):
        format = d.choose(("int8", "int4", "fp8_e4m3", "fp8_e5m2", "mxfp8_e4m3", "mxfp4", "fp4_e2m1"))
        mx = format.startswith("mx")
        block = 32 if mx else d.choose((None, 16, 32, 60, 128))
        blocks = 1 if block is None else -(-depth // block)
        kind: tuple[str, str] = ("int8", "integers") if mx else ("float32", "positive")
        arrays = {
            "lhs": lhs,
            "weight": ArrayInit(matrices, "int8", "integers"),
            "scales": ArrayInit((*batch, local, blocks, columns), *kind),
        }
        options |= {"format": format, "block_size": block}
        return Case("", "grouped_gemm", quantized_grouped_gemm, arrays, options)
    arrays = {"lhs": lhs, "rhs": ArrayInit(matrices, dtype, scale=depth**-0.5)}
    return Case("", "grouped_gemm", grouped_gemm, arrays, options)
