"""A product of few rows on TPU: its time is that of reading `b`, so transfers must never stop.

The usual pipeline of a grid holds two blocks and begins one transfer a step; between the end of one and the beginning of the next the memory idles. Here
`b` stays in HBM and the kernel keeps several tiles on their way into a ring of buffers, while everything else (the rows of `a`, bias, scales) lies in
VMEM for the whole product. Nothing goes through the grid's own blocks: it would wait for the rows before the first tile is asked for, and for a result one
step after its store began, behind every tile on its way. On chips with two cores to a device each takes half of the columns.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from vishwamai.core.qtensor import scale_values
from vishwamai.core.sharding import out_struct
from vishwamai.ops.matmul import tpu_unpack
from vishwamai.ops.matmul.spec import Blocked, joint_groups
from vishwamai.ops.matmul.tiles import MatmulConfig
from vishwamai.ops.matmul.tpu_dequantize import Operand, array_bytes, describe, stored

_SHARE = 8


def applies(config: MatmulConfig, lhs: Any, rhs: Any, lhs_axis: int, rhs_axis: int, vectors: tuple[Any, ...]) -> bool:
    """Whether the ring's tiles divide this problem (a config may come from a table, or the arrays may be shards of what it was made for)."""
    k, n = rhs.shape[rhs_axis], rhs.shape[3 - rhs_axis]
    return (
        config.ring > 1
        and joint_groups(lhs, rhs, *vectors) == 1
        and lhs_axis == 2
        and not isinstance(lhs, Blocked)
        and config.block_k % 128 == config.block_n % 128 == 0
        and k % config.block_k == 0
        and n % (config.block_n * config.cores) == 0
    )


