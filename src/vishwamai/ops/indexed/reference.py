"""Attention over chosen tokens in plain jax.numpy: the definition, and what runs on every platform.

The keys and values of a block of queries are gathered at once. The blocks are walked in turn, so memory grows with
neither the number of queries nor that of keys; the backward pass gathers them again.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from vishwamai.core.gradients import autodiff_backward
from vishwamai.core.op import Implementation
from vishwamai.core.precision import lax_precision
from vishwamai.core.sharding import match_varying
from vishwamai.core.target import Target
from vishwamai.ops.indexed.spec import IndexedSpec, Operands, Outputs

_BLOCK_BYTES = 32 << 20
"""Bytes of keys and values that a block of queries may gather."""


def forward(spec: IndexedSpec, operands: Operands) -> tuple[Outputs, None]:
    """softmax(scale q.k) v over the keys that `indices` names; entries outside of the keys name none."""
    wide = spec.accumulator
    precision = lax_precision("highest") if operands.query.dtype != jnp.bfloat16 else None
    if isinstance(spec.kv_len, int) and isinstance(spec.chosen, int) and spec.kv_len * spec.chosen == 0:
        shape = (*operands.query.shape[:3], spec.value_dim)
        return Outputs(jnp.zeros(shape, operands.query.dtype)), None
    key = operands.key
    value = operands.value
    shape = spec.batch, spec.kv_heads, spec.group, spec.q_len, spec.qk_dim
    query = operands.query.reshape(shape)
    indices = jnp.broadcast_to(operands.indices, (spec.batch, spec.q_len, spec.chosen))

    @jax.checkpoint
    def attend(item: tuple[Any, Any]) -> Any:
        """One query of every head: `[batch, kv_heads, group, qk_dim]` and its indices `[batch, chosen]`."""
        q, index = item
        present = (index >= 0) & (index < spec.kv_len)
        rows = jnp.where(present, index, 0)[:, None, :, None]
        keys = jnp.take_along_axis(key, rows, axis=2).astype(wide)  # [batch, kv_heads, chosen, qk_dim]
        if value is None:
            values = keys[..., : spec.value_dim]
        else:
            values = jnp.take_along_axis(value, rows, axis=2).astype(wide)
        present = present[:, None, None]
        # What is not chosen may hold anything, NaN included: it is replaced, not multiplied by 0.
        inside = present[:, 0, :, :, None]
        keys, values = jnp.where(inside, keys, 0), jnp.where(inside, values, 0)
        s = jnp.einsum("bhgd,bhnd->bhgn", q.astype(wide) * spec.scale, keys, precision=precision)
        m = lax.stop_gradient(jnp.max(s, axis=-1, keepdims=True, initial=-1e30, where=present))
        p = jnp.where(present, jnp.exp(jnp.where(present, s - m, 0)), 0)
        total = jnp.sum(p, axis=-1, keepdims=True)
        mixed = jnp.einsum("bhgn,bhnd->bhgd", p, values, precision=precision)
        return (mixed / jnp.where(total > 0, total, 1)).astype(operands.query.dtype)

    query, indices, key, value = match_varying((jnp.moveaxis(query, 3, 0), jnp.swapaxes(indices, 0, 1), key, value))
    sizes = spec.batch, spec.kv_heads, spec.chosen, spec.qk_dim + spec.value_dim
    block = None
    if all(isinstance(size, int) for size in (*sizes, spec.q_len)):
        block = max(1, _BLOCK_BYTES // max(1, sizes[0] * sizes[1] * sizes[2] * sizes[3] * wide.itemsize))
    if block is not None and block >= spec.q_len:
        out = jax.vmap(attend)((query, indices))
    else:
        out = lax.map(attend, (query, indices), batch_size=block)
    out = jnp.moveaxis(out, 0, 3).reshape(*operands.query.shape[:3], spec.value_dim)
    return Outputs(out), None


def notes(spec: IndexedSpec, target: Target) -> tuple[str, ...]:
    """What `explain` adds: there is no kernel yet."""
    return (f"XLA gathers {spec.chosen} keys of each query; no platform has a kernel of its own",)


XLA = Implementation("xla", None, forward, autodiff_backward(forward), notes=notes, autodiff=True)
