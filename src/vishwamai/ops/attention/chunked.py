"""Attention in plain JAX, block by block: memory linear in the sequences on every platform, forward and backward.

One scan walks the list of (query block, key block) pairs that the static mask leaves; pairs whose segments cannot meet
are passed over while it runs. The forward pass keeps the running maximum, sum and output of Milakov and Gimelshein
(2018) and Rabe and Staats (2021). The backward pass recomputes the probabilities from the logsumexp and adds up dQ, dK
and dV in one walk, by the formulas of Dao, "FlashAttention-2" (2023).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from vishwamai.core.op import Implementation
from vishwamai.core.sharding import match_varying
from vishwamai.core.target import Target
from vishwamai.core.types import AnyArray, PyTree
from vishwamai.ops.attention.block_mask import live_tiles
from vishwamai.ops.attention.blocks import At, ChunkedConfig, ScoreBlocks
from vishwamai.ops.attention.masks import grouped, of_seen_keys
from vishwamai.ops.attention.spec import AttentionSpec, Operands, Outputs


def heuristic(spec: AttentionSpec, target: Target) -> ChunkedConfig:
    """On the CPU, blocks of about half a million bytes of scores, which stay in a core's own cache; elsewhere, all
    problems at once.

    Elsewhere the problems may also be spread over devices, and a step that took some of them would have to fetch them;
    so where they are many, the blocks shrink instead, from 512 to 128, to keep a step's scores within a gigabyte.
    """
    rows, keys = max(1, spec.q_len), max(1, spec.kv_len)
    if spec.blocks is not None:
        return _sparse(spec, target.platform == "cpu")
    if target.platform != "cpu":
        side = next((side for side in (512, 256) if spec.batch * spec.q_heads * side * side <= 1 << 28), 128)
        return ChunkedConfig(min(side, rows), min(side, keys))
    scores = 1 << 17
    block_q = min(max(64, min(256, 1024 // spec.group)), rows)
    block_kv = min(8192, max(256, scores // (spec.group * block_q)), keys)
    return ChunkedConfig(block_q, block_kv, max(1, scores // (spec.group * block_q * block_kv)))


def _sparse(spec: AttentionSpec, on_cpu: bool) -> ChunkedConfig:
    """The blocks that cover the block mask at the least cost, where a step costs about as much as 8192 scores by
    itself.
    """
    mask = spec.blocks
    assert mask is not None

    def cost(sides: tuple[int, int]) -> int:
        live = live_tiles(mask, *sides, -(-spec.q_len // sides[0]), -(-spec.kv_len // sides[1]))
        return int(live.sum()) * (sides[0] * sides[1] + 8192)

    rows, keys = ((64, 128, 256), (128, 256, 512, 1024)) if on_cpu else ((128, 256, 512),) * 2
    sides = {(min(q, max(1, spec.q_len)), min(k, max(1, spec.kv_len))) for q in rows for k in keys}
    block_q, block_kv = min(sorted(sides, reverse=True), key=cost)
    return ChunkedConfig(block_q, block_kv, max(1, (1 << 17) // (spec.group * block_q * block_kv)) if on_cpu else None)


def _finite(m: jax.Array) -> jax.Array:
    """A maximum, or logsumexp, to subtract: 0 where it is -inf, so that exp(-inf - 0) is 0 and never exp(-inf +
    inf).
    """
    return jnp.where(m == -jnp.inf, 0.0, m)


def forward(
    spec: AttentionSpec, config: ChunkedConfig, operands: Operands, residuals: bool
) -> tuple[Outputs, jax.Array | None]:
    """The blocked forward pass; the residual is the logsumexp."""
    if spec.batch * spec.live_pairs == 0:
        return _without_scores(spec, operands, residuals)
    blocks = ScoreBlocks(spec, config, operands)
    acc, rows = spec.accumulator, blocks.query.shape[3]
    sinks = None if operands.sinks is None else grouped(operands.sinks.astype(acc), spec.kv_heads)[..., None]

    def block(running: PyTree, position: At) -> PyTree:
        m, l, out = running  # [b, h, G, block_q], the last with [Dv]
        q, k = blocks.cut("bhgqd", blocks.query, position), blocks.cut("bhkd", blocks.key, position)
        v = blocks.cut("bhkd", blocks.value, position)
        seen = blocks.visible(position)
        k, v = of_seen_keys(k, seen), of_seen_keys(v, seen)
        s = blocks.after_cap(blocks.logits(q, k, position), position)
        if seen is not None:
            s = jnp.where(seen, s, -jnp.inf)
        m_new = jnp.maximum(m, jnp.max(s, axis=-1))
        p = jnp.exp(s - _finite(m_new)[..., None])
        correction = jnp.exp(m - _finite(m_new))
        l = correction * l + jnp.sum(p, axis=-1)
        pv = blocks.product("bhgqk,bhkd->bhgqd", blocks.dropped(p, position).astype(v.dtype), v)
        return m_new, l, correction[..., None] * out + pv

    def problem(carry: None, batch: AnyArray, head: AnyArray) -> PyTree:
        shape = (blocks.sizes["b"], blocks.sizes["h"], spec.group, rows)
        start = jnp.full(shape, -jnp.inf, acc), jnp.zeros(shape, acc), jnp.zeros((*shape, spec.v_dim), acc)
        if sinks is not None:  # one more logit, without a value
            sink = jnp.broadcast_to(blocks.cut("bhgq", sinks, At(batch, head, 0, 0)), shape)
            start = sink, jnp.where(sink == -jnp.inf, 0.0, jnp.ones_like(sink)), start[2]
        start, _ = match_varying((start, operands))
        m, l, out = blocks.walk(block, start, ("BHgq", "BHgq", "BHgqd"), batch, head)
        safe = jnp.where(l > 0, l, 1.0)
        return carry, ((out / safe[..., None]).astype(operands.query.dtype), jnp.where(l > 0, m + jnp.log(safe), m))

    _, (out, logsumexp) = blocks.each_problem(problem, None)

    def heads(x: jax.Array) -> jax.Array:
        return x[:, :, :, : spec.q_len].reshape(spec.batch, spec.q_heads, spec.q_len, *x.shape[4:])

    logsumexp = heads(logsumexp)
    return Outputs(heads(out), logsumexp if spec.return_lse else None), logsumexp if residuals else None


def _without_scores(spec: AttentionSpec, operands: Operands, residuals: bool) -> tuple[Outputs, jax.Array | None]:
    """The result where no query sees any key: there are none, or the static mask hides them all."""
    shape = operands.query.shape[:3]
    out = jnp.zeros((*shape, spec.v_dim), operands.query.dtype)
    logsumexp = jnp.full(shape, -jnp.inf, spec.accumulator)
    if operands.sinks is not None:
        logsumexp = jnp.broadcast_to(operands.sinks[..., None].astype(spec.accumulator), shape)
    (out, logsumexp), _ = match_varying(((out, logsumexp), operands))
    return Outputs(out, logsumexp if spec.return_lse else None), logsumexp if residuals else None


def backward(
    spec: AttentionSpec,
    config: ChunkedConfig,
    operands: Operands,
    outputs: Outputs,
    residuals: jax.Array,
    cotangents: Outputs,
) -> Operands:
    """The blocked backward pass: every block of probabilities is computed once more, and once only."""
    acc, logsumexp, (dout, dlse) = spec.accumulator, residuals, cotangents
    # With o = p v / l, dS = p * (dP - delta): delta = rowsum(dO * O), the gradient of the softmax's
    # normalization, less the logsumexp's cotangent.
    delta = jnp.sum(dout.astype(acc) * outputs.out.astype(acc), axis=-1)
    if dlse is not None:
        delta = delta - jnp.where(logsumexp == -jnp.inf, 0.0, dlse)
    dsinks = None
    if operands.sinks is not None:
        probability = jnp.exp(operands.sinks[..., None].astype(acc) - _finite(logsumexp))
        dsinks = -jnp.sum(probability * delta, axis=-1)  # [B, Hq]
        if operands.sinks.shape[0] == 1:
            dsinks = jnp.sum(dsinks, axis=0, keepdims=True)
        dsinks = dsinks.astype(operands.sinks.dtype)
    zeros = Operands(
        *(jnp.zeros_like(x) for x in operands[:3]),
        bias=None if operands.bias is None else jnp.zeros_like(operands.bias),
        sinks=dsinks,
        slopes=None if operands.slopes is None else jnp.zeros_like(operands.slopes),
    )
    if spec.batch * spec.live_pairs == 0:
        return match_varying((zeros, operands))[0]

    blocks = ScoreBlocks(spec, config, operands)
    padded_dout = blocks.pad("bhgqd", grouped(dout, spec.kv_heads))
    padded_lse, padded_delta = (blocks.pad("bhgq", grouped(x, spec.kv_heads)) for x in (_finite(logsumexp), delta))

    def block(sums: PyTree, position: At) -> PyTree:
        dq, dk, dv, dbias = sums
        q, do = blocks.cut("bhgqd", blocks.query, position), blocks.cut("bhgqd", padded_dout, position)
        k, v = blocks.cut("bhkd", blocks.key, position), blocks.cut("bhkd", blocks.value, position)
        seen = blocks.visible(position)
        k, v = of_seen_keys(k, seen), of_seen_keys(v, seen)
        s = blocks.logits(q, k, position)
        # At most 1: of huge logits, another order of this product's sum may exceed the logsumexp.
        p = jnp.exp(
            jnp.minimum(blocks.after_cap(s, position) - blocks.cut("bhgq", padded_lse, position)[..., None], 0.0)
        )
        if seen is not None:
            p = jnp.where(seen, p, 0.0)
        dv = dv + blocks.product("bhgqk,bhgqd->bhkd", blocks.dropped(p, position).astype(do.dtype), do)
        dp = blocks.dropped(blocks.product("bhgqd,bhkd->bhgqk", do, v), position)
        ds = p * (dp - blocks.cut("bhgq", padded_delta, position)[..., None])
        capped = ds if spec.softcap is None else ds * (1.0 - jnp.square(s / spec.softcap))
        if dbias is not None:
            shared = tuple(axis for axis, extent in enumerate(dbias.shape) if extent < ds.shape[axis])
            dbias = dbias + jnp.sum(ds if spec.bias_after_softcap else capped, axis=shared, keepdims=True)
        ds = (spec.scale * capped).astype(q.dtype)
        dq = dq + blocks.product("bhgqk,bhkd->bhgqd", ds, k)
        return dq, dk + blocks.product("bhgqk,bhgqd->bhkd", ds, q), dv, dbias

    def problem(dbias: AnyArray, batch: AnyArray, head: AnyArray) -> PyTree:
        b, h = blocks.sizes["b"], blocks.sizes["h"]
        like = blocks.query.shape[2:], blocks.key.shape[2:], blocks.value.shape[2:]
        start = (*(jnp.zeros((b, h, *shape), acc) for shape in like), dbias)
        start, _ = match_varying((start, (operands, cotangents)))
        axes = ("BHgqd", "BHkd", "BHkd", None if dbias is None else "bhgqk")
        *gradients, dbias = blocks.walk(block, start, axes, batch, head, by_key=True)
        return dbias, tuple(g.astype(x.dtype) for g, x in zip(gradients, operands[:3], strict=True))

    dbias = None if blocks.bias is None else jnp.zeros(blocks.bias.shape, acc)
    dbias, _ = match_varying((dbias, (operands, cotangents)))
    dbias, (dq, dk, dv) = blocks.each_problem(problem, dbias)
    if operands.bias is not None:
        q_len, kv_len = operands.bias.shape[2:]
        dbias = dbias[:, :, :, :q_len, :kv_len].reshape(operands.bias.shape).astype(operands.bias.dtype)
    return zeros._replace(
        query=dq[:, :, :, : spec.q_len].reshape(operands.query.shape),
        key=dk[:, :, : spec.kv_len],
        value=dv[:, :, : spec.kv_len],
        bias=dbias,
    )


XLA_CHUNKED = Implementation("xla_chunked", None, forward, backward, heuristic=heuristic, config_type=ChunkedConfig)
