"""Tiles of the TPU kernels: what they take of VMEM, and how they are chosen."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math

from vishwamai.core.errors import KernelError
from vishwamai.core.hardware import TpuChip
from vishwamai.core.pallas import VmemTiles, planning_chip, round_up
from vishwamai.core.qtensor import bits
from vishwamai.core.target import Target
from vishwamai.core.tiles import Tiles, option, part, size
from vishwamai.core.tpu_dequantize import scale_rows
from vishwamai.ops.moe.spec import GroupedSpec

Block = tuple[int, int, int]
"""(rows, columns, depth) of one step."""
ALIGN = 16
"""Rows at whose multiples a piece of a tile may begin: the rows of one bfloat16 register."""


def _edge(tiles: Tiles, block_size: int) -> int:
    return block_size


@dataclasses.dataclass(frozen=True)
class GroupedTile(Tiles):
    """Tiles of one product, in elements; each is clamped to the array.

    Attributes:
      rows, columns, depth: sizes of one step. For the weights' gradient the depth is the columns of lhs, and the rows
        are what is contracted.
      chunk_rows: rows multiplied at once. small_rows: the same for what is left of a group.
      chunk_depth: depth multiplied at once; divides that of the block, or that is the whole depth.
      matrix_buffers: groups' matrices in VMEM at once, 2 or 3, where one stays there for all visits of its group: one
        or two are copied while another is used.
    """

    rows: int = size("rows", block_size=_edge)
    columns: int = size("columns", block_size=_edge)
    depth: int = size("depth", block_size=_edge)
    chunk_rows: int = size("rows at once", block_size=lambda tiles, n: min(tiles.chunk_rows, n))
    small_rows: int = size("rows at a group's end", block_size=lambda tiles, n: min(n, 128))
    chunk_depth: int = size("depth at once", block_size=lambda tiles, n: min(tiles.chunk_depth, n))
    matrix_buffers: int = option(2)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.matrix_buffers not in (2, 3):
            raise KernelError(f"GroupedTile: `matrix_buffers` is {self.matrix_buffers!r}; pass 2 or 3.")

    @property
    def block(self) -> Block:
        """(rows, columns, depth) of one step."""
        return self.rows, self.columns, self.depth


@dataclasses.dataclass(frozen=True)
class GroupedConfig(VmemTiles):
    """Tiles of the TPU kernels.

    Attributes:
      forward, grad_lhs, grad_rhs: the tiles of each product.
      vmem_bytes: bytes of VMEM that a step plans to use, buffers and temporaries together.
    """

    forward: GroupedTile = part(GroupedTile)
    grad_lhs: GroupedTile = part(GroupedTile)
    grad_rhs: GroupedTile = part(GroupedTile)
    vmem_bytes: int = 0

    def needs(self, spec: GroupedSpec, target: Target) -> dict[str, int]:
        tiles = self.forward, self.grad_lhs, self.grad_rhs
        problems = _problems(spec, target)
        fits = (fit(tile, p.m, p.n, p.k) for p, tile in zip(problems, tiles, strict=True))
        need = max(p.vmem(tile.block, tile.matrix_buffers) for p, tile in zip(problems, fits))
        return {"vmem_bytes": need}


def fit(tile: GroupedTile, m: int, n: int, k: int) -> GroupedTile:
    """The tile for one problem: an axis that fits is taken whole, any other in multiples of what the memory tiles."""
    rows, columns, depth = tile.block
    rows = m if rows >= m else min(m, round_up(rows, 128))
    columns = n if columns >= n else min(n, round_up(columns, 128))
    depth = k if depth >= k else min(k, round_up(depth, 128))
    chunk_m = min(rows, round_up(tile.chunk_rows, ALIGN))
    small_m = min(chunk_m, round_up(tile.small_rows, ALIGN))
    if rows % ALIGN:
        chunk_m = small_m = rows
    chunk_k = min(depth, round_up(tile.chunk_depth, 128))
    chunk_k = depth if depth % chunk_k and depth < k else chunk_k  # the last of a whole depth may be shorter
    return GroupedTile(rows, columns, depth, chunk_m, small_m, chunk_k, tile.matrix_buffers)


def stays(block: Block, n: int, k: int) -> bool:
    """Whether a group's matrix, of `[k, n]`, stays in VMEM for all its visits: a block has the whole depth, and whole
    registers of columns or all of them.
    """
    _, block_n, block_k = block
    return block_k == k and (block_n == n or (n % block_n == 0 and block_n % 128 == 0))


_HBM_SHARE = 0.9
"""Of the peak bandwidth, that large transfers reach."""
_STEP_CYCLES = 300
"""Of a grid step outside its products."""
_PIECE_CYCLES = 300
"""Of one product outside its multiplications: filling and draining the matrix unit."""
_UNROLLED = 16384
"""Cycles of products that are unrolled at once: more is more program, less is more filling and draining of the matrix
unit.
"""
_CONVERSION, _BLOCK_OPERATIONS = 3, 5
"""Vector operations that make an element of a narrow matrix what is multiplied, without and with a scale for each
block.
"""
_SMALL = 128
"""Rows of a piece at a group's end: fewer take as long, for the matrix unit must be given as many weights as it has
rows.
"""


def middle_rows(piece: int, small: int) -> int:
    """Rows of the piece between a large and a small one; 0 where there is none."""
    middle = round_up((piece + small) // 2, ALIGN)
    return middle if small < middle < piece else 0


@dataclasses.dataclass(frozen=True)
class GroupedProblem:
    """One of the three products, as the model sees it.

    Attributes:
      m, n, k: rows of a batch entry, columns of the result, and the depth that is contracted; of the weights' gradient,
        the columns of both operands.
      itemsize, out_itemsize: bytes of an element of the operands and of the result.
      weights: it is the weights' gradient, whose rows are what is contracted.
      matrix_bytes: bytes of an element of a group's matrix, half of one for 4 bits.
      granule: rows of the matrix that a tile must hold a multiple of, or all, so that its blocks' scales fill whole
        tiles of memory; transposed: the rows are the columns of the result.
      unpacking: vector operations for an element of the matrix before it is multiplied.
    """

    batch: int
    groups: int
    m: int
    n: int
    k: int
    itemsize: int
    out_itemsize: int
    weights: bool
    chip: TpuChip
    matrix_bytes: float
    granule: int = 1
    transposed: bool = False
    unpacking: int = 0

    @property
    def rate(self) -> float:
        """Multiply-adds of one core in a cycle."""
        peak = self.chip.peak_f32 if self.itemsize == 4 else self.chip.peak_bf16
        return peak / (2 * self.chip.cores * self.chip.clock)

    @property
    def bandwidth(self) -> float:
        """Bytes of one core in a cycle."""
        return _HBM_SHARE * self.chip.hbm_bandwidth / (self.chip.cores * self.chip.clock)

    def chunk_k(self, block: Block) -> int:
        """Depth of what is multiplied at once: a divisor of the block's depth in whole registers with at most
        `_UNROLLED` cycles of work; of a whole depth that no register divides, about equal parts.
        """
        block_m, block_n, block_k = block
        least = 128 if self.transposed else math.lcm(128, self.granule)
        most = _UNROLLED * self.rate / (_piece(block_m) * block_n)
        if block_k % least:
            even = self.k == block_k and self.granule == 1 and block_k > most  # all of it, the last a little shorter
            return round_up(-(-block_k // math.ceil(block_k / most)), 128) if even else block_k
        return max(d for d in range(least, block_k + 1, least) if block_k % d == 0 and (d <= most or d == least))

    def vmem(self, block: Block, matrices: int = 2) -> int:
        """Bytes of VMEM: blocks twice, for a transfer runs beside the computation, and the sum once; `matrices` where
        they stay for their group.
        """
        m, n, k = (round_up(size, 128) for size in block)
        if self.weights:
            return 2 * (m * k + m * n) * self.itemsize + k * n * (2 * self.out_itemsize + 4)
        matrix = int(k * n * self.matrix_bytes)
        operands = m * k * self.itemsize + matrix
        unpacked = round_up(self.chunk_k(block), 128) * n * (self.itemsize + 4) if self.unpacking else 0
        more = (matrices - 2) * matrix if self.stays(block) else 0
        return 2 * operands + more + m * n * (2 * self.out_itemsize + 4) + 8 * _piece(m) * n + unpacked

    def stays(self, block: Block) -> bool:
        """Whether a group's matrix stays in VMEM for all its visits in a sweep."""
        return not self.weights and stays(block, self.n, self.k)

    def cycles(self, block: Block) -> float:
        """About how long the product takes: the mean of groups that end where tiles do, and of groups that never do."""
        groups = min(self.groups, self.m)
        fewest = max(0, groups - self.m // block[0])  # each group is visited, however few rows it has
        return (self._cycles(block, fewest) + self._cycles(block, groups - 1)) / 2

    def _cycles(self, block: Block, shared: int) -> float:
        """With so many visits to tiles that a group shares with another."""
        block_m, block_n, block_k = block
        columns, depths = -(-self.n // block_n), -(-self.k // block_k)
        full = max(1.0, self.m / block_m)
        area = block_n * block_k
        rows = (min(block_m, self.m / self.groups) + _SMALL) / 2
        # A shared tile is half full on average, and half a piece is masked.
        work, part = self._visit(block, block_m), self._visit(block, rows)
        matrix = area * self.matrix_bytes / self.bandwidth
        lhs = block_m * block_k * self.itemsize / self.bandwidth
        if self.weights:
            load = block_m * (block_n + block_k) * self.itemsize / self.bandwidth
            store = area * self.out_itemsize / self.bandwidth
            sweep = full * max(work, load) + shared * max(part, load) + self.groups * store / 2
            outer: tuple[int, ...] = (columns, depths, self.batch)
        elif depths == 1:
            visits = full + shared
            # A group that shares tiles adds half of the step between two sizes of pieces at either end.
            middle = middle_rows(_piece(block_m), _SMALL)
            added = middle - _SMALL + ALIGN if middle else _SMALL
            busy = max(self._visit(block, self.m + shared * added) + visits * _STEP_CYCLES, visits * lhs)
            # A matrix is copied while its predecessor is used; the rows of the visit after the next one wait behind it.
            # One that does not stay is copied in the last visit of its predecessor.
            ahead = 2 if self.stays(block) else 1
            late = max(0.0, matrix + ahead * (lhs - busy / visits))
            sweep = busy + min(self.groups, self.m) * late
            outer = (columns, self.batch)
        else:
            sweep = depths * (full * max(work, matrix + lhs) + shared * max(part, matrix + lhs))
            outer = (columns, self.batch)
        # Pieces of fewer rows keep the matrix unit less busy.
        sweep *= 1.0 if _piece(block_m) >= 256 or self.weights else 1.12
        # A part of the grid for each core, if the sweeps come out even.
        cores = self.chip.cores_per_device
        return math.prod(outer) / (cores if any(size % cores == 0 for size in outer) else 1) * sweep + matrix + lhs

    def _visit(self, block: Block, rows: float) -> float:
        """Cycles that one step computes with `rows` of its rows."""
        pieces = 1 if self.weights else -(-rows // _piece(block[0]))
        products = pieces * (block[2] / self.chunk_k(block)) if not self.weights else 1
        area = block[1] * block[2]
        vector = pieces * area * self.unpacking / (self.chip.valus * self.chip.sublanes * self.chip.lanes)
        return max(rows * area / self.rate, vector) + products * _PIECE_CYCLES + _STEP_CYCLES

    def _fits_program(self, block: Block) -> bool:
        """Whether what is unrolled at once is a program of bearable size."""
        rows = block[0] if self.weights else _piece(block[0])
        depth = block[2] if self.weights else self.chunk_k(block)
        return rows * block[1] * depth / self.rate <= 1.25 * _UNROLLED or depth <= max(128, self.granule)

    def best(self) -> GroupedTile:
        """The tile that the model finds fastest among those that fit three quarters of VMEM."""
        # The weights' gradient touches its whole sum once for each tile of rows, so few of them are slow unless groups
        # are small.
        fewest = 128 if not self.weights else 512 if self.m >= 512 * self.groups else 256
        rows = sorted({min(self.m, size) for size in (128, 256, 512, 1024) if size >= fewest})
        columns = _sizes(self.n, 2048 if self.weights else 4096, self.granule if self.transposed else 1)
        depths = _sizes(self.k, 4096, 1 if self.transposed else self.granule)
        if not self.weights:
            depths = sorted({*depths, self.k})
        budget = self.chip.vmem_budget
        blocks = [
            block
            for block in itertools.product(rows, columns, depths)
            if self.vmem(block) <= budget and self._fits_program(block)
        ]
        smallest = (rows[0], columns[0], depths[0])
        block = min(blocks, key=lambda block: (self.cycles(block), self.vmem(block)), default=smallest)
        buffers = 3 if self.stays(block) and self.vmem(block, 3) <= budget else 2
        return GroupedTile(*block, _piece(block[0]), min(_SMALL, block[0]), self.chunk_k(block), buffers)


def _piece(block_m: int) -> int:
    return min(256, block_m)


def _sizes(size: int, largest: int, granule: int) -> list[int]:
    """Divisors in whole registers and multiples of `granule`; where there are none, the whole axis and powers of two of
    which the last block is ragged.
    """
    step = math.lcm(128, granule)
    divisors = [d for d in range(step, largest + 1, step) if size % d == 0]
    undivided = [size] if size <= largest else []
    ragged = [n for n in (256, 512, 1024, 1536, 2048) if n < min(size, largest)] if granule == 1 else []
    return divisors or ragged + undivided or [step]


@functools.lru_cache(maxsize=1024)
def _best(problem: GroupedProblem) -> tuple[GroupedTile, int]:
    tile = problem.best()
    return tile, problem.vmem(tile.block, tile.matrix_buffers)


def _problems(spec: GroupedSpec, target: Target) -> tuple[GroupedProblem, GroupedProblem, GroupedProblem]:
    """The forward product, the gradient of lhs and that of the weights."""
    o = spec.operands
    size, out = o.lhs.dtype.itemsize, spec.out_dtype.itemsize
    shared = o.rhs.shape[0] != spec.batch
    granule, unpacking = 1, 0
    if o.rhs_scale is not None:
        unpacking = _BLOCK_OPERATIONS if spec.block_k else _CONVERSION
        if spec.block_k and spec.block_k % 8 == 0:
            granule = scale_rows(spec.block_k, o.rhs_scale.dtype)

    def problem(n: int, k: int, out: int, weights: bool, transposed: bool = False) -> GroupedProblem:
        matrix = (size, 1, False, 0) if weights else (bits(o.rhs.dtype) / 8, granule, transposed, unpacking)
        return GroupedProblem(spec.batch, spec.groups, spec.m, n, k, size, out, weights, planning_chip(target), *matrix)

    n, k = spec.n, spec.k
    turned = spec.transpose_rhs
    weights = (k, n) if turned else (n, k)
    forward, grad_lhs = problem(n, k, out, False, turned), problem(k, n, size, False, not turned)
    return forward, grad_lhs, problem(*weights, 4 if shared else size, True)


def heuristic(spec: GroupedSpec, target: Target) -> GroupedConfig:
    """The tiles that the model of this module finds fastest for each of the three products."""
    forward, grad_lhs, grad_rhs = (_best(problem) for problem in _problems(spec, target))
    return GroupedConfig(forward[0], grad_lhs[0], grad_rhs[0], max(forward[1], grad_lhs[1], grad_rhs[1]))
