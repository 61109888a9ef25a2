"""The gradient of the gated linear unit on TPU, in two kernels (Pallas).

The first forms the gradients of both products, tile by tile, and multiplies them at once by the weights for dx; it
stores them for the second one, which multiplies x by them for the weights' gradients. So what lies between HBM and the
products hides behind the matrix unit, and x and the weights are read once for both products.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from vishwamai.core.pallas import by_rows, call, dot, zero_past
from vishwamai.core.types import AnyArray, Ref, Slice
from vishwamai.ops.gated import reference
from vishwamai.ops.gated.spec import GatedSpec, Operands, Outputs, Residuals
from vishwamai.ops.gated.tpu_tiles import GatedConfig, clamped


def served(spec: GatedSpec, config: GatedConfig) -> bool:
    """Whether these kernels have the gradient; XLA has it otherwise."""
    operands = [operand for operand in spec.operands if operand is not None]
    unshared = all(operand.shape[0] == spec.groups for operand in operands)  # none is summed over groups that share it
    return unshared and not spec.quantized and config.grad_x is not None and config.grad_w is not None


def backward(
    spec: GatedSpec,
    config: GatedConfig,
    operands: Operands,
    residuals: Residuals,
    cotangents: Outputs,
) -> Operands:
    """Gradients of all operands."""
    if not served(spec, config):
        return reference.backward(spec, operands, residuals, cotangents)
    dx, d_gate, d_up = _grad_x(spec, config, operands, residuals, cotangents.h)
    return Operands(dx, *_grad_w(spec, config, operands, d_gate, d_up))


def _precision(spec: GatedSpec) -> lax.Precision | None:
    return lax.Precision.HIGHEST if spec.precision != "default" else None


def _grad_x_kernel(
    gate_ref: Ref,
    up_ref: Ref,
    dh_ref: Ref,
    w_gate_ref: Ref,
    w_up_ref: Ref,
    dx_ref: Ref,
    d_gate_ref: Ref,
    d_up_ref: Ref,
    sum_ref: Ref,
    *,
    spec: GatedSpec,
    block_n: int,
) -> None:
    """One step: the slopes of a tile of hidden units, and what they add to dx.

    Blocks: the weights [block_k, block_n], dx and its sum [block_m, block_k], all others [block_m, block_n].
    """
    step, steps = pl.program_id(3), pl.cdiv(spec.n, block_n)
    tail = spec.n - (steps - 1) * block_n

    def grow(valid: int) -> None:
        pair = reference.slopes(spec, Residuals(gate_ref[...], up_ref[...]), dh_ref[...])  # [block_m, block_n] each
        products = []
        for d, w_ref, d_ref in zip(pair, (w_gate_ref, w_up_ref), (d_gate_ref, d_up_ref), strict=True):
            d_ref[...] = d  # for the gradient of the weights, which reads it again
            w = w_ref[...]
            if valid != block_n:
                d, w = zero_past(d, 1, valid), zero_past(w, 1, valid)
            products.append(dot(d, w, (1, 1), precision=_precision(spec)))  # [block_m, block_k]
        product = products[0] + products[1]  # dx = d_gate W_gate^T + d_up W_up^T
        if steps == 1:
            dx_ref[...] = product.astype(dx_ref.dtype)
            return
        before = sum_ref[...]
        sum_ref[...] = jnp.where(step == 0, jnp.zeros_like(before), before) + product

    _each_step(step, steps, tail, block_n, grow)

    if steps > 1:

        def finish(rows: Slice) -> None:
            dx_ref[rows, :] = sum_ref[rows, :].astype(dx_ref.dtype)

        pl.when(step == steps - 1)(lambda: by_rows(sum_ref.shape[0], finish))


def _each_step(step: AnyArray, steps: int, tail: int, size: int, grow: Callable[[int], None]) -> None:
    """`grow` with what is valid of a step's depth: all of it, or in the last step a ragged tail."""
    if tail == size or steps == 1:
        grow(tail if steps == 1 else size)
    else:
        pl.when(step < steps - 1)(lambda: grow(size))
        pl.when(step == steps - 1)(lambda: grow(tail))


