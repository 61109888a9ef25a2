"""Softmaxes on the CPU: the native kernels of `cpu_softmax.isa.cc`, one read of memory per pass."""

from __future__ import annotations

from vishwamai.core import ffi
from vishwamai.core.op import Implementation
from vishwamai.core.target import Target
from vishwamai.ops.softmax.spec import Operands, Outputs, SoftmaxSpec

_NATIVE = ("float32", "bfloat16", "float16", "float64")


def why_not(spec: SoftmaxSpec, target: Target) -> str | None:
    """The reason why this kernel cannot serve `spec`, or None."""
    if spec.operands.x.dtype.name not in _NATIVE:
        return f"`x` is {spec.operands.x.dtype.name}; the CPU kernel takes {', '.join(_NATIVE)}."
    return ffi.why_not(target)


def notes(spec: SoftmaxSpec, target: Target) -> tuple[str, ...]:
    return ("`axis` is not the last: the array is turned before and after",) if spec.transposed else ()


def forward(spec: SoftmaxSpec, operands: Operands) -> tuple[Outputs, None]:
    x = operands.x
    (y,) = ffi.call("vishwamai_softmax_forward", (ffi.result(x.shape, x.dtype),), x, log=spec.log)
    return Outputs(y), None


def backward(spec: SoftmaxSpec, operands: Operands, outputs: Outputs, cotangents: Outputs) -> Operands:
    source = operands.x if spec.log else outputs.y
    results = (ffi.result(source.shape, source.dtype),)
    (dx,) = ffi.call("vishwamai_softmax_backward", results, source, cotangents.y.astype(source.dtype), log=spec.log)
    return Operands(dx)


NATIVE = Implementation("native_cpu", "cpu", forward, backward, why_not, notes=notes)
