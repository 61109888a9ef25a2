"""`causal_conv1d` of torch tensors."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from vishwamai.ops.conv.api import CONV
from vishwamai.ops.conv.spec import SIGNATURE, Outputs, describe
from vishwamai.torch.arguments import checked
from vishwamai.torch.operator import TorchOperator

_conv = TorchOperator(
    CONV,
    Outputs,
    SIGNATURE,
    describe,
    gradients=("x", "weight", "bias", "initial_state"),
    dtypes=lambda call: (call.operands.x.dtype,) * 2,
)


@checked
def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    activation: str | None = None,
    initial_state: Tensor | None = None,
    segment_ids: Tensor | None = None,
    return_state: bool = False,
) -> Any:
    """Causal convolution of every channel with a short filter of its own; see `vishwamai.causal_conv1d`, whose
    arguments and results these are. Tensors on the CPU; it has no kernel for GPUs.

    >>> import torch
    >>> causal_conv1d(torch.arange(4.0).reshape(1, 4, 1), torch.tensor([[10.0, 1.0]])).ravel()
    tensor([ 0.,  1., 12., 23.])
    """
    y, state = _conv(x, weight, bias, initial_state, segment_ids, activation, return_state)
    return (y, state) if return_state else y
