"""Normalization on TPU: one pass over HBM, forward and backward (Pallas).

A grid step holds whole rows in VMEM, so the statistics, the residual sum and the result come from one read. Inside a step the rows are walked in
chunks: those of narrow rows stay in registers between the reduction and the scaling; those of wide rows do not fit there, and are taken from VMEM
again, a few columns at a time, in each pass over a chunk. All of it is straight code, so that one chunk's reductions wait beside another's arithmetic.
The backward pass recomputes the
statistics from its input, which it reads anyway, instead of storing them; parameter gradients are kept as eight partial rows per part of the grid and
summed outside, so the parts may run on different cores.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from vishwamai.core.errors import KernelError
from vishwamai.core.hardware import Chip
from vishwamai.core.op import Implementation
from vishwamai.core.pallas import (
    TPU_DTYPES,
    planning_chip,
    round_up,
    sublanes,
    tiled_bytes,
    vmem_budget,
)
from vishwamai.core.sharding import out_struct
from vishwamai.ops.norm.spec import NormSpec, Operands, Outputs

LANES = 128
_NARROW, _NARROW_CHUNK, _WIDE_CHUNK = 1024, 128 << 10, 64 << 10
"""Features up to which rows are narrow, and elements of a chunk of narrow and of wide rows: wide ones spill sooner."""
_SLABS = 64
"""Parts that wide rows are taken in at most (each is code of its own)."""
_STEPS = 32
"""Steps of each core to aim at: the first load and the last store are then about two parts in fifty."""
_FEWEST_STEPS = 4
"""Steps that longer transfers leave a small array."""
_SMALLEST_TRANSFER, _LARGEST_TRANSFER = 512 << 10, 2 << 20
_TRANSFER_SECONDS = 1.2e-6
"""Bytes and time of one array's block: below, the latency of a transfer, about 0.6 us, shows beside it; above, nothing is gained but on fast chips."""
_CLAIMED_VMEM = {64 << 20: 48 << 20}
"""Of this much VMEM (v5p, TPU7x), the bytes to claim: a call that leaves them free has XLA copy an operand there first, which nothing hides; 10 to 25 % on
v5p by the schedule. Chips with more or less of it showed no such copy."""


