"""`flash_attention_varlen`: attention of packed sequences, each over its own keys, as FlashAttention's users know it; a
custom operator with gradients.

On a GPU the kernels of `flash_attention` read where each sequence begins and work within it, so the cost is that of the
sequences and nothing is said to the host. On the CPU the sequences are computed one after the other.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal, NamedTuple

import jax.numpy as jnp
import torch
from torch import Tensor

from vishwamai.core import dims
from vishwamai.core.errors import ShapeError
from vishwamai.core.op import CallPlan
from vishwamai.core.signature import Signature, array_specs
from vishwamai.core.signature import described as remembered
from vishwamai.core.spec import ArraySpec, array_spec
from vishwamai.core.types import AnyArray
from vishwamai.ops.attention.api import ATTENTION
from vishwamai.ops.attention.gpu_memory import Packed, Placement
from vishwamai.ops.attention.gpu_tiles import AttentionGpuConfig
from vishwamai.ops.attention.spec import AttentionSpec, Operands, Outputs
from vishwamai.ops.attention.varlen import NAME, check_starts
from vishwamai.torch import attention, autocast, bridge
from vishwamai.torch.arguments import checked
from vishwamai.torch.attention_options import (
    OperatorOptions,
    constant_slopes,
    described,
    planned,
    requested,
    statistics_dtype,
)
from vishwamai.torch.operator import TorchOperator


class Tensors(NamedTuple):
    """What the operator takes."""

    query: Annotated[AnyArray, "total_q heads qk_dim"]
    key: Annotated[AnyArray, "total_k heads/ qk_dim"]
    value: Annotated[AnyArray, "total_k heads/ v_dim"]
    sinks: Annotated[AnyArray, "heads", "optional"]
    dropout_seed: Annotated[AnyArray, "sequences heads _", "optional"]
    slopes: Annotated[AnyArray, "heads", "optional"]
    cu_seqlens_q: Annotated[AnyArray, "starts"]
    cu_seqlens_k: Annotated[AnyArray, "starts"]


_SIGNATURE = Signature(
    dims.declared(Tensors), Outputs("total_q heads v_dim", "heads total_q"), labels={"slopes": "alibi_slopes"}
)


@remembered
def _check(tensors: Tensors) -> None:
    """Raises ShapeError where the tensors, of which these are the `ArraySpec`s, do not fit one another."""
    _SIGNATURE.check(NAME, tensors._replace(dropout_seed=None))
    for name, x in (("cu_seqlens_q", tensors.cu_seqlens_q), ("cu_seqlens_k", tensors.cu_seqlens_k)):
        if x.shape[0] < 2 or not jnp.issubdtype(x.dtype, jnp.integer):
            raise ShapeError(f"{NAME}: `{name}` is {x}; pass integers [batch + 1], from 0 to the last sequence's end.")


def _describe(operands: Tensors, max_seqlen_q: int, max_seqlen_k: int, options: OperatorOptions) -> AttentionSpec:
    """Of all sequences at once, whose bands are the kernel's to know."""
    batch = operands.cu_seqlens_q.shape[0] - 1
    arrays: list[ArraySpec] = []
    for x, length in zip(operands[:3], (max_seqlen_q, max_seqlen_k, max_seqlen_k), strict=True):
        packed = array_spec(x)
        arrays.append(ArraySpec((batch, packed.shape[1], length, packed.shape[2]), packed.dtype))
    sinks, seed, slopes = (None if x is None else array_spec(x) for x in operands[3:6])
    operands_of_batch = Operands(*arrays, sinks=sinks, dropout_seed=seed, slopes=slopes)
    return described(operands_of_batch, options._replace(bottom_right=False))


def _heads_first(x: Tensor) -> Tensor:
    """`[length, heads, dim]` as `[1, heads, length, dim]`."""
    return x.transpose(0, 1)[None]


