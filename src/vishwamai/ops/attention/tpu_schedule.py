"""Which tiles of the score matrix a TPU kernel visits, in which order, and the software pipeline that walks them.

The score matrix of one head is cut into tiles of `block_kv` keys by `block_q` queries. Tiles are gathered into panels:
what one grid step holds in VMEM. Everything that the static mask decides is decided here with numpy: panels without a
visible position are not in the grid, tiles without one are not in their panel's list, and tiles that are visible
throughout stand first in the list, because the code that walks them does no mask arithmetic. The static mask is
lengths, causal, window and blocks; where heads have block masks of their own, each has its own panels. Segment ids are
known on the device only: there a kernel reads the smallest and the largest id of every block from scalar memory and
rewrites the panel's list before it starts.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import TYPE_CHECKING, Any

import numpy as np
from jax.experimental import pallas as pl

from vishwamai.core.tiles import Tiles, size
from vishwamai.core.types import AnyArray, IndexMap, Ref
from vishwamai.ops.attention.block_mask import live_tiles as mask_tiles
from vishwamai.ops.attention.spec import AttentionSpec

if TYPE_CHECKING:
    import jax


@dataclasses.dataclass(frozen=True)
class Tiling(Tiles):
    """The cut of one pass.

    Attributes:
      block_q: queries of a tile (its lanes); `block_kv`: keys of a tile (its sublanes). Multiples of 128.
      panel_q: tiles of a panel along the queries; `panel_kv`: along the keys.
      unroll: tiles that one iteration of the unmasked loop walks; even, because scores alternate between two buffers.
      buffers: buffers of every block of the queries' side that moves between HBM and VMEM, 2 or 1; `kv_buffers`: of the
        keys' side. With one, the walk waits for the copy.
    """

    block_q: int = size("queries", least=128, block_size=lambda tiles, n: min(tiles.block_q, pl.cdiv(n, 128) * 128))
    block_kv: int = size("keys", least=128, block_size=lambda tiles, n: min(tiles.block_kv, pl.cdiv(n, 128) * 128))
    panel_q: int = size("queries", block_size=lambda tiles, n: 1)
    panel_kv: int = size("keys", block_size=lambda tiles, n: 1)
    unroll: int = size("unroll", least=2)
    buffers: int = 2
    kv_buffers: int = 2

    def block_spec(self, block: tuple[int | None, ...], index_map: IndexMap, keys: bool = False) -> pl.BlockSpec:
        """A block spec of the queries' side, or of the keys', with its number of buffers."""
        buffers = self.kv_buffers if keys else self.buffers
        return pl.BlockSpec(block, index_map, pipeline_mode=None if buffers == 2 else pl.Buffered(buffers))

    def blocks(self, spec: AttentionSpec) -> tuple[int, int]:
        """Tiles along the queries and the keys, rounded up to whole panels."""
        q, kv = pl.cdiv(spec.q_len, self.block_q), pl.cdiv(spec.kv_len, self.block_kv)
        return pl.cdiv(q, self.panel_q) * self.panel_q, pl.cdiv(kv, self.panel_kv) * self.panel_kv


MOST_BLOCKS = 1 << 10
"""The most tiles of a panel along one side that a word of the schedule can name."""
MOST_PATTERNS = 1 << 11
"""The most patterns of partly visible tiles, the whole one included."""


def pack_tile(i: AnyArray, j: AnyArray, pattern: AnyArray = 0) -> AnyArray:
    """A tile as one word: local q block, local kv block, number of its pattern in the block mask."""
    return i + (j << 10) + (pattern << 20)


def unpack_tile(word: AnyArray) -> tuple[AnyArray, AnyArray, AnyArray]:
    """(local q block, local kv block, pattern) of a word."""
    return word & 0x3FF, (word >> 10) & 0x3FF, word >> 20


@dataclasses.dataclass(frozen=True, eq=False)
class TileSchedule:
    """The panels of one pass and the tiles of each, as the scalar arrays that the kernel prefetches.

    Attributes:
      panels: int32 `[walks, steps, 2]`: q panel and kv panel, 16 bits each; query head within its walk (13 bits),
        whether the step is idle, whether it begins and whether it ends the accumulation, number of its tile list (15
        bits). `Panel` unpacks them. One walk serves all heads, unless heads have block masks of their own; shorter
        walks end in idle steps.
      tiles: int32, the lists one after another; of each the unmasked tiles first, and one entry of 0 after the last.
      counts: int32 `[lists, 3]`: tiles that need no mask (a multiple of `unroll`), all tiles, where the list starts.
    """

    panels: np.ndarray
    tiles: np.ndarray
    counts: np.ndarray

    @property
    def steps(self) -> int:
        return self.panels.shape[1]

    @property
    def length(self) -> int:
        """Words of the longest list."""
        return int(self.counts[:, 1].max()) + 1

    @property
    def words(self) -> int:
        """Words of scalar memory."""
        return self.panels.size + self.tiles.size + self.counts.size

    def first_step(self, walk: int | jax.Array) -> int | jax.Array:
        """Where the steps of a walk start; 0 where one walk serves all heads."""
        return 0 if len(self.panels) == 1 else walk * self.steps


@dataclasses.dataclass(frozen=True)
class Panel:
    """One step of the grid, unpacked from `TileSchedule.panels` (flat)."""

    words: Ref | np.ndarray
    step: int | jax.Array

    @property
    def q(self) -> jax.Array:
        return self.words[2 * self.step] & 0xFFFF

    @property
    def kv(self) -> jax.Array:
        return self.words[2 * self.step] >> 16

    @property
    def g(self) -> jax.Array:
        return self.words[2 * self.step + 1] & 0x1FFF

    @property
    def idle(self) -> jax.Array:
        return (self.words[2 * self.step + 1] & 0x2000) != 0

    @property
    def begins(self) -> jax.Array:
        return (self.words[2 * self.step + 1] & 0x4000) != 0

    @property
    def ends(self) -> jax.Array:
        return (self.words[2 * self.step + 1] & 0x8000) != 0

    @property
    def tiles(self) -> jax.Array:
        return self.words[2 * self.step + 1] >> 16


@dataclasses.dataclass(frozen=True)
class Home:
    """What becomes of dq in one step of a walk over several key panels that keeps it in VMEM, unpacked from
    `query_homes` (flat).
    """

    words: Ref
    step: jax.Array

    @property
    def q(self) -> jax.Array:
        """The q panel that is written next, in this step or later: the output's block until then."""
        return self.words[self.step] & 0xFFFF

    @property
    def g(self) -> jax.Array:
        """Its query head within the walk."""
        return (self.words[self.step] >> 16) & 0x1FFF

    @property
    def first(self) -> jax.Array:
        """Whether the step is the first that adds to its own q panel's dq."""
        return (self.words[self.step] & 1 << 29) != 0

    @property
    def last(self) -> jax.Array:
        """Whether it is the last one, which writes it."""
        return (self.words[self.step] & 1 << 30) != 0


