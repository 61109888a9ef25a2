"""`flash_attention` and `block_sparse_attention` of torch tensors, as a custom operator with gradients (eager and under
`torch.compile`).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from vishwamai.core.op import CallPlan
from vishwamai.core.signature import Signature, array_specs
from vishwamai.core.types import PyTree
from vishwamai.ops.attention import places
from vishwamai.ops.attention.api import ATTENTION
from vishwamai.ops.attention.block_mask import BlockMask
from vishwamai.ops.attention.checks import check_blocks, segment_pair
from vishwamai.ops.attention.gpu_memory import Placement
from vishwamai.ops.attention.gpu_tiles import AttentionGpuConfig
from vishwamai.ops.attention.spec import BSHD, SIGNATURE, Operands, Outputs
from vishwamai.torch import autocast, bridge, definition
from vishwamai.torch.arguments import check_tensors, checks_its_own
from vishwamai.torch.attention_options import (
    OperatorOptions,
    constant_slopes,
    described,
    mask_of,
    planned,
    requested,
    statistics_dtype,
)
from vishwamai.torch.operator import TorchOperator
from vishwamai.torch.sharding import placed_like
from vishwamai.torch.torch_private import constant_result
from vishwamai.torch.value_checks import check_values


def rows(x: Tensor) -> Tensor:
    """A tensor whose rows (its last axis) the kernels can read where they are; a copy where they cannot."""
    contiguous = x.stride(-1) == 1 or x.shape[-1] == 1
    distinct = all(step > 0 or extent == 1 for step, extent in zip(x.stride(), x.shape, strict=True))
    return x if contiguous and distinct and x.data_ptr() % 16 == 0 else x.contiguous()


def unexpanded(x: Tensor) -> Tensor:
    """The tensor with one element along the axes that `expand` has made."""
    for axis, (step, extent) in enumerate(zip(x.stride(), x.shape, strict=True)):
        if step == 0 and extent > 1:
            x = x.narrow(axis, 0, 1)
    return x


def _filled(x: Tensor | None, axes: int) -> Tensor | None:
    return None if x is None else x.contiguous().reshape((1,) * (axes - x.dim()) + x.shape)


def _inner(x: Tensor, layout: str | None) -> Tensor:
    return rows(x).transpose(1, 2) if layout == "bshd" else rows(x)


def _planned(tensors: Operands, options: OperatorOptions, of_bias: bool) -> tuple[CallPlan, Operands, Placement]:
    """(the plan, the operands in the op's own layout, how the kernels' arrays lie). A tensor that `expand` has made is
    read where it is, except for a bias whose gradient is asked for.
    """
    bias, mask = tensors.bias, tensors.mask
    bias = bias if bias is None or of_bias else unexpanded(bias)
    mask = None if mask is None else unexpanded(mask)
    operands_of_call = tensors._replace(bias=bias, mask=mask)
    plan = planned(described(array_specs(operands_of_call), options), operands_of_call.query, options)
    query, key, value, _, _, q_ids, kv_ids, sinks, seed, positions, slopes = operands_of_call
    if plan.spec.operands.q_positions is None:
        positions = None  # nothing asks where a row stands
    operands = Operands(
        _inner(query, options.layout),
        _inner(key, options.layout),
        _inner(value, options.layout),
        _filled(bias, 4),
        _filled(mask, 4),
        None if q_ids is None else _filled(q_ids.to(torch.int32), 2),
        None if kv_ids is None else _filled(kv_ids.to(torch.int32), 2),
        _filled(sinks, 2),
        None if seed is None else seed.contiguous().view(torch.uint32),
        q_positions=None if positions is None else _filled(positions.to(torch.int32), 2),
        slopes=_filled(slopes, 2),
    )
    return plan, operands, Placement(seq_first=options.layout == "bshd")


def attend(plan: CallPlan, operands: Operands, memory: Placement) -> tuple[Tensor, Tensor]:
    """(out, logsumexp) of operands in the op's own layout; on a GPU in the shapes that `memory` says."""
    outputs, logsumexp = bridge.forward(plan, operands, True, memory)
    return outputs.out, logsumexp


