"""The grouped product on TPU (Pallas): the three products made of its two kernels.

`rows_product` serves the forward product and the gradient of lhs (which contracts the other axis of rhs), and both the
other way around where the matrices are transposed. It sweeps
over the visits of `tpu_visits.py` for each tile of columns. Where the contracted axis fits VMEM whole, the matrix of a
group is read once for a sweep, and the next group's is copied while this one's rows are multiplied, however many visits
they take; else blocks along the contracted axis come through the pipeline. `weights_product` is the gradient of rhs: a
sum for each group over its rows, which are the contracted axis.

A visit multiplies the rows of its group alone, in pieces of a few hundred rows and then of `SMALL` rows, not the whole
tile; what the last piece has too much is masked. Rows of another group never reach a result, NaN or not.
"""

from __future__ import annotations

import jax.numpy as jnp

from vishwamai.core.op import Implementation
from vishwamai.core.pallas import TPU_DTYPES
from vishwamai.core.target import Target
from vishwamai.ops.moe import tpu_visits as visits
from vishwamai.ops.moe.reference import gradients, sum_shared
from vishwamai.ops.moe.spec import GroupedSpec, Operands, Outputs
from vishwamai.ops.moe.tpu_rows import rows_product
from vishwamai.ops.moe.tpu_tiles import GroupedConfig, heuristic
from vishwamai.ops.moe.tpu_weights import weights_product

_SMEM_BYTES = 512 << 10


def why_not(spec: GroupedSpec, target: Target) -> str | None:
    """The reason why these kernels cannot serve `spec`, or None."""
    o = spec.operands
    for name, dtype in (("lhs", o.lhs.dtype), ("out_dtype", spec.out_dtype)):
        if dtype not in TPU_DTYPES:
            return f"`{name}` is {dtype.name}, and the TPU computes in float32 and bfloat16."
    if 0 in (spec.batch, spec.m, spec.n, spec.k, spec.groups):
        return "an array is empty."
    config = heuristic(spec, target)
    rows = min(config.forward.rows, config.grad_lhs.rows, config.grad_rhs.rows)
    table = (len(visits.Visits._fields) - 1) * 4 * spec.batch * visits.length(spec.m, spec.groups, rows)
    if table > _SMEM_BYTES:
        return (
            f"the tables of visits for {spec.batch} x {spec.groups} groups take {table:,} bytes of scalar memory, more "
            f"than {_SMEM_BYTES:,}."
        )
    return None


def forward(spec: GroupedSpec, config: GroupedConfig, operands: Operands) -> tuple[Outputs, None]:
    out = rows_product(
        "grouped_gemm",
        config.forward,
        config.vmem_bytes,
        operands.lhs,
        operands,
        int(spec.transpose_rhs),
        spec.block_k,
        spec.out_dtype,
    )
    return Outputs(out), None


def backward(spec: GroupedSpec, config: GroupedConfig, operands: Operands, cotangents: Outputs) -> Operands:
    lhs, rhs, sizes, scale, first = operands
    dout = cotangents.out.astype(lhs.dtype)
    vmem = config.vmem_bytes
    axis = 1 - int(spec.transpose_rhs)
    d_lhs = rows_product("grouped_gemm_grad_lhs", config.grad_lhs, vmem, dout, operands, axis, spec.block_k, lhs.dtype)
    if scale is not None:
        return gradients(operands, d_lhs, None)
    shared = rhs.shape[0] != spec.batch  # then a sum over the batch follows, in float32
    rows, columns = spec.matrix_factors(lhs, dout)
    d_rhs = weights_product(config.grad_rhs, vmem, rows, columns, sizes, first, jnp.float32 if shared else rhs.dtype)
    return gradients(operands, d_lhs, sum_shared(d_rhs, rhs))


PALLAS_TPU = Implementation("pallas_tpu", "tpu", forward, backward, why_not, heuristic, GroupedConfig)
