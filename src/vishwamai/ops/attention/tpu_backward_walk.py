"""The kernel body of attention's backward pass on TPU: dq, dk and dv in one walk over the tiles (Dao 2023, algorithm
2), on transposed scores.

With S^T = K Q^T and dP^T = V dO^T of a tile in hand, `[block_kv, block_q]`,
    P = exp(S - logsumexp),  dS = P (dP - delta),  delta = rowsum(dO * O) - d logsumexp,
    dV^T += dO^T P,  dK^T += Q^T dS,  dQ^T += K^T dS^T,
where in all three the tile is the matrix unit's stationary operand and the head dimension streams; a head dimension
that fills the unit gains nothing by that, and has dV += P dO and dK += dS Q instead, for which nothing is transposed.
The tiles of one iteration are independent except for their sums, so that the compiler overlaps the products of one with
the exponentials of another. The sums stay in VMEM for a whole panel; the keys' sums for all the queries and the heads
of the group, so that a gradient of a shared kv head is written once. Where the keys take more than one panel, the
queries' sums stay in VMEM until the last of them, or travel to HBM and back.
"""

from __future__ import annotations

import dataclasses
import enum
from typing import TYPE_CHECKING

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from vishwamai.core.tiles import Tiles
from vishwamai.ops.attention.spec import AttentionSpec
from vishwamai.ops.attention.tpu_forward import for_blocks, rows_of, shown_keys, tile_reader, unless_idle
from vishwamai.ops.attention.tpu_masks import AttentionRefs, dot, probabilities, query_factor, tile_at, transposed
from vishwamai.ops.attention.tpu_schedule import Home, Panel, TileSchedule, Tiling
from vishwamai.ops.attention.tpu_walk import visit_tiles

if TYPE_CHECKING:
    import jax


class Pass(enum.Enum):
    """Which gradients one walk computes. Both together recompute the probabilities once; apart, each needs less
    memory.
    """

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
class Form(Tiles):
    """How the gradients are summed; it changes speed and memory only.

    Attributes:
      split: dq, and dk with dv, in two walks.
      streaming: bool, True where the tile of the products for dk and dv streams past the queries, which then need no
        transposing; otherwise the tile is the stationary operand, which head dimensions below the matrix unit's width
        need to fill it.
      resident: bool, True where the keys take several panels and dq of whole heads stays in VMEM until the last of
        them; otherwise it travels.
    """

    split: bool = False
    streaming: bool = False
    resident: bool = False


@dataclasses.dataclass(frozen=True)
class Walk:
    """One walk over the tiles: everything that is known when it is compiled."""

    spec: AttentionSpec
    tiling: Tiling
    schedule: TileSchedule
    phase: Pass
    form: Form

    @property
    def kv_panels(self) -> int:
        return self.tiling.blocks(self.spec)[1] // self.tiling.panel_kv

    @property
    def resident(self) -> bool:
        """Whether dq stays in VMEM over several key panels."""
        return self.form.resident and self.phase is Pass.BOTH and self.kv_panels > 1


def body(refs: AttentionRefs, plan: Walk) -> None:
    schedule, step = plan.schedule, pl.program_id(2)
    index = schedule.first_step(pl.program_id(1)) + step
    panel = Panel(refs.panels, index)
    home = Home(refs.homes, index) if plan.resident else None
    unless_idle(panel, schedule, lambda: _step(refs, panel, home, plan))


