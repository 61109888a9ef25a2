"""Normalization in plain jax.numpy: the definition, and the fallback on every platform (XLA fuses it)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax.numpy as jnp
from jax import lax

from vishwamai.core.gradients import autodiff_backward
from vishwamai.core.op import Implementation
from vishwamai.core.types import AnyArray
from vishwamai.ops.norm.spec import NormSpec, Operands, Outputs

if TYPE_CHECKING:
    import jax


def forward(spec: NormSpec, operands: Operands) -> tuple[Outputs, None]:
    """y = (s - mean) * rstd * scale + offset over the last axis, with s = x + residual, in the statistics dtype."""
    x = operands.x
    total = x if operands.residual is None else x + operands.residual  # rounded to x.dtype, as the caller will read it
    s = total.astype(spec.accumulator)
    if operands.residual is not None:
        # XLA may keep the sum in float32 between the two lines above; the caller's `total` is rounded, so `s` is too.
        rounded = jnp.finfo(x.dtype)
        s = lax.reduce_precision(s, rounded.nexp, rounded.nmant)
    inverse = _inverse_power(spec, s)
    s = s * inverse
    mean = jnp.mean(s, axis=-1, keepdims=True) if spec.kind == "layer" else None
    centred = s if mean is None else s - mean
    # Of rows that are constant and large, eps would vanish: 0 / 0.
    eps = jnp.maximum(spec.eps * inverse * inverse, jnp.finfo(s.dtype).tiny) if spec.eps > 0 else 0.0
    y = centred * lax.rsqrt(jnp.mean(centred * centred, axis=-1, keepdims=True) + eps)

    def parameter(p: jax.Array) -> AnyArray:
        return p[:, None, :].astype(spec.accumulator)

    if operands.scale is not None:
        y = y * parameter(operands.scale)
    if operands.offset is not None:
        y = y + parameter(operands.offset)
    return Outputs(y.astype(x.dtype), None if operands.residual is None else total), None


def _inverse_power(spec: NormSpec, s: AnyArray) -> AnyArray:
    """The inverse of the power of two near each row's largest size, or near sqrt(eps) where that is more: of rows times
    it, neither the squares nor the gradient's cubes leave the dtype's range, and no digit changes.
    """
    dtype = jnp.finfo(s.dtype)
    largest = jnp.max(jnp.abs(lax.stop_gradient(s)), axis=-1, keepdims=True)
    bounded = jnp.clip(largest, max(spec.eps**0.5, float(dtype.tiny)), 0.25 / float(dtype.tiny))
    if s.dtype != jnp.float64:
        return 1.0 / lax.reduce_precision(bounded, dtype.nexp, 0)
    return 1.0 / lax.platform_dependent(bounded, tpu=_power_by_float32, default=_power_of_float64)


def _power_of_float64(bounded: AnyArray) -> AnyArray:
    return lax.reduce_precision(bounded, jnp.finfo(jnp.float64).nexp, 0)


def _power_by_float32(bounded: AnyArray) -> AnyArray:
    """TPUs hold float64 as two float32, whose range it has there; their compiler reduces no float64."""
    return lax.reduce_precision(bounded.astype(jnp.float32), jnp.finfo(jnp.float32).nexp, 0).astype(jnp.float64)


XLA = Implementation("xla", None, forward, autodiff_backward(forward), autodiff=True)
