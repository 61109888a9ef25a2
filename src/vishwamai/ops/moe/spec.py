"""What a grouped matrix product computes: operands, options, and the checks that all platforms share."""

from __future__ import annotations

import dataclasses
import functools
from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from vishwamai.core import dims
from vishwamai.core.arrays import cut, namespace
from vishwamai.core.errors import ShapeError
from vishwamai.core.precision import FP8_DTYPES, accumulator_dtype
from vishwamai.core.qtensor import FP4, INT4, QTensor, bits, check_symmetric
from vishwamai.core.quantized.code_tensor import CodeTensor
from vishwamai.core.quantized.packed_qtensor import PackedQTensor
from vishwamai.core.signature import Signature, described
from vishwamai.core.spec import ArraySpec, OpSpec, array_spec, as_dtype
from vishwamai.core.types import AnyArray, PyTree

FLOATS = tuple(jnp.dtype(d) for d in (jnp.bfloat16, jnp.float16, jnp.float32, jnp.float64))
NARROW = (jnp.dtype(jnp.int8), INT4, *FP8_DTYPES, FP4)


class Operands(NamedTuple):
    """Operands in the op's own layout; `batch` counts batch entries (folded vmap axes among them), 1 where an operand
    is shared between them.
    """

    lhs: Annotated[AnyArray, "batch m k"]
    # Of the dtype of lhs; with a scale one of `NARROW`. "batch? groups n k" if transpose_rhs.
    rhs: Annotated[AnyArray, "batch? groups k n"]
    group_sizes: Annotated[AnyArray, "batch? groups"]  # int32
    # One for each block of k, or one block: float; or uint8, the bits of e8m0.
    rhs_scale: Annotated[AnyArray, "batch? groups _ n?", "optional"]
    first_row: Annotated[AnyArray, "batch?", "optional"]  # int32: where the first group begins, else at 0


class Outputs(NamedTuple):
    """`out` is the grouped product."""

    out: Annotated[AnyArray, "batch m n"]  # in out_dtype


def operand_dims(transpose_rhs: bool) -> Operands:
    """The dims of operands whose matrices may be transposed."""
    declared = dims.declared(Operands)
    return declared._replace(rhs="batch? groups n k") if transpose_rhs else declared


def experts_spec(weight: Any) -> ArraySpec:
    """Shape and dtype of experts' weights, packed or not."""
    if not isinstance(weight, PackedQTensor):
        return array_spec(weight)
    return ArraySpec((*weight.values.shape[:-2], *weight.shape), weight.values.dtype)


