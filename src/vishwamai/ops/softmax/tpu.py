"""Softmax on TPU: each row is read and written once, forward and backward (Pallas).

A grid step holds whole rows in VMEM and walks them in chunks of one tile's height, like the normalizations. The
backward pass reads the result (of the logarithm: x) and its cotangent.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from vishwamai.core.op import Implementation
from vishwamai.core.pallas import (
    LANES,
    LARGEST_TRANSFER,
    SMALLEST_TRANSFER,
    STEPS,
    TPU_DTYPES,
    RowTiles,
    call,
    planning_chip,
    round_up,
    sublanes,
    tiled_bytes,
    vmem_budget,
)
from vishwamai.core.target import Target
from vishwamai.core.types import Ref
from vishwamai.ops.softmax.reference import gradient_rows, softmax_rows
from vishwamai.ops.softmax.spec import Operands, Outputs, SoftmaxSpec


@dataclasses.dataclass(frozen=True)
class SoftmaxConfig(RowTiles):
    """Tiles of the TPU kernel."""

    def needs(self, spec: SoftmaxSpec, target: Target) -> dict[str, int]:
        return {"vmem_bytes": self.block_rows * _row_bytes(spec) + _chunk_bytes(spec, self.chunk_rows)}


def _row_bytes(spec: SoftmaxSpec) -> int:
    """VMEM that one row takes in the backward pass: two arrays in and one out, double buffered."""
    return 3 * 2 * round_up(spec.features, LANES) * spec.operands.x.dtype.itemsize


def _chunk_bytes(spec: SoftmaxSpec, chunk: int) -> int:
    """A chunk's float32 temporaries."""
    return 4 * tiled_bytes((chunk, spec.features), jnp.float32)


def why_not(spec: SoftmaxSpec, target: Target) -> str | None:
    """The reason why this kernel cannot serve `spec`, or None."""
    x = spec.operands.x
    if x.dtype not in TPU_DTYPES:
        return f"`x` is {x.dtype.name}, and the TPU's vector unit computes in float32 and bfloat16."
    if x.size == 0:
        return "the array is empty."
    if spec.transposed:
        return (
            "`axis` is not the last: turning the array would cost two passes over memory, and XLA sums along any axis "
            "in place."
        )
    need = _row_bytes(spec) * sublanes(x.dtype) + _chunk_bytes(spec, sublanes(x.dtype))
    if need > vmem_budget(target):
        return (
            f"{sublanes(x.dtype)} rows of {spec.features} features take {need:,} bytes of VMEM, more than the "
            f"{vmem_budget(target):,} there are to plan with."
        )
    return None


def heuristic(spec: SoftmaxSpec, target: Target) -> SoftmaxConfig:
    """As many rows as make a transfer worth its latency, but few enough that the first and the last, which nothing
    hides, are a small part.
    """
    chunk = sublanes(spec.operands.x.dtype)
    row = round_up(spec.features, LANES) * spec.operands.x.dtype.itemsize
    cores = planning_chip(target).cores_per_device
    transfer = min(max(row * spec.groups * spec.rows // (cores * STEPS), SMALLEST_TRANSFER), LARGEST_TRANSFER)
    by_memory = (vmem_budget(target) - _chunk_bytes(spec, chunk)) // _row_bytes(spec)
    count = max(1, min(transfer // row, by_memory, round_up(spec.rows, chunk)) // chunk)
    rows = chunk << (count.bit_length() - 1)  # chunks by a power of two
    return SoftmaxConfig(rows, chunk, rows * _row_bytes(spec) + _chunk_bytes(spec, chunk))


def _by_rows(
    spec: SoftmaxSpec, config: SoftmaxConfig, body: Callable[..., jax.Array], name: str, **arrays: jax.Array
) -> jax.Array:
    """Runs `body` on chunks of float32 rows of every array; its result has the first array's shape and dtype."""

    def kernel(y_ref: Ref, **sources: Ref) -> None:

        def chunk(i: jax.Array, carry: None) -> None:
            rows = pl.ds(pl.multiple_of(i * config.chunk_rows, config.chunk_rows), config.chunk_rows)
            values = [ref[rows, :].astype(jnp.float32) for ref in sources.values()]  # [chunk_rows, features]
            y_ref[rows, :] = body(*values).astype(y_ref.dtype)

        count = config.block_rows // config.chunk_rows
        # Two chunks at once: reductions of one overlap exponentials of the other.
        lax.fori_loop(0, count, chunk, None, unroll=2 if count % 2 == 0 else 1)

    block = pl.BlockSpec((None, config.block_rows, spec.features), lambda g, i: (g, i, 0))
    x = next(iter(arrays.values()))
    (y,) = call(
        kernel,
        name=name,
        grid=(spec.groups, pl.cdiv(spec.rows, config.block_rows)),
        inputs={ref: (array, block) for ref, array in arrays.items()},
        outputs=dict(y_ref=(x.shape, x.dtype, block)),
        semantics=("parallel", "parallel"),
        vmem_bytes=config.vmem_bytes,
        flops=spec.flops,
        bytes_accessed=(len(arrays) + 1) * x.nbytes,
        transcendentals=x.size,
    )
    return y


def forward(spec: SoftmaxSpec, config: SoftmaxConfig, operands: Operands) -> tuple[Outputs, None]:
    name = "log_softmax_forward" if spec.log else "softmax_forward"
    return Outputs(_by_rows(spec, config, lambda x: softmax_rows(x, spec.log), name, x_ref=operands.x)), None


def backward(
    spec: SoftmaxSpec,
    config: SoftmaxConfig,
    operands: Operands,
    outputs: Outputs,
    cotangents: Outputs,
) -> Operands:
    # The logarithm's result is rounded to the operands' dtype, and its exponential would be off: that starts from x.
    source = operands.x if spec.log else outputs.y
    name = "log_softmax_backward" if spec.log else "softmax_backward"
    slopes = functools.partial(gradient_rows, log=spec.log)
    return Operands(_by_rows(spec, config, slopes, name, source_ref=source, dy_ref=cotangents.y))


PALLAS_TPU = Implementation("pallas_tpu", "tpu", forward, backward, why_not, heuristic, SoftmaxConfig)
