"""Activations on the CPU: the native kernels of `cpu_activation.isa.cc`, forward and backward, with the dropout's mask
made on the way.
"""

from __future__ import annotations

import math

import numpy as np

from vishwamai.core import dropout, ffi
from vishwamai.core.op import Implementation
from vishwamai.core.target import Target
from vishwamai.core.types import AnyArray
from vishwamai.ops.activation.spec import ActivationSpec, Operands, Outputs

_NATIVE = ("float32", "bfloat16", "float16", "float64")
_KINDS = ("gelu", "gelu_tanh", "silu", "relu2")  # in the order of the kernel's ActivationKind


def why_not(spec: ActivationSpec, target: Target) -> str | None:
    """The reason why this kernel cannot serve `spec`, or None."""
    if spec.operands.x.dtype.name not in _NATIVE:
        return f"`x` is {spec.operands.x.dtype.name}; the CPU kernel takes {', '.join(_NATIVE)}."
    return ffi.why_not(target)


def notes(spec: ActivationSpec, target: Target) -> tuple[str, ...]:
    if spec.activation != "relu2" or spec.operands.x.dtype.name != "float32" or spec.rate:
        return ()
    return ("XLA's own fusion of relu2 in float32 is as fast (0.9 to 1.1 times, see docs/notes/rows.md)",)


def _call(spec: ActivationSpec, operands: Operands, dy: AnyArray) -> AnyArray:
    """y, or dx where `dy` is given, of x's shape."""
    x = operands.x
    groups, features = x.shape[0], x.shape[-1]
    flat = (groups, math.prod(x.shape[1:-1]), features)
    rows = None if operands.rows is None else operands.rows.reshape(operands.rows.shape[0], -1)
    (out,) = ffi.call(
        "vishwamai_activation",
        (ffi.result(flat, x.dtype),),
        x.reshape(flat),
        None if dy is None else dy.astype(x.dtype).reshape(flat),
        rows,
        operands.columns,
        operands.seed,
        kind=np.int64(_KINDS.index(spec.activation)),
        threshold=np.int64(dropout.threshold(spec.rate)),
        keep_scale=np.float64(1.0 / (1.0 - spec.rate)),
    )
    return out.reshape(x.shape)


def forward(spec: ActivationSpec, operands: Operands) -> tuple[Outputs, None]:
    return Outputs(_call(spec, operands, None)), None


def backward(spec: ActivationSpec, operands: Operands, cotangents: Outputs) -> Operands:
    return Operands(_call(spec, operands, cotangents.y), None, None, None)


NATIVE = Implementation("native_cpu", "cpu", forward, backward, why_not, notes=notes)
