"""Tiles of paged attention's Triton kernels, and those taken by default."""

from __future__ import annotations

import dataclasses

from vishwamai.core import gpu
from vishwamai.core.target import Target
from vishwamai.core.tiles import Tiles, size, stage_count, warp_count
from vishwamai.ops.paged_attention.spec import PagedSpec

WIDEST = 256
"""Columns of a head."""
_PROGRAMS = 4 * gpu.SMS
"""Programs to aim at by splitting the keys: two for each place on the GPU."""
_FEWEST_BLOCKS = 4
"""Blocks of keys that a split should have: with fewer the pipeline never fills."""
_MOST_SPLITS = 64
_PARTIAL_BYTES = 256 << 20
"""The most memory that the splits' outputs may take."""


@dataclasses.dataclass(frozen=True)
class PagedGpuConfig(Tiles):
    """Tiles of the Triton kernels: of short runs of queries, decoding above all, and of long ones, which have a launch
    of their own.

    Attributes:
      rows: rows of a tile, queries times query heads of a kv head; a power of two of 16 or more. Runs that fit one tile
        are short.
      block_kv: keys of a step, a power of two of 16 or more.
      warps: warps of a program.
      stages: blocks of keys in flight.
      splits: programs that share the keys of a short run.
      long_rows, long_kv, long_warps, long_stages: the same of long runs, whose keys are not shared.
    """

    rows: int = size("rows")
    block_kv: int = size("keys", block_size=lambda tiles, n: min(max(128, tiles.block_kv), tile_of(n)))
    warps: int = warp_count()
    stages: int = stage_count()
    splits: int = size("splits", most=64)
    long_rows: int = size("rows")
    long_kv: int = size("keys", block_size=lambda tiles, n: min(max(128, tiles.long_kv), tile_of(n)))
    long_warps: int = warp_count()
    long_stages: int = stage_count()


def tile_of(n: int) -> int:
    return max(16, gpu.next_power_of_2(n))


def heuristic(spec: PagedSpec, target: Target) -> PagedGpuConfig:
    """Few rows and many programs at once for short runs, larger tiles for long ones; splits until the programs fill a
    GPU.

    On Hopper nothing spills but float32 heads wider than 128, and decoding over some 8-bit pages 8 bytes.
    """
    most = most_rows(spec)[0]
    all_rows = tile_of(spec.max_q_len * spec.group)
    long = tiles(spec, min(all_rows, most))
    # Where some runs are long the short ones are those of decoding: as few rows as its heads fill.
    short = long if all_rows <= min(64, most) else tiles(spec, min(tile_of(spec.group), most))
    config = PagedGpuConfig(*short, 1, *long)
    programs = spec.batch * spec.sequences * spec.kv_heads * heads_of(spec, config.rows)[1]
    partial = 4 * spec.batch * slots_of(spec, config) * spec.heads * spec.value_dim
    splits = min(
        _PROGRAMS // programs,
        spec.visible_tokens // (_FEWEST_BLOCKS * config.block_kv),
        _PARTIAL_BYTES // partial,
        _MOST_SPLITS,
    )
    # A power of two: the number is compiled into the kernel, and batches of many sizes are to share one.
    return dataclasses.replace(config, splits=1 << max(1, splits).bit_length() - 1)


def tiles(spec: PagedSpec, rows: int) -> tuple[int, int, int, int]:
    """(rows, keys, warps, stages) of a tile of `rows` rows."""
    keys = most_rows(spec)[1]
    wide = spec.operands.query.dtype.itemsize == 4
    if wide and rows == 64 and spec.head_dim > 64:
        keys = 16
    while keys > 16 and keys >= 2 * spec.visible_tokens:
        keys //= 2
    # Numbers of pages are one load ahead of the pages: of three stages two hold keys and values. The largest tiles have
    # no registers for it.
    stages = 2 if rows == 64 and (keys == 16 or spec.value_dim > WIDEST) else 3
    return rows, keys, 8 if rows > 16 or (wide and spec.head_dim > 128) else 4, stages


def most_rows(spec: PagedSpec) -> tuple[int, int]:
    """(the most rows of a tile, keys of a step) that the registers hold."""
    latent, dim = spec.form == "latent", max(tile_of(spec.head_dim), tile_of(spec.value_dim))
    if spec.operands.query.dtype.itemsize == 4:
        return (64, 32) if dim <= 128 and not latent else (32, 16) if dim <= 128 else (16, 16)
    eight_bits = spec.operands.k_pages.dtype.itemsize == 1
    if dim <= 128:
        # Places in the mask take a register for each pair of a row and a key.
        return 128 if spec.operands.tree_mask is None else 64, 64
    if latent:
        return (32 if eight_bits else 64), 32
    return (64 if eight_bits else 128), 32


def heads_of(spec: PagedSpec, rows: int) -> tuple[int, int]:
    """(query heads of a tile, tiles that a group of them takes)."""
    heads = min(spec.group, rows)
    return heads, gpu.cdiv(spec.group, heads)


def longest_short(spec: PagedSpec, config: PagedGpuConfig) -> int:
    """Queries of the longest run that is short."""
    return config.rows // heads_of(spec, config.rows)[0]


def slots_of(spec: PagedSpec, config: PagedGpuConfig) -> int:
    """Rows of queries that the splits' outputs have room for: the tokens, or, where some runs are long, so many of each
    sequence.
    """
    short = longest_short(spec, config)
    return spec.tokens if spec.max_q_len <= short else spec.sequences * short
