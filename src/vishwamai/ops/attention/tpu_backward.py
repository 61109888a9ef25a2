"""Attention's backward pass on TPU: dq, dk and dv in one walk over the tiles (Dao 2023, algorithm 2), on transposed scores.

With S^T = K Q^T and dP^T = V dO^T of a tile in hand, `[block_kv, block_q]`,
    P = exp(S - logsumexp),  dS = P (dP - delta),  delta = rowsum(dO O) - d logsumexp,
    dV^T += dO^T P,  dK^T += Q^T dS,  dQ^T += K^T dS^T,
where in all three the tile is the matrix unit's stationary operand and the head dimension streams; a head dimension that fills the unit gains nothing
by that, and has dV += P dO and dK += dS Q instead, for which nothing is transposed. The tiles of one iteration are independent but for their sums, so
that the compiler overlaps the products of one with the exponentials of another. The sums stay in VMEM for a whole panel; the
keys' sums for all the queries and the heads of the group, so that a gradient of a shared kv head is written once. Where the keys take more than one
panel, the queries' sums stay in VMEM until the last of them, or travel to HBM and back.
"""

from __future__ import annotations

import dataclasses
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
    array_operands,
    call,
    dot,
    kernel_params,
    needs_mask_everywhere,
    pad_axis,
    probabilities,
    query_factor,
    scalar_operands,
    statistics,
    tile_at,
    transposed,
)
from vishwamai.ops.attention.tpu_schedule import Home, Panel, Schedule, Tiling, make_schedule, query_homes, visit_tiles


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


@dataclasses.dataclass(frozen=True)
class Form:
    """How the gradients are summed; it changes speed and memory only.

    Attributes:
      split: dq, and dk with dv, in two walks.
      streaming: in the products for dk and dv the tile streams past the queries, which then need no transposing; otherwise the tile is the stationary
        operand, which head dimensions below the matrix unit's width need to fill it.
      resident: where the keys take several panels, dq of whole heads stays in VMEM until the last of them; otherwise it travels.
    """

    split: bool = False
    streaming: bool = False
    resident: bool = False


@dataclasses.dataclass(frozen=True)
class _Walk:
    """One walk over the tiles: everything that is known when it is compiled."""

    spec: AttentionSpec
    tiling: Tiling
    schedule: Schedule
    which: Pass
    form: Form

    @property
    def kv_panels(self) -> int:
        return self.tiling.blocks(self.spec)[1] // self.tiling.panel_kv

    @property
    def resident(self) -> bool:
        """Whether dq stays in VMEM over several key panels."""
        return self.form.resident and self.which is Pass.BOTH and self.kv_panels > 1


def _body(refs: SimpleNamespace, plan: _Walk) -> None:
    schedule, step = plan.schedule, pl.program_id(2)
    at = schedule.first_step(pl.program_id(1)) + step
    panel = Panel(refs.panels, at)
    home = Home(refs.homes, at) if plan.resident else None
    unless_idle(panel, schedule, lambda: _step(refs, panel, home, plan))


