"""The matrix product on TPU: tiles with the contracted axis innermost, a float32 sum in VMEM, the epilogue in its last
step (Pallas).

One kernel serves the forward product and both products of the gradient: which axis of each operand is contracted is a
matter of the matrix unit's dimension numbers and of the index maps, so nothing is transposed or copied in HBM, and a
shared operand is read through an index map that ignores the group. Rows and columns past the end of a ragged array
compute what is not stored; past the end of the contracted axis both operands are zeroed, because what the memory holds
there may be NaN.

float32 products are built from bfloat16 ones (see `core.precision`); int8 and fp8 use the chip's own units where it has
them, and are widened to bfloat16, which holds them exactly, where it has not. Narrower operands, and those with a scale
for every block of K, are dequantized tile by tile (`core.tpu_dequantize`), so HBM holds them only as they are stored. A
product of few rows reads `b` through a ring of buffers of its own (`tpu_stream`).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from vishwamai.core.op import Implementation
from vishwamai.core.pallas import TPU_DTYPES
from vishwamai.core.precision import FP8_DTYPES
from vishwamai.core.target import Target
from vishwamai.core.types import AnyArray, PyTree
from vishwamai.ops.matmul import gradient
from vishwamai.ops.matmul.spec import INTEGERS, SMALL_FLOATS, WRAPS, MatmulSpec, Operands, Outputs
from vishwamai.ops.matmul.tpu_product import product
from vishwamai.ops.matmul.tpu_tiles import MatmulConfig, heuristic

_INT8 = jnp.dtype(jnp.int8)


def why_not(spec: MatmulSpec, target: Target) -> str | None:
    """The reason why this kernel cannot serve `spec`, or None."""
    if spec.wraps:
        return WRAPS
    for name, operand in zip(spec.operands._fields, spec.operands, strict=True):
        scale_bits = name.startswith("scale") and operand is not None and operand.dtype == jnp.uint8
        if operand is not None and not scale_bits and operand.dtype not in (*TPU_DTYPES, *INTEGERS, *SMALL_FLOATS):
            return f"`{name}` is {operand.dtype.name}, and the TPU computes in float32, bfloat16 and 8-bit numbers."
    if spec.out_dtype not in (*TPU_DTYPES, jnp.dtype(jnp.int32)):
        return f"`out_dtype` is {spec.out_dtype.name}, and the TPU computes in float32 and bfloat16."
    if 0 in (spec.groups, spec.m, spec.n, spec.k):
        return "an array is empty."
    if spec.compute_dtype == _INT8 and target.tpu is not None and target.tpu.name == "v4":
        # Without an int8 unit the operands are widened by the vector unit, of which v4 has half as much as later chips
        # (docs/notes/gemm.md).
        return "v4 has no int8 unit, and by the compiler's schedule XLA's own product is more than twice as fast."
    return None


def forward(spec: MatmulSpec, config: MatmulConfig, operands: Operands, residuals: bool) -> tuple[Outputs, PyTree]:
    a, b, scale_a, scale_b = spec.factors(operands)
    out, z = product(
        spec,
        config,
        "forward",
        a,
        b,
        1 if spec.transpose_a else 2,
        2 if spec.transpose_b else 1,
        spec.groups,
        spec.out_dtype,
        bias=operands.bias,
        scale_a=scale_a,
        scale_b=scale_b,
        activation=spec.activation,
        keep_preactivation=residuals and spec.keeps_preactivation,
    )
    return Outputs(out), z


def backward(
    spec: MatmulSpec,
    config: MatmulConfig,
    operands: Operands,
    outputs: Outputs,
    residuals: AnyArray,
    cotangents: Outputs,
) -> Operands:
    def run(phase: str, *args: PyTree) -> jax.Array:
        return product(spec, config, phase, *args)[0]

    return gradient.backward(spec, run, operands, outputs, residuals, cotangents.out)


def notes(spec: MatmulSpec, target: Target) -> tuple[str, ...]:
    """What `explain` adds: where the operands are widened, how float32 is multiplied, where the kernel gains
    nothing.
    """
    a, b = spec.operands.a.dtype, spec.operands.b.dtype
    lines = []
    chip = target.tpu
    without = f"{chip.name} has" if chip else "some chips have"
    if spec.compute_dtype == _INT8:
        if chip is None or not chip.has_int8:
            lines.append(f"int8 is multiplied as bfloat16 in exact pieces, for {without} no int8 unit")
    elif a in FP8_DTYPES and b in FP8_DTYPES:
        lines += [widened] if (widened := target.widens_fp8((a.name, b.name))) else []
    else:
        lines += [
            f"`{name}` is widened from {dtype.name} to {spec.compute_dtype.name} tile by tile"
            for name, dtype in (("a", a), ("b", b))
            if dtype != spec.compute_dtype
        ]
    if spec.precision != "default":
        lines.append(f"float32 is multiplied by {'six' if spec.precision == 'highest' else 'three'} bfloat16 products")
    if chip and spec.bytes_moved / chip.hbm_bandwidth > spec.flops / chip.peak(spec.compute_dtype.name):
        lines.append("memory bounds this product: XLA's own is as fast")
    return tuple(lines)


PALLAS_TPU = Implementation("pallas_tpu", "tpu", forward, backward, why_not, heuristic, MatmulConfig, notes)
