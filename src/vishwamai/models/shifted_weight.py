"""A quantized weight whose blocks also have a shift, as those of ggml's Q4_1, Q5_1, Q4_K and Q5_K have: a least number
that is no multiple of the scale.

    w[k, n] = values[k, n] * scales[b, n] + shifts[b, n]    where b is the block of row k
    x @ w   = x @ (values * scales) + sums(x) @ shifts      where sums(x)[b] adds up block b of x

The first product is any kernel's of the weight without shifts; the second is as small as the scales.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

import vishwamai
from vishwamai.core.qtensor import QTensor, expand
from vishwamai.core.quantized.packed_qtensor import PackedQTensor
from vishwamai.core.weight import WrappedWeight
from vishwamai.models.blocks import linear

if TYPE_CHECKING:
    from jax import Array
    from jax.typing import DTypeLike
    from jaxtyping import Float


@functools.partial(jax.tree_util.register_dataclass, data_fields=("weight", "shifts"), meta_fields=())
@dataclasses.dataclass(frozen=True)
class ShiftedWeight(WrappedWeight):
    """A weight in blocks, each with a number that is added to all of its own.

    Attributes:
      weight: `[*experts, in, out]`, values and scales in blocks along axis -2.
      shifts: float32 `[*experts, blocks, out]`.

    >>> from vishwamai import quantize
    >>> weight = ShiftedWeight(quantize(jnp.ones((64, 2)), "int4", axis=-2, block_size=32), jnp.ones((2, 2)))
    >>> (jnp.ones((1, 64)) @ weight).tolist()
    [[128.0, 128.0]]
    """

    weight: QTensor | PackedQTensor
    shifts: Float[Array, "*experts blocks out"]

    @property
    def tensor(self) -> QTensor:
        """The weight without its shifts, unpacked."""
        return self.weight if isinstance(self.weight, QTensor) else self.weight.unpack()

    @property
    def ndim(self) -> int:
        return self.shifts.ndim

    def dequantize(self) -> jax.Array:
        """The weight in float32."""
        weight = self.tensor
        return weight.dequantize() + expand(self.shifts, -2, self._block_size, weight.shape[-2])

    def product(self, x: jax.Array, out_dtype: DTypeLike | None) -> jax.Array:
        base = linear(x, self.weight, out_dtype=jnp.float32)
        return (base + linear(self._sums(x), self.shifts)).astype(out_dtype or x.dtype)

    def grouped(self, x: jax.Array, group_sizes: jax.Array) -> jax.Array:
        base = vishwamai.grouped_gemm(x, self.weight, group_sizes, out_dtype=jnp.float32)
        return (base + vishwamai.grouped_gemm(self._sums(x), self.shifts, group_sizes)).astype(x.dtype)

    @property
    def _block_size(self) -> int:
        assert self.weight.block_size is not None
        return self.weight.block_size

    def _sums(self, x: jax.Array) -> jax.Array:
        """float32 sums of the blocks of `x` `[..., in]`."""
        wide, count = x.astype(jnp.float32), self.shifts.shape[-2]
        missing = count * self._block_size - x.shape[-1]
        wide = jnp.pad(wide, ((0, 0),) * (x.ndim - 1) + ((0, missing),)) if missing else wide
        return wide.reshape(*x.shape[:-1], count, self._block_size).sum(-1)