def product(
    kernel: Callable[..., None],
    config: MatmulConfig,
    lhs: Any,
    rhs: Any,
    rhs_axis: int,
    out_dtype: Any,
    total: Any,
    wide: Any,
    precision: str,
    bias: Any,
    scale_a: Any,
    scale_b: Any,
    activation: str | None,
    keep_preactivation: bool,
) -> tuple[jax.Array, Any]:
    """`(activation(scale * (lhs @ rhs) + bias), preactivation or None)`, `[1, M, N]`.

    Args:
      kernel: one step on a tile: `tpu._kernel`.
      total: dtype of the sum; wide: of dequantized numbers.
    """
    m, k, n = lhs.shape[1], lhs.shape[2], rhs.shape[3 - rhs_axis]
    bn, bk, cores, ring = config.block_n, config.block_k, config.cores, config.ring
    steps, columns = k // bk, n // bn // cores
    turns = columns * steps
    # A store is a transfer among the tiles', so a few results are stored together; they are awaited when their buffer is needed again.
    share = max(c for c in range(1, columns + 1) if columns % c == 0 and (c <= _SHARE or c == 1))
    stores = columns // share
    reading = (Operand(jnp.dtype(lhs.dtype)), describe(rhs, bk))
    how = reading[1]
    narrow = stored(rhs).dtype
    unpack = config.unpack if tpu_unpack.serves(config.unpack, narrow, lhs.dtype, rhs_axis) else "convert"
    # The scales of deep blocks multiply what a block adds to the sum: a number for each result instead of one for each weight, and nothing is rounded.
    in_parts = how.direct and how.size % 128 == 0 and bk % how.size == 0 and wide == lhs.dtype == jnp.bfloat16
    own = (in_parts or (unpack != "convert" and not how.size)) and wide == jnp.bfloat16
    unpack = unpack if own else "convert"
    part_k = how.size if in_parts else bk
    added = tpu_unpack.ADDED[narrow] if unpack == "words" else 0
    tile = (bk, bn) if rhs_axis == 1 else (bn, bk)
    scales = rhs.scales if isinstance(rhs, Blocked) else None
    scale_tile = None if scales is None else list(tile)
    if isinstance(rhs, Blocked) and scale_tile is not None:
        scale_tile[how.k_axis] = pl.cdiv(bk, rhs.size) if how.direct else rhs.scales.shape[rhs.axis]

    resident = (stored(lhs), bias, None if scale_a is None else scale_a[:, :, None], scale_b)
    held = [x for x in resident if x is not None]
    out = out_struct((1, m, n), out_dtype, *(x for x in (*resident, stored(rhs), scales) if x is not None))
    outs = (out, out if keep_preactivation else None)
    results = [o for o in outs if o is not None]
    separate = steps > 1 and not (all(x is None for x in resident[1:]) and activation is None and out_dtype == total)

    def body(*refs: Any) -> None:
        remaining = iter(refs)

        def take(present: Any) -> Any:
            return None if present is None else next(remaining)

        held_hbm = [next(remaining) for _ in held]
        rhs_hbm, scales_hbm = next(remaining), take(scales)
        outs_hbm = [next(remaining) for _ in results]
        held_refs, held_semaphores = [next(remaining) for _ in held], next(remaining)
        in_vmem = iter(held_refs)
        lhs_ref: Any
        lhs_ref, bias_ref, scale_a_ref, scale_b_ref = (None if x is None else next(in_vmem) for x in resident)
        out_buffers, out_semaphores = [next(remaining) for _ in results], next(remaining)
        tiles_ref, tile_semaphores = next(remaining), next(remaining)
        scale_tiles: Any = take(scales)
        scale_semaphores: Any = take(scales)
        excess_ref = next(remaining) if added else None
        sum_ref = next(remaining) if separate else None
        core, column, step = pl.program_id(0), pl.program_id(1), pl.program_id(2)
        turn = column * steps + step

        def copies(turn: Any) -> list[Any]:
            """The transfers of the tile, and of its scales, that a turn of this core takes."""
            slot = lax.rem(turn, ring)
            j, r = core * columns + lax.div(turn, steps), lax.rem(turn, steps)

            def window(extents: Any, deep: bool) -> tuple[Any, ...]:
                index = (r if deep else 0, j) if rhs_axis == 1 else (j, r if deep else 0)
                return tuple(pl.ds(i * size, size) for i, size in zip(index, extents, strict=True))

            found = [
                pltpu.make_async_copy(
                    rhs_hbm.at[(0, *window(tile, True))], tiles_ref.at[slot], tile_semaphores.at[slot]
                )
            ]
            if scales_hbm is not None:
                source = scales_hbm.at[(0, *window(scale_tile, how.direct))]
                found.append(pltpu.make_async_copy(source, scale_tiles.at[slot], scale_semaphores.at[slot]))
            return found

        def begin(turn: Any) -> None:
            for copy in copies(turn):
                copy.start()

        def store(group: Any) -> list[Any]:
            """The transfers of the results of `share` columns."""
            slot = lax.rem(group, 2)
            at = pl.ds(pl.multiple_of((core * stores + group) * share * bn, share * bn), share * bn)
            return [
                pltpu.make_async_copy(buffer.at[slot], hbm.at[0, :, at], out_semaphores.at[i, slot])
                for i, (buffer, hbm) in enumerate(zip(out_buffers, outs_hbm, strict=True))
            ]

        def stored_before(group: Any) -> None:
            for copy in store(group):
                copy.wait()

        @pl.when(turn == 0)
        def _() -> None:
            loads = [
                pltpu.make_async_copy(source.at[0] if len(source.shape) == 3 else source, ref, held_semaphores.at[i])
                for i, (source, ref) in enumerate(zip(held_hbm, held_refs, strict=True))
            ]
            for copy in loads:
                copy.start()
            for first in range(min(ring - 1, turns)):
                begin(first)
            for copy in loads:
                copy.wait()
            if unpack == "words":
                tpu_unpack.prepare(lhs_ref, excess_ref, narrow, part_k)

        pl.when(turn + ring - 1 < turns)(lambda: begin(turn + ring - 1))
        group = lax.div(column, share)
        pl.when((lax.rem(turn, share * steps) == 0) & (group >= 2))(lambda: stored_before(group - 2))
        for copy in copies(turn):
            copy.wait()
        slot = lax.rem(turn, ring)
        at = pl.ds(pl.multiple_of((core * columns + column) * bn, bn), bn)
        of_block = pl.ds(pl.multiple_of(lax.rem(column, share) * bn, bn), bn)
        out_refs = [buffer.at[lax.rem(group, 2), :, of_block] for buffer in out_buffers]

        def vector(ref: Any) -> Any:
            return ref if ref is None or ref.shape[1] == 1 else ref.at[:, at]

        def tile_product() -> jax.Array:
            """What the tile adds to the sum, `[m, bn]`."""
            x = lhs_ref[...] if steps == 1 else lhs_ref[:, pl.ds(pl.multiple_of(step * bk, bk), bk)]
            w, spoils = tpu_unpack.to_bfloat16(tiles_ref.at[slot], unpack)
            result = jnp.zeros((), jnp.float32)
            for i in range(bk // part_k):
                at = slice(i * part_k, (i + 1) * part_k)
                part = lax.dot_general(
                    x[:, at],
                    w[at] if rhs_axis == 1 else w[:, at],
                    (((1,), (rhs_axis - 1,)), ((), ())),
                    preferred_element_type=jnp.float32,
                )
                if excess_ref is not None:
                    lane = pl.multiple_of((step * (bk // part_k) + i) * 128, 128)
                    part -= jnp.concatenate([excess_ref[:, pl.ds(lane, 128)]] * (bn // 128), axis=1)
                if unpack in tpu_unpack.SCALE:
                    part *= tpu_unpack.SCALE[unpack]
                if in_parts:
                    part *= scale_values(scale_tiles[slot, i : i + 1, :], jnp.float32)
                result = part if i == 0 else result + part
            return result if spoils is None else result + spoils

        kernel(
            (
                lhs_ref if steps == 1 else lhs_ref.at[:, pl.ds(pl.multiple_of(step * bk, bk), bk)],
                tiles_ref.at[slot],
                vector(bias_ref),
                scale_a_ref,
                vector(scale_b_ref),
                None,
                None if scales is None else scale_tiles.at[slot],
                out_refs[0],
                out_refs[1] if keep_preactivation else None,
                sum_ref,
            ),
            axes=(1, rhs_axis - 1),
            operands=reading,
            wide=wide,
            depth=k,
            block_k=bk,
            chunk_k=bk,
            steps=steps,
            step=step,
            offsets=(0, step * bk),
            precision=precision,
            native=config.native_8bit,
            activation=activation,
            own_product=tile_product if own else None,
        )

        @pl.when(lax.rem(turn, share * steps) == share * steps - 1)
        def _() -> None:
            for copy in store(group):
                copy.start()

        @pl.when(turn == turns - 1)
        def _() -> None:
            for last in range(max(0, stores - 2), stores):
                stored_before(last)

    scratch = [pltpu.VMEM(x.shape[-2:], x.dtype) for x in held] + [pltpu.SemaphoreType.DMA((len(held),))]
    scratch += [pltpu.VMEM((2, m, share * bn), out_dtype) for _ in results]
    scratch += [pltpu.SemaphoreType.DMA((len(results), 2))]
    scratch += [pltpu.VMEM((ring, *tile), stored(rhs).dtype), pltpu.SemaphoreType.DMA((ring,))]
    if scales is not None and scale_tile is not None:
        scratch += [pltpu.VMEM((ring, *scale_tile), scales.dtype), pltpu.SemaphoreType.DMA((ring,))]
    scratch += [pltpu.VMEM((m, k // part_k * 128), jnp.float32)] if added else []
    scratch += [pltpu.VMEM((m, bn), total)] if separate else []
    in_hbm = pl.BlockSpec(memory_space=pl.ANY)
    found = pl.pallas_call(
        body,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=0,
            grid=(cores, columns, steps),
            in_specs=[in_hbm] * (len(held) + (1 if scales is None else 2)),
            out_specs=[in_hbm] * len(results),
            scratch_shapes=scratch,
        ),
        out_shape=results,
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary", "arbitrary"), vmem_limit_bytes=config.vmem_limit_bytes
        ),
        cost_estimate=pl.CostEstimate(
            flops=2 * m * n * k,
            bytes_accessed=sum(map(array_bytes, (rhs, *held))) + len(results) * m * n * jnp.dtype(out_dtype).itemsize,
            transcendentals=0 if activation in (None, "relu", "relu2") else m * n,
        ),
        name="matmul_stream",
    )(*held, *(x for x in (stored(rhs), scales) if x is not None))
    return found[0], found[1] if keep_preactivation else None