def gradients(
    plan: CallPlan,
    operands: Operands,
    memory: Placement,
    outputs: Outputs,
    cotangents: Outputs,
    unwanted: Iterable[str],
) -> Operands:
    """The gradients, in the shapes of `attend`'s output; there may be no cotangent of the logsumexp."""
    logsumexp = outputs.logsumexp.contiguous()
    if cotangents.logsumexp is None:
        outputs = outputs._replace(logsumexp=None)
    else:
        plan = dataclasses.replace(plan, spec=dataclasses.replace(plan.spec, return_lse=True))
        cotangents = cotangents._replace(logsumexp=cotangents.logsumexp.contiguous())
    return bridge.backward(plan, operands, outputs, logsumexp, cotangents, unwanted, memory, "bias" not in unwanted)


def _outer(x: Tensor, plan: CallPlan, memory: Placement) -> Tensor:
    """A result in the caller's layout, contiguous; a kernel for GPUs has written it there."""
    return (x.transpose(1, 2) if memory.seq_first and plan.choices[0].platform == "cpu" else x).contiguous()


def forward(tensors: Operands, options: Sequence[Any]) -> tuple[Tensor, Tensor]:
    """The operator's results."""
    plan, operands, memory = _planned(tensors, OperatorOptions(*options), False)
    out, logsumexp = attend(plan, operands, memory)
    return _outer(out, plan, memory), logsumexp


def backward(
    cotangents: Outputs, outputs: Outputs, tensors: Operands, arguments: Sequence[Any], unwanted: set[str]
) -> Operands:
    """The gradients in the caller's layout."""
    options = OperatorOptions(*arguments)
    plan, operands, memory = _planned(tensors, options, "bias" not in unwanted)
    outputs, cotangents = (pair._replace(out=_inner(pair.out, options.layout)) for pair in (outputs, cotangents))
    result = gradients(plan, operands, memory, outputs, cotangents, unwanted)
    return result._replace(**{n: _outer(getattr(result, n), plan, memory) for n in ("query", "key", "value")})


def _directed(tensors: Operands, tangents: Operands, options: OperatorOptions) -> tuple[Any, Operands, Operands]:
    """(the spec, the operands and their tangents in the op's own layout)."""
    plan, operands, _ = _planned(tensors, options, True)
    merged = Operands(*(x if t is None else t for x, t in zip(tensors, tangents, strict=True)))
    packed = _planned(merged, options, True)[1]
    directions = Operands(*(None if t is None else p for p, t in zip(packed, tangents, strict=True)))
    return dataclasses.replace(plan.spec, return_lse=True), operands, directions


def tangents(tensors: Operands, directions: Operands, arguments: Sequence[Any]) -> Outputs:
    """The tangents of the operator's results, for those of its operands."""
    options = OperatorOptions(*arguments)
    result = definition.outputs_tangent(ATTENTION, *_directed(tensors, directions, options))
    return result._replace(out=_inner(result.out, options.layout).contiguous())


def gradient_tangents(
    cotangents: Outputs, of_cotangents: Outputs, tensors: Operands, directions: Operands, arguments: Sequence[Any]
) -> Operands:
    """The tangents of the gradients, for those of the outputs' cotangents and of the operands."""
    options = OperatorOptions(*arguments)
    sides = (
        Outputs(None if x.out is None else _inner(x.out, options.layout), x.logsumexp)
        for x in (cotangents, of_cotangents)
    )
    result = definition.gradients_tangent(ATTENTION, *_directed(tensors, directions, options), *sides)
    laid = {n: _inner(getattr(result, n), options.layout) for n in ("query", "key", "value")}
    return result._replace(**laid)


def _signature(call: Any) -> Signature:
    of = BSHD if call.layout == "bshd" else SIGNATURE
    outputs = Outputs("batch q_len heads v_dim" if of is BSHD else "batch heads q_len v_dim", "batch heads q_len")
    # Sinks have no batch axis of their own.
    return Signature(of.operands._replace(sinks="_ heads"), outputs)


