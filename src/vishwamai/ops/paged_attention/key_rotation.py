"""The rotation of new keys by their positions, on their way into the pages."""

from __future__ import annotations

import jax.numpy as jnp

from vishwamai.core.arrays import cast, fetched, namespace
from vishwamai.core.errors import ShapeError
from vishwamai.core.precision import accumulator_dtype
from vishwamai.core.spec import array_spec
from vishwamai.core.types import AnyArray, PyTree


def check_rope_tables(name: str, key: AnyArray, rope_tables: object, interleaved: bool) -> None:
    """Checks the tables of cos and sin against the keys that they are to turn; None is legal.

    Raises:
      ShapeError: they are not a pair of arrays `[positions, pairs]` of floats, or have more pairs than a key.
    """
    if rope_tables is None:
        if interleaved:
            raise ShapeError(f"{name}: `interleaved` is True without `rope_tables`; pass the tables of cos and sin.")
        return
    if not isinstance(rope_tables, (tuple, list)) or len(rope_tables) != 2:
        raise ShapeError(f"{name}: `rope_tables` is a {type(rope_tables).__name__}; pass a pair (cos, sin) of arrays.")
    cos, sin = (array_spec(x) for x in rope_tables)
    features = key.shape[-1]
    fits = len(cos.shape) == 2 and cos.shape == sin.shape and 2 <= 2 * cos.shape[1] <= features
    if not fits or not all(jnp.issubdtype(x.dtype, jnp.floating) for x in (cos, sin)):
        raise ShapeError(
            f"{name}: `rope_tables` are {cos} and {sin}, but a key has {features} features; pass cos and sin, floats "
            f"[positions, pairs] of 1 to {features // 2} pairs."
        )


def rotated(key: AnyArray, position: object, rope_tables: PyTree, interleaved: bool, latent: bool) -> AnyArray:
    """Keys turned by the angles of their positions: `apply_rope` of them, of JAX or torch.

    Args:
      key: `[tokens, kv_heads, head_dim]`, of which the first 2 `pairs` features turn; for latent pages
        `[tokens, columns]`, of which the last 2 `pairs` do.
      position: `[tokens]`. Where the tables have no such row, the features are NaN.
    """
    xp, dtype = namespace(key), accumulator_dtype(*(array_spec(x).dtype for x in (key, *rope_tables)))
    # A negative index would count from the end; such a token has no place, and any row will do.
    index = xp.clip(position, 0, None)
    cos, sin = (cast(fetched(table, index, float("nan")), dtype) for table in rope_tables)  # [tokens, pairs]
    sin = _joined(-sin, sin, interleaved)  # [tokens, 2 * pairs]
    cos = _joined(cos, cos, interleaved)
    if not latent:
        cos, sin = cos[:, None], sin[:, None]
    turning = cos.shape[-1]
    first = key.shape[-1] - turning if latent else 0
    x = key[..., first : first + turning]
    # Columns change places once and all else is elementwise, so XLA makes one fusion of it with the scaling.
    ends = (x[..., 1::2], x[..., 0::2]) if interleaved else (x[..., turning // 2 :], x[..., : turning // 2])
    turned = cast(x, dtype) * cos + cast(_joined(*ends, interleaved), dtype) * sin
    return xp.concatenate((key[..., :first], cast(turned, array_spec(key).dtype), key[..., first + turning :]), -1)


def _joined(a: AnyArray, b: object, interleaved: bool) -> AnyArray:
    """`[..., 2 * pairs]` of the first and of the second halves of pairs, `[..., pairs]` each."""
    xp = namespace(a)
    if interleaved:
        return xp.stack((a, b), -1).reshape(*a.shape[:-1], 2 * a.shape[-1])
    return xp.concatenate((a, b), -1)
