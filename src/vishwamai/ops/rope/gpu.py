"""The rotation on GPUs: one Triton kernel for queries and keys, in either layout by strides, forward and backward.

torch tensors run on it. JAX arrays do only where it is asked for by name: XLA makes one fusion of the rotation, and
joins it to what stands around it.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax.numpy as jnp

from vishwamai.core import gpu
from vishwamai.core.op import Implementation
from vishwamai.core.target import Target
from vishwamai.core.tiles import Tiles, size, warp_count
from vishwamai.core.types import AnyArray
from vishwamai.ops.rope.gpu_arguments import Heads
from vishwamai.ops.rope.reference import table_gradients
from vishwamai.ops.rope.spec import Operands, Outputs, RopeSpec

TURN = gpu.TritonKernel("vishwamai.ops.rope.gpu_kernels", "turn")

_DTYPES = tuple(jnp.dtype(d) for d in (jnp.bfloat16, jnp.float16, jnp.float32))
_TILE = 2048
"""Pairs that four warps hold: 16 a thread, and as many of both tables."""
_WIDEST = 4096
"""Features of the widest head."""
_PROGRAMS = 8 * gpu.SMS
"""Programs to aim at; fewer, and each would read its tables for more heads."""


@dataclasses.dataclass(frozen=True)
class RopeGpuConfig(Tiles):
    """Tiles of the Triton kernel.

    Attributes:
      positions: number that a program turns, a power of two.
      heads: number of query heads that it turns, one after another; a like share of the key's.
      warps: warps of a program.
    """

    positions: int = size("positions", block_size=lambda tiles, n: min(tiles.positions, gpu.next_power_of_2(n)))
    heads: int = size("heads")
    warps: int = warp_count()


def why_not(spec: RopeSpec, target: Target) -> str | None:
    """The reason why this kernel cannot serve `spec`, or None."""
    for name, x in (("x", spec.operands.query), ("cos", spec.operands.cos), ("sin", spec.operands.sin)):
        if x.dtype not in _DTYPES:
            return f"`{name}` is {x.dtype.name}; the Triton kernel takes {', '.join(d.name for d in _DTYPES)}."
    if any(x is not None and x.size == 0 for x in spec.operands):
        return "an array is empty."
    if spec.head_dim > _WIDEST:
        return f"heads of {spec.head_dim} features do not fit the registers of a program; it takes up to {_WIDEST}."
    return gpu.why_not(target)


def heuristic(spec: RopeSpec, target: Target) -> RopeGpuConfig:
    """Positions to fill the registers, and as many heads as leave enough programs."""
    pairs = gpu.next_power_of_2(spec.pairs)
    rows = max(1, min(_TILE // pairs, gpu.next_power_of_2(spec.positions)))
    heads = spec.heads(spec.operands.query)
    groups = min(heads, gpu.next_power_of_2(gpu.cdiv(_PROGRAMS, spec.batch * gpu.cdiv(spec.positions, rows))))
    return RopeGpuConfig(rows, gpu.cdiv(heads, groups), 4 if rows * pairs >= 512 else 1)


def _strides(spec: RopeSpec, x: AnyArray) -> tuple[int, int, int]:
    """Strides of batch, head and position: a tensor's own; JAX arrays, results and shapes have those of contiguous
    ones.
    """
    strides = [math.prod(x.shape[axis + 1 :]) for axis in range(3)]
    if gpu.framework(x) == "torch":
        strides = [int(stride) for stride in x.stride()[:3]]
    batch, *rest = strides
    head, position = rest if spec.layout == "bhsd" else reversed(rest)
    return batch, head, position


def _heads(spec: RopeSpec, x: AnyArray, out: object, groups: int) -> Heads:
    """The heads of the query, or of the key where there is one."""
    if x is None:
        return Heads(0, 0, *(0,) * 6)
    return Heads(spec.heads(x), gpu.cdiv(spec.heads(x), groups), *_strides(spec, x), *_strides(spec, out))


def _turn(spec: RopeSpec, config: RopeGpuConfig, arrays: Any, cos: Any, sin: object, back: bool) -> list[Any]:
    query, key = arrays
    rows, heads = config.positions, spec.heads(query)
    groups, blocks = gpu.cdiv(heads, config.heads), gpu.cdiv(spec.positions, rows)
    rest = spec.head_dim - 2 * spec.pairs
    outputs = [None if x is None else gpu.result(x.shape, spec.operands.query.dtype) for x in arrays]
    return gpu.launch(
        TURN,
        (spec.batch * blocks, groups),
        dict(query_ptr=query, key_ptr=key, cos_ptr=cos, sin_ptr=sin),
        dict(query_out_ptr=outputs[0], key_out_ptr=outputs[1]),
        warps=config.warps,
        positions=spec.positions,
        pairs=spec.pairs,
        features=spec.head_dim,
        blocks=blocks,
        table_batch=0 if cos.shape[0] == 1 else spec.positions * spec.pairs,
        query=_heads(spec, query, outputs[0], groups)._replace(share=config.heads),
        key=_heads(spec, key, outputs[1], groups),
        BACK=back,
        INTERLEAVED=spec.interleaved,
        ROWS=rows,
        PAIRS=gpu.next_power_of_2(spec.pairs),
        REST=gpu.next_power_of_2(rest) if rest else 0,
    )


def forward(spec: RopeSpec, config: RopeGpuConfig, operands: Operands) -> tuple[Outputs, None]:
    query, key = _turn(spec, config, operands[:2], operands.cos, operands.sin, False)
    return Outputs(query, key), None


def backward(spec: RopeSpec, config: RopeGpuConfig, operands: Operands, cotangents: Outputs) -> Operands:
    """The inverse rotation. Gradients of the tables, which XLA drops where they are not requested, are for JAX
    alone.
    """
    query, key = _turn(spec, config, tuple(cotangents), operands.cos, operands.sin, True)
    if gpu.framework(operands.cos) == "torch":
        return Operands(query, key, None, None)
    return Operands(query, key, *table_gradients(spec, operands, cotangents))


TRITON = Implementation(
    "triton", "cuda", forward, backward, why_not, heuristic, RopeGpuConfig, why_not_default=gpu.fused_by_xla
)
