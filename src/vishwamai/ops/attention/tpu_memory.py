"""VMEM that a step of attention's TPU kernels takes."""

from __future__ import annotations

import jax.numpy as jnp

from vishwamai.core.pallas import TPU_DTYPES, tiled_bytes
from vishwamai.ops.attention.spec import AttentionSpec
from vishwamai.ops.attention.tpu_backward_walk import Form, sum_shape
from vishwamai.ops.attention.tpu_masks import needs_mask_everywhere
from vishwamai.ops.attention.tpu_schedule import Tiling


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
    shared += (3 if is_plain(spec) else 6) * tiled_bytes((tiling.block_kv, tiling.block_q), jnp.float32)
    resident_rows = spec.group * tiling.blocks(spec)[0] if form.resident else tiling.panel_q
    for_dq = (
        tiling.buffers * tiled_bytes((q_rows, spec.qk_dim), dtype if form.resident else jnp.float32)
        + resident_rows * tiled_bytes((spec.qk_dim, tiling.block_q), jnp.float32)
        + tiling.panel_kv * tiled_bytes((spec.qk_dim, tiling.block_kv), dtype)
    )
    for_dkv = tiling.kv_buffers * sum(tiled_bytes((kv_rows, dim), dtype) for dim in dims)
    if not form.streaming:
        for_dkv += tiling.panel_q * sum(tiled_bytes((dim, tiling.block_q), dtype) for dim in dims)
    for_dkv += tiling.panel_kv * sum(tiled_bytes(sum_shape(form, tiling.block_kv, dim), jnp.float32) for dim in dims)
    return shared + (max(for_dq, for_dkv) if form.split else for_dq + for_dkv)


def is_plain(spec: AttentionSpec) -> bool:
    """Whether the scores go straight into the exponential, except for a static mask."""
    return not needs_mask_everywhere(spec) and spec.softcap is None and not spec.by_value
