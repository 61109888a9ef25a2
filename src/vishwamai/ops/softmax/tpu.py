"""Softmax on TPU: each row is read and written once, forward and backward (Pallas).

A grid step holds whole rows in VMEM and walks them in chunks of one tile's height, like the normalizations. The backward pass reads the result (of
the logarithm: x) and its cotangent.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from vishwamai.core.errors import KernelError
from vishwamai.core.hardware import Chip
from vishwamai.core.op import Implementation
from vishwamai.core.pallas import TPU_DTYPES, planning_chip, round_up, sublanes, tiled_bytes, vmem_budget
from vishwamai.core.sharding import out_struct
from vishwamai.ops.softmax.reference import gradient_rows, softmax_rows
from vishwamai.ops.softmax.spec import Operands, Outputs, SoftmaxSpec

LANES = 128
_STEPS = 32
"""Steps of each core to aim at: the first load and the last store are then about two parts in fifty."""
_SMALLEST_TRANSFER, _LARGEST_TRANSFER = 512 << 10, 2 << 20
"""Bytes of one array's block: below, a transfer takes less than its latency of about 0.6 us; above, nothing is gained."""


@dataclasses.dataclass(frozen=True)
class SoftmaxConfig:
    """Tiles of the TPU kernel.

    Attributes:
      block_rows: rows that one grid step holds in VMEM.
      chunk_rows: rows that are worked on together; divides `block_rows`.
      vmem_bytes: what a step plans to use of VMEM, buffers and temporaries together.
    """

    block_rows: int
    chunk_rows: int
    vmem_bytes: int = 0

    def __post_init__(self) -> None:
        if self.block_rows < 1 or self.chunk_rows < 1 or self.chunk_rows % 8 or self.block_rows % self.chunk_rows:
            raise KernelError(
                f"SoftmaxConfig: chunk_rows is {self.chunk_rows} and block_rows {self.block_rows}; "
                "chunk_rows must be a multiple of 8, and block_rows one of chunk_rows."
            )

    def with_block_size(self, block_size: int) -> SoftmaxConfig:
        """The same with about `block_size` rows a step."""
        rows = round_up(block_size, self.chunk_rows)
        return dataclasses.replace(self, block_rows=rows, vmem_bytes=self.vmem_bytes * rows // self.block_rows)


def _row_bytes(spec: SoftmaxSpec) -> int:
    """VMEM that one row takes in the backward pass: two arrays in and one out, double buffered."""
    return 3 * 2 * round_up(spec.features, LANES) * spec.operands.x.dtype.itemsize


def _chunk_bytes(spec: SoftmaxSpec) -> int:
    """A chunk's float32 temporaries."""
    return 4 * tiled_bytes((sublanes(spec.operands.x.dtype), spec.features), jnp.float32)


def why_not(spec: SoftmaxSpec, chip: Chip | None) -> str | None:
    """The reason why this kernel cannot serve `spec`, or None."""
    x = spec.operands.x
    if x.dtype not in TPU_DTYPES:
        return f"`x` is {x.dtype.name}, and the TPU's vector unit computes in float32 and bfloat16."
    if x.size == 0:
        return "the array is empty."
    if spec.moved:
        return "`axis` is not the last: turning the array would cost two passes over memory, and XLA sums along any axis in place."
    need = _row_bytes(spec) * sublanes(x.dtype) + _chunk_bytes(spec)
    if need > vmem_budget(chip):
        return f"{sublanes(x.dtype)} rows of {spec.features} features take {need:,} bytes of VMEM, more than the {vmem_budget(chip):,} there are to plan with."
    return None


def heuristic(spec: SoftmaxSpec, chip: Chip | None) -> SoftmaxConfig:
    """As many rows as make a transfer worth its latency, but few enough that the first and the last, which nothing hides, are a small part."""
    chunk = sublanes(spec.operands.x.dtype)
    row = round_up(spec.features, LANES) * spec.operands.x.dtype.itemsize
    cores = planning_chip(chip).cores_per_device
    transfer = min(max(row * spec.groups * spec.rows // (cores * _STEPS), _SMALLEST_TRANSFER), _LARGEST_TRANSFER)
    by_memory = (vmem_budget(chip) - _chunk_bytes(spec)) // _row_bytes(spec)
    count = max(1, min(transfer // row, by_memory, round_up(spec.rows, chunk)) // chunk)
    rows = chunk << (count.bit_length() - 1)
    return SoftmaxConfig(rows, chunk, rows * _row_bytes(spec) + _chunk_bytes(spec))


def _call(spec: SoftmaxSpec, config: SoftmaxConfig, body: Any, name: str, *arrays: jax.Array) -> jax.Array:
    """Runs `body` on chunks of float32 rows of every array; its result has the first array's shape and dtype."""

    def kernel(*refs: Any) -> None:
        *sources, result = refs

        def chunk(i: jax.Array, carry: None) -> None:
            rows = pl.ds(pl.multiple_of(i * config.chunk_rows, config.chunk_rows), config.chunk_rows)
            result[rows, :] = body(*(ref[rows, :].astype(jnp.float32) for ref in sources)).astype(result.dtype)

        count = config.block_rows // config.chunk_rows
        lax.fori_loop(0, count, chunk, None, unroll=2 if count % 2 == 0 else 1)

    block = pl.BlockSpec((None, config.block_rows, spec.features), lambda g, i: (g, i, 0))
    wanted = round_up(config.vmem_bytes * 5 // 4, 1 << 20)
    x = arrays[0]
    return pl.pallas_call(
        kernel,
        grid=(spec.groups, pl.cdiv(spec.rows, config.block_rows)),
        in_specs=[block] * len(arrays),
        out_specs=block,
        out_shape=out_struct(x.shape, x.dtype, arrays),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel"),
            vmem_limit_bytes=wanted if wanted > 16 << 20 else None,
        ),
        cost_estimate=pl.CostEstimate(
            flops=spec.flops, bytes_accessed=(len(arrays) + 1) * x.nbytes, transcendentals=x.size
        ),
        name=name,
    )(*arrays)


def forward(spec: SoftmaxSpec, config: SoftmaxConfig, operands: Operands, residuals: bool) -> tuple[Outputs, None]:
    del residuals  # the backward pass needs none
    name = "log_softmax_forward" if spec.log else "softmax_forward"
    return Outputs(_call(spec, config, lambda x: softmax_rows(x, spec.log), name, operands.x)), None


def backward(
    spec: SoftmaxSpec,
    config: SoftmaxConfig,
    operands: Operands,
    outputs: Outputs,
    residuals: None,
    cotangents: Outputs,
) -> Operands:
    del residuals
    source = operands.x if spec.log else outputs.y
    name = "log_softmax_backward" if spec.log else "softmax_backward"
    return Operands(_call(spec, config, lambda s, dy: gradient_rows(s, dy, spec.log), name, source, cotangents.y))


PALLAS_TPU = Implementation("pallas_tpu", "tpu", forward, backward, why_not, heuristic, SoftmaxConfig)
