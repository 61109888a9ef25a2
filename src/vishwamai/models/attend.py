"""How tokens see one another: in whole sequences (training, scoring), or through pages (serving)."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import jax.numpy as jnp

import vishwamai
from vishwamai.models.axes import ONE_DEVICE, MeshAxes
from vishwamai.models.blocks import Attend, Rotate
from vishwamai.models.config import ModelConfig
from vishwamai.models.layer_kinds import LayerKind, Rope
from vishwamai.models.pages import PagedBatch, QuantizedPages
from vishwamai.ops.attention.ring import ring_attention
from vishwamai.ops.attention.ulysses import ulysses_attention
from vishwamai.ops.rope import Llama3Scaling, LongRopeScaling, YarnScaling


def rotation_switch(config: ModelConfig) -> int | None:
    """The length past which all keys of a sequence are rotated otherwise (LongRoPE); None where that never happens."""
    scalings = [kind.rope.scaling for kind in config.layers]
    return min((s.original_max_positions for s in scalings if isinstance(s, LongRopeScaling)), default=None)


def rotation(config: ModelConfig, positions: Any, lengths: Any = None) -> Rotate:
    """The rotation by `positions`, `[batch, seq]` or None to count from 0.

    Args:
      lengths: `[batch, seq]`, tokens of each token's sequence, for scalings that depend on it; None for the largest
        position and one more.
    """

    def rotate(pair: tuple[Any, Any], rope: Rope) -> tuple[Any, Any]:
        turned = int(config.head_dim * rope.partial)
        if not turned:
            return pair
        if rope.query_growth:
            pair = pair[0] * _growth(rope, positions, pair[0]), pair[1]
        options: dict[str, Any] = {"theta": rope.theta, "rotary_dim": turned, "layout": "bshd"}
        options["interleaved"] = config.rope_interleaved
        scaling = rope.scaling
        if lengths is None or not isinstance(scaling, LongRopeScaling):
            return vishwamai.apply_rope(pair, positions, scaling=scaling, **options)
        short = dataclasses.replace(scaling, long_factor=scaling.short_factor)
        long = dataclasses.replace(scaling, short_factor=scaling.long_factor)
        near, far = (vishwamai.apply_rope(pair, positions, scaling=one, **options) for one in (short, long))
        past = (lengths > scaling.original_max_positions)[..., None, None]
        return jnp.where(past, far[0], near[0]), jnp.where(past, far[1], near[1])

    return rotate


def _growth(rope: Rope, positions: Any, query: Any) -> Any:
    """The factor of queries `[batch, seq, heads, head_dim]` by position; see `Rope`."""
    if positions is None:
        positions = jnp.arange(query.shape[1])[None]
    assert isinstance(rope.scaling, YarnScaling | LongRopeScaling | Llama3Scaling)
    steps = jnp.floor(positions / rope.scaling.original_max_positions)
    return (1 + rope.query_growth * jnp.log1p(steps))[..., None, None].astype(query.dtype)


def sequence_placement(config: ModelConfig) -> Literal["contiguous", "zigzag"]:
    """How rows lie on the devices of a split sequence: `ring_attention` balances windows in order, and other layers in
    zig-zag order.
    """
    return "zigzag" if all(kind.window is None for kind in config.layers) else "contiguous"


def attend_sequences(config: ModelConfig, segment_ids: Any, axes: MeshAxes = ONE_DEVICE) -> Attend:
    """Causal attention within each row, and within each of its segments.

    Args:
      axes: with `sequence`, the device has its part of each row, placed by `sequence_placement`; in order with `heads`.
    """

    def attend(kind: LayerKind, query: Any, key: Any, value: Any, sinks: Any, pages: Any) -> tuple[Any, Any]:
        options: dict[str, Any] = {
            "causal": True,
            "window": None if kind.window is None else (kind.window - 1, 0),
            "segment_ids": None if segment_ids is None else (segment_ids, segment_ids),
            "softcap": config.attention_softcap,
            "scale": config.attention_scale,
        }
        if axes.sequence is None:
            return vishwamai.flash_attention(query, key, value, layout="bshd", sinks=sinks, **options), pages
        by_head = (jnp.swapaxes(x, 1, 2) for x in (query, key, value))
        options |= {"axis": axes.sequence, "sinks": sinks}
        if axes.heads:
            out = ulysses_attention(*by_head, **options)
        else:
            out = ring_attention(*by_head, placement=sequence_placement(config), **options)
        return jnp.swapaxes(out, 1, 2), pages

    return attend


def attend_pages(config: ModelConfig, batch: PagedBatch, first_page: Any = 0) -> Attend:
    """Attention of new tokens `[1, tokens, ...]` over pages, which get their keys and values first.

    Args:
      first_page: where the layer's pages start in its group's pool.
    """

    def scales(pages: QuantizedPages) -> dict[str, Any]:
        layer = first_page // (pages.pool.shape[0] // pages.k_scale.shape[0])
        return {"k_scale": pages.k_scale[layer], "v_scale": pages.v_scale[layer]}

    def attend(kind: LayerKind, query: Any, key: Any, value: Any, sinks: Any, pages: Any) -> tuple[Any, Any]:
        tables = batch.kv_lens, batch.table(kind.window) + first_page, batch.cu_q_lens
        latent = None if config.latent is None else config.latent.kv_rank
        pool, scaled = (pages.pool, scales(pages)) if isinstance(pages, QuantizedPages) else (pages, {})
        if value is None:
            pool = vishwamai.update_pages(pool, key[0, :, 0], None, *tables, **scaled)
        else:
            pool = vishwamai.update_pages(pool, key[0], value[0], *tables, **scaled)
        out = vishwamai.ragged_paged_attention(
            query[0],
            pool,
            *tables,
            **scaled,
            scale=config.attention_scale,
            window=None if kind.window is None else kind.window - 1,
            softcap=config.attention_softcap,
            sinks=sinks,
            latent_dim=latent,
            max_q_len=batch.max_q_len,
        )
        return out[None], dataclasses.replace(pages, pool=pool) if scaled else pool

    return attend
