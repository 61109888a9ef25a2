"""The block-sparse product on GPUs: Triton kernels for torch tensors and JAX arrays, whose time is that of the blocks
that are there.

The blocks are put in the order of their columns on the device, so indices may change from call to call; the gradient of
the dense operand is the same product with rows and columns exchanged, that of the values one small product for each
block.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from vishwamai.core import gpu
from vishwamai.core.op import Implementation
from vishwamai.core.target import Target
from vishwamai.core.tiles import Tiles, size, stage_count, warp_count
from vishwamai.core.types import AnyArray
from vishwamai.ops.sparse.spec import Operands, Outputs, SparseSpec

if TYPE_CHECKING:
    import numpy as np

ARRANGE, PRODUCT, VALUES_GRADIENT = (
    gpu.TritonKernel("vishwamai.ops.sparse.gpu_kernels", name) for name in ("arrange", "product", "values_gradient")
)

_DTYPES = ("bfloat16", "float16", "float32")
_MOST_GROUPS = 65535
"""Programs along a grid's second axis."""


@dataclasses.dataclass(frozen=True)
class SparseGpuConfig(Tiles):
    """Tiles of the Triton kernels, powers of two of 16 or more; those along a block's sides are clamped to the block.

    Attributes:
      block_m: dense rows of a program.
      block_n, block_k: columns of the result, and features that a step contracts.
      warps, stages: counts of a program.
      backward_k: dense rows that a step of the values' gradient sums; that of the dense operand is the product again.
      backward_n: its largest tile, in rows and columns of a block.
      backward_warps, backward_stages: counts of the backward pass's programs.
    """

    block_m: int = size("rows", block_size=lambda tiles, n: min(128, max(16, gpu.next_power_of_2(n))))
    block_n: int = size("columns")
    block_k: int = size("depth")
    warps: int = warp_count()
    stages: int = stage_count()
    backward_k: int = size("depth", of="backward")
    backward_n: int = size("columns", of="backward")
    backward_warps: int = warp_count(of="backward")
    backward_stages: int = stage_count(of="backward")


def why_not(spec: SparseSpec, target: Target) -> str | None:
    """The reason why these kernels cannot serve `spec`, or None."""
    o = spec.operands
    if o.dense.dtype.name not in _DTYPES:
        return f"`dense` is {o.dense.dtype.name}; the Triton kernels take {', '.join(_DTYPES)}."
    if 0 in (*o.dense.shape, *o.values.shape, spec.rows, spec.columns):
        return "an array is empty."
    if spec.groups > _MOST_GROUPS and not _shared(o):
        return f"there are {spec.groups:,} sparse matrices; a grid has {_MOST_GROUPS:,} places for them."
    return gpu.why_not(target)


