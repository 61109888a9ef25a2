"""The gradient of a matrix product with its epilogue, written once for every implementation that brings its own
product.

With z = sa * sb * (a @ b) + bias and y = act(z)::

    dz = dy * act'(z)            dbias = sum_m dz
    da' = (dz * sb) @ b^T        da = sa * da'        dsa = sum_k a * da'
    db' = a^T @ (dz * sa)        db = sb * db'        dsb = sum_k b * db'

so the scales' gradients need no further product where the operands are float32 or wider. An integer operand has no
gradient, and the products of narrower floats take dz in 16 bits, too coarse for the scalar that a long sum leaves of
it; there the sum `a @ b` is formed again, and z from it: dsa = sum_n dz * sb * (a @ b). (Under `jax.jit` XLA removes
that product where nothing reads the gradient of a scale.) An operand with a scale for every block of K,
and those scales, have no gradient (`gemm` declines to differentiate a QTensor): zeros stand for it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp

from vishwamai.core.precision import FP8_DTYPES
from vishwamai.core.spec import ArraySpec
from vishwamai.core.types import AnyArray, PyTree
from vishwamai.ops.matmul.epilogue import columns, derivative, rows
from vishwamai.ops.matmul.spec import Blocked, MatmulSpec, Operands, Outputs, joint_groups

if TYPE_CHECKING:
    import numpy as np
    from jax.typing import DTypeLike


Product = Callable[..., jax.Array]
"""`(phase, lhs, rhs, lhs_axis, rhs_axis, groups, out_dtype) -> [groups, lhs's free axis, rhs's free axis]`.

`phase` is "grad_a", "grad_b" or "forward" (a @ b once more), for an implementation that chooses tiles by it; lhs and
rhs are `[G or 1, ., .]` (or `Blocked`) and contract the axis given (1 or 2). With `groups` 1 and several in an operand,
the products are summed over them.
"""


class Through(NamedTuple):
    """What comes back through the epilogue.

    Attributes:
      dz_a, dz_b: dz times the scale of a's rows, and dz times that of b's columns, in the dtype of the products.
      bias, scale_a, scale_b: gradients; of a scale only where `scales_by_total` says so (else `GradientSteps.unscale`
        has it), else None.
    """

    dz_a: AnyArray
    dz_b: AnyArray
    bias: AnyArray
    scale_a: AnyArray
    scale_b: AnyArray


class GradientSteps(NamedTuple):
    """The steps around the products. `JAX` is the one that XLA fuses; `gpu_gradient.py` has Triton's, for arrays of JAX
    and of torch.

    Attributes:
      epilogue: `(spec, operands, outputs, preactivation, dout, total) -> Through`; `total` is a @ b, None where no
        scale needs it.
      unscale: `(spec, gradient, operand, x, scale, k_axis, with_scale) -> (gradient of x, of its scale)`, from the
        gradient of scale * x; `operand` is "a" or "b". Without `with_scale` that of the scale is None.
    """

    epilogue: Callable[..., Through]
    unscale: Callable[..., tuple[AnyArray, AnyArray]]


def backward(
    spec: MatmulSpec,
    product: Product,
    operands: Operands,
    outputs: Outputs,
    preactivation: AnyArray,
    dout: AnyArray,
    steps: GradientSteps | None = None,
) -> Operands:
    """Gradients of every floating operand, None for the others.

    Args:
      product: see `Product`.
      preactivation: `[G, M, N]` in out_dtype where `spec.keeps_preactivation`, else None.
      dout: `[G, M, N]`, cotangent of the result.
      steps: None for JAX's own.
    """
    steps = steps or JAX
    a, b, scale_a, scale_b = spec.factors(operands)
    of_a, of_b = spec.differentiable
    k_of_a, k_of_b = 1 if spec.transpose_a else 2, 2 if spec.transpose_b else 1
    total = None
    by_total_a, by_total_b = scales_by_total(spec)
    if (scale_a is not None and by_total_a) or (scale_b is not None and by_total_b):
        total = product("forward", a, b, k_of_a, k_of_b, joint_groups(a, b), spec.accumulator)  # [G, M, N]
    through = steps.epilogue(spec, operands, outputs, preactivation, dout, total)
    da, db = _zeros(a), _zeros(b)
    dscale_a, dscale_b = through.scale_a, through.scale_b
    if of_a:
        n_of_b = 3 - k_of_b
        # A shared operand's gradient is summed inside the product, unless each group scales it differently.
        groups, exact = joint_groups(a, scale_a), _exact(spec, spec.operands.a, scale_a)
        if spec.transpose_a:
            da = product("grad_a", b, through.dz_b, n_of_b, 2, groups, exact)  # [G, K, M]
        else:
            da = product("grad_a", through.dz_b, b, 2, n_of_b, groups, exact)  # [G, M, K]
        da, of_scale = steps.unscale(spec, da, "a", a, scale_a, k_of_a, not by_total_a)
        dscale_a = dscale_a if by_total_a else of_scale
    if of_b:
        m_of_a = 3 - k_of_a
        groups, exact = joint_groups(b, scale_b), _exact(spec, spec.operands.b, scale_b)
        if spec.transpose_b:
            db = product("grad_b", through.dz_a, a, 1, m_of_a, groups, exact)  # [G, N, K]
        else:
            db = product("grad_b", a, through.dz_a, m_of_a, 1, groups, exact)  # [G, K, N]
        db, of_scale = steps.unscale(spec, db, "b", b, scale_b, k_of_b, not by_total_b)
        dscale_b = dscale_b if by_total_b else of_scale
    return Operands(
        da,
        db,
        through.bias,
        _zeros(a, of_scales=True) if isinstance(a, Blocked) else dscale_a,
        _zeros(b, of_scales=True) if isinstance(b, Blocked) else dscale_b,
    )


def scales_by_total(spec: MatmulSpec) -> tuple[bool, bool]:
    """Whether the gradient of a's scale, and that of b's, comes from the sum a @ b."""
    coarse = spec.compute_dtype.itemsize < spec.epilogue_dtype.itemsize
    of_a, of_b = spec.differentiable
    return coarse or not of_a, coarse or not of_b


def _exact(spec: MatmulSpec, operand: ArraySpec, scale: AnyArray) -> np.dtype:
    """The dtype of a product that is scaled or cut off before it is rounded to the operand's."""
    return spec.epilogue_dtype if scale is not None or operand.dtype in FP8_DTYPES else operand.dtype


