"""Tiles of attention's TPU kernels, and how they are chosen."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable

import jax.numpy as jnp

from vishwamai.core.errors import KernelError
from vishwamai.core.pallas import LANES, VmemTiles, planning_chip, round_up, vmem_budget
from vishwamai.core.target import Target
from vishwamai.core.tiles import part
from vishwamai.ops.attention import tpu_dbias
from vishwamai.ops.attention.spec import AttentionSpec
from vishwamai.ops.attention.tpu_backward_walk import Form
from vishwamai.ops.attention.tpu_masks import needs_mask_everywhere
from vishwamai.ops.attention.tpu_memory import backward_bytes, forward_bytes, is_plain
from vishwamai.ops.attention.tpu_schedule import Tiling, make_schedule, panel_bound, visited_tiles

SCHEDULE_WORDS = 160 * 1024
"""32-bit words of scalar memory (1 MiB on every generation) that a schedule's panels may take."""
PANEL_ROWS = 16384
"""The most queries or keys of a panel, so that a panel's list of tiles stays short."""
RESIDENT_ROWS = 1024
"""The fewest keys of a panel for which dq is kept in VMEM over several of them: with fewer the queries pass by too
often.
"""


@dataclasses.dataclass(frozen=True)
class AttentionConfig(VmemTiles):
    """Tiles of the two passes.

    Attributes:
      forward, backward: the cut of each pass.
      form: how the backward pass sums the gradients.
      vmem_bytes, backward_vmem_bytes: bytes of VMEM that a grid step of each plans to use.
    """

    forward: Tiling = part(Tiling)
    backward: Tiling = part(Tiling)
    form: Form = part(Form, Form())
    vmem_bytes: int = 0
    backward_vmem_bytes: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        for tiling in (self.forward, self.backward):
            if tiling.block_q % LANES or tiling.block_kv % LANES or min(tiling.block_q, tiling.block_kv) < LANES:
                raise KernelError(
                    f"AttentionConfig: a tile is {tiling.block_q} x {tiling.block_kv}; both sides must be multiples of "
                    f"{LANES}."
                )
            if tiling.unroll < 2 or tiling.unroll % 2 or min(tiling.panel_q, tiling.panel_kv) < 1:
                raise KernelError(
                    f"AttentionConfig: unroll is {tiling.unroll} and a panel {tiling.panel_q} x {tiling.panel_kv} "
                    "tiles; unroll must be even, for scores alternate between two buffers, and a panel has a tile at "
                    "least."
                )

    def needs(self, spec: AttentionSpec, target: Target) -> dict[str, int]:
        forward, backward = forward_bytes(spec, self.forward), backward_bytes(spec, self.backward, self.form)
        return {"vmem_bytes": forward, "backward_vmem_bytes": backward}

    def resized(self, block_size: int, spec: AttentionSpec, target: Target) -> AttentionConfig:
        """As `VmemTiles.resized`; these tiles too where the schedule of smaller ones does not fit scalar memory."""
        tiles = super().resized(block_size, spec, target)
        return tiles if schedule_words(spec, tiles) <= SCHEDULE_WORDS else self


def schedule_words(spec: AttentionSpec, config: AttentionConfig) -> int:
    """Words of the longest schedule, at most; with a block mask exactly, and of what else lives in scalar memory
    because of it.
    """
    if spec.blocks is None:
        return 2 * max(panel_bound(spec, config.forward), panel_bound(spec, config.backward))
    masked = needs_mask_everywhere(spec)
    schedules = [
        make_schedule(spec, config.forward, masked=masked, kv_major=False),
        make_schedule(spec, config.backward, masked=masked, kv_major=True, heads=spec.group),
    ]
    if config.form.split:
        schedules.append(make_schedule(spec, config.backward, masked=masked, kv_major=False, heads=spec.group))
    lists = 2 if spec.by_value else 0
    words = max(schedule.words + lists * schedule.length for schedule in schedules)
    if spec.operands.bias is not None:
        tiling = tpu_dbias.tiling_for(spec)
        words = max(words, math.prod(tiling.blocks(spec)) * (spec.blocks.heads if spec.blocks else 1))
    return words


