"""The activations on GPUs: one Triton kernel, forward and backward, for torch tensors.

JAX arrays take it only where it is asked for by name: XLA makes one pass of an activation too, and joins it to what
stands around it.
"""

from __future__ import annotations

import dataclasses
import math

from vishwamai.core import gpu
from vishwamai.core.dropout import threshold
from vishwamai.core.op import Implementation
from vishwamai.core.target import Target
from vishwamai.core.tiles import Tiles, size
from vishwamai.core.types import AnyArray
from vishwamai.ops.activation.spec import ActivationSpec, Operands, Outputs

APPLY = gpu.TritonKernel("vishwamai.ops.activation.gpu_kernels", "apply")

_DTYPES = ("bfloat16", "float16", "float32")
_TILE, _COLUMNS = 2048, 1024
"""Elements that four warps hold, 16 a thread, and the widest tile."""


@dataclasses.dataclass(frozen=True)
class ActivationGpuConfig(Tiles):
    """Tiles of the Triton kernel, whose product is the number of elements that a program of four warps holds.

    Attributes:
      rows, columns: powers of two. Without dropout an array is one long row.
    """

    rows: int = size("rows")
    columns: int = size("columns", block_size=lambda tiles, n: min(tiles.columns, gpu.next_power_of_2(n)))


def why_not(spec: ActivationSpec, target: Target) -> str | None:
    """The reason why this kernel cannot serve `spec`, or None."""
    x = spec.operands.x
    if x.dtype.name not in _DTYPES:
        return f"`x` is {x.dtype.name}; the Triton kernel takes {', '.join(_DTYPES)}."
    if x.size == 0:
        return "the array is empty."
    return gpu.why_not(target)


def _sizes(spec: ActivationSpec) -> tuple[int, int, int]:
    """(groups, rows, features) as the kernel sees them."""
    shape = spec.operands.x.shape
    if spec.operands.seed is None:
        return 1, 1, spec.operands.x.size
    return shape[0], math.prod(shape[1:-1]), shape[-1]


def heuristic(spec: ActivationSpec, target: Target) -> ActivationGpuConfig:
    """Wide tiles, of several rows where these are short."""
    _, rows, features = _sizes(spec)
    columns = min(_COLUMNS, gpu.next_power_of_2(features))
    return ActivationGpuConfig(max(1, min(_TILE // columns, gpu.next_power_of_2(rows))), columns)


def _stride(x: AnyArray) -> int:
    """Elements from one group's numbers to the next's, 0 where they are shared."""
    return 0 if x is None or x.shape[0] == 1 else math.prod(x.shape[1:])


def _apply(spec: ActivationSpec, config: ActivationGpuConfig, operands: Operands, dy: AnyArray) -> AnyArray:
    groups, rows, features = _sizes(spec)
    row_blocks, column_blocks = gpu.cdiv(rows, config.rows), gpu.cdiv(features, config.columns)
    x, numbers, columns, seed = operands
    (out,) = gpu.launch(
        APPLY,
        (groups * row_blocks * column_blocks,),
        dict(x_ptr=x, dy_ptr=dy, rows_ptr=numbers, columns_ptr=columns, seed_ptr=seed),
        dict(out_ptr=gpu.result(x.shape, spec.operands.x.dtype)),
        rows=rows,
        features=features,
        row_blocks=row_blocks,
        column_blocks=column_blocks,
        rows_stride=_stride(numbers),
        columns_stride=_stride(columns),
        seed_stride=_stride(seed),
        threshold=threshold(spec.rate),
        ACTIVATION=spec.activation,
        SCALE=1.0 / (1.0 - spec.rate),
        ROWS=config.rows,
        COLUMNS=config.columns,
    )
    return out


def forward(spec: ActivationSpec, config: ActivationGpuConfig, operands: Operands) -> tuple[Outputs, None]:
    return Outputs(_apply(spec, config, operands, None)), None


def backward(
    spec: ActivationSpec,
    config: ActivationGpuConfig,
    operands: Operands,
    cotangents: Outputs,
) -> Operands:
    return Operands(_apply(spec, config, operands, cotangents.y), None, None, None)


TRITON = Implementation(
    "triton", "cuda", forward, backward, why_not, heuristic, ActivationGpuConfig, why_not_default=gpu.fused_by_xla
)
