"""Which query may see which key: one definition for the pure-JAX implementations, of the whole score matrix or of a
block of it.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from vishwamai.core.types import AnyArray
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
    seen = static_mask(spec, rows, columns)
    seen = None if seen is None else seen[None, None]
    if spec.blocks is not None:  # of the whole score matrix
        blocks = jnp.asarray(spec.blocks.positions(spec.q_len, spec.kv_len)[None])
        seen = blocks if seen is None else seen & blocks
    if operands.mask is not None:
        seen = operands.mask if seen is None else seen & operands.mask
    if operands.q_segment_ids is not None:
        same = operands.q_segment_ids[:, None, :, None] == operands.kv_segment_ids[:, None, None, :]
        seen = same if seen is None else seen & same
    if operands.q_positions is not None:
        near = within_reach(spec, operands.q_positions[:, None, :, None], columns)
        seen = near if seen is None else seen & near
    return seen


def within_reach(spec: AttentionSpec, positions: jax.Array, columns: jax.Array) -> jax.Array:
    """Causal mask and window for queries that stand at the keys `positions`, which broadcast with `columns`; True =
    attend.
    """
    low, high = spec.reach
    distance = columns - positions
    seen = jnp.ones(distance.shape, bool) if high is None else distance <= high
    return seen if low is None else seen & (distance >= low)


def of_seen_keys(x: jax.Array, seen: jax.Array | None) -> jax.Array:
    """Keys or values `[B, Hkv, Tk, D]`, 0 where no query sees them: a probability of 0 times infinity or NaN is NaN.

    Args:
      seen: bool, positions that queries see, broadcastable to `[B, Hkv, G, Tq, Tk]`; None for everything.
    """
    if seen is None:
        return x
    seen = seen.reshape((1,) * (5 - seen.ndim) + seen.shape)
    return jnp.where(jnp.any(seen, axis=(2, 3))[..., None], x, 0)


def exposed_keys(spec: AttentionSpec, operands: Operands) -> jax.Array | None:
    """Which keys no mask hides from every query by itself, as far as that follows without a look at every pair.

    Counted are the band, columns of the block mask, a mask that is the same for all queries, segment ids outside the
    range of the queries' ids, and keys outside of what positions reach.

    Returns:
      bool `[B or 1, Hkv or 1, Tk]`; None where it would be True everywhere or nothing of it is known.
    """
    columns = jnp.arange(spec.kv_len)
    terms = []
    start, stop = spec.key_range(0, spec.q_len - 1)
    if (start, stop) != (0, spec.kv_len):
        terms.append(((columns >= start) & (columns < stop))[None, None])
    if spec.blocks is not None:
        visible = spec.blocks.columns(spec.kv_len)  # [heads or 1, Tk]
        if not visible.all():
            terms.append(jnp.asarray(_of_kv_heads(spec, visible[None])))
    if operands.mask is not None and operands.mask.shape[2] == 1:
        terms.append(_of_kv_heads(spec, operands.mask[:, :, 0]))
    if operands.q_segment_ids is not None:
        rows, ids = operands.q_segment_ids, operands.kv_segment_ids
        terms.append(((ids >= rows.min(1, keepdims=True)) & (ids <= rows.max(1, keepdims=True)))[:, None])
    if operands.q_positions is not None:
        (low, high), rows = spec.reach, operands.q_positions[:, None]
        if low is not None:
            terms.append(columns >= rows.min(2, keepdims=True) + low)
        if high is not None:
            terms.append(columns <= rows.max(2, keepdims=True) + high)
    if not terms:
        return None
    visible = functools.reduce(jnp.logical_and, terms)
    return jnp.broadcast_to(visible, (*visible.shape[:2], spec.kv_len))


def _of_kv_heads(spec: AttentionSpec, visible: AnyArray) -> AnyArray:
    """`[B, Hq or 1, Tk]` to `[B, Hkv or 1, Tk]`: shown to any head of the group."""
    heads = visible.shape[1]
    return visible if heads == 1 else visible.reshape(visible.shape[0], spec.kv_heads, -1, visible.shape[2]).any(2)


def grouped(x: jax.Array, kv_heads: int) -> jax.Array:
    """Splits the head axis: `[B, Hq or 1, ...] -> [B, Hkv or 1, Hq // Hkv or 1, ...]`."""
    heads = x.shape[1]
    return x.reshape(x.shape[0], *((1, 1) if heads == 1 else (kv_heads, heads // kv_heads)), *x.shape[2:])
