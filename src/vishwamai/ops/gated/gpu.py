"""The gated linear unit on GPUs: Triton kernels for torch tensors and JAX arrays.

Forward: both products of a tile in one pass over x, into two accumulators, and only the gated product (with both sums,
rounded, where a gradient will be asked for) goes to memory. Backward: the gradients of both products element by
element, then two kernels: x's gradient, the sum of two products in one accumulator, and the weights', which is the
forward pass's own kernel with x turned and nothing gated.
"""

from __future__ import annotations

import dataclasses
import math

from vishwamai.core import gpu
from vishwamai.core.op import Implementation
from vishwamai.core.target import Target
from vishwamai.core.tiles import Tiles, size, stage_count, warp_count
from vishwamai.core.types import AnyArray, PyTree
from vishwamai.ops.gated.gpu_arguments import Strides
from vishwamai.ops.gated.spec import GatedSpec, Operands, Outputs, Residuals

_KERNELS = "vishwamai.ops.gated.gpu_kernels"
PRODUCTS, SLOPES, GRADIENT_OF_X = (gpu.TritonKernel(_KERNELS, name) for name in ("products", "slopes", "gradient_of_x"))

_DTYPES = ("bfloat16", "float16", "float32")
_PRECISION = {"highest": "tf32x3", "high": "bf16x3", "default": None}
"""Of float32 operands: three products of TF32 parts keep 21 bits of each factor, three of bfloat16 parts 16."""


def _edge(tiles: Tiles, block_size: int) -> int:
    return min(128, max(16, gpu.next_power_of_2(block_size)))


@dataclasses.dataclass(frozen=True)
class GatedGpuConfig(Tiles):
    """Tiles of the Triton kernels.

    Attributes:
      block_m, block_n, block_k: rows, columns (of either product) and depth of a tile of the forward pass, powers of
        two.
      warps, stages: counts of a program; a stage is a tile of x and one of each weight in shared memory.
      group_m: tiles along the rows that are walked together.
      num_programs: persistent programs.
    """

    block_m: int = size("rows", block_size=_edge)
    block_n: int = size("columns", block_size=_edge)
    block_k: int = size("depth")
    warps: int = warp_count(8, block_size=lambda tiles, n: 8 if _edge(tiles, n) == 128 else 4)
    stages: int = stage_count(3)
    group_m: int = size("rows", 8)
    num_programs: int = size("programs", gpu.SMS)


def why_not(spec: GatedSpec, target: Target) -> str | None:
    """The reason why this kernel cannot serve `spec`, or None."""
    dtype = spec.operands.x.dtype.name
    if dtype not in _DTYPES:
        return f"`x` is {dtype}; the Triton kernel takes {', '.join(_DTYPES)}."
    if spec.quantized:
        return "`weights` are QTensors, which the Triton kernel does not take."
    if 0 in (spec.groups, spec.m, spec.n, spec.k):
        return "an array is empty."
    return gpu.why_not(target)


def _tiles(spec: GatedSpec, groups: int, m: int, n: int, k: int, sums: int) -> GatedGpuConfig:
    """The largest tiles of which there are enough for every multiprocessor.

    Args:
      groups, m, n, k: so many products `m x n x k`.
      sums: accumulators of a program; two of 128 x 128 fill its registers, or one of 128 x 256.
    """
    width = spec.operands.x.dtype.itemsize
    # The parts of float32 need registers, and so do the addresses of a tile that the copy engine cannot fetch.
    roomy = width == 2 and _aligned(spec, spec.k, spec.n)
    widest = (256 if roomy else 128) // sums
    options = ((128, widest), (128, 64), (64, 64))
    for block_m, block_n in options:
        if groups * gpu.cdiv(m, block_m) * gpu.cdiv(n, block_n) >= gpu.SMS and m >= block_m and n >= block_n:
            break
    block_m = min(block_m, max(16, gpu.next_power_of_2(m)))
    block_n = min(block_n, max(16, gpu.next_power_of_2(n)))
    block_k = min(64 if roomy else 32, max(16, gpu.next_power_of_2(k)))
    large = sums * block_m * block_n >= 128 * 128
    # Of small tiles a multiprocessor holds several programs.
    return GatedGpuConfig(
        block_m, block_n, block_k, 8 if large else 4, 3 if large else 4, num_programs=gpu.SMS * (1 if large else 3)
    )


def heuristic(spec: GatedSpec, target: Target) -> GatedGpuConfig:
    """Tiles of 128 x 128 for each product, or 64 columns of float32; smaller ones where there are too few for every
    multiprocessor.
    """
    return _tiles(spec, spec.groups, spec.m, spec.n, spec.k, 2)


def _aligned(spec: GatedSpec, *columns: int) -> bool:
    """Whether the copy engine takes rows of so many elements."""
    return all(n * spec.operands.x.dtype.itemsize % 16 == 0 for n in columns)


def _weights(spec: GatedSpec, operands: Operands) -> tuple[dict[str, PyTree], dict[str, int]]:
    """(buffers, strides) of the weights as the kernels take them."""
    size = spec.k * spec.n
    if operands.joint is None:
        assert operands.gate is not None
        buffers = dict(gate_ptr=operands.gate, up_ptr=operands.up)
        return buffers, dict(weight_stride=size, weight_gap=0, W_GROUPS=operands.gate.shape[0])
    buffers = dict(gate_ptr=operands.joint, up_ptr=None)
    return buffers, dict(weight_stride=2 * size, weight_gap=size, W_GROUPS=operands.joint.shape[0])


