"""Which query may see which key: one definition for the pure-JAX implementations, of the whole score matrix or of a block of it."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from vishwamai.ops.attention.spec import AttentionSpec, Operands


def static_mask(spec: AttentionSpec, rows: jax.Array, columns: jax.Array) -> jax.Array | None:
    """Causal mask and window for absolute `rows [Tq]` and `columns [Tk]`; None if both let everything through.

    Returns:
      bool `[Tq, Tk]`, True = attend.
    """
    low, high = spec.band
    distance = columns[None, :] - rows[:, None]
    seen = None if high is None else distance <= high
    if low is not None:
        seen = distance >= low if seen is None else seen & (distance >= low)
    return seen


def visible(spec: AttentionSpec, operands: Operands, rows: jax.Array, columns: jax.Array) -> jax.Array | None:
    """All masks together, for whole operands whose `rows` and `columns` are their absolute positions.

    Returns:
      bool, broadcastable to `[B, Hq, Tq, Tk]`, True = attend; None if nothing is masked.
    """
    seen: Any = static_mask(spec, rows, columns)
    seen = None if seen is None else seen[None, None]
    if spec.blocks is not None:  # of the whole score matrix
        blocks = jnp.asarray(spec.blocks.positions(spec.q_len, spec.kv_len)[None])
        seen = blocks if seen is None else seen & blocks
    if operands.mask is not None:
        seen = operands.mask if seen is None else seen & operands.mask
    if operands.q_segment_ids is not None:
        same = operands.q_segment_ids[:, None, :, None] == operands.kv_segment_ids[:, None, None, :]
        seen = same if seen is None else seen & same
    return seen


def grouped(x: jax.Array, kv_heads: int) -> jax.Array:
    """Splits the head axis: `[B, Hq or 1, ...] -> [B, Hkv or 1, Hq // Hkv or 1, ...]`."""
    heads = x.shape[1]
    return x.reshape(x.shape[0], *((1, 1) if heads == 1 else (kv_heads, heads // kv_heads)), *x.shape[2:])
