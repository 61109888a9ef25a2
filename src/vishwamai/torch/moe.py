"""`grouped_gemm` and the mixture-of-experts layer of torch tensors, on one device."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from vishwamai.core.arrays import fetched
from vishwamai.core.errors import ShapeError
from vishwamai.core.types import AnyArray, PyTree
from vishwamai.ops.moe.api import MOE
from vishwamai.ops.moe.checks import (
    CLAMPED,
    check_bias,
    check_biases,
    check_layer,
    check_limit,
    check_router_tokens,
)
from vishwamai.ops.moe.dispatch import Dispatch, capacity_of, check_combine, check_dispatch, check_experts, sort_choices
from vishwamai.ops.moe.layer import MoEOutput, clamped, weighted_inputs
from vishwamai.ops.moe.routing import Routing, check_routing, choose
from vishwamai.ops.moe.spec import (
    Outputs,
    check_held,
    check_offset,
    check_sizes,
    check_transposed,
    describe,
    held_groups,
    signature,
    unpack_weights,
)
from vishwamai.torch import activation as activations
from vishwamai.torch import autocast, bridge
from vishwamai.torch.arguments import checked
from vishwamai.torch.matmul import gemm
from vishwamai.torch.operator import TorchOperator
from vishwamai.torch.quantization import QTensor
from vishwamai.torch.torch_private import is_transformed
from vishwamai.torch.value_checks import check_values

_grouped_gemm = TorchOperator(
    MOE,
    Outputs,
    lambda call: signature(call.transpose_rhs),
    describe,
    gradients=("lhs", "rhs"),
    dtypes=lambda call: (getattr(torch, call.out_dtype) if call.out_dtype else call.operands.lhs.dtype,),
    one_by_one=True,  # sizes that differ between the elements have no axis to be folded into
)

_ACTIVATIONS = {
    "silu": activations.silu,
    "gelu": activations.gelu,
    "gelu_tanh": lambda x: activations.gelu(x, approximate=True),
    "relu": torch.relu,
    "relu2": activations.relu2,
}


@checked
def grouped_gemm(
    lhs: Tensor,
    rhs: Tensor | QTensor,
    group_sizes: Tensor,
    *,
    group_offset: int | Tensor | None = None,
    transpose_rhs: bool = False,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """Matrix product whose rows are in consecutive groups, each with its own right-hand matrix; see
    `vishwamai.grouped_gemm`, whose arguments these are.

    Sizes that do not fit the rows are an error on the CPU. On a GPU the host never waits for them, except under
    `KernelConfig(checks=True)`, so the call can be captured with whatever computes them. For the same reason a
    `group_offset` out of range is an error where it is an int, and is clamped where it is a tensor. A `QTensor` as
    `rhs` is read as it is stored there, with one scale for a column or one for each block of K.

    >>> import torch
    >>> rows = torch.tensor([[1.0], [2.0], [3.0], [4.0]])
    >>> grouped_gemm(rows, torch.tensor([[[10.0]], [[7.0]], [[100.0]]]), torch.tensor([1, 0, 2]))[:, 0]
    tensor([ 10., 200., 300.,   0.])
    >>> grouped_gemm(rows, torch.tensor([[[7.0]], [[100.0]]]), torch.tensor([1, 0, 2]), group_offset=1)[:, 0]
    tensor([  0., 200., 300.,   0.])
    """
    lhs, rhs = autocast.factors(lhs, rhs)
    if out_dtype is None and lhs.dtype == torch.float32:
        out_dtype = torch.float32  # whatever the ambient `use_bfloat16` makes of the operands
    check_transposed(rhs, transpose_rhs)
    scale, block_k = None, 0
    if isinstance(rhs, QTensor):
        rhs, scale, block_k = unpack_weights(rhs)
        (lhs,) = bridge.cast_for_matmul(lhs)
    else:
        lhs, rhs = bridge.cast_for_matmul(lhs, rhs)
    if lhs.dim() > 1 and not (group_sizes.is_floating_point() or group_sizes.is_complex()):
        check_values(functools.partial(check_sizes, rows=lhs.shape[-2]), group_sizes)
    first_row = None
    if group_offset is not None:
        group_sizes, first_row = _local_groups(lhs, rhs, group_sizes, group_offset)
    name = None if out_dtype is None else str(out_dtype).removeprefix("torch.")
    return _grouped_gemm(lhs, rhs, group_sizes, scale, first_row, name, block_k, transpose_rhs)[0]


def _local_groups(lhs: Tensor, rhs: AnyArray, group_sizes: Tensor, offset: int | Tensor) -> tuple[Tensor, Tensor]:
    """(the sizes of the groups that `rhs` has matrices for, cut off at the last row; the row where the first begins).

    Raises:
      ShapeError: the arguments contradict one another.
    """
    array = torch.as_tensor(offset)
    floats = array.is_floating_point() or array.is_complex()
    check_held(lhs, rhs, group_sizes, array, not (floats or array.dtype == torch.bool))
    groups, local = group_sizes.shape[-1], rhs.shape[-3]
    if isinstance(offset, Tensor):
        offset = offset.int().clamp(0, groups - local)
    else:
        offset = int(offset)
        check_offset(offset, groups=groups, local=local)
    sizes = group_sizes if group_sizes.is_floating_point() else group_sizes.int()  # `describe` declines floats
    return held_groups(sizes, offset, local=local, rows=lhs.shape[-2])


@checked
def moe_routing(
    tokens: Tensor,
    router_weights: Tensor,
    num_experts: int | None = None,
    top_k: int = 2,
    *,
    scoring: str = "softmax",
    bias: Tensor | None = None,
    normalize: bool = True,
    scale: float = 1.0,
    num_groups: int = 1,
    top_groups: int | None = None,
    group_score: str = "top2",
    logit_bias: Tensor | None = None,
    expert_scale: Tensor | None = None,
    margin: float = 0.02,
    jitter: float = 0.0,
    generator: torch.Generator | None = None,
) -> Routing:
    """Scores every token with every expert and chooses the best k; see `vishwamai.moe_routing`. Jitter draws from
    `generator`, or torch's own.

    >>> import torch
    >>> routing = moe_routing(torch.tensor([[3.0, 1.0, 2.0]]), torch.eye(3), top_k=2)
    >>> routing.experts.tolist(), routing.expert_counts.tolist()
    ([[0, 2]], [1, 0, 1])
    """
    biases = {"bias": bias, "logit_bias": logit_bias, "expert_scale": expert_scale}
    grouping = num_groups, top_groups, group_score
    arguments = tokens, router_weights, num_experts, top_k, scoring, biases, grouping, margin, jitter
    experts = check_routing(*arguments, key="torch's")
    x = tokens.reshape(-1, tokens.shape[-1]).float()
    if jitter:
        noise = torch.rand(x.shape, generator=generator, device=x.device)
        x = x * (1.0 - jitter + 2 * jitter * noise)
    with autocast.off(x):  # whatever its users round, a router is float32
        logits = gemm(x, router_weights.float(), precision="highest", out_dtype=torch.float32)  # [T, experts]
    if logit_bias is not None:
        logits = logits + logit_bias.float()
    weights, chosen, counts, shares = choose(logits, bias, top_k, scoring, normalize, grouping, margin)
    if expert_scale is not None:
        weights = weights * expert_scale.float()[chosen]
    number = max(1, x.shape[0])
    balance = experts * (counts.float() / (number * top_k) * shares / number).sum()
    z_loss = logits.logsumexp(1).square().sum() / number
    return Routing(weights * scale, chosen.int(), balance, z_loss, counts)


@checked
def moe_dispatch(tokens: Tensor, routing: Routing, *, capacity_factor: float | None = None) -> Dispatch:
    """Sorts the tokens by the experts that they chose, with or without a capacity; see `vishwamai.moe_dispatch`.

    >>> import torch
    >>> tokens = torch.eye(3)[[2, 0, 2]]
    >>> moe_dispatch(tokens, moe_routing(tokens, 9 * torch.eye(3), top_k=1)).group_sizes
    tensor([1, 0, 2], dtype=torch.int32)
    """
    check_dispatch(tokens, routing, capacity_factor)
    count, top_k = routing.experts.shape
    bins = routing.expert_counts.shape[0]
    check_values(functools.partial(check_experts, experts=bins), routing.experts)
    capacity = None if capacity_factor is None else capacity_of(count, top_k, bins, capacity_factor)
    wide = routing.experts.long(), routing.expert_counts.long()  # as torch reads indices
    sizes, choice, place, dropped = sort_choices(wide[0], bins, capacity, wide[1])
    rows = _gathered(tokens.reshape(-1, tokens.shape[-1]), choice // top_k, place)
    return Dispatch(rows, sizes.int(), choice, place, dropped)


class _Gather(torch.autograd.Function):
    """Rows of x at `index`. The gradient is a gather too, with the same bits every time: `back` says where each row of
    x went, `[rows]` or, where the gradient is the sum of several, `[rows, k]`.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, index: Tensor, back: Tensor) -> Tensor:
        return fetched(x, index)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[AnyArray, ...], output: AnyArray) -> None:
        ctx.save_for_backward(inputs[2])

    @staticmethod
    def backward(ctx: Any, *cotangents: AnyArray) -> PyTree:
        (g,), (back,) = cotangents, ctx.saved_tensors
        gradient = fetched(g.flatten(0, -2), back)
        if back.dim() == 2:
            gradient = gradient.to(torch.promote_types(g.dtype, torch.float32)).sum(1).to(g.dtype)
        return gradient, None, None