def _packed_call(tensors: Tensors, arguments: Sequence[Any]) -> tuple[CallPlan, Operands, Placement]:
    """(the plan, operands, where they lie) of all sequences at once, on a GPU."""
    query, key, value, sinks, seed, slopes, q_starts, kv_starts = tensors
    options = OperatorOptions(*arguments[2:])
    operands = Operands(
        *(_heads_first(attention.rows(x)) for x in (query, key, value)),
        sinks=None if sinks is None else sinks.contiguous()[None],
        dropout_seed=None if seed is None else seed.contiguous().view(torch.uint32),
        slopes=None if slopes is None else slopes.contiguous()[None],
    )
    q, kv = q_starts.to(torch.int32).contiguous(), kv_starts.to(torch.int32).contiguous()
    plan = planned(_describe(array_specs(tensors), arguments[0], arguments[1], options), query, options)
    return plan, operands, Placement(True, Packed(q, kv, options.bottom_right))


def _sequences(tensors: Tensors, arguments: Sequence[Any]) -> Iterator[tuple[slice, slice, Operands]]:
    """(positions of the queries and of the keys, a batch of one in the layout "bshd") of the sequences that have
    queries, one after the other.
    """
    query, key, value, sinks, seed, slopes, *starts = tensors
    for side, first, longest, x in zip("qk", starts, arguments, (query, key)):
        check_starts(side, longest, len(x), first.cpu().numpy())
    ranges = ([slice(*ends) for ends in itertools.pairwise(first.tolist())] for first in starts)
    for number, (q, kv) in enumerate(zip(*ranges, strict=True)):
        if q.stop > q.start:
            packed = query[None, q], key[None, kv], value[None, kv]
            bits = None if seed is None else seed[number : number + 1]
            yield q, kv, Operands(*packed, sinks=sinks, dropout_seed=bits, slopes=slopes)


def _forward(tensors: Tensors, arguments: Sequence[Any]) -> tuple[Tensor, Tensor]:
    query, _, value, *_ = tensors
    _check(array_specs(tensors))
    if bridge.platform_of(query) == "cuda":
        return attention.attend(*_packed_call(tensors, arguments))
    wide, out = torch.promote_types(query.dtype, torch.float32), query.new_zeros((*query.shape[:2], value.shape[2]))
    logsumexp = query.new_full((query.shape[1], query.shape[0]), float("-inf"), dtype=wide)
    options = OperatorOptions(*arguments[2:])._replace(layout="bshd")
    for q, _, operands in _sequences(tensors, arguments):
        part, lse = attention.forward(operands, options)
        out[q], logsumexp[:, q] = part[0], lse[0]
    return out, logsumexp


def _backward(
    cotangents: Outputs, outputs: Outputs, tensors: Tensors, arguments: Sequence[Any], unwanted: set[str]
) -> Operands:
    (out, logsumexp), (dout, dlogsumexp) = outputs, cotangents
    if bridge.platform_of(out) == "cuda":
        o, do = (Outputs(_heads_first(attention.rows(x)), of) for x, of in (outputs, cotangents))
        gradients = attention.gradients(*_packed_call(tensors, arguments), o, do, unwanted)
        return gradients._replace(**{n: getattr(gradients, n).contiguous() for n in ("query", "key", "value")})
    dq, dk, dv = (torch.zeros(x.shape, dtype=x.dtype) for x in tensors[:3])
    dsinks = None if tensors.sinks is None else torch.zeros_like(tensors.sinks)
    options = OperatorOptions(*arguments[2:])._replace(layout="bshd")
    for q, kv, operands in _sequences(tensors, arguments):
        saved = Outputs(out[None, q], logsumexp[None, :, q])
        of = Outputs(dout[None, q], None if dlogsumexp is None else dlogsumexp[None, :, q])
        gradients = attention.backward(of, saved, operands, options, unwanted)
        dq[q], dk[kv], dv[kv] = (part[0] for part in gradients[:3])
        if dsinks is not None:
            dsinks += gradients.sinks[0]
    return Operands(dq, dk, dv, sinks=dsinks)


def _directions(tangents: Tensors, q: slice, kv: slice) -> Operands:
    """The tangents of one sequence's operands, as `_sequences` has those."""
    sides = zip(tangents[:3], (q, kv, kv), strict=True)
    return Operands(*(None if t is None else t[None, rows] for t, rows in sides), sinks=tangents.sinks)


def _tangents(tensors: Tensors, tangents: Tensors, arguments: Sequence[Any]) -> Outputs:
    query, _, value, *_ = tensors
    wide, out = torch.promote_types(query.dtype, torch.float32), query.new_zeros((*query.shape[:2], value.shape[2]))
    logsumexp = query.new_zeros((query.shape[1], query.shape[0]), dtype=wide)
    options = OperatorOptions(*arguments[2:])._replace(layout="bshd")
    for q, kv, operands in _sequences(tensors, arguments):
        part, lse = attention.tangents(operands, _directions(tangents, q, kv), options)
        out[q], logsumexp[:, q] = part[0], lse[0]
    return Outputs(out, logsumexp)


