"""Gated linear units on the CPU: the native kernels of `cpu_gated.isa.cc`, forward and backward."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
import numpy as np

from vishwamai.core import ffi
from vishwamai.core.activations import ACTIVATIONS
from vishwamai.core.op import Implementation
from vishwamai.core.target import Target
from vishwamai.core.types import AnyArray
from vishwamai.ops.gated.spec import GatedSpec, Operands, Outputs, Residuals

if TYPE_CHECKING:
    import jax


def why_not(spec: GatedSpec, target: Target) -> str | None:
    """The reason why this kernel cannot serve `spec`, or None."""
    if spec.quantized:
        return "`weights` are QTensors; the kernels take those that `pack_weight` made of them."
    return ffi.why_not(target)  # every shape, dtype and activation of the op


def notes(spec: GatedSpec, target: Target) -> tuple[str, ...]:
    return ("float16 is computed through float32 copies",) if spec.operands.x.dtype == jnp.float16 else ()


def _storage(spec: GatedSpec) -> np.dtype:
    dtype = spec.operands.x.dtype
    return jnp.dtype(jnp.float32) if dtype == jnp.float16 else dtype


def _attributes(spec: GatedSpec) -> dict[str, Any]:
    return {
        "activation": np.int64(0 if spec.activation is None else 1 + ACTIVATIONS.index(spec.activation)),
        "parts": np.int64(2 if spec.precision == "high" else 3),
    }


def _native_operands(spec: GatedSpec, operands: Operands) -> Operands:
    """In the kernel's dtype, gate and up with as many groups as one another."""
    x, gate, up, joint = (None if a is None else a.astype(_storage(spec)) for a in operands[:4])
    if gate is not None and up is not None and gate.shape != up.shape:
        gate, up = (jnp.broadcast_to(w, (spec.groups, *w.shape[1:])) for w in (gate, up))
    return Operands(x, gate, up, joint)


def forward(spec: GatedSpec, operands: Operands, residuals: bool) -> tuple[Outputs, Residuals | None]:
    """activation(x @ gate) * (x @ up), from the unrounded sums."""
    shape, dtype, storage = (spec.groups, spec.m, spec.n), operands.x.dtype, _storage(spec)
    residual_shape = shape if residuals else None
    h, gate, up = ffi.call(
        "vishwamai_gated_forward",
        (ffi.result(shape, storage), ffi.result(residual_shape, storage), ffi.result(residual_shape, storage)),
        *_native_operands(spec, operands)[:4],
        **_attributes(spec),
    )
    return Outputs(h.astype(dtype)), Residuals(gate.astype(dtype), up.astype(dtype)) if residuals else None


def backward(spec: GatedSpec, operands: Operands, residuals: Residuals, cotangents: Outputs) -> Operands:
    """Two calls, so that XLA drops the one whose gradients are not requested."""
    storage, native = _storage(spec), _native_operands(spec, operands)
    arguments = (*native[:4], *(a.astype(storage) for a in (*residuals, cotangents.h)))

    def dtype_of(operand: jax.Array, groups: int) -> np.dtype:
        """Of the kernel's gradient: the accumulation dtype where groups of it are still to be summed."""
        return spec.accumulator if operand.shape[0] < groups else storage

    def finish(gradient: AnyArray, operand: AnyArray) -> AnyArray:
        if operand is None:
            return None
        if gradient.shape[0] > operand.shape[0]:
            gradient = jnp.sum(gradient, axis=0, keepdims=True)
        return gradient.astype(operand.dtype)

    x = operands.x
    (dx,) = ffi.call(
        "vishwamai_gated_input_gradient",
        (ffi.result((spec.groups, spec.m, spec.k), dtype_of(x, spec.groups)),),
        *arguments,
        **_attributes(spec),
    )
    groups = (native.gate if native.joint is None else native.joint).shape[0]
    weights = [None if w is None else (groups, *w.shape[1:]) for w in native[1:4]]
    shared = any(w is not None and w.shape[0] < groups for w in operands[1:4])
    dweights = ffi.call(
        "vishwamai_gated_weight_gradient",
        [ffi.result(shape, spec.accumulator if shared else storage) for shape in weights],
        *arguments,
        **_attributes(spec),
    )
    return Operands(finish(dx, x), *(finish(d, w) for d, w in zip(dweights, operands[1:4], strict=True)))


NATIVE = Implementation("native_cpu", "cpu", forward, backward, why_not, notes=notes)
