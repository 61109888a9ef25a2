"""`gemm` of torch tensors, as a custom operator with gradients (eager and under `torch.compile`)."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import torch
from torch import Tensor

from vishwamai.core.config import current_config
from vishwamai.core.precision import FP8_DTYPES
from vishwamai.core.spec import ArraySpec, array_spec
from vishwamai.ops.matmul import gpu
from vishwamai.ops.matmul.api import MATMUL
from vishwamai.ops.matmul.layout import Layout, make_spec
from vishwamai.ops.matmul.spec import MatmulSpec, Operands, Outputs, compute_dtype, joint_groups
from vishwamai.torch import bridge
from vishwamai.torch.launch import torch_dtype

Options = tuple[str, bool, bool, str, str]
"""activation ("" for none), transpose_a, transpose_b, precision, out_dtype ("" for the default)."""


@functools.lru_cache(maxsize=4096)
def _described(arrays: tuple[ArraySpec | None, ...], options: Options) -> tuple[MatmulSpec, Layout]:
    activation, transpose_a, transpose_b, precision, out_dtype = options
    return make_spec(arrays, activation or None, transpose_a, transpose_b, precision, out_dtype or None)


def _describe(arrays: tuple[Tensor | None, ...], options: Options) -> tuple[MatmulSpec, Layout]:
    return _described(tuple(None if x is None else array_spec(x) for x in arrays), options)


def _laid_out(layout: Layout, spec: MatmulSpec, arrays: tuple[Tensor | None, ...]) -> Operands:
    """The caller's tensors in the op's own layout."""
    a, b, bias, scale_a, scale_b = arrays
    wide = torch_dtype(spec.epilogue_dtype)

    def lay(x: Tensor | None, how: Callable[[Any], Any]) -> Tensor | None:
        return None if x is None else how(x).contiguous()

    return Operands(
        lay(a, layout.matrix),
        lay(b, layout.matrix),
        lay(bias, layout.per_column),
        None if scale_a is None else lay(scale_a.to(wide), layout.per_row),
        None if scale_b is None else lay(scale_b.to(wide), layout.per_column),
    )


def _returned(layout: Layout, gradient: Tensor, like: Tensor, core: int, per_row: bool) -> Tensor:
    """A gradient in the op's own layout in the shape of the caller's tensor, summed where that was shared.

    Args:
      core: axes behind the batch axes: 2 of a matrix, 1 of a vector.
      per_row: the vector has a number for each row of a product (or one for all).
    """
    lead = (1,) * (len(layout.batch) - (like.dim() - core)) + tuple(like.shape[: like.dim() - core])
    target = (*lead, *like.shape[like.dim() - core :]) if like.dim() else (1,) * (len(layout.batch) + core)
    outer = layout.outer if gradient.shape[0] != 1 else (1,) * len(layout.outer)
    inner = target[len(layout.outer) : len(layout.batch)]
    rest = list(gradient.shape[1:])
    if per_row and rest[0] != 1:  # laid out for every row, whatever the caller's vector shares
        inner, rest = layout.inner, [layout.m]
    elif math.prod(inner) != 1:
        rest[0] //= math.prod(inner)
    gradient = gradient.reshape(*outer, *inner, *rest)
    axes = [i for i, (have, want) in enumerate(zip(gradient.shape, target, strict=True)) if want == 1 and have != 1]
    return (gradient.sum(axes, keepdim=True) if axes else gradient).reshape(like.shape)


@torch.library.custom_op("vishwamai::gemm", mutates_args=())
def _gemm(
    a: Tensor,
    b: Tensor,
    bias: Tensor | None,
    scale_a: Tensor | None,
    scale_b: Tensor | None,
    activation: str,
    transpose_a: bool,
    transpose_b: bool,
    precision: str,
    out_dtype: str,
    keep: bool,
) -> tuple[Tensor, Tensor]:
    """(out, the activation's argument if `keep` and the gradient needs it, else empty)."""
    arrays = (a, b, bias, scale_a, scale_b)
    spec, layout = _describe(arrays, (activation, transpose_a, transpose_b, precision, out_dtype))
    choice = bridge.choose(MATMUL, spec, a)
    outputs, preactivation = bridge.forward(choice, spec, _laid_out(layout, spec, arrays), keep)
    saved = a.new_empty(0) if preactivation is None else layout.result(preactivation)
    return layout.result(outputs.out), saved


@_gemm.register_fake
def _(
    a: Tensor,
    b: Tensor,
    bias: Any,
    scale_a: Any,
    scale_b: Any,
    activation: str,
    transpose_a: bool,
    transpose_b: bool,
    precision: str,
    out_dtype: str,
    keep: bool,
) -> tuple[Tensor, Tensor]:
    del precision
    batch = torch.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    m, n = a.shape[-1 if transpose_a else -2], b.shape[-2 if transpose_b else -1]
    out = a.new_empty(
        (*batch, m, n),
        dtype=_out_dtype(a, b, activation, any(x is not None for x in (bias, scale_a, scale_b)), out_dtype),
    )
    return out, torch.empty_like(out) if keep and activation not in ("", "relu") else a.new_empty(0)


def _out_dtype(a: Tensor, b: Tensor, activation: str, vectors: bool, out_dtype: str) -> torch.dtype:
    # Of arrays of any size: a dtype does not depend on it, and a size may be a symbol here.
    def small(x: Tensor) -> ArraySpec:
        return ArraySpec((1, 1), array_spec(torch.empty(0, dtype=x.dtype)).dtype)

    scale = ArraySpec((), jnp.dtype("float32")) if vectors else None
    return torch_dtype(
        _described((small(a), small(b), None, scale, None), (activation, False, False, "default", out_dtype))[
            0
        ].out_dtype
    )


@torch.library.custom_op("vishwamai::gemm_backward", mutates_args=())
def _gemm_backward(
    dout: Tensor,
    saved: Tensor,
    a: Tensor,
    b: Tensor,
    bias: Tensor | None,
    scale_a: Tensor | None,
    scale_b: Tensor | None,
    activation: str,
    transpose_a: bool,
    transpose_b: bool,
    precision: str,
    out_dtype: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of the tensors; empty for those that are absent or integers. `saved` is the output of relu, else the activation's argument."""
    arrays = (a, b, bias, scale_a, scale_b)
    spec, layout = _describe(arrays, (activation, transpose_a, transpose_b, precision, out_dtype))
    choice = bridge.choose(MATMUL, spec, a)
    operands = _laid_out(layout, spec, arrays)
    shape = (spec.groups, spec.m, spec.n)
    dout = dout.contiguous().reshape(shape)
    kept = None if activation == "" else saved.contiguous().reshape(shape)
    if choice.implementation is gpu.TRITON:
        gradients = _gradient(spec, operands, kept, dout)
    else:
        outputs = Outputs(kept if activation == "relu" else torch.zeros_like(dout))
        residual = kept if spec.keeps_preactivation else None
        gradients = bridge.backward(choice, spec, operands, outputs, residual, Outputs(dout))

    def back(gradient: Tensor | None, x: Tensor | None, core: int, per_row: bool) -> Tensor:
        if x is None or gradient is None or not x.is_floating_point():
            return dout.new_empty(0)
        returned = _returned(layout, gradient, x, core, per_row).to(x.dtype)
        # An operator must not hand its operand's memory, or one result's as another's, back.
        return returned

    by_row = (False, False, False, True, False)
    return tuple(map(back, gradients, arrays, (2, 2, 1, 1, 1), by_row))  # type: ignore[return-value]


@_gemm_backward.register_fake
def _(dout: Tensor, saved: Tensor, *arguments: Any) -> tuple[Tensor, ...]:
    del saved
    return tuple(
        dout.new_empty(0) if x is None or not x.is_floating_point() else x.new_empty(x.shape) for x in arguments[:5]
    )


def _gradient(spec: MatmulSpec, operands: Operands, kept: Tensor | None, dout: Tensor) -> Operands:
    """`ops.matmul.gradient.backward` for torch: the same formulas, which stand there, on the same products."""
    a, b, bias, scale_a, scale_b = operands
    wide, factor = torch_dtype(spec.epilogue_dtype), torch_dtype(spec.compute_dtype)
    dz = dout.to(wide)
    if kept is not None:
        dz = _DERIVATIVE[str(spec.activation)](dz, kept.to(wide))
    dz_b = dz if scale_b is None else dz * scale_b[:, None, :]
    dz_a = dz if scale_a is None else dz * scale_a[:, :, None]
    product = functools.partial(gpu.product, spec)

    def of_factor(
        x: Tensor, scale: Tensor | None, first: Callable[[int, Any], Tensor], k_axis: int
    ) -> tuple[Tensor | None, Tensor | None]:
        """(gradient of a factor, of its scale)."""
        if not x.is_floating_point():
            return None, None
        stored = array_spec(x).dtype
        exact = spec.epilogue_dtype if scale is not None or stored in FP8_DTYPES else stored
        gradient, of_scale = first(joint_groups(x, scale), exact), None
        if scale is not None:
            of_scale = (gradient * x.to(wide)).sum(k_axis)
            gradient = gradient * scale.unsqueeze(k_axis)
        if gradient.shape[0] != x.shape[0]:
            gradient = gradient.sum(0, keepdim=True)
        if stored in FP8_DTYPES:
            largest = torch.finfo(x.dtype).max
            gradient = gradient.clamp(-largest, largest)
        return gradient.to(x.dtype), of_scale

    def grad_a(groups: int, exact: Any) -> Tensor:
        n_of_b, right = 1 if spec.transpose_b else 2, dz_b.to(factor).contiguous()
        if spec.transpose_a:
            return product("grad_a", b, right, n_of_b, 2, groups, exact)
        return product("grad_a", right, b, 2, n_of_b, groups, exact)

    def grad_b(groups: int, exact: Any) -> Tensor:
        m_of_a, right = 2 if spec.transpose_a else 1, dz_a.to(factor).contiguous()
        if spec.transpose_b:
            return product("grad_b", right, a, 1, m_of_a, groups, exact)
        return product("grad_b", a, right, m_of_a, 1, groups, exact)

    da, dscale_a = of_factor(a, scale_a, grad_a, 1 if spec.transpose_a else 2)
    db, dscale_b = of_factor(b, scale_b, grad_b, 2 if spec.transpose_b else 1)
    if (scale_a is not None and dscale_a is None) or (scale_b is not None and dscale_b is None):
        k_of_a, k_of_b = 1 if spec.transpose_a else 2, 2 if spec.transpose_b else 1
        total = product("forward", a, b, k_of_a, k_of_b, joint_groups(a, b), spec.accumulator).to(wide)
        dscale_a = (dz_b * total).sum(2) if scale_a is not None and dscale_a is None else dscale_a
        dscale_b = (dz_a * total).sum(1) if scale_b is not None and dscale_b is None else dscale_b

    def vector(gradient: Tensor | None, operand: Tensor | None) -> Tensor | None:
        if operand is None or gradient is None:
            return None
        axes = [i for i in range(2) if operand.shape[i] == 1 and gradient.shape[i] != 1]
        return gradient.sum(axes, keepdim=True) if axes else gradient

    dbias = None if bias is None else dz.sum(1)
    return Operands(da, db, vector(dbias, bias), vector(dscale_a, scale_a), vector(dscale_b, scale_b))


_ATEN = torch.ops.aten
_DERIVATIVE: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "relu": lambda dy, y: torch.where(y > 0, dy, 0),  # of its output; the others of their argument
    "relu2": lambda dy, z: dy * 2 * z.clamp(min=0),
    "silu": lambda dy, z: _ATEN.silu_backward(dy, z),
    "gelu": lambda dy, z: _ATEN.gelu_backward(dy, z),
    "gelu_tanh": lambda dy, z: _ATEN.gelu_backward(dy, z, approximate="tanh"),
    "sigmoid": lambda dy, z: _ATEN.sigmoid_backward(dy, z.sigmoid()),
    "tanh": lambda dy, z: _ATEN.tanh_backward(dy, z.tanh()),
}


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *arrays, activation, _, _, _, _, keep = inputs
    ctx.options = inputs[5:10]
    kept = output[0] if activation == "relu" else output[1]
    assert keep or activation in ("", "relu")
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(kept if activation else output[0].new_empty(0), *arrays)


def _backward(ctx: Any, dout: Tensor | None, dsaved: Any) -> tuple[Any, ...]:
    del dsaved  # only the gradient reads it
    if dout is None:
        return (None,) * 11
    saved, *arrays = ctx.saved_tensors
    gradients = _gemm_backward(dout, saved, *arrays, *ctx.options)
    floats = [None if x is None or not x.is_floating_point() else g for g, x in zip(gradients, arrays, strict=True)]
    return (*floats, None, None, None, None, None, None)


bridge.register_autograd(_gemm, _backward, _setup)


def gemm(
    a: Tensor,
    b: Tensor,
    *,
    bias: Tensor | None = None,
    activation: str | None = None,
    transpose_a: bool = False,
    transpose_b: bool = False,
    precision: str | None = None,
    out_dtype: torch.dtype | None = None,
    scale_a: Tensor | None = None,
    scale_b: Tensor | None = None,
) -> Tensor:
    """Matrix product with its epilogue, `activation(scale_a[:, None] * scale_b[None, :] * (a @ b) + bias)`, rounded once; see `vishwamai.gemm`.

    Args:
      a: `[..., M, K]`, or `[..., K, M]` with `transpose_a`: bfloat16, float16, float32, int8, float8_e4m3fn or float8_e5m2 (float64 on the CPU).
      b: `[..., K, N]`, or `[..., N, K]` with `transpose_b`; batch axes broadcast.
      bias: `[N]`, or `[..., N]`.
      activation: "relu", "relu2", "silu", "gelu", "gelu_tanh", "sigmoid", "tanh", or None.
      precision: of float32 products: "highest" or "high"; None takes the ambient one.
      out_dtype: of the result; None for that of the products.
      scale_a, scale_b: a scalar tensor, or one number for each row of `a` (column of `b`).

    Raises:
      ShapeError: the arguments contradict one another.
      UnsupportedError: no kernel serves the call on the tensors' device.

    >>> import torch
    >>> gemm(torch.tensor([[1.0, 2.0]]), torch.tensor([[3.0], [-1.0]]), bias=torch.tensor([4.0]))
    tensor([[5.]])
    """
    narrow_a, narrow_b = bridge.narrowed(a, b)
    if out_dtype is None and (narrow_a is not a or narrow_b is not b):
        products = compute_dtype(array_spec(a).dtype, array_spec(b).dtype)
        out_dtype = torch.float32 if products == jnp.float32 else None  # the dtype that the result would have had
    a, b = narrow_a, narrow_b
    tensors = [x for x in (a, b, bias, scale_a, scale_b) if x is not None]
    keep = activation is not None and torch.is_grad_enabled() and any(x.requires_grad for x in tensors)
    products = precision or ("default" if torch.compiler.is_compiling() else current_config().precision.products)
    name = "" if out_dtype is None else str(out_dtype).removeprefix("torch.")
    return _gemm(a, b, bias, scale_a, scale_b, activation or "", transpose_a, transpose_b, products, name, keep)[0]
