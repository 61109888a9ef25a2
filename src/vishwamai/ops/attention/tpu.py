"""Attention on TPU (Pallas): the tiles, what the kernels decline, and the implementation. The kernels stand in `tpu_forward.py` and `tpu_backward.py`."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp

from vishwamai.core.errors import KernelError
from vishwamai.core.hardware import Chip
from vishwamai.core.op import Implementation
from vishwamai.core.pallas import TPU_DTYPES, planning_chip, round_up, tiled_bytes, vmem_budget
from vishwamai.ops.attention import tpu_backward, tpu_dbias, tpu_forward
from vishwamai.ops.attention.spec import AttentionSpec, Operands, Outputs
from vishwamai.ops.attention.tpu_backward import Form
from vishwamai.ops.attention.tpu_masks import LANES, needs_mask_everywhere
from vishwamai.ops.attention.tpu_schedule import MOST_PATTERNS, Tiling, make_schedule, panel_bound, visited_tiles

PANEL_ROWS = 16384
"""The most queries or keys of a panel, so that a panel's list of tiles stays short."""

RESIDENT_ROWS = 1024
"""The fewest keys of a panel for which dq is kept in VMEM over several of them: with fewer the queries pass by too often."""

SCHEDULE_WORDS = 160 * 1024
"""32-bit words of scalar memory (1 MiB on every generation) that a schedule's panels may take."""


@dataclasses.dataclass(frozen=True)
class AttentionConfig:
    """Tiles of the two passes.

    Attributes:
      block_q, block_kv: queries and keys of a tile; multiples of 128.
      panel_q, panel_kv: tiles that a grid step holds along the queries and along the keys.
      unroll: tiles that one iteration of the loop without masks walks; even.
      buffers, kv_buffers: buffers of every block of the queries' and of the keys' side that moves between HBM and VMEM, 2 or 1.
      vmem_bytes: what a grid step plans to use.
      backward_...: the same for the backward pass.
      backward_split, backward_streaming, backward_resident: how the gradients are summed, see `tpu_backward.Form`.
    """

    block_q: int
    block_kv: int
    panel_q: int
    panel_kv: int
    unroll: int
    buffers: int
    kv_buffers: int
    vmem_bytes: int
    backward_block_q: int
    backward_block_kv: int
    backward_panel_q: int
    backward_panel_kv: int
    backward_unroll: int
    backward_buffers: int
    backward_kv_buffers: int
    backward_vmem_bytes: int
    backward_split: bool = False
    backward_streaming: bool = False
    backward_resident: bool = False

    def __post_init__(self) -> None:
        for tiling in (self.forward, self.backward):
            if tiling.block_q % LANES or tiling.block_kv % LANES or min(tiling.block_q, tiling.block_kv) < LANES:
                raise KernelError(
                    f"AttentionConfig: a tile is {tiling.block_q} x {tiling.block_kv}; both sides must be multiples of {LANES}."
                )
            if tiling.unroll < 2 or tiling.unroll % 2 or min(tiling.panel_q, tiling.panel_kv) < 1:
                raise KernelError(
                    f"AttentionConfig: unroll is {tiling.unroll} and a panel {tiling.panel_q} x {tiling.panel_kv} tiles; unroll must be even, for "
                    "scores alternate between two buffers, and a panel has a tile at least."
                )

    @property
    def forward(self) -> Tiling:
        """The forward pass's tiling."""
        return Tiling(
            self.block_q, self.block_kv, self.panel_q, self.panel_kv, self.unroll, self.buffers, self.kv_buffers
        )

    @property
    def backward(self) -> Tiling:
        """The backward pass's tiling."""
        return Tiling(
            self.backward_block_q,
            self.backward_block_kv,
            self.backward_panel_q,
            self.backward_panel_kv,
            self.backward_unroll,
            self.backward_buffers,
            self.backward_kv_buffers,
        )

    @property
    def form(self) -> Form:
        """How the backward pass sums."""
        return Form(self.backward_split, self.backward_streaming, self.backward_resident)

    def with_block_size(self, block_size: int) -> AttentionConfig:
        """The same with tiles of `block_size`, rounded up to 128 and no larger than these, and one tile to a panel."""
        size = round_up(block_size, LANES)
        return dataclasses.replace(
            self,
            block_q=min(size, self.block_q),
            block_kv=min(size, self.block_kv),
            panel_q=1,
            panel_kv=1,
            backward_block_q=min(size, self.backward_block_q),
            backward_block_kv=min(size, self.backward_block_kv),
            backward_panel_q=1,
            backward_panel_kv=1,
        )