def smallest(spec: AttentionSpec) -> Tiling:
    return Tiling(LANES, LANES, 1, 1, 2, 1, 1)


def _block(length: int, most: int) -> int:
    """The block, a multiple of 128 up to `most`, that pads `length` least; the larger of equals."""
    return min(range(LANES, most + 1, LANES), key=lambda size: (round_up(length, size), -size))


def _fitted(spec: AttentionSpec, tiling: Tiling, need: Callable[..., int], budget: int) -> Tiling:
    """`tiling` with panels as large as the budget allows: all the keys first, because what is kept for them is made
    once.
    """
    for axis, length, block in (("panel_kv", spec.kv_len, tiling.block_kv), ("panel_q", spec.q_len, tiling.block_q)):
        blocks = -(-length // block)
        for panel in range(min(blocks, max(1, PANEL_ROWS // block)), 0, -1):
            wider = dataclasses.replace(tiling, **{axis: panel})
            if blocks % panel == 0 and need(spec, wider) <= budget:
                tiling = wider
                break
    return tiling


def _forward_cost(block_q: int, block_kv: int, wide: bool) -> int:
    """What visiting a tile costs, in scores; `wide` matrix units finish a small tile long before its dependencies do.

    A fit to the schedules of tiles of 128, 256 and 512 a side, head dimension 128, on v5e (v5p and v4 are alike) and
    v6e.
    """
    if wide:
        return block_q * block_kv + (64_000 if block_q == LANES else 100_000)
    return block_q * block_kv + 5_200 + 60 * max(0, block_kv - block_q)


def _backward_cost(block_q: int, block_kv: int, wide: bool) -> int:
    """The same for the backward pass."""
    if wide:
        return block_q * block_kv + (21_000 if LANES in (block_q, block_kv) else 2_000)
    return block_q * block_kv + 5_000


def _unroll(spec: AttentionSpec, sides: tuple[int, int], few_alus: bool) -> int:
    """Small tiles need more of them in one piece of code to keep the units busy; but what does not fill it takes the
    slower, masked way.
    """
    most, work = (8, 1 << 17) if few_alus else (16, 1 << 19)
    unroll = max(2 if few_alus else 4, min(most, work // (sides[0] * sides[1])))
    while unroll > 2 and visited_tiles(spec, *sides) < 4 * unroll:
        unroll //= 2
    return unroll


def _is_sparse(spec: AttentionSpec) -> bool:
    """Whether the mask is so uneven that the tiles have to fit it: blocks, or a band with two sides."""
    return spec.blocks is not None or None not in spec.band


def _is_wide(target: Target) -> bool:
    """Whether the matrix units are 256 wide."""
    return planning_chip(target).mxu_size > LANES


def _fitting(
    spec: AttentionSpec, target: Target, most: int, cost: Callable[[int, int, bool], int]
) -> list[tuple[int, int]]:
    """Tiles up to `most`, those that cover the static mask at the least cost first."""
    rows, columns = (
        {_block(length, size) for size in (128, 256, 512) if size <= most} for length in (spec.q_len, spec.kv_len)
    )
    costs = {(q, k): visited_tiles(spec, q, k) * cost(q, k, _is_wide(target)) for q in rows for k in columns}
    return sorted(costs, key=lambda sides: (costs[sides], -sides[0] * sides[1], -sides[0]))


def _forward_tiling(spec: AttentionSpec, target: Target, most: int, unroll: int) -> Tiling:
    budget = vmem_budget(target)
    few_alus = planning_chip(target).valus < 4
    wide_heads = few_alus and most == 512 and max(spec.qk_dim, spec.v_dim) > LANES
    # Longer straight-line code only spills where the vector unit is the bottleneck.
    shapes = [(size, size, 2 if few_alus else unroll) for size in range(most, LANES - 1, -LANES)]
    if _is_sparse(spec) and not (few_alus and spec.blocks is None):
        fitting = _fitting(spec, target, most, _forward_cost)
        shapes = [(*sides, 2 if unroll == 2 else _unroll(spec, sides, few_alus)) for sides in fitting]
    elif wide_heads and is_plain(spec):
        # The sums of partial products fill the vector unit; short tiles leave memory for long panels, whose starts cost
        # less.
        shapes.insert(0, (512, 256, 2))
        budget = planning_chip(target).vmem_bytes * 7 // 8
    elif most == 512 and spec.band == (None, None):
        shapes.insert(0, (256 if few_alus else 512, 1024, unroll))  # nothing to skip along the keys: fewer rescalings
    for rows, columns, tiles in shapes:
        tiling = Tiling(_block(spec.q_len, rows), _block(spec.kv_len, columns), 1, 1, tiles)
        if forward_bytes(spec, tiling) <= budget:
            return _fitted(spec, tiling, forward_bytes, budget)
    return smallest(spec)


def _backward_tiling(spec: AttentionSpec, target: Target, most: int, form: Form) -> tuple[Tiling, Form]:
    """The first tiles for which dq does not travel: all keys in one panel, or dq of whole heads in VMEM; else those
    with the largest panels.
    """
    plain = is_plain(spec)
    # The plan counts the tiles that the code works on, so the compiler needs less beside it than `vmem_budget` leaves.
    budget = vmem_budget(target) if form.split else planning_chip(target).vmem_bytes * (15 if plain else 14) // 16
    travelling, resident = form, dataclasses.replace(form, resident=True)
    tilings = []
    small = 4
    if _is_sparse(spec):
        choices = [(sides, n, travelling) for sides in _fitting(spec, target, most, _backward_cost) for n in (2, 1)]
        if most == 512 and planning_chip(target).valus >= 4 and plain:
            small = 8  # small tiles need more of them in one piece of code
    else:
        choices = []
        for size in range(most, LANES - 1, -LANES):
            half = max(LANES, size // 2), size
            choices += [((size, size), 2, travelling), (half, 2, resident), (half, 1, travelling)]
        if form.split:
            choices = [choice for choice in choices if choice[2] is travelling]
    for (rows, columns), kv_buffers, how in choices:
        unroll = small if max(rows, columns) <= (256 if _is_wide(target) else LANES) else 4 if plain else 2
        tiling = Tiling(_block(spec.q_len, rows), _block(spec.kv_len, columns), 1, 1, unroll, 2, kv_buffers)
        need = functools.partial(backward_bytes, form=how)
        if need(spec, tiling) > budget:
            continue
        tiling = _fitted(spec, tiling, need, budget)
        if tiling.panel_kv * tiling.block_kv >= spec.kv_len:
            return tiling, travelling
        if how is resident and tiling.panel_kv * tiling.block_kv >= RESIDENT_ROWS:
            return tiling, resident
        tilings.append((tiling, how))
    largest = max(tilings, key=lambda x: _panel_area(x[0]), default=None)
    return largest or (smallest(spec), travelling)


def _panel_area(tiling: Tiling) -> int:
    return tiling.panel_q * tiling.block_q * tiling.panel_kv * tiling.block_kv


def heuristic(spec: AttentionSpec, target: Target) -> AttentionConfig:
    """Tiles of 512 x 512 where they fit, panels of whole heads where they fit."""
    exact = spec.operands.query.dtype == jnp.float32
    # Full precision takes six products of the compiler's own, whose code grows with the tile.
    widest = max(spec.qk_dim, spec.v_dim)
    most = max(LANES, min(256 if exact else 512, (1 << 16 if exact else 1 << 18) // widest // LANES * LANES))
    forward = _forward_tiling(spec, target, most, 2 if exact or needs_mask_everywhere(spec) else 4)
    unit = planning_chip(target).mxu_size
    form = Form(
        split=backward_bytes(spec, Tiling(LANES, LANES, 1, 1, 2), Form()) > vmem_budget(target),
        streaming=not exact and spec.qk_dim % unit == 0 and spec.v_dim % unit == 0,
    )
    backward, form = _backward_tiling(spec, target, most, form)
    return AttentionConfig(forward, backward, form, forward_bytes(spec, forward), backward_bytes(spec, backward, form))