class _GatherWithTangents(_Gather):
    """The same with forward mode, which torch's compiler does not take."""

    generate_vmap_rule = True

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.save_for_backward(inputs[2])
        ctx.save_for_forward(inputs[1])

    @staticmethod
    def jvp(ctx: Any, *tangents: PyTree) -> Any:
        (index,) = ctx.saved_tensors
        return fetched(tangents[0], index)


def _gathered(x: Tensor, index: Tensor, back: Tensor) -> AnyArray:
    return (_GatherWithTangents if is_transformed((x,)) else _Gather).apply(x, index, back)


@checked
def moe_combine(rows: Tensor, dispatch: Dispatch, routing: Routing) -> Tensor:
    """Each token's weighted sum of what its experts returned; see `vishwamai.moe_combine`.

    >>> import torch
    >>> tokens = torch.tensor([[1.0, 2.0], [3.0, 1.0]])
    >>> routing = moe_routing(tokens, torch.eye(2), top_k=2)
    >>> moe_combine(moe_dispatch(tokens, routing).rows, moe_dispatch(tokens, routing), routing)
    tensor([[1., 2.],
            [3., 1.]])
    """
    check_combine(rows, dispatch, routing)
    wide = torch.promote_types(rows.dtype, torch.float32)
    choices = _gathered(rows, dispatch.place, dispatch.choice)
    return (choices.to(wide) * routing.weights.to(wide)[..., None]).sum(1).to(rows.dtype)


