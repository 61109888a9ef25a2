"""Attention with the whole score matrix, one feature after another, in float64."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from oracle import keep_mask


def visible(
    batch: int,
    heads: int,
    rows: int,
    columns: int,
    *,
    mask: Any = None,
    causal: bool = False,
    causal_align: str = "top_left",
    window: tuple[int | None, int | None] | None = None,
    segment_ids: Any = None,
    q_offset: Any = None,
    kv_lens: Any = None,
    kv_starts: Any = None,
) -> np.ndarray:
    """Which key each query may attend to, bool `[batch, heads, rows, columns]`, one condition at a time."""
    see = np.ones((batch, heads, rows, columns), bool)
    i = stands_at(rows, columns, causal_align, q_offset)
    j = np.arange(columns)[None, :]
    if kv_lens is not None:
        see &= j < np.asarray(kv_lens).reshape(-1, 1, 1, 1)
    if kv_starts is not None:
        see &= j >= np.asarray(kv_starts).reshape(-1, 1, 1, 1)
    if causal:
        see &= j <= i
    if window is not None:
        left, right = (window, window) if isinstance(window, int) else window
        see &= np.ones_like(see) if left is None else i - left <= j
        see &= np.ones_like(see) if right is None else j <= i + right
    if segment_ids is not None:
        q_ids, kv_ids = (np.asarray(ids) for ids in segment_ids)
        see &= (q_ids[..., :, None] == kv_ids[..., None, :]).reshape(-1, 1, rows, columns)
    if mask is not None:
        see &= np.asarray(mask)
    return see


def stands_at(rows: int, columns: int, causal_align: str = "top_left", q_offset: Any = None, **_: Any) -> np.ndarray:
    """The key that each query stands at, `[rows, 1]` or `[batch or 1, 1, rows, 1]`."""
    if q_offset is not None:
        offset = np.asarray(q_offset)
        return (offset if offset.ndim == 2 else offset.reshape(-1, 1) + np.arange(rows))[:, None, :, None]
    return np.arange(rows)[:, None] + (columns - rows if causal_align == "bottom_right" else 0)


def flash_attention(
    query: Any,
    key: Any,
    value: Any,
    bias: Any = None,
    mask: Any = None,
    *,
    softcap: float | None = None,
    bias_after_softcap: bool = False,
    sinks: Any = None,
    alibi_slopes: Any = None,
    dropout_rate: float = 0.0,
    dropout_key: Any = None,
    scale: float | None = None,
    return_lse: bool = False,
    layout: str = "bhsd",
    **seen: Any,
) -> Any:
    """Attention with the whole score matrix, one feature after another in the order of the contract."""
    if layout == "bshd":
        query, key, value = (jnp.swapaxes(x, 1, 2) for x in (query, key, value))
    batch, heads, rows, features = query.shape
    group = heads // key.shape[1]
    columns = key.shape[2]
    key, value = (jnp.repeat(x, group, axis=1) for x in (key, value))
    scale = 1 / np.sqrt(features) if scale is None else scale
    logits = scale * jnp.einsum("bhid,bhjd->bhij", query, key)
    if bias is not None and not bias_after_softcap:
        logits = logits + bias
    if softcap is not None:
        logits = softcap * jnp.tanh(logits / softcap)
    if bias is not None and bias_after_softcap:
        logits = logits + bias
    if alibi_slopes is not None:
        slopes = np.asarray(alibi_slopes).reshape(-1, heads, 1, 1)
        logits = logits - slopes * np.abs(stands_at(rows, columns, **seen) - np.arange(columns))
    see = visible(batch, heads, rows, columns, mask=mask, **seen)
    see = see & (logits > -jnp.inf)
    sink = jnp.full((batch, heads, rows, 1), -jnp.inf)
    if sinks is not None:
        sink = jnp.broadcast_to(jnp.asarray(sinks).reshape(-1, heads, 1, 1), sink.shape)
    hidden = jnp.where(see, logits, -jnp.inf)
    top = jax.lax.stop_gradient(jnp.maximum(jnp.max(hidden, -1, keepdims=True, initial=-jnp.inf), sink))
    top = jnp.where(top == -jnp.inf, 0.0, top)  # nothing to attend to
    weights = jnp.where(see, jnp.exp(jnp.where(see, logits - top, 0.0)), 0.0)
    total = weights.sum(-1, keepdims=True) + (jnp.exp(sink - top) if sinks is not None else 0.0)
    anything = total > 0
    safe = jnp.where(anything, total, 1.0)
    probability = weights / safe
    if dropout_rate:
        with jax.ensure_compile_time_eval():  # numbers of the key alone, also inside jit
            seeds = np.asarray(jax.random.bits(dropout_key, (batch, heads, 2), jnp.uint32))
        kept = keep_mask(seeds, rows, columns, dropout_rate)
        probability = jnp.where(kept, probability / (1 - dropout_rate), 0.0)
    out = jnp.einsum("bhij,bhjd->bhid", probability, value)
    if layout == "bshd":
        out = jnp.swapaxes(out, 1, 2)
    if not return_lse:
        return out
    logsumexp = jnp.where(anything, jnp.log(safe) + top, -jnp.inf)[..., 0]
    return out, logsumexp


def flash_attention_varlen(
    query: Any,
    key: Any,
    value: Any,
    *,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    max_seqlen_q: int,
    max_seqlen_k: int,
    causal_align: str = "bottom_right",
    return_lse: bool = False,
    **options: Any,
) -> Any:
    """Attention of one sequence after another, and zeros after the last."""
    total, heads = query.shape[:2]
    outs, statistics = [], []
    for n in range(len(cu_seqlens_q) - 1):
        q = slice(int(cu_seqlens_q[n]), int(cu_seqlens_q[n + 1]))
        k = slice(int(cu_seqlens_k[n]), int(cu_seqlens_k[n + 1]))
        assert q.stop - q.start <= max_seqlen_q and k.stop - k.start <= max_seqlen_k
        one = (jnp.swapaxes(x, 0, 1)[None] for x in (query[q], key[k], value[k]))
        out, logsumexp = flash_attention(*one, causal_align=causal_align, return_lse=True, **options)
        outs.append(jnp.swapaxes(out[0], 0, 1))
        statistics.append(logsumexp[0])
    rest = total - int(cu_seqlens_q[-1])
    out = jnp.concatenate([*outs, jnp.zeros((rest, heads, value.shape[2]), query.dtype)])
    empty = jnp.full((heads, rest), -jnp.inf)
    if options.get("sinks") is not None:
        empty = jnp.broadcast_to(jnp.asarray(options["sinks"])[:, None], empty.shape)
    return (out, jnp.concatenate([*statistics, empty], 1)) if return_lse else out


def visible_blocks(block_mask: Any, block_size: Any, rows: int, columns: int) -> np.ndarray:
    """The mask of every position, bool `[heads or 1, rows, columns]`."""
    if callable(block_mask):
        return np.array([[[bool(block_mask(i, j)) for j in range(columns)] for i in range(rows)]])
    height, width = (block_size, block_size) if isinstance(block_size, int) else block_size
    mask = np.asarray(block_mask)
    mask = mask if mask.ndim == 3 else mask[None]
    i, j = np.arange(rows) // height, np.arange(columns) // width
    return mask[:, i][:, :, j]


def block_sparse_attention(
    query: Any, key: Any, value: Any, *, block_mask: Any, block_size: Any, **options: Any
) -> Any:
    """Attention under the mask written out, beside the caller's own."""
    axis = 1 if options.get("layout") == "bshd" else 2
    seen = visible_blocks(block_mask, block_size, query.shape[axis], key.shape[axis])[None]
    mask = options.pop("mask", None)
    mask = seen if mask is None else seen & np.asarray(mask)
    return flash_attention(query, key, value, options.pop("bias", None), mask, **options)
