"""`gated_linear_unit` of torch tensors."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from vishwamai.core.errors import ShapeError
from vishwamai.ops.gated.api import GATED
from vishwamai.ops.gated.spec import SIGNATURE, Outputs, Residuals, describe
from vishwamai.torch import bridge
from vishwamai.torch.operator import TorchOperator

_gated = TorchOperator(
    GATED,
    Outputs,
    SIGNATURE,
    describe,
    gradients=("x", "gate", "up", "both"),
    residuals=Residuals("*rows hidden", "*rows hidden"),
    saves=lambda call: (*call.operands._fields, "gate_out", "up_out"),
)


def gated_linear_unit(
    x: Tensor, weights: Any, activation: str | None = "silu", *, precision: str | None = None
) -> Tensor:
    """Gated linear unit `activation(x @ gate) * (x @ up)`, both products in one pass over x; see
    `vishwamai.gated_linear_unit`.

    Arguments, result and errors are those of JAX's; `weights` is a pair of tensors, or one `[2, features, hidden]`.

    >>> import torch
    >>> x, gate, up = torch.ones(3, 8), torch.full((8, 16), 0.5), torch.full((8, 16), 0.25)
    >>> gated_linear_unit(x, (gate, up), "relu")[0, :3]
    tensor([8., 8., 8.])
    """
    if isinstance(weights, (tuple, list)):
        if len(weights) != 2:
            raise ShapeError(
                f"gated_linear_unit: `weights` is a sequence of {len(weights)}; pass (gate, up), or one tensor of "
                "shape (2, features, hidden)."
            )
        gate, up, both = *weights, None
    else:
        gate, up, both = None, None, weights
    arrays = (None if t is None else bridge.cast_for_matmul(t)[0] for t in (x, gate, up, both))
    return _gated(*arrays, None, None, activation, bridge.products(precision))[0].to(x.dtype)
