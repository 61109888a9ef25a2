"""Attention's backward pass on TPU: the calls of its kernel, and the gradients of every operand from them."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from vishwamai.core.pallas import call
from vishwamai.core.sharding import match_varying
from vishwamai.core.types import AnyArray, IndexMap, PyTree, Ref
from vishwamai.ops.attention.spec import AttentionSpec, Operands, Outputs
from vishwamai.ops.attention.tpu_backward_walk import Form, Pass, Walk, sum_shape
from vishwamai.ops.attention.tpu_backward_walk import body as walk_body
from vishwamai.ops.attention.tpu_dbias import bias_gradient
from vishwamai.ops.attention.tpu_masks import AttentionRefs, needs_mask_everywhere
from vishwamai.ops.attention.tpu_operands import array_operands, pad_axis, scalar_operands, shown_operand, statistics
from vishwamai.ops.attention.tpu_schedule import Home, Panel, Tiling, make_schedule, query_homes


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
    delta = jnp.sum(dout.astype(jnp.float32) * out.astype(jnp.float32), axis=-1)  # [B, Hq, Tq], rowsum(dO * O)
    if cotangents.logsumexp is not None:
        # ds = p (dp - delta) + p dlse
        delta = delta - cotangents.logsumexp.astype(jnp.float32)
    gradients: dict[str, jax.Array] = {}
    for phase in (Pass.QUERIES, Pass.KEYS) if form.split else (Pass.BOTH,):
        schedule = make_schedule(spec, tiling, masked=needs_mask_everywhere(spec), kv_major=phase.dkv, heads=spec.group)
        plan = Walk(spec, tiling, schedule, phase, form)
        gradients |= _products(plan, vmem_bytes, operands, logsumexp, delta, dout)
    return Operands(
        gradients["dq"].astype(query.dtype),
        gradients["dk"].astype(key.dtype),
        gradients["dv"].astype(value.dtype),
        bias=None if operands.bias is None else bias_gradient(spec, operands, logsumexp, delta, dout),
        sinks=_sinks_gradient(operands, logsumexp, delta),
        slopes=None if operands.slopes is None else jnp.zeros_like(operands.slopes),
    )


def _sinks_gradient(operands: Operands, logsumexp: jax.Array, delta: jax.Array) -> jax.Array | None:
    """A sink takes its share of the probability and gives nothing to the output."""
    sinks = operands.sinks
    if sinks is None:
        return None
    seen = logsumexp > -jnp.inf
    # [B, Hq, Tq]: the sink's probability; 0 in rows that see no key and no sink.
    share = jnp.where(seen, jnp.exp(sinks.astype(jnp.float32)[..., None] - jnp.where(seen, logsumexp, 0.0)), 0.0)
    gradient = -jnp.sum(share * delta, axis=2)  # [B, Hq]
    return (gradient if sinks.shape[0] > 1 else gradient.sum(axis=0, keepdims=True)).astype(sinks.dtype)


def _products(
    plan: Walk, vmem_bytes: int, operands: Operands, logsumexp: jax.Array, delta: jax.Array, dout: jax.Array
) -> dict[str, jax.Array]:
    """dq, or dk and dv, or all three; dq in float32 where it was summed in HBM."""
    spec, tiling, schedule, phase = plan.spec, plan.tiling, plan.schedule, plan.phase
    query, key, value = operands.query, operands.key, operands.value
    q_blocks, kv_blocks = tiling.blocks(spec)
    q_rows, kv_rows = tiling.panel_q * tiling.block_q, tiling.panel_kv * tiling.block_kv
    q_size, kv_size = q_blocks * tiling.block_q, kv_blocks * tiling.block_kv

    def place(index: IndexMap) -> IndexMap:
        def index_map(b: AnyArray, h: AnyArray, step: AnyArray, panels: Ref, *_: Ref) -> PyTree:
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

    def at_home(b: AnyArray, h: AnyArray, step: jax.Array, panels: Ref, homes: Ref, *_: Ref) -> PyTree:
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
        **shown_operand(spec, tiling, operands, place),
    }
    shape = (spec.batch, spec.q_heads, q_size, spec.qk_dim)
    kv_shape = (spec.batch, spec.kv_heads, kv_size)

    def transposes(panel: int, dim: int, block: int, dtype: jnp.dtype) -> object:
        return pltpu.VMEM((panel, dim, block), dtype)

    scratch: dict[str, object] = {}
    if spec.by_value:
        scratch |= {name: pltpu.SMEM((schedule.length,), jnp.int32) for name in ("live", "spare")}
    outputs: dict[str, Any] = {}
    if phase.dkv:
        outputs |= {
            "dk": ((*kv_shape, spec.qk_dim), key.dtype, keys(spec.qk_dim)),
            "dv": ((*kv_shape, spec.v_dim), value.dtype, keys(spec.v_dim)),
        }
        scratch |= {
            name: pltpu.VMEM((tiling.panel_kv, *sum_shape(plan.form, tiling.block_kv, dim)), jnp.float32)
            for name, dim in (("dk_sum", spec.qk_dim), ("dv_sum", spec.v_dim))
        }
    if phase.dkv and not plan.form.streaming:
        scratch |= {
            "q_t": transposes(tiling.panel_q, spec.qk_dim, tiling.block_q, query.dtype),
            "do_t": transposes(tiling.panel_q, spec.v_dim, tiling.block_q, query.dtype),
        }
    aliases: dict[str, str] = {}
    if phase.dq:
        scratch |= {
            "k_t": transposes(tiling.panel_kv, spec.qk_dim, tiling.block_kv, query.dtype),
            "dq_t": transposes(
                spec.group * q_blocks if plan.resident else tiling.panel_q, spec.qk_dim, tiling.block_q, jnp.float32
            ),
        }
    if plan.resident:
        block = tiling.block_spec((None, None, q_rows, spec.qk_dim), at_home)
        outputs["dq"] = (shape, query.dtype, block)
    elif phase.dq and (plan.kv_panels == 1 or not phase.dkv):
        outputs["dq"] = (shape, query.dtype, queries(spec.qk_dim))
    elif phase.dq:
        in_hbm = pl.BlockSpec(memory_space=pl.ANY)
        # Several panels of keys add to the same dq: it is summed in HBM, from zeros that the result aliases.
        inputs["dq_zeros"] = (match_varying((jnp.zeros(shape, jnp.float32), query))[0], in_hbm)
        outputs["dq_sum"] = (shape, jnp.float32, in_hbm)
        aliases = {"dq_zeros": "dq_sum"}
        scratch |= {"dq": pltpu.VMEM((q_rows, spec.qk_dim), jnp.float32), "copied": pltpu.SemaphoreType.DMA}

    def body(**refs: Ref) -> None:
        walk_body(AttentionRefs(**refs), plan)

    results = call(
        body,
        name=phase.value,
        scalars=scalars,
        inputs=inputs,
        outputs=outputs,
        scratch=scratch,
        grid=(spec.batch, spec.kv_heads, schedule.steps),
        aliases=aliases,
        semantics=("parallel", "parallel", "arbitrary"),
        vmem_bytes=vmem_bytes,
        flops=spec.backward_flops * {Pass.BOTH: 5, Pass.QUERIES: 3, Pass.KEYS: 4}[phase] // 5,
        bytes_accessed=3 * spec.bytes_moved,
        transcendentals=spec.batch * spec.q_heads * spec.live_pairs,
    )
    lengths = {"dq": spec.q_len, "dq_sum": spec.q_len, "dk": spec.kv_len, "dv": spec.kv_len}
    return {name.removesuffix("_sum"): x[:, :, : lengths[name]] for name, x in zip(outputs, results)}