@dataclasses.dataclass(frozen=True)
class GroupedSpec(OpSpec):
    """`out[i] = lhs[i] @ rhs[g]` for the rows i of group g, which are consecutive; 0 for the rows before the first
    group and after the last one.

    Attributes:
      out_dtype: dtype of the result.
      block_k: numbers along K that share a scale of rhs; 0 where a column has one scale, or none.
      transpose_rhs: the matrices are stored [N, K]; never with scales.
    """

    out_dtype: jnp.dtype = jnp.dtype(jnp.float32)
    block_k: int = 0
    transpose_rhs: bool = False

    def dims(self, kind: object) -> Any:
        """Of transposed matrices too."""
        declared = super().dims(kind)
        return operand_dims(self.transpose_rhs) if kind is Operands else declared

    @property
    def batch(self) -> int:
        """B: the largest leading axis of any operand (0 where one is empty)."""
        sizes = {operand.shape[0] for operand in self.operands if operand is not None}
        return 0 if 0 in sizes else max(sizes)

    @property
    def m(self) -> int:
        return self.operands.lhs.shape[1]

    @property
    def k(self) -> int:
        return self.operands.lhs.shape[2]

    @property
    def groups(self) -> int:
        return self.operands.rhs.shape[1]

    @property
    def n(self) -> int:
        return self.operands.rhs.shape[2 if self.transpose_rhs else 3]

    def matrix_factors(self, lhs: AnyArray, dout: AnyArray) -> tuple[PyTree, PyTree]:
        """The factors of the weights' gradient: what makes the rows of a matrix, and what makes its columns."""
        return (dout, lhs) if self.transpose_rhs else (lhs, dout)

    @property
    def accumulator(self) -> jnp.dtype:
        """float32, or float64 for float64 operands."""
        return accumulator_dtype(self.operands.lhs.dtype)

    @property
    def flops(self) -> int:
        """Floating-point operations of the forward pass where every row has a group (a multiply-add is two)."""
        return 2 * self.batch * self.m * self.n * self.k

    @property
    def bytes_moved(self) -> int:
        """Bytes that the forward pass must move between HBM and the chip at least, where every group has rows."""
        operands = sum((o.size * bits(o.dtype) + 7) // 8 for o in self.operands if o is not None)
        return self.batch * self.m * self.n * self.out_dtype.itemsize + operands

    def tuning_key(self) -> str:
        o = self.operands
        shared = " shared" if o.rhs.shape[0] != self.batch else ""
        scaled = "" if o.rhs_scale is None else f" {o.rhs.dtype.name} blocks {self.block_k}"
        offset = "" if o.first_row is None else " offset"
        offset += " transposed" if self.transpose_rhs else ""
        return (
            f"{o.lhs.dtype.name} {self.batch}x{self.m}x{self.n}x{self.k} groups {self.groups} "
            f"{self.out_dtype.name}{shared}{scaled}{offset}"
        )


@functools.cache
def signature(transpose_rhs: bool = False) -> Signature:
    """The dims of the caller's arrays: any batch axes in place of the one."""
    op_texts = operand_dims(transpose_rhs)
    return Signature(
        Operands(*(text.replace("batch", "*batch") for text in op_texts)), Outputs("*batch m n"), op_texts=op_texts
    )


def split(spec: GroupedSpec, backward: bool) -> str:
    """The dims that may be split over devices; blocks of k that share a scale stay on one."""
    return "batch n" if spec.block_k else "batch k n"


def unpack_weights(rhs: QTensor) -> tuple[PyTree, PyTree, int]:
    """(values, scales `[..., G, blocks, N or 1]`, numbers along K that share a scale or 0); the arrays may be of any
    framework.

    Raises:
      ShapeError: the scales are not shared along K, which the product contracts, or there are zero points.
    """
    check_symmetric("grouped_gemm: `rhs`", rhs.format)
    values, scales = rhs.values, rhs.scales
    if rhs.axis is None:
        lead = tuple(values.shape[:-2])
        broadcast = jnp.broadcast_to if isinstance(scales, (jax.Array, np.ndarray)) else scales.expand
        return values, broadcast(scales, (*lead, 1, 1)), 0
    if rhs.axis != -2:
        raise ShapeError(
            f"grouped_gemm: `rhs` of shape {rhs.shape} shares its scales along axis {rhs.axis}, but the product "
            "contracts axis -2; quantize it with axis=-2."
        )
    return values, scales, rhs.block_size or 0


def check_transposed(rhs: PyTree, transpose_rhs: bool) -> None:
    """Checks that transposed matrices are an array.

    Raises:
      ShapeError: they are quantized.
    """
    if transpose_rhs and isinstance(rhs, (QTensor, PackedQTensor, CodeTensor)):
        raise ShapeError(
            f"grouped_gemm: `rhs` is a {type(rhs).__name__}, and `transpose_rhs` is for arrays; quantize matrices "
            "[..., G, K, N] with axis=-2, without it."
        )


@described
def describe(operands: Operands, out_dtype: str | None, block_k: int = 0, transpose_rhs: bool = False) -> GroupedSpec:
    """The spec of the caller's arrays, with or without batch axes.

    Raises:
      ShapeError: the arguments contradict one another; the text names them, their values and the fix.
    """
    x, w, sizes, scale, _ = operands
    for name, array in (("lhs", x), ("rhs", w)):
        if array.dtype not in (NARROW if scale is not None and name == "rhs" else FLOATS):
            raise ShapeError(
                f"grouped_gemm: `{name}` has dtype {array.dtype.name}; pass bfloat16, float16, float32 or float64."
            )
    if scale is not None:
        blocks = -(-w.shape[-2] // block_k) if block_k else 1
        if len(scale.shape) != len(w.shape) or scale.shape[-2] != blocks:
            raise ShapeError(
                f"grouped_gemm: `rhs` has values of shape {w.shape} and scales of shape {scale.shape}; along K there "
                f"are {blocks} scales."
            )
    elif x.dtype != w.dtype:
        raise ShapeError(
            f"grouped_gemm: `lhs` has dtype {x.dtype.name}, but `rhs` has dtype {w.dtype.name}; convert one, for "
            f"instance `rhs.astype({x.dtype.name})`."
        )
    if not jnp.issubdtype(sizes.dtype, jnp.integer):
        raise ShapeError(
            f"grouped_gemm: `group_sizes` has dtype {sizes.dtype.name}; pass integers: rows of each group."
        )
    of_caller = signature(transpose_rhs)
    of_caller.check("grouped_gemm", operands)
    dtype = x.dtype if out_dtype is None else as_dtype("grouped_gemm", "out_dtype", out_dtype)
    if dtype not in FLOATS:
        raise ShapeError(
            f"grouped_gemm: `out_dtype` is {dtype.name}; pass bfloat16, float16, float32 or float64, or None."
        )
    specs = of_caller.specs(operands)
    integers = dataclasses.replace(specs.group_sizes, dtype=jnp.dtype(jnp.int32))
    if specs.first_row is not None:
        specs = specs._replace(first_row=dataclasses.replace(specs.first_row, dtype=jnp.dtype(jnp.int32)))
    return GroupedSpec(specs._replace(group_sizes=integers), dtype, block_k, transpose_rhs)


def check_sizes(sizes: np.ndarray, *, rows: int) -> None:
    """Checks the values of `group_sizes`, `[..., G]`, of products with `rows` rows.

    Raises:
      ShapeError: one is negative, or their sum is more than there are rows.
    """
    if (sizes < 0).any():
        first = tuple(int(i) for i in np.argwhere(sizes < 0)[0])
        raise ShapeError(
            f"grouped_gemm: `group_sizes` holds {sizes[first]} at {list(first)}; pass rows of each group, 0 or more."
        )
    total = int(sizes.sum(axis=-1, dtype=np.int64).max(initial=0))
    if total > rows:
        raise ShapeError(
            f"grouped_gemm: `group_sizes` adds up to {total}, but `lhs` has {rows} rows; pass sizes that add up to "
            f"{rows} at most."
        )


def check_offset(offset: Any, *, groups: int, local: int) -> None:
    """Checks the value of `group_offset`, with `groups` sizes and the weights of `local` of them.

    Raises:
      ShapeError: a group that `rhs` has weights for does not exist.
    """
    if not 0 <= int(offset) <= groups - local:
        raise ShapeError(
            f"grouped_gemm: `group_offset` is {int(offset)}, but `rhs` has the weights of {local} of {groups} groups; "
            f"pass 0 to {groups - local}."
        )


def check_held(lhs: AnyArray, rhs: AnyArray, group_sizes: AnyArray, offset: AnyArray, integer: bool) -> None:
    """Checks shapes of a call with `group_offset`, of arrays of any framework; `integer`: whether the offset is one.

    Raises:
      ShapeError: the arguments contradict one another.
    """
    if offset.ndim or not integer:
        dtype = str(offset.dtype).removeprefix("torch.")
        raise ShapeError(f"grouped_gemm: `group_offset` is {dtype} of shape {tuple(offset.shape)}; pass one integer.")
    if lhs.ndim < 2 or rhs.ndim < 3 or not group_sizes.ndim or group_sizes.shape[-1] < rhs.shape[-3]:
        shapes = (tuple(x.shape) for x in (lhs, rhs, group_sizes))
        raise ShapeError(
            "grouped_gemm: `lhs` has shape {}, `rhs` {} and `group_sizes` {}; with `group_offset` pass [..., M, K], "
            "[..., G, K, N] and the sizes of all groups, G or more.".format(*shapes)
        )


def held_groups(group_sizes: AnyArray, offset: AnyArray, *, local: int, rows: int) -> tuple[AnyArray, AnyArray]:
    """(sizes of the `local` groups from `offset` on, the row where the first of them begins), where sizes count from 0
    on and are cut off at the last of `rows` rows; of int32 arrays of JAX or torch.
    """
    xp = namespace(group_sizes)
    sizes = xp.clip(group_sizes, 0, None)
    totals = xp.cumsum(sizes, -1, dtype=sizes.dtype)
    starts, ends = (cut(xp.clip(x, None, rows), offset, local) for x in (totals - sizes, totals))
    return ends - starts, starts[..., :1].sum(-1, dtype=starts.dtype)  # 0 where no group is held
