"""`gemm` of torch tensors."""

from __future__ import annotations

import jax.numpy as jnp
import torch
from torch import Tensor

from vishwamai.core.errors import ShapeError
from vishwamai.core.spec import array_spec
from vishwamai.core.types import PyTree
from vishwamai.ops.matmul.api import MATMUL
from vishwamai.ops.matmul.batch_layout import make_spec, signature
from vishwamai.ops.matmul.packed import packed_operands
from vishwamai.ops.matmul.quantized import check_quantized
from vishwamai.ops.matmul.spec import MatmulSpec, Operands, Outputs, compute_dtype
from vishwamai.torch import autocast, bridge
from vishwamai.torch.arguments import checked
from vishwamai.torch.launch import torch_dtype
from vishwamai.torch.operator import TorchOperator
from vishwamai.torch.packed import PackedWeight, packed_gemm, result_dtype
from vishwamai.torch.quantization import QTensor


def _describe(
    operands: Operands,
    activation: str | None,
    transpose_a: bool,
    transpose_b: bool,
    precision: str,
    out_dtype: str | None,
) -> MatmulSpec:
    return make_spec(operands, activation, transpose_a, transpose_b, precision, out_dtype)


def _pack(spec: MatmulSpec, tensors: Operands) -> Operands:
    """The caller's tensors in the op's own layout."""
    laid = signature(spec.transpose_a, spec.transpose_b).pack(tensors)
    return Operands(*(None if x is None else x.contiguous() for x in laid))


def _unpack(spec: MatmulSpec, gradients: Operands, tensors: Operands) -> Operands:
    """The gradients in the shapes of the caller's tensors."""
    layout = signature(spec.transpose_a, spec.transpose_b).layout(tensors)

    def back(gradient: Tensor | None, x: Tensor | None, core: int, per_row: bool) -> Tensor | None:
        if x is None or gradient is None or not x.is_floating_point():
            return None
        expanded, summed = layout.gradient_shapes(tuple(gradient.shape), tuple(x.shape), core, per_row)
        return gradient.reshape(expanded).sum_to_size(summed).reshape(x.shape).to(x.dtype)

    return Operands(*map(back, gradients, tensors, (2, 2, 1, 1, 1), (False, False, False, True, False)))


_gemm = TorchOperator(
    MATMUL,
    Outputs,
    lambda call: signature(call.transpose_a, call.transpose_b),
    _describe,
    gradients=Operands._fields,
    residuals=("*batch m n",),
    keeps=lambda call: call.activation not in (None, "relu"),
    saves=lambda call: (*Operands._fields, "residual" if call.activation != "relu" else "out"),
    dtypes=lambda call: [result_dtype(call, call.operands.b.dtype)] * 2,
    pack=_pack,
    unpack=_unpack,
    own_shapes=lambda spec: [(spec.groups, spec.m, spec.n)] * 2,
    independent=(("bias", "k"),),  # it is made of the cotangent alone
)


def _factor(name: str, x: PyTree, contracted: int, scale: Tensor | None, dtype: torch.dtype) -> tuple[Tensor, PyTree]:
    """(a tensor in place of a QTensor, its scale); one whose scales are of blocks of the contracted axis is dequantized
    to `dtype`.
    """
    if not isinstance(x, QTensor):
        return x, scale
    check_quantized(name, x, contracted, scale)
    if x.block_size is not None:
        return x.dequantize(dtype), None
    return x.values, x.scales if x.axis is None else x.scales.squeeze(x.axis)


@checked
def gemm(
    a: Tensor | QTensor,
    b: Tensor | QTensor | PackedWeight,
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
    """Matrix product with its epilogue, `activation(scale_a[:, None] * scale_b[None, :] * (a @ b) + bias)`, rounded
    once; see `vishwamai.gemm`, whose arguments these are.

    A `QTensor` with scales for blocks of the contracted axis is dequantized before the product. Scales are tensors.

    >>> import torch
    >>> gemm(torch.tensor([[1.0, 2.0]]), torch.tensor([[3.0], [-1.0]]), bias=torch.tensor([4.0]))
    tensor([[5.]])
    """
    a, b, bias = autocast.factors(a, b, bias)
    name = None if out_dtype is None else str(out_dtype).removeprefix("torch.")
    if isinstance(b, PackedWeight):
        if isinstance(a, QTensor) or transpose_a or transpose_b:
            raise ShapeError("gemm: `b` is a PackedWeight; pass `a` as a tensor [..., M, K], and no transpositions.")
        operands = packed_operands(a, b, activation, bias, scale_a, scale_b)
        out = packed_gemm(*operands, list(b.shape), b.isa, activation, name)[0]
        return out.reshape(*a.shape[:-1], b.shape[1])
    if isinstance(a, QTensor) or isinstance(b, QTensor):
        blocked = torch_dtype(compute_dtype(array_spec(a).dtype, array_spec(b).dtype, blocked=True))
        a, scale_a = _factor("a", a, -2 if transpose_a else -1, scale_a, blocked)
        b, scale_b = _factor("b", b, -1 if transpose_b else -2, scale_b, blocked)
    narrow_a, narrow_b = bridge.cast_for_matmul(a, b)
    if name is None and (narrow_a is not a or narrow_b is not b):
        products = compute_dtype(array_spec(a).dtype, array_spec(b).dtype)
        name = "float32" if products == jnp.float32 else None  # the dtype that the result would have had
    options = activation, transpose_a, transpose_b, bridge.products(precision), name
    return _gemm(narrow_a, narrow_b, bias, scale_a, scale_b, *options)[0]
