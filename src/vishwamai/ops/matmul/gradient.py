"""The gradient of a matrix product with its epilogue, written once for every implementation that brings its own product.

With z = sa * sb * (a @ b) + bias and y = act(z)::

    dz = dy * act'(z)            dbias = sum_m dz
    da' = (dz * sb) @ b^T        da = sa * da'        dsa = sum_k a * da'
    db' = a^T @ (dz * sa)        db = sb * db'        dsb = sum_k b * db'

so the scales' gradients need no further product where their operand is floating. An integer operand has no gradient, and there the sum `a @ b` is
formed again: dsa = sum_n dz * sb * (a @ b). An operand with a scale for every block of K, and those scales, have no gradient (`gemm` refuses to
differentiate a QTensor): zeros stand for it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from vishwamai.core.precision import FP8_DTYPES
from vishwamai.ops.matmul.epilogue import columns, derivative, rows
from vishwamai.ops.matmul.spec import Blocked, MatmulSpec, Operands, Outputs, joint_groups

Product = Callable[..., jax.Array]
"""`(which, lhs, rhs, lhs_axis, rhs_axis, groups, out_dtype) -> [groups, lhs's free axis, rhs's free axis]`.

`which` is "grad_a", "grad_b" or "forward" (a @ b once more), for an implementation that chooses tiles by it; lhs and rhs are `[G or 1, ., .]` (or `Blocked`) and contract the axis given (1 or 2). With `groups` 1 and several in an operand, the products are summed over them.
"""


def backward(
    spec: MatmulSpec,
    product: Product,
    operands: Operands,
    outputs: Outputs,
    preactivation: Any,
    dout: jax.Array,
) -> Operands:
    """Gradients of every floating operand, None for the others.

    Args:
      product: see `Product`.
      preactivation: `[G, M, N]` in out_dtype where `spec.keeps_preactivation`, else None.
      dout: `[G, M, N]`, cotangent of the result.
    """
    a, b, scale_a, scale_b = spec.factors(operands)
    bias = operands.bias
    wide = spec.epilogue_dtype
    dz = dout.astype(wide)
    if spec.activation == "relu":
        dz = jnp.where(outputs.out > 0, dz, 0)
    elif spec.activation is not None:
        dz = dz * derivative(spec.activation, preactivation.astype(wide))

    dz_b = dz if scale_b is None else dz * columns(scale_b, wide)
    dz_a = dz if scale_a is None else dz * rows(scale_a, wide)
    factor = spec.compute_dtype
    da, dscale_a = None, None
    if isinstance(a, jax.Array) and jnp.issubdtype(a.dtype, jnp.floating):
        exact = wide if scale_a is not None or a.dtype in FP8_DTYPES else a.dtype
        n_of_b = 1 if spec.transpose_b else 2
        # A shared operand's gradient is summed inside the product, unless each group scales it differently.
        groups = joint_groups(a, scale_a)
        if spec.transpose_a:
            da = product("grad_a", b, dz_b.astype(factor), n_of_b, 2, groups, exact)  # [G, K, M]
        else:
            da = product("grad_a", dz_b.astype(factor), b, 2, n_of_b, groups, exact)  # [G, M, K]
        if scale_a is not None:
            k_axis = 1 if spec.transpose_a else 2
            dscale_a = jnp.sum(da * a.astype(wide), axis=k_axis)  # [G, M]
            da = da * jnp.expand_dims(scale_a.astype(wide), k_axis)
        da = saturate(_sum_to(da, a.shape), a.dtype)
    db, dscale_b = None, None
    if isinstance(b, jax.Array) and jnp.issubdtype(b.dtype, jnp.floating):
        exact = wide if scale_b is not None or b.dtype in FP8_DTYPES else b.dtype
        m_of_a = 2 if spec.transpose_a else 1
        groups = joint_groups(b, scale_b)
        if spec.transpose_b:
            db = product("grad_b", dz_a.astype(factor), a, 1, m_of_a, groups, exact)  # [G, N, K]
        else:
            db = product("grad_b", a, dz_a.astype(factor), m_of_a, 1, groups, exact)  # [G, K, N]
        if scale_b is not None:
            k_axis = 2 if spec.transpose_b else 1
            dscale_b = jnp.sum(db * b.astype(wide), axis=k_axis)  # [G, N]
            db = db * jnp.expand_dims(scale_b.astype(wide), k_axis)
        db = saturate(_sum_to(db, b.shape), b.dtype)

    wants_sum = (scale_a is not None and dscale_a is None) or (scale_b is not None and dscale_b is None)
    if wants_sum:
        k_of_a, k_of_b = 1 if spec.transpose_a else 2, 2 if spec.transpose_b else 1
        total = product("forward", a, b, k_of_a, k_of_b, joint_groups(a, b), spec.accumulator).astype(wide)  # [G, M, N]
        if scale_a is not None and dscale_a is None:
            dscale_a = jnp.sum(dz_b * total, axis=2)
        if scale_b is not None and dscale_b is None:
            dscale_b = jnp.sum(dz_a * total, axis=1)

    def vector(gradient: Any, operand: Any) -> Any:
        return None if operand is None else _sum_to(gradient, operand.shape).astype(operand.dtype)

    def blocked(x: Any) -> Any:
        return jnp.zeros_like(x) if jnp.issubdtype(x.dtype, jnp.floating) else None

    return Operands(
        blocked(a.values) if isinstance(a, Blocked) else da,
        blocked(b.values) if isinstance(b, Blocked) else db,
        vector(None if bias is None else jnp.sum(dz, axis=1), bias),
        blocked(a.scales) if isinstance(a, Blocked) else vector(dscale_a, scale_a),
        blocked(b.scales) if isinstance(b, Blocked) else vector(dscale_b, scale_b),
    )


def _sum_to(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Sums over the axes that are 1 in `shape`."""
    axes = tuple(i for i, (have, want) in enumerate(zip(x.shape, shape, strict=True)) if want == 1 and have != 1)
    return jnp.sum(x, axis=axes, keepdims=True) if axes else x


def saturate(x: jax.Array, dtype: Any) -> jax.Array:
    """`x` in `dtype`; an 8-bit float saturates at its largest finite value, where a plain conversion would give NaN or infinity."""
    if dtype in FP8_DTYPES:
        largest = float(jnp.finfo(dtype).max)
        x = jnp.clip(x, -largest, largest)
    return x.astype(dtype)