def _step(refs: SimpleNamespace, panel: Panel, home: Home | None, plan: _Walk) -> None:
    spec, tiling, which = plan.spec, plan.tiling, plan.which
    batch, kv_head = pl.program_id(0), pl.program_id(1)
    q_head = kv_head * spec.group + panel.g
    block_q, block_kv = tiling.block_q, tiling.block_kv
    # Where the panel's dq stands among what is kept of it.
    first_query = panel.g * tiling.blocks(spec)[0] + panel.q * tiling.panel_q if home is not None else 0

    def start_keys(j: Any) -> None:
        if which.dq:
            refs.k_t[j] = transposed(refs.key[rows_of(j, block_kv), :])
        if which.dkv:
            refs.dk_sum[j] = jnp.zeros(refs.dk_sum.shape[1:], jnp.float32)
            refs.dv_sum[j] = jnp.zeros(refs.dv_sum.shape[1:], jnp.float32)

    def start_queries(i: Any) -> None:
        rows = rows_of(i, block_q)
        if which.dkv and not plan.form.streaming:
            refs.q_t[i] = transposed(refs.query[rows, :])
            refs.do_t[i] = transposed(refs.do[rows, :])
        if which.dq and home is None:
            refs.dq_t[i] = jnp.zeros(refs.dq_t.shape[1:], jnp.float32)

    def clear_queries(i: Any) -> None:
        refs.dq_t[first_query + i] = jnp.zeros(refs.dq_t.shape[1:], jnp.float32)

    # What stays for the whole accumulation is prepared when it begins, what passes by at every step.
    if home is not None:
        pl.when(home.first)(lambda: for_blocks(tiling.panel_q, clear_queries))
    if which.dkv:
        pl.when(panel.begins)(lambda: for_blocks(tiling.panel_kv, start_keys))
        for_blocks(tiling.panel_q, start_queries)
    else:
        pl.when(panel.begins)(lambda: for_blocks(tiling.panel_q, start_queries))
        for_blocks(tiling.panel_kv, start_keys)

    def visit(word: Any, masked: bool) -> None:
        tile = tile_at(word, tiling, panel.q, panel.kv)
        keys, queries = rows_of(tile.j, block_kv), rows_of(tile.i, block_q)
        # Scaled as they are: here the matrix units have the most to do, and a scaled copy of the queries would be made again for every key panel.
        scores = dot(refs.key[keys, :], refs.query[queries, :], (1, 1)) * query_factor(spec)[0]  # [block_kv, block_q]
        dp = dot(refs.value[keys, :], refs.do[queries, :], (1, 1))
        head = batch * spec.q_heads + q_head
        p, ds = probabilities(spec, tiling, refs, tile, scores, dp, head, masked)
        ds = ds.astype(refs.query.dtype)
        if which.dkv and plan.form.streaming:
            refs.dv_sum[tile.j] += dot(p.astype(refs.do.dtype), refs.do[queries, :], (1, 0))
            refs.dk_sum[tile.j] += dot(ds, refs.query[queries, :], (1, 0))
        elif which.dkv:
            refs.dv_sum[tile.j] += dot(refs.do_t[tile.i], p.astype(refs.do.dtype), (1, 1))
            refs.dk_sum[tile.j] += dot(refs.q_t[tile.i], ds, (1, 1))
        if which.dq:
            refs.dq_t[first_query + tile.i] += dot(refs.k_t[tile.j], ds, (1, 0))

    read, counts = tile_reader(spec, tiling, plan.schedule, refs, batch, panel)
    visit_tiles(read, counts, visit, tiling.unroll)

    def finish_queries(i: Any) -> None:
        refs.dq[rows_of(i, block_q), :] = (refs.dq_t[first_query + i] * spec.scale).T.astype(refs.dq.dtype)

    def finish_keys(j: Any) -> None:
        rows = rows_of(j, block_kv)
        dk, dv = refs.dk_sum[j] * spec.scale, refs.dv_sum[j]
        refs.dk[rows, :] = (dk if plan.form.streaming else dk.T).astype(refs.dk.dtype)
        refs.dv[rows, :] = (dv if plan.form.streaming else dv.T).astype(refs.dv.dtype)

    if home is not None:
        pl.when(home.last)(lambda: for_blocks(tiling.panel_q, finish_queries))
    elif which is Pass.QUERIES:
        pl.when(panel.ends)(lambda: for_blocks(tiling.panel_q, finish_queries))
    elif which is Pass.BOTH and plan.kv_panels == 1:
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


def sum_shape(form: Form, block_kv: int, dim: int) -> tuple[int, int]:
    """Of a block's sum for dk or dv."""
    return (block_kv, dim) if form.streaming else (dim, block_kv)


