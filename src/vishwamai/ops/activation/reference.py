"""Activations in plain jax.numpy: the definition, and what runs on every platform, for XLA makes one pass of it.

The backward pass needs x alone: the derivative is computed again, and so is the dropout's mask, which is never stored.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from vishwamai.core.activations import activate, derivative
from vishwamai.core.dropout import keep_mask
from vishwamai.core.op import Implementation
from vishwamai.core.target import Target
from vishwamai.ops.activation.spec import ActivationSpec, Operands, Outputs


def _dropped(spec: ActivationSpec, operands: Operands, y: jax.Array) -> jax.Array:
    """`y` with the dropout's zeros and scale."""
    if operands.seed is None:
        return y
    seed_0, seed_1 = (operands.seed[:, i].reshape(-1, *(1,) * (y.ndim - 1)) for i in range(2))
    columns = operands.columns.reshape(operands.columns.shape[0], *(1,) * (y.ndim - 2), -1)
    keep = keep_mask(seed_0, seed_1, operands.rows[..., None], columns, spec.rate)
    return jnp.where(keep, y * (1.0 / (1.0 - spec.rate)), 0)


def forward(spec: ActivationSpec, operands: Operands) -> tuple[Outputs, None]:
    """keep * activation(x) / (1 - rate), in float32 (float64 for float64), rounded once."""
    y = _dropped(spec, operands, activate(spec.activation, operands.x.astype(spec.accumulator)))
    return Outputs(y.astype(operands.x.dtype)), None


def backward(spec: ActivationSpec, operands: Operands, cotangents: Outputs) -> Operands:
    x, dy = operands.x, cotangents.y
    dx = _dropped(spec, operands, dy.astype(spec.accumulator)) * derivative(spec.activation, x.astype(spec.accumulator))
    return Operands(dx.astype(x.dtype), None, None, None)


def notes(spec: ActivationSpec, target: Target) -> tuple[str, ...]:
    """What `explain` adds on a TPU: why there is no kernel."""
    return (WHY_NO_KERNEL,) if target.platform == "tpu" else ()


WHY_NO_KERNEL = (
    "XLA's own fusion is as fast: one read and one write, 88 to 90 % of the bandwidth by the schedule of v5e and v6e "
    "(90 is the ceiling; exact gelu and dropout, bound by the vector unit, 50 to 90 %)"
)


XLA = Implementation("xla", None, forward, backward, notes=notes, autodiff=True)
