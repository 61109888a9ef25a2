"""Which tiles of the score matrix a TPU kernel visits, in which order, and the software pipeline that walks them.

The score matrix of one head is cut into tiles of `block_kv` keys by `block_q` queries. Tiles are gathered into panels: what one grid step holds in
VMEM. Everything that the static mask decides is decided here with numpy: panels without a visible position are not in the
grid, tiles without one are not in their panel's list, and tiles that are visible throughout stand first in the list, because the code that walks them
does no mask arithmetic. The static mask is lengths, causal, window and blocks; where heads have block masks of their own, each has its own panels. Segment ids are known on the device only: there a kernel reads the smallest and the largest id of every block from scalar memory
and rewrites the panel's list before it starts.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl

from vishwamai.ops.attention.block_mask import live_tiles as mask_tiles
from vishwamai.ops.attention.spec import AttentionSpec


@dataclasses.dataclass(frozen=True)
class Tiling:
    """The cut of one pass.

    Attributes:
      block_q: queries of a tile (its lanes); `block_kv`: keys of a tile (its sublanes). Multiples of 128.
      panel_q: tiles of a panel along the queries; `panel_kv`: along the keys.
      unroll: tiles that one iteration of the unmasked loop walks; even, because scores alternate between two buffers.
      buffers: buffers of every block of the queries' side that moves between HBM and VMEM, 2 or 1; `kv_buffers`: of the keys' side. With one, the
        walk waits for the copy.
    """

    block_q: int
    block_kv: int
    panel_q: int
    panel_kv: int
    unroll: int
    buffers: int = 2
    kv_buffers: int = 2

    def block_spec(
        self, block: tuple[int | None, ...], index_map: Callable[..., Any], keys: bool = False
    ) -> pl.BlockSpec:
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


def pack_tile(i: Any, j: Any, pattern: Any = 0) -> Any:
    """A tile as one word: local q block, local kv block, number of its pattern in the block mask."""
    return i + (j << 10) + (pattern << 20)


def unpack_tile(word: Any) -> tuple[Any, Any, Any]:
    """(local q block, local kv block, pattern) of a word."""
    return word & 0x3FF, (word >> 10) & 0x3FF, word >> 20


@dataclasses.dataclass(frozen=True, eq=False)
class Schedule:
    """The panels of one pass and the tiles of each, as the scalar arrays that the kernel prefetches.

    Attributes:
      panels: int32 `[walks, steps, 2]`: q panel and kv panel, 16 bits each; query head within its walk (13 bits), whether the step is idle, whether
        it begins and whether it ends the accumulation, number of its tile list (15 bits). `Panel` unpacks them. One walk serves all heads, unless
        heads have block masks of their own; shorter walks end in idle steps.
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

    def first_step(self, walk: Any) -> Any:
        """Where the steps of a walk start; 0 where one walk serves all heads."""
        return 0 if len(self.panels) == 1 else walk * self.steps

    def tiles_of(self, number: int) -> tuple[np.ndarray, int]:
        """(words of a list, how many of them need no mask)."""
        plain, count, start = self.counts[number]
        return self.tiles[start : start + count], int(plain)


@dataclasses.dataclass(frozen=True)
class Panel:
    """One step of the grid, unpacked from `Schedule.panels` (flat)."""

    words: Any
    step: Any

    @property
    def q(self) -> Any:
        return self.words[2 * self.step] & 0xFFFF

    @property
    def kv(self) -> Any:
        return self.words[2 * self.step] >> 16

    @property
    def g(self) -> Any:
        return self.words[2 * self.step + 1] & 0x1FFF

    @property
    def idle(self) -> Any:
        return (self.words[2 * self.step + 1] & 0x2000) != 0

    @property
    def begins(self) -> Any:
        return (self.words[2 * self.step + 1] & 0x4000) != 0

    @property
    def ends(self) -> Any:
        return (self.words[2 * self.step + 1] & 0x8000) != 0

    @property
    def tiles(self) -> Any:
        return self.words[2 * self.step + 1] >> 16


@dataclasses.dataclass(frozen=True)
class Home:
    """What becomes of dq in one step of a walk over several key panels that keeps it in VMEM, unpacked from `query_homes` (flat)."""

    words: Any
    step: Any

    @property
    def q(self) -> Any:
        """The q panel that is written next, in this step or later: the output's block until then."""
        return self.words[self.step] & 0xFFFF

    @property
    def g(self) -> Any:
        """Its query head within the walk."""
        return (self.words[self.step] >> 16) & 0x1FFF

    @property
    def first(self) -> Any:
        """Whether the step is the first that adds to its own q panel's dq."""
        return (self.words[self.step] & 1 << 29) != 0

    @property
    def last(self) -> Any:
        """Whether it is the last one, which writes it."""
        return (self.words[self.step] & 1 << 30) != 0


