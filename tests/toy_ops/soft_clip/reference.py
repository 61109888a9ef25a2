"""The soft limit in plain jax.numpy: the definition, and the fallback on every platform."""

from __future__ import annotations

import jax.numpy as jnp

from toy_ops.soft_clip.spec import Operands, Outputs, SoftClipSpec
from vishwamai.core.gradients import autodiff_backward
from vishwamai.core.op import Implementation


def forward(spec: SoftClipSpec, operands: Operands) -> tuple[Outputs, None]:
    y = spec.limit * jnp.tanh(operands.x.astype(spec.accumulator) / spec.limit)
    if operands.gain is not None:
        y = y * operands.gain.astype(spec.accumulator)
    return Outputs(y.astype(operands.x.dtype)), None


XLA = Implementation("xla", None, forward, autodiff_backward(forward), autodiff=True)
