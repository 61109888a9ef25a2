"""A static block mask as the Triton kernels walk it: for every tile of queries, and of keys, the tiles on the other
side that are there.

Everything here is numpy on the host, when a program is traced (`block_mask.py` has the mask itself); the lists are
small constants that the kernels read from memory, so a tile that is not there costs nothing.
"""

from __future__ import annotations

import dataclasses
import functools

import numpy as np

from vishwamai.ops.attention.gpu_arguments import Walk
from vishwamai.ops.attention.spec import AttentionSpec


@dataclasses.dataclass(frozen=True, eq=False)
class Walks:
    """The tiles of one cut of the score matrix that the block mask, the causal mask and the window leave.

    A list is pairs of int32: the tile's number along the other side, and the number of its pattern; 0 is a tile that
    the block mask leaves whole.

    Attributes:
      by_query: int32; for each head and tile of queries where its list begins, where in it the tiles begin that are
        seen whole, and its end, counted in pairs from the array's start; then the lists. `by_key` the same for the
        tiles of keys, all of them seen in part for all it says.
      by_query_step, by_key_step: lists of one head; 0 where all heads share them.
      patterns: int8 `[count + 1, block_q, block_kv]`, 1 = attend; None where no tile is there in part.
      tiles: int32 `[heads or 1, q_tiles, kv_tiles]`: 0 = not there, else the pattern's number and 1.
    """

    by_query: np.ndarray
    by_key: np.ndarray
    by_query_step: int
    by_key_step: int
    patterns: np.ndarray | None
    tiles: np.ndarray


def walks(spec: AttentionSpec, block_q: int, block_kv: int) -> Walks | None:
    """The walks of `spec` in tiles of that size, None without a block mask.

    >>> import jax.numpy as jnp, numpy as np
    >>> from vishwamai.core.spec import ArraySpec
    >>> from vishwamai.ops.attention.block_mask import BlockMask
    >>> from vishwamai.ops.attention.spec import Operands
    >>> rows = ArraySpec((1, 1, 32, 16), jnp.dtype("float32"))
    >>> mask = BlockMask.from_blocks(np.array([[True, False], [True, True]]), (16, 16))
    >>> found = walks(AttentionSpec(Operands(rows, rows, rows), causal=True, blocks=mask), 16, 16)

    The tile on the diagonal is seen in part, and comes before one seen whole:

    >>> found.by_query[:6].tolist(), found.by_query[6:].tolist()
    ([3, 4, 4, 4, 5, 6], [0, 0, 1, 0, 0, 0])
    """
    if spec.blocks is None:
        return None
    return _walks(spec, block_q, block_kv)


def by_query(walks: Walks | None) -> Walk:
    """The walk of programs that own a tile of queries."""
    return NO_WALK if walks is None else Walk(walks.by_query, walks.patterns, walks.by_query_step)


def by_key(walks: Walks | None) -> Walk:
    """The walk of programs that own a tile of keys."""
    return NO_WALK if walks is None else Walk(walks.by_key, walks.patterns, walks.by_key_step)


def by_tile(walks: Walks | None) -> Walk:
    """Every tile, with what is seen of it."""
    if walks is None:
        return NO_WALK
    return Walk(walks.tiles, walks.patterns, 0 if len(walks.tiles) == 1 else walks.tiles[0].size)


NO_WALK = Walk(None, None, 0)


@functools.lru_cache(maxsize=64)
def _walks(spec: AttentionSpec, block_q: int, block_kv: int) -> Walks:
    q_tiles, kv_tiles = -(-spec.q_len // block_q), -(-spec.kv_len // block_kv)
    masks = spec.tile_masks(block_q, block_kv, q_tiles, kv_tiles)
    assert masks is not None
    row, column = np.arange(q_tiles)[:, None] * block_q, np.arange(kv_tiles)[None, :] * block_kv
    last_row, last_column = np.minimum(row + block_q, spec.q_len) - 1, np.minimum(column + block_kv, spec.kv_len) - 1
    low, high = spec.band
    live = masks.ids >= 0
    unmasked = (masks.ids == 0) & (column + block_kv <= spec.kv_len)
    if high is not None:
        live &= column - last_row <= high
        unmasked &= last_column - row <= high
    if low is not None:
        live &= last_column - row >= low
        unmasked &= column - last_row >= low
    ids = np.maximum(masks.ids, 0)
    heads = len(live)
    by_query = _lists(live, unmasked, ids)
    by_key = _lists(*(x.transpose(0, 2, 1) for x in (live, np.zeros_like(live), ids)))
    return Walks(
        by_query=by_query,
        by_key=by_key,
        by_query_step=q_tiles if heads > 1 else 0,
        by_key_step=kv_tiles if heads > 1 else 0,
        patterns=masks.patterns.astype(np.int8) if masks.partial else None,
        tiles=np.where(live, ids + 1, 0).astype(np.int32),
    )


def _lists(live: np.ndarray, unmasked: np.ndarray, ids: np.ndarray) -> np.ndarray:
    """The lists of every row of `[heads, rows, tiles]`, those of whole tiles last, behind their spans."""
    heads, rows, _ = live.shape
    head, row, tile = np.nonzero(live)
    last = unmasked[head, row, tile]
    order = np.lexsort((tile, last, row, head))
    count, partial = live.sum(2).reshape(-1), (live & ~unmasked).sum(2).reshape(-1)
    header = heads * rows * 3
    # Pairs are counted from the array's start, and must begin at an even number.
    first = (header + 1) // 2 + np.cumsum(count) - count
    spans = np.stack([first, first + partial, first + count], 1).reshape(-1)
    pairs = np.stack([tile, ids[head, row, tile]], 1)[order].reshape(-1)
    return np.concatenate([spans, np.zeros(header % 2, np.int64), pairs]).astype(np.int32)
