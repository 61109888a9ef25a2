"""The grouped product on TPU (Pallas): its two kernels, and the three products made of them.

`rows_product` serves the forward product and the gradient of lhs (which contracts the other axis of rhs). It sweeps over the visits of `visits.py` for each
tile of columns. Where the contracted axis fits VMEM whole, the matrix of a group is read once for a sweep, and the next group's is copied while this
one's rows are multiplied, however many visits they take; else blocks along the contracted axis come through the pipeline. `weights_product` is the
gradient of rhs: a sum for each group over its rows, which are the contracted axis.

A visit multiplies the rows of its group alone, in pieces of a few hundred rows and then of `SMALL` rows, not the whole tile; what the last piece has
too much is masked. Rows of another group never reach a result, NaN or not.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from vishwamai.core.hardware import Chip
from vishwamai.core.op import Implementation
from vishwamai.core.pallas import TPU_DTYPES, round_up
from vishwamai.core.sharding import out_struct
from vishwamai.ops.moe import visits
from vishwamai.ops.moe.reference import sum_shared
from vishwamai.ops.moe.spec import GroupedSpec, Operands, Outputs
from vishwamai.ops.moe.tiles import ALIGN, GroupedConfig, Tile, fit, heuristic

_SMEM_BYTES = 512 << 10


def why_not(spec: GroupedSpec, chip: Chip | None) -> str | None:
    """The reason why these kernels cannot serve `spec`, or None."""
    for name, dtype in (("lhs", spec.operands.lhs.dtype), ("out_dtype", spec.out_dtype)):
        if dtype not in TPU_DTYPES:
            return f"`{name}` is {dtype.name}, and the TPU computes in float32 and bfloat16."
    if 0 in (spec.batch, spec.m, spec.n, spec.k, spec.groups):
        return "an array is empty."
    config = heuristic(spec, chip)
    rows = min(config.forward[0], config.grad_lhs[0], config.grad_rhs[0])
    table = 5 * 4 * spec.batch * visits.length(spec.m, spec.groups, rows)
    if table > _SMEM_BYTES:
        return f"the tables of visits for {spec.batch} x {spec.groups} groups take {table:,} bytes of scalar memory, more than {_SMEM_BYTES:,}."
    return None


def _dot(x: jax.Array, y: jax.Array, axes: tuple[int, int]) -> jax.Array:
    precision = lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    return lax.dot_general(
        x, y, (((axes[0],), (axes[1],)), ((), ())), precision=precision, preferred_element_type=jnp.float32
    )


def _keep(x: jax.Array, axis: int, start: Any, stop: Any) -> jax.Array:
    """x with zeros outside `start <= index < stop` of the axis."""
    index = lax.broadcasted_iota(jnp.int32, x.shape, axis)
    return jnp.where((index >= start) & (index < stop), x, jnp.zeros_like(x))


def _for_pieces(start: Any, stop: Any, block_m: int, piece: int, small: int, body: Any) -> None:
    """Calls `body(first row, rows, fresh)` for pieces that cover `start <= row < stop` of a tile: large ones, then small ones, never past the tile.

    Rows before `fresh` were in the piece before: the last one is moved up where it would leave the tile.
    """
    if block_m % ALIGN:  # a tile of all rows there are, which no multiple divides

        @pl.when(stop > start)
        def _() -> None:
            body(0, block_m, 0)

        return
    begin = lax.div(start, ALIGN) * ALIGN
    wanted = stop - begin
    large = lax.div(wanted, piece)

    def one_large(i: jax.Array, carry: None) -> None:
        at = pl.multiple_of(begin + i * piece, ALIGN)
        body(at, piece, at)

    def one_small(i: jax.Array, carry: None) -> None:
        fresh = begin + large * piece + i * small
        body(pl.multiple_of(jnp.minimum(fresh, block_m - small), ALIGN), small, fresh)

    lax.fori_loop(0, large, one_large, None)
    if piece > small:
        lax.fori_loop(0, lax.div(wanted - large * piece + small - 1, small), one_small, None)
    else:
        pl.when(wanted > large * piece)(lambda: one_small(jnp.int32(0), None))


@dataclasses.dataclass(frozen=True)
class Split:
    """A grid over (batch, tiles), cut in two along one of them where that comes out even: a part for each core of a megacore chip.

    Grid axes instead of a division, which the scalar unit does not have.
    """

    batch: int
    tiles: int

    @property
    def _axis(self) -> int | None:
        return next((axis for axis, size in ((1, self.tiles), (0, self.batch)) if size % 2 == 0), None)

    @property
    def grid(self) -> tuple[int, int, int]:
        """(parts, batch entries of a part, tiles of a part)."""
        if self._axis is None:
            return 1, self.batch, self.tiles
        return (2, self.batch, self.tiles // 2) if self._axis == 1 else (2, self.batch // 2, self.tiles)

    def index(self, part: Any, b: Any, j: Any) -> tuple[Any, Any]:
        """(batch entry, tile) of a place in the grid."""
        _, batch, tiles = self.grid
        return (part * batch + b, j) if self._axis == 0 else (b, part * tiles + j) if self._axis == 1 else (b, j)


# --- Rows times their group's matrix ---------------------------------------------------------------------------------------------------------------


def _rows_kernel(
    group_ref: Any,
    tile_ref: Any,
    start_ref: Any,
    stop_ref: Any,
    following_ref: Any,
    lhs_ref: Any,
    rhs_ref: Any,
    out_ref: Any,
    *scratch: Any,
    entries: int,
    split: Split,
    shared: bool,
    rhs_axis: int,
    depth: int,
    tile: Tile,
    resident: bool,
) -> None:
    """One step: the product of one visit's rows with (a block along the contracted axis of) its group's matrix.

    Args:
      scratch: the sum [block_m, block_n] if the depth takes several steps or chunks; then, if resident, the matrices [2, ...], which of the two is in use,
        and their semaphores.
      entries: visits of one batch entry in the tables.
      split: which sweeps each part of the grid has.
      shared: one set of matrices serves every batch entry.
      rhs_axis: the contracted axis of rhs's blocks.
      depth: length of the contracted axis.
    """
    block_m, block_n, block_k = tile.block
    part, b, j, visit, step = (pl.program_id(axis) for axis in range(5))
    steps = pl.cdiv(depth, block_k)
    batch, column = split.index(part, b, j)
    entry = batch * entries + visit
    before = jnp.maximum(entry - 1, 0)
    start, stop = start_ref[entry], stop_ref[entry]
    first_of_tile = (visit == 0) | (tile_ref[entry] != tile_ref[before])
    sum_ref = None
    if steps > 1 or tile.chunk_k < block_k:
        sum_ref, scratch = scratch[0], scratch[1:]

    if resident:
        matrix_ref, slot_ref, semaphores = scratch

        def copy(batch: Any, column: Any, group: Any, slot: Any) -> Any:
            columns = pl.ds(pl.multiple_of(column * block_n, block_n), block_n)
            matrix = (slice(None), columns) if rhs_axis == 0 else (columns, slice(None))
            source = rhs_ref.at[(0 if shared else batch, group, *matrix)]
            return pltpu.make_async_copy(source, matrix_ref.at[slot], semaphores.at[slot])

        @pl.when((visit == 0) | (group_ref[entry] != group_ref[before]))
        def _() -> None:
            opening = (b == 0) & (j == 0) & (visit == 0)
            slot = jnp.where(opening, 0, 1 - slot_ref[0])
            slot_ref[0] = slot
            here = copy(batch, column, group_ref[entry], slot)
            pl.when(opening)(here.start)
            here.wait()
            following = following_ref[entry]

            @pl.when(following >= 0)
            def _() -> None:
                copy(batch, column, following, 1 - slot).start()

            turns = j == pl.num_programs(2) - 1

            @pl.when((following < 0) & ((b < pl.num_programs(1) - 1) | jnp.logical_not(turns)))
            def _() -> None:  # the first matrix of the next sweep
                next_b, next_j = jnp.where(turns, b + 1, b), jnp.where(turns, 0, j + 1)
                next_batch, next_column = split.index(part, next_b, next_j)
                copy(next_batch, next_column, group_ref[next_batch * entries], 1 - slot).start()

        rhs_ref = matrix_ref.at[slot_ref[0]]

    tail = depth - (steps - 1) * block_k

    def chunk(at: Any, rows: int, k: Any, size: int, valid: Any) -> jax.Array:
        lhs = lhs_ref[pl.ds(at, rows), pl.ds(k, size)]
        rhs = rhs_ref[pl.ds(k, size), :] if rhs_axis == 0 else rhs_ref[:, pl.ds(k, size)]
        if valid is not None:
            lhs, rhs = _keep(lhs, 1, 0, valid), _keep(rhs, rhs_axis, 0, valid)
        return _dot(lhs, rhs, (1, rhs_axis))

    def store(at: Any, rows: int, total: jax.Array) -> None:
        index = at + lax.broadcasted_iota(jnp.int32, total.shape, 0)
        old = out_ref[pl.ds(at, rows), :].astype(jnp.float32)
        out_ref[pl.ds(at, rows), :] = jnp.where((index >= start) & (index < stop), total, old).astype(out_ref.dtype)

    @pl.when(first_of_tile & (step == 0) & ((start > 0) | (stop < block_m)))
    def _() -> None:
        out_ref[...] = jnp.zeros_like(out_ref)

    def piece(at: Any, rows: int, fresh: Any) -> None:
        del fresh  # what is computed twice is the same
        if sum_ref is None:
            store(at, rows, chunk(at, rows, 0, block_k, None))
            return
        place = pl.ds(at, rows)
        total_ref: Any = sum_ref

        def grown(k: Any, size: int) -> jax.Array:
            first = (step == 0) & (k == 0)
            old = total_ref[place, :]
            valid = None if tail == block_k else jnp.where(step == steps - 1, tail, block_k)
            return jnp.where(first, jnp.zeros_like(old), old) + chunk(at, rows, k, size, valid)

        def grow(k: Any, size: int) -> None:
            total_ref[place, :] = grown(k, size)

        size = tile.chunk_k if tail == block_k else block_k
        chunks = block_k // size
        if chunks > 1:
            lax.fori_loop(0, chunks - 1, lambda i, _: grow(pl.multiple_of(i * size, size), size), None)
        # The last product is stored as it is made: a pass of its own over the sum would not hide behind the matrix unit.
        last = (chunks - 1) * size
        if steps == 1:
            store(at, rows, grown(last, size))
            return
        pl.when(step < steps - 1)(lambda: grow(last, size))
        pl.when(step == steps - 1)(lambda: store(at, rows, grown(last, size)))

    _for_pieces(start, stop, block_m, tile.chunk_m, min(tile.small_m, tile.chunk_m), piece)


def rows_product(
    name: str,
    tile: Tile,
    vmem: int,
    lhs: jax.Array,
    rhs: jax.Array,
    group_sizes: jax.Array,
    rhs_axis: int,
    out_dtype: Any,
) -> jax.Array:
    """`[B, M, N]` from lhs `[B, M, K]`, rhs `[B or 1, G, K, N]` (rhs_axis 0) or `[B or 1, G, N, K]` (1) and sizes `[B or 1, G]`."""
    batch, m, k = lhs.shape
    n = rhs.shape[3 - rhs_axis]
    tile = fit(tile, m, n, k)
    block_m, block_n, block_k = tile.block
    group_sizes = jnp.broadcast_to(group_sizes, (batch, group_sizes.shape[1]))
    *tables, count = visits.plan(group_sizes, m, block_m, every_group=False)
    entries = visits.length(m, group_sizes.shape[1], block_m)
    column_tiles, steps = pl.cdiv(n, block_n), pl.cdiv(k, block_k)
    split = Split(batch, column_tiles)
    shared = rhs.shape[0] == 1
    resident = block_k == k and k % 128 == 0 and n % block_n == 0 and block_n % 128 == 0

    def lhs_index(p: Any, b: Any, j: Any, v: Any, r: Any, group: Any, tile: Any, *_: Any) -> Any:
        b, _ = split.index(p, b, j)
        return b, tile[b * entries + v], r

    def rhs_index(p: Any, b: Any, j: Any, v: Any, r: Any, group: Any, *_: Any) -> Any:
        b, j = split.index(p, b, j)
        rest = (r, j) if rhs_axis == 0 else (j, r)
        return (0 if shared else b, group[b * entries + v], *rest)

    def out_index(p: Any, b: Any, j: Any, v: Any, r: Any, group: Any, tile: Any, *_: Any) -> Any:
        b, j = split.index(p, b, j)
        return b, tile[b * entries + v], j

    matrix = (block_k, block_n) if rhs_axis == 0 else (block_n, block_k)
    scratch: list[Any] = []
    if steps > 1 or tile.chunk_k < block_k:
        scratch.append(pltpu.VMEM((block_m, block_n), jnp.float32))
    if resident:
        scratch += [pltpu.VMEM((2, *matrix), rhs.dtype), pltpu.SMEM((1,), jnp.int32), pltpu.SemaphoreType.DMA((2,))]

    def body(*refs: Any) -> None:
        _rows_kernel(
            *refs,
            entries=entries,
            split=split,
            shared=shared,
            rhs_axis=rhs_axis,
            depth=k,
            tile=tile,
            resident=resident,
        )

    return pl.pallas_call(
        body,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=5,
            grid=(*split.grid, count[0], steps),
            in_specs=[
                pl.BlockSpec((None, block_m, block_k), lhs_index),
                pl.BlockSpec(memory_space=pl.ANY) if resident else pl.BlockSpec((None, None, *matrix), rhs_index),
            ],
            out_specs=pl.BlockSpec((None, block_m, block_n), out_index),
            scratch_shapes=scratch,
        ),
        out_shape=out_struct((batch, m, n), out_dtype, lhs, rhs, group_sizes),
        compiler_params=_compiler_params(vmem, "parallel", "arbitrary", "arbitrary", "arbitrary", "arbitrary"),
        cost_estimate=pl.CostEstimate(
            flops=2 * batch * m * n * k,
            bytes_accessed=column_tiles * lhs.nbytes + rhs.nbytes + batch * m * n * jnp.dtype(out_dtype).itemsize,
            transcendentals=0,
        ),
        name=name,
    )(*tables, lhs, rhs)


def _compiler_params(vmem: int, *semantics: Any) -> pltpu.CompilerParams:
    """The VMEM limit is raised where the plan needs more than the 16 MiB that every chip gives unasked."""
    wanted = round_up(vmem * 5 // 4, 1 << 20)
    return pltpu.CompilerParams(dimension_semantics=semantics, vmem_limit_bytes=wanted if wanted > 16 << 20 else None)


# --- The weights' gradient -------------------------------------------------------------------------------------------------------------------------


def _weights_kernel(
    group_ref: Any,
    tile_ref: Any,
    start_ref: Any,
    stop_ref: Any,
    following_ref: Any,
    lhs_ref: Any,
    dout_ref: Any,
    out_ref: Any,
    sum_ref: Any,
    *,
    entries: int,
    split: Split,
    tile: Tile,
) -> None:
    """One step: a group's sum grows by the product of its rows in one tile; its last visit stores it."""
    del tile_ref, following_ref
    block_m = tile.block[0]
    part, b, j, visit = (pl.program_id(axis) for axis in (0, 1, 2, 4))
    visited = pl.num_programs(4)
    base = split.index(part, b, j)[0] * entries
    group = group_ref[base + visit]
    start, stop = start_ref[base + visit], stop_ref[base + visit]
    first = (visit == 0) | (group_ref[base + jnp.maximum(visit - 1, 0)] != group)
    last = (visit == visited - 1) | (group_ref[base + jnp.minimum(visit + 1, visited - 1)] != group)
    whole = (start == 0) & (stop == block_m)

    @pl.when(first & jnp.logical_not(whole))
    def _() -> None:
        sum_ref[...] = jnp.zeros_like(sum_ref)

    @pl.when(whole)
    def _() -> None:
        old = sum_ref[...]
        sum_ref[...] = jnp.where(first, jnp.zeros_like(old), old) + _dot(lhs_ref[...], dout_ref[...], (0, 0))

    @pl.when(jnp.logical_not(whole))
    def _() -> None:
        def piece(at: Any, rows: int, fresh: Any) -> None:
            begin = jnp.maximum(start, fresh) - at
            lhs, dout = lhs_ref[pl.ds(at, rows), :], dout_ref[pl.ds(at, rows), :]
            lhs, dout = _keep(lhs, 0, begin, stop - at), _keep(dout, 0, begin, stop - at)
            sum_ref[...] += _dot(lhs, dout, (0, 0))

        _for_pieces(start, stop, block_m, tile.chunk_m, min(tile.small_m, tile.chunk_m), piece)

    @pl.when(last)
    def _() -> None:
        out_ref[...] = sum_ref[...].astype(out_ref.dtype)


