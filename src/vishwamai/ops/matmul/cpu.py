"""The matrix product on the CPU: the native kernel of `cpu_matmul.isa.cc`, with its epilogue, and the shared gradient
on top of it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np

from vishwamai.core import ffi
from vishwamai.core.op import Implementation
from vishwamai.core.precision import FP8_DTYPES
from vishwamai.core.target import Target
from vishwamai.core.types import AnyArray, PyTree
from vishwamai.ops.matmul import gradient
from vishwamai.ops.matmul.spec import ACTIVATIONS, WRAPS, MatmulSpec, Operands, Outputs, joint_groups

if TYPE_CHECKING:
    from jax.typing import DTypeLike


_COMPUTED = ("float32", "bfloat16", "float64", "float16", "int8")


def why_not(spec: MatmulSpec, target: Target) -> str | None:
    """The reason why this kernel cannot serve `spec`, or None."""
    if spec.wraps:
        return WRAPS
    if spec.compute_dtype.name not in _COMPUTED:
        return f"the operands multiply as {spec.compute_dtype.name}; the CPU kernel takes {', '.join(_COMPUTED)}."
    if any(spec.blocked):
        return "an operand has scales for blocks of K; the CPU kernel takes one for each row or column."
    return ffi.why_not(target)


def notes(spec: MatmulSpec, target: Target) -> tuple[str, ...]:
    a, b = spec.operands.a.dtype, spec.operands.b.dtype
    if a in FP8_DTYPES and b in FP8_DTYPES and (widened := target.widens_fp8((a.name, b.name))):
        return (widened,)
    return ("float16 is computed through float32 copies",) if spec.compute_dtype == jnp.float16 else ()


def _native(dtype: DTypeLike) -> np.dtype:
    return jnp.dtype(jnp.float32) if dtype == jnp.float16 else jnp.dtype(dtype)


def result_dtype(storage: object, requested: object) -> np.dtype:
    """The dtype in which the kernel writes what is wanted as `requested`: the same where it can, else the one it
    computed in.
    """
    if storage == jnp.float64:
        return jnp.dtype(jnp.float64)
    if storage == jnp.int8 and requested == jnp.int32:
        return jnp.dtype(jnp.int32)
    return jnp.dtype(jnp.bfloat16 if requested == jnp.bfloat16 else jnp.float32)


def _matmul(
    spec: MatmulSpec,
    a: AnyArray,
    b: AnyArray,
    transpose_a: bool,
    transpose_b: bool,
    out_dtype: DTypeLike,
    vectors: tuple[PyTree, ...],
    activation: str | None,
    keep: bool,
) -> tuple[AnyArray, AnyArray]:
    """(activation(scales * (a @ b) + bias), the pre-activation if `keep`), both in out_dtype; `vectors` is (bias,
    scale_a, scale_b).
    """
    storage = _native(spec.compute_dtype)
    groups = joint_groups(a, b, *vectors)
    shape = (groups, a.shape[2 if transpose_a else 1], b.shape[1 if transpose_b else 2])
    result = result_dtype(storage, out_dtype)
    wide = jnp.float64 if storage == jnp.float64 else jnp.float32
    out, preactivation = ffi.call(
        "vishwamai_matmul",
        (ffi.result(shape, result), ffi.result(shape if keep else None, result)),
        a.astype(storage),
        b.astype(storage),
        *(None if v is None else v.astype(wide) for v in vectors),
        transpose_a=transpose_a,
        transpose_b=transpose_b,
        activation=np.int64(0 if activation is None else 1 + ACTIVATIONS.index(activation)),
        parts=np.int64(2 if spec.precision == "high" else 3),
    )
    return out.astype(out_dtype), None if preactivation is None else preactivation.astype(out_dtype)


def forward(spec: MatmulSpec, operands: Operands, residuals: bool) -> tuple[Outputs, PyTree]:
    a, b, *vectors = operands
    keep = residuals and spec.keeps_preactivation
    out, preactivation = _matmul(
        spec, a, b, spec.transpose_a, spec.transpose_b, spec.out_dtype, tuple(vectors), spec.activation, keep
    )
    return Outputs(out), preactivation


def product(
    spec: MatmulSpec,
    lhs: jax.Array,
    rhs: jax.Array,
    lhs_axis: int,
    rhs_axis: int,
    groups: int,
    out_dtype: DTypeLike,
) -> jax.Array:
    """See `gradient.Product`."""
    per_group = lhs.shape[0] == rhs.shape[0]
    if groups == 1 and per_group and lhs.shape[0] > 1 and lhs_axis == rhs_axis == 1:
        lhs, rhs = (x.reshape(1, -1, x.shape[2]) for x in (lhs, rhs))  # the groups are contracted too
    summed = groups == 1 and max(lhs.shape[0], rhs.shape[0]) > 1
    total = spec.accumulator if summed else out_dtype
    out, _ = _matmul(spec, lhs, rhs, lhs_axis == 1, rhs_axis == 2, total, (None, None, None), None, False)
    return jnp.sum(out, axis=0, keepdims=True).astype(out_dtype) if summed else out


def backward(
    spec: MatmulSpec, operands: Operands, outputs: Outputs, residuals: AnyArray, cotangents: Outputs
) -> Operands:
    return gradient.backward(
        spec, lambda _, *arguments: product(spec, *arguments), operands, outputs, residuals, cotangents.out
    )


NATIVE = Implementation("native_cpu", "cpu", forward, backward, why_not, notes=notes)
