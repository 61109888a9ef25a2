"""The oracle of what is sparse in blocks: the dense matrix, or the dense mask, written out."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np

import oracle


def block_sparse_matmul(
    dense: Any, values: Any, *, indices: Any, shape: tuple[int, int], transpose: bool = False, **how: Any
) -> Any:
    """`dense @ S` with the whole S."""
    del how
    if isinstance(indices, tuple):
        starts, columns = indices
        rows = [row for row in range(len(starts) - 1) for _ in range(starts[row], starts[row + 1])]
        indices = list(zip(rows, columns, strict=True))
    _, height, width = values.shape
    matrix = jnp.zeros(shape, values.dtype)  # as wide as the caller has made the values
    for n, (row, column) in enumerate(indices):
        matrix = matrix.at[row * height : (row + 1) * height, column * width : (column + 1) * width].add(values[n])
    return dense @ (matrix.T if transpose else matrix)


def visible_blocks(block_mask: Any, block_size: Any, rows: int, columns: int) -> np.ndarray:
    """The mask of every position, bool `[heads or 1, rows, columns]`."""
    if callable(block_mask):
        return np.array([[[bool(block_mask(i, j)) for j in range(columns)] for i in range(rows)]])
    height, width = (block_size, block_size) if isinstance(block_size, int) else block_size
    mask = np.asarray(block_mask)
    mask = mask if mask.ndim == 3 else mask[None]
    i, j = np.arange(rows) // height, np.arange(columns) // width
    return mask[:, i][:, :, j]


def block_sparse_attention(
    query: Any, key: Any, value: Any, *, block_mask: Any, block_size: Any, **options: Any
) -> Any:
    """Attention under the mask written out, beside the caller's own."""
    axis = 1 if options.get("layout") == "bshd" else 2
    seen = visible_blocks(block_mask, block_size, query.shape[axis], key.shape[axis])[None]
    mask = options.pop("mask", None)
    mask = seen if mask is None else seen & np.asarray(mask)
    return oracle.flash_attention(query, key, value, options.pop("bias", None), mask, **options)


ORACLES = {"block_sparse_matmul": block_sparse_matmul, "block_sparse_attention": block_sparse_attention}
