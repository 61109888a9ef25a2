"""Attention's backward pass on TPU: dq, dk and dv in one walk over the tiles (Dao 2023, algorithm 2), on transposed scores.

With S^T = K Q^T and dP^T = V dO^T of a tile in hand, `[block_kv, block_q]`,
    P = exp(S - logsumexp),  dS = P (dP - delta),  delta = rowsum(dO O) - d logsumexp,
    dV^T += dO^T P,  dK^T += Q^T dS,  dQ^T += K^T dS^T,
where in all three the tile is the matrix unit's stationary operand and the head dimension streams. The sums stay in VMEM for a whole panel; the
keys' sums for all the queries and the heads of the group, so that a gradient of a shared kv head is written once. Where the keys take more than one
panel, the queries' sums travel to HBM and back between them.
"""

from __future__ import annotations

import enum
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from vishwamai.core.sharding import out_struct
from vishwamai.ops.attention.spec import AttentionSpec, Operands, Outputs
from vishwamai.ops.attention.tpu_dbias import bias_gradient
from vishwamai.ops.attention.tpu_forward import for_blocks, rows_of, tile_reader, unless_idle
from vishwamai.ops.attention.tpu_masks import (
    Tile,
    array_operands,
    call,
    dot,
    kernel_params,
    needs_mask_everywhere,
    pad_axis,
    probabilities,
    scalar_operands,
    scaled_query,
    statistics,
    tile_at,
    transposed,
)
from vishwamai.ops.attention.tpu_schedule import Panel, Schedule, Tiling, make_schedule, walk


class Pass(enum.Enum):
    """Which gradients one walk computes. Both together recompute the probabilities once; apart, each needs less memory."""

    BOTH = "attention_backward"
    QUERIES = "attention_backward_dq"
    KEYS = "attention_backward_dkv"

    @property
    def dq(self) -> bool:
        return self is not Pass.KEYS

    @property
    def dkv(self) -> bool:
        return self is not Pass.QUERIES


def _body(
    refs: SimpleNamespace, *, spec: AttentionSpec, tiling: Tiling, schedule: Schedule, kv_panels: int, which: Pass
) -> None:
    kv_head, step = pl.program_id(1), pl.program_id(2)
    panel = Panel(refs.panels, schedule.first_step(kv_head) + step)
    unless_idle(panel, schedule, lambda: _step(refs, panel, spec, tiling, schedule, kv_panels, which))


def _step(
    refs: SimpleNamespace,
    panel: Panel,
    spec: AttentionSpec,
    tiling: Tiling,
    schedule: Schedule,
    kv_panels: int,
    which: Pass,
) -> None:
    batch, kv_head = pl.program_id(0), pl.program_id(1)
    q_head = kv_head * spec.group + panel.g
    block_q, block_kv = tiling.block_q, tiling.block_kv

    def start_keys(j: Any) -> None:
        if which.dq:
            refs.k_t[j] = transposed(refs.key[rows_of(j, block_kv), :])
        if which.dkv:
            refs.dk_t[j] = jnp.zeros(refs.dk_t.shape[1:], jnp.float32)
            refs.dv_t[j] = jnp.zeros(refs.dv_t.shape[1:], jnp.float32)

    def start_queries(i: Any) -> None:
        rows = rows_of(i, block_q)
        query = refs.query[rows, :]
        refs.q_scaled[rows, :] = scaled_query(spec, query)
        if which.dkv:
            refs.q_t[i] = transposed(query)
            refs.do_t[i] = transposed(refs.do[rows, :])
        if which.dq:
            refs.dq_t[i] = jnp.zeros(refs.dq_t.shape[1:], jnp.float32)

    # What stays for the whole accumulation is prepared when it begins, what passes by at every step.
    if which.dkv:
        pl.when(panel.begins)(lambda: for_blocks(tiling.panel_kv, start_keys))
        for_blocks(tiling.panel_q, start_queries)
    else:
        pl.when(panel.begins)(lambda: for_blocks(tiling.panel_q, start_queries))
        for_blocks(tiling.panel_kv, start_keys)
    slots = ((refs.scores_0, refs.dp_0), (refs.scores_1, refs.dp_1))

    def tile_of(word: Any) -> Tile:
        return tile_at(word, tiling, panel.q, panel.kv)

    def produce(word: Any, slot: int) -> None:
        tile = tile_of(word)
        keys, queries = rows_of(tile.j, block_kv), rows_of(tile.i, block_q)
        scores, dp = slots[slot]
        scores[...] = dot(refs.key[keys, :], refs.q_scaled[queries, :], (1, 1))
        dp[...] = dot(refs.value[keys, :], refs.do[queries, :], (1, 1))

    def consume(word: Any, slot: int, masked: bool) -> None:
        tile = tile_of(word)
        scores, dp = slots[slot]
        head = batch * spec.q_heads + q_head
        p, ds = probabilities(spec, tiling, refs, tile, scores[...], dp[...], head, masked)
        ds = ds.astype(refs.query.dtype)
        if which.dkv:
            refs.dv_t[tile.j] += dot(refs.do_t[tile.i], p.astype(refs.do.dtype), (1, 1))
            refs.dk_t[tile.j] += dot(refs.q_t[tile.i], ds, (1, 1))
        if which.dq:
            refs.dq_t[tile.i] += dot(refs.k_t[tile.j], ds, (1, 0))

    read, counts = tile_reader(spec, tiling, schedule, refs, batch, panel)
    walk(read, counts, produce, consume, tiling.unroll)

    def finish_queries(i: Any) -> None:
        refs.dq[rows_of(i, block_q), :] = (refs.dq_t[i] * spec.scale).T.astype(refs.dq.dtype)

    def finish_keys(j: Any) -> None:
        rows = rows_of(j, block_kv)
        refs.dk[rows, :] = (refs.dk_t[j] * spec.scale).T.astype(refs.dk.dtype)
        refs.dv[rows, :] = refs.dv_t[j].T.astype(refs.dv.dtype)

    if which is Pass.QUERIES:
        pl.when(panel.ends)(lambda: for_blocks(tiling.panel_q, finish_queries))
    elif which is Pass.BOTH and kv_panels == 1:
        for_blocks(tiling.panel_q, finish_queries)
    elif which is Pass.BOTH:
        _add_queries(refs, spec, tiling, batch, q_head, panel.q)
    if which.dkv:
        pl.when(panel.ends)(lambda: for_blocks(tiling.panel_kv, finish_keys))


