"""The arguments of the product's Triton kernel, bundled: named tuples that Python fills and the kernel reads.

Names in capitals are compile-time constants. Strides are in elements, 0 along an axis that is shared; pointers may be
None.
"""

from __future__ import annotations

from typing import NamedTuple

from vishwamai.core.types import AnyArray


class Vectors(NamedTuple):
    """The epilogue's bias `[groups, N]`, and the scales of the rows `[groups, M]` and of the columns `[groups, N]`."""

    bias_ptr: AnyArray
    scale_a_ptr: AnyArray
    scale_b_ptr: AnyArray
    bias_group: int
    scale_a_group: int
    scale_a_row: int
    scale_b_group: int
    scale_b_column: int


class Form(NamedTuple):
    """How the operands lie, and how many groups' products are added to one result; see `gpu_kernels.matmul`."""

    A_GROUPS: int
    B_GROUPS: int
    SUMMED: int
    TRANSPOSE_A: bool
    TRANSPOSE_B: bool


class Order(NamedTuple):
    """How the programs walk over the tiles.

    Attributes:
      PROGRAMS: count of programs.
      GROUP_M: rows of tiles that are walked column by column.
      SPLIT: bool, True for an epilogue by quarters of a tile.
    """

    PROGRAMS: int
    GROUP_M: int
    SPLIT: bool
