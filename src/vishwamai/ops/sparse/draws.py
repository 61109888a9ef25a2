"""Random calls of block-sparse products: shapes at the edges of tiles, mixed dtypes, options in any combination."""

from __future__ import annotations

import numpy as np

from vishwamai.core.cases import ArrayInit, Case
from vishwamai.core.draws import Sizes
from vishwamai.ops.sparse.api import block_sparse_matmul


def draw(d: Sizes) -> Case:
    """A case that calls the op in any legal way."""
    block = tuple(d.choose((128, 8, 128, 3, 16, 128, 32, 100, 128, 256)) for _ in range(2))
    mask = d.rng().random((d.choose((1, 2, 3, 5)), d.choose((1, 2, 3, 5)))) < d.choose((0.2, 0.5, 1.0))
    coordinates = np.argwhere(mask).astype(np.int32)
    if len(coordinates) and d.flag(3):
        coordinates = d.rng().permutation(
            np.concatenate([coordinates, coordinates[:1]])
        )  # in any order, and one place twice
    transpose = d.flag()
    shape = mask.shape[0] * block[0], mask.shape[1] * block[1]
    batch = d.choose(((), (d.size(),), (2, d.size(65))))
    dtype = d.dtype()
    arrays = {
        "dense": ArrayInit((*batch, shape[1 if transpose else 0]), dtype),
        "values": ArrayInit((len(coordinates), *block), dtype, scale=0.1),
    }
    options = {"indices": coordinates, "shape": shape, "transpose": transpose} | d.precision(dtype)
    return Case("", "block_sparse_matmul", block_sparse_matmul, arrays, options)
