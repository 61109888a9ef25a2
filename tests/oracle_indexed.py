"""Attention over chosen keys from its definition, query by query over all keys, in float64."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp


def indexed_attention(
    query: Any, key: Any, value: Any, indices: Any, *, scale: float | None = None, value_dim: int | None = None
) -> Any:
    batch, heads, _, dim = query.shape
    value = key[..., :value_dim] if value is None else value
    key, value = (jnp.repeat(x, heads // x.shape[1], axis=1) for x in (key, value))
    # How often each key is named: [batch, 1, q_len, kv_len].
    times = (indices[..., None] == jnp.arange(key.shape[2])).sum(-2)
    times = jnp.broadcast_to(times, (batch, *times.shape[1:]))[:, None]
    logits = jnp.einsum("bhqd,bhkd->bhqk", query, key) * (dim**-0.5 if scale is None else scale)
    logits = logits - jnp.max(jnp.where(times > 0, logits, -1e300), axis=-1, keepdims=True, initial=-1e300)
    weights = times * jnp.exp(jnp.where(times > 0, logits, 0.0))
    total = weights.sum(-1, keepdims=True)
    return jnp.einsum("bhqk,bhkd->bhqd", weights / jnp.where(total > 0, total, 1.0), value)


def latent_keys(query: Any, key: Any, indices: Any, **how: Any) -> Any:
    return indexed_attention(query, key, None, indices, **how)