def query_homes(schedule: TileSchedule) -> np.ndarray:
    """int32 `[walks, steps]`: see `Home`."""
    words = np.zeros(schedule.panels.shape[:2], np.int32)
    for number, panels in enumerate(schedule.panels):
        keys = [int(place & 0xFFFF | (word & 0x1FFF) << 16) for place, word in panels]
        first: dict[int, int] = {}
        last: dict[int, int] = {}
        for step, (_, word) in enumerate(panels):
            if not word & 1 << 13:  # idle steps add nothing
                first.setdefault(keys[step], step)
                last[keys[step]] = step
        home = keys[max(last.values())]
        for step in range(len(panels) - 1, -1, -1):
            ends = last[keys[step]] == step
            home = keys[step] if ends else home
            words[number, step] = home | (first[keys[step]] == step) << 29 | ends << 30
    return words


def visited_tiles(spec: AttentionSpec, block_q: int, block_kv: int) -> float:
    """Tiles of that size that the static mask leaves, for one head (their mean where heads differ): the work of a cut,
    before it is made.
    """
    q_tiles, kv_tiles = pl.cdiv(spec.q_len, block_q), pl.cdiv(spec.kv_len, block_kv)
    first_row, first_column = np.arange(q_tiles)[:, None] * block_q, np.arange(kv_tiles)[None, :] * block_kv
    last_row = np.minimum(first_row + block_q, spec.q_len) - 1
    last_column = np.minimum(first_column + block_kv, spec.kv_len) - 1
    low, high = spec.band
    live = np.ones((1, q_tiles, kv_tiles), bool)
    if high is not None:
        live &= first_column - last_row <= high
    if low is not None:
        live &= last_column - first_row >= low
    if spec.blocks is not None:
        live = live & mask_tiles(spec.blocks, block_q, block_kv, q_tiles, kv_tiles)
    return float(live.sum()) / len(live)


