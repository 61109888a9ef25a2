"""What a grouped matrix product computes: operands, options, and the checks that all platforms share."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, NamedTuple

import jax.numpy as jnp

from vishwamai.core.errors import ShapeError
from vishwamai.core.precision import accumulator_dtype
from vishwamai.core.sharding import Axes, name_axes
from vishwamai.core.spec import ArraySpec, OpSpec, array_spec, as_dtype

FLOATS = tuple(jnp.dtype(d) for d in (jnp.bfloat16, jnp.float16, jnp.float32, jnp.float64))


class Operands(NamedTuple):
    """Operands in the op's own layout; B counts batch entries (folded vmap axes among them), 1 where an operand is shared between them."""

    lhs: Any  # [B, M, K]
    rhs: Any  # [B or 1, G, K, N], of the dtype of lhs
    group_sizes: Any  # [B or 1, G] int32


class Outputs(NamedTuple):
    """`out` is the grouped product."""

    out: Any  # [B, M, N] in out_dtype


@dataclasses.dataclass(frozen=True)
class GroupedSpec(OpSpec):
    """`out[i] = lhs[i] @ rhs[g]` for the rows i of group g, which are consecutive; 0 for the rows after the last group.

    Attributes:
      out_dtype: dtype of the result.
    """

    out_dtype: jnp.dtype = jnp.dtype(jnp.float32)

    @property
    def batch(self) -> int:
        """B: the largest leading axis of any operand (0 where one is empty)."""
        sizes = {operand.shape[0] for operand in self.operands}
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
        return self.operands.rhs.shape[3]

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
        return self.batch * self.m * self.n * self.out_dtype.itemsize + sum(o.nbytes for o in self.operands)

    def tuning_key(self) -> str:
        o = self.operands
        shared = " shared" if o.rhs.shape[0] != self.batch else ""
        return f"{o.lhs.dtype.name} {self.batch}x{self.m}x{self.n}x{self.k} groups {self.groups} {self.out_dtype.name}{shared}"


def grouped_axes(spec: GroupedSpec, arguments: tuple[Any, ...], results: Any) -> Axes:
    """Batch, columns and the contracted axis may be split; rows and groups stay whole, for a row's group depends on all sizes before it."""
    operands = Operands(("b", "m", "k"), ("b", "g", "k", "n"), ("b", "g"))
    return name_axes(arguments, results, (operands, Outputs(("b", "m", "n"))), "bkn")


def make_spec(lhs: Any, rhs: Any, group_sizes: Any, out_dtype: Any) -> GroupedSpec:
    """Checks the caller's arguments (with or without batch axes) and describes them in the op's own layout.

    Raises:
      ShapeError: the arguments contradict one another; the text names them, their values and the mend.
    """
    x, w, sizes = (array_spec(a) for a in (lhs, rhs, group_sizes))
    for name, array, rank, axes in (("lhs", x, 2, "[M, K]"), ("rhs", w, 3, "[G, K, N]")):
        if len(array.shape) < rank:
            raise ShapeError(f"grouped_gemm: `{name}` has shape {array.shape}; pass at least the axes {axes}.")
        if array.dtype not in FLOATS:
            raise ShapeError(
                f"grouped_gemm: `{name}` has dtype {array.dtype.name}; pass bfloat16, float16, float32 or float64."
            )
    if x.dtype != w.dtype:
        raise ShapeError(
            f"grouped_gemm: `lhs` has dtype {x.dtype.name}, but `rhs` has dtype {w.dtype.name}; convert one, for instance `rhs.astype({x.dtype.name})`."
        )
    if x.shape[-1] != w.shape[-2]:
        hint = (
            "transpose `rhs` with `jnp.swapaxes(rhs, -1, -2)`" if x.shape[-1] == w.shape[-1] else "make the two equal"
        )
        raise ShapeError(
            f"grouped_gemm: `lhs` of shape {x.shape} contracts {x.shape[-1]} elements, but `rhs` of shape {w.shape} contracts {w.shape[-2]}; {hint}."
        )
    if not jnp.issubdtype(sizes.dtype, jnp.integer):
        raise ShapeError(
            f"grouped_gemm: `group_sizes` has dtype {sizes.dtype.name}; pass integers: rows of each group."
        )
    if sizes.shape[-1:] != w.shape[-3:-2]:
        raise ShapeError(
            f"grouped_gemm: `group_sizes` has shape {sizes.shape}, but `rhs` of shape {w.shape} holds {w.shape[-3]} groups; pass one size for each."
        )
    batch = x.shape[:-2]
    for name, array, rank in (("rhs", w, 3), ("group_sizes", sizes, 1)):
        own = array.shape[: len(array.shape) - rank]
        if own not in ((), batch):
            raise ShapeError(
                f"grouped_gemm: `{name}` has batch axes {own}, but `lhs` has {batch}; pass `{name}` with the same, or without any where all share it."
            )
    wanted = x.dtype if out_dtype is None else as_dtype("grouped_gemm", "out_dtype", out_dtype)
    if wanted not in FLOATS:
        raise ShapeError(
            f"grouped_gemm: `out_dtype` is {wanted.name}; pass bfloat16, float16, float32 or float64, or None."
        )
    shapes = (flat_shape(a.shape, rank) for a, rank in ((x, 2), (w, 3), (sizes, 1)))
    dtypes = (x.dtype, w.dtype, jnp.dtype(jnp.int32))
    return GroupedSpec(Operands(*map(ArraySpec, shapes, dtypes)), wanted)


def flat_shape(shape: tuple[int, ...], rank: int) -> tuple[int, ...]:
    """The batch axes of a shape as one, which is 1 where there are none."""
    cut = len(shape) - rank
    return (math.prod(shape[:cut]), *shape[cut:])
