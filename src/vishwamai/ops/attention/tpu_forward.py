"""Attention's forward pass on TPU: the online softmax over transposed scores (Milakov & Gimelshein 2018; Dao 2023).

A grid step holds a panel of queries and a panel of keys and values, whole heads where they fit. Scores are computed as
K Q^T, `[block_kv, block_q]`: maxima and sums then run over sublanes and registers, which the vector unit does, and
never over lanes. The product with the values is V^T P^T, where the probabilities are the matrix unit's stationary
operand, so that a head dimension below the unit's width wastes none of it. The scores of the next tile are computed
together with the exponentials of this one.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from vishwamai.core.pallas import call
from vishwamai.core.types import AnyArray, IndexMap, PyTree, Ref
from vishwamai.ops.attention.spec import AttentionSpec, Operands
from vishwamai.ops.attention.tpu_masks import (
    LN2,
    AttentionRefs,
    ScoreTile,
    base2_logits,
    dot,
    keep_mask,
    needs_mask_everywhere,
    scaled_query,
    tile_at,
    transposed,
)
from vishwamai.ops.attention.tpu_operands import array_operands, pad_axis, scalar_operands, shown_operand
from vishwamai.ops.attention.tpu_schedule import Panel, TileSchedule, Tiling, make_schedule
from vishwamai.ops.attention.tpu_walk import Range, Read, live_tiles, walk


def tile_reader(
    spec: AttentionSpec,
    tiling: Tiling,
    schedule: TileSchedule,
    refs: AttentionRefs,
    batch: AnyArray,
    panel: Panel,
) -> tuple[Read, tuple[jax.Array, jax.Array]]:
    """(tile by position, (unmasked tiles, all tiles)) of the current panel, less what segments or positions hide."""
    number = 3 * panel.tiles  # `counts` has (unmasked, all, start) for each panel
    counts, start = (refs.counts[number], refs.counts[number + 1]), refs.counts[number + 2]

    def static(t: AnyArray) -> jax.Array:
        return refs.tiles[start + t]  # a word that `tile_at` reads

    if not spec.by_value:
        return static, counts
    o = spec.operands
    rows = o.q_positions if o.q_segment_ids is None else o.q_segment_ids
    keys_shared = o.kv_segment_ids is None or o.kv_segment_ids.shape[0] == 1
    q_blocks, kv_blocks = tiling.blocks(spec)

    def ranges(ref: Ref, shared: bool, blocks: int, first: AnyArray) -> Range:
        offset = (0 if shared else batch) * blocks + first
        return lambda n: (ref[2 * (offset + n)], ref[2 * (offset + n) + 1])

    # Tiles that segments or positions hide are left out of the walk.
    counts = live_tiles(
        static,
        counts,
        ranges(refs.q_range, rows.shape[0] == 1, q_blocks, panel.q * tiling.panel_q),
        ranges(refs.kv_range, keys_shared, kv_blocks, panel.kv * tiling.panel_kv),
        refs.live,
        refs.spare,
        tiling.unroll,
    )
    return (lambda t: refs.live[t]), counts


def for_blocks(count: int, body: Callable[[jax.Array], None]) -> None:
    """Runs `body(n)` for every block of a panel."""

    def step(n: AnyArray, carry: None) -> None:
        body(n)
        return carry

    lax.fori_loop(0, count, step, None)


def rows_of(n: AnyArray, size: int) -> slice | pl.Slice:
    """Rows of block `n`."""
    return pl.ds(pl.multiple_of(n * size, 128), size)


def shown_keys(refs: AttentionRefs, j: jax.Array) -> jax.Array | None:
    """`[1, block_kv]`: 0 for keys of block `j` that no query sees; None where the kernel has no such keys."""
    return None if refs.exposed is None else refs.exposed[j]


def unless_idle(panel: Panel, schedule: TileSchedule, body: Callable[[], None]) -> None:
    """Runs `body()`, but in the idle steps that only walks of different lengths have."""
    if len(schedule.panels) == 1:
        body()
    else:
        pl.when(jnp.logical_not(panel.idle))(body)


def _body(refs: AttentionRefs, *, spec: AttentionSpec, tiling: Tiling, schedule: TileSchedule, kv_panels: int) -> None:
    batch, kv_head, g, step = (pl.program_id(axis) for axis in range(4))
    head = kv_head * spec.group + g
    panel = Panel(refs.panels, schedule.first_step(head) + step)
    block_q, block_kv = tiling.block_q, tiling.block_kv

    @pl.when(panel.begins)
    def _() -> None:
        def start(i: AnyArray) -> None:
            rows = rows_of(i, block_q)
            refs.q_scaled[rows, :] = scaled_query(spec, refs.query[rows, :])
            refs.acc[i] = jnp.zeros(refs.acc.shape[1:], jnp.float32)  # [v_dim, block_q], transposed as the scores
            if spec.operands.sinks is None:
                refs.m[i] = jnp.full((1, block_q), -jnp.inf, jnp.float32)
                refs.l[i] = jnp.zeros((8, block_q), jnp.float32)  # eight partial sums: one per sublane
            else:
                sink = refs.sinks[(batch if spec.operands.sinks.shape[0] > 1 else 0) * spec.q_heads + head]
                refs.m[i] = jnp.full((1, block_q), sink, jnp.float32)
                # The eight rows of l are partial sums, so a sink counts in one of them alone.
                first = lax.broadcasted_iota(jnp.int32, (8, block_q), 0) == 0
                refs.l[i] = jnp.where(first & jnp.full(first.shape, sink > -jnp.inf), 1.0, 0.0)

        for_blocks(tiling.panel_q, start)

    # Within a group the keys and values stay where they are, unless they pass by in several panels.
    @pl.when((g == 0) & (step == 0) if kv_panels == 1 else step >= 0)
    def _() -> None:
        def start(j: AnyArray) -> None:
            refs.v_t[j] = transposed(refs.value[rows_of(j, block_kv), :], shown_keys(refs, j))

        for_blocks(tiling.panel_kv, start)

    slots = (refs.scores_0, refs.scores_1)  # two tiles of scores: one is made while the other is used

    def tile_of(word: jax.Array) -> ScoreTile:
        return tile_at(word, tiling, panel.q, panel.kv)

    def produce(word: AnyArray, slot: int) -> None:
        tile = tile_of(word)
        slots[slot][...] = dot(
            refs.key[rows_of(tile.j, block_kv), :], refs.q_scaled[rows_of(tile.i, block_q), :], (1, 1)
        )

    def consume(word: AnyArray, slot: int, masked: bool) -> None:
        tile = tile_of(word)
        s, _ = base2_logits(spec, tiling, refs, tile, slots[slot][...], masked)  # [block_kv, block_q]
        m_before = refs.m[tile.i]  # [1, block_q]
        m = jnp.maximum(m_before, jnp.max(jnp.max(s.reshape(-1, 8, block_q), axis=0), axis=0, keepdims=True))
        # Subtracted from -inf, a maximum of -inf would give NaN where it has to give a probability of 0.
        shift = jnp.where(m == -jnp.inf, 0.0, m)
        alpha = jnp.exp2(m_before - shift)  # [1, block_q]
        p = jnp.exp2(s - shift)  # [block_kv, block_q]
        refs.m[tile.i] = m
        refs.l[tile.i] = refs.l[tile.i] * alpha + jnp.sum(p.reshape(-1, 8, block_q), axis=0)  # [8, block_q]
        if spec.dropout_rate > 0:
            # After l, which is the sum over dropped positions too.
            p = jnp.where(keep_mask(spec, tiling, refs, tile, batch * spec.q_heads + head), p, 0.0)
        refs.acc[tile.i] = refs.acc[tile.i] * alpha + dot(refs.v_t[tile.j], p.astype(refs.v_t.dtype), (1, 0))

    def visit() -> None:
        read, counts = tile_reader(spec, tiling, schedule, refs, batch, panel)
        walk(read, counts, produce, consume, tiling.unroll)

    unless_idle(panel, schedule, visit)

    @pl.when(panel.ends)
    def _() -> None:
        def finish(i: AnyArray) -> None:
            l = jnp.sum(refs.l[i], axis=0, keepdims=True)  # [1, block_q]
            empty = l == 0.0
            inverse = jnp.where(empty, 0.0, (1.0 / (1.0 - spec.dropout_rate)) / l)  # rows without a key give 0
            refs.out[rows_of(i, block_q), :] = (refs.acc[i] * inverse).T.astype(refs.out.dtype)  # [block_q, v_dim]
            refs.logsumexp[i] = jnp.where(empty, -jnp.inf, refs.m[i] * LN2 + jnp.log(l))

        for_blocks(tiling.panel_q, finish)


def forward(spec: AttentionSpec, tiling: Tiling, vmem_bytes: int, operands: Operands) -> tuple[jax.Array, jax.Array]:
    """(out `[B, Hq, Tq, Dv]` in the query's dtype, logsumexp `[B, Hq, Tq]` float32)."""
    query, key, value = operands.query, operands.key, operands.value
    q_blocks, kv_blocks = tiling.blocks(spec)
    kv_panels = kv_blocks // tiling.panel_kv
    schedule = make_schedule(spec, tiling, masked=needs_mask_everywhere(spec), kv_major=False)
    q_rows, kv_rows = tiling.panel_q * tiling.block_q, tiling.panel_kv * tiling.block_kv

    def place(index: IndexMap) -> IndexMap:
        def index_map(b: AnyArray, h: AnyArray, g: AnyArray, step: AnyArray, panels: Ref, *_: Ref) -> PyTree:
            head = h * spec.group + g
            panel = Panel(panels, schedule.first_step(head) + step)
            return index(b, head, panel.q, panel.kv)

        return index_map

    def of_queries(b: AnyArray, h: AnyArray, q: AnyArray, kv: AnyArray) -> PyTree:
        return b, h, q, 0

    def of_keys(b: AnyArray, h: AnyArray, q: AnyArray, kv: AnyArray) -> PyTree:
        return b, lax.div(h, np.int32(spec.group)), kv, 0

    scalars = {
        "panels": schedule.panels.reshape(-1),
        "tiles": schedule.tiles.reshape(-1),
        "counts": schedule.counts.reshape(-1),
        **scalar_operands(spec, tiling, operands),
    }
    inputs = {
        "query": (
            pad_axis(query, 2, q_blocks * tiling.block_q),
            tiling.block_spec((None, None, q_rows, spec.qk_dim), place(of_queries)),
        ),
        "key": (
            pad_axis(key, 2, kv_blocks * tiling.block_kv),
            tiling.block_spec((None, None, kv_rows, spec.qk_dim), place(of_keys), keys=True),
        ),
        "value": (
            pad_axis(value, 2, kv_blocks * tiling.block_kv),
            tiling.block_spec((None, None, kv_rows, spec.v_dim), place(of_keys), keys=True),
        ),
        **array_operands(spec, tiling, operands, place),
        **shown_operand(spec, tiling, operands, place),
    }
    heads = (spec.batch, spec.q_heads)
    outputs = {
        "out": (
            (*heads, q_blocks * tiling.block_q, spec.v_dim),
            query.dtype,
            tiling.block_spec((None, None, q_rows, spec.v_dim), place(of_queries)),
        ),
        "logsumexp": (
            (*heads, q_blocks, 1, tiling.block_q),
            jnp.float32,
            tiling.block_spec(
                (None, None, tiling.panel_q, 1, tiling.block_q), place(lambda b, h, q, kv: (b, h, q, 0, 0))
            ),
        ),
    }
    tile = (tiling.block_kv, tiling.block_q)
    scratch = {
        "q_scaled": pltpu.VMEM((q_rows, spec.qk_dim), query.dtype),
        "v_t": pltpu.VMEM((tiling.panel_kv, spec.v_dim, tiling.block_kv), value.dtype),
        "acc": pltpu.VMEM((tiling.panel_q, spec.v_dim, tiling.block_q), jnp.float32),
        "m": pltpu.VMEM((tiling.panel_q, 1, tiling.block_q), jnp.float32),
        "l": pltpu.VMEM((tiling.panel_q, 8, tiling.block_q), jnp.float32),
        "scores_0": pltpu.VMEM(tile, jnp.float32),
        "scores_1": pltpu.VMEM(tile, jnp.float32),
    }
    if spec.by_value:
        scratch |= {name: pltpu.SMEM((schedule.length,), jnp.int32) for name in ("live", "spare")}

    def body(**refs: Ref) -> None:
        _body(AttentionRefs(**refs), spec=spec, tiling=tiling, schedule=schedule, kv_panels=kv_panels)

    out, logsumexp = call(
        body,
        name="attention_forward",
        scalars=scalars,
        inputs=inputs,
        outputs=outputs,
        scratch=scratch,
        grid=(spec.batch, spec.kv_heads, spec.group, schedule.steps),
        semantics=("parallel", "parallel", "arbitrary", "arbitrary"),  # a group shares `v_t`, and steps share m, l, acc
        vmem_bytes=vmem_bytes,
        flops=spec.flops,
        bytes_accessed=spec.bytes_moved,
        transcendentals=spec.batch * spec.q_heads * spec.live_pairs,
    )
    return out[:, :, : spec.q_len], logsumexp.reshape(*heads, -1)[:, :, : spec.q_len]
