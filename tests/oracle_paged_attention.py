"""Paged attention from its definition, sequence by sequence, in NumPy: there are no gradients to take."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np


def ragged_paged_attention(
    query: Any,
    kv_pages: Any,
    kv_lens: Any,
    page_indices: Any,
    cu_q_lens: Any,
    num_seqs: Any = None,
    *,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Any = None,
    alibi_slopes: Any = None,
    tree_mask: Any = None,
    q_scale: Any = 1.0,
    k_scale: Any = 1.0,
    v_scale: Any = 1.0,
    latent_dim: int | None = None,
    max_q_len: int | None = None,
    return_lse: bool = False,
    out_dtype: Any = None,
) -> Any:
    query, kv_pages, sinks = jax.tree.map(np.asarray, (query, kv_pages, sinks))
    query = query.astype(np.float64) if query.dtype.itemsize == 1 else query
    if latent_dim is not None:
        k_pages = kv_pages[:, :, None]
        v_pages = k_pages[..., :latent_dim]
    elif isinstance(kv_pages, tuple):
        k_pages, v_pages = kv_pages
    else:
        k_pages, v_pages = kv_pages[:, :, 0::2], kv_pages[:, :, 1::2]
    heads, kv_heads, page_size = query.shape[1], k_pages.shape[2], k_pages.shape[1]
    of_queries = np.broadcast_to(np.asarray(q_scale, np.float64).reshape(-1), (kv_heads,)).repeat(heads // kv_heads)
    query = (query * of_queries[:, None]).astype(query.dtype)
    scale = query.shape[2] ** -0.5 if scale is None else scale
    lens, table, starts = (np.asarray(x) for x in (kv_lens, page_indices, cu_q_lens))
    out = [np.zeros((0, heads, v_pages.shape[-1]), query.dtype)]
    statistics = [np.zeros((0, heads), query.dtype)]
    for s in range(len(lens) if num_seqs is None else np.ravel(num_seqs)[0]):
        q = query[starts[s] : starts[s + 1]]
        assert max_q_len is None or q.shape[0] <= max_q_len
        where = np.arange(lens[s])
        rows = table[s, where // page_size], where % page_size
        k, v = (
            (p[rows] * (f.reshape(*p.shape[:3], 1)[rows] if f.ndim > 2 else f.reshape(-1, 1))).astype(q.dtype)
            for p, f in ((k_pages, np.asarray(k_scale)), (v_pages, np.asarray(v_scale)))
        )
        k, v = (np.repeat(x, heads // kv_heads, axis=1) for x in (k, v))
        logits = scale * (q.swapaxes(0, 1) @ k.transpose(1, 2, 0))
        if softcap is not None:
            logits = softcap * np.tanh(logits / softcap)
        position = lens[s] - q.shape[0] + np.arange(q.shape[0])[:, None]
        if alibi_slopes is not None:
            logits = logits - np.asarray(alibi_slopes)[:, None, None] * (position - where)
        see = where <= position
        if window is not None:
            see &= where >= position - window
        for i in range(0 if tree_mask is None else q.shape[0]):
            allowed = np.asarray(tree_mask)[starts[s] + i]
            for j in range(min(q.shape[0], len(allowed))):
                if lens[s] - q.shape[0] + j >= 0:
                    see[i, lens[s] - q.shape[0] + j] &= allowed[j]
        weights = np.where(see, np.exp(logits), 0)
        total = weights.sum(-1)
        if sinks is not None:
            total = total + np.exp(sinks)[:, None]
        with np.errstate(divide="ignore"):
            statistics.append(np.log(total).T)
        weights = weights / np.where(total > 0, total, 1)[..., None]
        out.append((weights @ v.swapaxes(0, 1)).swapaxes(0, 1))
    out = np.concatenate(out)
    rest = query.shape[0] - out.shape[0]
    out = np.pad(out, ((0, rest), (0, 0), (0, 0)))
    if not return_lse:
        return out
    return out, np.pad(np.concatenate(statistics), ((0, rest), (0, 0)), constant_values=-np.inf)


def separate_pages(
    query: Any, k_pages: Any, v_pages: Any, kv_lens: Any, page_indices: Any, cu_q_lens: Any, **options: Any
) -> Any:
    return ragged_paged_attention(query, (k_pages, v_pages), kv_lens, page_indices, cu_q_lens, **options)
