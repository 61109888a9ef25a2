"""Normalization on the CPU: the native kernels of `cpu_norm.isa.cc`, one read of memory per pass."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from vishwamai.core import ffi
from vishwamai.core.op import Implementation
from vishwamai.core.target import Target
from vishwamai.core.types import AnyArray
from vishwamai.ops.norm.spec import NormSpec, Operands, Outputs

if TYPE_CHECKING:
    import jax

_NATIVE = ("float32", "bfloat16", "float64")


def why_not(spec: NormSpec, target: Target) -> str | None:
    """The reason why this kernel cannot serve `spec`, or None."""
    if spec.operands.x.dtype.name not in (*_NATIVE, "float16"):
        return f"`x` is {spec.operands.x.dtype.name}; the CPU kernel takes {', '.join(_NATIVE)} and float16."
    return ffi.why_not(target)


def notes(spec: NormSpec, target: Target) -> tuple[str, ...]:
    return ("float16 is computed through float32 copies",) if spec.operands.x.dtype == jnp.float16 else ()


def _storage(dtype: DTypeLike) -> DTypeLike:
    return jnp.float32 if dtype == jnp.float16 else dtype


def _cast(x: AnyArray, dtype: DTypeLike) -> AnyArray:
    return None if x is None else x.astype(dtype)


def _parameter_dtype(parameter: jax.Array | None, statistics: DTypeLike) -> DTypeLike:
    """The dtype in which the kernel takes a parameter and gives its gradient: its own of 16 bits, or that of the
    statistics.
    """
    if parameter is None or parameter.dtype.itemsize != 2 or statistics != jnp.float32:
        return statistics
    return parameter.dtype


def _attributes(spec: NormSpec) -> dict[str, Any]:
    return {"eps": np.float64(spec.eps), "layer": spec.kind == "layer"}


def forward(spec: NormSpec, operands: Operands) -> tuple[Outputs, None]:
    x, residual, scale, offset = operands
    total = None
    if x.dtype == jnp.float16 and residual is not None:
        x = total = x + residual  # rounded to float16, which the kernel's float32 copy would not do
        residual = None
    dtype = _storage(x.dtype)
    y, summed = ffi.call(
        "vishwamai_norm_forward",
        (ffi.result(x.shape, dtype), ffi.result(None if residual is None else x.shape, dtype)),
        x.astype(dtype),
        _cast(residual, dtype),
        _cast(scale, _parameter_dtype(scale, spec.accumulator)),
        _cast(offset, _parameter_dtype(offset, spec.accumulator)),
        **_attributes(spec),
    )
    return Outputs(y.astype(x.dtype), total if total is not None else summed), None


def backward(spec: NormSpec, operands: Operands, outputs: Outputs, cotangents: Outputs) -> Operands:
    x, residual, scale, offset = operands
    s = x if outputs.total is None else outputs.total
    dtype, statistics = _storage(x.dtype), spec.accumulator
    dx, dscale, doffset = ffi.call(
        "vishwamai_norm_backward",
        (
            ffi.result(x.shape, dtype),
            ffi.result(None if scale is None else scale.shape, _parameter_dtype(scale, statistics)),
            ffi.result(None if offset is None else offset.shape, _parameter_dtype(offset, statistics)),
        ),
        s.astype(dtype),
        cotangents.y.astype(dtype),
        _cast(cotangents.total, dtype),
        _cast(scale, _parameter_dtype(scale, statistics)),
        **_attributes(spec),
    )
    dx = dx.astype(x.dtype)
    return Operands(
        dx,
        None if residual is None else dx,
        None if scale is None else dscale.astype(scale.dtype),
        None if offset is None else doffset.astype(offset.dtype),
    )


NATIVE = Implementation("native_cpu", "cpu", forward, backward, why_not, notes=notes)