def _gradient_tangents(
    cotangents: Outputs, of_cotangents: Outputs, tensors: Tensors, tangents: Tensors, arguments: Sequence[Any]
) -> Operands:
    dq, dk, dv = (x.new_zeros(x.shape) for x in tensors[:3])
    dsinks = None if tensors.sinks is None else torch.zeros_like(tensors.sinks)
    options = OperatorOptions(*arguments[2:])._replace(layout="bshd")
    for q, kv, operands in _sequences(tensors, arguments):
        of, cotangent_directions = (
            Outputs(None if o is None else o[None, q], None if lse is None else lse[None, :, q])
            for o, lse in (cotangents, of_cotangents)
        )
        directional = attention.gradient_tangents(
            of, cotangent_directions, operands, _directions(tangents, q, kv), options
        )
        dq[q], dk[kv], dv[kv] = (part[0] for part in directional[:3])
        if dsinks is not None:
            dsinks += directional.sinks[0]
    return Operands(dq, dk, dv, sinks=dsinks)


_varlen = TorchOperator(
    ATTENTION,
    Outputs,
    _SIGNATURE,
    _describe,
    gradients=("query", "key", "value", "sinks"),
    saves=lambda call: (*Tensors._fields, *Outputs._fields),
    dtypes=statistics_dtype,
    optional=("logsumexp",),
    forward=_forward,
    backward=_backward,
    tangents=_tangents,
    gradient_tangents=_gradient_tangents,
    one_by_one=True,
    name="attention_varlen",
)


@checked
def flash_attention_varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    causal: bool = False,
    causal_align: Literal["top_left", "bottom_right"] = "bottom_right",
    window: tuple[int | None, int | None] | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    dropout_rate: float = 0.0,
    dropout_seed: Tensor | None = None,
    scale: float | None = None,
    return_lse: bool = False,
    block_size: int | None = None,
    config: AttentionGpuConfig | None = None,
    implementation: str | None = None,
) -> Any:
    """Attention of sequences of any lengths, packed one after another; see `vishwamai.flash_attention_varlen`, whose
    arguments these are.

    Blocks of other sequences are not visited: the time is that of the sequences, and nothing is padded. Dropout is that
    of `flash_attention` here, with rows and columns counted within each sequence and seeds `[batch, heads, 2]`.
    `max_seqlen_q` and `max_seqlen_k` are the longest sequence's length, or more. Where a sequence is longer, the CPU
    raises an error. A GPU is not asked: there the results of queries past `max_seqlen_q` become NaN, and the gradients
    of keys past `max_seqlen_k`, which are seen.

    >>> import torch
    >>> q, k, v = torch.randn(3, 10, 2, 16)
    >>> starts = torch.tensor([0, 3, 10])
    >>> out = flash_attention_varlen(q, k, v, starts, starts, 7, 7, causal=True)
    >>> torch.equal(out[0], v[0]) and torch.equal(out[3], v[3])
    True
    """
    computed: Any = dict(causal=causal, causal_align=causal_align, window=window, softcap=softcap, scale=scale)
    how: Any = dict(block_size=block_size, config=config, implementation=implementation)
    options = requested(NAME, dropout_rate=dropout_rate, **computed, **how)
    query, key, value = autocast.factors(query, key, value)
    seed = None
    if dropout_rate and query.dim() == 3:
        shape = (cu_seqlens_q.shape[0] - 1, query.shape[1], 2)
        seed = bridge.seeds(NAME, "dropout_seed", dropout_seed, shape, query.device)
    out_dtype = query.dtype
    query, key, value = bridge.cast_for_matmul(query, key, value)
    slopes = constant_slopes(NAME, alibi_slopes)
    tensors = Tensors(query, key, value, sinks, seed, slopes, cu_seqlens_q, cu_seqlens_k)
    out, logsumexp = _varlen(*tensors, int(max_seqlen_q), int(max_seqlen_k), *options)
    out = out.to(out_dtype)
    return (out, logsumexp) if return_lse else out
