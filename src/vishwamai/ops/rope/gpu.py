"""The rotation on GPUs: one Triton kernel for queries and keys, in either layout by strides, forward and backward.

torch tensors run on it. JAX arrays do only where it is asked for by name: XLA makes one fusion of the rotation, and joins it to what stands around it.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from vishwamai.core import gpu
from vishwamai.core.hardware import Chip
from vishwamai.core.op import Implementation
from vishwamai.ops.rope.reference import table_gradients
from vishwamai.ops.rope.spec import Operands, Outputs, RopeSpec

TURN = gpu.Kernel("vishwamai.ops.rope.gpu_kernels", "turn")

_DTYPES = ("bfloat16", "float16", "float32")
_TILE = 2048
"""Pairs that four warps hold: 16 a thread, and as many of both tables."""
_WIDEST = 4096
"""Features of the widest head."""
_PROGRAMS = 8 * gpu.SMS
"""Programs to aim at; fewer, and each would read its tables for more heads."""


@dataclasses.dataclass(frozen=True)
class RopeGpuConfig:
    """Tiles of the Triton kernel.

    Attributes:
      positions: that a program turns, a power of two.
      heads: of the query that it turns, one after another; of the key, a like share.
      warps: warps of a program.
    """

    positions: int
    heads: int
    warps: int

    def with_block_size(self, block_size: int) -> RopeGpuConfig:
        """The same with about `block_size` positions a program."""
        return dataclasses.replace(self, positions=gpu.next_power_of_2(block_size))


def why_not(spec: RopeSpec, chip: Chip | None) -> str | None:
    """The reason why this kernel cannot serve `spec`, or None."""
    del chip
    for name, x in (("x", spec.operands.query), ("cos", spec.operands.cos), ("sin", spec.operands.sin)):
        if x.dtype.name not in _DTYPES:
            return f"`{name}` is {x.dtype.name}; the Triton kernel takes {', '.join(_DTYPES)}."
    if any(x is not None and x.size == 0 for x in spec.operands):
        return "an array is empty."
    if spec.head_dim > _WIDEST:
        return f"heads of {spec.head_dim} features do not fit the registers of a program; it takes up to {_WIDEST}."
    return gpu.why_not()


def heuristic(spec: RopeSpec, chip: Chip | None) -> RopeGpuConfig:
    """Positions to fill the registers, and as many heads as leave enough programs."""
    del chip
    pairs = gpu.next_power_of_2(spec.pairs)
    rows = max(1, min(_TILE // pairs, gpu.next_power_of_2(spec.positions)))
    heads = spec.heads(spec.operands.query)
    groups = min(heads, gpu.next_power_of_2(gpu.cdiv(_PROGRAMS, spec.batch * gpu.cdiv(spec.positions, rows))))
    return RopeGpuConfig(rows, gpu.cdiv(heads, groups), 4 if rows * pairs >= 512 else 1)


def _strides(spec: RopeSpec, prefix: str, x: Any) -> dict[str, int]:
    """A tensor's own strides; JAX arrays, results and shapes have those of contiguous ones."""
    strides = [math.prod(x.shape[axis + 1 :]) for axis in range(3)]
    if gpu.framework(x) == "torch":
        strides = list(x.stride()[:3])
    head = 1 if spec.layout == "bhsd" else 2
    names = ("batch", "head", "position") if head == 1 else ("batch", "position", "head")
    return {f"{prefix}_{name}_stride": int(stride) for name, stride in zip(names, strides, strict=True)}


def _turn(spec: RopeSpec, config: RopeGpuConfig, arrays: Any, cos: Any, sin: Any, back: bool) -> list[Any]:
    query, key = arrays
    rows, heads = config.positions, spec.heads(query)
    groups, blocks = gpu.cdiv(heads, config.heads), gpu.cdiv(spec.positions, rows)
    rest = spec.head_dim - 2 * spec.pairs
    outputs = [None if x is None else gpu.result(x.shape, spec.operands.query.dtype) for x in arrays]
    strides: dict[str, int] = {}
    for name, x, out in (("query", query, outputs[0]), ("key", key, outputs[1])):
        # An absent key's strides are never used.
        strides |= _strides(spec, name, query if x is None else x)
        strides |= _strides(spec, f"{name}_out", query if out is None else out)
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
        query_heads=heads,
        query_share=config.heads,
        key_heads=0 if key is None else spec.heads(key),
        key_share=0 if key is None else gpu.cdiv(spec.heads(key), groups),
        BACK=back,
        INTERLEAVED=spec.interleaved,
        ROWS=rows,
        PAIRS=gpu.next_power_of_2(spec.pairs),
        REST=gpu.next_power_of_2(rest) if rest else 0,
        **strides,
    )


def forward(spec: RopeSpec, config: RopeGpuConfig, operands: Operands, residuals: bool) -> tuple[Outputs, None]:
    del residuals  # the backward pass needs none
    query, key = _turn(spec, config, operands[:2], operands.cos, operands.sin, False)
    return Outputs(query, key), None


def backward(
    spec: RopeSpec, config: RopeGpuConfig, operands: Operands, outputs: Outputs, residuals: None, cotangents: Outputs
) -> Operands:
    """The inverse rotation. Gradients of the tables, which XLA drops where nobody asks, are for JAX alone."""
    del outputs, residuals
    query, key = _turn(spec, config, tuple(cotangents), operands.cos, operands.sin, True)
    if gpu.framework(operands.cos) == "torch":
        return Operands(query, key, None, None)
    return Operands(query, key, *table_gradients(spec, operands, cotangents))


TRITON = Implementation("triton", "cuda", forward, backward, why_not, heuristic, RopeGpuConfig, torch_only=True)
