"""The TPU kernel of `update_pages`: each new row goes from HBM to its place there by a copy of its own, many at once.

XLA's scatter takes the rows one after the other, and waits for each.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from vishwamai.core import pallas
from vishwamai.core.qtensor import bits
from vishwamai.core.target import Target

MOST_TOKENS = 1 << 15
"""Tokens whose places scalar memory holds: two numbers of 4 bytes each."""
_FLYING = 64
"""Copies that are under way at once."""
_CORES = 2
"""Parts of the tokens, for the two cores of a megacore chip."""


def why_not(pool: Any, rows: Any, target: Target) -> str | None:
    """What keeps the kernel from these arrays, or None."""
    if target.tpu is not None and target.tpu.name == "tpu7x":
        return "each copy takes 0.28 us on TPU7x by the schedule, and XLA's scatter 0.1"
    if pool.ndim != 4 or pool.shape[3] % pallas.LANES:
        return f"rows of {pool.shape[2:]} are no whole tiles of memory"
    if bits(pool.dtype) < 8:
        return f"{pool.dtype.name} has no whole bytes"
    if not 0 < rows.shape[0] <= MOST_TOKENS:
        return f"{rows.shape[0]} tokens, of 1 to {MOST_TOKENS}"
    return None


@functools.partial(jax.jit, inline=True)  # one trace for all calls of the same shapes
def put(pool: jax.Array, rows: jax.Array, page: jax.Array, slot: jax.Array) -> jax.Array:
    """See `rows.put`."""
    anywhere = pl.BlockSpec(memory_space=pl.ANY)
    (written,) = pallas.call(
        _copy,
        name="update_pages",
        grid=(_CORES,),
        inputs={"rows": (rows, anywhere), "old": (pool, anywhere)},
        outputs={"pool": (pool.shape, pool.dtype, anywhere)},
        scalars={"page": page, "slot": slot},
        scratch={"copied": pltpu.SemaphoreType.DMA},
        aliases={"old": "pool"},
        semantics=("parallel",),
        vmem_bytes=0,
        flops=0,
        bytes_accessed=2 * rows.size * rows.dtype.itemsize,
    )
    return written


def _copy(page: Any, slot: Any, rows: Any, old: Any, pool: Any, copied: Any) -> None:
    del old  # the same memory as `pool`
    tokens, pages = rows.shape[0], pool.shape[0]
    each = pl.cdiv(tokens, _CORES)
    first = pl.program_id(0) * each

    def wait() -> None:
        pltpu.make_async_copy(rows.at[0], pool.at[0, 0], copied).wait()  # every row has its size

    def start(i: Any, flying: Any) -> Any:
        there = (page[i] >= 0) & (page[i] < pages)

        @pl.when(there & (flying == _FLYING))
        def _() -> None:
            wait()

        @pl.when(there)
        def _() -> None:
            pltpu.make_async_copy(rows.at[i], pool.at[page[i], slot[i]], copied).start()

        return jnp.minimum(flying + there.astype(jnp.int32), _FLYING)

    flying = lax.fori_loop(first, jnp.minimum(first + each, tokens), start, jnp.int32(0))

    def last(_: Any, carry: None) -> None:
        wait()

    lax.fori_loop(0, flying, last, None)
