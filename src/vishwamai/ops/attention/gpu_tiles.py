"""Tiles of the Triton attention kernels, and those taken by default."""

from __future__ import annotations

import dataclasses

from vishwamai.core import gpu
from vishwamai.core.target import Target
from vishwamai.core.tiles import Tiles, size, stage_count, warp_count
from vishwamai.ops.attention.spec import AttentionSpec


@dataclasses.dataclass(frozen=True)
class AttentionGpuConfig(Tiles):
    """Tiles of the Triton kernels, powers of two of 16 or more.

    Attributes:
      block_q, block_kv: queries and keys of a forward block.
      warps, stages: warps of a forward program, and blocks of keys in flight.
      backward_q, backward_kv: queries and keys of a block of the backward pass.
      backward_warps, backward_stages: the same of the backward pass.
      deterministic: the same bits every time; False saves two of seven products of the backward pass.
    """

    block_q: int = size("queries", block_size=lambda tiles, n: min(tiles.block_q, tile_of(n)))
    block_kv: int = size("keys", block_size=lambda tiles, n: min(tiles.block_kv, tile_of(n)))
    warps: int = warp_count()
    stages: int = stage_count()
    backward_q: int = size("queries", of="backward", block_size=lambda tiles, n: min(tiles.backward_q, tile_of(n)))
    backward_kv: int = size("keys", of="backward", block_size=lambda tiles, n: min(tiles.backward_kv, tile_of(n)))
    backward_warps: int = warp_count(of="backward")
    backward_stages: int = stage_count(of="backward")
    deterministic: bool = True


def heuristic(spec: AttentionSpec, target: Target) -> AttentionGpuConfig:
    """Blocks that fill the registers, by head width and dtype; fewer rows for short queries.

    On Hopper nothing of the causal kernels spills for 16-bit operands; float32 spills for heads wider than 64.
    """
    wide = spec.operands.query.dtype.itemsize == 4
    dim = max(tile_of(spec.qk_dim), tile_of(spec.v_dim))
    if wide:
        config = _WIDE[max(64, dim)]
    else:
        config = _NARROW[max(64, dim)]
        if dim == 128 and spec.q_len > 64 and spec.operands.bias is None and spec.operands.mask is None:
            # Measured on an H100, 4096 causal positions: 0.500 ms with four stages, 0.585 with three. A bias or a mask
            # needs the shared memory of the fourth.
            config = dataclasses.replace(config, stages=4)
    if spec.blocks is not None:
        # A tile larger than a block would visit the block's neighbours too; smaller than 64 rows it would leave the
        # tensor cores idle.
        block_q, block_kv = (max(64, gpu.next_power_of_2(size)) for size in spec.blocks.block_size)
        forward = config.block_q, config.block_kv, config.warps, config.stages
        if block_q < config.block_q:
            # The tile masks take the shared memory that a third stage would need for a second program beside this one.
            forward = _SMALL[max(64, dim), len(spec.blocks.patterns) > 0]
        config = dataclasses.replace(
            config,
            block_q=forward[0],
            block_kv=min(forward[1], block_kv),
            warps=forward[2],
            stages=forward[3],
            backward_q=min(config.backward_q, block_q),
            backward_kv=min(config.backward_kv, block_kv),
        )
    return dataclasses.replace(
        config,
        block_q=clamp(config.block_q, spec.q_len),
        block_kv=clamp(config.block_kv, spec.kv_len),
        backward_q=clamp(config.backward_q, spec.q_len),
        backward_kv=clamp(config.backward_kv, spec.kv_len),
    )


_NARROW = {
    64: AttentionGpuConfig(128, 128, 8, 2, 64, 128, 8, 2),
    128: AttentionGpuConfig(128, 64, 8, 3, 64, 64, 8, 2),
    256: AttentionGpuConfig(128, 64, 8, 2, 64, 32, 8, 1),
}
_SMALL = {
    (64, False): (64, 64, 4, 3),
    (64, True): (64, 64, 4, 3),
    (128, False): (64, 64, 4, 3),
    (128, True): (64, 64, 4, 2),
    (256, False): (64, 32, 4, 2),
    (256, True): (64, 32, 4, 2),
}
"""Forward tiles (queries, keys, warps, stages) of 16-bit operands under a block mask of blocks of 64 queries or fewer,
by head width and by whether blocks are there in part.
"""
_WIDE = {
    64: AttentionGpuConfig(64, 32, 4, 2, 16, 16, 4, 1),
    128: AttentionGpuConfig(64, 32, 8, 1, 32, 32, 8, 1),
    256: AttentionGpuConfig(32, 32, 8, 1, 16, 32, 8, 1),
}
"""By the wider of the two head widths, rounded up to a power of two."""


def tile_of(n: int) -> int:
    return max(16, gpu.next_power_of_2(n))


def clamp(block: int, length: int) -> int:
    return min(tile_of(block), tile_of(length))
