"""Gradient of attention's bias on TPU, summed over the axes that the bias broadcasts along.

The grid's axes along which the bias has extent 1 are its innermost, so a block of the result stays in VMEM until its
sum is complete, and no array of the size of the scores exists unless the bias itself is that large. The scores and
their gradient are recomputed; calls without a bias pay nothing.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl

from vishwamai.core.pallas import call
from vishwamai.core.types import AnyArray, IndexMap, PyTree, Ref
from vishwamai.ops.attention.spec import AttentionSpec, Operands
from vishwamai.ops.attention.tpu_masks import AttentionRefs, ScoreTile, dot, probabilities, scaled_query
from vishwamai.ops.attention.tpu_operands import array_operands, pad_axis, scalar_operands, shown_operand, statistics
from vishwamai.ops.attention.tpu_schedule import Tiling

BLOCK = 256


def _body(refs: AttentionRefs, *, spec: AttentionSpec, tiling: Tiling, order: tuple[int, ...], kept_axes: int) -> None:
    ids = dict(zip(order, (pl.program_id(n) for n in range(4)), strict=True))  # the grid's axes are in `order`
    batch, head, q, kv = (ids[n] for n in range(4))
    steps = [pl.program_id(n) == 0 for n in range(kept_axes, 4)]
    first = steps[0] if steps else True
    for step in steps[1:]:
        first = jnp.logical_and(first, step)

    @pl.when(first)
    def _() -> None:
        refs.dbias[...] = jnp.zeros(refs.dbias.shape, jnp.float32)  # the block stays over the axes that are summed

    low, high = spec.band
    live, pattern = jnp.bool_(True), 0
    if spec.blocks is not None:
        q_blocks, kv_blocks = tiling.blocks(spec)
        pattern_head = head if spec.blocks.heads > 1 else 0
        pattern = refs.tile_ids[(pattern_head * q_blocks + q) * kv_blocks + kv]
        live &= pattern >= 0  # -1: no key of the tile is visible
    tile = ScoreTile(0, 0, q * tiling.block_q, kv * tiling.block_kv, pattern)
    if high is not None:
        live &= tile.column - (tile.row + tiling.block_q - 1) <= high  # the tile's lower left corner
    if low is not None:
        live &= tile.column + tiling.block_kv - 1 - tile.row >= low  # its upper right corner

    @pl.when(live)
    def _() -> None:
        query = scaled_query(spec, refs.query[...])
        s, dp = dot(refs.key[...], query, (1, 1)), dot(refs.value[...], refs.do[...], (1, 1))
        _, ds = probabilities(spec, tiling, refs, tile, s, dp, batch * spec.q_heads + head, True, of_bias=True)
        _, _, rows, columns = spec.operands.bias.shape
        if columns > 1:
            ds = ds.T  # [block_q, block_kv]
        if rows == 1 or columns == 1:
            ds = jnp.sum(ds, axis=0, keepdims=True)
        if rows == 1 and columns == 1:
            ds = jnp.sum(ds, axis=1, keepdims=True)
        refs.dbias[...] += ds


def tiling_for(spec: AttentionSpec) -> Tiling:
    """The cut of this pass."""
    most = BLOCK if max(spec.qk_dim, spec.v_dim) <= 512 else 128

    def block(length: int) -> int:
        return min(most, pl.cdiv(length, 128) * 128)

    return Tiling(block(spec.q_len), block(spec.kv_len), 1, 1, 2)


def bias_gradient(
    spec: AttentionSpec, operands: Operands, logsumexp: jax.Array, delta: jax.Array, dout: jax.Array
) -> jax.Array:
    """The gradient of `operands.bias`, of its shape and dtype."""
    bias: Any = operands.bias
    tiling = tiling_for(spec)
    q_blocks, kv_blocks = tiling.blocks(spec)
    q_size, kv_size = q_blocks * tiling.block_q, kv_blocks * tiling.block_kv
    sizes = (spec.batch, spec.q_heads, q_blocks, kv_blocks)
    kept_axes = [n for n in range(4) if bias.shape[n] > 1]
    # Summed axes are the inner ones of the grid, so that a block of the result is finished before the next.
    order = (*kept_axes, *(n for n in range(4) if n not in kept_axes))

    def place(index: IndexMap) -> IndexMap:
        def index_map(*args: PyTree) -> PyTree:
            ids = dict(zip(order, args[:4], strict=True))
            return index(ids[0], ids[1], ids[2], ids[3])

        return index_map

    def rows(dim: int, length: str) -> pl.BlockSpec:
        if length == "q":
            return pl.BlockSpec((None, None, tiling.block_q, dim), place(lambda b, h, q, kv: (b, h, q, 0)))
        return pl.BlockSpec(
            (None, None, tiling.block_kv, dim), place(lambda b, h, q, kv: (b, lax.div(h, np.int32(spec.group)), kv, 0))
        )

    inputs = {
        "query": (pad_axis(operands.query, 2, q_size), rows(spec.qk_dim, "q")),
        "do": (pad_axis(dout.astype(operands.query.dtype), 2, q_size), rows(spec.v_dim, "q")),
        "key": (pad_axis(operands.key, 2, kv_size), rows(spec.qk_dim, "kv")),
        "value": (pad_axis(operands.value, 2, kv_size), rows(spec.v_dim, "kv")),
        **statistics(spec, tiling, logsumexp, delta, place),
        **array_operands(spec, tiling, operands, place),
        **shown_operand(spec, tiling, operands, place),
    }
    scalars = scalar_operands(spec, tiling, operands)
    masks = spec.tile_masks(tiling.block_q, tiling.block_kv, q_blocks, kv_blocks)
    if masks is not None:
        scalars["tile_ids"] = jnp.asarray(masks.ids.reshape(-1))
    batch, heads, q_len, kv_len = bias.shape

    def index(b: AnyArray, h: AnyArray, *rest: AnyArray) -> tuple[AnyArray, ...]:
        return (b if batch > 1 else 0, h if heads > 1 else 0, *rest)

    if q_len > 1 and kv_len > 1:
        shape: tuple[int, ...] = (q_len, kv_len)
        out_block: tuple[Any, ...] = (tiling.block_q, tiling.block_kv)
        where = place(lambda b, h, q, kv: index(b, h, q, kv))
    elif q_len > 1:
        shape, out_block = (q_blocks, 1, tiling.block_q), (None, 1, tiling.block_q)
        where = place(lambda b, h, q, kv: index(b, h, q, 0, 0))
    elif kv_len > 1:
        shape, out_block = (kv_blocks, 1, tiling.block_kv), (None, 1, tiling.block_kv)
        where = place(lambda b, h, q, kv: index(b, h, kv, 0, 0))
    else:
        shape, out_block = (1, 1), (1, 1)
        where = place(lambda b, h, q, kv: index(b, h, 0, 0))

    def body(**refs: Ref) -> None:
        _body(AttentionRefs(**refs), spec=spec, tiling=tiling, order=order, kept_axes=len(kept_axes))

    (gradient,) = call(
        body,
        name="attention_dbias",
        grid=tuple(sizes[n] for n in order),
        scalars=scalars,
        inputs=inputs,
        outputs={"dbias": ((batch, heads, *shape), jnp.float32, pl.BlockSpec((None, None, *out_block), where))},
        semantics=tuple("parallel" if n < len(kept_axes) else "arbitrary" for n in range(4)),
        vmem_bytes=0,  # the default is enough
        flops=spec.backward_flops * 2 // 5,
        bytes_accessed=spec.bytes_moved,
        transcendentals=spec.batch * spec.q_heads * spec.live_pairs,
    )
    if len(shape) == 3:
        gradient = gradient.reshape(batch, heads, -1)[:, :, : max(q_len, kv_len)].reshape(bias.shape)
    return gradient.astype(bias.dtype)
