"""What a block-sparse product computes: operands, options and the factor rule; the checks of the caller's arguments."""

from __future__ import annotations

import dataclasses
import numbers
from collections.abc import Sequence
from typing import Annotated, Any, NamedTuple, NoReturn

import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from vishwamai.core.errors import ShapeError
from vishwamai.core.precision import accumulator_dtype
from vishwamai.core.shape_checks import check_float
from vishwamai.core.signature import Signature
from vishwamai.core.spec import ArraySpec, OpSpec, array_spec
from vishwamai.core.types import AnyArray


class Operands(NamedTuple):
    """Operands in the op's own layout; `groups` counts folded vmap axes."""

    dense: Annotated[AnyArray, "groups m k"]  # k: rows of the sparse matrix, or columns if transposed
    values: Annotated[AnyArray, "groups? blocks block_rows block_columns"]
    indices: Annotated[AnyArray, "groups? blocks _"]  # int32: block row, block column


class Outputs(NamedTuple):
    out: Annotated[AnyArray, "groups m n"]


@dataclasses.dataclass(frozen=True)
class SparseSpec(OpSpec):
    """`dense @ S`, or `dense @ S^T`, where S `[rows, columns]` is made of the blocks `values` at `indices`.

    Attributes:
      rows, columns: sizes of S; multiples of the block's.
      transpose: multiply by S^T.
      precision: mode of float32 products; see `core.precision`.
    """

    rows: int = 0
    columns: int = 0
    transpose: bool = False
    precision: str = "default"

    @property
    def groups(self) -> int:
        return self.operands.dense.shape[0]

    @property
    def m(self) -> int:
        """Rows of the dense operand."""
        return self.operands.dense.shape[1]

    @property
    def blocks(self) -> int:
        return self.operands.values.shape[1]

    @property
    def block(self) -> tuple[int, int]:
        """(rows, columns) of a block."""
        return self.operands.values.shape[2], self.operands.values.shape[3]

    @property
    def width(self) -> int:
        """Columns of the result."""
        return self.rows if self.transpose else self.columns

    @property
    def accumulator(self) -> jnp.dtype:
        return accumulator_dtype(self.operands.dense.dtype)

    @property
    def flops(self) -> int:
        """Floating-point operations of the forward pass: those of the blocks that are there."""
        rows, columns = self.block
        return 2 * self.groups * self.m * self.blocks * rows * columns

    @property
    def backward_flops(self) -> int:
        """Floating-point operations of both gradients."""
        return 2 * self.flops

    @property
    def bytes_moved(self) -> int:
        """Bytes that the forward pass must move: every operand once, and the result."""
        out = self.groups * self.m * self.width * self.operands.dense.dtype.itemsize
        return sum(operand.nbytes for operand in self.operands) + out

    def tuning_key(self) -> str:
        rows, columns = self.block
        shape = f"{self.groups}x{self.m} {self.rows}x{self.columns}{'T' if self.transpose else ''}"
        return f"{self.operands.dense.dtype.name} {shape} {self.blocks} blocks {rows}x{columns}"


SIGNATURE = Signature(
    Operands("*m k", "blocks block_rows block_columns", "blocks 2"),
    Outputs("*m n"),
    hints={"indices": "(block row, block column) each, or a pair (row_starts, block_columns)"},
)


def _fail(text: str) -> NoReturn:
    raise ShapeError(f"block_sparse_matmul: {text}")


def static(x: AnyArray) -> np.ndarray | None:
    """The values of an index array that is known now, or None."""
    return None if isinstance(x, Tracer) else np.asarray(x)


def make_spec(
    dense: AnyArray, values: AnyArray, indices: AnyArray, shape: object, transpose: bool, precision: str
) -> SparseSpec:
    """Checks the caller's arguments (`dense` of any rank, `values` `[blocks, rows, columns]`, `indices` `[blocks, 2]`).

    Raises:
      ShapeError: an argument is not legal or does not fit the others.
    """
    x, v, coordinates = array_spec(dense), array_spec(values), array_spec(indices)
    for name, array in (("dense", x), ("values", v)):
        check_float("block_sparse_matmul", name, array.dtype)
    if v.dtype != x.dtype:
        _fail(f"`values` has dtype {v.dtype.name}, but `dense` has {x.dtype.name}; pass arrays of one dtype.")
    SIGNATURE.check("block_sparse_matmul", Operands(x, v, coordinates))
    if 0 in v.shape[1:]:
        _fail(f"`values` has shape {v.shape}; pass blocks of at least one row and one column.")
    if not jnp.issubdtype(coordinates.dtype, jnp.integer):
        _fail(f"`indices` has dtype {coordinates.dtype.name}; pass integers (block row, block column).")
    rows, columns = _extents(x, v, static(indices), shape, transpose)
    contracted, name = (columns, "columns") if transpose else (rows, "rows")
    if x.shape[-1] != contracted:
        _fail(
            f"`dense` has shape {x.shape}, but the sparse matrix is {rows} x {columns} and `transpose` is {transpose}; "
            f"pass {contracted} features, one for each of its {name}."
        )
    concrete = static(indices)
    if concrete is not None:
        check_places(concrete, most=(rows // v.shape[1], columns // v.shape[2]))
    m = x.size // x.shape[-1] if x.shape[-1] else 0
    operands = Operands(
        ArraySpec((1, m, x.shape[-1]), x.dtype),
        ArraySpec((1, *v.shape), v.dtype),
        ArraySpec((1, *coordinates.shape), jnp.dtype(jnp.int32)),
    )
    return SparseSpec(operands, rows, columns, bool(transpose), precision)


def check_places(indices: np.ndarray, *, most: tuple[int, int]) -> None:
    """Raises ShapeError where one of `indices` `[blocks, 2]` is outside of `most` block rows and columns."""
    for axis, side in enumerate(("row", "column")):
        numbers = indices[:, axis]
        wrong = numbers[(numbers < 0) | (numbers >= most[axis])]
        if wrong.size:
            _fail(f"`indices` has the block {side} {wrong[0]}, but there are {most[axis]}; pass 0 to {most[axis] - 1}.")


def _extents(x: ArraySpec, v: ArraySpec, concrete: np.ndarray | None, shape: Any, transpose: bool) -> tuple[int, int]:
    """(rows, columns) of the sparse matrix."""
    _, block_rows, block_columns = v.shape
    if shape is None:
        if concrete is None:
            _fail(
                "`indices` is traced, so the width of the result is not in it; pass `shape`, (rows, columns) of the "
                "sparse matrix."
            )
        axis = 0 if transpose else 1
        extent = (int(concrete[:, axis].max()) + 1 if len(concrete) else 0) * v.shape[1 + axis]
        shape = (extent, x.shape[-1]) if transpose else (x.shape[-1], extent)
    if (
        not isinstance(shape, Sequence)
        or len(shape) != 2
        or any(isinstance(n, bool) or not isinstance(n, numbers.Integral) or n < 0 for n in shape)
    ):
        _fail(f"`shape` is {shape!r}; pass (rows, columns) of the sparse matrix.")
    if shape[0] % block_rows or shape[1] % block_columns:
        _fail(
            f"the sparse matrix is {shape[0]} x {shape[1]}, which are not multiples of its blocks, {block_rows} x "
            f"{block_columns}; pad it to whole blocks."
        )
    return int(shape[0]), int(shape[1])