def why_not(spec: AttentionSpec, chip: Chip | None) -> str | None:
    """The reason why these kernels cannot serve `spec`, or None."""
    o = spec.operands
    for name in ("query", "key", "value"):
        dtype = getattr(o, name).dtype
        if dtype not in TPU_DTYPES:
            return f"`{name}` is {dtype.name}, and the kernel computes in float32 and bfloat16."
        if dtype != o.query.dtype:
            return f"`{name}` is {dtype.name} and `query` {o.query.dtype.name}; the kernel wants one dtype for query, key and value."
    if 0 in (*o.query.shape, *o.key.shape, *o.value.shape):
        return "an operand is empty."
    for direction, tiling, need in (
        ("forward", _smallest(spec), forward_bytes(spec, _smallest(spec))),
        ("backward", _smallest(spec), backward_bytes(spec, _smallest(spec), Form(split=True))),
    ):
        if need > vmem_budget(chip):
            return (
                f"the smallest {direction} tile, {tiling.block_q} x {tiling.block_kv} at head dimensions {spec.qk_dim} and "
                f"{spec.v_dim}, takes {need:,} bytes of VMEM, more than the {vmem_budget(chip):,} there are to plan with."
            )
    config = heuristic(spec, chip)
    words = 2 * max(panel_bound(spec, config.forward), panel_bound(spec, config.backward))
    if spec.blocks is not None:
        if spec.blocks.heads not in (1, spec.q_heads):
            return f"the block mask has {spec.blocks.heads} heads, and there are {spec.q_heads} here."
        for tiling in (config.forward, config.backward):
            tiles = spec.tile_masks(tiling.block_q, tiling.block_kv, *tiling.blocks(spec))
            if tiles is not None and len(tiles.patterns) > MOST_PATTERNS:
                return (
                    f"the block mask has {len(tiles.patterns):,} different tiles that are visible in part, and the schedule can name "
                    f"{MOST_PATTERNS:,}; use blocks of 128 or a multiple."
                )
        words = _schedule_words(spec, config)
    if words > SCHEDULE_WORDS:
        return (
            f"{spec.q_len} queries and {spec.kv_len} keys take up to {words:,} words of schedule, and scalar memory has {SCHEDULE_WORDS:,} "
            f"for it; narrow the `window`, or split the sequence."
        )
    return None


def _schedule_words(spec: AttentionSpec, config: AttentionConfig) -> int:
    """Words of the longest schedule of a call with a block mask, and of what else lives in scalar memory because of it."""
    masked = needs_mask_everywhere(spec)
    schedules = [
        make_schedule(spec, config.forward, masked=masked, kv_major=False),
        make_schedule(spec, config.backward, masked=masked, kv_major=True, heads=spec.group),
    ]
    if config.backward_split:
        schedules.append(make_schedule(spec, config.backward, masked=masked, kv_major=False, heads=spec.group))
    segments = 2 if spec.operands.q_segment_ids is not None else 0
    words = max(schedule.words + segments * schedule.length for schedule in schedules)
    if spec.operands.bias is not None:
        tiling = tpu_dbias.tiling_for(spec)
        words = max(words, math.prod(tiling.blocks(spec)) * (spec.blocks.heads if spec.blocks else 1))
    return words


def _smallest(spec: AttentionSpec) -> Tiling:
    return Tiling(LANES, LANES, 1, 1, 2, 1, 1)


# --- Memory ------------------------------------------------------------------------------------------------------------------------------------------