_attention = TorchOperator(
    ATTENTION,
    Outputs,
    _signature,
    described,
    gradients=("query", "key", "value", "bias", "sinks"),
    saves=lambda call: (*Operands._fields, *Outputs._fields),
    dtypes=statistics_dtype,
    optional=("logsumexp",),  # one that is not used costs no array of zeros
    lazy=("bias",),
    forward=forward,
    backward=backward,
    tangents=tangents,
    gradient_tangents=gradient_tangents,
    option_values={"blocks": mask_of},
)


@checks_its_own("segment_ids")
def flash_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None = None,
    mask: Tensor | None = None,
    *,
    causal: bool = False,
    causal_align: Literal["top_left", "bottom_right"] = "top_left",
    window: tuple[int | None, int | None] | None = None,
    q_offset: int | Tensor | None = None,
    kv_lens: Tensor | None = None,
    kv_starts: Tensor | None = None,
    segment_ids: tuple[Tensor, Tensor] | None = None,
    softcap: float | None = None,
    bias_after_softcap: bool = False,
    sinks: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    dropout_rate: float = 0.0,
    dropout_seed: Tensor | None = None,
    scale: float | None = None,
    return_lse: bool = False,
    block_size: int | None = None,
    config: AttentionGpuConfig | None = None,
    layout: Literal["bhsd", "bshd"] | None = None,
    implementation: str | None = None,
) -> Any:
    """Exact attention in memory linear in the sequences; see `vishwamai.flash_attention`, whose arguments these are.

    Query, key and value may have any strides in which the elements of a head lie side by side (transposed views, parts
    of one tensor): they are not copied on a GPU. float64 is for the CPU. The gradient of `bias` is computed if it
    requires one; `alibi_slopes` have none, and may not require one. `config` is an `AttentionGpuConfig`. In place of a
    key, dropout has `dropout_seed`: integers `[batch, heads, 2]`, of which 32 bits count. The same drop the same
    positions, here and in JAX, where they are `vishwamai.core.dropout.seeds(dropout_key, batch, heads)`. None draws
    them from torch's generator of the query's device. What `q_offset`, `kv_lens` and `kv_starts` hold is checked on the
    CPU; on a GPU, whose host does not wait, under `KernelConfig(checks=True)`.

    >>> import torch
    >>> q, k, v = torch.randn(3, 1, 100, 4, 64)
    >>> flash_attention(q, k[:, :, :2], v[:, :, :2], causal=True, window=(15, 0), layout="bshd").shape
    torch.Size([1, 100, 4, 64])
    """
    computed: Any = dict(causal=causal, causal_align=causal_align, window=window, softcap=softcap, scale=scale)
    computed |= dict(dropout_rate=dropout_rate, layout=layout, bias_after_softcap=bias_after_softcap)
    how: Any = dict(block_size=block_size, config=config, implementation=implementation)
    options = requested("flash_attention", **computed, **how)
    check_tensors("flash_attention", "segment_ids", segment_ids)
    query, key, value, bias = autocast.factors(query, key, value, bias)
    rest = *segment_pair(segment_ids), sinks, dropout_seed
    tensors = Operands(query, key, value, bias, mask, *rest, slopes=alibi_slopes)
    return _attend(*_placed("flash_attention", tensors, options, q_offset, kv_lens, kv_starts), return_lse)


def _placed(
    function: str, tensors: Operands, options: OperatorOptions, q_offset: Any, kv_lens: Any, kv_starts: Any
) -> tuple[Operands, OperatorOptions]:
    """The tensors and options with where the queries stand and which keys exist; see `ops.attention.places`."""
    query, key = tensors[:2]
    if isinstance(q_offset, int):
        options = options._replace(q_offset=places.static_offset(function, q_offset))
    if query.dim() != 4 or key.dim() != 4:  # errors of the operator
        return tensors, options
    seq = 1 if options.layout == "bshd" else 2
    batch, q_len, kv_len = query.shape[0], query.shape[seq], key.shape[seq]

    def count(length: int) -> Tensor:
        return placed_like(query, torch.arange(length, dtype=torch.int32, device=query.device))

    if isinstance(q_offset, Tensor):
        places.check_integers(function, "q_offset", q_offset, _integers(q_offset))
        places.check_offset_shape(function, tuple(q_offset.shape), batch, q_len)
        check_values(functools.partial(places.check_offsets, function, q_len), q_offset)
        tensors = tensors._replace(q_positions=places.rows_at(q_offset.int(), count(q_len)))
    bounds = []
    for name, x in (("kv_lens", kv_lens), ("kv_starts", kv_starts)):
        if x is not None:
            places.check_integers(function, name, x, _integers(x))
            places.check_bound_shape(function, name, tuple(x.shape), batch)
            check_values(functools.partial(places.check_bounds, function, name, kv_len), x)
        bounds.append(None if x is None else x.int())
    if kv_lens is None and kv_starts is None:
        return tensors, options
    exists = places.between(count(kv_len), *bounds)
    q_ids, kv_ids = tensors.q_segment_ids, tensors.kv_segment_ids
    if q_ids is None or kv_ids is None:
        q_ids, kv_ids = count(q_len)[None] * 0, count(kv_len) * 0
    else:
        check_values(functools.partial(places.check_segments, function), q_ids)
    return tensors._replace(q_segment_ids=q_ids, kv_segment_ids=torch.where(exists, kv_ids, places.NOWHERE)), options