@checked
def moe_layer(
    tokens: Tensor,
    router_weights: Tensor,
    gate: Tensor | None,
    up: Tensor,
    down: Tensor,
    *,
    top_k: int = 2,
    biases: Sequence[Tensor | None] | None = None,
    activation: str = "silu",
    limit: float = 7.0,
    capacity_factor: float | None = None,
    router_tokens: Tensor | None = None,
    weight_inputs: bool = False,
    **routing_options: Any,
) -> MoEOutput:
    """Mixture of experts: each token is sent to its best k of E gated feed-forward networks; see `vishwamai.moe_layer`.

    One device holds all experts; `routing_options` are those of `moe_routing`.

    >>> import torch
    >>> weights = torch.ones(3, 8, 16), torch.ones(3, 8, 16), torch.ones(3, 16, 8)
    >>> result = moe_layer(torch.ones(4, 8), torch.zeros(8, 3), *weights)
    >>> result.out.shape, int(result.dropped), result.routing.expert_counts.tolist()
    (torch.Size([4, 8]), 0, [4, 4, 0])
    """
    if "axis_name" in routing_options or "expert_axis" in routing_options:
        raise ShapeError("moe_layer: torch's has all experts on one device; leave out `expert_axis` and `axis_name`.")
    check_layer(tokens, router_weights, gate, up, down, activation, None, "dense", None, capacity_factor)
    gate_bias, up_bias, down_bias = check_biases(biases)
    for name, bias, weight in (("gate", gate_bias, gate), ("up", up_bias, up), ("down", down_bias, down)):
        check_bias(name, bias, weight)
    check_limit(activation, gate, limit)
    if router_tokens is not None:
        check_router_tokens(router_tokens, tokens)
    scored = tokens if router_tokens is None else router_tokens
    routing = moe_routing(scored, router_weights, top_k=top_k, **routing_options)
    rows, placed = tokens, routing
    if weight_inputs:
        rows, placed = weighted_inputs(torch, tokens.reshape(-1, tokens.shape[-1]), routing)
    dispatch = moe_dispatch(rows, placed, capacity_factor=capacity_factor)

    def product(rows: Tensor, weights: Tensor, bias: Tensor | None) -> Tensor:
        result = grouped_gemm(rows, weights, dispatch.group_sizes)
        return result if bias is None else result + _of_rows(bias, dispatch.group_sizes, len(result)).to(result.dtype)

    hidden = product(dispatch.rows, up, up_bias)
    if gate is not None:
        gated = product(dispatch.rows, gate, gate_bias)
        clamps = activation == CLAMPED
        hidden = clamped(torch, gated, hidden, limit) if clamps else _ACTIVATIONS[activation](gated) * hidden
    else:
        hidden = _ACTIVATIONS[activation](hidden)
    out = moe_combine(product(hidden, down, down_bias), dispatch, placed)
    if weight_inputs:
        out = out.reshape(*routing.experts.shape, -1).sum(1)
    return MoEOutput(out.reshape(tokens.shape), routing, dispatch.dropped)


def _of_rows(bias: Tensor, group_sizes: Tensor, rows: int) -> Tensor:
    """The bias of each row's group, `[rows, _]`; 0 in rows after the last group, as the product has there."""
    numbers = torch.arange(rows, device=bias.device)
    group = torch.searchsorted(group_sizes.long().cumsum(0), numbers, right=True)
    return torch.where((group < len(bias))[:, None], bias[group.clamp(max=len(bias) - 1)], 0)
