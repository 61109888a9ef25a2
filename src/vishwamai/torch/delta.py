"""`gated_delta_rule`, `linear_attention` and `state_space` of torch tensors."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from vishwamai.ops.delta.api import DELTA
from vishwamai.ops.delta.spec import SIGNATURE, Outputs, check_state_space, describe, state_space_decay, with_channels
from vishwamai.torch.arguments import checked
from vishwamai.torch.operator import TorchOperator


def _sums(call: Any) -> torch.dtype:
    return torch.float64 if call.operands.value.dtype == torch.float64 else torch.float32


_delta = TorchOperator(
    DELTA,
    Outputs,
    SIGNATURE,
    describe,
    gradients=("value", "query", "key", "decay", "beta", "skip", "initial_state"),
    dtypes=lambda call: (call.operands.value.dtype, _sums(call)),
)


def _call(*arguments: object) -> Tensor | tuple[Tensor, Tensor]:
    """The results for the operands and what `describe` takes, the last of it `return_state`."""
    y, state = _delta(*arguments)
    return (y, state) if arguments[-1] else y


@checked
def gated_delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    decay: Tensor | None = None,
    beta: Tensor | None = None,
    *,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    segment_ids: Tensor | None = None,
    return_state: bool = False,
) -> Any:
    """The gated delta rule; see `vishwamai.gated_delta_rule`, whose arguments and results these are. Tensors on the
    CPU; it has no kernel for GPUs.

    >>> import torch
    >>> key = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 0.0]]).reshape(1, 1, 3, 2)
    >>> gated_delta_rule(key, key, torch.tensor([5.0, 7.0, 9.0]).reshape(1, 1, 3, 1), scale=1.0).ravel()
    tensor([5., 7., 9.])
    """
    name = "gated_delta_rule"
    tensors = value, query, key, with_channels(name, decay), beta, None, initial_state, segment_ids
    return _call(*tensors, name, scale, True, return_state)


@checked
def linear_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    decay: Tensor | None = None,
    *,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    segment_ids: Tensor | None = None,
    return_state: bool = False,
) -> Any:
    """Causal linear attention with decay; see `vishwamai.linear_attention`, whose arguments and results these are.

    >>> import torch
    >>> ones = torch.ones(1, 1, 3, 1)
    >>> linear_attention(ones, ones, ones).ravel()
    tensor([1., 2., 3.])
    """
    name = "linear_attention"
    tensors = value, query, key, with_channels(name, decay), None, None, initial_state, segment_ids
    return _call(*tensors, name, scale, False, return_state)


@checked
def state_space(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    *,
    initial_state: Tensor | None = None,
    segment_ids: Tensor | None = None,
    return_state: bool = False,
) -> Any:
    """The selective state space; see `vishwamai.state_space`, whose arguments and results these are.

    >>> import torch
    >>> ones = torch.ones(1, 1, 3, 1)
    >>> state_space(ones, torch.ones(1, 1, 3), torch.tensor([-1.0]), ones, ones).ravel()
    tensor([1.0000, 1.3679, 1.5032])
    """
    name = "state_space"
    check_state_space(x, dt, A, B, C, D, initial_state, segment_ids)
    wide = torch.promote_types(dt.dtype, torch.float32)
    decay = state_space_decay(dt.to(wide), A.to(wide))
    return _call(x, C, B, decay, dt, D, initial_state, segment_ids, name, 1.0, False, return_state)