def _add_queries(
    refs: SimpleNamespace, spec: AttentionSpec, tiling: Tiling, batch: Any, head: Any, q_panel: Any
) -> None:
    """Adds a panel's share of dq to what earlier key panels have left in HBM."""
    size = tiling.panel_q * tiling.block_q
    home = refs.dq_sum.at[batch, head, pl.ds(pl.multiple_of(q_panel * size, 128), size), :]
    fetch = pltpu.make_async_copy(home, refs.dq, refs.copied)
    fetch.start()
    fetch.wait()

    def add(i: Any) -> None:
        rows = rows_of(i, tiling.block_q)
        refs.dq[rows, :] += (refs.dq_t[i] * spec.scale).T

    for_blocks(tiling.panel_q, add)
    store = pltpu.make_async_copy(refs.dq, home, refs.copied)
    store.start()
    store.wait()


def backward(
    spec: AttentionSpec,
    tiling: Tiling,
    split: bool,
    vmem_bytes: int,
    operands: Operands,
    outputs: Outputs,
    logsumexp: jax.Array,
    cotangents: Outputs,
) -> Operands:
    """Gradients of every floating operand; dq, and dk with dv, in one walk or `split` into two."""
    query, key, value = operands.query, operands.key, operands.value
    out, dout = outputs.out, cotangents.out
    delta = jnp.sum(dout.astype(jnp.float32) * out.astype(jnp.float32), axis=-1)
    if cotangents.logsumexp is not None:
        delta = delta - cotangents.logsumexp.astype(jnp.float32)
    found: dict[str, jax.Array] = {}
    for which in (Pass.QUERIES, Pass.KEYS) if split else (Pass.BOTH,):
        found |= _products(spec, tiling, vmem_bytes, operands, logsumexp, delta, dout, which)
    return Operands(
        found["dq"].astype(query.dtype),
        found["dk"].astype(key.dtype),
        found["dv"].astype(value.dtype),
        bias=None if operands.bias is None else bias_gradient(spec, operands, logsumexp, delta, dout),
        sinks=_sinks_gradient(operands, logsumexp, delta),
    )


def _sinks_gradient(operands: Operands, logsumexp: jax.Array, delta: jax.Array) -> jax.Array | None:
    """A sink takes its share of the probability and gives nothing to the output."""
    sinks = operands.sinks
    if sinks is None:
        return None
    seen = logsumexp > -jnp.inf
    share = jnp.where(seen, jnp.exp(sinks.astype(jnp.float32)[..., None] - jnp.where(seen, logsumexp, 0.0)), 0.0)
    gradient = -jnp.sum(share * delta, axis=2)  # [B, Hq]
    return (gradient if sinks.shape[0] > 1 else gradient.sum(axis=0, keepdims=True)).astype(sinks.dtype)


