"""The cross entropy of a linear layer with all its logits: the definition, which JAX differentiates itself."""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax
from jax.nn import logsumexp

from vishwamai.core.gradients import autodiff_backward
from vishwamai.core.op import Implementation
from vishwamai.core.precision import lax_precision
from vishwamai.core.target import Target
from vishwamai.ops.loss.spec import LossSpec, Operands, Outputs


def forward(spec: LossSpec, operands: Operands) -> tuple[Outputs, None]:
    """Logsumexp, label's logit and sum of the logits `[G, T, V]`."""
    x, weight, bias, labels, targets = operands
    weight = jnp.broadcast_to(weight, (spec.groups, *weight.shape[1:]))
    z = lax.dot_general(
        x,
        weight,
        (((2,), (2,)), ((0,), (0,))),
        precision=lax_precision(spec.precision),
        preferred_element_type=spec.accumulator,
    )
    if bias is not None:
        z = z + bias[:, None, :]
    if spec.softcap is not None:
        z = spec.softcap * jnp.tanh(z / spec.softcap)
    labelled = (labels >= 0) & (labels < spec.vocab)
    at_label = jnp.take_along_axis(z, jnp.where(labelled, labels, 0)[..., None], axis=-1)[..., 0]
    at_label = jnp.where(labelled, at_label, 0.0)
    if targets is not None:
        at_label = at_label + jnp.sum(targets.astype(z.dtype) * z, axis=-1)
    total = jnp.sum(z, axis=-1) if spec.logit_sum else None
    return Outputs(logsumexp(z, axis=-1), at_label, total), None


def notes(spec: LossSpec, target: Target) -> tuple[str, ...]:
    """What `explain` adds: what holding the logits takes."""
    size = spec.groups * spec.tokens * spec.vocab * spec.accumulator.itemsize
    return (f"holds all logits: {size:,} bytes",)


XLA = Implementation("xla", None, forward, autodiff_backward(forward), autodiff=True, notes=notes)
