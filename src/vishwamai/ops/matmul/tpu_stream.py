"""A product of few rows on TPU: its time is that of reading `b`, so transfers must never stop.

The usual pipeline of a grid holds two blocks and begins one transfer a step; between the end of one and the beginning
of the next the memory idles. Here `b` stays in HBM and the kernel keeps several tiles on their way into a ring of
buffers, while everything else (the rows of `a`, bias, scales) lies in VMEM for the whole product. Nothing goes through
the grid's own blocks: it would wait for the rows before the first tile is asked for, and for a result one step after
its store began, behind every tile on its way. On chips with two cores to a device each takes half of the columns.

What it gains, by the schedule of 16 rows by 4096 x 14336, compared with the usual pipeline on v5e, v6e and TPU7x: int8
82, 42 and 19 us instead of 88, 46 and 22, int4 43, 22 and 11 instead of 52, 27 and 14; bfloat16 0 to 3 %.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from vishwamai.core.pallas import call
from vishwamai.core.qtensor import scale_values
from vishwamai.core.tpu_dequantize import Operand
from vishwamai.core.types import ABSENT, AnyArray, PyTree, Ref, Slice, Transfer
from vishwamai.ops.matmul import tpu_unpack
from vishwamai.ops.matmul.spec import Blocked, joint_groups
from vishwamai.ops.matmul.tpu_kernel import MatmulRefs, kernel
from vishwamai.ops.matmul.tpu_operands import array_bytes, describe, stored
from vishwamai.ops.matmul.tpu_tiles import VMEM_GRANULE, MatmulConfig

_SHARE = 8


def applies(
    config: MatmulConfig, lhs: AnyArray, rhs: PyTree, lhs_axis: int, rhs_axis: int, vectors: tuple[PyTree, ...]
) -> bool:
    """Whether the ring's tiles divide this problem (a config may come from a table, or the arrays may be shards of what
    it was made for).
    """
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
    config: MatmulConfig,
    lhs: AnyArray,
    rhs: AnyArray,
    rhs_axis: int,
    out_dtype: Any,
    total: Any,
    wide: Any,
    precision: str,
    bias: AnyArray,
    scale_a: AnyArray,
    scale_b: AnyArray,
    activation: str | None,
    keep_preactivation: bool,
) -> tuple[jax.Array, Any]:
    """`(activation(scale * (lhs @ rhs) + bias), preactivation or None)`, `[1, M, N]`.

    Args:
      total: dtype of the sum; wide: of dequantized numbers.
    """
    m, k, n = lhs.shape[1], lhs.shape[2], rhs.shape[3 - rhs_axis]
    bn, bk, cores, ring = config.block_n, config.block_k, config.cores, config.ring
    steps, columns = k // bk, n // bn // cores
    turns = columns * steps
    # A store is a transfer among the tiles', so a few results are stored together; they are awaited when their buffer
    # is needed again.
    share = max(c for c in range(1, columns + 1) if columns % c == 0 and (c <= _SHARE or c == 1))
    stores = columns // share
    reading = (Operand(jnp.dtype(lhs.dtype)), describe(rhs, bk))
    how = reading[1]
    narrow = stored(rhs).dtype
    unpack = config.unpack if tpu_unpack.serves(config.unpack, narrow, lhs.dtype, rhs_axis) else "convert"
    # The scales of deep blocks multiply what a block adds to the sum: a number for each result instead of one for each
    # weight, and nothing is rounded.
    in_parts = how.direct and how.size % 128 == 0 and bk % how.size == 0 and wide == lhs.dtype == jnp.bfloat16
    in_kernel = (in_parts or (unpack != "convert" and not how.size)) and wide == jnp.bfloat16
    unpack = unpack if in_kernel else "convert"
    part_k = how.size if in_parts else bk
    added = tpu_unpack.ADDED[narrow] if unpack == "words" else 0
    tile = (bk, bn) if rhs_axis == 1 else (bn, bk)
    scales = rhs.scales if isinstance(rhs, Blocked) else None
    scale_tile = None if scales is None else list(tile)
    if isinstance(rhs, Blocked) and scale_tile is not None:
        scale_tile[how.k_axis] = pl.cdiv(bk, rhs.size) if how.direct else rhs.scales.shape[rhs.axis]

    vectors = dict(bias=bias, scale_a=None if scale_a is None else scale_a[:, :, None], scale_b=scale_b)
    resident = dict(lhs=stored(lhs), **{name: x for name, x in vectors.items() if x is not None})
    results = ("out", "preactivation") if keep_preactivation else ("out",)
    separate = steps > 1 and not (len(resident) == 1 and activation is None and out_dtype == total)

    def body(
        rhs_hbm: Ref,
        scales_hbm: Ref,
        held_semaphores: Ref,
        out_semaphores: Ref,
        tiles_ref: Ref,
        tile_semaphores: Ref,
        scale_tiles: Ref,
        scale_semaphores: Ref,
        excess_ref: Ref,
        sum_ref: Ref,
        **refs: Ref,
    ) -> None:
        resident_refs = {name: refs[f"{name}_vmem"] for name in resident}
        lhs_ref = resident_refs["lhs"]  # [m, k]
        outs_hbm = [refs[f"{name}_hbm"] for name in results]
        out_buffers = [refs[f"{name}_buffers"] for name in results]  # [2, m, share * block_n]
        core, column, step = pl.program_id(0), pl.program_id(1), pl.program_id(2)
        turn = column * steps + step

        def copies(turn: int | jax.Array) -> list[Transfer]:
            """The transfers of the tile, and of its scales, that a turn of this core takes."""
            slot = lax.rem(turn, ring)
            j, r = core * columns + lax.div(turn, steps), lax.rem(turn, steps)

            def window(extents: Sequence[int], deep: bool) -> tuple[Slice, ...]:
                index = (r if deep else 0, j) if rhs_axis == 1 else (j, r if deep else 0)
                return tuple(pl.ds(i * size, size) for i, size in zip(index, extents, strict=True))

            transfers: list[Transfer] = [
                pltpu.make_async_copy(
                    rhs_hbm.at[(0, *window(tile, True))], tiles_ref.at[slot], tile_semaphores.at[slot]
                )
            ]
            if scale_tile is not None:
                source = scales_hbm.at[(0, *window(scale_tile, how.direct))]
                transfers.append(pltpu.make_async_copy(source, scale_tiles.at[slot], scale_semaphores.at[slot]))
            return transfers

        def begin(turn: int | jax.Array) -> None:
            for copy in copies(turn):
                copy.start()

        def store(group: int | jax.Array) -> list[Transfer]:
            """The transfers of the results of `share` columns."""
            slot = lax.rem(group, 2)
            columns = pl.ds(pl.multiple_of((core * stores + group) * share * bn, share * bn), share * bn)
            return [
                pltpu.make_async_copy(buffer.at[slot], hbm.at[0, :, columns], out_semaphores.at[i, slot])
                for i, (buffer, hbm) in enumerate(zip(out_buffers, outs_hbm, strict=True))
            ]

        def stored_before(group: int | jax.Array) -> None:
            for copy in store(group):
                copy.wait()

        @pl.when(turn == 0)
        def _() -> None:
            loads = []
            for i, (name, ref) in enumerate(resident_refs.items()):
                source = refs[f"{name}_hbm"]
                source = source.at[0] if len(source.shape) == 3 else source
                loads.append(pltpu.make_async_copy(source, ref, held_semaphores.at[i]))
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
        columns_of_step = pl.ds(pl.multiple_of((core * columns + column) * bn, bn), bn)
        of_block = pl.ds(pl.multiple_of(lax.rem(column, share) * bn, bn), bn)
        out_refs = [buffer.at[lax.rem(group, 2), :, of_block] for buffer in out_buffers]

        def vector(ref: Ref | None) -> Any:
            return ref if ref is None or ref.shape[1] == 1 else ref.at[:, columns_of_step]

        def tile_product() -> jax.Array:
            """What the tile adds to the sum, `[m, bn]`."""
            x = lhs_ref[...] if steps == 1 else lhs_ref[:, pl.ds(pl.multiple_of(step * bk, bk), bk)]
            w, spoils = tpu_unpack.to_bfloat16(tiles_ref.at[slot], unpack)
            result = jnp.zeros((), jnp.float32)
            for i in range(bk // part_k):
                rows = slice(i * part_k, (i + 1) * part_k)
                part = lax.dot_general(
                    x[:, rows],
                    w[rows] if rhs_axis == 1 else w[:, rows],
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
            MatmulRefs(
                lhs=lhs_ref if steps == 1 else lhs_ref.at[:, pl.ds(pl.multiple_of(step * bk, bk), bk)],
                rhs=tiles_ref.at[slot],
                bias=vector(resident_refs.get("bias")),
                scale_a=resident_refs.get("scale_a", ABSENT),
                scale_b=vector(resident_refs.get("scale_b")),
                lhs_scales=ABSENT,
                rhs_scales=ABSENT if scales is None else scale_tiles.at[slot],
                out=out_refs[0],
                preactivation=out_refs[1] if keep_preactivation else ABSENT,
                sum=sum_ref,
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
            own_product=tile_product if in_kernel else None,
        )

        @pl.when(lax.rem(turn, share * steps) == share * steps - 1)
        def _() -> None:
            for copy in store(group):
                copy.start()

        @pl.when(turn == turns - 1)
        def _() -> None:
            for last in range(max(0, stores - 2), stores):
                stored_before(last)

    in_hbm = pl.BlockSpec(memory_space=pl.ANY)
    scale_ring = None if scale_tile is None or scales is None else pltpu.VMEM((ring, *scale_tile), scales.dtype)
    out, *preactivation = call(
        body,
        name="matmul_stream",
        grid=(cores, columns, steps),
        inputs={
            **{f"{name}_hbm": (x, in_hbm) for name, x in resident.items()},
            "rhs_hbm": (stored(rhs), in_hbm),
            "scales_hbm": (scales, in_hbm),
        },
        outputs={f"{name}_hbm": ((1, m, n), out_dtype, in_hbm) for name in results},
        scratch={
            **{f"{name}_vmem": pltpu.VMEM(x.shape[-2:], x.dtype) for name, x in resident.items()},
            "held_semaphores": pltpu.SemaphoreType.DMA((len(resident),)),
            **{f"{name}_buffers": pltpu.VMEM((2, m, share * bn), out_dtype) for name in results},
            "out_semaphores": pltpu.SemaphoreType.DMA((len(results), 2)),
            "tiles_ref": pltpu.VMEM((ring, *tile), stored(rhs).dtype),
            "tile_semaphores": pltpu.SemaphoreType.DMA((ring,)),
            "scale_tiles": scale_ring,
            "scale_semaphores": None if scale_ring is None else pltpu.SemaphoreType.DMA((ring,)),
            "excess_ref": pltpu.VMEM((m, k // part_k * 128), jnp.float32) if added else None,
            "sum_ref": pltpu.VMEM((m, bn), total) if separate else None,
        },
        semantics=("parallel", "arbitrary", "arbitrary"),
        vmem_bytes=config.vmem_bytes,
        vmem_granule=VMEM_GRANULE,
        flops=2 * m * n * k,
        bytes_accessed=sum(map(array_bytes, (rhs, *resident.values())))
        + len(results) * m * n * jnp.dtype(out_dtype).itemsize,
        transcendentals=0 if activation in (None, "relu", "relu2") else m * n,
    )
    return out, preactivation[0] if keep_preactivation else None