def _integers(x: Tensor) -> bool:
    return not (x.is_floating_point() or x.is_complex() or x.dtype == torch.bool)


def _attend(tensors: Operands, options: OperatorOptions, return_lse: bool) -> PyTree:
    """`flash_attention` of the caller's tensors."""
    query, slopes, seed = tensors.query, constant_slopes("flash_attention", tensors.slopes), None
    if options.dropout_rate and query.dim() == 4:
        shape = (query.shape[0], query.shape[2 if options.layout == "bshd" else 1], 2)
        seed = bridge.seeds("flash_attention", "dropout_seed", tensors.dropout_seed, shape, query.device)
    factors = bridge.cast_for_matmul(*tensors[:3])
    out, logsumexp = _attention(*factors, *tensors[3:8], seed, tensors.q_positions, slopes, *options)
    out = out.to(query.dtype)
    return (out, logsumexp) if return_lse else out


@constant_result
def _text(block_mask: object, block_size: object, heads: int, q_len: int, kv_len: int) -> str | None:
    blocks = check_blocks(block_mask, block_size, heads, q_len, kv_len)
    return None if blocks is None else blocks.to_text()


@checks_its_own("block_mask", "block_size")
def block_sparse_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    block_mask: np.ndarray | BlockMask | Callable[[Any, Any], Any] | None = None,
    *,
    block_size: int | tuple[int, int] | None = None,
    bias: Tensor | None = None,
    mask: Tensor | None = None,
    q_offset: int | Tensor | None = None,
    kv_lens: Tensor | None = None,
    kv_starts: Tensor | None = None,
    segment_ids: tuple[Tensor, Tensor] | None = None,
    sinks: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    dropout_seed: Tensor | None = None,
    return_lse: bool = False,
    **options: Any,
) -> Any:
    """Attention over the blocks of the score matrix that `block_mask` keeps; see `vishwamai.block_sparse_attention`.

    The arguments are those, and `options` those of `flash_attention` here. A function as `block_mask` gets arrays of
    NumPy and is evaluated by every call; `torch.compile` takes a `BlockMask` too.

    >>> import numpy as np, torch
    >>> q = torch.ones(1, 1, 4, 8)
    >>> v = torch.arange(4.0)[None, None, :, None]
    >>> block_sparse_attention(q, q, v, np.eye(2, dtype=bool), block_size=2).flatten()
    tensor([0.5000, 0.5000, 2.5000, 2.5000])
    """
    blocks = None
    if query.dim() == key.dim() == 4:  # others are rejected by the checks
        seq, heads = (1, 2) if options.get("layout") == "bshd" else (2, 1)
        blocks = _text(
            block_mask, block_size, *map(bridge.constant, (query.shape[heads], query.shape[seq], key.shape[seq]))
        )
    how = requested("block_sparse_attention", blocks=blocks, **options)
    query, key, value, bias = autocast.factors(query, key, value, bias)
    rest = *segment_pair(segment_ids), sinks, dropout_seed
    tensors = Operands(query, key, value, bias, mask, *rest, slopes=alibi_slopes)
    return _attend(*_placed("block_sparse_attention", tensors, how, q_offset, kv_lens, kv_starts), return_lse)
