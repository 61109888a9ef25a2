"""The gated linear unit by XLA's own products: the definition, the fallback on every platform, and the gradient of
every implementation.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from vishwamai.core.activations import activate, with_derivative
from vishwamai.core.gradients import is_float, map_fields
from vishwamai.core.op import Implementation
from vishwamai.core.precision import lax_precision
from vishwamai.ops.gated.spec import GatedSpec, Operands, Outputs, Residuals


def _weights(operands: Operands) -> tuple[jax.Array, jax.Array]:
    """gate and up, `[G or 1, K, N]`, in the dtype of x, which holds quantized numbers exactly."""
    pair = (operands.gate, operands.up) if operands.joint is None else (operands.joint[:, 0], operands.joint[:, 1])
    return pair[0].astype(operands.x.dtype), pair[1].astype(operands.x.dtype)


def _columns(operands: Operands) -> tuple[jax.Array | None, jax.Array | None]:
    """The scales of gate's and up's columns, `[G or 1, 1, N]`, or None."""
    if operands.gate_scale is None:
        return None, None
    return operands.gate_scale[:, None], operands.up_scale[:, None]


def _times(x: jax.Array, columns: jax.Array | None) -> jax.Array:
    return x if columns is None else x * columns


def _product(spec: GatedSpec, lhs: jax.Array, rhs: jax.Array, lhs_axis: int, rhs_axis: int, shared: bool) -> jax.Array:
    """`[G, ., .]` in the wide dtype, contracting the axis given of each `[G or 1, ., .]`; summed over the groups,
    `[1, ., .]`, where `shared`.
    """
    dot = functools.partial(
        lax.dot_general, precision=lax_precision(spec.precision), preferred_element_type=spec.accumulator
    )
    groups = max(lhs.shape[0], rhs.shape[0])
    if lhs.shape[0] == rhs.shape[0]:
        if shared and groups > 1:
            return dot(lhs, rhs, (((0, lhs_axis), (0, rhs_axis)), ((), ())))[None]
        return dot(lhs, rhs, (((lhs_axis,), (rhs_axis,)), ((0,), (0,))))
    if rhs.shape[0] == 1:
        out = dot(lhs, rhs[0], (((lhs_axis,), (rhs_axis - 1,)), ((), ())))
    else:
        out = dot(rhs, lhs[0], (((rhs_axis,), (lhs_axis - 1,)), ((), ()))).swapaxes(1, 2)
    return jnp.sum(out, axis=0, keepdims=True) if shared else out


def forward(spec: GatedSpec, operands: Operands, residuals: bool) -> tuple[Outputs, Residuals | None]:
    """activation(x @ gate) * (x @ up), from the unrounded sums."""
    dtype = operands.x.dtype
    gate, up = (
        jnp.broadcast_to(_times(_product(spec, operands.x, w, 2, 1, False), columns), (spec.groups, spec.m, spec.n))
        for w, columns in zip(_weights(operands), _columns(operands), strict=True)
    )
    out = (activate(spec.activation, gate) * up).astype(dtype)
    return Outputs(out), Residuals(gate.astype(dtype), up.astype(dtype)) if residuals else None


def slopes(
    spec: GatedSpec, residuals: Residuals, dh: jax.Array, columns: tuple[Any, Any] = (None, None)
) -> tuple[jax.Array, jax.Array]:
    """The gradients of gate's and up's products, times the scales of their columns, rounded to the operands' dtype, as
    jax.numpy's own would be.
    """
    dtype = dh.dtype
    gate, up, dh = (a.astype(spec.accumulator) for a in (*residuals, dh))
    activated, slope = with_derivative(spec.activation, gate)
    return _times(dh * up * slope, columns[0]).astype(dtype), _times(dh * activated, columns[1]).astype(dtype)


def backward(spec: GatedSpec, operands: Operands, residuals: Residuals, cotangents: Outputs) -> Operands:
    """Four products, of `slopes`; of quantized weights two, for zeros stand for what has no gradient."""
    x, (w_gate, w_up) = operands.x, _weights(operands)
    d_gate, d_up = slopes(spec, residuals, cotangents.h, _columns(operands))
    lone_x = x.shape[0] == 1
    dx = _product(spec, d_gate, w_gate, 2, 2, lone_x) + _product(spec, d_up, w_up, 2, 2, lone_x)
    dx = dx.astype(x.dtype)
    if spec.quantized:
        rest = map_fields(lambda a: jnp.zeros_like(a) if is_float(a) else None, operands)
        return rest._replace(x=dx)
    lone_w = w_gate.shape[0] == 1
    dw_gate, dw_up = (_product(spec, x, d, 1, 1, lone_w).astype(x.dtype) for d in (d_gate, d_up))
    if operands.joint is not None:
        return Operands(dx, None, None, jnp.stack([dw_gate, dw_up], axis=1))
    return Operands(dx, dw_gate, dw_up, None)


XLA = Implementation("xla", None, forward, backward, autodiff=True)
