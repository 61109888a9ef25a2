"""How the TPU kernel reads a factor of the product, an array or a `Blocked`."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from vishwamai.core.qtensor import bits
from vishwamai.core.tpu_dequantize import Operand, blocked_operand
from vishwamai.core.types import AnyArray, PyTree
from vishwamai.ops.matmul.spec import Blocked


def describe(x: Any, tile_k: int) -> Operand:
    """How a tile of `tile_k` numbers along K of `x` (an array or a `Blocked`) is read."""
    if not isinstance(x, Blocked):
        return Operand(jnp.dtype(x.dtype))
    return blocked_operand(x.dtype, x.scales.dtype, x.size, x.axis - 1, tile_k, x.shape[x.axis])


def stored(x: PyTree) -> AnyArray:
    """The values alone."""
    return x.values if isinstance(x, Blocked) else x


def array_bytes(x: PyTree) -> int:
    """Bytes of an operand in HBM, its scales included."""
    parts = (x.values, x.scales) if isinstance(x, Blocked) else (x,)
    return sum(p.size * bits(p.dtype) // 8 for p in parts if p is not None)