def panel_bound(spec: AttentionSpec, tiling: Tiling) -> int:
    """No schedule of `tiling` has more panels than this."""
    q_blocks, kv_blocks = tiling.blocks(spec)
    rows, columns = tiling.panel_q * tiling.block_q, tiling.panel_kv * tiling.block_kv
    total = 0
    for first in range(0, q_blocks * tiling.block_q, rows):
        start, stop = spec.key_range(first, min(first + rows, spec.q_len) - 1)
        total += 1 + max(0, (stop - 1) // columns - start // columns + 1)
    return (total + kv_blocks // tiling.panel_kv) * spec.group


def _tiles(
    spec: AttentionSpec, tiling: Tiling, q_panel: int, kv_panel: int, masked: bool, ids: np.ndarray | None
) -> tuple[tuple[int, ...], int]:
    """(packed tiles of a panel, how many of them need no mask). `ids` of the block mask: int32 `[q_blocks, kv_blocks]`
    as in `TileMasks`, or None.
    """
    i = np.arange(tiling.panel_q)[:, None]
    j = np.arange(tiling.panel_kv)[None, :]
    row, column = (q_panel * tiling.panel_q + i) * tiling.block_q, (kv_panel * tiling.panel_kv + j) * tiling.block_kv
    last_row = np.minimum(row + tiling.block_q, spec.q_len) - 1
    last_column = np.minimum(column + tiling.block_kv, spec.kv_len) - 1
    low, high = spec.band
    live = (row < spec.q_len) & (column < spec.kv_len)
    full = live & (column + tiling.block_kv <= spec.kv_len) & (not masked)
    if high is not None:
        live &= column - last_row <= high
        full &= last_column - row <= high
    if low is not None:
        live &= last_column - row >= low
        full &= column - last_row >= low
    pattern = np.zeros(live.shape, np.int32)
    if ids is not None:
        rows, columns = q_panel * tiling.panel_q, kv_panel * tiling.panel_kv
        pattern = ids[rows : rows + tiling.panel_q, columns : columns + tiling.panel_kv]
        live &= pattern >= 0
        full &= pattern == 0
    packed = pack_tile(i, j, np.maximum(pattern, 0))
    plain, rest = packed[live & full], packed[live & ~full]
    return (*plain.tolist(), *rest.tolist()), len(plain) // tiling.unroll * tiling.unroll


@functools.lru_cache(maxsize=64)
def make_schedule(spec: AttentionSpec, tiling: Tiling, *, masked: bool, kv_major: bool, heads: int = 1) -> TileSchedule:
    """The schedule of one pass.

    Args:
      masked: every tile needs the mask's code (there is a bias, a dense mask or dropout).
      kv_major: accumulate over queries and heads for one kv panel (dk and dv), instead of over keys for one q panel and
        head.
      heads: query heads of a group that the schedule walks itself; 1 where the grid does.
    """
    q_blocks, kv_blocks = tiling.blocks(spec)
    q_panels, kv_panels = q_blocks // tiling.panel_q, kv_blocks // tiling.panel_kv
    assert max(tiling.panel_q, tiling.panel_kv) <= MOST_BLOCKS
    blocks = spec.tile_masks(tiling.block_q, tiling.block_kv, q_blocks, kv_blocks)
    ids = [None] if blocks is None else list(blocks.ids)
    lists: dict[tuple[tuple[int, ...], int], int] = {}

    @functools.cache
    def visible(mask: int, outer: int) -> list[tuple[int, int, Any]]:
        """(q panel, kv panel, tiles) of the panels that a head visits, of those that share `outer`."""
        visits = []
        for inner in range(q_panels if kv_major else kv_panels):
            q, kv = (inner, outer) if kv_major else (outer, inner)
            tiles = _tiles(spec, tiling, q, kv, masked, ids[mask])
            if tiles[0]:
                visits.append((q, kv, tiles))
        return visits

    def walk_of(masks: list[int]) -> list[tuple[int, int]]:
        """The panels of one walk over `heads` heads, whose masks are these."""
        panels = []
        unseen = {(g, q) for g in range(heads) for q in range(q_panels)}
        for outer in range(kv_panels if kv_major else q_panels):
            for group in [range(heads)] if kv_major else [range(g, g + 1) for g in range(heads)]:
                visits = [(q, kv, g, tiles) for g in group for q, kv, tiles in visible(masks[g], outer)]
                unseen -= {(g, q) for q, _, g, _ in visits}
                if kv_major and outer == kv_panels - 1:  # every dq is written once, also where there is nothing to sum
                    visits = sorted((*visits, *((q, outer, g, ((), 0)) for g, q in unseen)), key=lambda x: (x[2], x[0]))
                if not visits:  # nothing to see, yet the zeros have to be written
                    visits = [(0, outer, group[0], ((), 0)) if kv_major else (outer, 0, group[0], ((), 0))]
                for n, (q, kv, g, tiles) in enumerate(visits):
                    number = lists.setdefault(tiles, len(lists))
                    begins, ends = n == 0, n == len(visits) - 1
                    panels.append((q | kv << 16, g | begins << 14 | ends << 15 | number << 16))
        return panels

    if len(ids) == 1:
        walks = [walk_of([0] * heads)]
    else:
        walks = [walk_of(list(range(first, first + heads))) for first in range(0, spec.q_heads, heads)]
    steps = max(map(len, walks))
    for panels in walks:  # an idle step stays where the last one was, so that nothing is copied
        place, word = panels[-1]
        panels += [(place, word & 0x1FFF | 1 << 13)] * (steps - len(panels))
    starts = np.cumsum([0, *(len(tiles) + 1 for tiles, _ in lists)])
    return TileSchedule(
        np.array(walks, np.int64).astype(np.int32),
        np.concatenate([np.array((*tiles, 0), np.int32) for tiles, _ in lists]),
        np.array([(plain, len(tiles), start) for (tiles, plain), start in zip(lists, starts, strict=False)], np.int32),
    )
