"""The rotation in plain jax.numpy: the definition, and the fallback on every platform."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from vishwamai.core.op import Implementation
from vishwamai.ops.rope.spec import Operands, Outputs, RopeSpec


def _table(spec: RopeSpec, table: jax.Array) -> jax.Array:
    """A table so that it meets the arrays, `[B or 1, 1, T, P]` or `[B or 1, T, 1, P]`, in the compute dtype."""
    return jnp.expand_dims(table, 1 if spec.layout == "bhsd" else 2).astype(spec.compute_dtype)


def _pairs(spec: RopeSpec, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Both halves of every pair, `[..., P]` each, in the compute dtype."""
    turning = x[..., : 2 * spec.pairs].astype(spec.compute_dtype)
    if spec.interleaved:
        return turning[..., 0::2], turning[..., 1::2]
    return turning[..., : spec.pairs], turning[..., spec.pairs :]


def rotate(spec: RopeSpec, x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """`x` with its pairs turned: `(a cos - b sin, b cos + a sin)`."""
    a, b = _pairs(spec, x)
    halves = (a * cos - b * sin).astype(x.dtype), (b * cos + a * sin).astype(x.dtype)
    if spec.interleaved:
        turned = jnp.stack(halves, axis=-1).reshape(*x.shape[:-1], 2 * spec.pairs)
    else:
        turned = jnp.concatenate(halves, axis=-1)
    return jnp.concatenate([turned, x[..., 2 * spec.pairs :]], axis=-1)


def forward(spec: RopeSpec, operands: Operands) -> tuple[Outputs, None]:
    cos, sin = _table(spec, operands.cos), _table(spec, operands.sin)
    query, key = (None if x is None else rotate(spec, x, cos, sin) for x in operands[:2])
    return Outputs(query, key), None


def table_gradients(spec: RopeSpec, operands: Operands, cotangents: Outputs) -> tuple[jax.Array, jax.Array]:
    """Gradients of cos and sin, summed over heads. XLA drops them where they are not requested, which is nearly always:
    positions are integers.
    """
    heads = 1 if spec.layout == "bhsd" else 2
    dcos = dsin = jnp.zeros((), spec.compute_dtype)
    for x, dy in zip(operands[:2], cotangents, strict=True):
        if x is not None:
            (a, b), (da, db) = _pairs(spec, x), _pairs(spec, dy)
            dcos = dcos + jnp.sum(a * da + b * db, axis=heads)
            dsin = dsin + jnp.sum(a * db - b * da, axis=heads)
    if operands.cos.shape[0] != spec.batch:  # shared
        dcos, dsin = (jnp.sum(d, axis=0, keepdims=True) for d in (dcos, dsin))
    return dcos.astype(operands.cos.dtype), dsin.astype(operands.sin.dtype)


def backward(spec: RopeSpec, operands: Operands, cotangents: Outputs) -> Operands:
    """The inverse rotation: the same with -sin."""
    turned, _ = forward(spec, Operands(*cotangents, operands.cos, -operands.sin))
    return Operands(*turned, *table_gradients(spec, operands, cotangents))


XLA = Implementation("xla", None, forward, backward, autodiff=True)
