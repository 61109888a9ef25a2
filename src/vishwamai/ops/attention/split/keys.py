"""Attention of queries that all devices have over keys that are split over them: each attends to its own keys, and the
parts are merged by their logsumexps.

Dao et al., "Flash-Decoding for long-context inference" (2023), over devices instead of the blocks of one. What travels
is as large as the output, however many keys there are.
"""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp

from vishwamai.core import dropout
from vishwamai.core.precision import accumulator_dtype
from vishwamai.core.sharding import match_varying
from vishwamai.core.types import AnyArray
from vishwamai.ops.attention.op import ATTENTION
from vishwamai.ops.attention.spec import AttentionSpec, Operands, Outputs


def merged_over(axes: object, out: jax.Array, lse: jax.Array, sinks: AnyArray = None) -> tuple[jax.Array, jax.Array]:
    """(out, logsumexp) over the keys of all devices of `axes`, from those over each device's own; inside `shard_map`.

    Args:
      out: `[..., v_dim]`. lse: the same without the last axis, -inf where a row sees no key of the device.
      sinks: broadcast to `lse`: one more logit in every denominator. None for none.
    """
    wide = accumulator_dtype(out.dtype)
    lse = lse.astype(wide)
    top = jax.lax.pmax(jax.lax.stop_gradient(lse), axes)
    if sinks is not None:
        sinks = sinks.astype(wide)
        top = jnp.maximum(top, jax.lax.stop_gradient(sinks))
    top = jnp.where(top == -math.inf, 0.0, top)
    seen = lse > -math.inf
    # Zero twice, so that the derivative of what is not seen is 0 too.
    weight = jnp.where(seen, jnp.exp(jnp.where(seen, lse, top) - top), 0.0)
    total = jax.lax.psum(weight, axes)
    if sinks is not None:
        total = total + jnp.exp(sinks - top)
    alive = total > 0
    safe = jnp.where(alive, total, 1.0)
    result = jax.lax.psum(weight[..., None] * out.astype(wide), axes) / safe[..., None]
    return result.astype(out.dtype), jnp.where(alive, top + jnp.log(safe), -math.inf)


def attend_keys(
    axes: object, spec: AttentionSpec, operands: Operands, *, config: object = None, implementation: str | None = None
) -> Outputs:
    """Output and logsumexp over the keys of all devices of `axes`, the same on each; inside `shard_map`.

    Args:
      spec: the options; `causal_offset` says where the queries stand among the keys of all devices.
      operands: the queries and what belongs to them, the same on every device; of keys, values, bias and mask this
        device's keys. `q_positions` are among the keys of all devices.
    """
    kv_len = operands.key.shape[2]
    first = jax.lax.axis_index(axes) * kv_len
    local = operands._replace(sinks=None)
    spec = dataclasses.replace(spec, causal=spec.causal and not _sees_all(spec, jax.lax.axis_size(axes) * kv_len))
    if spec.causal or spec.window is not None:
        positions = operands.q_positions
        if positions is None:
            positions = spec.causal_offset + jnp.arange(operands.query.shape[2], dtype=jnp.int32)[None]
        local = local._replace(q_positions=positions - first.astype(jnp.int32))
    if operands.dropout_seed is not None:
        local = local._replace(dropout_seed=dropout.offset_seeds(operands.dropout_seed, 0, first))
    local = match_varying(local)
    local_spec = dataclasses.replace(spec.localize(local), causal_offset=0, return_lse=True)
    part = ATTENTION(local_spec, local, config=config, implementation=implementation)
    sinks = None if operands.sinks is None else operands.sinks[:, :, None]
    return Outputs(*merged_over(axes, part.out, part.logsumexp, sinks))


def _sees_all(spec: AttentionSpec, all_keys: int) -> bool:
    """Whether a causal mask hides nothing from the queries, as in a step of decoding."""
    return spec.operands.q_positions is None and spec.causal_offset >= all_keys - 1
