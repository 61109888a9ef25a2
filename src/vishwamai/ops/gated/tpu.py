"""The gated linear unit on TPU: both products of a tile of x in one step, the gate in the last one (Pallas).

The contracted axis is innermost; both float32 sums live in VMEM, and only the gated product goes to HBM (and both sums,
rounded, where a gradient will be asked for). Rows and columns past the end compute what is not stored; past the end of
the contracted axis both operands are zeroed, because what the memory holds there may be NaN. The gradient is
`tpu_backward`'s.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from vishwamai.core.activations import activate
from vishwamai.core.hardware import TpuChip
from vishwamai.core.op import Implementation
from vishwamai.core.pallas import TPU_DTYPES, by_rows, call, zero_past
from vishwamai.core.target import Target
from vishwamai.core.tpu_dequantize import widen
from vishwamai.core.types import AnyArray, Ref, Slice
from vishwamai.ops.gated.spec import GatedSpec, Operands, Outputs, Residuals
from vishwamai.ops.gated.tpu_backward import backward, served
from vishwamai.ops.gated.tpu_tiles import GatedConfig, clamped, heuristic


def why_not(spec: GatedSpec, target: Target) -> str | None:
    """The reason why this kernel cannot serve `spec`, or None."""
    if spec.operands.x.dtype not in TPU_DTYPES:
        return f"`x` is {spec.operands.x.dtype.name}, and the TPU computes in float32 and bfloat16."
    if 0 in (spec.groups, spec.m, spec.n, spec.k):
        return "an array is empty."
    if spec.quantized and target.tpu is not None and target.tpu.generation == 4 and _bound_by_memory(spec, target.tpu):
        return "`weights` are QTensors, and v4 converts them so slowly that two products by `gemm` are faster."
    return None


def _bound_by_memory(spec: GatedSpec, chip: TpuChip) -> bool:
    return spec.bytes_moved / chip.hbm_bandwidth > spec.flops / chip.peak(spec.operands.x.dtype.name)


def _kernel(
    x_ref: Ref,
    gate_ref: Ref,
    up_ref: Ref,
    gate_scale: Ref,
    up_scale: Ref,
    h_ref: Ref,
    keep_gate: Ref,
    keep_up: Ref,
    gate_sum: Ref,
    up_sum: Ref,
    *,
    spec: GatedSpec,
    block_k: int,
    gate_every_step: bool,
) -> None:
    """One step: both sums grow by one product; the last step, or every one, gates them.

    Blocks: x [block_m, block_k], gate and up [block_k, block_n], their scales [1, block_n] or None, all others
    [block_m, block_n]; `keep_gate` and `keep_up` take both products.
    """
    step, steps = pl.program_id(3), pl.cdiv(spec.k, block_k)
    tail = spec.k - (steps - 1) * block_k  # valid depth of the last step
    precision = lax.Precision.HIGHEST if spec.precision != "default" else None

    def scaled(gate: jax.Array, up: jax.Array) -> tuple[jax.Array, jax.Array]:
        return (gate, up) if gate_scale is None else (gate * gate_scale[...], up * up_scale[...])

    def grow(valid: int) -> None:
        sums = []
        x = x_ref[...]
        if valid != block_k:
            x = zero_past(x, 1, valid)  # memory past the end may be NaN, and so may that of the weights
        for w_ref, sum_ref in ((gate_ref, gate_sum), (up_ref, up_sum)):
            w = widen(w_ref[...], w_ref.dtype, x.dtype)
            if valid != block_k:
                w = zero_past(w, 0, valid)
            product = lax.dot_general(  # [block_m, block_n]
                x, w, (((1,), (0,)), ((), ())), preferred_element_type=jnp.float32, precision=precision
            )
            if steps > 1:
                before = sum_ref[...]
                product += jnp.where(step == 0, jnp.zeros_like(before), before)  # scratch holds anything before step 0
            sums.append(product)
            if sum_ref is not None:
                sum_ref[...] = product
        # Ungated sums give a wrong h until the last step, which writes over it: the gate then hides behind the
        # products.
        if gate_every_step:
            gate, up = scaled(*sums)
            h_ref[...] = (activate(spec.activation, gate) * up).astype(h_ref.dtype)
            if gate_sum is None and keep_gate is not None:
                keep_gate[...] = gate.astype(keep_gate.dtype)
                keep_up[...] = up.astype(keep_up.dtype)

    if tail == block_k or steps == 1:
        grow(tail if steps == 1 else block_k)
    else:
        pl.when(step < steps - 1)(lambda: grow(block_k))
        pl.when(step == steps - 1)(lambda: grow(tail))

    def finish(rows: Slice) -> None:
        gate, up = scaled(gate_sum[rows, :], up_sum[rows, :])  # [rows, block_n]
        if keep_gate is not None:
            keep_gate[rows, :] = gate.astype(keep_gate.dtype)
            keep_up[rows, :] = up.astype(keep_up.dtype)
        if not gate_every_step:
            h_ref[rows, :] = (activate(spec.activation, gate) * up).astype(h_ref.dtype)

    if gate_every_step and (keep_gate is None or gate_sum is None):
        return

    pl.when(step == steps - 1)(lambda: by_rows(gate_sum.shape[0], finish))  # a few rows at once fit in registers


def forward(
    spec: GatedSpec, config: GatedConfig, operands: Operands, residuals: bool
) -> tuple[Outputs, Residuals | None]:
    x, gate, up, joint, gate_scale, up_scale = operands
    bm, bn, bk = clamped((config.block_m, config.block_n, config.block_k), spec.m, spec.n, spec.k)

    def weights(part: int, w: AnyArray) -> pl.BlockSpec:
        per_group = w.shape[0] > 1
        if joint is None:
            return pl.BlockSpec((None, bk, bn), lambda g, i, j, r: (g if per_group else 0, r, j))
        # [G, 2, K, N]
        return pl.BlockSpec((None, None, bk, bn), lambda g, i, j, r: (g if per_group else 0, part, r, j))

    def per_column(scale: jax.Array | None) -> tuple[jax.Array, pl.BlockSpec] | None:
        if scale is None:
            return None
        per_group = scale.shape[0] > 1
        return scale[:, None], pl.BlockSpec((None, 1, bn), lambda g, i, j, r: (g if per_group else 0, 0, j))

    w_gate, w_up = (gate, up) if joint is None else (joint, joint)
    tile = pl.BlockSpec((None, bm, bn), lambda g, i, j, r: (g, i, j))
    out = ((spec.groups, spec.m, spec.n), x.dtype, tile)
    residual = out if residuals else None
    own_x = x.shape[0] > 1
    size = spec.groups * spec.m * spec.n
    total = None if bk == spec.k and config.gate_every_step else pltpu.VMEM((bm, bn), jnp.float32)
    h, kept_gate, kept_up = call(
        functools.partial(_kernel, spec=spec, block_k=bk, gate_every_step=config.gate_every_step),
        name="gated_linear_unit",
        grid=(spec.groups, pl.cdiv(spec.m, bm), pl.cdiv(spec.n, bn), pl.cdiv(spec.k, bk)),
        inputs=dict(
            x_ref=(x, pl.BlockSpec((None, bm, bk), lambda g, i, j, r: (g if own_x else 0, i, r))),
            gate_ref=(w_gate, weights(0, w_gate)),
            up_ref=(w_up, weights(1, w_up)),
            gate_scale=per_column(gate_scale),
            up_scale=per_column(up_scale),
        ),
        outputs=dict(h_ref=out, keep_gate=residual, keep_up=residual),
        scratch=dict(gate_sum=total, up_sum=total),
        semantics=("parallel", "parallel", "parallel", "arbitrary"),
        vmem_bytes=config.vmem_bytes,
        flops=spec.flops,
        bytes_accessed=spec.bytes_moved + (2 * size * x.dtype.itemsize if residuals else 0),
        transcendentals=0 if spec.activation in (None, "relu", "relu2") else size,
    )
    return Outputs(h), Residuals(kept_gate, kept_up) if residuals else None


def notes(spec: GatedSpec, target: Target) -> tuple[str, ...]:
    """What `explain` adds: who computes the gradient, how float32 is multiplied, where the kernel gains nothing."""
    lines = [] if served(spec, heuristic(spec, target)) else ["the gradient's products are XLA's own"]
    if spec.precision != "default":
        lines.append("float32 is multiplied by six bfloat16 products")
    chip = target.tpu
    if chip and not spec.quantized and _bound_by_memory(spec, chip):
        lines.append("memory bounds these products: XLA's own are as fast")
    return tuple(lines)


PALLAS_TPU = Implementation("pallas_tpu", "tpu", forward, backward, why_not, heuristic, GatedConfig, notes)
