"""Random calls of grouped products: shapes at the edges of tiles, mixed dtypes, options in any combination."""

from __future__ import annotations

from typing import Any

import numpy as np

from vishwamai.core.cases import ArrayInit, Case
from vishwamai.core.draws import Sizes
from vishwamai.ops.moe.api import grouped_gemm


def draw(d: Sizes) -> Case:
    """A case that calls the op in any legal way."""
    rows, depth, columns, groups = d.size(), d.size(), d.size(), d.choose((1, 2, 3, 5, 9))
    batch = d.choose(((), (), (1,), (2,)))
    rng = d.rng()
    share = rng.dirichlet(np.full(groups, 0.5), batch) * rows * d.choose((1.0, 0.7, 1.0, 0.0))
    sizes = np.floor(share).astype(np.int32)
    dtype = d.dtype()
    held = d.choose((1, groups)) if d.flag(4) else groups
    arrays = {
        "lhs": ArrayInit((*batch, rows, depth), dtype),
        "rhs": ArrayInit((*batch, held, depth, columns), dtype, scale=depth**-0.5),
    }
    options: dict[str, Any] = {"group_sizes": sizes}
    if held < groups:
        options["group_offset"] = int(rng.integers(0, groups - held + 1))
    if d.flag(4):
        options["out_dtype"] = "float32"
    return Case("", "grouped_gemm", grouped_gemm, arrays, options)
