"""The arguments of the grouped product's Triton kernel, bundled in named tuples."""

from __future__ import annotations

from typing import NamedTuple


class Strides(NamedTuple):
    """Matrices, their scales, the sizes and the first rows from one batch entry to the next; 0 where all share them."""

    rhs: int
    scale: int
    sizes: int
    first: int


class Matrices(NamedTuple):
    """How the matrices of rhs lie, compile-time constants; see `gpu_kernels.rows_product`."""

    PLANES: int
    BLOCKS: int
    SIZE: int
    WIDTH: int
    FOUR: str | None
    TRANSPOSE: bool
