"""Tiles of the TPU kernel: their config, the products that a spec means, and how a product of few rows is cut."""

from __future__ import annotations

import dataclasses
import math

import jax.numpy as jnp

from vishwamai.core.hardware import TpuChip
from vishwamai.core.pallas import VmemTiles, planning_chip, round_up, vmem_budget
from vishwamai.core.precision import FP8_DTYPES
from vishwamai.core.qtensor import INT4, bits
from vishwamai.core.target import Target
from vishwamai.core.tiles import Tiles, option, size, sizes
from vishwamai.core.tpu_dequantize import scale_rows
from vishwamai.ops.matmul.spec import INTEGERS, MatmulSpec, joint_groups
from vishwamai.ops.matmul.tpu_tile_model import LARGEST, MatmulProblem, Tile, best_tile, chunk, forward_tile

VMEM_GRANULE = 1 << 16
"""Of the limit that is asked of the compiler: plans go up to `LARGEST` of VMEM, and a whole MiB more would be past its
end.
"""
EXACT_INT8_TERMS = 1024
"""Products of int8 numbers that float32 sums exactly: 1024 * 128 * 128 = 2^24."""


def _edge(tiles: Tiles, block_size: int) -> int:
    return block_size


def _none(tiles: Tiles, block_size: int) -> None:
    return None


@dataclasses.dataclass(frozen=True)
class MatmulConfig(VmemTiles):
    """Tiles of the TPU kernel, in elements; each is clamped to the array.

    Attributes:
      block_m, block_n, block_k: rows, columns and depth of one step of the forward product.
      grad_a: the same of the product that gives a's gradient; None takes the forward product's.
      grad_b: the same of b's gradient.
      native_8bit: multiply 8-bit operands on the chip's own unit; False widens them to bfloat16, exactly.
      ring: tiles of b that are on their way or in use at once where the forward product reads few rows, see
        `tpu_stream`; 0 for the usual pipeline of two.
      cores: cores that share such a product's columns.
      unpack: how such a product reads a narrow weight, see `tpu_unpack`.
      vmem_bytes: bytes of VMEM that a step plans to use, buffers and temporaries together.
      serpentine: the forward product goes over its tiles back and forth, on a chip of one core, see `tpu_serpentine`.
    """

    block_m: int = size("rows", block_size=_edge)
    block_n: int = size("columns", block_size=_edge)
    block_k: int = size("depth", block_size=_edge)
    grad_a: Tile | None = sizes(("rows of grad_a", "columns of grad_a", "depth of grad_a"), None, block_size=_none)
    grad_b: Tile | None = sizes(("rows of grad_b", "columns of grad_b", "depth of grad_b"), None, block_size=_none)
    chunk_k: int = size("depth", 1 << 30)
    native_8bit: bool = False
    vmem_bytes: int = 0
    ring: int = size("ring", 0, block_size=lambda tiles, n: 0)
    cores: int = 1
    unpack: str = "convert"
    serpentine: bool = option(False, block_size=lambda tiles, n: False)

    def tiles(self, phase: str) -> Tile:
        """The tile of "forward", "grad_a" or "grad_b"."""
        tile = None if phase == "forward" else getattr(self, phase)
        return tile or (self.block_m, self.block_n, self.block_k)

    def needs(self, spec: MatmulSpec, target: Target) -> dict[str, int]:
        need = vmem_budget(target) // 2 if self.ring else 0
        for phase in ("forward", "grad_a", "grad_b"):
            p = problem_of(spec, phase, target)
            need = max(need, p.vmem(fit(self.tiles(phase), p.m, p.n, p.k, p.lhs_axis, p.rhs_axis)))
        return {"vmem_bytes": need}


def fit(tile: Tile, m: int, n: int, k: int, lhs_axis: int, rhs_axis: int) -> Tile:
    """The tile for one problem: an axis that fits is taken whole, any other in multiples of what the memory tiles.

    Args:
      lhs_axis: axis (1 or 2) of lhs `[., ., .]` that is contracted; its other axis is M. rhs_axis: the same of rhs.
    """
    rows, columns, depth = tile
    # M lies along lanes where lhs is transposed, else along sublanes, of which an 8-bit tile has 32. N is always along
    # the lanes of the result.
    rows = m if rows >= m else min(m, round_up(rows, 128 if lhs_axis == 1 else 32))
    columns = n if columns >= n else min(n, round_up(columns, 128))
    depth = k if depth >= k else min(k, round_up(depth, 128))
    return rows, columns, depth


