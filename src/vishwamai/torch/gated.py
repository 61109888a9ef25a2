"""`gated_linear_unit` of torch tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from vishwamai.core.errors import ShapeError
from vishwamai.core.precision import accumulator_dtype
from vishwamai.core.spec import ArraySpec, array_spec
from vishwamai.ops.gated.api import GATED, check_quantized
from vishwamai.ops.gated.spec import SIGNATURE, Operands, Outputs, Residuals, describe
from vishwamai.torch import autocast, bridge
from vishwamai.torch.arguments import checked
from vishwamai.torch.launch import torch_dtype
from vishwamai.torch.matmul import gemm
from vishwamai.torch.operator import TorchOperator
from vishwamai.torch.quantization import QTensor

_gated = TorchOperator(
    GATED,
    Outputs,
    SIGNATURE,
    describe,
    gradients=("x", "gate", "up", "joint"),
    residuals=Residuals("*rows hidden", "*rows hidden"),
    saves=lambda call: (*call.operands._fields, "gate_out", "up_out"),
)


@checked
def gated_linear_unit(
    x: Tensor,
    weights: Tensor | Sequence[Tensor | QTensor],
    activation: str | None = "silu",
    *,
    precision: str | None = None,
) -> Tensor:
    """Gated linear unit `activation(x @ gate) * (x @ up)`, both products in one pass over x; see
    `vishwamai.gated_linear_unit`.

    Arguments, result and errors are those of JAX's; `weights` is a pair of tensors, or one `[2, features, hidden]`. A
    pair of `QTensor`s is multiplied by two calls of `gemm`, whose kernels read what is stored.

    >>> import torch
    >>> x, gate, up = torch.ones(3, 8), torch.full((8, 16), 0.5), torch.full((8, 16), 0.25)
    >>> gated_linear_unit(x, (gate, up), "relu")[0, :3]
    tensor([8., 8., 8.])
    """
    (x,) = autocast.factors(x)
    weights = autocast.factors(*weights) if isinstance(weights, (tuple, list)) else autocast.factors(weights)[0]
    if isinstance(weights, (tuple, list)):
        if len(weights) != 2:
            raise ShapeError(
                f"gated_linear_unit: `weights` is a sequence of {len(weights)}; pass (gate, up), or one tensor of "
                "shape (2, features, hidden)."
            )
        if any(isinstance(w, QTensor) for w in weights):
            return _quantized(x, weights, activation, precision)
        gate, up, joint = *weights, None
    else:
        gate, up, joint = None, None, weights
    operands: tuple[Any, ...] = x, gate, up, joint
    arrays = (None if t is None else bridge.cast_for_matmul(t)[0] for t in operands)
    return _gated(*arrays, None, None, activation, bridge.products(precision))[0].to(x.dtype)


def _quantized(x: Tensor, weights: Any, activation: str | None, precision: str | None) -> Tensor:
    """Two products in the dtype of sums, so that the result is rounded once."""
    check_quantized(weights)
    gate, up = weights
    sums = accumulator_dtype(array_spec(x).dtype)
    if not torch.compiler.is_compiling():  # a compiled call is checked when it runs
        scale = ArraySpec(tuple(gate.shape[-1:]), sums)
        values = array_spec(gate.values), array_spec(up.values)
        describe(Operands(array_spec(x), *values, None, scale, scale), activation, bridge.products(precision))
    how: Any = {"precision": precision, "out_dtype": torch_dtype(sums)}
    return (gemm(x, gate, activation=activation, **how) * gemm(x, up, **how)).to(x.dtype)
