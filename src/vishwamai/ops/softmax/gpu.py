"""Softmax and its logarithm on GPUs: Triton kernels, whole rows in registers; longer rows in tiles, each read twice."""

from __future__ import annotations

import dataclasses

from vishwamai.core import gpu
from vishwamai.core.op import Implementation
from vishwamai.core.target import Target
from vishwamai.core.tiles import UNLIMITED, Tiles, size, warp_count
from vishwamai.core.types import AnyArray, PyTree
from vishwamai.ops.softmax.spec import Operands, Outputs, SoftmaxSpec

_KERNELS = "vishwamai.ops.softmax.gpu_kernels"
FORWARD, BACKWARD = (gpu.TritonKernel(_KERNELS, name) for name in ("forward", "backward"))
IN_TILES = {kernel: gpu.TritonKernel(_KERNELS, f"{kernel.name}_in_tiles") for kernel in (FORWARD, BACKWARD)}
"""The kernels for rows of several tiles."""

_DTYPES = ("bfloat16", "float16", "float32")
_TILE = 4096
"""Elements that four warps hold: 32 a thread."""
_WIDEST = 16384
"""Features of the widest row that the registers of 16 warps hold, 32 a thread; at 32768 the backward pass spills 1404
bytes.
"""
_PART = 4096
"""Features of a tile of a longer row: 16 a thread of eight warps, and in the backward pass as many of four arrays."""


@dataclasses.dataclass(frozen=True)
class SoftmaxGpuConfig(Tiles):
    """Tiles of the Triton kernels.

    Attributes:
      rows: rows that a program holds, a power of two.
      warps: warps of a program.
      columns: features of a tile, a power of two; a longer row is walked in tiles.
    """

    rows: int = size("rows", block_size=lambda tiles, n: min(tiles.rows, gpu.next_power_of_2(n)))
    warps: int = warp_count()
    columns: int = size("columns", UNLIMITED, least=128, most=_WIDEST)


def why_not(spec: SoftmaxSpec, target: Target) -> str | None:
    """The reason why this kernel cannot serve `spec`, or None."""
    x = spec.operands.x
    if x.dtype.name not in _DTYPES:
        return f"`x` is {x.dtype.name}; the Triton kernel takes {', '.join(_DTYPES)}."
    if x.size == 0:
        return "the array is empty."
    if spec.transposed:
        return (
            "`axis` is not the last: turning the array would cost two passes over memory, and XLA sums along any axis "
            "in place."
        )
    return gpu.why_not(target)


def notes(spec: SoftmaxSpec, target: Target) -> tuple[str, ...]:
    if spec.features > _WIDEST:
        return (f"rows of {spec.features} features do not fit the registers of a program, so they are read twice",)
    return ()


def heuristic(spec: SoftmaxSpec, target: Target) -> SoftmaxGpuConfig:
    """Several rows where they are short, more warps where they are long; tiles of one row where it does not fit."""
    if spec.features > _WIDEST:
        return SoftmaxGpuConfig(1, 8, _PART)
    columns = gpu.next_power_of_2(spec.features)
    rows = max(1, min(_TILE // columns, gpu.next_power_of_2(spec.groups * spec.rows)))
    return SoftmaxGpuConfig(rows, min(16, max(4 if columns * rows >= 1024 else 1, 4 * columns * rows // _TILE)))


def _launch(
    kernel: gpu.TritonKernel, spec: SoftmaxSpec, config: SoftmaxGpuConfig, inputs: dict[str, PyTree], out: str
) -> AnyArray:
    rows, columns = spec.groups * spec.rows, gpu.next_power_of_2(spec.features)
    (result,) = gpu.launch(
        kernel if config.columns >= columns else IN_TILES[kernel],
        (gpu.cdiv(rows, config.rows),),
        inputs,
        {out: gpu.result(spec.operands.x.shape, spec.operands.x.dtype)},
        warps=config.warps,
        rows=rows,
        features=spec.features,
        LOG=spec.log,
        ROWS=config.rows,
        COLUMNS=min(config.columns, columns),
    )
    return result


def forward(spec: SoftmaxSpec, config: SoftmaxGpuConfig, operands: Operands) -> tuple[Outputs, None]:
    return Outputs(_launch(FORWARD, spec, config, dict(x_ptr=operands.x), "y_ptr")), None


def backward(
    spec: SoftmaxSpec,
    config: SoftmaxGpuConfig,
    operands: Operands,
    outputs: Outputs,
    cotangents: Outputs,
) -> Operands:
    source = operands.x if spec.log else outputs.y
    return Operands(_launch(BACKWARD, spec, config, dict(source_ptr=source, dy_ptr=cotangents.y), "dx_ptr"))


TRITON = Implementation("triton", "cuda", forward, backward, why_not, heuristic, SoftmaxGpuConfig, notes)