def backward(
    spec: AttentionSpec,
    tiling: Tiling,
    form: Form,
    vmem_bytes: int,
    operands: Operands,
    outputs: Outputs,
    logsumexp: jax.Array,
    cotangents: Outputs,
) -> Operands:
    """Gradients of every floating operand; dq, and dk with dv, in one walk or split into two."""
    query, key, value = operands.query, operands.key, operands.value
    out, dout = outputs.out, cotangents.out
    delta = jnp.sum(dout.astype(jnp.float32) * out.astype(jnp.float32), axis=-1)
    if cotangents.logsumexp is not None:
        delta = delta - cotangents.logsumexp.astype(jnp.float32)
    found: dict[str, jax.Array] = {}
    for which in (Pass.QUERIES, Pass.KEYS) if form.split else (Pass.BOTH,):
        schedule = make_schedule(spec, tiling, masked=needs_mask_everywhere(spec), kv_major=which.dkv, heads=spec.group)
        plan = _Walk(spec, tiling, schedule, which, form)
        found |= _products(plan, vmem_bytes, operands, logsumexp, delta, dout)
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
    plan: _Walk, vmem_bytes: int, operands: Operands, logsumexp: jax.Array, delta: jax.Array, dout: jax.Array
) -> dict[str, jax.Array]:
    """dq, or dk and dv, or all three; dq in float32 where it was summed in HBM."""
    spec, tiling, schedule, which = plan.spec, plan.tiling, plan.schedule, plan.which
    query, key, value = operands.query, operands.key, operands.value
    q_blocks, kv_blocks = tiling.blocks(spec)
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

    def at_home(b: Any, h: Any, step: Any, panels: Any, homes: Any, *_: Any) -> Any:
        home = Home(homes, schedule.first_step(h) + step)
        return b, h * spec.group + home.g, home.q, 0

    scalars = {
        "panels": schedule.panels.reshape(-1),
        **({"homes": query_homes(schedule).reshape(-1)} if plan.resident else {}),
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

    def transposes(panel: int, dim: int, block: int, dtype: Any) -> Any:
        return pltpu.VMEM((panel, dim, block), dtype)

    scratch: dict[str, Any] = {}
    if operands.q_segment_ids is not None:
        scratch |= {name: pltpu.SMEM((schedule.length,), jnp.int32) for name in ("live", "spare")}
    outputs: dict[str, Any] = {}
    if which.dkv:
        outputs |= {
            "dk": (out_struct((*kv_shape, spec.qk_dim), key.dtype, operands, dout), keys(spec.qk_dim)),
            "dv": (out_struct((*kv_shape, spec.v_dim), value.dtype, operands, dout), keys(spec.v_dim)),
        }
        scratch |= {
            name: pltpu.VMEM((tiling.panel_kv, *sum_shape(plan.form, tiling.block_kv, dim)), jnp.float32)
            for name, dim in (("dk_sum", spec.qk_dim), ("dv_sum", spec.v_dim))
        }
    if which.dkv and not plan.form.streaming:
        scratch |= {
            "q_t": transposes(tiling.panel_q, spec.qk_dim, tiling.block_q, query.dtype),
            "do_t": transposes(tiling.panel_q, spec.v_dim, tiling.block_q, query.dtype),
        }
    aliases = {}
    if which.dq:
        scratch |= {
            "k_t": transposes(tiling.panel_kv, spec.qk_dim, tiling.block_kv, query.dtype),
            "dq_t": transposes(
                spec.group * q_blocks if plan.resident else tiling.panel_q, spec.qk_dim, tiling.block_q, jnp.float32
            ),
        }
    if plan.resident:
        block = tiling.block_spec((None, None, q_rows, spec.qk_dim), at_home)
        outputs["dq"] = (out_struct(shape, query.dtype, operands, dout), block)
    elif which.dq and (plan.kv_panels == 1 or not which.dkv):
        outputs["dq"] = (out_struct(shape, query.dtype, operands, dout), queries(spec.qk_dim))
    elif which.dq:
        in_hbm = pl.BlockSpec(memory_space=pl.ANY)
        inputs["dq_zeros"] = (jnp.zeros(shape, jnp.float32), in_hbm)
        outputs["dq_sum"] = (out_struct(shape, jnp.float32, operands, dout), in_hbm)
        aliases = {len(scalars) + len(inputs) - 1: len(outputs) - 1}
        scratch |= {"dq": pltpu.VMEM((q_rows, spec.qk_dim), jnp.float32), "copied": pltpu.SemaphoreType.DMA}

    def body(refs: SimpleNamespace) -> None:
        _body(refs, plan)

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
