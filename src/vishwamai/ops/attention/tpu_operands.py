"""Further inputs of attention's TPU kernels: scalars, bias, masks, segment ids and statistics of the rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl

from vishwamai.core.pallas import TPU_DTYPES
from vishwamai.core.types import AnyArray, IndexMap, PyTree
from vishwamai.ops.attention.masks import exposed_keys
from vishwamai.ops.attention.spec import AttentionSpec, Operands
from vishwamai.ops.attention.tpu_masks import LOG2E, is_dense
from vishwamai.ops.attention.tpu_schedule import Tiling
from vishwamai.ops.attention.tpu_walk import id_ranges

Place: TypeAlias = Callable[[IndexMap], IndexMap]
"""From an index map of (batch, head, q panel, kv panel) to one of a pass's grid."""


def pad_axis(x: AnyArray, axis: int, size: int, mode: str = "constant") -> AnyArray:
    """Pads `axis` to `size`; zeros unless `mode` says otherwise."""
    if x is None or x.shape[axis] == size:
        return x
    return jnp.pad(x, [(0, size - x.shape[axis] if n == axis else 0) for n in range(x.ndim)], mode=mode)


def scalar_operands(spec: AttentionSpec, tiling: Tiling, operands: Operands) -> dict[str, jax.Array]:
    """Operands that live in scalar memory, flat: ranges of the blocks, sinks (in base 2), seeds of dropout."""
    scalars: dict[str, jax.Array] = {}
    if spec.by_value:
        scalars |= {name: x.reshape(-1) for name, x in block_ranges(spec, tiling, operands).items()}
    if operands.sinks is not None:
        scalars["sinks"] = operands.sinks.astype(jnp.float32).reshape(-1) * LOG2E
    if operands.dropout_seed is not None and spec.dropout_rate > 0:
        scalars["seeds"] = lax.bitcast_convert_type(operands.dropout_seed, jnp.int32).reshape(-1)
    return scalars


def block_ranges(spec: AttentionSpec, tiling: Tiling, operands: Operands) -> dict[str, jax.Array]:
    """What decides on the device whether a block of queries may see a block of keys: their ranges overlap.

    They are ranges of segment ids; without segments, of the keys that a block of queries reaches and of those that a
    block has.

    Returns:
      `q_range` and `kv_range`, int32 `[batch or 1, blocks, 2]`: the least and the greatest.
    """
    if operands.q_segment_ids is not None:
        q_ids, kv_ids = _padded_ids(spec, tiling, operands)
        return {"q_range": id_ranges(q_ids, tiling.block_q), "kv_range": id_ranges(kv_ids, tiling.block_kv)}
    low, high = spec.reach
    limits = jnp.iinfo(jnp.int32)
    rows = id_ranges(_padded_positions(spec, tiling, operands), tiling.block_q)
    ends = (
        jnp.full_like(rows[..., 0], limits.min) if low is None else rows[..., 0] + low,
        jnp.full_like(rows[..., 1], limits.max) if high is None else rows[..., 1] + high,
    )
    first = jnp.arange(tiling.blocks(spec)[1], dtype=jnp.int32) * tiling.block_kv
    keys = jnp.stack([first, first + (tiling.block_kv - 1)], axis=-1)[None]
    return {"q_range": jnp.stack(ends, axis=-1), "kv_range": keys}


def _padded_positions(spec: AttentionSpec, tiling: Tiling, operands: Operands) -> jax.Array:
    # The last position again, so that padding widens no range of a block.
    return pad_axis(operands.q_positions, 1, tiling.blocks(spec)[0] * tiling.block_q, "edge")


def _padded_ids(spec: AttentionSpec, tiling: Tiling, operands: Operands) -> tuple[jax.Array, jax.Array]:
    # The last id again, so that padding widens no range of a block.
    q_blocks, kv_blocks = tiling.blocks(spec)
    return (
        pad_axis(operands.q_segment_ids, 1, q_blocks * tiling.block_q, "edge"),
        pad_axis(operands.kv_segment_ids, 1, kv_blocks * tiling.block_kv, "edge"),
    )


def array_operands(
    spec: AttentionSpec, tiling: Tiling, operands: Operands, place: Place
) -> dict[str, tuple[jax.Array, pl.BlockSpec]]:
    """Bias, mask, segment ids and positions with their block specs.

    A vector along the queries or the keys is cut into `[blocks, 1, block]`, so that a kernel picks a block by a leading
    index.

    Args:
      place: `place(kind)` makes an index map from `kind(b, h, q_panel, kv_panel) -> block index`.
    """
    arrays: dict[str, tuple[jax.Array, pl.BlockSpec]] = {}
    for name in ("bias", "mask"):
        x = getattr(operands, name)
        if x is None:
            continue
        if name == "mask":
            # A dense mask moves a quarter of the bytes as int8; a vector of it is read as 32-bit rows.
            x = x.astype(jnp.int8 if is_dense(x) else jnp.float32)
        elif not is_dense(x) or x.dtype not in TPU_DTYPES:
            x = x.astype(jnp.float32)
        arrays[name] = _broadcast_operand(spec, tiling, x, place)
    words = pattern_words(spec, tiling)
    if words is not None:
        # All patterns, the same in every step: they are read once and need one buffer.
        block = pl.BlockSpec(words.shape, place(lambda b, h, q, kv: (0, 0, 0)), pipeline_mode=pl.Buffered(1))
        arrays["patterns"] = (jnp.asarray(words), block)
    if operands.q_segment_ids is not None:
        q_ids, kv_ids = _padded_ids(spec, tiling, operands)
        arrays["q_ids"] = _broadcast_operand(spec, tiling, q_ids[:, None, :, None], place)
        arrays["kv_ids"] = _broadcast_operand(spec, tiling, kv_ids[:, None, None, :], place)
    if operands.q_positions is not None:
        positions = _padded_positions(spec, tiling, operands)
        arrays["q_positions"] = _broadcast_operand(spec, tiling, positions[:, None, :, None], place)
    if operands.slopes is not None:
        slopes = operands.slopes.astype(jnp.float32) * LOG2E
        arrays["slopes"] = _broadcast_operand(spec, tiling, slopes[:, :, None, None], place)
    return arrays


