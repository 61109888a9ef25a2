"""The matrix product on GPUs: one Triton kernel for torch tensors and JAX arrays, its epilogue on the accumulator, and
the shared gradient on top.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from vishwamai.core import gpu
from vishwamai.core.op import Implementation
from vishwamai.core.spec import array_spec
from vishwamai.core.target import Target
from vishwamai.core.tiles import Tiles, size, stage_count, warp_count
from vishwamai.core.types import AnyArray, PyTree
from vishwamai.ops.matmul import gpu_gradient, gradient
from vishwamai.ops.matmul.gpu_arguments import Form, Order, Vectors
from vishwamai.ops.matmul.gpu_gradient import stride
from vishwamai.ops.matmul.spec import WRAPS, MatmulSpec, Operands, Outputs

if TYPE_CHECKING:
    import numpy as np
    from jax.typing import DTypeLike


MATMUL = gpu.TritonKernel("vishwamai.ops.matmul.gpu_kernels", "matmul")
TRANSPOSE = gpu.TritonKernel("vishwamai.ops.matmul.gpu_kernels", "transpose")

_COMPUTED = ("float32", "bfloat16", "float16", "int8")
_FP8 = ("float8_e4m3fn", "float8_e5m2")
_STORED = (*_COMPUTED, *_FP8)
_TRITON = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16", "int8": "int8"}
_PRECISION = {"highest": "tf32x3", "high": "bf16x3", "default": "tf32"}
"""Of float32 operands: three products of TF32 parts keep 21 bits of each factor, three of bfloat16 parts 16; "default"
is for narrower operands.
"""
_EXACT_FP8 = 128
"""Products of 8-bit floats are added with about 14 bits inside the tensor core; after so many the sum moves to
float32.
"""


_ROWS_TO_TRANSPOSE = 64
"""From so many rows on, 8-bit columns are transposed first: the tensor cores take 8-bit operands with K contiguous, and
to turn every tile on its way took an H100 4.5 ms of int8 4096 x 4096 x 14336 where one with K contiguous takes 0.44.
"""


def _edge(tiles: Tiles, block_size: int) -> int:
    return min(256, max(16, gpu.next_power_of_2(block_size)))


@dataclasses.dataclass(frozen=True)
class MatmulGpuConfig(Tiles):
    """Tiles of the Triton kernel.

    Attributes:
      block_m, block_n, block_k: edges of a tile, powers of two.
      warps, stages: counts of a program; a stage is one pair of tiles in shared memory.
      group_m: tiles along M that are walked together.
      num_programs: persistent programs.
    """

    block_m: int = size("rows", block_size=lambda tiles, n: min(128, _edge(tiles, n)))
    block_n: int = size("columns", block_size=_edge)
    block_k: int = size("depth")
    warps: int = warp_count(8, block_size=lambda tiles, n: 8 if _edge(tiles, n) >= 128 else 4)
    stages: int = stage_count(3)
    group_m: int = size("rows", 8)
    num_programs: int = size("programs", gpu.SMS)


def why_not(spec: MatmulSpec, target: Target) -> str | None:
    """The reason why this kernel cannot serve `spec`, or None."""
    if spec.wraps:
        return WRAPS
    if any(spec.blocked):
        return "an operand has scales for blocks of K; the Triton kernel takes one for each row or column."
    for name, operand in zip("ab", spec.operands, strict=False):
        if operand.dtype.name not in _STORED:
            return f"`{name}` is {operand.dtype.name}; the Triton kernel takes {', '.join(_STORED)}."
    if 0 in (spec.groups, spec.m, spec.n, spec.k):
        return "an array is empty."
    return gpu.why_not(target)


def heuristic(spec: MatmulSpec, target: Target) -> MatmulGpuConfig:
    """The largest tile of which there are enough for every multiprocessor."""
    return tiles(spec.groups, spec.m, spec.n, spec.k, _native_width(spec), spec.compute_dtype.name == "int8")


def _native_width(spec: MatmulSpec) -> int:
    """Bytes of an element as the tensor cores take it."""
    return 1 if _takes_fp8(spec.operands.a.dtype, spec.operands.b.dtype) else spec.compute_dtype.itemsize


def tiles(groups: int, m: int, n: int, k: int, width: int, integer: bool = False) -> MatmulGpuConfig:
    """Tiles for `groups` products `m x n x k` of elements that take `width` bytes in the tensor cores."""
    smallest_k = 32 if width == 1 else 16
    deep = {1: 128, 2: 64, 4: 32}[width]
    block_k = min(deep, max(smallest_k, gpu.next_power_of_2(k)))
    # 8-bit floats need a second accumulator (`_EXACT_FP8`), float32 twice the shared memory: there a tile of 256
    # columns has no room.
    widest = 256 if width == 2 or integer else 128
    options = ((128, widest), (128, 128), (64, 128), (64, 64))
    for block_m, block_n in options:
        enough = groups * gpu.cdiv(m, block_m) * gpu.cdiv(n, block_n) >= gpu.SMS
        if enough and m >= block_m and n >= block_n:
            break
    block_m = min(block_m, max(16, gpu.next_power_of_2(m)))
    block_n = min(block_n, max(16, gpu.next_power_of_2(n)))
    large = block_m * block_n >= 128 * 128
    return MatmulGpuConfig(block_m, block_n, block_k, 8 if large else 4, 3 if large else 4)


def _takes_fp8(a: AnyArray, b: object) -> bool:
    """Two operands of one 8-bit format go into the tensor cores as they are."""
    return a == b and a.name in _FP8


def _aligned(columns: int, dtype: np.dtype) -> bool:
    return columns * dtype.itemsize % 16 == 0


def _transposed(x: AnyArray) -> AnyArray:
    """`[groups, rows, columns]` with the last two axes exchanged in memory."""
    groups, rows, columns = x.shape
    tile = 128
    (y,) = gpu.launch(
        TRANSPOSE,
        (gpu.cdiv(rows, tile) * gpu.cdiv(columns, tile), groups),
        dict(x_ptr=x),
        dict(y_ptr=gpu.result((groups, columns, rows), array_spec(x).dtype)),
        warps=8,
        ROWS=rows,
        COLUMNS=columns,
        TILE=tile,
    )
    return y


def _matmul(
    spec: MatmulSpec,
    config: MatmulGpuConfig,
    a: AnyArray,
    b: AnyArray,
    transpose_a: bool,
    transpose_b: bool,
    groups: int,
    out_dtype: DTypeLike,
    vectors: tuple[PyTree, PyTree, PyTree] = (None, None, None),
    activation: str | None = None,
    keep: bool = False,
) -> tuple[AnyArray, AnyArray]:
    """(activation(scales * (a @ b) + bias), its argument if `keep`); `vectors` is (bias, scale_a, scale_b). With
    `groups` 1, products are summed.
    """
    bias, scale_a, scale_b = vectors
    m, k = (a.shape[2], a.shape[1]) if transpose_a else (a.shape[1], a.shape[2])
    n = b.shape[1] if transpose_b else b.shape[2]
    of_a, of_b = array_spec(a).dtype, array_spec(b).dtype
    compute = spec.compute_dtype.name
    as_they_are = (of_a == of_b and of_a.name == compute) or _takes_fp8(of_a, of_b)
    integer = compute == "int8"
    if integer or _takes_fp8(of_a, of_b):
        if transpose_a and n >= _ROWS_TO_TRANSPOSE:
            a, transpose_a = _transposed(a), False
        if not transpose_b and m >= _ROWS_TO_TRANSPOSE:
            b, transpose_b = _transposed(b), True
    summed = max(a.shape[0], b.shape[0]) if groups == 1 else 1
    out = gpu.result((groups, m, n), out_dtype)
    count = groups * gpu.cdiv(m, config.block_m) * gpu.cdiv(n, config.block_n)

    out, pre = gpu.launch(
        MATMUL,
        (min(config.num_programs, count),),
        dict(
            a_ptr=a,
            b_ptr=b,
            vectors=Vectors(
                bias,
                scale_a,
                scale_b,
                stride(bias, 0),
                stride(scale_a, 0),
                stride(scale_a, 1),
                stride(scale_b, 0),
                stride(scale_b, 1),
            ),
        ),
        dict(out_ptr=out, pre_ptr=out if keep else None),
        warps=config.warps,
        stages=config.stages,
        GROUPS=groups,
        M=m,
        N=n,
        K=k,
        FORM=Form(a.shape[0], b.shape[0], summed, transpose_a, transpose_b),
        COMPUTE=None if as_they_are else gpu.TritonDtype(_TRITON[compute]),
        ACCUMULATE=gpu.TritonDtype("int32" if integer else "fp32"),
        PRECISION=_PRECISION[spec.precision] if compute == "float32" else None,
        IMPRECISE=min(_EXACT_FP8, config.block_k) if _takes_fp8(of_a, of_b) else None,
        ACTIVATION=activation,
        TMA=_aligned(a.shape[2], of_a) and _aligned(b.shape[2], of_b),
        BLOCK_M=config.block_m,
        BLOCK_N=config.block_n,
        BLOCK_K=config.block_k,
        ORDER=Order(min(config.num_programs, count), config.group_m, config.block_n >= 256),
    )
    return out, pre


def forward(spec: MatmulSpec, config: MatmulGpuConfig, operands: Operands, residuals: bool) -> tuple[Outputs, AnyArray]:
    a, b, bias, scale_a, scale_b = operands
    out, preactivation = _matmul(
        spec,
        config,
        a,
        b,
        spec.transpose_a,
        spec.transpose_b,
        spec.groups,
        spec.out_dtype,
        (bias, scale_a, scale_b),
        spec.activation,
        residuals and spec.keeps_preactivation,
    )
    return Outputs(out), preactivation


def product(
    spec: MatmulSpec, lhs: AnyArray, rhs: AnyArray, lhs_axis: int, rhs_axis: int, groups: int, out_dtype: DTypeLike
) -> PyTree:
    """See `gradient.Product`."""
    m, k = lhs.shape[3 - lhs_axis], lhs.shape[lhs_axis]
    n = rhs.shape[3 - rhs_axis]
    width = 1 if _takes_fp8(array_spec(lhs).dtype, array_spec(rhs).dtype) else spec.compute_dtype.itemsize
    config = tiles(groups, m, n, k, width, spec.compute_dtype.name == "int8")
    return _matmul(spec, config, lhs, rhs, lhs_axis == 1, rhs_axis == 2, groups, out_dtype)[0]


def backward(
    spec: MatmulSpec, operands: Operands, outputs: Outputs, residuals: PyTree, cotangents: Outputs
) -> Operands:
    steps = gpu_gradient.STEPS

    def run(_: str, *arguments: Any) -> Any:
        return product(spec, *arguments)

    return gradient.backward(spec, run, operands, outputs, residuals, cotangents.out, steps)


def notes(spec: MatmulSpec, target: Target) -> tuple[str, ...]:
    """What `explain` adds: where 8-bit floats are widened."""
    a, b = spec.operands.a.dtype, spec.operands.b.dtype
    if not {a.name, b.name} <= set(_FP8):
        return ()
    if widened := target.widens_fp8((a.name, b.name)):
        return (widened,)
    return () if a == b else ("8-bit floats of two formats are widened to bfloat16: they save memory and cost time",)


TRITON = Implementation("triton", "cuda", forward, backward, why_not, heuristic, MatmulGpuConfig, notes)