def _step(refs: AttentionRefs, panel: Panel, home: Home | None, plan: Walk) -> None:
    spec, tiling, phase = plan.spec, plan.tiling, plan.phase
    batch, kv_head = pl.program_id(0), pl.program_id(1)
    q_head = kv_head * spec.group + panel.g
    block_q, block_kv = tiling.block_q, tiling.block_kv
    # Where the panel's dq stands among what is kept of it.
    first_query = panel.g * tiling.blocks(spec)[0] + panel.q * tiling.panel_q if home is not None else 0

    def start_keys(j: jax.Array) -> None:
        if phase.dq:
            refs.k_t[j] = transposed(refs.key[rows_of(j, block_kv), :], shown_keys(refs, j))
        if phase.dkv:
            refs.dk_sum[j] = jnp.zeros(refs.dk_sum.shape[1:], jnp.float32)
            refs.dv_sum[j] = jnp.zeros(refs.dv_sum.shape[1:], jnp.float32)

    def start_queries(i: jax.Array) -> None:
        rows = rows_of(i, block_q)
        if phase.dkv and not plan.form.streaming:
            refs.q_t[i] = transposed(refs.query[rows, :])
            refs.do_t[i] = transposed(refs.do[rows, :])
        if phase.dq and home is None:
            refs.dq_t[i] = jnp.zeros(refs.dq_t.shape[1:], jnp.float32)

    def clear_queries(i: jax.Array) -> None:
        refs.dq_t[first_query + i] = jnp.zeros(refs.dq_t.shape[1:], jnp.float32)

    # What stays for the whole accumulation is prepared when it begins, what passes by at every step.
    if home is not None:
        pl.when(home.first)(lambda: for_blocks(tiling.panel_q, clear_queries))
    if phase.dkv:
        pl.when(panel.begins)(lambda: for_blocks(tiling.panel_kv, start_keys))
        for_blocks(tiling.panel_q, start_queries)
    else:
        pl.when(panel.begins)(lambda: for_blocks(tiling.panel_q, start_queries))
        for_blocks(tiling.panel_kv, start_keys)

    def visit(word: jax.Array, masked: bool) -> None:
        tile = tile_at(word, tiling, panel.q, panel.kv)
        keys, queries = rows_of(tile.j, block_kv), rows_of(tile.i, block_q)
        # Scaled as they are: here the matrix units have the most to do, and a scaled copy of the queries would be made
        # again for every key panel.
        scores = dot(refs.key[keys, :], refs.query[queries, :], (1, 1)) * query_factor(spec)[0]  # [block_kv, block_q]
        dp = dot(refs.value[keys, :], refs.do[queries, :], (1, 1))  # [block_kv, block_q]
        head = batch * spec.q_heads + q_head
        p, ds = probabilities(spec, tiling, refs, tile, scores, dp, head, masked)  # [block_kv, block_q] each
        ds = ds.astype(refs.query.dtype)
        if phase.dkv and plan.form.streaming:
            refs.dv_sum[tile.j] += dot(p.astype(refs.do.dtype), refs.do[queries, :], (1, 0))  # [block_kv, Dv]
            refs.dk_sum[tile.j] += dot(ds, refs.query[queries, :], (1, 0))  # [block_kv, D]
        elif phase.dkv:
            refs.dv_sum[tile.j] += dot(refs.do_t[tile.i], p.astype(refs.do.dtype), (1, 1))  # [Dv, block_kv]
            refs.dk_sum[tile.j] += dot(refs.q_t[tile.i], ds, (1, 1))  # [D, block_kv]
        if phase.dq:
            refs.dq_t[first_query + tile.i] += dot(refs.k_t[tile.j], ds, (1, 0))  # [D, block_q]

    read, counts = tile_reader(spec, tiling, plan.schedule, refs, batch, panel)
    visit_tiles(read, counts, visit, tiling.unroll)

    def finish_queries(i: jax.Array) -> None:
        refs.dq[rows_of(i, block_q), :] = (refs.dq_t[first_query + i] * spec.scale).T.astype(refs.dq.dtype)

    def finish_keys(j: jax.Array) -> None:
        rows = rows_of(j, block_kv)
        dk, dv = refs.dk_sum[j] * spec.scale, refs.dv_sum[j]  # see `sum_shape`
        refs.dk[rows, :] = (dk if plan.form.streaming else dk.T).astype(refs.dk.dtype)
        refs.dv[rows, :] = (dv if plan.form.streaming else dv.T).astype(refs.dv.dtype)

    if home is not None:
        pl.when(home.last)(lambda: for_blocks(tiling.panel_q, finish_queries))
    elif phase is Pass.QUERIES:
        pl.when(panel.ends)(lambda: for_blocks(tiling.panel_q, finish_queries))
    elif phase is Pass.BOTH and plan.kv_panels == 1:
        for_blocks(tiling.panel_q, finish_queries)
    elif phase is Pass.BOTH:
        _add_queries(refs, spec, tiling, batch, q_head, panel.q)
    if phase.dkv:
        pl.when(panel.ends)(lambda: for_blocks(tiling.panel_kv, finish_keys))


def _add_queries(
    refs: AttentionRefs, spec: AttentionSpec, tiling: Tiling, batch: jax.Array, head: jax.Array, q_panel: jax.Array
) -> None:
    """Adds a panel's share of dq to what earlier key panels have left in HBM."""
    size = tiling.panel_q * tiling.block_q
    home = refs.dq_sum.at[batch, head, pl.ds(pl.multiple_of(q_panel * size, 128), size), :]
    fetch = pltpu.make_async_copy(home, refs.dq, refs.copied)
    fetch.start()
    fetch.wait()  # nothing hides it: the sum below needs it

    def add(i: jax.Array) -> None:
        rows = rows_of(i, tiling.block_q)
        refs.dq[rows, :] += (refs.dq_t[i] * spec.scale).T

    for_blocks(tiling.panel_q, add)
    store = pltpu.make_async_copy(refs.dq, home, refs.copied)
    store.start()
    store.wait()  # before a later key panel reads the same rows


def sum_shape(form: Form, block_kv: int, dim: int) -> tuple[int, int]:
    """Of a block's sum for dk or dv."""
    return (block_kv, dim) if form.streaming else (dim, block_kv)