def weights_product(
    tile: Tile, vmem: int, lhs: jax.Array, dout: jax.Array, group_sizes: jax.Array, out_dtype: Any
) -> jax.Array:
    """`[B, G, K, N]`: for each group the product of its rows, lhs `[B, M, K]` transposed with dout `[B, M, N]`."""
    batch, m, k = lhs.shape
    n = dout.shape[2]
    tile = fit(tile, m, n, k)
    block_m, block_n, block_k = tile.block
    groups = group_sizes.shape[1]
    group_sizes = jnp.broadcast_to(group_sizes, (batch, groups))
    *tables, count = visits.plan(group_sizes, m, block_m, every_group=True)
    entries = visits.length(m, groups, block_m)
    column_tiles, depth_tiles = pl.cdiv(n, block_n), pl.cdiv(k, block_k)
    # The axis of tiles that splits evenly in two is the outer one.
    by_column = column_tiles % 2 == 0 or depth_tiles % 2
    split = Split(batch, column_tiles if by_column else depth_tiles)

    def at(p: Any, b: Any, j: Any, i: Any) -> tuple[Any, Any, Any]:
        b, j = split.index(p, b, j)
        return (b, i, j) if by_column else (b, j, i)

    def lhs_index(p: Any, b: Any, j: Any, i: Any, v: Any, group: Any, tile: Any, *_: Any) -> Any:
        b, i, _ = at(p, b, j, i)
        return b, tile[b * entries + v], i

    def dout_index(p: Any, b: Any, j: Any, i: Any, v: Any, group: Any, tile: Any, *_: Any) -> Any:
        b, _, j = at(p, b, j, i)
        return b, tile[b * entries + v], j

    def out_index(p: Any, b: Any, j: Any, i: Any, v: Any, group: Any, *_: Any) -> Any:
        b, i, j = at(p, b, j, i)
        return b, group[b * entries + v], i, j

    def body(*refs: Any) -> None:
        _weights_kernel(*refs, entries=entries, split=split, tile=tile)

    return pl.pallas_call(
        body,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=5,
            grid=(*split.grid, depth_tiles if by_column else column_tiles, count[0]),
            in_specs=[
                pl.BlockSpec((None, block_m, block_k), lhs_index),
                pl.BlockSpec((None, block_m, block_n), dout_index),
            ],
            out_specs=pl.BlockSpec((None, None, block_k, block_n), out_index),
            scratch_shapes=[pltpu.VMEM((block_k, block_n), jnp.float32)],
        ),
        out_shape=out_struct((batch, groups, k, n), out_dtype, lhs, dout, group_sizes),
        compiler_params=_compiler_params(vmem, "parallel", "arbitrary", "arbitrary", "arbitrary", "arbitrary"),
        cost_estimate=pl.CostEstimate(
            flops=2 * batch * m * n * k,
            bytes_accessed=column_tiles * lhs.nbytes
            + depth_tiles * dout.nbytes
            + batch * groups * k * n * jnp.dtype(out_dtype).itemsize,
            transcendentals=0,
        ),
        name="grouped_gemm_grad_rhs",
    )(*tables, lhs, dout)


