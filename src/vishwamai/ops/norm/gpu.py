"""Normalization on GPUs: Triton kernels for torch tensors and JAX arrays, one read of memory per pass.

Forward: a program holds a few whole rows in registers. Backward: a fixed number of programs walk over bands of rows and
keep the parameters' gradients in registers; each leaves one partial row, and a second kernel adds these in a fixed
order, so the same inputs give the same bits.
"""

from __future__ import annotations

import dataclasses

from vishwamai.core import gpu
from vishwamai.core.gpu_sums import sum_to
from vishwamai.core.op import Implementation
from vishwamai.core.target import Target
from vishwamai.core.tiles import Tiles, size, warp_count
from vishwamai.core.types import AnyArray
from vishwamai.ops.norm.spec import NormSpec, Operands, Outputs

_KERNELS = "vishwamai.ops.norm.gpu_kernels"
FORWARD, BACKWARD = (gpu.TritonKernel(_KERNELS, name) for name in ("forward", "backward"))

_DTYPES = ("bfloat16", "float16", "float32")
_FORWARD_TILE, _BACKWARD_TILE = 4096, 2048
"""Elements that a program of four warps holds of each array: 32 or 16 a thread, which leaves room for all of them in
registers.
"""
_WIDEST = 16384
"""Features of the widest row that a program holds. Hopper's code for rows of 32768 spills thousands of bytes in the
backward pass.
"""


@dataclasses.dataclass(frozen=True)
class NormGpuConfig(Tiles):
    """Tiles of the Triton kernels.

    Attributes:
      rows: rows that a forward program holds, a power of two.
      warps: warps of a forward program.
      backward_rows, backward_warps: the same of the backward pass.
      num_programs: bands of rows in the backward pass; sums of parameter gradients are formed per band.
    """

    rows: int = size("rows", block_size=lambda tiles, n: min(tiles.rows, gpu.next_power_of_2(n)))
    warps: int = warp_count()
    backward_rows: int = size(
        "rows", of="backward", block_size=lambda tiles, n: min(tiles.backward_rows, gpu.next_power_of_2(n))
    )
    backward_warps: int = warp_count(of="backward")
    num_programs: int = size("programs", 2 * gpu.SMS)


def why_not(spec: NormSpec, target: Target) -> str | None:
    """The reason why this kernel cannot serve `spec`, or None."""
    for name, operand in zip(spec.operands._fields, spec.operands, strict=True):
        if operand is not None and operand.dtype.name not in _DTYPES:
            return f"`{name}` is {operand.dtype.name}; the Triton kernel takes {', '.join(_DTYPES)}."
    if spec.groups * spec.rows == 0:
        return "the array is empty."
    if spec.features > _WIDEST:
        return f"rows of {spec.features} features do not fit the registers of one program; it takes up to {_WIDEST}."
    return gpu.why_not(target)


def notes(spec: NormSpec, target: Target) -> tuple[str, ...]:
    if spec.kind == "layer" and spec.features > _WIDEST // 2:
        return (
            "rows so wide spill registers to memory in the backward pass (712 bytes of a thread at 16384 features)",
        )
    return ()


def _tile(columns: int, rows: int, elements: int) -> tuple[int, int]:
    """(rows, warps) of a program whose tile has about `elements` for each four warps."""
    fit = max(1, min(elements // columns, gpu.next_power_of_2(rows)))
    return fit, min(16, max(4 if columns * fit >= 1024 else 1, 4 * columns * fit // elements))


def heuristic(spec: NormSpec, target: Target) -> NormGpuConfig:
    """Whole rows, several where they are short; more warps where they are long."""
    columns = gpu.next_power_of_2(spec.features)
    return NormGpuConfig(
        *_tile(columns, spec.rows, _FORWARD_TILE),
        *_tile(columns, spec.rows, _BACKWARD_TILE),
    )


def _stride(parameter: AnyArray | None, features: int) -> int:
    return 0 if parameter is None or parameter.shape[0] == 1 else features


def forward(spec: NormSpec, config: NormGpuConfig, operands: Operands) -> tuple[Outputs, None]:
    x, residual, scale, offset = operands
    like_x = gpu.result(x.shape, spec.operands.x.dtype)
    y, total = gpu.launch(
        FORWARD,
        (gpu.cdiv(spec.rows, config.rows), spec.groups),
        dict(x_ptr=x, residual_ptr=residual, scale_ptr=scale, offset_ptr=offset),
        dict(y_ptr=like_x, total_ptr=None if residual is None else like_x),
        warps=config.warps,
        rows=spec.rows,
        features=spec.features,
        scale_stride=_stride(scale, spec.features),
        offset_stride=_stride(offset, spec.features),
        LAYER=spec.kind == "layer",
        EPS=spec.eps,
        ROWS=config.rows,
        COLUMNS=gpu.next_power_of_2(spec.features),
    )
    return Outputs(y, total), None


def backward(
    spec: NormSpec, config: NormGpuConfig, operands: Operands, outputs: Outputs, cotangents: Outputs
) -> Operands:
    x, residual, scale, offset = operands
    band = gpu.cdiv(gpu.cdiv(spec.rows, config.num_programs), config.backward_rows) * config.backward_rows
    programs = gpu.cdiv(spec.rows, band)
    partial = gpu.result((spec.groups, programs, spec.features), "float32")
    dx, dscale, doffset = gpu.launch(
        BACKWARD,
        (programs, spec.groups),
        dict(
            s_ptr=x if outputs.total is None else outputs.total,
            dy_ptr=cotangents.y,
            dtotal_ptr=cotangents.total,
            scale_ptr=scale,
        ),
        dict(
            dx_ptr=gpu.result(x.shape, spec.operands.x.dtype),
            dscale_ptr=None if scale is None else partial,
            doffset_ptr=None if offset is None else partial,
        ),
        warps=config.backward_warps,
        stages=1,
        rows=spec.rows,
        features=spec.features,
        scale_stride=_stride(scale, spec.features),
        band=band,
        LAYER=spec.kind == "layer",
        EPS=spec.eps,
        ROWS=config.backward_rows,
        COLUMNS=gpu.next_power_of_2(spec.features),
    )
    return Operands(
        dx,
        None if residual is None else dx,
        None if scale is None else sum_to(dscale, scale.shape, spec.operands.scale.dtype),
        None if offset is None else sum_to(doffset, offset.shape, spec.operands.offset.dtype),
    )


TRITON = Implementation("triton", "cuda", forward, backward, why_not, heuristic, NormGpuConfig, notes)