def shown_operand(
    spec: AttentionSpec, tiling: Tiling, operands: Operands, place: Place
) -> dict[str, tuple[jax.Array, pl.BlockSpec]]:
    """`exposed`: which keys `masks.exposed_keys` leaves, float32 `[B or 1, Hkv or 1, blocks, 1, block_kv]`; nothing
    where no key is known to be hidden from all queries. `place` as in `array_operands`.
    """
    visible = exposed_keys(spec, operands)
    if visible is None:
        return {}
    batch, heads, _ = visible.shape
    _, kv_blocks = tiling.blocks(spec)
    x = pad_axis(visible.astype(jnp.float32), 2, kv_blocks * tiling.block_kv)

    def index(b: AnyArray, h: AnyArray, q: AnyArray, kv: AnyArray) -> PyTree:
        return b if batch > 1 else 0, lax.div(h, np.int32(spec.group)) if heads > 1 else 0, kv, 0, 0

    block = tiling.block_spec((None, None, tiling.panel_kv, 1, tiling.block_kv), place(index))
    return {"exposed": (x.reshape(batch, heads, kv_blocks, 1, tiling.block_kv), block)}


def pattern_words(spec: AttentionSpec, tiling: Tiling) -> np.ndarray | None:
    """The partly visible tiles of the block mask, transposed and a bit to a position; None where every tile of it is
    whole or empty.

    Returns:
      int32 `[patterns, rows, block_q]`: bit n of row r is key n * rows + r, so that a tile is unpacked by shifts and
      never across sublanes. There are as many bits to a word as leave whole registers of 8 rows.
    """
    tiles = spec.tile_masks(tiling.block_q, tiling.block_kv, *tiling.blocks(spec))
    if tiles is None or not tiles.partial:
        return None
    bits = 32 if tiling.block_kv % 256 == 0 else 16
    cut = tiles.patterns.swapaxes(1, 2).reshape(len(tiles.patterns), bits, tiling.block_kv // bits, tiling.block_q)
    words = (cut.astype(np.uint32) << np.arange(bits, dtype=np.uint32)[None, :, None, None]).sum(1, dtype=np.uint32)
    return words.view(np.int32)


def statistics(
    spec: AttentionSpec, tiling: Tiling, logsumexp: jax.Array, delta: jax.Array, place: Place
) -> dict[str, tuple[jax.Array, pl.BlockSpec]]:
    """logsumexp in base 2 and delta, `[B, Hq, blocks, 1, block_q]`. Rows that attend to nothing, and padding, get +inf:
    a probability of 0.
    """
    q_blocks, _ = tiling.blocks(spec)
    size = q_blocks * tiling.block_q
    padding = [(0, 0), (0, 0), (0, size - spec.q_len)]
    base2 = jnp.where(logsumexp == -jnp.inf, jnp.inf, logsumexp.astype(jnp.float32) * LOG2E)
    arrays = {"logsumexp": jnp.pad(base2, padding, constant_values=jnp.inf), "delta": jnp.pad(delta, padding)}
    block = tiling.block_spec(
        (None, None, tiling.panel_q, 1, tiling.block_q), place(lambda b, h, q, kv: (b, h, q, 0, 0))
    )
    return {
        name: (x.reshape(spec.batch, spec.q_heads, q_blocks, 1, tiling.block_q), block) for name, x in arrays.items()
    }


def _broadcast_operand(
    spec: AttentionSpec, tiling: Tiling, x: jax.Array, place: Place
) -> tuple[jax.Array, pl.BlockSpec]:
    """`[B|1, H|1, Tq|1, Tk|1]` as a kernel reads it."""
    batch, heads, rows, columns = x.shape
    q_blocks, kv_blocks = tiling.blocks(spec)

    def index(b: AnyArray, h: AnyArray, *rest: AnyArray) -> tuple[AnyArray, ...]:
        return (b if batch > 1 else 0, h if heads > 1 else 0, *rest)

    if is_dense(x):
        block = (None, None, tiling.panel_q * tiling.block_q, tiling.panel_kv * tiling.block_kv)
        return x, tiling.block_spec(block, place(lambda b, h, q, kv: index(b, h, q, kv)))
    if rows > 1:
        x = pad_axis(x, 2, q_blocks * tiling.block_q).reshape(batch, heads, q_blocks, 1, tiling.block_q)
        block = (None, None, tiling.panel_q, 1, tiling.block_q)
        return x, tiling.block_spec(block, place(lambda b, h, q, kv: index(b, h, q, 0, 0)))
    if columns > 1:
        x = pad_axis(x, 3, kv_blocks * tiling.block_kv).reshape(batch, heads, kv_blocks, 1, tiling.block_kv)
        block = (None, None, tiling.panel_kv, 1, tiling.block_kv)
        return x, tiling.block_spec(block, place(lambda b, h, q, kv: index(b, h, kv, 0, 0)))
    return x, pl.BlockSpec((None, None, 1, 1), place(lambda b, h, q, kv: index(b, h, 0, 0)))
