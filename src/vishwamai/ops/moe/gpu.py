"""The grouped product on GPUs: two Triton kernels for torch tensors and JAX arrays, one of rows (also for their
gradient), one of the weights' gradient.

The sizes stay on the device: the grid is as many programs as there are multiprocessors, and each finds its tiles
itself.
"""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp

from vishwamai.core import gpu
from vishwamai.core.op import Implementation
from vishwamai.core.qtensor import FP4, INT4, bits
from vishwamai.core.spec import array_spec
from vishwamai.core.target import Target
from vishwamai.core.tiles import Tiles, size, stage_count, warp_count
from vishwamai.core.types import AnyArray
from vishwamai.ops.moe.gpu_arguments import Matrices, Strides
from vishwamai.ops.moe.reference import gradients
from vishwamai.ops.moe.spec import GroupedSpec, Operands, Outputs

if TYPE_CHECKING:
    from jax.typing import DTypeLike


ROWS_PRODUCT, WEIGHTS_PRODUCT, CAST = (
    gpu.TritonKernel("vishwamai.ops.moe.gpu_kernels", name) for name in ("rows_product", "weights_product", "cast")
)

_DTYPES = ("bfloat16", "float16", "float32")
_MOST_GROUPS = 4096
"""Groups whose sizes a program holds in registers."""


class Tile(NamedTuple):
    """Rows, columns and depth of one product's tiles, and its programs' warps and stages."""

    m: int
    n: int
    k: int
    warps: int
    stages: int


def _edge(tiles: Tiles, block_size: int) -> int:
    return min(256, max(16, gpu.next_power_of_2(block_size)))


def _rows(tiles: Tiles, block_size: int) -> int:
    return min(128, _edge(tiles, block_size))


def _warps(tiles: Tiles, block_size: int) -> int:
    return 8 if _edge(tiles, block_size) >= 128 else 4


@dataclasses.dataclass(frozen=True)
class GroupedGpuConfig(Tiles):
    """Tiles of the Triton kernels, powers of two.

    Attributes:
      block_m, block_n, block_k: rows, columns and depth of a tile of the forward pass; warps, stages: of its programs.
      backward_lhs_...: the same of the gradient of `lhs`.
      backward_rhs_...: of the weights' gradient, whose rows and columns are a matrix's, and whose depth is the rows of
      a group that are summed at once.
      group_m: tiles along the rows of a group that are walked together.
      num_programs: persistent programs of 8 warps; of 4, of which two fit a multiprocessor, there are twice as many.
    """

    block_m: int = size("rows", block_size=_rows)
    block_n: int = size("columns", block_size=_edge)
    block_k: int = size("depth")
    warps: int = warp_count(block_size=_warps)
    stages: int = stage_count()
    backward_lhs_m: int = size("rows", of="backward", block_size=_rows)
    backward_lhs_n: int = size("columns", of="backward", block_size=_edge)
    backward_lhs_k: int = size("depth", of="backward")
    backward_lhs_warps: int = warp_count(of="backward", block_size=_warps)
    backward_lhs_stages: int = stage_count(of="backward")
    backward_rhs_m: int = size("rows", of="backward", block_size=_rows)
    backward_rhs_n: int = size("columns", of="backward", block_size=_edge)
    backward_rhs_k: int = size("depth", of="backward")
    backward_rhs_warps: int = warp_count(of="backward", block_size=_warps)
    backward_rhs_stages: int = stage_count(of="backward")
    group_m: int = size("rows", 8)
    num_programs: int = size("programs", gpu.SMS)

    @property
    def forward(self) -> Tile:
        return Tile(*dataclasses.astuple(self)[:5])

    @property
    def backward_lhs(self) -> Tile:
        return Tile(*dataclasses.astuple(self)[5:10])

    @property
    def backward_rhs(self) -> Tile:
        return Tile(*dataclasses.astuple(self)[10:15])


def why_not(spec: GroupedSpec, target: Target) -> str | None:
    """The reason why these kernels cannot serve `spec`, or None."""
    for name, dtype in (("`lhs`", spec.operands.lhs.dtype), ("`out_dtype`", spec.out_dtype)):
        if dtype.name not in _DTYPES:
            return f"{name} is {dtype.name}; the Triton kernels take {', '.join(_DTYPES)}."
    if 0 in (spec.batch, spec.groups, spec.m, spec.n, spec.k):
        return "an array is empty."
    if spec.operands.rhs_scale is not None and bits(spec.operands.rhs.dtype) < 8 and spec.n % 2:
        return f"`rhs` has rows of {spec.n} numbers of 4 bits; the Triton kernels read two at a time."
    if spec.groups > _MOST_GROUPS:
        return f"there are {spec.groups:,} groups; a program holds the sizes of {_MOST_GROUPS:,} in its registers."
    return gpu.why_not(target)