def _dense_bytes(spec: AttentionSpec, tiling: Tiling) -> int:
    """Double buffers of the operands that have a value for every position, and a transposed tile of each."""
    total = 0
    for x in (spec.operands.bias, spec.operands.mask):
        if x is not None and x.shape[2] > 1 and x.shape[3] > 1:
            dtype = jnp.int8 if x.dtype == jnp.bool_ else x.dtype if x.dtype in TPU_DTYPES else jnp.float32
            total += 2 * tiled_bytes((tiling.panel_q * tiling.block_q, tiling.panel_kv * tiling.block_kv), dtype)
            total += tiled_bytes((tiling.block_q, tiling.block_kv), jnp.float32)
    return total


def _pattern_bytes(spec: AttentionSpec, tiling: Tiling) -> int:
    """The partly visible tiles of the block mask, 32 or 16 positions to a word."""
    tiles = spec.tile_masks(tiling.block_q, tiling.block_kv, *tiling.blocks(spec))
    if tiles is None or not tiles.partial:
        return 0
    return len(tiles.patterns) * tiling.block_q * tiling.block_kv // (32 if tiling.block_kv % 256 == 0 else 16) * 4


def forward_bytes(spec: AttentionSpec, tiling: Tiling) -> int:
    """VMEM of one step of the forward pass."""
    dtype = spec.operands.query.dtype
    q_rows, kv_rows = tiling.panel_q * tiling.block_q, tiling.panel_kv * tiling.block_kv
    dims = (spec.qk_dim, spec.v_dim)
    buffers = tiling.buffers * sum(tiled_bytes((q_rows, dim), dtype) for dim in dims)
    buffers += tiling.kv_buffers * sum(tiled_bytes((kv_rows, dim), dtype) for dim in dims)
    scratch = (
        tiled_bytes((q_rows, spec.qk_dim), dtype)
        + tiling.panel_kv * tiled_bytes((spec.v_dim, tiling.block_kv), dtype)
        + tiling.panel_q * tiled_bytes((spec.v_dim + 24, tiling.block_q), jnp.float32)
    )
    tiles = 3 * tiled_bytes((tiling.block_kv, tiling.block_q), jnp.float32)
    return buffers + scratch + tiles + _dense_bytes(spec, tiling) + _pattern_bytes(spec, tiling)


def backward_bytes(spec: AttentionSpec, tiling: Tiling, form: Form) -> int:
    """VMEM of one step of the backward pass; of the larger of its walks if it is split."""
    dtype = spec.operands.query.dtype
    q_rows, kv_rows = tiling.panel_q * tiling.block_q, tiling.panel_kv * tiling.block_kv
    dims = (spec.qk_dim, spec.v_dim)
    blocks = tiling.buffers * sum(tiled_bytes((q_rows, dim), dtype) for dim in dims)
    blocks += tiling.kv_buffers * sum(tiled_bytes((kv_rows, dim), dtype) for dim in dims)
    shared = blocks + _dense_bytes(spec, tiling) + _pattern_bytes(spec, tiling)
    # What is done to every score besides the exponential holds more tiles at a time.
    shared += (3 if _is_plain(spec) else 6) * tiled_bytes((tiling.block_kv, tiling.block_q), jnp.float32)
    kept = spec.group * tiling.blocks(spec)[0] if form.resident else tiling.panel_q
    for_dq = (
        tiling.buffers * tiled_bytes((q_rows, spec.qk_dim), dtype if form.resident else jnp.float32)
        + kept * tiled_bytes((spec.qk_dim, tiling.block_q), jnp.float32)
        + tiling.panel_kv * tiled_bytes((spec.qk_dim, tiling.block_kv), dtype)
    )
    for_dkv = tiling.kv_buffers * sum(tiled_bytes((kv_rows, dim), dtype) for dim in dims)
    if not form.streaming:
        for_dkv += tiling.panel_q * sum(tiled_bytes((dim, tiling.block_q), dtype) for dim in dims)
    for_dkv += tiling.panel_kv * sum(
        tiled_bytes(tpu_backward.sum_shape(form, tiling.block_kv, dim), jnp.float32) for dim in dims
    )
    return shared + (max(for_dq, for_dkv) if form.split else for_dq + for_dkv)


# --- Heuristic ---------------------------------------------------------------------------------------------------------------------------------------


