"""Normalization in plain jax.numpy: the definition, and the fallback on every platform (XLA fuses it)."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import lax

from vishwamai.core.gradients import autodiff_backward
from vishwamai.core.op import Implementation
from vishwamai.ops.norm.spec import NormSpec, Operands, Outputs


def forward(spec: NormSpec, config: None, operands: Operands, residuals: bool) -> tuple[Outputs, None]:
    """y = (s - mean) * rstd * scale + offset over the last axis, with s = x + residual, in the statistics dtype."""
    del config, residuals  # nothing to configure, nothing to keep
    x = operands.x
    total = x if operands.residual is None else x + operands.residual  # rounded to x.dtype, as the caller will read it
    s = total.astype(spec.accumulator)
    if operands.residual is not None:
        # XLA may keep the sum in float32 between the two lines above; the caller's `total` is rounded, so `s` is too.
        rounded = jnp.finfo(x.dtype)
        s = lax.reduce_precision(s, rounded.nexp, rounded.nmant)
    mean = jnp.mean(s, axis=-1, keepdims=True) if spec.kind == "layer" else None
    centred = s if mean is None else s - mean
    rstd = lax.rsqrt(jnp.mean(centred * centred, axis=-1, keepdims=True) + spec.eps)
    y = centred * rstd

    def parameter(p: Any) -> Any:
        return p[:, None, :].astype(spec.accumulator)

    if operands.scale is not None:
        y = y * parameter(operands.scale)
    if operands.offset is not None:
        y = y + parameter(operands.offset)
    return Outputs(y.astype(x.dtype), None if operands.residual is None else total), None


XLA = Implementation("xla", None, forward, autodiff_backward(forward), autodiff=True)
