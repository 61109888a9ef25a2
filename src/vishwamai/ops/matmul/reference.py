"""The matrix product by XLA's own dot: the definition, and the fallback on every platform."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax import lax

from vishwamai.core.op import Implementation
from vishwamai.core.precision import FP8_DTYPES, lax_precision
from vishwamai.core.qtensor import expand, scale_values
from vishwamai.core.types import PyTree
from vishwamai.ops.matmul import gradient
from vishwamai.ops.matmul.epilogue import activate, columns, rows
from vishwamai.ops.matmul.spec import LONGEST_INT8, Blocked, MatmulSpec, Operands, Outputs, joint_groups

if TYPE_CHECKING:
    from jax.typing import DTypeLike


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _from_fp8(x: jax.Array, stored: str, dtype: str) -> jax.Array:
    """An 8-bit float in a wider dtype; its gradient saturates instead of overflowing."""
    return x.astype(dtype)


_from_fp8.defvjp(
    lambda x, stored, dtype: (x.astype(dtype), None),
    lambda stored, dtype, _, g: (gradient.saturate(g, jnp.dtype(stored)),),
)


def _widen(x: PyTree, dtype: jnp.dtype) -> jax.Array:
    if isinstance(x, Blocked):
        wide = jnp.float64 if dtype == jnp.float64 else jnp.float32
        scales = expand(scale_values(x.scales, wide), x.axis, x.size, x.shape[x.axis])
        # No gradient, as in `gradient.backward`: a QTensor has none.
        return lax.stop_gradient((x.values.astype(wide) * scales).astype(dtype))
    return _from_fp8(x, x.dtype.name, dtype.name) if x.dtype in FP8_DTYPES else x.astype(dtype)


def product(
    spec: MatmulSpec, lhs: PyTree, rhs: PyTree, lhs_axis: int, rhs_axis: int, groups: int, out_dtype: DTypeLike
) -> jax.Array:
    """`[groups, lhs's free axis, rhs's free axis]`; see `gradient.Product`."""
    dtype, total = spec.compute_dtype, spec.accumulator
    lhs, rhs = _widen(lhs, dtype), _widen(rhs, dtype)
    length = lhs.shape[lhs_axis]
    if spec.wraps and length > LONGEST_INT8:  # int32 sums of parts, added in float32

        def part(start: int) -> jax.Array:
            ends = start, min(start + LONGEST_INT8, length)
            a, b = (lax.slice_in_dim(x, *ends, axis=axis) for x, axis in ((lhs, lhs_axis), (rhs, rhs_axis)))
            return product(spec, a, b, lhs_axis, rhs_axis, groups, spec.epilogue_dtype)

        return functools.reduce(jnp.add, map(part, range(0, length, LONGEST_INT8)))
    dot = functools.partial(lax.dot_general, precision=lax_precision(spec.precision), preferred_element_type=total)
    per_group = lhs.shape[0] == rhs.shape[0]
    if per_group and groups == lhs.shape[0]:
        out = dot(lhs, rhs, (((lhs_axis,), (rhs_axis,)), ((0,), (0,))))
    elif per_group:  # summed over the groups: they are contracted too
        out = dot(lhs, rhs, (((0, lhs_axis), (0, rhs_axis)), ((), ())))[None]
    elif groups == 1:  # one operand is shared, and the sum is over the other's groups
        products = product(spec, lhs, rhs, lhs_axis, rhs_axis, joint_groups(lhs, rhs), total)
        out = jnp.sum(products, axis=0, keepdims=True)
    elif rhs.shape[0] == 1:
        out = dot(lhs, rhs[0], (((lhs_axis,), (rhs_axis - 1,)), ((), ())))
    else:
        out = dot(rhs, lhs[0], (((rhs_axis,), (lhs_axis - 1,)), ((), ()))).swapaxes(1, 2)
    return out.astype(out_dtype)


def forward(spec: MatmulSpec, operands: Operands, residuals: bool) -> tuple[Outputs, jax.Array | None]:
    """activation(scale_a * scale_b * (a @ b) + bias), the sum and all that follows in the accumulation dtype."""
    a, b, scale_a, scale_b = spec.factors(operands)
    bias = operands.bias
    z = product(
        spec,
        a,
        b,
        1 if spec.transpose_a else 2,
        2 if spec.transpose_b else 1,
        joint_groups(a, b),
        spec.accumulator,
    )
    if not spec.integer:
        wide = spec.epilogue_dtype
        z = z.astype(wide)
        if scale_a is not None:
            z = z * rows(scale_a, wide)
        if scale_b is not None:
            z = z * columns(scale_b, wide)
        if bias is not None:
            z = z + columns(bias, wide)
    z = jnp.broadcast_to(z, (spec.groups, spec.m, spec.n))
    out = activate(spec.activation, z).astype(spec.out_dtype)
    return Outputs(out), z.astype(spec.out_dtype) if residuals and spec.keeps_preactivation else None


def backward(
    spec: MatmulSpec, operands: Operands, outputs: Outputs, residuals: PyTree, cotangents: Outputs
) -> Operands:

    def dot(operand: str, *arguments: Any) -> jax.Array:
        return product(spec, *arguments)

    return gradient.backward(spec, dot, operands, outputs, residuals, cotangents.out)


XLA = Implementation("xla", None, forward, backward, autodiff=True)
