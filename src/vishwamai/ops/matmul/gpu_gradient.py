"""The steps of the matmul's gradient around its products (see `gradient.GradientSteps`), as Triton kernels for arrays
of JAX and of torch.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from vishwamai.core import gpu
from vishwamai.core.gpu_sums import sum_to
from vishwamai.core.precision import FP8_DTYPES
from vishwamai.core.types import AnyArray
from vishwamai.ops.matmul.gradient import GradientSteps, Through, scales_by_total
from vishwamai.ops.matmul.spec import MatmulSpec, Operands, Outputs

_KERNELS = "vishwamai.ops.matmul.gpu_kernels_gradient"
EPILOGUE, SCALE = (gpu.TritonKernel(_KERNELS, name) for name in ("epilogue_gradient", "scale_gradient"))
_ROWS = _COLUMNS = 64
"""Of a tile: rows of 128 bytes and more are read whole, and a partial row is a sixty-fourth of what it sums."""


def stride(x: AnyArray, axis: int) -> int:
    """Of a vector `[G or 1, size or 1]` along an axis; 0 where it is shared."""
    return 0 if x is None or x.shape[axis] == 1 else (x.shape[1] if axis == 0 else 1)


def epilogue(
    spec: MatmulSpec, operands: Operands, outputs: Outputs, preactivation: object, dout: AnyArray, total: object
) -> Through:
    _, _, bias, scale_a, scale_b = operands
    saved = outputs.out if spec.activation == "relu" else preactivation
    of_a, of_b = spec.differentiable
    by_total_a, by_total_b = scales_by_total(spec)
    cast = saved is not None or spec.out_dtype != spec.compute_dtype
    shape = (spec.groups, spec.m, spec.n)
    strips, tiles = gpu.cdiv(spec.m, _ROWS), gpu.cdiv(spec.n, _COLUMNS)
    dz = gpu.result(shape, spec.compute_dtype)
    by_column, by_row = (
        gpu.result(s, "float32") for s in ((spec.groups, strips, spec.n), (spec.groups, tiles, spec.m))
    )
    # Without scales both factors' products read one dz; it is dout itself where nothing follows the sum but the bias.
    unscaled = scale_a is None and scale_b is None
    outputs_of_kernel = dict(
        dz_a_ptr=dz if of_b and not unscaled and (cast or scale_a is not None) else None,
        dz_b_ptr=dz if (of_a or (of_b and unscaled)) and (cast or scale_b is not None) else None,
        dbias_ptr=None if bias is None else by_column,
        dscale_a_ptr=by_row if scale_a is not None and by_total_a else None,
        dscale_b_ptr=by_column if scale_b is not None and by_total_b else None,
    )
    if all(out is None for out in outputs_of_kernel.values()):
        return Through(dout, dout, None, None, None)
    total_bias = None if total is None else bias
    dz_a, dz_b, dbias, dscale_a, dscale_b = gpu.launch(
        EPILOGUE,
        (strips * tiles * spec.groups,),
        dict(
            dout_ptr=dout,
            kept_ptr=saved,
            total_ptr=total,
            scale_a_ptr=scale_a,
            scale_b_ptr=scale_b,
            bias_ptr=total_bias,
        ),
        outputs_of_kernel,
        M=spec.m,
        N=spec.n,
        scale_a_group=stride(scale_a, 0),
        scale_a_row=stride(scale_a, 1),
        scale_b_group=stride(scale_b, 0),
        scale_b_column=stride(scale_b, 1),
        bias_group=stride(total_bias, 0),
        bias_column=stride(total_bias, 1),
        ACTIVATION=spec.activation,
        ROWS=_ROWS,
        COLUMNS=_COLUMNS,
    )
    dz_b = dout if dz_b is None else dz_b
    dz_a = (dz_b if unscaled else dout) if dz_a is None else dz_a

    def summed(partial: object, operand: AnyArray, spec: Any) -> AnyArray:
        return None if partial is None else sum_to(partial, operand.shape, spec.dtype)

    o = spec.operands
    return Through(
        dz_a,
        dz_b,
        summed(dbias, bias, o.bias),
        summed(dscale_a, scale_a, o.scale_a),
        summed(dscale_b, scale_b, o.scale_b),
    )


def unscale(
    spec: MatmulSpec, gradient: AnyArray, operand: str, x: AnyArray, scale: AnyArray, k_axis: int, with_scale: bool
) -> tuple[AnyArray, AnyArray]:
    stored = getattr(spec.operands, operand)
    if scale is None and stored.dtype not in FP8_DTYPES:
        return gradient, None
    x_groups, rows, columns = x.shape
    groups, by_row = gradient.shape[0] // x_groups, k_axis == 2
    strips, tiles = gpu.cdiv(rows, _ROWS), gpu.cdiv(columns, _COLUMNS)
    partial = (gradient.shape[0], tiles, rows) if by_row else (gradient.shape[0], strips, columns)
    dx, dscale = gpu.launch(
        SCALE,
        (strips * tiles * x_groups,),
        dict(gradient_ptr=gradient, x_ptr=x if with_scale and scale is not None else None, scale_ptr=scale),
        dict(
            dx_ptr=gpu.result(x.shape, stored.dtype),
            dscale_ptr=gpu.result(partial, "float32") if with_scale and scale is not None else None,
        ),
        groups=groups,
        rows=rows,
        columns=columns,
        scale_group=stride(scale, 0),
        scale_step=stride(scale, 1),
        BY_ROW=by_row,
        LARGEST=float(jnp.finfo(stored.dtype).max) if stored.dtype in FP8_DTYPES else None,
        ROWS=_ROWS,
        COLUMNS=_COLUMNS,
    )  # fmt: skip
    if scale is None or dscale is None:
        return dx, None
    return dx, sum_to(dscale, scale.shape, getattr(spec.operands, f"scale_{operand}").dtype)


STEPS = GradientSteps(epilogue, unscale)
