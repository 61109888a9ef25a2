"""Sums of partial results, always in the same order: what the programs of a kernel leave for a parameter that all of
them share.
"""

from __future__ import annotations

from typing import Any

from vishwamai.core import gpu
from vishwamai.core.types import AnyArray

SUM_ROWS = gpu.TritonKernel("vishwamai.core.gpu_kernels", "sum_rows")


def sum_to(partial: Any, shape: tuple[int, ...], dtype: object) -> AnyArray:
    """Partial rows `[groups, count, size]`, float32, summed to `[groups or 1, size or 1]`."""
    groups, count, size = partial.shape
    if shape[1] != size:
        rows = _sum(partial, (shape[0], size), "float32")
        return _sum(rows.reshape(shape[0], size, 1), tuple(shape), dtype)
    if shape[0] != groups:
        partial = partial.reshape(shape[0], groups * count, size)
    return _sum(partial, tuple(shape), dtype)


def _sum(partial: Any, shape: tuple[int, ...], dtype: object) -> AnyArray:
    groups, size = shape
    columns = 64 if size > 1 else 1
    (total,) = gpu.launch(
        SUM_ROWS,
        (gpu.cdiv(size, columns), groups),
        dict(partial_ptr=partial),
        dict(out_ptr=gpu.result(shape, dtype)),
        count=partial.shape[0] * partial.shape[1] // groups,
        features=size,
        ROWS=32 if size > 1 else 1024,
        COLUMNS=columns,
    )
    return total