# --- Forward and backward --------------------------------------------------------------------------------------------------------------------------


def forward(spec: GroupedSpec, config: GroupedConfig, operands: Operands, residuals: bool) -> tuple[Outputs, None]:
    del residuals  # the backward pass needs the operands alone
    lhs, rhs, sizes = operands
    out = rows_product("grouped_gemm", config.tile("forward"), config.vmem_bytes, lhs, rhs, sizes, 0, spec.out_dtype)
    return Outputs(out), None


def backward(
    spec: GroupedSpec, config: GroupedConfig, operands: Operands, outputs: Outputs, residuals: None, cotangents: Outputs
) -> Operands:
    del outputs, residuals
    lhs, rhs, sizes = operands
    dout = cotangents.out.astype(lhs.dtype)
    vmem = config.vmem_bytes
    d_lhs = rows_product("grouped_gemm_grad_lhs", config.tile("grad_lhs"), vmem, dout, rhs, sizes, 1, lhs.dtype)
    shared = rhs.shape[0] != spec.batch  # then a sum over the batch follows, in float32
    d_rhs = weights_product(config.tile("grad_rhs"), vmem, lhs, dout, sizes, jnp.float32 if shared else rhs.dtype)
    return Operands(d_lhs, sum_shared(d_rhs, rhs), None)


PALLAS_TPU = Implementation("pallas_tpu", "tpu", forward, backward, why_not, heuristic, GroupedConfig)
