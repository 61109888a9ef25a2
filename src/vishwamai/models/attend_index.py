"""Attention over the tokens of pages that an index chose, and the index over the keys in pages."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

import vishwamai
from vishwamai.core.errors import UnsupportedError
from vishwamai.core.types import PyTree
from vishwamai.models.pages import PagedBatch, QuantizedPages

if TYPE_CHECKING:
    from jax import Array
    from jaxtyping import Float, Int

    from vishwamai.models.config import ModelConfig

_BLOCK = 16
"""New tokens of one sequence that read its keys together."""
_GROUP_BYTES = 64 << 20
"""Bytes of the scores of the blocks that are computed at once."""


def chosen_keys(
    query: Float[Array, "tokens heads dim"],
    weights: Float[Array, "tokens heads"],
    batch: PagedBatch,
    pool: Float[Array, "pages page_size features"],
    first_page: int | jax.Array,
    columns: slice,
    top_k: int,
) -> Int[Array, "1 tokens chosen"]:
    """`vishwamai.lightning_index` of new tokens over the keys in the pages of their sequences.

    Args:
      query, weights: the indexer's, of the new tokens.
      batch: the sequences.
      pool: the pages, with the new tokens written.
      first_page: int32 scalar, index of the layer's first page in the pool.
      columns: the features of a row that are the indexer's key.
      top_k: keys of each token.

    Returns:
      Positions in each token's sequence, `[1, tokens, top_k]`; -1 for none.
    """
    count, heads, dim = query.shape
    table = batch.page_table + first_page
    length = table.shape[1] * pool.shape[1]
    size = 1 if batch.max_q_len == 1 else min(_BLOCK, count)
    starts, counts = batch.cu_q_lens[:-1], batch.cu_q_lens[1:] - batch.cu_q_lens[:-1]
    blocks = -(-counts // size)
    last = jnp.cumsum(blocks)
    padded = [jnp.pad(x, [(0, size), *[(0, 0)] * (x.ndim - 1)]) for x in (query, weights)]

    def select(i: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The choice of one block, and the tokens that it is for; those past its sequence's end get none."""
        sequence = jnp.minimum(jnp.searchsorted(last, i, side="right"), counts.shape[0] - 1)
        offset = (i - last[sequence] + blocks[sequence]) * size + jnp.arange(size, dtype=jnp.int32)
        keys = pool[table[sequence]][..., columns].reshape(1, length, dim)
        q, w = (jax.lax.dynamic_slice_in_dim(x, starts[sequence] + offset[0], size)[None] for x in padded)
        positions = (batch.kv_lens[sequence] - counts[sequence] + offset)[None]
        index = vishwamai.lightning_index(jnp.swapaxes(q, 1, 2), keys, w, top_k=top_k, positions=positions)
        live = (i < last[-1]) & (offset < counts[sequence])
        return index[0], jnp.where(live, starts[sequence] + offset, count)

    items = jnp.arange(count // size + counts.shape[0], dtype=jnp.int32)
    group = max(1, _GROUP_BYTES // (4 * size * heads * length))
    index, places = jax.lax.map(select, items, batch_size=min(group, items.shape[0]))
    empty = jnp.full((count, index.shape[-1]), -1, jnp.int32)
    return empty.at[places.reshape(-1)].set(index.reshape(-1, index.shape[-1]), mode="drop")[None]


def attend_chosen_pages(
    config: ModelConfig,
    query: Float[Array, "1 tokens heads dim"],
    row: Float[Array, "1 tokens 1 features"],
    select: Callable[[jax.Array], Int[Array, "1 tokens chosen"]],
    batch: PagedBatch,
    pages: PyTree,
    first_page: int | jax.Array,
    value_dim: int,
) -> tuple[Float[Array, "1 tokens heads value_dim"], PyTree, Int[Array, "1 tokens chosen"]]:
    """Attention of new tokens over chosen tokens of their sequences' pages, which get the new rows first.

    Args:
      config: the model, for the scale of the logits.
      query: absorbed queries, as `vishwamai.ragged_paged_attention` takes them for latent pages.
      row: features of the new tokens as the pages hold them; a key is its first features.
      select: function of the pool that gives the positions of the tokens chosen.
      batch: the sequences.
      pages: the pool of the layer's group.
      first_page: int32 scalar, index of the layer's first page in the pool.
      value_dim: first features of a row that are the value.

    Returns:
      The mixed values, the pool, and the positions.

    Raises:
      UnsupportedError: the pages are quantized.
    """
    if isinstance(pages, QuantizedPages):
        raise UnsupportedError(
            f"{config.family}: attention over chosen tokens reads pages in the model's dtype, and these are "
            f"{pages.pool.dtype.name}; serve without 8-bit keys and values."
        )
    table = batch.page_table + first_page
    pool = vishwamai.update_pages(pages, row[0, :, 0], None, batch.kv_lens, table, batch.cu_q_lens)
    index = select(pool)
    count, size = query.shape[1], pool.shape[1]
    of_token = table[batch.sequences(count)]  # [tokens, pages]
    page = jnp.take_along_axis(of_token, jnp.maximum(index[0], 0) // size, axis=1)
    rows = jnp.where(index[0] < 0, -1, page * size + index[0] % size)
    query = jnp.pad(query, [(0, 0)] * 3 + [(0, pool.shape[2] - query.shape[3])]).astype(pool.dtype)
    out = vishwamai.indexed_attention(
        jnp.swapaxes(query, 1, 2),
        pool.reshape(1, 1, -1, pool.shape[2]),
        None,
        rows[None],
        scale=config.attention_scale,
        value_dim=value_dim,
    )
    return jnp.swapaxes(out, 1, 2).astype(row.dtype), pool, index
