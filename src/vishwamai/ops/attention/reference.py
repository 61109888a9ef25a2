"""Attention in plain jax.numpy, with the whole score matrix: the definition that every kernel is held against.

JAX differentiates it to any order. Every division and logarithm is guarded before and after ("double where"), so a row
with nothing to attend to gives output 0, logsumexp -inf and a gradient of exactly 0.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from vishwamai.core import dropout
from vishwamai.core.gradients import autodiff_backward
from vishwamai.core.op import Implementation
from vishwamai.core.precision import lax_precision, rounded
from vishwamai.ops.attention import alibi
from vishwamai.ops.attention.masks import grouped, of_seen_keys, visible
from vishwamai.ops.attention.spec import AttentionSpec, Operands, Outputs


def forward(spec: AttentionSpec, operands: Operands, residuals: bool) -> tuple[Outputs, jax.Array | None]:
    """out = dropout(softmax(mask(softcap(scale * q.k + bias)))) @ v, with the sinks in the denominator."""
    query, key, value = operands.query, operands.key, operands.value
    acc, precision = spec.accumulator, lax_precision(spec.precision)
    rows, columns = jnp.arange(spec.q_len), jnp.arange(spec.kv_len)
    seen = visible(spec, operands, rows, columns)
    if seen is not None:
        seen = grouped(seen, spec.kv_heads)  # broadcasts to [B, Hkv, G, Tq, Tk]
        key, value = of_seen_keys(key, seen), of_seen_keys(value, seen)

    # Heads are [Hkv, G] here, so that keys and values are never repeated.
    q = grouped(query, spec.kv_heads)
    logits = rounded(
        spec.scale * jnp.einsum("bhgqd,bhkd->bhgqk", q, key, precision=precision, preferred_element_type=acc)
    )
    bias = None if operands.bias is None else grouped(operands.bias.astype(acc), spec.kv_heads)
    if bias is not None and not spec.bias_after_softcap:
        logits = logits + bias
    if spec.softcap is not None:
        logits = spec.softcap * jnp.tanh(logits / spec.softcap)
    if bias is not None and spec.bias_after_softcap:
        logits = logits + bias
    if operands.slopes is not None:
        logits = logits + alibi.of_all(spec, operands)
    if seen is not None:
        logits = jnp.where(seen, logits, -jnp.inf)  # [B, Hkv, G, Tq, Tk]

    m = jnp.max(logits, axis=-1, initial=-jnp.inf)  # [B, Hkv, G, Tq]
    sinks = None
    if operands.sinks is not None:
        sinks = grouped(operands.sinks.astype(acc), spec.kv_heads)[..., None]  # [B|1, Hkv, G, 1]
        m = jnp.maximum(m, sinks)
    m = lax.stop_gradient(
        jnp.where(m == -jnp.inf, 0.0, m)
    )  # the result does not depend on it, so neither does the gradient
    p = jnp.exp(logits - m[..., None])
    l = jnp.sum(p, axis=-1)
    if sinks is not None:
        l = l + jnp.exp(sinks - m)
    alive = l > 0
    safe_l = jnp.where(alive, l, 1.0)
    logsumexp = jnp.where(alive, m + jnp.log(safe_l), -jnp.inf).reshape(query.shape[:3])

    if spec.dropout_rate:
        seed = operands.dropout_seed[..., None, None]  # [B, Hq, 2, 1, 1]
        keep = dropout.keep_mask(seed[:, :, 0], seed[:, :, 1], rows[:, None], columns[None, :], spec.dropout_rate)
        p = jnp.where(grouped(keep, spec.kv_heads), p / (1.0 - spec.dropout_rate), 0.0)
    out = jnp.einsum("bhgqk,bhkd->bhgqd", p.astype(value.dtype), value, precision=precision, preferred_element_type=acc)
    out = (out / safe_l[..., None]).astype(query.dtype).reshape(*query.shape[:3], spec.v_dim)
    return Outputs(out, logsumexp if spec.return_lse else None), logsumexp if residuals else None


XLA = Implementation("xla", None, forward, autodiff_backward(forward), autodiff=True)