def native_8bit(spec: MatmulSpec, chip: TpuChip | None) -> bool:
    """Whether the chip multiplies the spec's 8-bit operands as they are."""
    a, b = spec.operands.a.dtype, spec.operands.b.dtype
    if chip is None or any(spec.blocked):
        return False
    if a in INTEGERS and b in INTEGERS:
        return chip.has_int8
    return all(d in FP8_DTYPES and d.name in chip.fp8_formats for d in (a, b))


def problem_of(spec: MatmulSpec, phase: str, target: Target) -> MatmulProblem:
    """The product "forward", "grad_a" or "grad_b" of a spec."""
    planned = planning_chip(target)
    o = spec.operands
    a, b = bits(o.a.dtype) / 8, bits(o.b.dtype) / 8
    wide = spec.compute_dtype.itemsize
    out = spec.out_dtype.itemsize
    scaled = any(x is not None for x in (o.bias, o.scale_a, o.scale_b)) or spec.activation is not None
    m, n, k, groups = spec.m, spec.n, spec.k, spec.groups

    mixed = a != wide or b != wide
    widened = wide if mixed else 0
    widened = 4 if spec.precision == "high" else max(widened, 2 if spec.compute_dtype == jnp.int8 else 0)
    if phase == "forward" and native_8bit(spec, planned):
        widened = 1 if a < 1 or b < 1 else 0  # 4-bit numbers multiply as int8
    widened += 4 if any(spec.blocked) else 0  # scaled in float32
    granule = max([128, *(_granule(spec, phase, i) for i in range(2))])
    forward = phase == "forward"
    rate = _rate(spec, planned, forward=forward)

    def problem(
        groups: int, m: int, n: int, k: int, axes: tuple[int, int], sizes: tuple[float, float, int], sum_bytes: int
    ) -> MatmulProblem:
        summed = 1 if forward else max(1, spec.groups // groups)
        pieces = forward and spec.compute_dtype == jnp.int8 and not native_8bit(spec, planned) and not any(spec.blocked)
        return MatmulProblem(
            *(groups, m, n, k, summed, *axes, *sizes, sum_bytes),
            scaled_rows=forward and o.scale_a is not None,
            widened_bytes=widened,
            epilogue_bytes=16 if forward and spec.activation is not None else 0,
            rate=rate,
            chip=planned,
            granule=granule,
            deepest=EXACT_INT8_TERMS if pieces else 8192,
            serpentine=forward and planned.cores_per_device == 1 and not spec.keeps_preactivation,
        )

    if phase == "forward":
        axes = (1 if spec.transpose_a else 2, 2 if spec.transpose_b else 1)
        result = out * (2 if spec.keeps_preactivation else 1)
        plain = not scaled and spec.out_dtype == spec.accumulator
        return problem(groups, m, n, k, axes, (a, b, result), 0 if plain else 4)
    if phase == "grad_a":
        n_of_b = 1 if spec.transpose_b else 2
        g = joint_groups(o.a, o.scale_a)
        sizes = (wide, b, 4 if o.scale_a is not None else math.ceil(a))
        if spec.transpose_a:
            return problem(g, k, m, n, (n_of_b, 2), (b, wide, sizes[2]), 4)
        return problem(g, m, k, n, (2, n_of_b), sizes, 4)
    m_of_a = 2 if spec.transpose_a else 1
    g = joint_groups(o.b, o.scale_b)
    size = 4 if o.scale_b is not None else math.ceil(b)

    if spec.transpose_b:
        return problem(g, n, k, m, (1, m_of_a), (wide, a, size), 4)
    return problem(g, k, n, m, (m_of_a, 1), (a, wide, size), 4)


def _granule(spec: MatmulSpec, phase: str, operand: int) -> int:
    """What the depth of the forward product's tiles must be a multiple of for one operand's block scales."""
    transposed = not spec.transpose_a if operand == 0 else spec.transpose_b
    if phase != "forward" or not spec.blocked[operand] or transposed or spec.block_k % 8:
        return 1  # K lies along lanes, or the matrix unit repeats the scales
    return scale_rows(spec.block_k, spec.operands[3 + operand].dtype)


def _rate(spec: MatmulSpec, chip: TpuChip, *, forward: bool) -> float:
    """Multiply-adds a second of one core, in the dtype that the products run in."""
    peak = chip.peak_bf16
    if spec.precision != "default":
        peak = chip.peak_bf16 / (6 if spec.precision == "highest" else 3)
    elif forward and native_8bit(spec, chip):
        peak = chip.peak(spec.operands.a.dtype.name)
    return peak / chip.cores / 2


_RING = 4
_RING_SECONDS = 0.7e-6
"""Of the longest transfer of one tile of a ring: short beside the whole, of which the first load and the last product
are hidden by nothing, and with three of them on their way much longer than their latency.
"""
_RING_ROWS = 256
_RING_MARGIN = 1.25
"""How much longer than its products the transfers of such a product must take: its small tiles cost the matrix unit
more.
"""


def ring_tile(spec: MatmulSpec, chip: TpuChip) -> tuple[int, int, int] | None:
    """(columns, depth, cores) of a product of few rows whose time is that of reading `b`; None where it is no such
    product, or nothing fits.

    Tiles divide the array, and the cores share them evenly.
    """
    o = spec.operands
    limit = spec.bytes_moved / chip.hbm_bandwidth > _RING_MARGIN * spec.flops / chip.peak(spec.compute_dtype.name)
    few = spec.groups == 1 and spec.m <= _RING_ROWS and not spec.transpose_a and not spec.blocked[0]
    item = bits(o.b.dtype) / 8
    if not limit or not few or spec.n % 128 or spec.k % 128:
        return None
    granule = max(128, _granule(spec, "forward", 1))
    depths = [d for d in range(granule, spec.k + 1, granule) if spec.k % d == 0] + [spec.k]
    cores = chip.cores_per_device
    largest = _RING_SECONDS * chip.hbm_bandwidth / chip.cores
    tiles = [
        (columns, depth)
        for columns in range(128, min(spec.n, 2048) + 1, 128)
        if spec.n % (columns * cores) == 0
        for depth in depths
        if largest / 4 <= columns * depth * item <= largest
    ]
    if not tiles:
        return None
    # The fewest steps; among those the deepest, for the sum is touched once a step.
    columns, depth = max(tiles, key=lambda t: (t[0] * t[1], t[1]))
    scales = 0 if not spec.blocked[1] else 4 * round_up(-(-spec.k // spec.block_k), 8) * columns
    results = round_up(spec.m, 16) * spec.n * spec.out_dtype.itemsize * (2 if spec.keeps_preactivation else 1) // cores
    fixed = 2 * spec.m * spec.k * o.a.dtype.itemsize + 3 * spec.n * 8 * 4 + results
    if fixed + _RING * (columns * depth * item + scales) + 6 * columns * depth > chip.vmem_budget:
        return None
    return columns, depth, cores


def unpacking(spec: MatmulSpec, chip: TpuChip) -> str:
    """How a narrow weight is read best on `chip` (docs/notes/gemm.md): the vector unit's own conversions differ by
    generation.
    """
    narrow = spec.operands.b.dtype
    if narrow == jnp.float8_e4m3fn and chip.generation in (5, 6):
        return "b11fnuz"
    if (narrow == INT4 and chip.generation <= 5) or (narrow == jnp.int8 and chip.generation == 4):
        return "words"
    return "convert"


def heuristic(spec: MatmulSpec, target: Target) -> MatmulConfig:
    """The tiles that the model of this module finds fastest, for the product and for those of its gradient."""
    problems = {phase: problem_of(spec, phase, target) for phase in ("forward", "grad_a", "grad_b")}
    forward, serpentine = forward_tile(problems["forward"])
    tiles = {"forward": forward} | {phase: best_tile(problems[phase]) for phase in ("grad_a", "grad_b")}
    needed = max(problem.vmem(tiles[phase]) for phase, problem in problems.items())
    # The limit that is asked of the compiler is a quarter more, and VMEM has to have it.
    vmem_bytes = min(needed, int(LARGEST * planning_chip(target).vmem_bytes) * 4 // 5)
    gradients = (tiles["grad_a"], tiles["grad_b"])
    chip = target.tpu
    native = native_8bit(spec, chip)
    ring = None if chip is None else ring_tile(spec, chip)
    if ring is not None and chip is not None:
        columns, depth, cores = ring
        vmem_bytes = max(vmem_bytes, chip.vmem_budget // 2)
        return MatmulConfig(
            spec.m, columns, depth, *gradients, depth, native, vmem_bytes, _RING, cores, unpacking(spec, chip)
        )
    return MatmulConfig(
        *forward, *gradients, chunk(problems["forward"], forward), native, vmem_bytes, serpentine=serpentine
    )
