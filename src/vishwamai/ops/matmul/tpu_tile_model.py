"""A model of the TPU kernel's pipeline: what a tile takes of VMEM and about how long a product takes with it, and the
tile that is best by it.

A step takes the longer of its products and the next step's transfers; the first load and the last store are hidden by
nothing. Its constants were fitted to the compiler's schedules (docs/notes/gemm.md).
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math

from vishwamai.core.hardware import TpuChip
from vishwamai.core.pallas import round_up

Tile = tuple[int, int, int]
"""(rows, columns, depth) of one step."""

_HBM_SHARE = 0.9
"""Of the peak bandwidth, that large transfers reach."""
_LATENCY = 0.6e-6
"""Seconds from the start of a transfer until its data is visible."""
_STEP_CYCLES = 300
"""Of a grid step outside its products: transfers started and awaited, the matrix unit filled and drained."""
_CHUNK_CYCLES = 180
"""Of one more chunk."""
_CHUNK_WORK = 8192
"""Cycles of products that are unrolled at once: more is more program, less is more filling and draining."""
_SUM_CYCLES = 270 / (1 << 20)
"""For each element of the sum that a chunk reads and writes, where the matrix unit does not hide it."""
_SPILLS = 0.06
"""Of VMEM, that spills take at most, by the compiler's report."""
_V4_NARROW_BYTES = 2.4
"""Of what v4, which converts 8-bit floats in several operations, keeps for each of their elements beside the copy and
the spills, by the same.
"""
LARGEST = 0.99
"""Of VMEM, that a plan may take."""
_HIDDEN_SUM = 2 << 20
_LONG_SUM_CYCLES = 80 / (1 << 20)
"""Of v6e's int8 products, for each element of a sum beyond `_HIDDEN_SUM`: 275 cycles a chunk were lost with 2048 x
1024, 435 with 2048 x 2048.
"""
_SERPENTINE_GAIN = 0.99
"""Of a product's time, that the kernel's own stores have to save."""
_ZERO_OPERATIONS = 4
"""Of the vector unit for an element of a ragged tile."""


def _accumulates(chip: TpuChip) -> bool:
    """Whether the matrix unit adds up a deep product itself (TPU7x), so that a deep chunk touches the sum in VMEM
    once.
    """
    return chip.generation >= 7


