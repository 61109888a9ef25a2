"""Attention of queries over keys and values: within whole sequences (training, scoring), or through pages (serving)."""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, Any, Literal

import jax
import jax.numpy as jnp

import vishwamai
from vishwamai.core.errors import UnsupportedError
from vishwamai.core.types import PyTree
from vishwamai.models.axes import ONE_DEVICE, MeshAxes
from vishwamai.models.pages import PagedBatch, QuantizedPages
from vishwamai.ops.attention.split.ring import ring_attention
from vishwamai.ops.attention.ulysses import ulysses_attention

if TYPE_CHECKING:
    from jax import Array
    from jaxtyping import Float, Int

    from vishwamai.models.config import ModelConfig


NO_STEPS = (
    "the model's tokens see those behind them (`use_bidirectional_attention`), so it cannot write texts; serve it as "
    "an encoder: /v1/embeddings, or SentenceEncoder."
)


def sequence_placement(config: ModelConfig) -> Literal["contiguous", "zigzag"]:
    """How rows lie on the devices of a split sequence: `ring_attention` balances windows in order, and other layers in
    zig-zag order.
    """
    return "zigzag" if all(kind.mixer.window is None for kind in config.layers) else "contiguous"


def attend_sequences(
    config: ModelConfig,
    window: int | None,
    query: Float[Array, "batch seq heads head_dim"],
    key: Float[Array, "batch seq kv_heads head_dim"],
    value: Float[Array, "batch seq kv_heads value_dim"],
    sinks: Float[Array, " heads"] | None,
    segment_ids: Int[Array, "batch seq"] | None,
    axes: MeshAxes = ONE_DEVICE,
) -> Float[Array, "batch seq heads value_dim"]:
    """Attention within each row, and within each of its segments; causal unless the model is `bidirectional`.

    Args:
      config: the model, for the scale and the soft-cap of the logits.
      window: tokens that a token sees, its own included; None for all before it.
      query, key, value: heads of all tokens of the rows.
      sinks: a logit of each head that enters the denominator only.
      segment_ids: `[batch, seq]`, segments of the rows; None for one segment a row.
      axes: mesh axes; with `sequence`, the device has its part of each row, placed by `sequence_placement`; in order
        with `heads`.
    """
    reach = None if window is None else (window // 2, window // 2) if config.bidirectional else (window - 1, 0)
    options: dict[str, Any] = {
        "causal": not config.bidirectional,
        "window": reach,
        "segment_ids": None if segment_ids is None else (segment_ids, segment_ids),
        "softcap": config.attention_softcap,
        "scale": config.attention_scale,
    }
    if config.alibi:
        options["alibi_slopes"] = _slopes(config, query.shape[2], axes)
    if axes.sequence is None:
        return vishwamai.flash_attention(query, key, value, layout="bshd", sinks=sinks, **options)
    by_head = (jnp.swapaxes(x, 1, 2) for x in (query, key, value))
    options |= {"axis": axes.sequence, "sinks": sinks}
    if axes.heads:
        out = ulysses_attention(*by_head, **options)
    else:
        out = ring_attention(*by_head, placement=sequence_placement(config), **options)
    return jnp.swapaxes(out, 1, 2)


def attend_pages(
    config: ModelConfig,
    window: int | None,
    query: Float[Array, "1 tokens heads head_dim"],
    key: Float[Array, "1 tokens kv_heads head_dim"] | None,
    value: Float[Array, "1 tokens kv_heads head_dim"] | None,
    sinks: Float[Array, " heads"] | None,
    batch: PagedBatch,
    pages: PyTree,
    first_page: int | jax.Array,
    latent_dim: int | None = None,
    chunk: int | None = None,
) -> tuple[Float[Array, "1 tokens heads value_dim"], PyTree]:
    """Attention of new tokens over pages, which get their keys and values first.

    Args:
      config, window, query, sinks: arguments of `attend_sequences`, of the new tokens.
      key: keys of the new tokens; None where the pages have theirs.
      value: values of the new tokens; None where `key` is a latent row.
      batch: the sequences.
      pages: the pool of the layer's group, an array or `QuantizedPages`.
      first_page: int32 scalar, index of the layer's first page in the pool.
      latent_dim: features of a latent row that are the value.
      chunk: tokens of a block, where tokens see those of their own block only.

    Returns:
      The mixed values, and the pool.
    """
    if config.bidirectional:
        raise UnsupportedError(NO_STEPS)
    tables = batch.kv_lens, batch.table(window) + first_page, batch.cu_q_lens
    pool = pages
    scales: dict[str, Any] = {}
    if isinstance(pages, QuantizedPages):
        if pages.by_token:
            if key is not None:
                key, value, pages = _scaled_by_token(key, value, pages, tables)
            scales = {"k_scale": pages.k_scale, "v_scale": pages.k_scale if latent_dim is not None else pages.v_scale}
        else:
            assert pages.v_scale is not None, "scales of heads are pairs"
            layer = first_page // (pages.pool.shape[0] // pages.k_scale.shape[0])
            scales = {"k_scale": pages.k_scale[layer], "v_scale": pages.v_scale[layer]}
        pool = pages.pool
    factors = {} if isinstance(pages, QuantizedPages) and pages.by_token else scales
    if key is None:
        pass
    elif value is None:
        pool = vishwamai.update_pages(pool, key[0, :, 0], None, *tables, **factors)
    else:
        pool = vishwamai.update_pages(pool, key[0], value[0], *tables, **factors)
    if chunk is not None:
        tables = _blocks_of_pages(chunk, pool.shape[1], query.shape[1], batch, tables[1])
    out = vishwamai.ragged_paged_attention(
        query[0],
        pool,
        *tables,
        **scales,
        scale=config.attention_scale,
        window=None if window is None or chunk is not None else window - 1,
        softcap=config.attention_softcap,
        sinks=sinks,
        alibi_slopes=_slopes(config, query.shape[2]) if config.alibi else None,
        latent_dim=latent_dim,
        max_q_len=batch.max_q_len if chunk is None else min(chunk, batch.max_q_len or query.shape[1]),
    )
    return out[None], dataclasses.replace(pages, pool=pool) if isinstance(pages, QuantizedPages) else pool


def _scaled_by_token(
    key: Float[Array, "1 tokens kv_heads head_dim"],
    value: Float[Array, "1 tokens kv_heads head_dim"] | None,
    pages: QuantizedPages,
    tables: tuple[jax.Array, ...],
) -> tuple[jax.Array, jax.Array | None, QuantizedPages]:
    """Keys and values over their scales, which make the largest number of each head the largest of the pages' dtype;
    and the pages with the scales.
    """
    dtype = pages.pool.dtype
    most = float(jnp.iinfo(dtype).max if jnp.issubdtype(dtype, jnp.integer) else jnp.finfo(dtype).max)

    def scaled(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        wide = x.astype(jnp.float32)
        largest = jnp.max(jnp.abs(wide), axis=-1, keepdims=True, initial=0.0)
        scale = jnp.where(largest > 0, largest / most, 1.0)  # [1, tokens, kv_heads, 1]
        return wide / scale, scale[0]

    key, k_scale = scaled(key)
    if value is None:  # latent rows, which are key and value at once
        scale = vishwamai.update_pages(pages.k_scale, k_scale[:, 0], None, *tables)
        return key, None, dataclasses.replace(pages, k_scale=scale)
    value, v_scale = scaled(value)
    scales = vishwamai.update_pages((pages.k_scale, pages.v_scale), k_scale, v_scale, *tables)
    return key, value, dataclasses.replace(pages, k_scale=scales[0], v_scale=scales[1])


def _blocks_of_pages(
    chunk: int, page_size: int, tokens: int, batch: PagedBatch, page_table: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Lengths, page tables and first tokens of the blocks of `chunk` positions that a step's new tokens lie in, each
    block as a sequence of its own. The new tokens of a block are its last ones, as paged attention has them.
    """
    if chunk % page_size:
        raise UnsupportedError(
            f"Decoder.step: pages have {page_size} tokens; layers that attend within blocks of {chunk} tokens need a "
            f"page size that divides {chunk}."
        )
    count = -(-((batch.max_q_len or tokens) - 1) // chunk) + 1  # blocks that the new tokens of one sequence touch
    ends, new = batch.kv_lens, batch.cu_q_lens[1:] - batch.cu_q_lens[:-1]
    starts = jnp.maximum(ends - new, 0)
    block = (starts // chunk)[:, None] + jnp.arange(count, dtype=jnp.int32)  # [sequences, count]
    lengths = jnp.clip(ends[:, None] - block * chunk, 0, chunk)
    before = jnp.clip(starts[:, None] - block * chunk, 0, chunk)
    sizes = jnp.where(new[:, None] > 0, jnp.maximum(lengths - before, 0), 0).reshape(-1)
    lengths = jnp.where(sizes > 0, lengths.reshape(-1), 0)
    offsets = batch.cu_q_lens[0] + jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(sizes, dtype=jnp.int32)])
    per = chunk // page_size
    columns = block[..., None] * per + jnp.arange(per, dtype=jnp.int32)
    columns = jnp.minimum(columns, page_table.shape[1] - 1).reshape(page_table.shape[0], -1)
    tables = jnp.take_along_axis(page_table, columns, axis=1).reshape(-1, per)
    return lengths, tables, offsets


def _slopes(config: ModelConfig, heads: int, axes: MeshAxes = ONE_DEVICE) -> jax.Array:
    """ALiBi's slopes of the heads that the device has. Press et al. (2022): powers of one number for a power of two of
    heads, and every other one of twice as many for the rest.
    """
    power = 2 ** math.floor(math.log2(config.num_heads))
    slopes = [2.0 ** (-8.0 * (i + 1) / power) for i in range(power)]
    slopes += [2.0 ** (-4.0 * (2 * i + 1) / power) for i in range(config.num_heads - power)]
    table = jnp.asarray(slopes, jnp.float32)
    if axes.tensor is None:
        return table
    return jax.lax.dynamic_slice_in_dim(table, jax.lax.axis_index(axes.tensor) * heads, heads)
