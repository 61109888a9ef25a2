"""Rows times their group's matrix on TPU: the forward product, and the gradient of lhs, which contracts the other axis
of rhs.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from vishwamai.core.pallas import call
from vishwamai.core.qtensor import bits, scale_values
from vishwamai.core.tpu_dequantize import Operand, blocked_operand
from vishwamai.core.types import AnyArray, PyTree, Ref, Slice, Transfer
from vishwamai.ops.moe import tpu_visits as visits
from vishwamai.ops.moe.spec import Operands
from vishwamai.ops.moe.tpu_pieces import SEMANTICS, Split, for_pieces, keep, product
from vishwamai.ops.moe.tpu_tiles import GroupedTile, fit, middle_rows, stays

if TYPE_CHECKING:
    from jax.typing import DTypeLike


def _rows_kernel(
    group_ref: Ref,
    tile_ref: Ref,
    start_ref: Ref,
    stop_ref: Ref,
    following_ref: Ref,
    second_ref: Ref,
    lhs_ref: Ref,
    rhs_ref: Ref,
    scale_ref: Ref,
    out_ref: Ref,
    sum_ref: Ref,
    matrix_ref: Ref,
    slot_ref: Ref,
    semaphores: Ref,
    *,
    entries: int,
    split: Split,
    shared: bool,
    rhs_axis: int,
    depth: int,
    all_columns: bool,
    tile: GroupedTile,
    reading: Operand,
) -> None:
    """One step: the product of one visit's rows with (a block along the contracted axis of) its group's matrix.

    Args:
      scale_ref: [1, block_n] of the columns of the result, or [1, block_k] of those of lhs (rhs_axis 1); of blocks of
        K, [blocks, block_n or block_k].
      sum_ref: [block_m, block_n] if the depth takes several steps or chunks.
      matrix_ref, slot_ref, semaphores: if a group's matrix stays in VMEM, the buffers of `tile`, which of them is in
        use, and of their copies.
      entries: visits of one batch entry in the tables.
      split: which sweeps each part of the grid has.
      shared: one set of matrices serves every batch entry.
      rhs_axis: the contracted axis of rhs's blocks.
      depth: length of the contracted axis. all_columns: a tile has all columns of the result.
      reading: how the matrix is read.
    """
    block_m, block_n, block_k = tile.block
    part, b, j, visit, step = (pl.program_id(axis) for axis in range(5))
    steps = pl.cdiv(depth, block_k)
    batch, column = split.index(part, b, j)
    entry = batch * entries + visit
    before = jnp.maximum(entry - 1, 0)
    start, stop = start_ref[entry], stop_ref[entry]
    first_of_tile = (visit == 0) | (tile_ref[entry] != tile_ref[before])  # the tile's block is new in VMEM

    if matrix_ref is not None:

        def copy(batch: AnyArray, column: jax.Array, group: AnyArray, slot: jax.Array) -> Transfer:
            columns: Slice = slice(None)
            if not all_columns:
                columns = pl.ds(pl.multiple_of(column * block_n, block_n), block_n)
            matrix = (slice(None), columns) if rhs_axis == 0 else (columns, slice(None))
            source = rhs_ref.at[(0 if shared else batch, group, *matrix)]
            return pltpu.make_async_copy(source, matrix_ref.at[slot], semaphores.at[slot])

        buffers = tile.matrix_buffers

        def after(slot: jax.Array, by: int) -> AnyArray:
            return jnp.where(slot + by >= buffers, slot + by - buffers, slot + by)

        @pl.when((visit == 0) | (group_ref[entry] != group_ref[before]))
        def _() -> None:
            opening = (b == 0) & (j == 0) & (visit == 0)
            slot = jnp.where(opening, 0, after(slot_ref[0], 1))  # a ring of `buffers` matrices
            slot_ref[0] = slot
            transfer = copy(batch, column, group_ref[entry], slot)
            pl.when(opening)(transfer.start)  # later matrices were started by the visits before
            following, second = following_ref[entry], second_ref[entry]
            # Of three buffers that of the group before is free, and the following group's has its copy already, except
            # in the first visit of a sweep.
            begins = following >= 0 if buffers == 2 else (following >= 0) & (visit == 0)
            pl.when(begins)(lambda: copy(batch, column, following, after(slot, 1)).start())
            if buffers > 2:
                pl.when(second >= 0)(lambda: copy(batch, column, second, after(slot, 2)).start())
            transfer.wait()

            turns = j == pl.num_programs(2) - 1

            @pl.when((following < 0) & ((b < pl.num_programs(1) - 1) | jnp.logical_not(turns)))
            def _() -> None:  # the first matrix of the next sweep
                next_b, next_j = jnp.where(turns, b + 1, b), jnp.where(turns, 0, j + 1)
                next_batch, next_column = split.index(part, next_b, next_j)
                copy(next_batch, next_column, group_ref[next_batch * entries], after(slot, 1)).start()

        rhs_ref = matrix_ref.at[slot_ref[0]]

    tail = depth - (steps - 1) * block_k
    block_scales, column_scales = (scale_ref, None) if reading.size else (None, scale_ref)
    first_k = step * block_k if rhs_axis == 0 else column * block_n  # of rhs's rows in its block

    def chunk(row: AnyArray, rows: int, k: int | jax.Array, size: int, valid: object) -> jax.Array:
        lhs = lhs_ref[pl.ds(row, rows), pl.ds(k, size)]  # [rows, size]
        rhs = reading.tile(rhs_ref, block_scales, rhs_axis, k, size, first_k, lhs.dtype)
        if column_scales is not None:
            rhs = rhs.astype(lhs.dtype)
            if rhs_axis == 1:
                # The scales are along the contracted axis: they cannot wait for the result.
                lhs = (lhs.astype(jnp.float32) * column_scales[:, pl.ds(k, size)]).astype(lhs.dtype)
        if valid is not None:
            lhs, rhs = keep(lhs, 1, 0, valid), keep(rhs, rhs_axis, 0, valid)
        return product(lhs, rhs, (1, rhs_axis))

    def store(row: int | jax.Array, rows: int, total: jax.Array) -> None:
        total = total if column_scales is None or rhs_axis == 1 else total * column_scales[...]
        index = row + lax.broadcasted_iota(jnp.int32, total.shape, 0)
        old = out_ref[pl.ds(row, rows), :].astype(jnp.float32)  # rows of other groups in the same tile stay
        out_ref[pl.ds(row, rows), :] = jnp.where((index >= start) & (index < stop), total, old).astype(out_ref.dtype)

    @pl.when(first_of_tile & (step == 0) & ((start > 0) | (stop < block_m)))
    def _() -> None:
        out_ref[...] = jnp.zeros_like(out_ref)

    def piece(row: AnyArray, rows: int, fresh: AnyArray) -> None:
        del fresh  # what is computed twice is the same
        if sum_ref is None:
            store(row, rows, chunk(row, rows, 0, block_k, None))
            return
        place = pl.ds(row, rows)

        def grown(k: int | jax.Array, size: int) -> jax.Array:
            first = (step == 0) & (k == 0)
            old = sum_ref[place, :]
            valid = None if tail == block_k else jnp.where(step == steps - 1, tail, block_k)
            return jnp.where(first, jnp.zeros_like(old), old) + chunk(row, rows, k, size, valid)

        def grow(k: int | jax.Array, size: int) -> None:
            sum_ref[place, :] = grown(k, size)

        size = tile.chunk_depth if tail == block_k else block_k
        chunks = pl.cdiv(block_k, size)
        if chunks > 1:
            lax.fori_loop(0, chunks - 1, lambda i, _: grow(pl.multiple_of(i * size, size), size), None)
        # The last product is stored as it is made: a pass of its own over the sum would not hide behind the matrix
        # unit.
        last = (chunks - 1) * size
        if steps == 1:
            store(row, rows, grown(last, block_k - last))
            return
        pl.when(step < steps - 1)(lambda: grow(last, size))
        pl.when(step == steps - 1)(lambda: store(row, rows, grown(last, size)))

    small = min(tile.small_rows, tile.chunk_rows)
    for_pieces(start, stop, block_m, tile.chunk_rows, small, middle_rows(tile.chunk_rows, small), piece)


def rows_product(
    name: str,
    tile: GroupedTile,
    vmem: int,
    lhs: jax.Array,
    operands: Operands,
    rhs_axis: int,
    block_size: int,
    out_dtype: DTypeLike,
) -> jax.Array:
    """`[B, M, N]` from lhs `[B, M, K]` and, of the operands, rhs `[B or 1, G, K, N]` (rhs_axis 0) or `[B or 1, G, N,
    K]` (1), its scales, and sizes `[B or 1, G]`.

    Args:
      block_size: rows of rhs that share a scale, 0 where a column has one, or none.
    """
    _, rhs, group_sizes, scale, first_row = operands
    batch, m, k = lhs.shape
    n = rhs.shape[3 - rhs_axis]
    tile = fit(tile, m, n, k)
    block_m, block_n, block_k = tile.block
    reading = Operand(jnp.dtype(rhs.dtype))
    if scale is not None:
        if not block_size or scale.dtype != jnp.uint8:  # the kernel reads the bits of e8m0
            scale = scale_values(scale, jnp.float32)
        scale = jnp.broadcast_to(scale, (*scale.shape[:3], rhs.shape[3]))
        if block_size:
            tile_k = block_k if rhs_axis == 0 else block_n
            reading = blocked_operand(rhs.dtype, scale.dtype, block_size, 0, tile_k, rhs.shape[2])
            if reading.direct and rhs_axis == 0 and tile.chunk_depth % reading.granule:
                tile = dataclasses.replace(tile, chunk_depth=block_k)
    group_sizes = jnp.broadcast_to(group_sizes, (batch, group_sizes.shape[1]))
    tables, count = visits.tables(group_sizes, first_row, m, block_m, every_group=False)
    entries = visits.length(m, group_sizes.shape[1], block_m)
    column_tiles, steps = pl.cdiv(n, block_n), pl.cdiv(k, block_k)  # sweeps over the rows, and steps of a visit
    split = Split(batch, column_tiles)
    shared = rhs.shape[0] == 1
    scales_shared = scale is None or scale.shape[0] == 1
    resident = stays(tile.block, n, k)  # the group's matrix stays in VMEM over its visits

    def lhs_index(
        p: AnyArray, b: AnyArray, j: AnyArray, v: AnyArray, r: AnyArray, group: Ref, tile: Ref, *_: object
    ) -> PyTree:
        b, _ = split.index(p, b, j)
        return b, tile[b * entries + v], r

    def rhs_index(p: AnyArray, b: AnyArray, j: AnyArray, v: AnyArray, r: AnyArray, group: Ref, *_: object) -> PyTree:
        b, j = split.index(p, b, j)
        rest = (r, j) if rhs_axis == 0 else (j, r)
        return (0 if shared else b, group[b * entries + v], *rest)

    def out_index(
        p: jax.Array, b: AnyArray, j: jax.Array, v: AnyArray, r: jax.Array, group: Ref, tile: Ref, *_: object
    ) -> PyTree:
        b, j = split.index(p, b, j)
        return b, tile[b * entries + v], j

    def scale_index(p: AnyArray, b: AnyArray, j: AnyArray, v: AnyArray, r: AnyArray, group: Ref, *_: object) -> PyTree:
        entry, of_group, rows, columns = rhs_index(p, b, j, v, r, group)
        return 0 if scales_shared else entry, of_group, rows if reading.direct else 0, columns

    matrix = (block_k, block_n) if rhs_axis == 0 else (block_n, block_k)
    scale_rows = 1 if scale is None else scale.shape[2]
    if reading.direct:
        scale_rows = min(pl.cdiv(matrix[0], block_size), scale_rows)
    several = steps > 1 or tile.chunk_depth < block_k  # more than one product adds up
    in_hbm = pl.BlockSpec(memory_space=pl.ANY)
    (out,) = call(
        functools.partial(
            _rows_kernel,
            entries=entries,
            split=split,
            shared=shared,
            rhs_axis=rhs_axis,
            depth=k,
            all_columns=block_n == n,
            tile=tile,
            reading=reading,
        ),
        name=name,
        grid=(*split.grid, count[0], steps),
        scalars=tables,
        inputs=dict(
            lhs_ref=(lhs, pl.BlockSpec((None, block_m, block_k), lhs_index)),
            rhs_ref=(rhs, in_hbm if resident else pl.BlockSpec((None, None, *matrix), rhs_index)),
            scale_ref=(scale, pl.BlockSpec((None, None, scale_rows, matrix[1]), scale_index)),
        ),
        outputs=dict(out_ref=((batch, m, n), out_dtype, pl.BlockSpec((None, block_m, block_n), out_index))),
        scratch=dict(
            sum_ref=pltpu.VMEM((block_m, block_n), jnp.float32) if several else None,
            matrix_ref=pltpu.VMEM((tile.matrix_buffers, *matrix), rhs.dtype) if resident else None,
            slot_ref=pltpu.SMEM((1,), jnp.int32) if resident else None,
            semaphores=pltpu.SemaphoreType.DMA((tile.matrix_buffers,)) if resident else None,
        ),
        semantics=SEMANTICS,
        vmem_bytes=vmem,
        flops=2 * batch * m * n * k,
        bytes_accessed=column_tiles * lhs.nbytes
        + rhs.size * bits(rhs.dtype) // 8
        + batch * m * n * jnp.dtype(out_dtype).itemsize,
    )
    return out
