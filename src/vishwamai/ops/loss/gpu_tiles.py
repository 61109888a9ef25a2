"""Tiles of the linear cross entropy's Triton kernels, and those taken by default."""

from __future__ import annotations

import dataclasses

from vishwamai.core import gpu
from vishwamai.core.target import Target
from vishwamai.core.tiles import Tiles, size, stage_count, warp_count
from vishwamai.ops.loss.spec import LossSpec

_SHALLOW = 1024
"""Features below which a tile's product is short beside what follows it: then two programs share a multiprocessor, so
that one multiplies meanwhile.
"""
_PARTS, _LEAST, _MOST = 16, 512, 8192
"""Parts of the vocabulary to aim at in the backward pass, and bounds of a part's entries."""


def _tile_vocab(tiles: LossGpuConfig, block_size: int) -> int:
    return min(tiles.tile_vocab, max(16, gpu.next_power_of_2(block_size)))


@dataclasses.dataclass(frozen=True)
class LossGpuConfig(Tiles):
    """Tiles of the Triton kernels.

    Attributes:
      block_tokens, tile_vocab, block_features: edges of a tile of logits and the depth of one step of its product,
        powers of two.
      splits: parts of the vocabulary that the forward pass sums apart.
      block_vocab: entries whose logits' gradient the backward pass holds at a time; it is brought to a multiple of
        `tile_vocab`.
      warps, stages: counts of a program that forms logits.
      group_m: tiles of tokens that are walked together.
    """

    block_tokens: int = size("tokens")
    tile_vocab: int = size("vocab", block_size=_tile_vocab)
    block_features: int = size("features")
    splits: int = size("splits", most=64)
    block_vocab: int = size("vocab", block_size=lambda tiles, n: min(tiles.block_vocab, max(_tile_vocab(tiles, n), n)))
    warps: int = warp_count(8, block_size=lambda tiles, n: 4)
    stages: int = stage_count(3)
    group_m: int = size("rows", 8)


def groups_and_tokens(spec: LossSpec) -> tuple[int, int]:
    """(groups, tokens of each): groups that share all parameters are one."""
    return (1, spec.groups * spec.tokens) if spec.shared else (spec.groups, spec.tokens)


def rows_aligned(spec: LossSpec) -> bool:
    """Whether the copy engine takes rows of features."""
    return spec.features * spec.operands.x.dtype.itemsize % 16 == 0


def widest_columns(spec: LossSpec) -> int:
    """Columns of the widest tile of 128 rows whose program keeps within its registers: the parts of float32 need some,
    and so do the addresses of a tile that the copy engine cannot fetch.
    """
    return 256 // spec.operands.x.dtype.itemsize * (2 if rows_aligned(spec) else 1)


def warps_and_stages(spec: LossSpec, rows: int, columns: int) -> tuple[int, int]:
    """Of a program that multiplies tiles of `rows x columns`."""
    return (8, 3) if rows * columns >= 128 * min(128, widest_columns(spec)) else (4, 4)


def edge_of(size: int, largest: int) -> int:
    """Edge of a tile over an axis of `size`."""
    return min(largest, max(16, gpu.next_power_of_2(size)))


def heuristic(spec: LossSpec, target: Target) -> LossGpuConfig:
    """Tiles of 128 tokens and 256 entries; so many splits, and such parts of the backward pass, that the last round of
    programs is nearly full.
    """
    groups, tokens = groups_and_tokens(spec)
    widest, block_t = widest_columns(spec), edge_of(tokens, 128)
    # All that may follow a tile's product at once, bias, cap and sums, needs registers too.
    narrow = block_t < 128 or spec.features <= _SHALLOW or None not in (spec.softcap, spec.operands.bias)
    block_v = edge_of(spec.vocab, min(widest, 128) if narrow else widest)
    block_d = edge_of(spec.features, 64 if widest == 256 else 32)
    slots = gpu.SMS * (2 if widest == 256 and block_t * block_v <= 128 * 128 else 1)
    rows, tiles = groups * gpu.cdiv(tokens, block_t), gpu.cdiv(spec.vocab, block_v)

    def rounds(programs: int) -> int:
        return gpu.cdiv(programs, slots)

    def cost(splits: int) -> int:
        """Tiles that pass by, one after the other."""
        entries = gpu.cdiv(tiles, splits)
        return rounds(rows * gpu.cdiv(tiles, entries)) * entries

    splits = min(range(1, min(tiles, gpu.cdiv(4 * slots, rows)) + 1), key=cost)
    # Few tokens take more entries at a time, so that there is work for every multiprocessor, but never a quarter of
    # all.
    more = min(2 * slots // rows, spec.vocab // 4 // block_v)
    most = max(min(max(spec.vocab // _PARTS, _LEAST), _MOST) // block_v, more, 1)
    part = max(range((most + 1) // 2, most + 1), key=lambda n: rows * n / rounds(rows * n))
    block_vocab = min(part, tiles) * block_v
    return LossGpuConfig(block_t, block_v, block_d, splits, block_vocab, *warps_and_stages(spec, block_t, block_v))


def product_tiles(spec: LossSpec, groups: int, m: int, n: int, k: int) -> tuple[int, int, int]:
    """(rows, columns, depth) of a tile of `groups` products `m x n x k`: the largest of which there are enough for
    every multiprocessor.
    """
    widest = widest_columns(spec)
    options = ((128, widest), *((128, n) for n in (128, 64) if n < widest), (64, 64))
    for block_m, block_n in options:
        if groups * gpu.cdiv(m, block_m) * gpu.cdiv(n, block_n) >= gpu.SMS and m >= block_m and n >= block_n:
            break
    return edge_of(m, block_m), edge_of(n, block_n), edge_of(k, 64 if widest == 256 else 32)