def _grad_x(
    spec: GatedSpec, config: GatedConfig, operands: Operands, residuals: Residuals, dh: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """dx, and the gradients of gate's and up's products."""
    x, gate, up, joint, *_ = operands
    assert config.grad_x is not None
    bm, bk, bn = clamped(config.grad_x, spec.m, spec.k, spec.n)
    tiles, steps = pl.cdiv(spec.k, bk), pl.cdiv(spec.n, bn)

    def weights(part: int) -> pl.BlockSpec:
        if joint is None:
            return pl.BlockSpec((None, bk, bn), lambda g, i, j, r: (g, j, r))
        return pl.BlockSpec((None, None, bk, bn), lambda g, i, j, r: (g, part, j, r))

    w_gate, w_up = (gate, up) if joint is None else (joint, joint)
    hidden = pl.BlockSpec((None, bm, bn), lambda g, i, j, r: (g, i, r))
    # The slopes go to HBM with the first tile of features. With the others the last block stays where it is, and ends
    # with what belongs there, so that a step needs no branch.
    once = pl.BlockSpec((None, bm, bn), lambda g, i, j, r: (g, i, jnp.where(j == 0, r, steps - 1)))
    slope = ((spec.groups, spec.m, spec.n), x.dtype, hidden if tiles == 1 else once)
    size = spec.groups * spec.m * spec.n
    return call(
        functools.partial(_grad_x_kernel, spec=spec, block_n=bn),
        name="gated_linear_unit_grad_x",
        grid=(spec.groups, pl.cdiv(spec.m, bm), tiles, steps),
        inputs=dict(
            gate_ref=(residuals.gate, hidden),
            up_ref=(residuals.up, hidden),
            dh_ref=(dh, hidden),
            w_gate_ref=(w_gate, weights(0)),
            w_up_ref=(w_up, weights(1)),
        ),
        outputs=dict(
            dx_ref=(x.shape, x.dtype, pl.BlockSpec((None, bm, bk), lambda g, i, j, r: (g, i, j))),
            d_gate_ref=slope,
            d_up_ref=slope,
        ),
        scratch=dict(sum_ref=pltpu.VMEM((bm, bk), jnp.float32) if steps > 1 else None),
        # slopes are written by the first tile of features
        semantics=("parallel", "parallel", "arbitrary", "arbitrary"),
        vmem_bytes=config.grad_vmem_bytes,
        flops=spec.flops,
        bytes_accessed=spec.bytes_moved + 4 * size * x.dtype.itemsize,
        transcendentals=0 if spec.activation in (None, "relu", "relu2") else size,
    )


def _grad_w_kernel(
    x_ref: Ref,
    d_gate_ref: Ref,
    d_up_ref: Ref,
    dw_gate_ref: Ref,
    dw_up_ref: Ref,
    dw_both_ref: Ref,
    gate_sum: Ref,
    up_sum: Ref,
    *,
    spec: GatedSpec,
    block_m: int,
) -> None:
    """One step: what some rows add to a tile of both weights' gradients.

    Blocks: x [block_m, block_k], the slopes [block_m, block_n], all others [block_k, block_n], of `joint` two.
    """
    step, steps = pl.program_id(3), pl.cdiv(spec.m, block_m)
    tail = spec.m - (steps - 1) * block_m
    slopes, sums = (d_gate_ref, d_up_ref), (gate_sum, up_sum)

    def store(part: int, rows: Slice, total: jax.Array) -> None:
        if dw_both_ref is not None:
            dw_both_ref[part, rows, :] = total.astype(dw_both_ref.dtype)
        else:
            out = (dw_gate_ref, dw_up_ref)[part]
            out[rows, :] = total.astype(out.dtype)

    def grow(valid: int) -> None:
        x = x_ref[...] if valid == block_m else zero_past(x_ref[...], 0, valid)  # [block_m, block_k]
        for part, (d_ref, sum_ref) in enumerate(zip(slopes, sums, strict=True)):
            d = d_ref[...] if valid == block_m else zero_past(d_ref[...], 0, valid)
            product = dot(x, d, (0, 0), precision=_precision(spec))  # [block_k, block_n]
            if steps == 1:
                store(part, slice(None), product)
            else:
                before = sum_ref[...]
                sum_ref[...] = jnp.where(step == 0, jnp.zeros_like(before), before) + product

    _each_step(step, steps, tail, block_m, grow)

    if steps > 1:

        def finish(rows: Slice) -> None:
            for part, sum_ref in enumerate(sums):
                store(part, rows, sum_ref[rows, :])

        pl.when(step == steps - 1)(lambda: by_rows(gate_sum.shape[0], finish))


def _grad_w(
    spec: GatedSpec, config: GatedConfig, operands: Operands, d_gate: jax.Array, d_up: jax.Array
) -> tuple[AnyArray, AnyArray, AnyArray]:
    """(of gate, of up, of both in one array)."""
    x, joint = operands.x, operands.joint
    assert config.grad_w is not None
    bk, bn, bm = clamped(config.grad_w, spec.k, spec.n, spec.m)
    steps = pl.cdiv(spec.m, bm)
    slope = pl.BlockSpec((None, bm, bn), lambda g, i, j, r: (g, r, j))
    result = ((spec.groups, spec.k, spec.n), x.dtype, pl.BlockSpec((None, bk, bn), lambda g, i, j, r: (g, i, j)))
    pair = (
        (spec.groups, 2, spec.k, spec.n),
        x.dtype,
        pl.BlockSpec((None, 2, bk, bn), lambda g, i, j, r: (g, 0, i, j)),
    )
    total = pltpu.VMEM((bk, bn), jnp.float32) if steps > 1 else None
    return call(
        functools.partial(_grad_w_kernel, spec=spec, block_m=bm),
        name="gated_linear_unit_grad_w",
        grid=(spec.groups, pl.cdiv(spec.k, bk), pl.cdiv(spec.n, bn), steps),
        inputs=dict(
            x_ref=(x, pl.BlockSpec((None, bm, bk), lambda g, i, j, r: (g, r, i))),
            d_gate_ref=(d_gate, slope),
            d_up_ref=(d_up, slope),
        ),
        outputs=dict(
            dw_gate_ref=result if joint is None else None,
            dw_up_ref=result if joint is None else None,
            dw_both_ref=None if joint is None else pair,
        ),
        scratch=dict(gate_sum=total, up_sum=total),
        semantics=("parallel", "parallel", "parallel", "arbitrary"),
        vmem_bytes=config.grad_vmem_bytes,
        flops=spec.flops,
        bytes_accessed=spec.bytes_moved + spec.groups * spec.m * spec.n * x.dtype.itemsize,
    )