def _block(length: int, most: int) -> int:
    """The block, a multiple of 128 up to `most`, that pads `length` least; the larger of equals."""
    return min(range(LANES, most + 1, LANES), key=lambda size: (round_up(length, size), -size))


def _fitted(spec: AttentionSpec, tiling: Tiling, need: Callable[..., int], budget: int) -> Tiling:
    """`tiling` with panels as large as the budget allows: all the keys first, because what is kept for them is made once."""
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

    A fit to the schedules of tiles of 128, 256 and 512 a side, head dimension 128, on v5e (v5p and v4 are alike) and v6e.
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
    """Small tiles need more of them in one piece of code to keep the units busy; but what does not fill it takes the slower, masked way."""
    most, work = (8, 1 << 17) if few_alus else (16, 1 << 19)
    unroll = max(2 if few_alus else 4, min(most, work // (sides[0] * sides[1])))
    while unroll > 2 and visited_tiles(spec, *sides) < 4 * unroll:
        unroll //= 2
    return unroll


def _is_plain(spec: AttentionSpec) -> bool:
    """Whether the scores go straight into the exponential, but for a static mask."""
    return not needs_mask_everywhere(spec) and spec.softcap is None and spec.operands.q_segment_ids is None


def _is_sparse(spec: AttentionSpec) -> bool:
    """Whether the mask is so uneven that the tiles have to fit it: blocks, or a band with two sides."""
    return spec.blocks is not None or None not in spec.band


def _is_wide(chip: Chip | None) -> bool:
    """Whether the matrix units are 256 wide."""
    return planning_chip(chip).mxu_size > LANES


def _fitting(
    spec: AttentionSpec, chip: Chip | None, most: int, cost: Callable[[int, int, bool], int]
) -> list[tuple[int, int]]:
    """Tiles up to `most`, those that cover the static mask at the least cost first."""
    rows, columns = (
        {_block(length, size) for size in (128, 256, 512) if size <= most} for length in (spec.q_len, spec.kv_len)
    )
    found = {(q, k): visited_tiles(spec, q, k) * cost(q, k, _is_wide(chip)) for q in rows for k in columns}
    return sorted(found, key=lambda sides: (found[sides], -sides[0] * sides[1], -sides[0]))


def _forward_tiling(spec: AttentionSpec, chip: Chip | None, most: int, unroll: int) -> Tiling:
    budget = vmem_budget(chip)
    few_alus = planning_chip(chip).valus < 4
    wide_heads = few_alus and most == 512 and max(spec.qk_dim, spec.v_dim) > LANES
    # Longer straight-line code only spills where the vector unit is the bottleneck.
    shapes = [(size, size, 2 if few_alus else unroll) for size in range(most, LANES - 1, -LANES)]
    if _is_sparse(spec) and not (few_alus and spec.blocks is None):
        fitting = _fitting(spec, chip, most, _forward_cost)
        shapes = [(*sides, 2 if unroll == 2 else _unroll(spec, sides, few_alus)) for sides in fitting]
    elif wide_heads and _is_plain(spec):
        # The sums of partial products fill the vector unit; short tiles leave memory for long panels, whose starts cost less.
        shapes.insert(0, (512, 256, 2))
        budget = planning_chip(chip).vmem_bytes * 7 // 8
    elif most == 512 and spec.band == (None, None):
        shapes.insert(0, (256 if few_alus else 512, 1024, unroll))  # nothing to skip along the keys: fewer rescalings
    for rows, columns, tiles in shapes:
        tiling = Tiling(_block(spec.q_len, rows), _block(spec.kv_len, columns), 1, 1, tiles)
        if forward_bytes(spec, tiling) <= budget:
            return _fitted(spec, tiling, forward_bytes, budget)
    return _smallest(spec)


def _backward_tiling(spec: AttentionSpec, chip: Chip | None, most: int, form: Form) -> tuple[Tiling, Form]:
    """The first tiles for which dq does not travel: all keys in one panel, or dq of whole heads in VMEM; else those with the largest panels."""
    plain = _is_plain(spec)
    # The plan counts the tiles that the code works on, so the compiler needs less beside it than `vmem_budget` leaves.
    budget = vmem_budget(chip) if form.split else planning_chip(chip).vmem_bytes * (15 if plain else 14) // 16
    travelling, resident = form, dataclasses.replace(form, resident=True)
    found = []
    small = 4
    if _is_sparse(spec):
        choices = [(sides, n, travelling) for sides in _fitting(spec, chip, most, _backward_cost) for n in (2, 1)]
        if most == 512 and planning_chip(chip).valus >= 4 and plain:
            small = 8  # small tiles need more of them in one piece of code
    else:
        choices = []
        for size in range(most, LANES - 1, -LANES):
            half = max(LANES, size // 2), size
            choices += [((size, size), 2, travelling), (half, 2, resident), (half, 1, travelling)]
        if form.split:
            choices = [choice for choice in choices if choice[2] is travelling]
    for (rows, columns), kv_buffers, how in choices:
        unroll = small if max(rows, columns) <= (256 if _is_wide(chip) else LANES) else 4 if plain else 2
        tiling = Tiling(_block(spec.q_len, rows), _block(spec.kv_len, columns), 1, 1, unroll, 2, kv_buffers)
        need = functools.partial(backward_bytes, form=how)
        if need(spec, tiling) > budget:
            continue
        tiling = _fitted(spec, tiling, need, budget)
        if tiling.panel_kv * tiling.block_kv >= spec.kv_len:
            return tiling, travelling
        if how is resident and tiling.panel_kv * tiling.block_kv >= RESIDENT_ROWS:
            return tiling, resident
        found.append((tiling, how))
    largest = max(found, key=lambda x: _panel_area(x[0]), default=None)
    return largest or (_smallest(spec), travelling)


def _panel_area(tiling: Tiling) -> int:
    return tiling.panel_q * tiling.block_q * tiling.panel_kv * tiling.block_kv


def heuristic(spec: AttentionSpec, chip: Chip | None) -> AttentionConfig:
    """Tiles of 512 x 512 where they fit, panels of whole heads where they fit."""
    exact = spec.operands.query.dtype == jnp.float32
    # Full precision takes six products of the compiler's own, whose code grows with the tile.
    widest = max(spec.qk_dim, spec.v_dim)
    most = max(LANES, min(256 if exact else 512, (1 << 16 if exact else 1 << 18) // widest // LANES * LANES))
    forward = _forward_tiling(spec, chip, most, 2 if exact or needs_mask_everywhere(spec) else 4)
    unit = planning_chip(chip).mxu_size
    form = Form(
        split=backward_bytes(spec, Tiling(LANES, LANES, 1, 1, 2), Form()) > vmem_budget(chip),
        streaming=not exact and spec.qk_dim % unit == 0 and spec.v_dim % unit == 0,
    )
    backward, form = _backward_tiling(spec, chip, most, form)
    return AttentionConfig(
        **dataclasses.asdict(forward),
        vmem_bytes=forward_bytes(spec, forward),
        **{f"backward_{name}": value for name, value in dataclasses.asdict(backward).items()},
        backward_vmem_bytes=backward_bytes(spec, backward, form),
        **{f"backward_{name}": value for name, value in dataclasses.asdict(form).items()},
    )


# --- The implementation ------------------------------------------------------------------------------------------------------------------------------


def forward(
    spec: AttentionSpec, config: AttentionConfig, operands: Operands, residuals: bool
) -> tuple[Outputs, jax.Array | None]:
    out, logsumexp = tpu_forward.forward(spec, config.forward, config.vmem_bytes, operands)
    return Outputs(out, logsumexp if spec.return_lse else None), logsumexp if residuals else None


def backward(
    spec: AttentionSpec,
    config: AttentionConfig,
    operands: Operands,
    outputs: Outputs,
    residuals: jax.Array,
    cotangents: Outputs,
) -> Operands:
    return tpu_backward.backward(
        spec,
        config.backward,
        config.form,
        config.backward_vmem_bytes,
        operands,
        outputs,
        residuals,
        cotangents,
    )


PALLAS_TPU = Implementation("pallas_tpu", "tpu", forward, backward, why_not, heuristic, AttentionConfig)
