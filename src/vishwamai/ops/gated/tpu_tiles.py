"""Tiles of the TPU kernels of the gated linear unit: their config, and models of the three pipelines by which it is
chosen.

A step takes the longer of its products and the next step's transfers.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterable

import jax.numpy as jnp

from vishwamai.core.hardware import TpuChip
from vishwamai.core.pallas import VmemTiles, planning_chip, round_up, tiled_bytes
from vishwamai.core.qtensor import bits
from vishwamai.core.target import Target
from vishwamai.core.tiles import Tiles, size, sizes
from vishwamai.ops.gated.spec import GatedSpec

Tile = tuple[int, int, int]

_HBM_SHARE = 0.9
"""Of the peak bandwidth, that large transfers reach."""
_LATENCY = 0.6e-6
"""Seconds from the start of a transfer until its data is visible."""
_GAP = 0.2e-6
"""Seconds between the end of a step's transfers and those of the next one, where the products wait for them."""
_STEP_CYCLES = 300
"""Of a grid step outside its products: transfers started and awaited, the matrix unit filled and drained."""
_EPILOGUE_OPS = 25
"""Vector operations for each element of the result: two roundings, the activation, its product."""
_SLOPE_OPS = 40
"""The same for each pair of slopes: three conversions, the activation and its derivative, two roundings."""
_SLOPE_EXPOSED = 0.5
"""Of their time, that the matrix unit does not hide: 0.4 on v5e and v6e, 0.6 on v4."""
_GAINS = frozenset(("v5e", "v5p", "v6e"))
"""Chips on which the schedules of the gradient's kernels take less time than XLA's (docs/notes/rows.md)."""
_MOST_WORK = 24576
"""Cycles of products in one step: they are unrolled, and more is more program for little."""


def _whole_lanes(tiles: Tiles, block_size: int) -> int:
    return round_up(block_size, 128)


def _whole_tile(name: str) -> Callable[..., tuple[int, int, int] | None]:
    """A tile of the backward pass under a block size; None stays None."""

    def resize(tiles: Tiles, block_size: int) -> Tile | None:
        edge = round_up(block_size, 128)
        return None if getattr(tiles, name) is None else (edge, edge, edge)

    return resize


@dataclasses.dataclass(frozen=True)
class GatedConfig(VmemTiles):
    """Tiles of the TPU kernels, in elements; each is clamped to the array.

    Attributes:
      block_m, block_n, block_k: rows, columns (of either product) and depth of one step.
      gate_every_step: gate the unfinished sums too, which hides behind the matrix unit; False waits for the last step
        of a tile.
      vmem_bytes: bytes of VMEM that a step plans to use, buffers and sums together.
      grad_x: rows, features and hidden units of one step of the gradient of x.
      grad_w: features, hidden units and rows of one step of the gradients of the weights. None in one of both leaves
        the gradient to XLA.
      grad_vmem_bytes: bytes like `vmem_bytes`, the larger of both.
    """

    block_m: int = size("rows", block_size=_whole_lanes)
    block_n: int = size("columns", block_size=_whole_lanes)
    block_k: int = size("depth", block_size=_whole_lanes)
    gate_every_step: bool = False
    vmem_bytes: int = 0
    grad_x: Tile | None = sizes(
        ("rows of grad_x", "columns of grad_x", "depth of grad_x"), None, block_size=_whole_tile("grad_x")
    )
    grad_w: Tile | None = sizes(
        ("rows of grad_w", "columns of grad_w", "depth of grad_w"), None, block_size=_whole_tile("grad_w")
    )
    grad_vmem_bytes: int = 0

    def needs(self, spec: GatedSpec, target: Target) -> dict[str, int]:
        tile = min(self.block_m, spec.m), min(self.block_n, spec.n), min(self.block_k, spec.k)
        backward = [_grad_x_vmem(spec, clamped(self.grad_x, spec.m, spec.k, spec.n))] if self.grad_x else [0]
        backward += [_grad_w_vmem(spec, clamped(self.grad_w, spec.k, spec.n, spec.m))] if self.grad_w else []
        return {"vmem_bytes": _vmem(spec, tile), "grad_vmem_bytes": max(backward)}


def clamped(tile: Tile, m: int, n: int, k: int) -> Tile:
    """A tile that is not larger than its arrays."""
    return min(tile[0], m), min(tile[1], n), min(tile[2], k)


