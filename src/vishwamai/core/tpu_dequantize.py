"""Narrow numbers on TPU: tiles that become float32 or bfloat16 inside the chip, with a scale for every block of K.

Where K lies along sublanes, a block's scale is broadcast to its rows. Where it lies along lanes, or a tile does not
begin with a block, the matrix unit repeats the scales: a product with a matrix of zeros and ones, exact because every
sum has one term.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from vishwamai.core.qtensor import FP4, INT4, scale_values
from vishwamai.core.types import AnyArray, Ref

if TYPE_CHECKING:
    from jax.typing import DTypeLike


@dataclasses.dataclass(frozen=True)
class Operand:
    """How the kernel reads one factor of the product.

    Attributes:
      dtype: stored dtype; float4_e2m1fn comes as int4, its bits.
      size: numbers that share a scale along K; 0 without block scales.
      k_axis: axis (0 or 1) of the tile along which K lies, where there are block scales.
      direct: the tile comes with exactly its own scales, in rows; else with all of K's.
      granule: rows of a tile whose scales fill whole tiles of memory.
    """

    dtype: DTypeLike
    size: int = 0
    k_axis: int = 0
    direct: bool = False
    granule: int = 1

    @property
    def narrow(self) -> bool:
        """It must be unpacked before a product may take it."""
        return self.size > 0 or self.dtype == FP4

    def tile(
        self, ref: Ref, scales: Any, axis: int, start: int | jax.Array, size: int, offset: AnyArray, wide: DTypeLike
    ) -> jax.Array:
        """`size` numbers from `start` along `axis` of the block in `ref`, dequantized to `wide` where that is needed.

        Args:
          scales: the block of scales, or None.
          offset: first index of the block in `ref`, along K.
        """
        x = _slice(ref, axis, start, size)
        if not self.narrow:
            return x.astype(jnp.int8) if self.dtype == INT4 else x  # the vector unit selects no 4-bit numbers
        if self.size == 0:
            return widen(x, self.dtype, jnp.float32).astype(wide)
        extent = x.shape[self.k_axis]
        rows = pl.cdiv(extent, self.size)
        if axis != self.k_axis:  # a part of the columns, or of the rows, that have scales of their own
            block, row = _slice(scales, axis, start, size), 0
            block = block[:rows] if self.direct else block
        elif self.direct:
            first = start // self.size if isinstance(start, int) else lax.div(start, self.size)
            block, row = _slice(scales, 0, first, rows), start
        else:
            block, row = scales[...], start
        block = scale_values(block, jnp.float32)
        if self.direct:
            repeated = _repeat_rows(block, self.size, extent)
        else:
            repeated = _repeat(block, self.k_axis, self.size, offset + row, extent)
        return (widen(x, self.dtype, jnp.float32) * repeated).astype(wide)


def _slice(ref: Ref, axis: int, start: int | jax.Array, size: int) -> jax.Array:
    if size == ref.shape[axis]:
        return ref[...]
    return ref[:, pl.ds(start, size)] if axis == 1 else ref[pl.ds(start, size), :]


def widen(x: jax.Array, dtype: DTypeLike, wide: DTypeLike) -> jax.Array:
    """x in `wide`, exactly; a float4_e2m1fn is read from its bits, because most chips' compilers have no conversion.

    Exponent and mantissa, moved to where float32 has them, give f, which is the number where it is normal (1 and more).
    Below, where the leading one is not there, it is 2 f - 1, and that is the smaller of the two exactly there.
    """
    if dtype != FP4:
        return x.astype(wide)
    code = lax.bitcast_convert_type(x, INT4).astype(jnp.int32)  # the sign is extended
    f = lax.bitcast_convert_type(((code & 7) << 22) + (126 << 23), jnp.float32)
    size = lax.bitcast_convert_type(jnp.minimum(f, f + f - 1.0), jnp.int32)
    return lax.bitcast_convert_type(size | (code & jnp.int32(-(2**31))), jnp.float32).astype(wide)


def _repeat_rows(scales: jax.Array, size: int, extent: int) -> jax.Array:
    """`[blocks, columns]` as `[extent, columns]`, each row `size` times."""
    blocks, columns = scales.shape
    repeated = jnp.broadcast_to(scales[:, None, :], (blocks, size, columns)).reshape(blocks * size, columns)
    return repeated if blocks * size == extent else repeated[:extent]


def _repeat(scales: jax.Array, axis: int, size: int, offset: AnyArray, extent: int) -> jax.Array:
    """The scale of each of `extent` numbers from `offset` on along `axis`."""
    blocks = scales.shape[axis]
    shape = (extent, blocks) if axis == 0 else (blocks, extent)
    position = lax.broadcasted_iota(jnp.int32, shape, axis) + offset
    first = lax.broadcasted_iota(jnp.int32, shape, 1 - axis) * size
    chosen = ((position >= first) & (position < first + size)).astype(jnp.float32)
    pair = (chosen, scales) if axis == 0 else (scales, chosen)
    return lax.dot_general(
        *pair, (((1,), (0,)), ((), ())), preferred_element_type=jnp.float32, precision=lax.Precision.HIGHEST
    )


def scale_rows(size: int, dtype: DTypeLike) -> int:
    """How deep a tile must be, or divide, so that its blocks' scales fill whole tiles of memory: 8 rows of float32, 32
    of 8 bits.
    """
    return size * (32 if jnp.dtype(dtype).itemsize == 1 else 8)


def blocked_operand(dtype: DTypeLike, scales: Any, size: int, k_axis: int, tile_k: int, depth: int) -> Operand:
    """How tiles of `tile_k` numbers along K are read of a factor with a scale for each `size` of its `depth` along K.

    Args:
      dtype: its values' dtype; scales: its scales' dtype.
      k_axis: axis (0 or 1) of a tile along which K lies.
    """
    granule = scale_rows(size, scales)
    aligned = size % 8 == 0 and (tile_k % granule == 0 or tile_k >= depth)
    return Operand(jnp.dtype(dtype), size, k_axis, k_axis == 0 and aligned, granule)
