"""A product of few rows on TPU: its time is that of reading `b`, so transfers must never stop.

The usual pipeline of a grid holds two blocks and begins one transfer a step; between the end of one and the beginning of the next the memory idles. Here
`b` stays in HBM and the kernel keeps several tiles on their way into a ring of buffers, while everything else (the rows of `a`, bias, scales) lies in
VMEM for the whole product. On chips with two cores to a device each takes half of the columns.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from vishwamai.core.sharding import out_struct
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
    # A store queues behind the tiles that are on their way, so a result waits for a few more and is stored with them.
    share = max(c for c in range(1, columns + 1) if columns % c == 0 and (c <= _SHARE or c == 1))
    reading = (Operand(jnp.dtype(lhs.dtype)), describe(rhs, bk))
    how = reading[1]
    tile = (bk, bn) if rhs_axis == 1 else (bn, bk)
    scales = rhs.scales if isinstance(rhs, Blocked) else None
    scale_tile = None if scales is None else list(tile)
    if isinstance(rhs, Blocked) and scale_tile is not None:
        scale_tile[how.k_axis] = pl.cdiv(bk, rhs.size) if how.direct else rhs.scales.shape[rhs.axis]

    resident = (stored(lhs), bias, None if scale_a is None else scale_a[:, :, None], scale_b)
    out = out_struct((1, m, n), out_dtype, *(x for x in (*resident, stored(rhs), scales) if x is not None))
    outs = (out, out if keep_preactivation else None)
    separate = steps > 1 and not (all(x is None for x in resident[1:]) and activation is None and out_dtype == total)

    def body(*refs: Any) -> None:
        remaining = iter(refs)

        def take(present: Any) -> Any:
            return None if present is None else next(remaining)

        lhs_ref, bias_ref, scale_a_ref, scale_b_ref = map(take, resident)
        rhs_hbm, scales_hbm = next(remaining), take(scales)
        out_ref, z_ref = map(take, outs)
        tiles_ref, tile_semaphores = next(remaining), next(remaining)
        scale_tiles, scale_semaphores = take(scales), take(scales)
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

        @pl.when(turn == 0)
        def _() -> None:
            for first in range(min(ring - 1, turns)):
                begin(first)

        pl.when(turn + ring - 1 < turns)(lambda: begin(turn + ring - 1))
        for copy in copies(turn):
            copy.wait()
        slot = lax.rem(turn, ring)
        at = pl.ds(pl.multiple_of((core * columns + column) * bn, bn), bn)

        of_block = pl.ds(pl.multiple_of(lax.rem(column, share) * bn, bn), bn)

        def vector(ref: Any) -> Any:
            return ref if ref is None or ref.shape[1] == 1 else ref.at[:, at]

        kernel(
            (
                lhs_ref if steps == 1 else lhs_ref.at[:, pl.ds(pl.multiple_of(step * bk, bk), bk)],
                tiles_ref.at[slot],
                vector(bias_ref),
                scale_a_ref,
                vector(scale_b_ref),
                None,
                None if scales is None else scale_tiles.at[slot],
                out_ref.at[:, of_block],
                None if z_ref is None else z_ref.at[:, of_block],
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
        )

    def whole(x: Any) -> Any:
        return pl.BlockSpec((None, *x.shape[1:]) if x.ndim == 3 else x.shape, lambda *_: (0,) * x.ndim)

    scratch = [pltpu.VMEM((ring, *tile), stored(rhs).dtype), pltpu.SemaphoreType.DMA((ring,))]
    if scales is not None and scale_tile is not None:
        scratch += [pltpu.VMEM((ring, *scale_tile), scales.dtype), pltpu.SemaphoreType.DMA((ring,))]
    present = [o for o in outs if o is not None]
    stores = columns // share
    out_spec = pl.BlockSpec(
        (None, m, share * bn), lambda core, column, step: (0, 0, core * stores + lax.div(column, share))
    )
    scratch += [pltpu.VMEM((m, bn), total)] if separate else []
    in_hbm = pl.BlockSpec(memory_space=pl.ANY)
    results = pl.pallas_call(
        body,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=0,
            grid=(cores, columns, steps),
            in_specs=[whole(x) for x in resident if x is not None] + [in_hbm] * (1 if scales is None else 2),
            out_specs=[out_spec] * len(present),
            scratch_shapes=scratch,
        ),
        out_shape=present,
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary", "arbitrary"), vmem_limit_bytes=config.vmem_limit_bytes
        ),
        cost_estimate=pl.CostEstimate(
            flops=2 * m * n * k,
            bytes_accessed=sum(map(array_bytes, (rhs, *(x for x in resident if x is not None))))
            + len(present) * m * n * jnp.dtype(out_dtype).itemsize,
            transcendentals=0 if activation in (None, "relu", "relu2") else m * n,
        ),
        name="matmul_stream",
    )(*(x for x in resident if x is not None), *(x for x in (stored(rhs), scales) if x is not None))
    return results[0], results[1] if keep_preactivation else None