def heuristic(spec: GroupedSpec, target: Target) -> GroupedGpuConfig:
    """As many rows to a tile as a group has on average, 128 at most; the widest tiles of which there are enough for
    every multiprocessor.
    """
    width = spec.operands.lhs.dtype.itemsize
    mean = gpu.cdiv(spec.m, spec.groups)
    entries = spec.batch * spec.groups
    quantized = spec.operands.rhs_scale is not None
    shared, _, rows, columns = spec.operands.rhs.shape
    return GroupedGpuConfig(
        *tiles(entries, mean, spec.n, spec.k, width, quantized),
        *tiles(entries, mean, spec.k, spec.n, width, quantized),
        *tiles(shared * spec.groups, rows, columns, mean, width),
    )


def tiles(products: int, m: int, n: int, k: int, width: int, quantized: bool = False) -> Tile:
    """The tile of `products` products of about `m x n x k` elements of `width` bytes; `quantized`: of one factor in
    registers.
    """
    block_k = min({2: 64, 4: 32}[width], max(16, gpu.next_power_of_2(k)))
    # Of float32, whose factors are taken apart in registers, a tile of 256 columns has no room; nor has one that is
    # dequantized there.
    options = ((128, 128), (64, 128), (64, 64))
    options = ((128, 256), *options) if width == 2 and not quantized else options
    block_m, block_n = options[-1]
    for block_m, block_n in options:
        enough = products * gpu.cdiv(m, block_m) * gpu.cdiv(n, block_n) >= gpu.SMS
        if enough and 4 * m >= 3 * block_m and n >= block_n:
            break
    block_m = min(block_m, max(16, gpu.next_power_of_2(m)))
    block_n = min(block_n, max(16, gpu.next_power_of_2(n)))
    large = block_m * block_n >= 128 * 128
    return Tile(block_m, block_n, block_k, 8 if large else 4, 3 if large else 4)


def _aligned(columns: int, dtype: jnp.dtype) -> bool:
    """Whether the copy engine takes rows of that many elements: whole 16 bytes."""
    return columns * dtype.itemsize % 16 == 0


