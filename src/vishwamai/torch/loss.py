"""`linear_cross_entropy` of torch tensors.

The operator gives three numbers for each token; the loss is composed of them in torch, which differentiates that part
itself.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from vishwamai.ops.loss.api import LOSS
from vishwamai.ops.loss.compose import compose
from vishwamai.ops.loss.spec import (
    SIGNATURE,
    Outputs,
    check_class_weights,
    check_labels,
    check_options,
    describe,
    probabilities,
)
from vishwamai.torch import autocast, bridge
from vishwamai.torch.arguments import checked
from vishwamai.torch.operator import TorchOperator
from vishwamai.torch.value_checks import check_values

_numbers = TorchOperator(
    LOSS,
    Outputs,
    SIGNATURE,
    describe,
    gradients=("x", "weight", "bias", "targets"),
    saves=lambda call: (*Outputs._fields, *call.operands._fields),
    dtypes=lambda call: (torch.promote_types(call.operands.x.dtype, torch.float32),) * 3,
)


@checked
def linear_cross_entropy(
    x: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    bias: Tensor | None = None,
    class_weights: Tensor | None = None,
    softcap: float | None = None,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    ignore_index: int = -100,
    reduction: str = "mean",
    return_logsumexp: bool = False,
    precision: str | None = None,
) -> Any:
    """Cross entropy of the logits `x @ weight.T + bias`, which are never held, neither forward nor backward; see
    `vishwamai.linear_cross_entropy`.

    Arguments, results and errors are those of JAX's. A label outside the vocab is an error on the CPU; on a GPU, and
    where `torch.compile` runs, its loss is NaN, unless `KernelConfig(checks=True)` has the host read labels on a GPU.
    The mean is 0 where all tokens are ignored, or all that count weigh 0 (torch's own has NaN).

    >>> import torch
    >>> linear_cross_entropy(torch.zeros(2, 4), torch.ones(8, 4), torch.tensor([3, -100]))  # log(8)
    tensor(2.0794)
    """
    check_options(softcap, label_smoothing, z_loss, ignore_index, reduction)
    x, weight = bridge.cast_for_matmul(*autocast.factors(x, weight))
    common = torch.promote_types(x.dtype, weight.dtype)
    x, weight = x.to(common), weight.to(common)
    if bias is not None:
        bias = bias.to(torch.promote_types(common, torch.float32))
    cap = None if softcap is None else float(softcap)
    targets, mass = None, None
    if probabilities(labels, x, labels.is_floating_point()):
        targets, mass = labels, labels.sum(-1, dtype=torch.promote_types(labels.dtype, torch.float32))
        labels = torch.full_like(mass, -1, dtype=torch.int32)
    elif weight.dim() == 2:
        check_values(functools.partial(check_labels, vocab=weight.shape[0], ignore_index=ignore_index), labels)
    vocab = weight.shape[0] if weight.dim() == 2 else 0  # other shapes are errors of the operator
    if class_weights is not None and vocab:
        check_class_weights(class_weights, class_weights.is_floating_point(), vocab, label_smoothing, mass is not None)
    numbers = Outputs(*_numbers(x, weight, bias, labels, targets, cap, bridge.products(precision), label_smoothing > 0))
    inside = (labels >= 0) & (labels < vocab)
    active = ~inside if targets is not None else labels != ignore_index
    how = label_smoothing, z_loss, reduction
    unknown = inside if targets is not None else active & ~inside
    shares = active
    if class_weights is not None:
        labelled = active & inside
        of_labels = class_weights.to(numbers.logsumexp.dtype)[torch.where(labelled, labels, 0).long()]
        shares = torch.where(labelled, of_labels, 0.0)
    loss = compose(torch, numbers, vocab, active, unknown, shares, *how, mass)
    return (loss, numbers.logsumexp) if return_logsumexp else loss
