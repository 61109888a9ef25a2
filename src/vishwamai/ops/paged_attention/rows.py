"""Rows of new tokens into a pool of pages: the one step of `update_pages` that touches the pool.

On GPUs XLA's scatter moves the new rows only, and writes in place where the pool is donated; a kernel writes numbers of
4 bits (`gpu_update.put`). On TPUs it takes one row after the other, and a kernel copies many at once (`tpu_update`),
where rows are whole tiles. On the CPU the scatter widens the whole pool of bfloat16 to float32 and back, and copies a
pool of any type if there is a single token. There a native kernel copies each row to its place. It takes the pool as
the caller holds it: XLA copies a donated array that is reshaped before it is changed in place.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from vishwamai.core import ffi, sharding
from vishwamai.core.config import current_config
from vishwamai.core.execute import by_platform
from vishwamai.core.promotion import by_default
from vishwamai.core.qtensor import bits
from vishwamai.core.spec import is_symbolic
from vishwamai.core.types import AnyArray
from vishwamai.ops.paged_attention import gpu_update, tpu_update
from vishwamai.ops.paged_attention.reference import XLA

_HANDLER = "vishwamai_update_pages"


def put(pool: AnyArray, rows: AnyArray, page: AnyArray, slot: AnyArray) -> AnyArray:
    """`pool.at[page, slot].set(rows, mode="drop")`, in place where the pool is donated.

    Args:
      pool: `[pages, slots, ...]`.
      rows: `[tokens, ...]`, in the pool's dtype.
      page: `[tokens]` int32; a row whose page is out of range is not written. No two rows have one place.
      slot: `[tokens]` int32.
    """
    arrays = pool, rows, page.astype(jnp.int32), slot.astype(jnp.int32)
    return sharding.follow_explicit_axes(_put, functools.partial(_axes, pool.ndim), *arrays)


def _axes(rank: int) -> sharding.Axes:
    """What a row has may be split over devices, such as its heads."""
    row = tuple(f"row__{i}" for i in range(rank - 2))
    pool = ("pages", "slots", *row)
    return sharding.Axes((pool, ("tokens", *row), ("tokens",), ("tokens",)), pool, frozenset(row))


def _scatter(pool: jax.Array, rows: jax.Array, page: jax.Array, slot: AnyArray) -> jax.Array:
    return pool.at[page, slot].set(rows, mode="drop")


def _native(pool: AnyArray, *others: AnyArray) -> AnyArray:
    return ffi.call(_HANDLER, (ffi.result(pool.shape, pool.dtype),), pool, *others, aliases={0: 0})[0]


def _whole_bytes(pool: AnyArray) -> bool:
    """Whether every row of the pool begins with a byte."""
    return math.prod(pool.shape[2:]) * bits(pool.dtype) % 8 == 0


def _by(kernel: Callable[..., object], rank: int) -> Any:
    """The kernel on each device's share of the columns, or the scatter where a share is not whole bytes."""

    def share(pool: AnyArray, *others: AnyArray) -> AnyArray:
        return (kernel if _whole_bytes(pool) else _scatter)(pool, *others)

    return sharding.partitioned(share, _axes(rank))


@jax.custom_vjp
def _put(pool: AnyArray, rows: AnyArray, page: AnyArray, slot: AnyArray) -> AnyArray:
    return _mapped(*sharding.match_varying((pool, rows, page, slot)))


def _put_fwd(
    pool: object, rows: object, page: jax.Array, slot: AnyArray
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return _put(pool, rows, page, slot), (page, slot)


def _put_bwd(places: tuple[object, object], cotangent: AnyArray) -> tuple[jax.Array | None, ...]:
    page, slot = places
    rows = cotangent.at[page, slot].get(mode="fill", fill_value=0)
    return cotangent.at[page, slot].set(0, mode="drop"), rows, None, None


_put.defvjp(by_default(_put_fwd), by_default(_put_bwd))


@jax.custom_batching.custom_vmap
@by_default
def _mapped(pool: AnyArray, rows: AnyArray, page: AnyArray, slot: AnyArray) -> AnyArray:
    if is_symbolic((pool, rows)):
        return _scatter(pool, rows, page, slot)
    branches: dict[str, Any] = {}
    if _whole_bytes(pool) and ffi.why_not(None, _HANDLER) is None:
        branches["cpu"] = _by(_native, pool.ndim)
    if current_config().implementation != XLA.name:
        if tpu_update.why_not(pool, rows) is None:
            branches["tpu"] = tpu_update.put
        if gpu_update.why_not_put(pool, rows) is None:
            branches["cuda"] = _by(gpu_update.put, pool.ndim)
    return by_platform(_scatter, branches, pool, rows, page, slot)


@_mapped.def_vmap
@by_default
def _fold(size: int, in_batched: list[bool], *arrays: Any) -> tuple[Any, bool]:
    """A mapped axis makes more pages."""
    pool, rows, page, slot = (
        x if batched else jnp.broadcast_to(x[None], (size, *x.shape))
        for x, batched in zip(arrays, in_batched, strict=True)
    )
    pages = pool.shape[1]
    first = pages * jnp.arange(size, dtype=jnp.int32)[:, None]
    page = jnp.where((page >= 0) & (page < pages), page + first, size * pages)
    flat = (x.reshape(-1, *x.shape[2:]) for x in (pool, rows, page, slot))
    return _mapped(*flat).reshape(pool.shape), True
