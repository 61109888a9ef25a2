"""Products with `CodeTensor`s: tiles of columns are dequantized one after the other, each for one call of a kernel.

The dense weight never exists as a whole: neither in the forward pass, nor for the gradient of the other operand, which
dequantizes the tiles again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from vishwamai.core.errors import ShapeError, UnsupportedError
from vishwamai.core.qtensor import undifferentiable
from vishwamai.core.quantized.code_tensor import CodeTensor

if TYPE_CHECKING:
    from jax.typing import DTypeLike


TILE_BYTES = 8 << 20  # of dense tiles at a time
_GRANULE = 128  # columns: lanes of a TPU


def tile_columns(weights: Sequence[CodeTensor], dtype: DTypeLike) -> int:
    """Columns of a tile, of all `weights` at once: `TILE_BYTES` of them, in multiples of 128."""
    *_, n = shape = weights[0].shape
    column = len(weights) * math.prod(shape[:-1]) * jnp.dtype(dtype).itemsize
    return min(n, max(_GRANULE, TILE_BYTES // max(column, 1) // _GRANULE * _GRANULE))


def by_columns(
    function: str,
    product: Callable[..., Any],
    weights: Sequence[CodeTensor],
    dtype: DTypeLike,
    vectors: Sequence[jax.Array | None] = (),
) -> jax.Array:
    """`product(*dense weights, *vectors)`, `[..., N]`, of tiles of columns.

    Args:
      function: the public function, for errors.
      product: takes the dense tiles `[..., K, columns]` in `dtype`, and the same columns of `vectors`.
      vectors: arrays `[..., N]`, or None.

    Raises:
      ShapeError: the weights differ in shape.
    """
    first = weights[0]
    for weight in weights:
        if not isinstance(weight, CodeTensor):
            raise ShapeError(
                f"{function}: one weight is {first}, but another is not a CodeTensor; quantize both or none."
            )
        if weight.shape != first.shape:
            raise ShapeError(f"{function}: the weights are {first} and {weight}; pass two of one shape.")
    guarded: Any = undifferentiable(f"{function}: a weight is a CodeTensor", *_arrays(weights))
    weights = jax.tree.unflatten(jax.tree.structure(tuple(weights)), guarded[0])
    n, tile = first.shape[-1], tile_columns(weights, dtype)

    def part(start: Any, count: int) -> jax.Array:
        dense = (w.columns(start, count).dequantize(dtype) for w in weights)
        cut = (None if v is None else jax.lax.dynamic_slice_in_dim(v, start, count, axis=-1) for v in vectors)
        return product(*dense, *cut)

    count = n // tile if tile else 0
    if count <= 1 and n == tile:
        return part(0, n)
    again = jax.checkpoint(lambda start: part(start, tile))
    tiles = jax.lax.map(again, jnp.arange(count) * tile)  # [count, ..., tile]
    out = jnp.moveaxis(tiles, 0, -2).reshape(*tiles.shape[1:-1], count * tile)
    return out if n % tile == 0 else jnp.concatenate([out, part(count * tile, n % tile)], axis=-1)


def _arrays(weights: Sequence[CodeTensor]) -> tuple[Any, ...]:
    return jax.tree.leaves(tuple(weights)), ()


def check_options(function: str, weight: str, **options: object) -> None:
    """Raises UnsupportedError for an option that a product with a CodeTensor does not take."""
    for name, value in options.items():
        if value is not None and value is not False:
            raise UnsupportedError(
                f"{function}: `{weight}` is a CodeTensor, and `{name}` is {value!r}; leave `{name}` out, or pass "
                "the array that `dequantize` gives."
            )