def _tiling(config: GatedGpuConfig, groups: int, m: int, n: int) -> tuple[int, dict[str, int]]:
    """(programs, the constants of a persistent kernel)."""
    programs = min(config.num_programs, groups * gpu.cdiv(m, config.block_m) * gpu.cdiv(n, config.block_n))
    tiles = dict(BLOCK_M=config.block_m, BLOCK_N=config.block_n, BLOCK_K=config.block_k, GROUP_M=config.group_m)
    return programs, dict(PROGRAMS=programs, **tiles)


def forward(
    spec: GatedSpec, config: GatedGpuConfig, operands: Operands, residuals: bool
) -> tuple[Outputs, Residuals | None]:
    weights, strides = _weights(spec, operands)
    out = gpu.result((spec.groups, spec.m, spec.n), spec.operands.x.dtype)
    programs, tiling = _tiling(config, spec.groups, spec.m, spec.n)
    h, gate, up = gpu.launch(
        PRODUCTS,
        (programs,),
        dict(x_ptr=operands.x, **weights),
        dict(h_ptr=out, keep_gate_ptr=out if residuals else None, keep_up_ptr=out if residuals else None),
        warps=config.warps,
        stages=config.stages,
        GROUPS=spec.groups,
        M=spec.m,
        N=spec.n,
        K=spec.k,
        strides=Strides(strides["weight_stride"], strides["weight_gap"], spec.m * spec.n, 0),
        W_GROUPS=strides["W_GROUPS"],
        X_GROUPS=operands.x.shape[0],
        SUMMED=1,
        TRANSPOSE_X=False,
        ACTIVATION=spec.activation,
        PRECISION=_PRECISION[spec.precision],
        TMA=_aligned(spec, spec.k, spec.n),
        **tiling,
    )
    return Outputs(h), Residuals(gate, up) if residuals else None


def backward(
    spec: GatedSpec,
    operands: Operands,
    residuals: Residuals,
    cotangents: Outputs,
) -> Operands:
    slope = gpu.result((spec.groups, spec.m, spec.n), spec.operands.x.dtype)
    count, block = math.prod(slope.shape), 1024
    d_gate, d_up = gpu.launch(
        SLOPES,
        (gpu.cdiv(count, block),),
        dict(gate_ptr=residuals.gate, up_ptr=residuals.up, dh_ptr=cotangents.h),
        dict(d_gate_ptr=slope, d_up_ptr=slope),
        count=count,
        ACTIVATION=spec.activation,
        BLOCK=block,
    )
    dx = _gradient_of_x(spec, operands, d_gate, d_up)
    return Operands(dx, *_gradients_of_weights(spec, operands, d_gate, d_up))


def _gradient_of_x(spec: GatedSpec, operands: Operands, d_gate: object, d_up: object) -> AnyArray:
    weights, strides = _weights(spec, operands)
    groups, x = operands.x.shape[0], spec.operands.x
    config = _tiles(spec, groups, spec.m, spec.k, spec.n, 1)
    programs, tiling = _tiling(config, groups, spec.m, spec.k)
    (dx,) = gpu.launch(
        GRADIENT_OF_X,
        (programs,),
        dict(d_gate_ptr=d_gate, d_up_ptr=d_up, **weights),
        dict(dx_ptr=gpu.result(x.shape, x.dtype)),
        warps=config.warps,
        stages=config.stages,
        GROUPS=groups,
        M=spec.m,
        N=spec.k,
        K=spec.n,
        D_GROUPS=spec.groups,
        SUMMED=spec.groups // groups,  # x that the groups share has the sum of their gradients
        PRECISION=_PRECISION[spec.precision],
        TMA=_aligned(spec, spec.n),
        **strides,
        **tiling,
    )
    return dx


def _gradients_of_weights(
    spec: GatedSpec, operands: Operands, d_gate: object, d_up: object
) -> tuple[AnyArray, AnyArray, AnyArray]:
    """(of gate, of up, of both in one array)."""
    like = operands.gate if operands.joint is None else operands.joint
    groups, size = like.shape[0], spec.k * spec.n
    config = _tiles(spec, groups, spec.k, spec.n, spec.m, 2)
    programs, tiling = _tiling(config, groups, spec.k, spec.n)
    out = gpu.result(like.shape, spec.operands.x.dtype)
    joint = operands.joint is not None
    _, first, second = gpu.launch(
        PRODUCTS,
        (programs,),
        dict(x_ptr=operands.x, gate_ptr=d_gate, up_ptr=d_up),
        dict(h_ptr=None, keep_gate_ptr=out, keep_up_ptr=None if joint else out),
        warps=config.warps,
        stages=config.stages,
        GROUPS=groups,
        M=spec.k,
        N=spec.n,
        K=spec.m,
        strides=Strides(spec.m * spec.n, 0, 2 * size if joint else size, size if joint else 0),
        X_GROUPS=operands.x.shape[0],
        W_GROUPS=spec.groups,
        SUMMED=spec.groups // groups,
        TRANSPOSE_X=True,
        ACTIVATION=None,
        PRECISION=_PRECISION[spec.precision],
        TMA=_aligned(spec, spec.k, spec.n),
        **tiling,
    )
    return (None, None, first) if joint else (first, second, None)


TRITON = Implementation("triton", "cuda", forward, backward, why_not, heuristic, GatedGpuConfig)
