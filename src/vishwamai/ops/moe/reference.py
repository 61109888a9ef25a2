"""The grouped product on any platform: blocks of rows that belong to one group each, one dot a block.

Each group's rows are laid out in whole blocks (the last of a group padded with zeros), so the cost is that of
`M + G * block` rows, where `jax.lax.ragged_dot` on a CPU multiplies every row with every group's matrix and masks.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from vishwamai.core.gradients import is_float
from vishwamai.core.op import Implementation
from vishwamai.core.qtensor import expand, scale_values
from vishwamai.core.spec import static_size
from vishwamai.core.types import AnyArray, PyTree
from vishwamai.ops.moe.spec import GroupedSpec, Operands, Outputs

if TYPE_CHECKING:
    from jax.typing import DTypeLike


_LARGEST_BLOCK = 512


class GroupBlocks(NamedTuple):
    """How rows are laid out in blocks of one group each."""

    group: AnyArray  # [blocks] int32: the group of each block
    source: AnyArray  # [blocks, block] int32: the row that stands there; M, which is not a row, where none does
    # [M] int32: where each row stands in the flattened blocks; past their end for a row without a group
    place: AnyArray


def block_rows(m: int, groups: int) -> int:
    """Rows of one block: a power of two of about half a group, so that padding costs little."""
    half = max(1, static_size(m, 32 * groups) // max(1, 2 * groups))
    return min(_LARGEST_BLOCK, max(8, 1 << (half - 1).bit_length()))


def layout(group_sizes: jax.Array, first_row: jax.Array | None, m: int, block: int) -> GroupBlocks:
    """The blocks of `group_sizes` [G], from row `first_row` on; sizes beyond the m rows there are count as cut off."""
    groups = group_sizes.shape[0]
    first = jnp.zeros((), group_sizes.dtype) if first_row is None else first_row
    ends = jnp.minimum(first + jnp.cumsum(group_sizes), m)
    starts = jnp.concatenate([first[None], ends[:-1]])
    last_block = jnp.cumsum(-(-(ends - starts) // block))  # blocks up to and with each group
    first_block = last_block + (-(ends - starts) // block)
    # At most: every group that has a row adds one part of a block.
    count = m // block + (min(groups, m) if isinstance(m, int) else groups)
    index = jnp.arange(count)
    group = jnp.minimum(jnp.searchsorted(last_block, index, side="right"), groups - 1)
    row = (starts[group] + (index - first_block[group]) * block)[:, None] + jnp.arange(block)
    inside = (row < ends[group][:, None]) & (index < last_block[-1])[:, None]
    rows = jnp.arange(m)
    of_row = jnp.minimum(jnp.searchsorted(ends, rows, side="right"), groups - 1)
    place = first_block[of_row] * block + rows - starts[of_row]
    place = jnp.where((rows >= first) & (rows < ends[-1]), place, count * block)
    return GroupBlocks(group.astype(jnp.int32), jnp.where(inside, row, m).astype(jnp.int32), place.astype(jnp.int32))


def _dot(x: jax.Array, y: jax.Array, axes: tuple[int, int], total: DTypeLike) -> jax.Array:
    return lax.dot_general(
        x, y, (((axes[0],), (axes[1],)), ((), ())), precision=lax.Precision.HIGHEST, preferred_element_type=total
    )


def _zeros(shape: tuple[int, ...], dtype: DTypeLike, like: jax.Array) -> jax.Array:
    """Zeros that vary over the mesh axes that `like` varies over: the sum of none of its rows is added."""
    return jnp.zeros(shape, dtype) + like[:0].sum().astype(dtype)


def _take(x: jax.Array, index: jax.Array) -> jax.Array:
    """Rows of x, zeros where the index is past its end."""
    return x.at[index].get(mode="fill", fill_value=0)


def _matrix(
    rhs: jax.Array, scale: jax.Array | None, group: AnyArray, block_k: int, dtype: DTypeLike
) -> tuple[PyTree, PyTree]:
    """(the matrix of a group `[K, N]`, the scales of its columns `[1, N or 1]`, or None).

    Scales of blocks of K are multiplied in, and the result is rounded to `dtype`.
    """
    values = rhs[group]
    if scale is None:
        return values, None
    factor = scale_values(scale[group], jnp.float64 if dtype == jnp.float64 else jnp.float32)
    if not block_k:
        return values.astype(dtype), factor
    return (values.astype(factor.dtype) * expand(factor, -2, block_k, values.shape[0])).astype(dtype), None


def product(
    lhs: jax.Array,
    rhs: jax.Array,
    group_sizes: jax.Array,
    scale: jax.Array | None,
    first_row: jax.Array | None,
    *,
    transposed: bool,
    block_k: int,
    total: DTypeLike,
    out_dtype: DTypeLike,
) -> jax.Array:
    """`[M, N]` from lhs `[M, K]`, rhs `[G, K, N]` (`[G, N, K]` if transposed) and sizes `[G]`.

    The matrix of one group at a time is dequantized.
    """
    m = lhs.shape[0]
    n = rhs.shape[1 if transposed else 2]
    if 0 in (m, rhs.shape[0]):
        return _zeros((m, n), out_dtype, lhs)
    block = block_rows(m, rhs.shape[0])
    blocks = layout(group_sizes, first_row, m, block)

    def block_product(block: tuple[jax.Array, jax.Array]) -> jax.Array:
        group, source = block

        def dot() -> jax.Array:
            matrix, columns = _matrix(rhs, scale, group, block_k, lhs.dtype)
            rows = _take(lhs, source)
            if transposed:
                rows = rows if columns is None else (rows * columns).astype(rows.dtype)
                return _dot(rows, matrix, (1, 1), total).astype(out_dtype)
            out = _dot(rows, matrix, (1, 0), total)
            return (out if columns is None else out * columns).astype(out_dtype)

        return lax.cond(source[0] < m, dot, lambda: _zeros((source.shape[0], n), out_dtype, lhs))

    out = lax.map(block_product, (blocks.group, blocks.source))  # [blocks, block, N]
    return _take(out.reshape(-1, n), blocks.place)


def weight_gradient(
    lhs: jax.Array, dout: jax.Array, group_sizes: jax.Array, first_row: jax.Array | None, *, total: DTypeLike
) -> jax.Array:
    """`[G, K, N]`: for each group the product of its rows, lhs `[M, K]` transposed with dout `[M, N]`."""
    groups, m = group_sizes.shape[0], lhs.shape[0]
    zeros = _zeros((groups, lhs.shape[1], dout.shape[1]), total, lhs)
    if 0 in (groups, m):
        return zeros
    blocks = layout(group_sizes, first_row, m, block_rows(m, groups))

    def add_block(sums: jax.Array, block: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
        group, source = block

        def add() -> jax.Array:
            return sums.at[group].add(_dot(_take(lhs, source), _take(dout, source), (0, 0), total))

        return lax.cond(source[0] < m, add, lambda: sums), None

    return lax.scan(add_block, zeros, (blocks.group, blocks.source))[0]


def _for_each(function: Any, *arrays: jax.Array | None) -> jax.Array:
    """`function` of every batch entry; an operand of one entry is shared."""
    batch = max(x.shape[0] for x in arrays if x is not None)
    axes = tuple(None if x is None or x.shape[0] == 1 else 0 for x in arrays)
    if batch == 1:
        return function(*(x if x is None else x[0] for x in arrays))[None]
    entries = (x if x is None or axis == 0 else x[0] for x, axis in zip(arrays, axes))
    return jax.vmap(function, axes)(*entries)


def forward(spec: GroupedSpec, operands: Operands) -> tuple[Outputs, None]:
    if spec.batch == 0:
        return Outputs(jnp.zeros((0, spec.m, spec.n), spec.out_dtype)), None
    run = functools.partial(
        product,
        transposed=spec.transpose_rhs,
        block_k=spec.block_k,
        total=spec.accumulator,
        out_dtype=spec.out_dtype,
    )
    return Outputs(_for_each(run, *operands)), None


def backward(spec: GroupedSpec, operands: Operands, cotangents: Outputs) -> Operands:
    lhs, rhs, sizes, scale, first = operands
    if spec.batch == 0:
        return gradients(operands, jnp.zeros_like(lhs), jnp.zeros_like(rhs))
    dout = cotangents.out.astype(lhs.dtype)
    total = spec.accumulator
    how: Any = dict(transposed=not spec.transpose_rhs, block_k=spec.block_k, total=total, out_dtype=lhs.dtype)
    run = functools.partial(product, **how)
    d_lhs = sum_shared(_for_each(run, dout, rhs, sizes, scale, first), lhs)
    if scale is not None:
        return gradients(operands, d_lhs, None)
    rows, columns = spec.matrix_factors(lhs, dout)
    d_rhs = _for_each(functools.partial(weight_gradient, total=total), rows, columns, sizes, first)
    return gradients(operands, d_lhs, sum_shared(d_rhs, rhs))


def gradients(operands: Operands, d_lhs: jax.Array, d_rhs: jax.Array | None) -> Operands:
    """The cotangents of all operands; those of quantized weights, which nobody can ask for, are zeros."""

    def none(x: jax.Array | None) -> jax.Array | None:
        return jnp.zeros_like(x) if x is not None and is_float(x) else None

    return Operands(d_lhs, none(operands.rhs) if d_rhs is None else d_rhs, None, none(operands.rhs_scale), None)


def sum_shared(gradient: jax.Array, operand: jax.Array) -> jax.Array:
    """The gradient of an operand that may be shared between batch entries, in its dtype."""
    if operand.shape[0] != gradient.shape[0]:
        gradient = gradient.sum(axis=0, keepdims=True)
    return gradient.astype(operand.dtype)


XLA = Implementation("xla", None, forward, backward, autodiff=True)