@dataclasses.dataclass(frozen=True)
class NormConfig:
    """Tiles of the TPU kernel.

    Attributes:
      block_rows: rows that one grid step holds in VMEM.
      chunk_rows: rows that are normalized together in registers, a multiple of 8; divides `block_rows`.
      vmem_bytes: what a step plans to use of VMEM, buffers and temporaries together.
      claimed_vmem_bytes: what the call claims of VMEM at least.

    Raises:
      KernelError: rows of a block would be left over.
    """

    block_rows: int
    chunk_rows: int
    vmem_bytes: int = 0
    claimed_vmem_bytes: int = 0

    def __post_init__(self) -> None:
        if self.block_rows < 1 or self.chunk_rows < 1 or self.chunk_rows % 8 or self.block_rows % self.chunk_rows:
            raise KernelError(
                f"NormConfig: chunk_rows is {self.chunk_rows} and block_rows {self.block_rows}; "
                "chunk_rows must be a multiple of 8, and block_rows one of chunk_rows."
            )

    def with_block_size(self, block_size: int) -> NormConfig:
        """The same with about `block_size` rows a step."""
        rows = round_up(block_size, self.chunk_rows)
        return dataclasses.replace(self, block_rows=rows, vmem_bytes=self.vmem_bytes * rows // self.block_rows)


def _row_bytes(spec: NormSpec) -> int:
    """VMEM that one row takes in the worse of the two passes: x, dy, dtotal in and dx out, double buffered."""
    arrays = 4 if spec.operands.residual is not None else 3
    return arrays * 2 * round_up(spec.features, LANES) * spec.operands.x.dtype.itemsize


def why_not(spec: NormSpec, chip: Chip | None) -> str | None:
    """The reason why this kernel cannot serve `spec`, or None."""
    for name, operand in zip(spec.operands._fields, spec.operands, strict=True):
        if operand is not None and operand.dtype not in TPU_DTYPES:
            return f"`{name}` is {operand.dtype.name}, and the TPU's vector unit computes in float32 and bfloat16."
    if spec.groups * spec.rows == 0:
        return "the array is empty."
    need = _row_bytes(spec) * _chunk(spec) + _fixed_bytes(spec)
    if need > vmem_budget(chip):
        return f"{_chunk(spec)} rows of {spec.features} features take {need:,} bytes of VMEM, more than the {vmem_budget(chip):,} there are to plan with."
    return None


def _tile_rows(spec: NormSpec) -> int:
    """Rows of a memory tile: the fewest that a chunk can have."""
    return max(sublanes(operand.dtype) for operand in spec.operands if operand is not None and len(operand.shape) == 3)


def _chunk(spec: NormSpec) -> int:
    """Enough rows to hide the latency of their reductions, few enough not to spill: by the schedule, 1024 of 128 features, 128 of 768, 16 of 4096."""
    features = round_up(spec.features, LANES)
    rows = min((_NARROW_CHUNK if features <= _NARROW else _WIDE_CHUNK) // features, spec.rows)
    return max(_tile_rows(spec), 1 << max(0, rows.bit_length() - 1))


def _fixed_bytes(spec: NormSpec) -> int:
    """Parameters and their gradients, and float32 temporaries of a chunk, the waiting ones among them."""
    return 8 * tiled_bytes((8, spec.features), jnp.float32) + 6 * tiled_bytes(
        (_chunk(spec), spec.features), jnp.float32
    )


def heuristic(spec: NormSpec, chip: Chip | None) -> NormConfig:
    """As many rows as make a transfer worth its latency, but few enough that the first and the last, which nothing hides, are a small part."""
    chunk = _chunk(spec)
    row = round_up(spec.features, LANES) * spec.operands.x.dtype.itemsize
    planned = planning_chip(chip)
    cores = planned.cores_per_device
    smallest = max(_SMALLEST_TRANSFER, int(planned.hbm_bandwidth_per_device * _TRANSFER_SECONDS) // cores)
    share = row * spec.groups * spec.rows // cores
    transfer = max(min(share // _STEPS, _LARGEST_TRANSFER), min(smallest, share // _FEWEST_STEPS), _SMALLEST_TRANSFER)
    by_memory = (vmem_budget(chip) - _fixed_bytes(spec)) // _row_bytes(spec)
    rows = max(1, min(transfer // row, by_memory, round_up(spec.rows, chunk)) // chunk)
    # A power of two, so that the usual numbers of rows divide into an even number of even steps: two cores, and two chunks at a time.
    rows = chunk << (rows.bit_length() - 1)
    plan = rows * _row_bytes(spec) + _fixed_bytes(spec)
    return NormConfig(rows, chunk, plan, _CLAIMED_VMEM.get(planned.vmem_bytes, 0))


# --- Kernel bodies ---------------------------------------------------------------------------------------------------------------------------------


def _slabs(spec: NormSpec) -> list[Any]:
    """The columns of one slab after the other: all of narrow rows, a lane tile or a few of wide ones."""
    width = spec.features if spec.features <= _NARROW else round_up(pl.cdiv(spec.features, _SLABS), LANES)
    return [pl.ds(at, min(width, spec.features - at)) for at in range(0, spec.features, width)]


class _RowSum:
    """A sum over the columns: slabs are added as they come, and the lanes of what they add up to at the end. A narrower last slab stays apart."""

    def __init__(self) -> None:
        self._parts: dict[int, jax.Array] = {}

    def add(self, slab: jax.Array) -> None:
        """Adds `[chunk, width]`."""
        width = slab.shape[1]
        self._parts[width] = self._parts[width] + slab if width in self._parts else slab

    def rows(self) -> jax.Array:
        """The sums, `[chunk, 1]`."""
        first, *rest = (jnp.sum(part, axis=-1, keepdims=True) for part in self._parts.values())
        return first + rest[0] if rest else first


def _for_chunks(config: NormConfig, body: Any) -> None:
    """Calls `body(rows, k)` for every chunk, two (k = 0, 1) in a turn of the loop where they are even."""
    count = config.block_rows // config.chunk_rows
    together = 2 if count % 2 == 0 else 1

    def step(i: jax.Array, carry: None) -> None:
        for k in range(together):
            start = pl.multiple_of((i * together + k) * config.chunk_rows, config.chunk_rows)
            body(pl.ds(start, config.chunk_rows), k)
        return carry

    lax.fori_loop(0, count // together, step, None)


class _Centered:
    """A chunk of rows less their mean (of a layer norm; the rows as they are of an RMS norm), by slabs.

    What was centered waits in VMEM, in half `k` of `centered_ref`, which spares the next pass the widening and the subtraction.
    """

    def __init__(self, spec: NormSpec, ref: Any, rows: Any, centered_ref: Any, k: int):
        self.ref, self.rows, self.centered_ref, self.k = ref, rows, centered_ref, k
        self.mean = None
        if spec.kind == "layer":
            total = _RowSum()
            for columns in _slabs(spec):
                total.add(self._read(columns))
            self.mean = total.rows() * (1.0 / spec.features)

    def _read(self, columns: Any) -> jax.Array:
        return self.ref[self.rows, columns].astype(jnp.float32)

    def first(self, columns: Any) -> jax.Array:
        """`[chunk, width]`, when it is needed first."""
        s = self._read(columns)
        if self.mean is None:
            return s
        s = s - self.mean
        self.centered_ref[self.k, :, columns] = s
        return s

    def again(self, columns: Any) -> jax.Array:
        """The same later."""
        return self._read(columns) if self.mean is None else self.centered_ref[self.k, :, columns]


def _forward_kernel(refs: Any, *, spec: NormSpec, config: NormConfig) -> None:
    x_ref, residual_ref, scale_ref, offset_ref, y_ref, total_ref, centered_ref = refs
    slabs = _slabs(spec)

    def chunk(rows: Any, k: int) -> None:
        if residual_ref is not None:
            for columns in slabs:
                # Added in float32 and rounded once, which is what adding in the array's own dtype gives.
                total = x_ref[rows, columns].astype(jnp.float32) + residual_ref[rows, columns].astype(jnp.float32)
                total_ref[rows, columns] = total.astype(total_ref.dtype)
        source = _Centered(spec, x_ref if residual_ref is None else total_ref, rows, centered_ref, k)
        squares = _RowSum()
        for columns in slabs:
            s = source.first(columns)
            squares.add(s * s)
        rstd = lax.rsqrt(squares.rows() * (1.0 / spec.features) + spec.eps)  # [chunk, 1]
        for columns in slabs:
            y = source.again(columns) * rstd
            if scale_ref is not None:
                y = y * scale_ref[:, columns]
            if offset_ref is not None:
                y = y + offset_ref[:, columns]
            y_ref[rows, columns] = y.astype(y_ref.dtype)

    _for_chunks(config, chunk)


def _backward_kernel(refs: Any, *, spec: NormSpec, config: NormConfig, steps: int) -> None:
    """With c = s - mean and g = dy * scale: dx = rstd * (g - c * (rstd^2 * mean(g * c)) - mean(g)), the last for a layer norm."""
    s_ref, dy_ref, dtotal_ref, scale_ref, dx_ref, dscale_ref, doffset_ref, centered_ref = refs
    part, step = pl.program_id(1), pl.program_id(2)
    first_row = (part * steps + step) * config.block_rows
    inverse, slabs = 1.0 / spec.features, _slabs(spec)

    @pl.when(step == 0)
    def _() -> None:
        for ref in (dscale_ref, doffset_ref):
            if ref is not None:
                ref[...] = jnp.zeros_like(ref)

    def partial_rows(values: jax.Array, rows: Any) -> jax.Array:
        """Sums `[chunk, width]` to eight rows; rows past the end of the array hold anything and count as zero."""
        if spec.rows % config.block_rows:
            index = first_row + rows.start + lax.broadcasted_iota(jnp.int32, values.shape, 0)
            values = jnp.where(index < spec.rows, values, 0.0)
        return jnp.sum(values.reshape(config.chunk_rows // 8, 8, values.shape[1]), axis=0)

    def chunk(rows: Any, k: int) -> None:
        source = _Centered(spec, s_ref, rows, centered_ref, k)
        squares, products, sums = _RowSum(), _RowSum(), _RowSum()
        for columns in slabs:
            s, g = source.first(columns), dy_ref[rows, columns].astype(jnp.float32)
            if scale_ref is not None:
                g = g * scale_ref[:, columns]
            squares.add(s * s)
            products.add(g * s)
            if source.mean is not None:
                sums.add(g)
        rstd = lax.rsqrt(squares.rows() * inverse + spec.eps)  # [chunk, 1]
        slope = products.rows() * inverse * (rstd * rstd)
        if source.mean is None:
            slope, shift = slope * rstd, None
        else:
            shift = sums.rows() * inverse
        for columns in slabs:
            s, dy = source.again(columns), dy_ref[rows, columns].astype(jnp.float32)
            normed = dy * rstd
            if dscale_ref is not None:
                dscale_ref[:, columns] += partial_rows(normed * s, rows)
            if doffset_ref is not None:
                doffset_ref[:, columns] += partial_rows(dy, rows)
            g = normed if shift is None else dy
            if scale_ref is not None:
                g = g * scale_ref[:, columns]
            dx = g - s * slope
            if shift is not None:  # scaled last: gradients that cancel do so exactly, however large rstd is
                dx = (dx - shift) * rstd
            if dtotal_ref is not None:
                dx = dx + dtotal_ref[rows, columns].astype(jnp.float32)
            dx_ref[rows, columns] = dx.astype(dx_ref.dtype)

    _for_chunks(config, chunk)


# --- Calls -----------------------------------------------------------------------------------------------------------------------------------------


def _call(
    body: Any,
    operands: tuple[Any, ...],
    specs: tuple[Any, ...],
    outs: tuple[Any, ...],
    out_specs: tuple[Any, ...],
    scratch: Any,
    **kwargs: Any,
) -> list[Any]:
    """`pallas_call` with optional operands, outputs and scratch: absent ones are None everywhere, and arrive as None refs."""
    present = [x is not None for x in (*operands, *outs, scratch)]

    def kernel(*refs: Any) -> None:
        remaining = iter(refs)
        body([next(remaining) if here else None for here in present])

    def given(values: tuple[Any, ...], mask: tuple[Any, ...]) -> list[Any]:
        return [value for value, operand in zip(values, mask, strict=True) if operand is not None]

    results = iter(
        pl.pallas_call(
            kernel,
            in_specs=given(specs, operands),
            out_specs=given(out_specs, outs),
            out_shape=given(outs, outs),
            scratch_shapes=[] if scratch is None else [scratch],
            **kwargs,
        )(*given(operands, operands))
    )
    return [None if out is None else next(results) for out in outs]


def _compiler_params(config: NormConfig, *dimension_semantics: str) -> pltpu.CompilerParams:
    """The VMEM limit is raised where the plan, made for the chip, needs more than the 16 MiB that every chip gives unasked."""
    wanted = max(round_up(config.vmem_bytes * 5 // 4, 1 << 20), config.claimed_vmem_bytes)
    return pltpu.CompilerParams(
        dimension_semantics=dimension_semantics,  # type: ignore[arg-type]
        vmem_limit_bytes=wanted if wanted > 16 << 20 else None,
    )


def _centered(spec: NormSpec, config: NormConfig) -> Any:
    """Where a layer norm's chunks wait between two passes: two of them, so that neither waits for the other."""
    return pltpu.VMEM((2, config.chunk_rows, spec.features), jnp.float32) if spec.kind == "layer" else None


def _parameter_rows(p: Any) -> Any:
    """A parameter `[G or 1, F]` as `[G or 1, 1, F]`, so that a block of one row is a whole axis; widened once, not in every chunk."""
    return None if p is None else p[:, None, :].astype(jnp.float32)


def forward(spec: NormSpec, config: NormConfig, operands: Operands, residuals: bool) -> tuple[Outputs, None]:
    del residuals  # the backward pass needs none
    x, residual, scale, offset = operands
    rows = pl.BlockSpec((None, config.block_rows, spec.features), lambda g, i: (g, i, 0))

    def parameter(p: Any) -> pl.BlockSpec | None:
        return (
            None
            if p is None
            else pl.BlockSpec(
                (None, 1, spec.features), (lambda g, i: (g, 0, 0)) if p.shape[0] > 1 else (lambda g, i: (0, 0, 0))
            )
        )

    like_x = out_struct(x.shape, x.dtype, operands)
    y, total = _call(
        functools.partial(_forward_kernel, spec=spec, config=config),
        (x, residual, _parameter_rows(scale), _parameter_rows(offset)),
        (rows, rows, parameter(scale), parameter(offset)),
        (like_x, None if residual is None else like_x),
        (rows, rows),
        _centered(spec, config),
        grid=(spec.groups, pl.cdiv(spec.rows, config.block_rows)),
        compiler_params=_compiler_params(config, "parallel", "parallel"),
        cost_estimate=pl.CostEstimate(
            flops=spec.flops, bytes_accessed=spec.bytes_moved, transcendentals=spec.groups * spec.rows
        ),
        name=f"{spec.kind}_norm_forward",
    )
    return Outputs(y, total), None


def backward(
    spec: NormSpec, config: NormConfig, operands: Operands, outputs: Outputs, residuals: None, cotangents: Outputs
) -> Operands:
    del residuals
    x, residual, scale, offset = operands
    s = x if outputs.total is None else outputs.total
    blocks = pl.cdiv(spec.rows, config.block_rows)
    parts = 2 if blocks % 2 == 0 else 1  # one for each core of a megacore chip
    steps = blocks // parts
    rows = pl.BlockSpec((None, config.block_rows, spec.features), lambda g, p, i: (g, p * steps + i, 0))
    partial = pl.BlockSpec((None, None, 8, spec.features), lambda g, p, i: (g, p, 0, 0))
    partial_struct = out_struct((spec.groups, parts, 8, spec.features), jnp.float32, operands, cotangents)
    scale_spec = None
    if scale is not None:
        scale_spec = pl.BlockSpec(
            (None, 1, spec.features), (lambda g, p, i: (g, 0, 0)) if scale.shape[0] > 1 else (lambda g, p, i: (0, 0, 0))
        )
    dx, dscale, doffset = _call(
        functools.partial(_backward_kernel, spec=spec, config=config, steps=steps),
        (s, cotangents.y, cotangents.total, _parameter_rows(scale)),
        (rows, rows, rows, scale_spec),
        (
            out_struct(x.shape, x.dtype, operands, cotangents),
            None if scale is None else partial_struct,
            None if offset is None else partial_struct,
        ),
        (rows, partial, partial),
        _centered(spec, config),
        grid=(spec.groups, parts, steps),
        compiler_params=_compiler_params(config, "parallel", "parallel", "arbitrary"),
        cost_estimate=pl.CostEstimate(
            flops=2 * spec.flops, bytes_accessed=3 * x.nbytes, transcendentals=spec.groups * spec.rows
        ),
        name=f"{spec.kind}_norm_backward",
    )

    def total_of(parts_of: Any, p: Any) -> Any:
        if p is None:
            return None
        return jnp.sum(parts_of, axis=(1, 2) if p.shape[0] > 1 else (0, 1, 2)).reshape(p.shape).astype(p.dtype)

    return Operands(dx, None if residual is None else dx, total_of(dscale, scale), total_of(doffset, offset))


PALLAS_TPU = Implementation("pallas_tpu", "tpu", forward, backward, why_not, heuristic, NormConfig)
