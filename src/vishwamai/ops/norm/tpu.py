"""Normalization on TPU: one pass over HBM, forward and backward (Pallas).

A grid step holds whole rows in VMEM, so the statistics, the residual sum and the result come from one read. Inside a
step the rows are walked in chunks: those of narrow rows stay in registers between the reduction and the scaling; those
of wide rows do not fit there, and are taken from VMEM again, a few columns at a time, in each pass over a chunk. All of
it is straight code, so that reductions of one chunk overlap arithmetic of the next. The backward pass recomputes the
statistics from its input, which it reads anyway, instead of storing them; parameter gradients are kept as eight partial
rows per part of the grid and summed outside, so the parts may run on different cores.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from vishwamai.core.op import Implementation
from vishwamai.core.pallas import (
    call,
)
from vishwamai.core.types import AnyArray
from vishwamai.ops.norm.spec import NormSpec, Operands, Outputs
from vishwamai.ops.norm.tpu_kernels import backward_kernel, forward_kernel
from vishwamai.ops.norm.tpu_tiles import NormConfig, heuristic, why_not

if TYPE_CHECKING:
    import jax


def _centered(spec: NormSpec, config: NormConfig) -> Any:
    """Where a layer norm's chunks wait between two passes: two of them, so that neither waits for the other."""
    return pltpu.VMEM((2, config.chunk_rows, spec.features), jnp.float32) if spec.kind == "layer" else None


def _planned(config: NormConfig) -> int:
    """The plan of a step, or what makes the call claim `claimed_vmem_bytes`."""
    return max(config.vmem_bytes, config.claimed_vmem_bytes * 4 // 5)


def _parameter_rows(p: jax.Array | None) -> AnyArray:
    """A parameter `[G or 1, F]` as `[G or 1, 1, F]`, so that a block of one row is a whole axis; widened once, not in
    every chunk.
    """
    return None if p is None else p[:, None, :].astype(jnp.float32)


def forward(spec: NormSpec, config: NormConfig, operands: Operands) -> tuple[Outputs, None]:
    x, residual, scale, offset = operands
    rows = pl.BlockSpec((None, config.block_rows, spec.features), lambda g, i: (g, i, 0))

    def parameter(p: jax.Array | None) -> pl.BlockSpec | None:
        return (
            None
            if p is None
            else pl.BlockSpec(
                (None, 1, spec.features), (lambda g, i: (g, 0, 0)) if p.shape[0] > 1 else (lambda g, i: (0, 0, 0))
            )
        )

    like_x = (x.shape, x.dtype, rows)
    y, total = call(
        functools.partial(forward_kernel, spec=spec, config=config),
        name=f"{spec.kind}_norm_forward",
        grid=(spec.groups, pl.cdiv(spec.rows, config.block_rows)),
        inputs=dict(
            x_ref=(x, rows),
            residual_ref=(residual, rows),
            scale_ref=(_parameter_rows(scale), parameter(scale)),
            offset_ref=(_parameter_rows(offset), parameter(offset)),
        ),
        outputs=dict(y_ref=like_x, total_ref=None if residual is None else like_x),
        scratch=dict(centered_ref=_centered(spec, config)),
        semantics=("parallel", "parallel"),
        vmem_bytes=_planned(config),
        flops=spec.flops,
        bytes_accessed=spec.bytes_moved,
        transcendentals=spec.groups * spec.rows,
    )
    return Outputs(y, total), None


def backward(spec: NormSpec, config: NormConfig, operands: Operands, outputs: Outputs, cotangents: Outputs) -> Operands:
    x, residual, scale, offset = operands
    s = x if outputs.total is None else outputs.total
    blocks = pl.cdiv(spec.rows, config.block_rows)
    parts = 2 if blocks % 2 == 0 else 1  # one for each core of a megacore chip
    steps = blocks // parts
    rows = pl.BlockSpec((None, config.block_rows, spec.features), lambda g, p, i: (g, p * steps + i, 0))
    partial = pl.BlockSpec((None, None, 8, spec.features), lambda g, p, i: (g, p, 0, 0))
    partial_sums = ((spec.groups, parts, 8, spec.features), jnp.float32, partial)
    scale_spec = None
    if scale is not None:
        scale_spec = pl.BlockSpec(
            (None, 1, spec.features), (lambda g, p, i: (g, 0, 0)) if scale.shape[0] > 1 else (lambda g, p, i: (0, 0, 0))
        )
    dx, dscale, doffset = call(
        functools.partial(backward_kernel, spec=spec, config=config, steps=steps),
        name=f"{spec.kind}_norm_backward",
        grid=(spec.groups, parts, steps),
        inputs=dict(
            s_ref=(s, rows),
            dy_ref=(cotangents.y, rows),
            dtotal_ref=(cotangents.total, rows),
            scale_ref=(_parameter_rows(scale), scale_spec),
        ),
        outputs=dict(
            dx_ref=(x.shape, x.dtype, rows),
            dscale_ref=None if scale is None else partial_sums,
            doffset_ref=None if offset is None else partial_sums,
        ),
        scratch=dict(centered_ref=_centered(spec, config)),
        semantics=("parallel", "parallel", "arbitrary"),
        vmem_bytes=_planned(config),
        flops=2 * spec.flops,
        bytes_accessed=3 * x.nbytes,
        transcendentals=spec.groups * spec.rows,
    )

    def total_of(parts_of: AnyArray, p: AnyArray) -> AnyArray:
        if p is None:
            return None
        return jnp.sum(parts_of, axis=(1, 2) if p.shape[0] > 1 else (0, 1, 2)).reshape(p.shape).astype(p.dtype)

    return Operands(dx, None if residual is None else dx, total_of(dscale, scale), total_of(doffset, offset))


PALLAS_TPU = Implementation("pallas_tpu", "tpu", forward, backward, why_not, heuristic, NormConfig)
