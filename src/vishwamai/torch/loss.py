"""`linear_cross_entropy` of torch tensors, as a custom operator with gradients (eager and under `torch.compile`).

The operator gives three numbers for each token, the logsumexp of its logits, its label's logit and, for label smoothing, their sum; the loss is composed
of them in torch, which differentiates that part itself.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from vishwamai.core.config import current_config
from vishwamai.core.precision import PrecisionConfig, resolve_precision
from vishwamai.core.spec import array_spec
from vishwamai.ops.loss.api import LOSS
from vishwamai.ops.loss.spec import LossSpec, Operands, Outputs, check_arrays, check_options
from vishwamai.torch import bridge


def _described(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    softcap: float | None,
    precision: str,
    logit_sum: bool,
) -> tuple[LossSpec, Operands]:
    """(spec, operands in the op's own layout)."""
    check_arrays(x, weight, labels, bias)
    operands = Operands(
        x.contiguous().reshape(1, labels.numel(), x.shape[-1]),
        weight.contiguous()[None],
        None if bias is None else bias.contiguous()[None],
        labels.to(torch.int32).contiguous().reshape(1, labels.numel()),
    )
    shapes = Operands(*(None if a is None else array_spec(a) for a in operands))
    assert shapes.x is not None
    products = resolve_precision(precision, PrecisionConfig.DEFAULT, shapes.x.dtype)
    return LossSpec(shapes, softcap, products, logit_sum), operands


def _wide(x: Tensor) -> torch.dtype:
    """The dtype of sums."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


@torch.library.custom_op("vishwamai::cross_entropy", mutates_args=())
def cross_entropy(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    softcap: float | None,
    precision: str,
    logit_sum: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """(logsumexp, label's logit, sum of the logits if `logit_sum`, else empty) of each token; x and weight have one dtype. See `linear_cross_entropy`."""
    spec, operands = _described(x, weight, bias, labels, softcap, precision, logit_sum)
    outputs, _ = bridge.forward(bridge.choose(LOSS, spec, x), spec, operands)
    results = (None if y is None else y.reshape(labels.shape) for y in outputs)
    return tuple(x.new_empty(0, dtype=_wide(x)) if y is None else y for y in results)  # type: ignore[return-value]


@cross_entropy.register_fake
def _(x: Tensor, weight: Any, bias: Any, labels: Tensor, softcap: Any, precision: str, logit_sum: bool) -> Any:
    del weight, bias, softcap, precision
    row = x.new_empty(labels.shape, dtype=_wide(x))
    return row, torch.empty_like(row), torch.empty_like(row) if logit_sum else row.new_empty(0)


@torch.library.custom_op("vishwamai::cross_entropy_backward", mutates_args=())
def cross_entropy_backward(
    dlogsumexp: Tensor,
    dlabel: Tensor,
    dsum: Tensor | None,
    logsumexp: Tensor,
    label_logit: Tensor,
    total: Tensor | None,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    softcap: float | None,
    precision: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of x, weight and bias; the last is empty where there is none. The logits are formed once more."""
    spec, operands = _described(x, weight, bias, labels, softcap, precision, total is not None)

    def rows(*tensors: Tensor | None) -> Outputs:
        return Outputs(*(None if t is None else t.contiguous().reshape(1, labels.numel()) for t in tensors))

    outputs, cotangents = rows(logsumexp, label_logit, total), rows(dlogsumexp, dlabel, dsum)
    gradients = bridge.backward(bridge.choose(LOSS, spec, x), spec, operands, outputs, None, cotangents)
    dbias = x.new_empty(0, dtype=_wide(x)) if bias is None else gradients.bias[0]
    return gradients.x.reshape(x.shape), gradients.weight[0], dbias


@cross_entropy_backward.register_fake
def _(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    x, weight, bias = arguments[6:9]
    dbias = x.new_empty(0, dtype=_wide(x)) if bias is None else bias.new_empty(bias.shape)
    return x.new_empty(x.shape), weight.new_empty(weight.shape), dbias


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *arrays, ctx.softcap, ctx.precision, ctx.logit_sum = inputs
    ctx.save_for_backward(*output, *arrays)


def _gradient(ctx: Any, dlogsumexp: Tensor, dlabel: Tensor, dsum: Tensor) -> tuple[Any, ...]:
    logsumexp, label_logit, total, x, weight, bias, labels = ctx.saved_tensors
    if not ctx.logit_sum:
        total, dsum = None, None  # type: ignore[assignment]
    dx, dweight, dbias = cross_entropy_backward(
        dlogsumexp, dlabel, dsum, logsumexp, label_logit, total, x, weight, bias, labels, ctx.softcap, ctx.precision
    )
    return dx, dweight, None if bias is None else dbias, None, None, None, None


bridge.register_autograd(cross_entropy, _gradient, _setup)


def linear_cross_entropy(
    x: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    bias: Tensor | None = None,
    softcap: float | None = None,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    ignore_index: int = -100,
    reduction: str = "mean",
    return_logsumexp: bool = False,
    precision: str | None = None,
) -> Any:
    """Cross entropy of the logits `x @ weight.T + bias`, which are never held, neither forward nor backward; see `vishwamai.linear_cross_entropy`.

    Args:
      x: `[..., features]`, bfloat16, float16 or float32 (float64 on the CPU): the last hidden states.
      weight: `[words, features]`, as `torch.nn.Linear` has it; beside an `x` of another dtype, both are promoted.
      labels: `[...]`, integers from 0 to words-1, or `ignore_index`. Any other label makes its loss NaN.
      bias: `[words]`, or None.
      softcap: bound of the logits, or None.
      label_smoothing: share of the target that is spread evenly over all words.
      z_loss: weight of the squared logsumexp.
      ignore_index: label of tokens whose loss is 0 and that no gradient reaches.
      reduction: "none", "sum", or "mean" over the tokens that are not ignored (0 if all are, where torch's own has NaN).
      return_logsumexp: return the logsumexp of every token too; it is differentiable.
      precision: of float32 products: "highest" or "high"; None takes the ambient one.

    Returns:
      The loss, float32 (float64 for float64 tensors): a scalar, or `[...]` for "none"; with `return_logsumexp` the pair (loss, logsumexp `[...]`).

    Raises:
      ShapeError: the arguments contradict one another.
      UnsupportedError: no kernel serves the call on the tensors' device.

    >>> import torch
    >>> linear_cross_entropy(torch.zeros(2, 4), torch.ones(8, 4), torch.tensor([3, -100]))  # log(8)
    tensor(2.0794)
    """
    check_options(softcap, label_smoothing, z_loss, ignore_index, reduction)
    x, weight = bridge.narrowed(x, weight)
    common = torch.promote_types(x.dtype, weight.dtype)
    x, weight = x.to(common), weight.to(common)
    if bias is not None:
        bias = bias.to(_wide(x))
    products = precision or ("default" if torch.compiler.is_compiling() else current_config().precision.products)
    cap = None if softcap is None else float(softcap)
    logsumexp, at_label, total = cross_entropy(x, weight, bias, labels, cap, products, label_smoothing > 0)

    loss = logsumexp - (1.0 - label_smoothing) * at_label
    if label_smoothing > 0:
        loss = loss - label_smoothing / weight.shape[0] * total
    if z_loss:
        loss = loss + z_loss * logsumexp.square()
    counted = labels != ignore_index
    unknown = (labels < 0) | (labels >= weight.shape[0])
    loss = torch.where(counted, torch.where(unknown, torch.nan, loss), 0.0)
    if reduction != "none":
        loss = loss.sum()
    if reduction == "mean":
        loss = loss / counted.sum().clamp(min=1)
    return (loss, logsumexp) if return_logsumexp else loss