def query_homes(schedule: Schedule) -> np.ndarray:
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
    """Tiles of that size that the static mask leaves, for one head (their mean where heads differ): the work of a cut, before it is made."""
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
    """(packed tiles of a panel, how many of them need no mask). `ids` of the block mask: int32 `[q_blocks, kv_blocks]` as in `TileMasks`, or None."""
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
def make_schedule(spec: AttentionSpec, tiling: Tiling, *, masked: bool, kv_major: bool, heads: int = 1) -> Schedule:
    """The schedule of one pass.

    Args:
      masked: every tile needs the mask's code (there is a bias, a dense mask or dropout).
      kv_major: accumulate over queries and heads for one kv panel (dk and dv), instead of over keys for one q panel and head.
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
        found = []
        for inner in range(q_panels if kv_major else kv_panels):
            q, kv = (inner, outer) if kv_major else (outer, inner)
            tiles = _tiles(spec, tiling, q, kv, masked, ids[mask])
            if tiles[0]:
                found.append((q, kv, tiles))
        return found

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
    return Schedule(
        np.array(walks, np.int64).astype(np.int32),
        np.concatenate([np.array((*tiles, 0), np.int32) for tiles, _ in lists]),
        np.array([(plain, len(tiles), start) for (tiles, plain), start in zip(lists, starts, strict=False)], np.int32),
    )


def id_ranges(ids: jax.Array, block: int) -> jax.Array:
    """Smallest and largest segment id of every block: `[B or 1, blocks * block]` to flat int32 `[B or 1 * blocks * 2]`."""
    cut = ids.reshape(ids.shape[0], -1, block)
    return jnp.stack([cut.min(-1), cut.max(-1)], axis=-1).reshape(-1)


def live_tiles(
    read: Callable[[Any], Any],
    counts: tuple[Any, Any],
    q_range: Callable[[Any], tuple[Any, Any]],
    kv_range: Callable[[Any], tuple[Any, Any]],
    out_ref: Any,
    spare_ref: Any,
    unroll: int,
) -> tuple[Any, Any]:
    """Writes to `out_ref` the tiles whose segments can meet, the unmasked first; returns the new counts.

    Args:
      read: tile by position in the static list; `counts`: (those that need no static mask, all).
      q_range, kv_range: (smallest, largest) id of a local block.
      out_ref, spare_ref: int32 refs in scalar memory, of the static list's length.
    """
    plain, count = counts

    def visit(t: Any, found: tuple[Any, Any]) -> tuple[Any, Any]:
        n_plain, n_rest = found
        tile = read(t)
        i, j, _ = unpack_tile(tile)
        q_min, q_max = q_range(i)
        kv_min, kv_max = kv_range(j)
        meet = (q_min <= kv_max) & (kv_min <= q_max)
        uniform = (t < plain) & (q_min == q_max) & (kv_min == kv_max)
        # Written where it would go in either case; only the counters say whether it stays.
        out_ref[n_plain] = tile
        spare_ref[n_rest] = tile
        return n_plain + (meet & uniform).astype(jnp.int32), n_rest + (meet & ~uniform).astype(jnp.int32)

    n_plain, n_rest = lax.fori_loop(0, count, visit, (jnp.int32(0), jnp.int32(0)))

    def move(t: Any, carry: None) -> None:
        out_ref[n_plain + t] = spare_ref[t]
        return carry

    lax.fori_loop(0, n_rest, move, None)
    out_ref[n_plain + n_rest] = 0
    return n_plain - lax.rem(n_plain, np.int32(unroll)), n_plain + n_rest


def walk(
    read: Callable[[Any], Any],
    counts: tuple[Any, Any],
    produce: Callable[[Any, int], None],
    consume: Callable[[Any, int, bool], None],
    unroll: int,
) -> None:
    """Walks a list of tiles: the products that make the next tile's scores are issued together with the work on this one's.

    Args:
      read: tile by position; one position past the end is read.
      counts: (tiles that need no mask, all tiles).
      produce: `(tile, slot)`: computes a tile's scores into buffer `slot`.
      consume: `(tile, slot, masked)`: uses them.
    """
    plain, count = counts
    produce(read(0), 0)

    def step(t: Any, slot: int, masked: bool) -> None:
        produce(read(t + 1), 1 - slot)
        consume(read(t), slot, masked)

    def unmasked(n: Any, carry: None) -> None:
        for u in range(unroll):
            step(n * unroll + u, u % 2, False)
        return carry

    lax.fori_loop(0, lax.div(plain, np.int32(unroll)), unmasked, None)

    def masked_pair(n: Any, carry: None) -> None:
        t = plain + 2 * n
        step(t, 0, True)
        pl.when(t + 1 < count)(lambda: step(t + 1, 1, True))
        return carry

    lax.fori_loop(0, lax.div(count - plain + 1, np.int32(2)), masked_pair, None)


def visit_tiles(
    read: Callable[[Any], Any], counts: tuple[Any, Any], visit: Callable[[Any, bool], None], unroll: int
) -> None:
    """Visits a list of tiles, those that need no mask `unroll` at a time, which leaves it to the compiler to interleave them.

    Args:
      read: tile by position.
      counts: (tiles that need no mask, all tiles).
      visit: `(tile, masked)`.
    """
    plain, count = counts

    def unmasked(n: Any, carry: None) -> None:
        for u in range(unroll):
            visit(read(n * unroll + u), False)
        return carry

    def masked(t: Any, carry: None) -> None:
        visit(read(t), True)
        return carry

    lax.fori_loop(0, lax.div(plain, np.int32(unroll)), unmasked, None)
    lax.fori_loop(plain, count, masked, None)
