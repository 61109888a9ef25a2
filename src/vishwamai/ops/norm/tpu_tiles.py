"""Tiles of the TPU normalization: how many rows a step holds and how many it works on together."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp

from vishwamai.core.pallas import (
    LANES,
    LARGEST_TRANSFER,
    SMALLEST_TRANSFER,
    STEPS,
    TPU_DTYPES,
    RowTiles,
    planning_chip,
    round_up,
    sublanes,
    tiled_bytes,
    vmem_budget,
)
from vishwamai.core.target import Target
from vishwamai.ops.norm.spec import NormSpec

NARROW, _NARROW_CHUNK, _WIDE_CHUNK = 1024, 128 << 10, 64 << 10
"""Features up to which rows are narrow, and elements of a chunk of narrow and of wide rows: wide ones spill sooner."""
_FEWEST_STEPS = 4
"""Steps that longer transfers leave a small array."""
_TRANSFER_SECONDS = 1.2e-6
"""Time of one array's block: below, the latency of a transfer, about 0.6 us, shows. Fast chips gain by longer ones."""
_CLAIMED_VMEM = {64 << 20: 48 << 20}
"""Of this much VMEM (v5p, TPU7x), the bytes to claim: a call that leaves them free has XLA copy an operand there first,
which nothing hides; 10 to 25 % on v5p by the schedule. Chips with more or less of it showed no such copy.
"""


@dataclasses.dataclass(frozen=True)
class NormConfig(RowTiles):
    """Tiles of the TPU kernel.

    Attributes:
      claimed_vmem_bytes: bytes of VMEM that the call claims at least.
    """

    claimed_vmem_bytes: int = 0

    def needs(self, spec: NormSpec, target: Target) -> dict[str, int]:
        return {"vmem_bytes": self.block_rows * _row_bytes(spec) + _fixed_bytes(spec, self.chunk_rows)}


def _row_bytes(spec: NormSpec) -> int:
    """VMEM that one row takes in the worse of the two passes: x, dy, dtotal in and dx out, double buffered."""
    arrays = 4 if spec.operands.residual is not None else 3
    return arrays * 2 * round_up(spec.features, LANES) * spec.operands.x.dtype.itemsize


def why_not(spec: NormSpec, target: Target) -> str | None:
    """The reason why this kernel cannot serve `spec`, or None."""
    for name, operand in zip(spec.operands._fields, spec.operands, strict=True):
        if operand is not None and operand.dtype not in TPU_DTYPES:
            return f"`{name}` is {operand.dtype.name}, and the TPU's vector unit computes in float32 and bfloat16."
    if spec.groups * spec.rows == 0:
        return "the array is empty."
    need = _row_bytes(spec) * _chunk(spec) + _fixed_bytes(spec, _chunk(spec))
    if need > vmem_budget(target):
        return (
            f"{_chunk(spec)} rows of {spec.features} features take {need:,} bytes of VMEM, more than the "
            f"{vmem_budget(target):,} there are to plan with."
        )
    return None


def _tile_rows(spec: NormSpec) -> int:
    """Rows of a memory tile: the fewest that a chunk can have."""
    return max(sublanes(operand.dtype) for operand in spec.operands if operand is not None and len(operand.shape) == 3)


def _chunk(spec: NormSpec) -> int:
    """Enough rows to hide the latency of their reductions, few enough not to spill: by the schedule, 1024 of 128
    features, 128 of 768, 16 of 4096.
    """
    features = round_up(spec.features, LANES)
    rows = min((_NARROW_CHUNK if features <= NARROW else _WIDE_CHUNK) // features, spec.rows)
    return max(_tile_rows(spec), 1 << max(0, rows.bit_length() - 1))


def _fixed_bytes(spec: NormSpec, chunk: int) -> int:
    """Parameters and their gradients, and float32 temporaries of a chunk, the waiting ones among them."""
    return 8 * tiled_bytes((8, spec.features), jnp.float32) + 6 * tiled_bytes((chunk, spec.features), jnp.float32)


def heuristic(spec: NormSpec, target: Target) -> NormConfig:
    """As many rows as make a transfer worth its latency, but few enough that the first and the last, which nothing
    hides, are a small part.
    """
    chunk = _chunk(spec)
    row = round_up(spec.features, LANES) * spec.operands.x.dtype.itemsize
    planned = planning_chip(target)
    cores = planned.cores_per_device
    smallest = max(SMALLEST_TRANSFER, int(planned.hbm_bandwidth_per_device * _TRANSFER_SECONDS) // cores)
    share = row * spec.groups * spec.rows // cores
    transfer = max(min(share // STEPS, LARGEST_TRANSFER), min(smallest, share // _FEWEST_STEPS), SMALLEST_TRANSFER)
    by_memory = (vmem_budget(target) - _fixed_bytes(spec, chunk)) // _row_bytes(spec)
    rows = max(1, min(transfer // row, by_memory, round_up(spec.rows, chunk)) // chunk)
    # A power of two, so that the usual numbers of rows divide into an even number of even steps: two cores, and two
    # chunks at a time.
    rows = chunk << (rows.bit_length() - 1)
    plan = rows * _row_bytes(spec) + _fixed_bytes(spec, chunk)
    return NormConfig(rows, chunk, plan, _CLAIMED_VMEM.get(planned.vmem_bytes, 0))
