"""How a kernel walks the list of tiles of its panel: as a software pipeline, after segments took out what no query
sees.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl

from vishwamai.core.types import Ref
from vishwamai.ops.attention.tpu_schedule import unpack_tile

Read: TypeAlias = "Callable[[int | jax.Array], jax.Array]"
"""A tile of a list, as one word, by its position."""
Range: TypeAlias = "Callable[[jax.Array], tuple[jax.Array, jax.Array]]"
"""(smallest, largest) number of a local block."""


def id_ranges(ids: jax.Array, block: int) -> jax.Array:
    """Smallest and largest number of every block: `[B or 1, blocks * block]` to int32 `[B or 1, blocks, 2]`."""
    cut = ids.reshape(ids.shape[0], -1, block)
    return jnp.stack([cut.min(-1), cut.max(-1)], axis=-1)


def live_tiles(
    read: Read,
    counts: tuple[jax.Array, jax.Array],
    q_range: Range,
    kv_range: Range,
    out_ref: Ref,
    spare_ref: Ref,
    unroll: int,
) -> tuple[jax.Array, jax.Array]:
    """Writes to `out_ref` the tiles whose ranges overlap, the unmasked first; returns the new counts.

    Args:
      read: tile by position in the static list; `counts`: (those that need no static mask, all).
      q_range, kv_range: (smallest, largest) segment id of a local block, or key that its queries reach and that it has.
      out_ref, spare_ref: int32 refs in scalar memory, of the static list's length.
    """
    plain, count = counts

    def visit(t: jax.Array, counts: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        n_plain, n_rest = counts
        tile = read(t)
        i, j, _ = unpack_tile(tile)
        q_min, q_max = q_range(i)
        kv_min, kv_max = kv_range(j)
        meet = (q_min <= kv_max) & (kv_min <= q_max)
        # one id on each side: no element of the tile needs the mask
        uniform = (t < plain) & (q_min == q_max) & (kv_min == kv_max)
        # Written where it would go in either case; only the counters say whether it stays.
        out_ref[n_plain] = tile
        spare_ref[n_rest] = tile
        return n_plain + (meet & uniform).astype(jnp.int32), n_rest + (meet & ~uniform).astype(jnp.int32)

    n_plain, n_rest = lax.fori_loop(0, count, visit, (jnp.int32(0), jnp.int32(0)))

    def move(t: jax.Array, carry: None) -> None:
        out_ref[n_plain + t] = spare_ref[t]
        return carry

    lax.fori_loop(0, n_rest, move, None)
    # `walk` produces the scores of one position past the end: there of blocks (0, 0).
    out_ref[n_plain + n_rest] = 0
    # Unmasked tiles that do not fill a turn of the unrolled loop are visited with a mask, which hides nothing of them.
    return n_plain - lax.rem(n_plain, np.int32(unroll)), n_plain + n_rest


def walk(
    read: Read,
    counts: tuple[jax.Array, jax.Array],
    produce: Callable[[jax.Array, int], None],
    consume: Callable[[jax.Array, int, bool], None],
    unroll: int,
) -> None:
    """Walks a list of tiles: the products that make the next tile's scores are issued together with the work on this
    one's.

    Args:
      read: tile by position; one position past the end is read.
      counts: (tiles that need no mask, all tiles).
      produce: `(tile, slot)`: computes a tile's scores into buffer `slot`.
      consume: `(tile, slot, masked)`: uses them.
    """
    plain, count = counts
    # Scores alternate between two buffers, so that the products of one tile overlap the softmax of the tile before.
    produce(read(0), 0)

    def step(t: jax.Array, slot: int, masked: bool) -> None:
        produce(read(t + 1), 1 - slot)
        consume(read(t), slot, masked)

    def unmasked(n: jax.Array, carry: None) -> None:
        for u in range(unroll):
            step(n * unroll + u, u % 2, False)
        return carry

    lax.fori_loop(0, lax.div(plain, np.int32(unroll)), unmasked, None)

    def masked_pair(n: jax.Array, carry: None) -> None:
        t = plain + 2 * n
        step(t, 0, True)
        pl.when(t + 1 < count)(lambda: step(t + 1, 1, True))
        return carry

    lax.fori_loop(0, lax.div(count - plain + 1, np.int32(2)), masked_pair, None)


def visit_tiles(
    read: Read, counts: tuple[jax.Array, jax.Array], visit: Callable[[jax.Array, bool], None], unroll: int
) -> None:
    """Visits a list of tiles, those that need no mask `unroll` at a time, which leaves it to the compiler to interleave
    them.

    Args:
      read: tile by position.
      counts: (tiles that need no mask, all tiles).
      visit: `(tile, masked)`.
    """
    plain, count = counts

    def unmasked(n: jax.Array, carry: None) -> None:
        for u in range(unroll):
            visit(read(n * unroll + u), False)
        return carry

    def masked(t: jax.Array, carry: None) -> None:
        visit(read(t), True)
        return carry

    lax.fori_loop(0, lax.div(plain, np.int32(unroll)), unmasked, None)
    lax.fori_loop(plain, count, masked, None)
