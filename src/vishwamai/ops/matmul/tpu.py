"""The matrix product on TPU: tiles with the contracted axis innermost, a float32 sum in VMEM, the epilogue in its last step (Pallas).

One kernel serves the forward product and both products of the gradient: which axis of each operand is contracted is a matter of the matrix unit's
dimension numbers and of the index maps, so nothing is transposed or copied in HBM, and a shared operand is read through an index map that ignores the
group. Rows and columns past the end of a ragged array compute what nobody stores; past the end of the contracted axis both operands are zeroed, because
what the memory holds there may be NaN.

float32 products are built from bfloat16 ones (see `core.precision`); int8 and fp8 use the chip's own units where it has them, and are widened to
bfloat16, which holds them exactly, where it has not. Narrower operands, and those with a scale for every block of K, are dequantized tile by tile
(`tpu_dequantize`), so HBM holds them only as they are stored. A product of few rows reads `b` through a ring of buffers of its own (`tpu_stream`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from vishwamai.core.hardware import Chip
from vishwamai.core.op import Implementation
from vishwamai.core.pallas import TPU_DTYPES, dot
from vishwamai.core.precision import FP8_DTYPES
from vishwamai.core.sharding import out_struct
from vishwamai.ops.matmul import gradient, tpu_snake, tpu_stream
from vishwamai.ops.matmul.epilogue import activate
from vishwamai.ops.matmul.spec import INTEGERS, SMALL_FLOATS, Blocked, MatmulSpec, Operands, Outputs, joint_groups
from vishwamai.ops.matmul.tiles import EXACT_INT8_TERMS, MatmulConfig, fit, heuristic
from vishwamai.ops.matmul.tpu_dequantize import Operand, array_bytes, describe, stored

_INT8 = jnp.dtype(jnp.int8)


def why_not(spec: MatmulSpec, chip: Chip | None) -> str | None:
    """The reason why this kernel cannot serve `spec`, or None."""
    for name, operand in zip(spec.operands._fields, spec.operands, strict=True):
        scale_bits = name.startswith("scale") and operand is not None and operand.dtype == jnp.uint8
        if operand is not None and not scale_bits and operand.dtype not in (*TPU_DTYPES, *INTEGERS, *SMALL_FLOATS):
            return f"`{name}` is {operand.dtype.name}, and the TPU computes in float32, bfloat16 and 8-bit numbers."
    if spec.out_dtype not in (*TPU_DTYPES, jnp.dtype(jnp.int32)):
        return f"`out_dtype` is {spec.out_dtype.name}, and the TPU computes in float32 and bfloat16."
    if 0 in (spec.groups, spec.m, spec.n, spec.k):
        return "an array is empty."
    if spec.compute_dtype == _INT8 and chip is not None and chip.name == "v4":
        # Without an int8 unit the operands are widened by the vector unit, of which v4 has half as much as later chips (docs/performance.md).
        return "v4 has no int8 unit, and by the compiler's schedule XLA's own product is more than twice as fast."
    return None


# --- Products of tiles -----------------------------------------------------------------------------------------------------------------------------


def _split(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """x as the sum of two bfloat16 numbers, to about 16 bits."""
    high = x.astype(jnp.bfloat16)
    return high, (x - high.astype(jnp.float32)).astype(jnp.bfloat16)


def tile_product(lhs: jax.Array, rhs: jax.Array, axes: tuple[int, int], precision: str, native: bool) -> jax.Array:
    """The product of two tiles, `[bm, bn]`, float32 or, for int8 with int8, int32.

    Args:
      axes: the contracted axis of each.
      precision: of float32 products.
      native: the chip multiplies these 8-bit types itself.
    """
    if lhs.dtype in INTEGERS and rhs.dtype in INTEGERS:
        if native:
            return dot(lhs.astype(_INT8), rhs.astype(_INT8), axes, jnp.int32)
        widened = dot(lhs.astype(jnp.bfloat16), rhs.astype(jnp.bfloat16), axes, jnp.float32)
        return widened.astype(jnp.int32)  # exact: a tile is no deeper than EXACT_INT8_TERMS
    if lhs.dtype in FP8_DTYPES and rhs.dtype in FP8_DTYPES and native:
        return dot(lhs, rhs, axes, jnp.float32)
    wide = jnp.float32 if jnp.float32 in (lhs.dtype, rhs.dtype) else jnp.bfloat16
    lhs, rhs = lhs.astype(wide), rhs.astype(wide)
    if wide == jnp.bfloat16:
        return dot(lhs, rhs, axes, jnp.float32)
    if precision == "highest":
        return dot(lhs, rhs, axes, jnp.float32, precision=lax.Precision.HIGHEST)
    (lhs_high, lhs_low), (rhs_high, rhs_low) = _split(lhs), _split(rhs)
    small = dot(lhs_low, rhs_high, axes, jnp.float32) + dot(lhs_high, rhs_low, axes, jnp.float32)
    return small + dot(lhs_high, rhs_high, axes, jnp.float32)


def _zero_past(x: jax.Array, axis: int, size: int) -> jax.Array:
    """x with everything from index `size` of `axis` on set to zero."""
    keep = lax.broadcasted_iota(jnp.int32, x.shape, axis) < size
    return jnp.where(keep, x, jnp.zeros_like(x))


# --- The kernel ------------------------------------------------------------------------------------------------------------------------------------


def _kernel(
    refs: Any,
    *,
    axes: tuple[int, int],
    operands: tuple[Operand, Operand],
    wide: Any,
    depth: int,
    block_k: int,
    chunk_k: int,
    steps: int,
    step: Any,
    offsets: tuple[Any, Any],
    precision: str,
    native: bool,
    activation: str | None,
    own_product: Callable[[], jax.Array] | None = None,
) -> None:
    """One step: a tile of the sum grows by one product; the last step applies the epilogue and stores.

    Args:
      refs: lhs, rhs, bias, scale_a, scale_b, block scales of lhs and of rhs, out, preactivation, sum (a scratch; None where the sum is out itself).
      axes: the contracted axis of lhs and of rhs.
      operands: how lhs and rhs are read; wide: the dtype that narrow ones are dequantized to.
      depth: length of the contracted axis.
      block_k: depth of the tiles; chunk_k: depth of what is multiplied at once, which divides it.
      steps: steps that one tile takes: tiles of the contracted axis, times the groups that are summed; step: which of them this is.
      offsets: where the blocks of lhs and of rhs begin along K, for those with block scales.
      own_product: forms the product of a whole tile where the caller knows a better way.
    """
    lhs_ref, rhs_ref, bias_ref, scale_a_ref, scale_b_ref, lhs_scales, rhs_scales, out_ref, z_ref, sum_ref = refs
    tiles = pl.cdiv(depth, block_k)
    tail = depth - (tiles - 1) * block_k

    def chunk_product(start: Any, size: int, valid: int) -> jax.Array:
        if own_product is not None:
            return own_product()
        lhs = operands[0].tile(lhs_ref, lhs_scales, axes[0], start, size, offsets[0], wide)
        rhs = operands[1].tile(rhs_ref, rhs_scales, axes[1], start, size, offsets[1], wide)
        if valid != size:
            lhs, rhs = _zero_past(lhs, axes[0], valid), _zero_past(rhs, axes[1], valid)
        return tile_product(lhs, rhs, axes, precision, native)

    def store(total: jax.Array) -> None:
        z = total
        if out_ref.dtype != jnp.int32:
            z = z.astype(jnp.float32)
        for scale in (scale_a_ref, scale_b_ref):
            if scale is not None:
                z = z * scale[...]
        if bias_ref is not None:
            z = z + bias_ref[...].astype(jnp.float32)
        if z_ref is not None:
            z_ref[...] = z.astype(z_ref.dtype)
        out_ref[...] = activate(activation, z).astype(out_ref.dtype)

    if steps == 1 and chunk_k == block_k:
        store(chunk_product(0, block_k, tail))
        return

    # An epilogue of a few operations hides behind the matrix unit in every step, which is cheaper than a pass of its own in the last one.
    light = activation is None
    separate = sum_ref is not None
    if not separate:
        sum_ref = out_ref

    def grow(first: Any, start: Any, size: int, valid: int) -> None:
        before = sum_ref[...]
        total = jnp.where(first, jnp.zeros_like(before), before) + chunk_product(start, size, valid)
        sum_ref[...] = total
        if separate and light:
            store(total)

    def whole_tile() -> None:
        chunks = block_k // chunk_k

        def one(c: jax.Array, carry: None) -> None:
            first = (step == 0) & (c == 0)
            grow(first, pl.multiple_of(c * chunk_k, chunk_k), chunk_k, chunk_k)

        if chunks == 1:
            grow(step == 0, 0, block_k, block_k)
        else:
            lax.fori_loop(0, chunks, one, None)

    if tail == block_k:
        whole_tile()
    else:
        last_tile = lax.rem(step, tiles) == tiles - 1
        pl.when(jnp.logical_not(last_tile))(whole_tile)

        @pl.when(last_tile)
        def _() -> None:
            grow(step == 0, 0, min(pl.cdiv(tail, 128) * 128, block_k), tail)

    if not light:

        @pl.when(step == steps - 1)
        def _() -> None:
            store(sum_ref[...])


def product(
    spec: MatmulSpec,
    config: MatmulConfig,
    which: str,
    lhs: Any,
    rhs: Any,
    lhs_axis: int,
    rhs_axis: int,
    groups: int,
    out_dtype: Any,
    *,
    bias: Any = None,
    scale_a: Any = None,
    scale_b: Any = None,
    activation: str | None = None,
    keep_preactivation: bool = False,
) -> tuple[jax.Array, Any]:
    """`(activation(scale * (lhs @ rhs) + bias), preactivation or None)`, `[groups, lhs's free axis, rhs's free axis]`; see `gradient.Product`."""
    m, n, k = lhs.shape[3 - lhs_axis], rhs.shape[3 - rhs_axis], lhs.shape[lhs_axis]
    native = config.native_8bit
    integers = spec.compute_dtype == _INT8 and lhs.dtype in INTEGERS and rhs.dtype in INTEGERS
    total = jnp.int32 if integers else jnp.float32
    wide = jnp.float32 if spec.compute_dtype == jnp.float32 else jnp.bfloat16
    if (
        which == "forward"
        and tpu_stream.applies(config, lhs, rhs, lhs_axis, rhs_axis, (bias, scale_a, scale_b))
        and (native or not integers or config.block_k <= EXACT_INT8_TERMS)
    ):
        how = (bias, scale_a, scale_b, activation, keep_preactivation)
        return tpu_stream.product(_kernel, config, lhs, rhs, rhs_axis, out_dtype, total, wide, spec.precision, *how)
    bm, bn, bk = fit(config.tiles(which), m, n, k, lhs_axis, rhs_axis)
    if integers and not native:
        bk = min(bk, EXACT_INT8_TERMS)
    k_tiles = pl.cdiv(k, bk)
    summed = joint_groups(lhs, rhs) if groups == 1 else 1
    steps = summed * k_tiles

    def group(x: Any, g: Any, r: Any) -> Any:
        if x.shape[0] == 1:
            return 0
        return lax.div(r, k_tiles) if summed > 1 else g

    grid = (groups, pl.cdiv(m, bm), pl.cdiv(n, bn), steps)
    whole = m % bm == n % bn == k % bk == 0 and steps == k_tiles > 1
    snake = tpu_snake.Snake(*grid) if config.snake and which == "forward" and whole and not keep_preactivation else None

    def depth(i: Any, j: Any, r: Any) -> Any:
        if snake is not None:
            return snake.depth(i, j, r)
        return r if summed == 1 else lax.rem(r, k_tiles)

    def column(i: Any, j: Any) -> Any:
        return j if snake is None else snake.column(i, j)

    def lhs_index(g: Any, i: Any, j: Any, r: Any) -> Any:
        at = depth(i, j, r)
        return (group(lhs, g, r), *((at, i) if lhs_axis == 1 else (i, at)))

    def rhs_index(g: Any, i: Any, j: Any, r: Any) -> Any:
        at = depth(i, j, r)
        return (group(rhs, g, r), *((at, column(i, j)) if rhs_axis == 1 else (column(i, j), at)))

    def per_column(x: Any) -> Any:  # [G or 1, 1, N or 1]
        if x is None:
            return None
        one = x.shape[2] == 1
        return pl.BlockSpec(
            (None, 1, 1 if one else bn),
            lambda g, i, j, r: (g if x.shape[0] > 1 else 0, 0, 0 if one else column(i, j)),
        )

    def per_row(x: Any) -> Any:  # [G or 1, M or 1, 1]
        if x is None:
            return None
        one = x.shape[1] == 1
        return pl.BlockSpec(
            (None, 1 if one else bm, 1),
            lambda g, i, j, r: (g if x.shape[0] > 1 else 0, 0 if one else i, 0),
        )

    def tile_along_k(x: Any, axis: int, free: int) -> int:
        return bk if not isinstance(x, Blocked) or x.axis == axis else free

    reading = (describe(lhs, tile_along_k(lhs, lhs_axis, bm)), describe(rhs, tile_along_k(rhs, rhs_axis, bn)))

    def block_scales(x: Any, how: Operand, shape: tuple[int, int], index: Any) -> Any:
        """As the tiles of their operand, K in blocks; or all of K."""
        if not isinstance(x, Blocked):
            return None
        sizes = list(shape)
        sizes[how.k_axis] = min(pl.cdiv(shape[how.k_axis], x.size), x.scales.shape[x.axis])
        if not how.direct:
            sizes[how.k_axis] = x.scales.shape[x.axis]

        def scales_index(*ids: Any) -> Any:
            at = list(index(*ids))
            if not how.direct:
                at[x.axis] = 0
            return tuple(at)

        return pl.BlockSpec((None, *sizes), scales_index)

    bias, scale_b = (None if x is None else x[:, None, :] for x in (bias, scale_b))
    scale_a = None if scale_a is None else scale_a[:, :, None]
    lhs_shape, rhs_shape = (bk, bm) if lhs_axis == 1 else (bm, bk), (bk, bn) if rhs_axis == 1 else (bn, bk)
    scales = tuple(x.scales if isinstance(x, Blocked) else None for x in (lhs, rhs))
    operands = (stored(lhs), stored(rhs), bias, scale_a, scale_b, *scales)
    in_specs = (
        pl.BlockSpec((None, *lhs_shape), lhs_index),
        pl.BlockSpec((None, *rhs_shape), rhs_index),
        per_column(bias),
        per_row(scale_a),
        per_column(scale_b),
        block_scales(lhs, reading[0], lhs_shape, lhs_index),
        block_scales(rhs, reading[1], rhs_shape, rhs_index),
    )
    out = out_struct((groups, m, n), out_dtype, *(x for x in operands if x is not None))
    outs = (out, out if keep_preactivation else None)
    out_spec = pl.BlockSpec((None, bm, bn), lambda g, i, j, r: (g, i, j))
    if snake is not None:
        out_spec = pl.BlockSpec(memory_space=pl.ANY)
    # Chosen for the forward product, whose depth a gradient's is not: `block_k` whole where it does not divide it into parts that lanes can be read by.
    parts = bk % config.chunk_k == 0 and (config.chunk_k % 128 == 0 or config.chunk_k == bk)
    aligned = all(config.chunk_k % how.granule == 0 for how in reading if how.direct)
    chunk_k = config.chunk_k if parts and aligned else bk
    plain = all(x is None for x in (bias, scale_a, scale_b, activation)) and out_dtype == total
    scratch = [pltpu.VMEM((bm, bn), total)] if (steps > 1 or chunk_k < bk) and not plain else []
    own = [] if snake is None else tpu_snake.scratch(bm, bn, out_dtype)
    present = [x is not None for x in (*operands, *outs)]

    def body(*refs: Any) -> None:
        remaining = iter(refs[: len(refs) - len(own)])
        *given, out_ref, z_ref = [next(remaining) if here else None for here in present]
        i, j, step = (pl.program_id(axis) for axis in (1, 2, 3))
        result = None if snake is None else tpu_snake.Result(snake, out_ref, *refs[-len(own) :])
        if result is not None:
            result.begin()
            out_ref = result.ref

        def offset(x: Any, axis: int, free: Any) -> Any:
            if not isinstance(x, Blocked):
                return 0
            return depth(i, j, step) * bk if x.axis == axis else free

        _kernel(
            (*given, out_ref, z_ref, next(remaining, None)),
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

    results = pl.pallas_call(
        body,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=0,
            grid=grid,
            in_specs=[s for s in in_specs if s is not None],
            out_specs=[out_spec for o in outs if o is not None],
            scratch_shapes=[*scratch, *own],
        ),
        out_shape=[o for o in outs if o is not None],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel" if snake is None else "arbitrary",) * 3 + ("arbitrary",),
            vmem_limit_bytes=config.vmem_limit_bytes,
        ),
        cost_estimate=pl.CostEstimate(
            flops=2 * max(groups, summed) * m * n * k,
            bytes_accessed=sum(map(array_bytes, (lhs, rhs, *(x for x in (bias, scale_a, scale_b) if x is not None))))
            + len([o for o in outs if o is not None]) * groups * m * n * jnp.dtype(out_dtype).itemsize,
            transcendentals=0 if activation in (None, "relu", "relu2") else groups * m * n,
        ),
        name=f"matmul_{which}",
    )(*(in_hbm(x) for x in operands if x is not None))
    return results[0], results[1] if keep_preactivation else None


def in_hbm(x: jax.Array) -> jax.Array:
    """`x` where the kernel's own pipeline takes it from: where VMEM has room for all of a small operand, TPU7x's compiler copies it there first, and
    nothing hides that copy. One element may be in scalar memory already, which the compiler does not take back."""
    return x if x.size == 1 else pltpu.with_memory_space_constraint(x, pltpu.HBM)


# --- Forward and backward --------------------------------------------------------------------------------------------------------------------------


def forward(spec: MatmulSpec, config: MatmulConfig, operands: Operands, residuals: bool) -> tuple[Outputs, Any]:
    a, b, scale_a, scale_b = spec.factors(operands)
    out, z = product(
        spec,
        config,
        "forward",
        a,
        b,
        1 if spec.transpose_a else 2,
        2 if spec.transpose_b else 1,
        spec.groups,
        spec.out_dtype,
        bias=operands.bias,
        scale_a=scale_a,
        scale_b=scale_b,
        activation=spec.activation,
        keep_preactivation=residuals and spec.keeps_preactivation,
    )
    return Outputs(out), z


def backward(
    spec: MatmulSpec, config: MatmulConfig, operands: Operands, outputs: Outputs, residuals: Any, cotangents: Outputs
) -> Operands:
    def run(which: str, *args: Any) -> jax.Array:
        return product(spec, config, which, *args)[0]

    return gradient.backward(spec, run, operands, outputs, residuals, cotangents.out)


def notes(spec: MatmulSpec, chip: Chip | None) -> tuple[str, ...]:
    """What `explain` adds: where the operands are widened, how float32 is multiplied, where the kernel gains nothing."""
    a, b = spec.operands.a.dtype, spec.operands.b.dtype
    said = []
    without = f"{chip.name} has" if chip else "some chips have"
    if spec.compute_dtype == _INT8:
        if chip is None or not chip.has_int8:
            said.append(f"int8 is multiplied as bfloat16 in exact pieces, for {without} no int8 unit")
    elif a in FP8_DTYPES and b in FP8_DTYPES:
        missing = [d.name for d in dict.fromkeys((a, b)) if chip is None or d.name not in chip.fp8_formats]
        if missing:
            said.append(f"8-bit floats are widened to bfloat16, for {without} no unit for {' and '.join(missing)}")
    else:
        said += [
            f"`{name}` is widened from {dtype.name} to {spec.compute_dtype.name} tile by tile"
            for name, dtype in (("a", a), ("b", b))
            if dtype != spec.compute_dtype
        ]
    if spec.precision != "default":
        said.append(f"float32 is multiplied by {'six' if spec.precision == 'highest' else 'three'} bfloat16 products")
    if chip and spec.bytes_moved / chip.hbm_bandwidth > spec.flops / chip.peak(spec.compute_dtype.name):
        said.append("memory bounds this product: XLA's own is as fast")
    return tuple(said)


PALLAS_TPU = Implementation("pallas_tpu", "tpu", forward, backward, why_not, heuristic, MatmulConfig, notes)
