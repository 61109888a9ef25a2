"""The TPU kernel of `update_pages`: new rows go from HBM to their places there by copies, of which many run at once.
Rows that stand one after the other in a page, as a prompt's do, go together.

XLA's scatter takes the rows one after the other, and waits for each.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from vishwamai.core import pallas
from vishwamai.core.qtensor import bits
from vishwamai.core.types import AnyArray, Ref, Transfer

MOST_TOKENS = 1 << 15
"""Tokens whose places scalar memory holds: two numbers of 4 bytes each."""
_TOGETHER = 32
"""Rows of one copy, where they stand together."""
_FLYING = 64
"""Copies of each size that are under way at once."""
_CORES = 2
"""Parts of the tokens, for the two cores of a megacore chip."""


def why_not(pool: AnyArray, rows: AnyArray) -> str | None:
    """What keeps the kernel from these arrays, or None."""
    if pool.ndim != 4 or pool.shape[3] % pallas.LANES:
        return f"rows of {pool.shape[2:]} are no whole tiles of memory"
    words, rest = divmod(pool.shape[2] * bits(pool.dtype), 32)
    if rest or (words not in (1, 2, 4) and pool.shape[2] % 8):
        return f"rows of {pool.shape[2:]} of {pool.dtype.name} do not lie together: XLA keeps slots next to each other"
    if not 0 < rows.shape[0] <= MOST_TOKENS:
        return f"{rows.shape[0]} tokens, of 1 to {MOST_TOKENS}"
    return None


@functools.partial(jax.jit, inline=True)  # one trace for all calls of the same shapes
def put(pool: jax.Array, rows: jax.Array, page: jax.Array, slot: jax.Array) -> jax.Array:
    """See `rows.put`."""
    anywhere = pl.BlockSpec(memory_space=pl.ANY)
    (updated,) = pallas.call(
        _copy,
        name="update_pages",
        grid=(_CORES,),
        inputs={"rows": (rows, anywhere), "old": (pool, anywhere)},
        outputs={"pool": (pool.shape, pool.dtype, anywhere)},
        scalars={"page": page, "slot": slot},
        scratch={"copied": pltpu.SemaphoreType.DMA((2,))},
        aliases={"old": "pool"},
        semantics=("parallel",),
        vmem_bytes=0,
        flops=0,
        bytes_accessed=2 * rows.size * bits(rows.dtype) // 8,
    )
    return updated


def _copy(page: Ref, slot: Ref, rows: Ref, old: Ref, pool: Ref, copied: Ref) -> None:
    del old  # the same memory as `pool`
    tokens, pages, slots = rows.shape[0], *pool.shape[:2]
    group = min(_TOGETHER, slots)
    per_core = pallas.round_up(pl.cdiv(tokens, _CORES), group)  # whole groups of rows for each core
    first = pl.program_id(0) * per_core
    last = jnp.minimum(first + per_core, tokens)

    def copy(row: int | jax.Array, count: int, page: int | jax.Array, slot: int | jax.Array) -> Transfer:
        into = pool.at[page, pl.ds(slot, count)]
        return pltpu.make_async_copy(rows.at[pl.ds(row, count)], into, copied.at[int(count > 1)])

    def wait(count: int) -> None:
        copy(0, count, 0, 0).wait()  # whose size all copies of so many rows have

    def start(row: jax.Array, count: int, active: jax.Array, flying: jax.Array) -> jax.Array:
        @pl.when(active & (flying == _FLYING))
        def _() -> None:
            wait(count)

        @pl.when(active)
        def _() -> None:
            copy(row, count, page[row], slot[row]).start()

        return jnp.minimum(flying + active.astype(jnp.int32), _FLYING)

    def exists(row: jax.Array) -> jax.Array:
        return (page[row] >= 0) & (page[row] < pages)  # padding has no page

    def copy_row(row: jax.Array, flying: jax.Array) -> jax.Array:
        return start(row, 1, exists(row), flying)

    def some(n: jax.Array, flying: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        row = first + n * group
        stop = jnp.minimum(row + group, last)
        joined = exists(row) & (stop == row + group)
        for k in range(1, group):
            neighbour = jnp.minimum(row + k, tokens - 1)
            joined &= (page[neighbour] == page[row]) & (slot[neighbour] == slot[row] + k)  # consecutive slots of a page
        blocks = start(row, group, joined, flying[0])  # one copy for all rows of the group
        return blocks, lax.fori_loop(jnp.where(joined, stop, row), stop, copy_row, flying[1])  # else one for each row

    parts = pl.cdiv(jnp.maximum(last - first, 0), group)
    blocks, singles = lax.fori_loop(0, parts, some, (jnp.int32(0), jnp.int32(0)))
    lax.fori_loop(0, blocks, lambda _, carry: wait(group), None)
    lax.fori_loop(0, singles, lambda _, carry: wait(1), None)