def _zeros(x: AnyArray, of_scales: bool = False) -> AnyArray:
    """What stands for the gradient of a blocked operand, or of its scales; None for integers."""
    if not isinstance(x, Blocked):
        return None
    x = x.scales if of_scales else x.values
    return jnp.zeros_like(x) if jnp.issubdtype(x.dtype, jnp.floating) else None


def _epilogue(
    spec: MatmulSpec, operands: Operands, outputs: Outputs, preactivation: AnyArray, dout: jax.Array, total: AnyArray
) -> Through:
    _, _, scale_a, scale_b = spec.factors(operands)
    of_a, of_b = spec.differentiable
    by_total_a, by_total_b = scales_by_total(spec)
    bias, wide, factor = operands.bias, spec.epilogue_dtype, spec.compute_dtype
    rows_a = None if scale_a is None else rows(scale_a, wide)
    columns_b = None if scale_b is None else columns(scale_b, wide)
    dout = dout.astype(wide)
    dz = dout
    if spec.activation == "relu":
        dz = jnp.where(outputs.out > 0, dout, 0)
    elif spec.activation is not None:
        dz = dout * derivative(spec.activation, preactivation.astype(wide))
    dz_a, dz_b = _times(dz, rows_a), _times(dz, columns_b)
    dscale_a = dscale_b = None
    if total is not None:
        total = total.astype(wide)
        exact = dz
        if spec.activation is not None and spec.keeps_preactivation and spec.out_dtype != wide:
            z = _times(_times(total, rows_a), columns_b)
            exact = dout * derivative(spec.activation, z if bias is None else z + columns(bias, wide))
        if scale_a is not None and by_total_a:
            dscale_a = _vector(jnp.sum(_times(exact, columns_b) * total, axis=2), scale_a)
        if scale_b is not None and by_total_b:
            dscale_b = _vector(jnp.sum(_times(exact, rows_a) * total, axis=1), scale_b)
    dbias = None if bias is None else _vector(jnp.sum(dz, axis=1), bias)
    return Through(
        dz_a.astype(factor) if of_b else None, dz_b.astype(factor) if of_a else None, dbias, dscale_a, dscale_b
    )


def _unscale(
    spec: MatmulSpec, gradient: jax.Array, operand: str, x: jax.Array, scale: AnyArray, k_axis: int, with_scale: bool
) -> tuple[jax.Array, PyTree]:
    del operand
    dscale, wide = None, spec.epilogue_dtype
    if scale is not None:
        if with_scale:
            dscale = _vector(jnp.sum(gradient * x.astype(wide), axis=k_axis), scale)
        gradient = gradient * jnp.expand_dims(scale.astype(wide), k_axis)
    return saturate(_sum_to(gradient, x.shape), x.dtype), dscale


def _times(x: jax.Array, scale: jax.Array | None) -> jax.Array:
    return x if scale is None else x * scale


JAX = GradientSteps(_epilogue, _unscale)


def _vector(gradient: jax.Array, operand: jax.Array) -> jax.Array:
    return _sum_to(gradient, operand.shape).astype(operand.dtype)


def _sum_to(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Sums over the axes that are 1 in `shape`."""
    axes = tuple(i for i, (have, want) in enumerate(zip(x.shape, shape, strict=True)) if want == 1 and have != 1)
    return jnp.sum(x, axis=axes, keepdims=True) if axes else x


def saturate(x: jax.Array, dtype: DTypeLike) -> jax.Array:
    """`x` in `dtype`; an 8-bit float saturates at its largest finite value, where a plain conversion would give NaN or
    infinity.
    """
    if dtype in FP8_DTYPES:
        largest = float(jnp.finfo(dtype).max)
        x = jnp.clip(x, -largest, largest)
    return x.astype(dtype)