@dataclasses.dataclass(frozen=True)
class MatmulProblem:
    """One product `[m, k] x [k, n]`, as the model sees it.

    Attributes:
      groups: products that are stored; summed: products that are added up in each.
      lhs_axis, rhs_axis: the contracted axis of each operand (1 or 2).
      lhs_bytes, rhs_bytes, out_bytes: bytes of an element, half of one for 4-bit numbers; out_bytes of all results
        together.
      sum_bytes: bytes of an element of a separate sum, 0 where the result is the sum.
      widened_bytes: size of the copy in the products' dtype of each operand's element in VMEM, 0 without a copy.
      epilogue_bytes: size of the values that the compiler keeps for each element of the result while it computes an
        activation.
      rate: multiply-adds a second of one core. bandwidth: bytes a second of one core.
      granule: divisor of the depth of a tile, so that its blocks' scales fill whole tiles of memory.
      deepest: upper bound of the depth.
      serpentine: the kernel may go over the tiles back and forth.
    """

    groups: int
    m: int
    n: int
    k: int
    summed: int
    lhs_axis: int
    rhs_axis: int
    lhs_bytes: float
    rhs_bytes: float
    out_bytes: int
    sum_bytes: int
    scaled_rows: bool
    widened_bytes: int
    epilogue_bytes: int
    rate: float
    chip: TpuChip
    granule: int = 128
    deepest: int = 8192
    serpentine: bool = False

    def buffers(self, tile: Tile) -> int:
        """Bytes of VMEM that the kernel asks for: blocks twice, for a transfer runs beside the computation, the sum
        once, and copies.
        """
        bm, bn, bk = tile

        def block(rows: int, columns: int, itemsize: float) -> int:
            return int(round_up(rows, int(32 / itemsize)) * round_up(columns, 128) * itemsize)

        lhs = block(bk, bm, self.lhs_bytes) if self.lhs_axis == 1 else block(bm, bk, self.lhs_bytes)
        rhs = block(bk, bn, self.rhs_bytes) if self.rhs_axis == 1 else block(bn, bk, self.rhs_bytes)
        result = round_up(bm, 32) * round_up(bn, 128)
        vectors = (block(bm, 1, 4) if self.scaled_rows else 0) + 2 * block(8, bn, 4)
        copies = (bm + bn) * bk * self.widened_bytes + result * self.epilogue_bytes
        return 2 * (lhs + rhs + vectors + result * self.out_bytes) + result * self.sum_bytes + copies

    def vmem(self, tile: Tile) -> int:
        """Bytes of VMEM: `buffers`, and what the compiler keeps beside them: the rows of a chunk, in its own order, and
        spills.
        """
        bm, bn, _ = tile
        depth = chunk(self, tile)
        rows = 0 if self.widened_bytes else bm * depth * math.ceil(self.lhs_bytes)
        if self.widened_bytes and self.chip.generation == 4:
            narrow = bm * (self.lhs_bytes <= 1) + bn * (self.rhs_bytes <= 1)
            rows = int(_V4_NARROW_BYTES * depth * narrow)
        spills = max(0, int(_SPILLS * self.chip.vmem_bytes) - bm * bn * self.epilogue_bytes)
        return self.buffers(tile) + rows + spills

    def work(self, tile: Tile) -> float:
        """Seconds of the products of a step."""
        bm, bn, bk = tile
        chip = self.chip
        depths = -(-self.k // bk)
        side = chip.mxu_size
        chunk_k = chunk(self, tile)
        chunks = -(-bk // chunk_k)
        # The last tile of a ragged depth multiplies only what is there.
        depth = round_up(chunk_k, side) * chunks if self.k % bk == 0 else round_up(self.k, side) / depths
        work = round_up(bm, 8) * round_up(bn, side) * depth / self.rate
        overhead = _STEP_CYCLES + (chunks - 1) * _CHUNK_CYCLES
        if _accumulates(chip):
            overhead += chunks * bm * bn * _SUM_CYCLES
        elif side == 256 and max(self.lhs_bytes, self.rhs_bytes) == 1 and not self.widened_bytes:
            overhead += chunks * max(0, bm * bn - _HIDDEN_SUM) * _LONG_SUM_CYCLES
        work += overhead / chip.clock
        if self.k % bk:  # zeroing what is past the end, in one of the steps along K
            lanes = chip.valus * chip.sublanes * chip.lanes
            work += _ZERO_OPERATIONS * (bm + bn) * bk / lanes / depths / chip.clock
        return work

    def seconds(self, tile: Tile, serpentine: bool = False) -> float:
        """About how long the product takes with this tile: every step hides the transfers of the next one, or waits for
        them.

        `serpentine`: its tiles are visited back and forth.
        """
        bm, bn, bk = tile
        chip = self.chip
        work = self.work(tile)
        rows, columns, depths = -(-self.m // bm), -(-self.n // bn), -(-self.k // bk)
        bandwidth = _HBM_SHARE * chip.hbm_bandwidth / chip.cores
        steps = depths * self.summed
        lhs = bm * bk * self.lhs_bytes / bandwidth
        rhs = bk * bn * self.rhs_bytes / bandwidth
        store = bm * bn * self.out_bytes / bandwidth
        tiles = [self.groups, rows, columns]
        split = next((i for i, size in enumerate(tiles) if size > 1), 0)
        tiles[split] = -(-tiles[split] // chip.cores_per_device)
        count, turns = math.prod(tiles), tiles[0] * tiles[1] - 1
        latency = _LATENCY if steps * rows * columns > 1 else 0
        load = max(lhs + rhs, latency)
        if steps == 1:  # a block whose index does not change is not read again: lhs stays for a whole row of tiles
            turn = max(work, max(lhs + (rhs if columns > 1 else 0), latency) + store)
            total = turns * turn + (count - turns) * max(work, max(rhs, latency) + store)
        elif serpentine:
            total = count * (steps - 1) * max(work, load)
            total += turns * max(work, lhs + store + latency) + (count - turns) * max(work, rhs + store + latency)
        else:
            total = count * ((steps - 1) * max(work, load) + max(work, load + store))
        return lhs + rhs + _LATENCY + total + store


def chunk(problem: MatmulProblem, tile: Tile) -> int:
    """Depth of what is multiplied at once: a divisor of the tile's depth with about `_CHUNK_WORK` cycles of work."""
    bm, bn, bk = tile
    side = max(128, problem.chip.mxu_size, problem.granule)
    # 235 to 480 cycles a chunk are lost on v6e, whatever its depth.
    limit = (2 if problem.chip.mxu_size == 256 else 1.5) * _CHUNK_WORK
    depth = bk
    while depth % (2 * side) == 0 and bm * bn * depth / problem.rate * problem.chip.clock > limit:
        depth //= 2
    return depth


def _candidates(size: int, multiple: int, largest: int) -> list[int]:
    """Whole, or in equal parts of whole tiles, or powers of two."""
    parts = {min(size, round_up(-(-size // p), multiple)) for p in range(1, 9)}
    powers = {1 << i for i in range(7, 13) if 1 << i < size}
    return sorted(c for c in parts | powers if c <= largest and (c == size or c % multiple == 0))


def _depths(size: int, granule: int = 128, largest: int = 8192) -> list[int]:
    """Divisors in whole tiles, so that no step is ragged; equal parts, of which the last is ragged, where there are
    none.
    """
    divisors = [d for d in range(granule, largest + 1, granule) if size % d == 0]
    return divisors if len(divisors) > 1 or divisors == [size] else _candidates(size, granule, largest) or [1024]


def _sizes(problem: MatmulProblem) -> tuple[list[int], list[int], list[int]]:
    """Rows, columns and depths of the tiles that are considered."""
    # M lies along lanes where lhs is transposed, else along sublanes, of which an 8-bit tile has 32.
    rows = _candidates(problem.m, 128 if problem.lhs_axis == 1 else 32, 2048) or [min(problem.m, 128)]
    columns = _candidates(problem.n, 128, 2048) or [min(problem.n, 128)]
    return rows, columns, _depths(problem.k, problem.granule, problem.deepest)


def _fitting(problem: MatmulProblem, serpentine: bool = False) -> list[Tile]:
    """Tiles whose buffers fit three quarters of VMEM, and all that goes with them the whole of it; for `serpentine`,
    those that divide the arrays.
    """
    budget, largest = problem.chip.vmem_budget, LARGEST * problem.chip.vmem_bytes
    cycles = problem.chip.clock / problem.rate
    return [
        tile
        for tile in itertools.product(*_sizes(problem))
        if not serpentine
        or (problem.m % tile[0] == problem.n % tile[1] == problem.k % tile[2] == 0 and tile[2] < problem.k)
        if problem.buffers(tile) <= budget
        and problem.vmem(tile) <= largest
        and tile[0] * tile[1] * chunk(problem, tile) * cycles <= 3 * _CHUNK_WORK
    ]


@functools.lru_cache(maxsize=1024)
def best_tile(problem: MatmulProblem) -> Tile:
    """The tile that the model finds fastest."""
    tiles = _fitting(problem)
    if not tiles:
        rows, columns, depths = _sizes(problem)
        return min(rows[0], problem.m), columns[0], depths[0]
    return min(tiles, key=lambda tile: (problem.seconds(tile), problem.buffers(tile)))


@functools.lru_cache(maxsize=1024)
def forward_tile(problem: MatmulProblem) -> tuple[Tile, bool]:
    """The forward product's tile, and whether its tiles are visited back and forth: where that gains what the model can
    tell.
    """
    tile = best_tile(problem)
    tiles = _fitting(problem, serpentine=True) if problem.serpentine else []
    if tiles:
        back = min(tiles, key=lambda tile: (problem.seconds(tile, serpentine=True), problem.buffers(tile)))
        if problem.seconds(back, serpentine=True) < _SERPENTINE_GAIN * problem.seconds(tile):
            return back, True
    return tile, False