def _copies(rhs: AnyArray, columns: int, pairs: bool) -> bool:
    """Whether the copy engine takes the matrices, in tiles of so many columns: whole 16 bytes too."""
    stored = array_spec(rhs).dtype
    return _aligned(rhs.shape[3], stored) and (columns // 2 if pairs else columns) * stored.itemsize >= 16


def _precision(dtype: jnp.dtype) -> str | None:
    return "tf32x3" if dtype.itemsize == 4 else None


def _beyond(groups: int, first: object) -> int:
    """A power of two that leaves entries for the rows of no group: those after the last, and before the first."""
    return gpu.next_power_of_2(groups + (1 if first is None else 2))


def _step(x: AnyArray, size: int) -> int:
    """Elements of `x` from one batch entry to the next, 0 where all share them."""
    return 0 if x is None or x.shape[0] == 1 else size


def _pairs(x: AnyArray) -> AnyArray:
    """A JAX array of 4 bits as int8, two numbers of a row in a byte, the first in its lower bits."""
    return jax.lax.bitcast_convert_type(x.reshape(*x.shape[:-1], x.shape[-1] // 2, 2), jnp.int8)


def rows_product(
    spec: GroupedSpec,
    config: GroupedGpuConfig,
    tile: Tile,
    lhs: AnyArray,
    operands: Operands,
    transpose: bool,
    dtype: DTypeLike,
) -> AnyArray:
    """`[B, M, N]`: rows of lhs `[B, M, K]` times the matrices rhs `[B or 1, G, K, N]` (`[B or 1, G, N, K]` if
    `transpose`) of their groups.
    """
    _, rhs, sizes, scale, first = operands
    batch, m, k = lhs.shape
    n = rhs.shape[2 if transpose else 3]
    stored = spec.operands.rhs.dtype
    four = {INT4: "int", FP4: "float"}.get(stored)
    rhs = rhs if four is None else _pairs(rhs)
    block_m, block_n, block_k, warps, stages = tile
    # Each group can add a tile that it does not fill, and so can the rows without a group.
    most = (gpu.cdiv(m, block_m) + spec.groups) * gpu.cdiv(n, block_n)
    programs = min(most, config.num_programs * 8 // warps)
    kind = array_spec(lhs).dtype
    (out,) = gpu.launch(
        ROWS_PRODUCT,
        (programs, batch),
        dict(lhs_ptr=lhs, rhs_ptr=rhs, scale_ptr=scale, sizes_ptr=sizes, first_ptr=first),
        dict(out_ptr=gpu.result((batch, m, n), dtype)),
        warps=warps,
        stages=stages,
        batch=batch,
        groups=spec.groups,
        M=m,
        N=n,
        K=k,
        strides=Strides(*[_step(x, spec.groups) for x in (rhs, scale, sizes)], first=_step(first, 1)),
        MATRICES=Matrices(
            PLANES=rhs.shape[0] * spec.groups,
            BLOCKS=1 if scale is None else scale.shape[2],
            SIZE=spec.block_k,
            WIDTH=1 if scale is None else scale.shape[3],
            FOUR=four,
            TRANSPOSE=transpose,
        ),
        PRECISION=_precision(kind),
        TMA_LHS=_aligned(k, kind),
        TMA_RHS=_copies(rhs, block_k if transpose else block_n, four is not None),
        PROGRAMS=programs,
        GROUPS=_beyond(spec.groups, first),
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        BLOCK_K=block_k,
        GROUP_M=config.group_m,
        SPLIT=block_n >= 256,
    )
    return out


def weights_product(spec: GroupedSpec, config: GroupedGpuConfig, operands: Operands, dout: AnyArray) -> AnyArray:
    """`[B or 1, G, K, N]`: for each group its rows of lhs `[B, M, K]`, transposed, times those of dout `[B, M, N]`; the
    other way around where the matrices are transposed.
    """
    lhs, _, sizes, _, first = operands
    lhs, dout = spec.matrix_factors(lhs, dout)
    rhs = spec.operands.rhs
    rows, columns = rhs.shape[2:]
    block_m, block_n, block_k, warps, stages = config.backward_rhs
    count = spec.groups * gpu.cdiv(rows, block_m) * gpu.cdiv(columns, block_n)
    programs = min(count, config.num_programs * 8 // warps)
    (out,) = gpu.launch(
        WEIGHTS_PRODUCT,
        (programs, rhs.shape[0]),
        dict(lhs_ptr=lhs, dout_ptr=dout, sizes_ptr=sizes, first_ptr=first),
        dict(out_ptr=gpu.result(rhs.shape, rhs.dtype)),
        warps=warps,
        stages=stages,
        batch=spec.batch,
        groups=spec.groups,
        M=spec.m,
        N=columns,
        K=rows,
        sizes_stride=_step(sizes, spec.groups),
        first_stride=_step(first, 1),
        MEMBERS=spec.batch // rhs.shape[0],
        PRECISION=_precision(rhs.dtype),
        TMA_LHS=_aligned(rows, rhs.dtype),
        TMA_DOUT=_aligned(columns, rhs.dtype),
        PROGRAMS=programs,
        GROUPS=_beyond(spec.groups, None),
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        BLOCK_K=block_k,
        GROUP_M=config.group_m,
        SPLIT=block_n >= 256,
    )
    return out


def _cast(x: AnyArray, dtype: DTypeLike) -> AnyArray:
    if array_spec(x).dtype == dtype:
        return x
    size = math.prod(x.shape)
    (y,) = gpu.launch(
        CAST, (gpu.cdiv(size, 4096),), dict(x_ptr=x), dict(y_ptr=gpu.result(x.shape, dtype)), size=size, COLUMNS=4096
    )
    return y


def forward(spec: GroupedSpec, config: GroupedGpuConfig, operands: Operands) -> tuple[Outputs, None]:
    lhs, turned = operands.lhs, spec.transpose_rhs
    return Outputs(rows_product(spec, config, config.forward, lhs, operands, turned, spec.out_dtype)), None


def backward(
    spec: GroupedSpec,
    config: GroupedGpuConfig,
    operands: Operands,
    cotangents: Outputs,
) -> Operands:
    scale = operands.rhs_scale
    dtype = spec.operands.lhs.dtype
    dout = _cast(cotangents.out, dtype)
    d_lhs = rows_product(spec, config, config.backward_lhs, dout, operands, not spec.transpose_rhs, dtype)
    if scale is not None:
        return gradients(operands, d_lhs, None) if gpu.framework(d_lhs) == "jax" else Operands(d_lhs, *(None,) * 4)
    return Operands(d_lhs, weights_product(spec, config, operands, dout), None, None, None)


TRITON = Implementation("triton", "cuda", forward, backward, why_not, heuristic, GroupedGpuConfig)
