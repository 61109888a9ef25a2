"""The options of attention's operators, from a caller's arguments to a spec and to a plan; dense, block-sparse and
packed attention have them in common.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor

from vishwamai.core.config import current_config
from vishwamai.core.errors import KernelError, ShapeError, UnsupportedError
from vishwamai.core.op import CallPlan
from vishwamai.core.precision import resolve_precision
from vishwamai.ops.attention.api import ATTENTION
from vishwamai.ops.attention.block_mask import BlockMask
from vishwamai.ops.attention.checks import (
    ALIGNMENTS,
    check_blocks,
    check_rate,
    check_window,
    make_spec,
    one_request,
)
from vishwamai.ops.attention.checks import Options as CallOptions
from vishwamai.ops.attention.gpu_tiles import AttentionGpuConfig
from vishwamai.ops.attention.reference import XLA
from vishwamai.ops.attention.spec import AttentionSpec, Operands
from vishwamai.torch import bridge

_CONFIG = dataclasses.fields(AttentionGpuConfig)


class OperatorOptions(NamedTuple):
    """Options of attention as an operator's schema has them. The last three say how it runs, not what is computed."""

    causal: bool
    bottom_right: bool
    left: int | None
    right: int | None
    softcap: float | None
    bias_after_softcap: bool
    scale: float | None
    q_offset: int | None  # one that is a tensor is an operand
    dropout_rate: float
    layout: str | None
    precision: str
    blocks: str | None  # the text of a `BlockMask`
    implementation: str | None
    block_size: int | None
    config: list[int]  # the fields of an `AttentionGpuConfig`, or nothing


_COMPUTED = OperatorOptions._fields.index("implementation")
"""How many options say what is computed."""


def requested(
    function: str,
    *,
    window: Any = None,
    blocks: str | None = None,
    block_size: int | None = None,
    config: Any = None,
    implementation: str | None = None,
    **options: Any,
) -> OperatorOptions:
    """The options of a call of `function`; `options` are further ones of JAX's call.

    Raises:
      ShapeError, KernelError: an option is not legal; the spec checks those that are not checked here.
    """
    call = CallOptions(**options)
    if call.causal_align not in ALIGNMENTS:
        raise ShapeError(f"{function}: `causal_align` is {call.causal_align!r}; pass 'top_left' or 'bottom_right'.")
    check_rate(call.dropout_rate)
    left, right = (window if torch.compiler.is_compiling() else check_window(window)) or (None, None)
    one_request(block_size, config)
    if config is not None and not isinstance(config, AttentionGpuConfig):
        raise KernelError(f"{function}: `config` is a {type(config).__name__}; pass an AttentionGpuConfig.")
    fields = [] if config is None else [int(getattr(config, field.name)) for field in _CONFIG]
    return OperatorOptions(
        call.causal, call.causal_align == "bottom_right", left, right, call.softcap,
        call.bias_after_softcap, call.scale, call.q_offset, float(call.dropout_rate), call.layout,
        bridge.products(None), blocks, implementation, block_size, fields,
    )  # fmt: skip


def constant_slopes(function: str, slopes: Tensor | None) -> Tensor | None:
    """The slopes of ALiBi as they are.

    Raises:
      UnsupportedError: they require a gradient, which attention has not.
    """
    if slopes is not None and slopes.requires_grad and torch.is_grad_enabled():
        raise UnsupportedError(
            f"{function}: `alibi_slopes` has no gradient, but requires one; pass `alibi_slopes.detach()`, or the "
            "distances times the slopes as `bias` of `flash_attention`, which has one."
        )
    return slopes


def described(arrays: Operands, options: OperatorOptions) -> AttentionSpec:
    """The spec of a call, which checks it; `arrays` are `ArraySpec`s in the caller's layout."""
    return _described(arrays, options[:_COMPUTED])


@functools.lru_cache(maxsize=4096)
def _described(arrays: Operands, options: tuple[Any, ...]) -> AttentionSpec:
    causal, bottom_right, left, right, softcap, after, scale, q_offset, rate, layout, precision, blocks = options
    seed = arrays.dropout_seed
    rate = 0.0 if seed is None else rate
    call = CallOptions(causal, ALIGNMENTS[bottom_right], (left, right), softcap, after, rate, scale)
    spec = make_spec(
        arrays._replace(dropout_seed=None),
        resolve_precision(precision, current_config().precision, arrays.query.dtype),
        *call._replace(layout=layout, q_offset=q_offset),
    )
    if seed is not None and tuple(seed.shape) != (spec.batch, spec.q_heads, 2):
        raise ShapeError(f"attention: `dropout_seed` has shape {seed.shape}; pass [batch, heads, 2].")
    sizes = spec.q_heads, spec.q_len, spec.kv_len
    return dataclasses.replace(spec, blocks=check_blocks(mask_of(blocks), None, *sizes))


def mask_of(blocks: str | None) -> BlockMask | None:
    """The mask of an operator's option `blocks`."""
    return None if blocks is None else BlockMask.from_text(blocks)


def planned(spec: AttentionSpec, tensor: Tensor, options: OperatorOptions) -> CallPlan:
    """What runs, by the caller's options or else the ambient ones."""
    config: object = options.block_size
    if len(options.config):
        fields: Any = [bool(n) if f.type == "bool" else n for n, f in zip(options.config, _CONFIG, strict=True)]
        config = AttentionGpuConfig(*fields)
    name = options.implementation or (None if current_config().use_flash else XLA.name)
    return bridge.choose(ATTENTION, spec, tensor, config=config, implementation=name)


def statistics_dtype(call: Any) -> tuple[torch.dtype, torch.dtype]:
    """The dtypes of (out, logsumexp)."""
    dtype = call.operands.query.dtype
    return dtype, torch.promote_types(dtype, torch.float32)