def _vmem(spec: GatedSpec, tile: Tile) -> int:
    """Bytes of VMEM: blocks twice, for a transfer runs beside the computation, both sums, both once more as values, and
    quantized weights in the dtype of x.
    """
    bm, bn, bk = tile
    dtype = spec.operands.x.dtype
    weights = 2 * tiled_bytes((bk, bn), spec.weight_dtype)
    blocks = tiled_bytes((bm, bk), dtype) + weights + 3 * tiled_bytes((bm, bn), dtype)
    copies = 2 * tiled_bytes((bk, bn), dtype) if spec.quantized else 0
    return 2 * blocks + 4 * tiled_bytes((bm, bn), jnp.float32) + copies


def _grad_x_vmem(spec: GatedSpec, tile: Tile) -> int:
    """As `_vmem`; of the sum one, and of both slopes a copy in either dtype."""
    bm, bk, bn = tile
    dtype = spec.operands.x.dtype
    blocks = 5 * tiled_bytes((bm, bn), dtype) + 2 * tiled_bytes((bk, bn), dtype) + tiled_bytes((bm, bk), dtype)
    values = 2 * tiled_bytes((bm, bk), jnp.float32) + 2 * tiled_bytes((bm, bn), jnp.float32)
    return 2 * blocks + values + 2 * tiled_bytes((bm, bn), dtype)


def _grad_w_vmem(spec: GatedSpec, tile: Tile) -> int:
    """As `_vmem`, and the rows of x transposed."""
    bk, bn, bm = tile
    dtype = spec.operands.x.dtype
    blocks = tiled_bytes((bm, bk), dtype) + 2 * tiled_bytes((bm, bn), dtype) + 2 * tiled_bytes((bk, bn), dtype)
    return 2 * blocks + 4 * tiled_bytes((bk, bn), jnp.float32) + tiled_bytes((bk, bm), dtype)


def _rate(spec: GatedSpec, chip: TpuChip) -> float:
    """Multiply-adds a second of one core."""
    passes = 6 if spec.operands.x.dtype == jnp.float32 else 1
    return chip.peak_bf16 / chip.cores / 2 / passes


def _bandwidth(chip: TpuChip) -> float:
    """Bytes a second of one core."""
    return _HBM_SHARE * chip.hbm_bandwidth / chip.cores


def _work(spec: GatedSpec, chip: TpuChip, rows: int, columns: int, depth: int) -> float:
    """Seconds of both products of a step."""
    side = chip.mxu_size
    macs = 2 * round_up(rows, 8) * round_up(columns, side) * round_up(depth, side)
    return macs / _rate(spec, chip) + _STEP_CYCLES / chip.clock