def _products(
    spec: AttentionSpec,
    tiling: Tiling,
    vmem_bytes: int,
    operands: Operands,
    logsumexp: jax.Array,
    delta: jax.Array,
    dout: jax.Array,
    which: Pass,
) -> dict[str, jax.Array]:
    """dq, or dk and dv, or all three; dq in float32 where it was summed in HBM."""
    query, key, value = operands.query, operands.key, operands.value
    q_blocks, kv_blocks = tiling.blocks(spec)
    kv_panels = kv_blocks // tiling.panel_kv
    schedule = make_schedule(spec, tiling, masked=needs_mask_everywhere(spec), kv_major=which.dkv, heads=spec.group)
    q_rows, kv_rows = tiling.panel_q * tiling.block_q, tiling.panel_kv * tiling.block_kv
    q_size, kv_size = q_blocks * tiling.block_q, kv_blocks * tiling.block_kv

    def place(index: Any) -> Any:
        def index_map(b: Any, h: Any, step: Any, panels: Any, *_: Any) -> Any:
            panel = Panel(panels, schedule.first_step(h) + step)
            return index(b, h * spec.group + panel.g, panel.q, panel.kv)

        return index_map

    def queries(dim: int) -> pl.BlockSpec:
        return tiling.block_spec((None, None, q_rows, dim), place(lambda b, h, q, kv: (b, h, q, 0)))

    def keys(dim: int) -> pl.BlockSpec:
        block = (None, None, kv_rows, dim)
        return tiling.block_spec(
            block, place(lambda b, h, q, kv: (b, lax.div(h, np.int32(spec.group)), kv, 0)), keys=True
        )

    scalars = {
        "panels": schedule.panels.reshape(-1),
        "tiles": schedule.tiles.reshape(-1),
        "counts": schedule.counts.reshape(-1),
        **scalar_operands(spec, tiling, operands),
    }
    inputs = {
        "query": (pad_axis(query, 2, q_size), queries(spec.qk_dim)),
        "do": (pad_axis(dout.astype(query.dtype), 2, q_size), queries(spec.v_dim)),
        "key": (pad_axis(key, 2, kv_size), keys(spec.qk_dim)),
        "value": (pad_axis(value, 2, kv_size), keys(spec.v_dim)),
        **statistics(spec, tiling, logsumexp, delta, place),
        **array_operands(spec, tiling, operands, place),
    }
    shape = (spec.batch, spec.q_heads, q_size, spec.qk_dim)
    kv_shape = (spec.batch, spec.kv_heads, kv_size)
    tile = (tiling.block_kv, tiling.block_q)

    def transposes(panel: int, dim: int, block: int, dtype: Any) -> Any:
        return pltpu.VMEM((panel, dim, block), dtype)

    scratch = {
        "q_scaled": pltpu.VMEM((q_rows, spec.qk_dim), query.dtype),
        **{name: pltpu.VMEM(tile, jnp.float32) for name in ("scores_0", "scores_1", "dp_0", "dp_1")},
    }
    if operands.q_segment_ids is not None:
        scratch |= {name: pltpu.SMEM((schedule.length,), jnp.int32) for name in ("live", "spare")}
    outputs: dict[str, Any] = {}
    if which.dkv:
        outputs |= {
            "dk": (out_struct((*kv_shape, spec.qk_dim), key.dtype, operands, dout), keys(spec.qk_dim)),
            "dv": (out_struct((*kv_shape, spec.v_dim), value.dtype, operands, dout), keys(spec.v_dim)),
        }
        scratch |= {
            "q_t": transposes(tiling.panel_q, spec.qk_dim, tiling.block_q, query.dtype),
            "do_t": transposes(tiling.panel_q, spec.v_dim, tiling.block_q, query.dtype),
            "dk_t": transposes(tiling.panel_kv, spec.qk_dim, tiling.block_kv, jnp.float32),
            "dv_t": transposes(tiling.panel_kv, spec.v_dim, tiling.block_kv, jnp.float32),
        }
    aliases = {}
    if which.dq:
        scratch |= {
            "k_t": transposes(tiling.panel_kv, spec.qk_dim, tiling.block_kv, query.dtype),
            "dq_t": transposes(tiling.panel_q, spec.qk_dim, tiling.block_q, jnp.float32),
        }
    if which.dq and (kv_panels == 1 or not which.dkv):
        outputs["dq"] = (out_struct(shape, query.dtype, operands, dout), queries(spec.qk_dim))
    elif which.dq:
        in_hbm = pl.BlockSpec(memory_space=pl.ANY)
        inputs["dq_zeros"] = (jnp.zeros(shape, jnp.float32), in_hbm)
        outputs["dq_sum"] = (out_struct(shape, jnp.float32, operands, dout), in_hbm)
        aliases = {len(scalars) + len(inputs) - 1: len(outputs) - 1}
        scratch |= {"dq": pltpu.VMEM((q_rows, spec.qk_dim), jnp.float32), "copied": pltpu.SemaphoreType.DMA}

    def body(refs: SimpleNamespace) -> None:
        _body(refs, spec=spec, tiling=tiling, schedule=schedule, kv_panels=kv_panels, which=which)

    results = call(
        body,
        scalars=scalars,
        inputs=inputs,
        outputs=outputs,
        scratch=scratch,
        grid=(spec.batch, spec.kv_heads, schedule.steps),
        input_output_aliases=aliases,
        compiler_params=kernel_params(vmem_bytes, ("parallel", "parallel", "arbitrary")),
        cost_estimate=pl.CostEstimate(
            flops=spec.backward_flops * {Pass.BOTH: 5, Pass.QUERIES: 3, Pass.KEYS: 4}[which] // 5,
            bytes_accessed=3 * spec.bytes_moved,
            transcendentals=spec.batch * spec.q_heads * spec.live_pairs,
        ),
        name=which.value,
    )
    lengths = {"dq": spec.q_len, "dq_sum": spec.q_len, "dk": spec.kv_len, "dv": spec.kv_len}
    return {name.removesuffix("_sum"): x[:, :, : lengths[name]] for name, x in results.items()}
