"""Softmax and its logarithm in plain jax.numpy: the definition, and the fallback on every platform."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from vishwamai.core.op import Implementation
from vishwamai.ops.softmax.spec import Operands, Outputs, SoftmaxSpec


def softmax_rows(x: jax.Array, log: bool) -> jax.Array:
    """Softmax, or its logarithm, over the last axis, in x's dtype."""
    shifted = x - jax.lax.stop_gradient(jnp.max(x, axis=-1, keepdims=True))
    e = jnp.exp(shifted)
    total = jnp.sum(e, axis=-1, keepdims=True)
    return shifted - jnp.log(total) if log else e / total


def gradient_rows(x_or_y: jax.Array, dy: jax.Array, log: bool) -> jax.Array:
    """The gradient of `x`, in the dtype of the operands: from y for the softmax, from x for its logarithm.

    The logarithm's result is no help there: rounded to 16 bits, its exponential is off by as much as y is large.
    """
    if log:
        return dy - softmax_rows(x_or_y, False) * jnp.sum(dy, axis=-1, keepdims=True)
    return x_or_y * (dy - jnp.sum(x_or_y * dy, axis=-1, keepdims=True))


def forward(spec: SoftmaxSpec, operands: Operands) -> tuple[Outputs, None]:
    """exp(x - max) / sum exp(x - max) over the last axis, in float32 (float64 for float64)."""
    return Outputs(softmax_rows(operands.x.astype(spec.accumulator), spec.log).astype(operands.x.dtype)), None


def backward(spec: SoftmaxSpec, operands: Operands, outputs: Outputs, cotangents: Outputs) -> Operands:
    source = operands.x if spec.log else outputs.y
    dx = gradient_rows(source.astype(spec.accumulator), cotangents.y.astype(spec.accumulator), spec.log)
    return Operands(dx.astype(operands.x.dtype))


XLA = Implementation("xla", None, forward, backward, autodiff=True)
