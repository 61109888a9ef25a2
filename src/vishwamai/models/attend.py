"""Attention of queries over keys and values: within whole sequences (training, scoring), or through pages (serving)."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, Literal

import jax.numpy as jnp

import vishwamai
from vishwamai.core.errors import UnsupportedError
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
    key: Float[Array, "1 tokens kv_heads head_dim"],
    value: Float[Array, "1 tokens kv_heads head_dim"] | None,
    sinks: Float[Array, " heads"] | None,
    batch: PagedBatch,
    pages: Any,
    first_page: Any,
    latent_dim: int | None = None,
) -> tuple[Float[Array, "1 tokens heads value_dim"], Any]:
    """Attention of new tokens over pages, which get their keys and values first.

    Args:
      config, window, query, key, sinks: those of `attend_sequences`, of the new tokens.
      value: values of the new tokens; None where `key` is a latent row.
      batch: the sequences.
      pages: the pool of the layer's group, an array or `QuantizedPages`.
      first_page: int32 scalar, index of the layer's first page in the pool.
      latent_dim: features of a latent row that are the value.

    Returns:
      The mixed values, and the pool.
    """
    if config.bidirectional:
        raise UnsupportedError(NO_STEPS)
    tables = batch.kv_lens, batch.table(window) + first_page, batch.cu_q_lens
    pool = pages
    scales: dict[str, Any] = {}
    if isinstance(pages, QuantizedPages):
        pool = pages.pool
        layer = first_page // (pool.shape[0] // pages.k_scale.shape[0])
        scales = {"k_scale": pages.k_scale[layer], "v_scale": pages.v_scale[layer]}
    if value is None:
        pool = vishwamai.update_pages(pool, key[0, :, 0], None, *tables, **scales)
    else:
        pool = vishwamai.update_pages(pool, key[0], value[0], *tables, **scales)
    out = vishwamai.ragged_paged_attention(
        query[0],
        pool,
        *tables,
        **scales,
        scale=config.attention_scale,
        window=None if window is None else window - 1,
        softcap=config.attention_softcap,
        sinks=sinks,
        latent_dim=latent_dim,
        max_q_len=batch.max_q_len,
    )
    return out[None], dataclasses.replace(pages, pool=pool) if isinstance(pages, QuantizedPages) else pool
