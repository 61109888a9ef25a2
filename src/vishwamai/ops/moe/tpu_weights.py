"""The gradient of rhs on TPU: for each group a sum over its rows, which are the contracted axis."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from vishwamai.core.pallas import call
from vishwamai.core.types import AnyArray, PyTree, Ref
from vishwamai.ops.moe import tpu_visits as visits
from vishwamai.ops.moe.tpu_pieces import SEMANTICS, Split, for_pieces, keep, product
from vishwamai.ops.moe.tpu_tiles import GroupedTile, fit

if TYPE_CHECKING:
    from jax.typing import DTypeLike


def _weights_kernel(
    group_ref: Ref,
    tile_ref: Ref,
    start_ref: Ref,
    stop_ref: Ref,
    following_ref: Ref,
    second_ref: Ref,
    lhs_ref: Ref,
    dout_ref: Ref,
    out_ref: Ref,
    sum_ref: Ref,
    *,
    entries: int,
    split: Split,
    tile: GroupedTile,
) -> None:
    """One step: a group's sum grows by the product of its rows in one tile; its last visit stores it."""
    del tile_ref, following_ref, second_ref
    block_m = tile.block[0]
    part, b, j, visit = (pl.program_id(axis) for axis in (0, 1, 2, 4))
    visited = pl.num_programs(4)
    base = split.index(part, b, j)[0] * entries
    group = group_ref[base + visit]
    start, stop = start_ref[base + visit], stop_ref[base + visit]
    first = (visit == 0) | (group_ref[base + jnp.maximum(visit - 1, 0)] != group)  # visits of a group are consecutive
    last = (visit == visited - 1) | (group_ref[base + jnp.minimum(visit + 1, visited - 1)] != group)
    full = (start == 0) & (stop == block_m)  # the tile is the group's alone: no row needs a mask

    @pl.when(first & jnp.logical_not(full))
    def _() -> None:
        sum_ref[...] = jnp.zeros_like(sum_ref)

    @pl.when(full)
    def _() -> None:
        old = sum_ref[...]
        sum_ref[...] = jnp.where(first, jnp.zeros_like(old), old) + product(lhs_ref[...], dout_ref[...], (0, 0))

    @pl.when(jnp.logical_not(full))
    def _() -> None:
        def piece(start_row: jax.Array | int, rows: int, fresh: jax.Array | int) -> None:
            begin = jnp.maximum(start, fresh) - start_row  # rows before `fresh` were counted in the piece before
            lhs, dout = (
                lhs_ref[pl.ds(start_row, rows), :],
                dout_ref[pl.ds(start_row, rows), :],
            )  # [rows, block_k], [rows, block_n]
            lhs, dout = keep(lhs, 0, begin, stop - start_row), keep(dout, 0, begin, stop - start_row)
            sum_ref[...] += product(lhs, dout, (0, 0))

        for_pieces(start, stop, block_m, tile.chunk_rows, min(tile.small_rows, tile.chunk_rows), 0, piece)

    @pl.when(last)
    def _() -> None:
        out_ref[...] = sum_ref[...].astype(out_ref.dtype)


def weights_product(
    tile: GroupedTile,
    vmem: int,
    lhs: jax.Array,
    dout: jax.Array,
    group_sizes: jax.Array,
    first_row: jax.Array | None,
    out_dtype: DTypeLike,
) -> jax.Array:
    """`[B, G, K, N]`: for each group the product of its rows, lhs `[B, M, K]` transposed with dout `[B, M, N]`."""
    batch, m, k = lhs.shape
    n = dout.shape[2]
    tile = fit(tile, m, n, k)
    block_m, block_n, block_k = tile.block
    groups = group_sizes.shape[1]
    group_sizes = jnp.broadcast_to(group_sizes, (batch, groups))
    tables, count = visits.tables(group_sizes, first_row, m, block_m, every_group=True)  # empty groups too: zeros
    entries = visits.length(m, groups, block_m)
    column_tiles, depth_tiles = pl.cdiv(n, block_n), pl.cdiv(k, block_k)
    # The axis of tiles that splits evenly in two is the outer one.
    by_column = column_tiles % 2 == 0 or depth_tiles % 2
    split = Split(batch, column_tiles if by_column else depth_tiles)

    def index(p: AnyArray, b: AnyArray, j: AnyArray, i: AnyArray) -> tuple[AnyArray, AnyArray, AnyArray]:
        b, j = split.index(p, b, j)
        return (b, i, j) if by_column else (b, j, i)

    def lhs_index(
        p: AnyArray, b: AnyArray, j: AnyArray, i: AnyArray, v: AnyArray, group: Ref, tile: Ref, *_: object
    ) -> PyTree:
        b, i, _ = index(p, b, j, i)
        return b, tile[b * entries + v], i

    def dout_index(
        p: AnyArray, b: AnyArray, j: AnyArray, i: AnyArray, v: AnyArray, group: Ref, tile: Ref, *_: object
    ) -> PyTree:
        b, _, j = index(p, b, j, i)
        return b, tile[b * entries + v], j

    def out_index(p: jax.Array, b: AnyArray, j: jax.Array, i: AnyArray, v: AnyArray, group: Ref, *_: object) -> PyTree:
        b, i, j = index(p, b, j, i)
        return b, group[b * entries + v], i, j

    out_block = pl.BlockSpec((None, None, block_k, block_n), out_index)
    (out,) = call(
        functools.partial(_weights_kernel, entries=entries, split=split, tile=tile),
        name="grouped_gemm_grad_rhs",
        grid=(*split.grid, depth_tiles if by_column else column_tiles, count[0]),
        scalars=tables,
        inputs=dict(
            lhs_ref=(lhs, pl.BlockSpec((None, block_m, block_k), lhs_index)),
            dout_ref=(dout, pl.BlockSpec((None, block_m, block_n), dout_index)),
        ),
        outputs=dict(out_ref=((batch, groups, k, n), out_dtype, out_block)),
        scratch=dict(sum_ref=pltpu.VMEM((block_k, block_n), jnp.float32)),
        semantics=SEMANTICS,
        vmem_bytes=vmem,
        flops=2 * batch * m * n * k,
        bytes_accessed=column_tiles * lhs.nbytes
        + depth_tiles * dout.nbytes
        + batch * groups * k * n * jnp.dtype(out_dtype).itemsize,
    )
    return out
