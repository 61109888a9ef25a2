"""One step of the TPU's matrix product: the product of two tiles, in the numbers that the chip multiplies, and the
epilogue of the last one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from vishwamai.core.pallas import dot, zero_past
from vishwamai.core.precision import FP8_DTYPES
from vishwamai.core.tpu_dequantize import Operand
from vishwamai.core.types import AnyArray, Ref
from vishwamai.ops.matmul.epilogue import activate
from vishwamai.ops.matmul.spec import INTEGERS

_INT8 = jnp.dtype(jnp.int8)


class MatmulRefs(NamedTuple):
    """The references of one step; what a product has no use for is None."""

    lhs: Ref  # [block_m, block_k], or [block_k, block_m]
    rhs: Ref  # [block_k, block_n], or [block_n, block_k]
    bias: Ref  # [1, block_n]
    scale_a: Ref  # [block_m or 1, 1]
    scale_b: Ref  # [1, block_n or 1]
    lhs_scales: Ref  # scales of blocks of K
    rhs_scales: Ref
    out: Ref  # [block_m, block_n]
    preactivation: Ref  # [block_m, block_n]
    sum: Ref  # [block_m, block_n], a scratch; None where the sum is `out` itself


def _split(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """x as the sum of two bfloat16 numbers, to about 16 bits."""
    high = x.astype(jnp.bfloat16)  # the upper 8 bits of the significand
    return high, (x - high.astype(jnp.float32)).astype(jnp.bfloat16)


def tile_product(lhs: jax.Array, rhs: jax.Array, axes: tuple[int, int], precision: str, native: bool) -> jax.Array:
    """The product of two tiles, `[bm, bn]`, float32 or, for int8 with int8, int32.

    Args:
      axes: the contracted axis of each.
      precision: mode of float32 products.
      native: the chip multiplies these 8-bit types itself.
    """
    if lhs.dtype in INTEGERS and rhs.dtype in INTEGERS:
        if native:
            return dot(lhs.astype(_INT8), rhs.astype(_INT8), axes, jnp.int32)  # the matrix unit's own product
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
    # Three passes of bfloat16 ("high"). low * low is below float32's rounding of the sum and is left out.
    small = dot(lhs_low, rhs_high, axes, jnp.float32) + dot(lhs_high, rhs_low, axes, jnp.float32)
    return small + dot(lhs_high, rhs_high, axes, jnp.float32)  # the small terms first, for accuracy


def kernel(
    refs: MatmulRefs,
    *,
    axes: tuple[int, int],
    operands: tuple[Operand, Operand],
    wide: Any,
    depth: int,
    block_k: int,
    chunk_k: int,
    steps: int,
    step: AnyArray,
    offsets: tuple[object, object],
    precision: str,
    native: bool,
    activation: str | None,
    own_product: Callable[[], jax.Array] | None = None,
) -> None:
    """One step: a tile of the sum grows by one product; the last step applies the epilogue and stores.

    Args:
      axes: the contracted axis of lhs and of rhs.
      operands: how lhs and rhs are read; wide: the dtype that narrow ones are dequantized to.
      depth: length of the contracted axis.
      block_k: depth of the tiles; chunk_k: depth of what is multiplied at once, which divides it.
      steps: steps that one tile takes: tiles of the contracted axis, times the groups that are summed; step: which of
        them this is.
      offsets: first index along K of the blocks of lhs and of rhs, for operands with block scales.
      own_product: forms the product of a whole tile where the caller knows a better way.
    """
    out_ref, sum_ref = refs.out, refs.sum
    tiles = pl.cdiv(depth, block_k)
    tail = depth - (tiles - 1) * block_k  # valid depth of the last tile

    def chunk_product(start: int, size: int, valid: int) -> jax.Array:
        if own_product is not None:
            return own_product()
        lhs = operands[0].tile(refs.lhs, refs.lhs_scales, axes[0], start, size, offsets[0], wide)
        rhs = operands[1].tile(refs.rhs, refs.rhs_scales, axes[1], start, size, offsets[1], wide)
        if valid != size:
            lhs, rhs = zero_past(lhs, axes[0], valid), zero_past(rhs, axes[1], valid)  # both: 0 * NaN is NaN
        return tile_product(lhs, rhs, axes, precision, native)

    def store(total: jax.Array) -> None:
        z = total  # [block_m, block_n]
        if out_ref.dtype != jnp.int32:
            z = z.astype(jnp.float32)
        for scale in (refs.scale_a, refs.scale_b):
            if scale is not None:
                z = z * scale[...]
        if refs.bias is not None:
            z = z + refs.bias[...].astype(jnp.float32)
        if refs.preactivation is not None:
            refs.preactivation[...] = z.astype(refs.preactivation.dtype)  # a residual of the gradient
        out_ref[...] = activate(activation, z).astype(out_ref.dtype)

    if steps == 1 and chunk_k == block_k:
        store(chunk_product(0, block_k, tail))
        return

    # An epilogue of a few operations hides behind the matrix unit in every step, which is cheaper than a pass of its
    # own in the last one.
    light = activation is None
    separate = sum_ref is not None
    if not separate:
        sum_ref = out_ref  # of the sum's dtype, without an epilogue: its block stays in VMEM

    def grow(first: jax.Array, start: Any, size: int, valid: int) -> None:
        before = sum_ref[...]
        # A choice, not a branch: scratch holds anything before the first step, and NaN must not reach the sum.
        total = jnp.where(first, jnp.zeros_like(before), before) + chunk_product(start, size, valid)
        sum_ref[...] = total
        if separate and light:
            store(total)

    def whole_tile() -> None:
        chunks = block_k // chunk_k

        def accumulate(c: jax.Array, carry: None) -> None:
            first = (step == 0) & (c == 0)
            grow(first, pl.multiple_of(c * chunk_k, chunk_k), chunk_k, chunk_k)

        if chunks == 1:
            grow(step == 0, 0, block_k, block_k)
        else:
            lax.fori_loop(0, chunks, accumulate, None)

    if tail == block_k:
        whole_tile()
    else:
        last_tile = lax.rem(step, tiles) == tiles - 1
        pl.when(jnp.logical_not(last_tile))(whole_tile)

        @pl.when(last_tile)
        def _() -> None:
            grow(step == 0, 0, min(pl.cdiv(tail, 128) * 128, block_k), tail)  # whole lanes that cover the tail

    if not light:

        @pl.when(step == steps - 1)
        def _() -> None:
            store(sum_ref[...])