def _tiles_of_a_core(chip: TpuChip, *tiles: int) -> int:
    """How many of these tiles one core has: the first axis of several is split over the cores of a device."""
    counts = list(tiles)
    split = next((i for i, count in enumerate(counts) if count > 1), 0)
    counts[split] = -(-counts[split] // chip.cores_per_device)
    return math.prod(counts)


def _seconds(spec: GatedSpec, chip: TpuChip, tile: Tile) -> float:
    """About how long the forward pass takes with this tile: every step hides the transfers of the next one, or waits
    for them.
    """
    bm, bn, bk = tile
    size, bandwidth = spec.operands.x.dtype.itemsize, _bandwidth(chip)
    weight_size = bits(spec.weight_dtype) / 8
    rows, columns, steps = -(-spec.m // bm), -(-spec.n // bn), -(-spec.k // bk)
    work = _work(spec, chip, bm, bn, bk)
    # A block whose index does not change is not read again: x stays for a whole row of tiles if one step is all its
    # depth.
    load = (bm * bk / (columns if steps == 1 else 1) * size + 2 * bk * bn * weight_size) / bandwidth
    load = max(load, _LATENCY)
    load += _GAP if load > work else 0
    store = bm * bn * size / bandwidth
    gating = bm * bn * _EPILOGUE_OPS * chip.cores / chip.peak_vector
    if spec.activation == "gelu":
        per_tile = (steps - 1) * max(work, load) + max(work + 4 * gating, load + store)
    else:
        per_tile = (steps - 1) * max(work, gating, load) + max(work, gating, load + store)
    first = (bm * bk * size + 2 * bk * bn * weight_size) / bandwidth
    return _tiles_of_a_core(chip, spec.groups, rows, columns) * per_tile + first + store


def _grad_x_seconds(spec: GatedSpec, chip: TpuChip, tile: Tile) -> float:
    """The same of the gradient of x."""
    bm, bk, bn = tile
    size, bandwidth = spec.operands.x.dtype.itemsize, _bandwidth(chip)
    rows, columns, steps = -(-spec.m // bm), -(-spec.k // bk), -(-spec.n // bn)
    work = _work(spec, chip, bm, bk, bn)
    slope = bm * bn * _SLOPE_OPS * chip.cores / chip.peak_vector * (4 if spec.activation == "gelu" else 1)
    load = max((3 * bm * bn + 2 * bk * bn) * size / bandwidth, _LATENCY)
    slopes, store = 2 * bm * bn * size / bandwidth, bm * bk * size / bandwidth
    busy = work + _SLOPE_EXPOSED * slope
    first = (steps - 1) * max(busy, load + slopes) + max(busy, load + slopes + store)
    later = (steps - 1) * max(busy, load) + max(busy, load + store)
    tiles = _tiles_of_a_core(chip, spec.groups, rows)
    return tiles * (first + (columns - 1) * later) + load + store


def _grad_w_seconds(spec: GatedSpec, chip: TpuChip, tile: Tile) -> float:
    """The same of the gradients of the weights."""
    bk, bn, bm = tile
    size, bandwidth = spec.operands.x.dtype.itemsize, _bandwidth(chip)
    rows, columns, steps = -(-spec.k // bk), -(-spec.n // bn), -(-spec.m // bm)
    work = _work(spec, chip, bk, bn, bm)
    load = max((bm * bk / (columns if steps == 1 else 1) + 2 * bm * bn) * size / bandwidth, _LATENCY)
    store = 2 * bk * bn * size / bandwidth
    per_tile = (steps - 1) * max(work, load) + max(work, load + store)
    return _tiles_of_a_core(chip, spec.groups, rows, columns) * per_tile + load + store


def _sizes(size: int, multiple: int, largest: int) -> list[int]:
    """Whole, in equal parts of whole tiles, or powers of two."""
    parts = {min(size, round_up(-(-size // p), multiple)) for p in range(1, 9)} | {1 << i for i in range(7, 12)}
    return sorted(s for s in parts if s <= min(size, largest) and (s == size or s % multiple == 0)) or [min(size, 128)]


def _depths(size: int) -> list[int]:
    """Divisors in whole tiles, so that no step is ragged; where there are none, equal parts of which the last is
    ragged.
    """
    divisors = [d for d in range(128, 4096 + 1, 128) if size % d == 0]
    return divisors or _sizes(size, 128, 2048)


def _fastest(
    spec: GatedSpec,
    chip: TpuChip,
    choices: Iterable[Tile],
    vmem: Callable[[GatedSpec, Tile], int],
    seconds: Callable[[GatedSpec, TpuChip, Tile], float],
    smallest: Tile,
) -> Tile:
    """The tile that the model finds fastest among those that fit three quarters of VMEM."""
    cycles = 2 * chip.clock / _rate(spec, chip)
    fitting = [t for t in choices if vmem(spec, t) <= chip.vmem_budget and math.prod(t) * cycles <= _MOST_WORK]
    return min(fitting, key=lambda t: (seconds(spec, chip, t), vmem(spec, t)), default=smallest)


@functools.lru_cache(maxsize=1024)
def _best(spec: GatedSpec, chip: TpuChip) -> tuple[Tile, Tile, Tile]:
    """The tiles of the forward pass, of the gradient of x, and of those of the weights."""
    m, n, k = spec.m, spec.n, spec.k
    choices = itertools.product(_sizes(m, 32, 2048), _sizes(n, 128, 2048), _depths(k))
    forward = _fastest(spec, chip, choices, _vmem, _seconds, (min(m, 128), min(n, 128), min(k, 128)))
    choices = itertools.product(_sizes(m, 32, 2048), _sizes(k, 128, 8192), _depths(n))
    of_x = _fastest(spec, chip, choices, _grad_x_vmem, _grad_x_seconds, (min(m, 128), min(k, 128), min(n, 128)))
    choices = itertools.product(_sizes(k, 128, 2048), _sizes(n, 128, 2048), _depths(m))
    of_w = _fastest(spec, chip, choices, _grad_w_vmem, _grad_w_seconds, (min(k, 128), min(n, 128), min(m, 128)))
    return forward, of_x, of_w


def all_tiles(spec: GatedSpec, target: Target) -> GatedConfig:
    """The tiles that the models of this module find fastest, of the forward pass and of the gradient's kernels."""
    forward, of_x, of_w = _best(spec, planning_chip(target))
    # Exact gelu's erf takes longer than a step's products.
    config = GatedConfig(*forward, spec.activation != "gelu", grad_x=of_x, grad_w=of_w)
    return dataclasses.replace(config, **config.needs(spec, target))


def heuristic(spec: GatedSpec, target: Target) -> GatedConfig:
    """`all_tiles`; those of the gradient on `_GAINS`, and where the chip is not known."""
    config = all_tiles(spec, target)
    if target.tpu is None or target.tpu.name in _GAINS:
        return config
    config = dataclasses.replace(config, grad_x=None, grad_w=None)
    return dataclasses.replace(config, **config.needs(spec, target))