def heuristic(spec: SparseSpec, target: Target) -> SparseGpuConfig:
    """The largest tiles of which there are enough for every multiprocessor."""
    wide = spec.operands.dense.dtype.itemsize == 4
    rows, columns = spec.block
    take, give = (columns, rows) if spec.transpose else (rows, columns)
    shared = _shared(spec.operands)
    m, groups = (spec.groups * spec.m, 1) if shared else (spec.m, spec.groups)
    block_n = min(128, _tile(give))
    for block_m in (128, 64):
        tiles = groups * gpu.cdiv(m, block_m) * (spec.width // give) * gpu.cdiv(give, block_n)
        if m >= block_m and tiles >= gpu.SMS:
            break
    block_m = min(block_m, _tile(m))
    deep = 32 if wide else 64
    return SparseGpuConfig(
        block_m=block_m,
        block_n=128,
        block_k=deep,
        warps=8 if block_m * block_n >= 128 * 128 else 4,
        stages=5,  # two of them wait for the block's number, the others for its values
        backward_k=deep,
        backward_n=128,
        backward_warps=8 if rows * columns >= 128 * 128 else 4,
        backward_stages=3 if wide else 4,
    )


def _tile(n: int) -> int:
    return max(16, gpu.next_power_of_2(n))


def _aligned(columns: int, dtype: np.dtype) -> bool:
    """Whether the copy engine takes rows of that many elements: whole 16 bytes."""
    return columns * dtype.itemsize % 16 == 0


def _shared(operands: Operands) -> bool:
    """Whether every group has the same sparse matrix."""
    return operands.values.shape[0] == operands.indices.shape[0] == 1


def _joined(operands: Operands, x: AnyArray) -> AnyArray:
    """`[G, M, features]`, or where all groups share the sparse matrix, `[1, G * M, features]`."""
    return x.reshape(1, -1, x.shape[-1]) if _shared(operands) else x


def product(
    spec: SparseSpec, config: SparseGpuConfig, dense: AnyArray, values: AnyArray, indices: AnyArray, transpose: bool
) -> AnyArray:
    """dense `[G, M, rows]` times the sparse matrix, or, if `transpose`, `[G, M, columns]` times its transpose."""
    groups, m, contracted = dense.shape
    rows, columns = spec.block
    take, give = (columns, rows) if transpose else (rows, columns)
    width = spec.rows if transpose else spec.columns
    targets, lists, blocks = width // give, indices.shape[0], spec.blocks
    order, place, starts = gpu.launch(
        ARRANGE,
        (targets + 1, lists),
        dict(indices_ptr=indices),
        dict(
            order_ptr=gpu.result((lists, blocks), "int32"),
            place_ptr=gpu.result((lists, blocks), "int32"),
            starts_ptr=gpu.result((lists, targets + 1), "int32"),
        ),
        blocks=blocks,
        targets=targets,
        AXIS=0 if transpose else 1,
        CHUNK=min(1024, max(32, gpu.next_power_of_2(blocks))),
    )
    dtype = spec.operands.dense.dtype
    block_m, block_n, block_k = config.block_m, min(config.block_n, _tile(give)), min(config.block_k, _tile(take))
    (out,) = gpu.launch(
        PRODUCT,
        (gpu.cdiv(m, block_m) * targets * gpu.cdiv(give, block_n), groups),
        dict(dense_ptr=dense, values_ptr=values, order_ptr=order, place_ptr=place, starts_ptr=starts),
        dict(out_ptr=gpu.result((groups, m, width), dtype)),
        warps=config.warps,
        stages=config.stages,
        groups=groups,
        M=m,
        contracted=contracted,
        width=width,
        blocks=blocks,
        values_planes=values.shape[0] * blocks,
        values_stride=blocks if values.shape[0] > 1 else 0,
        list_stride=1 if lists > 1 else 0,
        TAKE=take,
        GIVE=give,
        TRANSPOSE=transpose,
        PRECISION=_precision(dtype),
        # A tile that is wider than the block would bring features of another one, which may be NaN.
        TMA_DENSE=_aligned(contracted, dtype) and take % block_k == 0,
        TMA_VALUES=_aligned(columns, dtype),
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        BLOCK_K=block_k,
    )
    return out


def _precision(dtype: np.dtype) -> str | None:
    return "tf32x3" if dtype.itemsize == 4 else None


def values_gradient(
    spec: SparseSpec, config: SparseGpuConfig, left: AnyArray, right: object, indices: AnyArray
) -> AnyArray:
    """`[G or 1, blocks, block_rows, block_columns]` from left `[G, M, rows]` and right `[G, M, columns]`."""
    values = spec.operands.values
    groups, m = left.shape[:2]
    rows, columns = spec.block
    block_m, block_n = min(config.backward_n, _tile(rows)), min(config.backward_n, _tile(columns))
    results = values.shape[0] if groups > 1 else 1
    (out,) = gpu.launch(
        VALUES_GRADIENT,
        (spec.blocks * gpu.cdiv(rows, block_m) * gpu.cdiv(columns, block_n), results),
        dict(left_ptr=left, right_ptr=right, indices_ptr=indices),
        dict(out_ptr=gpu.result((results, *values.shape[1:]), values.dtype)),
        warps=config.backward_warps,
        stages=config.backward_stages,
        groups=groups,
        M=m,
        rows=spec.rows,
        columns=spec.columns,
        blocks=spec.blocks,
        list_stride=1 if indices.shape[0] > 1 else 0,
        MEMBERS=groups // results,
        ROWS=rows,
        COLUMNS=columns,
        PRECISION=_precision(values.dtype),
        TMA_LEFT=_aligned(spec.rows, values.dtype),
        TMA_RIGHT=_aligned(spec.columns, values.dtype),
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        BLOCK_K=min(config.backward_k, _tile(m)),
    )
    return out


def forward(spec: SparseSpec, config: SparseGpuConfig, operands: Operands) -> tuple[Outputs, None]:
    dense, values, indices = operands
    out = product(spec, config, _joined(spec.operands, dense), values, indices, spec.transpose)
    return Outputs(out.reshape(spec.groups, spec.m, spec.width)), None


def backward(
    spec: SparseSpec,
    config: SparseGpuConfig,
    operands: Operands,
    cotangents: Outputs,
) -> Operands:
    dense, cotangent = (_joined(spec.operands, x) for x in (operands.dense, cotangents.out))
    d_dense = product(spec, config, cotangent, operands.values, operands.indices, not spec.transpose)
    left, right = (cotangent, dense) if spec.transpose else (dense, cotangent)
    d_values = values_gradient(spec, config, left, right, operands.indices)
    return Operands(d_dense.reshape(spec.operands.dense.shape), d_values, None)


TRITON = Implementation("triton", "cuda", forward, backward, why_not, heuristic, SparseGpuConfig)
