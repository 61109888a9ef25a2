"""The soft limit on TPU (Pallas): a grid step holds whole rows in VMEM, forward and backward."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from toy_ops.soft_clip.spec import Operands, Outputs, SoftClipSpec
from vishwamai.core.op import Implementation
from vishwamai.core.pallas import TPU_DTYPES, VmemTiles, call, round_up, sublanes, vmem_budget
from vishwamai.core.target import Target
from vishwamai.core.tiles import size

_BLOCK_BYTES = 1 << 20
"""Of one array, in float32."""


@dataclasses.dataclass(frozen=True)
class SoftClipConfig(VmemTiles):
    """`block_rows` is what a grid step holds in VMEM."""

    block_rows: int = size("rows", block_size=lambda tiles, n: round_up(n, 16))
    vmem_bytes: int = 0

    def needs(self, spec: SoftClipSpec, target: Target) -> dict[str, int]:
        return {"vmem_bytes": self.block_rows * _row_bytes(spec)}


def _row_bytes(spec: SoftClipSpec) -> int:
    """Five arrays of the backward pass, double buffered, and two temporaries, in float32."""
    return 4 * round_up(spec.features, 128) * (2 * 5 + 2)


def why_not(spec: SoftClipSpec, target: Target) -> str | None:
    x = spec.operands.x
    if x.dtype not in TPU_DTYPES:
        return f"`x` is {x.dtype.name}, and the TPU's vector unit computes in float32 and bfloat16."
    if x.size == 0:
        return "the array is empty."
    need = sublanes(x.dtype) * _row_bytes(spec)
    return None if need <= vmem_budget(target) else f"rows of {spec.features} features take {need:,} bytes of VMEM."


def heuristic(spec: SoftClipSpec, target: Target) -> SoftClipConfig:
    unit = sublanes(spec.operands.x.dtype)
    rows = max(unit, min(_BLOCK_BYTES // (4 * spec.features), spec.rows) // unit * unit)
    return SoftClipConfig(rows, rows * _row_bytes(spec))


def _by_rows(
    spec: SoftClipSpec, config: SoftClipConfig, body: Callable[..., Any], name: str, results: int, **inputs: Any
) -> tuple[jax.Array, ...]:
    """Runs `body` on blocks of rows in float32; its results are like `x`."""
    x = spec.operands.x

    def kernel(**refs: Any) -> None:
        made = [refs.pop(f"y{i}_ref") for i in range(results)]
        values = {name: None if ref is None else ref[...].astype(jnp.float32) for name, ref in refs.items()}
        for y_ref, y in zip(made, body(**values), strict=True):
            y_ref[...] = y.astype(y_ref.dtype)

    block = pl.BlockSpec((None, config.block_rows, spec.features), lambda g, i: (g, i, 0))
    return call(
        kernel,
        name=name,
        grid=(spec.groups, pl.cdiv(spec.rows, config.block_rows)),
        inputs={name: (array, block) for name, array in inputs.items()},
        outputs={f"y{i}_ref": (x.shape, x.dtype, block) for i in range(results)},
        semantics=("parallel", "parallel"),
        vmem_bytes=config.vmem_bytes,
        flops=spec.flops,
        bytes_accessed=spec.bytes_moved,
        transcendentals=x.size,
    )


def forward(spec: SoftClipSpec, config: SoftClipConfig, operands: Operands) -> tuple[Outputs, None]:

    def body(x: jax.Array, gain: jax.Array | None) -> tuple[jax.Array]:
        y = spec.limit * jnp.tanh(x / spec.limit)
        return (y if gain is None else y * gain,)

    return Outputs(*_by_rows(spec, config, body, "soft_clip_forward", 1, x=operands.x, gain=operands.gain)), None


def backward(
    spec: SoftClipSpec,
    config: SoftClipConfig,
    operands: Operands,
    cotangents: Outputs,
) -> Operands:

    def body(x: jax.Array, gain: jax.Array | None, dy: jax.Array) -> tuple[jax.Array, ...]:
        t = jnp.tanh(x / spec.limit)
        slope = dy * (1 - t) * (1 + t)
        return (slope,) if gain is None else (slope * gain, dy * spec.limit * t)

    x, gain = operands
    count = 1 if gain is None else 2
    return Operands(
        *_by_rows(spec, config, body, "soft_clip_backward", count, x=x, gain=gain, dy=cotangents.y),
        *[None] * (2 - count),
    )


PALLAS_TPU = Implementation("pallas_tpu", "tpu", forward, backward, why_not, heuristic, SoftClipConfig)
