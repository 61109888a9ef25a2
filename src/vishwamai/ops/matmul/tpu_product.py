"""One product of the TPU kernel: the tiles of each operand, their index maps, and the call."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from vishwamai.core.pallas import call
from vishwamai.core.tpu_dequantize import Operand
from vishwamai.core.types import ABSENT, AnyArray, IndexMap, PyTree, Ref
from vishwamai.ops.matmul import tpu_serpentine, tpu_stream
from vishwamai.ops.matmul.spec import INTEGERS, Blocked, MatmulSpec, joint_groups
from vishwamai.ops.matmul.tpu_kernel import MatmulRefs, kernel
from vishwamai.ops.matmul.tpu_operands import array_bytes, describe, stored
from vishwamai.ops.matmul.tpu_tiles import EXACT_INT8_TERMS, VMEM_GRANULE, MatmulConfig, fit


def product(
    spec: MatmulSpec,
    config: MatmulConfig,
    phase: str,
    lhs: AnyArray,
    rhs: PyTree,
    lhs_axis: int,
    rhs_axis: int,
    groups: int,
    out_dtype: jnp.dtype,
    *,
    bias: AnyArray = None,
    scale_a: jax.Array | None = None,
    scale_b: AnyArray = None,
    activation: str | None = None,
    keep_preactivation: bool = False,
) -> tuple[AnyArray, ...]:
    """`(activation(scale * (lhs @ rhs) + bias), preactivation or None)`, `[groups, lhs's free axis, rhs's free axis]`;
    see `gradient.Product`.
    """
    m, n, k = lhs.shape[3 - lhs_axis], rhs.shape[3 - rhs_axis], lhs.shape[lhs_axis]
    native = config.native_8bit
    integers = spec.compute_dtype == jnp.int8 and lhs.dtype in INTEGERS and rhs.dtype in INTEGERS
    total = jnp.int32 if integers else jnp.float32
    wide = jnp.float32 if spec.compute_dtype == jnp.float32 else jnp.bfloat16
    if (
        phase == "forward"
        and tpu_stream.applies(config, lhs, rhs, lhs_axis, rhs_axis, (bias, scale_a, scale_b))
        and (native or not integers or config.block_k <= EXACT_INT8_TERMS)
    ):
        how = (bias, scale_a, scale_b, activation, keep_preactivation)
        return tpu_stream.product(config, lhs, rhs, rhs_axis, out_dtype, total, wide, spec.precision, *how)
    bm, bn, bk = fit(config.tiles(phase), m, n, k, lhs_axis, rhs_axis)
    if integers and not native:
        bk = min(bk, EXACT_INT8_TERMS)  # sums in float32 stay exact integers up to this depth
    k_tiles = pl.cdiv(k, bk)
    summed = joint_groups(lhs, rhs) if groups == 1 else 1  # groups whose products add up in one result
    steps = summed * k_tiles

    def group(x: jax.Array | Blocked, g: jax.Array, r: jax.Array) -> int | jax.Array:
        if x.shape[0] == 1:  # shared by all groups
            return 0
        return lax.div(r, k_tiles) if summed > 1 else g  # summed groups are part of the depth

    grid = (groups, pl.cdiv(m, bm), pl.cdiv(n, bn), steps)
    divisible = m % bm == n % bn == k % bk == 0 and steps == k_tiles > 1
    serpentine = (
        tpu_serpentine.Serpentine(*grid)
        if config.serpentine and phase == "forward" and divisible and not keep_preactivation
        else None
    )

    def depth(i: AnyArray, j: AnyArray, r: AnyArray) -> AnyArray:
        if serpentine is not None:
            return serpentine.depth(i, j, r)
        return r if summed == 1 else lax.rem(r, k_tiles)

    def column(i: AnyArray, j: jax.Array) -> AnyArray:
        return j if serpentine is None else serpentine.column(i, j)

    def lhs_index(g: AnyArray, i: AnyArray, j: AnyArray, r: AnyArray) -> PyTree:
        step = depth(i, j, r)
        return (group(lhs, g, r), *((step, i) if lhs_axis == 1 else (i, step)))

    def rhs_index(g: AnyArray, i: AnyArray, j: AnyArray, r: AnyArray) -> PyTree:
        step = depth(i, j, r)
        return (group(rhs, g, r), *((step, column(i, j)) if rhs_axis == 1 else (column(i, j), step)))

    def per_column(x: jax.Array | None) -> pl.BlockSpec | None:  # [G or 1, 1, N or 1]
        if x is None:
            return None
        shared = x.shape[2] == 1
        return pl.BlockSpec(
            (None, 1, 1 if shared else bn),
            lambda g, i, j, r: (g if x.shape[0] > 1 else 0, 0, 0 if shared else column(i, j)),
        )

    def per_row(x: jax.Array | None) -> pl.BlockSpec | None:  # [G or 1, M or 1, 1]
        if x is None:
            return None
        shared = x.shape[1] == 1
        return pl.BlockSpec(
            (None, 1 if shared else bm, 1),
            lambda g, i, j, r: (g if x.shape[0] > 1 else 0, 0 if shared else i, 0),
        )

    def tile_along_k(x: PyTree, axis: int, free: int) -> int:
        return bk if not isinstance(x, Blocked) or x.axis == axis else free

    reading = (describe(lhs, tile_along_k(lhs, lhs_axis, bm)), describe(rhs, tile_along_k(rhs, rhs_axis, bn)))

    def block_scales(x: PyTree, how: Operand, shape: tuple[int, int], index: IndexMap) -> pl.BlockSpec | None:
        """As the tiles of their operand, K in blocks; or all of K."""
        if not isinstance(x, Blocked):
            return None
        sizes = list(shape)
        sizes[how.k_axis] = min(pl.cdiv(shape[how.k_axis], x.size), x.scales.shape[x.axis])
        if not how.direct:
            sizes[how.k_axis] = x.scales.shape[x.axis]

        def scales_index(*ids: AnyArray) -> PyTree:
            ids_of_scale = list(index(*ids))
            if not how.direct:
                ids_of_scale[x.axis] = 0
            return tuple(ids_of_scale)

        return pl.BlockSpec((None, *sizes), scales_index)

    bias, scale_b = (None if x is None else x[:, None, :] for x in (bias, scale_b))
    scale_a = None if scale_a is None else scale_a[:, :, None]  # [G or 1, M or 1, 1]
    lhs_shape, rhs_shape = (bk, bm) if lhs_axis == 1 else (bm, bk), (bk, bn) if rhs_axis == 1 else (bn, bk)
    scales = tuple(x.scales if isinstance(x, Blocked) else None for x in (lhs, rhs))
    factors = dict(lhs=stored(lhs), rhs=stored(rhs))
    vectors = dict(bias=bias, scale_a=scale_a, scale_b=scale_b)
    blocks = dict(
        lhs=pl.BlockSpec((None, *lhs_shape), lhs_index),
        rhs=pl.BlockSpec((None, *rhs_shape), rhs_index),
        bias=per_column(bias),
        scale_a=per_row(scale_a),
        scale_b=per_column(scale_b),
        lhs_scales=block_scales(lhs, reading[0], lhs_shape, lhs_index),
        rhs_scales=block_scales(rhs, reading[1], rhs_shape, rhs_index),
    )
    arrays = factors | vectors | dict(lhs_scales=scales[0], rhs_scales=scales[1])
    out_spec = pl.BlockSpec((None, bm, bn), lambda g, i, j, r: (g, i, j))
    if serpentine is not None:
        out_spec = pl.BlockSpec(memory_space=pl.ANY)  # the serpentine copies its results itself
    out = ((groups, m, n), out_dtype, out_spec)
    # Chosen for the forward product, whose depth a gradient's is not: `block_k` whole where it does not divide it into
    # parts that lanes can be read by.
    parts = bk % config.chunk_k == 0 and (config.chunk_k % 128 == 0 or config.chunk_k == bk)
    aligned = all(config.chunk_k % how.granule == 0 for how in reading if how.direct)
    chunk_k = config.chunk_k if parts and aligned else bk
    plain = all(x is None for x in (bias, scale_a, scale_b, activation)) and out_dtype == total
    separate = (steps > 1 or chunk_k < bk) and not plain

    def body(buffers: Ref = ABSENT, semaphores: Ref = ABSENT, **by_name: Ref) -> None:
        refs = MatmulRefs(**by_name)
        i, j, step = (pl.program_id(axis) for axis in (1, 2, 3))
        result = (
            None if serpentine is None else tpu_serpentine.SerpentineResult(serpentine, refs.out, buffers, semaphores)
        )
        if result is not None:
            result.begin()
            refs = refs._replace(out=result.ref)

        def offset(x: PyTree, axis: int, free: jax.Array) -> AnyArray:
            if not isinstance(x, Blocked):
                return 0
            return depth(i, j, step) * bk if x.axis == axis else free

        kernel(
            refs,
            axes=(lhs_axis - 1, rhs_axis - 1),
            operands=reading,
            wide=wide,
            depth=k,
            block_k=bk,
            chunk_k=chunk_k,
            steps=steps,
            step=step,
            offsets=(offset(lhs, lhs_axis, i * bm), offset(rhs, rhs_axis, column(i, j) * bn)),
            precision=spec.precision,
            native=native,
            activation=activation,
        )
        if result is not None:
            result.end()

    preactivation = out if keep_preactivation else None
    return call(
        body,
        name=f"matmul_{phase}",
        grid=grid,
        inputs={ref: None if x is None else (in_hbm(x), blocks[ref]) for ref, x in arrays.items()},
        outputs=dict(out=out, preactivation=preactivation),
        scratch=dict(
            sum=pltpu.VMEM((bm, bn), total) if separate else None,
            **({} if serpentine is None else tpu_serpentine.scratch(bm, bn, out_dtype)),
        ),
        semantics=("parallel" if serpentine is None else "arbitrary",) * 3 + ("arbitrary",),
        vmem_bytes=config.vmem_bytes,
        vmem_granule=VMEM_GRANULE,
        flops=2 * max(groups, summed) * m * n * k,
        bytes_accessed=sum(map(array_bytes, (lhs, rhs, *(x for x in vectors.values() if x is not None))))
        + (2 if keep_preactivation else 1) * groups * m * n * jnp.dtype(out_dtype).itemsize,
        transcendentals=0 if activation in (None, "relu", "relu2") else groups * m * n,
    )


def in_hbm(x: jax.Array) -> jax.Array:
    """`x` where the kernel's own pipeline takes it from: where VMEM has room for all of a small operand, TPU7x's
    compiler copies it there first, and nothing hides that copy. One element may be in scalar memory already, which the
    compiler does not take back.
    """
    return x if x.size == 1 else pltpu.with_memory_space_constraint(x, pltpu.HBM)
