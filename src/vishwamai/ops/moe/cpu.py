"""The grouped product on the CPU: the native kernels of `cpu_grouped.isa.cc`, each group one product of its rows."""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from vishwamai.core import ffi
from vishwamai.core.op import Implementation
from vishwamai.core.target import Target
from vishwamai.ops.moe.reference import gradients, sum_shared
from vishwamai.ops.moe.spec import GroupedSpec, Operands, Outputs

if TYPE_CHECKING:
    from jax.typing import DTypeLike


def why_not(spec: GroupedSpec, target: Target) -> str | None:
    """The reason why this kernel cannot serve `spec`, or None."""
    if spec.operands.rhs_scale is not None:
        return "`rhs` is a QTensor; `vishwamai.pack_weight(rhs)` of int8, int4, e2m1 or e4m3 is what has a kernel."
    return ffi.why_not(target)


def notes(spec: GroupedSpec, target: Target) -> tuple[str, ...]:
    lines = []
    if spec.operands.lhs.dtype == jnp.float16:
        lines.append("float16 is computed through float32 copies")
    if spec.operands.first_row is not None:
        lines.append("with `group_offset` rows are copied so that the first group is in front, and the result back")
    return tuple(lines)


def _native(x: jax.Array) -> jax.Array:
    return x.astype(jnp.float32) if x.dtype == jnp.float16 else x


def _result(operand: DTypeLike, requested: DTypeLike) -> DTypeLike:
    """The dtype in which the kernel writes what is wanted as `requested`: the same where it can, else the one it
    computed in.
    """
    if operand == jnp.float64:
        return jnp.float64
    return jnp.bfloat16 if requested == jnp.bfloat16 else jnp.float32


def _rows(lhs: jax.Array, rhs: jax.Array, sizes: jax.Array, transposed: bool, out_dtype: DTypeLike) -> jax.Array:
    """`[B, M, N]`: the rows of each group times its matrix, `[K, N]` or, transposed, `[N, K]`."""
    lhs, rhs = _native(lhs), _native(rhs)
    shape = (*lhs.shape[:2], rhs.shape[2 if transposed else 3])
    results = (ffi.result(shape, _result(lhs.dtype, out_dtype)),)
    (out,) = ffi.call("vishwamai_grouped_rows", results, lhs, rhs, sizes, transposed=transposed)
    return out.astype(out_dtype)


def _weights(lhs: jax.Array, dout: jax.Array, sizes: jax.Array, out_dtype: DTypeLike) -> jax.Array:
    """`[B, G, K, N]`: the rows of each group, transposed, times the cotangent of its part of the result."""
    lhs, dout = _native(lhs), _native(dout)
    shape = (lhs.shape[0], sizes.shape[1], lhs.shape[2], dout.shape[2])
    results = (ffi.result(shape, _result(lhs.dtype, out_dtype)),)
    (out,) = ffi.call("vishwamai_grouped_weights", results, lhs, dout, sizes)
    return out.astype(out_dtype)


def _turned(x: jax.Array, first_row: jax.Array | None, sign: int) -> jax.Array:
    """Rows `[B, M, _]` turned so that `first_row` is the first one (sign -1), or back (1)."""
    if first_row is None:
        return x
    by = jnp.broadcast_to(sign * first_row, (x.shape[0],))
    return jax.vmap(lambda rows, by: jnp.roll(rows, by, 0))(x, by)


def forward(spec: GroupedSpec, operands: Operands) -> tuple[Outputs, None]:
    lhs, rhs, sizes, _, first = operands
    out = _rows(_turned(lhs, first, -1), rhs, sizes, spec.transpose_rhs, spec.out_dtype)
    return Outputs(_turned(out, first, 1)), None


def backward(spec: GroupedSpec, operands: Operands, cotangents: Outputs) -> Operands:
    lhs, rhs, sizes, _, first = operands
    lhs, dout = (_turned(x, first, -1) for x in (lhs, cotangents.out.astype(lhs.dtype)))
    d_lhs = _turned(_rows(dout, rhs, sizes, not spec.transpose_rhs, lhs.dtype), first, 1)
    shared = rhs.shape[0] != spec.batch  # then a sum over the batch follows, in the wider dtype
    rows, columns = spec.matrix_factors(lhs, dout)
    d_rhs = _weights(rows, columns, sizes, spec.accumulator if shared else rhs.dtype)
    return gradients(operands, d_lhs, sum_shared(d_rhs, rhs))


NATIVE = Implementation("native_cpu", "cpu", forward, backward, why_not, notes=notes)
